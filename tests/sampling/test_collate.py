"""Collate functions: one record must not change what a batch holds of the others, nor how long it is."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_sequence, pad_sequence
from torch.utils.data import DataLoader, Dataset

from dphero import PrivacyEngine
from dphero.checks.padding import PaddingCheck
from dphero.sampling import collate

Patch = pytest.MonkeyPatch
Items = list[tuple[Tensor, int]]
WIDTH = 3


class Sequences(Dataset):
    """Sequences of various lengths, each with a label."""

    def __init__(self, lengths: list[int]) -> None:
        generator = torch.Generator().manual_seed(0)
        self.items = [(torch.randn(n, WIDTH, generator=generator), i % 2) for i, n in enumerate(lengths)]

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.items[index]


LENGTHS = [4 + i % 5 for i in range(40)]


def stack(items: Items) -> tuple[Tensor, Tensor]:
    return torch.stack([x for x, _ in items]), torch.tensor([y for _, y in items])


def pad(items: Items) -> tuple[Tensor, Tensor, Tensor]:
    """As every loader for text or time series does: to the longest example, with lengths."""
    lengths = torch.tensor([len(x) for x, _ in items])
    return pad_sequence([x for x, _ in items], batch_first=True), lengths, torch.tensor([y for _, y in items])


def sorted_pad(items: Items) -> tuple[Tensor, Tensor, Tensor]:
    return pad(sorted(items, key=lambda item: -len(item[0])))


def pad_left(items: Items) -> tuple[Tensor, Tensor, Tensor]:
    x, lengths, y = pad([(x.flip(0), y) for x, y in items])
    return x.flip(1), lengths, y


class Pooled(nn.Module):
    """A linear layer at each position, and a mean over positions: over all of them, or over those that are there."""

    def __init__(self, masked: bool) -> None:
        super().__init__()
        self.masked, self.features, self.head = masked, nn.Linear(WIDTH, 5), nn.Linear(5, 2)
        self.drop = nn.Dropout(0.3)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        h = self.drop(self.features(x).tanh())
        if not self.masked:
            return self.head(h.mean(1))
        mask = (torch.arange(x.shape[1]) < lengths[:, None]).float()
        return self.head((h * mask[..., None]).sum(1) / lengths[:, None])


class LastState(nn.Module):
    def __init__(self, masked: bool) -> None:
        super().__init__()
        self.masked, self.recurrent, self.head = masked, nn.LSTM(WIDTH, 5, batch_first=True), nn.Linear(5, 2)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        states = self.recurrent(x)[0]
        last = lengths - 1 if self.masked else torch.full_like(lengths, x.shape[1] - 1)
        return self.head(states.gather(1, last[:, None, None].expand(-1, 1, 5))[:, 0])


class Convolved(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.head = nn.Conv1d(WIDTH, 5, 3, padding=1), nn.Linear(5, 2)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        return self.head(self.convolution(x.transpose(1, 2)).relu().mean(2))


def private(model: nn.Module, source: Any, **options: Any) -> tuple[PrivacyEngine, Any, Any]:
    engine = PrivacyEngine()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    settings = {"noise_multiplier": 1e-6, "max_grad_norm": 1.0, "guidance": "isotropic", "seed": 1, **options}
    settings.setdefault("sample_rate", 0.5)
    settings.setdefault("expected_batch_size", 20)
    _, _, loader = engine.make_private(module=model, optimizer=optimizer, data_loader=source, **settings)
    return engine, optimizer, loader


def train(model: nn.Module, source: Any, steps: int = 4, **options: Any) -> list[Tensor]:
    """Train on (inputs..., label) batches; return what was released."""
    engine, optimizer, loader = private(model, source, **options)
    found: list[Tensor] = []
    while engine.steps < steps:
        for *inputs, y in loader:
            before = engine.steps
            optimizer.zero_grad()
            F.cross_entropy(model(*inputs), y).backward()
            if engine.steps > before:
                found.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
            if engine.steps == steps:
                break
    return found


def loader_of(function: Callable[[Items], Any], lengths: list[int] = LENGTHS, **options: Any) -> DataLoader[Any]:
    return DataLoader(Sequences(lengths), batch_size=20, collate_fn=function, **options)


# -- rows ------------------------------------------------------------------------------------------------------------


def standardised(items: Items) -> tuple[Tensor, Tensor]:
    x, y = stack(items)
    return (x - x.mean((0, 1))) / x.std((0, 1)), y


def mixed_up(items: Items) -> tuple[Tensor, Tensor]:
    x, y = stack(items)
    return 0.7 * x + 0.3 * x[torch.randperm(len(x))], y


def shared_by_count(items: Items) -> tuple[Tensor, Tensor]:
    x, y = stack(items)
    return x / len(items), y


def with_a_total(items: Items) -> dict[str, Any]:
    x, y = stack(items)
    return {"x": x, "total": float(x.sum()), "y": y}


def largest(items: Items) -> tuple[Tensor, Tensor]:
    """Stretch every example to the longest."""
    x, _, y = pad(items)
    stretched = [F.interpolate(each.T[None], size=x.shape[1], mode="linear")[0].T for each, _ in items]
    return torch.stack(stretched), y


def packed(items: Items) -> tuple[Any, Tensor]:
    return pack_sequence([x for x, _ in items], enforce_sorted=False), torch.tensor([y for _, y in items])


def noisy(items: Items) -> tuple[Tensor, Tensor]:
    x, y = stack(items)
    return x + torch.randn(x.shape), y


def first_batches(source: Any, count: int = 3) -> list[Any]:
    """Return the first batches; each is taken as an engine would take it."""
    _, _, loader = private(nn.Linear(WIDTH, 2), source)
    found = []
    while len(found) < count:
        for batch in loader:
            found.append(batch)
            if loader.lots.capture().last:
                loader.lots.release()
    return found


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (standardised, "depends on the other examples"),
        (mixed_up, "depends on the other examples"),
        (shared_by_count, "depends on the other examples"),
        (with_a_total, r"value for the whole batch, at \['total'\]"),
        (largest, "depends on the other examples"),
        (packed, "no axis carries the examples"),
    ],
)
def test_rows_that_depend_on_neighbours_are_refused(
    function: Callable[[Items], Any], message: str, monkeypatch: Patch
) -> None:
    lengths = LENGTHS if function in (largest, packed) else [6] * 40
    with pytest.raises(ValueError, match=message):
        first_batches(loader_of(function, lengths))
    with unwatched(monkeypatch):
        first_batches(loader_of(function, lengths))


def test_collate_functions_are_watched_in_workers() -> None:
    with pytest.raises(ValueError, match="depends on the other examples"):
        first_batches(loader_of(standardised, [6] * 40, num_workers=1))
    with pytest.raises(ValueError, match="does not ignore the padding"):
        train(Pooled(False), loader_of(pad, num_workers=1))


class ReadySequences(Sequences):
    """Makes whole batches."""

    def __init__(self, function: Callable[[Items], Any]) -> None:
        super().__init__([6] * 40)
        self.function = function

    def __getitems__(self, indices: list[int]) -> Any:
        return self.function([self.items[index] for index in indices])


def as_it_is(batch: Any) -> Any:
    return batch


def test_ready_batches_are_watched() -> None:
    first_batches(DataLoader(ReadySequences(stack), batch_size=20, collate_fn=as_it_is))
    with pytest.raises(ValueError, match="depends on the other examples"):
        first_batches(DataLoader(ReadySequences(standardised), batch_size=20, collate_fn=as_it_is))


@contextmanager
def unwatched(monkeypatch: Patch) -> Iterator[None]:
    """Take the guard away."""
    with monkeypatch.context() as patch:
        patch.setattr(collate.CollateCheck, "look", lambda *arguments: None)
        yield


def as_lists(items: Items) -> dict[str, Any]:
    return {"x": [x for x, _ in items], "names": [f"person {len(x)}" for x, _ in items], "n": len(items)}


def in_place(items: list[Any]) -> tuple[Tensor, Tensor]:
    """Take labels out of the examples, and pad them where they lie."""
    labels = torch.tensor([item.pop("labels") for item in items])
    longest = max(len(item["input_ids"]) for item in items)
    for item in items:
        item["input_ids"].extend([0] * (longest - len(item["input_ids"])))
    return torch.tensor([item["input_ids"] for item in items]), labels


def test_a_collate_function_may_change_its_examples() -> None:
    assert len(first_batches(DataLoader(Tokens(), batch_size=20, collate_fn=in_place), 6)) == 6


def across(items: Items) -> tuple[Tensor, Tensor]:
    x, y = stack(items)
    return x.transpose(0, 1), y


@pytest.mark.parametrize("function", [stack, noisy, as_lists, across])
def test_rows_of_their_own_are_accepted(function: Callable[[Items], Any]) -> None:
    first_batches(loader_of(function, [6] * 40), 6)


@pytest.mark.parametrize("function", [pad, sorted_pad, pad_left])
def test_padding_alone_is_not_refused_by_the_loader(function: Callable[[Items], Any]) -> None:
    assert len(first_batches(loader_of(function), 6)) == 6


def test_an_examination_takes_no_random_numbers() -> None:
    """A run whose batches are looked at draws what one draws that is not looked at."""

    def batches() -> list[Any]:
        return [x for x, _ in first_batches(loader_of(noisy, [6] * 40))]

    watched = batches()
    with pytest.MonkeyPatch.context() as patch, unwatched(patch):
        assert all(map(torch.equal, watched, batches()))


def test_later_batches_are_looked_at_only_if_their_shape_is_new() -> None:
    looks: list[int] = []

    def counting(items: Items) -> Any:
        looks.append(len(items))
        return stack(items)

    first_batches(loader_of(counting, [6] * 40), 4)
    before = len(looks)
    assert before > 50
    first_batches(loader_of(counting, [6] * 40), 10)
    assert len(looks) - before == before + 6  # six batches more, and nothing else


# -- lengths ---------------------------------------------------------------------------------------------------------

UNMASKED: dict[str, Callable[[], nn.Module]] = {
    "mean": lambda: Pooled(False),
    "last state": lambda: LastState(False),
    "convolution": Convolved,
}
MASKED: dict[str, Callable[[], nn.Module]] = {"mean": lambda: Pooled(True), "last state": lambda: LastState(True)}


def test_one_long_record_moves_the_sum_by_many_times_the_clip_norm(monkeypatch: Patch) -> None:
    """The attack: 100 short sequences, and one that is ten times as long."""

    def release(lengths: list[int]) -> Tensor:
        torch.manual_seed(0)
        model = LastState(False)
        return train(model, loader_of(pad, lengths), 1, sample_rate=1.0, expected_batch_size=1)[0]

    with pytest.raises(ValueError, match="one long record would change the gradients of all others"):
        release([12] * 100 + [120])
    with monkeypatch.context() as patch:
        patch.setattr(PaddingCheck, "look", lambda *arguments: None)
        assert float((release([12] * 100 + [120]) - release([12] * 100)).norm()) > 3


def test_a_long_record_is_noticed_after_many_lengths() -> None:
    """Lengths of 60 to 79 first, many times, and then one of 600: a mean over positions hardly shows the former."""

    class Nearly(Pooled):
        def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
            masked = super().forward(x, lengths)
            return masked if x.shape[1] < 100 else masked + x.mean((1, 2))[:, None]

    model = Nearly(True)
    _, _, loader = private(model, loader_of(pad, [60 + i % 20 for i in range(40)] + [600]), sample_rate=0.1)
    lots = iter([*([i, i + 20 - j] for j in range(1, 8) for i in range(4)), [0, 1, 40]])
    loader.sampler.draw = lambda lot: np.array(next(lots))
    with pytest.raises(ValueError, match="does not ignore the padding"):
        while True:
            for x, lengths, y in loader:
                F.cross_entropy(model(x, lengths), y).backward()


@pytest.mark.parametrize("name", UNMASKED)
@pytest.mark.parametrize("function", [pad, sorted_pad])
def test_a_model_that_sees_padding_is_refused(name: str, function: Callable[[Items], Any]) -> None:
    with pytest.raises(ValueError, match=r"does not ignore the padding.*pad_to="):
        train(UNMASKED[name](), loader_of(function))


@pytest.mark.parametrize("name", MASKED)
@pytest.mark.parametrize("function", [pad, sorted_pad])
def test_a_model_that_ignores_padding_is_accepted(name: str, function: Callable[[Items], Any]) -> None:
    train(MASKED[name](), loader_of(function))
    train(MASKED[name](), loader_of(function), physical_batch_size=7, steps=2)


class Square(nn.Module):
    """Takes as many features as there are positions in the longest example, and a matrix of attention."""

    def __init__(self) -> None:
        super().__init__()
        self.features, self.head = nn.Linear(8, 5), nn.Linear(5, 2)

    def forward(self, x: Tensor, allowed: Tensor) -> Tensor:
        attention = torch.softmax(torch.where(allowed, x @ x.transpose(1, 2), -1e9), 2)
        return self.head((attention @ self.features(x)).tanh()[:, 0])


def test_features_are_told_from_positions() -> None:
    model = Square()
    engine, _, loader = private(model, loader_of(pad))
    for x, lengths, y in loader:
        wide = torch.cat([x, x, x[..., :2]], 2)  # 8 features, as many as the longest example has positions
        assert wide.shape[1:] == (8, 8)
        allowed = (torch.arange(8) < lengths[:, None])[:, None, :].expand(-1, 8, 8)
        F.cross_entropy(model(wide, allowed), y).backward()
    assert engine.steps == 2


class Bag(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.EmbeddingBag(30, 5, padding_idx=0), nn.Linear(5, 2)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.embedding(tokens))


def flat(items: list[dict[str, Any]]) -> tuple[Tensor, Tensor, Tensor]:
    """As in torch's tutorial: the tokens of all examples in a row, and where each begins."""
    tokens = [item["input_ids"] for item in items]
    starts = torch.tensor([0] + [len(each) for each in tokens[:-1]]).cumsum(0)
    return (
        torch.tensor([token for each in tokens for token in each]),
        starts,
        torch.tensor([item["labels"] for item in items]),
    )


