"""Is the loss a mean (or a sum) over the examples? If not, one example moves the gradients of the others.

A loss is read before it is back-propagated: the first few losses, a few more later on, and every one that consists of
other operations than those before. It is read in these ways:

* Is the batch reduced as declared, and by nothing else? (:mod:`dphero.checks.loss.reduction`)
* Does each term of the loss depend on one example alone? First derivatives tell, also where a loss is made of straight
  pieces, and second derivatives (:mod:`dphero.checks.loss.coupling`).
* Does it train a parameter besides the model's?
* Do the gradients of examples stay the same when others are replaced? (:mod:`dphero.checks.loss.replay`: the first
  losses and a few later on, whose batches were followed from the loader on)

What is not understood is accepted otherwise: a check with false alarms is soon switched off.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from dphero.checks.loss.coupling import coupling, coupling_strength, is_of_vectors
from dphero.checks.loss.graph import (
    OUTPUT,
    ModelOutput,
    fingerprint,
    is_custom,
    is_own,
    leaf_of,
    nodes_below,
    output_edges,
)
from dphero.checks.loss.recorder import Recorder, ordinary, watched_class
from dphero.checks.loss.reduction import ReductionCheck, require_same_targets
from dphero.checks.loss.replay import compare_losses
from dphero.checks.loss.unseen import OUTSIDE, Constants, not_repeated
from dphero.hooks.twins import twin_of
from dphero.numerics.buffers import cache_emptied
from dphero.numerics.trees import tree_flatten, tree_unflatten

logger = logging.getLogger(__name__)

_FIRST = 4
"""Losses that are read one after the other; then the gaps double, since a loss may change.

