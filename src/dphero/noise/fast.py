"""Gaussian noise that a key repeats."""

from __future__ import annotations

import hashlib
import logging
import math
import operator
import secrets
import struct
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, CipherContext, algorithms, modes

from dphero.noise.source import OneTimeSource, Target, close, common_std, is_flat
from dphero.noise.team import together

__all__ = ["FastNoise"]

logger = logging.getLogger(__name__)

# How many numbers a thread draws at a time. With fewer, the threads wait for Python's lock; with more, for memory.
_FAST_CHUNK = 1 << 17
_PAIRS = _FAST_CHUNK // 2
_AES_BLOCK = 16  # bytes
_VECTOR = 64  # NumPy computes in vectors of up to so many numbers and may treat a shorter rest differently
_ZEROS = memoryview(bytes(8 * _FAST_CHUNK))  # what is encrypted: the cipher text is then the key stream itself
_WORDS: dict[torch.dtype, np.dtype] = {torch.float32: np.dtype("<i4"), torch.float64: np.dtype("<i8")}


class _Piece(NamedTuple):
    """A flat part of a target."""

    array: np.ndarray
    keep: bool
    std: float


class FastNoise(OneTimeSource):
    """Gaussian noise from a key stream, repeatable from the key.

    On the CPU, position p of release t is a function of (key, t, p) alone: not of the thread count, of
    torch's global seed, of how the positions are split among tensors, or of how many follow. The words of
    release t are AES-128(key, t ‖ 0), AES-128(key, t ‖ 1), …, where t and the counter have 64 bits each. The
    concatenation of the tensors is cut in chunks of 131,072 numbers, made from as many words of 32 bits: chunk
    by chunk 65,536 words for radii, 65,536 for angles, and of these pairs first the sines, then the cosines
    (see `_box_muller`). float64 tensors form a concatenation of their own, made from words of 64 bits, whose
    counters start at 2⁶³. On CUDA, one Philox generator per device and release has a 64-bit seed hashed from
    (key, t, device).

    Tails end at 6.66 standard deviations in float32 and at 9.42 in float64. What it does not promise: CPU and
    CUDA streams differ, and the generator on CUDA is not cryptographic; other processors and versions of
    NumPy may round logarithms and sines differently in the last bits; the key is in every checkpoint. For a
    key that is never saved, and noise that is always made in float64, use `SecureNoise`.

    Two runs under one key share their noise, and the difference of their releases is free of it. So publish
    only one run per seed and only one continuation per checkpoint. `state_dict()` holds the key: keep it as
    secret as the data.

    Args:
        seed: None (default) takes 128 bits from the operating system. An integer makes the run repeatable;
            the guarantee then holds only while nobody else knows or guesses it, and `seeded` says so.
    """

    def __init__(self, seed: int | None = None) -> None:
        super().__init__()
        self._seeded = seed is not None
        if seed is None:
            self._key = secrets.token_bytes(16)
        else:
            self._key = hashlib.blake2b(str(operator.index(seed)).encode(), digest_size=16).digest()
        self._lanes: list[_Lane] = []
        self._cuda: dict[torch.device, torch.Generator] = {}

    @property
    def seeded(self) -> bool:
        """Whether a user chose the seed: then the guarantee holds only while that seed stays secret."""
        return self._seeded

    def state_dict(self) -> dict[str, Any]:
        """The key (secret!) and the last release: enough to continue the stream bit by bit."""
        return {
            "source": "FastNoise",
            "key": self._key.hex(),
            "seeded": self._seeded,
            "last_release": self._last_release,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over the key of the saved run and continue after its last release."""
        self._notice_fork()
        last_release, key = self._read_last_release(state), bytes.fromhex(state["key"])
        if key == self._key and last_release < self._last_release:
            logger.warning(
                "Noise went back from release %d to %d of the same stream: what was released in between and "
                "what will be released now share their noise. Publish only one of the two.",
                self._last_release,
                last_release,
            )
        self._key, self._seeded, self._last_release = key, bool(state["seeded"]), last_release

    def _enter_new_process(self) -> None:
        if not self._seeded:
            self._key = secrets.token_bytes(16)

    def _draw(self, targets: list[Target], release: int) -> None:
        streams: dict[torch.device | torch.dtype, list[Target]] = {}
        for target in targets:
            if target.tensor.is_cuda:
                streams.setdefault(target.tensor.device, []).append(target)
            else:  # float64 gets float64 noise; narrower types are rounded from float32
                dtype = torch.float64 if target.tensor.dtype == torch.float64 else torch.float32
                streams.setdefault(dtype, []).append(target)
        for stream, members in streams.items():
            if isinstance(stream, torch.dtype):
                self._draw_on_cpu(members, stream, release)
            else:
                self._draw_on_cuda(members, stream, release)

    def _draw_on_cpu(self, targets: list[Target], dtype: torch.dtype, release: int) -> None:
        pieces: list[_Piece] = []
        detours = []
        for tensor, keep, std in targets:
            flat = tensor.detach()
            if not (is_flat(tensor) and tensor.dtype == dtype):
                flat = torch.empty(tensor.numel(), dtype=dtype)
                detours.append((tensor, flat))
            pieces.append(_Piece(flat.view(-1).numpy(), keep, std))  # a view, or an error: noise must not go to a copy
        chunks = _cut(pieces)
        threads = min(torch.get_num_threads(), len(chunks))
        self._lanes += [_Lane() for _ in range(threads - len(self._lanes))]
        todo = iter(list(enumerate(chunks)))  # shared: whoever is free takes the next chunk

        def work(lane: int) -> None:
            for number, chunk in todo:
                self._lanes[lane].draw(chunk, _WORDS[dtype], self._key, release, number)

        together(work, threads)
        close(detours)
        # As torch does itself when it writes: autograd refuses to go back through what was overwritten.
        torch.autograd.graph.increment_version([target.tensor for target in targets])

    def _draw_on_cuda(self, targets: list[Target], device: torch.device, release: int) -> None:
        if device not in self._cuda:
            self._cuda[device] = torch.Generator(device)
        name = struct.pack("<Q", release) + str(device).encode()
        seed = hashlib.blake2b(name, key=self._key, digest_size=8).digest()
        generator = self._cuda[device].manual_seed(int.from_bytes(seed, "little"))
        for target in targets:
            target.tensor.normal_(0.0, target.std, generator=generator)


def _cut(pieces: list[_Piece]) -> list[list[_Piece]]:
    """Cut the concatenation of the pieces in chunks."""
    chunks: list[list[_Piece]] = []
    room = 0
    for array, keep, std in pieces:
        start = 0
        while start < len(array):
            if room == 0:
                chunks.append([])
                room = _FAST_CHUNK
            part = array[start : start + room]
            chunks[-1].append(_Piece(part, keep, std))
            start += len(part)
            room -= len(part)
    return chunks


class _Lane:
    """One thread's cipher and room to work in.

    It keeps to NumPy. torch would start further threads from each lane, and gives up Python's lock, to wait for it
    again, even where it only makes a view.
    """

    def __init__(self) -> None:
        self._key = b""
        self._cipher: CipherContext
        self._stream = memoryview(bytearray(8 * _FAST_CHUNK + 15))  # the cipher wants 15 spare bytes at the end
        self._scratch: dict[int, np.ndarray] = {}

    def draw(self, chunk: list[_Piece], kind: np.dtype, key: bytes, release: int, number: int) -> None:
        """Fill the pieces of one chunk, in order, from words of type `kind`; `number` is the chunk's index."""
        if key != self._key:
            self._key, self._cipher = key, Cipher(algorithms.AES128(key), modes.CTR(bytes(16))).encryptor()
        width = kind.itemsize
        if width not in self._scratch:
            self._scratch[width] = np.empty(3 * _PAIRS, f"f{width}")
        total = sum([len(piece.array) for piece in chunk])
        size = total + -total % _VECTOR
        pairs = min(_PAIRS, size)
        counter = number * _FAST_CHUNK * width // _AES_BLOCK + (width == 8) * (1 << 63)
        if pairs == _PAIRS:  # radii and angles in one go
            self._encrypt(release, counter, 0, 2 * pairs * width)
        else:
            self._encrypt(release, counter, 0, pairs * width)
            self._encrypt(release, counter + _PAIRS * width // _AES_BLOCK, pairs * width, pairs * width)
        words, scratch = np.frombuffer(self._stream, kind, 2 * pairs), self._scratch[width][: 3 * pairs]

        std = common_std(piece.std for piece in chunk)
        if len(chunk[0].array) == _FAST_CHUNK and not chunk[0].keep:
            _box_muller(words, std, scratch, out=chunk[0].array)
            return
        noise = scratch[pairs : pairs + size]
        _box_muller(words, std, scratch, out=noise)
        start = 0
        for array, keep, own in chunk:
            part = noise[start : start + len(array)]
            start += len(array)
            if own != std:
                part *= own
            if keep:
                array += part
            else:
                array[:] = part

    def _encrypt(self, release: int, counter: int, start: int, size: int) -> None:
        """Put `size` bytes of the key stream, from `counter` on, to `start` in the buffer."""
        self._cipher.reset_nonce(release.to_bytes(8, "big") + counter.to_bytes(8, "big"))
        self._cipher.update_into(_ZEROS[:size], self._stream[start:])


def _box_muller(words: np.ndarray, std: float, scratch: np.ndarray, out: np.ndarray) -> None:
    """Turn 2n random words, signed integers of b bits, into independent N(0, std²): n sines, then up to n cosines.

    Pair j has the words k = `words[j]` and l = `words[n + j]`. The uniform u = |2k + 1| / 2ᵇ is never 0, and it is
    finest near 0, where the tails come from. The angle πl / 2ᵇ⁻¹ lies in [-π, π]. The pair is
    std · √(ln 1/u²) · (sin, cos). `out` says how many are wanted, n at least. `scratch` has room for 3n numbers, of
    which `out` may be some, from the n-th on.
    """
    pairs, bits = len(words) // 2, 8 * words.itemsize
    scratch[: 2 * pairs] = words
    radius, sine, cosine = scratch.reshape(3, pairs)
    radius += 0.5
    np.square(radius, out=radius)
    np.divide(4.0 ** (bits - 1), radius, out=radius)  # 1/u²
    np.log(radius, out=radius)
    np.sqrt(radius, out=radius)
    radius *= std
    sine *= math.pi / 2.0 ** (bits - 1)  # the angle, so far
    wanted = len(out) - pairs
    np.cos(sine[:wanted], out=cosine[:wanted])
    np.sin(sine, out=sine)
    np.multiply(sine, radius, out=out[:pairs])
    np.multiply(cosine[:wanted], radius[:wanted], out=out[pairs:])
