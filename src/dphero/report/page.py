"""One self-contained page: words, tables, figures and the script that draws them, without any network."""

from __future__ import annotations

import base64
import gzip
import importlib.util
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import lru_cache
from importlib import resources
from os import PathLike
from pathlib import Path
from typing import Any

import dphero
from dphero._files import read_bytes, write_atomically
from dphero.experiments.pictures import ON_DARK
from dphero.report import sections
from dphero.report.drawn import Pictures, heat_maps, reproduced
from dphero.report.figures import federated, outcomes, over_time, trials
from dphero.report.figures.drawing import Drawing, kind
from dphero.report.markup import Html, join, script_json, tag
from dphero.report.reading.gather import Material
from dphero.report.summary import summary


@dataclass(frozen=True)
class Report:
    """A page in its parts.

    Attributes:
        title: Of the page.
        header: What stands above everything.
        main: The sections.
        figures: What plotly draws, by the place on the page.
    """

    title: str
    header: Html
    main: Html
    figures: dict[str, dict[str, Any]]

    def html(self, *, live: str | None = None, every: int = 2000) -> str:
        """Return the whole page.

        Args:
            live: The version that a server has; the page then asks for later ones.
            every: How often, in milliseconds.
        """
        state = {"live": live is not None, "version": live, "every": every, "onDark": ON_DARK}
        allowed = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data:"
        if live is not None:
            allowed += "; connect-src 'self'"
        head = tag(
            "head",
            tag("meta", charset="utf-8"),
            tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
            tag("meta", http_equiv="Content-Security-Policy", content=allowed),
            tag("meta", name="robots", content="noindex"),
            tag("title", self.title),
            tag("style", Html(_asset("page.css"))),
        )
        body = tag(
            "body",
            tag("a", "Skip to the content", href="#main", class_="skip"),
            tag("header", self.header, id="header"),
            tag("main", self.main, id="main", tabindex="-1"),
            tag("footer", _footer(live is not None)),
            script_json("figures", self.figures),
            script_json("state", state),
            Html(f'<script type="text/plain" id="plotly">{_plotly()}</script>'),
            Html(f"<script>{_asset('page.js')}</script>"),
        )
        return f"<!doctype html>\n{tag('html', head, body, lang='en')}\n"


def build(material: Material, *, private_diagnostics: bool = False) -> Report:
    """Return the page about what was read.

    Args:
        material: What :func:`dphero.report.read` returned.
        private_diagnostics: Also show losses, clipped shares, and heat maps of private images, which were computed
            from the private data without noise and which no ε covers.

    Raises:
        ImportError: If plotly is missing.
    """
    _plotly()
    page, pictures = _Page(), Pictures()
    if material.rows:
        page.add("summary", "In short", summary(material))
        page.add("promise", "What is promised", sections.promises(material))
        page.add("gain", "What an attacker could gain", *_gain(material, page))
        page.add("budget", "Budget", page.draw(over_time.budget(material)))
        drawings = (outcomes.frontier(material), over_time.accuracy(material), outcomes.seeds(material))
        page.add("accuracy", "Accuracy", *map(page.draw, drawings))
        page.add("claims", "Claims on trial", _claims(material, page))
        page.add("federation", "Who holds what", *_federated(material, page))
    page.add("paper", "The paper's results, anew", reproduced(material.reproduced, pictures))
    shown = heat_maps(material.explained, pictures, private=private_diagnostics)
    page.add("heat-maps", "Heat maps", shown)
    if private_diagnostics:
        page.add("diagnostics", "Private diagnostics", _diagnostics(material, page))
    if material.runs:
        page.add("recipe", "Recipe", sections.recipe(material))
        page.add("environment", "Environment", sections.environment(material))
    page.add("reproduce", "How to reproduce", sections.reproduce(material))
    title = _title(material)
    header = join(tag("h1", title), tag("p", ", ".join(map(str, material.sources)), class_="sub"))
    return Report(title, header, join(page.links(), sections.problems(material.problems), *page.sections), page.figures)


