"""Commands that make runs, or read them."""
