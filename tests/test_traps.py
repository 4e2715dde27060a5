"""Traps that well-known libraries fall into: each is impossible here.

Beside each guard stands what happens without it (the guard is patched away): so the tests are known to have power.
"""

from __future__ import annotations

import itertools
import math
import multiprocessing
import os
import secrets
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from dphero import PrivacyEngine, sampling
from dphero.checks import modules
from dphero.checks.loss import check as loss_check
from dphero.engine import assembly, sources
from dphero.geometry.geometry import identity
from dphero.gradients import convolution, gram
from dphero.gradients.batch import GradientBatch
from dphero.gradients.convolution import Convolution
from dphero.gradients.patches import convolution_arguments
from dphero.gradients.piece import Explicit
from dphero.hooks.taps import Taps
from dphero.mechanism import lot_sum
from dphero.mechanism.clipping import Flat
from dphero.mechanism.lot_sum import LotSum
from dphero.mechanism.release import Mechanism
from dphero.numerics import partial_norms as lengths
from dphero.run import Run, private_gradients
from dphero.sampling import Lots, PoissonSampler, PrivateLoader
from tests.trainer import Training, data, network, same, training

Patch = pytest.MonkeyPatch


def nothing(out: Tensor, label: Tensor) -> Tensor:
    return (out * 0).mean()


def first_batch(training_run: Training) -> tuple[Tensor, Tensor]:
    x, y = next(iter(training_run.loader))
    return x, y


# -- batch norm -------------------------------------------------------------------------------------


def frozen_norm() -> nn.Module:
    norm = nn.BatchNorm1d(8).requires_grad_(False).eval()
    norm.train = lambda mode=True: norm  # type: ignore[method-assign,assignment]
    return norm


@pytest.mark.parametrize("norm", [frozen_norm, lambda: nn.BatchNorm1d(8, affine=False), lambda: nn.BatchNorm1d(8)])
def test_batch_norm_in_any_disguise_is_refused(norm: Any, monkeypatch: Patch) -> None:
    with pytest.raises(ValueError, match="BatchNorm1d"):
        training(network(0, norm()))
    monkeypatch.setattr(modules, "_mixes", lambda module: None)
    model = training(network(0, norm()))
    if norm is frozen_norm:
        model.steps(1)  # without the guard it trains, on statistics of whatever it saw before
    else:
        with pytest.raises(ValueError):  # without it, a second look, at the model's first batch, finds it
            model.steps(1)


# -- NaN --------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("same_noise")
@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf, 3e38])
def test_an_example_that_is_not_finite_adds_nothing(poison: float, monkeypatch: Patch) -> None:
    def poisoned() -> Training:
        x, y = data().tensors
        x, y = torch.cat([x[:0], x]), y.clone()
        x[5] = poison
        return training(
            dataset=TensorDataset(x, y), sample_rate=1.0, dataset_size=None, guidance="isotropic", module=linear()
        )

    def linear() -> nn.Linear:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            return nn.Linear(6, 3)

    keep = [i for i in range(60) if i != 5]
    clean = training(
        dataset=TensorDataset(*(t[keep] for t in data().tensors)), sample_rate=1.0, dataset_size=None,
        guidance="isotropic", module=linear(),
    )  # fmt: skip
    found, expected = poisoned(), clean
    for first, second in zip(found.steps(3), expected.steps(3), strict=True):
        for name in first:
            torch.testing.assert_close(first[name], second[name], rtol=1e-4, atol=1e-5)
    assert found.engine.diagnostics.nonfinite == 3 and expected.engine.diagnostics.nonfinite == 0

    monkeypatch.setattr(lot_sum, "_are_finite", lambda norms: torch.ones_like(norms[0], dtype=torch.bool))
    if not math.isfinite(poison):
        assert not torch.equal(*[(g := poisoned().steps(1)[0]["weight"]), torch.nan_to_num(g)])  # one destroys all


# -- numbers whose squares vanish -------------------------------------------------------------------


