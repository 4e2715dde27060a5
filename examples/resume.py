"""Stop private training, continue it in another process, and end where an unbroken run would have ended.

    python examples/resume.py

The checkpoint holds model, optimizer, scheduler, ledger, guidance, and where lots and noise stand: no noise is drawn
twice, and nothing is charged twice. It also holds the key of the noise, so keep it as secret as the data.
"""

import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

from dphero import PrivacyEngine

generator = torch.Generator().manual_seed(0)
features = torch.randn(400, 20, generator=generator)
targets = (features[:, 0] > 0).long()


def start():
    """Everything as it is before the first step: a resumed run is set up with the same arguments."""
    torch.manual_seed(1)  # the initial weights are public
    model = nn.Linear(20, 2)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.9)
    engine = PrivacyEngine()
    _, _, loader = engine.make_private(
        module=model,
        optimizer=optimizer,
        data_loader=TensorDataset(features, targets),
        noise_multiplier=1.5,
        max_grad_norm=1.0,
        expected_batch_size=50,
        dataset_size="public",
        seed=7,  # only to compare two runs; leave it out, and every run has noise of its own
    )
    return engine, model, optimizer, scheduler, loader


def train(model, optimizer, scheduler, loader, epochs):
    for _ in range(epochs):
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
        scheduler.step()


with tempfile.TemporaryDirectory() as folder:
    path = Path(folder) / "run.pt"

    engine, model, optimizer, scheduler, loader = start()
    train(model, optimizer, scheduler, loader, epochs=2)
    engine.save(path, scheduler=scheduler, extra={"epoch": 2})

    engine, model, optimizer, scheduler, loader = start()  # another process, another day
    epoch = engine.load(path, scheduler=scheduler)["epoch"]
    print(f"resumed after epoch {epoch}, {engine.steps} steps, epsilon {engine.get_epsilon(1e-4):.3f}")
    train(model, optimizer, scheduler, loader, epochs=2)
    resumed = model.weight.detach().clone()
    print(f"finished after {engine.steps} steps, epsilon {engine.get_epsilon(1e-4):.3f}")

engine, model, optimizer, scheduler, loader = start()
train(model, optimizer, scheduler, loader, epochs=4)
print("same weights as an unbroken run:", torch.equal(resumed, model.weight))
