"""DP-SGD: clip each example's gradient, add the same noise in all directions (Abadi et al. 2016)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from dphero.guidance import Isotropic
from dphero.methods.card import Card
from dphero.methods.method import Method, register
from dphero.methods.task import Task
from dphero.methods.trainer import Trainer
from dphero.methods.trainers.engine_trainer import PrivateTrainer


@register
@dataclass(frozen=True)
class DPSGD(Method):
    """Poisson lots, one clip norm over all parameters, isotropic Gaussian noise.

    Attributes:
        per_tensor: Clip each layer to C/√(number of layers) instead of the whole gradient to C. One release still
            moves by at most C, so the price is the same.
    """

    card: ClassVar[Card] = Card(
        name="dp-sgd",
        title="DP-SGD, isotropic noise",
        protects="one training example",
        relation="add or remove",
        sampling="Poisson",
        paper="Abadi et al. 2016, Deep Learning with Differential Privacy",
        priced="PLD of the Poisson-sampled Gaussian",
        flaws=(
            "published figures mostly use shuffled batches at the Poisson price",
            "the original clips each tensor apart and pays once for each",
        ),
    )

    per_tensor: bool = False

    def start(self, task: Task) -> Trainer:
        """Begin a training."""
        clipping = "per_layer" if self.per_tensor else "flat"
        return PrivateTrainer(self.card, task, options={"guidance": self.guidance(), "clipping": clipping})

    def guidance(self) -> Isotropic:
        """Return noise that is the same in all directions."""
        return Isotropic()
