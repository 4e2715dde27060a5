"""SuperLink and SuperNodes as real processes on loopback, with TLS and node authentication."""

import contextlib
import fcntl
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path

import pytest

pytest.importorskip("flwr")

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from dphero.accounting import Ledger
from dphero.federated.deployment import _client, _settings

APP = Path(__file__).parents[2] / "examples" / "federated_app"
BIN = Path(sys.executable).parent


class Context:
    """What a node knows."""

    node_id = 7

    def __init__(self, node=None, **run):
        self.node_config, self.run_config = node or {}, {"data": "digits", **run}


def test_a_clients_budget_is_its_own(tmp_path):
    node = {"partition-id": 0, "home": str(tmp_path), "epsilon": 2.0, "delta": 1e-4}
    client = _client(Context(node, clients=2, sampled=1, rounds=3, lr=0.25))
    assert (client.recipe.epsilon, client.recipe.delta, client.recipe.lr) == (2.0, 1e-4, 0.25)
    assert client.federation.rounds == 3
    with pytest.raises(ValueError, match="the run config sets epsilon"):
        _client(Context(node, epsilon=100.0))
    with pytest.raises(ValueError, match="the run config sets noise-multiplier"):
        _settings({"data": "digits", "noise-multiplier": 0.01})
    with pytest.raises(ValueError, match="protects nothing"):
        _client(Context(node, method="sgd"))
    with pytest.raises(ValueError, match="names code"):
        _client(Context(node, model="os:system"))


@pytest.mark.parametrize(
    ("missing", "message"), [("home", "keeps its ledger"), ("epsilon", "the budget of this client")]
)
def test_a_client_without_budget_or_ledger_is_refused(missing, message, tmp_path):
    node = {"partition-id": 0, "home": str(tmp_path), "epsilon": 2.0}
    del node[missing]
    with pytest.raises(ValueError, match=message):
        _client(Context(node))


# -- processes ------------------------------------------------------------------------------------------------------


def free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def certificates(path):
    """A certificate authority, and a certificate of 127.0.0.1 that it signed."""
    now, keys, made = datetime.now(UTC), {}, {}
    for name in ("ca", "server"):
        keys[name] = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"dphero test {name}")])
        builder = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(made["ca"].subject if made else subject)
            .public_key(keys[name].public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - timedelta(days=1))
            .not_valid_after(now + timedelta(days=1))
            .add_extension(x509.BasicConstraints(ca=name == "ca", path_length=None), critical=True)
        )
        if name == "server":
            names = x509.SubjectAlternativeName([x509.IPAddress(ip_address("127.0.0.1"))])
            builder = builder.add_extension(names, critical=False)
        made[name] = builder.sign(keys["ca"], hashes.SHA256())
        (path / f"{name}.crt").write_bytes(made[name].public_bytes(serialization.Encoding.PEM))
    secret = serialization.NoEncryption()
    form = serialization.PrivateFormat.PKCS8
    (path / "server.key").write_bytes(keys["server"].private_bytes(serialization.Encoding.PEM, form, secret))


def node_key(path):
    key = ec.generate_private_key(ec.SECP384R1())
    openssh, nothing = serialization.PrivateFormat.OpenSSH, serialization.NoEncryption()
    path.write_bytes(key.private_bytes(serialization.Encoding.PEM, openssh, nothing))
    public = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    path.with_suffix(".pub").write_bytes(public)


