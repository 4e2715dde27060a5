"""What a loss takes from several examples as a constant is found by computing it again with other examples."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from dphero.checks.loss import check as loss_check
from dphero.checks.loss import repetition as loss_repetition
from dphero.checks.loss import replay as loss_replay
from dphero.checks.loss.calls import Call
from dphero.checks.loss.recorder import Recorder
from tests.trainer import CLASSES, FEATURES, Training, data, network, training

Body = Callable[[nn.Module, Tensor, Tensor], Tensor]


def train(body: Body, lots: int = 6, **options: Any) -> Training:
    """Train with a loop whose body computes the loss from the model and a batch."""
    run = training(**options)
    return go_on(run, body, lots)


def go_on(run: Training, body: Body, lots: int) -> Training:
    stop = run.engine.steps + lots
    while run.engine.steps < stop:
        for x, y in run.loader:
            run.optimizer.zero_grad()
            body(run.module, x, y).backward()
            run.optimizer.step()
            if run.engine.steps == stop:
                break
    return run


def notes(run: Training) -> list[str]:
    return [note for note in run.engine.statement(1e-5).notes if note.startswith("Not checked")]


def each(out: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(out, y, reduction="none")


TARGETS = torch.eye(CLASSES)
TEACHER = network(seed=3).eval()


def positives(out: Tensor, y: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(out[:, 0], (y == 0).float(), reduction="none")


def counted(y: Tensor) -> Tensor:
    counts = torch.zeros(CLASSES)
    for label in range(CLASSES):
        counts[label] = (y == label).sum()
    return 1 / (1 + counts)


def added(y: Tensor) -> Tensor:
    counts = torch.ones(CLASSES)
    counts.index_add_(0, y, torch.ones(len(y)))
    return 1 / counts


def mixup(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    order = torch.randperm(len(x))
    out = model(0.7 * x + 0.3 * x[order])
    return 0.7 * F.cross_entropy(out, y) + 0.3 * F.cross_entropy(out, y[order])


def own_value(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    loss = F.cross_entropy(model(x), y)
    return loss / loss.detach()


def hard_examples(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    losses = each(model(x), y)
    return (losses * (losses > losses.detach().median())).mean()


def keys_of_others(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    with torch.no_grad():
        keys = F.normalize(TEACHER(x))
    return F.cross_entropy(F.normalize(model(x)) @ keys.T, torch.arange(len(x)))


def balance_outside(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """As ``load_balancing_loss_func``: how often experts are chosen, times how likely that was."""
    out = model(x)
    chances = out.softmax(-1)
    chosen = F.one_hot(chances.topk(2, -1).indices, CLASSES).float().sum(1).mean(0)
    return F.cross_entropy(out, y) + 1e-3 * (chosen * chances.mean(0)).sum()


MIXED: dict[str, Body] = {
    "positive weight": lambda model, x, y: F.binary_cross_entropy_with_logits(
        model(x)[:, 0], (y == 0).float(), pos_weight=(y != 0).sum() / (1 + (y == 0).sum())
    ),
    "class weights": lambda model, x, y: (each(model(x), y) * (1 / (1 + torch.bincount(y, minlength=3)))[y]).mean(),
    "class weights, one by one": lambda model, x, y: (each(model(x), y) * counted(y)[y]).mean(),
    "class weights in place": lambda model, x, y: (each(model(x), y) * added(y)[y]).mean(),
    "standardised targets": lambda model, x, y: F.mse_loss(
        model(x)[:, 0], (y.float() - y.float().mean()) / (1e-3 + y.float().std())
    ),
    "hard examples": hard_examples,
    "by its own value": own_value,
    "detached mean": lambda model, x, y: (lambda out: (out - out.detach().mean(0)).pow(2).mean())(model(x)),
    "mixup": mixup,
    "standardised by the batch": lambda model, x, y: F.cross_entropy(model((x - x.mean(0)) / (1e-3 + x.std(0))), y),
    "second call on others": lambda model, x, y: (
        F.cross_entropy(model(x), y) + F.mse_loss(model(x), model(x.flip(0)).detach())
    ),
    "keys of others": keys_of_others,
    "balance of experts": balance_outside,
    "neighbours as targets": lambda model, x, y: F.mse_loss(model(x), TARGETS[y.roll(1)]),
}


@pytest.mark.parametrize("name", MIXED)
def test_constants_of_the_batch_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=r"by the others of its batch|mixed before they reach the model"):
        train(MIXED[name])


def test_division_by_a_count_is_refused() -> None:
    with pytest.raises(ValueError, match="by the others of its batch"):
        train(
            lambda model, x, y: positives(model(x), y).sum() / (1 + (y == 0).sum()),
            loss_reduction="sum",
        )


def test_a_sign_that_the_batch_decides_is_refused() -> None:
    """In double precision, in two entries of each example: their highest bits change, and nothing else."""
    records = data()

    def turned(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        sign = torch.where((y == 0).sum() > 4, 1.0, -1.0)
        return (sign * model(x)[:, :2].square()).mean()

    with pytest.raises(ValueError, match="by the others of its batch"):
        train(turned, module=network().double(), dataset=TensorDataset(records.tensors[0].double(), records.tensors[1]))


def test_without_the_repetition_they_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss_check, "compare_losses", lambda *_: loss_replay.Findings([]))
    for body in MIXED.values():
        train(body)


def test_a_refused_loss_releases_nothing() -> None:
    run = training()
    with pytest.raises(ValueError, match="by the others of its batch"):
        go_on(run, own_value, 1)
    assert run.engine.steps == 0
    go_on(run, lambda model, x, y: F.cross_entropy(model(x), y), 2)
    assert run.engine.steps == 2


# -- what is passed on ---------------------------------------------------------------------------------------------


def logged(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    out = model(x)
    accuracy = (out.argmax(1) == y).float().mean().item()
    loss = F.cross_entropy(out, y)
    assert torch.isfinite(loss)
    print(f"{loss.item():.3f} {accuracy:.2f} {float(loss):.1f} {loss}"[:0], end="")
    return loss


def in_place(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    x.div_(2).sub_(0.1)
    x[:, 0] = 0.0
    out = model(x)
    out /= 2
    loss = F.cross_entropy(out, y)
    loss *= 0.5
    loss /= 3
    return loss


def parts(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    total = torch.zeros(())
    out = model(x)
    for number in range(2):
        total += (number + 1) * F.cross_entropy(out.chunk(2, 1)[number], y % 1)
    return total


def mixed_precision(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return F.cross_entropy(model(x).float(), y)


def distilled(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    with torch.no_grad():
        soft = TEACHER(x).softmax(1)
    return 0.5 * F.cross_entropy(model(x), y) + 0.5 * F.kl_div(model(x).log_softmax(1), soft, reduction="batchmean")


def loop_over_rows(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    out = model(x)
    return torch.stack([F.cross_entropy(out[row], y[row]) for row in range(len(x))]).mean()


def two_views(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    first, second = model(x + 0.1 * torch.randn_like(x)), model(x + 0.1 * torch.randn_like(x))
    return F.cross_entropy(first, y) + F.mse_loss(first, second.detach())


def chosen(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    action = torch.distributions.Categorical(logits=model(x)).sample()
    return (each(model(x), action) * (action == y)).mean()


def grown(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    grown.weight += 0.1  # type: ignore[attr-defined]
    return F.cross_entropy(model(x), y) + grown.weight * model(x).pow(2).mean()  # type: ignore[attr-defined]


grown.weight = 0.0  # type: ignore[attr-defined]

ACCEPTED: dict[str, Body] = {
    "plain": lambda model, x, y: F.cross_entropy(model(x), y),
    "logged": logged,
    "in place": in_place,
    "parts": parts,
    "mixed precision": mixed_precision,
    "distilled": distilled,
    "loop over rows": loop_over_rows,
    "two views": two_views,
    "chosen at random": chosen,
    "a weight that grows": grown,
    "class weights, public": lambda model, x, y: (each(model(x), y) * torch.tensor([0.2, 0.3, 0.5])[y]).mean(),
    "focal": lambda model, x, y: ((1 - (-each(model(x), y)).exp()) ** 2 * each(model(x), y)).mean(),
    "own confidence": lambda model, x, y: (lambda out: (each(out, y) * out.detach().softmax(1).amax(1)).mean())(
        model(x)
    ),
    "pseudo-labels": lambda model, x, y: (
        lambda out: (each(out, out.detach().argmax(1)) * (out.detach().softmax(1).amax(1) > 0.4)).mean()
    )(model(x)),
    "noise on the output": lambda model, x, y: F.cross_entropy(F.dropout(model(x), 0.3), y),
    "in another order": lambda model, x, y: (lambda order: F.cross_entropy(model(x[order]), y[order]))(
        torch.arange(len(x)).flip(0)
    ),
    "sorted": lambda model, x, y: (lambda order: F.cross_entropy(model(x[order]), y[order]))(x[:, 0].argsort()),
    "vector": lambda model, x, y: each(model(x), y).mean(0, keepdim=True).squeeze(0),
    "one hot": lambda model, x, y: F.mse_loss(model(x), F.one_hot(y, CLASSES).float()),
    "to": lambda model, x, y: F.cross_entropy(model(x.to("cpu", torch.float32).contiguous()), y.long().view(-1)),
    "numpy, shown": lambda model, x, y: (lambda out: (out.detach().numpy().sum(), F.cross_entropy(out, y))[1])(
        model(x)
    ),
}


@pytest.mark.parametrize("name", ACCEPTED)
def test_ordinary_loops_are_accepted_without_a_note(name: str) -> None:
    assert notes(train(ACCEPTED[name])) == []


@pytest.mark.parametrize("name", ["in another order", "class weights, public", "noise on the output", "mixup"])
def test_where_bits_differ_gradients_are_compared(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU may add up in another order each time; what is known of bits then says nothing."""
    count = iter(range(1 << 30))
    monkeypatch.setattr(loss_repetition, "marks", lambda value, rows: torch.tensor([next(count)]))
    if name in ACCEPTED:
        assert notes(train(ACCEPTED[name])) == []
        return
    with pytest.raises(ValueError, match="mixed before they reach the model"):
        train(mixup)
    with pytest.raises(ValueError, match="by the others of its batch"):
        train(MIXED[next(iter(MIXED))])


