"""Commands that train: one run, many, or the paper's."""
