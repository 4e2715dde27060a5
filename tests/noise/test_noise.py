"""Noise sources: the right law, no repetition, no replay, exact resumption."""

import copy
import hashlib
import itertools
import math
import multiprocessing
import os
import pickle
import warnings

import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from dphero.noise import FastNoise, NoiseSource, SecureNoise, fast, key_stream
from dphero.noise import box_muller as pairs
from tests.live_bytes import peak_of

KEY = bytes(range(32))
STD = 1.7


def make_fast() -> FastNoise:
    return FastNoise(seed=2024)


def make_secure() -> SecureNoise:
    return SecureNoise(_key=KEY)


both = pytest.mark.parametrize("make", [make_fast, make_secure], ids=["fast", "secure"])


def draw(source: NoiseSource, *shapes: int | tuple[int, ...], release: int, std: float = STD, dtype=torch.float32):
    tensors = [torch.full(shape if isinstance(shape, tuple) else (shape,), math.nan, dtype=dtype) for shape in shapes]
    source.fill(tensors, std, release)
    return tensors


def pvalue(sample: torch.Tensor, std: float) -> float:
    return stats.kstest(sample.double().flatten().numpy() / std, "norm").pvalue


# ---- the law -----------------------------------------------------------------------------------------------


@both
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["f32", "f64"])
def test_is_gaussian_of_the_asked_scale_and_no_other(make, dtype):
    (sample,) = draw(make(), 200_000, release=0, dtype=dtype)
    assert pvalue(sample, STD) > 0.01
    assert pvalue(sample, STD * 2 / 3) < 1e-12
    assert pvalue(sample, STD * 3 / 2) < 1e-12
    assert pvalue(sample, STD * 1.02) < 1e-3  # the test sees a scale that is off by two percent


@both
def test_moments(make):
    (sample,) = draw(make(), 1_000_000, release=0)
    z = sample.double() / STD
    assert abs(z.mean()) < 4e-3  # four standard errors
    assert abs(z.var() - 1) < 4 * math.sqrt(2) * 1e-3
    assert abs((z**3).mean()) < 4 * math.sqrt(15) * 1e-3
    assert abs((z**4).mean() - 3) < 4 * math.sqrt(96) * 1e-3  # kurtosis: a uniform has 1.8, a Laplace 6


@both
def test_small_tensors_together_follow_the_same_law(make):
    """Sizes below torch's block of 16 and across chunk borders take other paths through the code."""
    source = make()
    sample = torch.cat([t.flatten() for r in range(400) for t in draw(source, 1, (3, 5), 7, (2, 1, 2), 13, release=r)])
    assert pvalue(sample, STD) > 0.01
    assert pvalue(sample, STD * 0.9) < 1e-3


@both
def test_neighbours_are_independent(make):
    (sample,) = draw(make(), 500_000, release=0)
    z = (sample / STD).double()
    for lag in (
        1,
        2,
        8,
        16,
        1 << 15,
        1 << 16,
        1 << 17,
    ):  # lags at which blocks, halves and chunks would repeat
        for f in (lambda x: x, torch.abs, torch.square):
            x, y = f(z[:-lag]), f(z[lag:])
            assert abs(np.corrcoef(x, y)[0, 1]) < 5 / math.sqrt(len(x))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@both
def test_every_float_type(make, dtype):
    (sample,) = draw(make(), 100_000, release=0, std=1.0, dtype=dtype)
    assert sample.dtype == dtype
    assert abs(sample.double().mean()) < 0.015
    assert abs(sample.double().var() - 1) < 0.025


def test_float64_noise_uses_all_of_float64():
    """Float32 noise in a float64 tensor would leave the low bits zero."""
    for make in (make_fast, make_secure):
        (sample,) = draw(make(), 1000, release=0, dtype=torch.float64)
        assert (sample != sample.float().double()).float().mean() > 0.99


def test_mixed_types_and_devices_in_one_release():
    for make in (make_fast, make_secure):
        tensors = [torch.zeros(50_000, dtype=d) for d in (torch.float32, torch.float64, torch.bfloat16, torch.float32)]
        make().fill(tensors, STD, 0)
        for tensor in tensors:
            assert abs(tensor.double().std() / STD - 1) < 0.02
        normalised = torch.stack([t.double() for t in tensors])
        correlation = torch.corrcoef(normalised) - torch.eye(4)
        assert correlation.abs().max() < 0.025


# ---- the transform -------------------------------------------------------------------------------------------


