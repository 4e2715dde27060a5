"""What is known of the rows of a value that is computed from a parameter, from the operations alone.

A value v has *row form* of degree d in a leaf p if, with one row of v for each row of p,

    v_rj = Σ_{e ≤ d} a_er · (p_rj)ᵉ,    a_er a function of Σ_j p_rj and Σ_j p_rj² of that row, and of constants.

Standardised, centred and normalised weights are of degree 1. Their Jacobian then is, for each row, a multiple of the
identity and what lies in span{1, p_r}: norms need no more of a gradient than its length and two of its products
(:mod:`dphero.row_form.norms`). The a_er may also depend on leaves with one number for each row (gains).

Only operations that keep the form whatever the numbers are have a rule here, so that it holds in every step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class RowForm(NamedTuple):
    """A value's row form.

    Attributes:
        degree: d; entries of degree 0 are all the same in a row.
        rows: Number of rows.
        axis: Where they lie in the value; the axes before have size 1.
        main: p, if the value depends on one.
    """

    degree: int
    rows: int
    axis: int
    main: Tensor | None


def leaf_form(leaf: Tensor) -> RowForm | None:
    """Return the form of a leaf: one number for each row, or rows of numbers."""
    if leaf.dim() == 0:
        return None
    if leaf.numel() == leaf.shape[0]:
        return RowForm(0, leaf.shape[0], 0, None)
    return RowForm(1, leaf.shape[0], 0, leaf)


class Call(NamedTuple):
    """An operation's arguments, the forms of the tensors among them that may have one, by id, and a result."""

    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    forms: Mapping[int, RowForm | None]
    out: Tensor

    def form(self, value: Any) -> RowForm | None:
        """Return the form of one argument."""
        return self.forms.get(id(value))

    def joined(self, values: Sequence[Any], degree: Callable[[list[int]], int]) -> RowForm | None:
        """Return the form of what is computed entry by entry; ``degree`` from those of these arguments."""
        forms = [form for form in map(self.form, values) if form is not None]
        if not forms:
            return None
        _, rows, axis, _ = forms[0]
        mains = {id(form.main): form.main for form in forms if form.main is not None}
        degrees = []
        for value in values:
            if isinstance(value, int | float):
                degrees.append(0)
                continue
            if not isinstance(value, Tensor):
                return None
            form = self.form(value)
            if form is None and (id(value) in self.forms or not self._one_for_each_row(value, rows, axis)):
                return None
            if form is not None and ((form.rows, form.axis) != (rows, axis) or value.dim() != self.out.dim()):
                return None
            degrees.append(0 if form is None else form.degree)
            if degrees[-1] and value.shape != self.out.shape:
                return None  # a product of all entries of a row with all others
        found = degree(degrees)
        return RowForm(found, rows, axis, next(iter(mains.values()), None)) if len(mains) < 2 and found < 3 else None

    def _one_for_each_row(self, constant: Tensor, rows: int, axis: int) -> bool:
        if constant.dim() == 0:
            return True
        return constant.dim() == self.out.dim() and is_scalar(constant.shape, rows, axis)


def is_scalar(shape: Sequence[int], rows: int, axis: int) -> bool:
    """Tell whether a tensor of this shape has one number for each row."""
    return prod(shape) == rows and len(shape) > axis and shape[axis] == rows


Rule = Callable[[Call], "RowForm | None"]
_RULES: dict[Any, Rule] = {}


def row_form(func: Any, call: Call) -> RowForm | None:
    """Return the form of a result, if it is known to have one."""
    rule = _RULES.get(func)
    if rule is None or not call.out.is_floating_point():
        return None
    try:
        return rule(call)
    except (TypeError, IndexError, ValueError):  # arguments that the rule does not know
        return None


def _rule(names: str, *others: Any) -> Callable[[Rule], Rule]:
    """Register a rule for functions by their names, as methods and in ``torch``."""

    def add(rule: Rule) -> Rule:
        found = [getattr(place, name, None) for name in names.split() for place in (torch.Tensor, torch)]
        _RULES.update((each, rule) for each in (*found, *others) if each is not None)
        return rule

    return add


_FUNCTIONS = "rsqrt sqrt exp log reciprocal abs clamp clamp_min clamp_max maximum minimum sigmoid tanh __rpow__"


@_rule(_FUNCTIONS)
def _pointwise(call: Call) -> RowForm | None:
    """Any function, of what is the same in a whole row."""
    values = [*call.args, *call.kwargs.values()]
    return call.joined(values, lambda degrees: 3 if any(degrees) else 0)


@_rule("add sub subtract rsub neg __add__ __radd__ __sub__ __rsub__ __neg__")
def _sum(call: Call) -> RowForm | None:
    return call.joined([*call.args, *call.kwargs.values()], max)


@_rule("mul multiply __mul__ __rmul__")
def _product(call: Call) -> RowForm | None:
    return call.joined([*call.args, *call.kwargs.values()], sum)


