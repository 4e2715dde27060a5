"""What may be published of a run is copied, and nothing secret with it."""

import hashlib
import json
import shutil
import signal

import numpy as np
import pytest
from typer.testing import CliRunner

from dphero.accounting import Ledger, price
from dphero.cli import app
from dphero.experiments import Interrupted, RunDirectory, resolve, train
from dphero.experiments.runs import publishing
from dphero.experiments.runs.prediction import Predictor
from dphero.experiments.runs.publishing import publish

pytest.importorskip("sklearn")

SEED = 987654321987654321
SETTINGS = {"data": "digits", "noise_multiplier": 3.0, "epochs": 1, "seed": SEED}
PUBLIC = {
    "model.safetensors", "model.json", "statement.txt", "statement.json", "ledger.json", "environment.json",
    "recipe.toml", "README.md", "manifest.json",
}  # fmt: skip


def trained(path, **settings):
    directory = RunDirectory.create(path, resolve({**SETTINGS, **settings}))
    train(directory)
    return directory


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    return trained(tmp_path_factory.mktemp("finished") / "run").path


@pytest.fixture
def published(finished, tmp_path):
    publish(finished, tmp_path / "deep" / "public")
    return tmp_path / "deep" / "public"


def test_exactly_what_may_be_published_is_copied(finished, published):
    assert {path.name for path in published.iterdir()} == PUBLIC
    result = RunDirectory.open(finished).result
    for path in published.iterdir():
        content = path.read_bytes()
        assert str(SEED).encode() not in content and str(result["accuracy"]).encode() not in content, path.name
        assert path.stat().st_mode & 0o077 == (finished / "model.json").stat().st_mode & 0o077
    same = PUBLIC - {"recipe.toml", "README.md", "manifest.json"}
    assert all((published / name).read_bytes() == (finished / name).read_bytes() for name in same)
    ledger = Ledger.from_json((published / "ledger.json").read_text())
    assert price(ledger, result["delta"]).epsilon == result["epsilon"]
    assert (finished / "statement.txt").read_text().strip() in (published / "README.md").read_text()
    assert list(published.parent.iterdir()) == [published]


def test_the_manifest_tells_digests_and_reasons(published):
    files = json.loads((published / "manifest.json").read_text())["files"]
    assert files.keys() == PUBLIC - {"manifest.json"}
    for name, entry in files.items():
        content = (published / name).read_bytes()
        assert (entry["bytes"], entry["sha256"]) == (len(content), hashlib.sha256(content).hexdigest())
        assert entry["why"]


def test_what_was_published_can_be_used_and_damage_is_named(finished, published, tmp_path):
    np.save(tmp_path / "x.npy", np.zeros((1, 8, 8), np.float32))
    assert Predictor(published).predict(tmp_path / "x.npy") == Predictor(finished).predict(tmp_path / "x.npy")
    for name in ("model.safetensors", "model.json", "recipe.toml", "manifest.json"):
        whole = (published / name).read_bytes()
        (published / name).write_bytes(whole[:-20] + bytes([whole[-20] ^ 1]) + whole[-19:])
        with pytest.raises(ValueError, match=name):
            Predictor(published)
        (published / name).write_bytes(whole)
    with pytest.raises(ValueError, match="the checkpoint with their key is gone"):
        train(RunDirectory.open(published))


def test_places_of_files_are_not_told(tmp_path, monkeypatch):
    images, labels = np.random.default_rng(0).normal(size=(60, 4)), np.arange(60) % 3
    np.savez(tmp_path / "patients.npz", x_train=images, y_train=labels, x_test=images, y_test=labels)
    own = {"data": str(tmp_path / "patients.npz"), "dataset_size": 60, "delta": 1e-3, "lot": 20, "model": "mlp"}
    publish(trained(tmp_path / "run", **own).path, tmp_path / "public")
    assert 'data = "patients.npz"' in (tmp_path / "public" / "recipe.toml").read_text()
    assert all(str(tmp_path).encode() not in path.read_bytes() for path in (tmp_path / "public").iterdir())


def test_the_command_line_that_older_runs_kept_stays_behind(finished, tmp_path):
    path = shutil.copytree(finished, tmp_path / "run")
    environment = json.loads((path / "environment.json").read_text())
    (path / "environment.json").write_text(json.dumps({**environment, "command": ["dphero", "--seed", str(SEED)]}))
    result = json.loads((path / "result.json").read_text())
    (path / "result.json").write_text(
        json.dumps({name: value for name, value in result.items() if name not in ("files", "version", "sha256")})
    )
    publish(path, tmp_path / "public")
    assert str(SEED) not in (tmp_path / "public" / "environment.json").read_text()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"method": "sgd"}, "guarantees nothing"),
        ({"accountant": "gdp"}, "no proven bound"),
        ({"method": "dp-hero-published", "options": {"floor": 0.1}, "model": "mlp"}, "no proven bound"),
        ({"seed": 2**32 - 1}, "can be guessed"),
    ],
)
def test_what_guarantees_nothing_is_refused(settings, words, tmp_path):
    directory = trained(tmp_path / "run", **settings)
    with pytest.raises(ValueError, match=words) as refused:
        publish(directory.path, tmp_path / "public")
    assert str(directory.recipe.seed) not in str(refused.value).replace(str(tmp_path), "")
    assert not (tmp_path / "public").exists()


def test_unfinished_damaged_and_linked_runs_are_refused(finished, tmp_path):
    stopped = RunDirectory.create(tmp_path / "stopped", resolve(SETTINGS))
    with pytest.raises(Interrupted):
        train(stopped, report=lambda _: signal.raise_signal(signal.SIGTERM))
    with pytest.raises(ValueError, match="is not finished"):
        publish(stopped.path, tmp_path / "public")
    path = shutil.copytree(finished, tmp_path / "run")
    whole = (path / "ledger.json").read_bytes()
    (path / "ledger.json").write_bytes(whole.replace(b"3.0", b"7.0"))
    with pytest.raises(ValueError, match=r"ledger.json is damaged"):
        publish(path, tmp_path / "public")
    (tmp_path / "secret").write_bytes(whole)
    (path / "ledger.json").unlink()
    (path / "ledger.json").symlink_to(tmp_path / "secret")
    with pytest.raises(ValueError, match="is a symbolic link"):
        publish(path, tmp_path / "public")
    assert not (tmp_path / "public").exists()


def test_nothing_is_overwritten_and_nothing_left_of_a_failure(finished, tmp_path, monkeypatch):
    (tmp_path / "public").mkdir()
    publish(finished, tmp_path / "public")
    with pytest.raises(ValueError, match="is there already: give -o a new directory"):
        publish(finished, tmp_path / "public")

    def full(path, content):
        raise OSError("No space left on device")

    monkeypatch.setattr(publishing, "write_atomically", full)
    with pytest.raises(OSError, match="No space"):
        publish(finished, tmp_path / "other")
    assert [path.name for path in tmp_path.iterdir()] == ["public"]


def test_the_command(finished, tmp_path):
    runner = CliRunner()
    shown = runner.invoke(app, ["publish", str(finished), "-o", str(tmp_path / "public")])
    assert shown.exit_code == 0 and "nothing else of the run" in " ".join(shown.stdout.split())
    again = runner.invoke(app, ["publish", str(finished), "-o", str(tmp_path / "public"), "--json"])
    assert again.exit_code == 2 and "is there already" in " ".join(again.stderr.split())
    told = runner.invoke(app, ["publish", str(finished), "-o", str(tmp_path / "more"), "--json"])
    assert set(json.loads(told.stdout)["files"]) == PUBLIC
