"""DP-RandP: synthetic images without anybody in them, two private phases with one ledger and one budget."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from dphero.accounting import BudgetExhausted, PoissonGaussian
from dphero.guidance.prior.processes import PROCESSES
from dphero.methods import make
from dphero.methods.trainers.head import Head, features, head_of, with_head
from dphero.methods.trainers.pretraining import _Lesson, pretrain
from dphero.methods.trainers.views import _turned, view
from dphero.models import build
from tests.methods.image_task import finish, make_task, resumes_exactly, start, take

QUICK = {"pretrain_steps": 3, "pretrain_batch": 16, "probe": 0.5}


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DPHERO_DATA", str(tmp_path))
    return tmp_path / "pretrained"


# -- images and what is learned from them --------------------------------------------------------------------


@pytest.mark.parametrize("process", PROCESSES)
@pytest.mark.parametrize("shape", [(1, 8, 8), (3, 32, 20)])
def test_processes_make_varied_images(process: str, shape: tuple[int, int, int]) -> None:
    images, again = (PROCESSES[process](50, shape, torch.Generator().manual_seed(4)) for _ in range(2))
    assert images.shape == (50, *shape) and images.dtype == torch.float32
    assert torch.equal(images, again) and images.isfinite().all() and images.abs().max() <= 1
    assert (images.flatten(1).std(1) > 0.05).float().mean() > 0.9  # not plain
    assert torch.pdist(images.flatten(1)).min() > 0.1  # not alike
    right = (images[..., 1:] - images[..., :-1]).abs().mean()
    assert right < 0.8 * (images - images.roll(1, 0)).abs().mean()  # neighbours resemble one another
    seen = view(images, torch.Generator().manual_seed(1))
    assert seen.shape == (50, shape[0], shape[1] // 2, shape[2] // 2) and seen.isfinite().all()


def test_views_differ_in_colour_more_than_in_light() -> None:
    """What could be known by its colours would be: nothing else would be learned."""
    images = PROCESSES["leaves"](200, (3, 32, 32), torch.Generator().manual_seed(4))
    one, other = (view(images, torch.Generator().manual_seed(seed)).mean((2, 3)) for seed in (1, 2))
    centred = [colour - colour.mean(1, keepdim=True) for colour in (one, other)]
    alike = torch.nn.functional.cosine_similarity(*centred).nan_to_num()
    assert 0.1 < alike.mean() < 0.8
    plain = torch.full((3, 3, 8, 8), 0.5)
    assert torch.allclose(_turned(plain, torch.tensor([0.1, 0.2, 0.3])), plain, atol=1e-6)  # grey stays grey


def network(seed: int = 0) -> tuple[nn.Module, Head]:
    model = with_head(build("digits", (1, 8, 8), 10, seed=seed))
    return model, head_of(model, torch.zeros(2, 1, 8, 8))


def learn(*arguments: Any) -> None:
    shares = list(pretrain(*arguments))
    assert shares == sorted(shares) and (not shares or shares[-1] == 1.0)


def test_pretraining_learns_to_know_views() -> None:
    losses = []
    for steps in (1, 40):
        lesson = _Lesson(network()[0], (1, 8, 8), "leaves", steps, 64)
        assert len(list(lesson.run())) == steps
        losses.append(lesson.loss)
    assert losses[1] < losses[0] - 0.5


def test_what_was_learned_is_kept(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (first, head), (second, other) = (network() for _ in "ab")
    before = {name: value.clone() for name, value in first.state_dict().items()}
    learn(first, head, (1, 8, 8), "leaves", 3, 16)
    assert len(list(own_cache.glob("*.pt"))) == 1
    monkeypatch.setattr("dphero.methods.trainers.pretraining._Lesson", lambda *_: pytest.fail("it was learned before"))
    learn(second, other, (1, 8, 8), "leaves", 3, 16)
    assert all(map(torch.equal, first.state_dict().values(), second.state_dict().values()))
    assert not torch.equal(first.state_dict()["0.weight"], before["0.weight"])
    assert torch.equal(head.linear.weight, before["3.linear.weight"])  # the last layer has no part in it
    assert all(parameter.grad is None for parameter in first.parameters())


def test_a_lesson_broken_off_goes_on_where_it_was(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dphero.methods.trainers.pretraining._SAVE_SECONDS", 0.0)
    settings = ((1, 8, 8), "leaves", 70, 4)
    whole, broken = network(), network()
    learn(*whole, *settings)
    (kept,) = own_cache.glob("*.pt")
    kept.unlink()
    for share in pretrain(*broken, *settings):
        if share > 66 / 70:
            break
    assert len(list(own_cache.glob("*.half"))) == 1 and not list(own_cache.glob("*.pt"))
    again = network()
    shares = list(pretrain(*again, *settings))
    assert shares[0] == 65 / 70 and not list(own_cache.glob("*.half"))
    assert all(map(torch.equal, whole[0].state_dict().values(), again[0].state_dict().values()))


def test_another_process_that_learns_the_same_is_waited_for(own_cache: Path) -> None:
    first, second = (pretrain(*network(), (1, 8, 8), "leaves", 2, 16) for _ in "ab")
    assert next(first) == 0.5 and next(second) == 0.0 == next(second)
    assert list(first) == [1.0] and not list(second)  # what the first has learned serves the second


def test_other_settings_are_not_taken_from_the_cache(own_cache: Path) -> None:
    for seed, process, steps in ((0, "leaves", 1), (1, "leaves", 1), (0, "spectrum", 1), (0, "leaves", 2)):
        learn(*network(seed), (1, 8, 8), process, steps, 16)
    assert len(list(own_cache.glob("*.pt"))) == 4


def test_a_cache_that_cannot_be_written_is_done_without(own_cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    own_cache.write_text("in the way")
    learn(*network(), (1, 8, 8), "leaves", 1, 16)
    assert "could not be kept" in caplog.text


def test_the_last_layer_must_be_linear() -> None:
    with pytest.raises(ValueError, match="must end with a linear layer"):
        head_of(with_head(nn.Sequential(nn.Linear(4, 3), nn.Tanh())), torch.ones(2, 4))
    with pytest.raises(ValueError, match="must end with a linear layer"):
        with_head(nn.Flatten())
    without_bias = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2, bias=False))
    last = without_bias[2]
    assert head_of(with_head(without_bias), torch.ones(2, 4)).linear is last
    alone = with_head(nn.Linear(4, 3))
    assert head_of(alone, torch.ones(2, 4)) is alone and torch.equal(
        features(alone, torch.ones(2, 4)), torch.ones(2, 4)
    )


def dropping() -> nn.Module:
    layers = (nn.Flatten(), nn.Linear(64, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Dropout(0.5), nn.Linear(12, 10))
    return with_head(nn.Sequential(*layers))


def test_dropout_before_the_last_layer_is_no_other_last_layer() -> None:
    model, before = dropping(), torch.get_rng_state()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    assert head_of(model, torch.rand(2, 1, 8, 8, generator=torch.Generator())) is model[5] and model.training
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), before)


def test_what_a_network_with_dropout_learns_depends_on_no_generator_of_the_run() -> None:
    found = []
    for seed in (1, 2):
        torch.manual_seed(0)
        lesson_model = dropping()
        torch.manual_seed(seed)
        before = torch.get_rng_state()
        lesson = _Lesson(lesson_model, (1, 8, 8), "leaves", 3, 16)
        assert len(list(lesson.run())) == 3
        assert torch.equal(torch.get_rng_state(), before)
        found.append(lesson.body.state_dict())
    assert all(map(torch.equal, found[0].values(), found[1].values()))


def test_a_new_head_changes_nothing_and_a_set_one_whitens() -> None:
    model, images = build("digits", (1, 8, 8), 10), torch.rand(500, 1, 8, 8)
    outputs = model(images)
    model = with_head(model)
    head = head_of(model, images[:2])
    assert torch.allclose(model(images), outputs, atol=1e-6)
    seen = features(model, images).detach()
    seen *= torch.linspace(0, 3, seen.shape[1])  # of all sizes, and one that is always the same
    head.whiten_by(seen)
    white = head.whitened(seen)
    assert white.isfinite().all() and white.mean(0).abs().max() < 1e-3
    assert white.norm(dim=1).median().item() == pytest.approx(1.0, abs=1e-3)
    before, after = (torch.linalg.eigvalsh(torch.cov(each.T)).flip(0) for each in (seen, white))
    strong = int((before > before.mean()).sum())
    assert before[0] > 3 * before[strong - 1] and after[0] < 1.05 * after[strong - 1]


# -- the two phases ------------------------------------------------------------------------------------------


def test_both_phases_are_in_one_ledger_and_within_one_budget() -> None:
    trainer = start("dp-randp", epsilon=4.0, epochs=8, options=QUICK)
    assert trainer.steps == 24 and trainer.probe_steps == 12
    assert finish(trainer) > 0.6
    event = PoissonGaussian(512 / 1437, trainer.noise_multiplier)
    assert dict(trainer.ledger.counts) == {event: 24}
    found = trainer.statement(1e-4)
    assert 3.9 < found.price.epsilon <= 4.0 and found.price.is_bound
    assert found.price.epsilon == trainer.price(1e-4).epsilon
    with pytest.raises(BudgetExhausted):
        take(trainer, 3)


def test_the_last_layer_is_trained_alone_first_and_has_rates_of_its_own() -> None:
    trainer = start("dp-randp", noise_multiplier=1.0, epochs=2, options={**QUICK, "probe_lr": 0.25, "head_lr": 0.5})
    take(trainer, 1)
    trained = trainer.task.module
    body = trained.state_dict()["0.weight"].clone()
    assert trainer.trainer.optimizer.param_groups[0]["lr"] == 0.25
    take(trainer, 2)
    assert trainer.phase == "probe" and torch.equal(trained.state_dict()["0.weight"], body)
    take(trainer, 1)
    assert trainer.phase == "fine-tuning"
    assert [group["lr"] for group in trainer.trainer.optimizer.param_groups] == [1.0, 0.5]
    assert trainer.trainer.optimizer.param_groups[1]["params"] == list(trainer.head.linear.parameters())
    assert not torch.equal(trained.state_dict()["0.weight"], body) and trainer.step == 4


def test_what_is_released_is_a_mean_of_late_weights() -> None:
    trainer = start("dp-randp", noise_multiplier=1.0, epochs=4, options=QUICK)
    weights, expected = trainer.task.module.get_parameter("3.linear.weight"), None
    for step in range(6):
        trainer.advance()
        share = 9 / (step + 9)
        expected = weights.clone() if expected is None else expected + share * (weights - expected)
        assert torch.allclose(trainer.model.get_parameter("3.linear.weight"), expected, atol=1e-6)
    trainer.advance()  # fine-tuning begins with that mean
    assert trainer.phase == "fine-tuning" and torch.equal(trainer.model.get_parameter("3.linear.weight"), weights)


def test_runs_of_all_seeds_share_what_was_learned(own_cache: Path) -> None:
    for seed in (1, 2):
        take(start("dp-randp", noise_multiplier=1.0, epochs=2, options=QUICK, seed=seed), 1)
    assert len(list(own_cache.glob("*.pt"))) == 1


@pytest.mark.parametrize("seed", [1, None])
def test_the_phases_draw_different_noise_and_lots(seed: int | None) -> None:
    trainer = start("dp-randp", noise_multiplier=1.0, epochs=2, options=QUICK, seed=seed)
    keys = []
    for _ in range(4):
        trainer.advance()
        run = trainer.engine._run
        keys.append((run.mechanism.noise.state_dict()["key"], run.sampler.key))
    assert keys[0] == keys[2] != keys[3]
    assert not {keys[0][0], keys[0][1]} & {keys[3][0], keys[3][1]}
    assert ("seed" in trainer.statement(1e-4).text) == (seed is not None)


@pytest.mark.parametrize("before", [0, 1, 3, 4], ids=["first", "probe", "last of the probe", "fine-tuning"])
def test_resumes_exactly(before: int, tmp_path: Path) -> None:
    resumes_exactly(
        lambda: start("dp-randp", noise_multiplier=1.0, epochs=4, options={**QUICK, "head_lr": 2.0}),
        tmp_path,
        before,
        4,
    )


def test_without_a_seed_a_killed_run_repeats_its_noise(tmp_path: Path) -> None:
    first, again = (start("dp-randp", noise_multiplier=1.0, epochs=2, options=QUICK, seed=None) for _ in "ab")
    first.save(tmp_path / "checkpoint.pt", {})
    again.load(tmp_path / "checkpoint.pt")
    states = [take(trainer, 5).model.state_dict().values() for trainer in (first, again)]
    assert all(map(torch.equal, *states))


def test_without_a_seed_nobody_can_guess_the_noise() -> None:
    first, again, other, chosen = (
        start("dp-randp", noise_multiplier=1.0, options=QUICK, seed=seed).seeds for seed in (None, None, 2, 1)
    )
    assert not set(first.values()) & set(again.values()) and not set(other.values()) & set(chosen.values())
    assert all(seed > 1 << 64 for seed in first.values())


def test_a_network_that_is_not_the_recipes_is_taken_as_it_is() -> None:
    task = make_task("dp-randp", noise_multiplier=1.0, options=QUICK)
    own = with_head(nn.Sequential(nn.Flatten(), nn.Linear(64, 5), nn.Tanh(), nn.Linear(5, 10)))
    trainer = make("dp-randp", QUICK).start(replace(task, model=own, module=own))
    assert take(trainer, 1).model.get_parameter("1.weight").isfinite().all()


class Mixing(nn.Sequential):
    """Subtracts the batch's mean."""

    def __init__(self) -> None:
        super().__init__(nn.Flatten(), nn.Linear(64, 5), nn.Tanh(), nn.Linear(5, 10))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x - x.mean(0))


