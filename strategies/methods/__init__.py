"""One file per method: its source, its config, its pieces and its fit."""
