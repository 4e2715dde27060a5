"""The house stays small enough to walk through: few modules at the top, rooms of three to nine, short modules.

What is larger today is listed with its size. It may shrink, and then the list is shortened; nothing grows.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import dphero

PACKAGE = Path(dphero.__file__).parent
MODULES_AT_THE_TOP, MODULES_IN_A_ROOM = 8, range(3, 10)
LINES_OF_A_MODULE, LINES_OF_A_FUNCTION = 350, 60

LONG_MODULES: dict[str, int] = {}
LONG_FUNCTIONS = {
    "cli/privacy/audit.py audit": 76,
    "cli/runs/compare.py compare": 91,
    "cli/runs/federate.py federate": 110,
}
ROOMS_OF_OTHER_SIZES: dict[str, int] = {}


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
    for name, count in rooms().items():
        assert count in MODULES_IN_A_ROOM or count == ROOMS_OF_OTHER_SIZES.get(name), (name, count)


def test_modules_are_short() -> None:
    long = {path: len(text.splitlines()) for path, text in modules() if len(text.splitlines()) > LINES_OF_A_MODULE}
    assert all(lines <= LONG_MODULES.get(path, 0) for path, lines in long.items()), long


def test_functions_are_short() -> None:
    long = {name: lines for name, lines in functions() if lines > LINES_OF_A_FUNCTION}
    assert all(lines <= LONG_FUNCTIONS.get(name, 0) for name, lines in long.items()), long
