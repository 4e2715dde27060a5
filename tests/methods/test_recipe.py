"""Recipes: merged in order, written and read as TOML, and refused with a hint."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dphero.methods import recipe as recipes
from dphero.methods.recipe import Recipe

BASE = {"data": "digits", "model": "mlp"}


def test_later_settings_lie_on_top_and_options_are_merged_by_name():
    recipe = recipes.merge(
        {**BASE, "lr": 1, "options": {"a": 1, "b": 2}}, {"lr": 2}, {"options": {"b": 3}, "method": "sgd"}
    )
    assert (recipe.lr, recipe.options, recipe.method) == (2.0, {"a": 1, "b": 3}, "sgd")


def test_a_target_replaces_noise_from_below_and_the_other_way():
    assert recipes.merge({**BASE, "noise_multiplier": 1.0}, {"epsilon": 3}).noise_multiplier is None
    assert recipes.merge({**BASE, "epsilon": 3}, {"noise_multiplier": 1.0}).epsilon is None
    with pytest.raises(ValueError, match="both given"):
        recipes.merge(BASE, {"epsilon": 3, "noise_multiplier": 1.0})


numbers = st.floats(1e-6, 1e6)


@given(
    epsilon=st.none() | numbers,
    lot=st.integers(1, 10**6),
    delta=st.floats(1e-12, 0.5),
    seed=st.none() | st.integers(0, 2**60),
    size=st.sampled_from([None, "public", 1437]),
    secure=st.booleans(),
    cuda_graphs=st.none() | st.booleans(),
    options=st.dictionaries(
        st.from_regex(r"[a-z_]{1,8}", fullmatch=True),
        numbers | st.integers(-5, 5) | st.booleans() | st.text("aü\"\\'#", max_size=5) | st.lists(numbers, max_size=3),
        max_size=3,
    ),
)
def test_toml_round_trip(tmp_path_factory, epsilon, lot, delta, seed, size, secure, cuda_graphs, options):
    recipe = Recipe(
        data="a/ü b.npz",
        model='m"x',
        epsilon=epsilon,
        lot=lot,
        delta=delta,
        seed=seed,
        dataset_size=size,
        secure=secure,
        cuda_graphs=cuda_graphs,
        options=options,
    )
    path = tmp_path_factory.mktemp("recipe") / "recipe.toml"
    path.write_text(recipe.to_toml(), encoding="utf-8")
    assert recipes.merge(recipes.load(path)) == recipe


def test_a_physical_batch_is_a_number_or_left_to_memory():
    for value in (64, "auto", None):
        recipe = recipes.merge(BASE, {"physical_batch": value})
        assert recipe.physical_batch == value
        assert recipes.merge(recipes.parse(recipe.to_toml().encode(), "recipe.toml")) == recipe


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"epsilon": -1}, "epsilon"),
        ({"epsilon": float("inf")}, "epsilon"),
        ({"delta": 1.0}, "delta"),
        ({"lot": 0}, "lot"),
        ({"lot": 1.5}, "lot must be a whole number"),
        ({"lr": "fast"}, "lr must be a finite number"),
        ({"lr": True}, "lr must be a finite number"),
        ({"momentum": 1.0}, "momentum"),
        ({"optimizer": "sdg"}, "optimizer"),
        ({"secure": "yes"}, "secure must be true or false"),
        ({"cuda_graphs": 1}, "cuda_graphs must be true or false"),
        ({"dataset_size": 0}, "dataset_size"),
        ({"dataset_size": "secret"}, "dataset_size"),
        ({"epsilons": 3}, "did you mean 'epsilon'"),
        ({"physical_batch": 0}, "physical_batch"),
        ({"physical_batch": "all"}, "physical_batch must be a whole number of at least 1, or .auto., got 'all'"),
        ({"seed": "x"}, "seed must be a whole number"),
    ],
)
def test_bad_settings_are_named(settings, words):
    with pytest.raises(ValueError, match=words):
        recipes.merge(BASE, settings)


def test_data_and_model_are_needed():
    with pytest.raises(ValueError, match="which model"):
        recipes.merge({"data": "digits"})


def test_a_file_that_is_not_toml(tmp_path):
    path = tmp_path / "recipe.toml"
    path.write_text("epsilon is 3")
    with pytest.raises(ValueError, match="not a TOML file"):
        recipes.load(path)
    path.write_text("epsilom = 3")
    with pytest.raises(ValueError, match="did you mean 'epsilon'"):
        recipes.load(path)
