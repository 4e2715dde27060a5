"""Recorded passes: CUDA graphs where there is a GPU.

On a CPU a stand-in records operations as a CUDA graph does: what ran once runs again, on the same tensors.
"""

from __future__ import annotations

import gc
import random
import re
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from dphero import PrivacyEngine
from dphero.checks.first_batch import probe
from dphero.checks.loss.recorder import Recorder as LossRecorder
from dphero.cuda_graphs import borrowed, pool
from dphero.cuda_graphs import replay as graphs
from dphero.cuda_graphs.live_geometry import LiveGeometry
from dphero.cuda_graphs.recorded_pass import Pass
from dphero.cuda_graphs.replay import Graphs
from dphero.functional import unbatched
from dphero.geometry.dense import Dense
from dphero.geometry.diagonal import Diagonal, Scalar
from dphero.geometry.geometry import Geometry, identity
from dphero.geometry.low_rank import LowRank
from dphero.guidance import PCA, History, Isotropic
from dphero.hooks.taps import Taps
from dphero.mechanism.release import Mechanism
from dphero.models import NAMES, FeatureModel, build
from dphero.numerics import buffers as room
from tests.cuda_graphs.stand_in import DEVICE, StandIn, same_place


@pytest.fixture
def recordings(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Let passes be recorded wherever the tests run; count the recordings."""
    made: list[int] = []
    base: Any = StandIn if DEVICE.type == "cpu" else pool.Pool

    class Counted(base):  # type: ignore[misc]
        def record(self, work: Callable[[], Any]) -> Any:
            made.append(1)
            return super().record(work)

    monkeypatch.setattr(graphs, "Pool", Counted)
    monkeypatch.setattr(graphs, "_DEVICES", (DEVICE.type,))
    monkeypatch.setattr(room, "_SOME", 1 << 40)  # no memory is used again on a GPU, which is stood in for
    if DEVICE.type == "cpu":
        monkeypatch.setattr(borrowed, "_place", same_place)
    return made


class Attention(nn.Module):
    """Tokens, positions that all examples share, attention and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(9, 8), nn.Embedding(5, 8)
        self.block, self.head = nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, batch_first=True), nn.Linear(8, 3)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.tokens(x) + self.positions(torch.arange(x.shape[1], device=x.device))
        return self.head(self.block(hidden).mean(1)) * self.scale


def convolutional() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.ReLU(), nn.Conv2d(4, 6, 3, stride=2), nn.Flatten(),
        nn.Linear(54, 12), nn.Tanh(), nn.Linear(12, 3),
    )  # fmt: skip


def images(count: int = 300) -> TensorDataset:
    return TensorDataset(torch.randn(count, 1, 8, 8).to(DEVICE), torch.randint(3, (count,)).to(DEVICE))


def tokens(count: int = 300) -> TensorDataset:
    return TensorDataset(torch.randint(9, (count, 5)).to(DEVICE), torch.randint(3, (count,)).to(DEVICE))


def train(
    model: nn.Module,
    data: TensorDataset,
    *,
    steps: int = 6,
    rate: float = 0.3,
    before: Callable[[int, nn.Module], None] = lambda step, model: None,
    precision: torch.dtype | None = None,
    **options: Any,
) -> tuple[list[Tensor], list[Tensor], PrivacyEngine]:
    """Return the weights after training, the private gradients of each step, and the engine."""
    engine = PrivacyEngine()
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    settings = {"noise_multiplier": 1e-6, "max_grad_norm": 0.4, "expected_batch_size": 20, "seed": 3, **options}
    settings.setdefault("dataset_size", "public")
    settings["guidance"] = options.get("guidance", Isotropic)()
    _, _, loader = engine.make_private(module=model, optimizer=optimizer, data_loader=data, **settings)
    gradients: list[Tensor] = []
    while engine.steps < steps:
        for x, y in loader:
            before(engine.steps, model)
            optimizer.zero_grad()
            with torch.autocast(DEVICE.type, precision, enabled=precision is not None):
                loss = F.cross_entropy(model(x), y)
            loss.backward()
            if (grads := [p.grad for p in model.parameters()])[0] is not None:
                gradients.append(torch.cat([g.flatten() for g in grads if g is not None]).clone())
            optimizer.step()
            if engine.steps == steps:
                break
    return [p.detach().clone() for p in model.parameters()], gradients, engine


def compare(
    make: Callable[[], nn.Module], data: TensorDataset, *, recorded: Any = True, slack: float = 1e-3, **options: Any
) -> PrivacyEngine:
    """Check that recorded training is training as usual, over lots of various sizes (and next to no noise)."""
    results = []
    for way in (False, recorded):
        torch.manual_seed(0)
        results.append(train(make().to(DEVICE), data, cuda_graphs=way, **options))
    (weights, gradients, _), (weights_too, gradients_too, engine) = results
    assert len(gradients) == len(gradients_too)
    for first, second in [*zip(gradients, gradients_too, strict=True), *zip(weights, weights_too, strict=True)]:
        torch.testing.assert_close(first, second, rtol=slack, atol=slack / 100)
    return engine


