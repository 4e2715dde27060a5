"""The paper's items at their smallest: files, labels, prices, plans, and going on after an interruption."""

import csv
import json
import math
import os
import signal
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
import torch

from dphero.accounting import Ledger, PoissonGaussian, claimed_by_paper, price
from dphero.experiments import Interrupted
from dphero.experiments.comparison.plan import Planned, save_plan
from dphero.experiments.comparison.sweep import Outcome, outcomes, sweep
from dphero.experiments.comparison.worker import train_run
from dphero.experiments.reproduction import drawing, running
from dphero.experiments.reproduction.figures import convergence, curves, linear, table1
from dphero.experiments.reproduction.items import ITEMS, find
from dphero.experiments.reproduction.report import brief
from dphero.experiments.reproduction.settings import (
    DELTAS,
    LOTS,
    METHOD_TITLES,
    PUBLISHED,
    RATES,
    SIGMAS,
    UNSOUND,
    noise_for,
)
from dphero.methods.recipe import Recipe

pytest.importorskip("sklearn")
pytest.importorskip("matplotlib")

FILES = ("png", "svg", "csv", "json", "md")


def sweep_here(plan, directory, *, workers, report):
    """Train in this process: starting workers would take longer than the training."""
    save_plan(directory, plan)
    errors = {}
    for planned in plan:
        answer = train_run(str(directory / "runs" / planned.name), planned.recipe.as_dict())
        if answer["kind"] != "done":
            errors[planned.name] = answer["error"]
    return outcomes(plan, directory, errors)


@pytest.fixture(scope="module")
def reproduced(tmp_path_factory):
    """What becomes of an item, tiny; each is done once."""
    out = tmp_path_factory.mktemp("reproduction")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(running, "sweep", sweep_here)
        yield cache(lambda name: (running.reproduce(name, out, size="tiny"), out))


