"""A checkout of the code as it was before screens and pictures were mended."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
COMMIT = "8fd3a28"


@contextmanager
def older_code() -> Iterator[Path]:
    """Check the older commit out beside the repository, and remove it afterwards."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder, "before")
        git = ["git", "-C", str(ROOT), "worktree"]
        subprocess.run([*git, "add", "--quiet", "--detach", str(place), COMMIT], check=True)
        try:
            yield place
        finally:
            subprocess.run([*git, "remove", "--force", str(place)], check=True)
