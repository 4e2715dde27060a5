"""What a method is: a card that says what it protects, its own settings, and a trainer that takes steps.

A *method* is a published way to train privately. It is a frozen dataclass whose fields are its own options, with a
:class:`Card` and one function, ``start``: a :class:`Task` in, a :class:`Trainer` out. The trainer takes one step at a
time, keeps the ledger of what it released, and can be saved and resumed; everything else (progress, evaluation, files)
is the business of :mod:`dphero.experiments`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from numbers import Integral, Real
from os import PathLike
from typing import Any, ClassVar, Literal, get_args, get_origin, get_type_hints

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from dphero import checkpoint
from dphero._checks import closest
from dphero.accounting import Ledger, Price, Statement, price, statement
from dphero.methods.recipe import Recipe
from dphero.models import NAMES

__all__ = ["METHODS", "Card", "Method", "Step", "Task", "Trainer", "extra_of", "make", "register"]

SEEDED = "The random seed was chosen by the user; the guarantee holds only while it stays secret."


@dataclass(frozen=True)
class Card:
    """What a reader must know of a method before comparing its numbers with another's.

    Attributes:
        name: On the command line.
        title: In a few words.
        protects: The protected unit: what one record of the guarantee is.
        relation: Which data sets are neighbours.
        sampling: How examples come into a step.
        paper: Where it was published.
        priced: How its ε is computed here.
        flaws: Known flaws, of the paper or of its published figures.
        extra_data: Data beyond the private set that it needs, or empty.
        sound: Whether the price printed here is a proven bound for what was released.
    """

    name: str
    title: str
    protects: str
    relation: str
    sampling: str
    paper: str
    priced: str
    flaws: tuple[str, ...] = ()
    extra_data: str = ""
    sound: bool = True


@dataclass(frozen=True)
class Task:
    """What a method is given.

    Attributes:
        recipe: The settings.
        train: The private examples, one row each, on the device: what ``module`` takes, and labels.
        model: The complete network with public initial weights, on the device; it takes images.
        module: The part of it that is trained. Where the model begins with a fixed public transform, the rows of
            ``train`` have gone through that already, and ``module`` is what follows.
        images: The private images as they came (the same as ``train``'s where nothing was transformed).
        classes: Number of classes.
    """

    recipe: Recipe
    train: TensorDataset
    model: nn.Module
    module: nn.Module
    images: Tensor
    classes: int

    @property
    def device(self) -> torch.device:
        """Where everything is."""
        return self.train.tensors[0].device

    @property
    def cuda_graphs(self) -> bool:
        """Whether to record the network's passes and replay them.

        Unasked, this is done for built-in networks on a GPU: a user's own may do more in Python than compute.
        """
        wanted = self.recipe.cuda_graphs
        return self.device.type == "cuda" and self.recipe.model in NAMES if wanted is None else wanted

    @property
    def records(self) -> int:
        """The public number of records.

        Raises:
            ValueError: If no number of records was declared public.
        """
        size = self.recipe.dataset_size
        if size is None:
            raise ValueError(
                "the number of records is private unless you say otherwise: give --dataset-size N, a public figure, or "
                "--dataset-size public, if the number of records in the data is no secret"
            )
        return len(self.train) if size == "public" else size

    @property
    def sample_rate(self) -> float:
        """The probability q = B / N with which an example enters a lot."""
        rate = self.recipe.lot / self.records
        if rate > 1:
            raise ValueError(f"lot {self.recipe.lot} is larger than the data: there are {self.records} records")
        return rate

    @property
    def steps(self) -> int:
        """How many lots the training takes."""
        return max(1, round(self.recipe.epochs * max(1, round(1 / self.sample_rate))))

    def optimizer(self, module: nn.Module | None = None) -> torch.optim.Optimizer:
        """Return the recipe's optimizer over the parameters that are trained."""
        recipe, parameters = self.recipe, (self.module if module is None else module).parameters()
        if recipe.optimizer == "adam":
            return torch.optim.Adam(parameters, lr=recipe.lr)
        return torch.optim.SGD(parameters, lr=recipe.lr, momentum=recipe.momentum)


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


class Method(ABC):
    """A way to train. Subclasses are frozen dataclasses; their fields are the method's own options.

    Attributes:
        card: What it protects, and where it comes from.
        defaults: Recipe settings that suit it, by data set; those under ``"*"`` suit all.
    """

    card: ClassVar[Card]
    defaults: ClassVar[Mapping[str, Mapping[str, Any]]] = {}

    @abstractmethod
    def start(self, task: Task) -> Trainer:
        """Begin a training."""

    def settled(self, task: Task) -> Task:
        """Return the task, its recipe telling all of the method's options: a resumed training compares them."""
        options = {each.name: getattr(self, each.name) for each in fields(self)}  # type: ignore[arg-type]
        return replace(task, recipe=task.recipe.with_(options=options))

    def network(self, model: nn.Module) -> nn.Module:
        """Return the network that the method releases, given the recipe's: most release that one itself.

        Saved weights are loaded into what this returns.
        """
        return model

    @classmethod
    def suggested(cls, data: str) -> dict[str, Any]:
        """Return the recipe settings that suit the method on a data set."""
        return {**cls.defaults.get("*", {}), **cls.defaults.get(data, {})}


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


METHODS: dict[str, type[Method]] = {}
"""Every method by its name."""


def register(method: type[Method]) -> type[Method]:
    """Make a method known by its card's name (a class decorator)."""
    name = method.card.name
    if name in METHODS:
        raise ValueError(f"a method named {name!r} exists already: {METHODS[name].__name__}")
    METHODS[name] = method
    return method


def make(name: str, options: Mapping[str, Any] | None = None) -> Method:
    """Return a method with its options set.

    Raises:
        ValueError: If there is no such method, it has no such option, or a value is not of the option's type.
    """
    if name not in METHODS:
        hint = closest(name, METHODS, f"there are {', '.join(sorted(METHODS))}")
        raise ValueError(f"method {name!r} is unknown; {hint}")
    method, options = METHODS[name], dict(options or {})
    known = [each.name for each in fields(method)]  # type: ignore[arg-type]
    for option in options:
        if option not in known:
            has = f"it has {', '.join(known)}" if known else "it has none"
            raise ValueError(f"method {name!r} has no option {option!r}; {has}")
    types = get_type_hints(method)
    for option, value in options.items():
        if not _fits(value, types[option]):
            raise ValueError(f"option {option!r} of method {name!r} must be {_words(types[option])}, got {value!r}")
    return method(**options)


def _fits(value: Any, wanted: Any) -> bool:
    """Whether a value of a recipe may stand for a field of that type."""
    if get_origin(wanted) is Literal:
        return True  # the method itself says which there are
    if get_args(wanted):  # this type or that
        return any(_fits(value, each) for each in get_args(wanted))
    if isinstance(value, bool):
        return wanted is bool
    if wanted is float:
        return isinstance(value, Real) and math.isfinite(value)
    return isinstance(value, Integral if wanted is int else wanted)


def _words(wanted: Any) -> str:
    """Say what a field of that type takes."""
    kinds = {float: "a finite number", int: "a whole number", bool: "true or false", str: "text"}
    return " or ".join(kinds[each] for each in (get_args(wanted) or (wanted,)) if each is not type(None))
