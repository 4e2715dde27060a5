"""The tape: what layers report during one backward pass, gathered into the per-example gradients of the batch."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from dphero.geometry.geometry import Geometry
from dphero.gradients.batch import GradientBatch, PieceMaker
from dphero.gradients.combine import combine
from dphero.gradients.outer import Bias, Outer
from dphero.gradients.piece import Explicit, Piece
from dphero.gradients.pool import pool
from dphero.numerics.partial_norms import PartialNorm, rank_one_norms
from dphero.numerics.precision import full_precision

_SMALL = 4096
"""Parameters up to this size are pooled: on them, the number of operations costs more than the arithmetic."""


class Tape:
    """Collects pieces while autograd runs, and hands them over when it has finished.

    Norms are taken as soon as an output gradient arrives, so that a layer whose per-example gradient is
    formed frees its input and output gradient at once. Parameters with several calls wait for the end.

    Args:
        rows: Number of examples.
        geometry: Name to geometry in which norms are taken.
        consume: Receives all gradients at the end of the backward pass.
        replayed: Whether they come from a recording (:mod:`dphero.cuda_graphs.replay`), all at once.
    """

    def __init__(
        self,
        rows: int,
        geometry: Mapping[str, Geometry],
        consume: Callable[[GradientBatch], None],
        *,
        replayed: bool = False,
    ) -> None:
        self.rows = rows
        self.replayed = replayed
        self.running = False
        self.done = False
        self._geometry = geometry
        self._consume = consume
        self._expected: Counter[str] = Counter()
        self._arrived: dict[str, list[Piece]] = defaultdict(list)
        self._ready: dict[str, tuple[Piece, Tensor]] = {}
        self._small: dict[str, Tensor] = {}
        self._single: dict[str, tuple[Piece, tuple[PartialNorm, ...]]] = {}
        self._late: list[Callable[[], None]] = []
        self._whole: GradientBatch | None = None

    def expect(self, names: Iterable[str]) -> None:
        """Announce, in the forward pass, that a call will deliver a piece for each of these parameters."""
        for name in names:
            self._expected[name] += 1

    def watch(
        self, out: Tensor, names: Mapping[str, str], make: PieceMaker, saved: tuple[Any, ...], label: str
    ) -> None:
        """Ask autograd for the gradient of ``out``; its pieces go to the parameters in ``names``."""
        # given away on arrival, since the hook itself lives as long as the user holds the loss
        held = [tuple([tensor.detach() if isinstance(tensor, Tensor) else tensor for tensor in saved])]
        versions = [tensor._version for tensor in held[0] if isinstance(tensor, Tensor)]
        self.expect(names.values())

        def arrive(gradient: Tensor) -> None:
            self.start()
            kept = held.pop()
            if [tensor._version for tensor in kept if isinstance(tensor, Tensor)] != versions:
                raise RuntimeError(
                    f"the input of {label} was changed in place after the layer had used it; its gradient "
                    "would be wrong. Use the out-of-place form of that operation."
                )
            with full_precision():
                for local, piece in make(gradient, *kept).items():
                    if local in names:
                        self.deliver(names[local], piece)

        out.register_hook(arrive)

    def start(self) -> None:
        """Note that the backward pass has begun; ask autograd to call back at its end."""
        if self.done:
            raise RuntimeError(
                "this batch was back-propagated a second time, which would count its examples twice; add up "
                "the losses and call backward() once per batch"
            )
        if not self.running:
            self.running = True
            torch.autograd.Variable._execution_engine.queue_callback(self._finish)

    def deliver(self, name: str, piece: Piece) -> None:
        """Take one piece of a parameter."""
        if self._expected[name] == 1:
            self._take(name, piece)
        else:
            self._arrived[name].append(piece)

    def _take(self, name: str, piece: Piece) -> None:
        # of these very types: a subclass may take its norms in a way of its own
        if type(piece) is Explicit and piece.shape.numel() <= _SMALL:
            self._small[name] = piece.gradients
            return
        geometry = self._geometry[name]
        lengths = piece.lengths(geometry) if type(piece) is Outer or type(piece) is Bias else ()
        if lengths and len(lengths[0].whole) == self.rows:
            self._single[name] = (piece, lengths)
        else:
            self._ready[name] = (piece, piece.square_norms(geometry))

    def settle(self, batch: GradientBatch) -> None:
        """Take all gradients at once, from a recording of this pass."""
        assert self.replayed and not self._ready and not self._arrived
        self._whole = batch

    def defer(self, work: Callable[[], None]) -> None:
        """Do ``work`` when autograd has finished; it may deliver further pieces."""
        self._late.append(work)

    def _finish(self) -> None:
        with full_precision():
            while self._late:
                self._late.pop()()
            for name, pieces in self._arrived.items():
                self._take(name, combine(pieces))
            if self._small:
                self._ready.update(pool(self._small, self._geometry))
            if self._single:
                norms = rank_one_norms({name: lengths for name, (_, lengths) in self._single.items()})
                self._ready.update((name, (piece, norms[name])) for name, (piece, _) in self._single.items())
        ready, self._ready, self._small, self._single = self._ready, {}, {}, {}
        self._arrived.clear()
        self.done = True
        batch, self._whole = self._whole, None
        if batch is None:
            batch = GradientBatch(
                self.rows,
                {name: piece for name, (piece, _) in ready.items()},
                {name: norms for name, (_, norms) in ready.items()},
            )
        batch.geometry = self._geometry
        ready.clear()  # the pieces are the batch's alone
        with full_precision():
            self._consume(batch)
