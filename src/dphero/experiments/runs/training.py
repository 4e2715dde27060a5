"""The training loop around any method: evaluation, files, progress, interruption, resuming."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from dphero._files import DamagedFile
from dphero.accounting import BudgetExhausted
from dphero.data import Data
from dphero.experiments.curves import Curves
from dphero.experiments.runs.evaluation import Evaluation
from dphero.experiments.runs.preparation import prepare
from dphero.experiments.runs.rundir import RunDirectory
from dphero.experiments.runs.snapshots import kept_steps, save_snapshot
from dphero.experiments.stopping import Interrupted, stoppable
from dphero.experiments.threads import threads_by_size
from dphero.methods import Step, Trainer, extra_of, make

_PRICING_SHARE = 0.01  # of the time, at most, is spent on the live ε: computing it costs as much as several steps
_RESULT = ("accuracy", "epsilon", "delta", "steps", "method", "is_bound", "seconds", "other_prices")  # what is shown


@dataclass(frozen=True)
class Progress:
    """Where a run stands. All but ε and the signal-to-noise ratio is computed without noise: for its owner's eyes.

    Attributes:
        step: Steps taken.
        steps: Steps in all.
        loss: Mean training loss of the latest steps.
        accuracy: Test accuracy at the latest evaluation, if there was one.
        epsilon: A bound on ε after one of the latest steps.
        clipped: Share of the latest examples whose gradient was clipped.
        signal_to_noise: Of the released gradients.
        seconds: Time spent in training, earlier parts of a resumed run included.
        prepared: What share is done of what comes before the first step, where that takes long.
    """

    step: int
    steps: int
    loss: float | None = None
    accuracy: float | None = None
    epsilon: float | None = None
    clipped: float | None = None
    signal_to_noise: float | None = None
    seconds: float = 0.0
    prepared: float | None = None


def train(
    directory: RunDirectory,
    *,
    report: Callable[[Progress], None] = lambda progress: None,
    data: Data | None = None,
    save_seconds: float = 30.0,
) -> dict[str, Any]:
    """Train, or go on with, the run of a directory; return its result.

    A finished run is not touched. A run that was killed goes on from its last checkpoint, with the same lots and the
    same noise: what it releases then is what it would have released.

    Args:
        directory: The run.
        report: Called after every step.
        data: The data, if it is loaded already.
        save_seconds: Time between checkpoints.

    Raises:
        ImportError: If what writes the weights is not installed: better known before the budget is spent.
        Interrupted: If the process was asked to stop (Ctrl-C, SIGTERM, SIGHUP); the run was saved.
        ValueError: For a recipe that cannot be trained, for a run that has lost its checkpoint, for one that was begun
            with another recipe or on other data, and for damaged files.
    """
    if (done := directory.result) is not None:
        if missing := [name for name in _RESULT if name not in done]:
            raise DamagedFile(directory.path / "result.json", f"it lacks {', '.join(missing)}")
        return done
    if (directory.path / "federation.json").exists():
        raise ValueError(f"{directory.path} is a federated run: go on with dphero federate --resume {directory.path}")
    import_module("safetensors.torch")
    with directory.locked(), stoppable() as asked_to_stop:
        directory.refuse_without_key()
        if directory.checkpoint.is_symlink():
            raise ValueError(
                f"{directory.checkpoint} is a symbolic link, which is not followed here: put the file itself"
            )
        saved = extra_of(directory.checkpoint) if directory.checkpoint.exists() else {}
        directory.require_same_recipe(saved.get("recipe"))
        task, data = prepare(directory.recipe, data)
        digest = data.digest()
        if saved.get("data", digest) != digest:  # older checkpoints do not tell
            raise ValueError(
                f"{directory.recipe.data} no longer holds the training data with which {directory.path} was begun, and "
                "its noise must not be used on other data: put the old data back to go on, or begin a new run in "
                "another --out"
            )
        with threads_by_size(task.module, task.train.tensors[0][:1], task.recipe.lot):
            trainer = make(task.recipe.method, task.recipe.options).start(task)
            try:
                return _Loop(directory, trainer, data, digest, report).run(asked_to_stop, save_seconds)
            finally:
                trainer.close()


class _Loop:
    """One run in this process."""

    def __init__(
        self,
        directory: RunDirectory,
        trainer: Trainer,
        data: Data,
        digest: str,
        report: Callable[[Progress], None],
    ) -> None:
        self.directory, self.trainer, self.report = directory, trainer, report
        self.recipe = trainer.task.recipe
        self.test, self.classes = Evaluation(data.test, trainer.task.device), data.classes
        self.digest = digest
        self.epoch_steps = max(1, round(trainer.steps / self.recipe.epochs))
        self.evaluate_steps = self.recipe.evaluate_every or self.epoch_steps
        self.kept_steps = kept_steps(self.recipe.keep_epochs, self.epoch_steps, trainer.steps)
        self.next_pricing = 0.0
        self.losses: list[Tensor] = []
        self.seconds = 0.0
        self.latest = Progress(trainer.step, trainer.steps)

    def run(self, asked_to_stop: Callable[[], bool], save_seconds: float) -> dict[str, Any]:
        """Take all steps that are left, then write the outcome."""
        self._resume()
        saved = started = time.monotonic()
        before = self.seconds
        with Curves(self.directory.path / "tensorboard", self.trainer.step) as curves:
            for share in self.trainer.prepare():
                self.report(replace(self.latest, prepared=share))
                if asked_to_stop():
                    raise Interrupted("stopped before the first step")
            while not self.trainer.finished:
                try:
                    step = self.trainer.advance()
                except BudgetExhausted:
                    break
                self.seconds = before + time.monotonic() - started
                self._note(step)
                self._keep()
                if self.trainer.step % self.evaluate_steps == 0 or self.trainer.finished:
                    curves.add(self._evaluate())
                if asked_to_stop():
                    self._save()
                    raise Interrupted(f"stopped after step {self.trainer.step} and saved")
                if time.monotonic() - saved >= save_seconds:
                    self._save()
                    saved = time.monotonic()
        return self._finish()

    def _resume(self) -> None:
        """Go on from the checkpoint, if there is one, with the running figures that it had."""
        if not self.directory.checkpoint.exists():
            self._keep()
            self._save()  # the keys of lots and noise: whatever happens next can be repeated, not drawn anew
            return
        extra = self.trainer.load(self.directory.checkpoint)
        self.directory.compare_ledger(self.trainer.ledger)
        running = extra.get("running", {})  # older checkpoints have none
        self.losses = list(running.get("losses", torch.empty(0)).to(self.trainer.task.device).unbind())
        self.seconds = float(extra["seconds"])
        self.directory.forget_metrics_after(self.trainer.step, extra.get("metrics"))
        metrics = self.directory.metrics
        self.latest = Progress(
            self.trainer.step,
            self.trainer.steps,
            accuracy=metrics[-1]["accuracy"] if metrics else None,
            seconds=self.seconds,
            **{name: running.get(name) for name in ("loss", "clipped", "signal_to_noise")},
        )

    def _keep(self) -> None:
        """Keep the weights, if it is time: before any checkpoint of the same step, so that none is ever left out."""
        if self.trainer.step in self.kept_steps:
            gradient = self.trainer.released_gradient()
            save_snapshot(self.directory.path, self.trainer.step, self.trainer.model, gradient)

    def _save(self) -> None:
        """The ledger first: what was released must be on record before anything can go wrong."""
        self.directory.save_ledger(self.trainer.ledger)
        latest = self.latest
        extra = {
            "seconds": self.seconds,
            "data": self.digest,
            "recipe": self.directory.recipe.as_dict(),
            "metrics": self.directory.metrics_seal,
            "running": {
                "losses": torch.stack(self.losses).cpu() if self.losses else torch.empty(0),
                "loss": latest.loss,
                "clipped": latest.clipped,
                "signal_to_noise": latest.signal_to_noise,
            },
        }
        self.trainer.save(self.directory.checkpoint, extra)

    def _note(self, step: Step) -> None:
        self.losses.append(step.loss)
        taken, latest = self.trainer.step, self.latest
        epsilon, loss = latest.epsilon, latest.loss
        if time.monotonic() >= self.next_pricing:
            epsilon = self._epsilon()
        if len(self.losses) >= 10 or loss is None:  # not at every step: on a GPU it waits for all that was asked before
            loss = self._mean_loss()
        self.latest = Progress(
            step=taken,
            steps=self.trainer.steps,
            loss=loss,
            accuracy=latest.accuracy,
            epsilon=epsilon,
            clipped=_smooth(latest.clipped, step.clipped),
            signal_to_noise=_smooth(latest.signal_to_noise, step.signal_to_noise),
            seconds=self.seconds,
        )
        self.report(self.latest)

    def _epsilon(self) -> float:
        started = time.monotonic()
        epsilon = self.trainer.price(self.recipe.delta, coarse=True).epsilon
        self.next_pricing = time.monotonic() + (time.monotonic() - started) / _PRICING_SHARE
        return epsilon

    def _mean_loss(self) -> float:
        mean = torch.stack(self.losses).mean().item()
        self.losses.clear()
        return mean

    def _evaluate(self) -> dict[str, Any]:
        accuracy = self.test.accuracy(self.trainer.model)
        loss = self._mean_loss() if self.losses else self.latest.loss
        epsilon, latest = self._epsilon(), self.latest
        values = {
            "step": latest.step,
            "epoch": latest.step / self.epoch_steps,
            "accuracy": accuracy,
            "loss": loss,
            "epsilon": epsilon,
            "clipped": latest.clipped,
            "signal_to_noise": latest.signal_to_noise,
            "seconds": round(self.seconds, 3),
        }
        self.directory.add_metrics(values)
        self.latest = Progress(
            latest.step, latest.steps, loss, accuracy, epsilon, latest.clipped, latest.signal_to_noise, self.seconds
        )
        self.report(self.latest)
        return values

    def _finish(self) -> dict[str, Any]:
        self._save()
        trainer, delta = self.trainer, self.recipe.delta
        statement = trainer.statement(delta)
        self.directory.save_statement(statement)
        self.directory.save_model(trainer.model)
        self.directory.save_signature(tuple(trainer.task.images.shape[1:]), self.classes)
        price = statement.price
        metrics = self.directory.metrics
        evaluated = bool(metrics) and metrics[-1]["step"] == trainer.step
        result = {
            "accuracy": metrics[-1]["accuracy"] if evaluated else self.test.accuracy(trainer.model),
            "epsilon": price.epsilon,
            "delta": price.delta,
            "steps": trainer.step,
            "method": trainer.card.name,
            "run": str(self.directory.path),
            "accountant": price.accountant,
            "is_bound": price.is_bound,
            "protects": trainer.card.protects,
            "sound": trainer.card.sound,
            "noise_multiplier": _noise_multiplier(trainer),
            "seconds": round(self.seconds, 2),
            "other_prices": {name: other.epsilon for name, other in trainer.compared_prices(delta).items()},
        }
        self.directory.finish(result)
        found = self.directory.result
        assert found is not None
        return found


def _noise_multiplier(trainer: Trainer) -> float | None:
    """σ of the run's releases, if they all had the same."""
    found = {getattr(event, "noise_multiplier", None) for event in trainer.ledger.counts}
    return found.pop() if len(found) == 1 else None


def _smooth(old: float | None, new: float | None) -> float | None:
    if old is None or new is None:
        return old if new is None else new
    return 0.9 * old + 0.1 * new
