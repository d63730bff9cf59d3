"""What a run keeps on disk: uploads, checkpoints, metrics and results."""
