"""Per-example gradients that are not formed unless that is cheaper: their norms and weighted sums."""
