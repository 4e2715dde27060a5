"""Membership inference against a released model: how well does it tell who was in its training data?

Not a bound on ε, but what a practical attacker gets: the loss of each record against a threshold, and the likelihood
ratio over shadow models (LiRA, Carlini et al. 2022). Read at low false positive rates: an attack that is right about a
few people is an attack.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import stats
from torch import Tensor, nn

from dphero.audit.trainings.training import Train, confidence, losses

Array = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Roc:
    """The receiver operating characteristic of an attack.

    Attributes:
        name: The attack.
        false_rates: False positive rates, from 0 to 1.
        true_rates: The true positive rate at each.
        members: How many scores of members there were, and
        others: of other records.
    """

    name: str
    false_rates: Array
    true_rates: Array
    members: int
    others: int

    @classmethod
    def of(cls, name: str, members: Array, others: Array) -> Roc:
        """Return the curve over all thresholds; a higher score speaks for membership.

        Raises:
            ValueError: If there are no scores of a kind, or some are NaN.
        """
        if not len(members) or not len(others) or np.isnan(members).any() or np.isnan(others).any():
            raise ValueError("an attack needs scores of members and of other records, none of them NaN")
        cuts = np.unique(np.concatenate([members, others]))[::-1]
        true = (len(members) - np.searchsorted(np.sort(members), cuts, side="left")) / len(members)
        false = (len(others) - np.searchsorted(np.sort(others), cuts, side="left")) / len(others)
        return cls(name, np.concatenate([[0.0], false]), np.concatenate([[0.0], true]), len(members), len(others))

    @property
    def area(self) -> float:
        """The area under the curve: the probability that a member scores higher than another; 0.5 is chance."""
        return float(np.trapezoid(self.true_rates, self.false_rates))

    def true_rate(self, false_rate: float = 0.001) -> float:
        """Return the largest true positive rate whose false positive rate is at most this."""
        return float(self.true_rates[self.false_rates <= false_rate].max())

    def as_dict(self) -> dict[str, Any]:
        """Return the summary as plain values."""
        return {
            "attack": self.name,
            "auc": self.area,
            "tpr_at_0.1%_fpr": self.true_rate(0.001),
            "tpr_at_1%_fpr": self.true_rate(0.01),
            "members": self.members,
            "others": self.others,
        }


def loss_attack(model: nn.Module, members: tuple[Tensor, Tensor], others: tuple[Tensor, Tensor]) -> Roc:
    """Attack by the loss alone: smaller speaks for membership.

    Args:
        model: The released model.
        members: Images and labels it was trained on.
        others: Images and labels from the same source that it was not.
    """
    model.eval()
    inside, outside = (-losses(model, *records).cpu().numpy() for records in (members, others))
    return Roc.of("loss threshold", inside, outside)


def lira(
    train: Train,
    images: Tensor,
    labels: Tensor,
    *,
    shadows: int = 16,
    seed: int = 0,
    report: Callable[[int], None] = lambda done: None,
) -> Roc:
    """Attack by the likelihood ratio over shadow models.

    Each of several models is trained on a random half of the records. Each model is then the target of an attacker who
    has all the others: for every record, its confidence in the target is compared with normal distributions fitted to
    its confidences in models that had it, and in models that had not. One variance for all records: with few shadows
    that is steadier.

    Args:
        train: The training under attack.
        images: All records.
        labels: Their labels.
        shadows: How many models, at least 4.
        seed: Makes it repeatable.
        report: Called with the number of models trained.
    """
    if shadows < 4:
        raise ValueError(f"shadows must be at least 4, got {shadows}: with fewer nothing can be fitted")
    random = np.random.default_rng([seed, 2])
    # Every record is in exactly half of the models: none is left without an "in" or an "out".
    order = np.argsort(random.random((shadows, len(labels))), axis=0)
    member = order < shadows // 2
    scores = np.empty((shadows, len(labels)))
    for number in range(shadows):
        inside = torch.from_numpy(np.flatnonzero(member[number])).to(images.device)
        trained = train(images[inside], labels[inside], seed * 1_000_003 + number)
        scores[number] = confidence(trained.model, images, labels).cpu().numpy()
        report(number + 1)
    ratios = np.stack([_ratios(scores, member, target) for target in range(shadows)])
    return Roc.of("LiRA", ratios[member], ratios[~member])


def _ratios(scores: Array, member: NDArray[np.bool_], target: int) -> Array:
    """Return ln p(score | in) − ln p(score | out) of each record in the target model, by the other models."""
    rest = np.arange(len(scores)) != target
    inside, outside = member[rest], ~member[rest]
    others = scores[rest]
    ratios = np.zeros(scores.shape[1])
    for sign, chosen in ((1, inside), (-1, outside)):
        count = np.maximum(chosen.sum(0), 1)
        mean = np.where(chosen, others, 0.0).sum(0) / count
        spread = np.sqrt(max(float(np.where(chosen, (others - mean) ** 2, 0.0).sum() / count.sum()), 1e-12))
        ratios += sign * stats.norm.logpdf(scores[target], mean, spread)
    return ratios