def by_pairs(noise: torch.Tensor) -> np.ndarray:
    """Sines and cosines, as rows, of noise in whole blocks."""
    return noise.numpy().reshape(-1, 2, pairs.BLOCK // 2).transpose(1, 0, 2).reshape(2, -1)


def fast_transform(radii, angles, kind=np.int32, place=0.5) -> np.ndarray:
    """Sines and cosines of the pairs, as rows; second words put the smallest uniforms at a place of their interval."""
    n = len(radii)
    words = np.zeros((2, n + -n % 128), dtype=kind)
    words[:, :n] = radii, angles
    out = torch.full((words.size,), math.nan, dtype=torch.float32 if kind == np.int32 else torch.float64)
    tiny, numbers = torch.tensor(2.0 ** (-8 * words.itemsize), dtype=out.dtype), out.new_empty(3, words.shape[1])
    chunk = (pairs.chunk_maker(), torch.from_numpy(words), numbers, tiny, 1.0, [out])
    pairs.draw_chunk(*chunk, lambda which: torch.full(which.shape, place, dtype=torch.float64))
    return by_pairs(out)[:, :n]


@pytest.mark.parametrize(("kind", "tail"), [(np.int32, 6.66), (np.int64, 9.42)], ids=["f32", "f64"])
def test_fast_transform_reaches_far_tails_and_is_always_finite(kind, tail):
    low, high = np.iinfo(kind).min, np.iinfo(kind).max
    quarter = 1 << (8 * np.dtype(kind).itemsize - 2)
    sines, cosines = fast_transform([0, -1, 0, -1], [quarter, -quarter, 0, low], kind)  # the smallest uniforms
    assert sines[:2] == pytest.approx([tail, -tail], abs=0.01) and cosines[2:] == pytest.approx([tail, -tail], abs=0.01)
    assert abs(cosines[:2]).max() < 1e-5 and abs(sines[2:]).max() < 1e-5
    values = [low, low + 1, -2, -1, 0, 1, 2, quarter, high - 1, high]
    assert np.isfinite(fast_transform(values * 10, sorted(values * 10), kind)).all()
    assert fast_transform([low, high], [quarter] * 2, kind) == pytest.approx(0)  # u = 1: radius 0
    far = fast_transform(range(-200, 200), [quarter] * 400, kind)[0]  # no two uniforms of the far tail are one
    assert len(np.unique(far[far > tail - 1])) > 15


def test_second_words_carry_the_tails_of_float32_beyond_9_standard_deviations():
    """What no word of 32 bits can reach by itself, and what made outputs beyond 6.66 impossible without a record."""
    quarter = 1 << 30
    ends = {place: fast_transform([0, -1], [quarter, -quarter], place=place)[0] for place in (2.0**-65, 0.5, 1.0)}
    assert ends[2.0**-65] == pytest.approx([11.54, -11.54], abs=0.01)  # the smallest second word
    assert ends[0.5] == pytest.approx([6.66, -6.66], abs=0.01)
    assert ends[1.0] == pytest.approx([6.55, -6.55], abs=0.01)
    # the intervals of neighbouring words join without a gap, up to the first that is not refined
    upper, lower = (fast_transform(range(8), [quarter] * 8, place=place)[0] for place in (0.0, 1.0))
    assert upper[0] == math.inf and upper[1:] == pytest.approx(lower[:-1], rel=1e-6)
    plain = fast_transform(range(8, 40), [quarter] * 32, place=0.9)[0]
    assert np.array_equal(plain, fast_transform(range(8, 40), [quarter] * 32, place=0.1)[0])


def test_refined_radii_follow_their_law():
    """Given that a pair is refined, its uniform is uniform: the tail beyond it is that of a Gaussian."""
    rng, found = np.random.default_rng(3), []
    for place in rng.random(500):
        sines, cosines = fast_transform(rng.integers(-8, 8, 8), rng.integers(-(1 << 31), 1 << 31, 8), place=place)
        found.append(np.hypot(sines[0].astype(float), cosines[0]))
    uniforms = np.exp(-(np.array(found) ** 2) / 2) * 2**32 / 16
    assert stats.kstest(uniforms, "uniform").pvalue > 0.01


def test_the_source_refines_what_its_words_ask_for(monkeypatch):
    """The second word is a block of its own of the key stream; the same bits whatever the chunk and thread."""
    encrypt = key_stream._Lane._encrypt

    def rare(self, code, first, count, begin):
        encrypt(self, code, first, count, begin)
        self._words[0, begin + 100 : begin + 103] = torch.tensor([0, -1, 5], dtype=torch.int32)
        seen.append((code, first))

    seen: list[tuple[bytes, int]] = []
    monkeypatch.setattr(key_stream._Lane, "_encrypt", rare)
    source, sizes = FastNoise(seed=3), (400_000, 300)
    drawn = draw(source, *sizes, release=2, std=1.0)
    assert len(seen) > 4
    for code, first in seen:
        noise = drawn[[key_stream._name_code("0"), key_stream._name_code("1")].index(code)]
        block = noise[2 * first : 2 * first + 256]
        for pair, unit in ((100, 1), (101, 1), (102, 11)):
            word = stream_of(source, 2, code, (1 << 62) + first + pair)[:8]
            fraction = (int.from_bytes(word, "little") + 0.5) / 2**64
            radius = math.sqrt(-2 * math.log((unit - 1 + 2 * fraction) / 2**32))
            assert math.hypot(block[pair], block[128 + pair]) == pytest.approx(radius, rel=1e-5)


def stream_of(source, release: int, code: bytes, counter: int, blocks: int = 1) -> bytes:
    """Blocks of AES under the key of a release that is bound to nothing, as documented."""
    counters = b"".join(code + (counter + i).to_bytes(8, "big") for i in range(blocks))
    number = release.to_bytes(8, "big")
    if isinstance(source, SecureNoise):
        key = hashlib.blake2b(number, key=KEY, digest_size=32).digest()
    else:
        secret = bytes.fromhex(source.state_dict()["key"])
        key = hashlib.blake2b(b"noise" + number, key=secret, digest_size=16).digest()
    cipher = algorithms.AES256(key) if len(key) == 32 else algorithms.AES128(key)
    return Cipher(cipher, modes.ECB()).encryptor().update(counters)


def test_on_a_device_two_normals_reach_further_than_one():
    """A stand-in for the generator of a GPU, whose normals end: the sum of two reaches √2 times as far."""
    tensor, generator = torch.empty(400_000), torch.Generator().manual_seed(5)
    fast.draw_on_device(tensor, 2.0, generator)
    assert stats.kstest(tensor.numpy() / 2, "norm").pvalue > 0.01
    half = torch.empty(1000, dtype=torch.bfloat16)
    fast.draw_on_device(half, 1.0, generator)
    assert 0.9 < half.float().std() < 1.1


def test_on_a_device_second_normals_are_drawn_in_pieces(monkeypatch):
    """Each piece has the whole law, by itself and beside the others, and only a piece takes memory."""
    monkeypatch.setattr(fast, "_PIECE", 40_000)
    tensor, generator = torch.empty(100, 1_001), torch.Generator().manual_seed(6)
    taken = peak_of(lambda: fast.draw_on_device(tensor, 2.0, generator))
    assert taken == 4 * (tensor.numel() + 40_000)
    pieces = (tensor / 2).flatten().split(40_000)
    assert [len(piece) for piece in pieces] == [40_000, 40_000, 20_100]
    assert all(stats.kstest(piece.numpy(), "norm").pvalue > 0.01 for piece in pieces)
    correlations = np.corrcoef([piece[:20_100].numpy() for piece in pieces])
    assert np.abs(correlations - np.eye(3)).max() < 4 / math.sqrt(20_100)


def test_on_a_device_a_tensor_of_one_piece_is_drawn_as_ever(monkeypatch):
    monkeypatch.setattr(fast, "_PIECE", 5_000)
    drawn, generator = torch.empty(5_000), torch.Generator().manual_seed(7)
    fast.draw_on_device(drawn, 1.0, generator)
    generator.manual_seed(7)
    first, second = (torch.empty(5_000).normal_(0.0, math.sqrt(0.5), generator=generator) for _ in range(2))
    assert torch.equal(drawn, first + second)


def assert_pairs(noise: np.ndarray, words: np.ndarray) -> None:
    """Compare sines and cosines with the documented formula in long double, taken of words for radii and angles."""
    bits, eps = 8 * words.itemsize, np.finfo(noise.dtype).eps
    k, angle = words.reshape(2, -1).astype(np.longdouble)
    u = np.abs(2 * k + 1) / np.longdouble(2) ** bits
    turn = math.tau * angle / np.longdouble(2) ** bits
    radius = np.sqrt(-2 * np.log(u))
    error = np.abs(noise.reshape(2, -1) - radius * np.stack([np.sin(turn), np.cos(turn)]))
    assert (error < eps * (8 * radius + 4 / radius)).all()  # its square is known to some ε, a small radius less well


@pytest.mark.parametrize("kind", [np.int32, np.int64], ids=["f32", "f64"])
def test_fast_transform_matches_the_formula(kind):
    words = np.random.default_rng(5).integers(np.iinfo(kind).min, np.iinfo(kind).max, size=(2, 65_536), dtype=kind)
    assert_pairs(fast_transform(*words, kind), words)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["f32", "f64"])
