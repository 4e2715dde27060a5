"""What reaches the optimizers: the private gradient, and no other."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from dphero.checks.optimizers import with_closure_evaluated
from dphero.sampling import Lots


def require_free(module: nn.Module) -> None:
    """Raise ``ValueError`` if a parameter of the module is being trained privately already."""
    for name, parameter in module.named_parameters():
        if any(isinstance(hook, _Guard) for hook in (parameter._backward_hooks or {}).values()):
            raise ValueError(
                f"this module (parameter {name!r}) is already being trained privately: a second engine would charge "
                "and clip apart from the first. detach() the engine that holds it first."
            )


class PrivateGradients:
    """Hands each release to the optimizers; guards see to it that they step with nothing else.

    Args:
        parameters: Name to parameter.
        optimizers: What steps them.
        lots: Where training stands.
        is_paused: Tells whether the model runs on other data, with ordinary gradients.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        optimizers: Iterable[Optimizer],
        lots: Lots,
        is_paused: Callable[[], bool],
    ) -> None:
        self._parameters, self._optimizers, self._lots, self._is_paused = parameters, list(optimizers), lots, is_paused
        self._names = {id(parameter): name for name, parameter in parameters.items()}
        # the private gradients, as they were put into .grad; they live no longer than the user keeps them there
        self._handed: dict[str, weakref.ref[Tensor]] = {}
        self._waiting: set[Optimizer] = set()  # those that have not stepped since the latest release
        self._hooks: list[Any] = []
        for optimizer in self._optimizers:
            self._hooks.append(optimizer.register_step_pre_hook(self._before_step))
            self._hooks.append(optimizer.register_step_post_hook(self._after_step))
        for name, parameter in parameters.items():
            self._hooks.append(parameter.register_hook(_Guard(is_paused, name)))

    def remove(self) -> None:
        """Take all guards away."""
        for handle in self._hooks:
            handle.remove()

    def hand_over(self, gradients: Mapping[str, Tensor]) -> None:
        """Put the private gradient where the optimizers look; several lots add up until ``zero_grad``."""
        self._waiting = set(self._optimizers)
        for name, parameter in self._parameters.items():
            if not parameter.requires_grad:  # frozen since
                parameter.grad = None
            elif parameter.grad is not None and self._holds_private(name):
                parameter.grad.add_(gradients[name])
            else:
                self._put(name, gradients[name])

    @contextmanager
    def set_aside(self) -> Iterator[None]:
        """Let there be no gradients at the beginning of a ``with`` block; those that arise within are gone after it."""
        before = {name: parameter.grad for name, parameter in self._parameters.items()}
        for parameter in self._parameters.values():
            parameter.grad = None
        try:
            yield
        finally:
            for name, parameter in self._parameters.items():
                parameter.grad = before[name]

    # -- what a checkpoint keeps of them ------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the gradients that optimizers have yet to step with, and the numbers of these optimizers."""
        held = {name: self._parameters[name].grad for name in self._handed if self._holds_private(name)}
        waiting = [number for number, optimizer in enumerate(self._optimizers) if optimizer in self._waiting]
        return {"gradients": held if self._waiting else {}, "waiting": waiting}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Put the gradients of a checkpoint in place."""
        self._handed.clear()
        saved = {name: gradient.to(self._parameters[name]) for name, gradient in state["gradients"].items()}
        for name, parameter in self._parameters.items():
            parameter.grad = None
            if name in saved:
                self._put(name, saved[name])
        self._waiting = {self._optimizers[number] for number in state["waiting"]}

    def _put(self, name: str, gradient: Tensor) -> None:
        parameter = self._parameters[name]
        parameter.grad = gradient
        self._handed[name] = weakref.ref(parameter.grad)

    def _holds_private(self, name: str) -> bool:
        """Tell whether a parameter's gradient is the one that was put there."""
        gradient, handed = self._parameters[name].grad, self._handed.get(name)
        return gradient is not None and handed is not None and handed() is gradient

    # -- before and after each step() ---------------------------------------------------------------------

    def _before_step(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        if self._is_paused():
            raise RuntimeError("step() inside `with engine.paused():` would train on gradients without noise; leave it")
        arguments = with_closure_evaluated(optimizer, args, kwargs)
        batch = self._lots.pending
        if batch is not None and not self._lots.captured:
            raise RuntimeError(
                "step() was called for a batch that was not back-propagated through the private model; was the model "
                "in training mode (model.train()), and called on the batch of the private loader?"
            )
        if batch is not None and not batch.last:  # more physical batches of this lot to come: a step of nothing
            for parameter in self._parameters.values():
                parameter.grad = None
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._require_private(parameter)
        return arguments

    def _require_private(self, parameter: Tensor) -> None:
        name = self._names.get(id(parameter))
        if name is not None and self._holds_private(name):
            return
        if name is None:
            raise RuntimeError(
                f"the optimizer holds a gradient for a parameter of shape {tuple(parameter.shape)} that was not there, "
                "or frozen, when the model was made private. detach() the engine, then make the model private anew."
            )
        raise RuntimeError(
            f"parameter {name!r} holds a gradient that is not the private one. Call zero_grad(); to change the "
            "private gradient, change it in place."
        )

    def _after_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._waiting.discard(optimizer)


class _Guard:
    """Watches a parameter: no gradient but the private one may reach it."""

    def __init__(self, is_paused: Callable[[], bool], name: str) -> None:
        self._is_paused, self._name = is_paused, name

    def __call__(self, gradient: Tensor) -> Tensor:
        if self._is_paused():
            return gradient
        raise RuntimeError(
            f"a gradient that is not private reached parameter {self._name!r}. The model must be in training mode, and "
            "its parameters may enter the loss only through the model's forward (use the optimizer's weight_decay "
            "instead of a penalty)."
        )
