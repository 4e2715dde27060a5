from __future__ import annotations

from pathlib import Path

import pytest

from dphero import data, experiments


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Short trainings on the digits: two seeds without privacy, one private that kept nothing, one unsound."""
    folder, digits = tmp_path_factory.mktemp("runs"), data.load("digits")
    for name, changes in {
        "sgd-1": {"method": "sgd", "seed": 1},
        "sgd-2": {"method": "sgd", "seed": 2},
        "dp-hero-1": {"method": "dp-hero", "seed": 1, "noise_multiplier": 1.0},
        "published-3": {"method": "dp-hero-published", "seed": 3, "noise_multiplier": 1.0},
        "bare": {"method": "dp-sgd", "seed": 4, "noise_multiplier": 1.0, "keep_epochs": []},
    }.items():
        settings = {"data": "digits", "lot": 256, "lr": 0.5, "clip": 0.5, "epochs": 2, "keep_epochs": [0, 1, 2]}
        recipe = experiments.resolve({**settings, "device": "cpu", **changes})
        experiments.train(experiments.RunDirectory.create(folder / name, recipe), data=digits)
    return folder