GUIDANCE: dict[str, Callable[[], Any]] = {
    "isotropic": Isotropic,
    "weights": lambda: PCA(refresh_every=2, exact_up_to=4, components=2),
    "history": lambda: History(refresh_every=2),
}


@pytest.mark.parametrize("guidance", GUIDANCE)
def test_training_is_the_same(recordings: list[int], guidance: str) -> None:
    compare(convolutional, images(), guidance=GUIDANCE[guidance])
    # forward, backward, sums, at two sizes; once more when history has made its first geometry
    assert len(recordings) == (12 if guidance == "history" else 6)
    compare(Attention, tokens(), guidance=GUIDANCE[guidance])


@pytest.mark.parametrize("make", [convolutional, Attention])
def test_training_under_autocast_is_the_same(recordings: list[int], make: Callable[[], nn.Module]) -> None:
    data = tokens() if make is Attention else images()
    compare(make, data, precision=torch.bfloat16, slack=0.05, rate=0.0, sampling="shuffle", dataset_size=None)
    assert len(recordings) == 3


def test_another_autocast_is_another_recording(recordings: list[int]) -> None:
    model = convolutional()
    engine, optimizer, batches = pair(model)
    types = []
    for dtype in (None, torch.bfloat16, None, torch.bfloat16):
        x, y = next(batches)
        with torch.autocast(DEVICE.type, dtype, enabled=dtype is not None):
            out = model(x)
        types.append(out.dtype)
        F.cross_entropy(out.float(), y).backward()
        optimizer.step()
    assert types == [torch.float32, torch.bfloat16] * 2 and len(recordings) == 6 and engine.steps == 4


def test_a_recording_under_autocast_follows_the_weights(recordings: list[int]) -> None:
    """A weight that was cast before, or for another pass, is not what it reads."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 3))
    _, optimizer, batches = pair(model)
    with torch.autocast(DEVICE.type, torch.bfloat16):
        for _ in range(3):
            x, y = next(batches)
            out = model(x)
            weight, bias = (p.detach().float() for p in model.parameters())
            torch.testing.assert_close(out.float(), x.flatten(1) @ weight.T + bias, rtol=0.02, atol=0.02)
            F.cross_entropy(out.float(), y).backward()
            optimizer.step()
            with torch.no_grad():
                model[1].weight.mul_(3.0)  # type: ignore[operator]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * name.startswith("wrn")) for name in NAMES]
)
def test_every_built_in_network_can_be_recorded(
    recordings: list[int], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)  # which rounds in other ways for other sizes

    shape = (3, 8, 8) if name.startswith("learned") else (1, 28, 28)

    def make() -> nn.Module:
        model = build(name, shape, 3)
        return model.head if isinstance(model, FeatureModel) else model  # what is trained of it

    torch.manual_seed(0)
    model = build(name, shape, 3)
    data = torch.rand(40, *shape)
    inputs = model.features(data) if isinstance(model, FeatureModel) else data
    dataset = TensorDataset(inputs.to(DEVICE), torch.randint(3, (40,)).to(DEVICE))
    # Weights stay, which other tests move: of these deep networks two trainings as usual can differ too, where rounding
    # turns a unit of a ReLU off.
    compare(make, dataset, expected_batch_size=6, steps=2, rate=0.0, guidance=GUIDANCE["weights"])
    assert len(recordings) == 3


@pytest.mark.parametrize("clipping", ["per_layer", "automatic", "adaptive"])
@pytest.mark.usefixtures("same_noise")
def test_every_clip_rule_sums_with_its_own_weights(recordings: list[int], clipping: Any) -> None:
    compare(convolutional, images(), clipping=clipping)
    assert recordings


def test_room_for_noise_is_taken_while_norms_are_computed(
    recordings: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """But not while gradients take memory that they give back."""
    taken, make_room = list[bool](), Mechanism.make_room

    def noted(self: Mechanism) -> None:
        taken.append(True)
        make_room(self)

    monkeypatch.setattr(Mechanism, "make_room", noted)
    train(nn.Linear(4, 3).to(DEVICE), small(), cuda_graphs=False, steps=3)
    assert not taken
    train(nn.Linear(4, 3).to(DEVICE), small(), cuda_graphs=True, sampling="shuffle", steps=3)
    assert recordings and len(taken) == 3


class Standardised(nn.Linear):
    """Weights that are computed from others, each row by itself or not."""

    def __init__(self, *, by_row: bool) -> None:
        super().__init__(64, 12)
        self.head, self.by_row = nn.Linear(12, 3), by_row

    def forward(self, x: Tensor) -> Tensor:
        weight = F.normalize(self.weight) if self.by_row else self.weight / (1 + self.weight.abs().mean())
        return self.head(F.linear(x.flatten(1), weight, self.bias).tanh())


@pytest.mark.parametrize("by_row", [False, True])
@pytest.mark.parametrize("clipping", ["flat", "per_layer"])
@pytest.mark.usefixtures("same_noise")
def test_gradients_that_are_pulled_back_are_summed_without_a_recording_too(
    recordings: list[int], monkeypatch: pytest.MonkeyPatch, clipping: Any, by_row: bool
) -> None:
    """With weights that it was not made for, and where an example counts for nothing."""
    monkeypatch.setattr(unbatched, "_LARGE", 0)
    data = images(60)
    data.tensors[0][::7] = float("nan")
    engine = compare(partial(Standardised, by_row=by_row), data, clipping=clipping)
    assert recordings and engine.diagnostics.nonfinite > 0


def small() -> TensorDataset:
    return TensorDataset(torch.randn(60, 4).to(DEVICE), torch.randint(3, (60,)).to(DEVICE))


def test_lots_in_parts_add_up(recordings: list[int]) -> None:
    compare(convolutional, images(), physical_batch_size=8)
    assert recordings


class Plenty:
    """The memory of a device of which little is taken."""

    room, peak = 1 << 30, 1 << 10

    def begin(self) -> None:
        pass


def test_recordings_wait_until_it_is_known_how_many_rows_fit(
    recordings: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dphero.run.row_limit.memory_of", lambda parameters: Plenty())
    made: list[tuple[int, bool]] = []
    model = convolutional().to(DEVICE)
    engine, optimizer, batches = pair(model, physical_batch_size="auto")
    for _ in range(12):
        x, y = next(batches)
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        made.append((len(x), bool(recordings)))
    assert [size for size, recorded in made if not recorded] == [4, 4, 4, 8, 16, 4, 16, 4]
    assert {size for size, recorded in made if recorded} == {20} and len(recordings) == 3
    assert engine._attached.row_limit.settled


def test_a_bad_example_counts_for_nothing(recordings: list[int]) -> None:
    data = images(60)
    data.tensors[0][::7] = float("nan")  # among them the first row of some lot, whose copies fill it up
    engine = compare(convolutional, data)
    assert engine.diagnostics.nonfinite > 0


def test_a_bad_example_counts_for_nothing_in_a_lot_in_parts(recordings: list[int]) -> None:
    """What the next part's replay writes over is summed up before."""
    data = images(60)
    data.tensors[0][::7] = float("nan")
    engine = compare(convolutional, data, physical_batch_size=8)
    assert recordings and engine.diagnostics.nonfinite > 0


