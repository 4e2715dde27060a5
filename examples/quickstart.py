"""Private training in a plain PyTorch loop, on scikit-learn's handwritten digits.

    python examples/quickstart.py

What is new in the loop's surroundings is marked. `dphero demo` trains longer on the same data, to about 94 %.
"""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from dphero import PrivacyEngine  # new

digits = load_digits()
images = torch.tensor(digits.data, dtype=torch.float32) / 8 - 1
labels = torch.tensor(digits.target)
train, test = slice(0, 1500), slice(1500, None)

model = nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
loader = DataLoader(TensorDataset(images[train], labels[train]), batch_size=300)

engine = PrivacyEngine()  # new
model, optimizer, loader = engine.make_private_with_epsilon(  # new
    module=model,
    optimizer=optimizer,
    data_loader=loader,
    target_epsilon=3.0,
    target_delta=1e-4,
    epochs=10,
    max_grad_norm=0.5,
    dataset_size="public",  # that there are 1,500 records is no secret here
)

for _ in range(10):
    for x, y in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()

model.eval()
with torch.no_grad():
    accuracy = (model(images[test]).argmax(1) == labels[test]).float().mean().item()
print(f"test accuracy {accuracy:.1%} after {engine.steps} steps at epsilon {engine.get_epsilon(1e-4):.2f}\n")
print(engine.statement(delta=1e-4, unit="one image"))  # new