class _Page:
    """Gathers sections and figures."""

    def __init__(self) -> None:
        self.figures: dict[str, dict[str, Any]] = {}
        self.sections: list[Html] = []
        self._links: list[Html] = []

    def draw(self, drawing: Drawing | None) -> Html | None:
        """Keep what is to be drawn, and return its place."""
        if drawing is None:
            return None
        self.figures[drawing.name] = drawing.spec
        return sections.figure(drawing)

    def add(self, name: str, title: str, *contents: Html | None) -> None:
        """Add a section, unless there is nothing in it."""
        inside, about = join(*contents), f"title-{name}"
        if inside:
            self.sections.append(tag("section", tag("h2", title, id=about), inside, id=name, aria_labelledby=about))
            self._links.append(tag("li", tag("a", title, href=f"#{name}")))

    def links(self) -> Html:
        """Return the way to all sections."""
        return tag("nav", tag("ul", *self._links), aria_label="Sections")


def write(report: Report, path: str | PathLike[str]) -> int:
    """Write the page, whole or not at all, for its owner's eyes only; return its size in bytes.

    Accuracies on it are computed without noise, as those in the runs' own files.
    """
    contents = report.html().encode(errors="replace")  # names of files need not be text
    write_atomically(Path(path), contents, private=True)
    return len(contents)


def _gain(material: Material, page: _Page) -> list[Html | None]:
    drawn = page.draw(over_time.gain(material))
    return [] if drawn is None else [sections.gains(), drawn]


def _claims(material: Material, page: _Page) -> Html | None:
    found = trials.claims_of(material)
    if not found:
        return None
    words = tag(
        "p",
        "The claimed ε is what a paper or a run prints; the true ε is what its ledger costs, a proven bound only where "
        "the summary says so; the audited one is a lower bound that an attack proved. An audit can refute a claim, "
        "never prove one. Claims about single releases are about two lots at the σ beside them, not about the run.",
        class_="before-figure",
    )
    conclusions = [
        tag("p", tag("strong", f"{run.name}: "), str(run.audit["conclusion"]) + ".")
        for run in material.runs
        if run.audit is not None and run.audit.get("conclusion")
    ]
    return join(words, *conclusions, page.draw(trials.claims(material)))


def _federated(material: Material, page: _Page) -> list[Html | None]:
    found: list[Html | None] = []
    for run in material.runs:
        if run.federation is not None:
            found += [page.draw(federated.partition(run)), page.draw(federated.clients(run))]
    return found


def _diagnostics(material: Material, page: _Page) -> Html | None:
    drawn = page.draw(over_time.diagnostics(material))
    if drawn is None:
        return None
    warning = tag(
        "div",
        tag("strong", "Private. "),
        "These figures were computed from the training data without noise. No ε covers them: who sees them may learn "
        "more than the statement allows. Do not pass this page on.",
        class_="notice private",
        role="note",
    )
    return join(warning, drawn)


def _title(material: Material) -> str:
    methods = list(dict.fromkeys(row.method if row.sound else kind(row) for row in material.rows))
    data = ", ".join(dict.fromkeys(Path(row.data).name or row.data for row in material.rows))
    if not methods:
        if material.reproduced:
            return "The results of the DP-Hero paper, anew"
        return "Heat maps" if material.explained else "Nothing could be read"
    what = (
        methods[0] if len(methods) == 1 else " and ".join(methods) if len(methods) == 2 else f"{len(methods)} methods"
    )
    federated = [run.federation for run in material.runs if run.federation is not None]
    clients = {each.get("clients") for each in federated} if len(federated) == len(material.runs) else set()
    among = f", {clients.pop()} clients" if len(clients) == 1 and None not in clients else ""
    return f"{what} on {data}{among}"


def _footer(live: bool) -> Html:
    when = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    return join(
        tag("p", id="live", role="status") if live else None,
        tag(
            "p",
            f"Made by dphero {dphero.__version__} on {when}. For its owner's eyes: accuracies on it were computed "
            "without noise. What may be published of a run, dphero publish copies.",
        ),
        tag("noscript", tag("p", "The figures need JavaScript; all their numbers are in tables.")),
    )


def _asset(name: str) -> str:
    return (resources.files("dphero.report") / "assets" / name).read_text(encoding="utf-8")


@lru_cache(maxsize=1)
def _plotly() -> str:
    """plotly.js, packed: a third of its size, and every browser since 2023 unpacks it."""
    spec = importlib.util.find_spec("plotly")
    if spec is None or spec.origin is None:
        raise ImportError("reports need plotly: pip install 'dphero[report]'")
    source = read_bytes(Path(spec.origin).parent / "package_data" / "plotly.min.js")
    return base64.b64encode(gzip.compress(source, 6, mtime=0)).decode("ascii")
