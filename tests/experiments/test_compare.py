"""Comparisons: the plan, the processes, the table, the pictures."""

import csv
import dataclasses
import json
import math
import signal
import statistics
from types import SimpleNamespace

import pytest

from dphero import data as datasets
from dphero.accounting import Ledger, PoissonGaussian, price
from dphero.experiments import plots
from dphero.experiments.comparison.compare import summarise
from dphero.experiments.comparison.grid import check, grid, matched_noise, parse_variations
from dphero.experiments.comparison.plan import Planned, load_plan, save_plan
from dphero.experiments.comparison.pool import Pool, default_workers, threads_each
from dphero.experiments.comparison.sweep import Outcome, State, outcomes, sweep
from dphero.experiments.comparison.table import cells, markdown, notes, remark, save_table, tabulate
from dphero.experiments.pictures import move_apart
from dphero.methods import METHODS

pytest.importorskip("sklearn")

DIGITS = {"data": "digits", "epochs": 1}


def plan_of(*names, seeds=(0,), **settings):
    return grid({**DIGITS, **settings}, methods=names, epsilons=[3.0], seeds=seeds)


# -- the plan --------------------------------------------------------------------------------------------


def test_all_combinations_with_readable_names():
    plan = grid(DIGITS, methods=["dp-sgd", "dp-hero"], epsilons=[1, 3], seeds=[0, 1], vary={"lr": [0.5, 2.0]})
    assert len(plan) == 16 and len({planned.name for planned in plan}) == 16
    assert plan[0].name == "dp-sgd_eps1_lr0.5_seed0" and plan[0].setting == {"lr": 0.5}
    assert plan[-1].recipe.lr == 2.0 and plan[-1].recipe.epsilon == 3 and plan[-1].recipe.seed == 1
    assert {planned.recipe.model for planned in plan} == {"digits"}  # the data set's defaults are in


def test_without_privacy_one_run_per_seed():
    vary = {"clip": [0.1, 0.2], "options.exponent": [0.25, 0.5]}
    plan = grid(DIGITS, methods=["sgd", "dp-sgd", "dp-hero"], epsilons=[1, 3], seeds=[0, 1], vary=vary)
    count = {name: sum(planned.recipe.method == name for planned in plan) for name in ("sgd", "dp-sgd", "dp-hero")}
    assert count == {"sgd": 2, "dp-sgd": 8, "dp-hero": 16}  # dp-sgd has no exponent to vary
    assert all(planned.asked is None for planned in plan if planned.recipe.method == "sgd")


def test_an_unsound_method_gets_the_noise_that_dp_sgd_needs():
    dp_sgd, published = plan_of("dp-sgd", "dp-hero-published")
    assert published.recipe.epsilon is None and published.target == published.asked == 3
    sigma = published.recipe.noise_multiplier
    assert sigma == matched_noise(dp_sgd.recipe, datasets.load("digits"))
    ledger = Ledger().with_event(PoissonGaussian(512 / 1437, sigma), 3)
    assert 2.99 < price(ledger, 1e-4).epsilon <= 3


def test_a_setting_of_one_value_is_set_but_not_named():
    (planned,) = grid(DIGITS, methods=["dp-sgd"], epsilons=[2], seeds=[7], vary={"lot": [100]})
    assert planned.recipe.lot == 100 and planned.name == "dp-sgd_eps2_seed7" and not planned.setting


def test_noise_instead_of_a_target():
    plan = grid(DIGITS, methods=["dp-sgd"], seeds=[0], vary={"noise_multiplier": [1.0, 2.0]})
    assert [planned.recipe.noise_multiplier for planned in plan] == [1, 2] and plan[0].asked is None


