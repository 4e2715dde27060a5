"""Pictures of an explanation, as matplotlib figures."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from dphero.experiments.pictures import FURTHER, METHOD_COLOURS
from dphero.explain.agreement import RANDOM, reference_group
from dphero.explain.explanation import Explanation
from dphero.explain.images import PRIVATE_STAMP
from dphero.explain.runs import LAST, ExplainedRun

TITLES = {
    "heatmaps": "Grad-CAM heat maps of the same images at the end of each training",
    "heatmaps-epochs": "Grad-CAM heat maps of one image during each training",
    "agreement": "Agreement of heat maps with those of training without privacy",
    "layers": "Spectra of weights, noise and released gradients, and where the noise falls",
    "trajectory": "How closely private trainings track one without privacy from the same initial weights",
}
"""What each picture shows, by its name."""

# The project's colours of the four trainings; others follow (Okabe and Ito: colour-blind readers can tell them apart).
_ZERO = 1e-8  # of a spectrum with mean 1: below, there is rounding alone
_MARKERS = {"sgd": "D", "dp-sgd": "s", "dp-hero": "o", "dp-hero-published": "X"}


def all_figures(explanation: Explanation, shown: int = 6) -> dict[str, Any]:
    """Return every picture that the explanation has the numbers for, by name."""
    found = {"heatmaps": plot_heatmaps(explanation, shown)}
    if any(epoch != LAST for _, epoch in explanation.maps):
        found["heatmaps-epochs"] = plot_heatmaps_by_epoch(explanation)
        if reference_group(explanation.runs) is not None and len(explanation.runs) > 1:
            found["agreement"] = plot_agreement(explanation)
    if explanation.numbers["layers"]:
        found["layers"] = plot_layers(explanation)
    if explanation.numbers["trajectory"]:
        found["trajectory"] = plot_trajectory(explanation)
    return found


def plot_heatmaps(explanation: Explanation, shown: int = 6) -> Any:
    """Draw images, a row each, under one run of each group, a second without privacy, and random weights."""
    columns = _columns(explanation.runs)
    rows = _spread_over(len(explanation.images), shown)
    figure, axes = _pictures(len(rows), len(columns) + 1, explanation)
    for line, number in zip(axes, rows, strict=True):
        _image(line[0], explanation.images.pixels[number])
        line[0].set_ylabel(explanation.numbers["images"]["classes"][int(explanation.targets[number])], fontsize=9)
        for each, (name, _) in zip(line[1:], columns, strict=True):
            _overlay(each, explanation.images.pixels[number], explanation.maps[name, LAST][number])
    for each, (_, title) in zip(axes[0], [("", "image"), *columns], strict=True):
        each.set_title(title, fontsize=9)
    return figure


def plot_heatmaps_by_epoch(explanation: Explanation, number: int | None = None) -> Any:
    """Draw one image under one run of each group, a row each, at the epochs that all have kept, and at the end.

    Args:
        explanation: What was found.
        number: Which image; unless given, the first of the last third.
    """
    number = len(explanation.images) * 2 // 3 if number is None else number
    runs = _one_of_each(explanation.runs)
    epochs = _epochs(explanation)
    figure, axes = _pictures(len(runs), len(epochs) + 1, explanation)
    for line, run in zip(axes, runs, strict=True):
        line[0].set_ylabel(_label(run), fontsize=9)
        _image(line[0], explanation.images.pixels[number])
        for each, epoch in zip(line[1:], epochs, strict=True):
            if (found := explanation.maps.get((run.name, epoch))) is not None:
                _overlay(each, explanation.images.pixels[number], found[number])
    axes[0][0].set_title(explanation.numbers["images"]["classes"][int(explanation.targets[number])], fontsize=9)
    for each, epoch in zip(axes[0][1:], epochs, strict=True):
        each.set_title("end" if epoch == LAST else f"epoch {epoch:g}", fontsize=9)
    return figure


def plot_agreement(explanation: Explanation) -> Any:
    """Draw, for each score, how much each group's maps agree with those without privacy, over the epochs.

    The reference's own line is the spread of its seeds (another seed at the same epoch), the dotted line that of
    untrained networks. Bars reach from the lowest to the highest pair.
    """
    from matplotlib.figure import Figure

    reference = reference_group(explanation.runs)
    epochs = _epochs(explanation)
    figure = Figure(figsize=(9, 4.2), layout="constrained")
    for axes, (score, title) in zip(
        figure.subplots(1, 2), (("spearman", "Spearman correlation"), ("iou", "IoU of the hottest 20 %")), strict=True
    ):
        groups = dict.fromkeys(run.group for run in explanation.runs)
        for place, group in enumerate(groups):
            points = [
                (epochs.index(each["epoch"]), each[score])
                for each in explanation.numbers["agreement"]
                if {each["a"], each["b"]} == {group, reference} and each["epoch"] == each["to"] and each[score]["mean"]
            ]
            _line(axes, points, explanation.runs, group, shift=0.06 * (place - (len(groups) - 1) / 2))
        chance = [each for each in explanation.numbers["agreement"] if each["a"] == reference and each["b"] == RANDOM]
        if chance and chance[-1][score]["mean"] is not None:
            axes.axhline(
                chance[-1][score]["mean"], color="#999999", linestyle=":", label="random weights with SGD's end"
            )
        axes.set_xticks(range(len(epochs)), ["end" if epoch == LAST else f"{epoch:g}" for epoch in epochs])
        _finish_axes(axes, title, "epoch")
    figure.axes[0].set_ylabel("agreement with training without privacy,\nother seeds, same epoch")
    _legend(figure, explanation)
    return figure


def plot_layers(explanation: Explanation) -> Any:
    """Draw, for each layer, spectra at the last kept epoch (above), and noise along public gradients (below).

    A spectrum ends where it is zero: a direction in which the noise is zero has no protection at all.
    Noise along the public gradient is 1 where noise is isotropic; bars reach from the lowest to the highest run.
    """
    from matplotlib.figure import Figure

    facts = explanation.numbers["layers"]
    layers = list(dict.fromkeys(each["layer"] for each in facts))
    runs = {run.name: run for run in explanation.runs}
    figure = Figure(figsize=(max(7.0, 2.3 * len(layers) + 0.8), 8.6), layout="constrained")
    grid = figure.subplots(4, len(layers), squeeze=False, gridspec_kw={"height_ratios": [1, 1, 1, 1]})
    parts = (("weights", "W Wᵀ"), ("noise", "noise"), ("released", "released gradient"))
    for column, layer in enumerate(layers):
        for row, (part, _) in enumerate(parts):
            for run in _one_of_each(explanation.runs):
                last = [each for each in facts if each["run"] == run.name and each["layer"] == layer and part in each]
                if last and (values := last[-1][part]["values"]):
                    ranks = [place / max(1, len(values) - 1) for place in range(len(values))]
                    grid[row][column].plot(
                        ranks, [v if v > _ZERO else math.nan for v in values], **_style(explanation.runs, run)
                    )
            _log_axis(grid[row][column])
            _finish_axes(grid[row][column], layer if row == 0 else "", "")
        below = grid[3][column]
        for group in dict.fromkeys(run.group for run in explanation.runs if run.is_private):
            by_epoch: dict[float, list[float]] = {}
            for each in facts:
                if each["layer"] == layer and runs[each["run"]].group == group and "noise_on_public" in each:
                    by_epoch.setdefault(each["epoch"], []).append(each["noise_on_public"])
            _band(below, by_epoch, explanation.runs, group)
        _finish_axes(below, "", "epoch")
    for row, (_, title) in enumerate(parts):
        grid[row][0].set_ylabel(f"spectrum: {title}\n(mean 1)", fontsize=8)
        grid[row][0].set_xlabel("rank, largest to smallest", fontsize=7)
    grid[3][0].set_ylabel("noise along the\npublic gradient", fontsize=8)
    _legend(figure, explanation)
    return figure


def plot_trajectory(explanation: Explanation) -> Any:
    """Draw distance and direction of private trainings against the one without privacy that began alike."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4.0), layout="constrained")
    titles = (("distance", "distance to SGD's weights (SGD's own way is 1)"), ("cosine", "cosine with SGD's direction"))
    for axes, (name, title) in zip(figure.subplots(1, 2), titles, strict=True):
        for group in dict.fromkeys(run.group for run in explanation.runs if run.is_private):
            by_epoch: dict[float, list[float]] = {}
            for each in explanation.numbers["trajectory"]:
                if each["group"] == group and each[name] is not None:
                    by_epoch.setdefault(each["epoch"], []).append(each[name])
            _band(axes, by_epoch, explanation.runs, group, wider=1.4)
        _finish_axes(axes, title, "epoch")
        epochs = sorted({each["epoch"] for each in explanation.numbers["trajectory"]})
        axes.set_xscale("log")
        axes.set_xticks(epochs, [f"{epoch:g}" for epoch in epochs])
        axes.minorticks_off()
        axes.set_ylim(bottom=0)
    _legend(figure, explanation)
    return figure


