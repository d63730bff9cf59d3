"""Starts, follows and ends a run."""
