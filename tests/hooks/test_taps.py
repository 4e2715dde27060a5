"""Taps leave a model what it is: its class, attributes, copies and errors; and nothing slips through them."""

from __future__ import annotations

import contextlib
import copy
import doctest
import gc
import inspect
import io
import signal
import time
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import dphero
from dphero.checks.first_batch import probe
from dphero.geometry.geometry import identity
from dphero.gradients.piece import Explicit
from dphero.hooks.modules import swapped
from dphero.hooks.taps import Taps
from dphero.layers import registry
from tests.oracle.micro_batches import Tapped, check, compare, micro_batches, tapped
from tests.oracle.zoo import CASES, Block, Lambda, StandardisedConv, images, sequences


def mean_loss(module: nn.Module, *inputs: Tensor) -> Tensor:
    return module(*inputs).sin().flatten(1).sum(1).mean()


def small() -> nn.Module:
    model = nn.Sequential(nn.Linear(8, 6), nn.ReLU(inplace=True), nn.LayerNorm(6), Lambda(scaled, scale=torch.randn(6)))
    model.note = "mine"
    return model


def scaled(self: Any, x: Tensor) -> Tensor:
    return x * self.scale


# -- the model stays what it is ------------------------------------------------------------------------------


def test_class_attributes_and_state_stay() -> None:
    model = small()
    kind, keys, signature = type(model), list(model.state_dict()), inspect.signature(model.forward)
    children, own = [type(child) for child in model.modules()], [set(vars(child)) for child in model.modules()]
    with Tapped(model, 5):
        mean_loss(model, torch.randn(5, 8)).backward()
        assert type(model) is kind and list(model.state_dict()) == keys and model.note == "mine"
        assert [type(child) for child in model.modules()] == children
        assert inspect.signature(model.forward) == signature
        assert all(isinstance(parameter, nn.Parameter) for parameter in model.parameters())
    for child, attributes in zip(model.modules(), own, strict=True):
        assert "forward" not in vars(child) and set(vars(child)) == attributes
    mean_loss(model, torch.randn(5, 8)).backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def save_and_load(model: nn.Module) -> nn.Module:
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, save_and_load], ids=["deepcopy", "torch.save"])
def test_copies_are_ordinary_models(duplicate: Callable[[nn.Module], nn.Module]) -> None:
    model, batch = small(), torch.randn(5, 8)
    with Tapped(model, 5) as original:
        mean_loss(model, batch).backward()
        twin = duplicate(model)
        assert all("forward" not in vars(child) for child in twin.modules())
        with torch.no_grad():
            for parameter in twin.parameters():
                parameter.mul_(2.0)
        mean_loss(twin, torch.randn(3, 8)).backward()  # its own parameters, ordinary gradients, any batch
        assert all(parameter.grad is not None for parameter in twin.parameters())
        assert len(original.found) == 1
        with torch.no_grad():
            assert not torch.allclose(twin(batch), model(batch))
        check(twin, (batch,), mean_loss)  # a copy can be tapped itself, while the original is


def test_a_forward_of_the_instance_is_kept() -> None:
    model = nn.Sequential(nn.Linear(8, 6), nn.Linear(6, 4))
    mine = lambda x: F.linear(x, 2 * model[0].weight)  # noqa: E731
    model[0].forward = mine
    check(model, (torch.randn(5, 8),), mean_loss)
    assert model[0].forward is mine


def test_evaluation_and_pauses_are_untapped() -> None:
    model, batch = small(), torch.randn(5, 8)
    with Tapped(model, 5) as tapped:
        with torch.no_grad():
            model(torch.randn(3, 8))
        model.eval()
        model(torch.randn(2, 8))
        model.train()
        with tapped.taps.paused():
            mean_loss(model, torch.randn(4, 8)).backward()
        assert not tapped.found and model[0].weight.grad is not None
        model.zero_grad()
        mean_loss(model, batch).backward()
        assert len(tapped.found) == 1 and model[0].weight.grad is None