def test_fast_pairs_are_a_plane_gaussian(dtype):
    """Sine and cosine share a radius: the plane has no corner, no spoke and no ring that a Gaussian has not."""
    (sample,) = draw(make_fast(), 2 * key_stream._CHUNK, release=0, std=1.0, dtype=dtype)
    sine, cosine = by_pairs(sample.double())
    assert stats.kstest((sine**2 + cosine**2) / 2, "expon").pvalue > 0.01
    assert stats.kstest(np.arctan2(sine, cosine) / np.pi, "uniform", (-1, 2)).pvalue > 0.01
    assert stats.spearmanr(sine**2 + cosine**2, np.arctan2(sine, cosine)).pvalue > 0.01
    quadrants = np.histogram2d(sine > 0, cosine > 0, bins=2)[0]
    assert stats.chisquare(quadrants.ravel()).pvalue > 0.01
    assert stats.kstest((sine + cosine) / math.sqrt(2), "norm").pvalue > 0.01
    squares = np.corrcoef(sine**2, cosine**2)[0, 1]  # were the radius constant: -1
    assert abs(squares) < 4 / math.sqrt(len(sine))


def test_fast_tails_are_as_heavy_as_they_should_be():
    """Eight million numbers: 507 beyond 4 σ, 54 beyond 4.5 σ, 4.6 beyond 5 σ are expected."""
    source, counts = make_fast(), np.zeros(3)
    for release in range(4):
        (sample,) = draw(source, 2_000_000, release=release, std=1.0)
        counts += [int((sample.abs() > bound).sum()) for bound in (4.0, 4.5, 5.0)]
    for count, bound in zip(counts, (4.0, 4.5, 5.0), strict=True):
        expected = 8_000_000 * 2 * stats.norm.sf(bound)
        assert stats.poisson.cdf(count, expected) > 0.001 and stats.poisson.sf(count - 1, expected) > 0.001


