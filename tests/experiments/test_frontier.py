"""Named recipes can be trained as they are, and the frontier's table tells figures that have a log."""

from pathlib import Path

import pytest

from dphero.experiments import frontier, resolve
from dphero.experiments.defaults import METHODS
from dphero.methods import make


@pytest.mark.parametrize("name", frontier.NAMES)
def test_a_recipe_says_itself_what_decides(name: str) -> None:
    """Defaults of the method for that data must not change a recipe: its own options are all that it has."""
    settings = frontier.named(name)
    recipe = resolve(settings)
    suggested = METHODS[recipe.method].suggested(recipe.data)
    assert set(suggested.get("options", {})) <= set(settings["options"])
    assert set(suggested) <= set(settings)
    make(recipe.method, recipe.options)
    assert frontier.described(name)


@pytest.mark.parametrize("name", [name for name in frontier.NAMES if not name.startswith("cifar10-prior")])
def test_a_recipe_fits_its_network(name: str) -> None:
    """The network of each recipe, made for the shape of its data, takes the recipe's normalisation."""
    from dphero import models

    recipe = resolve(frontier.named(name))
    shape = (3, 8, 8) if recipe.data == "cifar10" else (1, 8, 8)
    network = make(recipe.method, recipe.options).network(models.build(recipe.model, shape, 10))
    assert network.features.training is False


def test_an_unknown_recipe_is_named_with_those_there_are() -> None:
    with pytest.raises(ValueError, match="mnist-epsilon-3"):
        frontier.named("mnist-epsilon-9")


def test_figures_name_recipes_and_logs_that_exist() -> None:
    root = Path(__file__).parents[2]
    for figure in frontier.figures():
        if figure.ours is not None:
            assert (root / figure.ours.log).exists()
            assert figure.ours.recipe is None or figure.ours.recipe in frontier.NAMES
        else:
            assert figure.why


def test_a_file_of_that_name_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from dphero.cli.runs.train import _settings_of

    monkeypatch.chdir(tmp_path)
    Path("mine.toml").write_text('data = "digits"\n')
    assert _settings_of(Path("mine.toml")) == {"data": "digits"}
    assert _settings_of(Path("mnist-epsilon-1"))["data"] == "mnist"
    with pytest.raises(FileNotFoundError):
        _settings_of(Path("missing.toml"))
