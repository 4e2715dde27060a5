"""A loss may not couple examples: what is read from its graph, tried out and computed again."""
