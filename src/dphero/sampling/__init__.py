"""Lots: who takes part in each step.

A *lot* is one random draw of examples, and one release. It may reach the user in several *physical
batches* that fit in memory. Poisson lots include every example independently with probability q; the
draw costs O(lot), and a lot that happens to be empty is still a lot: the user gets one row that counts for
nothing, so that the loop runs and noise is released.

The sampling rate and the expected lot size are public numbers. Under add/remove neighbours the number of
records is not, so nothing here is derived from it unless the user declares it public.
"""

from dphero.sampling.loader import PrivateLoader
from dphero.sampling.lots import Lots, PhysicalBatch
from dphero.sampling.public_numbers import dataset_of, public_lot, public_rate
from dphero.sampling.same_data import describe_data, require_same_data
from dphero.sampling.samplers import PoissonSampler, Sampler, ShuffleSampler

__all__ = [
    "Lots",
    "PhysicalBatch",
    "PoissonSampler",
    "PrivateLoader",
    "Sampler",
    "ShuffleSampler",
    "dataset_of",
    "describe_data",
    "public_lot",
    "public_rate",
    "require_same_data",
]
