"""A layer rule and a guidance of one's own.

    python examples/custom_layer_and_guidance.py

Most modules need no rule: their code is followed as it runs. A rule makes a layer fast, because it never forms the
per-example gradients of a product. A guidance decides, from released things only, where the noise goes.
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import dphero
from dphero.geometry import Geometry, Scalar
from dphero.gradients import Outer


class LowRank(nn.Module):
    """y = up · down · x."""

    def __init__(self, inputs: int, rank: int, outputs: int) -> None:
        super().__init__()
        self.down = nn.Parameter(torch.randn(rank, inputs) / inputs**0.5)
        self.up = nn.Parameter(torch.randn(outputs, rank) / rank**0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.down.T @ self.up.T


@dphero.register(LowRank)
def low_rank(call, x):
    """For each product: how to compute it, and each example's gradient as an outer product."""
    hidden = call.tap(lambda: x @ call["down"].T, lambda delta, x: {"down": Outer(delta, x)}, x)
    return call.tap(lambda: hidden @ call["up"].T, lambda delta, hidden: {"up": Outer(delta, hidden)}, hidden)


class BySize:
    """Noise in proportion to each weight's size: weights that are large can bear more of it.

    `released` holds present weights and past noisy gradients, nothing else, so any rule is allowed here.
    """

    refresh_every = 5
    needs_gradients = False

    def observe(self, released):
        """Called after each release if `needs_gradients`."""

    def geometry(self, released):
        sizes = {block.name: block.value.square().mean().sqrt().item() for block in released.blocks}
        mean = sum(sizes.values()) / len(sizes)
        return {
            block.name: Geometry(block.value.shape, left=Scalar(len(block.value), sizes[block.name] / mean + 0.1))
            for block in released.blocks
        }

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass


torch.manual_seed(0)
features = torch.randn(500, 32)
targets = (features[:, :4].sum(1) > 0).long()
model = nn.Sequential(LowRank(32, 4, 16), nn.Tanh(), nn.Linear(16, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
engine = dphero.PrivacyEngine()
model, optimizer, loader = engine.make_private(
    module=model,
    optimizer=optimizer,
    data_loader=TensorDataset(features, targets),
    noise_multiplier=1.0,
    max_grad_norm=1.0,
    expected_batch_size=100,
    dataset_size="public",
    guidance=BySize(),
)
for _ in range(10):
    for x, y in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
model.eval()
print(f"training accuracy {(model(features).argmax(1) == targets).float().mean():.1%}")
print(f"epsilon {engine.get_epsilon(1e-4):.2f}: the same for every guidance")
