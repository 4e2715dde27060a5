"""The systems of the comparison, each one small file on top of the same parts.

Every module here adds its methods to :data:`METHODS` with :func:`register`.
"""

from __future__ import annotations

import pkgutil
from importlib import import_module

from dphero.methods.base import METHODS, Card, Method, Step, Task, Trainer, extra_of, make, register

__all__ = ["METHODS", "Card", "Method", "Step", "Task", "Trainer", "extra_of", "make", "register"]

for _module in sorted(module.name for module in pkgutil.iter_modules(__path__)):
    if not _module.startswith("_"):
        import_module(f"{__name__}.{_module}")
