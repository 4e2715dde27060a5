"""The plan of a comparison: which runs there are, what each does, and what they are called."""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

from dphero import data as datasets
from dphero import models
from dphero._checks import closest
from dphero.accounting import calibrate_noise_multiplier
from dphero.data import Data
from dphero.experiments.comparison.plan import Planned
from dphero.experiments.defaults import resolve
from dphero.methods import METHODS, Task, make
from dphero.methods.recipe import Recipe

_OWN_OPTION = {"method": "--methods", "epsilon": "--epsilons", "seed": "--seeds"}
_PRIVATE_ONLY = ("noise_multiplier", "delta", "clip", "clipping", "guidance", "mechanism", "accountant", "secure")


def grid(
    *layers: Mapping[str, Any],
    methods: Sequence[str],
    seeds: Sequence[int],
    epsilons: Sequence[float] = (),
    vary: Mapping[str, Sequence[Any]] | None = None,
) -> list[Planned]:
    """Return all combinations of methods, ε, seeds and varied settings.

    A method without privacy runs once per seed. A method that cannot meet a target ε gets the noise multiplier that
    dp-sgd needs for it (:func:`matched_noise`). An option that some methods do not have is varied for the others alone.

    Args:
        layers: Recipe settings for all runs, later ones on top.
        methods: Names of methods.
        seeds: One run each.
        epsilons: Privacy losses; without any, ``layers`` or ``vary`` give ε or a noise multiplier.
        vary: Values by the name of a recipe field, or of a method's option as ``options.NAME``.

    Raises:
        ValueError: If a method, field or option is unknown, a value is wrong, or a private method has no target.
    """
    vary = dict(vary or {})
    base: dict[str, Any] = {}
    for layer in layers:
        base |= {**layer, "options": {**base.get("options", {}), **layer.get("options", {})}}
    _require_some(methods=methods, seeds=seeds, **{f"values of {name}": values for name, values in vary.items()})
    for name in methods:
        make(name)
    _require_known(base, vary, methods)
    found: dict[str, Planned] = {}
    load = cache(datasets.load)
    for method in dict.fromkeys(methods):
        for epsilon in dict.fromkeys(epsilons) or [None]:
            for setting in _settings(method, vary):
                for seed in dict.fromkeys(seeds):
                    planned = _planned(base, method, epsilon, setting, seed, vary, load)
                    found.setdefault(planned.recipe.to_toml(), planned)
    return _named_apart(list(found.values()))


def _settings(method: str, vary: Mapping[str, Sequence[Any]]) -> Iterator[dict[str, Any]]:
    """Yield each combination of varied values, less those that mean nothing to the method."""
    names = [name for name in vary if _concerns(method, name)]
    for values in itertools.product(*(vary[name] for name in names)):
        yield dict(zip(names, values, strict=True))


def _concerns(method: str, name: str) -> bool:
    if name.startswith("options."):
        return name.removeprefix("options.") in _options(method)
    return _is_private(method) or name not in _PRIVATE_ONLY


def _planned(
    base: Mapping[str, Any],
    method: str,
    epsilon: float | None,
    setting: Mapping[str, Any],
    seed: int,
    vary: Mapping[str, Sequence[Any]],
    load: Callable[[str, int | None], Data],
) -> Planned:
    options = {name: value for name, value in base.get("options", {}).items() if name in _options(method)}
    settings: dict[str, Any] = {}
    for name, value in setting.items():
        if name.startswith("options."):
            options[name.removeprefix("options.")] = value
        else:
            settings[name] = value
    if epsilon is not None:
        settings["epsilon"] = epsilon
    common = {name: value for name, value in base.items() if name != "options"}
    recipe = resolve(common, {**settings, "method": method, "seed": seed, "options": options})
    target: float | None = None
    if not _is_private(method):
        recipe = recipe.with_(epsilon=None, noise_multiplier=None)
    elif recipe.epsilon is None and recipe.noise_multiplier is None:
        raise ValueError(f"method {method!r} is private: give --epsilons 1,3, or --vary noise_multiplier=1,2")
    elif not METHODS[method].card.sound and recipe.epsilon is not None:
        target = recipe.epsilon
        recipe = recipe.with_(epsilon=None, noise_multiplier=matched_noise(recipe, load(recipe.data, recipe.channels)))
    varied = {name: value for name, value in setting.items() if len(vary[name]) > 1}
    return Planned(_name(method, target or recipe.epsilon, varied, seed), recipe, target, varied)


def matched_noise(recipe: Recipe, data: Data) -> float:
    """Return the noise multiplier with which dp-sgd, sampling and stepping as the recipe does, meets its ε."""
    assert recipe.epsilon is not None
    task = _outline(recipe, data)
    return _calibrated(recipe.epsilon, recipe.delta, task.sample_rate, task.steps, recipe.accountant)


