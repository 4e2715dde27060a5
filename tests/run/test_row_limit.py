"""``physical_batch_size="auto"``: as many rows as fit, by a memory that is made up here, and by that of a GPU."""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from dphero import checkpoint
from dphero.run.memory import CudaMemory
from dphero.run.row_limit import MeasuredRows, RowLimit, make_row_limit
from tests.trainer import Training, data, same, training

SHARE = 0.8


class MadeUpMemory:
    """A batch takes ``fixed`` bytes and ``each`` for every row; one that takes more than there are is an error."""

    def __init__(self, size: float, each: float, fixed: float = 0, scatter: Iterable[float] = (1.0,)) -> None:
        self.size, self.each, self.fixed, self.scatter = size, each, fixed, list(scatter)
        self.rows, self.begun, self.steps = 0, 0, 0

    @property
    def room(self) -> int:
        return int(self.size)

    @property
    def peak(self) -> int:
        return int((self.fixed + self.each * self.rows) * self.scatter[self.begun % len(self.scatter)])

    def begin(self) -> None:
        self.begun += 1

    def run(self, limit: MeasuredRows, lots: Iterable[int]) -> list[int]:
        """Go through lots of so many rows; return the rows of their parts."""
        parts: list[int] = []
        for left in lots:
            while left > 0:
                self.rows = min(left, limit.rows)
                left -= self.rows
                limit.begin()
                assert self.fixed + self.each * self.rows <= self.size, "out of memory"
                limit.note(self.rows, stepped=self.steps > 0)
                parts.append(self.rows)
            self.steps += 1
        return parts


def test_a_size_grows_until_memory_is_full() -> None:
    memory = MadeUpMemory(size=1e9, each=1e6, fixed=5e7)
    limit = MeasuredRows(memory, 5000)
    parts = memory.run(limit, [4000] * 3)
    assert limit.settled and limit.rows == 736  # 1e6 · 750 + 5e7 would be 0.8 · 1e9
    assert parts[:7] == [4, 4, 4, 16, 16, 64, 64]  # the first batch is examined, and not counted
    assert max(b / a for a, b in pairwise(parts)) <= 4


def test_a_lot_that_fits_comes_whole() -> None:
    memory = MadeUpMemory(size=1e9, each=1e6)
    limit = MeasuredRows(memory, 130)
    memory.run(limit, [100] * 2)
    assert limit.settled and limit.rows == 130
    assert MeasuredRows(memory, 3).settled


def test_room_is_left_for_what_comes_with_the_first_step() -> None:
    memory = MadeUpMemory(size=1e9, each=1e6)
    limit = MeasuredRows(memory, 5000, later=600_000_000)
    memory.run(limit, [4000])
    assert limit.rows == 200 and not limit.settled
    memory.size -= 600_000_000  # they are there now
    memory.run(limit, [4000])
    assert limit.rows == 320 and limit.settled


def test_where_nothing_more_fits_the_size_stays() -> None:
    memory = MadeUpMemory(size=1e9, each=2.4e8)
    limit = MeasuredRows(memory, 5000)
    memory.run(limit, [20] * 2)
    assert limit.settled and limit.rows == 4


sizes = st.floats(1e6, 1e9)


@given(sizes, st.floats(0, 0.5), st.floats(0, 0.3), st.lists(st.floats(0.9, 1.1), min_size=7, max_size=7), st.data())
def test_no_batch_is_too_large(each: float, fixed: float, share: float, scatter: list[float], lots: Any) -> None:
    """Whatever a row takes, with measurements that are wrong by a tenth, and for lots of all sizes."""
    size = each / (share / 5 + 1e-3)  # from 16 to 1000 rows
    memory = MadeUpMemory(size, each, fixed * size, scatter)
    if memory.fixed + 4 * each > size:
        return
    most = lots.draw(st.integers(4, 3000))
    limit = MeasuredRows(memory, most)
    small = lots.draw(st.lists(st.integers(1, most), max_size=8))
    memory.run(limit, [*small, *[most] * 40])
    assert limit.settled
    if limit.rows < most and not small:  # what is left would not have taken many more
        found = 1.1 * (memory.fixed + memory.each * limit.rows)
        assert found * (1.1 + 9 / limit.rows) > SHARE * size


# -- in the engine ---------------------------------------------------------------------------------------------


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> MadeUpMemory:
    """Let models lie on a device with memory for ten rows."""
    made = MadeUpMemory(size=1000, each=80)
    monkeypatch.setattr("dphero.run.row_limit.memory_of", lambda parameters: made)
    monkeypatch.setattr("dphero.run.row_limit._AFTER_A_STEP", 0)
    return made


def trained(memory: MadeUpMemory, steps: int, run: Training) -> tuple[list[Tensor], list[dict[str, Tensor]], list[int]]:
    """Return the rows of each lot, its release, and the rows of each part."""
    lots: list[Tensor] = []
    releases, parts, rows = [], [], []
    while run.engine.steps < steps:
        for x, y in run.loader:
            before, memory.rows = run.engine.steps, len(x)
            rows.append(x)
            parts.append(len(x))
            run.optimizer.zero_grad()
            F.cross_entropy(run.module(x), y).backward()
            run.optimizer.step()
            if run.engine.steps > before:
                lots.append(torch.cat(rows))
                releases.append(run.gradients())
                rows = []
            if run.engine.steps == steps:
                break
    return lots, releases, parts


