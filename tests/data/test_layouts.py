"""Every layout becomes the published bytes, or is refused with a reason."""

import gzip
import io
import json
import os
import pickle
import tarfile
from typing import ClassVar

import numpy as np
import pytest

from dphero.data import get, load
from dphero.data.files import layouts
from tests.data import small


def plain(folder, kind):
    for name, content in small.contents(kind).items():
        (folder / name).write_bytes(content)


def compressed(folder, kind):
    for name, content in small.contents(kind).items():
        (folder / f"{name}.gz").write_bytes(gzip.compress(content))


def dotted(folder, kind):
    for name, content in small.contents(kind).items():
        (folder / name.replace("-idx", ".idx")).write_bytes(content)


def nested(folder, kind):
    (folder / "a" / "raw").mkdir(parents=True)
    plain(folder / "a" / "raw", kind)


def as_npz(folder, kind):
    x, y, test_x, test_y = small.arrays(kind)
    np.savez(folder / "set.npz", x_train=x, y_train=y, x_test=test_x, y_test=test_y)


def channels_last(folder, kind):
    x, y, test_x, test_y = small.arrays(kind)
    last = {"train_images": x.transpose(0, 2, 3, 1), "test_images": test_x.transpose(0, 2, 3, 1)}
    np.savez_compressed(folder / "set.npz", train_labels=y.reshape(-1, 1).astype(int), test_labels=test_y, **last)


def batches(kind="cifar10"):
    x, y, test_x, test_y = small.arrays(kind)
    for k in range(5):
        part = slice(k * small.BATCH, (k + 1) * small.BATCH)
        yield f"data_batch_{k + 1}", x[part], y[part]
    yield "test_batch", test_x, test_y


class Python2(pickle._Pickler):
    """Writes numpy's old module name, and text for keys, as the published batches have them."""

    def save_global(self, obj, name=None):
        if getattr(obj, "__name__", "") == "_reconstruct":
            self.write(b"cnumpy.core.multiarray\n_reconstruct\n")
            self.memoize(obj)
        else:
            super().save_global(obj, name)

    dispatch: ClassVar = {**pickle._Pickler.dispatch, type(lambda: 0): save_global}


def pickled(folder, kind, protocol=2, pickler=pickle.Pickler, keys=("data", "labels")):
    for name, images, labels in batches():
        value = dict(zip(keys, (images.reshape(len(images), -1), labels.tolist()), strict=True))
        with (folder / name).open("wb") as file:
            pickler(file, protocol).dump(value)


def pickled_newest(folder, kind):
    pickled(folder, kind, pickle.HIGHEST_PROTOCOL)


def pickled_old_names(folder, kind):
    pickled(folder, kind, 2, Python2, (b"data", b"labels"))


def binary_archive(folder, kind):
    (folder / "cifar-10-binary.tar.gz").write_bytes(small.archive(small.contents(kind), "cifar-10-batches-bin"))


def python_archive(folder, kind):
    (folder / "there").mkdir()
    pickled(folder / "there", kind)
    with tarfile.open(folder / "cifar-10-python.tar.gz", "w:gz") as tar:
        tar.add(folder / "there", "cifar-10-batches-py")
    for path in (folder / "there").iterdir():
        path.unlink()


def sheets(folder, kind):
    image = pytest.importorskip("PIL.Image")
    _, y, _, test_y = small.arrays(kind)
    for name, images, _ in batches():
        rows = images.reshape(len(images), 3, 1024).transpose(0, 2, 1)
        image.fromarray(np.ascontiguousarray(rows)).save(folder / f"{name}.png")
    (folder / "train_lables.json").write_text(json.dumps(y.tolist()))
    (folder / "test_lables.json").write_text(json.dumps(test_y.tolist()))


IDX = [plain, compressed, dotted, nested, as_npz]
CIFAR = [
    plain,
    nested,
    as_npz,
    channels_last,
    pickled,
    pickled_newest,
    pickled_old_names,
    binary_archive,
    python_archive,
]
CIFAR += [sheets]