def added_by_one(guidance: Any, small: float, huge: float, positions: int) -> float:
    """Return the length of what an example adds, over C, whose output gradient is small and whose input is huge."""
    torch.manual_seed(0)
    model = nn.Linear(8, 96)
    along = model.weight.detach()[:, 0].clone()  # where weight PCA gives more noise, and a norm is a difference
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    x = torch.zeros(16, positions, 8)
    x[3] = huge
    _, _, loader = PrivacyEngine().make_private(
        module=model, optimizer=optimizer, data_loader=TensorDataset(x), noise_multiplier=1e-9, max_grad_norm=1e-4,
        guidance=guidance, expected_batch_size=16, dataset_size="public", sampling="shuffle", seed=1,
    )  # fmt: skip
    for (rows,) in loader:
        (model(rows) @ (small * along)).mean().backward()
        optimizer.step()
    return float(torch.cat([p.grad.double().flatten() for p in model.parameters() if p.grad is not None]).norm()) * 16e4


@pytest.mark.parametrize("positions", [1, 3])
@pytest.mark.parametrize("guidance", ["isotropic", "pca"])
@pytest.mark.parametrize(("small", "huge"), [(1e-22, 6e18), (1e-21, 3e18), (1e-20, 1e25), (1e-21, 1e30), (1e-16, 1e17)])
def test_a_small_gradient_at_a_huge_input_is_clipped(
    guidance: str, small: float, huge: float, positions: int, monkeypatch: Patch
) -> None:
    assert added_by_one(guidance, small, huge, positions) < 4  # A's largest scale is below that
    for module in (lengths, gram):
        monkeypatch.setattr(module, "LEAST_SQUARE", 0.0)
    if (small, huge) == (1e-21, 3e18):
        assert added_by_one(guidance, small, huge, positions) > 100


def test_a_small_gradient_at_a_huge_image_is_not_lost(monkeypatch: Patch) -> None:
    weight = torch.empty(32, 16, 3, 3)
    made = Convolution(
        torch.full((1, 16, 3, 3), 1e18), torch.full((1, 32, 1, 1), 1e-23), convolution_arguments(weight, 1, 0, 1, 1)
    )
    true = float((1e18 * 1e-23) * weight.numel() ** 0.5)
    assert made.gram_is_cheaper() and float(made.square_norms(identity(tuple(weight.shape))).sqrt()) >= true
    for module in (convolution, gram):
        monkeypatch.setattr(module, "LEAST_SQUARE", 0.0)
    assert float(made.square_norms(identity(tuple(weight.shape)))) == 0.0


def test_a_norm_of_minus_infinity_is_not_finite() -> None:
    """A square norm below zero by rounding, times an infinite one."""
    piece = Explicit(torch.full((2, 3), 1e10))
    lot = LotSum(Flat(1.0))
    lot.add(GradientBatch(2, {"w": piece}, {"w": torch.tensor([-math.inf, 3e20])}), real=2, scale=1.0)
    assert float(lot.sums["w"].norm()) <= 1.0 and lot.diagnostics.nonfinite == 1


# -- empty lots -------------------------------------------------------------------------------------


@pytest.mark.usefixtures("same_noise")
def test_an_empty_lot_is_a_step(monkeypatch: Patch) -> None:
    empty: dict[str, Any] = {"sample_rate": 1e-9, "dataset_size": None, "guidance": "isotropic"}
    quiet = training(**empty)
    steps = quiet.steps(20)
    assert quiet.engine.ledger.steps == 20 and quiet.engine.diagnostics.examples == 0
    values = torch.cat([value.flatten() for step in steps for value in step.values()])
    assert float(values.std()) == pytest.approx(1 / 12, rel=0.1)  # noise, and nothing but noise
    assert same(training(**empty).steps(1)[0], training(guidance="isotropic").steps(1, nothing)[0])

    def draw_until_there_is_somebody(self: PrivateLoader, lot: int) -> np.ndarray:
        return next(members for number in itertools.count(lot) if len(members := self.sampler.draw(number)))

    monkeypatch.setattr(PrivateLoader, "_draw", draw_until_there_is_somebody)
    skipping = training(**{**empty, "sample_rate": 0.001})
    skipping.steps(20)
    assert skipping.engine.diagnostics.examples >= 20  # far more than the 1.2 that this rate should give


# -- public numbers ---------------------------------------------------------------------------------


def test_nothing_is_derived_from_the_number_of_records() -> None:
    """Two data sets that differ by one record: every number that is released or charged is the same."""
    runs = [
        training(
            dataset=data(records), sample_rate=0.2, dataset_size=None, expected_batch_size=12, guidance="isotropic"
        )
        for records in (60, 61)
    ]
    for each in runs:
        each.steps(5)
    assert runs[0].engine.ledger == runs[1].engine.ledger
    assert len(runs[0].loader) == len(runs[1].loader) == 5
    assert [each.engine._attached.mechanism.expected_lot for each in runs] == [12, 12]
    with pytest.raises(ValueError, match="number of records is not unless you say so"):
        training(dataset_size=None)


