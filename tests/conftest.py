"""Settings for all tests: two torch threads, and property tests that draw the same examples every time."""

import hypothesis
import torch

torch.set_num_threads(2)

hypothesis.settings.register_profile("repeatable", derandomize=True, deadline=None)
hypothesis.settings.load_profile("repeatable")
