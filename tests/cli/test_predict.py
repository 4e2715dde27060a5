"""``dphero predict`` for people and programs."""

import json

import numpy as np
from PIL import Image
from typer.testing import CliRunner

from dphero import models
from dphero.cli import app
from dphero.experiments import RunDirectory
from dphero.methods.recipe import Recipe


def run(*arguments):
    return CliRunner().invoke(app, ["predict", *map(str, arguments)])


def made(path, classes=("cat", "dog", "owl")):
    directory = RunDirectory.create(path, Recipe(data="mine.npz", model="mlp"))
    directory.save_model(models.build("mlp", (1, 6, 5), 3))
    directory.save_signature((1, 6, 5), classes)
    return path


def test_people_and_programs(tmp_path):
    directory = made(tmp_path / "run")
    Image.fromarray(np.full((6, 5, 3), 200, np.uint8)).save(tmp_path / "some.png")
    shown = run(directory, tmp_path / "some.png")
    assert shown.exit_code == 0 and "some.png" in shown.stdout and "colour to grey" in shown.stdout
    record = json.loads(run(directory, tmp_path / "some.png", "--json").stdout)
    (found,) = record["predictions"]
    assert record["classes"] == ["cat", "dog", "owl"] and list(found) == ["input", "class", "probability", "converted"]
    assert found["class"] in shown.stdout and f"{found['probability']:.1%}" in shown.stdout


def test_names_that_look_like_markup_are_shown_as_they_are_and_whole(tmp_path):
    directory = made(tmp_path / "run", classes=("[/b]", "[red]", ":cat:"))
    name = f"scan [a] :dog: {'x' * 100}.png"
    Image.fromarray(np.full((6, 5), 200, np.uint8)).save(tmp_path / name)
    shown = run(directory, tmp_path / name)
    assert shown.exit_code == 0, shown.output
    columns = zip(*(line.split("│") for line in shown.stdout.splitlines() if "│" in line), strict=True)
    texts = ["".join(part.strip(" ") for part in column) for column in columns]
    assert texts[1].replace(" ", "") == name.replace(" ", "") and texts[2] in ("[/b]", "[red]", ":cat:")


def test_damaged_files_are_named(tmp_path):
    directory = made(tmp_path / "run")
    np.save(tmp_path / "x.npy", np.zeros((6, 5), np.uint8))
    weights, signature = directory / "model.safetensors", directory / "model.json"
    whole = weights.read_bytes(), signature.read_bytes()
    for file, contents in (
        (weights, b""),
        (weights, whole[0][:200]),
        (signature, b""),
        (signature, b'{"model": "mlp"}'),
        (signature, b"[]"),
        (signature, b"\xff"),
    ):
        weights.write_bytes(whole[0])
        signature.write_bytes(whole[1])
        file.write_bytes(contents)
        result = run(directory, tmp_path / "x.npy")
        assert result.exit_code == 2 and f"{file} is damaged: " in result.stderr, result.output


def test_errors_are_one_line(tmp_path):
    directory = made(tmp_path / "run")
    for arguments, message in (
        ((tmp_path, "x.png"), "not the directory of a run"),
        ((directory, tmp_path / "x.png"), "there is no file"),
        ((directory,), "Missing argument"),
    ):
        result = run(*arguments)
        assert result.exit_code == 2 and result.stdout == "" and message in " ".join(result.stderr.split())
