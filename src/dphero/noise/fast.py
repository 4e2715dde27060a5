"""Gaussian noise that a key repeats."""

from __future__ import annotations

import hashlib
import logging
import math
import operator
import secrets
import struct
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch
from cryptography.hazmat.primitives.ciphers import Cipher, CipherContext, algorithms, modes
from torch import Tensor

from dphero.noise import register
from dphero.noise.box_muller import chunk_maker, draw_chunk
from dphero.noise.source import OneTimeSource, Target, close, is_flat
from dphero.noise.threads import run_on_torch_threads

__all__ = ["FastNoise"]

logger = logging.getLogger(__name__)

# How many numbers a thread draws at a time at most. With fewer, threads wait for Python's lock; with more, for memory.
_FAST_CHUNK = 1 << 17
_STAGGER = 1040  # numbers between rows: a power of two apart, they would want the same places in a cache
_AES_BLOCK = 16  # bytes
_PAIRS_OF_VECTORS = 128  # numbers; a chunk has a multiple of so many
_ZEROS = memoryview(bytes(8 * _FAST_CHUNK))  # what is encrypted: the cipher text is then the key stream itself
_SECOND_WORDS = 1 << 62  # where their counters begin: no other word's is so large, or from 2⁶³ on
_WORDS = {torch.float32: torch.int32, torch.float64: torch.int64}


