"""The examination of a model before its first private batch: what it finds, refuses and leaves untouched."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dphero
from dphero.checks.first_batch import MixedExamplesError
from dphero.gradients.outer import Outer
from tests.oracle.micro_batches import Tapped, check, compare, micro_batches
from tests.oracle.zoo import GPT, Lambda, Tagger, sequences, tokens


def mean_loss(module: nn.Module, *inputs: Tensor) -> Tensor:
    return module(*inputs).sin().flatten(1).sum(1).mean()


def with_layer(function: Callable[..., Tensor], **members: Any) -> nn.Module:
    """A small network with one layer of its own kind in the middle."""
    layers = {"first": nn.Linear(8, 8), "odd": Lambda(function, **members), "last": nn.Linear(8, 4)}
    return nn.Sequential(nn.ModuleDict(layers)["first"], layers["odd"], layers["last"])


def run(module: nn.Module, *inputs: Any, **options: Any) -> Any:
    """Call a model with taps once; return its output."""
    first = next(x for x in (*inputs, *options.values()) if isinstance(x, Tensor))
    with Tapped(module, len(first)):
        return module(*inputs, **options)


# -- examples that are mixed ----------------------------------------------------------------------------------------


class Centre(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(0)


MIXING: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "mean": lambda self, x: x - x.mean(0),
    "largest": lambda self, x: x / x.abs().amax(),
    "neighbour": lambda self, x: x + x.roll(1, 0),
    "first": lambda self, x: x - x[:1],
    "similarity": lambda self, x: torch.softmax(x @ x.T, -1) @ x,
    "number of rows": lambda self, x: x / len(x),
    "number of rows, with dropout": lambda self, x: F.dropout(x, 0.5, self.training) / len(x),
    "place in the batch": lambda self, x: x + torch.arange(len(x)).unsqueeze(1),
    "poison": lambda self, x: x if bool((x == x[:1]).all()) else x * float("nan"),
    "sorted": lambda self, x: x.sort(0).values,
    "faintly": lambda self, x: x + 1e-3 * x.std(0),
    "while training": lambda self, x: x - x.mean(0) if self.training else x,
    "while training, with dropout": lambda self, x: F.dropout(x - x.mean(0), 0.5) if self.training else x,
}


@pytest.mark.parametrize("name", MIXING)
def test_mixed_examples_are_refused(name: str) -> None:
    model = with_layer(MIXING[name])
    with pytest.raises(MixedExamplesError, match=r"^'1' \(Lambda\).*depends on.*GroupNorm"):
        run(model, torch.randn(6, 8))


def test_the_innermost_module_is_named() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.Dropout(0.1), Centre()), nn.Linear(8, 2))
    with pytest.raises(MixedExamplesError, match=r"^'1\.1' \(Centre\)"):
        run(model, torch.randn(6, 8))


@pytest.mark.parametrize("rows", [2, 3])
def test_small_first_batches(rows: int) -> None:
    with pytest.raises(MixedExamplesError):
        run(with_layer(MIXING["mean"]), torch.randn(rows, 8))


def test_a_matrix_of_all_pairs() -> None:
    with pytest.raises(MixedExamplesError, match="all pairs"):
        run(Lambda(lambda self, x: self.linear(x) @ self.linear(x).T, linear=nn.Linear(8, 8)), torch.randn(6, 8))


def test_a_memory_that_every_example_reads() -> None:
    model = Lambda(
        lambda self, x, y: torch.softmax(self.q(x) @ self.k(y).T, -1) @ y, q=nn.Linear(8, 8), k=nn.Linear(8, 8)
    )
    with pytest.raises(MixedExamplesError):
        run(model, torch.randn(6, 8), torch.randn(6, 8))


def test_folded_in_the_wrong_order() -> None:
    model = Lambda(lambda self, x: self.linear(x.transpose(0, 1).reshape(-1, 8)), linear=nn.Linear(8, 3))
    with pytest.raises(MixedExamplesError, match=r"^'linear' \(Linear\).*reordered"):
        run(model, sequences(6, 5))


def test_examples_sorted_on_the_way() -> None:
    """Each row is its example's, at both ends of the model; in between, rows belong to others."""

    def forward(self: Any, x: Tensor) -> Tensor:
        order = x.sum(1).argsort()
        return self.linear(x[order])[order.argsort()]

    with pytest.raises(MixedExamplesError, match=r"^'linear' \(Linear\)"):
        run(Lambda(forward, linear=nn.Linear(8, 3)), torch.randn(6, 8).sort(0).values)


