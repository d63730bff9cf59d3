"""The gatekeeper: detects valid but harmful uploads by their weights and by their predictions on synthetic images."""
