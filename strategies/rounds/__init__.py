"""Federated learning in rounds, without Flower: settings, rules, ternary updates, refinement."""