class Machines:
    """The processes of a deployment; all of them end with it."""

    def __init__(self, path):
        self.path, self.running, self.port = path, [], free_port()
        certificates(path)
        (path / "flwr").mkdir()
        (path / "flwr" / "config.toml").write_text(
            f'[superlink]\ndefault = "tls"\n[superlink.tls]\naddress = "127.0.0.1:{self.port}"\n'
            f'root-certificates = "{path / "ca.crt"}"\n'
        )
        self.environment = {
            **os.environ,
            "FLWR_HOME": str(path / "flwr"),
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
            "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
            "RAY_USAGE_STATS_ENABLED": "0",
            "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
            "OMP_NUM_THREADS": "1",
        }

    def start(self, name, *command):
        log = open(self.path / f"{name}.log", "a")  # noqa: SIM115 (the process holds it)
        process = subprocess.Popen(
            [str(BIN / command[0]), *map(str, command[1:])],
            env=self.environment, stdout=log, stderr=log, start_new_session=True, cwd=self.path,
        )  # fmt: skip
        self.running.append(process)
        return process

    def call(self, *command, timeout=90):
        found = subprocess.run(
            [str(BIN / "flwr"), *map(str, command)],
            env=self.environment, capture_output=True, text=True, timeout=timeout, cwd=self.path,
        )  # fmt: skip
        assert found.returncode == 0, found.stdout + found.stderr + self.logs()
        return found.stdout

    def superlink(self):
        self.start(
            "superlink", "flower-superlink", "--ssl-ca-certfile", self.path / "ca.crt", "--ssl-certfile",
            self.path / "server.crt", "--ssl-keyfile", self.path / "server.key", "--enable-supernode-auth", "--host",
            "127.0.0.1", "--port", self.port, "--disable-runtime-dependency-installation",
        )  # fmt: skip
        until = time.monotonic() + 60
        while time.monotonic() < until:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", self.port)) == 0:
                    return
            time.sleep(0.5)
        raise AssertionError((self.path / "superlink.log").read_text()[-2000:])

    def supernode(self, number, config):
        return self.start(
            f"node{number}", "flower-supernode", "--root-certificates", self.path / "ca.crt", "--superlink",
            f"127.0.0.1:{self.port}", "--auth-supernode-private-key", self.path / f"node{number}", "--host",
            "127.0.0.1", "--port", free_port(), "--node-config", config,
        )  # fmt: skip

    def logs(self):
        return "\n".join(f"== {log.name}\n{log.read_text()[-3000:]}" for log in self.path.glob("*.log"))

    def close(self):
        for process in reversed(self.running):
            kill(process)


def kill(process):
    """End a process and all that it started, at once."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


@pytest.fixture
def machines(tmp_path):
    found = Machines(tmp_path)
    try:
        yield found
    finally:
        found.close()


def wait_for(condition, seconds, machines):
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, machines.logs()
        time.sleep(0.3)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_client_that_is_killed_in_a_round_comes_back_and_its_ledger_is_complete(machines, tmp_path):
    shutil.copytree(APP, tmp_path / "app")
    out, homes = tmp_path / "run", tmp_path / "homes"
    machines.superlink()
    for number in range(2):
        node_key(tmp_path / f"node{number}")
        machines.call("supernode", "register", tmp_path / f"node{number}.pub", "tls")

    def node(number):
        config = f'partition-id={number} num-partitions=2 home="{homes / str(number)}" epsilon=8.0 delta=0.0001'
        return machines.supernode(number, config)

    nodes = [node(number) for number in range(2)]
    settings = {
        "out": f'"{out}"', "rounds": 3, "local-epochs": 30, "accountant": '"rdp"',
        "answer-seconds": 150.0, "patience": 120.0,
    }  # fmt: skip
    machines.call("run", tmp_path / "app", "tls", "--run-config", " ".join(f"{k}={v}" for k, v in settings.items()))

    def lines():
        path = out / "metrics.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    wait_for(lambda: len(lines()) >= 1, 300, machines)
    before = (homes / "1" / "client.json").read_bytes()
    lock = homes / "1" / ".lock"
    wait_for(lambda: locked(lock), 120, machines)  # it is training for round 2
    kill(nodes[1])
    assert (homes / "1" / "client.json").read_bytes() == before, "killed before its answer was charged"

    def finished():
        if nodes[1].poll() is not None:  # refused until the SuperLink has noticed that the former one is gone
            nodes[1] = node(1)
        return (out / "result.json").exists()

    wait_for(finished, 420, machines)

    rounds = lines()
    assert [line["round"] for line in rounds] == [1, 2, 3]
    assert rounds[1]["failed"] == {"1": "no answer"}
    assert "0" in rounds[1]["averaged"], "the others went on"
    assert "1" in rounds[2]["averaged"], "it came back"
    for name in "01":
        (count,) = Ledger.from_json((homes / name / "ledger.json").read_text()).counts.values()
        taken = sum(name in line["averaged"] for line in rounds)
        assert count % taken == 0
        assert count // taken == 30 * 22, "30 epochs of 22 lots in each round, each of them once"
    found = json.loads((out / "result.json").read_text())
    assert found["epsilon"] <= 8.0
    wait_for(lambda: '"finished:completed"' in machines.call("ls", "tls", "--format", "json"), 60, machines)


def locked(path):
    with open(path) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        return False
