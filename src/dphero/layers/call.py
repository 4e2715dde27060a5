"""What a layer rule works with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from torch import Tensor, nn

from dphero.gradients.batch import PieceMaker


class LayerCall(Protocol):
    """One call of one layer.

    ``call["weight"]`` is the module's parameter, detached; ``call.get("bias")`` is ``None`` where there is
    none; ``call.wants("bias")`` tells whether its gradient is asked for.
    """

    @property
    def module(self) -> nn.Module:
        """The module that is being called."""

    @property
    def label(self) -> str:
        """Name and type of the module, for messages."""

    @property
    def memory(self) -> dict[str, Any]:
        """What the rule keeps from one batch to the next; it goes when the model is no longer private."""

    @property
    def original(self) -> Callable[..., Any]:
        """The module's own ``forward``."""

    def __getitem__(self, name: str) -> Tensor:
        """Return a parameter, detached."""

    def get(self, name: str) -> Tensor | None:
        """Return the detached parameter, or ``None`` where the module has none of that name."""

    def wants(self, name: str) -> bool:
        """Tell whether the gradient of this parameter is asked for."""

    def tap(
        self, compute: Callable[[], Tensor], make: PieceMaker, *saved: Any, role: str = "", split: bool = False
    ) -> Tensor:
        """Compute an output, and have its gradient turned into pieces.

        Args:
            compute: Returns the output from detached parameters.
            make: ``make(output_gradient, *saved)`` returns the pieces by local parameter name; every tensor
                reaches it with the rows in front, one per example (or several consecutive ones, where the model
                folded positions into the batch: such pieces are added up).
            saved: What ``make`` needs besides, usually the layer's input.
            role: Tells the outputs of one module apart, where it taps several.
            split: Give ``make`` every tensor as ``(n, ...)``: for each example, that of a batch of this example alone.
        """
