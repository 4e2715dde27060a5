"""Data of one's own: every shape that is understood, and a clear error for every one that is not."""

import os
import re
import shutil
import subprocess
import sys
from decimal import Decimal

import numpy as np
import pytest
import torch

from dphero.data import Data, Split, from_arrays, load
from dphero.data.files.folders import HELD_OUT, is_held_out
from dphero.data.loading import located
from tests.data import small

X = np.random.default_rng(1).integers(256, size=(6, 5, 4), dtype=np.uint8)
Y = np.array([0, 1, 2, 0, 1, 2])


def made(images=X, labels=Y, test_images=None, test_labels=None, **options):
    return from_arrays(
        "mine",
        images,
        labels,
        images if test_images is None else test_images,
        labels if test_labels is None else test_labels,
        **options,
    )


def test_bytes_are_scaled_by_their_range_and_floats_are_left_alone():
    data = made()
    assert data.train.images.shape == (6, 1, 5, 4) and data.train.images.dtype == torch.float32
    assert np.allclose(data.train.images[:, 0].numpy(), X / 127.5 - 1, atol=1e-6)
    dark = made(np.full_like(X, 3)).train.images  # no fitting: a dark set stays dark
    assert dark.unique().tolist() == [pytest.approx(3 / 127.5 - 1)]
    floats = X.astype(np.float64) * 10
    assert np.allclose(made(floats).train.images[:, 0].numpy(), floats)
    assert not data.public_size and len(data.train) == 6


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ((6, 5, 4), (6, 1, 5, 4)),
        ((6, 3, 8, 8), (6, 3, 8, 8)),
        ((6, 8, 8, 3), (6, 3, 8, 8)),
        ((6, 8, 8, 1), (6, 1, 8, 8)),
        ((6, 3, 3, 3), (6, 3, 3, 3)),
        ((6, 81, 7, 7), (6, 81, 7, 7)),
        ((6, 12), (6, 12)),
    ],
)
@pytest.mark.parametrize("kind", [np.asarray, torch.tensor, np.ndarray.tolist])
def test_shapes(shape, expected, kind):
    values = np.arange(np.prod(shape)).reshape(shape) / 1000
    images = made(kind(values)).train.images
    assert images.shape == expected and images.is_contiguous()
    if shape == (6, 8, 8, 3):
        assert float(images[2, 1, 3, 4]) == pytest.approx(values[2, 3, 4, 1])


def test_their_array_may_change_afterwards():
    for theirs in (X.astype(np.float32), torch.tensor(X, dtype=torch.float32)):
        data = made(theirs)
        before = data.train.images.clone()
        theirs[:] = 0
        assert data.train.images.equal(before)


@pytest.mark.parametrize(
    ("labels", "classes", "numbers"),
    [
        (["cat", "dog", "cat"], ("cat", "dog"), [0, 1, 0]),
        (np.array(["b", "a", "b"]), ("a", "b"), [1, 0, 1]),
        (np.array([b"b", b"a", b"b"]), ("a", "b"), [1, 0, 1]),
        ([-1, 1, 10], ("-1", "1", "10"), [0, 1, 2]),
        (torch.tensor([5, 3, 5]), ("3", "5"), [1, 0, 1]),
        (np.array([[5], [3], [5]]), ("3", "5"), [1, 0, 1]),
        (np.array([1.0, 0.0, 1.0]), ("0", "1"), [1, 0, 1]),
        ([(1, 2), "x", (1, 2)], ("(1, 2)", "x"), [0, 1, 0]),
        ([True, False, True], ("False", "True"), [1, 0, 1]),
    ],
)
def test_labels_of_any_kind(labels, classes, numbers):
    data = made(X[:3], labels)
    assert data.classes == classes and data.train.labels.tolist() == numbers
    assert data.train.labels.dtype == torch.int64


def test_given_classes_set_the_order_and_may_be_absent_from_the_data():
    data = made(X[:2], ["dog", "cat"], classes=["dog", "emu", "cat"])
    assert data.classes == ("dog", "emu", "cat") and data.train.labels.tolist() == [0, 2]
    assert made(X[:2], [2, 0], classes=["dog", "emu", "cat"]).train.labels.tolist() == [2, 0]


