"""Label privacy: the law of the randomised labels, their price, that each is let out once, and what is protected."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from dp_accounting.pld.privacy_loss_distribution import from_randomized_response
from scipy.stats import chisquare

from dphero.accounting import Ledger, PoissonGaussian, RandomisedLabels, UnpriceableError, price, statement
from dphero.methods import make
from dphero.methods.own_mechanism.label_dp import LabelRandomiser, response
from tests.methods import image_task
from tests.methods.image_task import digits, finish, resumes_exactly, start, take, weights


def priors(count: int, classes: int, sharpness: float) -> torch.Tensor:
    generator = torch.Generator().manual_seed(classes)
    return (sharpness * torch.randn(count, classes, generator=generator, dtype=torch.float64)).softmax(1)


def all_labels(prior: torch.Tensor, epsilon: float) -> torch.Tensor:
    """Probabilities [label, example, outcome]."""
    classes = prior.shape[1]
    return torch.stack([response(torch.full((len(prior),), label), prior, epsilon) for label in range(classes)])


# -- the law -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("epsilon", [0.1, 1.0, 4.0])
@pytest.mark.parametrize("classes", [2, 10])
@pytest.mark.parametrize("sharpness", [0.0, 1.0, 20.0])
def test_no_two_labels_can_be_told_apart_by_more_than_epsilon(epsilon: float, classes: int, sharpness: float) -> None:
    found = all_labels(priors(200, classes, sharpness), epsilon)
    assert torch.allclose(found.sum(2), torch.ones(()).double(), atol=1e-12)
    largest, smallest = found.max(0).values, found.min(0).values
    assert (largest <= math.exp(epsilon) * smallest * (1 + 1e-12)).all()
    if sharpness == 0.0:  # randomised response uses all of it
        assert torch.allclose(largest, math.exp(epsilon) * smallest)


@pytest.mark.parametrize("epsilon", [0.5, 3.0])
def test_a_flat_prior_is_plain_randomised_response(epsilon: float) -> None:
    found = response(torch.arange(10), torch.full((10, 10), 0.1, dtype=torch.float64), epsilon)
    kept = math.exp(epsilon) / (math.exp(epsilon) + 9)
    expected = torch.full((10, 10), (1 - kept) / 9, dtype=torch.float64).fill_diagonal_(kept)
    assert torch.allclose(found, expected)


@pytest.mark.parametrize("sharpness", [0.3, 1.5, 6.0])
@pytest.mark.parametrize("epsilon", [0.3, 2.0])
def test_the_number_of_outcomes_is_the_best_from_one_on(epsilon: float, sharpness: float) -> None:
    classes = 6
    prior = priors(300, classes, sharpness)
    found = all_labels(prior, epsilon)
    right = torch.einsum("nk,knk->n", prior, found)
    ordered = prior.sort(1, descending=True).values
    by_size = [ordered[:, :k].sum(1) * math.exp(epsilon) / (math.exp(epsilon) + k - 1) for k in range(1, classes + 1)]
    assert torch.allclose(right, torch.stack(by_size).max(0).values)
    sizes = (found[0] > 0).sum(1)
    assert sharpness < 6 or (sizes == 1).any()  # one outcome, chosen by the prior alone, is allowed
    assert sharpness > 0.3 or (sizes > 1).any()


@pytest.mark.parametrize("key", [5, None], ids=["keyed", "secure"])
def test_labels_come_out_with_these_probabilities(key: int | None) -> None:
    count, epsilon = 60_000, 1.0
    prior = torch.tensor([[0.5, 0.3, 0.15, 0.05]], dtype=torch.float64).expand(count, 4)
    labels = torch.full((count,), 1)
    randomiser = LabelRandomiser(labels, epsilon, key)
    found = np.bincount(randomiser.release(0, torch.arange(count), prior, Ledger()).numpy(), minlength=4)

    def fits(strength: float) -> bool:
        expected = response(labels[:1], prior[:1], strength)[0].numpy() * count
        possible = expected > 0
        assert not found[~possible].any()
        return chisquare(found[possible], expected[possible]).pvalue > 1e-4

    assert fits(epsilon)
    assert not fits(1.1 * epsilon) and not fits(0.9 * epsilon)  # the test has power


# -- the price -----------------------------------------------------------------------------------------------


def labels_ledger(*events: tuple[float, int]) -> Ledger:
    ledger = Ledger()
    for epsilon, part in events:
        ledger.record(RandomisedLabels(epsilon, part))
    return ledger


def test_disjoint_parts_cost_the_dearest_and_one_part_twice_costs_the_sum() -> None:
    assert price(labels_ledger((2.0, 0), (2.0, 1), (1.0, 2)), 1e-5, "pure").epsilon == 2.0
    assert price(labels_ledger((2.0, 0), (1.5, 0), (3.0, 1)), 1e-5, "pure").epsilon == 3.5
    found = price(labels_ledger((2.0, 0)), 1e-9, "pure")
    assert found.is_bound and found.relation == "replace_label"


@pytest.mark.parametrize("epsilon", [0.2, 1.0, 3.0])
def test_the_curves_are_those_of_randomised_response(epsilon: float) -> None:
    ledger, event = labels_ledger((epsilon, 0)), RandomisedLabels(epsilon, 0)
    both = from_randomized_response(2 / (1 + math.exp(epsilon)), 2)
    assert both.get_epsilon_for_delta(0) == pytest.approx(epsilon, abs=1e-3)
    assert price(ledger, 1e-5).epsilon == pytest.approx(both.get_epsilon_for_delta(1e-5), abs=2e-4)
    kept = 1 / (1 + math.exp(-epsilon))
    p = np.array([kept, 1 - kept])
    orders = (1.5, 2.0, 8.0, 64.0)
    found = event.rdp(orders)
    assert found is not None
    for order, divergence in zip(orders, found, strict=True):
        assert divergence == pytest.approx(np.log((p**order * p[::-1] ** (1 - order)).sum()) / (order - 1))
        assert divergence <= min(epsilon, order * event.zcdp()) + 1e-12
        many = response(torch.arange(2), torch.full((2, 10), 0.1, dtype=torch.float64), epsilon).numpy()
        terms = order * np.log(many[0]) + (1 - order) * np.log(many[1])
        assert np.logaddexp.reduce(terms) / (order - 1) <= divergence + 1e-12  # more answers tell no more
    assert price(ledger, 1e-5, "rdp").epsilon <= epsilon + 0.02  # orders end at 1024


def test_a_ledger_of_labels_is_its_own_kind() -> None:
    ledger = labels_ledger((2.0, 0))
    assert Ledger.from_json(ledger.to_json()) == ledger
    with pytest.raises(ValueError, match="replace_label"):
        ledger.record(PoissonGaussian(0.1, 1.0))
    gaussian = Ledger()
    gaussian.record(PoissonGaussian(0.1, 1.0))
    with pytest.raises(UnpriceableError, match="no epsilon at delta 0"):
        price(gaussian, 1e-5, "pure")
    text = statement(ledger, 1e-5, unit="one label", accountant="pure").text
    assert "with one label exchanged for any other, all inputs the same (replace_label)" in text


def test_each_part_is_released_once() -> None:
    randomiser, ledger = LabelRandomiser(torch.arange(4), 1.0, 3), Ledger()
    flat = torch.full((2, 4), 0.25)
    randomiser.release(0, torch.tensor([0, 1]), flat, ledger)
    with pytest.raises(AssertionError, match="once"):
        randomiser.release(0, torch.tensor([2, 3]), flat, ledger)
    assert ledger == labels_ledger((1.0, 0))


# -- the training --------------------------------------------------------------------------------------------


def test_trains_in_stages_and_says_what_is_protected() -> None:
    trainer = start("label-dp", epsilon=3.0, epochs=8)
    assert finish(trainer) > 0.75
    assert dict(trainer.ledger.counts) == {RandomisedLabels(3.0, 0): 1, RandomisedLabels(3.0, 1): 1}
    made = trainer.statement(1e-4)
    assert made.price.epsilon == 3.0 and made.price.is_bound and made.price.accountant == "pure"
    assert "Protected unit: the label of one training example." in made.text
    assert "Only labels are protected" in made.text and "seed" in made.text
    assert (trainer.noisy >= 0).all() and (trainer.noisy != digits().train.labels).any()
    assert sorted(trainer.members.tolist()) == list(range(1437))


def test_one_label_decides_only_its_own_outcome() -> None:
    """What training sees of the labels is the randomised ones, and another label changes one of them at most."""
    outcomes = []
    for shift in (0, 1):
        task = image_task.make_task("label-dp", epsilon=1.0, options={"stages": 1})
        task.train.tensors[1][7] = (task.train.tensors[1][7] + shift) % 10
        outcomes.append(take(make("label-dp", {"stages": 1}).start(task), 1).noisy)
    differ = (outcomes[0] != outcomes[1]).nonzero().flatten().tolist()
    assert differ in ([], [7])


def test_training_sees_nothing_but_randomised_labels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the true labels are: the same randomised ones give the same weights."""
    monkeypatch.setattr(LabelRandomiser, "release", lambda self, part, index, prior, ledger: (index + part) % 10)
    models = []
    for shift in (0, 3):
        task = image_task.make_task("label-dp", epsilon=1.0, epochs=0.3, options={"keep_top": 2, "mixup": 1.0})
        task.train.tensors[1].add_(shift).remainder_(10)
        trainer = make("label-dp", task.recipe.options).start(task)
        models.append(weights(take(trainer, trainer.steps)))
    assert torch.equal(*models)


