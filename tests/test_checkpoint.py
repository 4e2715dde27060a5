"""A saved run goes on exactly as it would have gone on, whatever stopped it; nothing is lost or replayed."""

from __future__ import annotations

import multiprocessing
import os
import random
import resource
import signal
import socket
import stat
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from dphero import PrivacyEngine, checkpoint
from dphero.guidance import PCA, History
from tests import crash
from tests.trainer import Training, data, network, same, training

SGD, ADAM = (lambda p: torch.optim.SGD(p, lr=0.3, momentum=0.9)), (lambda p: torch.optim.AdamW(p, lr=0.05))


def cosine(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)


def milestones(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.MultiStepLR(optimizer, [3, 7], 0.5)


class Augmented(Dataset):
    """Examples with noise from torch, numpy and Python."""

    def __len__(self) -> int:
        return 60

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x, y = data()[index]
        return x + torch.randn(6) * np.random.rand() * random.random(), y


CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "momentum, cosine, isotropic": {"optimizer": SGD, "scheduler": cosine, "guidance": "isotropic"},
    "adam, milestones, dropout": {"optimizer": ADAM, "scheduler": milestones, "module": "dropout"},
    "pca every step": {"guidance": lambda: PCA(refresh_every=1), "optimizer": ADAM},
    "pca every 4 steps, ball": {"guidance": lambda: PCA(refresh_every=4, side="both"), "mechanism": "ball"},
    "pca by subspace": {"guidance": lambda: PCA(refresh_every=2, solver="subspace", components=2)},
    "history": {"guidance": lambda: History(refresh_every=3), "optimizer": SGD},
    "history, full": {"guidance": lambda: History.geoclip(refresh_every=2), "scheduler": cosine},
    "adaptive": {"clipping": "adaptive", "guidance": lambda: History(refresh_every=2)},
    "per layer, physical batches": {"clipping": "per_layer", "physical_batch_size": 5, "optimizer": ADAM},
    "adaptive, physical batches, dropout": {"clipping": "adaptive", "physical_batch_size": 4, "module": "dropout"},
    "shuffle": {"sampling": "shuffle", "optimizer": ADAM, "module": "dropout"},
    "workers and dropout": {
        "data_loader": lambda: DataLoader(data(), batch_size=12, num_workers=1),
        "module": "dropout",
    },
    "augmentation": {"data_loader": lambda: DataLoader(Augmented(), batch_size=12), "module": "dropout"},
    "published": {"mechanism": "published", "unsound": True, "guidance": lambda: PCA(floor=0.5, refresh_every=2)},
    "operating system's seed": {"seed": None},
}


def start(name: str, seed: int = 0) -> Training:
    """Begin a run of one configuration; torch's generators are those of a process that was just started."""
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)
    options = dict(CONFIGURATIONS[name])
    for option in ("guidance", "data_loader"):
        if callable(options.get(option)):
            options[option] = options[option]()
    if options.get("module") == "dropout":
        options["module"] = network(0, nn.Dropout(0.3))
    return training(engine=PrivacyEngine(accountant="rdp"), **options)  # quicker than pld


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_ten_steps_are_five_and_five(name: str, tmp_path: Path) -> None:
    """Bit by bit: every released gradient, the weights, the optimizer's state, the clip bound and the ledger."""
    path = tmp_path / "run.pt"
    whole = start(name)
    before = whole.steps(5)
    whole.engine.save(path, scheduler=whole.scheduler, extra={"epoch": 3})
    after = whole.steps(5)

    resumed = start(name, seed=99)
    with torch.no_grad():
        for parameter in resumed.module.parameters():
            parameter.add_(1.0)
    assert resumed.engine.load(path, scheduler=resumed.scheduler) == {"epoch": 3}
    assert resumed.engine.steps == 5
    again = resumed.steps(5)

    assert len(after) == len(again) == 5
    for step, other in zip(after, again, strict=True):
        assert same(step, other)
    assert same(whole.weights(), resumed.weights())
    assert str(whole.optimizer.state_dict()) == str(resumed.optimizer.state_dict())
    assert whole.engine.ledger == resumed.engine.ledger and whole.engine.ledger.steps == 10
    assert whole.engine.get_epsilon(1e-5) == resumed.engine.get_epsilon(1e-5)
    assert whole.engine._attached.mechanism.clipping.norm == resumed.engine._attached.mechanism.clipping.norm
    assert whole.engine.statement(1e-5).text == resumed.engine.statement(1e-5).text
    for early in before:
        assert not any(same(early, late) for late in again)  # no noise comes twice


