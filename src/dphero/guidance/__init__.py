"""Guidance: released things in, geometry out.

`resolve` takes a name or any object that keeps the `Guidance` contract.
"""

from __future__ import annotations

from collections.abc import Callable

from dphero.guidance.base import Block, Guidance, Preconditions, Prepares, Released, preconditioned
from dphero.guidance.history import History
from dphero.guidance.isotropic import Isotropic
from dphero.guidance.pca import PCA, noise_scales, spectrum
from dphero.guidance.prior.prior import Prior

__all__ = [
    "PCA",
    "Block",
    "Guidance",
    "History",
    "Isotropic",
    "Preconditions",
    "Prepares",
    "Prior",
    "Released",
    "noise_scales",
    "preconditioned",
    "resolve",
    "spectrum",
]

_NAMED: dict[str, Callable[[], Guidance]] = {"isotropic": Isotropic, "pca": PCA, "history": History}


def resolve(guidance: str | Guidance) -> Guidance:
    """Returns the guidance of that name with its default settings, or the guidance given.

    Names are "isotropic" (DP-SGD), "pca" (the weights) and "history" (past noisy gradients); a `Prior` has no name, for
    it has to know the network.

    Raises:
        ValueError: for an unknown name.
        TypeError: for anything that does not keep the `Guidance` contract.
    """
    if guidance == "prior":
        raise ValueError(
            "guidance 'prior' has to know the network and its inputs: give guidance=Prior(model, (1, 28, 28)), the "
            "shape of your images, from dphero.guidance"
        )
    if isinstance(guidance, str):
        if guidance not in _NAMED:
            choices = ", ".join(map(repr, (*_NAMED, "prior")))
            raise ValueError(f"unknown guidance {guidance!r}: expected one of {choices}, or a Guidance object")
        return _NAMED[guidance]()
    if isinstance(guidance, type) or not isinstance(guidance, Guidance):
        raise TypeError(f"guidance must be a name or a Guidance object, not {guidance!r}")
    return guidance
