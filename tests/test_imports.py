"""Who may import whom: the contract in pyproject.toml holds, and notices what would break it."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("importlinter")

ROOT = Path(__file__).parents[1]


def lint(folder):
    """Return whether the contract holds for the package in a folder, and what was printed."""
    command = [sys.executable, "-c", "from importlinter.cli import lint_imports_command as run; run()", "--no-cache"]
    environment = {**os.environ, "PYTHONPATH": str(folder / "src")}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    return done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    folder = tmp_path_factory.mktemp("package")
    shutil.copytree(ROOT / "src", folder / "src", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", folder)
    return folder


def test_the_contract_holds(copy):
    holds, printed = lint(copy)
    assert holds, printed


@pytest.mark.parametrize(
    ("room", "planted"),
    [
        ("hooks/tape.py", "import dphero.mechanism.release"),  # what sees raw gradients may not add noise
        (
            "guidance/pca.py",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from dphero.hooks.tape import Tape",
        ),
    ],
    ids=["an import", "an import for type checking"],
)
def test_a_forbidden_import_is_noticed(copy, room, planted):
    path = copy / "src" / "dphero" / room
    before = path.read_text()
    path.write_text(f"{before}\n{planted}\n")
    try:
        holds, printed = lint(copy)
    finally:
        path.write_text(before)
    assert not holds and "not allowed to import" in printed
