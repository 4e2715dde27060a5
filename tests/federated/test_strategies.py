"""Every strategy against a computation by hand: exact gradients, two clients, one step each on all of their data."""

import json

import numpy as np
import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("flwr")

from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict

from dphero import experiments
from dphero.accounting import Ledger, PoissonGaussian, price
from dphero.data import Split
from dphero.experiments import RunDirectory
from dphero.experiments.runs.preparation import prepare
from dphero.federated.directory import create, federation_of
from dphero.federated.partitions import split
from dphero.federated.requests import Request
from dphero.federated.server.app import Server
from dphero.federated.server.rounds import Roster
from dphero.federated.server.strategies import make_strategy, steps_length
from dphero.federated.settings import Federation
from dphero.federated.simulation import simulated_clients
from tests.federated.local_grid import LocalGrid
from tests.federated.small import SETTINGS

EXACT = {**SETTINGS, "method": "sgd", "lot": 5000, "lr": 0.3, "seed": 1}
"""Without privacy, all records in every lot: one step an epoch."""


def run(path, federation, digits, **settings):
    if not (path / "federation.json").exists():
        create(path, experiments.resolve(EXACT, settings), federation)
    directory = RunDirectory.open(path)
    federation, homes = federation_of(directory), path / "clients"
    server = Server(directory, federation, digits, homes=homes)
    server.run(LocalGrid(simulated_clients(directory.recipe, federation, homes), federation.clients))
    return server


def gradient(task, weights, data):
    """The mean gradient at given weights."""
    task.module.load_state_dict(weights)
    task.module.zero_grad()
    F.cross_entropy(task.module(data.images), data.labels).backward()
    return {name: parameter.grad.clone() for name, parameter in task.module.named_parameters()}


@pytest.fixture
def by_hand(digits):
    """The model, its initial weights, and the data of two clients."""
    task, _ = prepare(experiments.resolve(EXACT), digits)
    weights = {name: value.detach().clone() for name, value in task.module.state_dict().items()}

    def parts(federation):
        labels = digits.train.labels.numpy()
        return [Split(digits.train.images[p], digits.train.labels[p]) for p in split(labels, federation)]

    return task, weights, parts


def close(found, expected):
    return all(torch.allclose(found[name], expected[name], atol=2e-6, rtol=1e-5) for name in expected)


def test_fedavg_is_the_mean_weighted_by_records(by_hand, digits, tmp_path):
    task, start, parts = by_hand
    federation = Federation(clients=2, sampled=2, rounds=1, partition="dirichlet", alpha=0.5, seed=4)
    data = parts(federation)
    sizes = [len(each) for each in data]
    assert sizes[0] != sizes[1]
    gradients = [gradient(task, start, each) for each in data]
    expected = {
        name: start[name] - 0.3 * sum(n / sum(sizes) * g[name] for n, g in zip(sizes, gradients, strict=True))
        for name in start
    }
    assert close(run(tmp_path / "run", federation, digits).weights, expected)


def test_fedprox_pulls_back_to_the_global_model(by_hand, digits, tmp_path):
    task, start, parts = by_hand
    federation = Federation(
        clients=2, sampled=2, rounds=1, local_epochs=2, strategy="fedprox", proximal_mu=0.7, weights="equal"
    )
    ends = []
    for each in parts(federation):
        first = gradient(task, start, each)
        middle = {name: start[name] - 0.3 * first[name] for name in start}
        second = gradient(task, middle, each)
        ends.append({n: middle[n] - 0.3 * (second[n] + 0.7 * (middle[n] - start[n])) for n in start})
    expected = {name: (ends[0][name] + ends[1][name]) / 2 for name in start}
    assert close(run(tmp_path / "run", federation, digits).weights, expected)


@pytest.mark.parametrize("controls", ["update", "gradient"])
def test_scaffold_corrects_the_drift(by_hand, digits, tmp_path, controls):
    """With one exact step, both options give c_i = the client's gradient at the global model."""
    task, weights, parts = by_hand
    federation = Federation(
        clients=2, sampled=2, rounds=3, partition="shards", shards=2, strategy="scaffold", controls=controls, seed=2
    )
    data = parts(federation)
    own = [{name: torch.zeros_like(value) for name, value in weights.items()} for _ in data]
    control = {name: torch.zeros_like(value) for name, value in weights.items()}
    for _ in range(3):
        ends, fresh = [], []
        for each, mine in zip(data, own, strict=True):
            exact = gradient(task, weights, each)
            ends.append({n: weights[n] - 0.3 * (exact[n] + control[n] - mine[n]) for n in weights})
            if controls == "gradient":
                fresh.append(exact)
            else:
                fresh.append({n: mine[n] - control[n] + (weights[n] - ends[-1][n]) / 0.3 for n in weights})
        control = {n: control[n] + sum(f[n] - m[n] for f, m in zip(fresh, own, strict=True)) / 2 for n in weights}
        own, weights = fresh, {n: (ends[0][n] + ends[1][n]) / 2 for n in weights}
    server = run(tmp_path / "run", federation, digits)
    assert close(server.weights, weights)
    assert close({n: torch.from_numpy(v) for n, v in server.strategy.control.items()}, control)


