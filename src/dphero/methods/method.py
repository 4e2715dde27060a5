"""What a method is: a card that says what it protects, its own settings, and a trainer that takes steps.

A *method* is a published way to train privately. It is a frozen dataclass whose fields are its own options, with a
:class:`~dphero.methods.card.Card` and one function, ``start``: a :class:`~dphero.methods.task.Task` in, a
:class:`~dphero.methods.trainer.Trainer` out. The trainer takes one step at a time, keeps the ledger of what it
released, and can be saved and resumed; everything else (progress, evaluation, files) is the business of
:mod:`dphero.experiments`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import fields, replace
from numbers import Integral, Real
from typing import Any, ClassVar, Literal, get_args, get_origin, get_type_hints

from torch import nn

from dphero._checks import closest
from dphero.guidance import Guidance
from dphero.methods.card import Card
from dphero.methods.task import Task
from dphero.methods.trainer import Trainer


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

    def guidance(self) -> Guidance | None:
        """Return what shapes the noise, where the weights alone decide that; ``None`` where something else does."""
        return None

    @classmethod
    def suggested(cls, data: str) -> dict[str, Any]:
        """Return the recipe settings that suit the method on a data set."""
        return {**cls.defaults.get("*", {}), **cls.defaults.get(data, {})}


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
