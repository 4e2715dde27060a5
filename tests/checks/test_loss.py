"""A loss that is no mean over examples is refused; the usual ones are not."""

from __future__ import annotations

import copy
import pickle
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from dphero.checks.loss import check as loss_check
from dphero.checks.loss.check import LossCheck
from dphero.checks.loss.graph import fingerprint
from tests.trainer import data, training

ROWS, CLASSES, TOKENS = 6, 5, 7
Loss = Callable[[Tensor], Tensor]

torch.manual_seed(0)
X, Y = torch.randn(ROWS, CLASSES), torch.randint(CLASSES, (ROWS,))
TEXT = torch.randint(TOKENS, (ROWS, 4))
WEIGHT = torch.rand(CLASSES)
SOME = torch.arange(ROWS) < 4
CLASSIFIER = nn.Linear(CLASSES, CLASSES)
LANGUAGE = nn.Sequential(nn.Embedding(TOKENS, 5), nn.Linear(5, TOKENS))


def each(out: Tensor) -> Tensor:
    return F.cross_entropy(out, Y, reduction="none")


def per_token(out: Tensor, **options: Any) -> Tensor:
    return F.cross_entropy(out.reshape(-1, TOKENS), TEXT.reshape(-1), **options)


def check(loss: Loss, declared: str, module: nn.Module, x: Tensor) -> None:
    try:
        loss(LossCheck(module, lambda: ROWS, declared).watch(module(x))).backward()
    finally:
        module.zero_grad()


MEANS: dict[str, Loss] = {
    "cross_entropy": lambda out: F.cross_entropy(out, Y),
    "label smoothing": lambda out: F.cross_entropy(out, Y, label_smoothing=0.1),
    "probabilities": lambda out: F.cross_entropy(out, X.softmax(1)),
    "ignore_index unused": lambda out: F.cross_entropy(out, Y, ignore_index=-1),
    "nll": lambda out: F.nll_loss(out.log_softmax(1), Y),
    "mse": lambda out: F.mse_loss(out, X),
    "l1": lambda out: F.l1_loss(out, X),
    "smooth l1": lambda out: F.smooth_l1_loss(out, X),
    "huber": lambda out: F.huber_loss(out, X),
    "bce": lambda out: F.binary_cross_entropy(out.sigmoid(), X.sigmoid()),
    "bce with logits": lambda out: F.binary_cross_entropy_with_logits(out, X.sigmoid()),
    "bce weighted": lambda out: F.binary_cross_entropy_with_logits(out, X.sigmoid(), pos_weight=WEIGHT),
    "kl batchmean": lambda out: F.kl_div(out.log_softmax(1), X.softmax(1), reduction="batchmean"),
    "multi margin": lambda out: F.multi_margin_loss(out, Y),
    "soft margin": lambda out: F.multilabel_soft_margin_loss(out, (X > 0).float()),
    "triplet": lambda out: F.triplet_margin_loss(out, X, X + 1),
    "cosine": lambda out: F.cosine_embedding_loss(out, X, torch.ones(ROWS)),
    "poisson": lambda out: F.poisson_nll_loss(out, X.exp()),
    "gaussian": lambda out: F.gaussian_nll_loss(out, X, torch.ones(ROWS, CLASSES)),
    "mean of all": lambda out: out.pow(2).mean(),
    "mean of sums": lambda out: out.pow(2).sum(1).mean(),
    "mean of norms": lambda out: out.norm(dim=1).mean(),
    "mean over rows, sum over columns": lambda out: out.pow(2).mean(0).sum(),
    "mean kept": lambda out: out.mean(0, keepdim=True).mean(1).squeeze(),
    "each, mean": lambda out: each(out).mean(),
    "each weighted, mean": lambda out: (each(out) * WEIGHT[Y]).mean(),
    "sum over rows": lambda out: out.pow(2).sum() / ROWS,
    "sum by len": lambda out: each(out).sum() / len(out),
    "sum by tensor": lambda out: each(out).sum() / torch.tensor(float(ROWS)),
    "sum times": lambda out: out.pow(2).sum() * (1 / ROWS),
    "half the sum": lambda out: 0.5 * out.pow(2).sum() / ROWS,
    "log-sum-exp of rows": lambda out: (out.logsumexp(1) - out[torch.arange(ROWS), Y]).mean(),
    "gathered": lambda out: -out.log_softmax(1).gather(1, Y[:, None]).mean(),
    "focal": lambda out: ((1 - (-each(out)).exp()) ** 2 * each(out)).mean(),
    "several terms": lambda out: F.cross_entropy(out, Y) + 0.1 * out.pow(2).mean() - 0.01 * out.abs().sum(1).mean(),
    "stacked": lambda out: torch.stack([out.mean(), out.pow(2).mean()]).sum(),
    "stacked, weighted": lambda out: torch.stack([out.mean(), out.pow(2).mean()]).dot(torch.tensor([1.0, 0.5])),
    "one by one": lambda out: sum(torch.stack([out.mean(), out.pow(2).mean()]).unbind()),  # type: ignore[dict-item]
    "between two": lambda out: torch.lerp(out.mean(), out.pow(2).mean(), 0.3),
    "choice for each": lambda out: torch.where(each(out) > 1, each(out), each(out).square()).nan_to_num().mean(),
    "distance for each": lambda out: F.smooth_l1_loss(out, X) + F.huber_loss(out, X) + F.leaky_relu(out).mean(),
    "weighted by 1000": lambda out: F.cross_entropy(out, Y) * 1000,
    "weighted by 16": lambda out: F.cross_entropy(out, Y) * 16,
    "summed over each example's pixels": lambda out: F.mse_loss(out.repeat(1, 1024), X.repeat(1, 1024)) * 1024,
    "accumulated": lambda out: F.cross_entropy(out, Y) / 4,
    "in place": lambda out: F.cross_entropy(out.div_(2.0), Y),
    "double": lambda out: F.cross_entropy(out.double(), Y).float(),
    "a constant": lambda out: F.cross_entropy(out, Y) + 3.0,
    "a loop": lambda out: sum(F.cross_entropy(out[i], Y[i]) for i in range(ROWS)) / ROWS,
    "a loop of slices": lambda out: sum(F.mse_loss(out[i : i + 1], X[i : i + 1]) for i in range(ROWS)) / ROWS,
    "a loop over rows": lambda out: torch.stack([row.pow(2).mean().sqrt() for row in out]).mean(),
    "one column": lambda out: out[:, 0].pow(2).mean(),
    "a mask of one's own": lambda out: (each(out) * SOME).mean(),
}

