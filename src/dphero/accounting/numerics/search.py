"""Searches for the largest privacy cost that meets a target, in few evaluations and on the safe side.

A search takes one cost function or several of rising precision. The earlier ones only say where to look; the
last one decides.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

_SQUARE_ROOT_LAW = 0.45  # Gaussian composition: the cost grows a little slower than the root of the steps
_LONGEST_STRIDE = 2.0


@dataclass
class _Bracket:
    """The costliest safe and the cheapest unsafe point seen, on a logarithmic axis along which cost grows."""

    target: float
    elasticity: float
    safe: tuple[float, float] | None = None
    unsafe: tuple[float, float] | None = None
    tries: int = 0
    streak: int = 0

    def add(self, position: float, cost: float) -> None:
        self.tries += 1
        if cost <= self.target:
            self.safe, self.streak = (position, cost), max(self.streak, 0) + 1
        else:
            self.unsafe, self.streak = (position, cost), min(self.streak, 0) - 1

    def propose(self) -> float:
        """Where the cost should meet the target: log-linear between two points, a stride beyond one."""
        if self.safe is None or self.unsafe is None:
            position, cost = self.safe or self.unsafe or (0.0, 0.0)
            stride = _LONGEST_STRIDE
            if 0 < cost < math.inf:
                distance = abs(math.log(self.target / cost)) / self.elasticity
                stride = min(max(distance, 1e-4 * 4**self.tries), _LONGEST_STRIDE)
            return position + stride if self.safe else position - stride
        (low, low_cost), (high, high_cost) = self.safe, self.unsafe
        if low_cost <= 0 or math.isinf(high_cost) or abs(self.streak) > 2:
            self.streak = 0
            return (low + high) / 2
        rise = math.log(high_cost / low_cost)
        self.elasticity = rise / (high - low)
        return low + (high - low) * math.log(self.target / low_cost) / rise


def largest_count(
    costs: Sequence[Callable[[int], float]], target: float, guess: int, limit: int, before: int = 0
) -> int:
    """The largest whole number in [0, limit] whose cost is at most ``target``; ``guess`` is where to look first.

    The cost is taken to be smooth in the logarithm of the count and of what was counted ``before``, together.

    Guarantee:
        Exact if the last cost function does not fall as the count grows: ``cost(n) <= target < cost(n + 1)``,
        both evaluated. Nothing is evaluated at 0, which is taken to be safe.
    """
    elasticity = _SQUARE_ROOT_LAW
    safe = guess
    for cost in costs:
        bracket = _Bracket(target, elasticity)
        probe, safe, unsafe = safe, 0, limit + 1
        while unsafe - safe > 1:
            probe = min(max(probe, safe + 1), unsafe - 1)
            value = cost(probe)
            bracket.add(math.log(before + probe), value)
            if value <= target:
                safe = probe
            else:
                unsafe = probe
            furthest = math.log(before + limit) + 1
            probe = math.floor(math.exp(min(bracket.propose(), furthest))) - before
        elasticity = bracket.elasticity
    return safe


def safe_value(
    costs: Sequence[Callable[[float], float]],
    target: float,
    guess: float,
    *,
    safest: float,
    riskiest: float,
    tolerance: float,
) -> float | None:
    """A value between ``safest`` and ``riskiest`` whose cost is at most ``target``, and close below it.

    Costs grow from ``safest`` to ``riskiest``, both positive; either may be the smaller number. ``None`` is returned if
    even ``safest`` costs more than the target.

    Guarantee:
        The last cost function was evaluated at what is returned and is at most ``target`` there; it is at
        least ``(1 - tolerance)`` of it unless the value is ``riskiest`` itself or the cost jumps.
    """
    elasticity = _SQUARE_ROOT_LAW
    found: float | None = None
    for stage, cost in enumerate(costs, start=1):
        slack = tolerance if stage == len(costs) else 10 * tolerance
        start = guess if found is None else found
        found, elasticity = _approach(cost, target, start, (safest, riskiest), slack, elasticity)
    return found


def _approach(
    cost: Callable[[float], float],
    target: float,
    guess: float,
    ends: tuple[float, float],
    tolerance: float,
    elasticity: float,
) -> tuple[float | None, float]:
    """One stage of ``safe_value``: what it found, and the elasticity of the cost there."""
    safest, riskiest = ends
    sign = 1.0 if riskiest > safest else -1.0
    start, end = sign * math.log(safest), sign * math.log(riskiest)
    bracket = _Bracket(target * (1 - tolerance / 2), elasticity)  # aim at the middle of what is accepted
    found: float | None = None
    position = sign * math.log(guess)
    while True:
        position = min(max(position, start), end)
        value = {start: safest, end: riskiest}.get(position, math.exp(sign * position))
        price = cost(value)
        bracket.add(position, price)
        if price <= target:
            found = value
            if price >= target * (1 - tolerance) or position == end:
                break
        elif position == start:
            break
        if bracket.safe and bracket.unsafe and bracket.unsafe[0] - bracket.safe[0] < 1e-9:
            break
        position = bracket.propose()
    return found, bracket.elasticity
