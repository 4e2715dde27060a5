"""Gradient canaries (white box): the attacker chose each canary's gradient, and sees every released gradient."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from dphero.audit.bounds.claims import claim_of_ledger
from dphero.audit.settings import Settings
from dphero.audit.trainings.one_run import Scored


def _plain(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.1)


@dataclass(eq=False)
class GradientCanaries:
    """White box: canaries with orthogonal gradients in one linear layer, scored by every released gradient.

    Canary j plants C · 100 u vᵀ, from its own pair of the vectors of two orthonormal bases. The attacker knows the
    other records: v are directions in which they move the layer least. The score is the sum over steps of
    ⟨A⁻² g̃_t, u vᵀ⟩, A being the geometry of the step's noise: all of it is public but g̃, which was released.

    Args:
        settings: How the engine is made.
        model: The model.
        images: The data: what the model takes.
        labels: Their labels.
        canaries: m; at most :func:`room`.
        sample_rate: q, also of the canaries.
        steps: Length of the training.
        optimizer: Makes the optimizer of a module; default plain SGD.
        physical_batch: The most examples per forward pass; default whole lots.
        report: Called with the number of steps taken.
    """

    settings: Settings
    model: nn.Module
    images: Tensor
    labels: Tensor
    canaries: int
    sample_rate: float
    steps: int
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = _plain
    physical_batch: int | Literal["auto"] | None = None
    report: Callable[[int], None] = lambda done: None

    def __call__(self, included: NDArray[np.bool_], seed: int, /) -> Scored:
        """Train once."""
        module = _Ported(copy.deepcopy(self.model))
        rows, columns = self._directions(module, seed)
        inside = torch.from_numpy(included).to(rows.device)
        settings, optimizer = self.settings, self.optimizer(module)
        engine, loader = settings.attach(
            module,
            optimizer,
            self._records(rows[inside], columns[inside], settings.max_grad_norm),
            seed=seed,
            sampling="poisson",
            sample_rate=self.sample_rate,
            expected_batch_size=self.sample_rate * (len(self.images) + self.canaries / 2),
            physical_batch_size=self.physical_batch,
        )
        scores = torch.zeros(self.canaries, dtype=torch.float64, device=rows.device)
        while engine.steps < self.steps:
            for images, labels, ordinary, planted, readout in loader:
                geometry, before = engine._attached.mechanism.noise_geometry[module.weight_name], engine.steps
                outputs, ports = module(images, planted)
                entropy = F.cross_entropy(outputs, labels, reduction="none") * ordinary
                (entropy + (ports * readout).sum(1)).sum().backward()
                if engine.steps == before:  # a lot may come in several physical batches
                    continue
                assert module.layer.weight.grad is not None
                seen = geometry.whiten(geometry.whiten(module.layer.weight.grad.double()))
                scores += ((rows.double() @ seen) * columns.double()).sum(1)
                optimizer.step()
                optimizer.zero_grad()
                self.report(engine.steps)
                if engine.steps == self.steps:
                    break
        ledger, sound = engine.ledger.copy(), settings.mechanism != "published"  # whose price is no curve
        claim = (lambda delta: claim_of_ledger(ledger, delta)) if sound else None
        sigma = settings.noise_multiplier
        return Scored(scores.cpu().numpy(), lambda delta: engine.price(delta).epsilon, claim, True, sigma)

    def _directions(self, module: _Ported, seed: int) -> tuple[Tensor, Tensor]:
        """Return u and v of each canary: u from a random basis, v from that of the layer's inputs, no pair twice."""
        outputs, inputs = module.layer.weight.shape
        if self.canaries > outputs * inputs:
            raise ValueError(
                f"{self.canaries} canaries do not fit into the largest linear layer, which has {outputs * inputs} "
                "weights: take fewer"
            )
        generator = torch.Generator().manual_seed(seed)
        rows = torch.linalg.qr(torch.randn(outputs, outputs, generator=generator))[0].to(self.images)
        columns = torch.linalg.eigh(self._moments(module))[1].mT.to(rows)  # what the records move least comes first
        each = torch.arange(self.canaries, device=rows.device)
        return rows[each % outputs], columns[each // outputs]

    @torch.no_grad()
    def _moments(self, module: _Ported) -> Tensor:
        """Return Σ a aᵀ over the inputs a that the layer gets of the records, at the initial weights."""
        total = torch.zeros(module.layer.in_features, module.layer.in_features, dtype=torch.float64)
        total = total.to(self.images.device)

        def look(layer: nn.Module, arguments: tuple[Tensor, ...]) -> None:
            inputs = arguments[0].detach().reshape(-1, total.shape[0]).double()
            total.add_(inputs.mT @ inputs)

        hook = module.layer.register_forward_pre_hook(look)
        for part in self.images.split(500):
            module.model(part)
        hook.remove()
        return total

    def _records(self, rows: Tensor, columns: Tensor, clip_norm: float) -> TensorDataset:
        """Return the data, then the canaries: images that count for nothing, inputs and read-outs that do."""
        data, more = len(self.images), len(rows)
        blank = torch.rand(more, *self.images.shape[1:], generator=torch.Generator().manual_seed(0)).to(self.images)
        return TensorDataset(
            torch.cat([self.images, blank]),
            torch.cat([self.labels, self.labels.new_zeros(more)]),
            torch.cat([rows.new_ones(data), rows.new_zeros(more)]),
            torch.cat([columns.new_zeros(data, columns.shape[1]), 100 * columns]),
            torch.cat([rows.new_zeros(data, rows.shape[1]), clip_norm * rows]),
        )


def room(model: nn.Module) -> int:
    """Return how many gradient canaries fit into a model: the weights of its largest linear layer; 0 without one."""
    return max((layer.weight.numel() for layer in _linear(model).values()), default=0)


def _linear(model: nn.Module) -> dict[str, nn.Linear]:
    layers = {path: layer for path, layer in model.named_modules() if type(layer) is nn.Linear}
    return {path: layer for path, layer in layers.items() if layer.weight.requires_grad}


class _Ported(nn.Module):
    """A model and, beside it, its largest linear layer on an input of its own."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        linear = _linear(model)
        if not linear:
            raise ValueError("the model has no linear layer that is trained: gradient canaries have no place in it")
        self._path = max(linear, key=lambda path: linear[path].weight.numel())
        self.weight_name = f"model.{self._path}.weight" if self._path else "model.weight"

    @property
    def layer(self) -> nn.Linear:
        """The layer that carries the canaries."""
        found = self.model.get_submodule(self._path)
        assert isinstance(found, nn.Linear)
        return found

    def forward(self, images: Tensor, planted: Tensor) -> tuple[Tensor, Tensor]:
        return self.model(images), self.layer(planted)
