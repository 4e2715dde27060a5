"""Compiled passes. On a CPU a stand-in takes the place of CUDA graphs, and mostly that of the compiler too."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from dphero import compiling, graphs, recording
from dphero.compiling import Compiled, taken_apart
from dphero.factors import Diagonal
from dphero.geometry import identity
from dphero.gradients.batch import GradientBatch
from dphero.graphs import Graphs
from dphero.guidance import PCA
from dphero.pieces import Bias, Outer
from dphero.precision import _PRODUCTS
from dphero.probe import probe
from dphero.taps import Taps
from tests.models import test_zoo as zoo
from tests.models.zoo import CASES
from tests.test_graphs import DEVICE, GUIDANCE, Attention, StandIn, compare, convolutional, images, tokens, train


class Again(StandIn):
    """Does compiled work again, into the same tensors; its inside cannot be recorded on a CPU."""

    def __init__(self, device: torch.device, room: int = 0) -> None:
        super().__init__(device)
        self._compiled = 2  # the forward and the backward pass; sums are not

    def record(self, work: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        if self._compiled == 0:
            return super().record(work)
        self._compiled -= 1
        result = work()
        places = taken_apart(result)[0]

        @torch.no_grad()
        def replay() -> None:
            for place, value in zip(places, taken_apart(work())[0], strict=True):
                place.copy_(value)

        return replay, result


def interpreted(
    module: fx.GraphModule, given: list[Tensor], options: dict[str, Any]
) -> Callable[..., Sequence[Tensor]]:
    """Stand in for the compiler."""

    def run(given: list[Tensor]) -> Sequence[Tensor]:
        taken = list(given)
        given.clear()
        return module(taken)

    return run


def turned(module: fx.GraphModule, given: list[Tensor], options: dict[str, Any]) -> Callable[..., Sequence[Tensor]]:
    """Stand in for a compiler that lays tensors out in memory as it likes."""
    run = interpreted(module, given, options)
    return lambda given: [x.transpose(0, -1).contiguous().transpose(0, -1) if x.dim() > 1 else x for x in run(given)]


@pytest.fixture(params=[interpreted, turned])
def traced(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Record what the compiler is given, instead of what it makes of it."""
    monkeypatch.setattr(compiling, "_compile", request.param)
    if DEVICE.type == "cpu":
        monkeypatch.setattr(recording, "Pool", StandIn)
        monkeypatch.setattr(graphs, "_DEVICES", ("cpu",))


@pytest.mark.parametrize("guidance", GUIDANCE)
def test_training_is_the_same(traced: None, guidance: str) -> None:
    for make, data in ((convolutional, images()), (Attention, tokens())):
        compare(make, data, guidance=GUIDANCE[guidance], recorded="compiled")


