"""Runs: what they keep, how they resume, what they refuse."""

import errno
import json
import math
import resource
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import fields
from itertools import pairwise

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from dphero import methods
from dphero.accounting import Ledger, price
from dphero.data import load as load_data
from dphero.experiments import Interrupted, RunDirectory, prepare, resolve, train
from dphero.experiments.runs import training as loop
from dphero.experiments.runs.files import to_json
from dphero.experiments.stopping import stoppable

pytest.importorskip("sklearn")

SETTINGS = {"data": "digits", "noise_multiplier": 3.0, "epochs": 4, "seed": 0}


def begin(path, **settings):
    return RunDirectory.create(path, resolve({**SETTINGS, **settings}))


def weights(directory):
    return load_file(directory.path / "model.safetensors")


def same(first, second):
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    directory = begin(tmp_path_factory.mktemp("unbroken") / "run")
    train(directory)
    return directory


def test_a_run_directory_tells_the_whole_story(unbroken):
    result, path = unbroken.result, unbroken.path
    assert result["steps"] == 12 and result["method"] == "dp-hero"
    ledger = Ledger.from_json((path / "ledger.json").read_text())
    assert ledger.steps == 12
    assert price(ledger, result["delta"]).epsilon == result["epsilon"]
    assert "one training example" in (path / "statement.txt").read_text()
    assert json.loads((path / "statement.json").read_text())["epsilon"] == result["epsilon"]
    metrics = unbroken.metrics
    assert [line["step"] for line in metrics] == [3, 6, 9, 12]
    assert metrics[-1]["accuracy"] == result["accuracy"]
    assert all(first["epsilon"] < then["epsilon"] for first, then in pairwise(metrics))
    environment = json.loads((path / "environment.json").read_text())
    assert environment["packages"]["torch"].split("+")[0] == torch.__version__.split("+")[0]  # not all name their CUDA
    assert (path / "checkpoint.pt").stat().st_mode & 0o077 == 0  # it holds the key of the noise
    assert list((path / "tensorboard").iterdir())


def test_what_is_private_is_its_owners_alone_and_what_may_be_published_is_not(unbroken, tmp_path):
    (tmp_path / "usual").touch()
    usual = (tmp_path / "usual").stat().st_mode  # as the umask has it
    for name in ("checkpoint.pt", "metrics.jsonl", "result.json", "recipe.toml", "tensorboard"):
        assert (unbroken.path / name).stat().st_mode & 0o077 == 0, name
    public = ("model.safetensors", "model.json", "statement.txt", "statement.json", "ledger.json", "environment.json")
    for name in public:
        assert (unbroken.path / name).stat().st_mode == usual, name


def test_weights_that_cannot_be_written_are_an_error_of_the_disk(tmp_path):
    directory = begin(tmp_path / "run")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))  # as a full disk
    try:
        with pytest.raises(OSError, match="weights cannot be written"):
            directory.save_model(torch.nn.Linear(100, 100))
        with pytest.raises(OSError, match=r"File too large: '.*result\.json'"):
            directory.finish({"accuracy": "?" * 2000})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not list(directory.path.glob("*model*"))


def test_the_recipe_of_a_run_repeats_it(unbroken, tmp_path):
    again = RunDirectory.create(tmp_path / "again", RunDirectory.open(unbroken.path).recipe)
    train(again)
    assert same(weights(again), weights(unbroken))


def test_a_finished_run_is_not_touched(unbroken, monkeypatch):
    monkeypatch.setattr(loop, "prepare", lambda *_: pytest.fail("trained again"))
    assert train(unbroken) == unbroken.result


@pytest.mark.parametrize("left", ["ledger.json", "model.safetensors", "statement.json", "metrics.jsonl"])
def test_a_run_that_lost_its_checkpoint_is_not_trained_anew(left, unbroken, tmp_path, monkeypatch):
    monkeypatch.setattr(loop, "prepare", lambda *_: pytest.fail("trained anew"))
    directory = begin(tmp_path / "run")
    shutil.copy(unbroken.path / left, directory.path)
    releases = 12 if left == "ledger.json" else 0
    words = rf"\({releases} releases are on record\), but the checkpoint with their key is gone.* another --out"
    with pytest.raises(ValueError, match=words):
        train(RunDirectory.open(directory.path))
    with pytest.raises(ValueError, match=words):  # the advice is not to resume, which would be refused
        begin(directory.path)


