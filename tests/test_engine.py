"""The engine as users meet it: three lines around an ordinary loop."""

from __future__ import annotations

import copy
import itertools
import math
import weakref
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, TensorDataset

from dphero import BudgetExhausted, PrivacyEngine
from dphero.accounting import Ledger, PoissonGaussian, price
from dphero.guidance import PCA
from tests.trainer import Training, data, network, same, training


def spent(steps: int, rate: float = 0.2, noise_multiplier: float = 1.0, accountant: str = "pld") -> float:
    ledger = Ledger()
    ledger.record(PoissonGaussian(rate, noise_multiplier), steps)
    return price(ledger, 1e-5, accountant).epsilon


# -- three lines ----------------------------------------------------------------------------------------------


def test_the_objects_come_back_as_they_were_given() -> None:
    module = network()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    keys, kind, attributes = list(module.state_dict()), type(module), set(dir(module))
    x = data()[:5][0]
    out = module(x)
    back = PrivacyEngine().make_private(
        module=module, optimizer=optimizer, data_loader=DataLoader(data(), batch_size=12), noise_multiplier=1.0,
        max_grad_norm=1.0, dataset_size="public",
    )  # fmt: skip
    assert len(back) == 3 and back[0] is module and back[1] is optimizer
    assert list(module.state_dict()) == keys and type(module) is kind and set(dir(module)) == attributes
    module.eval()
    assert torch.equal(module(x), out)
    loader = back[2]
    assert len(loader) == 5 and loader.batch_size == 12 and len(loader.dataset) == 60  # type: ignore[arg-type]


def test_the_price_grows_from_zero() -> None:
    run = training()
    assert run.engine.get_epsilon(1e-5) == 0
    assert "Number of noisy releases: 0" in run.engine.statement(1e-5).text
    prices = [0.0]
    for _ in range(3):
        run.steps(1)
        prices.append(run.engine.get_epsilon(1e-5, accountant="rdp"))
    assert all(earlier < later for earlier, later in itertools.pairwise(prices))
    assert run.engine.get_epsilon(1e-5) == spent(3)
    assert run.engine.get_epsilon(1e-5, accountant="rdp") == spent(3, accountant="rdp")
    assert run.engine.get_epsilon(1e-5, coarse=True) >= run.engine.get_epsilon(1e-5)
    assert run.engine.steps == 3 and run.engine.noise_multiplier == 1.0


def test_private_training_learns() -> None:
    run = training(dataset=data(600), expected_batch_size=120, noise_multiplier=0.5)
    run.steps(60)
    x, y = data(300, seed=1).tensors
    run.module.eval()
    assert float((run.module(x).argmax(1) == y).float().mean()) > 0.85


@pytest.mark.usefixtures("same_noise")
@pytest.mark.parametrize("physical", [1, 3, 7, 100])
@pytest.mark.parametrize("clipping", ["flat", "adaptive"])
def test_physical_batches_change_nothing(physical: int, clipping: str) -> None:
    whole, split = training(clipping=clipping), training(clipping=clipping, physical_batch_size=physical)
    for first, second in zip(whole.steps(6), split.steps(6), strict=True):
        for name in first:
            torch.testing.assert_close(first[name], second[name], rtol=1e-4, atol=1e-6)
    assert whole.engine.ledger == split.engine.ledger


def test_what_a_batch_left_is_gone_before_the_next_one() -> None:
    """Else two of them would take memory."""
    run = training(physical_batch_size=4)
    seen: list[weakref.ref[Any]] = []
    add = run.engine._attached.lot_sum.add

    def watched(gradients: Any, *arguments: Any) -> None:
        seen.append(weakref.ref(gradients))
        add(gradients, *arguments)

    run.engine._attached.lot_sum.add = watched  # type: ignore[method-assign]
    for x, y in run.loader:
        assert all(gradients() is None for gradients in seen)
        F.cross_entropy(run.module(x), y).backward()
    assert len(seen) > run.engine.steps


class Words(Dataset):
    """Dictionaries of examples, as a collate function of one's own makes batches of them."""

    def __len__(self) -> int:
        return 60

    def __getitem__(self, index: int) -> dict[str, Any]:
        x, y = data()[index]
        return {"x": x, "y": y, "name": f"record {index}"}


@pytest.mark.parametrize("workers", [0, 2])
def test_dictionaries_workers_and_names(workers: int) -> None:
    loader = DataLoader(Words(), batch_size=12, num_workers=workers)
    run, reference = training(data_loader=loader), training()
    expected = reference.steps(5)
    for step, batch in enumerate(run.loader):
        assert len(batch["name"]) == len(batch["x"])
        run.optimizer.zero_grad()
        F.cross_entropy(run.module(batch["x"]), batch["y"]).backward()
        assert same(run.gradients(), expected[step])
        run.optimizer.step()


