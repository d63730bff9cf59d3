"""Rounds of federated learning on Flower's grid: messages, strategies, and the loop around them."""
