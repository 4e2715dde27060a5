"""Attacks on noise, checkpoints and limits."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from _attack import Attack, Figures, refused
from scipy import stats
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from dphero import BudgetExhausted, PrivacyEngine, checkpoint, engine
from dphero.mechanism import release as mechanism
from dphero.mechanism.clipped_sum import ClippedSum
from dphero.mechanism.release import Mechanism
from dphero.noise import FastNoise, key_stream
from dphero.noise import box_muller as pairs

LOT, DELTA = 12.0, 1e-5


def data(shift: float = 0.0) -> TensorDataset:
    """Return records with a label that their features tell."""
    x = torch.randn(60, 6, generator=torch.Generator().manual_seed(0))
    return TensorDataset(x + shift, x[:, :3].argmax(1))


class Run:
    """A small private training."""

    def __init__(self, engine: PrivacyEngine | None = None, source: Any = None, **options: Any) -> None:
        torch.manual_seed(0)
        self.module = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
        self.engine = engine or PrivacyEngine(accountant="rdp")
        self.optimizer = torch.optim.SGD(self.module.parameters(), lr=0.5)
        settings: dict[str, Any] = {"noise_multiplier": 1.0, "max_grad_norm": 1.0, "expected_batch_size": LOT}
        _, _, self.loader = self.engine.make_private(
            module=self.module, optimizer=self.optimizer, data_loader=source or data(), dataset_size=60,
            **{**settings, **options},
        )  # fmt: skip

    def steps(self, count: int, sign: float = 1.0) -> list[Tensor]:
        """Train for some lots; return what was released."""
        released, stop = [], self.engine.steps + count
        while self.engine.steps < stop:
            for x, y in self.loader:
                self.optimizer.zero_grad()
                (sign * F.cross_entropy(self.module(x), y)).backward()
                self.optimizer.step()
                released.append(torch.cat([p.grad.flatten() for p in self.module.parameters() if p.grad is not None]))
                if self.engine.steps == stop:
                    break
        return released


@contextmanager
def without(*guards: tuple[Any, str, Any]) -> Iterator[None]:
    """Take guards away, inside a ``with`` block."""
    with ExitStack() as stack:
        for owner, name, instead in guards:
            stack.enter_context(patch.object(owner, name, instead))
        yield


def both(attack: Callable[[], Figures], *guards: tuple[Any, str, Any]) -> dict[str, Callable[[], Figures]]:
    """Return the attack with its guards taken away, and as dphero is."""

    def before() -> Figures:
        with without(*guards):
            return attack()

    return {"before": before, "after": attack}


# -- noise ------------------------------------------------------------------------------------------------------------


def tails() -> Figures:
    """Draw with the most extreme words there are, and compute how often one record would be seen beyond."""

    def smallest(self: Any, *place: Any) -> None:
        self._words[0].zero_()
        self._words[1].fill_(1 << 30)

    least = (key_stream._Lane, "_second_word", lambda self, code, pair: 2.0**-65)
    noise = torch.empty(128)
    with without((key_stream._Lane, "_encrypt", smallest), least):
        FastNoise().fill([noise], 1.0, 0)
    end, sigma, rate, steps = float(noise.max()), 0.5, 0.001, 20_000
    return {"noise ends at": end, "impossible without the record": float(rate * steps * stats.norm.sf(end - 1 / sigma))}


def lattice() -> Figures:
    """Guess from the grid of a release in bfloat16 whether a sum was there."""
    right = 0
    for trial in range(20):
        module = nn.Sequential(nn.Linear(6, 400), nn.Tanh(), nn.Linear(400, 3)).bfloat16()
        private, there, value = PrivacyEngine(), trial % 2 == 0, 0.3 / LOT
        private.make_private(
            module=module, optimizer=torch.optim.SGD(module.parameters(), lr=0.1), data_loader=data(),
            noise_multiplier=1.0, max_grad_norm=1.0, expected_batch_size=LOT, dataset_size=60, guidance="isotropic",
        )  # fmt: skip
        it = private._attached.mechanism
        sums = {name: torch.full(p.shape, value * there) for name, p in module.named_parameters()}
        released = it.release(ClippedSum(sums, bound=1.0, geometry=it.norm_geometry, divisor=LOT))
        flat = torch.cat([part.flatten() for part in released.values()]).double()
        noise = (flat[flat.abs() < value / 8] - value) * 2**13
        right += bool(((noise - noise.round()).abs() < 0.1).double().mean() > 0.6) == there
    return {"right guesses of 20": right}


def difference(first: list[Tensor], second: list[Tensor], sigma: float) -> Figures:
    """Return how much noise is in the difference of two runs; 1.41 if each has its own."""
    parts = [one - other for one, other in zip(first, second, strict=True) if not torch.equal(one, other)]
    return {"noise in the difference": min(float(part.square().mean().sqrt()) for part in parts) * LOT / sigma}


def continued_twice() -> Figures:
    """Continue one checkpoint with two losses, and subtract."""
    options: dict[str, Any] = {"guidance": "isotropic", "noise_multiplier": 10.0}
    with tempfile.TemporaryDirectory() as folder:
        run, path = Run(**options), Path(folder) / "run.pt"
        run.steps(2)
        run.engine.save(path)
        released = []
        for sign in (1.0, -1.0):
            again = Run(**options)
            again.engine.load(path)
            released.append(again.steps(2, sign))
    return difference(*released, 10.0)


def one_seed_twice() -> Figures:
    """Train on two data sets with one seed, and subtract."""
    options: dict[str, Any] = {"guidance": "isotropic", "noise_multiplier": 10.0, "seed": 1}
    return difference(Run(**options).steps(2), Run(source=data(0.5), **options).steps(2), 10.0)


# -- limits -----------------------------------------------------------------------------------------------------------


def reached(run: Run) -> Figures:
    """Train on until that is refused, for 20 releases at most."""
    with suppress(BudgetExhausted):
        run.steps(20)
    return {"limit": 5.0, "reached": run.engine.get_epsilon(DELTA)}


def detached() -> Figures:
    """Set a limit, detach, train again."""
    run = Run()
    run.engine.limit(5.0, DELTA)
    run.steps(1)
    run.engine.detach()
    return reached(Run(run.engine))


def loaded() -> Figures:
    """Set a limit, save, load into an engine without one."""
    with tempfile.TemporaryDirectory() as folder:
        run, path = Run(), Path(folder) / "run.pt"
        run.engine.limit(5.0, DELTA)
        run.steps(1)
        run.engine.save(path)
        again = Run()
        again.engine.load(path)
    return reached(again)


# -- checkpoints ------------------------------------------------------------------------------------------------------


def flipped_bit() -> Figures:
    """Flip one bit of a saved ledger, and go on."""
    with tempfile.TemporaryDirectory() as folder:
        run, path = Run(noise_multiplier=3.0), Path(folder) / "run.pt"
        run.steps(20)
        run.engine.save(path)
        contents = bytearray(path.read_bytes())
        contents[contents.index(b'"noise_multiplier": 3.0') + 20] ^= 1 << 2
        path.write_bytes(contents)
        again = Run(noise_multiplier=3.0)

        def load() -> Figures:
            again.engine.load(path)
            return {"spent": run.engine.get_epsilon(DELTA), "printed": again.engine.get_epsilon(DELTA)}

        found = refused(load)
        return {
            name: value if name != "refused" else value.replace(f"{path}", "run.pt") for name, value in found.items()
        }


def other_data() -> Figures:
    """Continue a checkpoint on other data."""
    with tempfile.TemporaryDirectory() as folder:
        run, path = Run(), Path(folder) / "run.pt"
        run.steps(2)
        run.engine.save(path)
        return refused(lambda: Run(source=data(0.5)).engine.load(path) or None)


def nothing(*arguments: Any) -> None:
    """A guard that guards nothing."""


ATTACKS = [
    Attack("tails", "reads outputs beyond the end of float32 noise", **both(tails, (pairs, "_REFINED", 0))),
    Attack(
        "bfloat16",
        "reads the sum off the grid of noise in bfloat16",
        **both(lattice, (mechanism, "at_least_single", lambda dtype: dtype)),
    ),
    Attack(
        "continued twice",
        "continues one checkpoint with two losses and subtracts",
        **both(continued_twice, (FastNoise, "_bind", nothing)),
    ),
    Attack(
        "one seed twice",
        "trains on two data sets with one seed and subtracts",
        **both(one_seed_twice, (FastNoise, "_bind", nothing)),
    ),
    Attack(
        "limit, detach",
        "sets a limit, detaches and trains again",
        **both(detached, (PrivacyEngine, "_budget_of", nothing)),
    ),
    Attack(
        "limit, load",
        "sets a limit, saves, and loads without one",
        **both(loaded, (PrivacyEngine, "_stricter_budget", nothing)),
    ),
    Attack(
        "flipped bit",
        "goes on from a checkpoint in whose ledger one bit was flipped",
        **both(flipped_bit, (checkpoint, "_is_sealed", lambda *_: True), (Mechanism, "check_ledger", nothing)),
    ),
    Attack(
        "other data",
        "continues a checkpoint on other data",
        **both(other_data, (engine, "require_same_data", nothing)),
    ),
]
