"""Weights that a run keeps at chosen epochs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from dphero import data, experiments
from dphero.experiments.runs import snapshots
from dphero.experiments.runs.rundir import RunDirectory
from dphero.methods import recipe as recipes


def small() -> data.Data:
    generator = torch.Generator().manual_seed(0)
    images = torch.rand(40, 1, 8, 8, generator=generator) * 2 - 1
    labels = torch.arange(40) % 2
    half = data.Split(images, labels)
    return data.Data("small", half, half, ("a", "b"), public_size=True)


def begin(path: Path, **changes: object) -> RunDirectory:
    settings = {"data": "digits", "model": "digits", "method": "dp-sgd", "noise_multiplier": 1.0, "lot": 10, "lr": 0.1}
    settings |= {"epochs": 2, "seed": 1, "keep_epochs": [0, 0.5, 2], "device": "cpu", "delta": 1e-3, **changes}
    return RunDirectory.create(path, experiments.resolve(settings))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    directory = begin(tmp_path_factory.mktemp("runs") / "run")
    experiments.train(directory, data=small())
    return directory


def test_weights_are_kept_at_the_chosen_epochs(run: RunDirectory) -> None:
    names = snapshots.kept_files(run.path)
    assert [snapshots.step_of(name) for name in names] == [0, 2, 8]  # 4 steps an epoch
    last = snapshots.read_snapshot(run.path, names[-1])
    from safetensors.torch import load_file

    final = load_file(run.path / "model.safetensors")
    assert all(torch.equal(last.weights[name], value) for name, value in final.items())


def test_the_kept_gradient_is_what_the_optimizer_got(tmp_path: Path) -> None:
    directory = begin(tmp_path / "run", keep_epochs=[0.25, 0.5], momentum=0.0)
    experiments.train(directory, data=small())
    before, after = (snapshots.read_snapshot(directory.path, name) for name in snapshots.kept_files(directory.path))
    for name, value in after.weights.items():
        torch.testing.assert_close(value, before.weights[name] - 0.1 * after.gradient[name])


def test_initial_weights_have_no_gradient(run: RunDirectory) -> None:
    first = snapshots.read_snapshot(run.path, snapshots.kept_files(run.path)[0])
    assert first.gradient == {}


def test_a_stopped_run_keeps_the_same_weights(run: RunDirectory, tmp_path: Path) -> None:
    directory = begin(tmp_path / "run")

    def stop(progress: experiments.Progress) -> None:
        if progress.step == 5:
            raise KeyboardInterrupt  # as if killed: the checkpoint is that of step 0

    with pytest.raises(KeyboardInterrupt):
        experiments.train(directory, data=small(), report=stop)
    assert snapshots.kept_files(directory.path)
    experiments.train(RunDirectory.open(directory.path), data=small())
    for name in snapshots.kept_files(run.path):
        ours, theirs = (snapshots.read_snapshot(each.path, name) for each in (directory, run))
        assert all(torch.equal(ours.weights[key], value) for key, value in theirs.weights.items())


@pytest.mark.parametrize("place", [3, 30, 200, -5])
def test_any_damage_is_found_and_named(run: RunDirectory, tmp_path: Path, place: int) -> None:
    name = snapshots.kept_files(run.path)[1]
    contents = bytearray((run.path / name).read_bytes())
    contents[place] ^= 1
    with pytest.raises(ValueError, match=r"step-00000002\.safetensors is damaged"):
        snapshots.read_snapshot(run.path, name, bytes(contents))
    with pytest.raises(ValueError, match=r"step-00000002\.safetensors is damaged"):
        snapshots.read_snapshot(run.path, name, bytes(contents[:100]))


def test_a_finished_run_knows_its_snapshots(run: RunDirectory) -> None:
    first, second, *_ = snapshots.kept_files(run.path)
    whole = (run.path / first).read_bytes()
    try:
        (run.path / first).write_bytes((run.path / second).read_bytes())  # whole, but another's
        with pytest.raises(ValueError, match=r"step-00000000.*damaged"):
            RunDirectory.open(run.path).read(first)
    finally:
        (run.path / first).write_bytes(whole)


def test_tied_weights_are_kept(tmp_path: Path) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(2, 2)
            self.b = self.a

    snapshots.save_snapshot(tmp_path, 3, model := Tied(), {})
    (name,) = snapshots.kept_files(tmp_path)
    found = snapshots.read_snapshot(tmp_path, name)
    assert torch.equal(found.weights["b.weight"], model.a.weight)


@pytest.mark.parametrize("value", ["1", [3], [-1], [True], ["x"]])
def test_what_cannot_be_kept_is_refused(value: object) -> None:
    with pytest.raises(ValueError, match="keep_epochs"):
        recipes.merge({"data": "digits", "model": "digits", "epochs": 2, "keep_epochs": value})


def test_epochs_survive_the_file() -> None:
    recipe = recipes.merge({"data": "digits", "model": "digits", "keep_epochs": [0, 0.5, 10]})
    assert recipes.merge(recipes.parse(recipe.to_toml().encode(), "recipe.toml")) == recipe
