"""A noise source of the user's own: named in the statement, and refused where its numbers give it away."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from dphero.noise import FastNoise, OwnNoise
from dphero.noise.source import OneTimeSource, Target
from tests.trainer import training


class Honest(OneTimeSource):
    seeded = False

    def _draw(self, targets: list[Target], release: int) -> None:
        generator = self.generator(release)
        for tensor, std, *_ in targets:
            tensor.copy_(torch.randn(tensor.shape, generator=generator) * std)

    def generator(self, release: int) -> torch.Generator:
        return torch.Generator().manual_seed(1000 + release)

    def _enter_new_process(self) -> None:
        raise NotImplementedError

    def state_dict(self) -> dict[str, Any]:
        return {"source": type(self).__name__, "last_release": self.last_release}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._last_release = self.read_last_release(state)


class Repeating(Honest):
    def generator(self, release: int) -> torch.Generator:
        return torch.Generator().manual_seed(7)


class Forgetful(Honest):
    def _draw(self, targets: list[Target], release: int) -> None:
        super()._draw(targets[1:], release)


class Weak(Honest):
    def _draw(self, targets: list[Target], release: int) -> None:
        super()._draw([target._replace(std=target.std * 0.9) for target in targets], release)


def draw(source: Any, release: int, size: int = 20_000) -> None:
    source.fill({"a": torch.empty(size), "b": torch.empty(3)}, 2.0, release)


def test_honest_noise_passes_and_the_statement_names_its_source() -> None:
    run = training(noise=Honest(), seed=None)
    run.steps(3)
    text = " ".join(run.engine.statement(1e-5).text.split())
    assert f"your own source {__name__}.Honest; its promise is not proven by dphero" in text


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (Repeating(), "noise of an earlier release"),
        (Forgetful(), "not written"),
        (Weak(), "0.[89].* times what was asked"),
    ],
)
def test_noise_that_breaks_the_promise_is_refused(source: Honest, words: str) -> None:
    own = OwnNoise(source)
    with pytest.raises(RuntimeError, match=rf"breaks its promise.*{words}"):
        for release in range(2):
            draw(own, release)


def test_nothing_is_released_under_the_same_noise_twice() -> None:
    run = training(noise=Repeating(), seed=None)
    run.steps(1)
    with pytest.raises(RuntimeError, match="noise of an earlier release"):
        run.steps(1)


def test_what_is_no_new_source_is_refused() -> None:
    used = Honest()
    draw(used, 0)
    for source, words in [
        (used, "served 1 releases"),
        (Honest, "contract"),
        (3, "contract"),
        (FastNoise(), "built in"),
    ]:
        with pytest.raises(ValueError, match=words):
            training(noise=source, seed=None)
    with pytest.raises(ValueError, match="neither secure=True nor a seed"):
        training(noise=Honest(), seed=1)


def test_only_the_same_kind_of_source_resumes_and_never_with_noise_of_before(tmp_path: Path) -> None:
    run = training(noise=Honest(), seed=None)
    run.steps(2)
    run.engine.save(tmp_path / "saved")
    for other in ({"noise": Repeating()}, {}):
        with pytest.raises(ValueError, match="Honest"):
            training(**other, seed=None).engine.load(tmp_path / "saved")
    for shift, refused in ((0, False), (-2, True)):  # -2: a generator that begins again
        source = Honest()
        source.generator = lambda release, shift=shift: torch.Generator().manual_seed(1000 + release + shift)  # type: ignore
        resumed = training(noise=source, seed=None)
        resumed.engine.load(tmp_path / "saved")
        if refused:
            with pytest.raises(RuntimeError, match="earlier release"):
                resumed.steps(1)
        else:
            resumed.steps(1)
