"""Settings that work, for each data set; methods and the user's own settings are laid over them.

They were chosen on the public data sets by accuracy on their test images, at ε = 3. For private data such a search has
to be paid for.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dphero.data.loading import located
from dphero.methods import METHODS, make
from dphero.methods import recipe as recipes
from dphero.methods.recipe import Recipe

_ANY = {"model": "mlp", "lot": 256, "epochs": 20, "lr": 0.5, "momentum": 0.9, "clip": 0.5, "delta": 1e-5}

DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "digits": {
        "model": "digits",
        "lot": 512,
        "epochs": 40,
        "lr": 1.0,
        "clip": 0.2,
        "delta": 1e-4,
        "dataset_size": "public",
    },
    "mnist": {"model": "tanh-cnn", "lot": 2048, "epochs": 20, "lr": 4.0, "clip": 0.1, "dataset_size": "public"},
    "fashion-mnist": {"model": "tanh-cnn", "lot": 1024, "epochs": 30, "lr": 2.0, "clip": 0.1, "dataset_size": "public"},
    "cifar10": {"model": "scatter-cnn", "lot": 8192, "epochs": 60, "lr": 4.0, "clip": 0.1, "dataset_size": "public"},
}
"""By data set. Data of the user's own starts from a small network and modest settings."""


def resolve(*layers: Mapping[str, Any]) -> Recipe:
    """Return the recipe of a run: the data set's defaults, the method's, then the given settings, later ones on top.

    Data in a file or folder is then named by its whole path.

    Raises:
        ValueError: If no data set is named, the method is unknown, or a setting is wrong.
    """
    given: dict[str, Any] = {}
    for layer in layers:
        given |= layer
    data, method = given.get("data"), given.get("method", "dp-hero")
    if not isinstance(data, str):
        raise ValueError("which data? Give --data NAME (see: dphero data list), a folder, an .npz or package:function")
    make(str(method), {})  # unknown methods end here
    suggested = METHODS[str(method)].suggested(data)
    recipe = recipes.merge({**_ANY, **DEFAULTS.get(data, {})}, suggested, *layers)
    make(recipe.method, recipe.options)
    return anchored(recipe)


def anchored(recipe: Recipe) -> Recipe:
    """Return the recipe with data in a file or folder named by its whole path, which means the same everywhere."""
    return recipe.with_(data=located(recipe.data))