@pytest.mark.parametrize(
    ("kind", "layout"), [("mnist", layout) for layout in IDX] + [("cifar10", layout) for layout in CIFAR]
)
def test_every_layout_gives_the_published_files(kind, layout, sets, tmp_path, cache):
    folder = tmp_path / "have"
    folder.mkdir()
    layout(folder, kind)
    got = get(kind, folder=folder)
    assert got.source == str(folder) and got.path == cache / kind
    assert {path.name: path.read_bytes() for path in got.path.iterdir()} == small.contents(kind)
    data = load(kind)
    x, y, test_x, test_y = small.arrays(kind)
    for split, images, labels in ((data.train, x, y), (data.test, test_x, test_y)):
        pixels = (split.images + 1) * 127.5
        assert np.abs(pixels.numpy().reshape(images.shape) - images).max() < 1e-4
        assert split.labels.tolist() == labels.tolist()
    assert data.public_size and len(data.classes) == 10


def test_a_pickle_that_wants_to_run_something_is_refused(sets, tmp_path):
    class Evil:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "ran"),)

    folder = tmp_path / "have"
    folder.mkdir()
    pickled(folder, "cifar10")
    (folder / "data_batch_2").write_bytes(pickle.dumps({"data": Evil(), "labels": []}))
    with pytest.raises(ValueError, match=r"missing data_batch_2\.bin: .*posix\.mkdir.*not loaded"):
        get("cifar10", folder=folder)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("module", ["builtins", "numpy", "_codecs", "os"])
@pytest.mark.parametrize("name", ["eval", "load", "fromfile", "system"])
def test_no_other_name_is_found_in_a_pickle(module, name):
    with pytest.raises(pickle.UnpicklingError, match=f"{module}.{name}"):
        layouts._BatchUnpickler(io.BytesIO()).find_class(module, name)


def flipped(content):
    return content[:-1] + bytes([content[-1] ^ 1])


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (flipped, "its checksum differs"),
        (lambda content: content[:-5], "its checksum differs"),
        (lambda content: b"", "its checksum differs"),
        (lambda content: b"<html>please log in</html>", "its checksum differs"),
    ],
)
def test_a_damaged_file_is_named_and_not_taken(damage, words, sets, tmp_path, cache):
    plain(tmp_path, "mnist")
    path = tmp_path / "train-images-idx3-ubyte"
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(ValueError, match=rf"missing {path.name}: .*{path.name} .*{words}"):
        get("mnist", folder=tmp_path)
    assert not (cache / "mnist").exists()


@pytest.mark.parametrize(("kind", "layout"), [("mnist", compressed), ("mnist", as_npz), ("cifar10", pickled)])
@pytest.mark.parametrize("cut", [0.3, 0.9])
def test_a_truncated_file_is_refused(kind, layout, cut, sets, tmp_path, cache):
    layout(tmp_path, kind)
    for path in tmp_path.iterdir():
        if path.is_file():
            path.write_bytes(path.read_bytes()[: int(path.stat().st_size * cut)])
    with pytest.raises(ValueError, match="cannot be read"):
        get(kind, folder=tmp_path)
    assert not (cache / kind).exists()


def test_another_set_with_the_same_names_is_not_taken_but_passed_by(sets, tmp_path):
    for name in ("FashionMNIST", "MNIST"):
        (tmp_path / name).mkdir()
        plain(tmp_path / name, "mnist")
    for path in (tmp_path / "FashionMNIST").iterdir():
        path.write_bytes(flipped(path.read_bytes()))
    assert get("mnist", folder=tmp_path).path


def test_missing_files_are_listed_with_what_would_do(sets, tmp_path):
    plain(tmp_path, "mnist")
    (tmp_path / "t10k-labels-idx1-ubyte").unlink()
    with pytest.raises(ValueError, match=r"missing t10k-labels-idx1-ubyte\. It may hold .*plain or \.gz"):
        get("mnist", folder=tmp_path)
    with pytest.raises(ValueError, match="there is no such folder"):
        get("mnist", folder=tmp_path / "nowhere")
