"""A run on disk and on its way: its folder, uploads, checkpoints, journal and server stage."""
