"""dphero: train PyTorch models with differential privacy, with noise shaped by what the model already knows."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dphero.accounting import BudgetExhausted
    from dphero.checks.modules import fix
    from dphero.engine import PrivacyEngine
    from dphero.layers import register

__all__ = ["BudgetExhausted", "PrivacyEngine", "fix", "register"]
__version__ = "0.1.0"

_HOMES = {
    "BudgetExhausted": "dphero.accounting",
    "PrivacyEngine": "dphero.engine",
    "fix": "dphero.checks.modules",
    "register": "dphero.layers",
}


def __getattr__(name: str) -> Any:
    """Import public names when they are first used: pricing needs no torch."""
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'dphero' has no attribute {name!r}")


def __dir__() -> list[str]:
    """The public names too, those that are not imported yet: completion finds them."""
    return sorted({*globals(), *__all__} - {"Any", "TYPE_CHECKING", "annotations", "import_module"})