def test_parameters_that_are_not_trained_get_no_gradient() -> None:
    """Neither those of layers nor those that code uses directly: they are constants to the private model."""
    model, batch = (
        nn.Sequential(nn.Linear(8, 6), nn.Linear(6, 4), Lambda(scaled, scale=torch.randn(4))),
        torch.randn(5, 8),
    )
    expected = micro_batches(model, (batch,), mean_loss)
    found: list[Any] = []
    parameters = {"1.weight": model[1].weight}
    geometry = {"1.weight": identity((4, 6))}
    taps = Taps(model, parameters, geometry=lambda: geometry, rows=lambda: 5, consume=found.append, examine=probe)
    mean_loss(model, batch).backward()
    taps.detach()
    assert all(parameter.grad is None for parameter in model.parameters())
    compare({"1.weight": expected["1.weight"]}, found[0])


def test_moved_and_loaded_weights_are_seen() -> None:
    """Weights that change place in memory: load_state_dict, .data, another precision."""
    model, batch = small(), torch.randn(5, 8)
    with Tapped(model, 5) as tapped:
        mean_loss(model, batch).backward()
        for change in (
            lambda: model.load_state_dict({name: 2 * value for name, value in model.state_dict().items()}),
            lambda: setattr(model[3].scale, "data", model[3].scale.detach().clone() + 1),
            lambda: model.double(),
        ):
            change()
            batch = batch.to(model[0].weight.dtype)
            with tapped.taps.paused():
                expected = micro_batches(model, (batch,), mean_loss)
            mean_loss(model, batch).backward()
            compare(expected, tapped.found[-1])


# -- calls that are out of order -----------------------------------------------------------------------------


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="needs timers")
def test_parameters_come_back_whenever_an_interrupt_comes() -> None:
    """Ctrl-C at any moment, also while they are being put back."""

    class Stop(Exception):
        pass

    def stop(*_: Any) -> None:
        raise Stop

    value, other = torch.ones(1), torch.zeros(1)
    tables = [{"weight": value} for _ in range(5000)]
    slots = [(table, "weight", other) for table in tables]
    before, started = signal.signal(signal.SIGALRM, stop), time.perf_counter()
    try:
        with swapped(slots):
            pass
        duration = time.perf_counter() - started
        for number in range(200):
            with contextlib.suppress(Stop):
                signal.setitimer(signal.ITIMER_REAL, (number + 1) / 200 * duration)
                with swapped(slots):
                    pass
                signal.setitimer(signal.ITIMER_REAL, 0)
            assert all(table["weight"] is value for table in tables)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_an_exception_in_forward_restores_everything() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        if self.fails:
            raise KeyError("mine")
        return x * self.scale

    model = nn.Sequential(nn.Linear(8, 6), Lambda(forward, scale=torch.randn(6)))
    model[1].fails = False
    parameters = dict(model.named_parameters())
    with Tapped(model, 5) as tapped:
        for fails in (False, True):
            model[1].fails = fails
            for _ in range(2):
                if fails:
                    with pytest.raises(KeyError, match="mine"):
                        model(torch.randn(5, 8))
                else:
                    mean_loss(model, torch.randn(5, 8)).backward()
        assert all(value is parameters[name] for name, value in model.named_parameters())
        model[1].fails = False
        batch = (torch.randn(5, 8),)
        with tapped.taps.paused():
            expected = micro_batches(model, batch, mean_loss)
        mean_loss(model, *batch).backward()
        compare(expected, tapped.found[-1])


def test_a_changed_input_is_detected() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        h = self.first(x).tanh()
        out = self.second(h)
        h.mul_(2)
        return out

    model = Lambda(forward, first=nn.Linear(8, 6), second=nn.Linear(6, 4))
    with Tapped(model, 5), pytest.raises(RuntimeError, match=r"input of 'second' \(Linear\) was changed in place"):
        mean_loss(model, torch.randn(5, 8)).backward()


