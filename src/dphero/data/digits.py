"""The handwritten digits that come with scikit-learn: 1,797 images of 8×8 pixels."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
from numpy.typing import NDArray

SCALE = 8.0
"""Half of the largest pixel value: pixels are 0 to 16."""

_SHA256 = "87ff0c9e40dc7e2c0e34e7257799c2e3f3aec1a016363bb11cad869ec428a826"  # of pixels, then labels, as bytes


def arrays() -> tuple[NDArray[Any], NDArray[Any]]:
    """Return images, 1797×8×8 with values 0 to 16, and labels.

    Raises:
        ImportError: If scikit-learn is missing.
        ValueError: If it brings other data than it used to.
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise ImportError(
            "the digits come with scikit-learn, which is not installed: pip install 'dphero[demo]'"
        ) from error
    data = load_digits()
    images, labels = data.images.astype(np.uint8), data.target.astype(np.int64)
    if hashlib.sha256(images.tobytes() + labels.astype(np.uint8).tobytes()).hexdigest() != _SHA256:
        raise ValueError("scikit-learn's digits are not the 1,797 known images: is its installation damaged?")
    return images, labels