# -- examples that meet on the way back --------------------------------------------------------------------------------


class MeanTaken(torch.autograd.Function):
    """Leaves the values as they are, and takes the batch's mean from their gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient - gradient.mean(0)


def contrast(self: Any, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(self.first(x) @ self.second(y).T, torch.arange(len(x)))


def balance(self: Any, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Switch's loss for experts that are used alike, returned beside the output."""
    share = self.first(x).softmax(1)
    return self.second(y), (share.mean(0) * (share.argmax(1, keepdim=True) == torch.arange(8)).float().mean(0)).sum()


ON_THE_WAY_BACK: dict[str, Callable[..., Any]] = {
    "a contrast returned as the loss": contrast,
    "a term for balance": balance,
    "centred, and the loss returned": lambda self, x, y: (
        ((h := self.first(x) + self.second(y)) - h.mean(0)).pow(2).mean()
    ),
    "in the backward pass alone": lambda self, x, y: MeanTaken.apply(self.first(x)).tanh() + self.second(y),
    "straight through": lambda self, x, y: (h := self.first(x)) - h.mean(0) + h.mean(0).detach() + self.second(y),
}


@pytest.mark.parametrize("name", ON_THE_WAY_BACK)
def test_gradients_that_depend_on_other_examples_are_refused(name: str) -> None:
    torch.manual_seed(0)
    model = Lambda(ON_THE_WAY_BACK[name], first=nn.Linear(8, 8), second=nn.Linear(8, 8))
    with pytest.raises(MixedExamplesError, match=r"gradient for '.*' depends on the other examples.*mean over"):
        run(model, torch.randn(6, 8), torch.randn(6, 8))


def test_that_comparison_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dphero.checks.independence.IndependenceCheck, "compare_gradients", lambda *_: None)
    for forward in ON_THE_WAY_BACK.values():
        run(Lambda(forward, first=nn.Linear(8, 8), second=nn.Linear(8, 8)), torch.randn(6, 8), torch.randn(6, 8))


def test_a_mean_may_be_returned_as_the_loss() -> None:
    def forward(self: Any, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        out = F.dropout(self.linear(x), 0.5, self.training)
        return {"logits": out, "loss": F.cross_entropy(out, y), "parts": out.pow(2).mean(0)}

    run(Lambda(forward, linear=nn.Linear(8, 5)), torch.randn(6, 8), torch.randint(5, (6,)))


# -- examples that are mixed now and then ------------------------------------------------------------------------------


@pytest.mark.parametrize("draw", [lambda: torch.rand(()), random.random, np.random.rand])
def test_examples_that_are_mixed_at_random_are_refused(draw: Callable[[], Any]) -> None:
    model = with_layer(lambda self, x: x - x.mean(0) if draw() < 0.5 else x)
    for seed in range(8):
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)
        with pytest.raises(MixedExamplesError):
            run(model, torch.randn(6, 8))