IN_PLACE: dict[str, Callable[[], nn.Module]] = {
    "after the first layer": lambda: nn.Sequential(nn.Linear(8, 8), nn.ReLU(inplace=True)),
    "after a later layer": lambda: nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.ReLU(inplace=True)),
    "after a norm": lambda: nn.Sequential(nn.InstanceNorm1d(5, affine=True), nn.ReLU(inplace=True)),
    "after an operation": lambda: nn.Sequential(
        Lambda(lambda self, x: torch.einsum("btd,de->bte", x, self.weight), weight=torch.randn(8, 8)),
        nn.ReLU(inplace=True),
    ),
    "dropout": lambda: nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Dropout(0.0, inplace=True)),
}


@pytest.mark.parametrize("name", IN_PLACE)
def test_an_output_may_be_changed_in_place(name: str) -> None:
    torch.manual_seed(0)
    check(nn.Sequential(IN_PLACE[name](), nn.Linear(8, 3)), (sequences(6, 5),), mean_loss)


def test_dropout_in_place_is_followed_while_training() -> None:
    """In evaluation mode, in which a random model is compared as well, it does nothing."""
    torch.manual_seed(0)
    model, x = (
        nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Dropout(0.5, inplace=True)),
        sequences(6, 5),
    )
    with Tapped(model, 6) as tapped:
        torch.manual_seed(1)
        mean_loss(model, x).backward()
    torch.manual_seed(1)
    mean_loss(model, x).backward()
    for name, parameter in model.named_parameters():
        found = tapped.found[0].pieces[name].weighted_sum(torch.ones(6))
        torch.testing.assert_close(found, parameter.grad, rtol=1e-4, atol=1e-6)


