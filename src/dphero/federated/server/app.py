"""The server of a federated run: rounds, evaluation on its own test data, checkpoints, and the outcome."""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from flwr.app import ArrayRecord, ConfigRecord, MetricRecord
from flwr.serverapp import Grid
from torch import Tensor

from dphero import checkpoint
from dphero.accounting import Ledger
from dphero.data import Data
from dphero.experiments.runs.evaluation import Evaluation
from dphero.experiments.runs.files import write_text
from dphero.experiments.runs.preparation import prepare
from dphero.experiments.runs.rundir import RunDirectory
from dphero.experiments.stopping import Interrupted
from dphero.federated.client.training_round import load, spent
from dphero.federated.server.client_level import ClientLevelRounds
from dphero.federated.server.rounds import Roster, Round
from dphero.federated.server.statement import client_level, record_level
from dphero.federated.server.strategies import make_strategy
from dphero.federated.settings import Federation, partition_name
from dphero.federated.sharing.shared_set import distribute, gather

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RoundProgress:
    """Where a federated run stands.

    Attributes:
        round: Rounds finished.
        rounds: Rounds in all.
        accuracy: On the server's test data.
        epsilon: The largest ε among the clients.
        epsilon_median: The median over all clients, those that never took part included.
        averaged: Updates that were averaged in the latest round.
        declined: Clients whose budgets are used up, so far.
        rejected: Clients whose updates were rejected in the latest round.
        failed: Clients that did not answer in the latest round.
        seconds: Time spent, earlier parts of a resumed run included.
    """

    round: int
    rounds: int
    accuracy: float | None = None
    epsilon: float | None = None
    epsilon_median: float | None = None
    averaged: int = 0
    declined: int = 0
    rejected: tuple[str, ...] = ()
    failed: tuple[str, ...] = ()
    seconds: float = 0.0


class _AllExhausted(Exception):
    """No client has a budget left."""


