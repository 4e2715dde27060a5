"""The paper's data sets with fewer test images: a quick reproduction looks at the accuracy often.

The training images are all there, so that sampling rates and prices are the paper's.
"""

from __future__ import annotations

from dataclasses import replace

from dphero import data
from dphero.data import Data, Split


def mnist() -> Data:
    """MNIST with the first 2,000 test images."""
    return _with_fewer_tests("mnist", 2_000)


def cifar10() -> Data:
    """CIFAR-10 with the first 1,000 test images."""
    return _with_fewer_tests("cifar10", 1_000)


def _with_fewer_tests(name: str, count: int) -> Data:
    found = data.load(name)
    return replace(found, test=Split(found.test.images[:count], found.test.labels[:count]))
