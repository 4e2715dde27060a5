"""The numerics of pricing: privacy-loss curves, searches, Rényi moments of sampled mechanisms."""