_calibrated = cache(calibrate_noise_multiplier)  # seconds each, and the same for every seed


def check(plan: Sequence[Planned]) -> None:
    """Find out before any training whether data and models exist, and whether sampling rates can be told.

    Raises:
        ValueError: If a run could not begin.
        ImportError: If a data set needs a library that is missing.
    """
    load = cache(datasets.load)
    built: set[tuple[str, str]] = set()
    for planned in plan:
        recipe = planned.recipe
        data = load(recipe.data, recipe.channels)
        if (recipe.data, recipe.model) not in built:
            models.build(recipe.model, tuple(data.train.images.shape[1:]), len(data.classes))
            built.add((recipe.data, recipe.model))
        if _is_private(recipe.method):
            try:
                _ = _outline(recipe, data).sample_rate
            except ValueError as error:
                raise ValueError(f"run {planned.name}: {error}") from error


def _outline(recipe: Recipe, data: Data) -> Task:
    """The task as far as sampling goes: the number of records, without a model."""
    if data.public_size and recipe.dataset_size is None:
        recipe = recipe.with_(dataset_size="public")
    nothing = nn.Identity()
    return Task(recipe, TensorDataset(data.train.labels), nothing, nothing, torch.empty(0), len(data.classes))


# -- names ----------------------------------------------------------------------------------------------


def _name(method: str, epsilon: float | None, setting: Mapping[str, Any], seed: int) -> str:
    parts = [method]
    if epsilon is not None:
        parts.append(f"eps{epsilon:g}")
    for name, value in setting.items():
        text = f"{value:g}" if isinstance(value, float) else str(value)
        parts.append(f"{name.removeprefix('options.')}{text}")
    return re.sub(r"[^\w.+-]+", "-", "_".join([*parts, f"seed{seed}"]))


def _named_apart(plan: Sequence[Planned]) -> list[Planned]:
    """Give later runs of the same name a number."""
    taken: set[str] = set()
    found = []
    for planned in plan:
        numbered = itertools.chain([planned.name], (f"{planned.name}-{number}" for number in itertools.count(2)))
        name = next(name for name in numbered if name.lower() not in taken)  # some file systems ignore case
        taken.add(name.lower())
        found.append(Planned(name, planned.recipe, planned.target, planned.setting))
    return found


# -- what users write ------------------------------------------------------------------------------------


def value_of(text: str) -> Any:
    """Read a number, ``true``, ``false``, or text."""
    words = {"true": True, "false": False}
    if text in words:
        return words[text]
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def parse_variations(given: Sequence[str]) -> dict[str, list[Any]]:
    """Read ``NAME=VALUE,VALUE`` each; values are numbers, text, true and false.

    Raises:
        ValueError: If one is written differently, a value is none of these, or a name comes twice.
    """
    found: dict[str, list[Any]] = {}
    for text in given:
        name, equals, values = (part.strip() for part in text.partition("="))
        if not name or not equals or not values.strip(","):
            raise ValueError(f"--vary takes NAME=VALUE,VALUE, got {text!r}")
        if name in found:
            raise ValueError(f"--vary {name} is given twice: write all its values in one, separated by commas")
        read = [value_of(value.strip()) for value in values.split(",") if value.strip()]
        for value in read:
            if not isinstance(value, bool | int | float | str):
                raise ValueError(f"--vary {name} takes numbers, text, true and false, got {value!r}")
        found[name] = list(dict.fromkeys(read))
    return found


def _options(method: str) -> list[str]:
    return [each.name for each in fields(METHODS[method])]  # type: ignore[arg-type]


def _is_private(method: str) -> bool:
    return METHODS[method].card.protects != "nothing"


def _require_some(**lists: Sequence[Any]) -> None:
    for name, values in lists.items():
        if not values:
            raise ValueError(f"a comparison needs at least one of: {name}")


def _require_known(base: Mapping[str, Any], vary: Mapping[str, Any], methods: Sequence[str]) -> None:
    """Refuse names that no recipe has, and options that none of the methods has."""
    known = [each.name for each in fields(Recipe) if each.name not in (*_OWN_OPTION, "options")]
    options = sorted({f"options.{option}" for method in methods for option in _options(method)})
    wanted = {**dict.fromkeys(vary, "--vary"), **{f"options.{name}": "the recipe" for name in base.get("options", {})}}
    for name, where in wanted.items():
        if name in _OWN_OPTION:
            raise ValueError(f"--vary {name}: give several with {_OWN_OPTION[name]} instead")
        if name not in known and name not in options:
            meant = f"options.{name}" if f"options.{name}" in options else name
            hint = closest(meant, [*known, *options], f"there are {', '.join([*known, *options])}")
            raise ValueError(f"{where} names {name!r}, which these methods ({', '.join(methods)}) do not have; {hint}")
