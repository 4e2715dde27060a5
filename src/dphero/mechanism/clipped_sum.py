"""The value between clipping and noise: a sum that says by what, and in which geometry, it was clipped."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from torch import Tensor

from dphero.geometry.geometry import Geometry


class ClippedSum:
    """Σ_i w̄_i / B of one lot. No example moved it by more than C / B, measured by ‖A⁻¹ ·‖ over all parameters.

    Private: it leaves the mechanism under noise of the scale that C and A ask for, and only once. :meth:`spend` refuses
    anything else.

    Args:
        sums: The sum of each parameter, in parameter space; a name that is missing stands for zero, and gets noise.
        bound: C, as it was when the examples were clipped.
        geometry: A, by name: the very mapping in which their norms were taken; ``None`` for a lot of nobody.
        divisor: B.
        count: The count that an adaptive clip rule releases along, else ``None``.
        marks: Numbers, on the CPU, that tell this lot from others; for noise that is bound to its sum on a GPU.

    Raises:
        ValueError: If a sum has no geometry, or another shape than that.
    """

    def __init__(
        self,
        sums: Mapping[str, Tensor],
        *,
        bound: float,
        geometry: Mapping[str, Geometry] | None,
        divisor: float,
        count: Tensor | None = None,
        marks: Sequence[Tensor] = (),
    ) -> None:
        if not (0 < bound < math.inf and 0 < divisor < math.inf):
            raise ValueError(f"a sum is clipped by a positive bound and divided by a positive number: {bound, divisor}")
        if sums and geometry is None:
            raise ValueError("a sum of somebody's gradients needs the geometry in which they were clipped")
        for name, part in sums.items():
            if geometry is None or name not in geometry or tuple(part.shape) != geometry[name].shape:
                raise ValueError(f"the sum of {name!r}, of shape {tuple(part.shape)}, has no geometry of that shape")
        self.sums, self.count, self.marks = sums, count, marks
        self._bound, self._geometry, self._divisor = bound, geometry, divisor
        self._spent = False

    def spend(self, *, bound: float, geometry: Mapping[str, Geometry], divisor: float) -> None:
        """Give the sum away to be released, once, under noise for this bound, geometry and divisor.

        Raises:
            RuntimeError: If it was clipped otherwise, or was released before.
        """
        if self._spent:
            raise RuntimeError("this lot was released before: a second noise on the same sum would not be charged for")
        if self._bound != bound:
            raise RuntimeError(f"the lot was clipped to {self._bound:g}, the noise is for {bound:g}")
        if self._divisor != divisor:
            raise RuntimeError(f"the lot was divided by {self._divisor:g}, the noise by {divisor:g}")
        if self._geometry is not None and self._geometry is not geometry:
            raise RuntimeError("the lot was clipped in another geometry than the noise is priced for")
        self._spent = True
