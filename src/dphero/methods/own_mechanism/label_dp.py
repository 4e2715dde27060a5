"""Label privacy: labels are randomised once, then training is ordinary (Ghazi et al. 2021).

    stage 0      randomised response on the labels of the first part, and a first model
    stage t      RRWithPrior on the labels of the next part, the prior being what the last model thinks of their images;
                 a new model from all randomised labels so far

Only labels are protected. The images count as public: everything is computed from them without noise.
"""

from __future__ import annotations

import hashlib
import math
import os
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from dphero._checks import positive, whole
from dphero.accounting import Ledger, RandomisedLabels
from dphero.methods.card import SEEDED, Card
from dphero.methods.method import Method, register
from dphero.methods.task import Task
from dphero.methods.trainer import Step, Trainer
from dphero.methods.trainers.base_trainer import OwnTrainer, key_of
from dphero.sampling import ShuffleSampler

_CHUNK = 1000
_LARGEST = 34.0  # ε: e^−34 is fifteen steps of the grid that random numbers lie on


def response(labels: Tensor, prior: Tensor, epsilon: float) -> Tensor:
    """Return the probability of each outcome for each label: RRWithPrior, randomised response for a flat prior.

    The k likeliest classes of an example are the only outcomes, k being the one that maximises
    w_k = Σ_{top k} prior / (1 + (k−1) e^−ε), the probability that the outcome is right if the prior is. A label among
    them is kept with probability 1 / (1 + (k−1) e^−ε), and becomes each other one of them with e^−ε times that;
    any other label becomes each of the k with probability 1/k.

    Guarantee:
        Two labels' probabilities of one outcome differ at most by the factor e^ε, whatever the prior, as long as it
        does not depend on this example's label.

    Args:
        labels: One for each example.
        prior: Probabilities of the classes, one row for each example, in float64.
        epsilon: ε.
    """
    classes = prior.shape[1]
    order = prior.argsort(dim=1, descending=True, stable=True)
    away = math.exp(-epsilon)
    others = torch.arange(classes, dtype=torch.float64)  # k − 1
    size = 1 + (prior.gather(1, order).cumsum(1) / (1 + others * away)).argmax(1, keepdim=True).double()
    place = order.argsort(dim=1)
    possible = place < size
    kept = 1 / (1 + (size - 1) * away)
    is_label = F.one_hot(labels, classes).bool()
    inside = possible.gather(1, labels[:, None])
    probabilities = torch.where(inside, torch.where(is_label, kept, kept * away), 1 / size)
    return torch.where(possible, probabilities, 0.0)


class LabelRandomiser:
    """Holds the true labels, lets each of them out once, randomised, and charges for it.

    Args:
        labels: The true labels.
        epsilon: ε of each release.
        key: Secret key of the randomness; ``None`` draws it from the operating system.
    """

    def __init__(self, labels: Tensor, epsilon: float, key: int | None) -> None:
        self.epsilon, self.key = epsilon, key
        self._labels = labels.cpu()

    def release(self, part: int, index: Tensor, prior: Tensor, ledger: Ledger) -> Tensor:
        """Return randomised labels of one part of the data, after charging the ledger for them.

        Args:
            part: Its number, larger than those before: parts are disjoint.
            index: Its examples.
            prior: What is thought of their classes without knowing these labels.
            ledger: Charged.
        """
        before = [event.part for event in ledger.counts if isinstance(event, RandomisedLabels)]
        assert part > max(before, default=-1), "a label is released once"
        ledger.record(RandomisedLabels(self.epsilon, part))
        probabilities = response(self._labels[index], prior.cpu().double(), self.epsilon)
        reached = probabilities.cumsum(1)
        reached = reached / reached[:, -1:]  # ends at 1 exactly, where the last possible class is
        return (reached > self._uniform(index, probabilities)[:, None]).int().argmax(1)

    def _uniform(self, index: Tensor, probabilities: Tensor) -> Tensor:
        """Numbers in [0, 1), on the grid of 53 bits; those of a key are each bound to the probabilities of its example.

        Those of the other examples have no part in it: one label decides its own outcome alone.
        """
        if self.key is None:
            drawn = os.urandom(8 * len(probabilities))
        else:
            key = self.key.to_bytes(16)
            held = zip(index.tolist(), probabilities.contiguous().numpy(), strict=True)
            drawn = b"".join(
                hashlib.blake2b(row.tobytes(), key=key, salt=place.to_bytes(16), digest_size=8).digest()
                for place, row in held
            )
        return torch.from_numpy((np.frombuffer(drawn, dtype=np.uint64) >> np.uint64(11)) * 2.0**-53)


def _generator(key: int, number: int) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(key=key, counter=[0, 0, number, 1]))


