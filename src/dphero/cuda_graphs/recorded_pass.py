"""One recorded forward and backward pass, and the node that takes the model's place in the user's graph."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from dphero.cuda_graphs.autocast import Autocast, computing_in
from dphero.cuda_graphs.borrowed import borrowed
from dphero.cuda_graphs.live_geometry import LiveGeometry
from dphero.cuda_graphs.pool import Pool
from dphero.cuda_graphs.replay_guards import CannotRecordError
from dphero.functional.unbatched import plain
from dphero.gradients.batch import GradientBatch
from dphero.gradients.piece import Piece
from dphero.hooks.tape import Tape
from dphero.hooks.twins import Twin, set_twin
from dphero.numerics.compare import distinct_numbers
from dphero.numerics.trees import tree_flatten, tree_map, tree_unflatten

if TYPE_CHECKING:
    from dphero.hooks.taps import Taps


_CONSTANT = (bool, str, type(None), torch.dtype, torch.device)  # what a model may return besides tensors
_Found = tuple[Tensor, list[str], dict[str, Piece], list[Tensor]]
"""What a backward pass leaves: square norms, stacked; whose they are; the pieces; and what it began with."""


class Results(NamedTuple):
    """What one pass at full size leaves behind."""

    outs: list[Any]
    norms: Tensor
    sums: list[Tensor]


@dataclass
class Shared:
    """What is known of recordings that lie in one memory.

    Attributes:
        turn: How many passes were replayed there: each writes over what those before it left.
        begun: The last of them whose backward pass was begun.
        groups: The group of each parameter: one for all whose examples have the same weights.
        outgrown: Whether these are other groups than recordings were made for.
    """

    turn: int = 0
    begun: int = -1
    groups: dict[str, int] = field(default_factory=dict)
    outgrown: bool = False


@dataclass(frozen=True)
class Setting:
    """What the passes of all sizes have in common.

    Attributes:
        taps, autocast: The model's.
        geometry: The one in which norms are taken.
        structure: How the arguments of the model are put together;
        axes: where each carries the examples.
        shared: What is known of the memory in which they lie.
    """

    taps: Taps
    geometry: LiveGeometry
    autocast: Autocast
    structure: Any
    axes: Sequence[int | None]
    shared: Shared


class Pass:
    """One recorded forward and backward pass, for lots of up to ``rows`` examples.

    What it computes lies in the pool's memory, and holds until another pass recorded there writes over it.
    """

    def __init__(self, setting: Setting, rows: int, leaves: Sequence[Any]) -> None:
        self.rows = rows
        self._setting = setting
        self._inputs = [_buffer(leaf, axis, rows) for leaf, axis in zip(leaves, setting.axes, strict=True)]
        self._gradients: list[Tensor] = []  # once recorded
        self._weights: list[Tensor] = []
        self._shared = setting.shared

    def fill(self, leaves: Sequence[Any], rows: int) -> None:
        """Put arguments in their places."""
        for place, leaf, axis in zip(self._inputs, leaves, self._setting.axes, strict=True):
            if isinstance(leaf, Tensor) and axis == 0:
                _put(place, leaf, rows)
            elif isinstance(leaf, Tensor):
                place.copy_(leaf)

    # -- making it ----------------------------------------------------------------------------------------------

    def as_usual(self) -> Results:
        """Run the pass without recording it; this also lets libraries do what they do at first use."""
        found: list[GradientBatch] = []
        outs, _ = self._forward(found)
        self._trained = [place for place, out in enumerate(outs) if isinstance(out, Tensor) and out.requires_grad]
        gradients = [distinct_numbers(outs[place]).to(outs[place].dtype) for place in self._trained]
        norms = self._backward(self._edges(outs), gradients, found)
        del gradients
        names = list(found[0].pieces)
        known = self._shared.groups
        self._groups = known if known.keys() == set(names) else dict.fromkeys(names, 0)
        self._weights = [distinct_numbers(norms[0]).to(norms.dtype) for _ in set(self._groups.values())]
        outs = [out.detach().clone() if isinstance(out, Tensor) else out for out in outs]
        sums = self._sum(found[0].pieces)
        # in one piece: what lies about singly would keep the memory of the whole pass from being given back
        return Results(outs, norms, [*torch.cat(sums).split([len(each) for each in sums])])

    def record(self, pool: Pool) -> None:
        """Record the pass."""
        forward, backward = self._as_written()
        self._replay_forward, outs = pool.record(forward)
        # whatever the backward pass takes may lie where the outputs do: they are copied before that is replayed
        self.outs = borrowed(outs)
        del outs
        self._replay_backward, (norms, names, pieces, gradients) = pool.record(backward)
        self._replay_sums, sums = pool.record(lambda: self._sum(pieces))
        self._gradients, self.norms, self.found, self.added = borrowed((gradients, norms, pieces, sums))
        self.names = names

    def repeat(self) -> None:
        """Replay the recording on what it was recorded with."""
        self.repeat_forward()
        self.repeat_backward()

    def repeat_forward(self) -> None:
        """Replay the forward pass on what it was recorded with; its outputs hold until the backward pass begins."""
        self._shared.turn += 1
        self._replay_forward()

    def repeat_backward(self) -> None:
        """Replay the backward pass and the sums on what they were recorded with."""
        for place in (*self._gradients, *self._weights):
            place.copy_(distinct_numbers(place))
        self._replay_backward()
        self._replay_sums()

    def shares(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield, for some examples, their square norms and those of what they add to the sums, by parameter."""
        for row in sorted({0, self.rows // 2, self.rows - 1}):
            for weights in self._weights:
                weights.zero_()
                weights[row] = 1.0
            self._replay_sums()
            sums = dict(zip(self.found, self.added, strict=True))
            geometry = self._setting.geometry.live
            whitened = [geometry[name].whiten(sums[name].view(1, *geometry[name].shape)) for name in self.names]
            yield self.norms[:, row], torch.stack([each.double().square().sum() for each in whitened])

    def _as_written(self) -> tuple[Callable[[], list[Any]], Callable[[], _Found]]:
        """Return both passes as functions."""
        found: list[GradientBatch] = []
        edges: list[GradientEdge] = []

        def forward() -> list[Any]:
            outs, self._out_structure = self._forward(found)
            edges.extend(self._edges(outs))
            return [out.detach() if isinstance(out, Tensor) else out for out in outs]

        def backward() -> _Found:
            gradients = [torch.empty_like(self.outs[place]) for place in self._trained]  # filled before each replay
            norms, batch = self._backward(edges, gradients, found), found.pop()
            edges.clear()
            return norms, list(batch.square_norms), batch.pieces, gradients

        return forward, backward

    def _forward(self, found: list[GradientBatch]) -> tuple[list[Any], Any]:
        taps = self._setting.taps
        tape = Tape(self.rows, self._setting.geometry.live, found.append)
        assert taps.plan is not None
        args, kwargs = tree_unflatten(self._inputs, self._setting.structure)
        with computing_in(self._setting.autocast):
            outs, structure = tree_flatten(tree_map(plain, taps.run(taps.plan, tape, args, kwargs)))
        for out in outs:
            if not isinstance(out, Tensor):
                if type(out) not in _CONSTANT:  # a number may be that of the rows
                    raise CannotRecordError(f"it returns a value of type {type(out).__name__}, which never changes")
            elif out.dim() == 0 or len(out) != self.rows:
                raise CannotRecordError(f"for {self.rows} rows it returns a tensor of shape {tuple(out.shape)}")
        return outs, structure

    def _edges(self, outs: Sequence[Any]) -> list[GradientEdge]:
        """Return where the backward pass begins; the outputs themselves need not be kept for it."""
        return [get_gradient_edge(outs[place]) for place in self._trained]

    def _backward(
        self, edges: Sequence[GradientEdge], gradients: Sequence[Tensor], found: list[GradientBatch]
    ) -> Tensor:
        """Run the backward pass; return the square norms of all parameters."""
        if edges:
            torch.autograd.backward(edges, gradients)
        if not found or not found[0].pieces:
            raise CannotRecordError("no parameter takes part in what it returns")
        return found[0].stacked_norms()

    def _sum(self, pieces: Mapping[str, Piece]) -> list[Tensor]:
        """Return the weighted sum of each parameter, as one row of numbers."""
        with torch.no_grad():
            sums = [piece.weighted_sum(self._weights[self._groups[name]]) for name, piece in pieces.items()]
            return [each.reshape(-1) for each in sums]

    # -- using it -----------------------------------------------------------------------------------------------

    def run(self, leaves: Sequence[Any], rows: int, tape: Tape) -> Any:
        """Replay the forward pass on these arguments; the backward pass follows when autograd arrives."""
        self._shared.turn += 1
        self.fill(leaves, rows)
        anchor = torch.empty(0, device=self.norms.device, requires_grad=True)
        turn = self._shared.turn
        copies = _Replay.apply(anchor, self, tape, rows, turn)
        for place, copy in zip(self._trained, copies, strict=True):
            set_twin(copy, Twin(self.outs[place][:rows], lambda: self._outputs_hold(turn)))
        trained = iter(copies)
        outs = [
            next(trained) if place in self._trained else out[:rows].clone() if isinstance(out, Tensor) else out
            for place, out in enumerate(self.outs)
        ]
        return tree_unflatten(outs, self._out_structure)

    def _outputs_hold(self, turn: int) -> bool:
        return self._shared.turn == turn != self._shared.begun

    def forward(self, rows: int) -> tuple[Tensor, ...]:
        """Replay the forward pass; return copies of the outputs that carry a gradient."""
        self._replay_forward()
        return tuple(self.outs[place][:rows].clone() for place in self._trained)

    def backward(self, gradients: Sequence[Tensor], rows: int, turn: int, tape: Tape) -> None:
        """Replay the backward pass; hand what it found to the tape."""
        tape.start()
        if turn != self._shared.turn:
            raise RuntimeError(
                "the model was called again before this backward pass, which overwrote what it needs: call it once for "
                "each batch, then backward(), or call make_private with cuda_graphs=False"
            )
        self._shared.begun = turn  # gradients may lie where the outputs did
        for place, gradient in zip(self._gradients, gradients, strict=True):
            _put_above_zeros(place, gradient, rows)
        self._replay_backward()
        tape.settle(_ReplayedBatch(self, rows, turn))

    def sums(self, weights: Mapping[str, Tensor], rows: int, turn: int) -> dict[str, Tensor]:
        """Replay the weighted sums; return them where they lie: they hold until another pass is replayed."""
        self._require_latest(turn)
        distinct = {id(values): values for values in weights.values()}
        numbers = {key: number for number, key in enumerate(distinct)}
        groups = {name: numbers[id(weights[name])] for name in self.found}
        if groups != self._groups:
            self._shared.groups, self._shared.outgrown = groups, True
            filled = {key: _filled(values, self.rows) for key, values in distinct.items()}
            return {name: piece.weighted_sum(filled[id(weights[name])]) for name, piece in self.pieces(turn).items()}
        for place, values in zip(self._weights, distinct.values(), strict=True):
            _put_above_zeros(place, values, rows)
        self._replay_sums()
        return {
            name: part.view(piece.shape) for (name, piece), part in zip(self.found.items(), self.added, strict=True)
        }

    def pieces(self, turn: int) -> dict[str, Piece]:
        """Return those that a replay left, if no other one has written there since.

        They are copies: what a piece computes and keeps is not for the next turn.
        """
        self._require_latest(turn)
        copied: dict[str, Piece] = borrowed(self.found)
        return copied

    def _require_latest(self, turn: int) -> None:
        if turn != self._shared.turn:
            raise RuntimeError("these gradients were written over by another pass of the recorded model")


class _Replay(torch.autograd.Function):
    """Stands in the user's graph for the whole model."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, made: Pass, tape: Tape, rows: int, turn: int) -> tuple[Tensor, ...]:
        ctx.made, ctx.tape, ctx.rows, ctx.turn = made, tape, rows, turn
        return made.forward(rows)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, ...]:
        ctx.made.backward(gradients, ctx.rows, ctx.turn, ctx.tape)
        return (None,) * 5


class _ReplayedBatch(GradientBatch):
    """The per-example gradients that a replay left in the recording's places."""

    recorded = True

    def __init__(self, made: Pass, rows: int, turn: int) -> None:
        norms = made.norms[:, :rows]
        super().__init__(rows, made.found, dict(zip(made.names, norms.unbind(0), strict=True)))
        self._made, self._norms, self._turn = made, norms, turn

    def stacked_norms(self) -> Tensor:
        return self._norms

    def weighted_sums(
        self, weights: Mapping[str, Tensor], keep: Tensor | None, *, final: bool = False
    ) -> dict[str, Tensor]:
        if keep is None:
            return self._made.sums(weights, self.rows, self._turn)
        kept, pieces = _filled(keep, self._made.rows), self._made.pieces(self._turn)
        return {name: piece.take(kept).weighted_sum(weights[name]) for name, piece in pieces.items()}


def _buffer(leaf: Any, axis: int | None, rows: int) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    return torch.empty_like(leaf) if axis is None else leaf.new_empty((rows, *leaf.shape[1:]))


def _put(place: Tensor, leaf: Tensor, rows: int) -> None:
    """Copy a tensor's first rows to their place, and the first row to what is left there."""
    place[:rows].copy_(leaf[:rows])
    if rows < len(place):
        place[rows:].copy_(leaf[:1].expand(len(place) - rows, *leaf.shape[1:]))


def _put_above_zeros(place: Tensor, values: Tensor, rows: int) -> None:
    """Copy so many rows to their place, and let what is left there be zero."""
    place[:rows].copy_(values)
    if rows < len(place):
        place[rows:].zero_()


def _filled(values: Tensor, rows: int) -> Tensor:
    """Return values for the rows of a recording: zero, or false, beyond those of the lot."""
    filled = values.new_zeros(rows)
    filled[: len(values)] = values
    return filled
