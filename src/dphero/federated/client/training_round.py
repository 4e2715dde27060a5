"""One client: trains the global model on its own data with privacy, and pays for every answer that it sends.

What leaves a client is the noisy model of a round, its public weight in the average, the number of steps, and the
ledger: all of them functions of the noisy releases and of numbers that were declared public. Losses, accuracies, the
drawn lots and error messages stay at home.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor, nn

from dphero.accounting import Ledger, PoissonGaussian, calibrate_noise_multiplier, price
from dphero.data import Data, Split
from dphero.experiments.runs.preparation import prepare
from dphero.federated.client.files import ClientFiles, ClientState
from dphero.federated.client.local_training import train_round
from dphero.federated.requests import Answer, Declined, Request
from dphero.federated.settings import Federation
from dphero.federated.sharing.distillation import share
from dphero.methods import METHODS, Task
from dphero.methods.on_engine.sgd import SGD
from dphero.methods.recipe import Recipe

logger = logging.getLogger(__name__)


def spent(ledger: Ledger, recipe: Recipe, *, coarse: bool = False) -> float:
    """Return ε of a client's ledger; ``coarse`` is quicker, slightly larger, and still a bound."""
    adaptive = any(event.adaptive for event in ledger.counts)
    return _priced(ledger.to_json(), recipe.delta, "filter" if adaptive else recipe.accountant, coarse)


@lru_cache(maxsize=4096)
def _priced(ledger: str, delta: float, accountant: str, coarse: bool) -> float:
    return price(Ledger.from_json(ledger), delta, accountant, coarse=coarse).epsilon


def require_federable(recipe: Recipe, federation: Federation | None = None) -> None:
    """Refuse a recipe whose price over many rounds cannot be told in advance, or a budget that cannot be kept.

    Raises:
        ValueError: If so.
    """
    method = METHODS[recipe.method]
    private = method is not SGD
    if private and recipe.epsilon is None and recipe.noise_multiplier is None:
        raise ValueError(f"method {recipe.method!r} is private: give --epsilon or --noise-multiplier")
    if not private and recipe.epsilon is not None:
        raise ValueError(
            f"method 'sgd' protects nothing and cannot keep epsilon {recipe.epsilon:g}: leave --epsilon out, or take a "
            "private --method such as dp-sgd"
        )
    if federation is not None and federation.shared == "distilled-published" and recipe.epsilon is not None:
        raise ValueError(
            f"--shared distilled-published costs more than any budget, also than epsilon {recipe.epsilon:g}: give "
            "--noise-multiplier, or take --shared generated"
        )
    if not method.card.sound and recipe.epsilon is not None:
        raise ValueError(
            f"method {recipe.method!r} cannot keep a budget of epsilon {recipe.epsilon:g}: no noise multiplier does "
            "for sure. Give --noise-multiplier, or take a sound --method such as dp-hero"
        )


