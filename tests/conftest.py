"""Settings for all tests: one thread for each process, and property tests that draw the same examples every time."""

import os

# Small matrices gain nothing from threads, and `make test` has a process for each core. The variable is read when numpy
# and torch are imported, and inherited by the processes that tests start: their sums have the same last digits.
os.environ["OMP_NUM_THREADS"] = "1"

import hypothesis
import torch

torch.set_num_threads(1)

hypothesis.settings.register_profile("repeatable", derandomize=True, deadline=None)
hypothesis.settings.load_profile("repeatable")