def test_a_plain_dataset_needs_public_numbers() -> None:
    run = training(data_loader=data(), sample_rate=0.2, expected_batch_size=12, dataset_size=None)
    assert same(run.steps(1)[0], training().steps(1)[0])


def test_gradients_accumulate_over_lots_until_zero_grad() -> None:
    run, reference = training(), training()
    releases = [step["0.weight"] for step in reference_releases(reference, 2)]
    for _, (x, y) in zip(range(2), run.loader, strict=False):
        F.cross_entropy(run.module(x), y).backward()
    torch.testing.assert_close(run.gradients()["0.weight"], releases[0] + releases[1])
    run.optimizer.step()
    assert run.engine.ledger.steps == 2


def reference_releases(run: Training, count: int) -> list[dict[str, Tensor]]:
    """Releases of lots at the same weights."""
    released = []
    for _, (x, y) in zip(range(count), run.loader, strict=False):
        run.optimizer.zero_grad()
        F.cross_entropy(run.module(x), y).backward()
        released.append(run.gradients())
    return released


def test_gradients_may_be_changed_in_place() -> None:
    run = training()
    for x, y in run.loader:
        run.optimizer.zero_grad()
        F.cross_entropy(run.module(x), y).backward()
        torch.nn.utils.clip_grad_norm_(run.module.parameters(), 0.1)
        run.optimizer.step()
    assert run.engine.steps == 5


def test_zero_grad_may_keep_the_tensors() -> None:
    run, reference = training(), training()
    expected = reference.steps(3)
    for step, (x, y) in enumerate(run.loader):
        run.optimizer.zero_grad(set_to_none=False)
        F.cross_entropy(run.module(x), y).backward()
        assert same(run.gradients(), expected[step])
        run.optimizer.step()
        if step == 2:
            break


def test_a_layer_that_is_frozen_later_stays_as_it_is() -> None:
    run = training()
    run.steps(2)
    run.module[0].requires_grad_(False)  # type: ignore[index]
    before = run.weights()
    run.steps(2)
    after = run.weights()
    assert torch.equal(before["0.weight"], after["0.weight"]) and not torch.equal(before["2.weight"], after["2.weight"])


def test_a_layer_can_be_frozen_for_a_while_from_the_beginning() -> None:
    run = training()
    run.module[0].requires_grad_(False)  # type: ignore[index]
    before = run.weights()
    run.steps(2)
    assert torch.equal(before["0.weight"], run.weights()["0.weight"])
    run.module[0].requires_grad_(True)  # type: ignore[index]
    run.steps(1)
    assert not torch.equal(before["0.weight"], run.weights()["0.weight"])


# -- a target epsilon ------------------------------------------------------------------------------------------


def with_epsilon(engine: PrivacyEngine | None = None, **options: Any) -> Training:
    module = network()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    engine = engine or PrivacyEngine(accountant="rdp")
    defaults: dict[str, Any] = {"target_epsilon": 2.0, "target_delta": 1e-5, "epochs": 2, "dataset_size": "public"}
    _, _, loader = engine.make_private_with_epsilon(
        module=module, optimizer=optimizer, data_loader=DataLoader(data(), batch_size=12), max_grad_norm=1.0,
        **{**defaults, **options},
    )  # fmt: skip
    return Training(engine, module, optimizer, loader)


@pytest.mark.parametrize("options, steps", [({}, 10), ({"epochs": 0.5}, 2), ({"epochs": None, "steps": 7}, 7)])
def test_a_target_is_met_and_never_passed(options: dict[str, Any], steps: int) -> None:
    run = with_epsilon(**options)
    run.steps(steps)
    assert 1.95 < run.engine.get_epsilon(1e-5) <= 2.0
    with pytest.raises(BudgetExhausted):
        run.steps(1)
    assert run.engine.steps == steps and run.engine.get_epsilon(1e-5) <= 2.0


def test_all_options_reach_make_private() -> None:
    run = with_epsilon(
        guidance=PCA(exponent=1.0), clipping="automatic", physical_batch_size=4, seed=3, mechanism="ball"
    )
    mechanism = run.engine._attached.mechanism
    assert mechanism.mode == "ball" and mechanism.clipping.kind == "automatic" and mechanism.noise.seeded
    assert run.loader.physical_batch_size == 4