# ---- shapes, strides, and what else a tensor can be --------------------------------------------------------


@both
@given(sizes=st.lists(st.integers(0, 70), max_size=8), std=st.sampled_from([0.0, 1e-3, 2.0]))
def test_any_list_of_sizes_is_filled(make, sizes, std):
    tensors = draw(make(), *sizes, release=0, std=std)
    for tensor in tensors:
        assert torch.isfinite(tensor).all()
        assert (tensor == 0).all() if std == 0 else (tensor != 0).all()


@both
@pytest.mark.parametrize("size", [1, 15, 16, 17, 32_767, 32_768, 32_769, 131_072, 131_073, 300_001])
def test_odd_sizes_are_filled_to_the_last_element(make, size):
    (sample,) = draw(make(), size, release=0)
    assert torch.isfinite(sample).all()
    assert sample.unique().numel() > 0.9 * size


@both
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("rows", [30, 400], ids=["small", "across chunks"])
def test_strides_do_not_change_the_noise(make, dtype, rows):
    plain = [torch.zeros(rows, 401, dtype=dtype), torch.zeros(2, 3, 4, 5, dtype=dtype)]
    strided = [
        torch.zeros(401, rows, dtype=dtype).t(),
        torch.zeros(2, 3, 4, 5, dtype=dtype).to(memory_format=torch.channels_last),
    ]
    every_other = torch.full((rows, 802), 7.0, dtype=dtype)
    make().fill(plain, STD, 0)
    make().fill(strided, STD, 0)
    make().fill([every_other[:, ::2], torch.zeros_like(plain[1])], STD, 0)
    assert torch.equal(plain[0], strided[0])
    assert torch.equal(plain[1], strided[1])
    assert torch.equal(plain[0], every_other[:, ::2])
    assert (every_other[:, 1::2] == 7).all()  # neighbours in memory are left alone
    assert not strided[0].is_contiguous()


@both
def test_empty_tensors_and_empty_lists(make):
    source = make()
    source.fill([], STD, 0)
    first, empty, second = draw(source, 5, (0, 3), 6, release=1)
    assert empty.shape == (0, 3)
    assert torch.isfinite(torch.cat([first, second])).all()


@both
def test_parameters_keep_their_storage_and_their_graph(make):
    parameter = torch.nn.Parameter(torch.zeros(300_000))  # large enough for helper threads
    pointer = parameter.data_ptr()
    make().fill([parameter], STD, 0)
    assert parameter.data_ptr() == pointer
    assert parameter.is_leaf and parameter.requires_grad and parameter.grad is None
    assert parameter.detach().std() > 1


