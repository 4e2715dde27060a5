"""Lots: their law, their reproducibility, and that none is lost."""

from __future__ import annotations

import itertools
from collections import deque
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from dphero.sampling import (
    Lots,
    PhysicalBatch,
    PoissonSampler,
    PrivateLoader,
    ShuffleSampler,
    dataset_of,
    public_rate,
)
from dphero.sampling.loader import _rows_of
from dphero.sampling.samplers import _distinct

RECORDS, RATE, DRAWS = 40, 0.2, 4000
LEVEL = 1e-3


# -- the law of Poisson lots --------------------------------------------------------------------------------


def inclusions(sampler: Any) -> np.ndarray:
    table = np.zeros((DRAWS, RECORDS))
    for lot in range(DRAWS):
        table[lot, sampler.draw(lot)] = 1
    return table


def frequency_p_value(table: np.ndarray) -> float:
    """Does every example enter with probability q?"""
    expected = DRAWS * RATE
    statistic = ((table.sum(0) - expected) ** 2 / (expected * (1 - RATE))).sum()
    return float(stats.chi2.sf(statistic, RECORDS))


def size_p_value(table: np.ndarray) -> float:
    """Is the number of members binomial?"""
    law = stats.binom(RECORDS, RATE)
    cuts = [0, *range(4, 14), RECORDS + 1]
    expected = DRAWS * np.diff([0, *(law.cdf(cut - 1) for cut in cuts[1:])])
    observed, _ = np.histogram(table.sum(1), cuts)
    return float(stats.chisquare(observed, expected).pvalue)


def pair_p_value(table: np.ndarray) -> float:
    """Do examples enter independently of each other, and of the lot before?"""
    centred = (table - RATE) / np.sqrt(RATE * (1 - RATE))
    upper = np.triu_indices(RECORDS, 1)
    pairs = (centred.T @ centred)[upper] / np.sqrt(DRAWS)
    before = (centred[1:].T @ centred[:-1]).ravel() / np.sqrt(DRAWS - 1)
    scores = np.concatenate([pairs, before])
    return float(2 * stats.norm.sf(abs((scores**2).sum() - len(scores)) / np.sqrt(2 * len(scores))))


class FixedSize(PoissonSampler):
    def draw(self, lot: int) -> np.ndarray:
        return np.random.Generator(np.random.PCG64(lot)).permutation(RECORDS)[: int(RATE * RECORDS)]