def test_a_crash_before_the_first_checkpoint_loses_nothing(unbroken, tmp_path):
    directory = begin(tmp_path / "run")
    directory.save_ledger(Ledger())  # as far as it came: the ledger is written first
    train(RunDirectory.open(directory.path))
    assert same(weights(directory), weights(unbroken))


def test_a_finished_run_may_be_moved(unbroken, tmp_path, monkeypatch):
    shutil.copytree(unbroken.path, tmp_path / "elsewhere")
    monkeypatch.chdir(tmp_path)
    assert RunDirectory.open("elsewhere").result["run"] == "elsewhere"
    assert train(RunDirectory.open("elsewhere")) == {**unbroken.result, "run": "elsewhere"}


def test_what_writes_the_weights_is_needed_before_anything_is_spent(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    directory, seen = begin(tmp_path / "run"), []
    with pytest.raises(ImportError, match="safetensors"):
        train(directory, report=seen.append)
    assert not seen and not (directory.path / "ledger.json").exists()


def test_an_interrupted_run_goes_on_as_if_nothing_had_happened(unbroken, tmp_path):
    directory = begin(tmp_path / "run")

    def interrupt(progress):
        if progress.step == 5:
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(Interrupted, match="step 5"):
        train(directory, report=interrupt)
    assert directory.result is None
    assert Ledger.from_json((directory.path / "ledger.json").read_text()).steps == 5
    train(RunDirectory.open(directory.path))
    assert same(weights(directory), weights(unbroken))
    assert directory.result["epsilon"] == unbroken.result["epsilon"]
    assert [line["step"] for line in directory.metrics] == [3, 6, 9, 12]


def test_what_comes_before_the_first_step_is_seen_and_can_be_stopped(tmp_path, monkeypatch):
    monkeypatch.setenv("DPHERO_DATA", str(tmp_path))
    options = {"pretrain_steps": 4, "pretrain_batch": 8, "probe": 0.5}
    recipe = resolve({"data": "digits", "method": "dp-randp", "noise_multiplier": 1.0, "epochs": 1, "options": options})
    directory, seen = RunDirectory.create(tmp_path / "run", recipe), []

    def interrupt(progress):
        seen.append((progress.step, progress.prepared))
        if progress.prepared == 0.5:
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(Interrupted, match="before the first step"):
        train(directory, report=interrupt)
    assert seen == [(0, 0.25), (0, 0.5)]
    seen.clear()
    train(RunDirectory.open(directory.path), report=lambda progress: seen.append((progress.step, progress.prepared)))
    assert seen[:5] == [(0, 0.25), (0, 0.5), (0, 0.75), (0, 1.0), (1, None)] and directory.result["steps"] == 3


def test_evaluations_after_the_checkpoint_are_forgotten(tmp_path):
    directory = begin(tmp_path / "run")
    for step in (3, 6, 9):
        directory.add_metrics({"step": step})
    with open(directory.path / "metrics.jsonl", "a") as file:
        file.write('{"step": 1')  # a line that a crash cut short
    with open(directory.path / "metrics.jsonl", "ab") as file:
        file.write(b"\xff\xfe\0")  # what some file systems make of one
    directory.forget_metrics_after(6)
    assert [line["step"] for line in directory.metrics] == [3, 6]


KILLED = """
import sys, time
from dphero.experiments import RunDirectory, train
directory = RunDirectory.open(sys.argv[1])
train(directory, save_seconds=0.0, report=lambda progress: time.sleep(0.05))
"""


def test_kill_9_loses_nothing_and_trains_nothing_twice(unbroken, tmp_path):
    directory = begin(tmp_path / "run")
    process = subprocess.Popen([sys.executable, "-c", KILLED, str(directory.path)])
    while not directory.metrics:
        assert process.poll() is None
        time.sleep(0.01)
    process.kill()
    process.wait()
    assert directory.result is None
    seen = []
    train(directory, report=lambda progress: seen.append(progress.step))
    assert seen[0] > 1  # it went on; it did not begin again
    assert same(weights(directory), weights(unbroken))
    assert directory.result["epsilon"] == unbroken.result["epsilon"]
    assert Ledger.from_json((directory.path / "ledger.json").read_text()).steps == 12


def test_without_a_seed_a_killed_run_repeats_its_own_noise(tmp_path):
    directory = begin(tmp_path / "run", seed=None)
    first = {}

    def remember(progress):
        first[progress.step] = progress.loss
        if progress.step == 2:
            raise MemoryError  # nothing is saved on the way out

    with pytest.raises(MemoryError):
        train(directory, report=remember)
    again = {}
    train(directory, report=lambda progress: again.setdefault(progress.step, progress.loss))
    assert again[1] == first[1]


def test_two_processes_cannot_train_one_run(tmp_path):
    directory = begin(tmp_path / "run")
    with directory.locked(), pytest.raises(ValueError, match="another process"):
        train(RunDirectory.open(directory.path))


def test_a_full_disk_leaves_the_last_checkpoint_whole(unbroken, tmp_path, monkeypatch):
    directory = begin(tmp_path / "run")
    save = torch.save

    def full(contents, file):
        if contents["engine"]["mechanism"]["releases"] >= 3:
            file.write(b"half of it")
            raise OSError(errno.ENOSPC, "No space left on device")
        save(contents, file)

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(OSError, match="No space"):
        train(directory, save_seconds=0.0)
    monkeypatch.undo()
    assert not list(directory.path.glob(".checkpoint*"))
    train(directory)
    assert same(weights(directory), weights(unbroken))


@pytest.mark.parametrize("method", ["sgd", "dp-sgd"])
def test_other_methods_resume_too(method, tmp_path):
    whole = begin(tmp_path / "whole", method=method)
    train(whole)
    parts = begin(tmp_path / "parts", method=method)
    with pytest.raises(Interrupted):
        train(parts, report=lambda progress: progress.step == 4 and signal.raise_signal(signal.SIGTERM))
    train(parts)
    assert same(weights(whole), weights(parts))


def own_data(folder, seed=0, records=60):
    """Write data of one's own, and return the settings of a run on it by a name that only this folder understands."""
    generator = np.random.default_rng(seed)
    images, labels = generator.normal(size=(records, 4)), generator.integers(3, size=records)
    folder.mkdir(exist_ok=True)
    np.savez(folder / "set.npz", x_train=images, y_train=labels, x_test=images, y_test=labels, classes=[0, 1, 2])
    return {"data": "set.npz", "dataset_size": "public", "delta": 1e-3, "lot": 20, "clip": 0.5}


def stop(directory, step=4):
    """Train up to a step, and stop there."""
    with pytest.raises(Interrupted):
        train(directory, report=lambda progress: progress.step == step and signal.raise_signal(signal.SIGTERM))


def test_a_run_on_a_relative_path_goes_on_with_its_own_data_from_everywhere(tmp_path, monkeypatch):
    own_data(tmp_path / "other", seed=1)
    settings = own_data(tmp_path / "mine")
    monkeypatch.chdir(tmp_path / "mine")
    directory = begin(tmp_path / "run", **settings)
    plain = RunDirectory.create(tmp_path / "plain", directory.recipe.with_(data="set.npz"))
    assert plain.recipe == directory.recipe == RunDirectory.open(tmp_path / "plain").recipe
    stop(directory)
    monkeypatch.chdir(tmp_path / "other")
    seen = []
    monkeypatch.setattr("dphero.data.load", lambda spec, *rest: seen.append(spec) or load_data(spec, *rest))
    train(RunDirectory.open(directory.path))
    assert seen == [str(tmp_path / "mine" / "set.npz")]


def test_private_data_by_a_relative_path_is_still_not_public(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    directory = begin(tmp_path / "run", **own_data(tmp_path), method="projected", options={"public": "set.npz"})
    with pytest.raises(ValueError, match="is the private data itself"):
        train(directory)


@pytest.mark.parametrize("method", ["dp-hero", "sgd"])
def test_noise_is_never_used_on_other_data(method, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    directory = begin(tmp_path / "run", method=method, **own_data(tmp_path))
    stop(directory)
    own_data(tmp_path, seed=1)
    with pytest.raises(ValueError, match=r"set\.npz no longer holds the training data with which .*run was begun"):
        train(RunDirectory.open(directory.path))
    assert Ledger.from_json((directory.path / "ledger.json").read_text()).steps == 4
    own_data(tmp_path)
    digest = load_data(str(tmp_path / "set.npz")).digest()
    assert train(RunDirectory.open(directory.path))["steps"] > 4
    for path in directory.path.glob("*.*"):
        assert path.name == "checkpoint.pt" or digest.encode() not in path.read_bytes(), path.name


def test_a_checkpoint_from_before_digests_were_kept_still_resumes(unbroken, tmp_path):
    directory = begin(tmp_path / "run")
    stop(directory)
    contents = torch.load(directory.checkpoint, weights_only=True)
    assert contents["extra"].pop("data")
    torch.save({**contents, "version": 1}, directory.checkpoint)
    train(directory)
    assert same(weights(directory), weights(unbroken))


def test_ordinary_training_costs_infinitely_much(tmp_path):
    directory = begin(tmp_path / "run", method="sgd")
    result = train(directory)
    assert result["epsilon"] is None  # JSON has no infinity
    assert math.isinf(price(Ledger.from_json((directory.path / "ledger.json").read_text()), 1e-5).epsilon)
    assert "nothing is guaranteed" in (directory.path / "statement.txt").read_text()


def test_the_published_recipe_is_labelled_and_priced(tmp_path):
    directory = begin(tmp_path / "run", method="dp-hero-published", epochs=1, model="mlp", options={"floor": 0.1})
    result = train(directory)
    sound = train(begin(tmp_path / "sound", method="dp-sgd", epochs=1, model="mlp"))
    assert result["epsilon"] > sound["epsilon"]  # the same nominal noise, and worth less
    claimed = result["other_prices"]["claimed by the paper"]
    assert result["sound"] is False and not result["is_bound"]
    assert result["epsilon"] > claimed
    assert "UNSOUND AS PUBLISHED" in (directory.path / "statement.txt").read_text()


def test_published_without_a_floor_may_protect_nothing(tmp_path):
    directory = begin(tmp_path / "run", method="dp-hero-published", epochs=1)  # its 32×16 weight has 16 bare directions
    result = train(directory)
    assert result["epsilon"] is None and result["steps"] == 3
    assert result["other_prices"]["claimed by the paper"] < 10
    assert "nothing is guaranteed" in (directory.path / "statement.txt").read_text()


@pytest.mark.usefixtures("same_noise")
def test_physical_batches_change_nothing_but_memory(tmp_path):
    whole, directory = begin(tmp_path / "whole"), begin(tmp_path / "parts", physical_batch=100)
    train(whole)
    train(directory)
    for name, value in weights(whole).items():
        torch.testing.assert_close(weights(directory)[name], value, rtol=1e-3, atol=1e-4)


def test_features_are_computed_once(tmp_path):
    recipe = resolve({**SETTINGS, "model": "scatter-linear"})
    task, _ = prepare(recipe)
    assert task.module is task.model.head
    assert task.train.tensors[0].shape[1:] != task.images.shape[1:]
    torch.testing.assert_close(task.model.features(task.images[:3]), task.train.tensors[0][:3])


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"data": "nonsense"}, "nonsense"),
        ({"model": "nonsense"}, "nonsense"),
        ({"method": "dp-herro"}, "did you mean 'dp-hero"),
        ({"options": {"exponant": 1}}, "no option 'exponant'; it has exponent"),
        ({"device": "tpu"}, "device 'tpu'"),
        ({"lot": 5000}, "larger than the data"),
        ({"delta": 1e-3}, "delta"),
        ({"guidance": "magic"}, "magic"),
    ],
)
def test_what_cannot_be_trained_is_refused_with_a_reason(settings, words, tmp_path):
    with pytest.raises(ValueError, match=words):
        train(begin(tmp_path / "run", **settings))