@both
def test_autograd_notices_that_a_tensor_was_written(make):
    factor = torch.ones(3)
    loss = (factor * torch.ones(3, requires_grad=True)).sum()
    make().fill([factor], STD, 0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@both
def test_torch_global_generator_is_neither_read_nor_moved(make):
    torch.manual_seed(1)
    before = torch.get_rng_state()
    (first,) = draw(make(), 1000, release=0)
    assert torch.equal(before, torch.get_rng_state())
    torch.manual_seed(2)
    (second,) = draw(make(), 1000, release=0)
    assert torch.equal(first, second)


# ---- no repetition -----------------------------------------------------------------------------------------


@both
def test_no_noise_repeats_across_releases_tensors_and_chunks(make):
    """In float64 two equal values among half a million have a chance below 1e-4."""
    source = make()
    drawn = [t for r in range(3) for t in draw(source, 70_000, 1000, (200, 500), 7, release=r, dtype=torch.float64)]
    values = torch.cat([t.flatten() for t in drawn])
    assert values.unique().numel() == values.numel()


def test_no_value_of_one_type_is_the_rounded_value_of_another():
    narrow, wide = torch.zeros(1000), torch.zeros(1000, dtype=torch.float64)
    make_fast().fill([narrow, wide], 1.0, 0)
    assert not torch.isclose(narrow, wide.float(), atol=1e-4).all()
    assert abs(np.corrcoef(narrow, wide)[0, 1]) < 0.15


def words_of(source: NoiseSource, release: int, name: str, pairs_: int, width: int) -> np.ndarray:
    """The words of a tensor: a row for radii, and one for angles."""
    first = 1 << 63 if width == 8 else 0
    code, blocks = hashlib.blake2b(name.encode(), digest_size=8).digest(), pairs_ * width // 16
    streams = [stream_of(source, release, code, first + row * (1 << 61), blocks) for row in (0, 1)]
    return np.stack([np.frombuffer(stream, dtype=f"<i{width}") for stream in streams])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["f32", "f64"])
