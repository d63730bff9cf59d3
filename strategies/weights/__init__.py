"""Merging in weight space: rules that take one tensor of all clients, and the loop over a model's tensors."""
