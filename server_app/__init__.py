"""The server side of the app: the ServerApp, the run's folder and reports, and the `oneshot` command."""