LANGUAGE_MEANS: dict[str, Loss] = {
    "tokens": per_token,
    "shifted": lambda out: F.cross_entropy(out[:, :-1].reshape(-1, TOKENS), TEXT[:, 1:].reshape(-1)),
    "transposed": lambda out: F.cross_entropy(out.transpose(1, 2), TEXT),
    "sum by tokens": lambda out: per_token(out, reduction="sum") / TEXT.numel(),
    "each example's own tokens": lambda out: (
        (F.cross_entropy(out.transpose(1, 2), TEXT, reduction="none") * (TEXT > 1)).sum(1)
        / (TEXT > 1).sum(1).clamp(min=1)
    ).mean(),
    "last token": lambda out: F.cross_entropy(out[:, -1], TEXT[:, -1]),
}

SUMS: dict[str, Loss] = {
    "cross_entropy": lambda out: F.cross_entropy(out, Y, reduction="sum"),
    "by a constant": lambda out: out.pow(2).sum() / 16,
    "weighted": lambda out: F.cross_entropy(out, Y, weight=WEIGHT, reduction="sum") / 16,
    "some": lambda out: each(out)[SOME].sum(),
    "some, fused": lambda out: F.cross_entropy(out[SOME], Y[SOME], reduction="sum"),
    "some, squared": lambda out: (out[SOME].pow(2) * out[SOME].exp()).sum() / 16,
    "variational": lambda out: F.mse_loss(out, X, reduction="sum") - 0.5 * (1 + out - out.exp()).sum(),
    "a loop": lambda out: sum(F.mse_loss(row, x) for row, x in zip(out, X, strict=True)),  # type: ignore[dict-item]
    "mean times rows": lambda out: out.pow(2).mean() * ROWS,
}


@pytest.mark.parametrize("name", MEANS)
@pytest.mark.filterwarnings("ignore:.*batchmean")
def test_means_are_accepted(name: str) -> None:
    check(MEANS[name], "mean", CLASSIFIER, X)


@pytest.mark.parametrize("name", LANGUAGE_MEANS)
def test_means_over_tokens_are_accepted(name: str) -> None:
    check(LANGUAGE_MEANS[name], "mean", LANGUAGE, TEXT)


@pytest.mark.parametrize("name", SUMS)
def test_sums_are_accepted(name: str) -> None:
    check(SUMS[name], "sum", CLASSIFIER, X)


