"""A mean of a network's weights over the steps of its training: less noisy than the last ones, and free of charge."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, Literal, get_args

import torch
from torch import nn

from dphero._checks import one_of

Averaging = Literal["late", "ema"]
_LATE = 8.0
_MOST = 0.9999


class WeightAverage:
    """A copy of a network whose weights are a mean of the trained one's over steps, later ones counting more.

    mean ← mean + share · (weights − mean) after step t, where the share is

    - ``late``: (1 + γ) / (t + γ), γ = 8: about the last ninth of the steps counts (Shamir and Zhang 2013);
    - ``ema``: 1 − min(0.9999, (1 + t) / (10 + t)), an exponential mean with a warm-up: at first about the last tenth
      of the steps, in long trainings the last ten thousand.

    It is made from what was released, so it costs nothing. Buffers are those of the trained network.
    """

    def __init__(self, network: nn.Module, kind: str = "late") -> None:
        one_of("averaging", kind, get_args(Averaging))
        self.network, self.mean, self.kind, self.steps = network, copy.deepcopy(network), kind, 0
        self._pairs = list(zip(self.mean.parameters(), network.parameters(), strict=True))

    def restart(self) -> None:
        """Begin anew from the network as it is."""
        self.steps = 0
        self.mean.load_state_dict(self.network.state_dict())

    @torch.no_grad()
    def take(self) -> None:
        """Take the weights after another step in."""
        self.steps += 1
        share = self._share()
        trained = [(mean, value) for mean, value in self._pairs if value.requires_grad]
        torch._foreach_lerp_([mean for mean, _ in trained], [value for _, value in trained], share)
        for mean, value in zip(self.mean.buffers(), self.network.buffers(), strict=True):
            mean.copy_(value)

    def give(self) -> None:
        """Put the mean in the place of the weights."""
        self.network.load_state_dict(self.mean.state_dict())

    def state(self) -> dict[str, Any]:
        """Return what a resumed training needs."""
        return {"steps": self.steps, "mean": self.mean.state_dict()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a state."""
        self.mean.load_state_dict(state["mean"])
        self.steps = int(state["steps"])

    def _share(self) -> float:
        t = self.steps
        return (1 + _LATE) / (t + _LATE) if self.kind == "late" else 1 - min(_MOST, (1 + t) / (10 + t))
