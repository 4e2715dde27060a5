"""One client: its rounds, its budget, its ledger on disk."""
