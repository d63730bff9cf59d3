"""Where a job runs: in this process, or in a Ray actor."""
