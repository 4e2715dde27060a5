"""The systems of the comparison, each one small file on top of the same parts.

Every module in ``on_engine`` and ``own_mechanism`` adds its methods to :data:`METHODS` with :func:`register`.
"""

from __future__ import annotations

import pkgutil
from importlib import import_module

from dphero.methods.card import Card
from dphero.methods.method import METHODS, Method, make, register
from dphero.methods.task import Task
from dphero.methods.trainer import Step, Trainer, extra_of

__all__ = ["METHODS", "Card", "Method", "Step", "Task", "Trainer", "extra_of", "make", "register"]

for _room in ("on_engine", "own_mechanism"):
    for _module in sorted(module.name for module in pkgutil.iter_modules([f"{__path__[0]}/{_room}"])):
        import_module(f"{__name__}.{_room}.{_module}")