def matrix(items: list[dict[str, Any]]) -> tuple[Tensor, Tensor]:
    batch = tokens_padded(items)
    return batch["input_ids"], batch["labels"]


def test_bags_are_padded_instead_of_offset() -> None:
    with pytest.raises(ValueError, match=r"shapes \(\d+,\) and \(\d+,\) at \[0\].*padding_idx"):
        first_batches(DataLoader(Tokens(), batch_size=20, collate_fn=flat))
    model = Bag()
    alone = copy.deepcopy(model)
    found = train(model, DataLoader(Tokens(), batch_size=20, collate_fn=matrix), 1, sample_rate=1.0)[0]
    total = torch.zeros_like(found)
    for item in map(Tokens().__getitem__, range(40)):
        out = alone(torch.tensor([item["input_ids"]]))
        gradients = torch.autograd.grad(F.cross_entropy(out, torch.tensor([item["labels"]])), list(alone.parameters()))
        gradient = torch.cat([each.flatten() for each in gradients])
        total += gradient * min(1.0, 1.0 / float(gradient.norm()))
    assert torch.allclose(found * 20, total, atol=1e-4)


def test_a_model_that_takes_left_padding_for_data_is_refused() -> None:
    with pytest.raises(ValueError, match="does not ignore the padding"):
        train(LastState(False), loader_of(pad_left))


