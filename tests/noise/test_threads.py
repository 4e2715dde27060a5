"""Python work on torch's own threads: all of it is done, at the same time, and errors come back."""

from __future__ import annotations

import ctypes
import multiprocessing
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from dphero.noise import FastNoise, key_stream
from dphero.noise import threads as team

Patch = pytest.MonkeyPatch


@pytest.fixture(params=["torch's threads", "our own"])
def way(request: Any, monkeypatch: Patch) -> str:
    if request.param == "our own":
        monkeypatch.setattr(team, "_enter_region", None)
    elif team._enter_region is None:
        pytest.skip("this build of torch has no OpenMP that can be entered from outside")
    return str(request.param)


def test_this_build_of_torch_has_threads_to_share() -> None:
    """On Linux it comes with GNU's OpenMP. Should that change, noise would be right, but slower."""
    if sys.platform == "linux" and torch.backends.openmp.is_available():
        assert team._enter_region is not None


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_calls_meet(way: str, threads: int) -> None:
    """Each waits for all the others: they run at the same time, on threads of their own."""
    meeting = threading.Barrier(threads)
    seen: dict[int, int] = {}

    def work(number: int) -> None:
        meeting.wait(timeout=30)
        seen[number] = threading.get_ident()

    for _ in range(3):
        seen.clear()
        team.run_on_torch_threads(work, threads)
        assert sorted(seen) == list(range(threads)) and len(set(seen.values())) == threads
        assert threading.get_ident() in seen.values()


@pytest.mark.parametrize("bad", [0, 1])
@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_what_goes_wrong_is_raised_when_all_are_done(way: str, bad: int, error: type[BaseException]) -> None:
    done: list[int] = []
    meeting = threading.Barrier(2)

    def work(number: int) -> None:
        meeting.wait(timeout=30)
        if number == bad:
            raise error(f"number {number}")
        done.append(number)

    with pytest.raises(error, match=f"number {bad}"):
        team.run_on_torch_threads(work, 2)
    assert done == [1 - bad]


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_an_interrupt_is_not_lost_on_the_way_into_a_call(two_threads: None) -> None:
    """Python looks for signals at the very beginning of a call, where C is the only one to see what is raised."""

    class Region:
        def __call__(self, function: Any, data: Any, threads: int, flags: int) -> None:
            """OpenMP with one thread, and a callback that raised before its first line."""

    before, team._enter_region = team._enter_region, Region()
    try:
        with pytest.raises(KeyboardInterrupt):
            team.run_on_torch_threads(lambda number: None, 2)
        noise = torch.zeros(200_000)
        with pytest.raises(KeyboardInterrupt):
            FastNoise(5).fill([noise], 1.0, 0)
    finally:
        team._enter_region = before


def test_noise_that_is_not_all_there_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key_stream, "run_on_torch_threads", lambda work, threads: None)
    with pytest.raises(RuntimeError, match="only 0 of 4 pieces of noise were drawn"):
        FastNoise(5).fill([torch.zeros(400_000)], 1.0, 0)


def test_matrix_products_go_on_afterwards(way: str) -> None:
    before, (a, b) = torch.get_num_threads(), torch.randn(2, 300, 300).double()
    torch.set_num_threads(2)
    try:
        for _ in range(3):
            expected = a @ b
            team.run_on_torch_threads(lambda number: None, 2)
            assert torch.equal(a @ b, expected)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("threads", [1, 2])
def test_what_torch_computes_in_a_call_stays_on_its_thread(way: str, threads: int) -> None:
    before, alone = torch.get_num_threads(), []
    torch.set_num_threads(2)

    def work(number: int) -> None:
        alone.append(torch.get_num_threads() == 1 or _in_region())

    try:
        team.run_on_torch_threads(work, threads)
        assert alone == [True] * threads
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def _in_region() -> bool:
    return bool(ctypes.CDLL(torch._C.__file__).omp_in_parallel())


def _draw(pipe: Any, size: int) -> None:
    torch.set_num_threads(2)
    noise = torch.empty(size)
    FastNoise(5).fill([noise], 1.0, 0)
    pipe.send(noise.numpy())


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of forking where there are threads
@pytest.mark.parametrize("size", [60_000, 400_000], ids=["for one thread", "for several"])
def test_a_forked_process_does_not_wait_for_threads_that_it_has_lost(size: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        torch.randn(300, 300) @ torch.randn(300, 300)  # torch has threads now
        expected = torch.empty(size)
        FastNoise(5).fill([expected], 1.0, 0)
    finally:
        torch.set_num_threads(before)
    mine, theirs = multiprocessing.Pipe()
    child = multiprocessing.get_context("fork").Process(target=_draw, args=(theirs, size))
    child.start()
    try:
        assert mine.poll(60), "the child hangs"
        assert torch.equal(torch.from_numpy(mine.recv()), expected)
    finally:
        child.kill()
        child.join()