def test_earlier_examples_with_unlikely_labels_can_be_left_out() -> None:
    trainer = start("label-dp", epsilon=1.0, epochs=2, options={"keep_top": 2})
    take(trainer, trainer.starts[1] + 1)
    first = round(0.6 * 1437)
    assert 1437 - first < len(trainer.members) < 1437
    assert set(trainer.order[first:].tolist()) <= set(trainer.members.tolist())


@pytest.mark.parametrize("before", [0, 12, 14, 16], ids=["first", "last of stage 0", "begin of stage 1", "stage 1"])
def test_resumes_exactly(before: int, tmp_path: Path) -> None:
    def begin():
        trainer = start("label-dp", epsilon=2.0, epochs=1, options={"keep_top": 3, "mixup": 4.0})
        assert trainer.starts == [0, 13, 35]
        return trainer

    resumes_exactly(begin, tmp_path, before, 4)


def test_secure_labels_are_drawn_from_the_system() -> None:
    runs = [take(start("label-dp", epsilon=1.0, secure=True, seed=None), 1) for _ in range(2)]
    assert not torch.equal(runs[0].noisy, runs[1].noisy)
    assert all(run.randomiser.key is None for run in runs)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"noise_multiplier": 1.0}, "has no noise multiplier: give --epsilon"),
        ({"epsilon": 1.0, "guidance": "pca"}, "leave out --guidance pca"),
        ({"epsilon": 1.0, "secure": True}, "takes no --seed"),
        ({"epsilon": 34.5}, "above 34 a label changes so seldom"),
        ({"epsilon": 1.0, "accountant": "rdp"}, "priced by pure, not by accountant 'rdp'"),
        ({"epsilon": 1.0, "accountant": "bogus"}, "priced by pure, not by accountant 'bogus'"),
        ({"epsilon": 1.0, "options": {"stages": 2000}}, "too few for 2000 stages"),
    ],
)
def test_what_makes_no_sense_is_refused(settings: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        start("label-dp", **settings)


@pytest.mark.parametrize(
    "options",
    [{"stages": 0}, {"first_share": 1.0}, {"temperature": 0.0}, {"mixup": -1.0}, {"keep_top": 1.5}, {"share": 0.5}],
)
def test_bad_options(options: dict) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        make("label-dp", options)