def test_a_buffer_that_is_written_later_is_examined_then() -> None:
    class Late(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.on = nn.Linear(8, 3), False
            self.register_buffer("mean", torch.zeros(8))
            self.register_buffer("count", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            if self.on:
                self.count += 1
            if self.on == "data":
                self.mean.copy_(x.detach().mean(0))
            return self.linear(x - self.mean)

    model, x = Late(), torch.randn(6, 8)
    with Tapped(model, 6) as tapped:
        model(x)
        plan, model.on = tapped.taps.plan, True
        model(x)
        again = tapped.taps.plan
        model(x)
        assert plan is not again and again is tapped.taps.plan  # examined anew, once; a counter is no harm
        model.on = "data"
        with pytest.raises(ValueError, match="'mean' is written from the data"):
            model(x)


def test_a_buffer_that_is_always_written_may_take_part() -> None:
    """It was examined at first; to examine it again, after the pass, would write into what the backward pass needs."""

    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 3)
            self.register_buffer("count", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.count += 1
            return self.linear(x) * self.count

    model, x = Counting(), torch.randn(6, 8)
    with Tapped(model, 6) as tapped:
        for _ in range(3):
            model(x).sum().backward()
        assert len(tapped.found) == 3 and model.count == 3


def test_a_result_without_tensors_is_refused() -> None:
    class Result:
        def __init__(self, logits: Tensor) -> None:
            self.logits = logits

    with pytest.raises(ValueError, match=r"returns a Result, and no tensor is found in it.*dictionaries"):
        run(Lambda(lambda self, x: Result(self.linear(x)), linear=nn.Linear(8, 3)), torch.randn(6, 8))


def test_a_length_that_depends_on_the_others_is_refused() -> None:
    def forward(self: Any, x: Tensor, lengths: Tensor) -> Tensor:
        return self.linear(x)[:, : int(lengths.max())]

    with pytest.raises(MixedExamplesError, match=r"the shape of its output depends on.*Pad all batches"):
        run(Lambda(forward, linear=nn.Linear(8, 3)), sequences(6, 7), torch.tensor([3, 4, 5, 6, 7, 2]))


def test_one_row_says_nothing_and_the_next_batch_is_examined() -> None:
    model = with_layer(MIXING["mean"])
    with Tapped(model, 1) as tapped:
        model(torch.randn(1, 8)).sum().backward()
        assert tapped.taps.plan is not None and not tapped.taps.plan.examples_independent
        tapped.rows = 4
        with pytest.raises(MixedExamplesError):
            model(torch.randn(4, 8))


def test_identical_rows_say_nothing_either() -> None:
    model = with_layer(MIXING["mean"])
    with Tapped(model, 4):
        model(torch.ones(4, 8)).sum().backward()
        with pytest.raises(MixedExamplesError):
            model(torch.randn(4, 8))


def test_not_a_number_in_the_first_batch() -> None:
    batch = torch.randn(6, 8)
    batch[0], batch[2, 3] = float("nan"), float("inf")
    run(with_layer(lambda self, x: x.tanh()), batch)
    with pytest.raises(MixedExamplesError):
        run(with_layer(MIXING["mean"]), batch)
    with Tapped(with_layer(lambda self, x: x.tanh()), 6) as tapped:  # nothing to compare: examined again
        tapped.taps.module(torch.full((6, 8), float("nan"))).sum().backward()
        assert not tapped.taps.plan.examples_independent


# -- data in buffers and parameters ---------------------------------------------------------------------------------


class Keeper(nn.Module):
    def __init__(self, write: Callable[[Any, Tensor], None], kind: str = "buffer") -> None:
        super().__init__()
        self.write = write
        if kind == "buffer":
            self.register_buffer("kept", torch.zeros(8))
        else:
            self.kept = nn.Parameter(torch.zeros(8), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.write(self, x.detach())
        return x + 0 * self.kept


def average(self: Any, x: Tensor) -> None:
    self.kept.mul_(0.9).add_(0.1 * x.mean(0))


def largest(self: Any, x: Tensor) -> None:
    self.kept.copy_(torch.maximum(self.kept, x.amax(0)))


def count_rows(self: Any, x: Tensor) -> None:
    self.kept += len(x)


def replace(self: Any, x: Tensor) -> None:
    self.kept = x[0].clone()


def through_data(self: Any, x: Tensor) -> None:
    self.kept.data.copy_(x.mean(0))


@pytest.mark.parametrize(
    ("write", "kind"),
    [
        (average, "buffer"),
        (largest, "buffer"),
        (replace, "buffer"),
        (count_rows, "buffer"),
        (through_data, "parameter"),
    ],
)
def test_data_that_would_be_published(write: Callable, kind: str) -> None:
    model = nn.Sequential(nn.Linear(8, 8), Keeper(write, kind), nn.Linear(8, 2))
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=rf"1\.{kind} 'kept' is written from the data.*dphero\.fix"):
        run(model, torch.randn(6, 8))
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])


