"""Clip rules: from per-example norms to per-example weights.

Every rule keeps ‖(weights_i · w_i)‖ ≤ ``norm`` for the whitened gradient w_i of each example, over all
parameters together: one example moves the sum by at most ``norm``.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from dphero._checks import one_of, positive

_BOUNDS = (1e-20, 1e20)
"""Of a bound that follows the norms: beyond them, float32 has no noise for it."""

_ROUNDING = 1e-6
"""How far a user's rule may go beyond C by rounding: it is given norms that are larger by as much."""


class Clipping(ABC):
    """A clip rule with a bound ``norm`` on what one example can add."""

    kind: ClassVar[str] = "own"
    """Its name in ``make_private`` and in checkpoints; a rule of the user's own goes by the name of its class."""

    def __init__(self, norm: float) -> None:
        self.norm = self._first_norm = norm

    @abstractmethod
    def weights(self, square_norms: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return, for each parameter, the weight of each example, given ‖w_i‖² by parameter."""

    @property
    def option(self) -> str | Clipping:
        """What ``make_private`` takes as ``clipping=`` to make such a rule again."""
        return self.kind

    @property
    def note(self) -> str | None:
        """What the statement has to say of this rule; ``None`` if all it promises is proven."""
        return None

    @property
    def count_noise(self) -> float | None:
        """Standard deviation of the noise on the count that adapts the bound; ``None`` where none is released."""
        return None

    def observe(self, square_norms: Mapping[str, Tensor]) -> Tensor | None:
        """Return these examples' share of the count to be released, or ``None`` where none is."""
        return None

    def adapt(self, noisy_count: float, expected_lot: float) -> None:  # noqa: B027 (most rules do not)
        """Move the bound after a release."""

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint needs."""
        return {"kind": self.kind, "max_grad_norm": self._first_norm, "norm": self.norm}

    def check(self, state: Mapping[str, Any]) -> None:
        """Raise ``ValueError`` unless ``state`` was saved by a rule like this one."""
        for name, ours in self.state_dict().items():
            if name != "norm" and state.get(name) != ours:
                raise ValueError(
                    f"the checkpoint was made with clipping {name} {state.get(name)!r}, this engine has {ours!r}; "
                    "call make_private with the same arguments to resume"
                )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a checkpoint."""
        self.check(state)
        self.norm = float(state["norm"])


class Flat(Clipping):
    """One norm over all parameters: weights = min(1, C / ‖w_i‖)."""

    kind = "flat"

    def weights(self, square_norms: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        return dict.fromkeys(square_norms, _bounded(self.norm, total(square_norms)))


class Automatic(Clipping):
    """Normalise instead of clip: weights = C / (‖w_i‖ + γ) (Bu et al.), always below C / ‖w_i‖."""

    kind = "automatic"

    def __init__(self, norm: float, stability: float = 0.01) -> None:
        super().__init__(norm)
        self.stability = stability

    def weights(self, square_norms: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        return dict.fromkeys(square_norms, self.norm / (total(square_norms).sqrt() + self.stability))


class PerLayer(Clipping):
    """Each of the L modules with parameters is clipped alone, to C / √L, so that the whole stays within C."""

    kind = "per_layer"

    def __init__(self, norm: float, layers: Mapping[str, str]) -> None:
        super().__init__(norm)
        self._layers = dict(layers)
        self._root = math.sqrt(len(set(layers.values())))

    def weights(self, square_norms: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        sums: dict[str, Tensor] = {}
        for name, squares in square_norms.items():
            layer = self._layers[name]
            sums[layer] = sums[layer] + squares if layer in sums else squares
        weights = {layer: _bounded(self.norm / self._root, squares) for layer, squares in sums.items()}
        return {name: weights[self._layers[name]] for name in square_norms}


class Adaptive(Flat):
    """The bound follows a quantile of the norms, privately (Andrew et al.).

    Each release also publishes a noisy count of the examples below the bound, over the *whole* lot:
    b̃ = (Σ_i (1[‖w_i‖ ≤ C_t] − ½) + σ_b z) / B + ½, then C_{t+1} = C_t exp(−η (b̃ − quantile)), by no more than a
    factor e. Σ moves by at most ½ per example, so the step costs what multiplier σ costs if the gradient is released at
    (σ⁻² − (2σ_b)⁻²)^(−1/2). The bound of step t is fixed before its lot is drawn.

    Args:
        norm: C₀.
        expected_lot: B.
        noise_multiplier: σ. The count's noise σ_b is B / 20, at least σ: then the gradient's multiplier is at
            most 2/√3 of σ.
        quantile: Which share of the examples the bound should leave unclipped.
        rate: η.
    """

    kind = "adaptive"

    def __init__(
        self, norm: float, expected_lot: float, noise_multiplier: float, quantile: float = 0.5, rate: float = 0.2
    ) -> None:
        super().__init__(norm)
        self.quantile, self.rate = quantile, rate
        self._count_noise = max(expected_lot / 20, noise_multiplier)

    @property
    def count_noise(self) -> float | None:
        return self._count_noise

    def observe(self, square_norms: Mapping[str, Tensor]) -> Tensor | None:
        below = total(square_norms) <= self.norm**2
        return (below.to(torch.float64) - 0.5).sum()

    def adapt(self, noisy_count: float, expected_lot: float) -> None:
        fraction = noisy_count / expected_lot + 0.5
        step = -self.rate * (fraction - self.quantile)
        self.norm = _within(self.norm * math.exp(_within(step, -1.0, 1.0)), *_BOUNDS)

    def state_dict(self) -> dict[str, Any]:
        settings = {"quantile": self.quantile, "rate": self.rate, "count_noise": self._count_noise}
        return {**super().state_dict(), **settings}


class OwnRule(Clipping):
    """A rule of the user's own, held to its promise at every batch, and before the first at made-up norms.

    It promises that the weights of an example depend on the norms of that example alone, and that the weighted
    gradient is no longer than C. The second is checked; of the first, that the weights stay the same when every other
    example is left out, and that of the first example when it is alone. The bound is fixed, and no count is released.

    Args:
        rule: The user's rule.
        norm: C.

    Raises:
        ValueError: If the rule cannot be used, or does not keep its promise.
    """

    def __init__(self, rule: Clipping, norm: float) -> None:
        super().__init__(norm)
        self.rule, self.name = rule, f"{type(rule).__module__}.{type(rule).__qualname__}"
        if type(rule) in (Flat, Automatic, PerLayer, Adaptive, OwnRule):
            raise ValueError(f"{self.name} is built in: pass its name, clipping={rule.kind!r}")
        if rule.count_noise is not None:
            raise ValueError(
                f"your clip rule {self.name} releases a count, which cannot be priced without a proof for that count: "
                'let count_noise be None, or use clipping="adaptive"'
            )
        sizes = norm * 10.0 ** torch.arange(-12.0, 13.0, dtype=torch.float64, device="cpu")
        self._trial = torch.cat([sizes.new_zeros(1), sizes, norm * torch.linspace(0.1, 3.0, 30, dtype=sizes.dtype)])

    def try_out(self, names: Iterable[str]) -> None:
        """Weigh examples of many made-up norms; it raises ``ValueError`` if the rule breaks its promise there."""
        listed = list(names)
        even = self._trial.square().to(torch.float32) / len(listed)  # over the parameters; then uneven
        self.weights({name: torch.cat([even, even.roll(shift)]) for shift, name in enumerate(listed)})

    @property
    def option(self) -> str | Clipping:
        return self.rule

    @property
    def note(self) -> str | None:
        return (
            f"Gradients were clipped by your own rule {self.name}; its promise is not proven by dphero. That no "
            "example adds more than the clip norm was checked at every batch. That the weight of an example depends on "
            "its own norm alone is up to the rule."
        )

    def weights(self, square_norms: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        finite = total(square_norms).isfinite()  # the others count for nothing, whatever they weigh
        room = (1 + _ROUNDING) ** 2
        squares = {name: torch.where(finite, each * room, 0.0) for name, each in square_norms.items()}
        weights = self._ask(squares, slice(None))
        stacked = torch.stack(list(weights.values())).double()
        self._require(bool(((stacked >= 0) & stacked.isfinite()).all()), "some weight is negative or not finite")
        lengths = (stacked.square() * torch.stack(list(squares.values())).double()).sum(0).sqrt()
        longest = float(lengths.max()) if len(lengths) else 0.0
        self._require(
            longest <= self.norm * (1 + _ROUNDING),
            f"a weighted gradient has norm {longest:.8g}, more than max_grad_norm {self.norm:g}",
        )
        for some in (slice(0, 1), slice(0, None, 2), slice(1, None, 2))[: 1 + len(lengths)]:
            alone = torch.stack(list(self._ask(squares, some).values())).double()
            self._require(
                torch.allclose(alone, stacked[:, some], rtol=1e-4, atol=0.0),
                "the weights of examples change when other examples are left out",
            )
        return weights

    def _ask(self, squares: Mapping[str, Tensor], which: slice) -> dict[str, Tensor]:
        """Return the rule's weights of some examples, in the order of the parameters."""
        given = {name: each[which].clone() for name, each in squares.items()}  # a rule may work in place
        shapes = {name: each.shape for name, each in given.items()}
        found = self.rule.weights(given)
        fits = found.keys() == shapes.keys() and all(found[name].shape == shape for name, shape in shapes.items())
        self._require(fits, "it must return one weight for each example, for each parameter")
        self._require(self.rule.norm == self.norm, f"its norm is {self.rule.norm!r}, max_grad_norm {self.norm!r}")
        return {name: found[name] for name in shapes}

    def _require(self, holds: bool, otherwise: str) -> None:
        if not holds:
            raise ValueError(
                f"your clip rule {self.name} breaks its promise, and nothing is released: {otherwise}. It must return "
                "weights with weight × norm ≤ max_grad_norm, each from the norms of one example alone."
            )

    def state_dict(self) -> dict[str, Any]:
        return {**self.rule.state_dict(), **super().state_dict(), "kind": self.name}


def _within(value: float, low: float, high: float) -> float:
    return min(max(value, low), high)


def make_clipping(
    kind: str | Clipping | type[Clipping],
    norm: float,
    *,
    expected_lot: float,
    noise_multiplier: float,
    layers: Mapping[str, str],
) -> Clipping:
    """Make a clip rule by its name, or from one of the user's own."""
    norm = positive("max_grad_norm", norm)
    if isinstance(kind, Clipping):
        own = OwnRule(kind, norm)
        own.try_out(layers)
        return own
    if isinstance(kind, type) and issubclass(kind, Clipping):
        raise ValueError(f"clipping= takes a rule, not its class: pass clipping={kind.__name__}({norm:g})")
    one_of("clipping", kind, ("flat", "per_layer", "automatic", "adaptive"))
    if kind == "automatic":
        return Automatic(norm)
    if kind == "per_layer":
        return PerLayer(norm, layers)
    if kind == "adaptive":
        return Adaptive(norm, expected_lot, noise_multiplier)
    return Flat(norm)


class SquareNorms(dict[str, Tensor]):
    """‖w_i‖² by parameter, of which all lie in one tensor; ``total`` is that over all parameters.

    Args:
        names: The parameters.
        stacked: A row for each of them; nobody writes there afterwards.
    """

    def __init__(self, names: Iterable[str], stacked: Tensor) -> None:
        super().__init__(zip(names, stacked.unbind(0), strict=True))
        self.total = stacked.sum(0)


def total(square_norms: Mapping[str, Tensor]) -> Tensor:
    """Return ‖w_i‖² over all parameters."""
    if isinstance(square_norms, SquareNorms):
        return square_norms.total
    return torch.stack(list(square_norms.values())).sum(0)


def _bounded(norm: float, squares: Tensor) -> Tensor:
    return (norm / squares.sqrt().clamp(min=torch.finfo(squares.dtype).tiny)).clamp(max=1.0)