# -- shuffled loaders -------------------------------------------------------------------------------


def test_a_shuffled_loader_becomes_poisson_or_is_priced_without_amplification() -> None:
    records = TensorDataset(torch.arange(60.0)[:, None].repeat(1, 6), torch.zeros(60, dtype=torch.long))

    def epoch(**options: Any) -> list[list[float]]:
        made = training(data_loader=DataLoader(records, batch_size=12, shuffle=True), **options)
        lots = []
        for x, y in made.loader:
            lots.append(x[:, 0].tolist())
            made.optimizer.zero_grad()
            F.cross_entropy(made.module(x), y).backward()
        return lots

    poisson = epoch()
    assert len({len(lot) for lot in poisson}) > 1  # no permutation, cut in pieces
    assert sorted(itertools.chain(*poisson)) != list(range(60))
    shuffled = epoch(sampling="shuffle", dataset_size=None)
    assert sorted(itertools.chain(*shuffled)) == list(range(60))

    engines = [training(noise_multiplier=1.0), training(noise_multiplier=1.0, sampling="shuffle", dataset_size=None)]
    for each in engines:
        each.steps(5)
    amplified, plain = (each.engine.get_epsilon(1e-5) for each in engines)
    full = training(noise_multiplier=1.0, sample_rate=1.0, dataset_size=None)
    full.steps(1)
    assert plain == pytest.approx(full.engine.get_epsilon(1e-5), rel=1e-6)
    assert amplified != pytest.approx(plain, rel=0.01)


def test_a_second_permutation_does_not_ride_for_free(tmp_path: Any) -> None:
    """An engine that is used again, in the middle of a shuffled epoch, begins a new one; also after resuming."""

    def again(charged: PrivacyEngine, **options: Any) -> Training:
        return training(engine=charged, sampling="shuffle", dataset_size=None, **options)

    used = PrivacyEngine()
    again(used).steps(3)
    used.detach()
    made = again(used, seed=8)
    made.steps(2)
    assert [event.epoch for event in used.ledger.counts] == [0, 1]  # type: ignore[attr-defined]
    used.save(tmp_path / "run.pt")
    resumed = again(PrivacyEngine(), seed=8)
    resumed.engine.load(tmp_path / "run.pt")
    assert same(made.steps(4)[3], resumed.steps(4)[3])
    assert resumed.engine.ledger == used.ledger
    assert [event.epoch for event in used.ledger.counts] == [0, 1, 2]  # type: ignore[attr-defined]


# -- noise that can be guessed ----------------------------------------------------------------------


def test_the_default_seed_is_the_operating_systems(monkeypatch: Patch) -> None:
    def noise_and_lot() -> tuple[dict[str, Tensor], list[int]]:
        torch.manual_seed(0)
        np.random.seed(0)
        made = training(seed=None, guidance="isotropic")
        return made.steps(1, nothing)[0], made.loader.sampler.draw(0).tolist()

    (first, lot), (second, other) = noise_and_lot(), noise_and_lot()
    assert not same(first, second) and lot != other
    assert not training(seed=None).engine._attached.mechanism.noise.seeded

    monkeypatch.setattr(secrets, "token_bytes", lambda count: b"0" * count)
    monkeypatch.setattr(sources.secrets, "randbits", lambda bits: 1)
    (first, lot), (second, other) = noise_and_lot(), noise_and_lot()
    assert same(first, second) and lot == other  # this is what the test would see if they were not


# -- noise that is replayed -------------------------------------------------------------------------


def test_resuming_replays_no_noise(tmp_path: Any, monkeypatch: Patch) -> None:
    made = training(guidance="isotropic")
    early = made.steps(4, nothing)
    made.engine.save(tmp_path / "run.pt")

    def resume(forget: bool) -> list[dict[str, Tensor]]:
        resumed = training(guidance="isotropic")
        state = torch.load(tmp_path / "run.pt", weights_only=True)["engine"]
        if forget:  # a checkpoint that holds the key, but not how far it was used
            state["mechanism"]["releases"] = 0
            state["mechanism"]["noise"]["last_release"] = -1
        resumed.engine._attached.load_state_dict(state)
        return resumed.steps(4, nothing)

    assert not any(same(first, second) for first in early for second in resume(forget=False))
    with pytest.raises(ValueError, match="contradicts itself"):
        resume(forget=True)
    monkeypatch.setattr(Mechanism, "check_state", lambda self, *_: None)
    assert not any(same(first, second) for first in early for second in resume(forget=True))  # bound to what it hides
    monkeypatch.setattr(Mechanism, "_bound_to", lambda self, lot: [])
    made = training(guidance="isotropic")
    early = made.steps(4, nothing)
    made.engine.save(tmp_path / "run.pt")
    assert all(same(first, second) for first, second in zip(early, resume(forget=True), strict=True))


