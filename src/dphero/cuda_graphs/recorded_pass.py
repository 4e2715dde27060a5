"""One recorded forward and backward pass, and the node that takes the model's place in the user's graph."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from dphero.cuda_graphs.live_geometry import LiveGeometry
from dphero.functional.unbatched import plain
from dphero.gradients.batch import GradientBatch
from dphero.gradients.piece import Piece
from dphero.hooks.tape import Tape
from dphero.numerics.compare import distinct_numbers
from dphero.numerics.trees import tree_flatten, tree_map, tree_unflatten

if TYPE_CHECKING:
    from dphero.hooks.taps import Taps

__all__ = ["Pass", "Pool", "Results", "refusal"]

T = TypeVar("T")
_Found = tuple[Tensor, list[str], dict[str, Piece]]
"""What a backward pass leaves: square norms, stacked; whose they are; and the pieces."""


class Pool:
    """Memory and stream of the recordings of one pass, which are always replayed in the order they were made in."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.handle = torch.cuda.graph_pool_handle()
        self.stream = torch.cuda.Stream(device)

    def record(self, work: Callable[[], T]) -> tuple[Callable[[], None], T]:
        """Record what ``work`` does on the GPU; return what does it again, and results that stay where they are."""
        graph = torch.cuda.CUDAGraph()
        # Other threads may go on meanwhile (one that pins memory for a loader, say).
        way = torch.cuda.graph(graph, pool=self.handle, stream=self.stream, capture_error_mode="thread_local")
        with _no_collection(), torch.cuda.device(self.device), way:
            result = work()

        def replay() -> None:
            with torch.cuda.device(self.device):
                graph.replay()

        return replay, result