MIXED: dict[str, tuple[Loss, str]] = {
    "root": (lambda out: F.mse_loss(out, X).sqrt(), "mixes examples: Sqrt"),
    "square": (lambda out: F.cross_entropy(out, Y) ** 2, "mixes examples: Pow"),
    "norm": (lambda out: out.norm(), "mixes examples: LinalgVectorNorm"),
    "product": (lambda out: out.mean() * out.pow(2).mean(), "mixes examples: Mul"),
    "ratio": (lambda out: out.pow(2).mean() / out.abs().mean(), "mixes examples: Div"),
    "logarithm": (lambda out: out.pow(2).sum().log(), "mixes examples: Log"),
    "exponential": (lambda out: out.mean().exp(), "mixes examples: Exp"),
    "clamp": (lambda out: F.cross_entropy(out, Y).clamp(max=1), "mixes examples: Clamp"),
    "flooding": (lambda out: (F.cross_entropy(out, Y) - 0.1).abs() + 0.1, "mixes examples: Abs"),
    "flooding by a choice": (
        lambda out: torch.where(F.cross_entropy(out, Y) > 0.1, F.cross_entropy(out, Y), 0.2 - F.cross_entropy(out, Y)),
        "mixes examples: Where",
    ),
    "not a number, made one": (lambda out: F.cross_entropy(out, Y).nan_to_num(), "mixes examples: NanToNum"),
    "masked where huge": (lambda out: (lambda x: x.masked_fill(x > 1e3, 0.0))(F.cross_entropy(out, Y)), "MaskedFill"),
    "a leak": (lambda out: F.leaky_relu(F.cross_entropy(out, Y) - 1), "mixes examples: LeakyRelu"),
    "distance of the mean": (lambda out: F.smooth_l1_loss(out.mean(), torch.tensor(9.0)), "mixes examples: SmoothL1"),
    "the smaller, by order": (lambda out: torch.stack([out.mean(), out.pow(2).mean()]).sort().values[0], "Sort"),
    "means times means": (lambda out: torch.stack([out.mean()]).dot(torch.stack([out.pow(2).mean()])), "Dot"),
    "focal on the mean": (lambda out: (1 - (-F.cross_entropy(out, Y)).exp()) * F.cross_entropy(out, Y), "Mul"),
    "worst example": (lambda out: each(out).max(), "mixes examples: Max"),
    "soft maximum": (lambda out: each(out).logsumexp(0), "mixes examples: Logsumexp"),
    "deviation": (lambda out: each(out).std(), "mixes examples: Std"),
    "median": (lambda out: each(out).median(), "mixes examples: Median"),
    "hard examples": (lambda out: each(out).topk(4).values.mean(), "mixes examples: Topk"),
    "variance of the batch": (lambda out: F.relu(1 - out.std(0)).mean(), "mixes examples: Relu"),
    "one bad term": (lambda out: F.cross_entropy(out, Y) + 0.1 * out.pow(2).mean().sqrt(), "mixes examples: Sqrt"),
    "some rows": (lambda out: each(out)[SOME].mean(), "mean over some of the batch's rows"),
    "some rows, fused": (lambda out: F.cross_entropy(out[SOME], Y[SOME]), "mean over some of the batch's rows"),
    "easy examples": (lambda out: each(out).sort().values[:4].mean(), "mean over some of the batch's rows"),
    "masked mean": (lambda out: (each(out) * SOME).sum() / SOME.sum(), "divided by something else"),
    "contrast": (lambda out: F.cross_entropy(out @ out.T, torch.arange(ROWS)), r"with each other \(Mm"),
    "centred": (lambda out: (out - out.mean(0)).pow(2).mean(), r"with each other \(Mean"),
    "softmax over the batch": (lambda out: out.log_softmax(0).pow(2).mean(), r"with each other \(LogSoftmax"),
    "normalised": (lambda out: F.normalize(out, dim=0).pow(4).mean(), r"with each other \(LinalgVectorNorm"),
    "class weights": (lambda out: F.cross_entropy(out, Y, weight=WEIGHT), "weighted by class.*public constant"),
    "ignored targets": (
        lambda out: F.cross_entropy(out, torch.where(SOME, Y, -100)),
        "not ignore_index=-100.*public constant",
    ),
    "ignored class": (lambda out: F.cross_entropy(out, Y, ignore_index=int(Y[0])), "not ignore_index"),
    "a sum": (
        lambda out: F.cross_entropy(out, Y, reduction="sum"),
        'a sum over the examples, but .*"mean" was declared',
    ),
    "a sum by hand": (lambda out: out.pow(2).sum(), 'loss_reduction="sum"'),
    "scaled for half precision": (lambda out: F.cross_entropy(out, Y) * 65536.0, r"multiplied by 65536.*GradScaler"),
    "scaled by a scaler": (
        lambda out: torch.amp.GradScaler("cpu", init_scale=1024.0).scale(F.cross_entropy(out, Y)),
        r"multiplied by 1024.*without a scaler",
    ),
    "scaled, and accumulated": (lambda out: 1024 * (F.cross_entropy(out, Y) / 3), r"multiplied by 1024"),
    "a scaled sum by rows": (lambda out: each(out).sum() / ROWS * 1024, r"multiplied by 1024"),
    "a sum by a constant": (lambda out: out.pow(2).sum() / 16, "divided by something else than the number of rows"),
}