def test_buffers_that_hold_no_data() -> None:
    def count(self: Any, x: Tensor) -> None:
        self.kept += 1

    run(nn.Sequential(nn.Linear(8, 8), Keeper(count), nn.Linear(8, 2)), torch.randn(6, 8))


# -- nothing is touched ---------------------------------------------------------------------------------------------


def test_the_examination_leaves_no_trace() -> None:
    def write(self: Any, x: Tensor) -> None:
        self.kept += 1
        random.random()
        np.random.rand()

    keeper = Keeper(write)
    model = nn.Sequential(nn.Linear(8, 8), keeper, nn.Dropout(0.5), nn.Linear(8, 2))
    model[2].eval()
    model[0].weight.grad = gradient = torch.ones(8, 8)
    torch.manual_seed(5)
    random.seed(5)
    np.random.seed(5)
    before = (torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist())
    buffer, parameter, value = keeper.kept, model[0].weight, model[0].weight.detach().clone()
    with Tapped(model, 6) as tapped:
        x = torch.randn(6, 8, generator=torch.Generator().manual_seed(0))
        dphero.checks.first_batch.probe(tapped.taps, (x,), {}, 6)
        assert tapped.taps.tape is None and not tapped.found
    after = (torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist())
    assert torch.equal(before[0], after[0]) and before[1:] == after[1:]
    assert keeper.kept is buffer and not keeper.kept.any()
    assert model[0].weight is parameter and torch.equal(parameter, value) and parameter.grad is gradient
    assert [module.training for module in model] == [True, True, False, True]


def test_what_the_arguments_were_made_from_gets_no_gradient() -> None:
    x = torch.randn(6, 8, requires_grad=True)
    model = nn.Linear(8, 3)
    with Tapped(model, 6):
        out = model(2 * x)  # a graph before the model, which the examination must not use up
        assert x.grad is None
        out.sum().backward()
    torch.testing.assert_close(x.grad, 2 * model.weight.detach().sum(0).expand(6, 8))


# -- no false alarms --------------------------------------------------------------------------------------------------