@pytest.mark.parametrize("name", ITEMS)
def test_every_item_writes_its_picture_its_data_and_its_table(reproduced, name):
    found, out = reproduced(name)
    assert not found.failed
    assert {path.name for path in found.files} == {f"{name}.{kind}" for kind in FILES}
    assert (out / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    with open(out / f"{name}.csv", encoding="utf-8") as file:
        assert list(csv.DictReader(file))
    kept = json.loads((out / f"{name}.json").read_text())
    assert kept["rows"] and kept["size"] == "tiny" and kept["paper"] == ITEMS[name].paper


@pytest.mark.parametrize("name", [name for name in ITEMS if name != "heterogeneity"])  # which has sound rows alone
def test_the_published_recipe_is_labelled_everywhere(reproduced, name):
    _, out = reproduced(name)
    for kind in ("svg", "csv", "json", "md"):  # matplotlib keeps an SVG's texts as comments
        assert UNSOUND in (out / f"{name}.{kind}").read_text(), kind


def test_exponents_and_scopes_cost_the_same_and_are_told_apart(reproduced):
    rows = reproduced("heterogeneity")[0].report.rows
    assert [row["scope"] for row in rows] == ["isotropic", "layer", "model"]
    assert len({row[f"true ε, δ {DELTAS[0]:.0e}"] for row in rows}) == 1
    assert {row["seeds"] for row in rows} == {2}
    plan = ITEMS["heterogeneity"].plan("full")
    assert len({planned.name for planned in plan}) == len(plan) == 5 * (1 + 2 * 3)


def test_full_curves_have_five_seeds_and_show_their_spread(reproduced):
    for name in ("iterations", "epochs", "cifar", "lots", "learning-rates"):
        assert {planned.recipe.seed for planned in ITEMS[name].plan("full")} == set(range(5)), name


def test_sigma_is_drawn_at_every_look(reproduced):
    found, out = reproduced("sigma-per-iteration")
    with open(out / "sigma-per-iteration.csv", encoding="utf-8") as file:
        points = list(csv.DictReader(file))
    assert {point["step"] for point in points} == {"0", "1", "2", "3", "4"}
    by_layer = {}
    for point in points:
        key = (point["layer"], point["rule"], point["step"])
        by_layer.setdefault(key, []).append(float(point["σ / σ of DP-SGD"]) ** 2)
    assert all(math.isclose(sum(squares) / len(squares), 1, rel_tol=1e-3) for squares in by_layer.values())
    assert {row["layer"] for row in found.report.rows} == {layer for layer, *_ in by_layer}


@pytest.mark.parametrize("name", ["iterations", "epochs", "cifar", "lots", "learning-rates", "epsilon-boxes"])
def test_each_row_has_its_true_price_and_the_published_one_its_claim_besides(reproduced, name):
    rows = reproduced(name)[0].report.rows
    assert {row["method"] for row in rows} >= {"dp-sgd", "dp-hero", PUBLISHED}
    for row in rows:
        for delta in DELTAS:
            claim, true = row.get(f"claimed ε, δ {delta:.0e}"), row.get(f"true ε, δ {delta:.0e}")
            if row["method"] == PUBLISHED:
                assert row["remark"] == UNSOUND
                assert claim == claimed_by_paper([row["σ"]], delta).epsilon
                assert true == math.inf  # the digits' network has a layer with more rows than columns
            else:
                assert row["remark"] == "" and claim is None
    private = next(row for row in rows if row["method"] == "dp-hero")
    lot, steps = private.get("L", 512), private.get("steps", 4)
    ledger = Ledger()
    ledger.record(PoissonGaussian(lot / 1437, private["σ"]), steps)
    assert private["true ε, δ 1e-06"] == pytest.approx(price(ledger, 1e-6, "pld").epsilon, rel=1e-6)


def test_the_curves_have_a_point_at_every_look(reproduced):
    points = reproduced("iterations")[0].report.points
    assert {point["step"] for point in points if point["method"] != "sgd"} == {2, 4}


@dataclass(frozen=True)
class Ran(Outcome):
    """A finished run that was at these accuracies, in percent."""

    looks: tuple = ()

    @property
    def metrics(self):
        return [{"step": step, "epoch": step, "accuracy": each / 100} for step, each in enumerate(self.looks)]


def ran(method, seed, *looks, sigma=None):
    recipe = Recipe(data="digits", model="digits", method=method, noise_multiplier=sigma, lot=50, seed=seed)
    result = {"accuracy": looks[-1] / 100, "epsilon": 2.0}
    return Ran(Planned(f"{method}-{seed}", recipe, None, {}), Path(), result, looks=looks)


def test_distance_and_unrest_are_those_of_runs_not_of_their_mean(monkeypatch):
    """Two runs that swing against each other have a mean curve without any unrest."""
    monkeypatch.setattr(curves, "prices", lambda run, memory: {})
    found = [ran("sgd", 0, 50, 50, 50), ran("sgd", 1, 60, 60, 60)]
    found += [ran("dp-sgd", 0, 40, 60, 40, sigma=1.0), ran("dp-sgd", 1, 60, 40, 10, sigma=1.0)]
    row = next(row for row in curves._rows(found, curves._mean_curves(found)) if row["method"] == "dp-sgd")
    assert row["distance from SGD"] == pytest.approx((10 + 70 / 3) / 2)
    assert row["distance from SGD: ±"] == pytest.approx((70 / 3 - 10) / 2**0.5)
    assert row["unrest"] == pytest.approx((20 + 25) / 2) and row["unrest: ±"] == pytest.approx(5 / 2**0.5)
    assert row["collapsed"] == "1 of 2" and row["accuracy"] == pytest.approx(25)


def test_table_1_shows_how_far_seeds_lie_apart(tmp_path):
    runs = {method: [ran(method, seed, 90 + seed, sigma=1.0) for seed in range(3)] for method in ("gdp", "dp-hero")}
    line = next(line for line in table1.PRINTED if line.method == "gdp")
    row = table1._row(line, {**runs, PUBLISHED: []})
    assert row["ours, system (%)"] == pytest.approx(91) and row["ours, system: ±"] == pytest.approx(1)
    assert row[f"published recipe, {UNSOUND}: ±"] is None
    assert brief([row])[0]["system, ours (%)"] == "91.00 ± 1.00"


def test_table_1_compares_at_no_more_than_the_printed_epsilon(reproduced):
    rows = reproduced("table1")[0].report.rows
    assert {row["system"] for row in rows} == {"DP-SGD", "no privacy", "LDP"}
    for row in rows:
        if math.isfinite(row["ε printed"]):
            assert row["ours, system: true ε"] <= row["ε printed"] * 1.0001
            assert row["ours, sound DP-Hero: true ε"] <= row["ε printed"] * 1.0001
            assert row[f"published recipe, {UNSOUND}: true ε"] > row["ε printed"]
    labels = next(row for row in rows if row["system"] == "LDP")
    assert "label" in labels["protects"]


def test_a_failed_run_is_named_and_the_others_are_shown(tmp_path, monkeypatch):
    def one_fails(plan, directory, *, workers, report):
        found = sweep_here(plan[:-1], directory, workers=workers, report=report)
        lost = outcomes(plan[-1:], directory, {plan[-1].name: "out of luck"})
        return found + lost

    monkeypatch.setattr(running, "sweep", one_fails)
    done = running.reproduce("noise-spectra", tmp_path, size="tiny")
    assert list(done.failed.values()) == ["out of luck"]
    assert done.report.rows


# -- plans ------------------------------------------------------------------------------------------------


def test_nothing_is_cut_off_in_a_narrow_figure(tmp_path, monkeypatch):
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    kept = []
    monkeypatch.setattr(drawing, "save_figure", lambda figure, path: kept.append(figure))
    figure, axes = drawing.grid(1, 1)
    for method in METHOD_TITLES:
        drawing.line(axes[0][0], method, [0, 1], [0, 1])
    drawing.finish(figure, tmp_path / "narrow", "A title that is longer than one panel is wide", "and a note: " * 20)
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    assert kept == [figure]
    for part in (*figure.texts, *figure.legends):  # the title is a text
        extent = part.get_window_extent(canvas.get_renderer())
        assert extent.x0 >= 0 and extent.x1 <= figure.bbox.width, part


def test_a_picture_has_a_panel_for_each_setting_and_at_most_three_beside_each_other():
    made = convergence.LEARNING_RATES
    cells = made._cells(made.shapes["full"])
    placed = [(cells[place].lr, cells[place].noise_multiplier) for place in sorted(cells)]
    assert placed == [(rate, sigma) for rate in RATES for sigma in SIGMAS]
    assert set(cells) == {(row, column) for row in range(4) for column in range(3)}


def test_full_plans_cover_what_the_paper_varies():
    planned = {
        made.name: made.plan("full") for made in (convergence.ITERATIONS, convergence.EPOCHS, convergence.CIFAR_EPOCHS)
    }
    for runs in planned.values():
        assert {run.recipe.noise_multiplier for run in runs} == {None, *SIGMAS}
        assert {run.recipe.method for run in runs} == {"sgd", "dp-sgd", "dp-hero", PUBLISHED}
    assert {run.recipe.lot for run in convergence.LOT_SIZES.plan("full")} == set(LOTS)
    assert {run.recipe.lr for run in convergence.LEARNING_RATES.plan("full")} == set(RATES)


@pytest.mark.parametrize("size", ["quick", "full"])
def test_runs_of_the_published_recipe_are_named_for_what_they_are(size):
    for made in (
        convergence.ITERATIONS,
        convergence.EPOCHS,
        convergence.CIFAR_EPOCHS,
        convergence.LOT_SIZES,
        convergence.LEARNING_RATES,
    ):
        for run in made.plan(size):
            assert ("UNSOUND-AS-PUBLISHED" in run.name) == (run.recipe.method == PUBLISHED)


def test_a_plan_takes_as_many_steps_as_it_says():
    for run in convergence.LOT_SIZES.plan("quick"):
        assert round(run.recipe.epochs * round(60_000 / run.recipe.lot)) == 120


def test_the_printed_table_is_complete():
    assert len(table1.PRINTED) == 19
    assert sum(line.data == "cifar10" for line in table1.PRINTED) == 3
    assert {line.method for line in table1.lines("quick")} == {line.method for line in table1.PRINTED}


def test_equal_noise_is_calibrated_to_the_true_price():
    sigma = noise_for(3.0, 1e-5, 0.01, 60)
    ledger = Ledger()
    ledger.record(PoissonGaussian(0.01, sigma), 60)
    assert 2.97 < price(ledger, 1e-5, "pld").epsilon <= 3.0


# -- the linear classifier --------------------------------------------------------------------------------


def test_closed_forms_agree_with_drawn_noise():
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(40, 6, generator=generator, dtype=torch.float64)
    weight = torch.randn(6, generator=generator, dtype=torch.float64)
    direction = weight / weight.norm()
    energy, weakest = linear.energies(inputs, weight)["orthogonal to W"]
    assert weakest == 0
    noise = torch.randn(200_000, 6, generator=generator, dtype=torch.float64)
    noise = (noise - torch.outer(noise @ direction, direction)) * math.sqrt(6 / 5)
    moved = noise @ inputs.T
    scores = inputs @ weight
    change = (scores + moved) * moved + moved * scores  # the paper's expression
    assert torch.allclose(change.mean(0), energy, rtol=0.03, atol=0.03)
    right = ((scores + moved) * scores.sign() > 0).double().mean()
    assert linear._accuracy(scores.abs(), energy) == pytest.approx(float(right), abs=0.003)


def test_all_shapes_have_the_same_total_variance():
    corners = torch.eye(8, dtype=torch.float64)  # the sum of q over an orthonormal basis is the trace of the covariance
    weight = torch.arange(1.0, 9.0, dtype=torch.float64)
    for name, (energy, _) in linear.energies(corners, weight).items():
        assert float(energy.sum()) == pytest.approx(8.0), name


# -- names and going on -----------------------------------------------------------------------------------


def test_an_unknown_item_is_refused_with_a_hint():
    with pytest.raises(ValueError, match="did you mean 'epochs'"):
        find("epoch")


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_interrupted_it_goes_on_and_keeps_what_is_finished(tmp_path, monkeypatch):
    monkeypatch.setattr(running, "sweep", sweep)

    asked = []

    def interrupt(standing):
        if standing.done and not asked:
            asked.append(True)
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(Interrupted):
        running.reproduce("noise-spectra", tmp_path, size="tiny", workers=1, report=interrupt)
    finished = sorted(tmp_path.glob("runs/noise-spectra-tiny/runs/*/result.json"))
    assert 1 <= len(finished) < 3
    before = [path.stat().st_mtime_ns for path in finished]
    done = running.reproduce("noise-spectra", tmp_path, size="tiny", workers=1)
    assert not done.failed
    assert [path.stat().st_mtime_ns for path in finished] == before
    assert len(list(tmp_path.glob("runs/noise-spectra-tiny/runs/*/result.json"))) == 3


def test_runs_that_were_planned_otherwise_are_not_mixed_in(tmp_path):
    save_plan(tmp_path / "runs" / "noise-spectra-tiny", convergence.ITERATIONS.plan("tiny"))
    with pytest.raises(ValueError, match="planned otherwise: move it away"):
        running.reproduce("noise-spectra", tmp_path, size="tiny")