def test_names_are_apart_even_for_odd_values():
    plan = grid(methods=["sgd"], seeds=[0], vary={"data": ["a/b:c", "a/b c", "A/B c"]})
    names = [planned.name.lower() for planned in plan]
    assert len(set(names)) == 3 and not any("/" in name or " " in name for name in names)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"methods": ["dp-sdg"]}, "did you mean 'dp-sgd'"),
        ({"methods": []}, "at least one of: methods"),
        ({"seeds": []}, "at least one of: seeds"),
        ({"vary": {"lrr": [1]}}, "did you mean 'lr'"),
        ({"vary": {"exponent": [1]}, "methods": ["dp-hero"]}, "did you mean 'options.exponent'"),
        ({"vary": {"options.exponent": [1]}}, "options.exponent"),
        ({"vary": {"epsilon": [1]}}, "--epsilons"),
        ({"vary": {"seed": [1]}}, "--seeds"),
        ({"vary": {"lr": ["fast"]}}, "lr must be a finite number"),
        ({"epsilons": [-1.0]}, "epsilon must be a positive number"),
        ({"epsilons": []}, "give --epsilons"),
    ],
)
def test_plans_that_make_no_sense_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        grid(DIGITS, **{"methods": ["dp-sgd"], "epsilons": [1.0], "seeds": [0], **arguments})


def test_variations_are_read():
    given = ["lr=0.5,1", "options.exponent=0.25", "secure=true,false", "guidance=pca"]
    assert parse_variations(given) == {
        "lr": [0.5, 1],
        "options.exponent": [0.25],
        "secure": [True, False],
        "guidance": ["pca"],
    }
    for wrong in (["lr"], ["=1"], ["lr="], ["lr=,"], ["lr=1", "lr=2"]):
        with pytest.raises(ValueError, match="--vary"):
            parse_variations(wrong)


def test_what_cannot_begin_is_found_before_anything_is_trained():
    check(plan_of("dp-sgd"))
    for settings, message in (
        ({"model": "lenett"}, "no model 'lenett'"),
        ({"lot": 5000}, "run dp-sgd_eps3_seed0: lot 5000 is larger"),
        ({"data": "digitz", "model": "mlp"}, "digitz"),
    ):
        with pytest.raises(ValueError, match=message):
            check(plan_of("dp-sgd", **settings))


def test_a_plan_is_kept_and_another_refused(tmp_path):
    plan = plan_of("dp-sgd", "dp-hero-published", seeds=(0, 1))
    save_plan(tmp_path / "new", plan)
    save_plan(tmp_path / "new", plan)
    assert load_plan(tmp_path / "new") == plan
    for other, message in (
        (plan[:-1], "dp-hero-published_eps3_seed1 is there"),
        (plan_of("dp-sgd", "dp-hero-published", seeds=(0, 1), lr=0.25), "has lr 1.0 there, 0.25 here"),
    ):
        with pytest.raises(ValueError, match=message):
            save_plan(tmp_path / "new", other)
    with pytest.raises(ValueError, match="two runs are called 'dp-sgd_eps3_seed0'"):
        save_plan(tmp_path / "twice", [plan[0], plan[0]])
    with pytest.raises(ValueError, match=r"no plan\.json"):
        load_plan(tmp_path)
    (tmp_path / "plan.json").write_text('{"runs": [{"na')
    with pytest.raises(ValueError, match="damaged"):
        load_plan(tmp_path)


# -- processes -------------------------------------------------------------------------------------------

FATAL = """
import os, signal

def killed(shape, classes):
    print("about to die", flush=True)
    os.kill(os.getpid(), signal.SIGKILL)

def broken(shape, classes):
    raise KeyError("no such thing")
"""


def test_one_failing_run_leaves_the_others_alone(tmp_path, monkeypatch):
    (tmp_path / "fatal.py").write_text(FATAL)
    (tmp_path / "queue.py").write_text("raise RuntimeError('the name is taken by the user')")  # and not by Python
    monkeypatch.chdir(tmp_path)
    good, second = plan_of("dp-sgd", "sgd")
    plan = [
        Planned("killed", good.recipe.with_(model="fatal:killed")),
        Planned("broken", good.recipe.with_(model="fatal:broken")),
        Planned("lot", good.recipe.with_(lot=5000)),
        good,
        second,
    ]
    seen = []
    found = sweep(plan, tmp_path / "sweep", workers=1, report=seen.append)
    by_name = {outcome.planned.name: outcome for outcome in found}
    assert list(by_name) == [planned.name for planned in plan]
    assert "killed by SIGKILL" in by_name["killed"].error and "about to die" in by_name["killed"].error
    assert by_name["broken"].error == "KeyError: 'no such thing'"
    assert "lot 5000 is larger than the data" in by_name["lot"].error
    assert "Traceback" in (by_name["broken"].path / "log.txt").read_text()
    assert by_name[good.name].result["steps"] == 3 and by_name[second.name].result["epsilon"] is None
    assert seen[-1].completed == 5 and set(seen[-1].failed) == {"killed", "broken", "lot"} and len(seen[-1].done) == 2
    rows = summarise(found, tmp_path / "sweep")
    assert [row.failed for row in rows] == [1, 1, 1, 0, 0]

    # Once more, it would try again what failed, and nothing else.
    state = State(plan, tmp_path / "sweep", seen.append)
    assert [planned.name for planned in state.waiting] == ["killed", "broken", "lot"]
    with pytest.raises(ValueError, match="holds another comparison"):
        sweep(plan[3:], tmp_path / "sweep")