def test_unknown_options_name_their_neighbour() -> None:
    with pytest.raises(TypeError, match="unexpected argument 'guidence'; did you mean 'guidance'"):
        with_epsilon(guidence="pca")
    with pytest.raises(TypeError, match="'zzz'; the arguments are module, optimizer"):
        with_epsilon(zzz=1)
    with pytest.raises(TypeError, match="unexpected keyword argument 'nois_multiplier'"):
        training(nois_multiplier=1.0)


@pytest.mark.parametrize(
    "options, match",
    [
        ({"steps": 3}, "either epochs= or steps="),
        ({"epochs": None}, "either epochs= or steps="),
        ({"epochs": -1}, "epochs must be a positive number"),
        ({"epochs": None, "steps": 0}, "steps must be a whole number of at least 1"),
        ({"epochs": None, "steps": 2.5}, "steps must be a whole number of at least 1"),
        ({"noise_multiplier": 1.0}, "noise_multiplier follows from target_epsilon"),
        ({"mechanism": "published", "unsound": True}, "no noise multiplier that would meet a target"),
        ({"sampling": "shuffle"}, "sampling must be one of 'poisson'"),
        ({"target_epsilon": 0.0}, "epsilon must be above 0"),
        ({"target_delta": 1.0}, "delta must be above 0 and below 1"),
        ({"target_delta": 0.0}, "delta must be above 0 and below 1"),
    ],
)
def test_impossible_targets_are_refused(options: dict[str, Any], match: str) -> None:
    engine = PrivacyEngine(accountant="rdp")
    with pytest.raises(ValueError, match=match):
        with_epsilon(engine, **options)
    with_epsilon(engine)  # nothing was half-done


def test_a_limit_counts_what_was_released_before() -> None:
    engine = PrivacyEngine(accountant="rdp")
    run = training(engine=engine)
    run.steps(5)
    engine.limit(spent(8, accountant="rdp") * 1.001, 1e-5)
    run.steps(3)
    with pytest.raises(BudgetExhausted):
        run.steps(1)
    engine.detach()
    with pytest.raises(RuntimeError, match="8 releases already"):
        with_epsilon(engine)


# -- several optimizers -----------------------------------------------------------------------------------------


def test_two_optimizers_share_one_release() -> None:
    """Neither is charged twice, nor does one escape."""
    reference = training(optimizer=lambda p: torch.optim.SGD(p, lr=0.5))
    reference.steps(5)
    engine, module = PrivacyEngine(), network()
    several = [torch.optim.SGD(module[0].parameters(), lr=0.5), torch.optim.SGD(module[2].parameters(), lr=0.5)]
    _, back, loader = engine.make_private(
        module=module, optimizer=several, data_loader=DataLoader(data(), batch_size=12), noise_multiplier=1.0,
        max_grad_norm=1.0, dataset_size="public", seed=7,
    )  # fmt: skip
    assert back is several
    for x, y in loader:
        module.zero_grad()
        F.cross_entropy(module(x), y).backward()
        for optimizer in several:
            optimizer.step()
    assert same(dict(module.state_dict()), reference.weights())
    assert engine.ledger.steps == 5


# -- statement, diagnostics ------------------------------------------------------------------------------------------


def test_the_statement_says_what_is_promised() -> None:
    run = training(seed=None)
    run.steps(3)
    text = run.engine.statement(1e-5, unit="one person").text
    for words in (
        "Protected unit: one person",
        "added or removed",
        "Poisson",
        "Number of noisy releases: 3",
        "Not covered",
    ):
        assert words in text
    assert "seed" not in text
    assert "seed was chosen by the user" in training(seed=1).engine.statement(1e-5).text
    assert run.engine.statement(1e-5).price.epsilon == run.engine.get_epsilon(1e-5)


def test_diagnostics_count_examples_clipped_and_nonfinite() -> None:
    poisoned = data()
    poisoned.tensors[0][[3, 7, 20], 0] = math.nan
    run = training(dataset=poisoned, max_grad_norm=0.05, sample_rate=1.0, dataset_size=None)
    run.steps(2)
    seen = run.engine.diagnostics
    assert (seen.examples, seen.nonfinite) == (120, 6)
    assert 60 < seen.clipped <= 114
    assert 0.05 < seen.mean_norm < 10
    assert training(secure=True).engine.diagnostics.examples == 0


def test_a_gradient_that_was_dropped_is_gone() -> None:
    run = training()
    run.steps(1)
    parameter = next(iter(run.module.parameters()))
    assert parameter.grad is not None
    gradient = weakref.ref(parameter.grad)
    assert gradient() is parameter.grad
    run.optimizer.zero_grad()
    assert gradient() is None
    run.steps(1)