def test_gradients_that_were_written_over_are_not_summed_up(recordings: list[int]) -> None:
    model = convolutional()
    engine, _, batches = pair(model)
    x, y = next(batches)
    found: list[Any] = []
    engine._attached.taps._consume = found.append
    for _ in range(2):
        F.cross_entropy(model(x), y).backward()
    weights = dict.fromkeys(found[0].square_norms, torch.ones(20, device=DEVICE))
    assert found[1].weighted_sums(weights, None).keys() == weights.keys()
    for keep in (None, torch.ones(20, dtype=torch.bool, device=DEVICE)):
        with pytest.raises(RuntimeError, match="written over"):
            found[0].weighted_sums(weights, keep)


def test_what_earlier_passes_left_is_looked_after_before_anything_is_recorded(recordings: list[int]) -> None:
    """A recording is replayed as it is made, and so writes over sums that were not copied."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 3)).to(DEVICE)
    isotropic = {name: identity(tuple(p.shape)) for name, p in model.named_parameters()}
    called: list[int] = []
    Taps(
        model, dict(model.named_parameters()), geometry=lambda: isotropic, rows=lambda: 16,
        consume=lambda batch: None, examine=probe,
        replay=partial(Graphs, sizes=lambda: [16], before=lambda: called.append(len(recordings))),
    )  # fmt: skip
    for scale in (1.0, 1.0, 2.0):
        model.scale = scale  # type: ignore[assignment]
        model(torch.randn(16, 1, 8, 8, device=DEVICE)).square().sum().backward()
    assert called == [0, 3, 3] and len(recordings) == 6


@pytest.mark.parametrize("guidance", [Isotropic, partial(PCA, refresh_every=2)])
def test_the_sums_of_a_lot_in_one_batch_are_released_where_they_lie(
    recordings: list[int], monkeypatch: pytest.MonkeyPatch, guidance: Any
) -> None:
    """And no gradient lies there that is handed over."""
    release, lying = Mechanism.release, list[bool]()

    def watched(self: Mechanism, lot: Any) -> dict[str, Tensor]:
        passes = [each for each in gc.get_objects() if type(each) is Pass and hasattr(each, "added")]
        there = {part.untyped_storage().data_ptr() for each in passes for part in each.added}
        sums = {each.untyped_storage().data_ptr() for each in lot.sums.values()}
        before = [each.clone() for each in lot.sums.values()]
        found = release(self, lot)
        lying.append(bool(sums) and sums <= there)
        assert not there & {each.untyped_storage().data_ptr() for each in found.values()}
        assert all(map(torch.equal, before, lot.sums.values()))
        return found

    monkeypatch.setattr(Mechanism, "release", watched)
    train(convolutional().to(DEVICE), images(), guidance=guidance, cuda_graphs=True, sampling="shuffle")
    assert recordings and all(lying[1:]), lying
    lying.clear()
    train(convolutional().to(DEVICE), images(), physical_batch_size=8, cuda_graphs=True, sampling="shuffle")
    assert not any(lying)


def test_changed_modes_attributes_and_frozen_layers_make_new_recordings(recordings: list[int]) -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.factor = nn.Sequential(nn.Flatten(), nn.Linear(64, 3)), 1.0

        def forward(self, x: Tensor) -> Tensor:
            return self.body(x) * self.factor

    def change(step: int, model: nn.Module) -> None:
        model.factor = 1.0 if step < 3 else 2.0

    compare(Scaled, images(), before=change, sampling="shuffle", dataset_size=None)
    assert len(recordings) == 6


def test_moved_parameters_make_a_new_recording(recordings: list[int]) -> None:
    def move(step: int, model: nn.Module) -> None:
        if step == 3:
            for parameter in model.parameters():
                parameter.data = parameter.data.clone()

    compare(convolutional, images(), before=move, sampling="shuffle", dataset_size=None)
    assert len(recordings) == 6


def test_dropout_draws_new_numbers_at_each_replay(recordings: list[int]) -> None:
    def make() -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.Dropout(0.5), nn.Linear(16, 3))

    torch.manual_seed(0)
    gradients = train(make().to(DEVICE), images(), cuda_graphs=True, noise_multiplier=1e-6)[1]
    assert recordings and not torch.equal(gradients[1], gradients[2])


def test_a_recording_has_room_for_usual_lots_and_others_run_as_usual(recordings: list[int]) -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 3)).to(DEVICE)
    parameters = dict(model.named_parameters())
    rows, found = [0], []
    isotropic = {name: identity(tuple(p.shape)) for name, p in parameters.items()}
    taps = Taps(
        model,
        parameters,
        geometry=lambda: isotropic,
        rows=lambda: rows[0],
        consume=found.append,
        examine=probe,
        replay=partial(Graphs, sizes=lambda: [30]),
    )

    def run(count: int) -> tuple[bool, bool]:
        """Return whether a lot of this size was replayed, and whether something was recorded for it."""
        rows[0], before = count, len(recordings)
        x = torch.randn(count, 1, 8, 8, device=DEVICE)
        model(x).square().sum().backward()
        assert taps.tape is not None
        batch = found.pop()
        assert batch.rows == count
        weights = torch.rand(count, device=DEVICE)
        sums = batch.weighted_sums(dict.fromkeys(parameters, weights), None)
        flat, weight, bias = x.flatten(1), *(p.detach() for p in model.parameters())
        delta = 2 * (flat @ weight.T + bias)
        torch.testing.assert_close(sums["1.weight"], (delta * weights[:, None]).T @ flat, rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(batch.square_norms["1.bias"], delta.square().sum(1), rtol=1e-3, atol=1e-3)
        return taps.tape.replayed, len(recordings) > before

    assert run(40) == (False, False)  # a rare large one
    assert run(20) == (True, True)  # buffers for 32
    assert [run(size) for size in (32, 25, 9, 31)] == [(True, False)] * 4
    assert run(8) == (False, False)  # the rest of one that came in parts
    assert run(33) == (False, False)
    assert run(30) == (True, False)


def test_the_first_lot_recorded_may_be_larger_than_some_recordings(recordings: list[int]) -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 3)).to(DEVICE)
    found: list[Any] = []
    parameters = dict(model.named_parameters())
    isotropic = {name: identity(tuple(p.shape)) for name, p in parameters.items()}
    rows = 20
    Taps(
        model, parameters, geometry=lambda: isotropic, rows=lambda: rows, consume=found.append, examine=probe,
        replay=partial(Graphs, sizes=lambda: [16, 24]),
    )  # fmt: skip
    for rows in (20, 24, 16, 9, 17):
        model(torch.randn(rows, 1, 8, 8, device=DEVICE)).square().sum().backward()
        assert found.pop()._made.rows == (16 if rows <= 16 else 24)
    assert len(recordings) == 6


def test_a_model_on_two_devices_is_not_recorded(recordings: list[int]) -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 3)).to(DEVICE)
    parameters = dict(model.named_parameters())
    rows = 40
    taps = Taps(
        model, parameters, geometry=lambda: {}, rows=lambda: rows, consume=lambda batch: None, examine=probe,
        replay=partial(Graphs, sizes=lambda: [20]),
    )  # fmt: skip
    model(torch.randn(rows, 1, 8, 8, device=DEVICE))
    model.register_buffer("other", torch.zeros(3, device="meta"))
    rows = 20
    with pytest.raises(ValueError, match=f"its tensors are on {DEVICE}.* and meta"):
        model(torch.randn(rows, 1, 8, 8, device=DEVICE))
    assert taps.plan is not None and not recordings


def pair(model: nn.Module, **options: Any) -> tuple[PrivacyEngine, Any, Any]:
    engine = PrivacyEngine()
    model.to(DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    _, _, loader = engine.make_private(
        module=model, optimizer=optimizer, data_loader=images(), noise_multiplier=1.0, max_grad_norm=1.0,
        expected_batch_size=20, sampling="shuffle", cuda_graphs=True, **options,
    )  # fmt: skip
    return engine, optimizer, iter(loader)


def test_two_calls_for_one_batch_cannot_both_be_trained_on(recordings: list[int]) -> None:
    model = convolutional()
    engine, _, batches = pair(model)
    x, y = next(batches)
    first, second = model(x), model(x)
    with pytest.raises(RuntimeError, match="called again before this backward pass"):
        F.cross_entropy(first, y).backward()
    assert engine.steps == 0
    F.cross_entropy(second, y).backward()
    assert engine.steps == 1


def test_a_batch_counts_once(recordings: list[int]) -> None:
    model = convolutional()
    _, _, batches = pair(model)
    x, y = next(batches)
    loss = F.cross_entropy(model(x), y)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


def test_a_call_that_runs_as_usual_does_not_mix_with_a_replayed_one(recordings: list[int]) -> None:
    model = convolutional()
    engine, _, batches = pair(model)
    x, y = next(batches)
    replayed = model(x)
    usual = model(x.clone().requires_grad_())  # an input that wants a gradient is not recorded
    with pytest.raises(RuntimeError, match="earlier call"):
        F.cross_entropy(replayed + usual, y).backward()
    assert engine.diagnostics.examples <= 20


def test_outputs_outlive_the_next_replay(recordings: list[int]) -> None:
    model = convolutional()
    _, optimizer, batches = pair(model)
    kept = []
    for _ in range(2):
        x, y = next(batches)
        out = model(x)
        kept.append((out.detach(), out.detach().clone()))
        F.cross_entropy(out, y).backward()
        optimizer.step()
    assert all(torch.equal(*each) for each in kept)


class Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.calls = nn.Linear(64, 3), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.body(x.flatten(1)) * (1 if self.calls < 1000 else 2)


class Looks(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x.flatten(1))
        return out if float(out.detach()[0, 0]) > -1e9 else -out


class ReturnsConstant(nn.Linear):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x.flatten(1)), torch.ones(7, device=x.device)


def hooked() -> nn.Module:
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 3))
    model[1].register_forward_hook(lambda module, args, out: None)
    return model


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (hooked, "forward hooks"),
        (Counts, "changes attributes"),
        (lambda: ReturnsConstant(64, 3), "returns a tensor of shape"),
        (lambda: Looks(64, 3), "not permitted when stream is capturing|synchronizing"),
    ],
)
def test_what_cannot_be_recorded_is_refused(recordings: list[int], make: Any, reason: str) -> None:
    model = make()
    engine, _, batches = pair(model)
    x, _ = next(batches)
    with pytest.raises(ValueError, match=reason):
        model(x)
    assert engine.steps == 0


@pytest.mark.parametrize("forgotten", ["outputs", "norms", "sums"])
def test_a_wrong_recording_is_found_out(recordings: list[int], monkeypatch: pytest.MonkeyPatch, forgotten: str) -> None:
    class Forgetful(graphs.Pool):
        def record(self, work: Callable[[], Any]) -> Any:
            replay, result = super().record(work)
            if ["outputs", "norms", "sums"][len(recordings) - 1] != forgotten:
                return replay, result
            tensors = result if isinstance(result, list) else result[:1]  # norms come with names and pieces

            def wrong() -> None:
                replay()
                tensors[-1].zero_()

            return wrong, result

    monkeypatch.setattr(graphs, "Pool", Forgetful)
    model = convolutional()
    _, _, batches = pair(model)
    with pytest.raises(ValueError, match="computes something else"):
        model(next(batches)[0])


@pytest.mark.skipif(DEVICE.type != "cpu", reason="there is a GPU")
def test_outputs_make_room_for_the_backward_pass(recordings: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """What it takes may lie where outputs were; and what it begins with, where the forward pass computed something."""

    class Crowded(graphs.Pool):
        outs: list[Tensor]
        gradients: list[Tensor]

        def record(self, work: Callable[[], Any]) -> Any:
            replay, result = super().record(work)
            if isinstance(result, tuple):
                Crowded.gradients = result[-1]
                return lambda spoilt=Crowded.outs: (spoil(spoilt), replay()), result
            if len(recordings) % 3 == 1:
                Crowded.outs, Crowded.gradients = result, []
                return lambda: (spoil(Crowded.gradients), replay()), result
            return replay, result

    def spoil(places: list[Tensor]) -> None:
        for place in places:
            place.fill_(torch.nan)

    monkeypatch.setattr(graphs, "Pool", Crowded)
    compare(convolutional, images(), sampling="shuffle")
    assert len(recordings) == 3 and Crowded.outs[0].isnan().all()


def test_a_check_reads_outputs_where_the_recording_left_them(
    recordings: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    sources: list[Any] = []
    output = LossRecorder.output

    def noted(self: LossRecorder, *arguments: Any) -> None:
        output(self, *arguments)
        sources.append(self.sources[-1])

    monkeypatch.setattr(LossRecorder, "output", noted)
    model = convolutional()
    engine, _, batches = pair(model)
    for _ in range(2):
        x, y = next(batches)
        out = model(x)
        (source,) = sources
        made = engine._attached.taps._replay._known[0].passes[0]  # type: ignore[union-attr]
        assert source.holds() and source.value.data_ptr() == made.outs[0].data_ptr() != out.data_ptr()
        assert torch.equal(source.value, out.detach().as_subclass(Tensor))
        F.cross_entropy(out, y).backward()
        assert not source.holds()
        sources.clear()
    model(x := next(batches)[0])
    model(x)
    assert [source.holds() for source in sources] == [False, True]


def test_a_replayed_pass_is_refused_a_loss_that_mixes_examples(recordings: list[int]) -> None:
    _, _, batches = pair(model := convolutional())
    x, y = next(batches)
    out = model(x)
    assert recordings
    with pytest.raises(ValueError, match="by the others of its batch"):
        (F.cross_entropy(out, y, reduction="none") / (1 + torch.bincount(y))[y]).mean().backward()


def test_a_check_does_not_read_what_was_written_over(recordings: list[int]) -> None:
    model = convolutional()
    engine, _, batches = pair(model)
    x, y = next(batches)
    first = model(x)
    model(x.flip(0))
    with pytest.raises(RuntimeError, match="called again before this backward pass"):
        F.cross_entropy(first, y).backward()
    assert any("called again" in note for note in engine.statement(1e-5).notes)


@pytest.mark.skipif(DEVICE.type != "cpu", reason="there is a GPU")
def test_needs_a_gpu() -> None:
    with pytest.raises(ValueError, match="cuda_graphs=True needs a model on a CUDA device"):
        pair(convolutional())


# -- unasked ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def pays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let it seem that recordings save half of the time."""
    times = iter([(2.0, 2.0), (1.0, 0.1)])
    monkeypatch.setattr(pool, "seconds", lambda work, device: (work(), next(times))[1])


