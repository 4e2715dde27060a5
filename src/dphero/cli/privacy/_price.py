"""How the pricing commands take their arguments and show a price."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated

import typer
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from dphero.cli._console import console
from dphero.cli._options import Accountant

if TYPE_CHECKING:
    from dphero.accounting import Price

DeltaOption = Annotated[float, typer.Option(help="The probability left out of account, below 1 / examples.")]
AccountantOption = Annotated[Accountant, typer.Option(help="How to price.")]


def show(
    price: Price,
    *,
    noise_multiplier: float,
    sample_rate: float,
    steps: int,
    as_json: bool,
    solved: str | None = None,
) -> None:
    """Print what Poisson Gaussian steps cost, for people or as one JSON object with fixed keys.

    Args:
        price: The price of all steps.
        noise_multiplier: The noise of each step.
        sample_rate: The probability with which an example enters a lot.
        steps: How many steps.
        as_json: Whether to print JSON.
        solved: The name of the number that was solved for, if one was.
    """
    if as_json:
        finite = math.isfinite(price.epsilon)
        record = {
            "epsilon": price.epsilon if finite else None,
            "delta": price.delta,
            "accountant": price.accountant,
            "noise_multiplier": noise_multiplier,
            "sample_rate": sample_rate,
            "steps": steps,
            "relation": price.relation,
            "is_bound": price.is_bound,
        }
        warning = price.warning if finite else "epsilon is infinite: nothing is guaranteed"
        typer.echo(json.dumps(record | ({"warning": warning} if warning else {})))
        return
    # Whatever is rounded for the eye is rounded to the safe side: a price and noise up, a sample rate down.
    rows = {
        "noise multiplier": ("noise_multiplier", f"{_round(noise_multiplier, math.ceil):.6g}"),
        "sample rate": ("sample_rate", f"{_round(sample_rate, math.floor):.6g}"),
        "steps": ("steps", f"{steps:,}"),
        "accountant": ("", f"{price.accountant}, {'upper bound' if price.is_bound else 'not a bound'}"),
        "neighbours": ("", price.relation.replace("_", " ")),
    }
    table = Table.grid(padding=(0, 2))
    for label, (name, value) in rows.items():
        table.add_row(label, value, style="bold green" if name == solved else None)
    if price.warning:
        table.add_row("warning", price.warning, style="yellow")
    title = in_words(price.epsilon, price.delta, is_bound=price.is_bound)
    console().print(Panel(table, title=Text(title, style="bold"), expand=False, title_align="left"))


def in_words(epsilon: float | None, delta: float, *, is_bound: bool) -> str:
    """Return a price in one line, rounded up; ``None`` is an infinite ε, as in JSON."""
    if epsilon is None or math.isinf(epsilon):
        return "ε = ∞: nothing is guaranteed"
    return f"ε {'≤' if is_bound else '≈'} {_round(epsilon, math.ceil, 5):.5g} at δ = {delta:g}"


def _round(value: float, towards: Callable[[float], int], digits: int = 6) -> float:
    """``value`` to so many significant digits, rounded by ``towards`` (``math.ceil`` or ``math.floor``)."""
    if value == 0 or not math.isfinite(value):
        return value
    nearest = float(f"{value:.{digits}g}")
    if math.isclose(nearest, value, rel_tol=1e-12):
        return nearest
    scale = 10.0 ** (digits - 1 - math.floor(math.log10(abs(value))))
    return float(towards(value * scale)) / scale