def begun(model: nn.Module, **options: Any) -> Any:
    """A training of a network of one's own."""
    task = make_task("dp-randp", noise_multiplier=1.0, epochs=2)
    own = with_head(model)
    return make("dp-randp", {**QUICK, **options}).start(replace(task, model=own, module=own))


@pytest.mark.parametrize("probe", [0.5, 1.0])
def test_a_network_that_mixes_examples_releases_nothing(probe: float) -> None:
    trainer = begun(Mixing(), probe=probe)
    with pytest.raises(ValueError, match="before its last layer mixes examples"):
        trainer.advance()
    assert not trainer.ledger.steps
    trainer.close()


def test_a_batch_norm_is_refused_at_the_start_unless_it_stays_as_it_is() -> None:
    layers = (nn.Flatten(), nn.Linear(64, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 10))
    with pytest.raises(ValueError, match=r"2 \(BatchNorm1d\)"):
        begun(nn.Sequential(*layers), probe=0.5)
    trainer = take(begun(nn.Sequential(*layers), probe=1.0), 1)
    norm = trainer.task.module[2]
    learned = norm.running_mean.clone()
    take(trainer, 2)
    assert learned.any() and torch.equal(norm.running_mean, learned)  # from synthetic images alone


def test_networks_with_dropout_are_trained() -> None:
    trainer = begun(nn.Sequential(nn.Flatten(), nn.Linear(64, 9), nn.ReLU(), nn.Dropout(0.5), nn.Linear(9, 10)))
    assert take(trainer, trainer.steps).phase == "fine-tuning"


