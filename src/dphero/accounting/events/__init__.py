"""Kinds of events: what was released, and how each kind is priced."""
