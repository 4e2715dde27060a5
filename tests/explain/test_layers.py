"""Where the noise falls, against values by hand."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from dphero.explain import explain
from dphero.explain.layers import noise_factor, shares_of_noise, spectrum_facts
from dphero.explain.trajectory import compare_paths
from dphero.guidance import PCA, Block, Released


def test_spectra_by_hand() -> None:
    facts = spectrum_facts(torch.tensor([1.0, 3.0]))
    assert facts["rank"] == pytest.approx(16 / 10) and facts["largest_share"] == 0.75
    assert facts["values"] == [1.5, 0.5]  # mean 1, largest first
    assert spectrum_facts(torch.zeros(3))["values"] == []
    assert len(spectrum_facts(torch.rand(500))["values"]) == 32


def test_the_noise_of_a_weight_follows_its_spectrum() -> None:
    block = Block("w", torch.diag(torch.tensor([3.0, 1.0])))
    geometry = PCA(exponent=1.0, floor=0.0).geometry(Released(0, (block,), 1.0))["w"]
    factor = noise_factor(geometry, block)
    assert factor.square().sum().item() == pytest.approx(2)
    ratio = torch.linalg.svdvals(factor)  # noise in proportion to the eigenvalue, 9 : 1
    assert (ratio[0] / ratio[1]).item() == pytest.approx(9, rel=1e-4)
    assert torch.equal(noise_factor(None, block), torch.eye(2, dtype=torch.float64))


def test_noise_along_a_gradient_by_hand() -> None:
    factor = torch.diag(torch.tensor([math.sqrt(1.8), math.sqrt(0.2)], dtype=torch.float64))
    along = torch.tensor([[2.0, 1.0], [0.0, 0.0]], dtype=torch.float64)
    assert shares_of_noise(factor, {"public": along}, None)["noise_on_public"] == pytest.approx(1.8)
    assert shares_of_noise(factor, {"public": along.flip(0)}, None)["noise_on_public"] == pytest.approx(0.2)
    even = torch.eye(2, dtype=torch.float64)
    found = shares_of_noise(even, {"public": along, "released": -along}, None)
    assert found["noise_on_public"] == 1 and found["cosine"] == pytest.approx(-1)


def test_the_energy_of_noise_is_taken_away() -> None:
    torch.manual_seed(0)
    factor = torch.diag(torch.tensor([1.9, 0.1], dtype=torch.float64).sqrt())
    noise = 0.1 * factor @ torch.randn(2, 20_000, dtype=torch.float64)
    nothing = shares_of_noise(factor, {"released": noise}, 0.1)
    assert abs(nothing["signal_share"]) < 3 * nothing["signal_share_error"] and "noise_on_released" not in nothing
    signal = torch.zeros_like(noise)
    signal[1] = 0.2  # in the direction of little noise
    found = shares_of_noise(factor, {"released": noise + signal}, 0.1)
    assert found["signal_share"] == pytest.approx(800 / (800 + 400), abs=0.01)
    assert found["noise_on_released"] == pytest.approx(0.1, abs=0.03)


def test_paths_by_hand() -> None:
    start, other = torch.zeros(2), torch.tensor([2.0, 0.0])
    assert compare_paths(start, other, other) == {"distance": 0, "cosine": 1, "length": 1}
    assert compare_paths(start, torch.tensor([0.0, 1.0]), other) == {
        "distance": pytest.approx(math.sqrt(5) / 2),
        "cosine": 0,
        "length": 0.5,
    }
    assert compare_paths(start, start, other) == {"distance": 1, "cosine": None, "length": 0}
    assert compare_paths(start, other, start)["distance"] is None


def test_layers_and_paths_of_runs(runs: Path) -> None:
    found = explain([runs / name for name in ("sgd-1", "sgd-2", "dp-hero-1", "published-3", "bare")], per_class=2)
    layers = found.numbers["layers"]
    assert {each["run"] for each in layers} == {"sgd-1", "sgd-2", "dp-hero-1", "published-3"}  # who kept something
    assert all("noise" not in each for each in layers if each["run"].startswith("sgd"))
    published = [each for each in layers if each["run"] == "published-3" and each["layer"] == "0.weight"]
    assert published[-1]["noise"]["values"][-1] == 0  # 32 filters of 16 weights: directions without any noise
    assert all("released" in each for each in layers if each["epoch"] > 0)
    # only those that began with the same weights are on one path
    assert {(each["run"], each["reference"]) for each in found.numbers["trajectory"]} == {("dp-hero-1", "sgd-1")}
    assert [each["epoch"] for each in found.numbers["trajectory"]] == [1.0, 2.0]
    assert {"layers", "trajectory"} <= set(found.figures(2))
