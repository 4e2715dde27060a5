"""The command line: fixed JSON keys, one-line errors with exit code 2, a quick start."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import dphero
from dphero.accounting import Ledger, PoissonGaussian, price
from dphero.cli import app
from dphero.cli.privacy._price import _round

KEYS = ["epsilon", "delta", "accountant", "noise_multiplier", "sample_rate", "steps", "relation", "is_bound"]
STEPS = ["--noise-multiplier", "1.1", "--sample-rate", "0.01", "--steps", "500", "--delta", "1e-5"]


def run(*arguments):
    return CliRunner().invoke(app, list(arguments))


def fresh_process(code):
    source = Path(dphero.__file__).parents[1]
    environment = {**os.environ, "PYTHONPATH": str(source)}
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=60, check=False
    )


@pytest.mark.parametrize("encoding", ["ascii", "cp1252"])
def test_a_price_is_printed_whatever_the_encoding(encoding):
    code = f"import sys; from dphero.cli import app; sys.argv = ['dphero', 'epsilon', *{STEPS}]; app()"
    source = Path(dphero.__file__).parents[1]
    environment = {**os.environ, "PYTHONPATH": str(source), "PYTHONIOENCODING": encoding}
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, env=environment, timeout=60, check=False)
    assert found.returncode == 0 and b"500" in found.stdout and not found.stderr
    assert b"epsilon <= " in found.stdout and b"delta = 1e-05" in found.stdout


def test_numbers_that_overflow_are_one_line():
    result = run("epsilon", *STEPS[:4], "--steps", "1" + "0" * 400, "--delta", "1e-5")
    assert result.exit_code == 2 and "too large" in result.stderr and len(result.stderr.splitlines()) == 1


def test_epsilon_for_people():
    result = run("epsilon", *STEPS)
    assert result.exit_code == 0
    for words in ["ε ≤ ", "δ = 1e-05", "1.1", "0.01", "500", "pld, upper bound", "add or remove"]:
        assert words in result.stdout
    assert len(result.stdout.splitlines()) < 12


def test_epsilon_of_epochs_and_lots():
    start = ["epsilon", "--noise-multiplier", "1.1", "--delta", "1e-5", "--json"]
    by_rate = json.loads(run(*start, "--sample-rate", "0.01", "--steps", "300").stdout)
    by_size = json.loads(run(*start, "--dataset-size", "50000", "--lot", "500", "--epochs", "3").stdout)
    assert by_rate == by_size
    assert (
        json.loads(run(*start, "--sample-rate", "0.01", "--steps", "9", "--accountant", "gdp").stdout)["is_bound"]
        is False
    )
    for arguments, words in (
        (["--lot", "5"], "--dataset-size"),
        (["--lot", "5", "--dataset-size", "3", "--steps", "1"], "does not fit"),
        (["--sample-rate", "0.1"], "--epochs"),
        (["--sample-rate", "0.1", "--steps", "1", "--epochs", "1"], "one of them"),
    ):
        refused = run(*start, *arguments)
        assert refused.exit_code == 2 and words in refused.stderr


@pytest.mark.parametrize("accountant", ["pld", "rdp"])
def test_epsilon_as_json(accountant):
    result = run("epsilon", *STEPS, "--accountant", accountant, "--json")
    assert result.exit_code == 0 and result.stdout.count("\n") == 1
    record = json.loads(result.stdout)
    ledger = Ledger().with_event(PoissonGaussian(0.01, 1.1), 500)
    assert list(record) == KEYS
    assert record == {
        "epsilon": price(ledger, 1e-5, accountant).epsilon,
        "delta": 1e-5,
        "accountant": accountant,
        "noise_multiplier": 1.1,
        "sample_rate": 0.01,
        "steps": 500,
        "relation": "add_or_remove",
        "is_bound": True,
    }


@pytest.mark.parametrize(("accountant", "words"), [("gdp", "under-reports"), ("zcdp", "no gain from sampling")])
def test_a_warning_is_one_more_key(accountant, words):
    record = json.loads(run("epsilon", *STEPS, "--accountant", accountant, "--json").stdout)
    assert list(record) == [*KEYS, "warning"] and words in record["warning"]
    shown = " ".join(run("epsilon", *STEPS, "--accountant", accountant).stdout.replace("│", " ").split())
    assert words in shown


def test_an_infinite_epsilon_is_still_json():
    result = run("epsilon", "--noise-multiplier", "0.01", *STEPS[2:], "--accountant", "gdp", "--json")
    record = json.loads(result.stdout, parse_constant=pytest.fail)
    assert record["epsilon"] is None and "infinite" in record["warning"]


def test_no_steps_cost_nothing():
    result = run("epsilon", *STEPS, "--steps", "0", "--json")
    assert json.loads(result.stdout)["epsilon"] == 0.0


TARGET = ["--epsilon", "2", "--delta", "1e-5"]


@pytest.mark.parametrize(
    ("given", "solved"),
    [
        (["--sample-rate", "0.01", "--steps", "500"], "noise_multiplier"),
        (["--noise-multiplier", "1.2", "--sample-rate", "0.01"], "steps"),
        (["--noise-multiplier", "1.2", "--steps", "500"], "sample_rate"),
    ],
)
def test_calibrate_solves_for_what_is_left_out(given, solved):
    result = run("calibrate", *TARGET, *given, "--json")
    assert result.exit_code == 0
    record = json.loads(result.stdout)
    assert list(record) == KEYS
    assert 1.99 < record["epsilon"] <= 2
    ledger = Ledger().with_event(PoissonGaussian(record["sample_rate"], record["noise_multiplier"]), record["steps"])
    assert price(ledger, 1e-5).epsilon == record["epsilon"]
    assert record[solved] > 0


def test_calibrate_for_people():
    result = run("calibrate", *TARGET, "--sample-rate", "0.01", "--steps", "500", "--accountant", "rdp")
    assert result.exit_code == 0 and "noise multiplier" in result.stdout and "rdp" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["epsilon", "--steps", "3"], "Missing option '--noise-multiplier'"),
        (["epsilon", *STEPS, "--noise-multiplier", "0"], "noise_multiplier must be above 0"),
        (["epsilon", *STEPS, "--noise-multiplier", "nan"], "noise_multiplier must be finite"),
        (["epsilon", *STEPS, "--noise-multiplier", "much"], "Invalid value for '--noise-multiplier'"),
        (["epsilon", *STEPS, "--sample-rate", "1.5"], "sample_rate must be above 0 and at most 1, got 1.5"),
        (["epsilon", *STEPS, "--delta", "1"], "delta must be above 0 and below 1"),
        (["epsilon", *STEPS, "--delta", "0"], "delta must be above 0 and below 1"),
        (["epsilon", *STEPS, "--steps", "-1"], "steps must be a whole number of at least 0, got -1"),
        (["epsilon", *STEPS, "--accountant", "prv"], "'prv' is not one of"),
        (["epsilon", *STEPS, "--surprise"], "No such option"),
        (["calibrate", *TARGET], "give exactly two of"),
        (["calibrate", *TARGET, *STEPS[:6]], "got 3: the one left out is solved for"),
        (
            ["calibrate", *TARGET, "--sample-rate", "0.1", "--steps", "0"],
            "steps must be a whole number of at",
        ),
        (["calibrate", "--epsilon", "-1", *TARGET[2:], *STEPS[2:6]], "epsilon must be above 0"),
        (
            ["calibrate", *TARGET, "--sample-rate", "1", "--noise-multiplier", "0.5", "--accountant", "zcdp"],
            "one step alone costs 11.6",
        ),
        (["conjure"], "No such command 'conjure'"),
    ],
)
def test_errors_are_one_line_on_stderr_with_exit_code_2(arguments, message):
    result = run(*arguments)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.startswith("dphero: error: ") and result.stderr.count("\n") == 1
    assert message in result.stderr


def test_version_and_help():
    assert run("--version").stdout.split()[0] == "dphero" and run("--version").exit_code == 0
    for arguments in ([], ["--help"]):
        result = run(*arguments)
        assert result.exit_code == 0 and "epsilon" in result.stdout and "calibrate" in result.stdout


def test_pricing_imports_no_torch():
    result = fresh_process(
        "import sys\n"
        "from dphero.cli import app\n"
        f"sys.argv = ['dphero', 'epsilon', *{STEPS!r}, '--json']\n"
        "try:\n    app()\nfinally:\n    print('torch' in sys.modules)\n"
    )
    assert result.returncode == 0, result.stderr
    record, has_torch = result.stdout.splitlines()
    assert json.loads(record)["steps"] == 500 and has_torch == "False"
    assert result.stderr == ""


def test_help_needs_no_accountant_either():
    result = fresh_process(
        "import sys, dphero.cli\nprint([name for name in ('torch', 'dp_accounting', 'scipy') if name in sys.modules])"
    )
    assert result.stdout.strip() == "[]", result.stderr


@pytest.mark.parametrize("value", [1.0, 0.968449544139842, 0.00426666667, 15.76531755, 123456789.0])
def test_shown_numbers_are_rounded_to_the_safe_side(value):
    import math

    assert value * (1 - 1e-11) <= _round(value, math.ceil) <= value * (1 + 1e-5)
    assert value * (1 - 1e-5) <= _round(value, math.floor) <= value * (1 + 1e-11)