@pytest.mark.parametrize("name", MIXED)
def test_losses_that_are_no_mean_are_refused(name: str) -> None:
    loss, match = MIXED[name]
    with pytest.raises(ValueError, match=f"(?s){match}"):
        check(loss, "mean", CLASSIFIER, X)


def test_a_scaled_sum_is_refused() -> None:
    for loss in (lambda out: each(out).sum() / 100 * 1024, lambda out: 1024 * (out.pow(2).mean() * ROWS)):
        with pytest.raises(ValueError, match=r"multiplied by 1024"):
            check(loss, "sum", CLASSIFIER, X)
    check(lambda out: out.mean() * (256 * ROWS), "sum", nn.Linear(CLASSES, 256), X)  # a sum over 256 columns


def test_a_long_loop_is_read_quickly() -> None:
    module, x = nn.Linear(3, 3), torch.randn(3000, 3)
    out = LossCheck(module, lambda: 3000, "mean").watch(module(x))
    loss = sum(row.pow(2).mean().sqrt() for row in out) / 3000
    assert isinstance(loss, Tensor)
    start = time.process_time()
    loss.backward()
    assert time.process_time() - start < 10


def test_padded_tokens_are_refused() -> None:
    padded = torch.where(TEXT > 4, -100, TEXT)
    with pytest.raises(ValueError, match="ignore_index=-100"):
        check(lambda out: F.cross_entropy(out.transpose(1, 2), padded), "mean", LANGUAGE, TEXT)


def test_a_mean_declared_as_a_sum_is_refused() -> None:
    for loss in (lambda out: F.cross_entropy(out, Y), lambda out: out.pow(2).mean() * 0.3):
        with pytest.raises(ValueError, match='a mean over the examples, but loss_reduction="sum"'):
            check(loss, "sum", CLASSIFIER, X)


def test_a_sum_divided_by_the_rows_is_noticed_when_the_rows_change() -> None:
    """Dividing by B, a constant, is fine even where B happens to be the number of rows."""
    batch = [X]
    for divisor, refused in ((lambda x: 6, False), (len, True)):
        watch = LossCheck(CLASSIFIER, lambda: len(batch[0]), "sum")
        seen = []
        for rows in (6, 4):
            batch[0] = x = X[:rows]
            try:
                (watch.watch(CLASSIFIER(x)).pow(2).sum() / divisor(x)).backward()
                seen.append(False)
            except ValueError as error:
                assert "divided by the number of rows" in str(error)
                seen.append(True)
        assert seen == [False, refused]
    CLASSIFIER.zero_grad()


# -- the watched tensors ---------------------------------------------------------------------------------------


def test_gradients_are_those_of_the_plain_loss() -> None:
    for loss in (*MEANS.values(),):
        plain, watched = copy.deepcopy(CLASSIFIER), copy.deepcopy(CLASSIFIER)
        loss(plain(X)).backward()
        loss(LossCheck(watched, lambda: ROWS, "mean").watch(watched(X))).backward()
        assert torch.equal(plain.weight.grad, watched.weight.grad)  # type: ignore[arg-type]


def test_what_the_user_keeps_is_plain() -> None:
    out = LossCheck(CLASSIFIER, lambda: ROWS, "mean").watch(CLASSIFIER(X))
    assert isinstance(out, Tensor) and out.requires_grad
    loss = F.cross_entropy(out, Y)
    assert type(loss.detach()) is Tensor and type(out.argmax(1)) is Tensor and type(out.data) is Tensor
    assert isinstance(loss.item(), float) and out.detach().numpy().shape == (ROWS, CLASSES)
    assert type(pickle.loads(pickle.dumps(out.detach()))) is Tensor
    assert "Tensor" in repr(out) or "tensor" in repr(out)
    loss.backward(retain_graph=True)
    loss.backward()
    CLASSIFIER.zero_grad()


