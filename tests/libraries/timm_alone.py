"""Import timm where torchvision is missing, or made for another torch: its models need next to nothing of it."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any

from torch import nn

_PARTS = "", ".ops", ".ops.misc", ".transforms", ".transforms.functional", ".datasets", ".models", ".utils"


class _Empty(ModuleType):
    """A module in which every name is a class that no model uses."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        members = {mode: mode for mode in ("NEAREST", "BILINEAR", "BICUBIC", "BOX", "HAMMING", "LANCZOS")}
        return type(name, (nn.Module,), members)


def import_timm() -> ModuleType:
    """Return timm, imported with empty modules in place of torchvision unless that can be imported itself.

    Raises:
        ImportError: If timm is not installed.
    """
    try:
        import torchvision  # noqa: F401
    except (ImportError, RuntimeError):
        names = [f"torchvision{part}" for part in (*_PARTS, ".models.feature_extraction")]
        modules = {name: _Empty(name) for name in names}
        for name, module in modules.items():
            parent, _, child = name.rpartition(".")
            if parent:
                setattr(modules[parent], child, module)
        sys.modules.update(modules)
        try:
            return importlib.import_module("timm")
        finally:  # other libraries would take them for the real ones
            for name in modules:
                sys.modules.pop(name, None)
    return importlib.import_module("timm")