def test_what_is_summed_up_before_the_model_is_refused() -> None:
    """The model sees a mean over positions, and no length any more."""
    model = nn.Linear(WIDTH, 2)
    _, _, loader = private(model, loader_of(pad))
    x, *_ = next(batches := iter(loader))
    assert batches
    with pytest.raises(ValueError, match="No argument of the model has an axis of that length"):
        model(x.mean(1))


class PerPosition(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x)


def test_an_output_as_long_as_the_longest_example_may_not_enter_the_loss() -> None:
    """Divided by that length, it would tell it to all others."""
    model = PerPosition()
    _, _, loader = private(model, loader_of(pad))
    x, lengths, y = next(batches := iter(loader))
    assert batches
    mask = (torch.arange(x.shape[1]) < lengths[:, None]).float()[..., None]
    with pytest.raises(ValueError, match="as long as the longest example of the batch"):
        F.cross_entropy((model(x) * mask).mean(1), y).backward()


# -- public lengths --------------------------------------------------------------------------------------------------


def by_hand(length: int) -> Callable[[Items], Any]:
    def function(items: Items) -> tuple[Tensor, Tensor, Tensor]:
        x, lengths, y = pad(items)
        return F.pad(x, (0, 0, 0, length - x.shape[1])), lengths, y

    return function


