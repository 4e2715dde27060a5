"""One checkpoint continued twice, one seed in two engines: no two sums ever get the same noise."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import TensorDataset

from dphero.geometry import Diagonal, Geometry
from dphero.guidance import Released
from dphero.mechanism import release
from dphero.mechanism.clipped_sum import ClippedSum
from dphero.mechanism.release import Mechanism
from dphero.noise import FastNoise, fast
from dphero.noise.source import Target
from dphero.numerics import transfer
from tests.trainer import Training, data, network, same, training

SIGMA = 10.0


def doubled(out: Tensor, label: Tensor) -> Tensor:
    return 2 * F.cross_entropy(out, label)


def against(out: Tensor, label: Tensor) -> Tensor:
    return -F.cross_entropy(out, label)


def learning_rate(run: Training) -> None:
    run.optimizer.param_groups[0]["lr"] = 0.01


CONTINUATIONS: dict[str, Any] = {
    "loss": ({}, lambda run: None, doubled),
    "loss with the other sign": ({}, lambda run: None, against),
    "learning rate": ({}, learning_rate, F.cross_entropy),
}


def noise_left(first: list[dict[str, Tensor]], second: list[dict[str, Tensor]]) -> float:
    """The least root mean square, over releases, of the difference of two runs in units of one run's noise.

    √2 and more where noises are independent; far less where one noise is in both, and differences are people.
    """
    parts = []
    for one, other in zip(first, second, strict=True):
        if same(one, other):  # the same release again tells nothing new
            continue
        parts.append(torch.cat([(one[name] - other[name]).flatten() for name in one]))
    assert parts
    return min(float(part.square().mean().sqrt()) for part in parts) * 12 / SIGMA  # lots of 12


def continued(path: Path, change: Any, loss: Any, **options: Any) -> list[dict[str, Tensor]]:
    run = training(guidance="isotropic", noise_multiplier=SIGMA, **options)
    run.engine.load(path)
    change(run)
    return run.steps(3, loss)


@pytest.mark.parametrize("name", CONTINUATIONS)
@pytest.mark.parametrize("seed", [7, None], ids=["seed", "no seed"])
def test_two_continuations_share_no_noise(
    name: str, seed: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options, change, loss = CONTINUATIONS[name]
    run = training(guidance="isotropic", noise_multiplier=SIGMA, seed=seed)
    run.steps(2)
    run.engine.save(tmp_path / "run.pt")

    def difference() -> float:
        plain = continued(tmp_path / "run.pt", lambda run: None, F.cross_entropy)
        return noise_left(plain, continued(tmp_path / "run.pt", change, loss, **options))

    assert difference() > 1.0
    with monkeypatch.context() as patch:  # without the guard the difference is the people alone
        patch.setattr(FastNoise, "_bind", lambda self, release, values: None)
        assert difference() < 0.5


def test_one_seed_in_two_engines_on_other_data_shares_no_noise(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def released(dataset: Any) -> list[dict[str, Tensor]]:
        return training(network(), dataset=dataset, guidance="isotropic", noise_multiplier=SIGMA, seed=11).steps(1)

    other = data()
    other.tensors[0][:30] += 0.5
    with caplog.at_level(logging.WARNING, logger="dphero"):
        first = released(data())
        assert not caplog.records
        assert noise_left(first, released(other)) > 1.0
    assert "of another sum. Its noise is drawn anew here" in caplog.text
    monkeypatch.setattr(FastNoise, "_bind", lambda self, release, values: None)
    assert noise_left(released(data()), released(other)) < 0.5


class Scaled:
    """Noise of a scale for each number of a weight."""

    refresh_every, needs_gradients = 10, False

    def __init__(self, turned: bool) -> None:
        self.turned = turned

    def geometry(self, released: Released) -> dict[str, Geometry]:
        found = {}
        for block in released.blocks:
            scales = torch.linspace(1.0, 4.0, block.value.numel())
            found[block.name] = Geometry(
                tuple(block.value.shape), flat=Diagonal(scales.flip(0) if self.turned else scales)
            )
        return found

    def observe(self, released: Released) -> None:
        pass

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


def test_two_shapes_with_the_same_extremes_share_no_noise() -> None:
    """With gradients clipped to a ball both sums are the same: under one noise they could be solved for."""
    one, other = (
        training(guidance=Scaled(turned), mechanism="ball", noise_multiplier=SIGMA, seed=19).steps(1)[0]
        for turned in (False, True)
    )
    for name, first in one.items():
        if first.numel() < 50:
            continue
        scales = torch.linspace(1.0, 4.0, first.numel())
        apart = (first - other[name]).flatten() / (scales - scales.flip(0))  # the noise itself, were it the same
        solved = (first.flatten() - scales * apart)[(scales - 2.5).abs() > 0.5] * 12
        assert solved.square().mean().sqrt() > SIGMA / 2


def test_marks_tell_clip_rules_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU they stand for the sum: the norms are the same, and if all are clipped, so are counts."""
    found: list[list[float]] = []
    made = Mechanism.release

    def watched(self: Mechanism, lot: ClippedSum) -> dict[str, Tensor]:
        found.append([number for mark in lot.marks for number in mark.tolist()])
        return made(self, lot)

    monkeypatch.setattr(Mechanism, "release", watched)
    for rule in ("flat", "automatic", "per_layer"):
        training(guidance="isotropic", clipping=rule, max_grad_norm=1e-3, seed=20).steps(1)
    assert [marks[:3] for marks in found] == [found[0][:3]] * 3
    assert len({tuple(marks) for marks in found}) == 3


