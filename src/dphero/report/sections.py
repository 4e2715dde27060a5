"""The parts of the page that are words and tables."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dphero.experiments.comparison.table import notes
from dphero.experiments.environment import PACKAGES
from dphero.methods import METHODS
from dphero.report.figures.drawing import Drawing, line_label
from dphero.report.markup import Html, join, table, tag
from dphero.report.reading.gather import Material, Problem
from dphero.report.reading.runs import Run
from dphero.report.summary import badge
from dphero.report.words import explain_epsilon, verdict

_MANY = 12  # of more, a list is folded
_NAMED = 60  # runs of an explanation that are named in the command that repeats it
_FEW = 6  # statements that are printed whole
_ONE_RUN = ("started", "command")  # of an environment; a command, which old runs kept, may name a seed
_FEDERATED = (  # settings that `dphero federate` takes
    "data", "channels", "model", "method", "epsilon", "noise_multiplier", "delta", "lot", "lr", "momentum", "clip",
    "accountant", "dataset_size", "secure", "clients", "sampled", "rounds", "local_epochs", "partition", "alpha",
    "shards", "strategy", "proximal_mu", "controls", "shared", "sharing_budget", "unsound", "weights",
    "participations", "client_noise_multiplier", "client_clip",
)  # fmt: skip
_CONTROLS = {
    "true-epsilon": "place methods at their true ε (not at the ε asked for)",
    "single-runs": "show single runs",
}


def figure(drawing: Drawing) -> Html:
    """Return the place of a figure: title, switches, canvas, and its numbers as a table."""
    switches = [
        tag("label", tag("input", type="checkbox", data_control=name, data_of=drawing.name), text)
        for name, text in _CONTROLS.items()
        if name in drawing.controls
    ]
    canvas = tag(
        "div",
        class_="canvas",
        data_figure=drawing.name,
        role="img",
        aria_label=f"{drawing.title}. {drawing.description}",
        style=f"height:{drawing.height}px",
        data_height=drawing.height,
    )
    numbers = table(drawing.headings, drawing.lines, caption=drawing.title, numbers=range(1, len(drawing.headings)))
    return tag(
        "figure",
        tag("figcaption", tag("h3", drawing.title)),
        tag("div", *switches, class_="controls") if switches else None,
        tag("div", class_="legend", role="group", aria_label="Show or hide lines", data_legend=drawing.name),
        canvas,
        tag("p", drawing.note, class_="sub") if drawing.note else None,
        tag("details", tag("summary", "The numbers"), numbers, id=f"numbers-{drawing.name}"),
    )


def problems(found: Sequence[Problem]) -> Html | None:
    """Return what was skipped, and why."""
    if not found:
        return None
    items = [tag("li", tag("code", each.place), f": {each.what}") for each in found]
    count = "One thing" if len(found) == 1 else f"{len(found)} things"
    head = tag("strong", f"{count} could not be read and was skipped; all else is shown." if len(found) == 1
               else f"{count} could not be read and were skipped; all else is shown.")  # fmt: skip
    return tag("div", head, tag("ul", *items), class_="notice", role="alert", id="problems")


# -- details ----------------------------------------------------------------------------------------------------------


def promises(material: Material) -> Html:
    """Return the whole statement of each setting; of several, each to unfold."""
    parts = []
    for number, row in enumerate(material.rows):
        runs = material.runs_of(row)
        text = next((run.statement for run in runs if run.statement), "")
        whole = statement(text) if text else tag("p", "No statement yet: it is written when a run is finished.")
        if len(material.rows) == 1:
            return whole
        head = tag("summary", line_label(row), " ", badge(verdict(row, runs)))
        few = len(material.rows) <= _FEW
        parts.append(
            tag("details", head, tag("p", explain_epsilon(row)), whole, id=f"statement-{number}", data_print=few)
        )
    statements = join(*parts)
    if len(parts) > _MANY:
        statements = tag("details", tag("summary", f"All {len(parts)} statements"), statements, id="all-statements")
    said = tag("ul", *(tag("li", note) for note in notes(material.rows)))
    count = len(notes(material.rows))
    if count > _MANY:
        said = tag("details", tag("summary", f"All {count} notes"), said, id="notes", data_print=True)
    return join(statements, said)


def statement(text: str) -> Html:
    """Return a privacy statement as a list of terms; lines that begin with a dash belong to the term above."""
    terms: list[tuple[str, list[str]]] = []
    for line in text.strip().splitlines():
        name, colon, rest = line.partition(":")
        if line.startswith("  - ") and terms:
            terms[-1][1].append(line.removeprefix("  - "))
        elif colon:
            terms.append((name, [rest.strip()] if rest.strip() else []))
        else:
            terms.append((line, []))
    found = []
    if terms and terms[0] == ("Privacy statement", []):  # any other heading says that something is unsound
        terms = terms[1:]
    for name, said in terms:
        inside = tag("ul", *(tag("li", each) for each in said)) if len(said) > 1 else join(*said)
        found.append(tag("div", tag("dt", name), tag("dd", inside) if said else None))
    return tag("dl", *found, class_="statement")


def gains() -> Html:
    """Return how to read what an attacker could gain."""
    return tag(
        "p",
        "The attacker here is the strongest there is: everything is known but whether one record was used, and all "
        "that was released is seen. The curve follows from the whole privacy curve of the ledger by the "
        "likelihood-ratio test: no attack can lie above it. From ε alone one would have to conclude far more.",
        class_="before-figure",
    )


def recipe(material: Material) -> Html:
    """Return the settings: those that all runs share, and those in which they differ."""
    flat = [
        (run, _flat(run.recipe.as_dict()) | _flat(dict(run.federation or {}), "federation.")) for run in material.runs
    ]
    names = list(dict.fromkeys(name for _, values in flat for name in values))
    same = {name for name in names if len({repr(values.get(name)) for _, values in flat}) == 1}
    shared = [
        [_breakable(name), _shown(name, flat[0][1].get(name))]
        for name in names
        if name in same and flat[0][1].get(name) is not None
    ]
    parts = [
        table(("setting", "value"), shared, caption="The same in all runs" if len(flat) > 1 else "Settings of the run")
    ]
    varied = [name for name in names if name not in same]
    if varied:
        lines = [[run.name, *(_shown(name, values.get(name)) for name in varied)] for run, values in flat]
        whole = table(("run", *varied), lines, caption="What differs")
        parts.append(
            tag("details", tag("summary", f"What differs among {len(flat)} runs"), whole, id="differs")
            if len(flat) > _MANY
            else whole
        )
    return join(*parts, tag("p", "A seed is as secret as the data: it stays in the run's recipe.toml."))


def _breakable(name: str) -> Html:
    """Return a long name that may be broken between its words."""
    return Html(re.sub(r"([._])(?=\w)", r"\1<wbr>", join(name)))


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, each in values.items():
        found |= _flat(each, f"{prefix}{name}.") if isinstance(each, Mapping) else {f"{prefix}{name}": each}
    return found


def _shown(name: str, each: Any) -> str:
    if name.rpartition(".")[2] == "seed" and each is not None:  # of the run, of its federation, of an option
        return "set, kept secret"
    return "–" if each is None else f"{each:g}" if isinstance(each, float) else str(each)


def environment(material: Material) -> Html | None:
    """Return versions and machines, one table for all runs of the same."""
    groups: dict[str, list[Run]] = {}
    for run in material.runs:
        if run.environment:
            known = {name: each for name, each in run.environment.items() if name not in _ONE_RUN}
            groups.setdefault(repr(sorted(_flat(known).items())), []).append(run)
    if not groups:
        return None
    parts = []
    for runs in groups.values():
        values = _flat({name: each for name, each in runs[0].environment.items() if name not in _ONE_RUN})
        started = sorted(str(run.environment["started"]) for run in runs if run.environment.get("started"))
        lines = [["started" if len(runs) == 1 else "first started", started[0]]] if started else []
        lines += [[name.removeprefix("packages."), _words(each)] for name, each in values.items() if each is not None]
        all_runs = "All runs" if len(runs) > 1 else "Of the run"
        caption = all_runs if len(groups) == 1 else ", ".join(run.name for run in runs[:5])
        parts.append(
            table(("what", "value"), lines, caption=caption + ("" if len(runs) < 6 or len(groups) == 1 else ", …"))
        )
    return join(*parts)


def _words(each: Any) -> str:
    return shlex.join(map(str, each)) if isinstance(each, list) else str(each)


def reproduce(material: Material) -> Html:
    """Return the commands that repeat and check all this."""
    packages = next((run.environment.get("packages") for run in material.runs if run.environment), None) or {}
    pins = [f"{name}=={str(packages[name]).partition('+')[0]}" for name in PACKAGES if packages.get(name)]
    lines = ["# the same versions", f"pip install {' '.join(map(shlex.quote, pins))}", ""] if pins else []
    shown = list({run.recipe.method: run for run in reversed(material.runs)}.values())[::-1][
        :3
    ]  # the first of each method
    for run in shown:
        place = shlex.quote(str(run.path))
        if run.federation is not None:
            seed = "" if run.recipe.seed is None else "; SEED stands in its recipe.toml"
            lines += [
                f"# train again with the same settings{seed}",
                _federate(run),
                "# the federated run goes on, or shows its outcome",
                f"dphero federate --resume {place}",
                "",
            ]
        else:
            lines += [
                "# train again by the same recipe (its seed included)",
                f"dphero train --recipe {place}/recipe.toml --out again",
                *_audit(run, place),
                "",
            ]
    if len(material.runs) > len(shown):
        lines += [f"# … and so on for {len(material.runs) - len(shown)} more runs", ""]
    compared = [source for source in material.sources if (source / "plan.json").is_file()]
    for source in compared:
        lines += [
            "# finish what is missing, and print the table",
            f"dphero compare --resume {shlex.quote(str(source))}",
            "",
        ]
    for item in material.reproduced:
        size = {"quick": " --quick", "full": " --full"}.get(item.about["size"], " --data digits")
        name = shlex.quote(item.about["item"])
        lines.append(f"dphero reproduce {name}{size} --out {shlex.quote(str(item.path.parent))}")
    lines += [""] if material.reproduced else []
    for explained in material.explained:
        lines += [*_explain(explained.numbers, explained.place), ""]
    named = " ".join(shlex.quote(str(source)) for source in material.sources)
    lines += ["# this page", f"dphero report {named} -o report.html"]
    return tag("pre", "\n".join(lines))


def _explain(numbers: Mapping[str, Any], place: Path) -> list[str]:
    """Return how to draw heat maps again, from the folder in which their runs lie."""
    runs = numbers.get("runs")
    names = [str(each.get("name")) for each in runs if isinstance(each, Mapping)] if isinstance(runs, list) else []
    named = " ".join(map(shlex.quote, names[:_NAMED])) + (" …" if len(names) > _NAMED else "")
    return ["# the heat maps again, from where the runs are", f"dphero explain {named} -o {shlex.quote(place.name)}"]


def _federate(run: Run) -> str:
    """Return the command that begins a federated run again."""
    given = {**dict(run.federation or {}), **run.recipe.as_dict()}
    words = ["dphero", "federate"]
    for name in _FEDERATED:
        each, option = given.get(name), f"--{name.replace('_', '-')}"
        if each is True:
            words.append(option)
        elif each is not None and each is not False:
            words += [option, str(each).removesuffix(".0") if isinstance(each, float) else str(each)]
    words += ["--seed", "SEED"] if run.recipe.seed is not None else []
    for name, each in dict(given.get("options") or {}).items():
        words += ["--set", f"{name}={each}"]
    return shlex.join([*words, "--out", "again"])


def _audit(run: Run, place: str) -> list[str]:
    """Return how to check the price that a run printed, if it printed one."""
    private = METHODS[run.recipe.method].card.protects != "nothing"
    return ["# check the price that was printed", f"dphero audit {place} --quick"] if private else []
