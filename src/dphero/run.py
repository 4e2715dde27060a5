"""One model in private training: from the loader's lots to the optimizer's gradients."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dphero.lot_sum import LotSum
from dphero.mechanism import Mechanism
from dphero.sampling import Lots, Sampler
from dphero.tape import GradientBatch
from dphero.taps import Taps

__all__ = ["Run"]


class Run:
    """Ties taps, lots, mechanism and optimizers together.

    Each lot is released once, at the end of the backward pass of its last physical batch, and written to
    the parameters' ``.grad``; no other gradient may reach them.
    """

    def __init__(
        self,
        *,
        module: nn.Module,
        optimizers: list[Optimizer],
        parameters: dict[str, nn.Parameter],
        mechanism: Mechanism,
        lots: Lots,
        sampler: Sampler,
        key: int | None,
        mean: bool,
    ) -> None:
        self.module, self.optimizers, self.parameters = module, optimizers, parameters
        self.mechanism, self.lots, self.sampler, self.key, self._mean = mechanism, lots, sampler, key, mean
        self.lot_sum = LotSum(mechanism.clipping)
        self.taps = Taps(
            module,
            parameters,
            geometry=lambda: mechanism.norm_geometry,
            rows=self._rows,
            consume=self._consume,
        )
        self._handed: dict[str, Tensor] = {}
        self._hooks = [optimizer.register_step_pre_hook(self._before_step) for optimizer in optimizers]
        self._guards = [parameter.register_hook(_Guard(self.taps, name)) for name, parameter in parameters.items()]

    # -- one lot ------------------------------------------------------------------------------------------

    def before_lot(self) -> None:
        """Called by the loader before it draws a lot."""
        if not self.lots.released:
            raise RuntimeError(
                f"lot {self.lots.next - 1} was drawn but never back-propagated. Every lot that is drawn must be a step, "
                "whatever its loss: skipping steps by looking at the data is not private. (To evaluate, iterate over "
                "an ordinary loader.)"
            )
        self.taps.clear()
        self.lot_sum.clear()
        self.mechanism.before_lot()

    def _rows(self) -> int:
        batch = self.lots.current
        if batch is None:
            raise RuntimeError(
                "the private model was called in training mode without a batch of the private loader; iterate over the "
                "loader that make_private returned, or use `with engine.paused():` for other data"
            )
        return batch.rows

    def _consume(self, gradients: GradientBatch) -> None:
        lots, batch = self.lots, self.lots.current
        assert batch is not None
        lots.captured += gradients.rows
        if lots.captured > lots.delivered:
            raise RuntimeError(
                f"{lots.captured} rows were back-propagated, but only {lots.delivered} of this lot were handed out: an "
                "example would count twice. Add up the losses and call backward() once per batch."
            )
        self.lot_sum.add(gradients, batch.real, gradients.rows if self._mean else 1)
        if batch.last:
            self._hand_over(self.mechanism.release(self.lot_sum.sums, self.lot_sum.count))
            lots.released = True
            self.lot_sum.clear()

    def _hand_over(self, gradients: dict[str, Tensor]) -> None:
        """Put the private gradient where the optimizer looks; several lots add up until ``zero_grad``."""
        for name, parameter in self.parameters.items():
            if parameter.grad is not None and parameter.grad is self._handed.get(name):
                parameter.grad.add_(gradients[name])
            else:
                parameter.grad = gradients[name]
                self._handed[name] = gradients[name]

    def _before_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if any(callable(value) for value in (*args, *kwargs.values())):
            raise ValueError(
                "a closure would evaluate the loss inside step(), more than once for some optimizers; call backward() "
                "yourself and step() without arguments"
            )
        if not self.lots.released:
            batch = self.lots.current
            if batch is not None and batch.last:
                raise RuntimeError(
                    "step() was called for a lot that was not back-propagated through the private model; was the model "
                    "in training mode (model.train()), and called on the batch of the private loader?"
                )
            for parameter in self.parameters.values():  # more physical batches of this lot to come
                parameter.grad = None

    # -- life ---------------------------------------------------------------------------------------------

    def detach(self) -> None:
        """Take everything away again."""
        self.taps.detach()
        for handle in (*self._hooks, *self._guards):
            handle.remove()

    def state_dict(self) -> dict[str, Any]:
        """Return everything that the coming steps depend on."""
        if not self.lots.released:
            raise RuntimeError("a lot is under way; save after optimizer.step(), when its last batch is done")
        return {
            "module": self.module.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "mechanism": self.mechanism.state_dict(),
            "next_lot": self.lots.next,
            "key": None if self.key is None else str(self.key),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state."""
        if len(state["optimizers"]) != len(self.optimizers):
            raise ValueError("the checkpoint was made with another number of optimizers")
        self.mechanism.load_state_dict(state["mechanism"])
        self.module.load_state_dict(state["module"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        if (state["key"] is None) != (self.key is None):
            raise ValueError("the checkpoint and this engine disagree on secure=")
        if state["key"] is not None:
            self.key = int(state["key"])
            self.sampler.key = self.key
        self.lots.next = int(state["next_lot"])
        self.lots.abandon()
        self.lot_sum.clear()
        self.taps.clear()


class _Guard:
    """Watches a parameter: no gradient but the private one may reach it."""

    def __init__(self, taps: Taps, name: str) -> None:
        self._taps, self._name = taps, name

    def __call__(self, gradient: Tensor) -> Tensor:
        if self._taps.is_paused:
            return torch.zeros_like(gradient)
        raise RuntimeError(
            f"a gradient that is not private reached parameter {self._name!r}. The model must be in training mode, and "
            "its parameters may enter the loss only through the model's forward (use the optimizer's weight_decay "
            "instead of a penalty)."
        )
