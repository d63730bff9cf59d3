"""Between Flower and a method: messages, the adapter, and the named strategies."""
