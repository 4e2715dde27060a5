"""``dphero calibrate``: the noise multiplier, steps or sample rate that meet a privacy target."""

from __future__ import annotations

from typing import Annotated

import typer

from dphero.cli._options import JsonOption
from dphero.cli.privacy._price import AccountantOption, DeltaOption, show


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("calibrate")(calibrate)


def calibrate(
    epsilon: Annotated[float, typer.Option(help="The privacy loss allowed.")],
    delta: DeltaOption,
    noise_multiplier: Annotated[float | None, typer.Option(help="Noise over clip bound; leave out to solve.")] = None,
    sample_rate: Annotated[float | None, typer.Option(help="Sampling probability; leave out to solve.")] = None,
    steps: Annotated[int | None, typer.Option(help="Number of steps; leave out to solve.")] = None,
    accountant: AccountantOption = "pld",
    json: JsonOption = False,
) -> None:
    """Solve for the one of noise multiplier, sample rate and steps that is left out."""
    from dphero.accounting import (
        Ledger,
        PoissonGaussian,
        calibrate_noise_multiplier,
        calibrate_sample_rate,
        calibrate_steps,
        price,
    )

    given = {"noise_multiplier": noise_multiplier, "sample_rate": sample_rate, "steps": steps}
    missing = [name for name, value in given.items() if value is None]
    if len(missing) != 1:
        raise ValueError(
            f"give exactly two of --noise-multiplier, --sample-rate and --steps, got {3 - len(missing)}: the "
            "one left out is solved for"
        )
    if noise_multiplier is None and sample_rate is not None and steps is not None:
        noise_multiplier = calibrate_noise_multiplier(epsilon, delta, sample_rate, steps, accountant)
    elif sample_rate is None and noise_multiplier is not None and steps is not None:
        sample_rate = calibrate_sample_rate(epsilon, delta, noise_multiplier, steps, accountant)
    elif steps is None and noise_multiplier is not None and sample_rate is not None:
        steps = calibrate_steps(epsilon, delta, sample_rate, noise_multiplier, accountant)
    assert noise_multiplier is not None and sample_rate is not None and steps is not None
    ledger = Ledger()
    ledger.record(PoissonGaussian(sample_rate, noise_multiplier), steps)
    show(
        price(ledger, delta, accountant),
        noise_multiplier=noise_multiplier,
        sample_rate=sample_rate,
        steps=steps,
        as_json=json,
        solved=missing[0],
    )