def test_a_target_that_no_noise_meets(tmp_path):
    recipe = resolve({"data": "digits", "epsilon": 1e-6, "delta": 1e-13, "epochs": 1000})
    with pytest.raises(ValueError, match="out of reach"):
        train(RunDirectory.create(tmp_path / "run", recipe))


def test_private_methods_want_a_price(tmp_path):
    settings = {name: value for name, value in SETTINGS.items() if name != "noise_multiplier"}
    with pytest.raises(ValueError, match="--epsilon or --noise-multiplier"):
        train(RunDirectory.create(tmp_path / "run", resolve(settings)))


def test_a_directory_is_used_once(unbroken, tmp_path):
    with pytest.raises(ValueError, match=r"finished run: --resume .* shows it"):
        RunDirectory.create(unbroken.path, unbroken.recipe)
    directory = begin(tmp_path / "run")
    with pytest.raises(Interrupted):
        train(directory, report=lambda _: signal.raise_signal(signal.SIGINT))
    with pytest.raises(ValueError, match="go on with --resume"):
        begin(directory.path)


def test_a_run_that_was_refused_leaves_its_place_to_another(tmp_path):
    refused = begin(tmp_path / "run", clipping="magic")
    with pytest.raises(ValueError, match="magic"):
        train(refused)
    with refused.locked(), pytest.raises(ValueError, match="another process is training"):
        begin(refused.path)
    again = begin(refused.path, epochs=1)
    assert RunDirectory.open(again.path).recipe == again.recipe
    assert train(again)["steps"] == 3