@_rule("div divide true_divide __truediv__")
def _quotient(call: Call) -> RowForm | None:
    above, below = (*call.args, *call.kwargs.values())
    return call.joined([above, below], lambda degrees: 3 if degrees[1] else degrees[0])


@_rule("__rdiv__ __rtruediv__")
def _quotient_turned(call: Call) -> RowForm | None:
    below, above = call.args
    return call.joined([above, below], lambda degrees: 3 if degrees[1] else degrees[0])


@_rule("pow square __pow__")
def _power(call: Call) -> RowForm | None:
    base, exponent = (*call.args, *call.kwargs.values(), 2)[:2]
    if not isinstance(exponent, Tensor) and exponent == 2:
        return call.joined([base], lambda degrees: 2 * degrees[0] if degrees[0] < 2 else 3)
    return call.joined([base, exponent], lambda degrees: 3 if any(degrees) else 0)


# -- over a row -----------------------------------------------------------------------------------------------------


def _reduced(call: Call, most: int) -> RowForm | None:
    """Return the form of what is summed over all of each row."""
    value = call.args[0]
    form, shape = call.form(value), tuple(call.out.shape)
    if form is None or form.degree > most:
        return None
    if len(shape) == value.dim():
        axis, clear = form.axis, True
    else:  # the only axis of this size must be the one that is left
        axis, clear = 0, len(shape) == 1 and list(value.shape).count(form.rows) == 1
    return RowForm(0, form.rows, axis, form.main) if clear and is_scalar(shape, form.rows, axis) else None


@_rule("mean sum")
def _mean(call: Call) -> RowForm | None:
    return _reduced(call, 2)


@_rule("var std var_mean std_mean")
def _variance(call: Call) -> RowForm | None:
    return _reduced(call, 1)


@_rule("norm", torch.linalg.vector_norm)
def _norm(call: Call) -> RowForm | None:
    kind = call.args[1] if len(call.args) > 1 else call.kwargs.get("p", call.kwargs.get("ord"))
    return _reduced(call, 1) if kind is None or kind in (2, "fro") else None


@_rule("", F.normalize)
def _normalised(call: Call) -> RowForm | None:
    def known(input: Tensor, p: float = 2.0, dim: int = 1, eps: float = 1e-12, out: None = None) -> RowForm | None:
        form = call.form(input)
        fits = form is not None and p == 2 and form.degree < 2 and (form.axis, dim % input.dim()) == (0, 1)
        return form if fits and input.dim() == 2 else None

    return known(*call.args, **call.kwargs)


@_rule("", torch._weight_norm)
def _weight_norm(call: Call) -> RowForm | None:
    def known(v: Tensor, g: Tensor, dim: int = 0) -> RowForm | None:
        form = call.form(v)
        fits = form is not None and (dim, form.axis) == (0, 0) and form.degree < 2
        return call.joined([v, g], lambda degrees: 3 if degrees[1] else degrees[0]) if fits else None

    return known(*call.args, **call.kwargs)


@_rule("", F.batch_norm)
def _batch_norm(call: Call) -> RowForm | None:
    """Standardise rows by taking them for channels of one example, as timm does."""

    def known(
        input: Tensor,
        running_mean: Any,
        running_var: Any,
        weight: Any = None,
        bias: Any = None,
        training: bool = False,
        momentum: float = 0.1,
        eps: float = 1e-5,
    ) -> RowForm | None:
        form = call.form(input)
        if form is None or (form.axis, form.degree) != (1, 1) or not training:
            return None
        if running_mean is not None or running_var is not None:
            return None
        for each in (weight, bias):
            own = call.form(each)
            if each is None or (own is None and id(each) not in call.forms):
                continue  # a constant for each row
            if own is None or own.degree or (own.main is not None and own.main is not form.main):
                return None
        return form

    return known(*call.args, **call.kwargs)


# -- in other shapes ------------------------------------------------------------------------------------------------

_SHAPES = "view reshape flatten unflatten unsqueeze view_as reshape_as contiguous clone to float double type_as"


@_rule(_SHAPES)
def _in_other_shape(call: Call) -> RowForm | None:
    """Find the rows again where entries keep their order."""
    form, shape = call.form(call.args[0]), call.out.shape
    if form is None or call.out.numel() != call.args[0].numel():
        return None
    axis = next((axis for axis, size in enumerate(shape) if size != 1), 0)
    return form._replace(axis=axis) if len(shape) > axis and shape[axis] == form.rows else None


@_rule("__getitem__")
def _with_more_axes(call: Call) -> RowForm | None:
    index = call.args[1] if isinstance(call.args[1], tuple) else (call.args[1],)
    whole = all(each is None or each is Ellipsis or (isinstance(each, slice) and each == slice(None)) for each in index)
    return _in_other_shape(call) if whole else None


@_rule("expand expand_as broadcast_to")
def _expanded(call: Call) -> RowForm | None:
    value, out = call.args[0], call.out
    form = call.form(value)
    if form is None or (form.degree and value.shape != out.shape) or value.dim() != out.dim():
        return None
    return form if prod(out.shape[: form.axis]) == 1 and out.shape[form.axis] == form.rows else None
