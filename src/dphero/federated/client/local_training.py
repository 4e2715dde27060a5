"""A round of training at a client: the engine's trainer, started anew from the global model.

FedProx and SCAFFOLD change the private gradient before the optimizer uses it, by things that were released before: the
weights, and control variates. That is post-processing, free of charge.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from dphero.accounting import AdaptiveGaussian, Ledger, NoNoise, PoissonGaussian
from dphero.federated.requests import Request
from dphero.methods import Task, Trainer, make
from dphero.methods.on_engine.sgd import SGDTrainer
from dphero.methods.trainers.engine_trainer import PrivateTrainer

_ADD_UP = (PoissonGaussian, AdaptiveGaussian, NoNoise)
"""Events of one round that are no concern of another's. (A shuffled epoch is: a second one of its number is free.)"""


def train_round(
    task: Task, sigma: float | None, request: Request, own: Mapping[str, Tensor], controls: str
) -> tuple[Ledger, int, dict[str, Tensor] | None]:
    """Train for a round; the task's module then holds the result.

    With SCAFFOLD, the client's new control variate is, as in its paper,

    - option II (``controls="update"``): c_i − c + (w_global − w) / (steps · lr), a function of what is released anyway;
    - option I (``controls="gradient"``): a private gradient at the global model, one more release, in the ledger.

    Args:
        task: What to train; its module holds the global model.
        sigma: The noise multiplier, or ``None`` without privacy.
        request: What the server asked for.
        own: SCAFFOLD's control variate of this client.
        controls: Where the next one comes from.

    Returns:
        What was released, in how many steps the model was trained, and the client's new control variate.
    """
    start = {name: value.detach().clone() for name, value in task.module.named_parameters()}
    before, found = Ledger(), None
    if request.control is not None and controls == "gradient":
        before, found = _gradient(task, sigma, start)
    released, steps = _trained(task, sigma, lambda name, value: _pull(request, own, start, name, value))
    if request.control is not None and controls == "update":
        scale = 1 / (steps * task.recipe.lr)
        moved = {name: (start[name] - value.detach()) * scale for name, value in task.module.named_parameters()}
        found = {name: own[name] - request.control[name] + moved[name].cpu() for name in moved}
    for event, count in released:
        before.record(event, count)
    return before, steps, found


def _pull(
    request: Request, own: Mapping[str, Tensor], start: Mapping[str, Tensor], name: str, value: Tensor
) -> Tensor | None:
    """What is added to the gradient of a parameter."""
    found = None
    if request.proximal_mu:
        found = request.proximal_mu * (value - start[name])
    if request.control is not None:
        correction = (request.control[name] - own[name]).to(value)
        found = correction if found is None else found + correction
    return found


def _gradient(task: Task, sigma: float | None, start: Mapping[str, Tensor]) -> tuple[Ledger, dict[str, Tensor]]:
    """Release one gradient at the global model: one plain step of length 1, and back."""
    once = task.recipe.with_(lr=1.0, momentum=0.0, optimizer="sgd", seed=_other(task.recipe.seed))
    released, _ = _trained(replace(task, recipe=once), sigma, lambda name, value: None, most=1)
    found = {name: (start[name] - value.detach()).cpu() for name, value in task.module.named_parameters()}
    with torch.no_grad():
        for name, value in task.module.named_parameters():
            value.copy_(start[name])
    return released, found


def _other(seed: int | None) -> int | None:
    """Another seed: its noise must not be that of the training."""
    return None if seed is None else seed ^ 0x5CAFF01D


def _trained(task: Task, sigma: float | None, pull: Any, most: int | None = None) -> tuple[Ledger, int]:
    """Train the task's module; return what was released, in how many steps."""
    task = replace(task, recipe=task.recipe.with_(epsilon=None, noise_multiplier=sigma))
    trainer = make(task.recipe.method, task.recipe.options).start(task)
    try:
        _require_engine(trainer, task)
        with _pulled(trainer, task.module, pull):
            for _ in trainer.prepare():
                pass
            while not trainer.finished and (most is None or trainer.step < most):
                trainer.advance()
        released, steps = trainer.ledger, trainer.step
        if other := [event for event in released.counts if not isinstance(event, _ADD_UP)]:
            raise ValueError(f"{other[0]} does not simply add up over rounds: take --method dp-hero or dp-sgd")
        return released, steps
    finally:
        trainer.close()


def _require_engine(trainer: Trainer, task: Task) -> None:
    """Refuse a method whose rounds are not independent trainings of the model that the server averages."""
    if not isinstance(trainer, PrivateTrainer | SGDTrainer) or trainer.module is not task.module:
        raise ValueError(
            f"method {task.recipe.method!r} cannot train clients: it has steps or networks of its own, which do not go "
            "on from round to round. Take one that trains the model itself with the privacy engine, such as dp-hero or "
            "dp-sgd"
        )


@contextmanager
def _pulled(trainer: PrivateTrainer | SGDTrainer | Any, module: nn.Module, pull: Any) -> Iterator[None]:
    """Add what ``pull`` says to every gradient, in place, just before the optimizer uses it."""

    @torch.no_grad()
    def before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        for name, parameter in module.named_parameters():
            added = pull(name, parameter)
            if added is not None and parameter.grad is not None:
                parameter.grad.add_(added)

    hook = trainer.optimizer.register_step_pre_hook(before_step)
    try:
        yield
    finally:
        hook.remove()