class _LabelTrainer(OwnTrainer):
    def __init__(self, card: Card, task: Task, method: LabelDP) -> None:
        super().__init__(card, task)
        recipe, count = task.recipe, len(task.train)
        assert recipe.epsilon is not None
        self.method = method
        self.inputs, labels = task.train.tensors
        key = None if recipe.secure else key_of(recipe.seed, "labels")
        self.randomiser = LabelRandomiser(labels, recipe.epsilon, key)
        self.batches_key = key_of(recipe.seed, "batches")  # of no importance for privacy: labels are randomised first
        self.order = torch.from_numpy(_generator(key_of(recipe.seed, "parts"), 0).permutation(count))
        self.ends = method.ends(count)  # of each part, in that order
        lots = [max(1, round(recipe.epochs * end / recipe.lot)) for end in self.ends]
        self.starts = [sum(lots[:stage]) for stage in range(len(lots) + 1)]
        self.steps = self.starts[-1]
        self.stage = -1
        self.noisy = torch.full((count,), -1)
        self.members = self.order[:0]
        self._shuffled: tuple[int, ShuffleSampler] | None = None
        self._first_weights = {name: value.clone() for name, value in self.module.state_dict().items()}

    @property
    def accountant(self) -> str:
        """Pure ε; δ is not needed."""
        return "pure"

    @property
    def notes(self) -> tuple[str, ...]:
        """What must not be overlooked."""
        labels = "Only labels are protected: whoever sees the model may learn anything about the images."
        return (labels,) if self.task.recipe.seed is None else (labels, SEEDED)

    def take(self) -> Step:
        """Train on a batch of randomised labels; at the start of a stage, randomise its part first."""
        stage = bisect_right(self.starts, self.step) - 1
        if stage != self.stage:
            self._open(stage)
        first, last = self.starts[stage : stage + 2]
        for group in self.optimizer.param_groups:
            group["lr"] = self.task.recipe.lr * (1 - (self.step - first) / (last - first))
        batch = self.members[self._sampler().draw(self.step - first)]
        self.optimizer.zero_grad()
        loss = self._loss(self.inputs[batch.to(self.task.device)], self.noisy[batch].to(self.task.device))
        loss.backward()
        self.optimizer.step()
        return Step(loss=loss.detach())

    def _sampler(self) -> ShuffleSampler:
        if self._shuffled is None or self._shuffled[0] != self.stage:
            lot = min(self.task.recipe.lot, len(self.members))
            self._shuffled = (self.stage, ShuffleSampler(len(self.members), lot, self.batches_key ^ self.stage))
        return self._shuffled[1]

    def _loss(self, inputs: Tensor, labels: Tensor) -> Tensor:
        """Mixup: x = λ x₁ + (1−λ) x₂ has the labels of both, in that proportion; λ ~ Beta(α, α)."""
        if not self.method.mixup:
            return F.cross_entropy(self.module(inputs), labels)
        random = _generator(self.batches_key, self.step)
        share = float(random.beta(self.method.mixup, self.method.mixup))
        other = torch.from_numpy(random.permutation(len(labels))).to(labels.device)
        outputs = self.module(share * inputs + (1 - share) * inputs[other])
        return share * F.cross_entropy(outputs, labels) + (1 - share) * F.cross_entropy(outputs, labels[other])

    def _open(self, stage: int) -> None:
        """Randomise the labels of one more part, then begin a new model on all of them."""
        cuts = [0, *self.ends]
        part, earlier = self.order[cuts[stage] : cuts[stage + 1]], self.order[: cuts[stage]]
        flat = torch.full((len(part), self.task.classes), 1 / self.task.classes, dtype=torch.float64)
        prior = flat if stage == 0 else (self._outputs(part) / self.method.temperature).softmax(1)
        self.noisy[part] = self.randomiser.release(stage, part, prior, self._ledger)
        if stage and self.method.keep_top:
            likely = self._outputs(earlier).topk(min(self.method.keep_top, self.task.classes)).indices
            earlier = earlier[(likely == self.noisy[earlier][:, None]).any(1)]
        self.members, self.stage = torch.cat([earlier, part]), stage
        self.module.load_state_dict(self._first_weights)
        self.optimizer = self.task.optimizer(self.module)

    @torch.no_grad()
    def _outputs(self, index: Tensor) -> Tensor:
        self.module.eval()
        parts = [self.module(self.inputs[part.to(self.task.device)]).double().cpu() for part in index.split(_CHUNK)]
        self.module.train()
        return torch.cat(parts)

    def state(self) -> dict[str, Any]:
        own = {name: getattr(self, name) for name in ("stage", "noisy", "members", "order")}
        return {**super().state(), **own, "keys": [_text(self.randomiser.key), str(self.batches_key)]}

    def restore(self, state: Mapping[str, Any]) -> None:
        super().restore(state)
        for name in ("stage", "noisy", "members", "order"):
            setattr(self, name, state[name])
        self._shuffled = None
        key, batches_key = state["keys"]
        self.randomiser.key, self.batches_key = None if key is None else int(key), int(batches_key)

    def _require_same(self, state: Mapping[str, Any]) -> None:
        """Refuse also labels that were randomised in other parts: some would be a second time, and be charged once."""
        super()._require_same(state)
        if (state["keys"][0] is None) != self.task.recipe.secure:
            raise ValueError("the checkpoint was made with another choice of --secure; resume with the same one")
        released, parts = int((state["noisy"] >= 0).sum()), int(state["stage"]) + 1
        if parts > len(self.ends) or released != [0, *self.ends][parts]:
            raise ValueError(
                f"the checkpoint has {released} labels randomised in {parts} parts, and here the parts end at "
                f"{', '.join(map(str, self.ends))}: resume with the same stages and first_share"
            )


