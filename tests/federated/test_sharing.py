import json
import math

import numpy as np
import pytest
import torch

pytest.importorskip("flwr")

from dphero import experiments
from dphero.accounting import Gaussian, Ledger, NoNoise, PoissonGaussian, price
from dphero.data import Split
from dphero.experiments import RunDirectory
from dphero.federated.client.training_round import require_federable
from dphero.federated.directory import create
from dphero.federated.requests import Request
from dphero.federated.server.app import Server
from dphero.federated.settings import Federation
from dphero.federated.sharing import distillation as sharing
from dphero.federated.sharing.distiller import Distiller
from dphero.federated.sharing.private_training import rows_of, train
from dphero.federated.simulation import simulated_clients
from tests.federated.local_grid import LocalGrid
from tests.federated.small import SETTINGS

SHARED = {"clients": 2, "sampled": 2, "rounds": 2, "seed": 3}


def run(path, digits, federation, **settings):
    if not path.exists():
        create(path, experiments.resolve(SETTINGS, {"seed": 1, "lot": 64}, settings), federation)
    directory = RunDirectory.open(path)
    server = Server(directory, federation, digits, homes=path / "clients")
    server.run(LocalGrid(simulated_clients(directory.recipe, federation, path / "clients"), federation.clients))
    return server


@pytest.mark.parametrize("kind", [pytest.param("generated", marks=pytest.mark.slow), "distilled"])
def test_a_shared_set_is_charged_and_the_budget_covers_all(kind, digits, tmp_path):
    federation = Federation(**SHARED, shared=kind)
    server = run(tmp_path / "run", digits, federation, epsilon=8.0)
    result = server.finish()
    assert result["epsilon"] <= 8.0
    assert result["declined"] == [], "the budget was divided between sharing and training"
    for ledger in server.ledgers().values():
        kinds = [type(event) for event, _ in ledger]
        assert kinds == (
            [PoissonGaussian, PoissonGaussian] if kind == "generated" else [PoissonGaussian, Gaussian, PoissonGaussian]
        )
        events = list(ledger)
        if kind == "distilled":
            assert events[1][1] == 2, "two copies"
        spent = Ledger()
        for event, count in events[:-1]:
            spent.record(event, count)
        assert price(spent, 1e-4, "rdp").epsilon <= 4.0, "half of it for sharing"
        assert events[-1][0].sample_rate < 64 / 700, "trained on private and shared examples together"
    shared = torch.load(tmp_path / "run" / "shared.pt", weights_only=True)
    assert len(shared["images"]) == 2 * sharing._SLOTS * (2 if kind == "distilled" else 1)
    assert "shared data set" in (tmp_path / "run" / "statement.txt").read_text()


def test_fedfed_as_published_needs_consent_and_costs_everything(digits, tmp_path):
    with pytest.raises(ValueError, match="--unsound"):
        Federation(**SHARED, shared="distilled-published")
    federation = Federation(**SHARED, shared="distilled-published", unsound=True)
    with pytest.raises(ValueError, match="more than any budget"):
        require_federable(experiments.resolve(SETTINGS, {"epsilon": 8.0}), federation)
    server = run(tmp_path / "run", digits, federation, noise_multiplier=1.0)
    result = server.finish()
    assert result["epsilon"] is None, "infinite"
    text = (tmp_path / "run" / "statement.txt").read_text()
    assert "UNSOUND AS PUBLISHED" in text and "unbounded" in text
    assert all(NoNoise() in ledger.counts for ledger in server.ledgers().values())


def test_as_published_differences_within_a_batch_have_no_noise_and_distilled_ones_have(digits):
    """The attack: r(a) − r(b) of two images of one batch is x_p(a) − x_p(b), exactly."""
    images = digits.train.images[:2].repeat_interleave(32, 0)  # two people, each 32 times
    data = type(digits)(
        digits.name, Split(images, digits.train.labels[:2].repeat_interleave(32)), digits.test, digits.classes, True
    )
    recipe = experiments.resolve(SETTINGS, {"noise_multiplier": 1.0, "lot": 16})
    published, _ = sharing._published(data, 64, 16)
    same = published.images[:32].flatten(1)
    assert (same - same[0]).abs().max() < 1e-5, "one noise for all"
    given, _ = sharing.share(data, 64, recipe, Federation(**SHARED, shared="distilled"), Ledger(), 1)
    spread = given.images[:32].flatten(1).std(0).mean()
    assert spread == pytest.approx(math.sqrt(2), rel=0.15), "each image has noise of its own, √2 σ"


def test_without_a_record_one_slot_changes_wherever_the_record_stood(digits, monkeypatch):
    """Deals are coupled: each other record has the place that it has where the record is there."""
    rows = rows_of(digits.train, 10)
    model = sharing._untrained(Distiller, digits)
    slots = []

    class Watched:
        def __init__(self, seed):
            pass

        def fill(self, tensors, std, release, bound_to):
            slots.append(bound_to[0])
            tensors[0].zero_()

    monkeypatch.setattr(sharing, "FastNoise", Watched)
    places = sharing._deal(len(rows), len(rows), 1)
    for missing in (None, 0, int(places.argmin()), len(rows) - 1):
        kept = torch.arange(len(rows)) != (-1 if missing is None else missing)
        sharing._distilled(model, rows[kept], places[kept], len(rows), 1.0, Ledger(), 1, digits)
    whole, *others = slots[::2]
    assert whole.count_nonzero() > 0
    apart = [(whole - other).norm(dim=1) for other in others]
    assert all(int((each > 0).sum()) <= 1 and float(each.max()) <= math.sqrt(2) for each in apart)
    assert float(apart[1].max()) > 1, "the record in the first slot was given"


