"""The client: train a model on local data, or load one, and upload it once."""

from fl_app.environment import prepare

prepare()  # must run before any module of this package loads torch
