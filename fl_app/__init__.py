"""The app's shared half: run config, model zoo, data and partitions; it imports neither Flower nor Ray."""
