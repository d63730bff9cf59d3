"""The server side of the app: the ServerApp, the run's folder and reports, and the `oneshot` command."""

from fl_app.openmp import wait_briefly

wait_briefly()  # before any module of this package loads torch