@contextmanager
def _no_collection() -> Iterator[None]:
    """Keep Python's garbage where it is: to free an earlier recording that lies in it would spoil the one made now."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


@dataclass
class Results:
    """What one pass at full size leaves behind, where a recording leaves it again at each replay."""

    outs: list[Any]
    norms: Tensor
    sums: list[Tensor]


class Pass:
    """One recorded forward and backward pass, for lots of up to ``rows`` examples.

    It depends on ``key``, and takes norms in ``geometry``. ``leaves`` are the arguments of the model, put together by
    ``structure``; ``axes`` says where each carries the examples.
    """

    found: GradientBatch
    norms: Tensor

    def __init__(
        self,
        taps: Taps,
        key: tuple[Any, ...],
        geometry: LiveGeometry,
        rows: int,
        structure: Any,
        leaves: Sequence[Any],
        axes: Sequence[int | None],
    ) -> None:
        self.key, self.geometry, self.rows = key, geometry, rows
        self._taps, self._structure, self._axes = taps, structure, axes
        self._inputs = [_buffer(leaf, axis, rows) for leaf, axis in zip(leaves, axes, strict=True)]
        self._gradients: list[Tensor] = []
        self._weights: list[Tensor] = []
        self._replays = 0

    def fill(self, leaves: Sequence[Any], rows: int) -> None:
        """Put arguments in their places."""
        for place, leaf, axis in zip(self._inputs, leaves, self._axes, strict=True):
            if isinstance(leaf, Tensor):
                _put(place, leaf, rows if axis == 0 else len(place) if place.dim() else None)

    # -- making it ----------------------------------------------------------------------------------------------

    def as_usual(self) -> Results:
        """Run the pass without recording it; this also lets libraries do what they do at first use."""
        found: list[GradientBatch] = []
        outs, _ = self._forward(found)
        self._trained = [place for place, out in enumerate(outs) if isinstance(out, Tensor) and out.requires_grad]
        self._gradients = [distinct_numbers(outs[place]).to(outs[place].dtype) for place in self._trained]
        norms = self._backward(outs, found)
        self._norm_type = norms.dtype
        self._group(dict.fromkeys(found[0].pieces, 0))
        self._weights[0].copy_(distinct_numbers(self._weights[0]))
        outs = [out.detach().clone() if isinstance(out, Tensor) else out for out in outs]
        sums = self._sum(found[0].pieces)
        # in one piece: what lies about singly would keep the memory of the whole pass from being given back
        return Results(outs, norms, [*torch.cat(sums).split([len(each) for each in sums])])

    def record(self) -> None:
        """Record the pass."""
        device = self._gradients[0].device
        forward, backward = self._as_written()
        self._pool = Pool(device)
        self._replay_forward, self._outs = self._pool.record(forward)
        self._replay_backward, (self.norms, names, pieces) = self._pool.record(backward)
        self.found = GradientBatch(self.rows, pieces, dict(zip(names, self.norms.unbind(0), strict=True)))
        self._record_sums()

    def repeated(self) -> Results:
        """Replay the recording on what it was recorded with."""
        for place in (*self._gradients, self._weights[0]):
            place.copy_(distinct_numbers(place))
        for replay in (self._replay_forward, self._replay_backward, self._replay_sums):
            replay()
        return Results(self._outs, self.norms, self._sums)

    def shares(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield, for some examples, their square norms and those of what they add to the sums, by parameter."""
        for row in sorted({0, self.rows // 2, self.rows - 1}):
            self._weights[0].zero_()
            self._weights[0][row] = 1.0
            self._replay_sums()
            added = dict(zip(self.found.pieces, self._sums, strict=True))
            geometry = self.geometry.live
            squares = []
            for name in self.found.square_norms:
                whitened = geometry[name].whiten(added[name].view(1, *geometry[name].shape))
                squares.append(whitened.double().square().sum())
            yield self.norms[:, row], torch.stack(squares)

    def _as_written(self) -> tuple[Callable[[], list[Any]], Callable[[], _Found]]:
        """Return both passes as functions."""
        found: list[GradientBatch] = []
        outs: list[Any] = []

        def forward() -> list[Any]:
            made, self._out_structure = self._forward(found)
            outs.extend(made)
            return [out.detach() if isinstance(out, Tensor) else out for out in outs]

        def backward() -> _Found:
            norms, batch = self._backward(outs, found), found.pop()
            outs.clear()
            return norms, list(batch.square_norms), batch.pieces

        return forward, backward

    def _forward(self, found: list[GradientBatch]) -> tuple[list[Any], Any]:
        tape = Tape(self.rows, self.geometry.live, found.append)
        assert self._taps.plan is not None
        args, kwargs = tree_unflatten(self._inputs, self._structure)
        outs, structure = tree_flatten(tree_map(plain, self._taps.run(self._taps.plan, tape, args, kwargs)))
        for out in outs:
            if isinstance(out, Tensor) and (out.dim() == 0 or len(out) != self.rows):
                raise ValueError(refusal(f"for {self.rows} rows it returns a tensor of shape {tuple(out.shape)}"))
        return outs, structure

    def _backward(self, outs: Sequence[Any], found: list[GradientBatch]) -> Tensor:
        """Run the backward pass; return the square norms of all parameters."""
        if self._trained:
            torch.autograd.backward([outs[place] for place in self._trained], self._gradients)
        if not found or not found[0].pieces:
            raise ValueError(refusal("no parameter takes part in what it returns"))
        return found[0].stacked_norms()

    def _group(self, groups: Mapping[str, int]) -> None:
        """Make buffers for the weights, once for each group of parameters that share them."""
        self._groups, kind = dict(groups), self._gradients[0]
        self._weights = [
            torch.zeros(self.rows, device=kind.device, dtype=self._norm_type) for _ in set(groups.values())
        ]

    def _sum(self, pieces: Mapping[str, Piece]) -> list[Tensor]:
        """Return the weighted sum of each parameter, as one row of numbers."""
        with torch.no_grad():
            sums = [piece.weighted_sum(self._weights[self._groups[name]]) for name, piece in pieces.items()]
            return [each.reshape(-1) for each in sums]

    def _record_sums(self) -> None:
        self._replay_sums, self._sums = self._pool.record(lambda: self._sum(self.found.pieces))

    # -- using it -----------------------------------------------------------------------------------------------

    def run(self, leaves: Sequence[Any], rows: int, tape: Tape) -> Any:
        """Replay the forward pass on these arguments; the backward pass follows when autograd arrives."""
        self._replays += 1
        self.fill(leaves, rows)
        anchor = torch.empty(0, device=self._gradients[0].device, requires_grad=True)
        trained = iter(_Replay.apply(anchor, self, tape, rows, self._replays))
        outs = [
            next(trained) if place in self._trained else out[:rows].clone() if isinstance(out, Tensor) else out
            for place, out in enumerate(self._outs)
        ]
        return tree_unflatten(outs, self._out_structure)

    def forward(self, rows: int) -> tuple[Tensor, ...]:
        """Replay the forward pass; return copies of the outputs that carry a gradient."""
        self._replay_forward()
        return tuple(self._outs[place][:rows].clone() for place in self._trained)

    def backward(self, gradients: Sequence[Tensor], rows: int, replay_number: int, tape: Tape) -> None:
        """Replay the backward pass; hand what it found to the tape."""
        tape.start()
        if replay_number != self._replays:
            raise RuntimeError(
                "the model was called again before this backward pass, which overwrote what it needs: with "
                "cuda_graphs, call the model once for each batch, then backward()"
            )
        for place, gradient in zip(self._gradients, gradients, strict=True):
            place[:rows].copy_(gradient)
            place[rows:].zero_()
        self._replay_backward()
        tape.settle(_ReplayedBatch(self, rows))

    def sums(self, weights: Mapping[str, Tensor], rows: int) -> dict[str, Tensor]:
        """Replay the weighted sums; return copies."""
        distinct = {id(values): values for values in weights.values()}
        numbers = {key: number for number, key in enumerate(distinct)}
        groups = {name: numbers[id(weights[name])] for name in self.found.pieces}
        if groups != self._groups:
            self._group(groups)
            self._record_sums()
        for place, values in zip(self._weights, distinct.values(), strict=True):
            place[:rows].copy_(values)
            place[rows:].zero_()
        self._replay_sums()
        parts = torch.cat(self._sums).split([len(each) for each in self._sums])  # all copied at once
        return {
            name: part.view(piece.shape) for (name, piece), part in zip(self.found.pieces.items(), parts, strict=True)
        }


class _Replay(torch.autograd.Function):
    """Stands in the user's graph for the whole model."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, made: Pass, tape: Tape, rows: int, replay_number: int) -> tuple[Tensor, ...]:
        ctx.made, ctx.tape, ctx.rows, ctx.replay_number = made, tape, rows, replay_number
        return made.forward(rows)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, ...]:
        ctx.made.backward(gradients, ctx.rows, ctx.replay_number, ctx.tape)
        return (None,) * 5


class _ReplayedBatch(GradientBatch):
    """The per-example gradients that a replay left in the recording's places."""

    def __init__(self, made: Pass, rows: int) -> None:
        norms = made.norms[:, :rows]
        super().__init__(rows, made.found.pieces, dict(zip(made.found.square_norms, norms.unbind(0), strict=True)))
        self._made, self._norms = made, norms

    def stacked_norms(self) -> Tensor:
        return self._norms

    def weighted_sums(
        self, weights: Mapping[str, Tensor], keep: Tensor | None, *, final: bool = False
    ) -> dict[str, Tensor]:
        if keep is None:
            return self._made.sums(weights, self.rows)
        filled = torch.zeros(self._made.rows, dtype=torch.bool, device=keep.device)
        filled[: self.rows] = keep
        return super().weighted_sums(weights, filled)  # never the last: the pieces are the recording's


def _buffer(leaf: Any, axis: int | None, rows: int) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    return torch.empty_like(leaf) if axis is None else leaf.new_empty((rows, *leaf.shape[1:]))


def _put(place: Tensor, leaf: Tensor, rows: int | None) -> None:
    """Copy a tensor to its place, and its first row to what is left there."""
    if rows is None:
        place.copy_(leaf)
        return
    place[:rows].copy_(leaf)
    if rows < len(place):
        place[rows:].copy_(leaf[:1].expand(len(place) - rows, *leaf.shape[1:]))


def refusal(reason: str) -> str:
    """Return the message for a model that cannot be recorded."""
    return f"cuda_graphs: this model's passes cannot be recorded: {reason}. Call make_private without cuda_graphs."
