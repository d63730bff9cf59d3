"""The app's shared half: run config, model zoo, data, partitions and metrics; it knows neither Flower nor Ray."""