_HOOKED = ("weight_norm_by_hook", "pruned")  # refused, as their hooks would not run
_RESHAPED = ("prelu_single",)  # changes a shape in place, which the stand-in for CUDA graphs cannot do again


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("name", [name for name in CASES if name not in _HOOKED + _RESHAPED])
def test_gradients_are_those_of_micro_batches(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if DEVICE.type != "cpu":
        pytest.skip("the models are on a CPU")
    monkeypatch.setattr(compiling, "_compile", turned)
    monkeypatch.setattr(recording, "Pool", StandIn)
    monkeypatch.setattr(graphs, "_DEVICES", ("cpu",))
    module, batch = zoo.make(name, torch.float32)
    plain = {each: identity(tuple(parameter.shape)) for each, parameter in zoo.trained(module).items()}
    geometry = plain | zoo.guided(module, PCA())
    found: list[GradientBatch] = []
    taps = Taps(
        module,
        zoo.trained(module),
        geometry=lambda: geometry,
        rows=lambda: len(batch[0]),
        consume=found.append,
        examine=probe,
        replay=partial(Graphs, rows=len(batch[0]), compiled=True),
    )
    zoo.loss(module, *batch).backward()
    taps.detach()
    rows, weights = found[0].rows, torch.rand(found[0].rows)
    sums = found[0].weighted_sums(dict.fromkeys(found[0].pieces, weights), None)
    gradients = zoo.expected(name, torch.float32)
    largest = max(float(gradient.abs().max()) for gradient in gradients.values())
    assert type(found[0]) is not GradientBatch  # it comes from a recording
    for each, gradient in gradients.items():
        if each in sums:
            norms = geometry[each].whiten(gradient).reshape(rows, -1).norm(dim=1)
            close = {"rtol": 1e-3, "atol": 1e-6 * largest}
            torch.testing.assert_close(found[0].square_norms[each].sqrt() * rows, norms, **close)
            torch.testing.assert_close(sums[each] * rows, torch.einsum("n,n...->...", weights, gradient), **close)


def test_a_bad_example_counts_for_nothing(traced: None) -> None:
    data = images()
    data.tensors[0][::7] = float("nan")
    engine = compare(convolutional, data, recorded="compiled")
    assert engine.diagnostics.nonfinite > 0


@pytest.mark.skipif(DEVICE.type == "cpu" and shutil.which("g++") is None, reason="needs a compiler")
def test_the_compiler_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.backends.cudnn.allow_tf32 = False  # it is compared digit by digit
    if DEVICE.type == "cpu":
        monkeypatch.setattr(recording, "Pool", Again)
        monkeypatch.setattr(graphs, "_DEVICES", ("cpu",))
    lots = {"sampling": "shuffle", "steps": 3, "dataset_size": None}
    try:
        compare(convolutional, images(), guidance=GUIDANCE["weights"], recorded="compiled", **lots)
    finally:
        torch.backends.cudnn.allow_tf32 = True


def test_a_compiler_that_errs_is_found_out(traced: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(module: fx.GraphModule, given: list[Tensor], options: dict[str, Any]) -> Callable[..., Sequence[Tensor]]:
        run = interpreted(module, given, options)
        return lambda given: [1.2 * x for x in run(given)]

    monkeypatch.setattr(compiling, "_compile", wrong)
    with pytest.raises(ValueError, match="computes something else"):
        train(convolutional().to(DEVICE), images(), cuda_graphs="compiled")


def test_norms_that_are_too_small_are_found_out(traced: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """By less than compiled kernels may differ from others: they must still be norms of what is summed."""
    calls: list[int] = []

    def wrong(module: fx.GraphModule, given: list[Tensor], options: dict[str, Any]) -> Callable[..., Sequence[Tensor]]:
        run = interpreted(module, given, options)
        calls.append(1)
        return run if len(calls) == 1 else lambda given: (lambda norms, *rest: [0.95 * norms, *rest])(*run(given))

    monkeypatch.setattr(compiling, "_compile", wrong)
    with pytest.raises(ValueError, match="adds more to the sums than its norms say"):
        train(convolutional().to(DEVICE), images(), cuda_graphs="compiled")


def test_a_compiler_that_fails_is_named(traced: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(module: fx.GraphModule, given: list[Tensor], options: dict[str, Any]) -> Any:
        raise RuntimeError("no kernel for this")

    monkeypatch.setattr(compiling, "_compile", fail)
    with pytest.raises(ValueError, match=r"cannot be recorded: no kernel for this. Call make_private without"):
        train(convolutional().to(DEVICE), images(), cuda_graphs="compiled")


def test_what_is_saved_is_let_go(traced: None) -> None:
    x = torch.randn(5, 4)

    def forward() -> list[Tensor]:
        hidden.append(x.sin())
        return [hidden[0].sum()]

    hidden: list[Tensor] = []
    made = Compiled(forward, lambda: [hidden[0] * 2, hidden[0]])
    out, (double, itself) = made.forward()[0], made.backward()
    torch.testing.assert_close([out, double, itself], [x.sin().sum(), 2 * x.sin(), x.sin()])
    assert not made._saved and not made._kept
    x += 1  # it is read where it lies
    torch.testing.assert_close(made.forward()[0], x.sin().sum())


def test_an_object_is_made_again_of_other_tensors() -> None:
    factor = Diagonal(torch.ones(3))
    outer = Outer(torch.randn(2, 3), torch.randn(2, 4))
    pieces = {"weight": outer, "bias": Bias(outer), "about": (factor, "name", None)}
    tensors, put_together = taken_apart(pieces)
    others = [torch.full_like(tensor, 7.0) for tensor in tensors]
    again = put_together(others)
    assert len(tensors) == 2 and tensors[0] is outer.left
    assert again["weight"].left is others[0] and again["bias"].outer is again["weight"]
    assert again["about"][0] is factor and again["about"][1:] == ("name", None)


def test_who_looks_at_the_memory_itself_finds_it_as_it_was(traced: None) -> None:
    x, hidden = torch.randn(5, 4), []

    def forward() -> list[Tensor]:
        hidden.append(x.sin())
        return [hidden[0].sum()]

    made = Compiled(forward, lambda: [hidden[0].as_strided((6,), (1,), 2) * 2])
    made.forward()
    torch.testing.assert_close(made.backward()[0], 2 * x.sin().flatten()[2:8])


@pytest.fixture
def usual() -> Iterator[None]:
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


def test_a_compiler_is_told_the_precision_of_products(usual: None, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b, c = torch.randn(3, 4), torch.randn(4, 5), torch.randn(3, 5)
    stacks = [x.expand(2, *x.shape).contiguous() for x in (a, b, c)]

    def products() -> list[Tensor]:
        out = torch.empty(2, 3, 5)
        torch.bmm(stacks[0], stacks[1], out=out)
        return [a @ b, torch.bmm(*stacks[:2]), out, torch.addmm(c, a, b, beta=2.0, alpha=0.5),
                torch.baddbmm(stacks[2], *stacks[:2], beta=3.0)]  # fmt: skip

    def short() -> list[Tensor]:
        torch.backends.cuda.matmul.allow_tf32 = True
        try:
            return products()
        finally:
            torch.backends.cuda.matmul.allow_tf32 = False

    nodes: list[fx.Node] = []

    def compiler(module: fx.GraphModule, given: list[Tensor], options: dict[str, Any]) -> Any:
        nodes.extend(module.graph.nodes)
        return interpreted(module, given, options)

    monkeypatch.setattr(compiling, "_compile", compiler)
    made = Compiled(products, short)
    told = [node.args[2] for node in nodes if node.target is torch.ops.dphero.product.default]
    untold = [node for node in nodes if node.target in _PRODUCTS]
    assert told == [True] * 5 and len(untold) == 5
    torch.testing.assert_close(made.forward(), made.backward())
