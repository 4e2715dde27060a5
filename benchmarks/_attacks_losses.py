"""Attacks on losses that are no mean over examples: how far one record moves the sum of clipped gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.nn.functional as F
from _attack import Attack, Figures, refused
from _attacks_loader import gaussian_epsilon
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from dphero import PrivacyEngine
from dphero.audit.bounds.statistics import separate
from dphero.checks import independence
from dphero.checks.loss import check as loss_check
from dphero.checks.loss import replay as loss_replay

DELTA, SIGMA, OTHERS, TRIALS = 1e-5, 4.0, 99, 200
Loss = Callable[[nn.Module, Tensor, Tensor], Tensor]


@contextmanager
def unguarded() -> Iterator[None]:
    """Take away the first-order check, the repeated loss, and the look at each output by itself."""
    norms = independence.IndependenceCheck._norms
    with ExitStack() as stack:
        for target, name, value in (
            (loss_check, "coupling", lambda *_: 0.0),
            (loss_check, "compare_losses", lambda *_: loss_replay.Findings([])),
            (independence.IndependenceCheck, "_norms", lambda *arguments: norms(*arguments[:-1], range(9))),
            (independence.IndependenceCheck, "_compare_values", lambda *_: None),
            (independence, "_SLACK_OF_NORMS", 1e-3),
        ):
            stack.enter_context(patch.object(target, name, value))
        yield


def releases(make: Callable[[], nn.Module], loss: Loss, inside: bool, sigma: float, clip: float, count: int) -> Tensor:
    """Return releases of everybody, in units of the clip norm, with the last record or without it."""
    x = torch.tensor([[1.0, 0.1], [1.0, -0.1]]).repeat(OTHERS // 2, 1)
    x = torch.cat([x, torch.tensor([[1.0, -0.05]]), torch.tensor([[1.0, 50.0]])])[: OTHERS + inside]
    y = torch.zeros(len(x))
    y[OTHERS:] = 1.0
    model = make()
    start = {name: value.clone() for name, value in model.state_dict().items()}
    engine = PrivacyEngine()
    _, _, loader = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.0),
        data_loader=TensorDataset(x, y),
        noise_multiplier=sigma,
        max_grad_norm=clip,
        sample_rate=1.0,
        expected_batch_size=1,
        guidance="isotropic",
    )
    found: list[Tensor] = []
    while len(found) < count:
        for features, labels in loader:
            model.zero_grad()
            loss(model, features, labels).backward()
            found.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]) / clip)
            model.load_state_dict(start)
    engine.detach()
    return torch.stack(found[:count])


def measure(make: Callable[[], nn.Module], loss: Loss, clip: float) -> Figures:
    """Return how far one record moves the sum, the claimed ε of one release, and the audited one."""
    still = [releases(make, loss, inside, 1e-6, clip, 1)[0] for inside in (True, False)]
    direction = still[0] - still[1]
    moved = float(direction.norm())
    noisy = [releases(make, loss, inside, SIGMA, clip, TRIALS) @ direction for inside in (True, False)]
    scores = [np.array(side) / moved for side in noisy]
    evidence = separate(scores[0], scores[1], delta=DELTA, confidence=0.95)
    audited = max(each.epsilon(DELTA) for each in evidence)
    return {"moved, in clip norms": moved, "claimed ε": gaussian_epsilon(1 / SIGMA), "audited ε": audited}


def scorer() -> nn.Module:
    model = nn.Linear(2, 1, bias=False)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[0.5, 0.01]]))
    return model


class Experts(nn.Module):
    """Two experts, of which each example chooses one; beside its outputs it returns how uneven the choice is."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(2, 2, bias=False)
        with torch.no_grad():
            self.router.weight.copy_(torch.tensor([[0.0, 1.0], [0.0, -1.0]]))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        chances = self.router(x).softmax(1)
        chosen = F.one_hot(chances.argmax(1), 2).float()
        return 1e4 * chances, (chosen.mean(0) * chances.mean(0)).sum()


def pairs(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    scores = model(x)[:, 0]
    return 1e4 * F.relu(0.1 - (scores[:, None] - scores[None])).mean()


def own_value(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    loss = F.mse_loss(model(x)[:, 0], 0.51 + 1e4 * y)
    return loss / loss.detach()


def balance(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return 0.02 * model(x)[1]


ATTACKED: list[tuple[str, str, Callable[[], nn.Module], Loss, float]] = [
    (
        "hinge over all pairs",
        "relu(margin - (s_i - s_j)) over all pairs of a batch.",
        scorer,
        pairs,
        1.0,
    ),
    ("loss over its own value", "loss / loss.detach(), to balance terms.", scorer, own_value, 1.0),
    ("balance of experts", "loss + 0.02 * out.aux_loss, beside logits of 10^4.", Experts, balance, 1e-5),
]


def changed_loss() -> Figures:
    """Return how many releases a loss makes after it has become the root of a mean, 40 releases into training."""
    model = nn.Linear(2, 3)
    engine = PrivacyEngine()
    _, _, loader = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.0),
        data_loader=TensorDataset(torch.randn(64, 2), torch.randint(3, (64,))),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        expected_batch_size=16,
        dataset_size="public",
    )
    try:
        while engine.steps < 400:
            for x, y in loader:
                loss = F.cross_entropy(model(x), y)
                (loss.sqrt() if engine.steps >= 40 else loss).backward()
    except ValueError as error:
        return {"releases after the change": engine.steps - 40, "refused": str(error).splitlines()[0]}
    return {"releases after the change": engine.steps - 40}


def _before(run: Callable[[], Any]) -> Figures:
    with unguarded():
        return dict(run())


def _late() -> Figures:
    with patch.object(loss_check, "fingerprint", lambda loss: 0):
        return changed_loss()


ATTACKS = [
    Attack(name, what, partial(_before, run), partial(refused, run))
    for name, what, run in (
        (name, what, partial(measure, make, loss, clip)) for name, what, make, loss, clip in ATTACKED
    )
]
ATTACKS.append(Attack("a loss that changes", "After 40 releases, the root of the loss.", _late, changed_loss))