class Server:
    """One federated run.

    Args:
        directory: Where it is kept.
        federation: The settings.
        data: The server's data; only its test half is used.
        report: Called before the first round, without an accuracy, and after every round.
        asked_to_stop: Whether the run should stop after this round.
        homes: Where the clients keep what they remember, if they run on this machine: a directory with one for each.
    """

    def __init__(
        self,
        directory: RunDirectory,
        federation: Federation,
        data: Data,
        *,
        report: Callable[[RoundProgress], None] = lambda progress: None,
        asked_to_stop: Callable[[], bool] = lambda: False,
        homes: Path | None = None,
    ) -> None:
        self.directory, self.recipe, self.federation = directory, directory.recipe, federation
        self.data, self.report, self.asked_to_stop, self.homes = data, report, asked_to_stop, homes
        self.task, _ = prepare(self.recipe, replace(data, train=data.test))  # the model; the data is the clients'
        self.test = Evaluation(data.test, self.task.device)
        self.roster, self.done, self.seconds = Roster(), 0, 0.0
        self.strategy = make_strategy(federation, self.roster, self.recipe, noted=self._note)
        self._refuse_buffers()
        self.happened = Round(0)
        self._started = time.monotonic()

    # -- the run ------------------------------------------------------------------------------------------

    def run(self, grid: Grid) -> None:
        """Go through all rounds that are left.

        Raises:
            Interrupted: If the run was asked to stop; it was saved.
        """
        self._resume()
        self._started = time.monotonic() - self.seconds
        left = self.federation.rounds - self.done
        if left <= 0:
            return
        if self.federation.shared != "none":
            path, shape = self.directory.path / "shared.pt", tuple(self.task.images.shape[1:])
            classes = len(self.data.classes)
            shared = gather(grid, self.roster, self.federation, path, shape, classes, self._where)
            distribute(grid, self.roster, self.federation, shared)
        try:
            self.strategy.start(
                grid,
                ArrayRecord(self.weights),
                num_rounds=left,
                timeout=self.federation.answer_seconds,
                train_config=ConfigRecord(),
                evaluate_fn=self._after_round,
            )
        except _AllExhausted:
            logger.warning("no client has a budget left after round %d", self.done)

    def _refuse_buffers(self) -> None:
        """Refuse a model whose buffers would be averaged beside what a strategy knows of."""
        buffers = [name for name, _ in self.task.module.named_buffers()]
        exact = self.federation.strategy == "scaffold" or self.federation.client_noise_multiplier is not None
        if buffers and exact:
            raise ValueError(
                f"the model has buffers ({', '.join(buffers[:3])}), which would be averaged without noise and without "
                "control: take a model without them, such as one with group norms"
            )

    @property
    def weights(self) -> dict[str, Tensor]:
        """The global model."""
        return {name: value.detach().cpu() for name, value in self.task.module.state_dict().items()}

    def _note(self, happened: Round) -> None:
        self.happened = happened

    def _after_round(self, number: int, arrays: ArrayRecord) -> MetricRecord | None:
        """Evaluate, write down what happened, save; Flower calls this before the first and after every round."""
        if number == 0:
            if not self.directory.checkpoint.exists():
                self._save()
            self.report(self._progress(None, self._epsilons()))
            return None
        load(self.task.module, {name: torch.from_numpy(value.numpy().copy()) for name, value in arrays.items()})
        self.done, self.seconds = self.happened.number, time.monotonic() - self._started
        accuracy = self.test.accuracy(self.task.model)
        epsilons = self._epsilons()
        values = {
            "step": self.done,
            "round": self.done,
            "accuracy": accuracy,
            "epsilon": max(epsilons),
            "epsilon_median": statistics.median(epsilons),
            "seconds": round(self.seconds, 3),
            **{name: value for name, value in asdict(self.happened).items() if name != "number"},
        }
        self.directory.add_metrics(values)
        self._save()
        self.report(self._progress(accuracy, epsilons))
        if (
            self.homes is not None
            and not self.roster.ledgers
            and len(self.happened.failed) == len(self.happened.sampled) > 0
        ):
            where = self._where([*self.happened.failed])
            raise ValueError(f"all clients that were asked in round {self.done} failed{where}")
        if self.asked_to_stop():
            raise Interrupted(f"stopped after round {self.done} and saved")
        if len(self.roster.exhausted) >= self.federation.clients:
            raise _AllExhausted
        return MetricRecord({"accuracy": accuracy})

    def _where(self, failed: Sequence[str]) -> str:
        """Say where clients wrote down why they failed."""
        if self.homes is None:
            return "; the clients' own errors.log say why"
        logs = [self.homes / name / "errors.log" for name in failed[:3]]
        return "".join(f"; {path} says why" for path in logs if path.exists())

    def _epsilons(self) -> list[float]:
        known = list(self.roster.epsilons.values())
        return [*known, *[0.0] * max(0, self.federation.clients - len(known))]

    def _progress(self, accuracy: float | None, epsilons: list[float]) -> RoundProgress:
        return RoundProgress(
            round=self.done,
            rounds=self.federation.rounds,
            accuracy=accuracy,
            epsilon=max(epsilons),
            epsilon_median=statistics.median(epsilons),
            averaged=len(self.happened.averaged),
            declined=len(self.roster.exhausted),
            rejected=tuple(self.happened.rejected),
            failed=tuple(self.happened.failed),
            seconds=self.seconds,
        )

    # -- files --------------------------------------------------------------------------------------------

    def _resume(self) -> None:
        if self.directory.checkpoint.exists():
            state = checkpoint.load(self.directory.checkpoint).engine
            self.directory.require_same_recipe(state["recipe"])
            self._require_same(state["federation"])
            load(self.task.module, state["weights"])
            self.done, self.seconds = int(state["round"]), float(state["seconds"])
            self.roster.epsilons, self.roster.ledgers = dict(state["epsilons"]), dict(state["ledgers"])
            self.roster.exhausted = set(state["exhausted"])
            self.strategy.restore(state["strategy"])
            self.strategy.first_round = self.done
            self.directory.forget_metrics_after(self.done, state["metrics"])

    def _require_same(self, begun: Mapping[str, Any]) -> None:
        now = self.federation.as_dict()
        for name in sorted({*begun, *now}):
            if begun.get(name) != now.get(name):
                raise ValueError(
                    f"{name} in {self.directory.path / 'federation.json'} was {begun.get(name)!r} and is now "
                    f"{now.get(name)!r}, and a run goes on as it was begun: put the old value back, or begin a new run "
                    "in another --out"
                )

    def _save(self) -> None:
        state = {
            "round": self.done,
            "seconds": self.seconds,
            "weights": self.weights,
            "epsilons": dict(self.roster.epsilons),
            "ledgers": dict(self.roster.ledgers),
            "exhausted": sorted(self.roster.exhausted),
            "strategy": self.strategy.state(),
            "recipe": self.recipe.as_dict(),
            "federation": self.federation.as_dict(),
            "metrics": self.directory.metrics_seal,
        }
        checkpoint.save(self.directory.checkpoint, state, None, None)

    def ledgers(self) -> dict[str, Ledger]:
        """Return every client's ledger: the clients' own where they are on this machine, else what they reported."""
        found = {name: Ledger.from_json(text) for name, text in self.roster.ledgers.items()}
        if self.homes is not None:
            for path in sorted(self.homes.glob("*/ledger.json")):
                found[path.parent.name] = Ledger.from_json(path.read_text(encoding="utf-8"))
        return found

    def _promise_to_clients(self) -> float | None:
        """Write what whole clients are promised, if anything; return its ε."""
        if not isinstance(self.strategy, ClientLevelRounds):
            return None
        found, path = client_level(self.recipe, self.federation, self.strategy.ledger), self.directory.path
        write_text(path / "ledger-clients.json", self.strategy.ledger.to_json() + "\n")
        write_text(path / "statement-clients.txt", found.text + "\n")
        return found.price.epsilon

    def finish(self) -> dict[str, Any]:
        """Write model, ledgers, statement and outcome."""
        ledgers = self.ledgers()
        prices = {name: spent(ledger, self.recipe) for name, ledger in ledgers.items()}
        worst = max(prices, key=lambda name: prices[name], default=None)
        statement = record_level(self.recipe, self.federation, ledgers, worst, reported=self.homes is None)
        directory = self.directory
        directory.save_ledger(ledgers[worst] if worst is not None else Ledger())
        directory.save_statement(statement)
        whole = self._promise_to_clients()
        directory.save_model(self.task.model)
        directory.save_signature(tuple(self.task.images.shape[1:]), self.data.classes)
        epsilons = [*prices.values(), *[0.0] * max(0, self.federation.clients - len(prices))]
        result = {
            "accuracy": self.test.accuracy(self.task.model),
            "epsilon": statement.price.epsilon,
            "epsilon_median": statistics.median(epsilons) if epsilons else 0.0,
            "delta": self.recipe.delta,
            "rounds": self.done,
            "strategy": self.federation.strategy,
            "partition": partition_name(self.federation),
            "worst_client": worst,
            "client_level_epsilon": whole,
            "clients": prices,
            "declined": sorted(self.roster.exhausted),
            **_like_train(statement, ledgers.get(worst) if worst is not None else None, self.recipe.method),
            "seconds": round(self.seconds, 2),
            "run": str(directory.path),
        }
        directory.finish(result)
        found = directory.result
        assert found is not None
        return found


def _like_train(statement: Any, ledger: Ledger | None, method: str) -> Mapping[str, Any]:
    """What every run's outcome has, whatever trained it."""
    from dphero.methods import METHODS

    found = {getattr(event, "noise_multiplier", None) for event in (ledger.counts if ledger is not None else ())}
    return {
        "steps": ledger.steps if ledger is not None else 0,
        "method": method,
        "accountant": statement.price.accountant,
        "is_bound": statement.price.is_bound,
        "protects": statement.unit,
        "sound": METHODS[method].card.sound,
        "noise_multiplier": found.pop() if len(found) == 1 else None,
        "other_prices": {},
    }
