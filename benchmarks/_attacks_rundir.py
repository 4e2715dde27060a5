"""Attacks by the files of a run: a damaged ledger, a model whose seed is guessed, a directory from a stranger."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import chdir, contextmanager
from pathlib import Path
from unittest.mock import patch

import numpy as np
from _attack import Attack, Figures, refused

from dphero.accounting import price
from dphero.experiments import RunDirectory, resolve, train
from dphero.experiments.runs import publishing, rundir
from dphero.experiments.runs.prediction import Predictor
from dphero.methods import recipe as recipes

SETTINGS = {"data": "digits", "noise_multiplier": 3.0, "epochs": 1, "dataset_size": 1437}


@contextmanager
def trained(**settings: object) -> Iterator[RunDirectory]:
    """A finished run in a folder that is removed afterwards, which is the working directory meanwhile."""
    with tempfile.TemporaryDirectory() as folder, chdir(folder):
        directory = RunDirectory.create(Path(folder) / "run", resolve({**SETTINGS, **settings}))
        train(directory)
        yield directory


def flipped_ledger() -> Figures:
    """Flip one bit of the ledger's noise multiplier, 3.0 to 7.0, and price it."""
    with trained() as directory:
        path = directory.path / "ledger.json"
        path.write_text(path.read_text().replace('"noise_multiplier": 3.0', '"noise_multiplier": 7.0'))
        result = directory.result
        assert result is not None
        return {"true ε": result["epsilon"], "ε of the ledger": price(directory.ledger, result["delta"]).epsilon}


TRAIN = """
import sys
from dataclasses import replace
from dphero import data as datasets
from dphero.data import Split
from dphero.experiments import RunDirectory, resolve, train
folder, inside, *seeds = sys.argv[1:]
data = datasets.load("digits")
if inside == "without":
    data = replace(data, train=Split(data.train.images[1:], data.train.labels[1:]))
for seed in seeds:
    settings = {"data": "digits", "noise_multiplier": 3.0, "epochs": 1, "dataset_size": 1437, "seed": int(seed)}
    train(RunDirectory.create(f"{folder}/{inside}-{seed}", resolve(settings)), data=data)
"""


def guessed_seed() -> Figures:
    """Publish a model of a small seed; an attacker who knows all records but one tries seeds until weights agree."""
    with tempfile.TemporaryDirectory() as folder:
        for where, inside, *seeds in (("victim", "with", 3), ("victim", "without", 3), ("guess", "with", *range(5))):
            os.makedirs(f"{folder}/{where}", exist_ok=True)
            words = [f"{folder}/{where}", inside, *map(str, seeds)]
            subprocess.run([sys.executable, "-c", TRAIN, *words], check=True)  # each knows nothing of the others
        guesses = {path.read_bytes() for path in Path(folder, "guess").glob("*/model.safetensors")}
        right = 0
        for inside in ("with", "without"):
            publishing.publish(f"{folder}/victim/{inside}-3", f"{folder}/{inside}")
            released = Path(folder, inside, "model.safetensors").read_bytes()
            right += (released in guesses) == (inside == "with")
        result = RunDirectory.open(f"{folder}/victim/with-3").result
        assert result is not None
        return {"claimed ε": result["epsilon"], "membership told rightly": f"{right} of 2", "seeds tried": len(guesses)}


def strangers_code() -> Figures:
    """Predict with a run from a stranger, whose recipe names a module that lies beside it."""
    code = "from pathlib import Path\nPath('owned').touch()\nfrom torch import nn\n"
    code += "def net(shape, classes):\n    return nn.Sequential(nn.Flatten(), nn.Linear(64, classes))\n"
    with tempfile.TemporaryDirectory() as folder, chdir(folder):
        Path("strangers_net.py").write_text(code)
        sys.modules.pop("strangers_net", None)
        directory = RunDirectory.create("run", resolve({**SETTINGS, "model": "strangers_net:net"}))
        train(directory)
        del sys.modules["strangers_net"]
        os.unlink("owned")
        np.save("x.npy", np.zeros((1, 8, 8), np.float32))
        Predictor("run").predict("x.npy")
        return {"code of the stranger ran": Path("owned").exists()}


def without_digests() -> Figures:
    """The ledger as it was read: without digests."""
    with patch.object(rundir.files, "digests", lambda path: {}):
        return flipped_ledger()


def without_refusal() -> Figures:
    """Publishing as it was: whatever the seed."""
    with patch.object(publishing, "_GUESSABLE", 0):
        return guessed_seed()


def without_trust() -> Figures:
    """Code as it was imported: whoever named it."""
    with patch.object(recipes, "require_trust", lambda *arguments, **options: None):
        return strangers_code()


ATTACKS = [
    Attack(
        "damaged ledger",
        "Has one bit flipped in the ledger of a finished run, and prices it anew.",
        without_digests,
        lambda: refused(flipped_ledger),
    ),
    Attack(
        "guessed seed",
        "Publishes a model that was trained with --seed 3; the attacker tries seeds, and compares weights.",
        without_refusal,
        lambda: refused(guessed_seed),
    ),
    Attack(
        "stranger's code",
        "Predicts with a run directory from a stranger, whose recipe names a network as module:function.",
        without_trust,
        lambda: refused(strangers_code),
    ),
]
