"""Agreement of heat maps between runs, beside what another seed alone changes, and beside random weights."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dphero.explain.heatmaps import grad_cam
from dphero.explain.images import Images
from dphero.explain.runs import LAST, ExplainedRun
from dphero.explain.scores import faithfulness, is_empty, same_class, spearman, top_overlap

RANDOM = "random weights"
"""The group of networks that were never trained."""
Key = tuple[str, float | str]
"""A run's name and an epoch."""

_SCORES: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {"spearman": spearman, "iou": top_overlap}  # of maps
_NAMES = (*_SCORES, "same_class")


@dataclass(frozen=True, eq=False)
class Views:
    """What networks see.

    Attributes:
        maps: Heat maps, N×H×W, by run and epoch.
        classes: The class that each network gives to each image, by run and epoch.
        facts: What is true of each set of maps.
    """

    maps: dict[Key, Tensor]
    classes: dict[Key, Tensor]
    facts: list[dict[str, Any]]


def views_of(
    runs: Sequence[ExplainedRun],
    layers: Mapping[str, str],
    epochs: Sequence[float],
    images: Images,
    targets: Tensor,
    note: Callable[[str, int, int], None] = lambda what, done, total: None,
) -> Views:
    """Return what all runs see at all epochs, and what two untrained networks see.

    Args:
        runs: What is explained.
        layers: The explained layer of each run, by its name.
        epochs: Besides the last.
        images: What is looked at.
        targets: The class to explain, for each image.
        note: Called before each set of maps, with what is done, how many are, and how many there will be.
    """
    found = Views({}, {}, [])
    total = sum(1 + sum(epoch in run.snapshots for epoch in epochs) for run in runs) + 2

    def look(key: Key, network: nn.Module, layer: str, accuracy: float | None) -> None:
        note("Looking", len(found.facts), total)
        maps = found.maps[key] = grad_cam(network, layer, images.pixels, targets)
        with torch.no_grad():
            found.classes[key] = network(images.pixels).argmax(1)
        faithful = _mean(faithfulness(network, images.pixels, targets, maps))
        right = None if images.labels is None else _mean((found.classes[key] == images.labels).double())
        empty = _mean(is_empty(maps).double())
        facts = {"right": right, "empty": empty, "faithfulness": faithful, "accuracy": accuracy}
        found.facts.append({"run": key[0], "epoch": key[1], **facts})

    for run in runs:
        kept: list[float | str] = [each for each in epochs if each in run.snapshots]
        for epoch in (*kept, LAST):
            look((run.name, epoch), run.network(epoch), layers[run.name], run.accuracy(epoch))
    for number in (1, 2):  # of the first run's kind
        network = runs[0].random_network(seed=2**63 + number)
        look((f"{RANDOM} {number}", LAST), network, layers[runs[0].name], None)
    return found


def agreements(runs: Sequence[ExplainedRun], views: Views) -> list[dict[str, Any]]:
    """Return, for each epoch and each two groups, how much the maps of their runs agree.

    A group with itself is the spread of its seeds. Every group is also compared with untrained networks, and these with
    each other: maps that agree no less with those say nothing about what was learned. Besides, each group is compared
    at each epoch with the reference at the end of its training (``"to": "last"``): maps of a network that has learned
    less differ from those of one that has learned more, without any privacy.
    """
    maps = views.maps
    seeds = {run.name: run.directory.recipe.seed for run in runs}
    groups: dict[str, list[str]] = {}
    for run in runs:
        groups.setdefault(run.group, []).append(run.name)
    groups[RANDOM] = sorted({name for name, _ in maps if name.startswith(RANDOM)})
    found = []
    epochs = sorted({epoch for _, epoch in maps if epoch != LAST}, key=float)
    for epoch in (*epochs, LAST):
        for first, second in itertools.combinations_with_replacement(groups, 2):
            pairs = list(_pairs(groups[first], groups[second], first == second))
            at = [((a, epoch), (b, LAST if second == RANDOM else epoch)) for a, b in pairs]
            if (first != RANDOM or epoch == LAST) and all(key in maps for pair in at for key in pair) and at:
                found.append({"epoch": epoch, "to": epoch, **_agreement(first, second, at, views, seeds)})
    reference = reference_group(runs)
    for epoch in epochs if reference is not None else ():
        for first in groups:
            pairs = [(a, b) for a in groups[first] for b in groups[reference or ""] if a != b]
            at = [((a, epoch), (b, LAST)) for a, b in pairs]
            if first != RANDOM and at and all(key in maps for pair in at for key in pair):
                found.append({"epoch": epoch, "to": LAST, **_agreement(first, reference or "", at, views, seeds)})
    return found