def in_a_fork(work: Callable[[], Any]) -> Any:
    """Return what ``work`` returns in a forked process, or the message of its error."""
    mine, theirs = multiprocessing.Pipe()

    def child() -> None:
        torch.set_num_threads(1)  # OpenMP's threads did not survive the fork
        try:
            theirs.send(work())
        except RuntimeError as error:
            theirs.send(str(error))

    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    try:
        assert mine.poll(60), "the child hangs"
        return mine.recv()
    finally:
        process.kill()
        process.join()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of forking where there are threads
@pytest.mark.parametrize("options", [{"seed": 3}, {"seed": None}, {"secure": True}, {"sampling": "shuffle"}], ids=str)
def test_a_forked_process_does_not_go_on_with_its_parents_training(
    options: dict[str, Any], monkeypatch: Patch, tmp_path: Any
) -> None:
    if options.get("sampling") == "shuffle":
        options = {**options, "dataset_size": None}
    made, unused = training(**options), training(**options)
    made.steps(1)
    made.engine.save(tmp_path / "run.pt")
    x, y = first_batch(made)

    def release() -> int:
        F.cross_entropy(made.module(x), y).backward()
        return made.engine.steps

    def draw_again() -> list[float]:
        return first_batch(made)[0].flatten().tolist()

    def resume() -> int:
        unused.engine.load(tmp_path / "run.pt")
        unused.steps(1)
        return unused.engine.steps

    assert "this one is a fork" in str(in_a_fork(release))
    assert "this one is a fork" in str(in_a_fork(draw_again))
    assert in_a_fork(resume) == 2
    assert release() == 2  # the parent goes on
    monkeypatch.setattr(Lots, "require_open", lambda self: None)
    lot = draw_again()
    assert in_a_fork(draw_again) == lot  # without the guard


# -- adaptive clipping ------------------------------------------------------------------------------


@pytest.mark.usefixtures("same_noise")
def test_adaptive_clipping_sees_the_whole_lot(monkeypatch: Patch) -> None:
    def bound(**options: Any) -> float:
        made = training(clipping="adaptive", noise_multiplier=1e-3, **options)
        made.steps(6)
        return made.engine._attached.mechanism.clipping.norm

    whole, split = bound(), bound(physical_batch_size=1)
    assert split == pytest.approx(whole, rel=1e-6)

    add = LotSum.add

    def forgetful(self: LotSum, *args: Any) -> None:
        self.settle()
        self._count = torch.zeros((), dtype=torch.float64)
        add(self, *args)

    monkeypatch.setattr(LotSum, "add", forgetful)
    assert bound(physical_batch_size=1) != pytest.approx(whole, rel=1e-3)


# -- layers -----------------------------------------------------------------------------------------


class Odd(nn.Module):
    """A layer of one's own, with parameters that no rule knows."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, 8))
        self.mix = nn.Parameter(torch.eye(8) + 0.1)

    def forward(self, x: Tensor) -> Tensor:
        return torch.sinh(x * self.scale) @ self.mix.t().contiguous()


def test_a_layer_of_ones_own_is_trained_as_exactly_as_others() -> None:
    options: dict[str, Any] = {"guidance": "isotropic", "noise_multiplier": 1e-7, "max_grad_norm": 0.5}
    made = training(network(0, Odd()), **options)
    x, y = first_batch(made)
    F.cross_entropy(made.module(x), y).backward()
    found = made.gradients()
    plain = network(0, Odd())
    expected = {name: torch.zeros_like(p) for name, p in plain.named_parameters()}
    for i in range(len(x)):
        plain.zero_grad()
        F.cross_entropy(plain(x[i : i + 1]), y[i : i + 1]).backward()
        size = math.sqrt(sum(float(p.grad.square().sum()) for p in plain.parameters() if p.grad is not None))
        for name, p in plain.named_parameters():
            assert p.grad is not None
            expected[name] += p.grad * min(1.0, 0.5 / size) / 12
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], rtol=1e-3, atol=1e-6)


def test_unused_parameters_get_noise() -> None:
    """A parameter's gradient must not tell whether it was used."""

    class Unused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.idle = nn.Linear(6, 3), nn.Linear(40, 40)

        def forward(self, x: Tensor) -> Tensor:
            return self.used(x)

    made = training(Unused(), guidance="isotropic")
    step = made.steps(1)[0]
    assert step.keys() == {"used.weight", "used.bias", "idle.weight", "idle.bias"}
    assert float(step["idle.weight"].std()) == pytest.approx(1 / 12, rel=0.1)