@pytest.mark.parametrize(("name", "workers"), [*((name, 0) for name in UNMASKED), ("mean", 1)])
def test_a_public_length(name: str, workers: int) -> None:
    torch.manual_seed(0)
    model = UNMASKED[name]().requires_grad_(True)
    state = {key: value.clone() for key, value in model.state_dict().items()}
    found = train(model, loader_of(pad, num_workers=workers), pad_to=16)
    other = UNMASKED[name]()
    other.load_state_dict(state)
    assert all(map(torch.allclose, found, train(other, loader_of(by_hand(16)))))


def test_an_example_that_is_too_long_is_refused() -> None:
    with pytest.raises(ValueError, match="an example has length 8, and pad_to=7"):
        train(Pooled(False), loader_of(pad), pad_to=7)


def test_padding_that_cannot_be_seen_is_refused() -> None:
    with pytest.raises(ValueError, match="no two of the first 1000 examples differ in length"):
        train(Pooled(False), loader_of(pad, [6] * 40), pad_to=8)
    with pytest.raises(ValueError, match="needs a loader whose collate_fn pads"):
        private(Pooled(False), DataLoader(Sequences([6] * 40), batch_size=20), pad_to=8)
    with pytest.raises(ValueError, match="pad_to must be"):
        private(Pooled(False), loader_of(pad), pad_to=0)