class Client:
    """A client with its own data, budget and ledger.

    The recipe's ε and δ are the client's own: whatever a server asks, it answers no request that would take all its
    answers together beyond them. Noise and lots of every answer have a key of their own, so no noise is used twice.

    Args:
        name: By which it is known.
        recipe: How it trains; ``epsilon`` is its budget for all rounds.
        federation: The public settings.
        data: Its private examples.
        home: Where it keeps what it remembers.
    """

    def __init__(self, name: str, recipe: Recipe, federation: Federation, data: Data, home: Path) -> None:
        require_federable(recipe, federation)
        self.name, self.recipe, self.federation, self.data = name, recipe, federation, data
        self.files = ClientFiles(home)

    def answer(self, request: Request) -> Answer | Declined:
        """Answer a request, or decline it.

        The same request, asked again, is answered from disk, without a charge. The answer and its price are on disk
        before this returns.

        Raises:
            ValueError: If the request does not fit the model, or the recipe cannot be trained.
        """
        with self.files.locked():
            state, digest = self.files.load(), request.digest
            if state.answered == digest:
                return self._again(state, digest)
            task = self._task(request)
            sigma = self._noise_multiplier(state, task, request)
            if self._exceeds(_joined(state.ledger, _planned(task, sigma, self._releases(task, request)))):
                return self._declined(state)
            own = self._own_control(state, request)
            released, steps, control = train_round(task, sigma, request, own, self.federation.controls)
            ledger = _joined(state.ledger, released)
            if self._exceeds(ledger):  # what was charged decides, not what was planned
                return self._declined(state)
            answer = Answer(
                weights={name: value.detach().cpu().clone() for name, value in task.module.state_dict().items()},
                weight=float(self._records) if self.federation.weights == "records" else 1.0,
                steps=steps,
                epsilon=spent(ledger, self.recipe, coarse=True),
                ledger=ledger,
                control=None if control is None else {name: control[name] - own[name] for name in own},
            )
            stored = {"weights": answer.weights, "weight": answer.weight, "steps": steps, "control": answer.control}
            self.files.commit(ClientState(ledger, sigma, digest), {**stored, "own_control": control})
            return answer

    def _releases(self, task: Task, request: Request) -> int:
        """How many releases a round makes."""
        further = request.control is not None and self.federation.controls == "gradient"
        return task.steps + further

    def _own_control(self, state: ClientState, request: Request) -> dict[str, Tensor]:
        """SCAFFOLD's control variate of this client: it lies beside the latest answer, and changes with it."""
        if request.control is None:
            return {}
        stored = self.files.answer(state.answered)["own_control"] if state.answered is not None else None
        return stored or {name: torch.zeros_like(value) for name, value in request.control.items()}

    def share(self) -> tuple[Split, Answer] | Declined:
        """Return what this client gives to the shared data set; charged, and on disk, before this returns.

        The answer tells what all that left the client costs; it has no weights.
        """
        with self.files.locked():
            state = self.files.load()
            digest = hashlib.sha256(f"share {self.federation.shared}".encode()).hexdigest()
            if state.answered != digest:
                seed = self._seed(digest)
                given, released = share(self.data, self._records, self.recipe, self.federation, state.ledger, seed)
                ledger = _joined(state.ledger, released)
                if self._exceeds(ledger):
                    return self._declined(state)
                state = ClientState(ledger, state.noise_multiplier, digest)
                self.files.commit(state, {"images": given.images, "labels": given.labels, "own_control": None})
            stored = self.files.answer(digest)
            cost = spent(state.ledger, self.recipe, coarse=True)
            return Split(stored["images"], stored["labels"]), Answer({}, 1.0, 0, cost, state.ledger)

    def _again(self, state: ClientState, digest: str) -> Answer:
        logger.info("client %s sends its answer again", self.name)
        stored = self.files.answer(digest)
        return Answer(
            weights=stored["weights"],
            weight=stored["weight"],
            steps=stored["steps"],
            epsilon=spent(state.ledger, self.recipe, coarse=True),
            ledger=state.ledger,
            control=stored["control"],
        )

    def _task(self, request: Request) -> Task:
        data, records = self._joined_data()
        recipe = self.recipe.with_(
            epochs=self.federation.local_epochs,
            lot=min(self.recipe.lot, records),
            seed=self._seed(request.digest),
            dataset_size=records,
        )
        task, _ = prepare(recipe, data)
        load(task.module, request.weights)
        if bad := sorted(name for name, value in request.weights.items() if not torch.isfinite(value).all()):
            raise ValueError(f"the server's model holds NaN or infinity in {', '.join(bad[:5])}")
        return task

    def _joined_data(self) -> tuple[Data, int]:
        """Return the client's data with the shared set, and the public number of records in it: D^k ∪ D^s.

        The shared examples are public. They are sampled like the others, which are then in a lot with a smaller
        probability, and priced with that.
        """
        if self.federation.shared == "none":
            return self.data, self._records
        shared, train = self.files.load_shared(), self.data.train
        joined = Split(torch.cat([train.images, shared.images]), torch.cat([train.labels, shared.labels]))
        return replace(self.data, train=joined), self._records + len(shared)

    @property
    def _records(self) -> int:
        """The public number of the client's records."""
        size = self.recipe.dataset_size
        if size is None and not self.data.public_size:
            raise ValueError(
                "the number of a client's records is private unless you say otherwise: give --dataset-size N, a public "
                "figure for each client, or --dataset-size public, if the clients' numbers are no secret"
            )
        return len(self.data.train) if not isinstance(size, int) else size

    def _seed(self, digest: str) -> int | None:
        """A key of its own for every answer: the same noise on two different requests would cancel out."""
        if self.recipe.seed is None:
            return None
        text = f"client {self.name} {digest} {self.recipe.seed}"
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest())

    def _noise_multiplier(self, state: ClientState, task: Task, request: Request) -> float | None:
        """σ: given, remembered, or what makes the budget last for the planned rounds."""
        if self.recipe.noise_multiplier is not None or self.recipe.epsilon is None:
            return self.recipe.noise_multiplier
        if state.noise_multiplier is not None:
            return state.noise_multiplier
        return _calibrated(
            self.recipe.epsilon,
            self.recipe.delta,
            task.sample_rate,
            self._releases(task, request) * self.federation.planned_participations,
            self.recipe.accountant,
            state.ledger.to_json(),
        )

    def _exceeds(self, ledger: Ledger) -> bool:
        budget = self.recipe.epsilon
        if budget is None or spent(ledger, self.recipe, coarse=True) <= budget:
            return False
        return spent(ledger, self.recipe) > budget

    def _declined(self, state: ClientState) -> Declined:
        assert self.recipe.epsilon is not None
        logger.info("client %s declines", self.name)
        cost = spent(state.ledger, self.recipe, coarse=True)
        return Declined(
            f"its answers so far cost epsilon {cost:.4g}, and this round would take it beyond its "
            f"budget of {self.recipe.epsilon:g}"
        )


def load(module: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Load a model's weights, if they are exactly that.

    Raises:
        ValueError: If names or shapes differ.
    """
    mine = module.state_dict()
    if wrong := sorted(
        name
        for name in {*mine, *weights}
        if name not in mine or name not in weights or mine[name].shape != weights[name].shape
    ):
        raise ValueError(f"the server's model is another one: {', '.join(wrong[:5])} differ in name or shape")
    module.load_state_dict(dict(weights))


def _planned(task: Task, sigma: float | None, releases: int) -> Ledger:
    """What a round will cost, if nothing unforeseen happens."""
    plan = Ledger()
    if sigma is not None:
        plan.record(PoissonGaussian(task.sample_rate, sigma), releases)
    return plan


def _joined(first: Ledger, second: Ledger) -> Ledger:
    found = first.copy()
    for event, count in second:
        found.record(event, count)
    return found


@lru_cache(maxsize=1024)
def _calibrated(epsilon: float, delta: float, sample_rate: float, steps: int, accountant: str, earlier: str) -> float:
    besides = Ledger.from_json(earlier)
    return calibrate_noise_multiplier(epsilon, delta, sample_rate, steps, accountant, besides=besides)