# -- pausing and detaching --------------------------------------------------------------------------------


def test_paused_lets_the_model_run_on_other_data() -> None:
    run, reference = training(), training()
    x, y = data(9, seed=5).tensors
    plain = network()
    F.cross_entropy(plain(x), y).backward()
    with run.engine.paused():
        F.cross_entropy(run.module(x), y).backward()
        assert torch.equal(run.module[0].weight.grad, plain[0].weight.grad)  # type: ignore[index,arg-type]
        grads = torch.autograd.grad(F.cross_entropy(run.module(x), y), list(run.module.parameters()))
        assert torch.equal(grads[0], plain[0].weight.grad)  # type: ignore[arg-type]
    assert all(p.grad is None for p in run.module.parameters())
    assert same(run.steps(1)[0], reference.steps(1)[0])  # nothing of it is left
    kept = run.gradients()
    with run.engine.paused():
        F.cross_entropy(run.module(x), y).backward()
    assert same(run.gradients(), kept)


def test_evaluation_needs_nothing_special() -> None:
    run = training()
    run.steps(2)
    x = data()[:7][0]
    run.module.eval()
    before = run.module(x)
    run.module.train()
    with torch.no_grad():
        assert torch.equal(run.module(x), before)
    assert run.engine.ledger.steps == 2


def test_detach_gives_everything_back() -> None:
    module = network()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    attributes = {path: set(vars(child)) for path, child in module.named_modules()}
    run = training(module, optimizer=lambda _: optimizer)
    run.steps(3)
    ledger, price_then = run.engine.ledger, run.engine.get_epsilon(1e-5)
    run.engine.detach()
    assert attributes == {path: set(vars(child)) for path, child in module.named_modules()}
    assert not any(p._backward_hooks for p in module.parameters()) and not module._forward_hooks
    assert not optimizer._optimizer_step_pre_hooks and not optimizer._optimizer_step_post_hooks
    optimizer.zero_grad()
    F.cross_entropy(module(data()[:4][0]), data()[:4][1]).backward()
    optimizer.step()  # an ordinary model again
    assert run.engine.ledger is ledger and run.engine.get_epsilon(1e-5) == price_then
    assert "Number of noisy releases: 3" in run.engine.statement(1e-5).text
    for use in (lambda: run.engine.steps, lambda: run.engine.detach(), lambda: run.engine.save("x"), run.engine.paused):
        with pytest.raises(RuntimeError, match="call make_private first"):
            use()


def test_the_loader_of_a_detached_engine_hands_out_nothing() -> None:
    """What it handed out would be trained without noise, and nobody would count it."""
    run = training()
    run.steps(1)
    begun = iter(run.loader)
    next(begun)
    run.engine.detach()
    for lots in (begun, iter(run.loader)):
        with pytest.raises(RuntimeError, match=r"detached.*not private"):
            next(lots)


def test_an_engine_that_trains_again_goes_on_counting() -> None:
    """The same data a second time: the second training does not start from zero."""
    engine = PrivacyEngine()
    run = training(engine=engine)
    run.steps(3)
    with pytest.raises(RuntimeError, match="already trains a model"):
        training(engine=engine)
    engine.detach()
    with pytest.raises(ValueError, match="seed 7 already: the same noise"):
        training(engine=engine)
    with pytest.raises(ValueError, match="prices do not add up"):
        training(engine=engine, seed=8, sampling="shuffle", dataset_size=None)
    again = training(run.module, engine=engine, seed=8, noise_multiplier=2.0)
    again.steps(2)
    assert dict(engine.ledger.counts) == {PoissonGaussian(0.2, 1.0): 3, PoissonGaussian(0.2, 2.0): 2}
    assert "seed was chosen" in engine.statement(1e-5).text


def test_copies_of_a_private_model_are_ordinary() -> None:
    run = training()
    run.steps(1)
    average = copy.deepcopy(run.module)
    assert same(dict(average.state_dict()), run.weights())
    F.cross_entropy(average(data()[:4][0]), data()[:4][1]).backward()
    assert all(p.grad is not None for p in average.parameters())
    run.steps(1)


def test_seeds_make_runs_repeatable() -> None:
    first, second, other = training(seed=1), training(seed=1), training(seed=2)
    a, b, c = first.steps(3), second.steps(3), other.steps(3)
    assert all(same(x, y) for x, y in zip(a, b, strict=True))
    assert not any(same(x, y) for x, y in zip(a, c, strict=True))
    assert same(a[0], training(seed=np.int64(1)).steps(1)[0])
    for seed in ("a", 1.0, True):
        with pytest.raises(ValueError, match=f"seed must be a whole number, got {seed!r}"):
            training(seed=seed)
    with pytest.raises(ValueError, match="takes no seed"):
        training(secure=True, seed=1)


