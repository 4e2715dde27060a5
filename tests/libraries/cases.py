"""Models of well-known libraries, tiny and with random weights: what users bring.

``CASES`` maps ``"library/model"`` to a function that returns a :class:`~tests.libraries.verdict.Model`. A library is
imported when one of its models is made.
"""

from __future__ import annotations

from collections.abc import Callable

from tests.libraries import cases_adapters, cases_diffusion, cases_images, cases_text, cases_torch
from tests.libraries.verdict import Model

CASES: dict[str, Callable[[], Model]] = {}
for module in (cases_torch, cases_text, cases_images, cases_adapters, cases_diffusion):
    CASES |= module.CASES
