"""Fixtures of tests of row form."""

from __future__ import annotations

import pytest

from dphero.functional import pulled, unbatched


@pytest.fixture
def in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no gradients be so few that all are formed at once."""
    monkeypatch.setattr(unbatched, "_LARGE", 0)
    monkeypatch.setattr(pulled, "_CPU_BUFFER", 2000)
