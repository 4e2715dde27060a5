"""Whole trainings as releases: data in, a model and what it claims out."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from dphero.accounting import BudgetExhausted, Ledger
from dphero.audit.bounds.claims import Claim, claim_of_ledger, claim_of_prices
from dphero.methods import METHODS, Task, make
from dphero.methods.recipe import Recipe
from dphero.models import FeatureModel

Absent = Literal["nothing", "blank", "label"]
"""What stands for a canary that is "out": nothing; a blank record, where the number of records is public; or the canary
with another label, where labels alone are protected."""


def absence(method: str) -> Absent:
    """Return what stands for an absent canary under the method's neighbouring relation."""
    relation = METHODS[method].card.relation
    if relation.startswith("zero out"):
        return "blank"
    return "label" if "label" in relation else "nothing"


@dataclass(frozen=True, eq=False)
class Trained:
    """A trained model.

    Attributes:
        model: The model, in evaluation mode; it takes images.
        claim: Returns what was promised, given δ.
        price: Returns the ε that is printed, given δ, where that is finer than the claim's own.
    """

    model: nn.Module
    claim: Callable[[float], Claim]
    price: Callable[[float], float] | None = None

    def epsilon(self, delta: float) -> float:
        """Return ε as it is printed."""
        return self.claim(delta).epsilon if self.price is None else self.price(delta)


class Train(Protocol):
    """Any training: images and labels in, a model out, everything random decided by the seed."""

    def __call__(self, images: Tensor, labels: Tensor, seed: int, /) -> Trained:
        """Train once."""


@dataclass(frozen=True, eq=False)
class MethodTraining:
    """Trains with a method of :mod:`dphero.methods`, from the same public weights every time.

    Args:
        recipe: The settings. A ``dataset_size`` in it should be a number: with ``"public"``, the number of records,
            and with it the sample rate, would tell whether the canary is there.
        model: The network with its initial weights.
        classes: Number of classes.
        report: Called after every step, with the number of steps taken and that of all steps.
    """

    recipe: Recipe
    model: nn.Module
    classes: int
    report: Callable[[int, int], None] = lambda done, total: None

    def __call__(self, images: Tensor, labels: Tensor, seed: int, /) -> Trained:
        """Train once."""
        from dphero.experiments.runs.evaluation import features

        recipe = self.recipe.with_(seed=None if self.recipe.secure else seed)
        method = make(recipe.method, recipe.options)
        model = method.network(copy.deepcopy(self.model))
        module, inputs = model, images
        if isinstance(model, FeatureModel):
            module, inputs = model.head, features(model, images)
        trainer = method.start(
            Task(
                recipe=recipe,
                train=TensorDataset(inputs, labels),
                model=model,
                module=module,
                images=images,
                classes=self.classes,
            )
        )
        try:
            while not trainer.finished:
                trainer.advance()
                self.report(trainer.step, trainer.steps)
        except BudgetExhausted:
            pass
        ledger, price = trainer.ledger.copy(), trainer.price
        released = copy.deepcopy(trainer.model).eval()
        trainer.close()

        def claim(delta: float) -> Claim:
            if _is_gaussian(ledger):
                return claim_of_ledger(ledger, delta)
            return claim_of_prices(lambda each: price(each, coarse=True).epsilon, delta)

        return Trained(released, claim, lambda delta: price(delta).epsilon)


def _is_gaussian(ledger: Ledger) -> bool:
    """Whether the ledger has a curve and a family of its own."""
    return all(
        not event.adaptive and event.zcdp() is not None and hasattr(event, "noise_multiplier")
        for event in ledger.counts
    )


@torch.no_grad()
def losses(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    """Return the cross-entropy of each example, in float64."""
    outputs = torch.cat([model(part) for part in images.split(1000)]).double()
    return torch.nn.functional.cross_entropy(outputs, labels, reduction="none")


@torch.no_grad()
def confidence(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    """Return ln p − ln(1 − p) of each example's label: nearly normal over trainings, which LiRA needs."""
    outputs = torch.cat([model(part) for part in images.split(1000)]).double()
    right = outputs.gather(1, labels[:, None])
    rest = outputs.scatter(1, labels[:, None], -torch.inf)
    return right[:, 0] - rest.logsumexp(1)
