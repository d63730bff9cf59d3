"""A run on disk and in progress: its folder, uploads, checkpoints, journal and server stage."""

RUNS_VARIABLE = "ONESHOT_RUNS"  # the environment variable that names the folder of the runs