def test_outputs_of_any_structure_are_watched() -> None:
    class Many(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(CLASSES, CLASSES)

        def forward(self, x: Tensor) -> dict[str, Any]:
            out = self.layer(x)
            return {"logits": out, "parts": [out.tanh(), None, 3], "loss": F.mse_loss(out, x).sqrt()}

    module = Many()
    watch = LossCheck(module, lambda: ROWS, "mean")
    for loss in (
        lambda out: out["logits"].pow(2).mean().sqrt(),
        lambda out: out["parts"][0].norm(),
        lambda out: out["loss"],
    ):
        with pytest.raises(ValueError, match="mixes examples"):
            loss(watch.watch(module(X))).backward()
    watch.watch(module(X))["parts"][0].mean().backward()


def test_nothing_is_watched_without_a_private_batch() -> None:
    for rows in (None, 1):
        out = LossCheck(CLASSIFIER, lambda rows=rows: rows, "mean").watch(CLASSIFIER(X))  # type: ignore[misc]
        assert type(out) is Tensor


def test_nothing_is_watched_in_evaluation() -> None:
    run = training()
    x, _ = next(iter(run.loader))
    assert type(run.module(x)) is not Tensor
    assert type(run.module.eval()(data().tensors[0])) is Tensor


def test_losses_are_read_less_and_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """But never no more: a loss may change."""
    watch = LossCheck(CLASSIFIER, lambda: ROWS, "mean")
    read: list[int] = []
    done: list[int] = []
    monkeypatch.setattr(watch, "_check", lambda loss: read.append(len(done)))
    for number in range(70):
        done.append(number)
        F.cross_entropy(watch.watch(CLASSIFIER(X)), Y).backward()
    CLASSIFIER.zero_grad()
    assert read == [1, 2, 3, 4, 9, 18, 35, 68]


# -- losses that change ------------------------------------------------------------------------------------------------


def change_of_loss(at: int, loss: Loss) -> int:
    """Return how many losses pass after a good one has become another."""
    watch = LossCheck(CLASSIFIER, lambda: ROWS, "mean")
    for number in range(4 * at):
        out = watch.watch(CLASSIFIER(X))
        try:
            (F.cross_entropy(out, Y) if number < at else loss(out)).backward()
        except ValueError:
            return number - at
        finally:
            CLASSIFIER.zero_grad()
    return 3 * at


@pytest.mark.parametrize("at", [20, 40, 70, 140])
def test_a_loss_that_becomes_another_one_is_read_at_once(at: int) -> None:
    assert change_of_loss(at, lambda out: F.cross_entropy(out, Y).sqrt()) == 0
    assert change_of_loss(at, lambda out: F.cross_entropy(out, Y, reduction="sum")) == 0  # the same kinds of nodes
    assert change_of_loss(at, lambda out: F.cross_entropy(out, Y) + pairs_hinge(out)) == 0


def test_without_fingerprints_it_is_read_late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss_check, "fingerprint", lambda loss: 0)
    assert change_of_loss(40, lambda out: F.cross_entropy(out, Y).sqrt()) == 27


def test_a_loop_over_rows_stays_the_same_loss() -> None:
    numbers = set()
    for rows in (3, 4, 6):
        out = CLASSIFIER(X[:rows])
        numbers.add(fingerprint((sum(row.pow(2).mean() for row in out) / rows).grad_fn))
    assert len(numbers) == 1


# -- examples that meet ------------------------------------------------------------------------------------------------

EYE = torch.arange(ROWS)
GROUP = torch.tensor([0, 0, 1, 1, 2, 2])


def prototypes(out: Tensor) -> Tensor:
    centres = torch.stack([out[group == GROUP].mean(0) for group in range(3)])
    return F.cross_entropy(-(out[:, None] - centres).pow(2).sum(-1), GROUP)


def two_views(out: Tensor) -> Tensor:
    views = F.normalize(torch.cat([out, out.tanh()]))
    close = (views @ views.T / 0.5).masked_fill(torch.eye(2 * ROWS, dtype=torch.bool), -1e9)
    return F.cross_entropy(close, (torch.arange(2 * ROWS) + ROWS) % (2 * ROWS))