def test_scaffold_by_gradient_is_charged_for_its_second_release(make_client, weights):
    control = {name: torch.zeros_like(value) for name, value in weights.items()}
    steps = {}
    for controls in ("update", "gradient"):
        federation = Federation(clients=4, sampled=2, rounds=6, strategy="scaffold", controls=controls)
        answer = make_client(controls, federation=federation).answer(Request(1, weights, control=control))
        steps[controls] = answer.ledger.steps
        assert answer.steps == 9
    assert steps == {"update": 9, "gradient": 10}


def test_scaffold_by_update_sends_nothing_that_the_server_could_not_compute(make_client, weights):
    """So it is post-processing, and costs nothing: −c + (w_global − w_i) / (steps · lr)."""
    generator = torch.Generator().manual_seed(0)
    control = {name: 0.1 * torch.randn(value.shape, generator=generator) for name, value in weights.items()}
    federation = Federation(clients=4, sampled=2, rounds=6, strategy="scaffold")
    answer = make_client(federation=federation).answer(Request(1, weights, control=control))
    known = {n: (weights[n] - answer.weights[n]) / (answer.steps * 0.5) - control[n] for n in weights}
    assert all(torch.allclose(answer.control[n], known[n], atol=1e-6) for n in weights)


def test_scaffold_resumes_with_its_control_variates(digits, tmp_path):
    federation = Federation(clients=2, sampled=1, rounds=4, partition="shards", strategy="scaffold", seed=2)
    whole = run(tmp_path / "whole", federation, digits)
    create(tmp_path / "run", experiments.resolve(EXACT), federation)
    server = Server(RunDirectory.open(tmp_path / "run"), federation, digits, homes=tmp_path / "run" / "clients")
    server.asked_to_stop = lambda: server.done == 2
    clients = simulated_clients(server.recipe, federation, server.homes)
    with pytest.raises(experiments.Interrupted):
        server.run(LocalGrid(clients, 2))
    again = run(tmp_path / "run", federation, digits)
    assert all(torch.equal(again.weights[name], value) for name, value in whole.weights.items())


def replies(updates, weights, steps, model):
    """Replies to a strategy, by node 1, 2, …"""
    found = []
    for node, (update, weight, count) in enumerate(zip(updates, weights, steps, strict=True), 1):
        asked = Message(RecordDict(), dst_node_id=node, message_type="train")
        asked.metadata.__dict__["_message_id"] = str(node)
        content = {
            "arrays": ArrayRecord({"w": Array(np.full_like(model, update))}),
            "metrics": MetricRecord({"weight": weight, "steps": count}),
            "client": ConfigRecord({"name": "x", "epsilon": 1.0, "ledger": Ledger().to_json()}),
        }
        found.append(Message(content=RecordDict(content), reply_to=asked))
    return found


def strategy_of(federation, **settings):
    roster = Roster(names={1: "1", 2: "2", 3: "3"})
    return make_strategy(federation, roster, experiments.resolve(EXACT, settings))


def test_fednova_divides_by_the_number_of_steps():
    """By hand: p = (1/4, 3/4), a = (2, 4), τ = 3.5; d = 1/4 · 1/2 + 3/4 · 5/4 = 1.0625; w = 3.5 · 1.0625."""
    strategy = strategy_of(Federation(clients=2, sampled=2, strategy="fednova"))
    strategy.model = {"w": np.zeros(3, np.float32)}
    arrays, _ = strategy.aggregate_train(1, replies([1.0, 5.0], [100.0, 300.0], [2, 4], strategy.model["w"]))
    assert arrays["w"].numpy().tolist() == [3.5 * 1.0625] * 3


def test_the_length_of_steps_with_momentum():
    gradient_of_one, velocity, moved = 1.0, 0.0, 0.0
    for steps in range(1, 6):
        velocity = 0.9 * velocity + gradient_of_one
        moved += velocity
        assert steps_length(steps, 0.9) == pytest.approx(moved)
        assert steps_length(steps, 0.0) == steps


@pytest.mark.parametrize(
    ("strategy", "settings", "message"),
    [("scaffold", {"momentum": 0.9}, "--momentum 0"), ("fednova", {"optimizer": "adam"}, "lengths are those of SGD")],
)
def test_an_optimizer_that_does_not_fit_is_refused(strategy, settings, message):
    with pytest.raises(ValueError, match=message):
        strategy_of(Federation(strategy=strategy), **settings)


# -- whole clients --------------------------------------------------------------------------------------------------

WHOLE = Federation(clients=4, sampled=2, rounds=5, weights="equal", client_noise_multiplier=1.5, client_clip=0.5)


