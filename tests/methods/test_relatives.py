"""AdaCliP, GeoClip and quantile clipping: what shapes the noise or moves the clip norm, at DP-SGD's price."""

import statistics
from pathlib import Path

import pytest
import torch

from dphero.geometry.diagonal import Diagonal
from dphero.methods import make
from tests.methods.digits_task import accuracy, resumes_exactly, start

METHODS = ["adaclip", "geoclip", "quantile-clip"]


@pytest.mark.parametrize("method", METHODS)
def test_costs_what_dp_sgd_costs_and_learns(method: str) -> None:
    trainer, plain = (start(each, noise_multiplier=1.0, epochs=10.0) for each in (method, "dp-sgd"))
    while not trainer.finished:
        trainer.advance()
        plain.advance()
    assert trainer.ledger == plain.ledger
    assert trainer.price(1e-4) == plain.price(1e-4)
    assert accuracy(trainer) > 0.6


@pytest.mark.parametrize("method", METHODS)
def test_resumes_exactly(method: str, tmp_path: Path) -> None:
    resumes_exactly(method, tmp_path, noise_multiplier=1.0)


def geometry(trainer):
    return trainer.engine._run.mechanism.noise_geometry


def test_adaclip_scales_each_coordinate_and_geoclip_turns_too() -> None:
    shapes = {}
    for method in ("adaclip", "geoclip"):
        trainer = start(method, noise_multiplier=0.5, options={"refresh_every": 2})
        for _ in range(5):
            trainer.advance()
        shapes[method] = geometry(trainer)
    assert all(isinstance(shape.flat, Diagonal) for shape in shapes["adaclip"].values())
    weight = shapes["geoclip"]["0.weight"]
    turned = weight.colour(torch.eye(640).reshape(640, 10, 64)).reshape(640, 640)
    assert (turned - turned.diag().diag()).abs().max() > 0.01
    for shape in (*shapes["adaclip"].values(), weight):
        assert not shape.is_identity


def test_the_clip_norm_finds_the_median() -> None:
    trainer = start("quantile-clip", noise_multiplier=0.1, clip=20.0, lr=1e-6, epochs=20.0)
    shares = []
    while not trainer.finished:
        step = trainer.advance()
        assert step.signal_to_noise is None  # C has moved since
        shares.append(step.clipped)
    assert shares[0] < 0.05
    assert statistics.mean(shares[-20:]) == pytest.approx(0.5, abs=0.05)


@pytest.mark.parametrize(
    ("method", "field", "value"), [("adaclip", "guidance", "pca"), ("quantile-clip", "clipping", "flat")]
)
def test_a_recipe_cannot_undo_the_method(method: str, field: str, value: str) -> None:
    with pytest.raises(ValueError, match=f"leave out --{field} {value}, or take --method dp-sgd"):
        start(method, noise_multiplier=1.0, **{field: value})


@pytest.mark.parametrize("method", ["adaclip", "geoclip"])
@pytest.mark.parametrize("options", [{"refresh_every": 0}, {"floor": 0.0}, {"refresh_every": 1.5}, {"flor": 1.0}])
def test_bad_options(method: str, options: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        make(method, options)