def test_several_optimizers_are_saved(tmp_path: Path) -> None:
    def begin() -> tuple[Any, Any, Any, Any]:
        module = network()
        several = [torch.optim.Adam(module[0].parameters()), SGD(module[2].parameters())]
        engine = PrivacyEngine()
        _, _, loader = engine.make_private(
            module=module, optimizer=several, data_loader=DataLoader(data(), batch_size=12), noise_multiplier=1.0,
            max_grad_norm=1.0, dataset_size="public", seed=3,
        )  # fmt: skip
        return engine, module, several, loader

    def go(engine: Any, module: Any, several: Any, loader: Any) -> None:
        for x, y in loader:
            module.zero_grad()
            F.cross_entropy(module(x), y).backward()
            for optimizer in several:
                optimizer.step()

    first, second = begin(), begin()
    go(*first)
    first[0].save(tmp_path / "run.pt")
    go(*first)
    second[0].load(tmp_path / "run.pt")
    go(*second)
    assert same(dict(first[1].state_dict()), dict(second[1].state_dict()))
    assert first[0].ledger.steps == 10


# -- noise is never replayed ---------------------------------------------------------------------------------------


def nothing(out: Tensor, label: Tensor) -> Tensor:
    return (out * 0).mean()


def test_a_resumed_run_draws_noise_of_its_own(tmp_path: Path) -> None:
    first = training(guidance="isotropic")
    noise = first.steps(6, nothing)
    first.engine.save(tmp_path / "run.pt")
    second = training(guidance="isotropic", seed=None)
    second.engine.load(tmp_path / "run.pt")
    noise += second.steps(6, nothing)
    vectors = {tuple(torch.cat([value.flatten() for value in step.values()]).tolist()) for step in noise}
    assert len(vectors) == 12


def test_a_secure_run_is_not_repeated(tmp_path: Path) -> None:
    first = training(secure=True, guidance="isotropic")
    first.steps(2)
    first.engine.save(tmp_path / "run.pt")
    runs = [first]
    for _ in range(2):
        resumed = training(secure=True, guidance="isotropic")
        resumed.engine.load(tmp_path / "run.pt")
        runs.append(resumed)
    released = [run.steps(2, nothing) for run in runs]
    vectors = {tuple(step["2.bias"].tolist()) for steps in released for step in steps}
    assert len(vectors) == 6
    assert all(run.engine.ledger.steps == 4 for run in runs)
    saved = checkpoint.load(tmp_path / "run.pt").engine
    assert "key" not in saved["mechanism"]["noise"] and saved["sampler"]["key"] is None


def test_an_engine_that_has_released_is_not_set_back(tmp_path: Path) -> None:
    run = training()
    run.engine.save(tmp_path / "start.pt")
    run.steps(2)
    weights = run.weights()
    with pytest.raises(RuntimeError, match="2 releases; going back would repeat their noise"):
        run.engine.load(tmp_path / "start.pt")
    assert run.engine.ledger.steps == 2 and same(weights, run.weights())
    run.engine.detach()
    again = training(engine=run.engine, seed=8)  # nor after a first training, whose price would be forgotten
    with pytest.raises(RuntimeError, match="2 releases"):
        again.engine.load(tmp_path / "start.pt")