AUTO = {"cuda_graphs": "auto", "sampling": "shuffle", "dataset_size": None}


@pytest.mark.usefixtures("pays")
def test_unasked_passes_are_recorded_after_two_batches(recordings: list[int], caplog: pytest.LogCaptureFixture) -> None:
    made = []
    caplog.set_level("INFO", "dphero.cuda_graphs")
    compare(
        convolutional, images(), recorded="auto", sampling="shuffle", dataset_size=None,
        before=lambda step, model: made.append(len(recordings)),
    )  # fmt: skip
    assert made[6:] == [0, 0, 0, 3, 3, 3]
    assert [record.getMessage() for record in caplog.records] == [
        "Passes are recorded at 24 rows and replayed (2 s, replayed 1 s); cuda_graphs=False prevents it."
    ]


@pytest.mark.usefixtures("pays")
def test_unasked_lots_of_all_sizes_are_replayed(recordings: list[int]) -> None:
    compare(convolutional, images(), recorded="auto", guidance=lambda: History(refresh_every=4), steps=9)
    assert len(recordings) == 12


class ReadsList(nn.Linear):
    """A schedule that the user keeps in a list."""

    def __init__(self) -> None:
        super().__init__(64, 3)
        self.schedule = [1.0]

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.flatten(1)) * self.schedule[-1]