@pytest.mark.parametrize("physical", [None, 6])
def test_public_buckets(physical: int | None) -> None:
    """Each example is padded to a length that follows from its own: the same sum as one by one."""
    torch.manual_seed(0)
    model = LastState(False)
    found = train(model, loader_of(pad), 1, sample_rate=1.0, pad_to=(6, 16), physical_batch_size=physical)[0]
    torch.manual_seed(0)
    model = LastState(False)
    total = torch.zeros_like(found)
    for x, y in Sequences(LENGTHS).items:
        filled = F.pad(x, (0, 0, 0, (6 if len(x) <= 6 else 16) - len(x)))
        loss = F.cross_entropy(model(filled[None], torch.tensor([len(x)])), torch.tensor([y]))
        gradient = torch.cat([each.flatten() for each in torch.autograd.grad(loss, list(model.parameters()))])
        total += gradient * min(1.0, 1.0 / float(gradient.norm()))
    assert torch.allclose(found * 20, total, atol=1e-4)


def test_empty_lots_and_lots_of_one() -> None:
    for options in ({"pad_to": 16}, {"pad_to": (6, 16)}, {}):
        train(Pooled(True), loader_of(pad), 30, sample_rate=0.02, expected_batch_size=1, **options)


# -- text --------------------------------------------------------------------------------------------------------------


class Tokens(Dataset):
    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(index)
        ids = torch.randint(3, 30, (4 + index % 5,), generator=generator).tolist()
        return {"input_ids": ids, "attention_mask": [1] * len(ids), "labels": index % 2}


def tokens_padded(items: list[dict[str, Any]]) -> dict[str, Tensor]:
    longest = max(len(item["input_ids"]) for item in items)
    filled = {
        name: torch.tensor([item[name] + [0] * (longest - len(item[name])) for item in items])
        for name in ("input_ids", "attention_mask")
    }
    return {**filled, "labels": torch.tensor([item["labels"] for item in items])}


@pytest.mark.parametrize("masked", [True, False])
def test_bert_needs_its_mask_and_nothing_else(masked: bool) -> None:
    transformers = pytest.importorskip("transformers")
    settings = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
    model = transformers.BertForSequenceClassification(transformers.BertConfig(vocab_size=30, **settings))
    engine, _, loader = private(model, DataLoader(Tokens(), batch_size=20, collate_fn=tokens_padded))

    def train() -> None:
        for batch in loader:
            y = batch.pop("labels")
            if not masked:
                del batch["attention_mask"]
            F.cross_entropy(model(**batch).logits, y).backward()

    if masked:
        train()
        assert engine.steps == 2
    else:
        with pytest.raises(ValueError, match="does not ignore the padding"):
            train()
