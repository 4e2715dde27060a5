import numpy as np
import pytest

from dphero.federated.partitions import counts, dirichlet, iid, shards, split
from dphero.federated.settings import Federation

LABELS = np.random.default_rng(0).integers(0, 10, 5000)


@pytest.mark.parametrize("partition", ["iid", "dirichlet", "shards"])
def test_every_example_goes_to_one_client_and_the_seed_decides(partition):
    federation = Federation(clients=8, sampled=2, partition=partition, seed=5)
    parts = split(LABELS, federation)
    assert len(parts) == 8
    assert np.array_equal(np.sort(np.concatenate(parts)), np.arange(len(LABELS)))
    assert all(np.array_equal(one, other) for one, other in zip(parts, split(LABELS, federation), strict=True))
    other = split(LABELS, Federation(clients=8, sampled=2, partition=partition, seed=6))
    assert not all(np.array_equal(one, another) for one, another in zip(parts, other, strict=True))


def test_iid_shares_are_equal_and_look_alike():
    parts = iid(5000, 7, np.random.default_rng(1))
    assert {len(part) for part in parts} == {714, 715}
    held = counts(LABELS, parts, 10)
    assert held.sum() == 5000
    assert held.min() > 40


def test_a_small_alpha_concentrates_classes_and_everybody_has_enough():
    generator = np.random.default_rng(2)
    skewed, even = (counts(LABELS, dirichlet(LABELS, 10, alpha, generator), 10) for alpha in (0.1, 100.0))
    for held in (skewed, even):
        assert held.sum(1).min() >= 10

    def largest(held):
        return float((held.max(1) / held.sum(1)).mean())

    assert largest(skewed) > 0.45 > 0.2 > largest(even)


def test_who_has_an_average_share_already_gets_nothing_of_the_next_class():
    """FedFed's rule: after a client has N/K examples, it is left out. So nobody has more than N/K and one class."""
    for seed in range(5):
        parts = dirichlet(LABELS, 10, 0.3, np.random.default_rng(seed))
        assert max(map(len, parts)) <= 500 + np.bincount(LABELS).max()


def test_shards_hold_few_labels():
    held = counts(LABELS, shards(LABELS, 10, 2, np.random.default_rng(3)), 10)
    assert (held > 0).sum(1).max() <= 4
    assert held.sum(1).tolist() == [500] * 10


def test_too_many_clients_are_refused():
    with pytest.raises(ValueError, match="cannot be dealt out"):
        split(LABELS[:3], Federation(clients=4, sampled=1))
    with pytest.raises(ValueError, match="too few"):
        dirichlet(LABELS[:30], 4, 1.0, np.random.default_rng(0))
    with pytest.raises(ValueError, match="larger --alpha"):
        dirichlet(LABELS[:100], 10, 0.01, np.random.default_rng(0))  # 10 examples for each, to the last one
    with pytest.raises(ValueError, match="fewer --shards"):
        shards(LABELS[:30], 4, 10, np.random.default_rng(0))