def reference_group(runs: Sequence[ExplainedRun]) -> str | None:
    """Return the group without privacy with the most runs, if there is one: what the others are measured against."""
    public = [run.group for run in runs if not run.is_private]
    return max(public, key=public.count) if public else None


def verdicts(runs: Sequence[ExplainedRun], found: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return, for each private group and score, whether privacy moves the last maps further than another seed does.

    It does where every pair of a private run and one without privacy agrees less than every pair without privacy;
    where only some do, they are counted.
    """
    reference = reference_group(runs)
    last = {(each["a"], each["b"]): each for each in found if each["epoch"] == each["to"] == LAST}
    spread = last.get((reference, reference))
    result = []
    for group in dict.fromkeys(run.group for run in runs if run.is_private):
        against = last.get((reference, group)) or last.get((group, reference))
        for score in _SCORES:
            if against is None or reference is None:
                verdict = "no run without privacy to compare with"
            elif spread is None or spread[score]["mean"] is None or against[score]["mean"] is None:
                verdict = "no spread of seeds known: give two or more runs without privacy"
            else:
                values = _apart(against["pairs"], score)
                verdict = _verdict(sum(value < spread[score]["low"] for value in values), len(values))
            result.append({"group": group, "score": score, "verdict": verdict})
    return result


def _verdict(lower: int, pairs: int) -> str:
    """Say how many of the pairs agree less than all pairs without privacy."""
    if lower == pairs:
        return "differs by more than another seed does"
    return f"{lower} of {pairs} pairs agree less than any two seeds do" if lower else "within the spread of seeds"


def _apart(pairs: Sequence[Mapping[str, Any]], score: str) -> list[float]:
    """Return a score of the pairs that did not begin with the same weights; of all, if all did."""
    apart = [pair for pair in pairs if not pair["same_start"]] or pairs
    return [pair[score] for pair in apart if pair[score] is not None]


def _pairs(first: Sequence[str], second: Sequence[str], same: bool) -> Iterator[tuple[str, str]]:
    yield from itertools.combinations(first, 2) if same else itertools.product(first, second)


def _agreement(
    first: str, second: str, at: Sequence[tuple[Key, Key]], views: Views, seeds: Mapping[str, int | None]
) -> dict[str, Any]:
    """Summarise pairs. Runs that began with the same weights stay alike for that alone, so they count apart."""
    pairs: list[dict[str, Any]] = []
    for one, other in at:
        scores = {name: _mean(score(views.maps[one], views.maps[other])) for name, score in _SCORES.items()}
        scores["same_class"] = _mean(same_class(views.classes[one], views.classes[other]))
        seed = seeds.get(one[0])
        same_start = seed is not None and seed == seeds.get(other[0])
        pairs.append({"a": one[0], "b": other[0], "same_start": same_start, **scores})
    together = [pair for pair in pairs if pair["same_start"]]
    found: dict[str, Any] = {"a": first, "b": second}
    for name in _NAMES:
        found[name] = _summary(_apart(pairs, name))
        found[f"{name}_same_start"] = _summary([pair[name] for pair in together])
    return {**found, "pairs": pairs}


def _summary(values: Sequence[float | None]) -> dict[str, float | None]:
    known = [value for value in values if value is not None]
    if not known:
        return {"mean": None, "low": None, "high": None}
    return {"mean": statistics.mean(known), "low": min(known), "high": max(known)}


def _mean(values: Tensor) -> float | None:
    """The mean over images that have a value, or nothing if none has."""
    known = values[~values.isnan()]
    return known.double().mean().item() if len(known) else None