def test_a_recipe_of_the_users_own_is_not_overwritten(tmp_path):
    theirs = tmp_path / "recipe.toml"
    theirs.write_text("# by hand")
    with pytest.raises(ValueError, match=r"recipe\.toml is no run's, and would be overwritten: give another --out"):
        begin(tmp_path)
    assert theirs.read_text() == "# by hand"


@pytest.mark.parametrize("contents", ["", "{", "[1]", "\udcff"])
@pytest.mark.parametrize("name", ["result.json", "ledger.json"])
def test_damaged_files_are_named(name, contents, tmp_path):
    directory = begin(tmp_path / "run")
    (directory.path / name).write_text(contents, errors="surrogateescape")
    with pytest.raises(ValueError, match=rf"run/{name} is damaged: "):
        train(directory)


def test_only_run_directories_are_opened(tmp_path):
    with pytest.raises(ValueError, match=r"no recipe\.toml"):
        RunDirectory.open(tmp_path)


def test_every_card_is_complete():
    for name, method in methods.METHODS.items():
        card = method.card
        assert card.name == name
        assert all((card.title, card.protects, card.relation, card.sampling, card.paper, card.priced)), name


@pytest.mark.parametrize(
    ("method", "options", "words"),
    [
        ("dp-hero", {"exponent": "abc"}, "'exponent' of method 'dp-hero' must be a finite number, got 'abc'"),
        ("dp-hero", {"exponent": math.inf}, "must be a finite number, got inf"),
        ("dp-hero", {"exponent": True}, "must be a finite number, got True"),
        ("dp-hero", {"refresh_every": 1.5}, "must be a whole number, got 1.5"),
        ("dp-sgd", {"per_tensor": 1}, "must be true or false, got 1"),
        ("dp-randp", {"process": 3}, "must be text, got 3"),
        ("dp-randp", {"head_lr": [1]}, r"must be a finite number, got \[1\]"),
    ],
)
def test_options_have_types(method, options, words):
    with pytest.raises(ValueError, match=words):
        methods.make(method, options)


