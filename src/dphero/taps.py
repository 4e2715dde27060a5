"""Taps: a model's layers report their input and output gradient while the user's own loop runs.

While a model is private, each module that owns trainable parameters (a *site*) has its ``forward``
replaced, on the instance, by the rule of its layer family. A rule computes the same output from *detached*
parameters, so that autograd spends nothing on parameter gradients, and taps that output. The model keeps
its class, its attributes and its ``state_dict``; :meth:`Taps.detach` takes the replacements away.

Nothing here knows of clipping or noise.
"""

from __future__ import annotations

import types
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from dphero.geometry import Geometry
from dphero.layers import Rule, find_rule
from dphero.layout import Layout
from dphero.probe import Plan, probe
from dphero.shared import Origin, Shared
from dphero.tape import GradientBatch, PieceMaker, Tape

__all__ = ["Call", "Site", "Taps"]


class Site:
    """A module that owns trainable parameters, and the rule that taps it.

    Attributes:
        names: The module's own trainable parameters: local name to name in the whole model.
    """

    def __init__(self, path: str, module: nn.Module, names: dict[str, str], rule: Rule) -> None:
        self.path, self.module, self.names, self.rule = path, module, names, rule
        self.original = module.forward

    @property
    def label(self) -> str:
        """Name and type of the module, for messages."""
        return f"{self.path or 'the model'!r} ({type(self.module).__name__})"


class Call:
    """One call of one site: what a layer rule works with.

    ``call["weight"]`` is the module's parameter, detached; ``call.get("bias")`` is ``None`` where there is
    none; ``call.wants("bias")`` tells whether its gradient is asked for.
    """

    def __init__(self, taps: Taps, site: Site) -> None:
        self.taps, self.site = taps, site

    @property
    def module(self) -> nn.Module:
        """The module that is being called."""
        return self.site.module

    def __getitem__(self, name: str) -> Tensor:
        parameter = self.module._parameters[name]
        assert parameter is not None
        return parameter.detach()

    def get(self, name: str) -> Tensor | None:
        """Return the detached parameter, or ``None`` where the module has none of that name."""
        return None if self.module._parameters.get(name) is None else self[name]

    def wants(self, name: str) -> bool:
        """Tell whether the gradient of this parameter is asked for."""
        return name in self.site.names

    def tap(self, compute: Callable[[], Tensor], make: PieceMaker, *saved: Any) -> Tensor:
        """Compute an output, and have its gradient turned into pieces.

        Args:
            compute: Returns the output from detached parameters.
            make: ``make(output_gradient, *saved)`` returns the pieces by local parameter name; every tensor
                reaches it with the examples in front: ``(n, ...)``.
            saved: What ``make`` needs besides, usually the layer's input.
        """
        return self.taps.tap(self.site, compute, make, saved)


