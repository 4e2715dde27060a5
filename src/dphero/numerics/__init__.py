"""Arithmetic and containers that know nothing of privacy."""
