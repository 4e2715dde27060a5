"""A forward and a backward pass as two compiled functions, taps and norms included.

Both passes are run once and written down, operation by operation, whatever Python made them: autograd, hooks, taps.
What was written before the forward pass ended is one function, the rest another, and what the first hands to the second
is what autograd and the taps saved. torch's compiler then fuses the operations of each.

Every tensor that was there before (inputs, parameters, geometry) is an argument, and the compiled functions read it
where it lies.

Nothing here knows of clipping or noise.
"""

from __future__ import annotations

import io
import operator
import pickle
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import get_proxy_mode, make_fx

from dphero.factors import Factor
from dphero.precision import Explicitly
from dphero.room import Recycled, Room

__all__ = ["Compiled", "taken_apart"]

_aten = torch.ops.aten
_SAME = (_aten.detach.default, _aten.alias.default)
"""Operations whose result is the tensor itself; here, where nothing is differentiated, it can stand for them."""
_ANY_ORDER = (_aten.convolution_backward.default, operator.getitem)
"""Operations that take tensors with their axes in any order in memory, and may return such."""


class Compiled:
    """Two compiled functions that compute what two others do.

    Args:
        forward: Returns tensors.
        backward: Called after it, returns others.
    """

    def __init__(self, forward: Callable[[], Sequence[Tensor]], backward: Callable[[], Sequence[Tensor]]) -> None:
        traced, last, count = _traced(forward, backward)
        nodes = list(traced.graph.nodes)
        middle, results = nodes.index(last) + 1, nodes[-1].args[0]
        self._outs, self._found = results[:count], results[count:]
        self._places = {node: getattr(traced, node.target).detach() for node in nodes if node.op == "get_attr"}
        self._second = _Half(nodes[middle:], self._found)
        self._first = _Half(nodes[:middle], [*self._outs, *self._second.given, *self._found])
        self._first.compile([self._places[node] for node in self._first.given])
        self.forward()
        self._second.compile(self._saved)
        self.backward()

    def forward(self) -> list[Tensor]:
        """Return what ``forward`` would."""
        values = {**self._places, **self._first.run([self._places[node] for node in self._first.given])}
        self._saved = [values[node] for node in self._second.given]
        self._kept = {node: values[node] for node in self._found if node in values}
        return [values[node] for node in self._outs]

    def backward(self) -> list[Tensor]:
        """Return what ``backward`` would; nothing else of the passes is kept."""
        kept, self._kept = self._kept, {}
        kept.update(self._second.run(self._saved))  # which empties the list: what is done with is freed
        return [kept[node] for node in self._found]


class _Half:
    """One of the two functions.

    The compiler may return tensors with their axes in another order in memory than they had when the operations were
    written down, which saves much copying. Some operations are wrong on such tensors, so only those that are known to
    take any order are handed them: all others get them as they were.

    Args:
        nodes: Some operations of the whole, in order.
        wanted: Nodes of the whole, of which it returns those that are its own.

    Attributes:
        nodes: Its operations.
        given: What goes in, as nodes of the whole.
    """

    def __init__(self, nodes: Sequence[fx.Node], wanted: Sequence[fx.Node]) -> None:
        self.nodes = {node: None for node in nodes if node.op == "call_function" and node.target not in _SAME}
        inputs = (argument for node in self.nodes for argument in node.all_input_nodes)
        self.given = list(dict.fromkeys(node for node in inputs if node not in self.nodes))
        self._returned = list(dict.fromkeys(node for node in wanted if node in self.nodes))

    def compile(self, given: list[Tensor]) -> None:
        """Compile it for tensors like these."""
        graph = fx.Graph()
        taken = graph.placeholder("given")
        taken.meta["steal_arg"] = True  # the list is emptied, and each tensor freed after its last use
        copies = {
            node: graph.call_function(operator.getitem, (taken, number)) for number, node in enumerate(self.given)
        }
        loose = {node for node in self.given if node.op == "call_function"}
        tight: dict[fx.Node, fx.Node] = {}  # those of them that somebody wants as they were
        for node in self.nodes:
            if node.target in _ANY_ORDER:
                copies[node] = graph.node_copy(node, copies.__getitem__)
                if not loose.isdisjoint(node.all_input_nodes):
                    loose.add(node)
                continue
            for argument in loose.intersection(node.all_input_nodes).difference(tight):
                tight[argument] = _in_order(graph, copies[argument], argument.meta["val"])
            copies[node] = graph.node_copy(node, lambda argument: tight.get(argument, copies[argument]))
        graph.output([copies[node] for node in self._returned])
        options = {"keep_output_stride": False, "fallback_random": True, "triton.cudagraphs": False}
        self._run = _compile(fx.GraphModule(torch.nn.Module(), graph), list(given), options)

    @torch.no_grad()
    def run(self, given: list[Tensor]) -> dict[fx.Node, Tensor]:
        """Return what it computes; the list is emptied."""
        return dict(zip(self._returned, self._run(given), strict=True))