def test_places_are_dealt_evenly_and_too_few_are_refused():
    found = torch.stack([sharing._deal(3, 3, seed) for seed in range(2000)])
    share = torch.stack([(found == place).float().mean(0) for place in range(4)])
    assert (share - 0.25).abs().max() < 0.05
    assert not torch.equal(sharing._deal(99, 99, None), sharing._deal(99, 99, None))
    with pytest.raises(ValueError, match="--dataset-size that is not too small"):
        sharing._deal(12, 10, 1)


def test_a_size_declared_too_small_is_refused_before_anything_is_spent(digits, tmp_path):
    with pytest.raises(ValueError, match=r"gave anything.*clients/0/errors\.log says why") as refused:
        run(tmp_path / "run", digits, Federation(**SHARED, shared="distilled"), epsilon=8.0, dataset_size=10)
    assert "clients/1/errors.log" in str(refused.value)
    assert "not too small" in (tmp_path / "run" / "clients" / "0" / "errors.log").read_text()
    assert not list(tmp_path.glob("run/clients/*/ledger.json"))


def test_labels_are_noised_too(digits):
    recipe = experiments.resolve(SETTINGS, {"noise_multiplier": 1.0, "lot": 256})
    given, _ = sharing.share(digits, 1437, recipe, Federation(**SHARED, shared="distilled"), Ledger(), 1)
    labels = torch.full((1438,), -1)
    labels[sharing._deal(len(digits.train.labels), 1437, 1)] = digits.train.labels
    right = (given.labels[: sharing._SLOTS] == labels[: sharing._SLOTS]).float().mean()
    assert 0.1 < right < 0.5


def test_a_clients_gift_is_charged_once(make_client, weights):
    federation = Federation(clients=4, sampled=2, rounds=6, shared="generated")
    first, _ = make_client(federation=federation).share()
    again, answer = make_client(federation=federation).share()
    assert torch.equal(first.images, again.images)
    before = answer.ledger.steps
    client = make_client(federation=federation)
    with pytest.raises(ValueError, match="did not come"):
        client.answer(Request(1, weights))
    client.files.save_shared(first)
    assert client.answer(Request(1, weights)).ledger.steps > before


def test_generated_images_look_like_their_classes(digits):
    recipe = experiments.resolve(SETTINGS, {"noise_multiplier": 0.5, "lot": 128})
    given, _ = sharing.share(digits, 1437, recipe, Federation(**SHARED, shared="generated"), Ledger(), 1)
    means = torch.stack([digits.train.images[digits.train.labels == label].flatten(1).mean(0) for label in range(10)])
    nearest = torch.cdist(given.images.flatten(1), means).argmin(1)
    assert (nearest == given.labels).float().mean() > 0.5


@pytest.mark.slow
def test_a_gift_that_is_none_is_left_out(digits, tmp_path):
    federation = Federation(**SHARED, shared="generated")
    create(tmp_path / "run", experiments.resolve(SETTINGS, {"seed": 1, "epsilon": 8.0, "lot": 64}), federation)
    directory = RunDirectory.open(tmp_path / "run")

    def spoil(number, message, reply):
        if message.metadata.message_type == "train.share" and number == 1:
            from flwr.app import Array, ArrayRecord

            wrong = {"images": np.full((3, 1, 8, 8), np.nan, np.float32), "labels": np.zeros(3, np.int64)}
            reply.content["arrays"] = ArrayRecord({name: Array(value) for name, value in wrong.items()})
        return reply

    server = Server(directory, federation, digits, homes=tmp_path / "run" / "clients")
    server.run(LocalGrid(simulated_clients(directory.recipe, federation, tmp_path / "run" / "clients"), 2, spoil))
    assert len(torch.load(tmp_path / "run" / "shared.pt", weights_only=True)["images"]) == sharing._SLOTS
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert all(len(line["averaged"]) == 2 for line in lines)


def test_joint_training_leaves_small_parts_that_carry_the_label(digits):
    """FedFed's two aims: x_p is shorter than the image, and a classifier knows the class from it."""
    torch.manual_seed(0)
    rows = rows_of(digits.train, 10)
    model = Distiller(64, 10)
    train(model, rows, records=len(rows), lot=64, noise_multiplier=None, seed=None)
    sensitive = model.sensitive(rows)
    assert sensitive.norm() < 0.8 * digits.train.images.norm()
    with torch.no_grad():
        right = (model.classify(sensitive).argmax(1) == digits.train.labels).float().mean()
    assert right > 0.8
    made = list(model.classify.parameters()) + list(model.encode.parameters())
    model.zero_grad()
    model.loss(rows[:32]).backward()
    assert all(each.grad.abs().sum() > 0 for each in made), "one loss for q and f"
