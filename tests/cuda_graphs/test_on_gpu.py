"""What only a GPU can show of recordings: memory that they share, random numbers, and what a failed one leaves."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from dphero import PrivacyEngine
from dphero.cuda_graphs import pool, replay
from dphero.cuda_graphs.borrowed import borrowed
from dphero.cuda_graphs.pool import Pool

pytestmark = pytest.mark.gpu


def images(count: int = 512, side: int = 8) -> TensorDataset:
    return TensorDataset(torch.randn(count, 3, side, side).cuda(), torch.randint(3, (count,)).cuda())


def network(width: int = 8) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, width, 3, padding=1), nn.GroupNorm(2, width), nn.ReLU(), nn.Dropout(0.2),
        nn.Conv2d(width, width, 3, padding=1), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 3),
    ).cuda()  # fmt: skip


def train(model: nn.Module, steps: int, data: TensorDataset | None = None, **options: Any) -> PrivacyEngine:
    engine = PrivacyEngine()
    settings = {"noise_multiplier": 1.0, "max_grad_norm": 1.0, "expected_batch_size": 64, "dataset_size": "public"}
    _, optimizer, loader = engine.make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), data_loader=data or images(),
        **{**settings, **options},
    )  # fmt: skip
    while engine.steps < steps:
        for x, y in loader:
            optimizer.zero_grad()
            with torch.autocast("cuda", torch.bfloat16):
                loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            if engine.steps == steps:
                break
    return engine


def graphs_of(engine: PrivacyEngine) -> Any:
    return engine._attached.taps._replay


def test_unasked_a_small_network_is_recorded(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "dphero.cuda_graphs")
    model = network()
    engine = train(model, 8)
    assert "are recorded at" in caplog.text and graphs_of(engine)._recordings
    assert all(p.isfinite().all() for p in model.parameters())


class Waits(nn.Module):
    """Waits for the GPU in a way that torch notices, or not."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.body, self.how = network(), how

    def forward(self, x: Tensor) -> Tensor:
        out = self.body(x)
        if self.how == "item":
            return out if float(out.detach()[0, 0]) > -1e9 else -out
        torch.cuda.synchronize()
        return out


@pytest.mark.parametrize("how", ["item", "synchronize"])
def test_a_recording_that_fails_leaves_nothing_behind(
    how: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replay, "_BUSY", 0.0)
    caplog.set_level("INFO", "dphero.cuda_graphs")
    stream, mode = torch.cuda.current_stream(), torch.cuda.get_sync_debug_mode()
    model = Waits(how)
    engine = train(model, 8)
    assert engine.steps == 8 and "without a recording" in caplog.text and len(caplog.records) == 1
    assert (torch.cuda.current_stream(), torch.cuda.get_sync_debug_mode()) == (stream, mode)
    assert not torch.equal(torch.rand(9, device="cuda"), torch.rand(9, device="cuda"))
    other = network()
    caplog.clear()
    assert graphs_of(train(other, 8))._recordings  # and another model can be recorded afterwards
    x = torch.randn(64, 3, 8, 8).cuda()
    assert not torch.equal(other(x) if other.eval() else x, model.eval()(x))


def test_random_numbers_of_a_replay_are_those_of_the_generator() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    again, drawn = Pool(device).record(lambda: torch.rand(1000, device=device))
    found = []
    for seed in (1, 2, 1):
        torch.cuda.manual_seed(seed)
        for _ in range(2):
            again()
            found.append(drawn.clone())
    assert torch.equal(found[0], found[4]) and torch.equal(found[1], found[5])
    assert not any(torch.equal(found[i], found[j]) for i, j in [(0, 1), (0, 2), (0, 3), (1, 2), (2, 3)])


def test_a_failed_recording_lets_the_generator_of_earlier_ones_go_on() -> None:
    device = torch.device("cuda", torch.cuda.current_device())

    def fails() -> None:
        torch.rand(3, device=device)
        torch.cuda.synchronize()

    with pytest.raises(RuntimeError):
        Pool(device).record(fails)
    torch.cuda.manual_seed(1)
    first = torch.rand(9, device=device)
    torch.cuda.manual_seed(1)
    assert torch.equal(first, torch.rand(9, device=device)) and not torch.equal(first, torch.rand(9, device=device))


def test_what_is_borrowed_is_read_where_it_lies() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.float64):
        x = torch.arange(24, device="cuda").reshape(4, 6).to(dtype)
        view = x[1:, ::2].T
        (other,) = borrowed((view,))
        assert torch.equal(other, view) and other.dtype == dtype and other.stride() == view.stride()
        x.zero_()
        assert not other.any()
    before = torch.cuda.memory_allocated()
    big = torch.ones(1 << 20, device="cuda")
    kept = borrowed({"big": [big]})
    del big
    assert torch.cuda.memory_allocated() == before and kept["big"][0].shape == (1 << 20,)


def test_recordings_of_several_sizes_share_their_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([(2.0, 2.0), (1.0, 0.1)] * 2)
    monkeypatch.setattr(pool, "seconds", lambda work, device: (work(), next(times))[1])
    taken, data = [], images(512, 64)
    for sampling in ("shuffle", "poisson"):
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before, model = torch.cuda.memory_reserved(), network(64)
        size = {"expected_batch_size": 96} if sampling == "shuffle" else {}
        engine = train(model, 6, data, sampling=sampling, **size)
        graphs = graphs_of(engine)
        assert [each.rows for each in graphs._known[0].passes] == ([96] if sampling == "shuffle" else [72, 96])
        taken.append(torch.cuda.max_memory_reserved() - before)
        del graphs
        engine.detach()
        del engine, model
    assert taken[1] < 1.25 * taken[0]