def test_two_sweeps_do_not_share_a_directory(tmp_path):
    import fcntl

    plan = plan_of("sgd")
    save_plan(tmp_path, plan)
    with open(tmp_path / ".lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(ValueError, match="another process works on"):
            sweep(plan, tmp_path)


def test_a_run_of_another_recipe_is_not_taken_for_the_planned_one(tmp_path):
    from dphero.experiments import RunDirectory
    from dphero.experiments.comparison.worker import train_run

    (planned,) = plan_of("sgd")
    RunDirectory.create(tmp_path / "run", planned.recipe.with_(lr=0.25))
    answer = train_run(str(tmp_path / "run"), planned.recipe.as_dict())
    assert answer["kind"] == "failed" and "another recipe" in answer["error"]


def test_a_plan_with_a_relative_path_goes_on(tmp_path, monkeypatch):
    from dphero.experiments.comparison.worker import train_run

    monkeypatch.chdir(tmp_path)
    (planned,) = plan_of("sgd")
    order = str(tmp_path / "run"), planned.recipe.with_(data="set.npz").as_dict()
    answers = [train_run(*order)["error"] for _ in range(2)]
    assert answers == [f"there is no file {tmp_path / 'set.npz'}"] * 2


def test_a_process_reads_a_built_in_set_once(tmp_path, monkeypatch):
    from dphero.experiments.comparison import worker

    worker._built_in.cache_clear()
    load, loaded = datasets.load, []
    monkeypatch.setattr(datasets, "load", lambda *asked: loaded.append(asked) or load(*asked))
    for planned in plan_of("sgd", seeds=(0, 1)):
        assert worker.train_run(str(tmp_path / planned.name), planned.recipe.as_dict())["kind"] == "done"
    assert loaded == [("digits",)]


class Dead:
    """A worker whose process has ended."""

    def __init__(self, planned, status):
        self.planned, self.process = planned, SimpleNamespace(stdout=None, wait=lambda: status)

    def close(self):
        pass


@pytest.mark.parametrize(
    ("stopping", "status", "failed"),
    [(True, -signal.SIGTERM, False), (False, -signal.SIGTERM, True), (True, 1, True)],
)
def test_a_worker_that_a_signal_ends_while_all_stop_has_not_failed(stopping, status, failed, tmp_path):
    plan = plan_of("sgd")
    state = State(plan, tmp_path, lambda standing: None)
    worker, pool = Dead(state.begin(), status), Pool(state, 1)
    pool._selector, pool._workers = SimpleNamespace(unregister=lambda stdout: None), [worker]
    state.stopping = stopping
    pool._bury(worker)
    assert bool(state.failed) is failed and [*state.waiting] == ([] if failed else plan)


def test_a_run_that_left_its_result_is_finished_however_its_process_ended(made_up, tmp_path):
    first = made_up[3]
    (first.path / "result.json").write_text(json.dumps(first.result))
    plan = [outcome.planned for outcome in made_up[3:6]]
    state = State(plan[1:], tmp_path, lambda standing: None)
    state.waiting.append(plan[0])
    for _ in range(3):
        state.end(state.begin(), {"kind": "failed", "error": "killed"})
    assert state.done == [plan[0].name] and list(state.failed) == [plan[1].name, plan[2].name]
    (row,) = tabulate(outcomes(plan, tmp_path, {planned.name: "killed" for planned in plan}))
    assert (row.seeds, row.failed, row.unfinished) == (1, 2, 0)


def test_workers_share_the_cores(monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(12)), raising=False)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert default_workers("cpu") == 6 and default_workers("cuda") == 4
    assert threads_each(5) == 2 and threads_each(24) == 1
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert threads_each(2) == 1


