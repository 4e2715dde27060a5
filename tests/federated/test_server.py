import json

import numpy as np
import pytest
import torch

pytest.importorskip("flwr")

from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict

from dphero import experiments
from dphero.accounting import Ledger
from dphero.experiments import Interrupted, RunDirectory
from dphero.experiments.runs.prediction import Predictor
from dphero.federated.client.training_round import Client
from dphero.federated.directory import create, federation_of
from dphero.federated.server import rounds, strategies
from dphero.federated.server.app import Server
from dphero.federated.settings import Federation
from dphero.federated.simulation import simulated_clients
from tests.federated.local_grid import LocalGrid
from tests.federated.small import SETTINGS

FEDERATION = Federation(clients=4, sampled=2, rounds=4, seed=3)


def begin(path, federation=FEDERATION, **settings):
    return create(path, experiments.resolve(SETTINGS, {"epsilon": 8.0, "seed": 1}, settings), federation)


def run(directory, digits, *, finish=True, spoil=None, **options):
    """Run a federation without processes, as the simulation does with them."""
    federation, homes = federation_of(directory), directory.path / "clients"
    app = simulated_clients(directory.recipe, federation, homes)
    server = Server(directory, federation, digits, homes=homes, **options)
    grid = LocalGrid(app, federation.clients, *([spoil] if spoil else []))
    server.run(grid)
    return server.finish() if finish else server


def ledgers(directory):
    return {p.parent.name: Ledger.from_json(p.read_text()) for p in (directory.path / "clients").glob("*/ledger.json")}


def weights(directory):
    from safetensors.torch import load_file

    return load_file(directory.path / "model.safetensors")


@pytest.fixture(scope="module")
def finished(tmp_path_factory, digits):
    """An uninterrupted run."""
    directory = begin(tmp_path_factory.mktemp("finished") / "run")
    return directory, run(directory, digits)


def test_a_run_leaves_everything_that_train_does(finished, digits, tmp_path):
    directory, result = finished
    assert result["accuracy"] > 0.5
    assert result["rounds"] == 4
    assert result["run"] == str(directory.path)
    assert (result["strategy"], result["partition"], result["delta"]) == ("fedavg", "iid", 1e-4)
    assert 0 < result["epsilon_median"] <= result["epsilon"] <= 8.0
    assert result["clients"][result["worst_client"]] == result["epsilon"]
    lines = [json.loads(line) for line in (directory.path / "metrics.jsonl").read_text().splitlines()]
    assert [line["round"] for line in lines] == [1, 2, 3, 4]
    assert all(len(line["sampled"]) == 2 for line in lines)
    statement = (directory.path / "statement.txt").read_text()
    assert f"Worst client: {result['worst_client']}." in statement
    assert "Who adds the noise: each client" in statement
    image = tmp_path / "digit.npy"
    np.save(image, digits.test.images[:3].numpy())
    assert len(Predictor(directory.path).predict(image)) == 3


def test_each_ledger_holds_the_rounds_of_its_client(finished):
    directory, _ = finished
    lines = [json.loads(line) for line in (directory.path / "metrics.jsonl").read_text().splitlines()]
    for name, ledger in ledgers(directory).items():
        rounds = sum(name in line["averaged"] for line in lines)
        (steps,) = {count / rounds for count in ledger.counts.values()}
        assert steps.is_integer()
        assert 8 <= steps <= 12


def test_the_same_seed_gives_the_same_model(finished, digits, tmp_path):
    again = begin(tmp_path / "run")
    run(again, digits)
    assert all(torch.equal(value, weights(again)[name]) for name, value in weights(finished[0]).items())


def test_a_run_that_was_stopped_goes_on_as_if_nothing_had_been(finished, digits, tmp_path):
    directory = begin(tmp_path / "run")
    with pytest.raises(Interrupted):
        run(directory, digits, asked_to_stop=lambda: True)
    result = run(RunDirectory.open(directory.path), digits)
    assert result["rounds"] == 4
    assert all(torch.equal(value, weights(directory)[name]) for name, value in weights(finished[0]).items())
    assert ledgers(directory) == ledgers(finished[0])


def test_train_does_not_go_on_with_a_federated_run(tmp_path):
    with pytest.raises(ValueError, match="dphero federate --resume"):
        experiments.train(begin(tmp_path / "run"))


