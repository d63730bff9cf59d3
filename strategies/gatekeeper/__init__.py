"""The gatekeeper: uploads that are valid and harmful, told by their weights and by what they do with made-up images."""
