"""Writes a run's models as programs that need no code of this package."""
