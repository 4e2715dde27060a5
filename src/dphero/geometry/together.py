"""Factors made of spectra many at a time, so that a GPU is sent all their numbers at once.

Each is the one that its constructor makes, bit for bit. Those whose basis has to be looked at are left to it.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dphero.geometry.basis import is_known_good
from dphero.geometry.dense import Dense, Singular
from dphero.geometry.factor import Factor
from dphero.geometry.low_rank import LowRank
from dphero.numerics.transfer import grouped, sent

_EVEN = 128
"""So many numbers: tensors of multiples of it, one after another, each lie as memory of their own does."""


class Known(NamedTuple):
    """What is known of a factor A = U diag(v) U^T, or of one with a scale s along all directions that U lacks.

    Attributes:
        name: whose it is, for error messages.
        basis: U, of k x k (dense) or of fewer columns (low rank), on the CPU or on the device.
        scales: v, in float64 on the CPU.
        rest: s; of no meaning for a dense factor.
        defect: how far U^T U is from I at most; None where that is not known.
        device: where the factor belongs.
        bare: whether some v may be 0, which then are (:class:`~dphero.geometry.dense.Singular`).
    """

    name: str
    basis: Tensor
    scales: Tensor
    rest: float
    defect: float | None
    device: torch.device
    bare: bool = False


def together(wanted: Sequence[Known]) -> list[Factor]:
    """Returns the factors.

    Raises:
        ValueError: where a constructor would; its message begins with the name.
    """
    groups = _alike(wanted, _planned(wanted))
    rows = [_rows(group) for group in groups]
    far = [number for number, each in enumerate(wanted) if each.basis.device != each.device]
    places = [*(wanted[group[0].number].device for group in groups), *(wanted[number].device for number in far)]
    there = sent([*rows, *(wanted[number].basis for number in far)], places)
    bases = [each.basis.detach() for each in wanted]
    for number, basis in zip(far, there[len(groups) :], strict=True):
        bases[number] = basis
    found: dict[int, Factor] = {}
    for group, numbers in zip(groups, there[: len(groups)], strict=True):
        _form(group, [bases[plan.number] for plan in group], numbers)
        found.update((plan.number, plan.factor) for plan in group)
    for number, (each, basis) in enumerate(zip(wanted, bases, strict=True)):
        if number not in found:
            found[number] = _constructed(each._replace(basis=basis))
    return [found[number] for number in range(len(wanted))]


class _Plan(NamedTuple):
    """A factor that only lacks its tensors, and the numbers to be sent for it."""

    number: int
    factor: Dense | LowRank
    rows: list[list[float]]


def _planned(wanted: Sequence[Known]) -> list[_Plan]:
    """Returns plans for all but those that are left to the constructors."""
    if not wanted:
        return []
    # what a constructor asks its tensor of scales for, here of all at once
    scales, plans, start = torch.cat([each.scales for each in wanted]), [], 0
    exact, single = scales.tolist(), scales.float().tolist()
    for number, each in enumerate(wanted):
        some = slice(start, start + len(each.scales))
        try:
            plans.append(_plan(number, each, exact[some], single[some]))
        except ValueError as error:
            raise ValueError(f"block {each.name!r}: {error}") from error
        start = some.stop
    return [plan for plan in plans if plan is not None]


def _plan(number: int, known: Known, exact: list[float], single: list[float]) -> _Plan | None:
    """Does what a constructor does before it forms tensors, with all of its checks."""
    basis = known.basis
    assert known.scales.shape == basis.shape[1:] and 0 < basis.shape[1] <= basis.shape[0]
    if known.bare or basis.dtype not in (torch.float32, torch.float64):
        return None
    made: Dense | LowRank
    if basis.shape[0] == basis.shape[1]:
        made = Dense.__new__(Dense)
        made._admit(*exact)
    else:
        made = LowRank.__new__(LowRank)
        made.rest = float(known.rest)
        made._admit(*exact, made.rest)
    if not is_known_good(made._condition, known.defect):
        return None
    return _Plan(number, made, made._plan(exact if basis.dtype == torch.float64 else single, basis))


def _alike(wanted: Sequence[Known], plans: Sequence[_Plan]) -> list[list[_Plan]]:
    """Groups the plans: one set of operations forms all of a group."""

    def kind(plan: _Plan) -> Hashable:
        _, basis, _, _, _, device, _ = wanted[plan.number]
        # Slices of what is formed together lie as evenly in memory as what is formed alone, and as close: products that
        # read otherwise might round otherwise. On a CPU operations are cheaper than copies.
        even = basis.numel() % _EVEN == 0 and basis.shape[1] % 4 == 0 and basis.stride(1) == 1
        if isinstance(plan.factor, Dense) or device.type == "cpu" or not even:
            return plan.number
        return basis.shape, basis.dtype, device, len(plan.rows)

    return [[plans[n] for n in some] for some in grouped(map(kind, plans))]


def _rows(group: list[_Plan]) -> Tensor:
    rows: list[Any] = [plan.rows for plan in group]
    return torch.tensor(rows if len(group) > 1 else rows[0], dtype=group[0].factor.dtype, device="cpu")


def _form(group: list[_Plan], bases: list[Tensor], rows: Tensor) -> None:
    if len(group) == 1:
        group[0].factor._form(bases[0], rows)
    else:
        LowRank._form_alike([plan.factor for plan in group if isinstance(plan.factor, LowRank)], bases, rows)


def _constructed(known: Known) -> Factor:
    try:
        if known.bare:
            return Singular(known.basis, known.scales)
        if known.basis.shape[0] == known.basis.shape[1]:
            return Dense(known.basis, known.scales, defect=known.defect)
        return LowRank(known.basis, known.scales, known.rest, defect=known.defect)
    except ValueError as error:
        raise ValueError(f"block {known.name!r}: {error}") from error
