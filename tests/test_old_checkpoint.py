"""A checkpoint written before the modules moved into rooms is read, and its run goes on with the same lots and sums.

Its noise is drawn anew (noise has had addresses since), so that run was made with next to none: what is compared
are the lots, the clipped sums under the noise's geometry, and the optimizer's momentum.
"""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from dphero import PrivacyEngine

HERE = Path(__file__).parent / "checkpoints"


def test_a_checkpoint_from_before_the_rooms_goes_on_as_it_would_have_gone_on() -> None:
    model, optimizer, loader, engine = the_run()
    engine.load(HERE / "before-rooms.pt")
    at_the_checkpoint = {name: value.clone() for name, value in model.state_dict().items()}
    for images, labels in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(images), labels).backward()
        optimizer.step()
    expected: dict[str, Tensor] = torch.load(HERE / "before-rooms-went-on.pt", weights_only=True)
    for name, value in model.state_dict().items():
        assert (expected[name] - at_the_checkpoint[name]).abs().max() > 1e-3
        torch.testing.assert_close(value, expected[name], rtol=0, atol=1e-6)
    assert engine.steps == 6


def the_run() -> tuple[nn.Module, torch.optim.Optimizer, DataLoader, PrivacyEngine]:
    """Make the run of the checkpoint: 120 images that are a formula, three lots of about 40 in an epoch."""
    numbers = torch.arange(120 * 36).double()
    images = torch.sin(numbers * 1.7 + numbers**1.5 / 50).float().view(120, 1, 6, 6)
    model: nn.Module = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Tanh(), nn.Flatten(), nn.Linear(64, 3))
    engine = PrivacyEngine()
    model, optimizer, loader = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9),
        data_loader=DataLoader(TensorDataset(images, torch.arange(120) % 3), batch_size=40),
        noise_multiplier=1e-8,
        max_grad_norm=0.1,
        dataset_size="public",
        guidance="pca",
        seed=7,
    )
    return model, optimizer, loader, engine
