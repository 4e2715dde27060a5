"""Damaged files of runs and checkpoints: named and never used, or without any effect.

The oracle: after damage, whatever is done with the run or checkpoint either raises an error of the kind that the
command line shows as one line, or gives exactly the weights, ledger, price, metrics and predictions of the unharmed.
"""

from __future__ import annotations

import random
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dphero.audit.run_ledger import check_ledger
from dphero.experiments import Interrupted, RunDirectory, resolve, train
from dphero.experiments.runs.prediction import Predictor
from tests.fuzz.harness import Findings, attempt
from tests.trainer import Training, training

SECONDS = 60
SETTINGS = {"data": "digits", "noise_multiplier": 3.0, "epochs": 2, "seed": 987654321, "lot": 256}
OTHER = {**SETTINGS, "noise_multiplier": 5.0, "seed": 1}
REFUSED = (ValueError, OSError)  # DamagedFile is one


def damaged(contents: bytes, draw: random.Random, others: list[bytes]) -> tuple[str, bytes | None]:
    """Return what an accident makes of a file (``None``: it is gone), and what kind of accident it was."""
    size = len(contents)
    at = draw.randrange(size) if size else 0
    kind = draw.choice(("flip", "flip", "flip", "flips", "truncated", "garbage", "zeros", "appended", "empty", "gone",
                        "another", "doubled", "inserted", "lost"))  # fmt: skip
    if kind == "flip" and size:
        return kind, contents[:at] + bytes([contents[at] ^ 1 << draw.randrange(8)]) + contents[at + 1 :]
    if kind == "flips" and size:
        changed = bytearray(contents)
        for _ in range(draw.randrange(2, 20)):
            changed[draw.randrange(size)] ^= 1 << draw.randrange(8)
        return kind, bytes(changed)
    if kind == "garbage" and size:
        return kind, contents[:at] + draw.randbytes(min(32, size - at)) + contents[at + 32 :]
    if kind == "zeros" and size:
        return kind, contents[:at] + bytes(min(512, size - at)) + contents[at + 512 :]
    if kind == "inserted":
        return kind, contents[:at] + draw.randbytes(draw.randrange(1, 9)) + contents[at:]
    if kind == "lost":
        return kind, contents[:at] + contents[at + draw.randrange(1, 9) :]
    if kind == "appended":
        return kind, contents + draw.choice((b"\0", b"\n", b"{}", draw.randbytes(40)))
    if kind == "doubled":
        return kind, contents + contents
    if kind == "another" and others:
        return kind, draw.choice(others)
    if kind == "gone":
        return kind, None
    return ("empty", b"") if kind == "empty" else ("truncated", contents[:at])


def make_runs(folder: Path) -> tuple[Path, Path, Path]:
    """Return a finished run, one that was stopped, and a finished one with other settings."""
    finished, stopped, other = (folder / name for name in ("finished", "stopped", "other"))
    train(RunDirectory.create(finished, resolve(SETTINGS)))
    train(RunDirectory.create(other, resolve(OTHER)))
    try:
        train(
            RunDirectory.create(stopped, resolve(SETTINGS)),
            report=lambda progress: progress.step == 7 and signal.raise_signal(signal.SIGTERM),
        )
    except Interrupted:
        return finished, stopped, other
    raise AssertionError("the run was not stopped")


def outcome(path: Path) -> dict[str, Any]:
    """Do all that is done with a run: go on with it or show it, predict, read its statement, its ledger and metrics."""
    shown = train(RunDirectory.open(path))
    directory = RunDirectory.open(path)
    images = np.linspace(-1, 1, 64, dtype=np.float32).reshape(1, 1, 8, 8)
    np.save(path.parent / "x.npy", images)
    predictor = Predictor(path)
    timing = ("seconds", "run")
    return {
        "result": {name: value for name, value in shown.items() if name not in timing},
        "predictions": predictor.predict(path.parent / "x.npy"),
        "weights": {name: value.tolist() for name, value in predictor.model.state_dict().items()},
        "statements": [directory.read(name) for name in ("statement.txt", "statement.json")],
        "ledger": directory.ledger.to_json(),
        "price": check_ledger(directory).ledger_epsilon,
        "metrics": [{name: value for name, value in line.items() if name not in timing} for line in directory.metrics],
    }