class FastNoise(OneTimeSource):
    """Gaussian noise from a key stream, repeatable from the key.

    On the CPU, position p of n in release t is a function of (key, t, p, n) alone: not of the thread count, of
    torch's global seed, or of how the positions are split among tensors. The words of release t are
    AES-128(key, t ‖ 0), AES-128(key, t ‖ 1), …, where t and the counter have 64 bits each. The concatenation of
    the tensors is cut in equal chunks (:func:`_chunk_size`), each made from as many words of 32 bits: half of them
    for radii, half for angles, and of these pairs first the sines, then the cosines (see
    :mod:`dphero.noise.box_muller`). float64 tensors form a concatenation of their own, made from words of 64
    bits, whose counters start at 2⁶³. On CUDA, one Philox generator per device and release has a 64-bit seed
    hashed from (key, t, device).

    Tails reach 11.5 standard deviations in float32 (see :mod:`dphero.noise.box_muller`), 9.42 in float64, and 9.5
    on CUDA, where a normal is the sum of two, over √2: torch's own end at 6.76. What it does not promise: CPU and
    CUDA streams differ, and the generator on CUDA is not cryptographic; other processors and versions of
    torch may round logarithms and sines differently in the last bits; the key is in every checkpoint. For a
    key that is never saved, and noise that is always made in float64, use `SecureNoise`.

    Two sums under one noise vector differ by exactly the people in them. So where a release says what its noise is for
    (`bound_to`), its key is hashed from (key, t, that): a run that is resumed, or started again with its seed, draws
    the same noise for the same sum, and independent noise as soon as anything is different. `state_dict()` holds the
    key: keep it as secret as the data. A forked process draws a new key, also if there was a seed.

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
        self._binds = True
        self._bound_keys: dict[int, bytes] = {}
        self._key_shared = False
        self._lanes: dict[torch.dtype, list[_Lane]] = {}
        self._cuda: dict[torch.device, torch.Generator] = {}

    @property
    def seeded(self) -> bool:
        """Whether a user chose the seed: then the guarantee holds only while that seed stays secret."""
        return self._seeded

    @property
    def key_shared(self) -> bool:
        """Whether another run in this process released something else under the same key and number."""
        return self._key_shared

    def state_dict(self) -> dict[str, Any]:
        """The key (secret!) and the last release: enough to continue the stream bit by bit."""
        return {
            "source": "FastNoise",
            "key": self._key.hex(),
            "seeded": self._seeded,
            "last_release": self._last_release,
            "binds": self._binds,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over the key of the saved run and continue after its last release."""
        self._notice_fork()
        last_release, key = self.read_last_release(state), bytes.fromhex(state["key"])
        if key == self._key and last_release < self._last_release:
            logger.warning(
                "Noise went back from release %d to %d of the same stream: what was released in between and "
                "what will be released now share their noise. Publish only one of the two.",
                self._last_release,
                last_release,
            )
        self._key, self._seeded, self._last_release = key, bool(state["seeded"]), last_release
        self._binds = bool(state.get("binds", False))  # a state from before goes on as it would have gone on

    def _enter_new_process(self) -> None:
        self._key = secrets.token_bytes(16)  # whether seeded or not: noise is used once

    def _draw(self, targets: list[Target], release: int) -> None:
        key = self._bound_keys.get(release, self._key)
        streams: dict[torch.device | torch.dtype, list[Target]] = {}
        for target in targets:
            if target.tensor.is_cuda:
                streams.setdefault(target.tensor.device, []).append(target)
            else:  # float64 gets float64 noise; narrower types are rounded from float32
                dtype = torch.float64 if target.tensor.dtype == torch.float64 else torch.float32
                streams.setdefault(dtype, []).append(target)
        for stream, members in streams.items():
            if isinstance(stream, torch.dtype):
                self._draw_on_cpu(members, stream, key, release)
            else:
                self._draw_on_cuda(members, stream, key, release)

    def _bind(self, release: int, values: Sequence[Tensor]) -> None:
        """Derive the key of a release from the key, and from a code (GMAC, under the key) of what its noise is for.

        As in deterministic signatures (RFC 6979), a secret random number is a function of the secret key and of what it
        is used for: the same again for the same, and independent of it for everything else.
        """
        if not (self._binds and values):
            return
        self._bound_keys = dict(list(self._bound_keys.items())[-7:])  # of the latest releases, for tests of repeats
        code = Cipher(algorithms.AES128(self._key), modes.GCM(release.to_bytes(12, "big"))).encryptor()
        for value in values:
            code.authenticate_additional_data(value.detach().contiguous().view(-1).view(torch.uint8).numpy().data)
        code.finalize()
        sizes = repr([(value.dtype, tuple(value.shape)) for value in values]).encode()
        self._bound_keys[release] = key = hashlib.blake2b(sizes + code.tag, key=self._key, digest_size=16).digest()
        if register.is_new(self._key, release, key):
            return
        self._key_shared = True
        if register.to_be_warned_of(self._key):
            logger.warning(
                "Release %d of a run with this key (a seed, or a checkpoint that was continued before) was made in "
                "this process already, of another sum. Its noise is drawn anew here. Two runs on one data set spend "
                "two budgets: add them up if both are published.",
                release,
            )

    def _draw_on_cpu(self, targets: list[Target], dtype: torch.dtype, key: bytes, release: int) -> None:
        tensors, detours = [], []
        for tensor, _, _ in targets:
            if is_flat(tensor) and tensor.dtype == dtype:
                tensors.append(tensor.detach() if tensor.requires_grad else tensor)
            else:
                tensors.append(torch.empty(tensor.numel(), dtype=dtype, device="cpu"))
                detours.append((tensor, tensors[-1]))
        whole = _Concatenation(tensors, [target.keep for target in targets], [target.std for target in targets])
        chunks = -(-whole.ends[-1] // whole.chunk)
        threads = min(torch.get_num_threads(), chunks)
        lanes = self._lanes.setdefault(dtype, [])
        lanes += [_Lane(dtype) for _ in range(threads - len(lanes))]
        todo, done = iter(range(chunks)), list[int]()  # shared: whoever is free takes the next chunk

        def work(lane: int) -> None:
            for chunk in todo:
                lanes[lane].draw(whole, chunk, key, release)
                done.append(chunk)

        run_on_torch_threads(work, threads)
        if len(done) < chunks:  # nobody raised, and yet: better no release than one without noise
            raise RuntimeError(f"only {len(done)} of {chunks} pieces of noise were drawn; nothing may be released")
        close(detours)

    def _draw_on_cuda(self, targets: list[Target], device: torch.device, key: bytes, release: int) -> None:
        if device not in self._cuda:
            self._cuda[device] = torch.Generator(device)
        name = struct.pack("<Q", release) + str(device).encode()
        seed = hashlib.blake2b(name, key=key, digest_size=8).digest()
        generator = self._cuda[device].manual_seed(int.from_bytes(seed, "little"))
        for target in targets:
            draw_on_device(target.tensor, target.std, generator)


def draw_on_device(tensor: Tensor, std: float, generator: torch.Generator) -> None:
    """Overwrite a tensor with (z + z') σ / √2, rounded once.

    Each of the two ends where torch's normals end on a GPU: at 6.76 standard deviations in float32, whose uniforms are
    at least 2⁻³³. Their sum reaches √2 times as far. Types of fewer than 32 bits are drawn in float32.
    """
    dtype = tensor.dtype if tensor.dtype in _WORDS else torch.float32
    half = std / math.sqrt(2)
    noise = torch.empty(tensor.shape, dtype=dtype, device=tensor.device)
    noise.normal_(0.0, half, generator=generator)
    noise += torch.empty_like(noise).normal_(0.0, half, generator=generator)
    tensor.copy_(noise)


class _Concatenation:
    """Contiguous tensors of one type, one after the other; which are added to, their deviations and their ends."""

    def __init__(self, tensors: list[Tensor], keeps: list[bool], stds: list[float]) -> None:
        self.tensors, self.keeps, self.stds = tensors, keeps, stds
        self.ends = list(accumulate(tensor.numel() for tensor in tensors))
        self.chunk = _chunk_size(self.ends[-1])


def _chunk_size(numbers: int) -> int:
    """Return how many numbers a chunk has: as many as another, and among few threads the chunks are shared equally."""
    chunks = -(-numbers // _FAST_CHUNK)
    chunks += -chunks % 4 if chunks > 2 else 0
    size = -(-numbers // chunks)
    return size + -size % _PAIRS_OF_VECTORS


class _Lane:
    """One thread's cipher and room to work in, for one type."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._key = b""
        self._cipher: CipherContext
        self._width = dtype.itemsize
        pairs = _FAST_CHUNK // 2
        self._numbers = torch.empty(3, pairs + _STAGGER, dtype=dtype, device="cpu")
        self._words = self._numbers[:2].view(_WORDS[dtype])
        self._streams = [memoryview(row.numpy()).cast("B") for row in self._words]
        self._tiny = torch.tensor(2.0 ** (-8 * self._width), dtype=dtype, device="cpu")
        self._make = chunk_maker()

    def draw(self, whole: _Concatenation, chunk: int, key: bytes, release: int) -> None:
        """Draw one chunk of the concatenation."""
        if key != self._key:
            self._key, self._cipher = key, Cipher(algorithms.AES128(key), modes.CTR(bytes(16))).encryptor()
        ends, start = whole.ends, chunk * whole.chunk
        stop = min(start + whole.chunk, ends[-1])
        counter = start * self._width // _AES_BLOCK + (self._width == 8) * (1 << 63)
        words = stop - start + -(stop - start) % _PAIRS_OF_VECTORS
        self._encrypt(release, counter, words * self._width)
        some = slice(bisect_right(ends, start), bisect_left(ends, stop) + 1)
        lists = (whole.tensors[some], ends[some], whole.keeps[some], whole.stds[some])

        def second(pairs: Tensor) -> Tensor:
            return self._second_words(release, [start + pair for pair in pairs.tolist()])

        draw_chunk(self._make, self._words, self._numbers, self._tiny, (start, stop), lists, second)

    def _encrypt(self, release: int, counter: int, size: int) -> None:
        """Put `size` bytes of the key stream, from `counter` on, in the two rows of words, half in each."""
        self._cipher.reset_nonce(release.to_bytes(8, "big") + counter.to_bytes(8, "big"))
        for stream in self._streams:  # longer than this: the cipher wants 15 spare bytes
            self._cipher.update_into(_ZEROS[: size // 2], stream)

    def _second_words(self, release: int, places: list[int]) -> Tensor:
        """Return numbers in (0, 1) made from a block of the key stream each, which no other word comes from."""
        found = []
        for place in places:
            self._cipher.reset_nonce(release.to_bytes(8, "big") + (_SECOND_WORDS + place).to_bytes(8, "big"))
            found.append((int.from_bytes(self._cipher.update(bytes(8)), "little") + 0.5) * 2.0**-64)
        return torch.tensor(found, dtype=torch.float64, device="cpu")
