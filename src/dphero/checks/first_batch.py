"""Examine a model once, on a few rows of its first batch, before anything is trusted.

The model is run at two batch sizes, each row among different neighbours, to settle these questions:

* Where does each tapped tensor carry the examples? (:class:`~dphero.batch_axis.axis.BatchAxis`: read off the shapes at
  both sizes, so that a sequence length that happens to equal the batch size cannot be mistaken for it.)
* Does each row depend on its own example alone, and its gradient? A model that mixes examples (batch statistics
  of any kind, a contrast that it returns as its loss) cannot be made private. (:mod:`dphero.checks.independence`)
* Does training write data into buffers or parameters? They would be published with the ``state_dict``.
* Do the taps find the gradients that autograd finds? (:mod:`dphero.checks.gradient_check`)

Nothing is learned from the data's values and nothing of them is kept. Parameters, buffers and random generators are
left as they were; what a model writes into other attributes is not undone.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice, product
from typing import TYPE_CHECKING, Any

import torch

from dphero.batch_axis.arguments import Arguments
from dphero.batch_axis.axis import compare_shapes
from dphero.batch_axis.plan import AxisPlan
from dphero.checks.gradient_check import compare_with_autograd
from dphero.checks.independence import IndependenceCheck
from dphero.checks.model_runs import SIZES, MixedExamplesError, ModelRuns, RecordedRun
from dphero.functional.unbatched import CannotFollowError
from dphero.functional.vmap import vmapped
from dphero.numerics.buffers import cache_emptied

if TYPE_CHECKING:
    from dphero.hooks.taps import Taps

_ROUNDS = 64
"""How often a module that cannot be followed is recomputed example by example instead, at most."""
_WAYS = 8
"""How many guesses are made of where the arguments carry the examples."""


def probe(taps: Taps, args: tuple[Any, ...], kwargs: dict[str, Any], rows: int) -> AxisPlan:
    """Examine a model on its first batch: what it is called with, and the number of examples in that.

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
            with _without_tf32(), _all_trainable(taps), cache_emptied():
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
        problem.add_note(f"(dphero examines a model with {' and '.join(map(str, SIZES))} rows of its first batch.)")
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
        self._runs = ModelRuns(taps, batch)
        self.carrying: list[bool] = []  # which floating-point tensors that the model returned carry the examples

    def run(self) -> AxisPlan:
        """Return the plan, or raise what stands against private training.

        Where examples seem to be mixed inside a module, it may sort their tokens and put them back (a mixture of
        experts). Then that module is recomputed example by example, and what comes out of it is compared.
        """
        suspected: dict[str, MixedExamplesError] = {}
        rules = [(hooked, hooked.rule) for hooked in self._runs.taps.hooked_modules]
        while True:
            try:
                return self._attempt()
            except MixedExamplesError as error:
                hooked = next(
                    (hooked for hooked in self._runs.taps.hooked_modules if hooked.path == error.inside), None
                )
                problem: Exception = error
                if hooked is not None and hooked.path not in suspected and hooked.rule is not vmapped:
                    suspected[hooked.path] = error
                    hooked.rule = vmapped
                    self._runs.forget()
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
        for _ in range(_ROUNDS):
            try:
                return self._plan()
            except CannotFollowError as error:
                if error.owner is None or error.owner.rule is vmapped:
                    raise
                error.owner.rule = vmapped  # recompute that module example by example
                self._runs.forget()
        raise AssertionError

    def _plan(self) -> AxisPlan:
        """Return the plan, or raise, while modules are run as they are now."""
        runs, batch = self._runs, self._runs.batch
        rows = batch.different_rows()
        mixed = [[rows[i % len(rows)] for i in range(size)] for size in SIZES]
        calls, small, large = runs.settle(mixed)
        self.carrying = _carrying(small, large)
        check = IndependenceCheck(runs, self.carrying)
        if len(rows) > 1:
            check.compare_outputs(rows, mixed, small, large)
        small.let_go()  # what comes next takes as much memory
        large.let_go()
        plan = AxisPlan(calls, [batch.way], len(rows) > 1, small.written)
        for row in check.unlike:
            plan = plan.joined(self._plan_among_copies(row))
        for members in (mixed[0], *([row] * SIZES[0] for row in check.unlike)):
            compare_with_autograd(runs, plan, members, random=small.random)
        if len(rows) > 1:
            check.compare_gradients(plan, rows, mixed[0], small.random)
        return plan

    def _plan_among_copies(self, row: int) -> AxisPlan:
        """Return the plan of batches that are copies of one example."""
        calls, run, _ = self._runs.settle([[row] * size for size in SIZES])
        return AxisPlan(calls, [self._runs.batch.way], True, run.written)


def _carrying(small: RecordedRun, large: RecordedRun) -> list[bool]:
    layouts = [compare_shapes(a.shape, b.shape, *SIZES) for a, b in zip(small.values, large.values, strict=False)]
    return [layout is not None and not layout.unbatched for layout in layouts]


@contextmanager
def _without_tf32() -> Iterator[None]:
    """Keep a GPU from the shorter formats, whose rounding depends on the size of the batch."""
    matmul = torch.backends.cuda.matmul
    before, matmul.allow_tf32 = matmul.allow_tf32, False
    try:
        with torch.backends.cudnn.flags(enabled=torch.backends.cudnn.enabled, allow_tf32=False):
            yield
    finally:
        matmul.allow_tf32 = before
