"""The parts of a private training, put together."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset

from dphero.accounting import Ledger
from dphero.checks.modules import require_private_modules, trained_parameters
from dphero.checks.optimizers import innermost
from dphero.cuda_graphs.recorded_colour import RecordedColour
from dphero.cuda_graphs.replay import can_be_recorded
from dphero.engine.account import Account
from dphero.engine.options import Options
from dphero.engine.sources import LotPlan, noise_and_lot_key, plan_lots
from dphero.geometry.geometry import colour_all_
from dphero.guidance import resolve
from dphero.mechanism.clipping import make_clipping
from dphero.mechanism.parameters import describe
from dphero.mechanism.release import Mechanism
from dphero.noise import NoiseSource
from dphero.run import Run, make_row_limit, require_free
from dphero.sampling import PrivateLoader


def assemble(
    options: Options,
    module: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer],
    data: DataLoader[Any] | Dataset[Any],
    account: Account,
) -> tuple[Run, PrivateLoader]:
    """Make a run and its loader, and charge them to an account.

    Each part may refuse; nothing is changed before all have agreed.
    """
    noise, key = noise_and_lot_key(options, account.used_keys)
    given = list(optimizer) if isinstance(optimizer, Iterable) else [optimizer]
    optimizers: list[Optimizer] = [innermost(each) for each in given]
    require_private_modules(module)
    require_free(module)
    parameters = trained_parameters(module, optimizers)
    plan = plan_lots(options, data, key, account.ledger)
    event = plan.event(float(options.noise_multiplier))
    account.require_relation(event, options.sampling)
    limit = make_row_limit(
        options.physical_batch_size, plan.sampler.usual_sizes[-1], parameters, recorded=options.cuda_graphs is True
    )
    run = Run(
        module=module,
        optimizers=optimizers,
        parameters=parameters,
        mechanism=_mechanism(options, plan, noise, module, parameters, account.ledger),
        lots=plan.lots,
        sampler=plan.sampler,
        row_limit=limit,
        loss_reduction=options.loss_reduction,
        cuda_graphs=options.cuda_graphs,
    )
    account.begin(run.mechanism, event)
    loader = PrivateLoader(
        data,
        plan.sampler,
        plan.lots,
        before_lot=run.before_lot,
        before_batch=run.before_batch,
        handed_out=run.handed_out,
        expected_batch_size=plan.expected,
        physical_batch_size=lambda: limit.rows,
        pad_to=options.lengths,
    )
    return run, loader


def _mechanism(
    options: Options,
    plan: LotPlan,
    noise: NoiseSource,
    module: nn.Module,
    parameters: dict[str, nn.Parameter],
    ledger: Ledger,
) -> Mechanism:
    templates, noise_multiplier = describe(module, parameters), float(options.noise_multiplier)
    return Mechanism(
        options.mechanism,
        parameters=parameters,
        templates={name: template.for_guidance for name, template in templates.items()},
        guidance=resolve(options.guidance),
        clipping=make_clipping(
            options.clipping,
            options.max_grad_norm,
            expected_lot=plan.expected,
            noise_multiplier=noise_multiplier,
            layers={name: template.layer for name, template in templates.items()},
        ),
        noise=noise,
        noise_multiplier=noise_multiplier,
        expected_lot=plan.expected,
        event=plan.event,
        ledger=ledger,
        colour=RecordedColour() if options.cuda_graphs and can_be_recorded(*parameters.values()) else colour_all_,
    )
