"""The server side of the app: the ServerApp, the run's folder and reports, and the `oneshot` command."""

from fl_app.environment import prepare

prepare()  # before any module of this package loads torch
