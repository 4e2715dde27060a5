"""Bad input: a clear error each, nothing half-done, and the run can go on."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from dphero import PrivacyEngine
from dphero.guidance import PCA
from tests.trainer import Training, data, network, same, training


class Stream(IterableDataset):
    def __iter__(self) -> Any:
        return iter([torch.zeros(6)])


ARGUMENTS: dict[str, tuple[dict[str, Any], str]] = {
    "sigma zero": ({"noise_multiplier": 0.0}, "noise_multiplier must be a positive number, got 0.0"),
    "sigma negative": ({"noise_multiplier": -1.0}, "noise_multiplier must be a positive number, got -1.0"),
    "sigma nan": ({"noise_multiplier": float("nan")}, "noise_multiplier must be a positive number, got nan"),
    "sigma text": ({"noise_multiplier": "1.0"}, "noise_multiplier must be a positive number, got '1.0'"),
    "sigma missing": ({"noise_multiplier": None}, "noise_multiplier must be a positive number, got None"),
    "bound zero": ({"max_grad_norm": 0}, "max_grad_norm must be a positive number, got 0"),
    "bound list": ({"max_grad_norm": [1.0, 1.0]}, "max_grad_norm must be a positive number"),
    "rate above one": ({"sample_rate": 1.5, "dataset_size": None}, r"sample_rate must be in \(0, 1\], got 1.5"),
    "rate zero": ({"sample_rate": 0.0, "dataset_size": None}, "sample_rate must be a positive number, got 0.0"),
    "no public number": ({"dataset_size": None}, "number of records is not unless you say so"),
    "batch above size": ({"expected_batch_size": 61}, "more than the 60 records: sample_rate would be 1.01667"),
    "empty": ({"dataset": TensorDataset(torch.zeros(0, 6))}, "the dataset is empty"),
    "no length": ({"data_loader": DataLoader(Stream(), batch_size=2)}, "loader without a length cannot be sampled"),
    "no dataset": ({"data_loader": None}, "NoneType must have __len__ and __getitem__"),
    "physical zero": ({"physical_batch_size": 0}, "physical_batch_size must be a whole number of at least 1, got 0"),
    "physical half": ({"physical_batch_size": 2.5}, "physical_batch_size must be a whole number"),
    "physical word": (
        {"physical_batch_size": "automatic"},
        "physical_batch_size must be a whole number of at least 1, or \"auto\", got 'automatic'",
    ),
    "physical auto, several lengths": (
        {"physical_batch_size": "auto", "pad_to": (6, 16)},
        r"with pad_to=\(6, 16\) rows are of several lengths: give a number of rows",
    ),
    "mechanism": (
        {"mechanism": "elipsoid"},
        "mechanism must be one of 'ellipsoid', 'ball', 'published', got 'elipsoid'",
    ),
    "clipping": ({"clipping": "none"}, "clipping must be one of 'flat'"),
    "sampling": ({"sampling": "uniform"}, "sampling must be one of 'poisson', 'shuffle', got 'uniform'"),
    "loss": ({"loss_reduction": "none"}, "loss_reduction must be one of 'mean', 'sum', got 'none'"),
    "guidance": ({"guidance": "pac"}, "unknown guidance 'pac'"),
    "shuffled rate": ({"sampling": "shuffle", "sample_rate": 0.1, "dataset_size": None}, "has no sample_rate"),
    "shuffled fraction": (
        {"sampling": "shuffle", "expected_batch_size": 2.5, "dataset_size": None},
        "fixed whole size",
    ),
    "singular": ({"guidance": PCA(exponent=1.0, floor=0.0), "module": nn.Linear(6, 9)}, "rank deficient.*floor > 0"),
    "published singular": (
        {"guidance": PCA(floor=0.0), "module": nn.Linear(6, 9), "mechanism": "published", "unsound": True},
        "rank deficient.*no privacy",
    ),
    "bare": ({"guidance": PCA(exponent=1.0, floor=0.0, bare=True), "module": nn.Linear(6, 9)}, "without noise"),
    "no consent": ({"mechanism": "published"}, "unsound=True"),
    "no module": ({"module": "net", "optimizer": lambda p: torch.optim.SGD([torch.zeros(1)], 0.1)}, "torch.nn.Module"),
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_bad_arguments_are_refused_and_nothing_is_changed(name: str) -> None:
    options, match = ARGUMENTS[name]
    options = dict(options)
    module = options.pop("module", None) or network()
    if isinstance(module, nn.Module):
        optimizer: Any = torch.optim.SGD(module.parameters(), lr=0.5)
        attributes = {path: set(vars(child)) for path, child in module.named_modules()}
        weights = {key: value.clone() for key, value in module.state_dict().items()}
    else:
        optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.5)
    options.setdefault("data_loader", DataLoader(options.pop("dataset", data()), batch_size=12))
    numbers = {"noise_multiplier": 1.0, "max_grad_norm": 1.0, "dataset_size": "public", "seed": 7}
    engine = PrivacyEngine()
    options.pop("optimizer", None)
    with pytest.raises(ValueError, match=match):
        engine.make_private(module=module, optimizer=optimizer, **{**numbers, **options})
    if isinstance(module, nn.Module):
        assert attributes == {path: set(vars(child)) for path, child in module.named_modules()}
        assert same(weights, dict(module.state_dict()))
        assert not any(p._backward_hooks for p in module.parameters()) and not module._forward_hooks
        assert not optimizer._optimizer_step_pre_hooks
    run = training(engine=engine)  # the engine is as good as new, and so is the seed
    assert same(run.steps(1)[0], training().steps(1)[0])


@pytest.mark.parametrize("optimizer", [None, torch.optim.SGD, "adam", []])
def test_an_optimizer_that_is_none_is_refused(optimizer: Any) -> None:
    with pytest.raises(ValueError, match="must be a torch optimizer"):
        training(optimizer=lambda _: optimizer)


def test_unknown_arguments_are_errors() -> None:
    with pytest.raises(TypeError, match="poisson_sampling"):
        training(poisson_sampling=True)
    with pytest.raises(TypeError, match="positional"):
        PrivacyEngine("rdp")  # type: ignore[misc]


@pytest.mark.parametrize("delta", [0.0, 1.0, 1.5, -1e-5, float("nan"), "small", None])
def test_impossible_deltas_are_refused(delta: Any) -> None:
    run = training()
    for ask in (run.engine.get_epsilon, run.engine.statement):
        with pytest.raises(ValueError, match="delta must be"):
            ask(delta)
    with pytest.raises(ValueError, match="delta must be"):
        run.engine.limit(1.0, delta)


def test_the_engine_without_a_model_says_so() -> None:
    engine = PrivacyEngine()
    assert engine.get_epsilon(1e-5) == 0  # nothing was released
    for use in (lambda: engine.steps, lambda: engine.diagnostics, lambda: engine.limit(1.0, 1e-5), engine.detach):
        with pytest.raises(RuntimeError, match="call make_private first"):
            use()


# -- in the loop ------------------------------------------------------------------------------------------------


def unharmed(run: Training, before: dict[str, Tensor], sound: nn.Module | None = None) -> None:
    """Nothing was released, charged or changed, and the run goes on as one to which nothing happened."""
    assert run.engine.steps == run.engine.ledger.steps == 0
    assert same(before, run.weights())
    assert all(p.grad is None for p in run.module.parameters())
    found, expected = run.steps(2)[1], training(sound).steps(2)[1]
    assert all(map(torch.equal, found.values(), expected.values()))
    assert run.engine.ledger.steps == 2


def first_batch(run: Training) -> tuple[Tensor, Tensor]:
    x, y = next(iter(run.loader))
    return x, y


def test_a_label_out_of_range() -> None:
    run = training()
    before = run.weights()
    with pytest.raises((IndexError, RuntimeError), match="out of bounds"):
        run.steps(1, lambda out, y: F.cross_entropy(out, y + 3))
    unharmed(run, before)


def test_a_step_after_a_label_out_of_range_is_refused() -> None:
    """Whoever catches the error and steps anyway, or goes on to the next lot, is told."""
    run = training()
    batches = iter(run.loader)
    x, y = next(batches)
    with pytest.raises((IndexError, RuntimeError)):
        F.cross_entropy(run.module(x), y + 3).backward()
    with pytest.raises(RuntimeError, match="not back-propagated through the private model"):
        run.optimizer.step()
    with pytest.raises(RuntimeError, match="handed out but not back-propagated"):
        next(batches)
    unharmed(run, run.weights())


@pytest.mark.parametrize("shape", [(12, 5), (12, 6, 2), (0, 6)])
def test_wrong_shapes(shape: tuple[int, ...]) -> None:
    run = training()
    before = run.weights()
    first_batch(run)
    with pytest.raises((RuntimeError, ValueError)):
        run.module(torch.zeros(shape))
    unharmed(run, before)


@pytest.mark.parametrize("part", [slice(0, 3), slice(0, 1), [0, 0] * 10])
@pytest.mark.parametrize("examined", [False, True])
def test_another_number_of_rows_than_the_loaders(part: Any, examined: bool) -> None:
    """Half of the batch, or the batch twice: an example's gradient would be incomplete or somebody else's."""
    run = training()
    if examined:
        run.steps(1)
    before, ledger = run.weights(), run.engine.ledger.steps
    x, y = first_batch(run)
    with pytest.raises((RuntimeError, ValueError), match=r"rows|examples"):
        F.cross_entropy(run.module(x[part]), y[part]).backward()
    assert run.engine.ledger.steps == ledger
    assert same(before, run.weights())


def test_two_halves_of_a_batch_are_not_taken_for_one() -> None:
    run = training(dataset=data(10), sample_rate=1.0, expected_batch_size=10, dataset_size=None)
    run.steps(1)
    x, y = first_batch(run)
    with pytest.raises((RuntimeError, ValueError), match=r"rows|examples"):
        (F.cross_entropy(run.module(x[:5]), y[:5]) + F.cross_entropy(run.module(x[5:]), y[5:])).backward()
    assert run.engine.ledger.steps == 1


def test_a_model_called_without_a_batch_of_the_private_loader() -> None:
    run = training()
    with pytest.raises(RuntimeError, match="without a batch of the private loader"):
        run.module(torch.zeros(3, 6))
    unharmed(run, run.weights())


def test_an_old_loader_is_of_no_use() -> None:
    """Between lots as well: a batch of another loader is not taken for a lot."""
    run = training()
    run.steps(1)
    x, y = data()[:12]
    with pytest.raises((RuntimeError, ValueError)):
        F.cross_entropy(run.module(x), y).backward()
    assert run.engine.ledger.steps == 1


def test_a_loss_that_is_no_mean() -> None:
    run = training()
    before = run.weights()
    with pytest.raises(ValueError, match="mixes examples"):
        run.steps(1, lambda out, y: F.cross_entropy(out, y) ** 2)
    unharmed(run, before)


def test_a_loss_without_the_model() -> None:
    run = training()
    x, _ = first_batch(run)
    run.module(x)
    with pytest.raises(RuntimeError, match="does not require grad"):
        torch.zeros(()).backward()
    unharmed(run, run.weights())


def test_an_error_in_the_users_own_code_costs_nothing() -> None:
    class Flaky(nn.Module):
        fail = True

        def forward(self, x: Tensor) -> Tensor:
            if self.fail and self.training and torch.is_grad_enabled():
                raise KeyError("lost")
            return x

    flaky = Flaky()
    run = training(network(0, flaky))
    before = run.weights()
    with pytest.raises(KeyError, match="lost"):
        run.steps(1)
    flaky.fail = False
    unharmed(run, before, network(0, nn.Identity()))  # noise goes by the names of parameters


def test_an_error_in_the_middle_of_a_backward_pass_costs_nothing() -> None:
    class Broken(torch.autograd.Function):
        fail = True

        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            if Broken.fail:
                raise ArithmeticError("overflow")
            return gradient

    class Layer(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return Broken.apply(x)

    run = training(network(0, Layer()))
    before = run.weights()
    with pytest.raises(ArithmeticError, match="overflow"):
        run.steps(1)
    Broken.fail = False
    unharmed(run, before, network(0, nn.Identity()))  # noise goes by the names of parameters


def test_a_second_try_on_the_same_batch_after_an_error() -> None:
    """Out of memory, caught, tried again: the same batch still counts once."""
    run, reference = training(), training()
    for x, y in run.loader:
        run.optimizer.zero_grad()
        with pytest.raises(RuntimeError, match="not private"):
            (F.cross_entropy(run.module(x), y) + run.module[0].weight.square().sum()).backward()
        F.cross_entropy(run.module(x), y).backward()
        run.optimizer.step()
        break
    assert run.engine.ledger.steps == 1
    assert same(run.gradients(), reference.steps(1)[0])


def test_the_published_recipe_with_adaptive_clipping_is_refused() -> None:
    """Its count has noise of its own, which the price of the weakest direction does not cover."""
    with pytest.raises(ValueError, match="cannot be priced"):
        training(mechanism="published", unsound=True, clipping="adaptive")
