"""A trainer: a training in progress, that takes one step at a time and keeps the ledger of what it released."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from os import PathLike
from typing import Any

from torch import Tensor, nn

from dphero import checkpoint
from dphero.accounting import Ledger, Price, Statement, price, statement
from dphero.methods.card import Card
from dphero.methods.task import Task


@dataclass(frozen=True)
class Step:
    """What the owner of the data may look at after a step. Not private, unless said.

    Attributes:
        loss: Mean loss of the examples in the step.
        clipped: Share of them whose gradient was clipped, if anything is clipped.
        signal_to_noise: ‖signal‖ / ‖noise‖ of the released gradient, estimated from that gradient alone: a
            function of what was released, so it costs nothing.
    """

    loss: Tensor
    clipped: float | None = None
    signal_to_noise: float | None = None


class Trainer(ABC):
    """A training in progress.

    Attributes:
        model: The network that will be released; it takes images.
        steps: How many steps there are in all; may fall if the budget ends earlier.
    """

    model: nn.Module
    steps: int

    def __init__(self, card: Card, task: Task) -> None:
        self.card, self.task = card, task
        self.model, self.steps = task.model, task.steps

    @property
    @abstractmethod
    def step(self) -> int:
        """How many steps were taken."""

    @property
    @abstractmethod
    def ledger(self) -> Ledger:
        """What was released so far."""

    def prepare(self) -> Iterator[float]:
        """Do what comes before the first step, if that takes long, a piece at a time; may be left out or broken off.

        Yields:
            The share that is done.
        """
        yield from ()

    @abstractmethod
    def advance(self) -> Step:
        """Take one step."""

    def released_gradient(self) -> dict[str, Tensor]:
        """Return the gradient that the latest step released, by parameter; empty where a method has no such thing.

        Only what has left the mechanism: never a gradient to which noise is still to be added.
        """
        return {}

    @abstractmethod
    def save(self, path: str | PathLike[str], extra: Mapping[str, Any]) -> None:
        """Write everything that a resumed training needs, atomically; the file is as secret as the data.

        A method with values of its own to keep beside ``extra`` puts that under the name ``extra`` among them.
        """

    @abstractmethod
    def load(self, path: str | PathLike[str]) -> dict[str, Any]:
        """Go on from a saved state, exactly as it would have gone on; return the ``extra`` that was saved."""

    @property
    def finished(self) -> bool:
        """Whether all steps were taken."""
        return self.step >= self.steps

    @property
    def accountant(self) -> str:
        """How the ledger is priced."""
        return self.task.recipe.accountant

    @property
    def notes(self) -> tuple[str, ...]:
        """Remarks for the privacy statement."""
        return self.card.flaws if not self.card.sound else ()

    def price(self, delta: float, *, coarse: bool = False) -> Price:
        """Return what was released so far costs."""
        return price(self.ledger, delta, self.accountant, coarse=coarse)

    def statement(self, delta: float) -> Statement:
        """Return, in plain words, what is protected, at what price, and what is not covered."""
        return statement(self.ledger, delta, unit=self.card.protects, accountant=self.accountant, notes=self.notes)

    def compared_prices(self, delta: float) -> Mapping[str, Price]:
        """Return other figures for the same run that a reader may meet (a paper's claim, an approximation)."""
        return {}

    def close(self) -> None:  # noqa: B027 (most have nothing to undo)
        """Leave the model as an ordinary one."""


def gradients_of(model: nn.Module, module: nn.Module) -> dict[str, Tensor]:
    """Return what is in ``.grad`` of the module's parameters, under the names that they have in the whole model."""
    trained = {id(parameter) for parameter in module.parameters()}
    return {
        name: parameter.grad
        for name, parameter in model.named_parameters()
        if id(parameter) in trained and parameter.grad is not None
    }


def extra_of(path: str | PathLike[str]) -> dict[str, Any]:
    """Return the ``extra`` that a trainer of any method saved, before any trainer believes the rest.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If it is no checkpoint, or damaged.
    """
    found = checkpoint.load(path).extra
    inner = found.get("extra", found)
    if not isinstance(inner, dict):
        raise ValueError(f"{path} is not the checkpoint of a run: its extra values are {type(inner).__name__}")
    return inner