def _text(key: int | None) -> str | None:
    return None if key is None else str(key)


@register
@dataclass(frozen=True)
class LabelDP(Method):
    """LP-MST: randomised labels in stages, each model the prior for the next part's labels; mixup against their noise.

    One stage is plain randomised response. ``--epsilon`` is pure ε for each label; nothing else is protected, and
    there is no noise multiplier. The recipe's epochs count passes over the data of a stage. Each stage starts from
    the first weights, and the learning rate falls to 0 in the course of it; of both the source says nothing here.

    Attributes:
        stages: How many parts the data is split in; 1 is plain randomised response.
        first_share: Share of the data in the first part, whose labels are randomised without a prior.
        temperature: Of the softmax that makes a prior of the last model's outputs.
        mixup: α of mixup's Beta(α, α), 4 to 16 in the paper; 0 for none, which is better where training is short.
        keep_top: From earlier parts, keep only examples whose randomised label is among the last model's so many
            likeliest classes; 0 keeps all.
    """

    card: ClassVar[Card] = Card(
        name="label-dp",
        title="Label privacy by randomised response in stages (LP-MST): LABELS ONLY",
        protects="the label of one training example",
        relation="replace a label",
        sampling="each label is randomised once; batches do not matter",
        paper="Ghazi, Golowich, Kumar, Manurangsi and Zhang 2021 (arXiv 2102.06062), Deep Learning with Label DP",
        priced="pure ε of randomised response (δ = 0)",
        flaws=(
            "protects labels only, images are public: its ε cannot be compared with one that protects examples",
            "the published code chooses k* with an index that is off by one (accuracy suffers, privacy does not)",
        ),
    )

    defaults: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "*": {"lot": 256, "lr": 0.05, "momentum": 0.9, "epochs": 10},
        "digits": {"lot": 64, "epochs": 20},
        "mnist": {"model": "lenet", "epochs": 6, "options": {"stages": 3}},
        "fashion-mnist": {"model": "lenet", "epochs": 6, "options": {"stages": 3}},
        "cifar10": {
            "model": "wrn-16-4-norm-first",
            "lot": 512,
            "lr": 0.4,
            "epochs": 60,
            "options": {"mixup": 8.0},
        },
    }

    stages: int = 2
    first_share: float = 0.6
    temperature: float = 0.5
    mixup: float = 0.0
    keep_top: int = 0

    def __post_init__(self) -> None:
        whole("stages", self.stages)
        positive("temperature", self.temperature)
        if not 0 < positive("first_share", self.first_share) < 1:
            raise ValueError(f"first_share must lie between 0 and 1, got {self.first_share!r}")
        if self.mixup != 0:
            positive("mixup (if not 0)", self.mixup)
        if self.keep_top != 0:
            whole("keep_top (if not 0)", self.keep_top)

    def ends(self, count: int) -> list[int]:
        """Return where each part ends: the first has its share, the others divide the rest equally."""
        if self.stages == 1:
            return [count]
        first, later = round(self.first_share * count), self.stages - 1
        ends = [first + round((count - first) * part / later) for part in range(self.stages)]
        if first < 1 or len(set(ends)) < len(ends):
            raise ValueError(f"{count} examples are too few for {self.stages} stages, the first of {first}")
        return ends

    def start(self, task: Task) -> Trainer:
        """Begin a training."""
        recipe = task.recipe
        if recipe.epsilon is None:
            raise ValueError("method 'label-dp' randomises labels and has no noise multiplier: give --epsilon")
        if recipe.epsilon > _LARGEST:
            raise ValueError(
                f"epsilon {recipe.epsilon:g} is more than 'label-dp' can keep: above {_LARGEST:g} a label changes so "
                "seldom that 53 random bits do not tell how seldom; it would hardly protect anybody either"
            )
        if recipe.accountant not in ("pld", "pure"):  # pld is the recipe's default
            raise ValueError(f"method 'label-dp' is priced by pure, not by accountant {recipe.accountant!r}")
        if recipe.secure and recipe.seed is not None:
            raise ValueError("--secure draws from the operating system; it takes no --seed")
        for field in ("clipping", "guidance", "mechanism"):
            if (value := getattr(recipe, field)) is not None:
                raise ValueError(f"method 'label-dp' adds no noise to gradients: leave out --{field} {value}")
        return _LabelTrainer(self.card, self.settled(task), self)
