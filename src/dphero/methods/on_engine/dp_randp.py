"""DP-RandP: features from synthetic images first, then a private probe, then private fine-tuning (Tang et al.)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from os import PathLike
from typing import Any, ClassVar

import torch
from torch import nn
from torch.utils.data import TensorDataset

from dphero import checkpoint, models
from dphero._checks import one_of, positive, whole
from dphero.accounting import Ledger, Price, Statement, calibrate_noise_multiplier
from dphero.checks.modules import require_private_modules
from dphero.engine import PrivacyEngine
from dphero.guidance.prior.processes import PROCESSES
from dphero.methods.card import SEEDED, Card
from dphero.methods.method import Method, register
from dphero.methods.task import Task
from dphero.methods.trainer import Step, Trainer
from dphero.methods.trainers.averaging import WeightAverage
from dphero.methods.trainers.base_trainer import key_of
from dphero.methods.trainers.engine_trainer import PrivateTrainer
from dphero.methods.trainers.head import head_of, headless, with_head
from dphero.methods.trainers.pretraining import pretrain
from dphero.models import FeatureModel, require_rowwise

_CHUNK = 1000
_BEFORE, _PROBE, _TUNE = "before", "probe", "fine-tuning"


def _shapes(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Size]:
    return {name: value.shape for name, value in state.items()}


class _RandPTrainer(Trainer):
    """Two private trainings, one after the other, on one engine: its ledger goes through both."""

    def __init__(self, card: Card, task: Task, method: DPRandP) -> None:
        super().__init__(card, task)
        recipe = task.recipe
        self.probe_steps = round(method.probe * self.steps)
        if self.probe_steps < self.steps:  # fine-tuning refuses them too, but when the probe has been paid for
            require_private_modules(task.module)
        if recipe.epsilon is not None:
            self.noise_multiplier = calibrate_noise_multiplier(
                recipe.epsilon, recipe.delta, task.sample_rate, self.steps, recipe.accountant
            )
        elif recipe.noise_multiplier is not None:
            self.noise_multiplier = recipe.noise_multiplier
        else:
            raise ValueError(f"method {card.name!r} is private: give --epsilon or --noise-multiplier")
        self.method = method
        self.engine = PrivacyEngine(accountant=recipe.accountant)
        self.head = head_of(task.module, task.images.new_zeros(2, *task.images.shape[1:]))
        self.average = WeightAverage(task.module, recipe.averaging or "late")
        self.model = self.average.mean
        self.phase, self.ready = _BEFORE, False
        self.trainer: PrivateTrainer | None = None
        # drawn now and saved from the start, so that a run that is killed repeats its noise instead of drawing it anew
        self.seeds = {} if recipe.secure else {phase: key_of(recipe.seed, phase) for phase in (_PROBE, _TUNE)}

    @property
    def step(self) -> int:
        """How many lots were released, in both phases."""
        if self.trainer is None:
            return 0
        return self.trainer.step + (self.probe_steps if self.phase == _TUNE else 0)

    @property
    def ledger(self) -> Ledger:
        """The engine's ledger."""
        return self.engine.ledger

    def advance(self) -> Step:
        """Release a lot; learn from synthetic images before the first."""
        if self.trainer is None:
            for _ in self.prepare():
                pass
            self._attach(_PROBE if self.probe_steps else _TUNE)
            self.average.restart()
        elif self.phase == _PROBE and self.trainer.step >= self.probe_steps:
            self.trainer.close()
            self.average.give()
            self._attach(_TUNE)
            self.average.restart()
        assert self.trainer is not None
        step = self.trainer.advance()
        self.average.take()
        return step

    def prepare(self) -> Iterator[float]:
        """Learn from synthetic images, from first weights that all runs share: what was learned serves them all."""
        if self.ready:
            return
        method, task = self.method, self.task
        shape = (task.images.shape[1], task.images.shape[2], task.images.shape[3])
        if method.pretrain_steps:
            first = method.network(models.build(task.recipe.model, shape, task.classes)).state_dict()
            if _shapes(first) == _shapes(task.module.state_dict()):  # unless the network is not the recipe's
                task.module.load_state_dict(first)
            yield from pretrain(
                task.module, self.head, shape, method.process, method.pretrain_steps, method.pretrain_batch
            )
        with torch.no_grad():
            for parameter in self.head.linear.parameters():
                parameter.zero_()
        self.ready = True

    def _attach(self, phase: str) -> None:
        """Make the module of a phase private; the engine's ledger and limit cover both phases."""
        self.phase, recipe = phase, self.task.recipe.with_(averaging=None)  # here one mean goes through both phases
        if phase == _PROBE:
            recipe = recipe.with_(lr=self.method.probe_lr or recipe.lr, views=None, augment=None)
        task = replace(self.task, recipe=recipe)
        self.trainer = PrivateTrainer(
            self.card,
            task,
            module=self.head.linear if phase == _PROBE else None,
            train=self._embedded() if phase == _PROBE else None,
            noise_multiplier=self.noise_multiplier,
            optimizer=self._optimizer() if phase == _TUNE else None,
            engine=self.engine,
            seed=self.seeds.get(phase),
            options={"guidance": "isotropic"},
        )

    def _optimizer(self) -> torch.optim.Optimizer:
        """The recipe's optimizer for the whole network, with a learning rate of its own for the last layer."""
        optimizer = self.task.optimizer(self.task.module)
        if self.method.head_lr is not None:
            (group,), last = optimizer.param_groups, list(self.head.linear.parameters())
            group["params"] = [one for one in group["params"] if all(one is not other for other in last)]
            optimizer.add_param_group({"params": last, "lr": self.method.head_lr})
        return optimizer

    @torch.no_grad()
    def _embedded(self) -> TensorDataset:
        """What goes into the last layer, for all images: it stays the same while that layer alone is trained."""
        images, labels = self.task.train.tensors
        body = headless(self.task.module.eval())
        require_rowwise(body, images[:_CHUNK], f"model {self.task.recipe.model!r} before its last layer")
        parts = [self.head.whitened(body(part)) for part in images.split(_CHUNK)]
        return TensorDataset(torch.cat(parts), labels)

    def price(self, delta: float, *, coarse: bool = False) -> Price:
        """Return what both phases cost."""
        return self.engine.price(delta, coarse=coarse)

    def statement(self, delta: float) -> Statement:
        """Return the engine's statement."""
        made = self.engine.statement(delta, unit=self.card.protects)
        if self.task.recipe.seed is None:  # the engine was given seeds, but nobody chose them
            made = replace(made, notes=tuple(note for note in made.notes if note != SEEDED))
        return made

    def save(self, path: str | PathLike[str], extra: Mapping[str, Any]) -> None:
        """Write the checkpoint of the present phase, with the whole network."""
        own = {
            "phase": self.phase,
            "network": self.task.module.state_dict(),
            "average": self.average.state(),
            "seeds": {phase: str(seed) for phase, seed in self.seeds.items()},
            "extra": dict(extra),
        }
        if self.trainer is None:
            checkpoint.save(path, {}, None, own)
        else:
            self.trainer.save(path, own)

    def load(self, path: str | PathLike[str]) -> dict[str, Any]:
        """Go on in the phase that was saved."""
        saved = checkpoint.load(path)
        if not {"phase", "network", "average", "seeds", "extra"} <= saved.extra.keys():
            raise ValueError(f"{path} was not saved by method {self.card.name!r}")
        if bool(saved.extra["seeds"]) == self.task.recipe.secure:
            raise ValueError("the checkpoint was made with another choice of --secure; resume with the same one")
        self.task.module.load_state_dict(saved.extra["network"])
        self.average.restore(saved.extra["average"])
        self.seeds = {phase: int(seed) for phase, seed in saved.extra["seeds"].items()}
        if saved.extra["phase"] == _BEFORE:
            saved.restore_random()
        else:
            self.ready = True
            self._attach(saved.extra["phase"])
            assert self.trainer is not None
            self.trainer.load(path)
        return dict(saved.extra["extra"])

    def close(self) -> None:
        """Detach the engine."""
        if self.trainer is not None:
            self.trainer.close()


