"""Uploads: their facts, checks and kinds, and the forms in which models travel."""
