"""The model of a run at work: every kind of input, and what is refused."""

import gzip
import json
import struct

import numpy as np
import pytest
import torch
from PIL import Image

from dphero import data as datasets
from dphero import experiments, models
from dphero.experiments import RunDirectory
from dphero.experiments.runs.prediction import Predictor
from dphero.methods.recipe import Recipe

pytest.importorskip("sklearn")


def made(path, shape, classes=("cat", "dog", "owl"), data="mine.npz", model="mlp"):
    """A run directory with an untrained model, as training leaves it."""
    directory = RunDirectory.create(path, Recipe(data=data, model=model))
    network = models.build(model, shape, len(classes), seed=3)
    directory.save_model(network)
    directory.save_signature(shape, classes)
    return network


@pytest.fixture
def grey(tmp_path):
    """A model of 1×6×5 images, and a predictor that was loaded from its run."""
    network = made(tmp_path / "grey", (1, 6, 5))
    return network, Predictor(tmp_path / "grey")


@pytest.fixture
def pixels():
    return np.random.default_rng(0).integers(0, 256, (4, 6, 5), dtype=np.uint8)


def expected(network, pixels, shape):
    """Class numbers and probabilities, computed apart."""
    with torch.no_grad():
        x = torch.from_numpy(pixels.astype(np.float32) / 127.5 - 1).reshape(-1, *shape)
        best, where = network(x).softmax(1).max(1)
    return [("cat", "dog", "owl")[number] for number in where], best.tolist()


def same(found, labels, probabilities):
    return [each.label for each in found] == list(labels) and np.allclose(
        [each.probability for each in found], probabilities, atol=1e-5
    )


def test_a_trained_model_predicts_what_its_evaluation_said(tmp_path, monkeypatch):
    recipe = experiments.resolve({"data": "digits", "method": "sgd", "epochs": 1, "seed": 0})
    result = experiments.train(RunDirectory.create(tmp_path / "run", recipe))
    test = datasets.load("digits").test
    np.save(tmp_path / "test.npy", test.images.numpy())
    monkeypatch.setattr("dphero.data.loading.load", None)  # without the training data
    found = Predictor(tmp_path / "run").predict(tmp_path / "test.npy")
    right = [each.label == str(label) for each, label in zip(found, test.labels.tolist(), strict=True)]
    assert sum(right) / len(right) == pytest.approx(result["accuracy"]) and len(set(right)) == 2
    assert found[7].name == "test.npy[7]" and 0.1 <= found[7].probability <= 1
    assert json.loads((tmp_path / "run" / "model.json").read_text()) == {
        "model": "digits",
        "shape": [1, 8, 8],
        "classes": list("0123456789"),
    }
    np.save(tmp_path / "raw.npy", (test.images[:2].numpy() + 1) * 8)  # as scikit-learn has them
    with pytest.raises(ValueError, match="the model was trained on -1 to 1"):
        Predictor(tmp_path / "run").predict(tmp_path / "raw.npy")


def test_images_and_folders_of_them(grey, pixels, tmp_path):
    network, predictor = grey
    labels, probabilities = expected(network, pixels, (1, 6, 5))
    folder = tmp_path / "images" / "below"
    folder.mkdir(parents=True)
    for number, each in enumerate(pixels):
        Image.fromarray(each).save(folder / f"{number}.png")
    assert same(predictor.predict(folder / "2.png"), labels[2:3], probabilities[2:3])
    found = predictor.predict(folder.parent)
    assert same(found, labels, probabilities)
    assert [each.name for each in found] == [f"below/{number}.png" for number in range(4)]
    assert not found[0].converted


@pytest.mark.parametrize("form", ["npy", "one", "channel", "npz", "named", "float", "idx", "idx.gz"])
def test_arrays(grey, pixels, tmp_path, form):
    network, predictor = grey
    labels, probabilities = expected(network, pixels, (1, 6, 5))
    path = tmp_path / ("a.npz" if form in ("npz", "named") else f"a-{form}-ubyte.gz" if "gz" in form else f"a.{form}")
    idx = b"\0\0\x08\x03" + struct.pack(">3I", *pixels.shape) + pixels.tobytes()
    if form == "npz":
        np.savez(path, pixels)
    elif form == "named":
        np.savez(path, images=pixels, labels=np.zeros(4))
    elif form == "idx":
        path.write_bytes(idx)
    elif form == "idx.gz":
        path.write_bytes(gzip.compress(idx))
    else:
        path = tmp_path / "a.npy"
        values = {"npy": pixels, "one": pixels[0], "channel": pixels[:, None], "float": pixels / 127.5 - 1}[form]
        np.save(path, values)
    found = predictor.predict(path)
    number = 1 if form == "one" else 4
    assert len(found) == number and same(found, labels[:number], probabilities[:number])


def test_colour_is_converted_and_said(tmp_path, grey, pixels):
    rgb = np.random.default_rng(1).integers(0, 256, (6, 5, 3), dtype=np.uint8)
    Image.fromarray(rgb).save(tmp_path / "rgb.png")
    network, predictor = grey
    (found,) = predictor.predict(tmp_path / "rgb.png")
    assert found.converted == "colour to grey"
    luma = np.asarray(Image.fromarray(rgb).convert("L"))
    assert same([found], *expected(network, luma, (1, 6, 5)))

    network = made(tmp_path / "colour", (3, 6, 5))
    predictor = Predictor(tmp_path / "colour")
    channels_first = rgb.transpose(2, 0, 1).copy()
    (found,) = predictor.predict(tmp_path / "rgb.png")
    assert not found.converted and same([found], *expected(network, channels_first, (3, 6, 5)))
    np.save(tmp_path / "last.npy", rgb[None])
    np.save(tmp_path / "first.npy", channels_first)
    for name in ("last", "first"):
        assert same(predictor.predict(tmp_path / f"{name}.npy"), [found.label], [found.probability])
    Image.fromarray(pixels[0]).save(tmp_path / "grey.png")
    (found,) = predictor.predict(tmp_path / "grey.png")
    assert found.converted == "grey to RGB"
    assert same([found], *expected(network, np.stack([pixels[0]] * 3), (3, 6, 5)))