def test_what_a_layer_returns_of_its_input_is_not_written() -> None:
    """A rule may return its input seen in another way, which others may hold as well."""

    class Shift(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.by = nn.Parameter(torch.zeros(8))

        def forward(self, x: Tensor) -> Tensor:
            return (x + self.by).view(len(x), -1)

    @dphero.register(Shift)
    def shift(call: Any, x: Tensor) -> Tensor:
        return call.tap(lambda: x.view(len(x), -1), lambda delta, x: {"by": Explicit(delta)}, x)

    model = Lambda(lambda self, x: self.shift(x).mul_(2.0) + x, shift=Shift())
    check(model, (torch.randn(6, 8),), mean_loss)


def test_arguments_by_the_names_that_torch_gives_them() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        state = torch.zeros(1, len(x), 8)
        x = self.norm(input=self.linear(input=x))
        x = self.recurrent(input=x, hx=state)[0] + self.instance(input=x)
        x = self.pool(input=self.conv(input=x).unsqueeze(1)).flatten(1)
        return self.cell(input=self.group(input=x), hx=torch.zeros(len(x), 3))

    model = Lambda(
        forward,
        linear=nn.Linear(8, 8),
        norm=nn.LayerNorm(8),
        recurrent=nn.GRU(8, 8, batch_first=True),
        instance=nn.InstanceNorm1d(6, affine=True),
        conv=nn.Conv1d(6, 6, 1),
        pool=nn.MaxPool2d(2),
        group=nn.GroupNorm(2, 12),
        cell=nn.GRUCell(12, 3),
    )
    check(model, (sequences(5, 6),), mean_loss)
    words = Lambda(lambda self, i: self.bag(input=i) + self.table(input=i).sum(1), bag=nn.EmbeddingBag(9, 4),
                   table=nn.Embedding(9, 4))  # fmt: skip
    check(words, (torch.randint(9, (5, 6)),), mean_loss)


def test_a_second_backward_is_refused() -> None:
    model = small()
    with Tapped(model, 5) as tapped:
        loss = mean_loss(model, torch.randn(5, 8))
        loss.backward(retain_graph=True)
        with pytest.raises(RuntimeError, match="second time"):
            loss.backward()
        assert len(tapped.found) == 1


def test_several_calls_of_the_model_add_up() -> None:
    def loss(module: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return (module(x) * module(y)).sum(1).mean()

    check(small(), (torch.randn(5, 8), torch.randn(5, 8)), loss)


def test_a_forward_pass_without_backward_is_forgotten() -> None:
    model, batch = small(), (torch.randn(5, 8),)
    expected = micro_batches(model, batch, mean_loss)
    with Tapped(model, 5) as tapped:
        model(torch.randn(5, 8))
        mean_loss(model, *batch).backward()
    compare(expected, tapped.found[0])


def test_a_layer_called_by_itself_is_refused() -> None:
    model = small()
    with Tapped(model, 5) as tapped:
        for _ in range(2):  # before the first backward pass, and after it
            with pytest.raises(RuntimeError, match=r"'0' \(Linear\) was called by itself.*whole model.*paused"):
                model[0](torch.randn(5, 8))
            mean_loss(model, torch.randn(5, 8)).backward()
        with tapped.taps.paused():
            model[0](torch.randn(5, 8))


class Checkpointed(nn.Module):
    """Two layers and a block between them that frees its activations."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.first, self.block, self.head = nn.Linear(8, 8), Block(8, 2), nn.Linear(8, 3)
        self.options = options

    def forward(self, x: Tensor) -> Tensor:
        return self.head(checkpoint(self.block, self.first(x), **self.options))


@pytest.mark.filterwarnings("ignore:None of the inputs")
@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing_is_exact(reentrant: bool) -> None:
    model = Checkpointed(use_reentrant=reentrant)
    check(model, (sequences(5),), lambda model, x: mean_loss(model, x))
    calls = []
    model.block.register_forward_pre_hook(lambda *_: calls.append(1))
    model(sequences(5)).sum().backward()  # left alone where nothing is private: the block runs again
    assert len(calls) == 2


def test_the_layers_of_checkpointing_run_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the guard they would run again in the backward pass, and that is refused with the reason."""
    monkeypatch.setattr("dphero.hooks.taps.custom_code_followed", contextlib.nullcontext)
    monkeypatch.setattr("dphero.checks.gradient_check.custom_code_followed", contextlib.nullcontext)
    model = Checkpointed(use_reentrant=False)
    with Tapped(model, 5), pytest.raises(RuntimeError, match=r"during the backward pass.*switch it off"):
        mean_loss(model, sequences(5)).backward()


def test_memory_is_given_back() -> None:
    """Neither the taps nor a loss that the user keeps hold activations once the backward pass is over."""
    model = nn.Sequential(
        nn.Linear(8, 6), Lambda(lambda self, x: torch.einsum("nd,de->ne", x, self.w), w=torch.randn(6, 4))
    )
    kept: list[Any] = []
    model[0].register_forward_hook(lambda module, inputs, out: kept.append(weakref.ref(out)))
    with Tapped(model, 5) as tapped:
        loss = mean_loss(model, torch.randn(5, 8))
        loss.backward()
        tapped.found.clear()
        gc.collect()
        assert kept and all(reference() is None for reference in kept)
        assert loss is not None


# -- code that cannot be followed ----------------------------------------------------------------------------


class Sign(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.sign()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x @ w

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        return gradient @ w.T, x.T @ gradient


@pytest.mark.parametrize("kind", ["of a parameter", "of a parameter and the batch"])
def test_a_custom_autograd_function_on_a_parameter(kind: str) -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        return x @ Sign.apply(self.w) if kind == "of a parameter" else Product.apply(x, self.w)

    check(nn.Sequential(nn.Linear(8, 8), Lambda(forward, w=torch.randn(8, 3))), (torch.randn(5, 8),), mean_loss)


def test_a_custom_autograd_function_that_nobody_tells_of_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dphero.hooks.taps.custom_code_followed", contextlib.nullcontext)
    model = nn.Sequential(nn.Linear(8, 8), Lambda(lambda self, x: x @ Sign.apply(self.w), w=torch.randn(8, 3)))
    with Tapped(model, 5), pytest.raises(RuntimeError, match=r"parameter of '1' \(Lambda\).*custom autograd function"):
        model(torch.randn(5, 8))


def test_a_custom_autograd_function_on_activations_is_fine() -> None:
    check(
        nn.Sequential(nn.Linear(8, 8), Lambda(lambda self, x: Sign.apply(x)), nn.Linear(8, 2)),
        (torch.randn(5, 8),),
        mean_loss,
    )


def test_a_returned_parameter_may_not_enter_the_loss() -> None:
    model = Lambda(lambda self, x: (x @ self.w, self.scale.exp()), w=torch.randn(8, 3), scale=torch.tensor(0.1))
    with Tapped(model, 5) as tapped:
        out, scale = model(torch.randn(5, 8))
        assert scale.item() == pytest.approx(1.105, abs=1e-3)  # to be looked at
        with pytest.raises(RuntimeError, match="that the model returned"):
            (out * scale).sum().backward()
        assert not tapped.found


def test_writing_a_parameter_into_another_tensor() -> None:
    """Own parameters: the module is recomputed; those of another module: refused, by name."""

    def forward(self: Any, x: Tensor) -> Tensor:
        matrix = torch.zeros(8, 8)
        matrix[:] = self.linear.weight
        return x @ matrix

    with pytest.raises(RuntimeError, match=r"'linear' \(Linear\): what __setitem__.*out-of-place"):
        tapped(Lambda(forward, linear=nn.Linear(8, 8)), (torch.randn(5, 8),), mean_loss)


def test_random_numbers_in_a_recomputed_module_are_refused() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        matrix = torch.zeros(8, 8)
        matrix[:] = self.w
        return F.dropout(x @ matrix, 0.5)

    with pytest.raises(RuntimeError, match=r"'1' \(Lambda\) has no layer rule.*random"):
        tapped(nn.Sequential(nn.Linear(8, 8), Lambda(forward, w=torch.randn(8, 8))), (torch.randn(5, 8),), mean_loss)


def test_a_recomputed_module_must_return_one_tensor() -> None:
    def forward(self: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        matrix = torch.zeros(8, 8)
        matrix[:] = self.w
        return x @ matrix, x

    model = Lambda(lambda self, x: self.inner(x)[0], inner=Lambda(forward, w=torch.randn(8, 8)))
    with pytest.raises(ValueError, match=r"'inner' \(Lambda\).*returns tuple.*@dphero\.register"):
        tapped(model, (torch.randn(5, 8),), mean_loss)


def test_setting_the_data_of_a_parameter_in_forward_is_refused() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        self.w.data = self.w.data.clamp(-1, 1)
        return x * self.w

    with pytest.raises(RuntimeError, match="setting an attribute of a parameter"):
        tapped(Lambda(forward, w=torch.randn(8)), (torch.randn(5, 8),), mean_loss)


def test_changing_a_parameter_in_place_in_forward() -> None:
    """A constraint on the weights, as in Wasserstein GANs: it is the parameter itself that changes."""

    def forward(self: Any, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.w.clamp_(-0.5, 0.5)
        return x * self.w

    model = Lambda(forward, w=torch.randn(8))
    check(model, (torch.randn(5, 8),), mean_loss)
    assert model.w.abs().max() <= 0.5


@pytest.mark.parametrize("options", [{"add_bias_kv": True}, {"add_zero_attn": True}])
def test_attention_with_further_keys_is_refused(options: dict[str, bool]) -> None:
    attention = nn.MultiheadAttention(8, 2, batch_first=True, **options)
    with pytest.raises(ValueError, match=r"'attention' \(MultiheadAttention\).*add_bias_kv"):
        tapped(Lambda(lambda self, x: self.attention(x, x, x)[0], attention=attention), (sequences(),), mean_loss)


def test_packed_sequences_and_bags_by_offset_are_refused() -> None:
    def packed(self: Any, x: Tensor) -> Tensor:
        lengths = torch.full((len(x),), x.shape[1])
        return self.rnn(nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True))[1][0]

    with pytest.raises(ValueError, match=r"'rnn' \(GRU\): packed sequences.*mask the loss"):
        tapped(Lambda(packed, rnn=nn.GRU(8, 4)), (sequences(),), mean_loss)
    bag = Lambda(
        lambda self, x: self.bag(x.flatten(), torch.arange(0, x.numel(), x.shape[1])), bag=nn.EmbeddingBag(11, 4)
    )
    with pytest.raises(ValueError, match=r"'bag' \(EmbeddingBag\): bags given by offsets.*padding_idx"):
        tapped(bag, (torch.randint(0, 11, (5, 6)),), mean_loss)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_scripted_modules_are_refused() -> None:
    with pytest.raises(ValueError, match="'0' is a scripted module"):
        Tapped(nn.Sequential(torch.jit.script(nn.Linear(8, 2))), 5)


# -- rules ---------------------------------------------------------------------------------------------------


def test_the_example_of_register_runs() -> None:
    parser, runner = doctest.DocTestParser(), doctest.DocTestRunner()
    test = parser.get_doctest(registry.register.__doc__ or "", {}, "register", None, 0)
    assert runner.run(test, clear_globs=False).failed == 0
    rule, kind = registry._RULES.popitem()[::-1]
    registry._RULES[kind] = rule
    assert kind.__name__ == "Projection" and registry.find_rule(kind()) is rule
    check(nn.Sequential(nn.Linear(8, 5), kind()), (torch.randn(6, 8),), mean_loss)


def test_subclasses_that_compute_something_else_are_followed() -> None:
    class Standardised(nn.Conv2d):
        def _conv_forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
            return super()._conv_forward(x, weight - weight.mean((1, 2, 3), keepdim=True), bias)

    class Same(nn.Conv2d):
        def __init__(self) -> None:
            super().__init__(3, 4, 3)

    assert registry.find_rule(Standardised(3, 4, 3)) is registry.followed
    assert registry.find_rule(StandardisedConv(3, 4, 3)) is registry.followed
    assert registry.find_rule(Same()) is registry.find_rule(nn.Conv2d(3, 4, 3))
    check(Standardised(3, 4, 3), (images(),), mean_loss)


# -- short formats -------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:TF32")
@pytest.mark.parametrize("backward_inside", [False, True])
@pytest.mark.parametrize("name", ["lenet", "resnet", "vit", "gpt", "lstm", "huggingface_conv1d", "lora"])
def test_autocast(name: str, backward_inside: bool) -> None:
    torch.manual_seed(0)
    model, batch = CASES[name]()

    def loss(module: nn.Module, *inputs: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return mean_loss(module, *inputs).float()

    # oneDNN's products of bfloat16 are broken on some virtual machines (AMX without permission): do without
    with torch.backends.mkldnn.flags(enabled=False), Tapped(model, len(batch[0])) as tapped:
        expected = micro_batches(copy.deepcopy(model), batch, loss)
        if backward_inside:
            with torch.autocast("cpu", torch.bfloat16):
                loss(model, *batch).backward()
        else:
            loss(model, *batch).backward()
    compare(expected, tapped.found[0], tolerance=0.05)
    for name, norms in tapped.found[0].square_norms.items():
        assert norms.dtype == torch.float32 and norms.isfinite().all(), name
        assert tapped.found[0].pieces[name].weighted_sum(torch.ones_like(norms)).dtype == torch.float32, name


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_compiled_model_runs_eagerly_while_it_is_tapped() -> None:
    model, batch = small(), (torch.randn(5, 8),)
    expected = micro_batches(model, batch, mean_loss)
    with Tapped(model, 5) as tapped:
        mean_loss(torch.compile(model, backend="eager"), *batch).backward()
    compare(expected, tapped.found[0])
