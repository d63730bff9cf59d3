"""The client: train a model on local data, or load one, and upload it once."""
