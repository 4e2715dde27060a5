"""Audits of a finished run, and of a recipe before it is run."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from os import PathLike

from torch import nn

from dphero.audit.bounds.two_sample import Audit
from dphero.audit.canary import unreached
from dphero.audit.laws.checks import Check
from dphero.audit.mechanism import MechanismAudit, audit_mechanism, releases_of
from dphero.audit.report import Report
from dphero.audit.run_ledger import RunLedger, check_ledger
from dphero.audit.settings import Settings, small_model
from dphero.audit.trainings.gradient_canaries import GradientCanaries, room
from dphero.audit.trainings.input_canaries import InputCanaries
from dphero.audit.trainings.many_runs import audit_method
from dphero.audit.trainings.membership import Roc, lira, loss_attack
from dphero.audit.trainings.one_run import OneRun, audit_one_run
from dphero.audit.trainings.training import MethodTraining, absence
from dphero.data import Data
from dphero.experiments import RunDirectory, prepare
from dphero.methods import Task, Trainer, make
from dphero.methods.recipe import Recipe
from dphero.methods.trainers.engine_trainer import PrivateTrainer
from dphero.models import build

_LARGE = 100_000  # parameters: thousands of releases of more would take minutes
_SHADOWS = 8
_FEWEST_TRAININGS = 40  # small ones, with and without the canary
_MOST_NOISE = 1.0  # multiplier: under more the canary, and with it most faults of a release, could not be seen
_QUICK_RECORDS, _QUICK_STEPS = 2000, 150  # of a quick training with gradient canaries: some seconds
_MOST_CANARIES = 1000
_MOST_NAMES = 8  # of parameters, in a note
_CANARY_SEED = 1 << 42  # far from those of other engines in an audit, which must not have their noise
_CANARY_DELTA = 0.05  # m δ with gradient canaries: the bound of one run pays for δ once per canary

Tell = Callable[[str, int, int], None]
"""Called with what is being done, how much of it is done, and how much there is."""


def settings_of(trainer: PrivateTrainer) -> Settings:
    """Return the settings of a trainer's engine: what its audits have to repeat."""
    mechanism = trainer.engine._attached.mechanism
    return Settings(
        mechanism=mechanism.mode,
        guidance=copy.deepcopy(mechanism.guidance),
        clipping=mechanism.clipping.option,  # type: ignore[arg-type]
        noise_multiplier=mechanism.noise_multiplier,
        max_grad_norm=trainer.task.recipe.clip,
        secure=trainer.task.recipe.secure,
    )


def audit_run(
    path: str | PathLike[str],
    *,
    quick: bool = True,
    releases: int = 1000,
    confidence: float = 0.95,
    seed: int = 0,
    tell: Tell = lambda what, done, total: None,
    trust: bool = False,
) -> Report:
    """Audit a finished run: its ledger, mechanism, training, and released model; see :func:`audit_recipe`.

    Its ledger is priced anew, and must agree with what the run printed. Trainings are repeated with canaries among the
    data. Nothing of the run is changed.

    Args:
        path: The run's directory.
        quick: Leave out whole trainings; that with gradient canaries is shortened.
        releases: Of the mechanism, with and without the canary.
        confidence: Of all bounds together.
        seed: Makes the audit repeatable.
        tell: Told what is going on.
        trust: Whether code that its recipe names may be imported and run.

    Raises:
        ValueError: If it is no run, or not finished.
    """
    directory = RunDirectory.open(path, trust=trust)
    if directory.result is None:
        raise ValueError(f"{path} is not finished, there is no model to audit: dphero train --resume {path}")
    ledger = check_ledger(directory)
    task, data = prepare(directory.recipe)
    directory.load_model(task.model)
    released = copy.deepcopy(task.model).cpu().eval()
    members = (data.train.images, data.train.labels)
    attack = loss_attack(released, members, (data.test.images, data.test.labels))
    report = audit_recipe(
        directory.recipe, quick=quick, releases=releases, confidence=confidence, seed=seed, data=data, printed=ledger,
        tell=tell,
    )  # fmt: skip
    return replace(
        report,
        title=f"run {directory.path}",
        attacks=(attack, *report.attacks),
        notes=(ledger.sentence, *report.notes),
        ledger=ledger,
    )