class Taps:
    """Attaches rules to the sites of a model and opens a tape for each physical batch.

    Args:
        module: The model.
        parameters: Name to parameter, of those whose gradients are wanted.
        geometry: Name to geometry in which norms are taken; read anew for each batch.
        rows: Returns the number of rows of the physical batch in hand, or raises if there is none.
        consume: Receives the gradients of each physical batch when its backward pass has finished.
    """

    def __init__(
        self,
        module: nn.Module,
        parameters: Mapping[str, nn.Parameter],
        *,
        geometry: Callable[[], Mapping[str, Geometry]],
        rows: Callable[[], int],
        consume: Callable[[GradientBatch], None],
    ) -> None:
        self.module = module
        self._geometry, self._rows, self._consume = geometry, rows, consume
        self._tape: Tape | None = None
        self.plan: Plan | None = None
        """What was learned, or is being learned, about where each call carries the examples."""
        self._inside = False
        self._paused = False
        self._counter: Counter[str] = Counter()
        name_of = {id(parameter): name for name, parameter in parameters.items()}
        self.sites = list(_find_sites(module, name_of))
        for site in self.sites:
            site.module.__dict__["forward"] = _Patched(site.module, self._site_forward(site))
        self.root_forward = module.forward
        module.__dict__["forward"] = _Patched(module, self._run_root)

    # -- the user's side ------------------------------------------------------------------------------

    def detach(self) -> None:
        """Give every module its own ``forward`` back."""
        self.module.__dict__.pop("forward", None)
        for site in self.sites:
            site.module.__dict__.pop("forward", None)
            if not isinstance(site.original, types.MethodType) or site.original.__self__ is not site.module:
                site.module.__dict__["forward"] = site.original
        self.clear()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Let the model run without being tapped: its parameters then have ordinary gradients."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    @property
    def is_paused(self) -> bool:
        """Whether the model runs untapped."""
        return self._paused

    def clear(self) -> None:
        """Forget forward passes that no backward pass followed."""
        self._tape = None

    # -- forward --------------------------------------------------------------------------------------

    @property
    def _active(self) -> bool:
        return not self._paused and self.module.training and torch.is_grad_enabled()

    def _run_root(self, *args: Any, **kwargs: Any) -> Any:
        if not self._active or self._inside:
            return self.root_forward(*args, **kwargs)
        rows = self._rows()
        if self.plan is None or not self.plan.examples_independent:
            self.plan = probe(self, args, kwargs, rows)
        if self._tape is None or self._tape.done or self._tape.rows != rows:
            self._tape = Tape(rows, self._geometry(), self._consume)
        return self.run_inside(self.root_forward, *args, **kwargs)

    def run_inside(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a forward pass in which the sites are tapped."""
        self._inside, before = True, self._inside
        self._counter.clear()
        try:
            return forward(*args, **kwargs)
        finally:
            self._inside = before

    def _site_forward(self, site: Site) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            if not self._inside and not (self._active and (self._tape is None or not self._tape.running)):
                return site.original(*args, **kwargs)
            if not self._inside:
                raise RuntimeError(
                    f"{site.label} was called by itself while the model is private. Call the whole model, so "
                    "that each example's gradient is complete, or use `with engine.paused():` for other data."
                )
            return site.rule(Call(self, site), *args, **kwargs)

        return forward

    def tap(self, site: Site, compute: Callable[[], Tensor], make: PieceMaker, saved: tuple[Any, ...]) -> Tensor:
        """Compute and tap one output of a site (see :meth:`Call.tap`)."""
        key = self.next_key(site.path)
        if self.plan is not None and self.plan.recording:
            out = compute()
            self.plan.record(key, out, site)
            return self._share(site, out, make, saved) if self.plan.guess(out).shared else out
        layout = self.layout(key, site.label)
        assert layout is not None and self._tape is not None
        if layout.shared:
            return self._share(site, compute(), make, saved)
        out = compute() if any(_needs_grad(value) for value in saved) else _Fresh.apply(_anchor(saved), compute)
        if isinstance(out, Shared):
            raise AssertionError(f"{site.label}: a shared value with a batch axis")
        if not out.requires_grad:
            out = _Fresh.apply(_anchor(saved), lambda: out)
        self._tape.watch(out, layout, site.names, make, saved, site.label)
        return out

    def _share(self, site: Site, out: Tensor, make: PieceMaker, saved: tuple[Any, ...]) -> Tensor:
        """Tap an output that is the same for all examples: its gradient is taken where examples meet it."""
        tape = self.tape
        if tape is not None:
            tape.expect(site.names.values(), several=True)
        plain = tuple(value.plain if isinstance(value, Shared) else value for value in saved)

        def sink(gradients: Tensor) -> None:
            assert tape is not None

            def spread(value: Any) -> Any:
                return value.detach().expand(len(gradients), *value.shape) if isinstance(value, Tensor) else value

            for local, piece in make(gradients, *map(spread, plain)).items():
                if local in site.names:
                    tape.deliver(site.names[local], piece)

        return Shared.wrap(Origin.after(out, sink), self, site)

    # -- what the rules for shared values need -----------------------------------------------------------

    @property
    def tape(self) -> Tape | None:
        """The tape of the physical batch in hand; ``None`` while the model is being examined."""
        return None if self.plan is not None and self.plan.recording else self._tape

    @property
    def rows(self) -> int:
        """The number of rows of the batch that is running."""
        return self.plan.rows if self.plan is not None and self.plan.recording else self._rows()

    def next_key(self, path: str) -> tuple[str, int]:
        """Number the calls of one site within a forward pass."""
        self._counter[path] += 1
        return path, self._counter[path]

    def layout(self, key: tuple[str, int], label: str) -> Layout | None:
        """Return where the examples lie in the output of this call, as the probe saw it."""
        assert self.plan is not None
        try:
            return self.plan.layouts[key]
        except KeyError:
            raise RuntimeError(
                f"{label} was called {key[1]} times in this forward pass, more often than when the model was "
                "first examined. A private model must make the same calls for every batch."
            ) from None


def _find_sites(module: nn.Module, name_of: dict[int, str]) -> Iterator[Site]:
    for path, child in module.named_modules():
        names = {
            local: name_of[id(parameter)]
            for local, parameter in child._parameters.items()
            if parameter is not None and id(parameter) in name_of
        }
        if names:
            yield Site(path, child, names, find_rule(child))


def _needs_grad(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad


def _anchor(saved: tuple[Any, ...]) -> Tensor:
    device = next((value.device for value in saved if isinstance(value, Tensor)), None)
    return torch.empty(0, device=device, requires_grad=True)


class _Fresh(torch.autograd.Function):
    """Gives the first layer's output a place in the graph, though none of its inputs requires a gradient.

    The output is no leaf, so that an in-place activation may follow.
    """

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, compute: Callable[[], Tensor]) -> Tensor:
        return compute()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None]:
        return None, None


class _Patched:
    """The replaced ``forward`` of one module. Copies and pickles of the module get their class's own."""

    def __init__(self, module: nn.Module, forward: Callable[..., Any]) -> None:
        self._module, self._forward = module, forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._forward(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., Any]:
        twin = memo[id(self._module)]
        return types.MethodType(type(twin).forward, twin)

    def __reduce__(self) -> Any:
        return getattr, (self._module, "forward")