def test_whole_clients_are_promised_what_the_rounds_cost(digits, tmp_path):
    server = run(tmp_path / "run", WHOLE, digits)
    result = server.finish()
    expected = Ledger()
    expected.record(PoissonGaussian(0.5, 1.5), 5)
    assert server.strategy.ledger == expected
    assert result["client_level_epsilon"] == price(expected, 1e-4, "rdp").epsilon
    assert result["epsilon"] is None, "the clients add no noise here: their examples are promised nothing"
    text = (tmp_path / "run" / "statement-clients.txt").read_text()
    assert "Protected unit: one client with all its examples." in text
    assert "Who must be trusted: the server" in text
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert len({len(line["sampled"]) for line in lines}) > 1, "each client comes by itself, not so many of them"


class Silence:
    def fill(self, tensors, *settings, **options):
        for tensor in tensors:
            tensor.zero_()


def test_a_client_moves_the_sum_by_at_most_the_clip():
    strategy = strategy_of(WHOLE)
    results = []
    for updates in ([0.01, 0.9], [0.01]):
        strategy.model = {"w": np.zeros(100, np.float32)}
        strategy._noise = lambda number: Silence()
        count = len(updates)
        arrays, _ = strategy.aggregate_train(1, replies(updates, [1.0] * count, [1] * count, strategy.model["w"]))
        results.append(arrays["w"].numpy().astype(np.float64))
    assert np.linalg.norm(results[0] - results[1]) * 2 == pytest.approx(0.5, rel=1e-5)  # · expected cohort q K = 2
    assert np.linalg.norm(results[1]) * 2 == pytest.approx(0.1, rel=1e-5)  # not clipped


@pytest.mark.parametrize(("factor", "passes"), [(1, True), (2 / 3, False), (3 / 2, False)])
def test_the_noise_has_the_size_that_is_charged(factor, passes):
    """And a round without clients is a release."""
    federation = Federation(**{**WHOLE.as_dict(), "client_noise_multiplier": 1.5 * factor})
    strategy = strategy_of(federation, seed=None) if passes else strategy_of(federation)
    strategy.model = {"w": np.zeros(20_000, np.float32)}
    arrays, _ = strategy.aggregate_train(1, [])
    assert strategy.ledger.steps == 1
    assert bool(abs(arrays["w"].numpy().std() / (1.5 * 0.5 / 2) - 1) < 0.05) is passes


def test_clients_are_sampled_independently():
    strategy = strategy_of(Federation(**{**WHOLE.as_dict(), "sampled": 1}), seed=None)
    names = ["0", "1", "2", "3"]
    drawn = np.array([[name in strategy.sample(number, names) for name in names] for number in range(2000)])
    assert np.allclose(drawn.mean(0), 0.25, atol=0.04)
    assert np.allclose(np.corrcoef(drawn.T) - np.eye(4), 0, atol=0.08)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"weights": "records"}, "--weights equal"),
        ({"strategy": "scaffold"}, "not priced for strategy 'scaffold'"),
        ({"strategy": "fednova"}, "not priced"),
        ({"client_noise_multiplier": 0.0}, "client_noise_multiplier"),
        ({"client_clip": 0.0}, "client_clip"),
    ],
)
def test_what_the_noise_would_not_cover_is_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        Federation(**{**WHOLE.as_dict(), **settings})


def test_buffers_without_noise_are_refused(digits, tmp_path, monkeypatch):
    module = tmp_path / "own_network.py"
    module.write_text(
        "import torch\n"
        "def network(shape, classes):\n"
        "    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, classes))\n"
        "    model.register_buffer('seen', torch.zeros(3))\n"
        "    return model\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    directory = create(tmp_path / "run", experiments.resolve(EXACT, {"model": "own_network:network"}), WHOLE)
    with pytest.raises(ValueError, match=r"buffers \(seen\)"):
        Server(directory, WHOLE, digits)


# -- as if there were no federation ---------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["dp-sgd", "dp-hero"])
def test_one_client_without_noise_and_clipping_trains_as_if_centrally(method, digits, tmp_path):
    exact = {"method": method, "noise_multiplier": 1e-12, "clip": 1e3, "lot": len(digits.train), "lr": 0.3}
    federation = Federation(clients=1, sampled=1, rounds=3, local_epochs=2)
    server = run(tmp_path / "run", federation, digits, **exact)
    central = RunDirectory.create(tmp_path / "central", experiments.resolve(EXACT, exact, {"epochs": 6.0}))
    experiments.train(central, data=digits)
    from safetensors.torch import load_file

    expected = load_file(tmp_path / "central" / "model.safetensors")
    moved = sum((expected[name] - value).abs().max() for name, value in Server(
        create(tmp_path / "start", experiments.resolve(EXACT), federation), federation, digits
    ).weights.items())  # fmt: skip
    assert moved > 0.1
    assert close(server.weights, expected)
