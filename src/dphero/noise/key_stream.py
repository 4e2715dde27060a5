"""Gaussian noise from AES in counter mode: under a key, every number of every tensor has an address of its own.

The words of a tensor are AES(hash of its name ‖ counter), 64 bits each: those for radii have counters from 0 on, those
for angles from 2⁶¹ on; 64-bit words, for float64 noise, have counters 2⁶³ larger. :mod:`dphero.noise.box_muller` makes
numbers of them. So noise depends on nothing but the key, the tensor's name, the place in that tensor, and 32 or 64
bits: not on the thread count, on strides, on the tensor's size or on other tensors.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

import torch
from cryptography.hazmat.primitives.ciphers import Cipher, CipherContext, algorithms, modes
from torch import Tensor

from dphero.noise.box_muller import BLOCK, chunk_maker, draw_chunk
from dphero.noise.source import Target
from dphero.noise.threads import run_on_torch_threads

WORDS = {torch.float32: torch.int32, torch.float64: torch.int64}
"""The types that noise is made in, and those of their words."""

# How many numbers a thread draws at a time at most. With fewer, threads wait for Python's lock; with more, for memory.
_CHUNK = 1 << 17
_STAGGER = 1040  # numbers between rows: a power of two apart, they would want the same places in a cache
_AES_BLOCK = 16  # bytes
_ZEROS = memoryview(bytes(8 * _CHUNK))  # what is encrypted: the cipher text is then the key stream itself
_PAIRS = BLOCK // 2
# Where the counters of words begin that are not 32-bit words of radii: no two kinds ever meet.
_ANGLES, _SECOND_WORDS, _WIDE = 1 << 61, 1 << 62, 1 << 63


class KeyStream:
    """Draws noise on the CPU, with working memory that is used again."""

    def __init__(self) -> None:
        self._lanes: dict[torch.dtype, list[_Lane]] = {}

    def draw(self, targets: list[Target], dtype: torch.dtype, key: bytes) -> None:
        """Overwrite targets with noise of this type, float32 or float64, rounded once where theirs is another."""
        places, detours = list[_Place](), list[tuple[Tensor, Tensor]]()
        for tensor, _, name, start in targets:
            skipped = start % BLOCK
            if tensor.is_cpu and tensor.is_contiguous() and not skipped:
                flat = (tensor.detach() if tensor.requires_grad else tensor).view(-1)
            else:
                flat = torch.empty(skipped + tensor.numel(), dtype=dtype, device="cpu")
                detours.append((tensor, flat[skipped:]))
            places.append(_Place(flat, _name_code(name), start // BLOCK))
        if len({place.code for place in places}) < len(places):
            raise RuntimeError(f"names of tensors are alike to 64 bits of a hash: {[each.name for each in targets]}")
        chunks = _cut(places)
        threads = min(torch.get_num_threads(), len(chunks))
        lanes = self._lanes.setdefault(dtype, [])
        lanes += [_Lane(dtype) for _ in range(threads - len(lanes))]
        std, todo, done = targets[0].std, iter(chunks), list[int]()  # shared: whoever is free takes the next chunk

        def work(lane: int) -> None:
            for chunk in todo:
                lanes[lane].draw(chunk, std, key)
                done.append(len(chunk))

        run_on_torch_threads(work, threads)
        if len(done) < len(chunks):  # nobody raised, and yet: better no release than one without noise
            raise RuntimeError(f"only {len(done)} of {len(chunks)} pieces of noise were drawn; nothing may be released")
        for tensor, scratch in detours:
            tensor.copy_(scratch.view(tensor.shape))


class _Place(NamedTuple):
    """Where noise goes: a vector, the code of its tensor's name, and the block of the tensor that it begins with."""

    flat: Tensor
    code: bytes
    first: int


