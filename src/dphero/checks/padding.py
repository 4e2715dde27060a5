"""Whether a model ignores padding: only then may a batch be padded to the longest of its examples.

That length follows from one example, and all others see it. So examples that were filled up are run once more without
their filling, and the gradients of both must be the same: those of a model that masks its padding are, those of a mean
over all positions or of the last state of a recurrent layer are not.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import islice, product
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dphero.batch_axis.arguments import Arguments
from dphero.batch_axis.plan import UnknownCallError
from dphero.checks.tapped_pass import ModelArguments, Objective, TappedPass, bent, floating, tapped_pass
from dphero.functional.unbatched import plain
from dphero.hooks.snapshot import ModelSnapshot
from dphero.numerics.compare import is_short
from dphero.numerics.trees import tree_flatten, tree_unflatten
from dphero.sampling.padding import Padding

if TYPE_CHECKING:
    from dphero.hooks.taps import Taps

_COPIES = 5
"""Of an example that is run with and without its filling."""
_FIRST = 3
"""So many batches are looked at, then the 4th, the 8th, the 16th, …"""
_MORE = 1.1
"""How much more filling than before makes a batch worth a look."""
_TOLERANCE = 1e-3
_SHORT_TOLERANCE = 0.05
"""In bfloat16, float16 and TF32."""
_SMALL = 1e-2
"""Of the largest norm: rounding shows in what is smaller."""

_MOST_CUTS = 8
"""How many ways to cut arguments are tried."""


class PaddingCheck:
    """Looks at the calls of a model on batches that were padded to the longest of their examples."""

    def __init__(self) -> None:
        self._looks = 0
        self._share = 0.0  # of an example that was filling, at most
        self._following: set[int] = set()  # outputs, by number, whose shape follows that length

    def look(self, taps: Taps, args: tuple[Any, ...], kwargs: dict[str, Any], rows: int, padding: Padding) -> None:
        """Run an example with and without its filling.

        Raises:
            ValueError: If its gradient is not the same, or this cannot be found out.
        """
        row = min(padding.lengths, key=lambda row: sum(padding.lengths[row].values()))
        lengths = {size: own for size, own in padding.lengths[row].items() if own < size}
        if not self._is_due(lengths):
            return
        leaves, structure = tree_flatten((args, kwargs))
        assert taps.plan is not None
        batch = Arguments(args, kwargs, rows)
        batch.axes = taps.plan.axes(structure, leaves, rows) or batch.axes
        whole = batch.take([row] * _COPIES)
        snapshot = ModelSnapshot(taps.module)
        problems: list[Exception] = []
        for own in (lengths, {size: size - 1 for size in lengths}):  # some models need a least length
            for short in _cuts(whole, own, batch.axes, left=padding.left):
                try:
                    self._try(taps, snapshot, short, whole, left=padding.left)
                    return
                except Exception as error:
                    problems.append(error)
            for problem in problems:
                if isinstance(problem, _PaddingError):
                    raise problem
        if problems:
            raise ValueError(f"{_REFUSAL} (Without its padding, it fails: {problems[0]})") from problems[0]
        sizes = ", ".join(map(str, lengths))
        raise ValueError(f"{_REFUSAL} (No argument of the model has an axis of that length, {sizes}.)")

    def _is_due(self, lengths: Mapping[int, int]) -> bool:
        """Tell whether a batch is to be looked at: one of the first, some later ones, and each with more filling."""
        if not lengths:  # two tensors of one size, of which the row fills one
            return False
        self._looks += 1
        share = max(1 - own / size for size, own in lengths.items())
        more = share > _MORE * self._share
        self._share = max(share, self._share)
        return more or self._looks <= _FIRST or not self._looks & (self._looks - 1)

    def _try(
        self, taps: Taps, snapshot: ModelSnapshot, short: ModelArguments, whole: ModelArguments, *, left: bool
    ) -> None:
        """Compare in evaluation mode, where nothing is dropped, unless the model makes other calls there."""
        for training in (False, True):
            try:
                pair = [_Gradients(taps, snapshot, call, training=training) for call in (short, whole)]
                self._compare(pair[0], pair[1], left=left)
                return
            except UnknownCallError:
                if training:
                    raise

    def _compare(self, short: _Gradients, whole: _Gradients, *, left: bool) -> None:
        shapes = [out.shape for out in short.outs]
        norms = [each.norms(shapes, left=left) for each in (short, whole)]
        self._following |= {place for place, out in enumerate(whole.outs) if out.shape != shapes[place]}
        largest = max((float(norm.max()) for each in norms for norm in each.values()), default=0.0)
        for name in norms[0].keys() | norms[1].keys():
            first, second = (float(each[name][0]) if name in each else 0.0 for each in norms)
            gap, scale = abs(first - second), max(first, second, _SMALL * largest)
            both = not math.isfinite(first) and not math.isfinite(second)
            if not both and not gap <= whole.tolerance * scale:
                raise _PaddingError(f"{_REFUSAL} (Its gradient for {name!r} changes by {gap / scale:.2g} of its size.)")

    def watch(self, out: Any) -> Any:
        """See what the model returns: no loss may depend on outputs as long as the longest example."""
        if self._following:
            floats = floating(out)
            for place in self._following:
                if place < len(floats) and floats[place].requires_grad:
                    floats[place].register_hook(_require_unused)
        return out


class _PaddingError(ValueError):
    pass


class _Gradients:
    """Passes of the tapped model on copies of one example, and the gradients of what it returned."""

    def __init__(self, taps: Taps, snapshot: ModelSnapshot, call: ModelArguments, *, training: bool) -> None:
        self._taps, self._snapshot, self._call, self._training = taps, snapshot, call, training
        self.outs = [plain(out).detach() for out in self._run(lambda outs: []).outs]
        autocast = any(torch.is_autocast_enabled(device) for device in ("cpu", "cuda"))
        tf32 = torch.backends.cuda.matmul.allow_tf32 and any(out.is_cuda for out in self.outs)
        short = autocast or tf32 or is_short(*self.outs, *taps.module.parameters())
        self.tolerance = _SHORT_TOLERANCE if short else _TOLERANCE

    def norms(self, shapes: Sequence[torch.Size], *, left: bool) -> dict[str, Tensor]:
        """Return each copy's gradient norm, by parameter, of a number made up of what outputs of these shapes share."""

        def common(outs: list[Tensor]) -> list[Tensor]:
            parts = [(out, shape) for out, shape in zip(outs, shapes, strict=False) if out.requires_grad]
            return [bent(_common(out, shape, left=left).double()) for out, shape in parts if type(out) is Tensor]

        return self._run(common).norms

    def _run(self, objective: Objective) -> TappedPass:
        taps, snapshot = self._taps, self._snapshot
        assert taps.plan is not None
        return tapped_pass(taps, taps.plan, snapshot, self._call, _COPIES, objective, training=self._training)


