"""Runs to report about: a small real comparison, trained once."""

import pytest

from dphero.experiments.comparison.plan import Planned
from dphero.experiments.comparison.sweep import sweep
from dphero.experiments.comparison.worker import train_run
from dphero.experiments.defaults import resolve


class Here:
    """A pool without processes."""

    def __init__(self, state, size):
        self.state = state

    def run(self, asked_to_stop):
        while self.state.waiting:
            planned = self.state.begin()
            self.state.end(planned, train_run(str(self.state.path(planned)), planned.recipe.as_dict()))


@pytest.fixture(scope="session")
def comparison(tmp_path_factory):
    """Digits by three methods, two seeds each; nothing in it may be changed."""
    pytest.importorskip("sklearn")
    pytest.importorskip("safetensors")
    from dphero.experiments.comparison import sweep as module

    plan = []
    for method, epsilon in (("sgd", None), ("dp-sgd", 3.0), ("dp-hero", 8.0)):
        for seed in (0, 1):
            given = {"data": "digits", "method": method, "epsilon": epsilon, "seed": seed, "epochs": 2.0}
            recipe = resolve({name: value for name, value in given.items() if value is not None})
            plan.append(Planned(f"{method}_seed{seed}", recipe))
    place = tmp_path_factory.mktemp("comparison") / "digits"
    before = module.Pool
    module.Pool = Here
    try:
        found = sweep(plan, place, workers=1)
    finally:
        module.Pool = before
    assert all(outcome.result is not None for outcome in found), [outcome.error for outcome in found]
    return place