MEETING: dict[str, Loss] = {
    "contrast by einsum": lambda out: F.cross_entropy(torch.einsum("id,jd->ij", out, out.tanh()), EYE),
    "contrast of two views": two_views,
    "all pairs": lambda out: (out[:, None] - out[None]).pow(2).sum(-1).mean(),
    "the first example": lambda out: (out - out[0]).pow(2).mean(),
    "neighbours": lambda out: (out - out.roll(1, 0)).pow(2).mean(),
    "prototypes": prototypes,
    "centres": lambda out: (out - torch.zeros(3, CLASSES).index_add(0, GROUP, out)[GROUP] / 2).pow(2).sum(1).mean(),
    "survival": lambda out: -(out[:, 0] - out[:, 0].logcumsumexp(0)).mean(),
    "a batch norm after the model": lambda out: F.cross_entropy(F.batch_norm(out, None, None, training=True), Y),
}


@pytest.mark.parametrize("name", MEETING)
def test_losses_in_which_examples_meet_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="with each other"):
        check(MEETING[name], "mean", CLASSIFIER, X)


def test_a_cross_correlation_is_no_sum_over_examples() -> None:
    """Divided by a constant it is linear above, and reduced by a product below."""
    with pytest.raises(ValueError, match="with each other"):
        check(lambda out: (out.T @ out.tanh() / 64 - torch.eye(CLASSES)).pow(2).sum(), "sum", CLASSIFIER, X)


def test_any_two_examples_are_told_apart_in_time() -> None:
    for i, j in ((0, 1), (0, 2), (0, 4), (1, 5), (2, 3)):
        watch = LossCheck(CLASSIFIER, lambda: ROWS, "mean")
        with pytest.raises(ValueError, match="with each other"):
            for _ in range(3):
                out = watch.watch(CLASSIFIER(X))
                (F.cross_entropy(out, Y) + 0.1 * torch.stack([out[i, 0] * out[j, 1], out[i, 1]]).mean()).backward()
    CLASSIFIER.zero_grad()