def test_settings_that_were_edited_are_noticed(digits, tmp_path):
    directory = begin(tmp_path / "run")
    with pytest.raises(Interrupted):
        run(directory, digits, asked_to_stop=lambda: True)
    path = directory.path / "federation.json"
    path.write_text(path.read_text().replace('"rounds": 4', '"rounds": 40'))
    with pytest.raises(ValueError, match=r"rounds in .* was 4 and is now 40"):
        run(RunDirectory.open(directory.path), digits)


def test_a_run_killed_in_a_round_repeats_it_without_charging_twice(finished, digits, tmp_path):
    directory, answered = begin(tmp_path / "run"), []

    def kill(number, message, reply):
        if message.metadata.message_type == "train":
            answered.append(number)
            if len(answered) == 4:  # the second client of round 2, after its answer was charged
                raise KeyboardInterrupt
        return reply

    with pytest.raises(KeyboardInterrupt):
        run(directory, digits, spoil=kill)
    assert ledgers(directory)[str(answered[-1])].steps > 0
    run(RunDirectory.open(directory.path), digits)
    assert ledgers(directory) == ledgers(finished[0])
    assert all(torch.equal(value, weights(directory)[name]) for name, value in weights(finished[0]).items())


def test_clients_without_budget_decline_and_the_run_goes_on(digits, tmp_path):
    federation = Federation(clients=3, sampled=2, rounds=5, participations=2, seed=1)
    directory = begin(tmp_path / "run", federation)
    result = run(directory, digits)
    assert result["declined"]
    assert result["epsilon"] <= 8.0
    lines = [json.loads(line) for line in (directory.path / "metrics.jsonl").read_text().splitlines()]
    first = min(line["round"] for line in lines if line["declined"])
    assert any(line["averaged"] for line in lines if line["round"] > first)
    for name in result["declined"]:
        last = max(line["round"] for line in lines if name in line["declined"])
        assert not any(name in line["sampled"] for line in lines if line["round"] > last), "not asked again"


# -- what a server rejects ------------------------------------------------------------------------------------------


def tampered(reply, change):
    """Return the reply with another update."""
    update = {name: value.numpy().copy() for name, value in reply.content["arrays"].items()}
    arrays = ArrayRecord({name: Array(value) for name, value in change(update).items()})
    content = RecordDict({**reply.content, "arrays": arrays})
    reply.content = content
    return reply


def _first(update, change):
    name = next(iter(update))
    return {**update, name: change(update[name])}


