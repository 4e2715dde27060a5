"""Settings for all tests: one thread for each process, and property tests that draw the same examples every time."""

import os

import hypothesis

# Small matrices lose more by threads that wait for each other than they gain, and `make test` has a process per core.
# Torch and numpy read this when imported, and processes that tests start inherit it: sums have the same last digits.
os.environ.setdefault("OMP_NUM_THREADS", "1")

hypothesis.settings.register_profile("repeatable", derandomize=True, deadline=None)
hypothesis.settings.load_profile("repeatable")
