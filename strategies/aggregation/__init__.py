"""The training of FENS's aggregators, which needs numpy alone for all but torch-only forms."""
