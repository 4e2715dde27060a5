"""The figures that docs/explain.md tells of heat maps on CIFAR-10 are those of the committed file."""

import json
import re
from pathlib import Path
from statistics import fmean

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "explain.md").read_text().partition("tried on CIFAR-10")[2].replace("−", "-")
WORDS = " ".join(PAGE.split())
NUMBERS = json.loads((ROOT / "benchmarks" / "results" / "heatmaps" / "explain.json").read_text())
GROUPS = {
    "SGD, no privacy": "sgd", "DP-SGD, ε": "dp-sgd", "DP-Hero, sound": "dp-hero",
    "DP-Hero as published": "dp-hero-published (UNSOUND)", "random weights": "random weights",
}  # fmt: skip
PRIVATE = [name for name in GROUPS.values() if name.startswith("dp-")]


def agreement(first, second, epoch="last", to="last"):
    return next(
        each for each in NUMBERS["agreement"]
        if {each["a"], each["b"]} == {first, second} and (each["epoch"], each["to"]) == (epoch, to)
    )  # fmt: skip


def faithful(group):
    names = [each["name"] for each in NUMBERS["runs"] if each["group"] == group]
    maps = [each for each in NUMBERS["maps"] if each["epoch"] == "last"]
    return [each["faithfulness"] for each in maps if each["run"] in names or each["run"].startswith(f"{group} ")]


def shown(mean, low, high, form):
    return f"{mean:{form}} ({low:{form.lstrip('+')}}–{high:{form.lstrip('+')}})"


@pytest.mark.parametrize("words", GROUPS)
def test_the_table(words):
    group = GROUPS[words]
    line = next(line for line in PAGE.splitlines() if line.startswith(f"| {words}"))
    cells = [each.strip() for each in line.strip("|").split("|")]
    found = agreement("sgd", group)
    assert cells[2:4] == [
        shown(*(found[name][k] for k in ("mean", "low", "high")), ".2f") for name in ("spearman", "iou")
    ]
    scores = faithful(group)
    kept = shown(fmean(scores), min(scores), max(scores), "+.3f")
    assert cells[4] == (kept if group != "random weights" else kept.lstrip("+"))
    reached = [each["accuracy"] for each in NUMBERS["runs"] if each["group"] == group]
    assert len(reached) == (5 if group != "random weights" else 0)
    assert cells[1] == (f"{100 * fmean(reached):.1f} %" if reached else "")


def test_the_text():
    share = [fmean(faithful(group)) / fmean(faithful("sgd")) for group in PRIVATE]
    assert f"less faithful: {min(share):.2f} to {max(share):.2f} of SGD's" in WORDS
    alike = (
        agreement("dp-sgd", "dp-hero")["spearman_same_start"]["mean"],
        agreement("dp-sgd", "dp-hero")["spearman"]["mean"],
    )
    assert "(Spearman {:.2f}; other seeds {:.2f})".format(*alike) in WORDS
    assert f"agrees with SGD's end by {agreement('sgd', 'sgd', 1)['spearman']['mean']:.2f}," in WORDS
    pairs = [int(each["verdict"].split()[0]) for each in NUMBERS["verdicts"]]
    assert f"{min(pairs)} to {max(pairs)} of 20 pairs agree less" in WORDS
    first = [
        [each["distance"] for each in NUMBERS["trajectory"] if each["group"] == group and each["epoch"] == 0.1]
        for group in PRIVATE
    ]
    told = re.search(r"after 0.1 epochs DP-SGD is ([\d.]+) to ([\d.]+) .* DP-Hero ([\d.]+) to ([\d.]+), the published "
                     r"recipe ([\d.]+) to ([\d.]+);", WORDS)  # fmt: skip
    assert told.groups() == tuple(f"{each:.2f}" for ways in first for each in (min(ways), max(ways)))
    later = [each["distance"] for each in NUMBERS["trajectory"] if each["epoch"] == 1]
    assert f"after 1 epoch all three {min(later):.2f} to {max(later):.2f}" in WORDS
    spent = [each["epsilon"] for each in NUMBERS["runs"] if each["method"] == "dp-hero-published"]
    assert "true ε above 10⁷" in WORDS and min(spent) > 1e7


@pytest.mark.parametrize(("group", "form", "before"), [
    ("dp-hero", ".2f", "isotropic noise for DP-Hero"),
    ("dp-hero-published (UNSOUND)", ".1f", "for the published recipe"),
])  # fmt: skip
def test_where_noise_falls(group, form, before):
    of = {each["name"] for each in NUMBERS["runs"] if each["group"] == group}
    facts = [each for each in NUMBERS["layers"] if each["run"] in of and each["epoch"] >= 1]
    layers = {each["layer"] for each in facts}
    means = [fmean(each["noise_on_public"] for each in facts if each["layer"] == layer) for layer in layers]
    assert f"{min(means):{form}} to {max(means):{form}} " in WORDS and before in WORDS