class Sticky(PoissonSampler):
    """Half of each lot is that of the lot before."""

    def draw(self, lot: int) -> np.ndarray:
        now, before = super().draw(lot), super().draw(lot + 1)
        return np.concatenate([now[now < RECORDS // 2], before[before >= RECORDS // 2]]) if lot % 2 else now


@pytest.mark.parametrize("key", [3, None])
def test_poisson_lots_are_poisson(key: int | None) -> None:
    table = inclusions(PoissonSampler(RECORDS, RATE, key))
    if key is None:  # fresh randomness: a level that is not met by chance
        assert min(frequency_p_value(table), size_p_value(table), pair_p_value(table)) > 1e-7
    else:
        assert frequency_p_value(table) > LEVEL
        assert size_p_value(table) > LEVEL
        assert pair_p_value(table) > LEVEL


@pytest.mark.parametrize("factor", [2 / 3, 0.9, 1.1, 3 / 2])
def test_the_law_tests_notice_another_rate(factor: float) -> None:
    table = inclusions(PoissonSampler(RECORDS, RATE * factor, 3))
    assert frequency_p_value(table) < 1e-9
    assert size_p_value(table) < 1e-9


def test_the_law_tests_notice_lots_of_fixed_size_and_lots_that_depend_on_each_other() -> None:
    assert size_p_value(inclusions(FixedSize(RECORDS, RATE, 3))) < 1e-9
    assert pair_p_value(inclusions(Sticky(RECORDS, RATE, 3))) < 1e-9


@pytest.mark.parametrize("size, count", [(6, 1), (6, 2), (6, 3), (6, 4), (7, 3), (5, 5), (4, 0)])
def test_distinct_draws_every_set_equally_often(size: int, count: int) -> None:
    random = np.random.Generator(np.random.PCG64(5))
    sets = {members: 0 for members in itertools.combinations(range(size), count)}
    draws = 200 * len(sets)
    for _ in range(draws):
        sets[tuple(sorted(_distinct(random, size, count).tolist()))] += 1
    if len(sets) > 1:
        assert stats.chisquare(list(sets.values())).pvalue > LEVEL


def test_the_uniformity_test_notices_a_stream_that_is_sorted_first() -> None:
    """The first distinct values of a *sorted* stream are the small ones: the mistake that `_distinct` must not make."""
    random = np.random.Generator(np.random.PCG64(5))
    sets = {members: 0 for members in itertools.combinations(range(6), 2)}
    for _ in range(3000):
        sets[tuple(np.unique(random.integers(6, size=10))[:2].tolist())] += 1
    assert stats.chisquare(list(sets.values())).pvalue < 1e-9


@given(st.integers(1, 2000), st.floats(0, 1), st.integers(0, 2**128 - 1), st.integers(0, 2**40))
def test_a_lot_is_a_set_of_valid_indices_and_a_function_of_key_and_number(
    size: int, rate: float, key: int, lot: int
) -> None:
    rate = max(rate, 1e-6)
    first, second = (PoissonSampler(size, rate, key) for _ in range(2))
    second.draw(lot + 1)  # the order of draws does not matter
    members = first.draw(lot)
    assert len(set(members.tolist())) == len(members)
    assert all(0 <= member < size for member in members)
    assert np.array_equal(members, second.draw(lot))


def test_keys_and_numbers_make_different_lots() -> None:
    lots = {tuple(PoissonSampler(1000, 0.1, key).draw(lot)) for key in range(5) for lot in range(5)}
    assert len(lots) == 25
    fresh = PoissonSampler(1000, 0.1, None)
    assert not np.array_equal(fresh.draw(0), fresh.draw(0))


# -- shuffled epochs --------------------------------------------------------------------------------------------


@given(st.integers(1, 50), st.integers(1, 60), st.one_of(st.none(), st.integers(0, 99)))
def test_a_shuffled_epoch_has_every_example_once(size: int, lot_size: int, key: int | None) -> None:
    sampler = ShuffleSampler(size, lot_size, key)
    for epoch in range(2):
        lots = [sampler.draw(epoch * sampler.lots_per_epoch + place) for place in range(sampler.lots_per_epoch)]
        assert sorted(np.concatenate(lots).tolist()) == list(range(size))
        assert all(len(members) == lot_size for members in lots[:-1])


def test_a_shuffled_epoch_is_resumed_with_its_own_permutation() -> None:
    for key in (1, None):  # also with secure=True: else an example could take part twice in one epoch
        sampler = ShuffleSampler(30, 10, key)
        whole = [sampler.draw(lot).tolist() for lot in range(6)]
        other = ShuffleSampler(30, 10, None)
        other.draw(1)  # a permutation of its own, which must not survive
        other.load_state_dict(sampler.state_dict())
        assert [other.draw(lot).tolist() for lot in range(6)] == whole
    assert whole[:3] != whole[3:]


@pytest.mark.parametrize(("size", "rate"), [(60_000, 256 / 60_000), (1000, 0.02), (500, 0.5), (10, 1.0)])
def test_few_lots_are_larger_than_usual_and_usual_is_not_much_more_than_the_mean(size: int, rate: float) -> None:
    sampler = PoissonSampler(size, rate, key=5)
    sizes = [len(sampler.draw(lot)) for lot in range(400)]
    some, most = sampler.usual_sizes
    assert sum(size > some for size in sizes) <= 90 and max(sizes) <= most  # 63 of 400 are expected, and none, or fewer
    assert some <= size * rate + (size * rate) ** 0.5 + 1 and most <= size * rate + 4 * (size * rate) ** 0.5 + 1
    assert ShuffleSampler(size, 64, key=5).usual_sizes == [min(64, size)]


def test_a_sampler_refuses_the_state_of_another() -> None:
    poisson, shuffle = PoissonSampler(30, 0.1, 1), ShuffleSampler(30, 10, 1)
    for other, match in [
        (PoissonSampler(30, 0.2, 1), "sample_rate: saved 0.1, here 0.2"),
        (PoissonSampler(30, 0.1, None), "secure="),
        (shuffle, "disagree"),
    ]:
        before = other.state_dict()
        with pytest.raises(ValueError, match=match):
            other.load_state_dict(poisson.state_dict())
        assert other.state_dict() == before
    with pytest.raises(ValueError, match="size: saved 30, here 31"):
        ShuffleSampler(31, 10, 1).load_state_dict(shuffle.state_dict())
    assert "size" not in poisson.state_dict()  # the number of records is private


# -- the loader --------------------------------------------------------------------------------------------------


class Plain(Dataset):
    """A dataset that is nothing but indexed."""

    def __init__(self, records: int = 30) -> None:
        self.records = records

    def __len__(self) -> int:
        return self.records

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if index >= self.records:
            raise IndexError(index)
        return {"x": torch.full((2,), float(index + 1)), "index": torch.tensor(index)}


def joined(examples: list[dict[str, torch.Tensor]]) -> dict[str, Any]:
    return {
        "x": torch.stack([e["x"] for e in examples]),
        "index": torch.stack([e["index"] for e in examples]),
        "n": len(examples),
    }


def private_loader(
    source: Any, rate: float = 0.2, key: int | None = 1, physical: int | None = None, before: Any = None
) -> PrivateLoader:
    _, size = dataset_of(source)
    return PrivateLoader(
        source,
        PoissonSampler(size, rate, key),
        Lots(),
        before_lot=before or (lambda: None),
        expected_batch_size=rate * size,
        physical_batch_size=physical,
    )


def visit(loader: PrivateLoader) -> list[Any]:
    """Go through an epoch as an engine would: every batch captured, every lot released."""
    batches = []
    for batch in loader:
        batches.append(batch)
        if loader.lots.capture().last:
            loader.lots.release()
    return batches


def indices(batches: list[Any]) -> list[list[int]]:
    return [batch["index"].tolist() for batch in batches]


def test_lots_do_not_depend_on_workers_or_collate_function() -> None:
    expected = [PoissonSampler(30, 0.2, 1).draw(lot).tolist() for lot in range(5)]
    for source in [
        Plain(),
        DataLoader(Plain(), batch_size=6),
        DataLoader(Plain(), batch_size=6, shuffle=True, collate_fn=joined),
        DataLoader(Plain(), batch_size=6, num_workers=2, collate_fn=joined, drop_last=True),
        [Plain()[i] for i in range(30)],
    ]:
        loader = private_loader(source)
        batches = visit(loader)
        assert indices(batches) == expected
        assert all(torch.equal(batch["x"][:, 0], batch["index"] + 1.0) for batch in batches)
    fast = visit(private_loader(TensorDataset(torch.arange(30.0))))
    assert [batch[0].long().tolist() for batch in fast] == expected


def test_iterating_takes_nothing_from_the_global_generator() -> None:
    for workers in (0, 1):
        loader = private_loader(DataLoader(Plain(), batch_size=6, num_workers=workers))
        state = torch.get_rng_state()
        visit(loader)
        assert torch.equal(state, torch.get_rng_state())


@given(st.integers(1, 400), st.integers(1, 400))
def test_an_epoch_is_one_over_the_rate(records: int, lot: int) -> None:
    rate = min(1.0, lot / records)
    dataset = TensorDataset(torch.zeros(records, 1))
    loader = private_loader(dataset, rate)
    assert len(loader) == max(1, round(1 / rate))
    stop = len(loader) // 2
    for lot, _ in enumerate(loader):
        if lot == stop:
            break
        loader.lots.capture()
        loader.lots.release()
    assert len(visit(loader)) == len(loader) - stop  # what is left of the epoch
    assert len(visit(loader)) == len(loader)


@given(st.integers(1, 60), st.floats(0.01, 1), st.integers(1, 20), st.integers(0, 1000))
def test_physical_batches_partition_each_lot(records: int, rate: float, physical: int, key: int) -> None:
    dataset = TensorDataset(torch.arange(records))
    loader = private_loader(dataset, rate, key, physical)
    seen: list[int] = []
    lot = 0
    for (members,) in loader:
        batch = loader.lots.current
        assert batch is not None and batch.lot == lot and batch.rows == len(members) <= physical
        assert batch.first == (not seen)
        seen += members.tolist()[: batch.real]
        loader.lots.capture()
        if batch.last:
            assert seen == PoissonSampler(records, rate, key).draw(lot).tolist()
            seen, lot = [], lot + 1
            loader.lots.release()
    assert lot == len(loader)


@pytest.mark.parametrize("source", [TensorDataset(torch.ones(5, 2), torch.arange(5) + 3), None])
def test_an_empty_lot_is_a_batch_of_one_blank_row(source: Any) -> None:
    loader = private_loader(source or DataLoader(Plain(5), batch_size=1, collate_fn=joined), rate=1e-9, physical=3)
    batch = next(iter(loader))
    assert loader.lots.current == PhysicalBatch(lot=0, rows=1, real=0, first=True, last=True)
    x, label = (batch["x"], batch["index"]) if isinstance(batch, dict) else batch
    assert x.shape == (1, 2) and not x.any()
    assert label.tolist() == ([3] if source else [0])  # still a valid label


class Doubling(TensorDataset):
    """A subclass that makes its examples in a way of its own."""

    def __getitem__(self, index: Any) -> Any:
        return tuple(2 * value for value in super().__getitem__(index))


@pytest.mark.parametrize("workers", [0, 1])
def test_a_subclass_of_tensor_datasets_makes_its_own_examples(workers: int) -> None:
    source = DataLoader(Doubling(torch.ones(30, 2)), batch_size=6, num_workers=workers)
    (x,) = next(iter(private_loader(source)))
    assert torch.equal(x, torch.full_like(x, 2.0))


class Ready(Dataset):
    """A dataset that returns whole batches, and has none without examples."""

    def __len__(self) -> int:
        return 30

    def __getitems__(self, indices: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        assert indices
        return torch.tensor(indices)[:, None] + 1.0, torch.tensor(indices)

    def __getitem__(self, index: int) -> Any:
        raise AssertionError("batches are made at once")


def as_it_is(batch: Any) -> Any:
    return batch


class ReadyTensor(Ready):
    def __getitems__(self, indices: list[int]) -> Any:
        return super().__getitems__(indices)[1]


@pytest.mark.parametrize("workers", [0, 1])
def test_a_dataset_may_return_ready_batches(workers: int) -> None:
    source = DataLoader(Ready(), batch_size=6, collate_fn=as_it_is, num_workers=workers)
    batches = visit(private_loader(source, physical=4))
    assert all(torch.equal(x[:, 0], index + 1.0) for x, index in batches)
    expected = [PoissonSampler(30, 0.2, 1).draw(lot).tolist() for lot in range(5)]
    assert [i for _, index in batches for i in index.tolist()] == [i for lot in expected for i in lot]
    x, index = next(iter(private_loader(source, rate=1e-9)))
    assert x.tolist() == [[0.0]] and index.tolist() == [0]


def test_a_ready_batch_may_be_one_tensor() -> None:
    source = DataLoader(ReadyTensor(), batch_size=6, collate_fn=as_it_is)
    assert next(iter(private_loader(source))).tolist() == PoissonSampler(30, 0.2, 1).draw(0).tolist()


@pytest.mark.parametrize("layout", ["plain", "turned", "with gaps", "channels last"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bool, torch.int64])
def test_rows_of_tensors_are_those_that_were_drawn(layout: str, dtype: torch.dtype) -> None:
    numbers = torch.arange(12 * 3 * 4 * 5).view(12, 3, 4, 5).remainder(7).to(dtype)
    kinds = {
        "plain": numbers,
        "turned": numbers.mT,
        "with gaps": numbers[:, ::2],
        "channels last": numbers.contiguous(memory_format=torch.channels_last),
    }
    index = torch.tensor([7, 0, 7, 11])
    found = _rows_of(kinds[layout], index)
    assert torch.equal(found, kinds[layout][index]) and found.dtype == dtype


def test_a_lot_is_refused_before_it_is_drawn() -> None:
    def refuse() -> None:
        raise RuntimeError("no more")

    loader = private_loader(Plain(), before=refuse)
    with pytest.raises(RuntimeError, match="no more"):
        next(iter(loader))
    assert loader.lots.current is None and not loader._drawn


# -- no lot is skipped, none counts twice ------------------------------------------------------------------------


@pytest.mark.parametrize("key", [1, None])
@pytest.mark.parametrize("workers", [0, 1])
def test_a_lot_that_was_only_looked_at_comes_again(key: int | None, workers: int) -> None:
    loader = private_loader(DataLoader(Plain(), batch_size=6, num_workers=workers, collate_fn=joined), key=key)
    first = next(iter(loader))
    again = next(iter(loader))
    assert first["index"].tolist() == again["index"].tolist()
    loader.lots.capture()
    loader.lots.release()
    assert next(iter(loader))["index"].tolist() != again["index"].tolist()


def test_a_batch_that_was_not_captured_stops_the_iteration() -> None:
    for physical in (None, 2):
        loader = private_loader(Plain(), physical=physical)
        batches = iter(loader)
        next(batches)
        with pytest.raises(RuntimeError, match="handed out but not back-propagated"):
            next(batches)


def test_a_batch_is_captured_once() -> None:
    loader = private_loader(Plain(), physical=2)
    next(iter(loader))
    loader.lots.capture()
    with pytest.raises(RuntimeError, match="count twice"):
        loader.lots.capture()
    whole = private_loader(Plain())
    next(iter(whole))
    whole.lots.capture()
    whole.lots.release()
    with pytest.raises(RuntimeError, match="count twice"):
        whole.lots.capture()


def test_only_the_newest_iteration_goes_on() -> None:
    loader = private_loader(Plain())
    old = iter(loader)
    next(old)
    new = iter(loader)
    next(new)
    loader.lots.capture()
    loader.lots.release()
    with pytest.raises(RuntimeError, match="newer iteration"):
        next(old)
    next(new)


# -- public numbers ------------------------------------------------------------------------------------------------

LOADER = DataLoader(TensorDataset(torch.zeros(50, 1)), batch_size=10)
NOTHING: dict[str, Any] = {"sample_rate": None, "expected_batch_size": None, "dataset_size": None}


@pytest.mark.parametrize(
    "numbers, expected",
    [
        ({"sample_rate": 0.3}, (0.3, 10)),
        ({"sample_rate": 0.3, "expected_batch_size": 4}, (0.3, 4)),
        ({"dataset_size": 1000}, (0.01, 10)),
        ({"dataset_size": "public"}, (0.2, 10)),
        ({"dataset_size": "public", "expected_batch_size": 25}, (0.5, 25)),
        ({"dataset_size": np.int64(1000)}, (0.01, 10)),
        ({"sample_rate": 0.3, "dataset_size": 1000}, (0.3, 300)),
    ],
)
def test_rate_and_lot_come_from_public_numbers(numbers: dict[str, Any], expected: tuple[float, float]) -> None:
    assert public_rate(LOADER, 50, **{**NOTHING, **numbers}) == pytest.approx(expected)
    if numbers.get("dataset_size") != "public":  # then another number of records changes nothing
        assert public_rate(LOADER, 49, **{**NOTHING, **numbers}) == pytest.approx(expected)


def test_a_dataset_alone_needs_both_numbers() -> None:
    dataset = LOADER.dataset
    assert public_rate(dataset, 50, **{**NOTHING, "sample_rate": 0.1, "dataset_size": 1000}) == (0.1, 100)
    for numbers in ({"sample_rate": 0.1}, {"dataset_size": "public"}, {"expected_batch_size": 5}, {}):
        with pytest.raises(ValueError, match="public numbers"):
            public_rate(dataset, 50, **{**NOTHING, **numbers})


@pytest.mark.parametrize(
    "numbers, match",
    [
        ({}, "number of records is not unless you say so"),
        ({"sample_rate": 1.5}, r"sample_rate must be in \(0, 1\], got 1.5"),
        ({"sample_rate": 0}, "sample_rate must be a positive number, got 0"),
        ({"sample_rate": float("nan")}, "sample_rate must be a positive number"),
        ({"sample_rate": "0.1"}, "sample_rate must be a positive number, got '0.1'"),
        ({"sample_rate": 0.1, "expected_batch_size": -1}, "expected_batch_size must be a positive number"),
        ({"sample_rate": 0.1, "expected_batch_size": float("inf")}, "expected_batch_size must be a positive number"),
        ({"dataset_size": 0}, "dataset_size .* at least 1, got 0"),
        ({"dataset_size": 5}, "more than the 5 records: sample_rate would be 2"),
        ({"dataset_size": "secret"}, "dataset_size .* got 'secret'"),
        ({"dataset_size": 50.5}, "dataset_size .* got 50.5"),
        ({"sample_rate": 0.1, "expected_batch_size": 20, "dataset_size": 50}, "contradict each other"),
    ],
)
def test_impossible_numbers_are_refused(numbers: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        public_rate(LOADER, 50, **{**NOTHING, **numbers})


class Stream(IterableDataset):
    def __iter__(self) -> Any:
        return iter([torch.zeros(1)])


class NoLength(Dataset):
    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.zeros(1)


class BrokenLength(NoLength):
    def __len__(self) -> int:
        raise NotImplementedError("ask later")


class OwnBatches(DataLoader[Any]):
    def __iter__(self) -> Any:
        return (2 * batch[0] for batch in super().__iter__())


TEN = TensorDataset(torch.zeros(10, 1))


@pytest.mark.parametrize(
    "source, match",
    [
        (Stream(), "Stream must have __len__ and __getitem__"),
        (DataLoader(Stream(), batch_size=2), "Stream must have __len__ and __getitem__"),
        (NoLength(), "NoLength must have"),
        (DataLoader(NoLength(), batch_size=2), "NoLength must have"),
        ((x for x in range(3)), "generator must have"),
        (BrokenLength(), "needs the length of BrokenLength: ask later"),
        (TensorDataset(torch.zeros(0, 1)), "the dataset is empty"),
        ([], "the dataset is empty"),
        (DataLoader(TEN, batch_size=None), "batch_size=None"),
        (DataLoader(TEN, sampler=SubsetRandomSampler([1, 2])), "SubsetRandomSampler.*Subset"),
        (DataLoader(TEN, sampler=WeightedRandomSampler([1.0] * 10, 10)), "WeightedRandomSampler"),
        (DataLoader(TEN, sampler=RandomSampler(TEN, replacement=True)), "RandomSampler"),
        (DataLoader(TEN, sampler=RandomSampler(TEN, num_samples=5)), "RandomSampler"),
        (DataLoader(TEN, batch_sampler=[[0, 1], [2]]), "list"),
        (OwnBatches(TEN, batch_size=2), "OwnBatches.*collate_fn"),
    ],
)
def test_sources_that_cannot_be_sampled_are_refused(source: Any, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        dataset_of(source)


def test_a_subset_leaves_examples_out() -> None:
    loader = private_loader(DataLoader(Subset(Plain(), [1, 4, 9]), batch_size=1), rate=1.0)
    assert sorted(indices(visit(loader))[0]) == [1, 4, 9]


def test_queue_of_batches_stays_in_step_with_the_workers() -> None:
    loader = private_loader(DataLoader(Plain(), batch_size=6, num_workers=1), physical=4)
    queue: deque[PhysicalBatch] = deque()
    chunks = list(loader._chunks(range(5), queue))
    assert [batch.real for batch in queue] == [len(chunk) for chunk in chunks]
    assert [len(rows) for rows in indices(visit(loader))] == [batch.rows for batch in queue]
