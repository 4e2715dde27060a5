"""What a repetition of a loss cannot see: sentences for the statement."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dphero.checks.loss.calls import Call, ModelCall, Ref, leaves, tensors
from dphero.checks.loss.recorder import Recorder

STEERED = (
    "Not checked: the training loop takes branches that depend on the data (if, while or a comparison on a tensor). If "
    "they change the loss, an example changes the gradients of others."
)
OUTSIDE = (
    "Not checked: the loss uses numbers that change from batch to batch and were made outside of torch, and the loop "
    "takes numbers of the batch out of torch (item(), tolist(), numpy()). If they are computed from several examples, "
    "an example changes the gradients of others."
)


def not_repeated(why: str) -> str:
    """Return the note for a loss that could not be computed again."""
    return (
        f"Not checked: the loss could not be computed again with other examples ({why}). If constants in it are made "
        "from several examples (weights counted in the batch, a median), an example changes the gradients of others."
    )


def limits_of(recorder: Recorder, needed: set[int]) -> list[str]:
    """Name what the repetitions cannot see."""
    notes = []
    calls = [call for call in recorder.calls if isinstance(call, ModelCall)]
    followed = any(isinstance(each, Ref) for call in calls for each in call.inputs)
    if calls and not followed:
        notes.append(
            "Not checked: what the model is called with was not computed from the loader's tensors by torch functions. "
            "If it is made from several examples together, an example changes the gradients of others."
        )
    inner = [
        each
        for call in recorder.calls
        if isinstance(call, Call) and needed & call.made
        for each in tensors((call.args, call.kwargs))
        if each.grad_fn is not None
    ]
    if inner:
        notes.append(
            "Not checked: the loss uses activations from inside the model, which were not computed again with other "
            "examples."
        )
    return notes


def ancestors(recorder: Recorder, target: int) -> set[int]:
    """Return the numbers of all tensors on which a loss, or what the model is called with, depends."""
    needed = {target}
    for call in reversed(recorder.calls):
        if isinstance(call, ModelCall):
            needed |= {each.number for each in call.inputs if isinstance(each, Ref)}
        elif needed & call.made:
            needed |= {each.number for each in leaves((call.args, call.kwargs)) if isinstance(each, Ref)}
    return needed


@dataclass(frozen=True)
class Constants:
    """What enters a loss from outside torch, in the order in which it does."""

    rows: int  # the number of examples
    names: tuple[str, ...]  # the functions that were called
    values: tuple[Any, ...]  # the numbers, and marks of the tensors, among their arguments

    def differ(self, other: Constants) -> bool:
        """Whether they are others than in another batch; what follows from the number of rows counts as the same."""
        if self.names != other.names or len(self.values) != len(other.values):
            return True
        return any(not self._equivalent(a, b, other.rows) for a, b in zip(self.values, other.values, strict=True))

    def _equivalent(self, first: Any, second: Any, rows: int) -> bool:
        if first == second or type(first) is not type(second) or isinstance(first, bool):
            return bool(first == second)
        if not isinstance(first, int | float):
            return False
        ways = ((first / self.rows, second / rows), (first * self.rows, second * rows))
        return any(math.isclose(a, b, rel_tol=1e-6) for a, b in ways)


def constants_of(recorder: Recorder, needed: set[int]) -> Constants:
    """Collect what enters a loss from outside."""
    names, values = [], []
    for call in recorder.calls:
        if isinstance(call, Call) and needed & call.made:
            names.append(call.name)
            values += [_mark(each) for each in leaves((call.args, call.kwargs)) if not isinstance(each, Ref)]
    return Constants(recorder.rows, tuple(names), tuple(values))


def _mark(value: Any) -> Any:
    if isinstance(value, Tensor):
        if isinstance(value, torch.nn.Parameter) or value.requires_grad:
            return "parameter"
        small = value.numel() <= 4096 and not value.is_complex()
        return (value.dim(), float(value.detach().double().nan_to_num().sum())) if small else ("tensor", id(value))
    return value if isinstance(value, bool | int | float) else None