def fuzz_runs(count: int, seed: int, folder: Path) -> Findings:
    """Damage files of a finished and of a stopped run."""
    findings, draw = Findings("files of runs"), random.Random(seed)
    finished, stopped, other = make_runs(folder)
    expected = outcome(Path(shutil.copytree(finished, folder / "whole" / "run")))
    for number in range(count):
        source = finished if draw.random() < 0.6 else stopped
        path = Path(shutil.copytree(source, folder / "case" / "run"))
        files = sorted(file for file in path.rglob("*") if file.is_file())
        file = draw.choice(files)
        name = str(file.relative_to(path))
        others = [each.read_bytes() for each in files if each != file]
        same = other / name
        if same.exists():
            others += [same.read_bytes()] * 5
        kind, contents = damaged(file.read_bytes(), draw, others)
        if contents is None:
            file.unlink()
        else:
            file.write_bytes(contents)
        case = f"{number}: {source.name}/{name} {kind}"
        _judge(findings, case, name, kind, lambda path=path: outcome(path), expected)
        shutil.rmtree(folder / "case")
    return findings


def _judge(findings: Findings, case: str, name: str, kind: str, use: Callable[[], Any], expected: Any) -> None:
    found, error = attempt(use, SECONDS)
    if isinstance(error, REFUSED):
        names_it = Path(name).name in str(error) or kind in ("gone", "another") or name == "recipe.toml"
        findings.note("refused") if names_it else findings.fault("damage not named", case, error)
    elif error is not None:
        findings.fault("hang" if type(error).__name__ == "Hang" else "traceback", case, repr(error))
    elif found == expected:
        findings.note("without effect")
    elif name == "metrics.jsonl" and kind == "gone" and {**found, "metrics": 0} == {**expected, "metrics": 0}:
        findings.note("metrics lost, which was said")
    else:
        changed = [part for part in expected if found[part] != expected[part]]
        findings.fault("silently accepted", case, f"other {', '.join(changed)}")


CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "adaptive": {"clipping": "adaptive"},
    "shuffle": {"sampling": "shuffle"},
    "isotropic": {"guidance": "isotropic"},
}


def fuzz_checkpoints(count: int, seed: int, folder: Path) -> Findings:
    """Damage checkpoints of the library."""
    findings, draw = Findings("library checkpoints"), random.Random(seed)
    folder.mkdir(parents=True, exist_ok=True)
    saved, expected = {}, {}
    for name, options in CONFIGURATIONS.items():
        begun = training(**options)
        begun.steps(5)
        begun.engine.save(folder / f"{name}.pt")
        saved[name] = (folder / f"{name}.pt").read_bytes()
        expected[name] = _loaded(training(**options), folder / f"{name}.pt")
    path = folder / "case.pt"
    for number in range(count):
        name = draw.choice(list(CONFIGURATIONS))
        others = [contents for other, contents in saved.items() if other != name]
        kind, contents = damaged(saved[name], draw, others)
        path.unlink(missing_ok=True)
        if contents is not None:
            path.write_bytes(contents)
        run = training(**CONFIGURATIONS[name])
        before = _state(run)
        found, error = attempt(lambda run=run: _loaded(run, path), SECONDS)
        case = f"{number}: {name} {kind}"
        if isinstance(error, REFUSED):
            if _state(run) == before:
                findings.note("refused")
            else:
                findings.fault("refused, but changed", case, error)
        elif error is not None:
            findings.fault("hang" if type(error).__name__ == "Hang" else "traceback", case, repr(error))
        elif found == expected[name]:
            findings.note("without effect")
        else:
            findings.fault("silently accepted", case, [part for part in found if found[part] != expected[name][part]])
    return findings


def _loaded(run: Training, path: Path) -> dict[str, Any]:
    run.engine.load(path)
    state = _state(run)
    (gradients,) = run.steps(1)
    return {**state, "next": {name: value.tolist() for name, value in gradients.items()}}


def _state(run: Training) -> dict[str, Any]:
    torch.manual_seed(0)
    return {
        "steps": run.engine.steps,
        "ledger": run.engine.ledger.to_json(),
        "weights": {name: value.tolist() for name, value in run.weights().items()},
        "optimizer": str(run.optimizer.state_dict()),
    }
