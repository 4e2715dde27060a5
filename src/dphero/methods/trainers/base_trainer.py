"""The base of trainers whose steps are their own: what they need besides the step itself."""

from __future__ import annotations

import hashlib
import json
import secrets
from abc import abstractmethod
from collections.abc import Mapping
from os import PathLike
from typing import Any

from torch import nn

from dphero import checkpoint
from dphero.accounting import Ledger
from dphero.methods.card import Card
from dphero.methods.recipe import Recipe
from dphero.methods.task import Task
from dphero.methods.trainer import Step, Trainer

_MAY_CHANGE = ("data", "device", "physical_batch", "evaluate_every", "cuda_graphs")  # between two parts of a run


def key_of(seed: int | None, purpose: str) -> int:
    """Return a 128-bit key: fresh randomness, or a function of the seed and of what the key is for."""
    if seed is None:
        return secrets.randbits(128)
    return int.from_bytes(hashlib.blake2b(f"{purpose} {seed}".encode(), digest_size=16).digest())


class OwnTrainer(Trainer):
    """Keeps the module, its optimizer, the ledger and the number of steps, and saves them.

    Subclasses take the step in :meth:`take`, and charge the ledger there. Whatever else decides how the training goes
    on belongs into :meth:`state` and :meth:`restore`: sampler and noise state above all, so that a resumed run neither
    draws another lot nor repeats noise on other data.
    """

    def __init__(self, card: Card, task: Task, module: nn.Module | None = None) -> None:
        super().__init__(card, task)
        task.require_last_weights_of_one_view(card.name)
        self.module = task.module if module is None else module
        self.optimizer = task.optimizer(self.module)
        self._ledger, self._step = Ledger(), 0

    @property
    def step(self) -> int:
        """How many steps were taken."""
        return self._step

    @property
    def ledger(self) -> Ledger:
        """What was released."""
        return self._ledger

    @abstractmethod
    def take(self) -> Step:
        """Take a step: charge the ledger, change the module."""

    def advance(self) -> Step:
        """Take a step and count it."""
        self.module.train()
        step = self.take()
        self._step += 1
        return step

    def state(self) -> dict[str, Any]:
        """Return what a resumed training needs."""
        return {
            "method": self.card.name,
            "module": self.module.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "ledger": self._ledger.to_json(),
            "step": self._step,
            "steps": self.steps,
            "recipe": _deciding(self.task.recipe),
            "records": len(self.task.train),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a state.

        Raises:
            ValueError: If it is that of another method, recipe, network or number of examples; nothing is changed then.
        """
        self._require_same(state)
        self.module.load_state_dict(state["module"])
        self.optimizer.load_state_dict(state["optimizer"])
        self._ledger = Ledger.from_json(state["ledger"])
        self._step, self.steps = int(state["step"]), int(state["steps"])

    def _require_same(self, state: Mapping[str, Any]) -> None:
        """Find out what does not fit before anything is changed; older states lack recipe and records."""
        if state["method"] != self.card.name:
            raise ValueError(f"the checkpoint was made by method {state['method']!r}, not by {self.card.name!r}")
        records = len(self.task.train)
        if state.get("records", records) != records:
            raise ValueError(
                f"the checkpoint was made with {state['records']} training examples, and now there are {records}: a "
                "run goes on with the data that it was begun with; put that back"
            )
        mine = _deciding(self.task.recipe)
        then, now = (json.loads(text) for text in (state.get("recipe", mine), mine))
        for name in sorted({*then, *now}):
            was, is_now = then.get(name), now.get(name)
            if was != is_now:
                # a seed is secret, and messages are not
                what = "another seed" if name == "seed" else f"{name} {was!r}, and now it is {is_now!r}"
                raise ValueError(
                    f"the checkpoint was made with {what}: a run goes on as it was begun; put the old value back, or "
                    "begin a new run"
                )
        if _shapes(state["module"]) != _shapes(self.module.state_dict()):
            raise ValueError("the checkpoint is of another network: its weights differ in name or shape")

    def save(self, path: str | PathLike[str], extra: Mapping[str, Any]) -> None:
        """Write the state, atomically."""
        checkpoint.save(path, self.state(), None, extra)

    def load(self, path: str | PathLike[str]) -> dict[str, Any]:
        """Go on from a file."""
        saved = checkpoint.load(path)
        self.restore(saved.engine)
        saved.restore_random()
        return saved.extra


def _deciding(recipe: Recipe) -> str:
    """The settings that decide what is released and what it costs, as JSON."""
    return json.dumps({name: value for name, value in recipe.as_dict().items() if name not in _MAY_CHANGE}, default=str)


def _shapes(weights: Mapping[str, Any]) -> dict[str, Any]:
    return {name: getattr(value, "shape", None) for name, value in weights.items()}