def test_dropout_in_all_its_forms() -> None:
    class Dropping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.3, batch_first=True)
            self.recurrent = nn.LSTM(8, 8, num_layers=2, dropout=0.3, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            x = self.recurrent(F.dropout(self.layer(x), 0.2, self.training))[0]
            return x * (torch.rand_like(x) > 0.1)

    model = Dropping()
    with Tapped(model, 5) as tapped:
        model(sequences(5)).sum().backward()
    assert all(norms.isfinite().all() for norms in tapped.found[0].square_norms.values())
    assert tapped.taps.plan.examples_independent


def test_layers_dropped_at_random() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        self.used = {"scale"}
        for number, layer in enumerate(self.layers):
            if torch.rand(()) > 0.5:
                x = x + layer(x).tanh()
                self.used |= {f"layers.{number}.weight", f"layers.{number}.bias"}
        return x * self.scale

    torch.manual_seed(0)
    model = Lambda(forward, layers=nn.ModuleList([nn.Linear(8, 8) for _ in range(4)]), scale=torch.randn(8))
    with Tapped(model, 5) as tapped:
        for _ in range(12):
            mean_loss(model, sequences(5)).backward()
            assert tapped.found[-1].pieces.keys() == model.used


@pytest.mark.parametrize("lengths", [(6, 3, 9, 6, 2), (5, 10, 4)])
@pytest.mark.parametrize(
    "make",
    [
        lambda: Tagger(nn.LSTM, num_layers=2, bidirectional=True),
        lambda: GPT(longest=16),
        lambda: Lambda(lambda self, x: self.e(x.view(-1)).view(*x.shape, -1), e=nn.Embedding(11, 3)),
        lambda: Lambda(unrolled, embedding=nn.Embedding(11, 4), across=torch.randn(4, 4), cell=nn.GRUCell(4, 4)),
    ],
    ids=["lstm", "gpt", "folded", "by hand"],
)
def test_sequences_of_other_lengths(make: Callable[[], nn.Module], lengths: tuple[int, ...]) -> None:
    """Also where the length equals the number of examples, or their product is the same."""
    torch.manual_seed(0)
    model = make().double()
    with Tapped(model, 5) as tapped:
        for length, rows in zip(lengths, (5, 10, 3, 6, 4), strict=False):
            batch = (tokens(rows, length),)
            with tapped.taps.paused():
                expected = micro_batches(model, batch, mean_loss)
            tapped.rows = rows
            tapped.found.clear()
            mean_loss(model, *batch).backward()
            compare(expected, tapped.found[0], tolerance=1e-8)


@pytest.mark.parametrize(
    "steps",
    [[(5, 4, 3, True), (6, 6, 2, True), (7, 7, 2, False), (4, 4, 1, True)], [(5, 4, 2, False), (6, 6, 0, True)]],
)
@pytest.mark.parametrize("way", ["in one place", "in several places", "in a function", "on one line"])
def test_calls_that_change_later(way: str, steps: list[tuple[int, int, int, bool]]) -> None:
    """With as many positions as examples, shapes alone would not tell that the calls have changed."""

    def call(self: Any, x: Tensor) -> Tensor:
        return self.linear(x)

    def each_of(self: Any, xs: list[Tensor]) -> list[Tensor]:
        return [self.linear(x) for x in xs]

    def forward(self: Any, x: Tensor) -> Tensor:
        x = x.cumsum(1)  # time is not the batch
        inputs = [x[:, k] if steps[0][3] is False else x * k for k in range(self.calls)]
        turned = [x.transpose(0, 1)] if self.turned else []
        if way == "in one place":
            outs = [self.linear(each) for each in inputs + turned]
        elif way == "in several places":
            outs = [self.linear(each) for each in inputs] + [self.linear(each) for each in turned]
        elif way == "on one line":
            outs = each_of(self, inputs) + each_of(self, turned)
        else:
            outs = [call(self, each) for each in inputs] + [call(self, each) for each in turned]
        ends = [out.sum(0) for out in outs[len(inputs) :]]
        starts = [out if out.dim() == 2 else out.sum(1) for out in outs[: len(inputs)]]
        return sum(starts + ends) + 0 * x[:, 0]

    torch.manual_seed(0)
    model = Lambda(forward, linear=nn.Linear(8, 8)).double()
    with Tapped(model, 5) as tapped:
        for rows, length, calls, turned in steps:
            model.calls, model.turned, tapped.rows = calls, turned, rows
            batch = (sequences(rows, length).double(),)
            with tapped.taps.paused():
                expected = micro_batches(model, batch, mean_loss)
            if way == "in one place" and (rows, calls) == (4, 1):
                continue  # as many calls, of the same shapes, from the same place: not to be told apart
            mean_loss(model, *batch).backward()
            compare(expected, tapped.found[-1], tolerance=1e-8)


def test_a_batch_that_is_repeated_later() -> None:
    model = Lambda(lambda self, x: self.linear(x.repeat(self.times, 1)), linear=nn.Linear(8, 3))
    model.times = 1
    with Tapped(model, 5):
        model(torch.randn(5, 8)).sum().backward()
        model.times = 2
        with pytest.raises(MixedExamplesError, match="reordered"):
            model(torch.randn(5, 8))


def unrolled(self: Any, index: Tensor) -> Tensor:
    x, state = self.embedding(index), None
    for time in range(x.shape[1]):
        state = self.cell(x[:, time] @ self.across.T, state)
    return state


# -- finding the examples ---------------------------------------------------------------------------------------------


def test_arguments_by_name_in_dictionaries_and_outputs_of_all_kinds() -> None:
    def forward(
        self: Any, batch: dict[str, Tensor], *, mask: Tensor, scale: float, positions: Tensor
    ) -> dict[str, Any]:
        h = self.linear(batch["x"] + self.embedding(positions)) * mask.unsqueeze(-1) * scale
        return {"out": h, "more": (h.mean(1), [h[:, 0]]), "rows": len(h), "none": None}

    model = Lambda(forward, linear=nn.Linear(8, 8), embedding=nn.Embedding(6, 8))
    batch = {"x": sequences(6, 6)}  # as many positions as examples: positions must not be taken for examples
    mask, positions = (torch.rand(6, 6) > 0.3).float(), torch.arange(6)

    def loss(module: nn.Module, x: Tensor, mask: Tensor) -> Tensor:
        out = module({"x": x}, mask=mask, scale=2.0, positions=positions)
        return (out["out"].sin().sum((1, 2)) + out["more"][0].cos().sum(1) + out["more"][1][0].sum(1)).mean()

    check(model, (batch["x"], mask), loss)


def test_sequences_in_front() -> None:
    def loss(module: nn.Module, x: Tensor) -> Tensor:
        return module(x.transpose(0, 1))[0].sin().sum((0, 2)).mean()

    check(nn.GRU(8, 4), (sequences(5, 7),), loss)
    with pytest.raises(MixedExamplesError) as error:  # time is in axis 0, where examples are looked for
        check(nn.GRU(8, 4), (sequences(6, 6),), loss)
    assert "examples must be in axis 0" in str(error.value.__notes__)


def test_positions_that_cannot_be_told_from_examples() -> None:
    check(nn.Linear(8, 3), (sequences(5, 6),), mean_loss)
    with pytest.raises(ValueError, match="as many examples as positions"):
        run(nn.Linear(8, 3), sequences(6, 6))
    with Tapped(model := nn.Linear(8, 3), 5) as tapped:  # settled by an earlier batch
        model(sequences(5, 6))
        tapped.rows = 6
        model(sequences(6, 6))


def test_positions_that_leave_nothing_of_the_examples() -> None:
    """A bag of words: the words could be the examples, but then nothing of them would come out."""
    bag = Lambda(lambda self, i: self.linear(self.words(i).mean(1)), words=nn.Embedding(9, 8), linear=nn.Linear(8, 3))
    run(bag, torch.randint(9, (6, 6)))


def test_a_batch_that_is_not_the_loaders() -> None:
    with (
        Tapped(nn.Linear(8, 3), 7) as tapped,
        pytest.raises(ValueError, match=r"batch of 7 examples.*\(5, 8\).*paused"),
    ):
        tapped.taps.module(torch.randn(5, 8))


@pytest.mark.parametrize("model", [nn.Linear(8, 3), Lambda(lambda self, x: self.e(x.view(-1, 8)), e=nn.Linear(8, 3))])
def test_more_rows_than_the_loaders_after_the_examination(model: nn.Module) -> None:
    """Twice as many rows are not the same examples folded by two."""
    with Tapped(model, 5) as tapped:
        model(sequences(5, 3)).sum().backward()
        with pytest.raises(ValueError, match="batch of 5 examples"):
            model(sequences(10, 3))
        model(sequences(5, 3)).sum().backward()
        assert len(tapped.found) == 2


def test_arguments_that_come_and_go() -> None:
    def forward(self: Any, x: Tensor, y: Tensor | None = None, scale: Tensor | None = None) -> Tensor:
        x = self.first(x) if y is None else self.first(x) * self.second(y)
        return x if scale is None else x * scale * self.gain

    model = Lambda(forward, first=nn.Linear(8, 3), second=nn.Linear(4, 3), gain=torch.randn(3))
    calls = [{}, {"y": torch.randn(5, 4)}, {"scale": torch.tensor(2.0)}, {}, {"y": torch.randn(5, 4)}]
    with Tapped(model, 5) as tapped:
        for options in calls:
            model(torch.randn(5, 8), **options).sum().backward()
        plan = tapped.taps.plan
        model(torch.randn(5, 8), torch.randn(5, 4)).sum().backward()
        assert plan.examples_independent and len(tapped.found) == 6
    assert [len(batch.pieces) for batch in tapped.found] == [2, 4, 3, 2, 4, 4]


def test_errors_of_the_model_itself_are_passed_on() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        return self.linear(x) + torch.zeros(6, 1)  # works for six rows only

    with pytest.raises(RuntimeError, match="must match") as error:
        run(Lambda(forward, linear=nn.Linear(8, 3)), torch.randn(6, 8))
    assert "rows of its first batch" in str(error.value.__notes__)


# -- the rehearsal ----------------------------------------------------------------------------------------------------


class Projection(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.randn(3, 8))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.matrix.T


@pytest.mark.parametrize(
    ("forward_factor", "gradient_factor", "match"),
    [(1.0, 1.5, "'matrix' of .* another gradient"), (1.5, 1.5, "another output")],
)
def test_a_wrong_rule_is_found_out(forward_factor: float, gradient_factor: float, match: str) -> None:
    class Wrong(Projection):
        pass

    @dphero.register(Wrong)
    def wrong(call: Any, x: Tensor) -> Tensor:
        return call.tap(
            lambda: forward_factor * x @ call["matrix"].T, lambda d, x: {"matrix": Outer(d, gradient_factor * x)}, x
        )

    with pytest.raises(ValueError, match=match):
        run(Wrong(), torch.randn(6, 8))


def test_a_rule_that_is_wrong_under_autocast_alone_is_found_out() -> None:
    class Wrong(Projection):
        pass

    @dphero.register(Wrong)
    def wrong(call: Any, x: Tensor) -> Tensor:
        factor = 3.0 if torch.is_autocast_enabled("cpu") else 1.0
        return call.tap(lambda: x @ call["matrix"].T, lambda d, x: {"matrix": Outer(d, factor * x)}, x)

    run(Wrong(), torch.randn(6, 8))
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(ValueError, match=r"'matrix' of .* another gradient"):
        run(Wrong(), torch.randn(6, 8))


@pytest.mark.parametrize("seed", range(6))
def test_sums_that_autograd_rounds_are_no_reason_to_refuse(seed: int) -> None:
    torch.manual_seed(seed)
    hidden = (
        nn.Conv2d(1, 6, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(6, 16, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
    )
    model = nn.Sequential(*hidden, nn.Flatten(), nn.Linear(400, 10))
    with torch.autocast("cpu", torch.bfloat16):
        run(model, torch.randn(6, 1, 28, 28))  # biases: sums of 784 numbers that nearly cancel, in bfloat16


def test_a_parameter_reached_by_another_way() -> None:
    model = Lambda(lambda self, x: x @ self.hidden[0].T, linear=nn.Linear(8, 3))
    model.hidden = [model.linear.weight]
    with pytest.raises(ValueError, match=r"linear\.weight.*another way than the attribute"):
        run(model, torch.randn(6, 8))


# -- a model that does something else for some batches --------------------------------------------------------------


class LeavesMaskOut(nn.Module):
    """A bias that all examples share, and a mask that is only made where an example needs it (T5 in transformers)."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.bias, self.last = nn.Linear(8, 8), nn.Parameter(torch.randn(1, 6, 6)), nn.Linear(8, 3)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x, bias = self.first(x), self.bias
        if not bool(mask.all()):
            bias = bias + torch.where(mask, 0.0, -30.0).unsqueeze(1)
        return self.last(torch.softmax(x @ x.transpose(1, 2) + bias, -1) @ x)


@pytest.mark.parametrize("row", [0, 2, 4])
def test_a_mask_that_is_left_out_where_no_example_needs_it(row: int) -> None:
    torch.manual_seed(0)
    model, x, mask = LeavesMaskOut(), sequences(), torch.ones(5, 6, dtype=torch.bool)
    mask[row, 3:] = False
    check(model, (x, mask), mean_loss)
    full = torch.ones_like(mask)
    expected = [micro_batches(model, batch, mean_loss) for batch in ((x, full), (x, mask), (x, full))]
    with Tapped(model, 5) as found:
        for batch in ((x, full), (x, mask), (x, full)):
            mean_loss(model, *batch).backward()
    for gradients, batch in zip(expected, found.found, strict=True):
        compare(gradients, batch)


# -- modules that sort what they are given, and put it back ----------------------------------------------------------


class Experts(nn.Module):
    """Each token goes to the expert that its first number chooses."""

    def __init__(self, mixes: bool = False) -> None:
        super().__init__()
        self.weight, self.mixes = nn.Parameter(torch.randn(3, 8, 8)), mixes

    def forward(self, x: Tensor) -> Tensor:
        chosen, out = (x[:, 0] > 0).long() + (x[:, 1] > 0).long(), torch.zeros_like(x)
        for number in range(3):
            (which,) = torch.where(chosen == number)
            out = out.index_add(0, which, F.linear(x[which], self.weight[number]))
        return out - 0.1 * out.mean() if self.mixes else out


class Mixture(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.first, self.experts, self.last = nn.Linear(8, 8), Experts(**options), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.experts(self.first(x).flatten(0, 1)).unflatten(0, x.shape[:2]))


def test_a_mixture_of_experts_is_exact() -> None:
    torch.manual_seed(0)
    check(Mixture(), (sequences(),), mean_loss)


def test_a_mixture_of_experts_that_mixes_examples_is_refused() -> None:
    with pytest.raises(MixedExamplesError, match=r"'experts' \(Experts\)"):
        run(Mixture(mixes=True), sequences())


# -- random numbers that do not show --------------------------------------------------------------------------------


def test_dropout_before_a_head_that_starts_at_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rules may draw other random numbers than layers do: the outputs are zero all the same, the gradients are not."""
    head = nn.Linear(8, 3)
    for parameter in head.parameters():
        nn.init.zeros_(parameter)
    model = nn.Sequential(nn.TransformerEncoderLayer(8, 2, 16, 0.3, batch_first=True), head)
    run(model, sequences())
    monkeypatch.setattr("dphero.checks.gradient_check._shows_random_numbers", lambda *_: True)
    with pytest.raises(ValueError, match="another gradient than autograd"):
        run(model, sequences())


# -- what it takes -----------------------------------------------------------------------------------------------------


def test_a_random_model_is_run_a_few_times_on_a_few_rows() -> None:
    rows: list[int] = []
    model = with_layer(lambda self, x: (rows.append(len(x)), F.dropout(x, 0.5, self.training))[1])
    run(model, torch.randn(32, 8))
    assert rows.pop() == 32 and sum(rows) <= 150 and max(rows) <= 7


@pytest.mark.parametrize(("patience", "lines"), [(-1.0, 1), (60.0, 0)])
def test_what_takes_long_says_so_once(
    patience: float, lines: int, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dphero.checks.model_runs._PATIENCE", patience)
    caplog.set_level("INFO", "dphero")
    run(with_layer(lambda self, x: x), torch.randn(6, 8))
    assert [record.getMessage() for record in caplog.records] == [
        "Examining the model on a few rows of its first batch: once, before anything is trusted."
    ] * lines