@pytest.mark.parametrize(
    "classes",
    [
        np.unique([1, 2, 3]),
        list(np.unique([1, 2, 3])),
        np.array([1.0, 2.0, 3.0]),
        torch.tensor([1, 2, 3]),
        list(torch.tensor([1.0, 2.0, 3.0])),
        [Decimal(1), Decimal(2), Decimal(3)],
    ],
    ids=["array", "numpy integers", "floats", "tensor", "tensors", "decimals"],
)
@pytest.mark.parametrize(
    "kind", [np.asarray, list, lambda labels: list(torch.tensor(labels))], ids=["array", "list", "tensors"]
)
def test_classes_that_are_numbers_are_told_apart_whatever_they_came_in(classes, kind):
    data = made(X, kind(Y + 1), classes=classes)
    assert data.classes == ("1", "2", "3") and data.train.labels.tolist() == Y.tolist()
    with pytest.raises(ValueError, match="label 0 is out of range"):
        made(X, kind(Y), classes=classes)


NAN, INF = X.astype(np.float32), X.astype(np.float64)
NAN[4, 1, 1], INF[2, 0, 0] = np.nan, 1e300  # too large for float32


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"images": NAN}, "mine, train: image 4 holds NaN"),
        ({"images": INF}, "mine, train: image 2 holds NaN or infinity"),
        ({"test_images": NAN}, "mine, test: image 4 holds NaN"),
        ({"labels": Y[:5]}, "mine, train: there are 6 images but 5 labels"),
        ({"test_labels": Y[:5]}, "mine, test: there are 6 images but 5 labels"),
        ({"images": X[:0], "labels": Y[:0], "classes": [0, 1]}, "mine, train: there are no images"),
        ({"test_images": X[:0], "test_labels": []}, "mine, test: there are no images"),
        ({"images": X[:, :0]}, "there are no images"),
        ({"images": X[0, 0]}, "images must be N×C×H×W, or N×D for vectors, got shape 4"),
        ({"images": np.zeros((6, 1, 1, 1, 1), np.uint8)}, "got shape 6×1×1×1×1"),
        ({"images": X.astype(np.int64)}, "images of type torch.int64 have no range of their own"),
        ({"images": ["a"] * 6}, "images must be one array of numbers"),
        ({"images": [[1.0], [1.0, 2.0]]}, "images must be one array of numbers, all of one size"),
        ({"test_images": X[:, :4]}, "training images are 1×5×4 but test images are 1×4×4"),
        ({"labels": Y + 0.5}, "mine, train: label 0 is 0.5; labels are names or whole numbers"),
        ({"labels": [np.nan] * 6}, "label 0 is nan"),
        ({"labels": np.eye(6)}, "label 0 is a list; each example has one label"),
        ({"labels": Y, "classes": ["a", "b"]}, "mine, train: label 2 is out of range: it is none of the 2 classes"),
        ({"labels": -Y, "classes": ["a", "b", "c"]}, "label -1 is out of range"),
        ({"labels": np.array(3)}, "mine, train: labels must be a list, one for each example, got array(3)"),
        ({"test_labels": 3}, "mine, test: labels must be a list, one for each example, got 3"),
        ({"classes": 10}, "mine: classes must be a list of names, one for each class, got 10"),
        ({"classes": [["a", "b"], ["c", "d"]]}, "mine: classes must be a list of names, one for each class"),
        ({"test_labels": Y + 1}, "mine, test: label 3 is out of range: it is none of the 3 classes (0, 1, 2)"),
        ({"labels": Y * 0}, "at least two different class names are needed, got '0'"),
        ({"labels": [1, "1", 2, 1, 1, 1]}, "different labels are written alike"),
        ({"classes": ["a", "a", "b"]}, "at least two different class names"),
        ({"classes": ["a", "caf\udce9", "b"]}, r"mine: the class name 'caf\udce9' cannot be written as UTF-8: rename"),
    ],
)
def test_what_is_wrong_is_said(options, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        made(**options)


def test_a_data_object_cannot_be_wrong():
    good = Split(torch.zeros(2, 3), torch.tensor([0, 1]))
    with pytest.raises(ValueError, match=r"label 1 is out of range|at least two"):
        Data("mine", good, good, ("a",), False)
    with pytest.raises(ValueError, match=r"test: label 2 is out of range, there are 2 classes"):
        Data("mine", good, Split(torch.zeros(1, 3), torch.tensor([2])), ("a", "b"), False)
    with pytest.raises(ValueError, match=r"images must be a tensor of torch.float32, got torch.float64"):
        Split(torch.zeros(2, 3).double(), good.labels)
    with pytest.raises(ValueError, match=r"labels must be a tensor of torch.int64, got list"):
        Split(torch.zeros(2, 3), [0, 1])
    with pytest.raises(ValueError, match=r"labels count from 0, got -1"):
        Split(torch.zeros(2, 3), torch.tensor([0, -1]))
    with pytest.raises(ValueError, match=r"one number for each image, got shape 2×1"):
        Split(torch.zeros(2, 3), torch.zeros(2, 1, dtype=torch.int64))


def test_npz(tmp_path):
    path = tmp_path / "set.npz"
    np.savez(path, x_train=X, y_train=["cat", "dog"] * 3, x_test=X[:2], y_test=["dog", "cat"])
    data = load(str(path))
    assert data.name == "set" and data.classes == ("cat", "dog") and data.test.labels.tolist() == [1, 0]
    np.savez(path, X_train=X, Y_train=Y, test_images=X, test_labels=Y, classes=["a", "b", "c", "d"])
    assert load(str(path)).classes == ("a", "b", "c", "d")
    np.savez(path, x_train=X, y_train=Y + 1.0, x_test=X, y_test=Y + 1.0, classes=[1.0, 2.0, 3.0])
    assert load(str(path)).classes == ("1", "2", "3") and load(str(path)).train.labels.tolist() == Y.tolist()


def test_files_and_folders_are_found_from_everywhere_and_other_names_left_alone(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/me")
    (tmp_path / "folder").mkdir()
    assert located("set.npz") == str(tmp_path / "set.npz") and located("folder") == str(tmp_path / "folder")
    assert located("~/set.npz") == "/home/me/set.npz"
    (tmp_path / "mnist").mkdir()  # the built-in set comes first
    for name in ("mnist", "module:function", "/somewhere/set.npz", "no such thing"):
        assert located(name) == name


def test_the_digest_is_that_of_what_is_trained_on():
    digests = [
        made().digest(),
        made(255 - X).digest(),
        made(X.reshape(6, 4, 5)).digest(),
        made(labels=np.roll(Y, 1)).digest(),
        made(classes=[0, 1, 2, 3]).digest(),
    ]
    assert len(set(digests)) == 5 and digests[0] == made(test_images=255 - X).digest() == made().digest()


def test_npz_that_is_wrong(tmp_path):
    path = tmp_path / "set.npz"
    with pytest.raises(ValueError, match=r"there is no file .*set\.npz"):
        load(str(path))
    np.savez(path, x_train=X, y_train=Y, x_test=X)
    with pytest.raises(ValueError, match="has no y_test; it has x_train, y_train, x_test"):
        load(str(path))
    np.savez(path, x_train=X, y_train=np.array(["a", 1] * 3, dtype=object), x_test=X, y_test=Y)
    with pytest.raises(ValueError, match="holds pickled objects"):
        load(str(path))
    path.write_text("x_train,y_train")
    with pytest.raises(ValueError, match=r"set\.npz is not an \.npz file"):
        load(str(path))
    np.savez(path, x_train=X, y_train=Y, x_test=X, y_test=Y)
    whole = path.read_bytes()
    for content in (whole[:300], b"", b"PK\x03\x04 nothing"):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"set\.npz"):
            load(str(path))
    middle = bytearray(whole)
    middle[200] ^= 255
    path.write_bytes(middle)
    with pytest.raises(ValueError, match="not a whole"):
        load(str(path))


MODULE = """
import numpy as np
import torch
from dphero.data import Data, Split
images, labels = np.zeros((4, 2, 2), np.uint8), [0, 1, 0, 1]
def arrays(): return images, labels, torch.zeros(2, 2, 2), [1, 0]
def data():
    split = Split(torch.zeros(2, 3), torch.tensor([0, 1]))
    return Data("theirs", split, split, ("no", "yes"), True)
def wrong(): return images
def fails(): raise RuntimeError("theirs")
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    (tmp_path / "my_data_module.py").write_text(MODULE)
    (tmp_path / "my_broken_module.py").write_text("import a_module_that_is_not_there")
    monkeypatch.chdir(tmp_path)
    path = list(sys.path)
    yield
    assert sys.path == path
    sys.modules.pop("my_data_module", None)


def test_a_function(module):
    data = load("my_data_module:arrays")
    assert data.name == "my_data_module:arrays" and data.test.labels.tolist() == [1, 0] and not data.public_size
    assert load("my_data_module:data").name == "theirs"


@pytest.mark.parametrize(
    ("spec", "error", "words"),
    [
        ("my_data_module:wrong", ValueError, "must return dphero.data.Data or (train_images"),
        ("my_data_module:missing", ValueError, "has no function 'missing'"),
        ("my_data_module:images", ValueError, "has no function 'images'"),
        ("no_such_module:data", ValueError, "there is no module 'no_such_module'"),
        ("no_such_module.inside:data", ValueError, "there is no module 'no_such_module.inside'"),
        ("my_broken_module:data", ModuleNotFoundError, "a_module_that_is_not_there"),
        ("my_data_module:fails", RuntimeError, "theirs"),
        ("nothing", ValueError, "no data 'nothing': give digits, mnist"),
        ("some/where", ValueError, "no data 'some/where'"),
        ("C:\\set", ValueError, "no data"),
    ],
)
def test_functions_that_are_not_there(spec, error, words, module):
    with pytest.raises(error, match=re.escape(words)):
        load(spec)


def picture(path, size=(4, 3), mode="L", value=None):
    image = pytest.importorskip("PIL.Image")
    path.parent.mkdir(parents=True, exist_ok=True)
    image.new(mode, size, value or 0).save(path)


def test_a_folder_with_train_and_test(tmp_path):
    for half, number in (("train", 3), ("test", 1)):
        for label, name in enumerate(("ape", "bee")):
            for k in range(number):
                picture(tmp_path / half / name / f"{k}.png", value=100 * label + k)
    (tmp_path / "train" / "cow").mkdir()  # a class without examples is a class all the same
    (tmp_path / "train" / ".hidden").mkdir()
    (tmp_path / "train" / "ape" / "notes.txt").write_text("no image")
    data = load(str(tmp_path), channels=1)
    assert data.name == tmp_path.name and data.classes == ("ape", "bee", "cow")
    assert data.train.images.shape == (6, 1, 3, 4) and data.train.labels.tolist() == [0, 0, 0, 1, 1, 1]
    assert ((data.train.images[:, 0, 0, 0] + 1) * 127.5).round().tolist() == [0, 1, 2, 100, 101, 102]
    assert load(str(tmp_path)).train.images.shape == (6, 3, 3, 4)
    picture(tmp_path / "test" / "bee" / "colour.JPG", mode="RGB", value=(255, 0, 0))
    data = load(str(tmp_path))
    assert data.train.images.shape == (6, 3, 3, 4) and data.test.images.shape == (3, 3, 3, 4)
    red = data.test.images[2, :, 0, 0]
    assert red[0] > 0.9 and red[1] < -0.9


@pytest.mark.parametrize("channels", [None, 1, 3])
def test_one_coloured_image_does_not_change_the_shape_of_others(tmp_path, channels):
    """The network that is published has the shape of the images: neighbours must agree on it."""
    for half in ("train", "test"):
        for name in ("ape", "bee"):
            picture(tmp_path / half / name / "0.png", value=100)
    before = load(str(tmp_path), channels).train.images
    assert before.shape[1] == (channels or 3)
    picture(tmp_path / "train" / "bee" / "1.png", mode="RGB", value=(255, 0, 0))
    after = load(str(tmp_path), channels).train.images
    assert torch.equal(after[:2], before) and len(after) == 3


def test_channels_are_for_folders(tmp_path):
    picture(tmp_path / "ape" / "0.png")
    with pytest.raises(ValueError, match="channels must be one of 1, 3, got 4"):
        load(str(tmp_path), channels=4)
    with pytest.raises(ValueError, match="channels=1 is for folders of images, and 'digits' is none"):
        load("digits", channels=1)


def test_one_level_holds_out_by_name_alone(tmp_path):
    for name in ("ape", "bee"):
        for k in range(40):
            picture(tmp_path / name / f"{k}.png", value=k)
    first = load(str(tmp_path))
    names = [f"{name}/{k}.png" for name in ("ape", "bee") for k in range(40)]
    assert len(first.test) == sum(map(is_held_out, names)) and len(first.train) + len(first.test) == 80
    picture(tmp_path / "ape" / "another.png", value=200)
    second = load(str(tmp_path))
    # One image more on one side, and every other image where it was: neighbours stay neighbours.
    both = [sorted(split.images[:, 0, 0, 0].tolist()) for split in (first.train, first.test)]
    more = [sorted(split.images[:, 0, 0, 0].tolist()) for split in (second.train, second.test)]
    assert sum(map(len, more)) == 81
    for before, after in zip(both, more, strict=True):
        assert before == [value for value in after if value < 0.5]


@pytest.mark.parametrize(("mode", "value"), [("LA", (7, 255)), ("RGBA", (7, 7, 7, 255))])
def test_an_alpha_channel_that_hides_nothing_is_left_out_and_any_other_refused(mode, value, tmp_path):
    for half in ("train", "test"):
        for name in ("ape", "bee"):
            picture(tmp_path / half / name / "0.png", mode=mode, value=value)
    images = load(str(tmp_path), channels=len(mode) - 1).train.images
    assert images.shape == (2, len(mode) - 1, 3, 4) and images.unique().tolist() == [pytest.approx(7 / 127.5 - 1)]
    picture(tmp_path / "train" / "bee" / "0.png", mode=mode, value=(*value[:-1], 254))
    with pytest.raises(ValueError, match=r"bee/0\.png cannot be read as an image: it has transparent parts"):
        load(str(tmp_path))


def test_the_held_out_share_is_fixed():
    held = [name for name in map(str, range(20_000)) if is_held_out(name)]
    assert abs(len(held) / 20_000 - HELD_OUT) < 0.01
    assert held[:6] == ["4", "6", "12", "20", "25", "28"]  # for ever: a set must not be cut anew by an update


def test_folders_that_are_wrong(tmp_path):
    with pytest.raises(ValueError, match="gives 0 training and 0 test images"):
        load(str(tmp_path))
    picture(tmp_path / "train" / "ape" / "0.png")
    with pytest.raises(ValueError, match="has a folder train but no test"):
        load(str(tmp_path))
    (tmp_path / "test").mkdir()
    with pytest.raises(ValueError, match="gives 1 training and 0 test images"):
        load(str(tmp_path))
    picture(tmp_path / "test" / "cow" / "0.png")
    with pytest.raises(ValueError, match=r"has classes that .*train has not: cow"):
        load(str(tmp_path))
    picture(tmp_path / "train" / "cow" / "0.png", size=(5, 3))
    with pytest.raises(ValueError, match=r"cow/0\.png is 5×3 pixels but .*ape/0\.png is 4×3"):
        load(str(tmp_path))
    picture(tmp_path / "train" / "cow" / "0.png", mode="I;16")
    with pytest.raises(ValueError, match=r"cow/0\.png cannot be read as an image: its pixels have mode I;16"):
        load(str(tmp_path))
    picture(tmp_path / "train" / "cow" / "0.png", size=(50, 50))
    path = tmp_path / "train" / "cow" / "0.png"
    for content in (b"", b"nothing", path.read_bytes()[:60]):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"cow/0\.png cannot be read as an image"):
            load(str(tmp_path))


@pytest.mark.parametrize("name", [b"caf\xe9/0.png", b"bee/caf\xe9.png"])
@pytest.mark.parametrize("half", [b"train", b"test", b"."])
def test_names_that_are_not_utf_8_are_refused_before_anything_is_trained(name, half, tmp_path):
    for other in ("train", "test") if half != b"." else ("",):
        for label in ("ape", "bee"):
            picture(tmp_path / other / label / "0.png")
    path = os.path.join(os.fsencode(tmp_path), half, name)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    shutil.copy(next(tmp_path.rglob("0.png")), os.fsdecode(path))
    with pytest.raises(ValueError, match=r"holds the name 'caf\\udce9(\.png)?', which is not valid UTF-8: rename it"):
        load(str(tmp_path))


def test_the_digits_are_those_of_the_demonstration():
    pytest.importorskip("sklearn")
    from dphero.experiments import demo

    data = load("digits")
    train, test = demo.digits()
    assert train.tensors[0].equal(data.train.images) and test.tensors[1].equal(data.test.labels)
    assert data.train.images.shape == (1437, 1, 8, 8) and len(data.test) == 360 and data.public_size
    assert data.test.labels[:12].tolist() == [6, 5, 5, 7, 9, 9, 8, 4, 6, 8, 6, 0]


def test_nothing_here_imports_the_engine_and_fetching_needs_no_torch():
    code = (
        "import sys; from dphero.data import get, directory, BUILT_INS; assert 'torch' not in sys.modules;"
        "from dphero.data import load; load;"
        "bad = {'dphero.engine', 'dphero.mechanism.release', 'dphero.noise'} & set(sys.modules);"
        "assert not bad, bad"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, env=small.environment("none", "none"))
