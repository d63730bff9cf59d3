"""Runs on stored uploads: replay, forget, and import of models from elsewhere."""
