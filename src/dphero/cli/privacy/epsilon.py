"""``dphero epsilon``: what a run of private steps costs."""

from __future__ import annotations

from typing import Annotated

import typer

from dphero.cli._options import JsonOption
from dphero.cli.privacy._price import AccountantOption, DeltaOption, show


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("epsilon")(epsilon)


def epsilon(
    noise_multiplier: Annotated[float, typer.Option(help="Noise standard deviation over the clip bound.")],
    delta: DeltaOption,
    sample_rate: Annotated[
        float | None, typer.Option(help="Probability with which an example enters a lot; or --lot and --dataset-size.")
    ] = None,
    steps: Annotated[int | None, typer.Option(help="Number of steps; or --epochs.")] = None,
    dataset_size: Annotated[int | None, typer.Option(help="Number of records, a public figure.")] = None,
    lot: Annotated[int | None, typer.Option(help="Expected examples in a step.")] = None,
    epochs: Annotated[float | None, typer.Option(help="Passes over the data.")] = None,
    accountant: AccountantOption = "pld",
    json: JsonOption = False,
) -> None:
    """Price steps of Poisson-sampled Gaussian noise (DP-SGD and the ellipsoid mechanism)."""
    from dphero import _checks as checks
    from dphero.accounting import Ledger, PoissonGaussian, price

    rate = _rate(sample_rate, lot, dataset_size)
    count = _steps(steps, epochs, rate)
    ledger = Ledger()
    ledger.record(PoissonGaussian(rate, noise_multiplier), checks.whole("steps", count, least=0))
    show(
        price(ledger, delta, accountant),
        noise_multiplier=noise_multiplier,
        sample_rate=rate,
        steps=count,
        as_json=json,
    )


def _rate(sample_rate: float | None, lot: int | None, dataset_size: int | None) -> float:
    """Return the sample rate, given as it is or as lot and number of records."""
    from dphero import _checks as checks

    if sample_rate is not None and lot is None and dataset_size is None:
        return sample_rate
    if sample_rate is not None or lot is None or dataset_size is None:
        raise ValueError("give --sample-rate, or --lot and --dataset-size, whose ratio it is")
    lot, records = checks.whole("lot", lot), checks.whole("dataset_size", dataset_size)
    if lot > records:
        raise ValueError(f"a lot of {lot:,} does not fit in {records:,} records")
    return lot / records


def _steps(steps: int | None, epochs: float | None, sample_rate: float) -> int:
    """Return the number of steps, given as it is or as passes over the data, as ``dphero train`` counts them."""
    from dphero import _checks as checks

    if (steps is None) == (epochs is None):
        raise ValueError("give --steps, or --epochs, one of them")
    if steps is not None:
        return steps
    return max(1, round(checks.positive("epochs", epochs) * max(1, round(1 / checks.sample_rate(sample_rate)))))
