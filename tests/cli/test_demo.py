"""The demonstration: right numbers, a repeatable run, useful errors."""

import json
import sys

import pytest
from typer.testing import CliRunner

from dphero.accounting import Ledger, PoissonGaussian, price
from dphero.cli import app
from dphero.engine import PrivacyEngine
from dphero.experiments import demo

pytest.importorskip("sklearn")


def run(*arguments):
    return CliRunner().invoke(app, ["demo", *arguments])


def test_it_learns_within_its_budget():
    result = run("--json", "--seed", "1")
    assert result.exit_code == 0
    record = json.loads(result.stdout.splitlines()[-1])
    assert list(record) == ["accuracy", "epsilon", "delta", "steps", "noise_multiplier"]
    assert record["accuracy"] >= 0.9
    assert 2.99 < record["epsilon"] <= 3 and record["delta"] == 1e-4 and record["steps"] == 120
    ledger = Ledger().with_event(PoissonGaussian(512 / 1437, record["noise_multiplier"]), 120)
    assert price(ledger, 1e-4).epsilon == record["epsilon"]


def test_people_get_the_accuracy_and_the_statement():
    result = run("--epochs", "1", "--epsilon", "8")
    assert result.exit_code == 0
    shown = " ".join(result.stdout.split())
    for words in (
        "Test accuracy",
        "1,437 images, 3 steps",
        "360 other images",
        "Privacy statement",
        "one training image",
    ):
        assert words in shown
    assert "--seed makes one repeatable" in shown
    assert "loss" in result.stderr and "of 8" in result.stderr


def test_the_seed_repeats_the_run_and_is_mentioned():
    shown, again = run("--epochs", "1", "--seed", "5"), run("--epochs", "1", "--seed", "5", "--json")
    assert "holds only while it stays secret" in " ".join(shown.stdout.split())
    assert f"{json.loads(again.stdout)['accuracy']:.1%}" in shown.stdout


def test_without_a_seed_runs_differ():
    first, second = (demo.train(epochs=1).model[0].weight for _ in range(2))
    assert not first.equal(second)


def test_epsilon_is_not_priced_at_every_step(monkeypatch):
    pricings, seen = [], []
    original = PrivacyEngine.get_epsilon
    monkeypatch.setattr(PrivacyEngine, "get_epsilon", lambda *a, **k: pricings.append(k) or original(*a, **k))
    demo.train(epochs=20, seed=2, report=seen.append)
    assert [progress.step for progress in seen] == list(range(1, 61))
    assert all(progress.steps == 60 for progress in seen)
    assert 10 <= len(pricings) <= 21 and all(options["coarse"] for options in pricings)
    assert seen[0].epsilon < seen[30].epsilon < seen[-1].epsilon <= 3.02


def test_train_and_test_images_are_apart():
    train, test = demo.digits()
    assert len(train) + len(test) == 1797
    assert train.tensors[0].min() == -1 and train.tensors[0].max() == 1
    assert sorted(set(test.tensors[1].tolist())) == list(range(10))


def test_the_network_is_public_and_always_the_same():
    assert demo.network()[0].weight.equal(demo.network()[0].weight)
    assert sum(parameter.numel() for parameter in demo.network().parameters()) == 5674


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--delta", "0.01"], "delta must be above 0 and below 1 / 1437"),
        (["--epsilon", "-1"], "epsilon must be above 0"),
        (["--epochs", "0"], "Invalid value for '--epochs'"),
        (["--seed", "-1"], "Invalid value for '--seed'"),
    ],
)
def test_errors_are_one_line(arguments, message):
    result = run(*arguments)
    assert result.exit_code == 2 and result.stdout == ""
    assert message in " ".join(result.stderr.split()) and "Traceback" not in result.stderr


def test_without_scikit_learn_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    result = run()
    assert result.exit_code == 2
    assert "pip install 'dphero[demo]'" in " ".join(result.stderr.split())