COUNTER = [0]


class CountsElsewhere(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        COUNTER[0] += 1
        return super().forward(x.flatten(1)) * (1 if COUNTER[0] < 1000 else 2)


class DrawsInPython(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.flatten(1)) * (1.0 + (random.random() > 2))


class Keeps(nn.Linear):
    """Leaves what it computed in an attribute, where a loss might look for it."""

    def forward(self, x: Tensor) -> Tensor:
        self.latest = super().forward(x.flatten(1))
        return self.latest


class ReturnsObject(nn.Linear):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x.flatten(1)), object()


class ReturnsRows(nn.Linear):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x.flatten(1)), len(x)


class Fails(nn.Linear):
    """Fails on more rows than there are examples in a batch, as a check of a shape may."""

    def forward(self, x: Tensor) -> Tensor:
        if len(x) > 20:
            raise TypeError("too many rows")
        return super().forward(x.flatten(1))


def next_rate(step: int, model: nn.Module) -> None:
    model.schedule.append(1.0 + step)  # type: ignore[operator, union-attr]


@pytest.mark.parametrize(
    ("make", "reason", "options"),
    [
        (hooked, "forward hooks", {}),
        (Counts, "change from batch to batch", {}),
        (ReadsList, "change from batch to batch", {"before": next_rate}),
        (lambda: CountsElsewhere(64, 3), "change from batch to batch", {}),
        (lambda: DrawsInPython(64, 3), "draws random numbers in Python", {}),
        (lambda: Keeps(64, 3), "change from batch to batch", {}),
        (lambda: ReturnsConstant(64, 3), "returns a tensor of shape", {}),
        (lambda: ReturnsObject(64, 3), "a value of type object", {}),
        (lambda: ReturnsRows(64, 3), "a value of type int", {}),
        (lambda: Looks(64, 3), "not permitted when stream is capturing|synchronizing", {}),
        (lambda: Fails(64, 3), "too many rows", {}),
    ],
)
@pytest.mark.usefixtures("pays")
def test_unasked_what_cannot_be_recorded_runs_as_usual(
    recordings: list[int], caplog: pytest.LogCaptureFixture, make: Any, reason: str, options: dict[str, Any]
) -> None:
    caplog.set_level("INFO", "dphero.cuda_graphs")
    COUNTER[0] = 0

    def first(out: Any) -> Any:
        return out[0] if isinstance(out, tuple) else out

    results = []
    for way in (False, "auto"):
        torch.manual_seed(0)
        model = make().to(DEVICE)
        model.register_forward_hook(lambda module, args, out: first(out))
        COUNTER[0] = 0
        weights, gradients, _ = train(model, images(), **{**AUTO, "cuda_graphs": way}, **options)
        results.append([*weights, *gradients])
    if make is not Counts and DEVICE.type == "cpu":  # what it counts is counted in trials too
        assert all(map(torch.equal, *results))
    (line,) = [record.getMessage() for record in caplog.records]
    assert re.search(reason, line) and line.startswith("The model's passes run one operation after another")


