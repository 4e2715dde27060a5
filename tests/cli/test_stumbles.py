"""Command lines that once ended in a traceback, without end, or as if all were well."""

import io
import socket
import sys
import time
import types
import zipfile

import numpy as np
import pytest
from typer.testing import CliRunner

from dphero.cli import app

pytest.importorskip("sklearn")

TRAIN = ("train", "--data", "digits", "--noise-multiplier", "3", "--epochs", "0.3")
DEEP = "[" * 2000 + "]" * 2000


def refused(*arguments):
    """Run a command that must end with one line, and return that."""
    result = CliRunner().invoke(app, [*map(str, arguments)])
    assert isinstance(result.exception, SystemExit) and result.exit_code == 2, (result.output, result.exception)
    (line,) = [line for line in result.stderr.splitlines() if line.startswith("dphero: error:")]
    return line


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((*TRAIN, "--lr", "1e308"), "lr must lie between"),
        ((*TRAIN, "--clip", "1e308"), "clip must lie between"),
        ((*TRAIN, "--clip", "1e-308"), "clip must lie between"),
        ((*TRAIN, "--device", "meta"), "device 'meta' cannot be used"),
        ((*TRAIN, "--set", f"exponent={DEEP}"), "exponent"),
        ((*TRAIN, "--out", "a/" * 2000), "2000 parts"),
        ((*TRAIN, "--out", ""), "it is empty"),
        (("train", "--resume", ""), "it is empty"),
        (("train", "--data", "json:loads", "--noise-multiplier", "3"), "called with no arguments"),
        (("train", "--data", "time:sleep", "--noise-multiplier", "3"), "takes exactly one argument"),
        (("train", "--data", "sys:exit", "--noise-multiplier", "3"), "ended the process"),
        ((*TRAIN, "--model", "os:system"), "called with 2 arguments"),
        ((*TRAIN, "--model", "os:getcwd"), "called with 2 arguments"),
        ((*TRAIN, "--model", "json:dumps"), "called with 2 arguments"),
        ((*TRAIN, "--mechanism", "published"), "--method dp-hero-published"),
        (("compare", "--data", "digits", "--epsilons", "3", "--seeds", ""), "--seeds is empty"),
        (("compare", "--data", "digits", "--epsilons", ""), "--epsilons is empty"),
        (("audit", "published", "--releases", "100000000000000"), "--releases"),
    ],
)
def test_one_line_says_what_is_wrong(arguments, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert words in refused(*arguments)


@pytest.mark.parametrize(("line", "words"), [("options = 3", "options must be a table"), (f"lot = {DEEP}", "TOML")])
def test_recipes_that_are_none(line, words, tmp_path):
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(f'data = "digits"\nnoise_multiplier = 3.0\n{line}\n')
    assert words in refused("train", "--recipe", recipe, "--out", tmp_path / "run")


def test_a_function_that_fails_is_named_with_the_place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "its_own_data.py").write_text("def broken():\n    return {}['nothing']\n")
    line = refused("train", "--data", "its_own_data:broken", "--noise-multiplier", 3)
    assert "KeyError: 'nothing'" in line and "its_own_data.py, line 2" in line


def test_what_is_missing_is_said_before_torch_is_imported(monkeypatch):
    monkeypatch.setitem(sys.modules, "dphero.experiments", None)  # whoever imports it fails
    assert "which data?" in refused("train")


def test_an_option_is_no_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert "looks like an option" in refused(*TRAIN, "--out", "--json")


def test_a_refused_run_leaves_no_folder_behind(tmp_path):
    refused("train", "--data", "digits", "--epsilon", 3, "--device", "cuda:77", "--out", tmp_path / "run")
    assert not (tmp_path / "run").exists()
    (tmp_path / "kept").mkdir()
    refused("train", "--data", "digits", "--epsilon", 3, "--device", "cuda:77", "--out", tmp_path / "kept")
    assert (tmp_path / "kept").exists()


def test_a_message_of_several_lines_keeps_them(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    lines = (
        "def network(shape, classes):\n    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.BatchNorm1d(64))\n"
    )
    (tmp_path / "mixing.py").write_text(f"import torch\n{lines}")
    result = CliRunner().invoke(app, [*TRAIN, "--model", "mixing:network"])
    first, second, third = result.stderr.splitlines()
    assert first == "dphero: error: these modules cannot be made private:"
    assert second.startswith("  1 (BatchNorm1d): it normalises") and "dphero.fix(module)" in third
    assert not (tmp_path / "runs").exists()


def test_a_missing_module_of_somebody_else_is_no_extra_of_dphero(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "needs_more.py").write_text("import no_such_module_anywhere\n")
    line = refused("train", "--data", "needs_more:data", "--noise-multiplier", 3)
    assert "no_such_module_anywhere" in line and "dphero[" not in line


def test_a_recipe_that_never_ends(tmp_path):
    assert "/dev/zero" in refused("train", "--recipe", "/dev/zero", "--out", tmp_path / "run")


def test_the_folder_that_a_command_takes_unless_given(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert "nothing-of-this-name" in refused("reproduce", "nothing-of-this-name")


def arrays(**more):
    images, labels = np.zeros((20, 1, 8, 8), np.uint8), np.arange(20) % 2
    return {"x_train": images, "y_train": labels, "x_test": images, "y_test": labels, **more}


def test_an_npz_with_two_sets_of_names(tmp_path):
    np.savez(tmp_path / "two.npz", **arrays(train_images=np.ones((20, 1, 8, 8), np.uint8)))
    assert "has both x_train and train_images" in refused("train", "--data", tmp_path / "two.npz", *TRAIN[3:])


def test_an_npz_whose_header_claims_terabytes(tmp_path):
    header = io.BytesIO()
    claim = {"descr": "<f4", "fortran_order": False, "shape": (10**9, 1, 30, 33)}
    np.lib.format.write_array_header_1_0(header, claim)
    with zipfile.ZipFile(tmp_path / "huge.npz", "w") as archive:
        for name in arrays():
            archive.writestr(f"{name}.npy", header.getvalue() + b"...")
    line = refused("train", "--data", tmp_path / "huge.npz", *TRAIN[3:])
    assert "claims 3,960,000,000,000 bytes" in line


def test_terminals_without_a_width():
    arguments = ["epsilon", "--noise-multiplier", "1", "--sample-rate", "0.01", "--steps", "10", "--delta", "1e-5"]
    result = CliRunner().invoke(app, arguments, env={"COLUMNS": "0"})
    assert result.exit_code == 0 and "noise multiplier" in result.stdout


def test_a_ray_cluster_that_is_not_there(tmp_path, monkeypatch):
    def never(**_):
        time.sleep(400)

    monkeypatch.setitem(sys.modules, "ray", types.SimpleNamespace(init=never))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    start = time.monotonic()
    arguments = ("--data", "digits", "--methods", "dp-sgd", "--epsilons", "3", "--out", tmp_path / "comparison")
    line = refused("compare", *arguments, "--ray", f"127.0.0.1:{port}")
    assert "no Ray cluster answers at" in line and time.monotonic() - start < 20
