"""One run: its directory, its training, its predictions."""
