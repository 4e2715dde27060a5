"""The colouring of noise from a recording: what it makes, and where there is none."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from dphero.cuda_graphs import pool, recorded_colour
from dphero.cuda_graphs.recorded_colour import RecordedColour
from dphero.engine import assembly
from dphero.geometry.dense import Dense, Singular
from dphero.geometry.diagonal import Diagonal, Scalar
from dphero.geometry.geometry import Geometry, colour_all_, identity
from dphero.geometry.low_rank import LowRank
from dphero.guidance import PCA
from dphero.mechanism.clipped_sum import ClippedSum
from dphero.mechanism.release import Mechanism
from dphero.numerics.one_piece import room_for
from dphero.run import Run
from tests.cuda_graphs.stand_in import DEVICE, StandIn
from tests.live_bytes import peak_of
from tests.trainer import Training, data, network, training


@pytest.fixture(autouse=True)
def made(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Let noise be recorded wherever the tests run; count the recordings."""
    found: list[int] = []
    base: Any = StandIn if DEVICE.type == "cpu" else pool.Pool

    class Counted(base):  # type: ignore[misc]
        def record(self, work: Any) -> Any:
            found.append(1)
            return super().record(work)

    monkeypatch.setattr(recorded_colour, "Pool", Counted)
    monkeypatch.setattr(recorded_colour, "_DEVICES", (DEVICE.type,))
    return found


def basis(size: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.linalg.qr(torch.randn(size, size, generator=generator))[0].to(DEVICE)


def shapes(seed: int) -> dict[str, Geometry]:
    """One geometry of every form; those of all seeds have the same forms."""
    rows, columns = basis(12, seed), basis(20, seed + 1)
    low = LowRank(rows[:, :3].contiguous(), torch.tensor([3.0, 2.0, 1.5 + seed]), 0.5 + 0.1 * seed)
    return {
        "weight": Geometry((12, 20), left=low),
        "both": Geometry((12, 4, 5), low, LowRank(columns[:, :2].contiguous(), torch.tensor([2.0, 0.5]), 1.0 + seed)),
        "dense": Geometry((12, 3), left=Dense(rows, torch.linspace(0.5, 2.0 + seed, 12))),
        "bias": Geometry((12,), left=low),
        "diagonal": Geometry((5, 20), right=Diagonal(torch.linspace(1.0, 2.0 + seed, 20).to(DEVICE))),
        "scalar": Geometry((4, 3), left=Scalar(4, 2.0 + seed)),
        "plain": identity((7,)),
    }


def numbers(geometry: Mapping[str, Geometry], seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape.shape, generator=generator).to(DEVICE) for name, shape in geometry.items()}


def same(colour: RecordedColour, geometry: Mapping[str, Geometry], seed: int) -> bool:
    noise, expected = numbers(geometry, seed), numbers(geometry, seed)
    colour(geometry, noise)
    colour_all_(geometry, expected)
    return all(torch.allclose(noise[name], expected[name], rtol=1e-4, atol=1e-5) for name in geometry)


