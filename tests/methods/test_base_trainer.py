"""Trainers with steps of their own go on as they were begun, or say what has changed."""

import pytest
from torch import nn

from dphero.methods import make
from tests.methods.digits_task import make_task

METHODS = ["ipa-rf", "label-dp", "sas-dp", "dp-mp", "sgd"]


def begun(method, records=200, hidden=10, **settings):
    model = nn.Sequential(nn.Linear(64, hidden), nn.Tanh(), nn.Linear(hidden, 10))
    priced = {} if method == "sgd" else {"epsilon": 3.0}
    chosen = {"method": method, "lot": 50, "epochs": 2.0, "momentum": 0.0, **priced, **settings}
    return make(method).start(make_task(records, model, **chosen))


@pytest.fixture(scope="module", params=METHODS)
def saved(request, tmp_path_factory):
    """A method's name, and its checkpoint after two steps."""
    path = tmp_path_factory.mktemp("own") / "checkpoint.pt"
    trainer = begun(request.param)
    for _ in range(2):
        trainer.advance()
    trainer.save(path, {})
    return request.param, path


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"epsilon": 20.0}, r"made with epsilon .*, and now it is 20\.0: a run goes on as it was begun"),
        ({"epochs": 4.0}, r"made with epochs 2\.0, and now it is 4\.0"),
        ({"clip": 5.0}, r"made with clip 0\.5, and now it is 5\.0"),
        ({"lr": 0.1}, r"made with lr 0\.5, and now it is 0\.1"),
        ({"seed": 12345}, "made with another seed: a run goes on as it was begun"),
        ({"records": 150}, "made with 200 training examples, and now there are 150"),
        ({"records": 250}, "made with 200 training examples, and now there are 250"),
        ({"hidden": 12}, "is of another network"),
    ],
    ids=["epsilon", "epochs", "clip", "lr", "seed", "fewer", "more", "network"],
)
def test_what_was_changed_in_between_is_said_and_nothing_is_released(saved, settings, words):
    method, path = saved
    if method == "sgd" and "epsilon" in settings:
        pytest.skip("sgd takes no epsilon")
    trainer = begun(method, **settings)
    with pytest.raises(ValueError, match=words):
        trainer.load(path)
    assert trainer.step == 0


def test_the_same_run_goes_on_and_so_does_one_of_an_older_version(saved):
    method, path = saved
    trainer = begun(method, device="cpu", physical_batch="auto")  # changes no result
    trainer.load(path)
    assert trainer.step == 2
    state = {name: value for name, value in trainer.state().items() if name not in ("recipe", "records")}
    older = begun(method, epochs=4.0)
    older.restore(state)
    assert older.step == 2


def test_options_are_the_same_in_a_list_and_in_a_tuple():
    first = make("sgd").start(make_task(200, method="sgd", options={"some": (1, 2)}))
    make("sgd").start(make_task(200, method="sgd", options={"some": [1, 2]})).restore(first.state())


def test_ordinary_training_cannot_keep_an_epsilon():
    with pytest.raises(
        ValueError, match="method 'sgd' protects nothing and cannot keep epsilon 3: leave --epsilon out"
    ):
        begun("sgd", epsilon=3.0)