def audit_recipe(
    recipe: Recipe,
    *,
    quick: bool = True,
    releases: int = 1000,
    confidence: float = 0.95,
    seed: int = 0,
    data: Data | None = None,
    printed: RunLedger | None = None,
    tell: Tell = lambda what, done, total: None,
) -> Report:
    """Audit what a recipe would do.

    The mechanism of its engine, small trainings of its method, a training with gradient canaries, and, unless quick,
    one with input canaries and several on halves of the data, as shadow models of one another.

    Args:
        recipe: What to audit.
        quick: Leave out whole trainings; that with gradient canaries is shortened.
        releases: Of the mechanism, with and without the canary; small trainings are a tenth of that.
        confidence: Of all bounds together.
        seed: Makes the audit repeatable.
        data: The data, if it is loaded already.
        printed: What a finished run of the recipe printed: a training of as many steps has to keep that too.
        tell: Told what is going on.
    """
    task, data = prepare(recipe, data)
    recipe = task.recipe
    trainer = make(recipe.method, recipe.options).start(task)
    try:
        settings, notes = _engine_of(trainer)
        steps = trainer.steps
    finally:
        trainer.close()
    model, more = _carrier(trainer, by_releases=settings is not None)
    notes += more
    audits: list[Audit] = []
    checks: list[Check] = []
    each = 1 - (1 - confidence) / (1 + 2 * (settings is not None) + (not quick))
    if settings is not None:
        inside = _mechanism(settings, model, releases, recipe.delta, each, seed, tell)
        audits += inside.audits
        checks += inside.checks
    audits.append(_small_trainings(recipe, releases, each, seed, tell))
    one_runs: list[OneRun] = []
    attacks: list[Roc] = []
    if settings is not None:
        assert isinstance(trainer, PrivateTrainer)
        found, more = _gradient_canaries(trainer, settings, quick, each, seed, printed, tell)
        one_runs += found
        notes += more
    if quick:
        notes.append(f"quick: whole trainings of {steps} steps were left out; leave out --quick for them")
    else:
        one_run, attack = _whole(task, each, seed, tell)
        # Blank records among the data make longer epochs: then the steps may be others than the run's.
        one_runs.append(one_run if absence(recipe.method) == "blank" else _held_to(printed, one_run, steps))
        attacks.append(attack)
    title = f"method {recipe.method} on {recipe.data}"
    return Report(title, audits, one_runs, attacks, notes, confidence, checks=checks)


def _mechanism(
    settings: Settings, model: nn.Module, releases: int, delta: float, confidence: float, seed: int, tell: Tell
) -> MechanismAudit:
    """Audit the mechanism, with no more noise than lets faults be seen."""
    seen = replace(settings, noise_multiplier=min(settings.noise_multiplier, _MOST_NOISE))
    made = releases_of(seen, model, releases)
    return audit_mechanism(
        seen, model=model, releases=releases, delta=delta, confidence=confidence, seed=seed,
        report=lambda done: tell("Releasing", done, made),
    )  # fmt: skip