@pytest.mark.parametrize(
    ("times", "free", "reason"),
    [
        ([(2.0, 0.9)], [9, 9], r"the GPU is busy anyway \(of 2 s for a pass, Python takes 0.9 s"),
        ([(2.0, 2.0), (1.95, 0.1)], [9, 9], "replayed, a pass takes 1.9 s, and 2 s without|1.95"),
        ([(2.0, 2.0), (1.0, 0.1)], [9, 4], "too little memory"),
    ],
)
def test_unasked_nothing_is_recorded_that_does_not_pay(
    recordings: list[int],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    times: list[Any],
    free: list[int],
    reason: str,
) -> None:
    caplog.set_level("INFO", "dphero.cuda_graphs")
    measured, left = iter(times), iter(free)
    monkeypatch.setattr(pool, "seconds", lambda work, device: (work(), next(measured))[1])
    monkeypatch.setattr(pool, "free_memory", lambda device: next(left))
    train(convolutional().to(DEVICE), images(), **AUTO)
    assert re.search(reason, caplog.text) and len(caplog.records) == 1


@pytest.mark.parametrize("fails", [False, True])
def test_memory_of_a_recording_that_does_not_pay_is_given_back_before_a_pass_as_usual(
    recordings: list[int], monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    events: list[str] = []

    class Known(graphs.Pool):
        def record(self, work: Callable[[], Any]) -> Any:
            replay, result = super().record(work)
            if len(recordings) == 2 and fails:
                raise RuntimeError("out of luck")

            def recorded() -> None:
                replay()

            weakref.finalize(recorded, events.append, "gone")
            return recorded, result

    new_tape = Taps.new_tape

    def noted(self: Taps, rows: int, *, replayed: bool = False) -> Any:
        events.append("pass as usual")
        return new_tape(self, rows, replayed=replayed)

    times = iter([(2.0, 2.0), (1.95, 0.1)])
    monkeypatch.setattr(graphs, "Pool", Known)
    monkeypatch.setattr(pool, "seconds", lambda work, device: (work(), next(times))[1])
    monkeypatch.setattr(Taps, "new_tape", noted)
    monkeypatch.setattr(pool, "give_back", lambda: events.append("given back"))
    gc.disable()
    try:
        train(convolutional().to(DEVICE), images(), **AUTO, steps=4)
    finally:
        gc.enable()
    usual, gone = ["pass as usual"] * 2, ["gone"] * (1 if fails else 3)
    assert events == [*usual, *gone, "given back", *usual]


@pytest.mark.usefixtures("pays")
def test_unasked_deterministic_algorithms_are_left_alone(
    recordings: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "dphero.cuda_graphs")
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        train(convolutional().to(DEVICE), images(), **AUTO)
    finally:
        torch.use_deterministic_algorithms(False)
    assert "deterministic" in caplog.text and not recordings


@pytest.mark.usefixtures("pays")
def test_unasked_a_model_may_be_called_twice_for_a_batch(
    recordings: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "dphero.cuda_graphs")
    engine, model = PrivacyEngine(), convolutional().to(DEVICE)
    _, optimizer, loader = engine.make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), data_loader=images(),
        noise_multiplier=1.0, max_grad_norm=1.0, expected_batch_size=20, sampling="shuffle",
    )  # fmt: skip
    for x, y in loader:
        (F.cross_entropy(model(x), y) + F.cross_entropy(model(x.flip(-1)), y)).backward()
        optimizer.step()
    assert "more than once" in caplog.text and not recordings and engine.steps == 15