def test_the_first_noise_on_a_gpu_follows_the_labels_also_where_norms_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """A linear model that begins with zeros: every label has a gradient of the same length."""
    bound: list[list[Tensor]] = []
    bound_to = Mechanism._bound_to

    def watched(self: Mechanism, lot: ClippedSum) -> list[Tensor]:
        elsewhere: Any = {"weight": SimpleNamespace(is_cpu=False)}
        with monkeypatch.context() as patch:
            patch.setattr(self, "_parameters", elsewhere)
            bound.append(bound_to(self, lot))
        return bound[-1]

    monkeypatch.setattr(Mechanism, "_bound_to", watched)
    other = data()
    other.tensors[1].copy_((other.tensors[1] + 1) % 3)
    for dataset in (data(), other):
        module = torch.nn.Linear(data().tensors[0][0].numel(), 3)
        torch.nn.init.zeros_(module.weight)
        torch.nn.init.zeros_(module.bias)
        flat = TensorDataset(dataset.tensors[0].flatten(1), dataset.tensors[1])
        training(module, dataset=flat, guidance="isotropic", seed=21).steps(release._FIRST + 1)
    half = release._FIRST + 1
    first, again, later = bound[0], bound[half], bound[half - 1]
    assert torch.equal(first[1], again[1]), "the marks are the same"
    assert not all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert len(later) == 2, "later on the marks stand for the sum"


def test_sums_on_a_gpu_are_told_apart_by_their_rows_along_a_line() -> None:
    """Their lengths may be the same: rows or columns exchanged, signs turned, one row turned."""
    total = torch.randn(3, 4, 2, 2, generator=torch.Generator().manual_seed(0))
    turned = total.clone()
    turned[1] *= -1
    others = [total[[1, 2, 0]], total[:, [3, 0, 1, 2]], total.transpose(2, 3), -total, turned]
    seen = [transfer.along_a_line(each) for each in (total, *others)]
    assert all(each.shape == (3,) for each in seen)
    assert not any(torch.allclose(seen[0], each, rtol=1e-3, atol=1e-3) for each in seen[1:])
    assert torch.equal(transfer.mark(total[:, 0, 0, 0]), total[:, 0, 0, 0])


