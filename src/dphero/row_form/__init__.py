"""Weights that are computed row by row in a simple way: norms of their gradients need no backward pass."""
