"""Examine a model once, on a few rows of its first batch, before anything is trusted.

Three questions are settled by running the model at two batch sizes on the same rows:

* Where does each tapped tensor carry the examples? (:class:`~dphero.layout.Layout`: read off the shapes,
  so that a sequence length that happens to equal the batch size cannot be mistaken for it.)
* Does each row depend on its own example alone? A model that mixes examples (batch statistics in any
  disguise) cannot be made private.
* Does training write data into buffers? They would be published with the ``state_dict``.

Nothing is learned from the data's values, and nothing of them is kept.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map

from dphero.layers.generic import vmapped
from dphero.layout import Layout, compare_shapes
from dphero.shared import NoSharedRule

if TYPE_CHECKING:
    from dphero.taps import Site, Taps

__all__ = ["MixedExamplesError", "Plan", "probe"]

_SIZES = ((3, 4), (5, 7), (11, 13), (17, 19))
_TOLERANCE = 1e-3

Key = tuple[str, int]


class MixedExamplesError(ValueError):
    """A model in which one example's output depends on another example."""


class Plan:
    """Where the output of each call carries the examples.

    Attributes:
        layouts: By call; ``None`` for calls on shared values that return no tensor.
        dimensions: Number of axes of each call's output.
        examples_independent: Whether the rows could be compared (a first batch of one row says nothing).
    """

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self.recording = True
        self.layouts: dict[Key, Layout | None] = {}
        self.dimensions: dict[Key, int] = {}
        self.examples_independent = False
        self.outputs: dict[Key, tuple[Tensor | None, Site]] = {}

    def record(self, key: Key, out: Any, site: Site) -> None:
        """Note the output of one call."""
        self.outputs[key] = (out.detach() if isinstance(out, Tensor) else None, site)

    def guess(self, out: Tensor) -> Layout:
        """Guess a layout from one shape; the comparison of two runs confirms it."""
        for axis, size in enumerate(out.shape):
            if size == self.rows:
                return Layout(axis)
        if out.dim() and out.shape[0] and out.shape[0] % self.rows == 0:
            return Layout(0, out.shape[0] // self.rows)
        return Layout(None)


def probe(taps: Taps, args: tuple[Any, ...], kwargs: dict[str, Any], rows: int) -> Plan:
    """Run the model at two batch sizes and compare.

    Args:
        taps: The taps of the model.
        args: Positional arguments of the first call of the model.
        kwargs: Its keyword arguments.
        rows: The number of rows of that batch.

    Raises:
        MixedExamplesError: If an example's row depends on other examples.
        ValueError: If the batch cannot be found in the arguments, or buffers are written from data.
    """
    _require_batch(args, kwargs, rows)
    before = taps.plan
    try:
        with _unchanged(taps.module), torch.no_grad():
            while True:
                unfollowed: NoSharedRule | None = None
                for sizes in _SIZES:
                    try:
                        plan = _examine(taps, args, kwargs, rows, sizes)
                    except NoSharedRule as error:  # perhaps by chance, at this size
                        unfollowed = error
                        continue
                    if plan is not None:
                        return plan
                if unfollowed is None:
                    break
                unfollowed.site.rule = vmapped
    finally:
        taps.plan = before
    raise ValueError(
        "the shapes inside the model do not grow with the batch in any way that could be understood; each "
        "tapped output must carry the examples in one axis"
    )


def _examine(
    taps: Taps, args: tuple[Any, ...], kwargs: dict[str, Any], rows: int, sizes: tuple[int, int]
) -> Plan | None:
    """Return the plan, or ``None`` where the two runs disagree (a size met another size by chance)."""
    small, large, small_out, large_out = _two_runs(taps, args, kwargs, rows, sizes)
    if small.outputs.keys() != large.outputs.keys():
        return None
    plan = Plan(rows)
    plan.recording = False
    for key, (first, site) in small.outputs.items():
        second = large.outputs[key][0]
        if first is None or second is None:
            plan.layouts[key] = None
            continue
        layout = compare_shapes(first.shape, second.shape, *sizes)
        guessed = key[0].endswith(" shared")
        if layout is None or (guessed and layout != small.guess(first)):
            if sizes == _SIZES[-1]:
                raise ValueError(
                    f"{site.label}: output shapes {tuple(first.shape)} and {tuple(second.shape)} at batch sizes "
                    f"{sizes[0]} and {sizes[1]} do not carry the examples in one axis"
                )
            return None
        plan.layouts[key], plan.dimensions[key] = layout, first.dim()
    if rows > 1:
        _compare_rows(taps, plan, small, large, (small_out, large_out), (args, kwargs), sizes)
        plan.examples_independent = True
    return plan


def _two_runs(
    taps: Taps, args: tuple[Any, ...], kwargs: dict[str, Any], rows: int, sizes: tuple[int, int]
) -> tuple[Plan, Plan, Any, Any]:
    runs = []
    buffers = []
    start = {name: buffer.clone() for name, buffer in taps.module.named_buffers()}
    for size in sizes:
        _restore(taps.module, start)
        runs.append(_run(taps, args, kwargs, rows, size))
        buffers.append({name: buffer.clone() for name, buffer in taps.module.named_buffers()})
    for name, buffer in buffers[0].items():
        if rows > 1 and not torch.equal(buffer, buffers[1][name]):
            raise ValueError(
                f"buffer {name!r} is written from the data during training and would be published with the "
                "model. Replace that layer (dphero.fix replaces batch and instance norms) or switch its "
                "statistics off."
            )
    return runs[0][0], runs[1][0], runs[0][1], runs[1][1]


def _run(taps: Taps, args: tuple[Any, ...], kwargs: dict[str, Any], rows: int, size: int) -> tuple[Plan, Any]:
    pick = [row % min(rows, 3) for row in range(size)]

    def resize(value: Any) -> Any:
        axis = _batch_axis(value, rows)
        return value if axis is None else value.index_select(axis, torch.tensor(pick, device=value.device))

    taps.plan = Plan(size)
    out = taps.run_inside(taps.root_forward, *tree_map(resize, args), **tree_map(resize, kwargs))
    return taps.plan, out


def _compare_rows(
    taps: Taps,
    plan: Plan,
    small: Plan,
    large: Plan,
    outputs: tuple[Any, Any],
    call: tuple[tuple[Any, ...], dict[str, Any]],
    sizes: tuple[int, int],
) -> None:
    """Check that the rows of both runs agree: the same examples, in other company."""
    again, _ = _run(taps, *call, plan.rows, sizes[0])
    repeatable = all(
        first is None or torch.equal(torch.nan_to_num(first), torch.nan_to_num(again.outputs[key][0]))  # type: ignore[arg-type]
        for key, (first, _) in small.outputs.items()
    )
    if not repeatable:  # dropout: compare in evaluation mode
        modes = {module: module.training for module in taps.module.modules()}
        taps.module.eval()
        try:
            (small, first_out), (large, second_out) = (_run(taps, *call, plan.rows, size) for size in sizes)
        finally:
            for module, mode in modes.items():
                module.training = mode
        outputs = (first_out, second_out)
    pairs: list[tuple[str, Any, Any]] = [
        (site.label, first, large.outputs[key][0])
        for key, (first, site) in small.outputs.items()
        if key in large.outputs
    ]
    pairs += [("the model's output", *pair) for pair in zip(*(tree_flatten(out)[0] for out in outputs), strict=True)]
    for label, first, second in pairs:
        if not isinstance(first, Tensor) or not isinstance(second, Tensor) or not first.is_floating_point():
            continue
        layout = compare_shapes(first.shape, second.shape, *sizes)
        if layout is None or layout.shared:
            continue
        left, right = layout.rows(first), layout.rows(second)[: sizes[0] * layout.fold]
        scale = left[left.isfinite()].abs().max().item() if left.isfinite().any() else 0.0
        gap = torch.nan_to_num(left - right, nan=0.0, posinf=0.0, neginf=0.0).abs().max().item()
        if gap > _TOLERANCE * scale:
            raise MixedExamplesError(
                f"{label}: an example's output depends on the other examples of the batch (or rows were "
                f"reordered on the way), relative difference {gap / scale:.2g}. Such a model cannot be made "
                "private: use per-example statistics (GroupNorm, LayerNorm) and keep the batch axis first."
            )


def _batch_axis(value: Any, rows: int) -> int | None:
    if not isinstance(value, Tensor) or value.dim() == 0:
        return None
    if value.shape[0] == rows:
        return 0
    return 1 if value.dim() > 1 and value.shape[1] == rows else None


def _require_batch(args: tuple[Any, ...], kwargs: dict[str, Any], rows: int) -> None:
    leaves = tree_flatten((args, kwargs))[0]
    if all(_batch_axis(value, rows) is None for value in leaves):
        shapes = [tuple(value.shape) for value in leaves if isinstance(value, Tensor)]
        raise ValueError(
            f"the private loader gave a batch of {rows} examples, but the model was called with shapes {shapes}. "
            "Call the model on whole batches of that loader, examples in axis 0, or use `with engine.paused():` "
            "for other data."
        )


def _restore(module: nn.Module, buffers: dict[str, Tensor]) -> None:
    for name, buffer in module.named_buffers():
        buffer.copy_(buffers[name])


@contextmanager
def _unchanged(module: nn.Module) -> Iterator[None]:
    """Leave buffers and random generators as they were."""
    buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
    devices = {p.device.index for p in module.parameters() if p.device.type == "cuda"}
    with torch.random.fork_rng(devices=sorted(d for d in devices if d is not None)):
        try:
            yield
        finally:
            _restore(module, buffers)