# -- the model's face -------------------------------------------------------------------------------


def test_attributes_and_keys_are_unchanged() -> None:
    class Model(nn.Module):
        family = "mine"

        def __init__(self) -> None:
            super().__init__()
            self.body = network()
            self.extra = {"a": 1}

        def forward(self, x: Tensor) -> Tensor:
            return self.body(x)

        def helper(self) -> str:
            return self.family

    model = Model()
    keys = list(model.state_dict())
    made = training(model)
    made.steps(1)
    assert type(model) is Model and isinstance(made.module, Model)
    assert made.module.helper() == "mine" and made.module.extra == {"a": 1}
    assert list(model.state_dict()) == keys
    Model().load_state_dict(model.state_dict())


# -- charging ---------------------------------------------------------------------------------------


def test_the_price_before_the_first_step_is_zero() -> None:
    made = training()
    assert made.engine.get_epsilon(1e-5) == 0 == PrivacyEngine().get_epsilon(1e-5)


def test_a_second_engine_on_the_same_model_is_refused(monkeypatch: Patch) -> None:
    made = training()
    parent = nn.Sequential(made.module)
    for module in (made.module, parent, made.module[0]):  # type: ignore[index]
        with pytest.raises(ValueError, match="already being trained privately"):
            training(module, engine=PrivacyEngine())
    made.steps(1)
    made.engine.detach()
    training(made.module, engine=PrivacyEngine()).steps(1)

    monkeypatch.setattr(assembly, "require_free", lambda module: None)
    second = training(made.module, engine=PrivacyEngine())
    assert second.engine.ledger.steps == 0  # without the guard: a ledger that knows nothing of the other


def test_a_second_optimizer_does_not_escape(monkeypatch: Patch) -> None:
    """An optimizer over the other half of the model, which the engine was not told of."""
    model = network()
    half = torch.optim.SGD(model[0].parameters(), lr=0.5)
    with pytest.raises(ValueError, match=r"no optimizer holds '2.bias', '2.weight'.*optimizer=\[a, b\]"):
        training(model, optimizer=lambda _: half)

    monkeypatch.setattr(
        assembly, "trained_parameters", lambda module, optimizers: dict(module[0].named_parameters(prefix="0"))
    )
    made = training(model, optimizer=lambda _: half, guidance="isotropic")
    assert made.steps(1)[0].keys() >= {"0.weight", "0.bias"}  # without the guard half of the model is nobody's business


# -- gradients without noise ------------------------------------------------------------------------


def evaluate(made: Training) -> None:
    made.module.eval()
    x, y = data()[:12]
    F.cross_entropy(made.module(x), y).backward()


def penalise(made: Training) -> None:
    x, y = first_batch(made)
    (F.cross_entropy(made.module(x), y) + made.module[0].weight.square().mean()).backward()  # type: ignore[index]


def penalise_alone(made: Training) -> None:
    made.module[0].weight.square().sum().backward()  # type: ignore[index,operator]


@pytest.mark.parametrize("leak", [evaluate, penalise, penalise_alone])
def test_no_gradient_without_noise_reaches_the_optimizer(leak: Any, monkeypatch: Patch) -> None:
    made = training()
    before = made.weights()
    with pytest.raises(RuntimeError, match=r"not private reached parameter '(0|2)"):
        leak(made)
    assert made.engine.ledger.steps == 0
    made.module.train()
    made.optimizer.zero_grad()
    if leak is penalise_alone:
        made.optimizer.step()  # there is nothing to step on
        assert same(before, made.weights())

    # Without the guards on the parameters, the look before the step finds it; without that too, it trains.
    monkeypatch.setattr(private_gradients._Guard, "__call__", lambda self, gradient: gradient)
    second = training()
    if leak is not penalise:  # there the private gradient replaces it
        leak(second)
        with pytest.raises(RuntimeError, match="holds a gradient that is not the private one"):
            second.optimizer.step()
        monkeypatch.setattr(private_gradients.PrivateGradients, "_require_private", lambda self, parameter: None)
        third = training()
        leak(third)
        third.optimizer.step()
        assert not same(before, third.weights())


