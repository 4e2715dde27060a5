"""Guidance by second moments of the network on synthetic images."""