def test_the_clip_bound_and_its_noise_are_restored_together(tmp_path: Path) -> None:
    run = training(clipping="adaptive")
    run.steps(8)
    run.engine.save(tmp_path / "run.pt")
    resumed = training(clipping="adaptive")
    resumed.engine.load(tmp_path / "run.pt")
    bound = resumed.engine._attached.mechanism.clipping.norm
    assert bound == run.engine._attached.mechanism.clipping.norm != 1.0


# -- when to save -----------------------------------------------------------------------------------------------------


def test_a_gradient_that_waits_for_its_step_is_saved(tmp_path: Path) -> None:
    whole = training(optimizer=ADAM)
    whole.steps(2)
    for x, y in whole.loader:
        whole.optimizer.zero_grad()
        F.cross_entropy(whole.module(x), y).backward()
        break
    whole.engine.save(tmp_path / "run.pt")
    whole.optimizer.step()
    whole.steps(3)
    resumed = training(optimizer=ADAM)
    resumed.engine.load(tmp_path / "run.pt")
    resumed.optimizer.step()
    resumed.steps(3)
    assert same(whole.weights(), resumed.weights())
    resumed.engine.save(tmp_path / "later.pt")
    assert not checkpoint.load(tmp_path / "later.pt").engine["gradients"]  # after the step there is none to save


def test_a_lot_in_parts_is_not_saved(tmp_path: Path) -> None:
    run = training(physical_batch_size=2)
    batches = iter(run.loader)
    x, y = next(batches)
    F.cross_entropy(run.module(x), y).backward()
    with pytest.raises(RuntimeError, match="a lot is under way"):
        run.engine.save(tmp_path / "run.pt")
    next(batches)
    with pytest.raises(RuntimeError, match="a lot is under way"):
        run.engine.save(tmp_path / "run.pt")
    assert not list(tmp_path.iterdir())


def test_a_lot_that_was_only_looked_at_comes_again_after_resuming(tmp_path: Path) -> None:
    """A loop that stops at its top, `if step == last: break`, holds a lot that nothing was done with."""
    whole, run = training(), training()
    whole.steps(5)
    run.steps(3)
    seen = next(iter(run.loader))[0]
    run.engine.save(tmp_path / "run.pt")
    resumed = training()
    resumed.engine.load(tmp_path / "run.pt")
    assert torch.equal(next(iter(resumed.loader))[0], seen)
    resumed.steps(2)
    assert same(whole.weights(), resumed.weights())


# -- crashes ----------------------------------------------------------------------------------------------------------

PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["tests.crash"])  # so that torch is imported once


def begin(path: Path, how: str) -> Any:
    process = PROCESSES.Process(target=crash.main, args=(path, how))
    process.start()
    return process


def finish(process: Any) -> int:
    process.join(timeout=100)
    return process.exitcode


def test_kill_in_training_and_in_saving(tmp_path: Path) -> None:
    """Killed twice, in the middle of a step and in the middle of a save: the trajectory is that of the unbroken run."""
    path = tmp_path / "run.pt"
    assert finish(begin(path, "die-in-training")) == -signal.SIGKILL
    assert checkpoint.load(path).engine["next_lot"] == 4
    assert finish(begin(path, "die-in-saving")) == -signal.SIGKILL
    left = [file for file in tmp_path.iterdir() if file.name.endswith(".partial")]
    assert len(left) == 1 and left[0].stat().st_size > 0  # a checkpoint that was half written, beside the whole one
    assert checkpoint.load(path).engine["next_lot"] == 8
    assert finish(begin(path, "run")) == 0
    crash.main(tmp_path / "unbroken.pt", "run")
    found, expected = ((tmp_path / name).with_suffix(".txt").read_text() for name in ("run.pt", "unbroken.pt"))
    assert found == expected
    assert "20 releases" in found
    assert not [file for file in tmp_path.iterdir() if file.name.endswith(".partial")]