def test_an_iteration_that_ends_in_the_middle_of_a_lot_is_told_of(caplog: pytest.LogCaptureFixture) -> None:
    """As by a trainer that stops after len(loader) batches, whatever physical_batch_size makes of a lot."""
    for options, warnings in (({}, 0), ({"physical_batch_size": 3}, 1)):
        made = training(**options)
        for _ in range(2):  # epochs, of which each stops after two batches
            for x, y in itertools.islice(iter(made.loader), 2):
                F.cross_entropy(made.module(x), y).backward()
        assert sum("ended in the middle of lot 0" in record.getMessage() for record in caplog.records) == warnings
        assert made.engine.steps == (0 if warnings else 4)


def test_gradients_taken_while_paused_never_reach_the_optimizer() -> None:
    made = training()
    before = made.weights()
    x, y = data()[:12]
    with made.engine.paused():
        F.cross_entropy(made.module(x), y).backward()
        with pytest.raises(RuntimeError, match=r"step\(\) inside `with engine.paused\(\):`"):
            made.optimizer.step()
        stolen = {name: p.grad for name, p in made.module.named_parameters()}
    made.optimizer.step()
    assert same(before, made.weights())
    for name, p in made.module.named_parameters():
        p.grad = stolen[name]
    with pytest.raises(RuntimeError, match="not the private one"):
        made.optimizer.step()
    assert same(before, made.weights())


def test_a_gradient_put_in_by_hand_is_refused() -> None:
    made = training()
    for x, y in made.loader:
        F.cross_entropy(made.module(x), y).backward()
        weight = made.module[0].weight  # type: ignore[index]
        weight.grad = weight.grad * 2
        with pytest.raises(RuntimeError, match=r"'0.weight' holds a gradient that is not the private one.*in place"):
            made.optimizer.step()
        break


def unfreeze(model: nn.Sequential) -> nn.Module:
    return model[0].requires_grad_(True)


def add(model: nn.Sequential) -> nn.Module:
    model.append(nn.Linear(3, 3))
    return model[-1]


def exchange(model: nn.Sequential) -> nn.Module:
    model[2].weight = nn.Parameter(model[2].weight.detach().clone())
    return model[2]


@pytest.mark.parametrize("change", [unfreeze, add, exchange])
def test_parameters_that_come_later_are_refused(change: Any, monkeypatch: Patch) -> None:
    """Unfrozen, added or exchanged after make_private, for an optimizer of its own: neither clipped nor noised."""

    def step(made: Training, late: nn.Module) -> Tensor | None:
        x, y = first_batch(made)
        F.cross_entropy(made.module(x), y).backward()
        return late.weight.grad  # type: ignore[return-value]

    model = network()
    model[0].requires_grad_(False)
    made = training(model, guidance="isotropic")
    made.steps(1)
    late = change(model)
    with pytest.raises(RuntimeError, match="was not there, or frozen, when the model was made private"):
        step(made, late)
    assert late.weight.grad is None

    monkeypatch.setattr(Taps, "_require_known_parameters", lambda self: None)
    assert change is exchange or step(made, late) is not None  # without the guard: a gradient without noise


def test_a_loss_that_trains_other_parameters_is_refused(monkeypatch: Patch) -> None:
    """A head, or a loss with weights of its own, that another optimizer trains."""

    def head(made: Training) -> nn.Linear:
        other = nn.Linear(3, 3)
        x, y = first_batch(made)
        F.cross_entropy(other(made.module(x)), y).backward()
        return other

    made = training()
    with pytest.raises(ValueError, match=r"shape \(3, 3\) that is not the private model's"):
        head(made)
    assert made.engine.ledger.steps == 0
    made.steps(1, lambda out, y: F.cross_entropy(out @ torch.eye(3, requires_grad=True), y))  # nobody's parameter

    monkeypatch.setattr(loss_check.LossCheck, "_check_parameters", lambda self, loss: None)
    assert head(training()).weight.grad is not None  # without the guard: a gradient without noise


