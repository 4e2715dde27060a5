"""Runs in, numbers and pictures out."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from dphero._files import open_json
from dphero.cli import app
from dphero.explain import Explanation, explain
from dphero.explain.agreement import verdicts
from dphero.explain.images import PRIVATE_STAMP


@pytest.fixture(scope="module")
def found(runs: Path) -> Explanation:
    return explain([runs / name for name in ("published-3", "dp-hero-1", "sgd-1", "sgd-2")], per_class=2)


def agreement(found: Explanation, first: str, second: str, epoch: object = "last") -> dict:
    each = [one for one in found.numbers["agreement"] if one["epoch"] == one["to"] == epoch]
    return next(one for one in each if {one["a"], one["b"]} == {first, second})


def test_runs_are_grouped_and_the_unsound_one_is_named(found: Explanation) -> None:
    assert [run["group"] for run in found.numbers["runs"]] == ["sgd", "sgd", "dp-hero", "dp-hero-published (UNSOUND)"]
    assert found.numbers["reference"] == "sgd"
    assert "seed" not in json.dumps(found.numbers["runs"])  # it is secret


def test_the_spread_of_seeds_stands_beside_each_group(found: Explanation) -> None:
    spread, private = agreement(found, "sgd", "sgd"), agreement(found, "sgd", "dp-hero")
    assert [(pair["a"], pair["b"]) for pair in spread["pairs"]] == [("sgd-1", "sgd-2")]
    apart = [pair for pair in private["pairs"] if not pair["same_start"]]
    assert [(pair["a"], pair["b"]) for pair in apart] == [("sgd-2", "dp-hero-1")]
    assert private["spearman"]["mean"] == apart[0]["spearman"]
    assert private["spearman_same_start"]["mean"] == next(
        pair["spearman"] for pair in private["pairs"] if pair["same_start"]
    )


def test_runs_that_begin_alike_agree_wholly_at_the_beginning(found: Explanation) -> None:
    begin = agreement(found, "sgd", "dp-hero", 0.0)
    assert begin["spearman_same_start"]["mean"] == pytest.approx(1)
    assert begin["iou_same_start"]["mean"] == 1
    assert begin["spearman"]["mean"] < 0.9


def test_random_weights_are_compared(found: Explanation) -> None:
    both = agreement(found, "sgd", "random weights")
    assert len(both["pairs"]) == 4
    assert agreement(found, "random weights", "random weights")["pairs"]


def test_the_end_is_the_last_kept_epoch_and_not_taken_twice(found: Explanation) -> None:
    assert sorted({str(epoch) for _, epoch in found.maps}) == ["0.0", "1.0", "last"]


def test_pairs_that_agree_less_than_seeds_do_are_counted() -> None:
    def run(group: str, private: bool) -> Any:
        return SimpleNamespace(group=group, is_private=private)

    def between(a: str, b: str, *values: float) -> dict[str, Any]:
        pairs = [{"same_start": False, "spearman": value, "iou": value} for value in values]
        known = {"mean": sum(values) / len(values), "low": min(values), "high": max(values)}
        return {"a": a, "b": b, "epoch": "last", "to": "last", "spearman": known, "iou": known, "pairs": pairs}

    runs = [run("sgd", False), run("sgd", False), run("near", True), run("some", True), run("far", True)]
    found = [between("sgd", "sgd", 0.4, 0.5), between("sgd", "near", 0.4, 0.9), between("sgd", "some", 0.39, 0.9)]
    told = verdicts(runs, [*found, between("sgd", "far", 0.1, 0.2)])
    assert [each["verdict"] for each in told if each["score"] == "iou"] == [
        "within the spread of seeds",
        "1 of 2 pairs agree less than any two seeds do",
        "differs by more than another seed does",
    ]


def test_a_run_that_kept_nothing_is_explained_by_its_end(runs: Path) -> None:
    found = explain([runs / "bare"], per_class=1)
    assert {epoch for _, epoch in found.maps} == {"last"}
    assert "no run without privacy" in found.numbers["verdicts"][0]["verdict"]
    with pytest.raises(ValueError, match=r"bare has kept no weights of epoch 1 \(kept are: none\).*--keep-epochs"):
        explain([runs / "bare"], epochs=[1])


def test_a_damaged_snapshot_is_named(runs: Path, tmp_path: Path) -> None:
    shutil.copytree(runs / "sgd-1", tmp_path / "run")
    path = sorted((tmp_path / "run" / "snapshots").iterdir())[1]
    contents = bytearray(path.read_bytes())
    contents[-1] ^= 1
    path.write_bytes(contents)
    with pytest.raises(ValueError, match=f"{path.name} is damaged"):
        explain([tmp_path / "run"], per_class=1)


def test_a_snapshot_that_is_gone_is_not_needed(runs: Path, tmp_path: Path) -> None:
    shutil.copytree(runs / "sgd-1", tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "snapshots")
    assert {epoch for _, epoch in explain([tmp_path / "run"], per_class=1).maps} == {"last"}


def test_training_images_are_refused_without_consent(runs: Path) -> None:
    with pytest.raises(ValueError, match=r"no ε covers.*--private-images-unprotected"):
        explain([runs / "bare"], images="train")


def test_with_consent_they_are_stamped(runs: Path) -> None:
    found = explain([runs / "sgd-1"], images="train", per_class=1, private_images_unprotected=True)
    assert found.numbers["stamp"] == PRIVATE_STAMP and found.numbers["images"]["private"]
    for figure in found.figures().values():
        assert figure.get_suptitle() == PRIVATE_STAMP


def test_data_of_ones_own_is_not_taken_for_public(runs: Path, tmp_path: Path) -> None:
    from dphero.experiments.runs.prediction import Predictor
    from dphero.explain.images import choose

    predictor, mine = Predictor(runs / "bare"), tmp_path / "mine.npz"
    mine.write_bytes(b"")
    with pytest.raises(ValueError, match="whether its test images are public is not known"):
        choose(None, predictor, str(mine), per_class=1)
    with pytest.raises(ValueError, match="is the data that the run was trained on"):
        choose(str(mine), predictor, str(mine), per_class=1)


def test_images_of_a_file_are_explained_for_what_the_first_run_sees(runs: Path, tmp_path: Path) -> None:
    import numpy as np

    np.save(tmp_path / "some.npy", torch.rand(3, 1, 8, 8).numpy())
    found = explain([runs / "sgd-1"], images=str(tmp_path / "some.npy"))
    assert len(found.images) == 3 and found.numbers["images"]["target_is"] == "what sgd-1 predicts"


def test_one_run_twice_is_refused(runs: Path) -> None:
    with pytest.raises(ValueError, match="given twice"):
        explain([runs / "sgd-1", runs / "." / "sgd-1"])


def test_the_command(runs: Path, tmp_path: Path) -> None:
    names = [str(runs / name) for name in ("sgd-1", "sgd-2", "bare", "published-3")]
    shown = CliRunner().invoke(app, ["explain", *names, "--per-class", "1", "-o", str(tmp_path)], env={"COLUMNS": "80"})
    assert shown.exit_code == 0, shown.output
    assert max(map(len, shown.output.splitlines())) <= 80
    assert "UNSOUND" in shown.output and "dp-sgd" in shown.output
    numbers = open_json(json.loads((tmp_path / "explain.json").read_text()), tmp_path)
    assert all((tmp_path / picture["file"]).stat().st_size for picture in numbers["pictures"])


def test_json_and_the_place_of_one_run(runs: Path, tmp_path: Path) -> None:
    shutil.copytree(runs / "bare", tmp_path / "run")
    shown = CliRunner().invoke(app, ["explain", str(tmp_path / "run"), "--per-class", "1", "--json"])
    assert shown.exit_code == 0, shown.output
    values = json.loads(shown.stdout)
    assert values["out"] == str(tmp_path / "run" / "explain") and "explain.json" in values["files"]
    assert (tmp_path / "run" / "explain" / "heatmaps.png").exists()
