"""The house stays small enough to walk through: few modules at the top, rooms of three to nine, short modules."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import dphero

PACKAGE = Path(dphero.__file__).parent
MODULES_AT_THE_TOP, MODULES_IN_A_ROOM = 8, range(3, 10)
LINES_OF_A_MODULE, LINES_OF_A_FUNCTION = 350, 60


def lines_without_docstring(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Signature and body: what an argument means may be explained at length."""
    lines = (function.end_lineno or 0) - function.lineno + 1
    if ast.get_docstring(function) is not None:
        lines -= (function.body[0].end_lineno or 0) - function.body[0].lineno + 1
    return lines


def modules() -> Iterator[tuple[str, str]]:
    for path in sorted(PACKAGE.rglob("*.py")):
        yield path.relative_to(PACKAGE).as_posix(), path.read_text()


def functions() -> Iterator[tuple[str, int]]:
    for path, text in modules():
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield f"{path} {node.name}", lines_without_docstring(node)


def rooms() -> dict[str, int]:
    folders = {path.parent for path in PACKAGE.rglob("*.py")} - {PACKAGE}
    counts = {folder: sum(path.name != "__init__.py" for path in folder.glob("*.py")) for folder in folders}
    corridors = {folder.parent for folder in folders}  # their rooms are folders
    return {
        folder.relative_to(PACKAGE).as_posix(): count for folder, count in counts.items() if folder not in corridors
    }


def test_there_are_few_modules_at_the_top() -> None:
    assert len(list(PACKAGE.glob("*.py"))) <= MODULES_AT_THE_TOP


def test_rooms_have_three_to_nine_modules() -> None:
    assert not {name: count for name, count in rooms().items() if count not in MODULES_IN_A_ROOM}


def test_modules_are_short() -> None:
    lengths = {path: len(text.splitlines()) for path, text in modules()}
    assert not {path: lines for path, lines in lengths.items() if lines > LINES_OF_A_MODULE}


def test_functions_are_short() -> None:
    assert not {name: lines for name, lines in functions() if lines > LINES_OF_A_FUNCTION}