ATTACKS = {
    "NaN": (lambda update: _first(update, lambda value: value * np.nan), "NaN or infinity"),
    "infinite": (lambda update: _first(update, lambda value: value + np.inf), "NaN or infinity"),
    "huge": (lambda update: _first(update, lambda value: value + 1e6), "moves the model by"),
    "wrong shape": (lambda update: _first(update, lambda value: value[:1]), "has shape"),
    "wrong type": (lambda update: _first(update, lambda value: value.astype(np.float64)), "has type"),
    "a key too many": (lambda update: {**update, "extra": np.zeros(3, np.float32)}, "has extra"),
    "a key too few": (lambda update: dict(list(update.items())[1:]), "lacks"),
    "nothing": (lambda update: {}, "lacks"),
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_a_malicious_update_is_rejected_and_named(attack, digits, tmp_path):
    change, message = ATTACKS[attack]
    directory = begin(tmp_path / "run", Federation(clients=3, sampled=3, rounds=1))

    def spoil(number, asked, reply):
        return tampered(reply, change) if number == 1 and asked.metadata.message_type == "train" else reply

    run(directory, digits, spoil=spoil)
    (line,) = [json.loads(line) for line in (directory.path / "metrics.jsonl").read_text().splitlines()]
    assert list(line["rejected"]) == ["1"]
    assert message in line["rejected"]["1"]
    assert line["averaged"] == ["0", "2"]
    assert all(torch.isfinite(value).all() for value in weights(directory).values())


@pytest.mark.parametrize("attack", ["NaN", "huge"])
def test_without_the_check_the_attack_succeeds(attack, digits, tmp_path, monkeypatch):
    monkeypatch.setattr(rounds, "problem_with", lambda *args, **options: None)
    directory = begin(tmp_path / "run", Federation(clients=3, sampled=3, rounds=1))

    def spoil(number, asked, reply):
        train = asked.metadata.message_type == "train"
        return tampered(reply, ATTACKS[attack][0]) if number == 1 and train else reply

    run(directory, digits, spoil=spoil)
    assert not all((value.abs() < 1e3).all() for value in weights(directory).values())


@pytest.mark.parametrize("weight", [float("nan"), float("inf"), 0.0, -1.0])
def test_a_weight_that_is_none_is_rejected(weight, digits, tmp_path):
    directory = begin(tmp_path / "run", Federation(clients=2, sampled=2, rounds=1))

    def spoil(number, asked, reply):
        if number == 1 and asked.metadata.message_type == "train":
            reply.content["metrics"]["weight"] = weight
        return reply

    run(directory, digits, spoil=spoil)
    (line,) = [json.loads(line) for line in (directory.path / "metrics.jsonl").read_text().splitlines()]
    assert list(line["rejected"]) == ["1"]


def test_a_reply_that_is_no_update_is_rejected(digits, tmp_path):
    directory = begin(tmp_path / "run", Federation(clients=2, sampled=2, rounds=1))

    def spoil(number, asked, reply):
        if number == 1 and asked.metadata.message_type == "train":
            return Message(content=RecordDict({"nonsense": MetricRecord({"a": 1})}), reply_to=asked)
        return reply

    run(directory, digits, spoil=spoil)
    (line,) = [json.loads(line) for line in (directory.path / "metrics.jsonl").read_text().splitlines()]
    assert "no update" in line["rejected"]["1"]


def test_a_client_that_fails_tells_nobody_why(digits, tmp_path, monkeypatch):
    """The message of an error may hold a record; Flower would send it to the server."""
    directory, replies = begin(tmp_path / "run", Federation(clients=2, sampled=2, rounds=1)), []
    answer = Client.answer

    def fails(self, request):
        if self.name == "1":
            raise ValueError("record 17 of Mrs Miller is not a number")
        return answer(self, request)

    def spoil(number, asked, reply):
        replies.append(str(reply.content) if reply.has_content() else str(reply.error))
        return reply

    monkeypatch.setattr(Client, "answer", fails)
    run(directory, digits, spoil=spoil)
    assert not any("Miller" in text for text in replies)
    assert "Miller" in (directory.path / "clients" / "1" / "errors.log").read_text()
    (line,) = [json.loads(line) for line in (directory.path / "metrics.jsonl").read_text().splitlines()]
    assert list(line["failed"]) == ["1"]
    assert line["averaged"] == ["0"]


def test_a_run_in_which_everybody_fails_says_where_to_look(digits, tmp_path, monkeypatch):
    monkeypatch.setattr(Client, "answer", lambda self, request: 1 / 0)
    with pytest.raises(ValueError, match=r"failed.*errors\.log says why"):
        run(begin(tmp_path / "run"), digits)


def test_nobody_answers_and_the_model_stays(digits, tmp_path):
    directory = begin(tmp_path / "run", Federation(clients=2, sampled=2, rounds=1))

    def silent(number, asked, reply):
        return None if asked.metadata.message_type == "train" else reply

    with pytest.raises(ValueError, match="failed"):
        run(directory, digits, spoil=silent)


def test_fedavg_weighs_by_records():
    """Two clients by hand: (100 · 1 + 300 · 5) / 400 = 4."""
    federation, roster = Federation(clients=2, sampled=2, rounds=1), rounds.Roster(names={1: "a", 2: "b"})
    strategy = strategies.make_strategy(federation, roster, experiments.resolve(SETTINGS))
    strategy.model = {"w": np.zeros(3, np.float32)}
    asked = [Message(RecordDict(), dst_node_id=node, message_type="train") for node in (1, 2)]
    replies = []
    for message, value, weight in zip(asked, (1.0, 5.0), (100.0, 300.0), strict=True):
        message.metadata.__dict__["_message_id"] = str(weight)
        about = ConfigRecord({"name": "x", "epsilon": 1.0, "ledger": Ledger().to_json()})
        content = {
            "arrays": ArrayRecord({"w": Array(np.full(3, value, np.float32))}),
            "metrics": MetricRecord({"weight": weight, "steps": 1}),
            "client": about,
        }
        replies.append(Message(content=RecordDict(content), reply_to=message))
    arrays, _ = strategy.aggregate_train(1, replies)
    assert arrays["w"].numpy().tolist() == [4.0, 4.0, 4.0]