@pytest.mark.usefixtures("same_noise")
@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("options", [{}, {"sampling": "shuffle"}, {"clipping": "adaptive"}], ids=str)
def test_lots_and_releases_do_not_depend_on_the_size(options: Any, workers: int, memory: MadeUpMemory) -> None:
    def run(physical: Any) -> Training:
        loader = DataLoader(data(), batch_size=12, num_workers=workers)
        return training(data_loader=loader, physical_batch_size=physical, **options)

    fixed, auto = run(7), run("auto")
    lots, releases, _ = trained(memory, 8, fixed)
    found, grown, parts = trained(memory, 8, auto)
    assert auto.loader.physical_batch_size == 10 and {4, 10} <= set(parts) and max(parts) == 10
    for first, second in zip(lots, found, strict=True):
        assert torch.equal(first, second)
    for one, other in zip(releases, grown, strict=True):
        for name in one:
            torch.testing.assert_close(one[name], other[name], rtol=1e-4, atol=1e-6)
    assert fixed.engine.ledger == auto.engine.ledger and fixed.engine.price(1e-5) == auto.engine.price(1e-5)
    assert fixed.engine.diagnostics.examples == auto.engine.diagnostics.examples


def test_a_resumed_run_begins_with_the_size_that_was_found(
    memory: MadeUpMemory, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    whole = training(physical_batch_size="auto")
    trained(memory, 5, whole)
    assert "lots come in batches of at most 10 rows" in caplog.text
    whole.engine.save(tmp_path / "run.pt")
    expected = trained(memory, 8, whole)[1]

    resumed = training(physical_batch_size="auto")
    assert resumed.loader.physical_batch_size == 4
    resumed.engine.load(tmp_path / "run.pt")
    assert resumed.loader.physical_batch_size == 10
    begun = memory.begun
    assert all(same(*pair) for pair in zip(expected, trained(memory, 8, resumed)[1], strict=True))
    assert memory.begun == begun  # nothing is measured any more

    memory.size = 500  # on a smaller device
    smaller = training(physical_batch_size="auto")
    smaller.engine.load(tmp_path / "run.pt")
    assert smaller.loader.physical_batch_size == 4


def test_a_checkpoint_of_before_begins_with_few_rows(memory: MadeUpMemory, tmp_path: Path) -> None:
    run = training(physical_batch_size=5)
    run.steps(2)
    run.engine.save(tmp_path / "run.pt")
    saved = checkpoint.load(tmp_path / "run.pt").engine
    for state in (saved, {name: value for name, value in saved.items() if name != "physical_batch_size"}):
        resumed = training(physical_batch_size="auto")
        resumed.engine._attached.load_state_dict(state)
        assert resumed.loader.physical_batch_size == 4
        trained(memory, 4, resumed)


def test_on_a_cpu_it_is_the_lot_up_to_a_bound() -> None:
    assert training(physical_batch_size="auto").loader.physical_batch_size == 25  # four deviations above 12
    many = training(dataset=data(2000), expected_batch_size=600, physical_batch_size="auto", dataset_size="public")
    assert many.loader.physical_batch_size == 256
    assert RowLimit(None).state_dict() is None


def test_a_model_on_several_devices_needs_a_number() -> None:
    parameters = {"a": torch.zeros(2), "b": torch.zeros(2, device="meta")}
    with pytest.raises(ValueError, match="the model is on cpu and meta: give a number of rows"):
        make_row_limit("auto", 30, parameters, recorded=False)


def test_there_is_room_in_what_is_free_and_in_what_torch_keeps(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = {"memory_allocated": 30, "memory_reserved": 50, "get_per_process_memory_fraction": 1.0}
    for name, number in numbers.items():
        monkeypatch.setattr(torch.cuda, name, lambda device, number=number: number)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (100, 200))
    segments = [{"device": 0, "total_size": 50, "allocated_size": 30, "segment_pool_id": (0, 0)}]
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: segments)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: None)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 75)
    memory = CudaMemory(torch.device("cuda"))
    memory.begin()
    assert (memory.room, memory.peak) == (120, 45)
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda device: 0.4)
    memory.begin()
    assert memory.room == 50  # 80 are allowed, of which 30 are taken
    segments.append({"device": 0, "total_size": 9, "allocated_size": 2, "segment_pool_id": (0, 1)})
    memory.begin()
    assert memory.room == 43  # and 7 are kept for recordings


@pytest.mark.gpu
def test_a_gpu_is_filled_and_not_overfilled() -> None:
    """With 2 GiB of it, and examples of which each takes some MiB in a hidden layer."""
    gc.collect()
    torch.cuda.empty_cache()
    allowed = 2 * 2**30
    kept = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()  # by recordings of other tests
    torch.cuda.set_per_process_memory_fraction((kept + allowed) / torch.cuda.mem_get_info()[1])
    try:
        model = nn.Sequential(
            nn.Conv2d(1, 64, 3, padding=1), nn.Tanh(), nn.Flatten(), nn.Linear(64 * 64 * 64, 3)
        ).cuda()
        x, y = torch.randn(2000, 1, 64, 64), torch.randint(3, (2000,))
        run = training(
            model, dataset=TensorDataset(x, y), expected_batch_size=1500, physical_batch_size="auto",
            guidance="isotropic", cuda_graphs=False,
        )  # fmt: skip
        while run.engine.steps < 2:
            for images, labels in run.loader:
                run.optimizer.zero_grad()
                F.cross_entropy(run.module(images.cuda()), labels.cuda()).backward()
                run.optimizer.step()
        limit: Any = run.engine._attached.row_limit
        assert limit.settled and 64 <= limit.rows < 1500
        assert 0.3 * allowed < limit.state_dict()["bytes"] <= 0.8 * allowed
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