@pytest.mark.slow
@pytest.mark.parametrize("delay", [0.0, 0.01, 0.03, 0.1, 0.2])
def test_kill_at_any_time(delay: float, tmp_path: Path) -> None:
    path = tmp_path / "run.pt"
    for _ in range(3):
        process = begin(path, "slowly")
        while not path.exists() and process.is_alive():
            time.sleep(0.005)
        time.sleep(delay)
        process.kill()
        finish(process)
    assert finish(begin(path, "run")) == 0
    crash.main(tmp_path / "unbroken.pt", "run")
    assert path.with_suffix(".txt").read_text() == (tmp_path / "unbroken.txt").read_text()


def test_a_failed_save_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = training()
    path = tmp_path / "run.pt"
    run.engine.save(path)
    old = path.read_bytes()
    run.steps(1)

    def full(*args: Any) -> None:
        raise OSError("no space left")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="no space left"):
            run.engine.save(path)
    assert path.read_bytes() == old
    assert [file.name for file in tmp_path.iterdir()] == ["run.pt"]
    run.engine.save(path)
    assert path.read_bytes() != old


def test_what_the_file_system_says_is_not_hidden(tmp_path: Path) -> None:
    run = training()
    path = tmp_path / "run.pt"
    run.engine.save(path)
    old = path.read_bytes()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(old) // 2, limits[1]))  # as a full disk: half of it can be written
    try:
        with pytest.raises(OSError, match=r"File too large: '.*run\.pt'"):
            run.engine.save(path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert path.read_bytes() == old
    assert [file.name for file in tmp_path.iterdir()] == ["run.pt"]


def test_the_file_is_its_owners_alone(tmp_path: Path) -> None:
    run = training()
    run.engine.save(tmp_path / "run.pt")
    assert stat.S_IMODE((tmp_path / "run.pt").stat().st_mode) == 0o600


# -- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("extra", [{"a": object()}, {"a": [np.float64(1)]}, {"a": {"b": np.ones(2)}}, {"a": Path("x")}])
def test_what_could_not_be_loaded_is_not_saved(extra: dict[str, Any], tmp_path: Path) -> None:
    run = training()
    with pytest.raises(ValueError, match=r"extra.*could not be loaded without running code"):
        run.engine.save(tmp_path / "run.pt", extra=extra)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("make", [cosine, milestones, torch.optim.lr_scheduler.ReduceLROnPlateau])
def test_schedulers_can_be_saved(make: Any, tmp_path: Path) -> None:
    run = training(scheduler=make)
    run.engine.save(
        tmp_path / "run.pt", scheduler=run.scheduler, extra={"history": [1.0, torch.ones(2)], "n": (1, "a")}
    )
    other = training(scheduler=make)
    assert other.engine.load(tmp_path / "run.pt", scheduler=other.scheduler)["n"] == (1, "a")


def test_files_that_are_no_checkpoints(tmp_path: Path) -> None:
    run = training()
    path = tmp_path / "run.pt"
    with pytest.raises(FileNotFoundError):
        run.engine.load(path)
    run.engine.save(path)
    whole = path.read_bytes()
    for contents in (b"", b"nonsense", whole[: len(whole) // 2]):
        path.write_bytes(contents)
        with pytest.raises(ValueError, match=r"run.pt is not a readable checkpoint"):
            run.engine.load(path)
    torch.save({"version": 99}, path)
    with pytest.raises(ValueError, match="version 99 is not supported"):
        run.engine.load(path)
    torch.save([1, 2], path)
    with pytest.raises(ValueError, match="version None"):
        run.engine.load(path)


def test_damage_is_noticed_before_anything_is_believed(tmp_path: Path) -> None:
    """Bits all over the file, and every bit of the ledger; torch itself takes some of these, and prices change."""
    run, fresh = training(), training()
    run.steps(2)
    path = tmp_path / "run.pt"
    run.engine.save(path)
    whole = path.read_bytes()
    ledger = whole.index(b'"noise_multiplier": 1.0')
    places = [(ledger + i, bit) for i in range(23) for bit in range(8)]
    places += [(place, place % 8) for place in random.Random(0).sample(range(len(whole)), 200)]
    weights, random_state = fresh.weights(), torch.get_rng_state()
    for place, bit in places:
        damaged = bytearray(whole)
        damaged[place] ^= 1 << bit
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match=r"run.pt is (not a readable checkpoint|damaged)"):
            fresh.engine.load(path)
    assert fresh.engine.ledger.steps == 0 and same(weights, fresh.weights())
    assert torch.equal(random_state, torch.get_rng_state())
    path.write_bytes(whole)
    fresh.engine.load(path)
    assert same(run.weights(), fresh.weights())


def test_without_the_digest_a_flipped_bit_changes_the_price(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the digest is for: torch reads on, and the ledger says less than was spent."""
    run, fresh = training(noise_multiplier=3.0), training(noise_multiplier=3.0)
    run.steps(2)
    path = tmp_path / "run.pt"
    run.engine.save(path)
    whole = bytearray(path.read_bytes())
    whole[whole.index(b'"noise_multiplier": 3.0') + 20] ^= 1 << 2  # 3.0 becomes 7.0
    path.write_bytes(whole)
    with pytest.raises(ValueError, match="damaged"):
        fresh.engine.load(path)
    monkeypatch.setattr(checkpoint, "_is_sealed", lambda *arguments: True)
    assert '"noise_multiplier": 7.0' in checkpoint.load(path).engine["mechanism"]["ledger"]


def test_older_files_are_held_to_the_checksums_of_their_parts(tmp_path: Path) -> None:
    run = training(noise_multiplier=3.0)
    run.steps(2)
    path = tmp_path / "run.pt"
    run.engine.save(path)
    contents = torch.load(path, weights_only=True)
    torch.save({**contents, "version": 1}, path)
    whole = bytearray(path.read_bytes())
    training(noise_multiplier=3.0).engine.load(path)
    whole[whole.index(b'"noise_multiplier": 3.0') + 20] ^= 1 << 2
    path.write_bytes(whole)
    with pytest.raises(ValueError, match=r"damaged: the checksum of its part '.*data.pkl' is wrong"):
        training(noise_multiplier=3.0).engine.load(path)
    torch.save(contents, path)
    with pytest.raises(ValueError, match="the digest that was written with it is gone"):
        training(noise_multiplier=3.0).engine.load(path)


OTHERS: dict[str, tuple[dict[str, Any], str]] = {
    "sigma": ({"noise_multiplier": 1.1}, "noise multiplier 1.0, this engine has 1.1"),
    "mechanism": ({"mechanism": "ball"}, "mechanism 'ellipsoid', this engine has 'ball'"),
    "bound": ({"max_grad_norm": 2.0}, "max_grad_norm 1.0, this engine has 2.0"),
    "clipping": ({"clipping": "adaptive"}, "kind 'flat', this engine has 'adaptive'"),
    "rate": ({"sample_rate": 0.1, "dataset_size": None}, "sample_rate: saved 0.2, here 0.1"),
    "sampling": ({"sampling": "shuffle", "dataset_size": None}, "disagree on"),
    "secure": ({"secure": True}, "FastNoise.*SecureNoise"),
    "guidance": ({"guidance": PCA(exponent=1.0)}, "other settings .*exponent: saved 0.25, here 1.0"),
    "loss": ({"loss_reduction": "sum"}, "loss_reduction='mean'"),
    "model": (
        {"module": lambda: network(0, nn.Linear(8, 8))},
        "another model: 2.bias, 2.weight, 3.bias, 3.weight differ",
    ),
    "optimizer's class": ({"optimizer": torch.optim.Adam}, "made with SGD, this engine has Adam"),
    "lot": (
        {"sample_rate": 0.2, "expected_batch_size": 24, "dataset_size": None},
        "expected_batch_size=12, this engine has 24",
    ),
    "optimizer": (
        {"optimizer": lambda p: torch.optim.SGD([{"params": [q]} for q in p], lr=0.1)},
        r"groups of \[4\] parameters, this engine has 1 over groups of \[1, 1, 1, 1\]",
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_another_run_is_refused_and_nothing_is_changed(name: str, tmp_path: Path) -> None:
    saved = training()
    saved.steps(3)
    saved.engine.save(tmp_path / "run.pt")
    options, match = OTHERS[name]
    other, twin = ({**options, "module": options["module"]()} if "module" in options else options for _ in range(2))
    other, twin = training(**other), training(**twin)
    weights, random_state = other.weights(), torch.get_rng_state()
    with pytest.raises(ValueError, match=match):
        other.engine.load(tmp_path / "run.pt")
    assert other.engine.steps == 0 and other.engine.ledger.steps == 0 and other.loader.lots.next == 0
    assert same(weights, other.weights()) and torch.equal(random_state, torch.get_rng_state())
    assert other.optimizer.state_dict() == twin.optimizer.state_dict()
    if name not in ("secure", "loss", "model"):
        assert same(other.steps(1)[0], twin.steps(1)[0])  # it trains as if nothing had happened
        assert other.engine.ledger.steps == 1


def published(limit: float | None = None) -> Training:
    run = training(
        mechanism="published",
        unsound=True,
        noise_multiplier=20.0,
        guidance=PCA(exponent=0.25, floor=0.5, refresh_every=9),
    )
    if limit is not None:
        run.engine.limit(limit, 1e-5)
    return run


def test_a_filter_is_not_chosen_after_the_first_release_by_resuming(tmp_path: Path) -> None:
    """Its size is a promise only if it was fixed before anything came out."""
    path = tmp_path / "run.pt"
    for saved, limit in ((None, 8.0), (8.0, 9.0), (8.0, None)):
        run = published(saved)
        run.steps(1)
        run.engine.save(path)
        with pytest.raises(ValueError, match="fixed before the first release of a run"):
            published(limit).engine.load(path)
        resumed = published(saved)
        resumed.engine.load(path)
        resumed.steps(1)
        assert resumed.engine.statement(1e-5).price.is_bound == (saved is not None)
    run = published()
    run.steps(1)
    run.engine.detach()
    again = training(run.module, engine=run.engine, mechanism="published", unsound=True, seed=8)
    with pytest.raises(RuntimeError, match="before the first step of this engine"):
        again.engine.limit(8.0, 1e-5)


def test_notes_and_used_seeds_go_with_the_ledger(tmp_path: Path) -> None:
    path = tmp_path / "run.pt"
    run = training(seed=5)
    run.steps(1)
    run.engine.detach()
    run = training(run.module, engine=run.engine, seed=None)
    run.steps(1)
    run.engine.save(path)
    state = checkpoint.load(path).engine
    assert state["used_keys"] and state["mechanism"]["noise"]["key"] not in state["used_keys"]
    resumed = training(seed=None)
    resumed.engine.load(path)
    assert resumed.engine.ledger.steps == 2
    assert "seed was chosen" in resumed.engine.statement(1e-5).text
    resumed.engine.detach()
    with pytest.raises(ValueError, match="seed 5 already: the same noise"):
        training(resumed.module, engine=resumed.engine, seed=5)


NEW_KEYS = ("notes", "used_keys", "filter", "optimizer_classes", "expected_batch_size", "data", "budget")


def test_checkpoints_from_before_some_things_were_saved_still_load(tmp_path: Path) -> None:
    path = tmp_path / "run.pt"
    run = training(seed=5)
    run.steps(2)
    run.engine.save(path)
    contents = torch.load(path, weights_only=True)
    contents["version"] = 1  # before there were digests
    for name in NEW_KEYS:
        del contents["engine"][name]
    torch.save(contents, path)
    resumed = training(seed=6)
    resumed.engine.load(path)
    assert same(run.steps(1)[0], resumed.steps(1)[0])
    resumed.engine.detach()
    with pytest.raises(ValueError, match="seed 5 already"):  # the seed of the saved run is known by its key
        training(resumed.module, engine=resumed.engine, seed=5)


def test_a_scheduler_is_saved_and_loaded_or_neither(tmp_path: Path) -> None:
    run = training(scheduler=cosine)
    run.engine.save(tmp_path / "with.pt", scheduler=run.scheduler)
    run.engine.save(tmp_path / "without.pt")
    with pytest.raises(ValueError, match="saved with a scheduler"):
        run.engine.load(tmp_path / "with.pt")
    with pytest.raises(ValueError, match="saved without a scheduler"):
        run.engine.load(tmp_path / "without.pt", scheduler=run.scheduler)


def test_a_file_in_use_by_a_living_process_is_left_alone(tmp_path: Path) -> None:
    run = training()
    alive = tmp_path / f".run.pt.{socket.gethostname()}.{os.getppid()}.partial"
    foreign = tmp_path / ".run.pt.elsewhere.999999.partial"
    dead = tmp_path / f".run.pt.{socket.gethostname()}.99999999.partial"
    for file in (alive, foreign, dead):
        file.write_text("half")
    run.engine.save(tmp_path / "run.pt")
    assert alive.exists() and foreign.exists() and not dead.exists()


# -- contradictions, other data, and loading that fails half-way ------------------------------------------------------


def changed(contents: dict[str, Any], *way: str, to: Any) -> None:
    """Change one value of a state."""
    for name in way[:-1]:
        contents = contents[name]
    contents[way[-1]] = to(contents[way[-1]]) if callable(to) else to


CONTRADICTIONS: dict[str, tuple[tuple[str, ...], Any, str]] = {
    "releases": (("mechanism", "releases"), 2, "contradicts itself"),
    "next lot": (("next_lot",), 4, "contradicts itself"),
    "last noise": (("mechanism", "noise", "last_release"), 5, "contradicts itself"),
    "renewed": (("mechanism", "renewed_at"), 9, "contradicts itself"),
    "ledger's length": (("mechanism", "ledger"), lambda text: text.replace('"count": 3', '"count": 2'), "has 2"),
    "ledger's sigma": (("mechanism", "ledger"), lambda text: text.replace(": 1.0", ": 7.0"), "holds .*noise_mult.*7"),
    "ledger's rate": (("mechanism", "ledger"), lambda text: text.replace(": 0.2", ": 0.1"), "holds .*rate=0.1"),
    "weights": (("module", "0.weight"), lambda weight: weight * float("nan"), "'0.weight' .* is not finite"),
    "waiting": (("waiting",), [3], "speaks of optimizers"),
    "gradients": (("gradients",), {"0.weight": torch.ones(2)}, "gradient of '0.weight'"),
}


@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_parts_that_contradict_each_other_are_refused_and_nothing_is_changed(name: str, tmp_path: Path) -> None:
    """Also in a file whose digest is right."""
    run, fresh, twin = training(), training(), training()
    run.steps(3)
    run.engine.save(tmp_path / "run.pt")
    contents = checkpoint.load(tmp_path / "run.pt")
    way, value, match = CONTRADICTIONS[name]
    changed(contents.engine, *way, to=value)
    checkpoint.save(tmp_path / "run.pt", contents.engine, None, None)
    weights, random_state = fresh.weights(), torch.get_rng_state()
    with pytest.raises(ValueError, match=match):
        fresh.engine.load(tmp_path / "run.pt")
    assert same(weights, fresh.weights()) and torch.equal(random_state, torch.get_rng_state())
    assert fresh.engine.ledger.steps == 0
    assert same(fresh.steps(1)[0], twin.steps(1)[0])


def failing_at(part: str, run: Training, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have one part of a run fail when it is loaded, after it has changed."""
    owner = {"optimizer": run.optimizer, "scheduler": run.scheduler, "module": run.module}[part]
    load, calls = owner.load_state_dict, []

    def fail(state: Any) -> None:
        load(state)
        calls.append(state)
        if len(calls) == 1:
            raise KeyError("something is missing")

    monkeypatch.setattr(owner, "load_state_dict", fail)


@pytest.mark.parametrize("part", ["scheduler", "optimizer", "module"])
def test_what_fails_half_way_leaves_everything_as_it_was(
    part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run, fresh, twin = (training(optimizer=SGD, scheduler=cosine) for _ in range(3))
    run.steps(3)
    run.engine.save(tmp_path / "run.pt", scheduler=run.scheduler)
    failing_at(part, fresh, monkeypatch)
    torch.manual_seed(5)
    weights, random_state, schedule = fresh.weights(), torch.get_rng_state(), str(fresh.scheduler.state_dict())
    with pytest.raises(KeyError):
        fresh.engine.load(tmp_path / "run.pt", scheduler=fresh.scheduler)
    assert same(weights, fresh.weights()) and torch.equal(random_state, torch.get_rng_state())
    assert str(fresh.scheduler.state_dict()) == schedule
    assert str(fresh.optimizer.state_dict()) == str(twin.optimizer.state_dict())
    assert fresh.engine.ledger.steps == 0 and fresh.loader.lots.next == 0 and "went back" not in caplog.text
    assert same(fresh.steps(1)[0], twin.steps(1)[0])


class Pictures(Dataset):
    """Records that may be flipped at random, with the generator that the name says."""

    def __init__(self, size: int = 60, chance: float = 0.0, shift: float = 0.0) -> None:
        self.records, self.chance, self.shift = data(size), chance, shift

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, index: int) -> dict[str, Any]:
        x, y = self.records[index]
        if self.chance and torch.rand(()) < self.chance:
            x = x.flip(0)
        return {"x": x + self.shift, "y": y, "name": f"record {index}"}


OTHER_DATA: dict[str, tuple[Any, Any, str]] = {
    "number": (data(), data(61), "their number differs"),
    "values": (data(), data(60, seed=1), "8 of 8 records"),
    "types": (data(), torch.utils.data.TensorDataset(data().tensors[0].double(), data().tensors[1]), "number or type"),
    "own class": (Pictures(), Pictures(shift=0.5), "8 of 8 records"),
    "order": (data(), torch.utils.data.Subset(data(), list(range(59, -1, -1))), "8 of 8 records"),
}


def with_data(dataset: Any) -> Training:
    return training(data_loader=dataset, expected_batch_size=12, dataset_size=60)


@pytest.mark.parametrize("name", OTHER_DATA)
def test_other_data_are_refused(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second, match = OTHER_DATA[name]
    with_data(first).engine.save(tmp_path / "run.pt")
    with_data(first).engine.load(tmp_path / "run.pt")
    other = with_data(second)
    with pytest.raises(ValueError, match=f"other data .*{match}"):
        other.engine.load(tmp_path / "run.pt")
    monkeypatch.setattr("dphero.engine.privacy_engine.require_same_data", lambda *arguments: None)
    other.engine.load(tmp_path / "run.pt")  # without the guard


@pytest.mark.parametrize("chance", [0.1, 0.5, 1.0])
def test_random_augmentation_is_no_other_data(chance: float, tmp_path: Path) -> None:
    for trial in range(5):
        torch.manual_seed(trial)
        with_data(Pictures(chance=chance)).engine.save(tmp_path / "run.pt")
        torch.manual_seed(100 + trial)
        with_data(Pictures(chance=chance)).engine.load(tmp_path / "run.pt")


def test_looking_at_the_data_moves_no_generator_and_reveals_no_number(tmp_path: Path) -> None:
    torch.manual_seed(3)
    run = with_data(Pictures(chance=0.5))
    states = torch.get_rng_state(), str(np.random.get_state()), random.getstate()
    run.engine.save(tmp_path / "run.pt")
    assert torch.equal(states[0], torch.get_rng_state())
    assert states[1:] == (str(np.random.get_state()), random.getstate())
    described = checkpoint.load(tmp_path / "run.pt").engine["data"]
    run.engine.save(tmp_path / "again.pt")
    assert checkpoint.load(tmp_path / "again.pt").engine["data"] == described  # looked at once
    other = with_data(Pictures(chance=0.5))
    other.engine.save(tmp_path / "other.pt")
    assert checkpoint.load(tmp_path / "other.pt").engine["data"]["records"] != described["records"]  # another salt
