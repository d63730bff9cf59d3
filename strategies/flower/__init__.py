"""The adapter between Flower and a method: messages, collection, and the named strategies."""
