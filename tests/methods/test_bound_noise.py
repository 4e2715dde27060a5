"""With one seed, runs of other settings share no noise: else their sums could be solved for."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dphero.methods import Trainer
from dphero.methods.own_mechanism.dp_ged import student_t
from tests.methods.digits_task import TRAINING, start


def released(trainer: Trainer) -> torch.Tensor:
    """The first noisy sum, as it was divided by the lot."""
    trainer.advance()
    return torch.cat([parameter.grad.flatten() for parameter in trainer.model.parameters()]).double()


def test_another_lot_and_noise_in_proportion_tell_nothing() -> None:
    """Two runs over everybody, whose noise would be the same once it is divided by the lot, and the sums not."""
    settings: dict[str, Any] = {"options": {"full_norm_share": 1.0}, "epochs": 1}
    once = start("ipa-rf", lot=TRAINING, noise_multiplier=50.0, **settings)
    twice = start("ipa-rf", lot=2 * TRAINING, noise_multiplier=100.0, dataset_size=2 * TRAINING, **settings)
    solved = 2 * TRAINING * (released(once) - released(twice))  # the sum, if the noise is the same
    assert solved.std() > 10, "clipped sums are far smaller than noise of deviation 25 and more"


def test_student_t_noise_of_other_degrees_is_other_noise() -> None:
    drawn = []
    for degrees in (5, 9):
        trainer = start("dp-ged", options={"degrees": degrees}, noise_multiplier=2.0)
        noise = student_t(trainer, degrees, torch.zeros(3))
        drawn.append(torch.cat([part.flatten() for part in noise.values()]))
    assert torch.corrcoef(torch.stack(drawn))[0, 1].abs() < 0.2


@pytest.mark.parametrize("changed", [{"decrease": 0.2}, {"loss_clip": 2.0}, {"shrink": 0.4}, {"largest": 2.0}])
def test_a_search_of_other_settings_has_other_noise(changed: dict[str, float], monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = []
    for options in ({}, changed):
        trainer = start("sas-dp", options={"trials": 3, **options}, noise_multiplier=2.0, momentum=0.0)
        found: list[list[float]] = []
        original = trainer._laplace
        monkeypatch.setattr(trainer, "_laplace", lambda *a, f=found, o=original: f.append(o(*a)) or f[-1])
        trainer.advance()
        drawn.append(found[0])
    assert not set(drawn[0]) & set(drawn[1])