def _small_trainings(recipe: Recipe, releases: int, confidence: float, seed: int, tell: Tell) -> Audit:
    """Train a tiny model many times with the recipe's method, with a canary and without."""
    few = max(releases // 10, _FEWEST_TRAININGS)
    small = audit_method(
        recipe.method, options=recipe.options, releases=few, delta=recipe.delta, confidence=confidence, seed=seed,
        epsilon=recipe.epsilon or 1.0, report=lambda done: tell("Small trainings", done, 2 * few),
    )  # fmt: skip
    return replace(small, name="small trainings")


def _engine_of(trainer: Trainer) -> tuple[Settings | None, list[str]]:
    """Return the settings of the trainer's engine, if it has one, and remarks on how they are audited."""
    if not isinstance(trainer, PrivateTrainer):
        note = f"method {trainer.card.name!r} has a trainer of its own: it is audited by small trainings, and neither "
        return None, [note + "by single releases nor by gradient canaries"]
    if min(shape.smallest for shape in trainer.engine._attached.mechanism.noise_geometry.values()) == 0:
        note = (
            f"method {trainer.card.name!r} adds no noise at all in some directions of this model: whoever looks there "
        )
        return None, [note + "sees everything, its true ε is infinite, and nothing is left to measure"]
    settings = settings_of(trainer)
    if settings.noise_multiplier <= _MOST_NOISE:
        return settings, []
    note = (
        f"the mechanism was audited at noise multiplier {_MOST_NOISE:g}, the recipe's is "
        f"{settings.noise_multiplier:.4g}: under so much noise faults would not be seen"
    )
    return settings, [note]


def _carrier(trainer: Trainer, *, by_releases: bool) -> tuple[nn.Module, list[str]]:
    """Return the model whose layers carry the canary (the trainer's own, unless it is large), and remarks on that."""
    model: nn.Module = small_model()
    notes: list[str] = []
    if isinstance(trainer, PrivateTrainer):
        size = sum(parameter.numel() for parameter in trainer.module.parameters())
        if size <= _LARGE:
            model = copy.deepcopy(trainer.module).cpu()
        else:
            notes = [f"the model has {size:,} parameters: its mechanism was audited on a small network instead"]
    if by_releases and (missed := unreached(model)):
        notes.append(f"no canary enters {_listed(missed)}: a leak that is there alone is not seen by single releases")
    return model, notes


def _listed(names: list[str]) -> str:
    """Return names for a sentence, the first of them where they are many."""
    more = len(names) - _MOST_NAMES
    return ", ".join(names[:_MOST_NAMES]) + (f" and {more} more parameters" if more > 0 else "")


def _gradient_canaries(
    trainer: PrivateTrainer,
    settings: Settings,
    quick: bool,
    confidence: float,
    seed: int,
    printed: RunLedger | None,
    tell: Tell,
) -> tuple[list[OneRun], list[str]]:
    """Train once as the recipe does, with its own noise, and canaries whose gradients the attacker chose."""
    task, (inputs, labels), notes = trainer.task, trainer.train.tensors, []
    recipe, steps, places = task.recipe, trainer.steps, room(trainer.module)
    if not places:
        return [], ["the model has no linear layer that is trained: gradient canaries have no place in it"]
    if quick and (steps > _QUICK_STEPS or len(inputs) > _QUICK_RECORDS):
        steps, inputs, labels = min(steps, _QUICK_STEPS), inputs[:_QUICK_RECORDS], labels[:_QUICK_RECORDS]
        notes.append(
            f"quick: the training with gradient canaries took {steps} of {trainer.steps} steps, among {len(inputs)} "
            f"of {len(trainer.train)} records; its claim is that of those steps"
        )
    canaries = GradientCanaries(
        settings,
        trainer.module,
        inputs,
        labels,
        canaries=min(_MOST_CANARIES, places, max(50, round(_CANARY_DELTA / recipe.delta))),
        sample_rate=task.sample_rate,
        steps=steps,
        optimizer=task.optimizer,
        physical_batch=recipe.physical_batch,
        report=lambda done: tell("Training with gradient canaries", done, steps),
    )
    found = audit_one_run(
        canaries, name="one training, gradient canaries", delta=recipe.delta, confidence=confidence,
        seed=_CANARY_SEED + seed,
    )  # fmt: skip
    return [_held_to(printed, found, steps)], notes


def _held_to(printed: RunLedger | None, found: OneRun, steps: int) -> OneRun:
    """Return the finding; where a run of as many steps printed a smaller ε, that is the claim to keep."""
    if printed is None or (printed.steps, printed.delta) != (steps, found.delta):
        return found
    return replace(found, claimed_epsilon=min(found.claimed_epsilon, printed.printed_epsilon))


def _whole(task: Task, confidence: float, seed: int, tell: Tell) -> tuple[OneRun, Roc]:
    """Train once with input canaries, and several times for shadow models."""
    recipe, images, labels, classes = task.recipe, task.images, task.train.tensors[1], task.classes
    model = build(recipe.model, tuple(images.shape[1:]), classes, seed=recipe.seed or 0).to(task.device)
    absent = absence(recipe.method)
    blank = absent == "blank"  # then no record is ever left away: their number is public, and tells nothing
    size = len(images) if recipe.dataset_size == "public" else recipe.dataset_size
    fixed = recipe.with_(dataset_size="public" if blank else size)
    canaries = min(_MOST_CANARIES, max(20, len(images) // 10))
    train = MethodTraining(fixed, model, classes, lambda done, of: tell("Training with input canaries", done, of))
    one_run = audit_one_run(
        InputCanaries(train, images, labels, canaries, classes, seed, absent),
        name="one training, input canaries", delta=recipe.delta, confidence=confidence, seed=seed,
    )  # fmt: skip
    half, trained = len(images) // 2, [0]
    shadows = fixed.with_(dataset_size="public" if blank else half, lot=min(recipe.lot, half))
    train = MethodTraining(
        shadows, model, classes,
        lambda done, of: tell("Training shadow models", trained[0] * of + done, _SHADOWS * of),
    )  # fmt: skip
    attack = lira(
        train, images, labels, shadows=_SHADOWS, seed=seed, report=lambda done: trained.__setitem__(0, done)
    )  # fmt: skip
    return one_run, attack
