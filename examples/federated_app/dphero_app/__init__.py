"""Federated training with dphero, as a Flower app."""
