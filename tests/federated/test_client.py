import json

import pytest
import torch

from dphero.accounting import Ledger, price
from dphero.federated.client.files import ClientFiles
from dphero.federated.requests import Answer, Declined, Request
from dphero.federated.settings import Federation


def test_the_ledger_composes_over_rounds_until_the_budget_is_used_up(make_client, weights):
    answers = []
    for number in range(1, 6):
        answer = make_client().answer(Request(number, weights))  # a new object, as in a new process
        if isinstance(answer, Declined):
            break
        weights = answer.weights
        answers.append(answer)
    assert len(answers) == 3, "6 rounds, 2 of 4 clients: the budget was made to last for 3"
    assert "beyond its budget of 8" in answer.reason
    assert [each.ledger.steps for each in answers] == [9, 18, 27]
    epsilons = [price(each.ledger, 1e-4, "rdp").epsilon for each in answers]
    assert epsilons == sorted(epsilons)
    assert 7.9 < epsilons[-1] <= 8.0
    assert [each.epsilon for each in answers] == epsilons


def test_a_declined_round_leaves_no_trace(make_client, weights, tmp_path):
    client = make_client(epsilon=None, noise_multiplier=0.7)
    client.answer(Request(1, weights))
    before = {path.name: path.read_bytes() for path in (tmp_path / "clients" / "0").iterdir()}
    poor = make_client(epsilon=0.5)
    assert isinstance(poor.answer(Request(2, weights)), Declined)
    assert {path.name: path.read_bytes() for path in (tmp_path / "clients" / "0").iterdir()} == before


def test_the_same_request_gets_the_same_answer_and_is_charged_once(make_client, weights):
    first = make_client().answer(Request(1, weights))
    again = make_client().answer(Request(1, weights))
    assert again.ledger == first.ledger
    assert all(torch.equal(first.weights[name], again.weights[name]) for name in weights)


def test_the_same_request_without_a_seed_gets_the_same_answer_too(make_client, weights):
    first, again = (make_client(seed=None).answer(Request(1, weights)) for _ in range(2))
    assert again.ledger.steps == 9
    assert all(torch.equal(first.weights[name], again.weights[name]) for name in weights)


def test_another_request_is_another_release_with_other_noise(make_client, weights):
    """Even with the same seed and round: the same noise on other weights would cancel out."""
    moved = {name: value + 1e-3 for name, value in weights.items()}
    first, second = (make_client().answer(Request(1, each)) for each in (weights, moved))
    assert second.ledger.steps == 18
    steps = [
        torch.cat([(answer.weights[name] - start[name]).flatten() for name in weights])
        for answer, start in ((first, weights), (second, moved))
    ]
    assert torch.corrcoef(torch.stack(steps))[0, 1] < 0.9
    assert make_client()._seed("a") != make_client()._seed("b") != make_client("1")._seed("b")


def test_nothing_leaves_before_its_price_is_on_disk(make_client, weights, monkeypatch):
    def crash(self, state):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(ClientFiles, "save", crash)
        with pytest.raises(KeyboardInterrupt):
            make_client().answer(Request(1, weights))
    assert make_client().files.load().ledger.steps == 0, "the answer did not leave: nothing is charged"
    answer = make_client().answer(Request(1, weights))
    assert answer.ledger.steps == make_client().files.load().ledger.steps == 9


def test_a_crash_after_the_charge_loses_nothing(make_client, weights, monkeypatch, tmp_path):
    def crash(self, ledger):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(ClientFiles, "_write_copy", crash)
        with pytest.raises(KeyboardInterrupt):
            make_client().answer(Request(1, weights))
    answer = make_client().answer(Request(1, weights))
    assert answer.ledger.steps == 9, "charged once, sent from disk"
    copy = Ledger.from_json((tmp_path / "clients" / "0" / "ledger.json").read_text())
    assert copy == answer.ledger


def test_damaged_or_lost_memory_is_refused(make_client, weights, tmp_path):
    make_client().answer(Request(1, weights))
    path = tmp_path / "clients" / "0" / "client.json"
    whole = path.read_text()
    values = json.loads(whole)
    values["ledger"]["events"][0]["count"] = 1
    path.write_text(json.dumps(values))
    with pytest.raises(ValueError, match=r"client\.json is damaged"):
        make_client().answer(Request(2, weights))
    path.unlink()
    with pytest.raises(ValueError, match="price must not be forgotten"):
        make_client().answer(Request(2, weights))
    path.write_text(whole)
    next(path.parent.glob("answer-*.pt")).write_bytes(b"")
    with pytest.raises(ValueError, match=r"answer-.* is damaged"):
        make_client().answer(Request(1, weights))


def test_only_declared_numbers_enter_the_weight(make_client, weights):
    assert make_client("a").answer(Request(1, weights)).weight == 300.0
    assert make_client("b", dataset_size=250).answer(Request(1, weights)).weight == 250.0
    equal = Federation(clients=4, sampled=2, rounds=6, weights="equal")
    assert make_client("c", federation=equal).answer(Request(1, weights)).weight == 1.0


def test_a_client_with_fewer_records_than_a_lot_uses_them_all(make_client, weights):
    answer = make_client(records=20).answer(Request(1, weights))
    (event,) = answer.ledger.counts
    assert event.sample_rate == 1.0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"method": "sgd"}, "protects nothing"),
        ({"method": "dp-hero-published"}, "cannot keep a budget"),
        ({"epsilon": None}, "give --epsilon or --noise-multiplier"),
        ({"method": "dp-mp"}, "cannot train clients"),
    ],
)
def test_what_cannot_be_priced_is_refused(make_client, weights, settings, message):
    with pytest.raises(ValueError, match=message):
        make_client(**settings).answer(Request(1, weights))


def test_a_model_of_another_shape_is_refused(make_client, weights):
    name = next(iter(weights))
    with pytest.raises(ValueError, match="another one"):
        make_client().answer(Request(1, {**weights, name: weights[name][:1]}))
    with pytest.raises(ValueError, match="another one"):
        make_client().answer(Request(1, {**weights, "extra": weights[name]}))
    with pytest.raises(ValueError, match="NaN or infinity"):
        make_client().answer(Request(1, {**weights, name: weights[name] * torch.nan}))


def test_without_privacy_the_price_is_infinite(make_client, weights):
    answer = make_client(method="sgd", epsilon=None).answer(Request(1, weights))
    assert isinstance(answer, Answer)
    assert answer.epsilon == float("inf")
