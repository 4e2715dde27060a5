import json
import os
import signal
import subprocess
import sys
import time

import pytest
from typer.testing import CliRunner

from dphero.cli import app

pytest.importorskip("flwr")

COMMAND = [sys.executable, "-m", "dphero.cli", "federate", "--json"]
SETTINGS = ["--data", "digits", "--clients", "4", "--sampled", "2", "--rounds", "3", "--epsilon", "8", "--seed", "1"]
SETTINGS += ["--accountant", "rdp", "--partition", "dirichlet", "--alpha", "1"]


def on_loopback(command):
    """Ray listens on every interface: where it may, let the test have a network of its own, with loopback alone."""
    inside = ["unshare", "-n", "sh", "-c", 'ip link set lo up && exec "$@"', "ns"]
    return [*inside, *command] if subprocess.run([*inside, "true"], capture_output=True).returncode == 0 else command


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_simulation_that_is_killed_goes_on(tmp_path):
    out = tmp_path / "run"
    process = subprocess.Popen(on_loopback([*COMMAND, *SETTINGS, "--out", str(out)]), start_new_session=True)
    try:
        while not (out / "metrics.jsonl").exists() or not (out / "metrics.jsonl").read_text():
            assert process.poll() is None
            time.sleep(0.2)
    finally:
        os.killpg(process.pid, signal.SIGKILL)  # the server in the midst of round 2, and all clients with it
        process.wait()
    found = subprocess.run(
        on_loopback([*COMMAND, "--resume", str(out)]), capture_output=True, text=True, timeout=300, check=True
    )
    result = json.loads(found.stdout.splitlines()[-1])
    assert list(result) == [
        "accuracy", "epsilon", "epsilon_median", "delta", "rounds", "strategy", "partition", "run",
    ]  # fmt: skip
    assert result["rounds"] == 3
    assert result["partition"] == "dirichlet(1)"
    assert result["epsilon"] <= 8
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [line["round"] for line in lines] == [1, 2, 3]
    for name in {name for line in lines for name in line["averaged"]}:
        ledger = json.loads((out / "clients" / name / "ledger.json").read_text())
        rounds = sum(name in line["averaged"] for line in lines)
        assert ledger["events"][0]["count"] % rounds == 0, "every round once"
    assert (out / "partition.png").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--data", "digits", "--epsilon", "8", "--sampled", "11"], "11 clients cannot be sampled"),
        (["--data", "digits"], "give --epsilon or --noise-multiplier"),
        (["--data", "digits", "--method", "sgd", "--epsilon", "8"], "protects nothing"),
        (["--epsilon", "8"], "which data"),
        (["--resume", "nowhere"], "not the directory of a run"),
        (["--resume", "nowhere", "--lr", "1"], "leave out all other settings: --lr"),
        (["--resume", "nowhere", "--rounds", "20"], "leave out all other settings: --rounds"),
        (["--data", "digits", "--epsilon", "8", "--shared", "distilled-published"], "--unsound"),
        (["--data", "digits", "--epsilon", "8", "--client-noise-multiplier", "1"], "--weights equal"),
    ],
)
def test_what_is_wrong_is_said_in_a_line(arguments, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = CliRunner().invoke(app, ["federate", *arguments])
    assert found.exit_code == 2
    assert message in found.stderr.strip().splitlines()[-1]
    assert not (tmp_path / "runs").exists()


def test_a_simulation_whose_ray_fails_says_so_and_ends(tmp_path, monkeypatch):
    def run_simulation(*, server_app, **options):
        try:
            raise Exception("The node timed out.")
        except Exception as cause:
            raise RuntimeError("An error was encountered.") from cause

    monkeypatch.setattr("dphero.federated.simulation.run_simulation", run_simulation)
    found = CliRunner().invoke(app, ["federate", *SETTINGS, "--out", str(tmp_path / "run")])
    assert found.exit_code == 2
    assert "Ray, which runs the simulated clients, failed: The node timed out." in found.output
    assert not (tmp_path / "run").exists(), "nothing was begun"


def test_nobody_waits_for_clients_when_ray_has_failed():
    from dphero.federated.server.rounds import Roster

    roster = Roster()
    roster.abandoned = True
    with pytest.raises(ConnectionError):
        roster.wait(None, 3, patience=600)


def test_what_clients_kept_stays_when_the_federation_fails(tmp_path, monkeypatch):
    """Their ledgers and why they failed; the folder of one that no client began is removed."""
    from dphero.federated import simulation

    def fails(directory, *_, begun, **__):
        if begun:
            (directory.path / "clients" / "0").mkdir(parents=True)
            (directory.path / "clients" / "0" / "ledger.json").write_text("{}")
        raise ValueError("all clients failed")

    for begun in (False, True):
        out = tmp_path / f"run-{begun}"
        monkeypatch.setattr(simulation, "simulate", lambda *each, begun=begun, **more: fails(*each, begun=begun))
        found = CliRunner().invoke(app, ["federate", *SETTINGS, "--out", str(out)])
        assert found.exit_code and "all clients failed" in found.output
        assert out.exists() == begun
