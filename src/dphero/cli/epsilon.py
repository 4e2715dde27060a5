"""``dphero epsilon``: what a run of private steps costs."""

from __future__ import annotations

from typing import Annotated

import typer

from dphero.cli._price import AccountantOption, DeltaOption, JsonOption, show


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("epsilon")(epsilon)


def epsilon(
    noise_multiplier: Annotated[float, typer.Option(help="Noise standard deviation over the clip bound.")],
    sample_rate: Annotated[float, typer.Option(help="Probability with which an example enters a lot.")],
    steps: Annotated[int, typer.Option(help="Number of steps.")],
    delta: DeltaOption,
    accountant: AccountantOption = "pld",
    json: JsonOption = False,
) -> None:
    """Price steps of Poisson-sampled Gaussian noise (DP-SGD and the ellipsoid mechanism)."""
    from dphero import _checks as checks
    from dphero.accounting import Ledger, PoissonGaussian, price

    ledger = Ledger()
    ledger.record(PoissonGaussian(sample_rate, noise_multiplier), checks.whole("steps", steps, least=0))
    show(
        price(ledger, delta, accountant),
        noise_multiplier=noise_multiplier,
        sample_rate=sample_rate,
        steps=steps,
        as_json=json,
    )