def test_vectors(tmp_path):
    network = made(tmp_path / "run", (7,))
    rows = np.random.default_rng(2).normal(size=(3, 7)) * 30  # whatever range the owner's data has
    np.save(tmp_path / "rows.npy", rows)
    np.save(tmp_path / "row.npy", rows[0])
    with torch.no_grad():
        best, where = network(torch.from_numpy(rows).float()).softmax(1).max(1)
    predictor = Predictor(tmp_path / "run")
    assert same(predictor.predict(tmp_path / "rows.npy"), [("cat", "dog", "owl")[n] for n in where], best.tolist())
    assert len(predictor.predict(tmp_path / "row.npy")) == 1
    Image.new("L", (7, 1)).save(tmp_path / "a.png")
    with pytest.raises(ValueError, match="shape 7, not images"):
        predictor.predict(tmp_path / "a.png")


@pytest.mark.parametrize("mode", ["LA", "RGBA", "P"])
def test_what_training_takes_is_taken_here(grey, mode, tmp_path):
    image = Image.fromarray(np.arange(30, dtype=np.uint8).reshape(6, 5))
    image.save(tmp_path / "grey.png")
    image.convert("RGB").convert(mode).save(tmp_path / "other.png")
    (plain,), (found,) = (grey[1].predict(tmp_path / f"{name}.png") for name in ("grey", "other"))
    assert found.label == plain.label and found.converted == ("" if mode == "LA" else "colour to grey")


def write(path, kind):
    if kind == "wrong size":
        Image.new("L", (6, 5)).save(path / "a.png")
        return path / "a.png"
    if kind == "transparent":
        Image.new("RGBA", (5, 6)).save(path / "a.png")
        return path / "a.png"
    if kind == "16 bits":
        Image.fromarray(np.zeros((6, 5), np.uint16)).save(path / "a.png")
        return path / "a.png"
    if kind == "no image":
        (path / "a.png").write_text("hello")
        return path / "a.png"
    if kind == "empty folder":
        (path / "folder").mkdir()
        return path / "folder"
    if kind == "unknown ending":
        (path / "a.txt").write_text("hello")
        return path / "a.txt"
    if kind == "missing":
        return path / "a.png"
    if kind == "several arrays":
        np.savez(path / "a.npz", a=np.zeros((6, 5)), b=np.zeros((6, 5)))
        return path / "a.npz"
    if kind == "short idx":
        (path / "a-idx3-ubyte").write_bytes(b"\0\0\x08\x03" + struct.pack(">3I", 2, 6, 5) + bytes(31))
        return path / "a-idx3-ubyte"
    if kind == "no idx":
        (path / "a-idx3-ubyte").write_bytes(b"PNG")
        return path / "a-idx3-ubyte"
    if kind == "damaged":
        (path / "a.npy").write_bytes(b"\x93NUMPY")
        return path / "a.npy"
    values = {
        "wrong shape": np.zeros((2, 5, 6)),
        "pickled": np.array([{}], dtype=object),
        "integers": np.zeros((2, 6, 5), np.int64),
        "nan": np.full((6, 5), np.nan),
        "none": np.zeros((0, 6, 5)),
    }[kind]
    np.save(path / "a.npy", values)
    return path / "a.npy"


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("wrong size", "is 6×5 pixels and the model takes 5×6"),
        ("transparent", "transparent parts"),
        ("16 bits", "8-bit"),
        ("no image", "cannot be read as an image"),
        ("empty folder", "no image in"),
        ("unknown ending", "none of: image"),
        ("missing", "there is no file"),
        ("several arrays", "it has a, b"),
        ("short idx", "cut short"),
        ("no idx", "not an idx file"),
        ("damaged", "cannot be read as an array"),
        ("wrong shape", r"has shape \(2, 5, 6\) and the model takes 1×6×5"),
        ("pickled", "cannot be read as an array"),
        ("integers", "int64, whose range is not known"),
        ("nan", "NaN or infinity"),
        ("none", "holds no input"),
    ],
)
def test_bad_input(grey, tmp_path, kind, message):
    with pytest.raises(ValueError, match=message):
        grey[1].predict(write(tmp_path, kind))


def test_runs_without_a_model(tmp_path):
    with pytest.raises(ValueError, match="not the directory of a run"):
        Predictor(tmp_path)
    RunDirectory.create(tmp_path / "run", Recipe(data="digits", model="digits"))
    with pytest.raises(ValueError, match="no trained model yet: finish it with dphero train --resume"):
        Predictor(tmp_path / "run")


def test_weights_of_another_network(tmp_path):
    made(tmp_path / "run", (1, 6, 5))
    signature = tmp_path / "run" / "model.json"
    signature.write_text(signature.read_text().replace('"owl"', '"owl", "fox"'))
    with pytest.raises(ValueError, match="not those of the network 'mlp'"):
        Predictor(tmp_path / "run")
