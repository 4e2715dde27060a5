"""Whether a model can be trained privately: exact, or refused with a reason; never wrong.

The whole public path is used: ``make_private``, one lot, one ``backward``. What is released, with next to no noise and
half of the examples clipped, is compared with micro-batches of one.
"""

from __future__ import annotations

import contextlib
import copy
import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from dphero import PrivacyEngine
from tests.oracle.micro_batches import trained

ROWS = 4
TOLERANCE = 1e-3
_CHANCES = ("drop_prob", "dropout_prob", "dropout")

Batch = Mapping[str, Tensor]


@dataclass(frozen=True)
class Model:
    """A model, a batch for it, and what is trained on.

    Attributes:
        module: The model.
        batch: Its keyword arguments by name, examples in axis 0.
        loss: ``loss(module, batch)``, a mean over the examples.
        settled: Makes the same random numbers for an example in every batch, where dropout is not all that is random.
    """

    module: nn.Module
    batch: Batch
    loss: Callable[[nn.Module, Batch], Tensor] = field(default=lambda module, batch: mean(module(**batch)))
    settled: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext


@dataclass(frozen=True)
class Verdict:
    """What came of it.

    Attributes:
        exact: Whether it was accepted (it then must be exact).
        reason: Why it was refused.
        error: The largest difference to micro-batches of one, relative to each parameter's largest entry.
        parameters: How many numbers are trained.
        step_seconds: One ordinary step, forward and backward.
        first_seconds: The first private step, which examines the model.
    """

    exact: bool
    reason: str
    error: float
    parameters: int
    step_seconds: float
    first_seconds: float


def mean(out: Any) -> Tensor:
    """Return a mean over the examples of something that depends on every output in its own way."""
    for name in ("logits", "last_hidden_state", "sample", "reconstruction", "predicted_image_embedding"):
        if getattr(out, name, None) is not None:
            out = getattr(out, name)
    out = out[0] if isinstance(out, tuple | list) else out
    out = out.flatten(1)
    return torch.sin(out * torch.arange(1.0, out.shape[1] + 1, dtype=out.dtype).cos()).mean(1).mean()


def examine(make: Callable[[], Model]) -> Verdict:
    """Try to train a model privately, and compare with micro-batches of one."""
    torch.manual_seed(0)
    model = make()
    model.module.train()
    parameters = sum(parameter.numel() for parameter in trained(model.module).values())
    seconds = min(_ordinary_step(model) for _ in range(3))
    try:
        _, first_seconds = _private(model, clip=1.0)  # with its own random numbers, as a user would
        with same_dropout(model.module), model.settled():
            expected = _micro_batches(model)
            assert all(map(torch.equal, expected.values(), _micro_batches(model).values())), "random numbers are left"
            norms = torch.stack([gradients.flatten(1).norm(dim=1) for gradients in expected.values()]).norm(dim=0)
            clip = float(norms.median()) or 1.0
            found, _ = _private(model, clip)
    except (ValueError, RuntimeError, NotImplementedError) as error:
        return Verdict(False, " ".join(str(error).split()), math.nan, parameters, seconds, math.nan)
    factors = (clip / norms.clamp(min=1e-30)).clamp(max=1.0)
    largest = max(float(gradients.abs().max()) for gradients in expected.values())
    errors = [0.0]
    for name, gradients in expected.items():
        wanted = torch.einsum("n,n...->...", factors.to(gradients.dtype), gradients) / ROWS
        scale = max(float(wanted.abs().max()), 1e-3 * largest)
        errors.append(float((found[name] - wanted).abs().max()) / scale if name in found else math.inf)
    return Verdict(True, "", max(errors), parameters, seconds, first_seconds)


@contextlib.contextmanager
def same_dropout(module: nn.Module) -> Iterator[None]:
    """Let dropout draw for each example the mask that it draws in a batch of one: a function of the shape alone."""
    attention = F.scaled_dot_product_attention

    def dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        if not training or p == 0:
            return input
        generator = torch.Generator().manual_seed(math.prod(input.shape[1:]) + input.dim())
        mask = (torch.rand(input.shape[1:], generator=generator) >= p).to(input.dtype) / (1 - p)
        return input * mask

    def attend(
        query: Tensor, key: Tensor, value: Tensor, mask: Any = None, dropout_p: float = 0.0, *rest: Any, **more: Any
    ):
        mask = more.pop("attn_mask", mask)
        return attention(query, key, value, mask, 0.0, *rest, **{n: v for n, v in more.items() if n != "dropout_p"})

    chances = [
        (child, name) for child in module.modules() for name in _CHANCES if isinstance(vars(child).get(name), float)
    ]
    with (
        contextlib.ExitStack() as stack,
        mock.patch.object(F, "dropout", dropout),
        mock.patch.object(torch, "dropout", lambda input, p, train: dropout(input, p, train)),
        mock.patch.object(F, "scaled_dot_product_attention", attend),
    ):
        for child, name in chances:  # whole branches or labels that are left out, and what is drawn inside torch
            if isinstance(child, nn.RNNBase) or name != "dropout":
                stack.enter_context(mock.patch.object(child, name, 0.0))
        yield


class _Rows(Dataset[dict[str, Tensor]]):
    def __init__(self, batch: Batch) -> None:
        self._batch = batch

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {name: part[index] for name, part in self._batch.items()}


def _private(model: Model, clip: float) -> tuple[dict[str, Tensor], float]:
    """Return the private gradient of the whole batch, and the time that this took."""
    module, engine = model.module, PrivacyEngine()
    state = copy.deepcopy(module.state_dict())
    _, _, loader = engine.make_private(
        module=module,
        optimizer=torch.optim.SGD(module.parameters(), lr=0.0),
        data_loader=DataLoader(_Rows(model.batch), batch_size=ROWS),
        noise_multiplier=1e-9,
        max_grad_norm=clip,
        guidance="isotropic",
        sample_rate=1.0,
        expected_batch_size=ROWS,
    )
    try:
        batch = next(iter(loader))
        began = time.perf_counter()
        model.loss(module, batch).backward()
        seconds = time.perf_counter() - began
        return {name: p.grad.clone() for name, p in trained(module).items() if p.grad is not None}, seconds
    finally:
        engine.detach()
        module.load_state_dict(state)
        module.zero_grad(set_to_none=True)


def _micro_batches(model: Model) -> dict[str, Tensor]:
    module = model.module
    state = copy.deepcopy(module.state_dict())
    gradients: dict[str, list[Tensor]] = {name: [] for name in trained(module)}
    for row in range(ROWS):
        module.load_state_dict(state)
        module.zero_grad(set_to_none=True)
        model.loss(module, {name: part[row : row + 1] for name, part in model.batch.items()}).backward()
        for name, parameter in trained(module).items():
            gradients[name].append(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.to_dense())
    module.load_state_dict(state)
    module.zero_grad(set_to_none=True)
    return {name: torch.stack([part.clone() for part in parts]) for name, parts in gradients.items()}


def _ordinary_step(model: Model) -> float:
    began = time.perf_counter()
    model.loss(model.module, model.batch).backward()
    seconds = time.perf_counter() - began
    model.module.zero_grad(set_to_none=True)
    return seconds
