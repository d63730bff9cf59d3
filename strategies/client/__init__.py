"""The client half, for any ClientApp; imports neither torch nor Ray."""