def _in_order(graph: fx.Graph, node: fx.Node, like: Tensor) -> fx.Node:
    """Have a tensor brought to the order that the axes of another one have in memory; no operation if it is in it."""
    order = sorted(range(like.dim()), key=lambda axis: -like.stride()[axis])
    if order == list(range(like.dim())):
        return graph.call_function(_aten.contiguous.default, (node,))
    turned = graph.call_function(_aten.permute.default, (node, order))
    back = [order.index(axis) for axis in range(like.dim())]
    return graph.call_function(_aten.permute.default, (graph.call_function(_aten.contiguous.default, (turned,)), back))


def _compile(
    module: fx.GraphModule, given: list[Tensor], options: dict[str, Any]
) -> Callable[[list[Tensor]], Sequence[Tensor]]:
    """Have torch compile a function of one list of tensors."""
    import torch._inductor

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # on precisions that are the user's choice, and among torch's own parts
        run: Callable[[list[Tensor]], Sequence[Tensor]] = torch._inductor.compile(module, [given], options=options)  # type: ignore[list-item]
        return run


def _traced(
    forward: Callable[[], Sequence[Tensor]], backward: Callable[[], Sequence[Tensor]]
) -> tuple[fx.GraphModule, fx.Node, int]:
    """Write both down; return the operations, the last one of ``forward``, and how many tensors that returned."""
    marks: list[tuple[fx.Node, int]] = []

    def both() -> list[Tensor]:
        with Explicitly():
            outs = forward()
            mode = get_proxy_mode()
            assert mode is not None
            marks.append((next(iter(reversed(mode.tracer.graph.nodes))), len(outs)))
            return [*outs, *backward()]

    traced = make_fx(both)()
    for node in traced.graph.nodes:
        if node.target in _SAME:
            node.replace_all_uses_with(node.args[0])
    return traced, *marks[0]


class _Pickler(pickle.Pickler):
    """Sets tensors apart, and what must not be copied."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.tensors: list[Tensor] = []
        self.others: list[Any] = []
        self._names: dict[int, tuple[bool, int]] = {}

    def persistent_id(self, value: Any) -> tuple[bool, int] | None:
        if not isinstance(value, Tensor | Factor | Recycled | Room):
            return None
        if id(value) not in self._names:
            known: list[Any] = self.tensors if isinstance(value, Tensor) else self.others
            self._names[id(value)] = isinstance(value, Tensor), len(known)
            known.append(value)
        return self._names[id(value)]


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, tensors: Sequence[Tensor], others: Sequence[Any]) -> None:
        super().__init__(file)
        self._tensors, self._others = tensors, others

    def persistent_load(self, name: tuple[bool, int]) -> Any:
        return (self._tensors if name[0] else self._others)[name[1]]


def taken_apart(whole: Any) -> tuple[list[Tensor], Callable[[Sequence[Tensor]], Any]]:
    """Return the tensors of an object made of Python objects, and what makes the same of others."""
    file = io.BytesIO()
    pickler = _Pickler(file)
    pickler.dump(whole)
    form, others = file.getvalue(), pickler.others
    return pickler.tensors, lambda tensors: _Unpickler(io.BytesIO(form), tensors, others).load()