def test_an_optimizer_with_other_parameters_is_refused(monkeypatch: Patch) -> None:
    monkeypatch.setattr(loss_check.LossCheck, "_check_parameters", lambda self, loss: None)
    other = training(network())
    stranger = nn.Parameter(torch.ones(3))
    other.optimizer.add_param_group({"params": [stranger]})
    with pytest.raises(RuntimeError, match=r"shape \(3,\) that was not there"):
        other.steps(1, lambda out, y: F.cross_entropy(out * stranger, y))


# -- lots -------------------------------------------------------------------------------------------


def test_an_example_is_back_propagated_once(monkeypatch: Patch) -> None:
    def twice(physical: int | None) -> Training:
        made = training(physical_batch_size=physical)
        for x, y in made.loader:
            F.cross_entropy(made.module(x), y).backward()
            F.cross_entropy(made.module(x), y).backward()
            break
        return made

    for physical in (None, 3):
        with pytest.raises(RuntimeError, match="count twice"):
            twice(physical)
    made = training()
    x, y = first_batch(made)
    loss = F.cross_entropy(made.module(x), y)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match=r"second time|count"):
        loss.backward()
    assert made.engine.ledger.steps == 1

    capture = Lots.capture

    def careless(self: Lots) -> Any:
        self.captured = False
        return capture(self)

    monkeypatch.setattr(Lots, "capture", careless)
    made = training(physical_batch_size=3)
    x, y = first_batch(made)
    for _ in range(2):
        F.cross_entropy(made.module(x), y).backward()
    assert made.engine.diagnostics.examples == 2 * len(x)  # without the guard


def test_a_loss_of_an_earlier_batch_is_not_taken_for_the_present_one() -> None:
    made = training(physical_batch_size=3)
    x, y = first_batch(made)
    old = F.cross_entropy(made.module(x), y)
    for number, (x, y) in enumerate(made.loader):
        if number == 1:
            made.module(x)
            with pytest.raises(RuntimeError, match="belongs to an earlier batch"):
                old.backward()
            break
        F.cross_entropy(made.module(x), y).backward()
    assert made.engine.ledger.steps == 0


def test_an_earlier_batch_does_not_count_again_along_with_a_later_one(monkeypatch: Patch) -> None:
    x = torch.zeros(8, 6)
    x[0] = 100.0  # the one example with a gradient

    def rehearsing(seed: int) -> float:
        layer = nn.Linear(6, 3, bias=False)
        nn.init.zeros_(layer.weight)
        made = training(
            layer, dataset=TensorDataset(x, torch.zeros(8, dtype=torch.long)),
            noise_multiplier=1e-6, guidance="isotropic", physical_batch_size=2, seed=seed,
            sample_rate=1.0, expected_batch_size=8, dataset_size=None,
        )  # fmt: skip
        before: Tensor | float = 0.0
        for inputs, labels in made.loader:
            (F.cross_entropy(made.module(inputs), labels) + before).backward()
            before = F.cross_entropy(made.module(inputs), labels)
        return 8 * float(made.gradients()["weight"].norm())

    with pytest.raises(RuntimeError, match="belongs to an earlier batch"):
        rehearsing(0)
    monkeypatch.setattr(Run, "before_batch", lambda self: None)
    assert max(rehearsing(seed) for seed in range(3)) == pytest.approx(2.0, rel=1e-3)  # without the guard: 2 C


@pytest.mark.parametrize("physical", [None, 3])
def test_a_lot_is_not_skipped_by_looking_at_its_loss(physical: int | None, monkeypatch: Patch) -> None:
    def choosy(made: Training) -> Iterator[float]:
        for number, (x, y) in enumerate(made.loader):
            made.optimizer.zero_grad()
            loss = F.cross_entropy(made.module(x), y)
            yield float(loss.detach())
            if number == 1:
                continue
            loss.backward()
            made.optimizer.step()

    with pytest.raises(RuntimeError, match=r"handed out but not back-propagated.*not private"):
        list(choosy(training(physical_batch_size=physical)))
    monkeypatch.setattr(Lots, "require_captured", lambda self: None if self.captured else self.release())
    made = training()
    assert len(list(choosy(made))) == 5 and made.engine.ledger.steps == 4  # without the guard