def test_what_goes_wrong_between_the_phases_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = take(start("dp-randp", noise_multiplier=1.0, epochs=2, options=QUICK), 3)
    monkeypatch.setattr(trainer, "_optimizer", lambda: pytest.fail("no memory"))
    with pytest.raises(pytest.fail.Exception, match="no memory"):
        trainer.advance()
    trainer.close()
    trainer.close()


def test_secure_runs_have_no_seeds(tmp_path: Path) -> None:
    runs = [
        take(start("dp-randp", noise_multiplier=1.0, epochs=2, options=QUICK, seed=None, secure=True), 5) for _ in "ab"
    ]
    assert not torch.equal(*(run.model.state_dict()["3.linear.weight"] for run in runs))
    runs[0].save(tmp_path / "checkpoint.pt", {})
    with pytest.raises(ValueError, match="another choice of --secure"):
        start("dp-randp", noise_multiplier=1.0, epochs=2, options=QUICK).load(tmp_path / "checkpoint.pt")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "give --epsilon or --noise-multiplier"),
        ({"noise_multiplier": 1.0, "model": "scatter-linear"}, "has fixed ones"),
        ({"noise_multiplier": 1.0, "secure": True}, "takes no --seed"),
        ({"epsilon": 3.0, "accountant": "filter"}, "leave --accountant filter out"),
        ({"noise_multiplier": 1.0, "accountant": "filter"}, "leave --accountant filter out"),
    ],
)
def test_what_makes_no_sense_is_refused(settings: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        start("dp-randp", **settings)


def test_vectors_are_no_images() -> None:
    task = make_task("dp-randp", noise_multiplier=1.0)
    flat = replace(task, images=task.images.flatten(1))
    with pytest.raises(ValueError, match="no pixels"):
        make("dp-randp").start(flat)


@pytest.mark.parametrize(
    "options",
    [
        {"process": "clouds"},
        {"pretrain_steps": -1},
        {"pretrain_batch": 1},
        {"probe": 1.5},
        {"probe_lr": 0.0},
        {"head_lr": -1.0},
    ],
)
def test_bad_options(options: dict) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        make("dp-randp", options)
