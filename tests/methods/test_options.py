"""A run that is resumed with other options of its method is refused: they decide what is released, and its price."""

from pathlib import Path
from typing import Any

import pytest

from dphero.methods import METHODS, Trainer, make
from tests.methods.digits_task import make_task

CHANGED: dict[str, list[dict[str, Any]]] = {
    "dp-ged": [{"degrees": 5}, {"unit": 0.5}, {"levels": 9}, {"denoise": "none"}],
    "dp-mp": [{"schedule": "step"}, {"per_tensor": True}, {"schedule": "validation"}, {"decay": 0.5}],
    "ipa-rf": [{"full_norm_share": 0.5}],
    "label-dp": [{"first_share": 0.2}, {"stages": 3}, {"stages": 1}, {"temperature": 1.0}, {"mixup": 4.0}],
    "sas-dp": [{"loss_clip": 30.0}, {"search_share": 0.5}, {"search_every": 2}],
}


def begun(method: str, options: dict[str, Any] | None = None, **settings: Any) -> Trainer:
    chosen = {"method": method, "lot": 50, "epochs": 2.0, "momentum": 0.0, "epsilon": 3.0, **settings}
    return make(method, options).start(make_task(200, **chosen))


def taken(trainer: Trainer, steps: int) -> Trainer:
    for _ in range(steps):
        trainer.advance()
    return trainer


@pytest.mark.parametrize("method", CHANGED)
def test_other_options_are_refused(method: str, tmp_path: Path) -> None:
    path = tmp_path / "checkpoint.pt"
    taken(begun(method), 2).save(path, {})
    for options in CHANGED[method]:
        trainer = begun(method, options)
        with pytest.raises(ValueError, match=f"made with options .*{next(iter(options))}"):
            trainer.load(path)
        assert trainer.step == 0 and not trainer.ledger.steps
    begun(method, {}).load(path)


@pytest.mark.parametrize("method", METHODS)
def test_a_settled_recipe_tells_all_options(method: str) -> None:
    recipe = make(method).settled(make_task(200, method=method)).recipe
    assert make(method, recipe.options) == make(method)


def without_recipe(trainer: Trainer) -> dict[str, Any]:
    """The state as older versions saved it."""
    return {name: value for name, value in trainer.state().items() if name != "recipe"}


def test_the_filter_that_was_fixed_before_the_first_release_is_the_one_that_holds() -> None:
    first, resumed = taken(begun("sas-dp", epsilon=8.0), 4), begun("sas-dp", epsilon=1.0)
    resumed.restore(without_recipe(first))
    assert resumed.price(1e-4) == first.price(1e-4) and resumed.price(1e-4).epsilon > 7.9
    assert resumed.statement(1e-4).price == first.statement(1e-4).price


def test_labels_are_not_randomised_in_two_splits() -> None:
    state = without_recipe(taken(begun("label-dp"), 2))
    for options in ({"first_share": 0.2}, {"stages": 1}):
        resumed = begun("label-dp", options)
        with pytest.raises(ValueError, match="resume with the same stages and first_share"):
            resumed.restore(state)
        assert resumed.step == 0 and (resumed.noisy < 0).all()
    begun("label-dp").restore(state)
