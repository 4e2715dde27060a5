"""What following a model's code needs of whoever runs the model: protocols, so that nothing here knows of hooks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from torch import Tensor, nn

from dphero.batch_axis.axis import BatchAxis
from dphero.batch_axis.plan import AxisLookup, Key
from dphero.functional.operation import Operation
from dphero.gradients.batch import PieceMaker
from dphero.gradients.piece import Piece


class GradientSink(Protocol):
    """Takes the per-example gradients of one backward pass, of so many ``rows``."""

    rows: int

    def expect(self, names: Iterable[str]) -> None:
        """Announce, in the forward pass, one coming piece for each of these parameters."""

    def deliver(self, name: str, piece: Piece) -> None:
        """Take one piece of a parameter."""

    def defer(self, work: Callable[[], None]) -> None:
        """Do ``work`` when autograd has finished."""


class Owner(Protocol):
    """A module that owns trainable parameters.

    Attributes:
        names: Local name to name in the whole model.
        rule: What computes its output and reports its gradients.
    """

    names: dict[str, str]
    rule: Callable[..., Any]


class Context(Protocol):
    """The forward pass in which values without a batch axis are followed."""

    @property
    def following(self) -> bool:
        """Whether such a pass is running."""

    @property
    def is_collecting(self) -> bool:
        """Whether gradients are being carried back to parameters."""

    @property
    def tape(self) -> GradientSink | None:
        """What takes the gradients; ``None`` while the model is examined."""

    @property
    def stack(self) -> Sequence[Owner]:
        """The modules that are running, one inside the other."""

    @property
    def axis_lookup(self) -> AxisLookup:
        """What is known of where calls carry the examples."""

    @property
    def rows(self) -> int:
        """The number of rows of the batch that is running."""

    def key(self, path: str, what: str) -> Key:
        """Return the key of the call that is being made."""

    def collecting(self) -> AbstractContextManager[None]:
        """Let gradients be carried back to parameters, inside a ``with`` block."""

    def follow(self, operation: Operation, tensors: list[Tensor], args: Any, kwargs: Any) -> Any:
        """Run an operation on values without a batch axis."""

    def watch(
        self,
        out: Tensor,
        layouts: Sequence[BatchAxis],
        make: PieceMaker,
        saved: tuple[Any, ...],
        label: str,
        *,
        split: bool = False,
    ) -> None:
        """Have the gradient of ``out`` turned into pieces."""


class OpaqueCall(Protocol):
    """One call of a module whose code cannot be followed."""

    @property
    def label(self) -> str:
        """Name and type of the module, for messages."""

    @property
    def parameters(self) -> Mapping[str, nn.Parameter]:
        """Local name to trained parameter."""

    @property
    def original(self) -> Callable[..., Any]:
        """The module's own ``forward``."""

    def holding(self, values: Mapping[str, Tensor]) -> AbstractContextManager[None]:
        """Let the module's code see these values in place of its parameters."""

    def paused(self) -> AbstractContextManager[None]:
        """Let layers run without reporting, inside a ``with`` block."""

    def tap(
        self, compute: Callable[[], Tensor], make: PieceMaker, *saved: Any, role: str = "", split: bool = False
    ) -> Tensor:
        """Compute an output, and have its gradient turned into pieces."""
