"""Whether each row of a model's outputs, and its gradient, depends on its own example alone.

Each example is run among others and among copies of itself: what it gives must be the same, up to rounding.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from dphero.batch_axis.axis import BatchAxis, compare_shapes
from dphero.batch_axis.plan import AxisPlan, Traced
from dphero.checks.model_runs import SIZES, MixedExamplesError, ModelRuns, RecordedRun
from dphero.checks.tapped_pass import bent
from dphero.hooks.snapshot import same
from dphero.numerics.compare import all_equal, gap_and_size, is_short, largest_gaps, numbers_of

_SLACK = 1e-5
"""Relative difference that rounding may make between runs of the same shape, and"""
_SLACK_BETWEEN_SIZES = 1e-3
_SLACK_UNDER_AUTOCAST = 0.05
"""between runs of different shapes."""
_SLACK_OF_NORMS = 1e-4
"""between norms of gradients in runs of the same shape, and"""
_SLACK_OF_MEANS = 3e-5
"""between means of the same numbers in another order."""
_FEW_OUTPUTS = 4
"""Up to so many outputs that carry the examples are looked at one by one on the way back."""
_SMALL_GRADIENT = 1e-2
"""Of the largest norm: rounding shows in what is smaller."""
_SEEDS = range(6)
"""What a random model is tried with besides: it may mix examples only now and then."""


class IndependenceCheck:
    """Compares what examples give among different neighbours."""

    def __init__(self, runs: ModelRuns, carrying: list[bool]) -> None:
        self._runs = runs
        self._carrying = carrying  # which floating-point tensors that the model returned carry the examples
        self.unlike: list[int] = []  # rows that make other calls among copies of themselves than among others

    def compare_outputs(self, rows: list[int], mixed: list[list[int]], small: RecordedRun, large: RecordedRun) -> None:
        """Check that each example gives the same among any neighbours, and that nothing else remembers it."""
        layouts = {
            key: compare_shapes(tensor.shape, large.trace.outputs[key].shape, *SIZES)
            for key, tensor in small.trace.outputs.items()
            if key in large.trace.outputs and tensor.is_floating_point()
        }
        for (label, _, _), layout in layouts.items():
            if layout is None:
                raise MixedExamplesError(
                    f"{label}: its output does not carry the examples in one axis (a matrix of all pairs?). "
                    "Such a model cannot be made private."
                )
        _require_same_state(small, large)
        problem = None
        if not small.random:
            try:
                self._compare_sizes(mixed, small, large)
            except MixedExamplesError as error:
                problem = error  # among copies it may be seen where
        large.let_go()  # never three runs take memory
        self._compare_with_copies(rows, range(len(rows)), small, layouts)
        if problem is not None:
            raise problem
        if small.random:
            small.let_go()
            for seed in _SEEDS:  # each with one of the rows, in turn
                among = self._runs.record(mixed[0], seed=seed)
                self._compare_with_copies(rows, [seed % len(rows)], among, layouts, seed)
                among.let_go()
            # dropout draws other numbers at another size: evaluation mode decides, unless it is random too
            small, large = (self._runs.record(rows, training=False) for rows in mixed)
            if not small.random:
                self._compare_sizes(mixed, small, large)

    def _compare_sizes(self, mixed: list[list[int]], small: RecordedRun, large: RecordedRun) -> None:
        """Check that each example gives the same in batches of both sizes."""
        places = [mixed[1].index(row) for row in mixed[0]]
        found, gaps = [], []
        for key, tensor in small.trace.outputs.items():
            other = large.trace.outputs.get(key)
            layout = None if other is None else compare_shapes(tensor.shape, other.shape, *SIZES)
            if other is None or layout is None or layout.unbatched or not tensor.is_floating_point():
                continue
            first, second = layout.split(tensor, SIZES[0]), layout.split(other, SIZES[1])[places]
            found.append((key[0], first.dtype))
            gaps.append(gap_and_size(first, second))
        what = "the size of the batch or the order of its examples"
        short = any(torch.is_autocast_enabled(device) for device in ("cpu", "cuda"))
        slack = _SLACK_UNDER_AUTOCAST if short else _SLACK_BETWEEN_SIZES
        for (label, dtype), (gap, size) in zip(found, largest_gaps(gaps), strict=True):
            _require_small(label, gap, size, what, max(slack, torch.finfo(dtype).eps))

    def _compare_with_copies(
        self,
        rows: list[int],
        positions: Iterable[int],
        small: RecordedRun,
        layouts: Mapping[Traced, BatchAxis | None],
        seed: int | None = None,
    ) -> None:
        """Check that examples in these positions give the same as among copies of themselves."""
        for position in positions:
            row = rows[position]
            alone = self._runs.record([row] * SIZES[0], seed=seed)
            _require_same_state(small, alone)
            if seed is None and not alone.trace.calls.keys() <= small.trace.calls.keys():
                self.unlike.append(row)  # a mask that is left out where no example needs it
            pairs: dict[Traced, list[Tensor]] = {}
            for key in small.trace.outputs:
                layout = layouts.get(key)
                if layout is None or layout.unbatched or key not in alone.trace.outputs:
                    continue
                outputs = [run.trace.outputs[key] for run in (small, alone)]
                if outputs[0].shape != outputs[1].shape:
                    raise MixedExamplesError(
                        f"{key[0]}: the shape of its output depends on the other examples of the batch "
                        f"({tuple(outputs[0].shape)} and {tuple(outputs[1].shape)}). Pad all batches to one length, "
                        "not each to its longest example."
                    )
                pairs[key] = [layout.split(output, SIZES[0])[position] for output in outputs]
            _require_same_outputs(pairs)
            pairs.clear()
            alone.let_go()

    def compare_gradients(self, plan: AxisPlan, rows: list[int], mixed: list[int], random: bool) -> None:
        """Check that each example's gradient is what it is among copies of itself: the backward pass may mix them too.

        Outputs are looked at one by one: beside large logits, a small term over the whole batch would not be noticed.
        """
        carrying = [number for number, carries in enumerate(self._carrying) if carries]
        others = [number for number, carries in enumerate(self._carrying) if not carries]
        groups = [[number] for number in carrying] if len(carrying) <= _FEW_OUTPUTS else [carrying]
        for group in [*groups, *([number] for number in others)]:
            found = self._norms(plan, mixed, group)
            if not found:  # no gradient flows from there
                continue
            _require_same_norms(found, [self._norms(plan, [row] * len(mixed), group) for row in rows])
            if group[0] in others:
                self._compare_values(group[0], rows, mixed, random)

    def _norms(self, plan: AxisPlan, rows: list[int], only: Sequence[int]) -> dict[str, Tensor]:
        """Return the norm of each example's gradient, by parameter, of a number that some of the outputs make up.

        It is no linear function of outputs that carry the examples, so that what flows back differs from example to
        example. Of others it is: a mean over the examples may be among them.
        """

        def chosen(outs: list[Tensor]) -> list[Tensor]:
            carrying = dict(enumerate(self._carrying))
            return [bent(outs[i]) if carrying.get(i) else outs[i] for i in only if i < len(outs)]

        return self._runs.tapped(plan, rows, chosen).norms

    def _compare_values(self, number: int, rows: list[int], mixed: list[int], random: bool) -> None:
        """Check that an output without the examples is a mean, or a sum, over them.

        Then its value for a batch is the mean of its values for batches of copies of each example.
        """

        def value(rows: list[int]) -> Tensor | None:
            run = self._runs.record(rows, training=not random)
            return run.values[number] if number < len(run.values) and not run.random else None

        together = value(mixed)
        alone = [each for row in rows if (each := value([row] * len(mixed))) is not None]
        if together is None or not together.numel() or [each.shape for each in alone] != [together.shape] * len(rows):
            return
        mean = torch.stack([alone[position % len(rows)].double() for position in range(len(mixed))]).mean(0)
        gap = float((together.double() - mean).abs().max())
        scale = max(float(each.abs().max()) for each in alone)
        slack = _SLACK_UNDER_AUTOCAST if is_short(together) else _SLACK_OF_MEANS
        if math.isfinite(gap) and gap > slack * scale:
            raise MixedExamplesError(
                f"the model returns a tensor of shape {tuple(together.shape)} (its output {number + 1}) that "
                f"does not carry the examples and is no mean over them either: by {gap / scale:.2g} of its size it "
                "depends on how they are put together. A loss that uses it would mix them. Balance experts or the like "
                "for each example by itself, then take the mean; or do not return it (output_router_logits=False), or "
                "detach() it."
            )


def _require_same_outputs(pairs: Mapping[Traced, Sequence[Tensor]]) -> None:
    """Refuse a model some of whose outputs for an example are others than among copies of it."""
    equal = all_equal([(first, second) for first, second in pairs.values()])  # most of them
    rest = [pair for pair, same_numbers in zip(pairs.items(), equal, strict=True) if not same_numbers]
    gaps = largest_gaps([gap_and_size(first, second) for _, (first, second) in rest])
    for (key, (first, _)), (gap, size) in zip(rest, gaps, strict=True):  # as they came: the first is the cause
        what = "the other examples of the batch (or rows were reordered on the way)"
        try:
            _require_small(key[0], gap, size, what, max(_SLACK, torch.finfo(first.dtype).eps))
        except MixedExamplesError as error:
            error.inside = key[1][0] if key[1] is not None and key[1][1] else None
            raise


def _require_same_norms(together: dict[str, Tensor], alone: list[dict[str, Tensor]]) -> None:
    """Refuse a model whose per-example gradients are others among other examples than among copies."""
    among, copies = _numbers(together), [_numbers(norms) for norms in alone]
    largest = max((max(each) for each in among.values()), default=0.0)
    for position, norms in enumerate(copies):
        for name in [name for name in among if name in norms]:
            pair = among[name][position], norms[name][position]
            gap, scale = abs(pair[0] - pair[1]), max(*pair, _SMALL_GRADIENT * largest)
            slack = _SLACK_UNDER_AUTOCAST if is_short(together[name]) else _SLACK_OF_NORMS
            if math.isfinite(gap) and gap > slack * scale:
                raise MixedExamplesError(
                    f"an example's gradient for {name!r} depends on the other examples of the batch; it changes by "
                    f"{gap / scale:.2g} of its size. Such a model cannot be made private. If it returns its loss, "
                    "that must be a mean over the examples; so must a term that it returns beside its outputs."
                )


def _numbers(norms: Mapping[str, Tensor]) -> dict[str, list[float]]:
    return dict(zip(norms, numbers_of(list(norms.values())), strict=True))


def _require_same_state(first: RecordedRun, second: RecordedRun) -> None:
    for name in first.written.keys() | second.written.keys():
        pair = (first.written.get(name), second.written.get(name))
        if pair[0] is None or pair[1] is None or not same(pair[0], pair[1]):
            raise ValueError(
                f"{name} is written from the data during training and would be published with the model. Replace that "
                "layer (dphero.fix replaces batch and instance norms) or switch its statistics off."
            )


def _require_small(label: str, gap: float, scale: float, what: str, slack: float) -> None:
    if gap > slack * scale:
        raise MixedExamplesError(
            f"{label}: an example's output depends on {what}; it changes by {gap / max(scale, 1e-30):.2g} of its size. "
            "Such a model cannot be made private: use per-example statistics (GroupNorm, LayerNorm) and keep the batch "
            "axis first."
        )
