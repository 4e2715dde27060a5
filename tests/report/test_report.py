"""The page: what it tells, what it keeps back, and what it does with damage."""

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from dphero.accounting import Ledger, trade_off
from dphero.cli import app
from dphero.report import build, read

pytest.importorskip("plotly")

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
CIFAR = RESULTS / "cifar10-runs" / "feature-dp-epsilon-3-seed-0"


def run(*arguments):
    return CliRunner().invoke(app, ["report", *map(str, arguments)])


def exact(text):
    """The exact numbers behind those that are shown."""
    return [float(each) for each in re.findall(r'data-value="([^"]+)"', text)]


def test_numbers_on_the_page_are_those_of_the_files(tmp_path):
    page = tmp_path / "page.html"
    found = run(CIFAR, "-o", page, "--json")
    assert found.exit_code == 0, found.output
    assert json.loads(found.stdout) | {"bytes": 0} == {
        "report": str(page), "bytes": 0, "runs": [CIFAR.name], "skipped": [],
    }  # fmt: skip
    assert page.stat().st_mode & 0o077 == 0, "accuracies are computed without noise"
    text = page.read_text()
    result = json.loads((CIFAR / "result.json").read_text())
    gained = trade_off(Ledger.from_json((CIFAR / "ledger.json").read_text())).true_positive_rate(0.01)
    assert {result["epsilon"], result["accuracy"], gained} <= set(exact(text))
    assert "ε = " in text and "69.11 %" in text and "NVIDIA H200" in text
    assert (CIFAR / "statement.txt").read_text().splitlines()[1] in text
    metrics = [json.loads(line) for line in (CIFAR / "metrics.jsonl").read_text().splitlines()]
    figures = build(read([CIFAR])).figures
    assert figures["budget"]["data"][0]["y"] == [line["epsilon"] for line in metrics]
    assert figures["accuracy"]["data"][0]["y"] == [line["accuracy"] for line in metrics]