def test_defaults_have_the_types_of_their_options():
    for name, method in methods.METHODS.items():
        methods.make(name, {each.name: each.default for each in fields(method)})


def test_json_has_no_infinity():
    assert to_json({"a": [math.inf, 1.0], "b": math.nan}) == '{"a": [null, 1.0], "b": null}'


# -- a run goes on as it was begun ------------------------------------------------------------------------------------


def without_times(metrics):
    return [{name: value for name, value in line.items() if name != "seconds"} for line in metrics]


@pytest.mark.parametrize(
    ("method", "number"),
    [("dp-hero", signal.SIGHUP), ("dp-randp", signal.SIGTERM), ("dp-mp", signal.SIGINT), ("sgd", signal.SIGTERM)],
)
def test_metrics_of_a_resumed_run_are_those_of_the_unbroken_one(method, number, tmp_path, monkeypatch):
    monkeypatch.setenv("DPHERO_DATA", str(tmp_path))
    options = {"pretrain_steps": 4, "pretrain_batch": 8} if method == "dp-randp" else {}
    settings = {"method": method, "epochs": 8, "evaluate_every": 5, "options": options}
    whole = begin(tmp_path / "whole", **settings)
    train(whole)
    parts = begin(tmp_path / "parts", **settings)
    for step in (3, 13, 17):
        with pytest.raises(Interrupted):
            train(parts, report=lambda now, step=step: now.step == step and signal.raise_signal(number))
    train(parts)
    assert without_times(parts.metrics) == without_times(whole.metrics) != []


