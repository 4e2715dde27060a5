"""Clip, sum, release: the only place that adds noise and writes the ledger."""
