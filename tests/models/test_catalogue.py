"""Every built-in model is what its name says, repeatable, and trains privately; what does not fit is told."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from dphero.experiments import demo
from dphero.models import MODELS, NAMES, FeatureModel, build
from dphero.models.features import _ROWS
from tests.oracle.micro_batches import check
from tests.trainer import training

MNIST, CIFAR, DIGITS = (1, 28, 28), (3, 32, 32), (1, 8, 8)


def matrices(model: nn.Module) -> list[tuple[int, int]]:
    """Rows and columns of each trained weight that is a matrix."""
    shapes = [tuple(p.flatten(1).shape) for p in model.parameters() if p.dim() > 1 and p.requires_grad]
    return [(rows, columns) for rows, columns in shapes]


SIZES = {
    ("mlp", DIGITS): [(128, 64), (10, 128)],
    ("digits", DIGITS): [(32, 16), (10, 512)],
    ("lenet", MNIST): [(6, 25), (16, 150), (120, 400), (84, 120), (10, 84)],
    ("lenet", CIFAR): [(6, 75), (16, 150), (120, 400), (84, 120), (10, 84)],
    ("cifar-cnn", CIFAR): [(64, 75), (64, 1600), (384, 4096), (384, 384), (10, 384)],
    ("tanh-cnn", MNIST): [(16, 64), (32, 256), (32, 512), (10, 32)],
    ("tutorial-cnn", MNIST): [(16, 64), (32, 256), (32, 512), (10, 32)],
    ("tanh-cnn", CIFAR): [(32, 27), (32, 288), (64, 288), (64, 576), (128, 576), (128, 1152), (128, 2048), (10, 128)],
    ("scatter-linear", MNIST): [(10, 81 * 49)],
    ("scatter-linear", CIFAR): [(10, 243 * 64)],
    ("scatter-mirrored", CIFAR): [(10, 243 * 64)],
    ("scatter-whitened", DIGITS): [(10, 81 * 4)],
    ("learned-linear", (3, 8, 8)): [(10, 16 * (128 + 256) + 243 * 4)],
    ("scatter-cnn", MNIST): [(16, 729), (32, 144), (32, 512), (10, 32)],
    ("scatter-cnn", CIFAR): [(64, 2187), (64, 576), (10, 1024)],
    ("scatter-views", MNIST): [(96, 81), (96, 864), (96, 864), (10, 96 * 16)],
    ("scatter-views", CIFAR): [(96, 243), (96, 864), (96, 864), (10, 96 * 16)],
    ("learned-views", (3, 8, 8)): [(96, 192), (96, 864), (96, 864), (10, 96)],
}


@pytest.mark.parametrize(("name", "shape"), SIZES, ids=str)
def test_layers_have_their_published_sizes(name: str, shape: tuple[int, ...]) -> None:
    model = build(name, shape, 10)
    assert matrices(model) == SIZES[name, shape]
    assert model(torch.zeros(2, *shape)).shape == (2, 10)


@pytest.mark.parametrize(("name", "size"), [("wrn-16-4", 2_749_306), ("wrn-16-4-norm-first", 2_748_890)])
def test_the_wide_resnet_has_its_published_size(name: str, size: int) -> None:
    model = build(name, CIFAR, 10)
    weights = matrices(model)
    assert len(weights) == 1 + 12 + 3 + 1  # stem, two in each of six blocks, three shortcuts, classifier
    assert sum(rows * columns for rows, columns in weights) == 2_745_264
    assert sum(p.numel() for p in model.parameters()) == size
    assert not list(model.buffers())  # no statistics of any batch
    shapes = []
    model[7].register_forward_hook(lambda module, inputs, out: shapes.append(tuple(out.shape)))
    assert model(torch.zeros(1, *CIFAR)).shape == (1, 10)
    assert shapes == [(1, 256, 8, 8)]


def test_every_model_is_listed() -> None:
    assert tuple(entry.name for entry in MODELS) == NAMES
    assert {name for name, _ in SIZES} | {"wrn-16-4", "wrn-16-4-norm-first"} == set(NAMES)
    assert all(entry.line and entry.inputs and len(entry.line) < 90 for entry in MODELS)


@pytest.mark.parametrize("guidance", ["isotropic", "pca"])
@pytest.mark.parametrize("name", NAMES)
def test_every_model_trains_privately(name: str, guidance: str) -> None:
    small = (1, 16, 16)
    shapes = {"lenet": MNIST, "tanh-cnn": small, "tutorial-cnn": small, "digits": DIGITS}
    shape = (3, 8, 8) if name.startswith("learned") else shapes.get(name, (2, 8, 8))
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(24, *shape), torch.randint(3, (24,)))
    run = training(build(name, shape, 3), dataset=data, data_loader=data, expected_batch_size=4, guidance=guidance)
    before = run.weights()
    run.steps(2)
    after = run.weights()
    trained = [key for key, parameter in run.module.named_parameters() if parameter.requires_grad]
    assert all(not torch.equal(before[key], after[key]) for key in trained)
    assert all(value.isfinite().all() for value in after.values())
    assert run.engine.steps == 2 and 0 < run.engine.get_epsilon(1e-3, coarse=True) < 100


@pytest.mark.parametrize("name", ["tanh-cnn", "scatter-cnn"])
def test_deep_tanh_networks_give_the_gradients_of_micro_batches(name: str) -> None:
    torch.manual_seed(0)
    batch = (torch.randn(4, 2, 8, 8, dtype=torch.float64), torch.tensor([0, 1, 2, 0]))
    model = build(name, (2, 8, 8), 3).double()
    check(model, batch, lambda module, x, y: F.cross_entropy(module(x), y), None, 1e-9)


# -- weights ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_the_seed_alone_decides_the_weights(name: str) -> None:
    shape = (3, 8, 8) if name.startswith("learned") else {"lenet": MNIST}.get(name, (1, 16, 16))

    def weights(seed: int) -> Tensor:
        return torch.cat([p.flatten() for p in build(name, shape, 3, seed=seed).parameters()])

    torch.manual_seed(5)
    first, state = weights(1), torch.random.get_rng_state()
    torch.manual_seed(6)
    assert torch.equal(weights(1), first)
    assert not torch.equal(weights(2), first)
    torch.manual_seed(5)
    assert torch.equal(torch.random.get_rng_state(), state)


def test_no_other_generator_is_seeded(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(seed: int) -> None:
        raise AssertionError("the generators of GPUs were seeded")

    monkeypatch.setattr(torch.cuda, "manual_seed_all", refuse)
    build("mlp", (3,), 2)


def test_the_demonstration_uses_the_model_of_that_name() -> None:
    ours, its = build("digits", DIGITS, 10).state_dict(), demo.network().state_dict()
    assert ours.keys() == its.keys() and all(torch.equal(ours[key], its[key]) for key in ours)


# -- features --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["scatter-linear", "scatter-cnn"])
def test_heads_train_on_stored_features(name: str) -> None:
    torch.manual_seed(0)
    model = build(name, (2, 8, 8), 3)
    assert isinstance(model, FeatureModel)
    assert all(key.startswith("head.") for key in model.state_dict())
    images = torch.randn(_ROWS + 7, 2, 8, 8)
    stored = model.features(images)
    assert stored.shape == (_ROWS + 7, 2 * 81, 2, 2)
    groups = stored.view(len(stored), 27, -1)
    assert torch.allclose(groups.mean(2), torch.zeros(()), atol=1e-5)  # normalised for each image by itself
    assert torch.allclose(stored[-3:], model.features(images[-3:]), atol=1e-5)
    assert torch.allclose(model.head(stored), model(images), atol=1e-5)
    run = training(model.head, data_loader=TensorDataset(stored, torch.randint(3, (len(stored),))), sample_rate=0.02,
                   expected_batch_size=5, dataset_size=None)  # fmt: skip
    before = model.eval()(images)
    model.train()
    run.steps(1)
    assert not torch.equal(model.eval()(images), before)  # the model predicts with what its head has learned


def test_features_with_trainable_parameters_are_refused() -> None:
    layer = nn.Linear(3, 3)
    with pytest.raises(ValueError, match=r"trainable: weight, bias\. Freeze them"):
        FeatureModel(layer, nn.Linear(3, 2))
    FeatureModel(layer.requires_grad_(False), nn.Linear(3, 2))


# -- what does not fit -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "shape", "why"),
    [
        ("lenet", (64,), r"does not fit inputs of shape \(64,\): it takes images.*'mlp' takes any shape"),
        ("wrn-16-4", (3, 4, 5, 6), "it takes images"),
        ("lenet", (1, 8, 8), "28x28 or 32x32, not 8x8"),
        ("tanh-cnn", (1, 15, 15), "the images are too small for it"),
        ("tanh-cnn", (3, 7, 32), "the images are too small for it"),
        ("cifar-cnn", (3, 2, 2), "the images are too small for it"),
        ("digits", (1, 1, 1), "the images are too small for it"),
        ("scatter-cnn", (1, 27, 27), "multiples of 4, not 27x27"),
        ("scatter-cnn", (3, 4, 4), "the images are too small for it"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(name: str, shape: tuple[int, ...], why: str) -> None:
    with pytest.raises(ValueError, match=why) as caught:
        build(name, shape, 10)
    assert repr(name) in str(caught.value)


@pytest.mark.parametrize(("name", "closest"), [("LeNet5", "lenet"), ("cifar_cnn", "cifar-cnn"), ("wrn", "wrn-16-4")])
def test_unknown_names_get_the_closest(name: str, closest: str) -> None:
    with pytest.raises(ValueError, match=f"no model {name!r}; did you mean {closest!r}\\?") as caught:
        build(name, MNIST, 10)
    assert all(known in str(caught.value) for known in NAMES)


def test_unknown_names_unlike_any() -> None:
    with pytest.raises(ValueError, match=r"no model 'xyzzy'\. Known are"):
        build("xyzzy", MNIST, 10)


@pytest.mark.parametrize("shape", [(), (0, 3), (1, 28.0, 28), (True,)])
def test_impossible_shapes(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="shape must be positive integers"):
        build("mlp", shape, 10)


@pytest.mark.parametrize("classes", [1, 0, 2.0, True])
def test_impossible_classes(classes: int) -> None:
    with pytest.raises(ValueError, match="classes must be an integer of at least 2"):
        build("mlp", (3,), classes)


# -- one's own -------------------------------------------------------------------------------------------------------

OWN = """
from torch import nn
import {needs}