def test_a_failed_line_of_shapes_is_given_up(recordings: list[int], caplog: pytest.LogCaptureFixture) -> None:
    class Mean(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.flatten(2).transpose(1, 2).mean(1))

    caplog.set_level("INFO", "dphero.cuda_graphs")
    model = Mean(1, 3).to(DEVICE)
    _, optimizer, loader = PrivacyEngine().make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), data_loader=images(),
        noise_multiplier=1.0, max_grad_norm=1.0, expected_batch_size=10, sampling="shuffle",
    )  # fmt: skip
    for number, (x, y) in enumerate(loader):
        F.cross_entropy(model(x[..., : 1 + number % 2, : 1 + number // 2 % 8]), y).backward()
        optimizer.step()
    for number, (x, y) in enumerate(loader):
        F.cross_entropy(model(x[..., :3, :].repeat(1, 1, 1, 1 + number)), y).backward()
        optimizer.step()
    assert not recordings and "arguments change from batch to batch" in caplog.text


def test_nothing_is_recorded_on_a_cpu() -> None:
    model = convolutional()
    engine = PrivacyEngine()
    engine.make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), data_loader=images(),
        noise_multiplier=1.0, max_grad_norm=1.0, expected_batch_size=10, sampling="shuffle",
    )  # fmt: skip
    assert DEVICE.type != "cpu" or engine._attached.taps._replay is None


# -- geometry ---------------------------------------------------------------------------------------------------------


def orthonormal(size: int, columns: int) -> Tensor:
    return torch.linalg.qr(torch.randn(size, size))[0][:, :columns]


FACTORS: dict[str, Callable[[], Any]] = {
    "dense": lambda: Dense(orthonormal(6, 6), torch.rand(6) + 0.5),
    "low rank": lambda: LowRank(orthonormal(6, 2), torch.rand(2) + 0.5, 0.4 * float(torch.rand(())) + 0.1),
    "diagonal": lambda: Diagonal(torch.rand(6) + 0.5),
    "scalar": lambda: Scalar(6, float(torch.rand(())) + 0.5),
}


@pytest.mark.parametrize("kind", FACTORS)
def test_a_live_geometry_follows(kind: str) -> None:
    torch.manual_seed(0)
    first, second = ({"w": Geometry((6, 4), left=FACTORS[kind]()), "b": Geometry((4,))} for _ in range(2))
    live = LiveGeometry(first, torch.device("cpu"))
    x = torch.randn(5, 6, 4)
    torch.testing.assert_close(live.live["w"].whiten(x), first["w"].whiten(x))
    w = live.live["w"]
    replay, results = StandIn(x.device).record(lambda: [w.whiten(x), w.colour(x), w.square_norm(x)])
    assert live.follow(second)
    replay()
    expected = [second["w"].whiten(x), second["w"].colour(x), second["w"].square_norm(x)]
    torch.testing.assert_close(results, expected)
    assert float(w.smallest) == pytest.approx(second["w"].smallest)


@pytest.mark.parametrize("kind", FACTORS)
def test_a_shared_factor_is_copied_once_and_must_stay_shared(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def geometry(*factors: Any) -> dict[str, Geometry]:
        return {"w": Geometry((6, 4), left=factors[0]), "b": Geometry((6,), left=factors[-1])}

    torch.manual_seed(0)
    copied, copy = list[Tensor](), torch._foreach_copy_
    monkeypatch.setattr(torch, "_foreach_copy_", lambda places, values: copied.extend(places) or copy(places, values))
    live, second = LiveGeometry(geometry(FACTORS[kind]()), torch.device("cpu")), geometry(FACTORS[kind]())
    assert live.follow(second) and len(set(map(id, copied))) == len(copied)
    x = torch.randn(5, 6)
    torch.testing.assert_close(live.live["b"].whiten(x), second["b"].whiten(x))
    copied.clear()
    assert not live.follow(geometry(FACTORS[kind](), FACTORS[kind]())) and not copied


def test_a_live_geometry_notices_another_form() -> None:
    live = LiveGeometry({"w": Geometry((6, 4), left=FACTORS["low rank"]())}, torch.device("cpu"))
    for left in (None, FACTORS["dense"](), LowRank(orthonormal(6, 3), torch.rand(3) + 0.5, 1.0)):
        assert not live.follow({"w": Geometry((6, 4), left=left)})
    assert live.follow({"w": Geometry((6, 4), left=FACTORS["low rank"]())})


@pytest.mark.gpu
def test_garbage_is_not_collected_while_a_pass_is_recorded() -> None:
    """An earlier recording that nobody needs any more may lie in a cycle; to free it spoils one that is being made."""
    device = torch.device("cuda", torch.cuda.current_device())
    x, earlier = torch.ones(3, device=device), []
    for _ in range(2):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            x + 1
        earlier.append(graph)
    del graph

    def work() -> Tensor:
        while earlier:
            cycle: list[Any] = [earlier.pop()]
            cycle.append(cycle)
        del cycle
        many = [[] for _ in range(100_000)]  # type: ignore[var-annotated]
        assert many
        return x + 1

    replay, found = pool.Pool(device).record(work)
    assert gc.isenabled()
    x.fill_(2.0)
    replay()
    assert found.tolist() == [3.0] * 3
