"""Settings for all tests: one thread a process, a GPU only for those that want one, the same examples every time."""

import os
import signal
import sys

import hypothesis
import pytest

# Small matrices lose more by threads that wait for each other than they gain, and `make test` has a process per core.
# Torch and numpy read this when imported, and processes that tests start inherit it: sums have the same last digits.
os.environ.setdefault("OMP_NUM_THREADS", "1")

hypothesis.settings.register_profile("repeatable", derandomize=True, deadline=None)
hypothesis.settings.load_profile("repeatable")


signal.signal(signal.SIGHUP, signal.SIG_DFL)  # where the tests were started under nohup, it is ignored


def pytest_configure(config: pytest.Config) -> None:
    """Hide GPUs, on which two equal runs may differ in their bits, unless tests for them are asked for (`-m gpu`).

    `CUDA_VISIBLE_DEVICES=0 pytest tests/cuda_graphs/test_replay.py` runs there those that can do without.
    """
    chosen = config.getoption("markexpr", "")
    if "gpu" not in chosen or "not gpu" in chosen:
        os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")


@pytest.fixture(autouse=True)
def _no_keys_from_other_tests() -> None:
    """Let no test be warned of a seed that another one used in the same process."""
    if "dphero.noise.register" in sys.modules:
        sys.modules["dphero.noise.register"]._used.clear()


@pytest.fixture
def same_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give releases of one key and number the same noise whatever their sums, for tests that compare the sums."""
    from dphero.noise import FastNoise

    monkeypatch.setattr(FastNoise, "_bind", lambda self, release, values: None)


@pytest.fixture
def short_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compute as on a GPU with tensor cores; their own products are replaced by those of widened numbers."""
    import torch

    from dphero.numerics import products

    def of_short(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        assert a.dtype == b.dtype == torch.bfloat16
        return torch.matmul(a.float(), b.float(), out=out)

    monkeypatch.setattr(products, "on_tensor_cores", lambda x: True)
    monkeypatch.setattr(products, "_of_short", of_short)
