"""Examine a model once, on a few rows of its first batch, before anything is trusted.

The model is run at two batch sizes and in different company, to settle these questions:

* Where does each tapped tensor carry the examples? (:class:`~dphero.batch_axis.axis.BatchAxis`: read off the shapes at
  both sizes, so that a sequence length that happens to equal the batch size cannot be mistaken for it.)
* Does each row depend on its own example alone, and its gradient? A model that mixes examples (batch statistics in
  any disguise, a contrast that it returns as its loss) cannot be made private.
* Does training write data into buffers or parameters? They would be published with the ``state_dict``.
* Do the taps find the gradients that autograd finds? (:mod:`dphero.checks.gradient_check`)

Nothing is learned from the data's values and nothing of them is kept. Parameters, buffers and random generators are
left as they were; what a model writes into other attributes is not undone.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice, product
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from dphero.batch_axis.arguments import Arguments
from dphero.batch_axis.axis import BatchAxis, compare_shapes
from dphero.batch_axis.plan import Axes, AxisPlan, AxisTrace, Call, Traced
from dphero.checks.gradient_check import compare_with_autograd, gradient_norms
from dphero.functional.unbatched import CannotFollowError, plain
from dphero.functional.vmap import vmapped
from dphero.hooks.snapshot import ModelSnapshot, same
from dphero.numerics.trees import tree_flatten

if TYPE_CHECKING:
    from dphero.hooks.taps import Taps

__all__ = ["MixedExamplesError", "probe"]

_SIZES = (5, 7)
_ROUNDS = 64
_WAYS = 8
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


class MixedExamplesError(ValueError):
    """A model in which one example's output depends on another example.

    Attributes:
        inside: The path of the module inside whose code it was seen, if in none of the outputs so far.
    """

    inside: str | None = None


@dataclass
class _Run:
    """A recorded forward pass.

    Attributes:
        recording: What it noted.
        returned: The shapes of the floating-point tensors that it returned.
        values: Those tensors.
        written: What it wrote into parameters and buffers.
        random: Whether it drew random numbers.
    """

    recording: AxisTrace
    returned: list[torch.Size]
    values: list[Tensor]
    written: dict[str, Tensor]
    random: bool


def probe(taps: Taps, args: tuple[Any, ...], kwargs: dict[str, Any], rows: int) -> AxisPlan:
    """Examine a model on its first batch.

    Args:
        taps: The taps of the model.
        args: Positional arguments of the first call of the model.
        kwargs: Its keyword arguments.
        rows: The number of rows of that batch.

    Raises:
        MixedExamplesError: If an example's row depends on other examples.
        ValueError: If the batch cannot be found in the arguments, or buffers are written from data.
    """
    batch = Arguments(args, kwargs, rows)
    choices = batch.choices()
    ways = [way for way in islice(product(*choices), _WAYS) if any(axis is not None for axis in way)]
    if not ways:
        raise ValueError(
            f"the private loader gave a batch of {rows} examples, but the model was called with shapes {batch.shapes}. "
            "Call the model on whole batches of that loader, examples in axis 0, or use `with engine.paused():` "
            "for other data."
        )
    known = taps.plan.arguments if taps.plan is not None and taps.plan.examples_independent else []
    settled = [way for way in ways if (batch.structure, way) in known]
    ways = settled or ways
    unclear = not settled and rows > 1 and any(0 in choice and 1 in choice for choice in choices)
    problem: Exception | None = None
    for way in ways:
        batch.axes = way
        try:
            with _full_precision(), _all_trainable(taps):
                plan = _Examination(taps, batch).run()
            break
        except Exception as error:
            problem = problem or error
            if isinstance(problem, MixedExamplesError):
                if unclear:
                    problem.add_note(f"There are as many examples as positions ({rows}): examples must be in axis 0.")
                raise problem from None
    else:
        assert problem is not None
        problem.add_note(f"(dphero examines a model with {' and '.join(map(str, _SIZES))} rows of its first batch.)")
        raise problem
    if unclear and plan.examples_independent and way == ways[0]:
        batch.axes = [1 if 0 in choice and 1 in choice else axis for choice, axis in zip(choices, way, strict=True)]
        if _passes(taps, batch):
            raise ValueError(
                f"the first batch has shapes {batch.shapes}: as many examples as positions ({rows}), and the model "
                "treats both alike, so that it cannot be told which are the examples. Use another batch size."
            )
    return plan


@contextmanager
def _all_trainable(taps: Taps) -> Iterator[None]:
    """Let all parameters of the engine be trained here: those that are frozen now may not be later."""
    known = [hooked.parameters[local] for hooked in taps.hooked_modules for local in hooked.names]
    frozen = [parameter for parameter in known if not parameter.requires_grad]
    for parameter in frozen:
        parameter.requires_grad_(True)
    try:
        yield
    finally:
        for parameter in frozen:
            parameter.requires_grad_(False)


def _passes(taps: Taps, batch: Arguments) -> bool:
    """Tell whether a model could be private if the batch were read so; something of the examples must come out then."""
    rules = [hooked.rule for hooked in taps.hooked_modules]
    examination = _Examination(taps, batch)
    try:
        with _all_trainable(taps):
            examination.run()
    except Exception:
        return False
    finally:
        for hooked, rule in zip(taps.hooked_modules, rules, strict=True):
            hooked.rule = rule
    return any(examination.carrying)


class _Examination:
    """One examination of a model, given where its arguments carry the examples."""

    def __init__(self, taps: Taps, batch: Arguments) -> None:
        self._taps, self._batch = taps, batch
        self._snapshot = ModelSnapshot(taps.module)
        self._hints: dict[Call, Axes] = {}
        self._unlike: list[int] = []  # rows that make other calls among copies of themselves than among others
        self.carrying: list[bool] = []  # which floating-point tensors that the model returned carry the examples
        self._labels = {
            id(child): f"{path or 'the model'!r} ({type(child).__name__})"
            for path, child in taps.module.named_modules()
        }

    def run(self) -> AxisPlan:
        """Return the plan, or raise what stands against private training.

        Where examples seem to meet inside a module, it may be that it sorts their tokens and puts them back (a mixture
        of experts). Then that module is recomputed example by example, and what comes out of it is compared.
        """
        suspected: dict[str, MixedExamplesError] = {}
        rules = [(hooked, hooked.rule) for hooked in self._taps.hooked_modules]
        while True:
            try:
                return self._attempt()
            except MixedExamplesError as error:
                hooked = next((hooked for hooked in self._taps.hooked_modules if hooked.path == error.inside), None)
                problem: Exception = error
                if hooked is not None and hooked.path not in suspected and hooked.rule is not vmapped:
                    suspected[hooked.path] = error
                    hooked.rule = vmapped
                    self._hints.clear()
                    continue
            except Exception as error:
                problem = error
            if suspected:
                for hooked, rule in rules:
                    hooked.rule = rule
                if not isinstance(problem, MixedExamplesError):
                    problem = next(iter(suspected.values()))
            raise problem

    def _attempt(self) -> AxisPlan:
        rows = self._batch.different_rows()
        mixed = [[rows[i % len(rows)] for i in range(size)] for size in _SIZES]
        for _ in range(_ROUNDS):
            self._unlike = []
            try:
                calls, small, large = self._settle(mixed)
                self.carrying = _carrying(small, large)
                if len(rows) > 1:
                    self._compare(rows, mixed, small, large)
                plan = AxisPlan(calls, [self._batch.way], len(rows) > 1, small.written)
                for row in self._unlike:
                    others, run, _ = self._settle([[row] * size for size in _SIZES])
                    plan = plan.joined(AxisPlan(others, [self._batch.way], True, run.written))
                for batch in (mixed[0], *([row] * _SIZES[0] for row in self._unlike)):
                    compare_with_autograd(
                        self._taps, plan, self._snapshot, self._batch.take(batch), _SIZES[0], random=small.random
                    )
                if len(rows) > 1:
                    self._compare_gradients(plan, rows, mixed[0], small.random)
                return plan
            except CannotFollowError as error:
                if error.owner is None or error.owner.rule is vmapped:
                    raise
                error.owner.rule = vmapped  # recompute that module example by example
                self._hints.clear()
        raise AssertionError

    def _record(self, rows: Sequence[int], *, training: bool = True, seed: int | None = None) -> _Run:
        """Run the model on these rows and note all that is to be compared."""
        recording = AxisTrace(len(rows), self._hints)

        def note(child: nn.Module, _: Any, out: Any) -> None:
            if any(hooked.rule is vmapped for hooked in self._taps.stack):
                return  # what counts is what comes out of such a module
            for leaf in tree_flatten(out)[0]:
                if isinstance(leaf, Tensor) and id(child) in self._labels:
                    recording.note(self._labels[id(child)], plain(leaf))

        hook = nn.modules.module.register_module_forward_hook(note)
        try:
            with self._snapshot.restored_afterwards(seed) as changes:
                if not training:
                    self._taps.module.eval()
                args, kwargs = self._batch.take(rows)
                out = self._taps.run(recording, None, args, kwargs)
                tensors = [leaf for leaf in tree_flatten(out)[0] if isinstance(leaf, Tensor)]
                if not tensors:
                    raise ValueError(
                        f"the model returns a {type(out).__name__}, and no tensor is found in it, so that it cannot be "
                        "examined. Return a tensor, or tuples, lists, dictionaries or dataclasses of them."
                    )
                note(self._taps.module, None, out)
        finally:
            hook.remove()
        values = [plain(tensor).detach() for tensor in tensors if tensor.is_floating_point()]
        return _Run(recording, [value.shape for value in values], values, changes.state, changes.random)

    # -- where the examples lie -------------------------------------------------------------------------------

    def _settle(self, mixed: list[list[int]]) -> tuple[dict[Call, Axes], _Run, _Run]:
        """Run at both sizes until what was assumed of every call is what the shapes say."""
        for _ in range(_ROUNDS):
            first, second = (self._record(rows) for rows in mixed)
            calls, agreed, misfit, inside = {}, True, "", None
            for call, seen in first.recording.calls.items():
                other = second.recording.calls.get(call)
                if other is None or len(other.shapes) != len(seen.shapes):
                    continue
                layouts = [compare_shapes(a, b, *_SIZES) for a, b in zip(seen.shapes, other.shapes, strict=True)]
                fits = [layout for layout in layouts if layout is not None]
                if len(fits) < len(layouts):
                    shapes = ", ".join(
                        f"{tuple(a)} and {tuple(b)}" for a, b in zip(seen.shapes, other.shapes, strict=True)
                    )
                    inside = inside if misfit or not call[0][1] else call[0][0]
                    misfit = misfit or f"{seen.label}, {call[0][1] or 'output and input'}: {shapes}"
                    continue
                agreed &= all(
                    fit.axis == assumed.axis
                    for record in (seen, other)
                    for fit, assumed in zip(fits, record.assumed, strict=False)
                )
                calls[call] = tuple(
                    (len(shape), fit.axis, fit.fold > 1) for shape, fit in zip(seen.shapes, fits, strict=True)
                )
            if agreed and misfit:
                mixed_up = MixedExamplesError(
                    f"{misfit} at batch sizes {_SIZES[0]} and {_SIZES[1]}: these shapes do not carry the examples in "
                    "one axis. Such a model cannot be made private."
                )
                mixed_up.inside = inside
                raise mixed_up
            if agreed:
                return calls, first, second
            self._hints.update(calls)
        raise ValueError("the calls inside the model change from run to run, so that they could not be understood")

    # -- whether examples are independent -----------------------------------------------------------------------

    def _compare(self, rows: list[int], mixed: list[list[int]], small: _Run, large: _Run) -> None:
        """Check that each example gives the same in any company, and that nothing else remembers it."""
        layouts = {
            key: compare_shapes(tensor.shape, large.recording.trace[key].shape, *_SIZES)
            for key, tensor in small.recording.trace.items()
            if key in large.recording.trace and tensor.is_floating_point()
        }
        for (label, _, _), layout in layouts.items():
            if layout is None:
                raise MixedExamplesError(
                    f"{label}: its output does not carry the examples in one axis (a matrix of all pairs?). "
                    "Such a model cannot be made private."
                )
        _require_same_state(small, large)
        self._compare_with_copies(rows, small, layouts)
        if small.random:
            for seed in _SEEDS:
                self._compare_with_copies(rows, self._record(mixed[0], seed=seed), layouts, seed)
        if small.random:  # dropout draws other numbers at another size
            small, large = (self._record(rows, training=False) for rows in mixed)
        if small.random:
            return
        for key, tensor in small.recording.trace.items():
            other = large.recording.trace.get(key)
            layout = None if other is None else compare_shapes(tensor.shape, other.shape, *_SIZES)
            if other is None or layout is None or layout.unbatched or not tensor.is_floating_point():
                continue
            places = [mixed[1].index(row) for row in mixed[0]]
            first, second = layout.split(tensor, _SIZES[0]), layout.split(other, _SIZES[1])[places]
            what = "the size of the batch or the order of its examples"
            short = any(torch.is_autocast_enabled(device) for device in ("cpu", "cuda"))
            _require_close(key[0], first, second, what, slack=_SLACK_UNDER_AUTOCAST if short else _SLACK_BETWEEN_SIZES)

    def _compare_with_copies(
        self, rows: list[int], small: _Run, layouts: Mapping[Traced, BatchAxis | None], seed: int | None = None
    ) -> None:
        """Check that each example gives the same as among copies of itself."""
        for position, row in enumerate(rows):
            alone = self._record([row] * _SIZES[0], seed=seed)
            _require_same_state(small, alone)
            if seed is None and not alone.recording.calls.keys() <= small.recording.calls.keys():
                self._unlike.append(row)  # a mask that is left out where no example needs it
            for key in small.recording.trace:  # in the order in which they came: the first is the cause
                layout = layouts.get(key)
                if layout is None or layout.unbatched or key not in alone.recording.trace:
                    continue
                outputs = [run.recording.trace[key] for run in (small, alone)]
                if outputs[0].shape != outputs[1].shape:
                    raise MixedExamplesError(
                        f"{key[0]}: the shape of its output depends on the other examples of the batch "
                        f"({tuple(outputs[0].shape)} and {tuple(outputs[1].shape)}). Pad all batches to one length, "
                        "not each to its longest example."
                    )
                first, second = (layout.split(output, _SIZES[0])[position] for output in outputs)
                try:
                    _require_close(
                        key[0], first, second, "the other examples of the batch (or rows were reordered on the way)"
                    )
                except MixedExamplesError as error:
                    error.inside = key[1][0] if key[1] is not None and key[1][1] else None
                    raise

    def _compare_gradients(self, plan: AxisPlan, rows: list[int], mixed: list[int], random: bool) -> None:
        """Check that each example's gradient is what it is among copies of itself: they may meet on the way back.

        Outputs are looked at one by one: beside large logits, a small term over the whole batch would not be noticed.
        """
        carrying = [number for number, carries in enumerate(self.carrying) if carries]
        others = [number for number, carries in enumerate(self.carrying) if not carries]
        groups = [[number] for number in carrying] if len(carrying) <= _FEW_OUTPUTS else [carrying]
        for group in [*groups, *([number] for number in others)]:
            found = self._norms(plan, mixed, group)
            if not found:  # no gradient flows from there
                continue
            _require_same_norms(found, [self._norms(plan, [row] * len(mixed), group) for row in rows])
            if group[0] in others:
                self._compare_values(group[0], rows, mixed, random)

    def _norms(self, plan: AxisPlan, rows: list[int], only: list[int]) -> dict[str, Tensor]:
        call = self._batch.take(rows)
        return gradient_norms(self._taps, plan, self._snapshot, call, len(rows), self.carrying, only)

    def _compare_values(self, number: int, rows: list[int], mixed: list[int], random: bool) -> None:
        """Check that an output without the examples is a mean, or a sum, over them.

        Then its value for a batch is the mean of its values for batches of copies of each example.
        """

        def value(rows: list[int]) -> Tensor | None:
            run = self._record(rows, training=not random)
            return run.values[number] if number < len(run.values) and not run.random else None

        together = value(mixed)
        alone = [each for row in rows if (each := value([row] * len(mixed))) is not None]
        if together is None or not together.numel() or [each.shape for each in alone] != [together.shape] * len(rows):
            return
        mean = torch.stack([alone[position % len(rows)].double() for position in range(len(mixed))]).mean(0)
        gap = float((together.double() - mean).abs().max())
        scale = max(float(each.abs().max()) for each in alone)
        slack = _SLACK_UNDER_AUTOCAST if together.dtype in (torch.float16, torch.bfloat16) else _SLACK_OF_MEANS
        if math.isfinite(gap) and gap > slack * scale:
            raise MixedExamplesError(
                f"the model returns a tensor of shape {tuple(together.shape)} (its output {number + 1}) that "
                f"does not carry the examples and is no mean over them either: by {gap / scale:.2g} of its size it "
                "depends on how they are put together. A loss that uses it would mix them. Balance experts or the like "
                "for each example by itself, then take the mean; or do not return it (output_router_logits=False), or "
                "detach() it."
            )


def _carrying(small: _Run, large: _Run) -> list[bool]:
    layouts = [compare_shapes(a, b, *_SIZES) for a, b in zip(small.returned, large.returned, strict=False)]
    return [layout is not None and not layout.unbatched for layout in layouts]


@contextmanager
def _full_precision() -> Iterator[None]:
    """Keep a GPU from the shorter formats, whose rounding depends on the size of the batch."""
    matmul = torch.backends.cuda.matmul
    before, matmul.allow_tf32 = matmul.allow_tf32, False
    try:
        with torch.backends.cudnn.flags(enabled=torch.backends.cudnn.enabled, allow_tf32=False):
            yield
    finally:
        matmul.allow_tf32 = before


def _require_same_norms(together: dict[str, Tensor], alone: list[dict[str, Tensor]]) -> None:
    """Refuse a model whose per-example gradients are others among other examples than among copies."""
    largest = max((float(each.max()) for each in together.values()), default=0.0)
    for position, norms in enumerate(alone):
        for name in [name for name in together if name in norms]:
            pair = float(together[name][position]), float(norms[name][position])
            gap, scale = abs(pair[0] - pair[1]), max(*pair, _SMALL_GRADIENT * largest)
            short = together[name].dtype in (torch.float16, torch.bfloat16)
            if math.isfinite(gap) and gap > (_SLACK_UNDER_AUTOCAST if short else _SLACK_OF_NORMS) * scale:
                raise MixedExamplesError(
                    f"an example's gradient for {name!r} depends on the other examples of the batch; it changes by "
                    f"{gap / scale:.2g} of its size. Such a model cannot be made private. If it returns its loss, "
                    "that must be a mean over the examples; so must a term that it returns beside its outputs."
                )


def _require_same_state(first: _Run, second: _Run) -> None:
    for name in first.written.keys() | second.written.keys():
        pair = (first.written.get(name), second.written.get(name))
        if pair[0] is None or pair[1] is None or not same(pair[0], pair[1]):
            raise ValueError(
                f"{name} is written from the data during training and would be published with the model. Replace that "
                "layer (dphero.fix replaces batch and instance norms) or switch its statistics off."
            )


def _require_close(label: str, first: Tensor, second: Tensor, what: str, slack: float = 0.0) -> None:
    finite = first.isfinite() & second.isfinite()
    mixed_up = bool(((first != second) & ~finite & ~(first.isnan() & second.isnan())).any())
    scale = float(torch.where(finite, first, 0).abs().max()) if first.numel() else 0.0
    gap = float(torch.where(finite, first - second, 0).abs().max()) if first.numel() else 0.0
    if mixed_up or gap > max(_SLACK, slack, torch.finfo(first.dtype).eps) * scale:
        raise MixedExamplesError(
            f"{label}: an example's output depends on {what}; it changes by {gap / max(scale, 1e-30):.2g} of its size. "
            "Such a model cannot be made private: use per-example statistics (GroupNorm, LayerNorm) and keep the batch "
            "axis first."
        )