def network(shape, classes):
    return nn.Linear(shape[0], classes)

def nothing(shape, classes):
    return 3

def wrong(shape, classes):
    raise ValueError("of its own")
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_own").mkdir()
    (tmp_path / "my_own" / "models.py").write_text(OWN.format(needs="math"))
    (tmp_path / "my_own" / "broken.py").write_text(OWN.format(needs="there_is_no_such_module"))
    monkeypatch.syspath_prepend(tmp_path)
    for name in [name for name in sys.modules if name.split(".")[0] == "my_own"]:
        monkeypatch.delitem(sys.modules, name)


@pytest.mark.usefixtures("own")
def test_models_of_ones_own() -> None:
    model = build("my_own.models:network", (4,), 3, seed=1)
    assert isinstance(model, nn.Linear) and model.weight.shape == (3, 4)
    assert torch.equal(build("my_own.models:network", (4,), 3, seed=1).weight, model.weight)  # type: ignore[union-attr]
    assert not torch.equal(build("my_own.models:network", (4,), 3, seed=2).weight, model.weight)  # type: ignore[union-attr]


def test_models_are_looked_for_in_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_network_here.py").write_text(OWN.format(needs="math"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry not in ("", ".")])  # as a command has it
    before = list(sys.path)
    assert isinstance(build("my_network_here:network", (4,), 3), nn.Linear)
    assert sys.path == before
    monkeypatch.delitem(sys.modules, "my_network_here")


@pytest.mark.usefixtures("own")
@pytest.mark.parametrize(
    ("spec", "error", "why"),
    [
        ("my_own.models:missing", ValueError, "my_own.models has no function 'missing'"),
        ("my_own.models:nothing", ValueError, "must return a torch.nn.Module, and returned int"),
        ("my_own.models:wrong", ValueError, "^of its own\n.*my_own.models:wrong"),
        ("my_own.absent:network", ValueError, "no module 'my_own.absent', neither installed nor in .*Install it"),
        ("nowhere_at_all:network", ValueError, "there is no module 'nowhere_at_all'"),
        ("my_own.broken:network", ModuleNotFoundError, "there_is_no_such_module"),
        ("my own:network", ValueError, "given as package.module:function, not 'my own:network'"),
        ("my_own.models:", ValueError, "given as package.module:function"),
    ],
)
def test_mistakes_in_ones_own(spec: str, error: type[Exception], why: str) -> None:
    with pytest.raises(error, match=why):
        build(spec, (4,), 3)