def test_accountants_are_known() -> None:
    with pytest.raises(ValueError, match=r"accountant must be one of 'pld', 'rdp'.*'magic'"):
        PrivacyEngine(accountant="magic")


def test_double_precision() -> None:
    module = network().double()
    x, y = data().tensors
    run = training(module, dataset=TensorDataset(x.double(), y))
    (step,) = run.steps(1)
    assert all(value.dtype == torch.float64 for value in step.values())


@pytest.mark.parametrize("guidance", ["isotropic", "pca", "history"])
def test_a_model_may_change_its_precision_between_steps(guidance: str) -> None:
    module = network()
    run = training(module, guidance=guidance)
    for dtype in (torch.float32, torch.float64, torch.float32):
        module.to(dtype)
        hook = module[0].register_forward_pre_hook(lambda _, inputs, dtype=dtype: (inputs[0].to(dtype),))
        (step,) = run.steps(1)
        hook.remove()
        assert all(value.dtype == dtype and value.isfinite().all() for value in step.values())


# -- on a GPU ----------------------------------------------------------------------------------------------


def on_gpu(**options: Any) -> Training:
    return training(network().cuda(), dataset=TensorDataset(*(t.cuda() for t in data().tensors)), **options)


@pytest.mark.gpu
@pytest.mark.parametrize("clipping", ["flat", "per_layer", "automatic", "adaptive"])
@pytest.mark.parametrize("guidance", ["isotropic", "pca", "history"])
def test_training_on_a_gpu(clipping: str, guidance: str, tmp_path: Any) -> None:
    run = on_gpu(clipping=clipping, guidance=guidance, physical_batch_size=5)
    run.steps(5)
    run.engine.save(tmp_path / "run.pt")
    after = run.steps(5)
    resumed = on_gpu(clipping=clipping, guidance=guidance, physical_batch_size=5)
    resumed.engine.load(tmp_path / "run.pt")
    for first, second in zip(after, resumed.steps(5), strict=True):
        for name in first:
            torch.testing.assert_close(first[name], second[name], rtol=1e-3, atol=1e-5)
    assert run.engine.ledger == resumed.engine.ledger and run.engine.ledger.steps == 10
    assert run.engine.diagnostics.examples > 60


@pytest.mark.gpu
@pytest.mark.parametrize("before", [2, 3, 6])
def test_a_geometry_made_ahead_outlives_a_checkpoint_on_a_gpu(before: int, tmp_path: Any) -> None:
    unbroken, saved, resumed = (on_gpu(guidance=PCA(refresh_every=3, exact_up_to=4, components=3)) for _ in range(3))
    unbroken.steps(9)
    saved.steps(before)
    assert (saved.engine._attached.mechanism.shape._next is not None) == (before % 3 == 0)
    saved.engine.save(tmp_path / "run.pt")
    resumed.engine.load(tmp_path / "run.pt")
    resumed.steps(9 - before)
    for name, value in unbroken.weights().items():
        torch.testing.assert_close(resumed.weights()[name], value, rtol=1e-4, atol=1e-6)


@pytest.mark.gpu
def test_errors_on_a_gpu_are_raised_where_the_user_sees_them() -> None:
    """The end of a backward pass runs in a thread of autograd's own there."""
    run = on_gpu()
    x, y = next(iter(run.loader))
    with pytest.raises(ValueError, match="mixes examples"):
        F.cross_entropy(run.module(x), y).sqrt().backward()
    with pytest.raises(RuntimeError, match="not private reached"):
        (F.cross_entropy(run.module(x), y) + run.module[0].weight.mean()).backward()  # type: ignore[index,operator]
    run.steps(1)
    x, y = next(iter(run.loader))
    F.cross_entropy(run.module(x), y).backward()
    with pytest.raises(RuntimeError, match="count twice"):
        F.cross_entropy(run.module(x), y).backward()
    assert run.engine.ledger.steps == 2


@pytest.mark.gpu
def test_nan_on_a_gpu() -> None:
    x, y = (t.cuda() for t in data().tensors)
    x[[3, 9]] = math.nan
    run = training(network().cuda(), dataset=TensorDataset(x, y), sample_rate=1.0, dataset_size=None)
    run.steps(2)
    assert run.engine.diagnostics.nonfinite == 4
    assert all(value.isfinite().all() for value in run.weights().values())