def test_mostly_gradients_are_computed_once_for_each_replacement(monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[Tensor] = []
    run = loss_repetition.Repetition.run

    def counted(self: Any, index: Tensor, plain: Any) -> Any:
        runs.append(index)
        return run(self, index, plain)

    monkeypatch.setattr(loss_repetition.Repetition, "run", counted)
    train(lambda model, x, y: F.cross_entropy(model(x), y), lots=1)
    assert len(runs) == 1 + loss_replay._REPLACEMENTS


def test_gradients_are_those_of_the_plain_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    body = ACCEPTED["two views"]
    followed = train(body).weights()
    monkeypatch.setattr(loss_check.LossCheck, "hand_out", lambda self, batch: None)
    for name, value in train(body).weights().items():
        assert torch.equal(value, followed[name])


# -- what cannot be followed is named ----------------------------------------------------------------------------------


def by_a_number(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    loss = F.cross_entropy(model(x), y)
    return loss / loss.item()


def by_a_branch(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    loss = F.cross_entropy(model(x), y)
    return 0.5 * loss if loss.detach() > loss.detach() * x.mean().sign() else loss


def by_numpy(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    counts = np.bincount(y.numpy(), minlength=CLASSES) + 1.0
    return (each(model(x), y) * torch.from_numpy(1 / counts).float()[y]).mean()


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return 2 * gradient


NAMED: dict[str, tuple[Body, str]] = {
    "a number": (by_a_number, "item()"),
    "a branch": (by_a_branch, "branches"),
    "numpy": (by_numpy, "numpy()"),
    "own function": (lambda model, x, y: F.cross_entropy(Doubled.apply(model(x)), y), "autograd.Function"),
    "vmap": (lambda model, x, y: torch.vmap(F.cross_entropy)(model(x), TARGETS[y]).mean(), "could not be read"),
    "made outside": (lambda model, x, y: F.cross_entropy(model(torch.from_numpy(x.numpy() * 2)), y), "called with"),
}


@pytest.mark.parametrize("name", NAMED)
def test_what_cannot_be_followed_is_named_in_the_statement(name: str) -> None:
    body, match = NAMED[name]
    found = notes(train(body))
    assert len(found) >= 1 and match in " ".join(found)


def test_other_ways_to_back_propagate_are_named() -> None:
    run = training()
    for x, y in run.loader:
        torch.autograd.backward(F.cross_entropy(run.module(x), y))
        run.optimizer.step()
        break
    assert any("loss.backward()" in note for note in notes(run))


def test_what_is_changed_in_place_in_a_list_is_named() -> None:
    """Calls that were made again would change it again."""

    def doubled(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        out = model(x)
        torch._foreach_mul_([out.detach()], 2.0)
        return F.cross_entropy(out, y)

    assert any("_foreach_mul_ changes a tensor without" in note for note in notes(train(doubled)))


def test_activations_from_inside_are_named() -> None:
    run, kept = training(), []
    run.module[1].register_forward_hook(lambda module, args, out: kept.append(out))  # type: ignore[index]
    go_on(run, lambda model, x, y: F.cross_entropy(model(x), y) + kept[-1].pow(2).mean(), 4)
    assert "inside the model" in " ".join(notes(run))


# -- earlier batches -------------------------------------------------------------------------------------------------


def test_values_of_earlier_batches_are_refused() -> None:
    queue = [torch.zeros(4, CLASSES)]

    def queued(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        out = model(x)
        loss = F.cross_entropy(out, y) + (out @ queue[0].T).abs().mean()
        queue[0] = torch.cat([out.detach(), queue[0]])[:4]
        return loss

    average = [torch.zeros(())]

    def averaged(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        losses = each(model(x), y)
        loss = (losses * (losses.detach() > average[0])).mean()
        average[0].mul_(0.9).add_(0.1 * loss.detach())
        return loss

    for body in (queued, averaged):
        with pytest.raises(ValueError, match="an earlier batch"):
            train(body)


def test_sums_for_the_log_are_no_such_values() -> None:
    total = torch.zeros(())
    sums = [torch.zeros(())]

    def body(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(model(x), y)
        total.add_(loss.detach())
        sums[0] = sums[0] + loss.detach()
        return loss

    assert notes(train(body, lots=8)) == []
    assert float(total) == pytest.approx(float(sums[0])) and float(total) > 1


# -- containers, and what is left behind -------------------------------------------------------------------------------


@dataclass
class Record:
    features: Tensor
    label: Tensor


class Records(Dataset[Any]):
    def __init__(self, wrap: Callable[[Tensor, Tensor], Any]) -> None:
        self.tensors, self.wrap = data().tensors, wrap

    def __len__(self) -> int:
        return len(self.tensors[0])

    def __getitem__(self, index: int) -> Any:
        return self.wrap(self.tensors[0][index], self.tensors[1][index])


def test_batches_of_any_structure_are_followed() -> None:
    run = training(dataset=Records(lambda x, y: {"inputs": {"x": x}, "rest": [y, "name"]}))
    with pytest.raises(ValueError, match="mixed before they reach the model"):
        for batch in run.loader:
            x = batch["inputs"]["x"]
            F.cross_entropy(run.module(x - x.mean(0)), batch["rest"][0]).backward()


def test_the_batch_and_the_generators_are_as_they_were() -> None:
    run = training()
    for x, y in run.loader:
        kept = x.clone()
        assert isinstance(x, Tensor) and type(x) is not Tensor
        out = run.module(x)
        loss = F.cross_entropy(F.dropout(out, 0.5), y)
        state = torch.get_rng_state()
        copied = copy.deepcopy(x)
        loss.backward()
        assert type(x) is Tensor and torch.equal(x, kept) and torch.equal(copied, kept)
        assert type(copied) is Tensor
        run.optimizer.step()
        break
    assert state.shape == torch.get_rng_state().shape


def test_nothing_of_a_batch_is_kept() -> None:
    run = training()
    for number, (x, y) in enumerate(run.loader):
        reference = weakref.ref(x)
        loss = F.cross_entropy(run.module(x), y)
        loss.backward()
        run.optimizer.step()
        if number == 1:
            break
    del x, y
    gc.collect()
    assert reference() is None and loss.item() > 0


def test_most_batches_are_ordinary_tensors() -> None:
    run = training()
    kinds = []
    while len(kinds) < 12:
        for x, y in run.loader:
            kinds.append(type(x) is Tensor)
            F.cross_entropy(run.module(x), y).backward()
            run.optimizer.step()
    assert kinds[:10] == [False] * 4 + [True] * 4 + [False] + [True]
    assert x.shape[1] == FEATURES


def test_a_loop_that_breaks_off_leaves_nothing_behind() -> None:
    run = training()
    for x, y in run.loader:
        F.cross_entropy(run.module(x), y)
        break
    go_on(run, lambda model, x, y: F.cross_entropy(model(x), y), 2)
    assert type(x) is Tensor
    run.engine.detach()


def test_only_what_the_user_computes_is_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is read from the loss is computed from its targets too, which are followed; it is not the user's."""
    seen: list[list[str]] = []
    compare = loss_check.compare_losses

    def noted(recorder: Recorder, *arguments: Any) -> Any:
        seen.append([call.name for call in recorder.calls if isinstance(call, Call)])
        return compare(recorder, *arguments)

    monkeypatch.setattr(loss_check, "compare_losses", noted)
    train(lambda model, x, y: F.cross_entropy(2 * model(x), y), lots=2)
    assert seen == [["mul", "cross_entropy"]] * 2
