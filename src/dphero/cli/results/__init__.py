"""Commands for finished runs: what they see, what they predict, what of them may be published."""