@register
@dataclass(frozen=True)
class DPRandP(Method):
    """Learn from synthetic images, without privacy because there is nobody in them; then train privately.

    1. The network learns, all but its last layer, to know two views of a synthetic image among many.
    2. Its last layer alone is trained by DP-SGD on the private images (the probe).
    3. All of it is trained by DP-SGD. One noise multiplier serves both, calibrated for the sum of their steps.

    What is released is a mean of the weights over the late steps, as in the paper. Unlike there, the last layer sees
    features without mean and correlation, measured on synthetic images. The paper trains far longer on its images, and
    sees every private image in 16 versions, which is not done here.

    Attributes:
        process: Where synthetic images come from: ``leaves`` (shapes on one another), ``spectrum`` (coloured noise) or
            ``network`` (painted by random networks, as in the paper).
        pretrain_steps: Steps on synthetic images; 0 for none.
        pretrain_batch: Synthetic images in a step.
        probe: Share of the private steps that trains the last layer alone; 0.11 in the paper.
        probe_lr: Learning rate of that; the recipe's unless given.
        head_lr: Learning rate of the last layer when all layers are trained; the recipe's unless given.
    """

    card: ClassVar[Card] = Card(
        name="dp-randp",
        title="DP-SGD on a network that has learned from synthetic images",
        protects="one training example",
        relation="add or remove",
        sampling="Poisson",
        paper="Tang, Panda, Sehwag and Mittal 2023 (arXiv 2306.06076), Differentially Private Image Classification by "
        "Learning Priors from Random Processes",
        priced="PLD of the Poisson-sampled Gaussian, probe and fine-tuning in one ledger",
        flaws=("much of its gain is generic low-level features: pre-training on satellite images does nearly as well",),
        extra_data="synthetic images of a random process, made here; no real image",
    )

    defaults: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "digits": {"options": {"pretrain_steps": 150, "pretrain_batch": 128}},
        "mnist": {"options": {"pretrain_steps": 1000}},
        "fashion-mnist": {"options": {"pretrain_steps": 1000}},
        "cifar10": {
            "model": "wrn-16-4-norm-first",
            "lot": 4096,
            "epochs": 20,
            "lr": 2.0,
            "clip": 1.0,
            "momentum": 0.0,
            "options": {
                "process": "network",
                "pretrain_steps": 12000,
                "pretrain_batch": 512,
                "probe": 0.15,
                "probe_lr": 30.0,
                "head_lr": 10.0,
            },
        },
    }

    process: str = "leaves"
    pretrain_steps: int = 400
    pretrain_batch: int = 256
    probe: float = 0.11
    probe_lr: float | None = None
    head_lr: float | None = None

    def __post_init__(self) -> None:
        one_of("process", self.process, tuple(PROCESSES))
        if self.pretrain_steps != 0:
            whole("pretrain_steps (if not 0)", self.pretrain_steps)
        if whole("pretrain_batch", self.pretrain_batch) < 2:
            raise ValueError(f"pretrain_batch must be at least 2, got {self.pretrain_batch}")
        if self.probe != 0 and not positive("probe (if not 0)", self.probe) <= 1:
            raise ValueError(f"probe is a share of the steps, at most 1, got {self.probe!r}")
        for name in ("probe_lr", "head_lr"):
            if getattr(self, name) is not None:
                positive(name, getattr(self, name))

    def network(self, model: nn.Module) -> nn.Module:
        """Return the network with a fixed map before its last layer."""
        return with_head(model)

    def start(self, task: Task) -> Trainer:
        """Begin a training."""
        if isinstance(task.model, FeatureModel):
            raise ValueError(
                f"method 'dp-randp' learns features, and model {task.recipe.model!r} has fixed ones: give a --model "
                "without, such as tanh-cnn or wrn-16-4"
            )
        if task.recipe.guidance == "prior":
            raise ValueError(
                "guidance 'prior' shapes the noise of the recipe's own network, and method 'dp-randp' begins with its "
                "last layer alone: leave --guidance out"
            )
        if task.recipe.secure and task.recipe.seed is not None:
            raise ValueError("--secure draws from the operating system; it takes no --seed")
        if task.recipe.accountant == "filter":
            raise ValueError(
                "method 'dp-randp' makes two private trainings, and a Rényi filter has to be fixed for one: leave "
                "--accountant filter out; its noise is fixed in advance, and pld gives the least price"
            )
        if task.images.dim() != 4:
            raise ValueError("method 'dp-randp' learns from synthetic images, and this data is none: it has no pixels")
        return _RandPTrainer(self.card, task, self)