def test_bad_workers(tmp_path):
    with pytest.raises(ValueError, match="workers must be a whole number"):
        sweep(plan_of("sgd"), tmp_path, workers=0)
    with pytest.raises(ValueError, match="no runs"):
        sweep([], tmp_path)


def test_without_ray_it_says_what_to_install(tmp_path, monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ValueError, match=r"pip install 'dphero\[ray\]'"):
        sweep(plan_of("sgd"), tmp_path, ray="local")


@pytest.mark.slow
def test_on_ray(tmp_path, monkeypatch):
    pytest.importorskip("ray")
    plan = [*plan_of("dp-sgd", "sgd"), Planned("lot", plan_of("dp-sgd")[0].recipe.with_(lot=5000))]
    found = sweep(plan, tmp_path, ray="local")
    assert [outcome.result is not None for outcome in found] == [True, True, False]
    assert "lot 5000" in found[2].error and found[0].result["epsilon"] <= 3
    assert [outcome.error is None for outcome in sweep(plan, tmp_path, ray="local")] == [True, True, False]


# -- table and pictures ----------------------------------------------------------------------------------


@pytest.fixture
def made_up(tmp_path):
    """Outcomes of a sweep that never ran."""
    accuracies = {0: 0.9, 1: 0.95, 2: 0.91}
    plan = grid(DIGITS, methods=["sgd", "dp-sgd", "dp-hero-published"], epsilons=[1, 3], seeds=[0, 1, 2])
    found = []
    for planned in plan:
        path = tmp_path / "runs" / planned.name
        path.mkdir(parents=True)
        lines = [{"step": 3 * n, "epoch": n, "accuracy": 0.5 + 0.1 * n + planned.recipe.seed / 100} for n in (1, 2, 3)]
        (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        published = planned.recipe.method == "dp-hero-published"
        result = {
            "accuracy": accuracies[planned.recipe.seed],
            "epsilon": None
            if planned.recipe.method != "dp-sgd"
            else planned.recipe.epsilon - 0.01 * planned.recipe.seed,
            "noise_multiplier": 1.5,
            "accountant": "filter" if published else "pld",
            "is_bound": not published,
            "steps": 9,
            "seconds": 1.0,
            "other_prices": {"claimed by the paper": 0.4} if published else {},
        }
        found.append(Outcome(planned, path, result))
    return found


def test_rows_are_means_over_seeds(made_up):
    rows = tabulate(made_up)
    assert [(row.method, row.asked_epsilon) for row in rows] == [
        ("sgd", None),
        ("dp-sgd", 1),
        ("dp-sgd", 3),
        ("dp-hero-published", 1),
        ("dp-hero-published", 3),
    ]
    row = rows[1]
    assert row.accuracy == pytest.approx(0.92) and row.seeds == 3
    assert row.spread == pytest.approx(statistics.stdev([0.9, 0.95, 0.91]))
    assert row.epsilon == 1  # the largest of the seeds: never too small
    assert math.isinf(rows[0].epsilon) and math.isinf(rows[3].epsilon)
    assert rows[3].claimed_epsilon == 0.4 and rows[3].remark == "UNSOUND AS PUBLISHED" and not rows[3].sound
    assert rows[0].remark == "not private" and rows[1].remark == ""


def test_runs_that_differ_in_more_than_the_seed_are_never_averaged(made_up):
    first = made_up[3]
    other = dataclasses.replace(first.planned, recipe=first.planned.recipe.with_(lr=0.125, seed=9))
    assert len(tabulate([first, dataclasses.replace(first, planned=other)])) == 2


def test_failed_and_unfinished_runs_are_counted_and_not_averaged(made_up):
    outcomes = made_up[3:6]
    outcomes[1] = dataclasses.replace(outcomes[1], result=None, error="out of memory")
    outcomes[2] = dataclasses.replace(outcomes[2], result=None)
    (row,) = tabulate(outcomes)
    assert (row.seeds, row.failed, row.unfinished) == (1, 1, 1)
    assert row.accuracy == 0.9 and row.spread is None
    text = markdown([row])
    assert "1, 1 failed, 1 unfinished" in text and "out of memory" in text
    (row,) = tabulate(outcomes[1:])
    assert row.accuracy is None and row.epsilon is None and "–" in markdown([row])


def test_tables_say_what_the_numbers_mean(made_up, tmp_path):
    rows = tabulate(made_up)
    save_table(rows, tmp_path)
    text = (tmp_path / "table.md").read_text()
    for words in (
        "92.00% ± 2.65",
        "UNSOUND AS PUBLISHED",
        "claimed ε",
        "∞",
        "one training example",
        "PLD of the Poisson-sampled Gaussian",
        "sample standard deviation",
        "ε at δ = 0.0001",
        "the noise multiplier that dp-sgd needs",
    ):
        assert words in text
    record = json.loads((tmp_path / "table.json").read_text())
    assert record["rows"][1]["epsilon"] == 1 and record["rows"][0]["epsilon"] is None
    lines = list(csv.DictReader((tmp_path / "table.csv").open()))
    assert lines[0]["epsilon"] == "inf" and lines[3]["claimed_epsilon"] == "0.4" and lines[3]["sound"] == "False"


def test_prices_are_rounded_up(made_up):
    (row, *_) = tabulate(made_up[3:6])
    for epsilon, text in ((2.99901, "3.0"), (0.12301, "0.124"), (22783.2, "22,784"), (math.inf, "∞")):
        headings, texts = cells([dataclasses.replace(row, epsilon=epsilon)])
        assert texts[0][headings.index("true ε")] == text


def test_other_figures_are_in_the_notes(made_up):
    (row, *_) = tabulate(made_up[3:6])
    row = dataclasses.replace(row, other_prices={"the central limit theorem": 0.9})
    assert any("central limit theorem 0.9" in note for note in notes([row])) and row.claimed_epsilon is None


def test_protection_of_labels_alone_is_said():
    card = dataclasses.replace(METHODS["dp-sgd"].card, protects="the label of one training example")
    assert remark(card) == "labels only"
    if "label-dp" in METHODS:
        assert remark(METHODS["label-dp"].card) == "labels only"


def test_pictures_and_the_data_behind_them(made_up, tmp_path):
    plots.plot_accuracy(tabulate(made_up), tmp_path)
    plots.plot_curves(made_up, tmp_path)
    for name in ("accuracy", "curves"):
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")
        drawn = (tmp_path / f"{name}.svg").read_text()
        assert "UNSOUND AS PUBLISHED" in drawn and "test accuracy (%)" in drawn
    assert "true ε ∞" in (tmp_path / "accuracy.svg").read_text()
    points = list(csv.DictReader((tmp_path / "accuracy.csv").open()))
    assert [point["plotted_epsilon"] for point in points] == ["", "1.0", "3.0", "1.0", "3.0"]
    assert float(points[1]["accuracy_sample_sd"]) == pytest.approx(0.0264575)
    lines = list(csv.DictReader((tmp_path / "curves.csv").open()))
    assert len(lines) == 15 * 3 and {line["seed"] for line in lines} == {"0", "1", "2"}


def test_one_seed_has_no_spread(made_up, tmp_path):
    plots.plot_accuracy(tabulate([each for each in made_up if each.planned.recipe.seed == 0]), tmp_path)
    drawn = (tmp_path / "accuracy.svg").read_text()
    assert "digits: one seed, so the spread is not known" in drawn and "sample sd" not in drawn


def test_a_comparison_of_nothing_finished_is_still_drawn(made_up, tmp_path):
    empty = [dataclasses.replace(outcome, result=None, path=tmp_path / "none") for outcome in made_up]
    rows = summarise(empty, tmp_path)
    assert all(row.unfinished == 3 for row in rows) and (tmp_path / "curves.png").exists()


def test_outcomes_are_read_from_the_directory(tmp_path):
    plan = plan_of("sgd")
    (found,) = outcomes(plan, tmp_path, {plan[0].name: "why"})
    assert found.result is None and found.error == "why" and found.metrics == []


def test_names_at_line_ends_are_moved_apart_as_little_as_can_be():
    assert move_apart([1.0, 5.0], step=1.0, top=9.0) == [1.0, 5.0]
    assert move_apart([2.0, 2.0, 2.0], step=1.0, top=9.0) == [1.0, 2.0, 3.0]
    assert move_apart([2.0, 2.5, 3.1], step=1.0, top=3.0) == [1.0, 2.0, 3.0]