A divisor that follows the data can agree with the number of rows by chance: not four times."""
_ROUNDING = 1e-4
"""How much of a derivative rounding may bring about."""

_UNREAD = (
    "Not checked: a loss could not be read (it was not loss.backward() that was called, or it comes from a scripted "
    "function). Unless it is a mean over the examples, or a sum if so declared, the price is wrong."
)


class LossCheck:
    """Reads losses of a private model: are they the declared ``"mean"`` or ``"sum"`` over the examples?

    The model's outputs, and what is computed from them, are tensors of a subclass that does nothing but note
    ``backward()``. ``rows`` returns the number of rows of the batch in hand, ``None`` while no private batch is in
    work.
    """

    def __init__(self, module: nn.Module, rows: Callable[[], int | None], declared: str) -> None:
        self._module, self._rows, self._declared = module, rows, declared
        self._read = 0
        self._gap = self._left = 0  # losses that are not read in full after one was; how many of them are to come
        self._known: set[int] = set()  # fingerprints of losses that were read in full
        self._unread = self._told = False  # whether an output is watched whose loss was not seen; whether that was said
        self._divided_by_rows: int | None = None
        self._ignores_targets = False
        self._recorder: Recorder | None = None
        self._sizes: dict[int, set[tuple[int, ...]]] = {}  # of each output: the rows, and the sizes of its first axes
        self._constants: Constants | None = None
        self.notes: dict[str, None] = {}
        self._kind = watched_class(self._announced, self._recording)

    def hand_out(self, batch: Any) -> None:
        """Called with a batch that the user is about to get; follow it if its loss is to be read."""
        self.close()
        rows = self._rows()
        if rows is not None and rows > 1 and not self._left:
            self._recorder = Recorder(rows, self._kind)
            self._recorder.begin(batch)

    def enter(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> AbstractContextManager[None]:
        """Called with what the model is called with; inside, it is ordinary tensors."""
        recorder = self._recording()
        return ordinary(args, kwargs) if recorder is None else recorder.model(args, kwargs)

    def close(self) -> None:
        """Follow the batch in hand no longer."""
        if self._recorder is not None:
            self._recorder.close()
        self._recorder = None

    def _recording(self) -> Recorder | None:
        return self._recorder if self._recorder is not None and self._recorder.open else None

    def watch(self, output: Any) -> Any:
        """Return what the model returned, watched."""
        if (self._rows() or 1) < 2:  # with one row nothing can be told apart
            return output
        self._unread = True
        if isinstance(output, Tensor):
            return self._mark(0, output)
        leaves, structure = tree_flatten(output)
        return tree_unflatten([self._mark(number, leaf) for number, leaf in enumerate(leaves)], structure)

    def back_propagated(self) -> None:
        """Say, once, that a loss was back-propagated which could not be read."""
        if self._unread and not self._told:
            self._told = True
            self.notes[_UNREAD] = None
            logger.warning(
                "The loss could not be read (it was not loss.backward() that was called, or it comes from a scripted "
                "or custom function). It must be a mean over the examples, or a sum if loss_reduction says so: "
                "otherwise one example changes the gradients of the others, and the price is wrong."
            )
        self._unread = False
        self.close()

    def _mark(self, number: int, value: Any) -> Any:
        recorder = self._recording()
        if type(value) is not Tensor or not (value.requires_grad or recorder):
            return value
        edge = None
        if value.requires_grad:
            watched = ModelOutput.apply(value)
            node: Any = watched.grad_fn
            node.metadata[OUTPUT] = watched.output_nr
            edge = GradientEdge(node, watched.output_nr)
            watched.__class__ = self._kind
        else:
            watched = value.as_subclass(self._kind)
        if recorder is not None:
            recorder.output(watched, *self._place(number, value.shape, recorder.rows), edge, twin_of(value))
        return watched

    def _place(self, number: int, shape: torch.Size, rows: int) -> tuple[int | None, int]:
        """Return where an output carries the examples, and how many entries belong to each; as far as that is sure."""
        seen = self._sizes.setdefault(number, set())
        seen.add((rows, *shape[:2]))
        for axis, size in enumerate(shape[:2]):
            fold = size // rows
            one_size = len({sizes[0] for sizes in seen}) == 1
            fits = all(len(sizes) > axis + 1 and sizes[axis + 1] == fold * sizes[0] for sizes in seen)
            if fold and fits and (fold == 1 or (axis == 0 and not one_size)):
                return axis, fold
        return None, 1

    def _announced(self, loss: Tensor, gradient: Tensor | None = None) -> None:
        """Read a loss that is about to be back-propagated, if it is one of those to be read or unlike them."""
        self._unread = False
        rows = self._rows()
        with torch._C.DisableTorchFunctionSubclass():  # else each look at an attribute is a call that is watched
            node = loss.grad_fn
        if rows is None or rows < 2 or node is None:
            return
        recorder = self._recording()
        if recorder is not None:
            recorder.open = False  # what the checks compute is not the user's
        try:
            if self._ignores_targets:
                require_same_targets(node, rows)
            number = fingerprint(node)
            if self._left and number in self._known:
                self._left -= 1
                return
            with cache_emptied():
                self._check(loss.as_subclass(Tensor))
                if recorder is not None:
                    self._repeat(recorder, loss, gradient)
        finally:
            self.close()
        self._known.add(number)
        self._read += 1
        if self._left:  # another loss than before: look at the next ones too
            self._gap, self._left = 0, 0
            self._read = 0
        elif self._read >= _FIRST:
            self._gap = self._left = 2 * self._gap or _FIRST

    def _repeat(self, recorder: Recorder, loss: Tensor, gradient: Tensor | None) -> None:
        """Compute the loss again with other examples; note what cannot be."""
        if recorder.number(loss) in recorder.earlier:  # of an earlier batch, which the tape refuses
            return
        if any(is_custom(node) and not is_own(node) for node in nodes_below(loss.grad_fn, until=OUTPUT)):
            self.notes[not_repeated("it has an autograd.Function of its own")] = None
            return
        edges = [source.edge for source in recorder.sources if source.edge is not None]
        given = None if gradient is None else gradient.as_subclass(Tensor)
        plain = loss.as_subclass(Tensor)

        def actual() -> Sequence[Tensor | None]:
            return torch.autograd.grad(plain, edges, given, retain_graph=True, allow_unused=True) if edges else ()

        findings = compare_losses(recorder, loss, gradient, actual, self._read)
        self.notes |= dict.fromkeys(findings.notes)
        if findings.constants is not None:
            if self._constants is not None and findings.constants.differ(self._constants):
                self.notes[OUTSIDE] = None
            self._constants = findings.constants

    def _check(self, loss: Tensor) -> None:
        rows = self._rows()
        assert rows is not None
        self._check_parameters(loss.grad_fn)
        reduction = ReductionCheck(rows, self._declared)
        reduction.follow(loss.grad_fn)
        self._ignores_targets |= reduction.ignores_targets
        if reduction.divided_by_rows:
            if self._divided_by_rows not in (None, rows):
                raise ValueError(
                    'the loss is a sum divided by the number of rows in the batch, but loss_reduction="sum" was '
                    'declared: declare loss_reduction="mean", or divide by a constant such as the expected batch size'
                )
            self._divided_by_rows = rows
        self._check_coupling(loss, rows)

    def _check_coupling(self, loss: Tensor, rows: int) -> None:
        """Refuse a loss that couples examples; not tried where a custom Function makes a second backward unsafe."""
        if any(map(is_custom, nodes_below(loss.grad_fn, until=OUTPUT))):  # may be differentiated only once
            return
        if is_of_vectors(loss.grad_fn, rows):
            return
        coupled = coupling_strength(loss, output_edges(loss.grad_fn), rows, self._read)
        how = "derivatives for one half of them depend on the other half"
        if coupled <= _ROUNDING:
            coupled = coupling(loss.grad_fn, rows, self._read)
            how = "one of its terms depends on two halves of them"
        if coupled > _ROUNDING:
            raise ValueError(
                f"the loss compares the examples of a batch with each other ({how}, by {coupled:.2g} of its change): "
                "it is no mean over examples, and one example changes the gradients of the others"
            )

    def _check_parameters(self, loss: Any) -> None:
        """Refuse a loss that trains other parameters too: nothing would be clipped, and no noise added."""
        own = {id(parameter) for parameter in self._module.parameters()}
        for node in nodes_below(loss):
            parameter = leaf_of(node)
            if isinstance(parameter, nn.Parameter) and id(parameter) not in own:
                raise ValueError(
                    f"the loss has a gradient for a parameter of shape {tuple(parameter.shape)} that is not the "
                    "private model's: whoever trains it would do so without privacy. Make it a part of the module "
                    "that is made private (the loss can be computed in its forward), freeze it, or detach() what comes "
                    "from it."
                )