def test_it_makes_what_each_geometry_makes(made: list[int]) -> None:
    colour = RecordedColour()
    for step in range(12):
        assert same(colour, shapes(step // 4), step), step
    assert len(made) == 1


def test_a_geometry_of_another_form_is_recorded_anew(made: list[int]) -> None:
    colour, first = RecordedColour(), shapes(0)
    other = {**first, "weight": Geometry((12, 20), left=Dense(basis(12, 5), torch.linspace(1.0, 2.0, 12)))}
    assert all(same(colour, first if step < 6 else other, step) for step in range(12))
    assert len(made) == 2


def test_a_geometry_is_copied_once(monkeypatch: pytest.MonkeyPatch) -> None:
    copied, follow = [], recorded_colour.LiveGeometry.follow

    def counted(self: Any, geometry: Mapping[str, Geometry]) -> bool:
        copied.append(geometry)
        return follow(self, geometry)

    monkeypatch.setattr(recorded_colour.LiveGeometry, "follow", counted)
    colour, geometries = RecordedColour(), [shapes(0), shapes(1), shapes(2)]
    assert all(same(colour, geometries[step // 5], step) for step in range(15))
    assert len(copied) == 2


def test_noise_in_one_piece_is_copied_in_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU it lies so. The piece also holds what is not coloured."""
    geometry, copied, copy = shapes(0), list[int](), torch._foreach_copy_

    def side_by_side(tensors: Collection[Tensor]) -> list[Tensor]:
        meta = room_for([each.to("meta") for each in tensors])
        whole = torch.zeros(sum(-(-each.numel() // 64) * 64 for each in tensors), device=DEVICE)
        return [whole.as_strided(each.shape, each.stride(), each.storage_offset()) for each in meta]

    def counted(places: list[Tensor], values: list[Tensor]) -> None:
        copied.append(len(places))
        copy(places, values)

    monkeypatch.setattr(recorded_colour, "room_for", side_by_side)
    colour = RecordedColour()
    assert same(colour, geometry, 0) and same(colour, geometry, 1)  # of noise that lies about
    monkeypatch.setattr(torch, "_foreach_copy_", counted)
    for step in range(8):
        loose = numbers(geometry, step)
        noise = dict(zip(loose, side_by_side(loose.values()), strict=True))
        for name, part in noise.items():
            part.copy_(loose[name])
        colour(geometry, noise)
        colour_all_(geometry, loose)
        assert all(torch.allclose(noise[name], loose[name], rtol=1e-4, atol=1e-5) for name in geometry), step
    assert set(copied) == {1}


def test_isotropic_noise_is_left_as_it_is(made: list[int]) -> None:
    colour = RecordedColour()
    assert all(same(colour, {"a": identity((3,)), "b": identity((2, 2))}, step) for step in range(8))
    assert not made


def test_where_it_cannot_be_recorded_the_geometry_itself_is_used(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    colour = RecordedColour()
    bare = {"weight": Geometry((12, 3), left=Singular(basis(12, 0), torch.linspace(0.0, 2.0, 12)))}
    assert all(same(colour, bare, step) for step in range(8))
    assert sum("without a recording" in record.message for record in caplog.records) == 1


def test_noise_is_the_same_to_the_bit_before_and_after_it_is_recorded() -> None:
    colour, geometry, found = RecordedColour(), shapes(0), []
    for _ in range(6):
        noise = numbers(geometry, 1)
        colour(geometry, noise)
        found.append(noise)
    assert all(torch.equal(each[name], found[0][name]) for each in found for name in geometry)


def test_a_recording_that_makes_something_else_is_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    record = recorded_colour.Pool.record

    def wrong(self: Any, work: Any) -> Any:
        replay, result = record(self, work)
        return lambda: (replay(), places[0].mul_(1.01)), result

    monkeypatch.setattr(recorded_colour.Pool, "record", wrong)
    colour, places = RecordedColour(), list[Tensor]()
    for step in range(8):
        if colour._made is not None:
            places[:] = [colour._made.places["dense"]]
        assert same(colour, shapes(0), step)
    assert sum("something else" in record.message for record in caplog.records) == 1


def test_a_recording_that_writes_over_what_is_not_coloured_is_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    record, places = recorded_colour.Pool.record, list[Tensor]()

    def wrong(self: Any, work: Any) -> Any:
        replay, result = record(self, work)
        return lambda: (replay(), places[0].mul_(1.01)), result

    monkeypatch.setattr(recorded_colour.Pool, "record", wrong)
    colour = RecordedColour()
    for step in range(8):
        if colour._made is not None:
            places[:] = [colour._made.places["plain"]]
        assert same(colour, shapes(0), step)
    assert sum("something else" in record.message for record in caplog.records) == 1


def test_no_second_copy_of_all_noise_is_made(made: list[int]) -> None:
    """Where places and recordings are compared with what they should do, that takes a few parameters at a time."""
    scales = Diagonal(torch.linspace(1.0, 2.0, 1000).to(DEVICE))
    geometry = {str(n): Geometry((8, 1000), right=scales) for n in range(20)}
    colour, taken = RecordedColour(), []
    for step in range(6):
        noise = numbers(geometry, step)
        taken.append(peak_of(partial(colour, geometry, noise)) / (4 * 8 * 1000))
    assert made and taken[0] < taken[1] + 2 and taken[3] < taken[4] + 2, taken


def releases(
    colour: RecordedColour, count: int, clip: Callable[[Mechanism, int], ClippedSum], options: Mapping[str, Any]
) -> Iterator[tuple[Mechanism, dict[str, Tensor]]]:
    """Yield the private gradients of some lots whose noise is coloured so."""
    it = training(network().to(DEVICE), seed=5, guidance=PCA(refresh_every=3, exponent=0.5), **options).engine
    mechanism = it._attached.mechanism
    mechanism._colour = colour
    for step in range(count):
        mechanism.before_lot()
        if step % 2:
            mechanism.make_room()
        gradients = mechanism.release(clip(mechanism, step))
        with torch.no_grad():
            for name, parameter in mechanism._parameters.items():
                parameter.sub_(0.1 * gradients[name])
        yield mechanism, gradients


def some_sums(it: Mechanism, step: int) -> ClippedSum:
    """Sums of all parameters but one, for which nobody had a gradient."""
    sums = numbers({name: shape for name, shape in it.norm_geometry.items() if name != "0.bias"}, step)
    count = None if it.clipping.count_noise is None else torch.zeros((), dtype=torch.float64)
    return ClippedSum(sums, bound=it.clipping.norm, geometry=it.norm_geometry, divisor=it.expected_lot, count=count)


@pytest.mark.parametrize("options", [{}, {"clipping": "adaptive"}], ids=["flat", "adaptive"])
def test_gradients_are_those_of_a_run_that_never_records(
    made: list[int], monkeypatch: pytest.MonkeyPatch, options: Mapping[str, Any]
) -> None:
    """To the bit; and none is changed by a later release, although noise is drawn in the places of the recording."""
    colour, lent = RecordedColour(), list[bool]()
    found, kept = [], []
    for mechanism, gradients in releases(colour, 9, some_sums, options):
        assert colour._made is not None
        places = {each.untyped_storage().data_ptr() for each in colour._made.places.values()}
        assert not places & {each.untyped_storage().data_ptr() for each in gradients.values()}
        lent.append(mechanism._new_room().lent)
        found.append(gradients)
        kept.append({name: each.clone() for name, each in gradients.items()})
    assert len(made) == 1 and lent == [False] * 3 + [True] * 6
    monkeypatch.setattr(recorded_colour, "_FIRST", 100)
    usual = [gradients for _, gradients in releases(RecordedColour(), 9, some_sums, options)]
    assert len(made) == 1
    for now, then, as_usual in zip(found, kept, usual, strict=True):
        for name, value in now.items():
            assert torch.equal(value, then[name]) and torch.equal(value, as_usual[name]), name


def test_there_is_no_room_for_noise_of_another_form_or_of_parameters_that_were_cast(made: list[int]) -> None:
    geometry = shapes(0)
    other = {**geometry, "weight": Geometry((12, 20), left=Dense(basis(12, 5), torch.linspace(1.0, 2.0, 12)))}

    def recorded() -> RecordedColour:
        colour = RecordedColour()
        assert all(same(colour, geometry, step) for step in range(4))
        return colour

    colour, parameters = recorded(), numbers(geometry, 0)
    assert colour.room(geometry, parameters) is not None and colour.room(shapes(1), parameters) is not None
    assert colour.room(other, parameters) is None and same(colour, other, 1)
    assert recorded().room({name: identity(shape.shape) for name, shape in geometry.items()}, parameters) is None
    colour = recorded()
    assert colour.room(geometry, {name: each.double() for name, each in parameters.items()}) is None
    assert same(colour, geometry, 2)  # in places that are made anew
    colour = recorded()
    short = {name: each.bfloat16() for name, each in parameters.items()}
    assert colour.room(geometry, short) is not None  # its noise is drawn in float32
    with torch_deterministic():
        assert colour.room(geometry, parameters) is None


def test_an_error_on_noise_that_was_drawn_in_the_places_is_not_glossed_over(made: list[int]) -> None:
    """It may have been coloured in part: to go on with another way would colour it twice."""
    colour, geometry = RecordedColour(), shapes(0)
    assert all(same(colour, geometry, step) for step in range(5))
    room = colour.room(geometry, numbers(geometry, 0))
    assert colour._made is not None and room is not None

    def fail() -> None:
        raise RuntimeError("no memory")

    colour._made._replay = fail
    with pytest.raises(RuntimeError, match="no memory"):
        colour(geometry, room)
    assert same(colour, geometry, 6)  # of noise that lies elsewhere


@contextmanager
def torch_deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.gpu
def test_on_a_gpu_it_makes_what_each_geometry_makes(made: list[int]) -> None:
    assert DEVICE.type == "cuda"
    test_it_makes_what_each_geometry_makes(made)


@pytest.mark.parametrize("before", [2, 3, 6])
def test_a_resumed_run_has_the_same_noise_to_the_bit(
    before: int, made: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its noise is coloured without a recording at first, that of the unbroken run from one."""
    monkeypatch.setattr(assembly, "can_be_recorded", lambda *tensors: True)

    def run() -> Training:
        monkeypatch.setattr(Run, "_recorder", lambda self, wanted: None)  # passes are not what is looked at here
        return training(
            network().to(DEVICE),
            dataset=TensorDataset(*(part.to(DEVICE) for part in data().tensors)),
            guidance=PCA(refresh_every=3, exact_up_to=4, components=3),
        )

    unbroken, saved, resumed = run(), run(), run()
    unbroken.steps(9)
    saved.steps(before)
    saved.engine.save(tmp_path / "run.pt")
    resumed.engine.load(tmp_path / "run.pt")
    resumed.steps(9 - before)
    assert len(made) >= 1
    for name, value in unbroken.weights().items():
        assert torch.equal(resumed.weights()[name], value)
