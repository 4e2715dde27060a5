"""The documentation keeps its word: its code runs, its links lead somewhere, its commands exist."""

import ast
import contextlib
import re
import runpy
import shlex
import sys
import warnings
from pathlib import Path

import pytest
import torch
import typer

from dphero.accounting import EVENT_KINDS
from dphero.cli import app
from dphero.experiments.runs import rundir
from dphero.methods import METHODS

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
OTHERS = [ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def named(path):
    return str(path.relative_to(ROOT))


def blocks(page, *kinds):
    """Yield (kind, code, name for tracebacks), with as many empty lines before the code as the page has."""
    text = page.read_text()
    for match in FENCE.finditer(text):
        if match[1] in kinds:
            line = text[: match.start(2)].count("\n")
            yield match[1], "\n" * line + match[2], named(page)


def run(code, name, namespace):
    exec(compile(code, name, "exec"), namespace)


def side(diff, sign):
    """The lines of a diff before (-) or after (+) it."""
    return "\n".join(line[1:] if line[:1] in (" ", sign) else "" for line in diff.split("\n"))


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    """Run in an empty folder, leaving generators, threads, and the known methods and events as they were."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("dphero.audit.mechanism._FEWEST", 60)  # releases that are looked into: seconds less
    known = [(registry, dict(registry)) for registry in (METHODS, EVENT_KINDS)]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield tmp_path
    for registry, before in known:
        registry.clear()
        registry.update(before)


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_python_blocks_run(page, elsewhere):
    namespace = {"__name__": "__page__"}
    for _, code, name in blocks(page, "python"):
        run(code, name, namespace)


@pytest.mark.parametrize("sign", ["+", "-"], ids=["dphero", "opacus"])
@pytest.mark.parametrize("page", [page for page in PAGES if any(blocks(page, "diff"))], ids=named)
def test_both_sides_of_a_diff_run(page, sign, elsewhere):
    if sign == "-":
        pytest.importorskip("opacus")
    _, setup, name = next(blocks(page, "python"))
    for _, diff, _ in blocks(page, "diff"):
        namespace = {"__name__": "__page__"}
        run(setup, name, namespace)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            run(side(diff, sign), name, namespace)


def test_there_is_something_to_run():
    assert len(PAGES) >= 6 and len(EXAMPLES) >= 3
    assert sum(1 for page in PAGES for _ in blocks(page, "python")) > 20


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_every_block_has_a_kind(page):
    """A block without one would be run by nobody."""
    fences = re.findall(r"^\s*```(.*)$", page.read_text(), re.MULTILINE)
    assert len(fences) % 2 == 0
    assert set(fences[::2]) <= {"python", "diff", "sh"} and set(fences[1::2]) <= {""}


def slugs(page):
    """The anchors that headings get."""
    headings = re.findall(r"^#+ (.+)$", FENCE.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES + OTHERS, ids=named)
def test_relative_links_resolve(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", FENCE.sub("", page.read_text())):
        if "://" in target:
            continue
        file, _, anchor = target.partition("#")
        path = (page.parent / file).resolve() if file else page
        assert path.exists(), f"{named(page)}: {target}"
        assert not anchor or anchor in slugs(path), f"{named(page)}: {target}"


def test_the_guide_lists_all_its_parts():
    text = FENCE.sub("", (ROOT / "docs/guide.md").read_text())
    listed = re.findall(r"^- \[(.+)\]\(#", text, re.MULTILINE)
    assert listed == re.findall(r"^## (.+)$", text, re.MULTILINE)


@pytest.mark.parametrize("page", sorted((ROOT / "docs/extend").glob("[!R]*.md")), ids=named)
def test_ways_to_extend_take_at_most_40_lines(page):
    _, code, _ = next(blocks(page, "python"))
    assert 0 < len(code.strip().splitlines()) <= 40
    assert f"({page.name})" in (ROOT / "docs/extend/README.md").read_text()


def defined_in(room):
    """The functions, classes and methods (Class.method) of a room, by name."""
    found = set()
    for path in (ROOT / "src/dphero" / room).rglob("*.py"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                found.add(node.name)
            if isinstance(node, ast.ClassDef):
                found |= {f"{node.name}.{each.name}" for each in node.body if isinstance(each, ast.FunctionDef)}
    return found


def test_the_walk_has_ten_hops_each_a_function_that_exists():
    text = " ".join((ROOT / "docs/architecture.md").read_text().split("## One lot in ten hops")[1].split())
    hops = re.findall(r" (\d+)\. \*\*", text)
    assert hops == [str(number) for number in range(1, 11)]
    named = re.findall(r"\*\*(\w+)\*\* `([\w.]+)`", text)
    assert len(named) >= 20
    assert [(room, name) for room, name in named if name not in defined_in(room)] == []


def test_the_picture_of_the_rooms_is_that_of_the_contract():
    script = runpy.run_path(str(ROOT / "docs/make_rooms.py"))
    drawn = {name for row in script["layers"]() for name in row}
    package = ROOT / "src/dphero"
    rooms = {path.stem for path in package.iterdir() if path.is_dir() or path.suffix == ".py"}
    assert rooms - drawn == {"__init__", "__pycache__"} & rooms
    assert script["PICTURE"].read_text() == script["picture"](), "run: python docs/make_rooms.py"


COMMANDS = typer.main.get_command(app).commands


def test_training_has_every_setting_and_every_file():
    text = (ROOT / "docs/training.md").read_text()
    flags = [flag for parameter in COMMANDS["train"].params for flag in parameter.opts if flag != "--help"]
    files = re.findall(r"^``(\S+)``", rundir.__doc__, re.MULTILINE)
    assert len(flags) > 20 and len(files) > 8
    assert [name for name in (*flags, *files) if name not in text] == []


def shown_commands():
    for page in PAGES:
        text = page.read_text()
        shell = [line for _, code, _ in blocks(page, "sh") for line in code.splitlines()]
        inline = [" ".join(code.split()) for code in re.findall(r"`([^`]+)`", FENCE.sub("", text))]
        for line in shell + inline:
            words = shlex.split(line, comments=True) if re.match(r"(dphero|make) \w", line) else []
            if words:
                yield pytest.param(words, id=f"{named(page)}: {' '.join(words)}")


@pytest.mark.parametrize("words", list(shown_commands()))
def test_shown_commands_exist(words):
    program, command, *arguments = words
    if program == "make":
        assert re.search(rf"^{command}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
        return
    assert command in COMMANDS
    found = COMMANDS[command]
    while hasattr(found, "commands") and arguments:  # a group: go on to its command
        command, *arguments = arguments
        assert command in found.commands
        found = found.commands[command]
    context = found.make_context(command, arguments, resilient_parsing=not arguments)
    assert not context.args  # every option is known, every value has the right type


@pytest.mark.parametrize("example", EXAMPLES, ids=named)
def test_examples_run(example, elsewhere, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [str(example)])
    with contextlib.suppress(SystemExit):
        runpy.run_path(str(example), run_name="__main__")
    shown = capsys.readouterr().out
    assert "epsilon" in shown
    if example.stem == "resume":
        assert "same weights as an unbroken run: True" in shown