def test_a_lot_is_not_exchanged_by_starting_anew() -> None:
    """Breaking off and iterating again gives the same lot, also where lots are drawn by the operating system."""
    for options in ({}, {"secure": True}):
        made = training(**options)
        lots = [first_batch(made)[0] for _ in range(4)]
        assert all(torch.equal(lots[0], lot) for lot in lots)
        made.steps(1)
        assert lots[0].shape != first_batch(made)[0].shape or not torch.equal(lots[0], first_batch(made)[0])
    fresh = PoissonSampler(60, 0.2, None)
    assert fresh.draw(0).tolist() != fresh.draw(0).tolist()  # the sampler alone would exchange it


def test_a_step_in_the_middle_of_a_lot_does_nothing() -> None:
    made = training(physical_batch_size=3, optimizer=lambda p: torch.optim.Adam(p, weight_decay=0.1))
    before = made.weights()
    for x, y in made.loader:
        made.optimizer.zero_grad()
        F.cross_entropy(made.module(x), y).backward()
        made.optimizer.step()
        if made.engine.steps:
            break
        assert same(before, made.weights()) and not made.optimizer.state
    assert not same(before, made.weights())


def test_an_optimizer_that_a_library_has_wrapped() -> None:
    class Wrapper(torch.optim.Optimizer):  # as accelerate's: an optimizer by name, without the hooks of one
        def __init__(self, optimizer: torch.optim.Optimizer) -> None:
            self.optimizer = optimizer

        @property
        def param_groups(self) -> Any:  # type: ignore[override]
            return self.optimizer.param_groups

        def step(self, closure: Any = None) -> Any:
            return self.optimizer.step(closure)

    made = training(optimizer=lambda p: Wrapper(torch.optim.SGD(p, lr=0.1)))
    before = made.weights()
    x, y = first_batch(made)
    with pytest.raises(RuntimeError, match="not back-propagated"):  # the guards are on the optimizer inside
        made.optimizer.step()
    F.cross_entropy(made.module(x), y).backward()
    made.optimizer.step()
    assert type(made.optimizer) is Wrapper and not same(before, made.weights())


def test_a_closure_is_evaluated_once() -> None:
    made = training(seed=1)
    x, y = first_batch(made)
    evaluated = []

    def closure() -> Tensor:
        made.optimizer.zero_grad()
        loss = F.cross_entropy(made.module(x), y)
        loss.backward()
        evaluated.append(float(loss.detach()))
        return loss

    before = made.weights()
    assert float(made.optimizer.step(closure).detach()) == evaluated[0]
    assert len(evaluated) == 1 and made.engine.ledger.steps == 1 and not same(before, made.weights())
    other = training(seed=1)
    x, y = first_batch(other)
    F.cross_entropy(other.module(x), y).backward()
    other.optimizer.step()
    assert same(made.weights(), other.weights())


def test_an_optimizer_that_evaluates_its_closure_again_is_refused() -> None:
    class Twice(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            closure()
            closure()
            super().step()

    made = training(optimizer=lambda p: Twice(p, lr=0.1))
    x, y = first_batch(made)
    with pytest.raises(ValueError, match="Twice evaluates its closure several times"):
        made.optimizer.step(lambda: F.cross_entropy(made.module(x), y).backward())
    assert made.engine.ledger.steps == 1


def test_a_closure_of_lbfgs_is_refused() -> None:
    made = training(optimizer=lambda p: torch.optim.LBFGS(p))
    x, y = first_batch(made)

    def closure() -> Tensor:
        loss = F.cross_entropy(made.module(x), y)
        loss.backward()
        return loss

    before = made.weights()
    for step in (lambda: made.optimizer.step(closure), lambda: made.optimizer.step(closure=closure)):
        with pytest.raises(ValueError, match="evaluates its closure many times"):
            step()
    assert made.engine.ledger.steps == 0 and same(before, made.weights())


def test_a_step_without_a_backward_pass_is_refused() -> None:
    made = training()
    first_batch(made)
    with pytest.raises(RuntimeError, match="not back-propagated"):
        made.optimizer.step()


def test_a_loader_that_chooses_examples_itself_is_refused(monkeypatch: Patch) -> None:
    weighted = torch.utils.data.WeightedRandomSampler([1.0] * 60, 60)
    loader = DataLoader(data(), batch_size=12, sampler=weighted)
    with pytest.raises(ValueError, match="WeightedRandomSampler"):
        training(data_loader=loader)
    monkeypatch.setattr(sampling.public_numbers, "_require_plain_loader", lambda loader: None)
    training(data_loader=loader)  # without the guard the weights would be ignored in silence
