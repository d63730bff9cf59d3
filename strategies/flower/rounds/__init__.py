"""Federated learning in rounds: settings, rules and refinement without Flower; messages, strategies and loop on it."""
