"""Compares runs in rounds: a table, and a plot over the rounds."""