@pytest.mark.parametrize(
    ("line", "changed", "words"),
    [
        ("lr = 1.0", "lr = 0.5", "lr in .*was 1.0 and is now 0.5"),
        ("momentum = 0.9", "momentum = 0.5", "momentum in .*was 0.9 and is now 0.5"),
        ("seed = 0", "seed = 12345", "seed in .*recipe.toml was changed, and a run goes on"),
        ("lot = 512", "lot = 512\nphysical_batch = 100", "physical_batch in .*was not set and is now 100"),
        ("lot = 512", "lot = 512\nevaluate_every = 1", "evaluate_every in .*was not set and is now 1"),
        ('method = "dp-hero"', 'method = "sgd"', "method in .*was 'dp-hero' and is now 'sgd'"),
        ("noise_multiplier = 3.0", "noise_multiplier = 7.0", "noise_multiplier in .*was 3.0 and is now 7.0"),
    ],
)
def test_an_edited_recipe_is_refused_by_the_name_of_the_setting(line, changed, words, tmp_path):
    directory = begin(tmp_path / "run")
    stop(directory)
    path = directory.path / "recipe.toml"
    text = path.read_text()
    assert line in text
    path.write_text(text.replace(line, changed))
    with pytest.raises(ValueError, match=words) as refused:
        train(RunDirectory.open(directory.path))
    assert "12345" not in str(refused.value)
    path.write_text(text)
    assert train(RunDirectory.open(directory.path))["steps"] == 12


def test_data_that_was_moved_is_found_by_its_new_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    directory = begin(tmp_path / "run", **own_data(tmp_path))
    stop(directory)
    (tmp_path / "set.npz").rename(tmp_path / "moved.npz")
    path = directory.path / "recipe.toml"
    path.write_text(path.read_text().replace("set.npz", "moved.npz"))
    assert train(RunDirectory.open(directory.path))["steps"] > 4


def test_a_second_ctrl_c_does_what_the_first_one_says(tmp_path, caplog):
    directory = begin(tmp_path / "run")

    def twice(progress):
        signal.raise_signal(signal.SIGTERM)  # asks as well, and may come as often as it likes
        signal.raise_signal(signal.SIGTERM)
        assert not caplog.records
        signal.raise_signal(signal.SIGINT)
        assert "second Ctrl-C stops at once and saves nothing" in caplog.text
        signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        train(directory, report=twice)
    assert Ledger.from_json((directory.path / "ledger.json").read_text()).steps == 0
    assert train(directory)["steps"] == 12


def test_nohup_holds():
    former = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with stoppable() as asked:
            signal.raise_signal(signal.SIGHUP)
            assert not asked()
    finally:
        signal.signal(signal.SIGHUP, former)