def _log_axis(axes: Any) -> None:
    """Make the upright axis logarithmic, with numbers that can be read where it is short."""
    axes.set_yscale("log")
    axes.minorticks_off()
    low, high = axes.get_ylim()
    if high < 100 * low:
        powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        ticks = [
            part * 10.0**power for power in powers for part in ((1, 2, 5) if high > 5 * low else (1, 1.5, 2, 3, 5))
        ]
        axes.set_yticks([tick for tick in ticks if low <= tick <= high])
        axes.yaxis.set_major_formatter("{x:g}")


def _band(
    axes: Any, by_epoch: Mapping[float, Sequence[float]], runs: Sequence[ExplainedRun], group: str, wider: float = 0.0
) -> None:
    """Draw the mean over runs, and a band from the lowest to the highest.

    Args:
        axes: Where.
        by_epoch: The values of the runs.
        runs: All runs.
        group: Whose values these are.
        wider: How much wider a line is than the one drawn after it, so that both are seen where they coincide.
    """
    if not by_epoch:
        return
    run = next(each for each in runs if each.group == group)
    epochs = sorted(by_epoch)
    groups = list(dict.fromkeys(each.group for each in runs if each.is_private))
    width = {"linewidth": 1.5 + wider * (len(groups) - 1 - groups.index(group))}
    axes.plot(epochs, [sum(by_epoch[e]) / len(by_epoch[e]) for e in epochs], **(_style(runs, run) | width))
    lowest, highest = [min(by_epoch[e]) for e in epochs], [max(by_epoch[e]) for e in epochs]
    axes.fill_between(epochs, lowest, highest, color=_colour(runs, run), alpha=0.15, linewidth=0)