def test_the_measure_of_company_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where terms are told apart by first derivatives, second ones see it too; but not the other way round."""
    monkeypatch.setattr(loss_check, "coupling_strength", lambda *_: 0.0)
    monkeypatch.setattr(loss_check, "coupling", lambda *_: 0.0)
    for loss in MEETING.values():
        check(loss, "mean", CLASSIFIER, X)


ORDER = torch.tensor([3, 0, 5, 1, 2, 4])


def pairs_hinge(out: Tensor) -> Tensor:
    return F.relu(1 - (out[:, None, 0] - out[None, :, 0])).mean()


def mixed_columns(out: Tensor) -> Tensor:
    return torch.stack([out[:, 0], out.roll(1, 0)[:, 1]], 1)


PIECEWISE: dict[str, Loss] = {
    "all pairs of a hinge": pairs_hinge,
    "ranking": lambda out: F.margin_ranking_loss(out, out.roll(1, 0), torch.ones_like(out), margin=1.0),
    "distance from another example": lambda out: F.l1_loss(out, out[ORDER]),
    "fused distance": lambda out: F.smooth_l1_loss(out, out[ORDER], beta=1e-6),
    "fused hinge over columns": lambda out: F.multi_margin_loss(mixed_columns(out), Y % 2),
    "weighted sum": lambda out: torch.dot(torch.full((ROWS,), 1 / ROWS), (out - out.flip(0))[:, 0].abs()),
    "product with a matrix": lambda out: (torch.ones(1, ROWS) / ROWS @ (out - out.roll(2, 0)).abs()).mean(),
    "beside a good one": lambda out: F.cross_entropy(out, Y) + 1e-3 * F.l1_loss(out, out[ORDER]),
    "nearest": lambda out: ((out[:, None] - out).abs().mean(-1) + 1e3 * torch.eye(ROWS)).amin(1).mean(),
}


@pytest.mark.parametrize("name", PIECEWISE)
def test_losses_of_straight_pieces_in_which_examples_meet_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="with each other"):
        check(PIECEWISE[name], "mean", CLASSIFIER, X)


def test_the_first_derivatives_are_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss_check, "coupling", lambda *_: 0.0)
    for loss in PIECEWISE.values():
        check(loss, "mean", CLASSIFIER, X)


REARRANGED: dict[str, Loss] = {
    "rows in another order": lambda out: F.l1_loss(out[ORDER], X[ORDER]),
    "sorted by their loss": lambda out: each(out).sort().values.mean(),
    "two views of each": lambda out: F.l1_loss(torch.cat([out, 2 * out]), torch.cat([X, X])),
    "hinge of each example's columns": lambda out: F.relu(1 - (out[:, :, None] - out[:, None])).mean(),
    "ranking within each": lambda out: F.margin_ranking_loss(out[:, 0], out[:, 1], torch.ones(ROWS)),
    "summed by group": lambda out: torch.zeros(3).index_add(0, GROUP, each(out).abs()).sum() / ROWS,
    "matrix times losses": lambda out: (torch.ones(1, ROWS) / ROWS @ F.relu(out)).mean(),
    "multi margin": lambda out: F.multi_margin_loss(out, Y),
    "bce": lambda out: F.binary_cross_entropy_with_logits(out, X.sigmoid()),
}


@pytest.mark.parametrize("name", REARRANGED)
def test_losses_that_only_rearrange_are_accepted(name: str) -> None:
    check(REARRANGED[name], "mean", CLASSIFIER, X)


def test_as_many_examples_as_columns() -> None:
    square = nn.Linear(CLASSES, ROWS)
    check(lambda out: F.l1_loss(out, torch.zeros(ROWS, ROWS)), "mean", square, X)
    check(lambda out: (out - out.mean(1, keepdim=True)).abs().mean(), "mean", square, X)
    with pytest.raises(ValueError, match="with each other"):
        check(lambda out: F.relu(out @ out.T).mean(), "mean", square, X)


def in_place(*steps: Callable[[Tensor], Any]) -> Loss:
    def loss(out: Tensor) -> Tensor:
        value = F.cross_entropy(out, Y)
        for step in steps:
            step(value)
        return value

    return loss


def test_arithmetic_in_place_is_read() -> None:
    """The loss of a Hugging Face ``Trainer`` is divided in place."""
    for linear in (
        in_place(lambda v: v.div_(4)),
        in_place(lambda v: v.div_(torch.tensor(4.0)), lambda v: v.add_(1)),
        in_place(lambda v: v.mul_(0.5), lambda v: v.sub_(2), lambda v: v.neg_()),
    ):
        check(linear, "mean", CLASSIFIER, X)

    def accumulated(out: Tensor) -> Tensor:
        total = torch.zeros(())
        total += F.cross_entropy(out, Y)
        total /= 3
        return total

    def placed(out: Tensor) -> Tensor:
        both = torch.zeros(2)
        both[0], both[1] = F.cross_entropy(out, Y), out.pow(2).mean()
        both[1] *= 0.1
        return both.sum()

    check(accumulated, "mean", CLASSIFIER, X)
    check(placed, "mean", CLASSIFIER, X)
    for bent in (in_place(lambda v: v.sqrt_()), in_place(lambda v: v.clamp_(max=1.0)), in_place(lambda v: v.exp_())):
        with pytest.raises(ValueError, match="mixes examples"):
            check(bent, "mean", CLASSIFIER, X)


def test_a_loss_without_second_derivatives_can_be_trained_with() -> None:
    lengths, labels = torch.full((ROWS,), 8), Y[:, None].clamp(min=1)

    def loss(out: Tensor) -> Tensor:
        return F.ctc_loss(out.log_softmax(1).expand(8, -1, -1), labels, lengths, torch.ones_like(lengths))

    check(loss, "mean", CLASSIFIER, X)


def test_a_function_that_works_once_is_called_once() -> None:
    """Some scale a gradient in place that they have computed on the way forward."""

    class Prepared(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.gradient = x.clone()
            return x.square() / 2

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
            return ctx.gradient.mul_(gradient)

    plain, watched = copy.deepcopy(CLASSIFIER), copy.deepcopy(CLASSIFIER)
    Prepared.apply(plain(X)).mean().mul(0.5).backward()
    out = LossCheck(watched, lambda: ROWS, "mean").watch(watched(X))
    (Prepared.apply(out).mean() * 0.5 + 0 * out.mean()).backward()
    torch.testing.assert_close(plain.weight.grad, watched.weight.grad)


# -- in training ---------------------------------------------------------------------------------------------------


def test_a_wrong_loss_releases_nothing() -> None:
    run = training()
    before = run.weights()
    with pytest.raises(ValueError, match="mixes examples"):
        run.steps(1, lambda out, y: F.cross_entropy(out, y).sqrt())
    assert run.engine.steps == run.engine.ledger.steps == 0
    assert all(torch.equal(before[name], value) for name, value in run.weights().items())
    run.steps(1)  # and with the right loss the run goes on
    assert run.engine.steps == 1


def test_what_a_loss_takes_from_inside_the_model_is_read_too() -> None:
    """A term for balance that a model keeps in an attribute, a penalty on activations."""
    refused = {
        "balance": lambda hidden: hidden.softmax(1).mean(0).var() / hidden.softmax(1).mean(),
        "root": lambda hidden: hidden.pow(2).mean().sqrt(),
        "centred": lambda hidden: (hidden - hidden.mean(0)).pow(2).mean(),
    }
    accepted = {
        "activity": lambda hidden: hidden.pow(2).mean(),
        "length": lambda hidden: hidden.norm(dim=1).mean(),
    }
    for name, penalty in {**refused, **accepted}.items():
        run, kept = training(), []
        run.module[1].register_forward_hook(lambda module, args, out, kept=kept: kept.append(out))  # type: ignore[index,misc]

        def loss(out: Tensor, y: Tensor, penalty: Loss = penalty, kept: list[Tensor] = kept) -> Tensor:
            return F.cross_entropy(out, y) + 0.1 * penalty(kept[-1])

        if name in refused:
            with pytest.raises(ValueError, match=r"mixes examples|with each other"):
                run.steps(1, loss)
        else:
            run.steps(5, loss)


@pytest.mark.usefixtures("same_noise")
def test_a_loss_that_cannot_be_read_is_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    run = training()
    run.steps(2)
    assert not caplog.records
    for number, (x, y) in enumerate(run.loader):
        torch.autograd.backward(F.cross_entropy(run.module(x), y))
        run.optimizer.step()
        if number == 2:
            break
    assert [record.message[:27] for record in caplog.records] == ["The loss could not be read "]


@pytest.mark.usefixtures("same_noise")
def test_the_declared_reduction_is_checked_in_training() -> None:
    with pytest.raises(ValueError, match='loss_reduction="sum" was declared'):
        training(loss_reduction="sum").steps(1)
    summed = training(loss_reduction="sum").steps(3, lambda out, y: F.cross_entropy(out, y, reduction="sum"))
    mean = training().steps(3)
    for first, second in zip(summed, mean, strict=True):
        for name in first:
            torch.testing.assert_close(first[name], second[name], rtol=1e-4, atol=1e-6)


def test_a_mean_with_a_divisor_of_other_examples_would_break_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """Why this matters: without the check, one example of many ignored targets changes what the others add."""
    monkeypatch.setattr(LossCheck, "_check", lambda self, loss: None)
    monkeypatch.setattr(LossCheck, "_repeat", lambda *_: None)
    added = []
    for ignored in (0, 8):
        labels = torch.arange(10) % 3
        labels[:ignored] = -100
        x = torch.zeros(10, 6)
        x[8:] = torch.randn(2, 6, generator=torch.Generator().manual_seed(2))
        run = training(
            dataset=TensorDataset(x, labels), sample_rate=1.0, expected_batch_size=1.0, dataset_size=None,
            noise_multiplier=1e-9, max_grad_norm=100.0, guidance="isotropic",
        )  # fmt: skip
        added.append(run.steps(1)[0]["0.weight"])  # features of zero add nothing to the first weight
    torch.testing.assert_close(added[1], 5 * added[0], rtol=1e-3, atol=1e-4)


# -- targets that are ignored ------------------------------------------------------------------------------------------


def next_word(out: Tensor, targets: Tensor) -> Tensor:
    """As transformers do for ``labels=``: the last word has no next one, and is ignored."""
    shifted = F.pad(targets, (0, 1), value=-100)[:, 1:]
    return F.cross_entropy(out.reshape(-1, TOKENS), shifted.reshape(-1))


def read_many(short_from: int) -> None:
    """Read forty losses on full blocks; in some of the last, one example has fewer targets."""
    check = LossCheck(LANGUAGE, lambda: ROWS, "mean")
    for number in range(40):
        targets = TEXT.clone()
        if number >= short_from:
            targets[0, 2:] = -100
        next_word(check.watch(LANGUAGE(TEXT)), targets).backward()


def test_full_blocks_may_ignore_their_last_targets() -> None:
    read_many(short_from=40)


@pytest.mark.parametrize("short_from", [0, 3, 21, 39])
def test_one_example_with_fewer_targets_is_refused_whenever_it_comes(short_from: int) -> None:
    with pytest.raises(ValueError, match=r"examples ignore different ones.*full"):
        read_many(short_from)


def test_it_would_not_be_noticed_if_only_sampled_losses_were_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss_check, "require_same_targets", lambda *_: None)
    read_many(short_from=39)