def _cuts(
    call: ModelArguments, lengths: Mapping[int, int], axes: Sequence[int | None], *, left: bool
) -> list[ModelArguments]:
    """Return arguments without filling: axes of these sizes get the example's own length.

    Where several axes of a tensor have such a size, it is not known which is filled up, and all readings are returned
    (both of a matrix of attention, one of positions and features). None is, where no tensor has such an axis.
    """
    leaves, structure = tree_flatten(call)
    choices_by_leaf: list[list[Any]] = []
    for leaf, rows in zip(leaves, axes, strict=True):
        shape = leaf.shape if isinstance(leaf, Tensor) else ()
        found = [axis for axis, size in enumerate(shape) if axis != rows and lengths.get(size, size) < size]
        choices = [found, *([axis] for axis in found if len(found) > 1)]
        choices_by_leaf.append([_narrowed(leaf, choice, lengths, left=left) for choice in choices])
    if all(len(each) == 1 and each[0] is leaf for each, leaf in zip(choices_by_leaf, leaves, strict=True)):
        return []
    return [tree_unflatten(list(chosen), structure) for chosen in islice(product(*choices_by_leaf), _MOST_CUTS)]


def _narrowed(leaf: Any, axes: Sequence[int], lengths: Mapping[int, int], *, left: bool) -> Any:
    for axis in axes:
        size = leaf.shape[axis]
        leaf = leaf.narrow(axis, size - lengths[size] if left else 0, lengths[size])
    return leaf


def _common(out: Tensor, shape: torch.Size, *, left: bool) -> Tensor:
    """Return the part of an output that it would also have with less filling."""
    for axis, size in enumerate(shape):
        if out.shape[axis] != size:
            out = out.narrow(axis, out.shape[axis] - size if left else 0, size)
    return out


def _require_unused(gradient: Tensor) -> None:
    if bool(gradient.any()):
        raise ValueError(
            f"the loss uses an output of the model (shape {tuple(gradient.shape)}) that is as long as the longest "
            "example of the batch, and so it may depend on that length. Pass pad_to= a public length to make_private, "
            "or pad to one in the collate function."
        )


_REFUSAL = (
    "the collate function pads each batch to its longest example, and the model does not ignore the padding: one long "
    "record would change the gradients of all others. Pass pad_to= a public length (or several) to make_private, pad "
    "to one in the collate function, or give the model a mask."
)