def _style(runs: Sequence[ExplainedRun], run: ExplainedRun) -> dict[str, Any]:
    dashes = "--" if not run.is_private else "-" if run.sound else ":"
    return {"color": _colour(runs, run), "linestyle": dashes, "linewidth": 1.5, "label": run.group}


def _finish_axes(axes: Any, title: str, below: str) -> None:
    axes.set_title(title, fontsize=10)
    axes.set_xlabel(below, fontsize=9)
    axes.tick_params(labelsize=8)
    axes.grid(True, alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)


def _legend(figure: Any, explanation: Explanation) -> None:
    """Put one legend for all panels below, and the stamp above if there has to be one."""
    entries: dict[str, Any] = {}
    for axes in figure.axes:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            entries.setdefault(label, handle)
    figure.legend(entries.values(), entries.keys(), loc="outside lower center", ncols=3, fontsize=8)
    _stamp(figure, explanation)


def _epochs(explanation: Explanation) -> list[float | str]:
    """Return the epochs that are compared, the end last."""
    return [*sorted({epoch for _, epoch in explanation.maps if epoch != LAST}, key=float), LAST]


def _line(axes: Any, points: Sequence[Any], runs: Sequence[ExplainedRun], group: str, shift: float) -> None:
    if not points:
        return
    run = next(each for each in runs if each.group == group)
    x = [place + shift for place, _ in points]
    means = [value["mean"] for _, value in points]
    reach = [[m - v["low"] for m, (_, v) in zip(means, points, strict=True)]]
    reach += [[v["high"] - m for m, (_, v) in zip(means, points, strict=True)]]
    label = f"{group}: spread of seeds" if not run.is_private else group
    style = {**_style(runs, run), "label": label}
    axes.errorbar(x, means, yerr=reach, marker=_MARKERS.get(run.method, "v"), markersize=5, capsize=3, **style)


