"""The server: rounds, strategies, statement."""