@pytest.mark.parametrize("release", [0, 7, (1 << 40) + 7, (1 << 64) - 1])
def test_fast_stream_is_the_documented_one(release, dtype):
    """Key, release, name, type and place, and nothing else, say what the noise is; all bits of them count."""
    source, size = FastNoise(), 32_000  # several parts of a chunk
    tensors = {name: torch.zeros(size, dtype=dtype) for name in ("conv.weight", "b")}
    source.fill(tensors, 1.0, release)
    for name, noise in tensors.items():
        assert_pairs(by_pairs(noise), words_of(source, release, name, size // 2, dtype.itemsize))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["f32", "f64"])
@pytest.mark.parametrize("release", [0, 7, (1 << 64) - 1])
def test_secure_noise_is_made_in_float64_under_256_bits(release, dtype):
    source, tensors = make_secure(), {name: torch.zeros(300_032, dtype=dtype) for name in ("conv.weight", "b")}
    source.fill(tensors, 1.0, release)
    wide = {name: torch.zeros(300_032, dtype=torch.float64) for name in tensors}
    make_secure().fill(wide, 1.0, release)
    for name, noise in wide.items():
        assert_pairs(by_pairs(noise), words_of(source, release, name, len(noise) // 2, 8))
        assert torch.equal(noise.to(dtype), tensors[name])  # rounded once


@pytest.mark.parametrize("blocks", [1, 2, 511, 512, 513, 1024, 1025, 7281, 4_000_001])
def test_chunks_are_equal_and_few(blocks):
    size = key_stream._chunk_size(blocks)
    chunks = -(-blocks // size)
    assert size * pairs.BLOCK <= key_stream._CHUNK
    assert chunks <= 2 or chunks % 4 == 0 or blocks > 10**6  # among so many one more or less is nothing
    assert chunks <= -(-blocks * pairs.BLOCK // key_stream._CHUNK) + 3


def test_no_block_of_the_key_stream_is_used_twice(monkeypatch):
    used: set[tuple[bytes, bytes]] = set()
    encrypt = key_stream._Lane._encrypt

    class Watched:
        def __init__(self, lane):
            self.cipher, self.lane = lane._cipher, lane

        def reset_nonce(self, nonce):
            self.nonce = nonce
            self.cipher.reset_nonce(nonce)

        def update_into(self, zeros, stream):
            first = int.from_bytes(self.nonce, "big")
            blocks = {(self.lane._key, (first + i).to_bytes(16, "big")) for i in range(-(-len(zeros) // 16))}
            assert not blocks & used
            used.update(blocks)
            return self.cipher.update_into(zeros, stream)

    def watched(self, *place):
        self._cipher, cipher = Watched(self), self._cipher
        encrypt(self, *place)
        self._cipher = cipher

    monkeypatch.setattr(key_stream._Lane, "_encrypt", watched)
    source, sizes = make_fast(), (key_stream._CHUNK, 7, 90_000, 200_000)
    for release in (0, 1, 1 << 32):
        source.fill([torch.zeros(n, dtype=d) for n in sizes for d in (torch.float32, torch.float64)], STD, release)
    assert len(used) > 3 * sum(sizes) * 12 / 16


def test_all_bits_of_the_release_reach_the_generator():
    source = make_fast()
    drawn = [draw(source, 32, release=release)[0] for release in (1, 1 + (1 << 32), 1 + (1 << 63))]
    assert torch.cat(drawn).unique().numel() == 96


def test_seeds_beyond_64_bits_and_negative_ones_differ():
    seeds = (0, 1, -1, 1 << 32, 1 << 64, 1 << 200)
    drawn = torch.cat([draw(FastNoise(seed=seed), 16, release=0)[0] for seed in seeds])
    assert drawn.unique().numel() == 16 * len(seeds)


def test_without_a_seed_nothing_is_repeatable():
    for make in (FastNoise, SecureNoise):
        torch.manual_seed(0)
        (first,) = draw(make(), 100, release=0)
        torch.manual_seed(0)
        (second,) = draw(make(), 100, release=0)
        assert not make().seeded
        assert torch.cat([first, second]).unique().numel() == 200


def test_a_given_seed_is_on_record():
    assert FastNoise(seed=0).seeded
    source = FastNoise()
    source.load_state_dict(make_fast().state_dict())
    assert source.seeded
    assert make_secure().seeded
    with pytest.raises(TypeError):
        FastNoise(seed=1.5)


@both
def test_replays_are_refused(make):
    source = make()
    draw(source, 4, release=3)
    for release in (3, 2, 0):
        with pytest.raises(RuntimeError, match="never used twice"):
            draw(source, 4, release=release)
    draw(source, 4, release=10)  # gaps are allowed
    assert source.last_release == 10


@both
def test_a_release_that_failed_halfway_is_used_up(make):
    source = make()
    broadcast = torch.zeros(1).expand(5)  # cannot be written
    with pytest.raises(RuntimeError):
        source.fill([torch.zeros(5), broadcast], STD, 0)
    with pytest.raises(RuntimeError, match="never used twice"):
        draw(source, 5, release=0)


@both
def test_a_refused_call_changes_nothing(make):
    source = make()
    good = torch.zeros(3)
    for tensors, std, release in [
        ([good], -1.0, 0),
        ([good], math.nan, 0),
        ([good], math.inf, 0),
        ([good], 1.0, -1),
        ([good, torch.zeros(3, dtype=torch.int64)], 1.0, 0),
        ([good, torch.zeros(3, dtype=torch.complex64)], 1.0, 0),
        ([good, torch.zeros(3, 3).to_sparse()], 1.0, 0),
    ]:
        with pytest.raises(ValueError):
            source.fill(tensors, std, release)
    assert source.last_release == -1
    assert (good == 0).all()


@both
def test_zero_scale_gives_zeros_and_uses_the_release_up(make):
    source = make()
    assert (draw(source, 5, release=0, std=0.0)[0] == 0).all()
    with pytest.raises(RuntimeError):
        draw(source, 5, release=0)


@both
def test_copies_are_refused(make):
    source = make()
    for clone in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="same noise"):
            clone(source)


# ---- a function of key, release and position ---------------------------------------------------------------


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_fast_noise_does_not_depend_on_the_thread_count(threads, dtype):
    results = []
    for count in (1, 2, 5):
        threads(count)
        source = make_fast()
        results.append([draw(source, (700, 500), 3, 90_001, release=r, dtype=dtype) for r in (0, 1)])
    for other in results[1:]:
        for ours, theirs in zip(results[0], other, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_fast_noise_survives_a_growing_pool(threads):
    source, reference = make_fast(), make_fast()
    for release, count in enumerate((2, 5, 1, 3)):
        threads(count)
        (ours,) = draw(source, 400_000, release=release)
        threads(1)
        (theirs,) = draw(reference, 400_000, release=release)
        assert torch.equal(ours, theirs)


@given(total=st.integers(139_800, 140_000), cuts=st.lists(st.integers(0, 139_800), max_size=6))
def test_a_part_of_a_tensor_drawn_alone_has_the_noise_of_the_whole(total, cuts):
    whole = torch.zeros(total)
    make_fast().fill({"w": whole}, STD, 4)
    edges = [0, *sorted(cuts), total]
    for begin, end in itertools.pairwise(edges):
        part = torch.zeros(end - begin)
        make_fast().fill({"w": part}, STD, 4, starts={"w": begin})
        assert torch.equal(part, whole[begin:end])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_neither_order_nor_other_tensors_nor_sizes_matter(dtype):
    shapes = {"a.weight": (300, 500), "a.bias": (300,), "b.weight": (7, 3, 5, 5), "b.bias": (7,)}
    together = {name: torch.zeros(shape, dtype=dtype) for name, shape in shapes.items()}
    make_fast().fill(together, STD, 2)
    for name, shape in reversed(shapes.items()):
        alone, longer = torch.zeros(shape, dtype=dtype), torch.zeros(math.prod(shape) + 999, dtype=dtype)
        make_fast().fill({"other": torch.zeros(5), name: alone}, STD, 2)
        make_fast().fill({name: longer}, STD, 2)
        assert torch.equal(alone, together[name])
        assert torch.equal(longer[: alone.numel()], alone.flatten())
    values = torch.cat([each.flatten()[:7] for each in together.values()])
    assert values.unique().numel() > 20  # and no two tensors have the same


def test_parts_that_are_no_parts_are_refused():
    source = make_fast()
    for starts in ({"v": 0}, {"w": -1}):
        with pytest.raises(ValueError):
            source.fill({"w": torch.zeros(3)}, STD, 0, starts=starts)
    assert source.last_release == -1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["f32", "f64"])
def test_python_draws_what_the_compiled_function_draws(dtype, monkeypatch):
    """Where torch cannot compile it, noise is slower but the same."""
    sizes = [70_001, 3, 190_000]
    compiled, other = ([torch.ones(size, dtype=dtype) for size in sizes] for _ in range(2))
    make_fast().fill(compiled, STD, 1)
    monkeypatch.setattr(key_stream, "chunk_maker", lambda: pairs.make_chunk)
    make_fast().fill(other, STD, 1)
    assert all(torch.equal(a, b) for a, b in zip(compiled, other, strict=True))


def test_torch_compiles_the_transform_and_warns_of_nothing():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert pairs.chunk_maker.__wrapped__() is not pairs.make_chunk


def test_compiling_leaves_the_compiler_as_it_was():
    for mode in (False, True):  # last, as it is by default
        torch._C._jit_set_profiling_mode(mode)
        pairs.chunk_maker.__wrapped__()
        assert torch._C._jit_set_profiling_mode(True) is mode


def test_noise_goes_on_where_torch_cannot_compile(monkeypatch, caplog):
    monkeypatch.setattr(torch.jit, "CompilationUnit", None)
    with caplog.at_level("INFO"):
        assert pairs.chunk_maker.__wrapped__() is pairs.make_chunk
    assert "more slowly" in caplog.text


def test_fast_noise_stays_on_the_cpu_whatever_the_default_device_is():
    with torch.device("meta"):
        noise = torch.zeros(5, 6, device="cpu").t()
        make_fast().fill([noise], STD, 0)
    assert (noise != 0).all()


def test_fast_noise_scales_exactly():
    (one,) = draw(make_fast(), 70_001, release=0, std=1.0)
    (four,) = draw(make_fast(), 70_001, release=0, std=4.0)
    assert torch.equal(one * 4, four)


# ---- saving and resuming -----------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [None, 7])
def test_fast_noise_resumes_bitwise(seed, tmp_path):
    unbroken = FastNoise(seed)
    for release in range(5):
        draw(unbroken, 1000, 70_000, release=release)
    torch.save(unbroken.state_dict(), tmp_path / "noise.pt")
    resumed = FastNoise(seed=99)
    resumed.load_state_dict(torch.load(tmp_path / "noise.pt", weights_only=True))
    with pytest.raises(RuntimeError):
        draw(resumed, 1000, release=4)
    for release in range(5, 8):
        ours, theirs = (draw(s, 1000, 70_000, release=release) for s in (unbroken, resumed))
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_a_source_that_has_drawn_takes_the_loaded_key_over():
    source, other = FastNoise(seed=1), FastNoise(seed=2)
    draw(source, 300_000, release=0)
    source.load_state_dict(other.state_dict())
    assert torch.equal(draw(source, 300_000, release=1)[0], draw(other, 300_000, release=1)[0])


def test_secure_noise_never_resumes_its_stream(tmp_path):
    source = make_secure()
    draw(source, 1000, release=0)
    state = source.state_dict()
    assert KEY.hex() not in repr(state)
    torch.save(state, tmp_path / "noise.pt")
    (unbroken,) = draw(source, 1000, release=1, dtype=torch.float64)
    seen = [unbroken]
    for _ in range(2):
        resumed = make_secure()
        resumed.load_state_dict(torch.load(tmp_path / "noise.pt", weights_only=True))
        assert not resumed.seeded
        with pytest.raises(RuntimeError):
            draw(resumed, 1000, release=0)
        seen += draw(resumed, 1000, release=1, dtype=torch.float64)
    source.load_state_dict(state)  # rewound in place
    seen += draw(source, 1000, release=1, dtype=torch.float64)
    assert torch.cat(seen).unique().numel() == 4000


def test_rewinding_a_living_stream_is_logged(caplog):
    source = FastNoise()
    state = source.state_dict()
    source.load_state_dict(state)
    assert not caplog.records
    draw(source, 3, release=0)
    source.load_state_dict(state)
    assert "share their noise" in caplog.text


def test_states_of_the_other_kind_are_refused():
    with pytest.raises(ValueError, match="'SecureNoise'"):
        make_fast().load_state_dict(make_secure().state_dict())
    with pytest.raises(ValueError, match="'FastNoise'"):
        make_secure().load_state_dict(make_fast().state_dict())


# ---- processes and devices ----------------- --------------------------------------------------------------------


def forked(source: NoiseSource, queue) -> None:
    torch.set_num_threads(1)  # OpenMP's threads did not survive the fork
    queue.put(draw(source, 100, release=1, dtype=torch.float64)[0].numpy())


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize("make", [FastNoise, make_secure, make_fast], ids=["fast", "secure", "seeded"])
def test_forked_processes_do_not_share_a_stream(make):
    source = make()
    draw(source, 100, release=0)
    context = multiprocessing.get_context("fork")
    queue = context.SimpleQueue()
    children = [context.Process(target=forked, args=(source, queue)) for _ in range(2)]
    for child in children:
        child.start()
    drawn = [queue.get() for _ in children]
    for child in children:
        child.join()
    drawn.append(draw(source, 100, release=1, dtype=torch.float64)[0].numpy())
    assert len(np.unique(np.concatenate(drawn))) == 300  # a seed does not make it otherwise: noise is used once


def resume_in_child(source: FastNoise, state, queue) -> None:
    torch.set_num_threads(1)
    source.load_state_dict(state)
    queue.put(draw(source, 100, release=1)[0].numpy())


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_process_may_resume_a_saved_stream():
    saved, source = FastNoise(), FastNoise()
    draw(saved, 100, release=0)
    context = multiprocessing.get_context("fork")
    queue = context.SimpleQueue()
    child = context.Process(target=resume_in_child, args=(source, saved.state_dict(), queue))
    child.start()
    resumed = queue.get()
    child.join()
    assert np.array_equal(resumed, draw(saved, 100, release=1)[0].numpy())


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@both
def test_cuda(make, dtype):
    def on_cuda(source, release):
        tensors = [
            torch.zeros(300, 500, device="cuda", dtype=dtype).t(),
            torch.zeros(7, device="cuda", dtype=dtype),
            torch.zeros(100_000, device="cuda", dtype=dtype),
        ]
        source.fill(tensors, STD, release)
        return torch.cat([t.flatten() for t in tensors]).cpu()

    source = make()
    first, second = on_cuda(source, 0), on_cuda(source, 1)
    for sample in (first, second):
        assert abs(sample.double().mean()) < 0.02
        assert abs(sample.double().std() / STD - 1) < 0.01
        if dtype != torch.bfloat16:
            assert pvalue(sample, STD) > 1e-4
            assert pvalue(sample, STD * 2 / 3) < 1e-12
    assert abs(np.corrcoef(first.double(), second.double())[0, 1]) < 0.01
    assert torch.equal(on_cuda(make(), 0), first)  # same key, same release
    resumed = make()
    state = make().state_dict() | {"last_release": 0}
    resumed.load_state_dict(state)
    assert torch.equal(on_cuda(resumed, 1), second) == isinstance(resumed, FastNoise)
    low, high = (torch.Generator("cuda").manual_seed(s) for s in (1, 1 + (1 << 32)))
    assert not torch.equal(
        torch.empty(32, device="cuda").normal_(generator=low),
        torch.empty(32, device="cuda").normal_(generator=high),
    )
