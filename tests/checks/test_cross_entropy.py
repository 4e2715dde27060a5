"""Which losses are sure to be cross entropies of single vectors: those that derivatives need not be asked about."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dphero.checks.loss import check as loss_check
from dphero.checks.loss.check import LossCheck
from dphero.checks.loss.coupling import coupling, coupling_strength, is_of_vectors
from dphero.checks.loss.graph import output_edges

ROWS, LENGTH, CLASSES = 6, 4, 5
NAMES = torch.arange(ROWS * LENGTH).reshape(ROWS, LENGTH) % CLASSES
Y = NAMES[:, 0]
Loss = Callable[[Tensor], Tensor]


def of(loss: Loss, *shape: int) -> Tensor:
    """Return a loss of what a model returns in this shape."""
    watch = LossCheck(nn.Identity(), lambda: ROWS, "mean")
    torch.manual_seed(0)
    return loss(watch.watch(torch.randn(shape, requires_grad=True) * 1.0)).as_subclass(Tensor)


def words(out: Tensor) -> Tensor:
    return F.cross_entropy(out[:, :-1].flatten(0, 1), NAMES[:, 1:].flatten())


SURE: dict[str, tuple[Loss, tuple[int, ...]]] = {
    "classes": (lambda out: F.cross_entropy(out, Y), (ROWS, CLASSES)),
    "sum": (lambda out: F.cross_entropy(out, Y, reduction="sum") / 7, (ROWS, CLASSES)),
    "weighed": (lambda out: (F.cross_entropy(out, Y, reduction="none") * torch.arange(6.0)).mean(), (ROWS, CLASSES)),
    "by hand": (lambda out: F.nll_loss(out.log_softmax(1), Y), (ROWS, CLASSES)),
    "summed up in another type": (lambda out: F.nll_loss(out.log_softmax(1).double(), Y), (ROWS, CLASSES)),
    "words": (words, (ROWS, LENGTH, CLASSES)),
    "words in another type": (lambda out: words(out.double()), (ROWS, LENGTH, CLASSES)),
    "words in front": (
        lambda out: F.cross_entropy(out.reshape(-1, CLASSES), NAMES.T.flatten()),
        (LENGTH, ROWS, CLASSES),
    ),
    "two": (lambda out: F.cross_entropy(out, Y) + F.cross_entropy(out, Y.flip(0)), (ROWS, CLASSES)),
}
UNSURE: dict[str, tuple[Loss, tuple[int, ...]]] = {
    "over the examples, summed up in another type": (
        lambda out: F.nll_loss(out.log_softmax(0).double(), Y), (ROWS, CLASSES)
    ),
    "over the examples": (lambda out: F.cross_entropy(out.T, torch.arange(CLASSES) % ROWS), (ROWS, CLASSES)),
    "as many classes as examples": (lambda out: F.cross_entropy(out, Y), (ROWS, ROWS)),
    "all pairs": (lambda out: F.cross_entropy(out @ out.T, torch.arange(ROWS)), (ROWS, CLASSES)),
    "two examples in a vector": (lambda out: F.cross_entropy(out.reshape(3, -1), Y[:3]), (ROWS, CLASSES)),
    "vectors cut otherwise": (
        lambda out: F.cross_entropy(out.reshape(CLASSES, ROWS).reshape(-1, CLASSES), Y), (ROWS, CLASSES)
    ),
    "a square": (lambda out: F.cross_entropy(out, Y) ** 2, (ROWS, CLASSES)),
    "a product": (lambda out: F.cross_entropy(out, Y) * F.cross_entropy(out / 1, Y), (ROWS, CLASSES)),
    "with a term beside": (lambda out: F.cross_entropy(out, Y) + (out @ out.T).mean(), (ROWS, CLASSES)),
    "standardised": (lambda out: F.cross_entropy(out - out.mean(0), Y), (ROWS, CLASSES)),
    "one after the other": (lambda out: F.cross_entropy(out.cumsum(0), Y), (ROWS, CLASSES)),
}  # fmt: skip


@pytest.mark.parametrize("name", SURE)
def test_cross_entropies_of_single_vectors_are_known(name: str) -> None:
    loss = of(SURE[name][0], *SURE[name][1])
    assert is_of_vectors(loss.grad_fn, ROWS)
    assert coupling_strength(loss, output_edges(loss.grad_fn), ROWS, 0) < 1e-5  # and derivatives agree
    assert coupling(loss.grad_fn, ROWS, 0) < 1e-5


@pytest.mark.parametrize("name", UNSURE)
def test_of_anything_else_derivatives_are_asked(name: str) -> None:
    assert not is_of_vectors(of(UNSURE[name][0], *UNSURE[name][1]).grad_fn, ROWS)


def test_no_derivative_is_taken_of_a_cross_entropy(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Tensor] = []

    def strength(loss: Tensor, *_: object) -> float:
        asked.append(loss)
        return 0.0

    monkeypatch.setattr(loss_check, "coupling_strength", strength)
    for loss, times in ((lambda out: F.cross_entropy(out, Y), 0), (lambda out: F.cross_entropy(out * 2, Y), 1)):
        watch = LossCheck(nn.Identity(), lambda: ROWS, "mean")
        loss(watch.watch(torch.randn(ROWS, CLASSES, requires_grad=True) * 1.0)).backward()
        assert len(asked) == times