def test_one_key_is_warned_of_once_however_many_runs_share_it(caplog: pytest.LogCaptureFixture) -> None:
    losses = [F.cross_entropy, against, doubled, against]
    with caplog.at_level(logging.WARNING, logger="dphero"):
        runs = [training(seed=17) for _ in losses]
        for run, loss in zip(runs, losses, strict=True):
            run.steps(2, loss)
    assert sum("made in this process already" in record.getMessage() for record in caplog.records) == 1
    assert all("used the same key" in run.engine.statement(1e-5).text for run in runs[1:])  # each statement says it


def test_a_run_that_is_repeated_is_the_same_and_is_not_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="dphero"):
        first, second = training(seed=12), training(seed=12)
        assert all(same(a, b) for a, b in zip(first.steps(3), second.steps(3), strict=True))
    assert not caplog.records
    assert "another run" not in second.engine.statement(1e-5).text.lower()


def test_the_statement_says_that_a_key_was_shared() -> None:
    training(seed=13).steps(1)
    second = training(seed=13)
    second.steps(1, against)
    assert "Another run of the same process used the same key" in second.engine.statement(1e-5).text


def test_noise_is_bound_to_values_types_and_shapes() -> None:
    def drawn(*values: Tensor, release: int = 0) -> tuple[float, ...]:
        noise = torch.zeros(8)
        FastNoise(seed=14).fill([noise], 1.0, release, bound_to=values)
        return tuple(noise.tolist())

    ones = torch.ones(4)
    bits = torch.ones(4).view(torch.uint8).clone().view(torch.float32)
    assert drawn(ones) == drawn(bits) == drawn(torch.ones(4, 2)[:, 0])
    changed = ones.clone()
    changed[3] = torch.nextafter(ones[3], torch.tensor(2.0))  # one bit
    others = [
        (changed,), (-ones,), (ones, ones), (ones.view(2, 2),), (ones.double(),), (ones[:3],), (), (ones.bfloat16(),)
    ]  # fmt: skip
    found = {drawn(ones), drawn(ones, release=1), *(drawn(*other) for other in others)}
    assert len(found) == 2 + len(others)


def test_a_state_of_an_earlier_stream_goes_on_with_new_noise(caplog: pytest.LogCaptureFixture) -> None:
    """Noise then was another function of the key: none of it comes again, and the run is charged as before."""
    state = {**FastNoise(seed=15).state_dict(), "last_release": 4, "binds": True}
    del state["stream"]
    source = FastNoise(seed=16)
    with caplog.at_level(logging.INFO, logger="dphero"):
        source.load_state_dict(state)
    assert "goes on with new noise" in caplog.text and source.last_release == 4
    with pytest.raises(RuntimeError, match="already served"):
        source.fill([torch.zeros(8)], 1.0, 4)
    source.fill([torch.zeros(8)], 1.0, 5)


def test_a_state_of_an_earlier_stream_on_cuda_says_so_where_noise_is_new(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """That is, for more numbers than one piece; and never on the CPU, or for a state of this version."""
    monkeypatch.setattr(fast, "_PIECE", 100)
    cpu = torch.device("cpu")  # which stands in for a GPU

    def said(state: dict[str, Any], size: int, *, on_cuda: bool = True) -> int:
        source = FastNoise(seed=16)
        caplog.clear()
        with caplog.at_level(logging.INFO, logger="dphero"):
            source.load_state_dict(state)
            for _ in range(2):
                target = Target(torch.zeros(size), 1.0)
                source._draw_on_cuda([target], cpu, b"key") if on_cuda else source._draw([target], 5)
        return caplog.text.count("goes on with new noise")

    now = {**FastNoise(seed=15).state_dict(), "last_release": 4}
    earlier = {name: value for name, value in now.items() if name != "cuda_stream"}
    assert said(earlier, 101) == 1
    assert said(earlier, 100) == said(now, 101) == said(earlier, 101, on_cuda=False) == 0