def _cut(places: list[_Place]) -> list[list[_Place]]:
    """Share the blocks of all tensors out among chunks of equal size; the noise does not depend on how."""
    size = _chunk_size(sum(-(-len(place.flat) // BLOCK) for place in places))
    chunks: list[list[_Place]] = [[]]
    room = size
    for flat, code, first in places:
        while len(flat):
            if not room:
                chunks.append([])
                room = size
            part, flat = flat[: room * BLOCK], flat[room * BLOCK :]
            chunks[-1].append(_Place(part, code, first))
            blocks = -(-len(part) // BLOCK)
            first, room = first + blocks, room - blocks
    return chunks


def _chunk_size(blocks: int) -> int:
    """Return how many blocks a chunk has: as many as another, and among few threads the chunks are shared equally."""
    chunks = -(-blocks * BLOCK // _CHUNK)
    chunks += -chunks % 4 if chunks > 2 else 0
    return -(-blocks // chunks)


class _Lane:
    """One thread's cipher and working memory, for one type."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._key = b""
        self._cipher: CipherContext
        self._dtype, self._width = dtype, dtype.itemsize
        pairs = _CHUNK // 2
        self._numbers = torch.empty(3, pairs + _STAGGER, dtype=dtype, device="cpu")
        self._words = self._numbers[:2].view(WORDS[dtype])
        self._streams = [memoryview(row.numpy()).cast("B") for row in self._words]
        self._tiny = torch.tensor(2.0 ** (-8 * self._width), dtype=dtype, device="cpu")
        self._make = chunk_maker()

    def draw(self, chunk: list[_Place], std: float, key: bytes) -> None:
        """Draw one chunk."""
        if key != self._key:
            self._key, self._cipher = key, Cipher(algorithms.AES(key), modes.CTR(bytes(16))).encryptor()
        firsts = [place.first * _PAIRS for place in chunk]
        counts = [-(-len(place.flat) // BLOCK) * _PAIRS for place in chunk]
        begin = 0
        for place, first, count in zip(chunk, firsts, counts, strict=True):
            self._encrypt(place.code, first, count, begin)
            begin += count

        def second(pairs: Tensor) -> Tensor:
            ends, found = list(accumulate(counts)), []
            for pair in pairs.tolist():
                number = next(i for i, end in enumerate(ends) if pair < end)
                found.append(
                    self._second_word(chunk[number].code, firsts[number] + pair - ends[number] + counts[number])
                )
            return torch.tensor(found, dtype=torch.float64, device="cpu")

        outs = [
            place.flat if place.flat.dtype == self._dtype else torch.empty_like(place.flat, dtype=self._dtype)
            for place in chunk
        ]
        draw_chunk(self._make, self._words, self._numbers, self._tiny, std, outs, second)
        for place, out in zip(chunk, outs, strict=True):
            if out is not place.flat:
                place.flat.copy_(out)

    def _encrypt(self, code: bytes, first: int, count: int, begin: int) -> None:
        """Put the words of a tensor's pairs from `first` on in the rows of radii and angles, from `begin` on."""
        counter = first * self._width // _AES_BLOCK + (_WIDE if self._width == 8 else 0)
        for row, stream in enumerate(self._streams):  # longer than this: the cipher wants 15 spare bytes
            self._cipher.reset_nonce(code + (counter + row * _ANGLES).to_bytes(8, "big"))
            self._cipher.update_into(_ZEROS[: count * self._width], stream[begin * self._width :])

    def _second_word(self, code: bytes, pair: int) -> float:
        """Return a number in (0, 1) made from a block of the key stream that no other word comes from."""
        self._cipher.reset_nonce(code + (_SECOND_WORDS + pair).to_bytes(8, "big"))
        return (int.from_bytes(self._cipher.update(bytes(8)), "little") + 0.5) * 2.0**-64


@lru_cache(1 << 12)
def _name_code(name: str) -> bytes:
    return hashlib.blake2b(name.encode(), digest_size=8).digest()