def _colour(runs: Sequence[ExplainedRun], run: ExplainedRun) -> str:
    """The project's colour of a training; a second group of one method gets another."""
    groups = list(dict.fromkeys(each.group for each in runs))
    same = [group for group in groups if group.split(" ")[0] == run.method]
    if same[0] == run.group and run.method in METHOD_COLOURS:
        return METHOD_COLOURS[run.method]
    return FURTHER[groups.index(run.group) % len(FURTHER)]


def _columns(runs: Sequence[ExplainedRun]) -> list[tuple[str, str]]:
    """Return whose maps are shown, each with its title."""
    found = [(run.name, _label(run)) for run in _one_of_each(runs)]
    reference = reference_group(runs)
    others = [run for run in runs if run.group == reference][1:2]
    for run in others:
        where = next(i for i, (name, _) in enumerate(found) if name in {r.name for r in runs if r.group == reference})
        found.insert(where + 1, (run.name, f"{run.group}\nanother seed"))
    return [*found, (f"{RANDOM} 1", RANDOM)]


def _one_of_each(runs: Sequence[ExplainedRun]) -> list[ExplainedRun]:
    found: dict[str, ExplainedRun] = {}
    for run in runs:
        found.setdefault(run.group, run)
    return list(found.values())


def _label(run: ExplainedRun) -> str:
    if not run.is_private:
        return f"{run.group}\nno privacy"
    epsilon = run.result.get("epsilon")
    shown = "∞" if epsilon is None else f"{epsilon:.3g}" if epsilon < 1000 else f"{epsilon:.1e}"
    if run.sound:
        return f"{run.group}\nε {shown}"
    return f"{run.group.replace(' (UNSOUND)', '')}\nUNSOUND\ntrue ε {shown}"


def _spread_over(count: int, shown: int) -> list[int]:
    """Return so many numbers, evenly over all images, which lie class by class."""
    shown = min(shown, count)
    return [round(number * count / shown) for number in range(shown)]


def _pictures(rows: int, columns: int, explanation: Explanation) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(1.35 * columns + 0.5, 1.3 * rows + 0.8), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False)
    for each in axes.flat:
        each.set_xticks([])
        each.set_yticks([])
        for spine in each.spines.values():
            spine.set_visible(False)
    _stamp(figure, explanation)
    return figure, axes


def _stamp(figure: Any, explanation: Explanation) -> None:
    if explanation.images.private:
        figure.suptitle(PRIVATE_STAMP, fontsize=10, color="white", backgroundcolor="#B00020")


def _image(axes: Any, pixels: Tensor) -> None:
    low, high = pixels.min(), pixels.max()
    low, high = (torch.tensor(-1.0), torch.tensor(1.0)) if low >= -1 and high <= 1 else (low, high)
    scaled = ((pixels - low) / (high - low)).clamp(0, 1)
    if scaled.shape[0] == 3:
        axes.imshow(scaled.permute(1, 2, 0).numpy())
    else:
        axes.imshow(scaled.mean(0).numpy(), cmap="gray", vmin=0, vmax=1)


def _overlay(axes: Any, pixels: Tensor, heat: Tensor) -> None:
    """Draw a heat map, scaled to its own hottest position, over the grey image; an empty one says so."""
    _image(axes, pixels.mean(0, keepdim=True))
    hottest = float(heat.max())
    if hottest <= float(heat.min()):
        axes.text(0.5, 0.5, "empty", transform=axes.transAxes, ha="center", va="center", fontsize=8, color="#FFD700")
        return
    axes.imshow((heat / hottest).numpy(), cmap="inferno", alpha=0.6, vmin=0, vmax=1)
