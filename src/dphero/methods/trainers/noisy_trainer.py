"""The base of methods that clip, add noise and charge in a way of their own: what all of them share."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from dphero.accounting import Event
from dphero.checks.first_batch import probe
from dphero.checks.modules import require_private_modules, trained_parameters
from dphero.geometry.geometry import identity
from dphero.gradients.batch import GradientBatch
from dphero.hooks.taps import Taps
from dphero.mechanism.clipping import Clipping
from dphero.mechanism.lot_sum import LotSum
from dphero.methods.card import Card
from dphero.methods.task import Task
from dphero.methods.trainers.base_trainer import OwnTrainer, key_of
from dphero.noise import FastNoise, SecureNoise
from dphero.sampling import PoissonSampler, Sampler

_CHUNK = 2048  # examples that pass through the model at a time
_SEEDED = "The random seed was chosen by the user; the guarantee holds only while it stays secret."


def lot_key(task: Task) -> int | None:
    """Return the secret key of the lots; ``None`` for fresh randomness at every lot.

    Raises:
        ValueError: If a seed and ``secure`` are both asked for.
    """
    recipe = task.recipe
    if recipe.secure and recipe.seed is not None:
        raise ValueError("--secure draws from the operating system; it takes no --seed")
    return None if recipe.secure else key_of(recipe.seed, "lots")


def poisson(task: Task) -> PoissonSampler:
    """Return the sampler of the recipe's Poisson lots."""
    return PoissonSampler(len(task.train), task.sample_rate, lot_key(task))


class NoisyTrainer(OwnTrainer):
    """Per-example gradients through the core's taps; noise, lots and ledger that a resumed run goes on with.

    Attributes:
        accountants: Those that can price the method; the first one holds unless the recipe names another.
        noise: Where noise comes from.
        sampler: Draws the lots.
        parameters: What is trained, by name.
        size: Number of trained coordinates.
    """

    accountants: ClassVar[tuple[str, ...]] = ("pld",)

    def __init__(self, card: Card, task: Task, sampler: Sampler) -> None:
        super().__init__(card, task)
        recipe = task.recipe
        for name in ("clipping", "guidance", "mechanism"):
            if getattr(recipe, name) is not None:
                raise ValueError(f"method {card.name!r} has a {name} of its own: leave --{name} out")
        if recipe.accountant not in ("pld", *self.accountants):  # pld is the recipe's default
            known = " or ".join(self.accountants)
            raise ValueError(f"method {card.name!r} is priced by {known}, not by accountant {recipe.accountant!r}")
        if recipe.epsilon is None and recipe.noise_multiplier is None:
            raise ValueError(f"method {card.name!r} is private: give --epsilon or --noise-multiplier")
        require_private_modules(self.module)
        self.noise = SecureNoise() if recipe.secure else FastNoise(recipe.seed)
        self.sampler = sampler
        self.parameters = trained_parameters(self.module, [self.optimizer])
        self.size = sum(parameter.numel() for parameter in self.parameters.values())
        self.chunk = recipe.physical_batch if isinstance(recipe.physical_batch, int) else _CHUNK
        shapes = {name: identity(tuple(parameter.shape)) for name, parameter in self.parameters.items()}
        self._rows, self._received = 0, list[GradientBatch]()
        self._taps = Taps(
            self.module,
            self.parameters,
            geometry=lambda: shapes,
            rows=lambda: self._rows,
            consume=self._received.append,
            examine=probe,
        )

    @property
    def accountant(self) -> str:
        """How the ledger is priced."""
        asked = self.task.recipe.accountant
        return asked if asked in self.accountants else self.accountants[0]

    @property
    def notes(self) -> tuple[str, ...]:
        """Remarks for the privacy statement."""
        return (*super().notes, _SEEDED) if self.noise.seeded else super().notes

    # -- gradients ----------------------------------------------------------------------------------------

    def rows(self, lot: int) -> Tensor:
        """Return the rows of the examples of a lot."""
        return torch.from_numpy(self.sampler.draw(lot))

    def gradients(self, rows: Tensor) -> Iterator[tuple[Tensor, GradientBatch, Tensor]]:
        """Yield rows, the gradients of each of their own losses, and these losses, in parts that fit in memory."""
        inputs, labels = self.task.train.tensors
        for part in rows.split(self.chunk) if len(rows) else ():
            index = part.to(self.task.device)
            self._rows = len(part)
            losses = F.cross_entropy(self.module(inputs[index]), labels[index], reduction="none")
            losses.sum().backward()
            yield part, self._received.pop(), losses.detach()
        assert not self._received

    def clipped_sum(self, rows: Tensor, clipping: Clipping) -> tuple[dict[str, Tensor], Tensor, float | None]:
        """Return the clipped sum over rows, their mean loss, and the share of them that was clipped."""
        total, loss = LotSum(clipping), torch.zeros((), device=self.task.device)
        for part, batch, losses in self.gradients(rows):
            total.add(batch, len(part), 1.0)
            loss = loss + losses.sum()
        clipped = total.diagnostics.clipped / len(rows) if len(rows) else None
        return total.sums, loss / max(len(rows), 1), clipped

    # -- noise --------------------------------------------------------------------------------------------

    @torch.no_grad()
    def release(self, sums: Mapping[str, Tensor], std: float, event: Event | None) -> None:
        """Charge the ledger, add Gaussian noise to a sum, and leave it, divided by B, in the parameters' ``.grad``.

        Args:
            sums: The clipped sum by parameter; a name that is missing stands for zero, and gets noise.
            std: σ C.
            event: What it costs; ``None`` where an event that covers it was recorded before.
        """
        if event is not None:
            self._ledger.record(event)
        assert self._ledger.steps, "noise is added only under an event"
        lot = self.task.recipe.lot
        gradients = {name: torch.empty_like(parameter) for name, parameter in self.parameters.items()}
        self.draw(list(gradients.values()), std / lot, torch.tensor(lot), *sums.values())
        for name, part in sums.items():
            gradients[name].add_(part, alpha=1 / lot)
        self.hand_over(gradients)

    def draw(self, tensors: Sequence[Tensor], std: float, *values: Tensor) -> None:
        """Overwrite tensors with noise that is bound to values: with one seed, other values never have the same."""
        bound_to = [torch.tensor(self.step, device="cpu"), *(value.cpu() for value in values)]
        self.noise.fill(tensors, std, self.noise.last_release + 1, bound_to=bound_to)

    def hand_over(self, gradients: Mapping[str, Tensor]) -> None:
        """Put a private gradient where the optimizer looks."""
        for name, parameter in self.parameters.items():
            parameter.grad = gradients[name]

    def signal_to_noise(self, std: float) -> float | None:
        """√(‖g̃‖² B² / (d std²) − 1), from the released gradient alone; at every tenth step."""
        if self.step % 10:
            return None
        norms = torch._foreach_norm([parameter.grad for parameter in self.parameters.values()])  # type: ignore[misc]
        energy = torch.stack(norms).square().sum().item() * self.task.recipe.lot**2
        return math.sqrt(max(energy / (self.size * std**2) - 1, 0.0))

    # -- life ---------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Return what a resumed training needs: the keys of noise and lots among it."""
        return {**super().state(), "sampler": self.sampler.state_dict(), "noise": self.noise.state_dict()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a state."""
        super().restore(state)
        self.sampler.load_state_dict(state["sampler"])
        self.noise.load_state_dict(state["noise"])

    def close(self) -> None:
        """Leave the module as an ordinary one."""
        self._taps.detach()
