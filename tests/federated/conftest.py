"""A client small enough to train in tests, on handwritten digits."""

from dataclasses import replace

import pytest

from dphero import data as datasets
from dphero import experiments
from dphero.data import Split
from dphero.experiments.runs.preparation import prepare
from dphero.federated.client.training_round import Client
from dphero.federated.settings import Federation
from tests.federated.small import SETTINGS


@pytest.fixture(scope="session")
def digits():
    return datasets.load("digits")


@pytest.fixture
def make_client(digits, tmp_path):
    """Return a client with the first ``records`` digits; one of the same name goes on where the other stopped."""

    def made(name="0", *, records=300, federation=None, **settings):
        recipe = experiments.resolve(SETTINGS, {"epsilon": 8.0, "seed": 1}, settings)
        train = Split(digits.train.images[:records], digits.train.labels[:records])
        federation = federation or Federation(clients=4, sampled=2, rounds=6)
        return Client(name, recipe, federation, replace(digits, train=train), tmp_path / "clients" / name)

    return made


@pytest.fixture
def weights(digits):
    """The public initial weights."""
    task, _ = prepare(experiments.resolve(SETTINGS, {"epsilon": 8.0, "seed": 1}), digits)
    return {name: value.detach().clone() for name, value in task.module.state_dict().items()}
