"""Gaussian noise that a key repeats."""

from __future__ import annotations

import hashlib
import logging
import math
import operator
import secrets
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from cryptography.hazmat.primitives.ciphers import Cipher, CipherContext, algorithms, modes
from torch import Tensor

from dphero.noise import register
from dphero.noise.box_muller import BLOCK, chunk_maker, draw_chunk
from dphero.noise.source import OneTimeSource, Target, copy_back, is_flat
from dphero.noise.threads import run_on_torch_threads

__all__ = ["FastNoise"]

logger = logging.getLogger(__name__)

_STREAM = 2
"""Which words of the key stream make which numbers; in 1, of earlier versions, that went by the place in a release."""
# How many numbers a thread draws at a time at most. With fewer, threads wait for Python's lock; with more, for memory.
_FAST_CHUNK = 1 << 17
_STAGGER = 1040  # numbers between rows: a power of two apart, they would want the same places in a cache
_AES_BLOCK = 16  # bytes
_ZEROS = memoryview(bytes(8 * _FAST_CHUNK))  # what is encrypted: the cipher text is then the key stream itself
_PAIRS = BLOCK // 2
# Where the counters of words begin that are not 32-bit words of radii: no two kinds ever meet.
_ANGLES, _SECOND_WORDS, _WIDE = 1 << 61, 1 << 62, 1 << 63
_WORDS = {torch.float32: torch.int32, torch.float64: torch.int64}


class FastNoise(OneTimeSource):
    """Gaussian noise from a key stream, repeatable from the key.

    On the CPU every number has an address: noise is a function of (key, release, what it is bound to, the tensor's
    name, the place in that tensor, 32 or 64 bits) and of nothing else: not of the thread count, of torch's global seed,
    of strides, of the tensor's size or of the other tensors. So a part of a tensor can be drawn alone (`starts`).

    Each release has a key of its own, hashed from the key, its number, and what it is bound to. Under it, the words of
    a tensor are AES-128(hash of its name ‖ counter), 64 bits each: those for radii have counters from 0 on, those for
    angles from 2⁶¹ on; 64-bit words, for float64 tensors, have counters 2⁶³ larger. :mod:`dphero.noise.box_muller`
    makes numbers of them. On CUDA one Philox generator per device and release has a 64-bit seed hashed from the
    release's key and the device: there noise goes by the order of the tensors, and none can be drawn in parts.

    Tails reach 11.5 standard deviations in float32 (see :mod:`dphero.noise.box_muller`), 9.42 in float64, and 9.5
    on CUDA, where a normal is the sum of two, over √2: torch's own end at 6.76. What it does not promise: CPU and
    CUDA streams differ (unless `portable`), and the generator on CUDA is not cryptographic; other processors and
    versions of torch may round logarithms and sines differently in the last bits; the key is in every checkpoint. For a
    key that is never saved, and noise that is always made in float64, use `SecureNoise`.

    Two sums under one noise vector differ by exactly the people in them. So where a release says what its noise is for
    (`bound_to`), its key is hashed from that too: a run that is resumed, or started again with its seed, draws
    the same noise for the same sum, and independent noise as soon as anything is different. `state_dict()` holds the
    key: keep it as secret as the data. A forked process draws a new key, also if there was a seed.

    Args:
        seed: None (default) takes 128 bits from the operating system. An integer makes the run repeatable;
            the guarantee then holds only while nobody else knows or guesses it, and `seeded` says so.
        portable: Draw on the CPU for tensors of every device, and copy: the same noise wherever they are, but slower
            on a GPU.
    """

    def __init__(self, seed: int | None = None, *, portable: bool = False) -> None:
        super().__init__()
        self._seeded, self._portable = seed is not None, portable
        if seed is None:
            self._key = secrets.token_bytes(16)
        else:
            self._key = hashlib.blake2b(str(operator.index(seed)).encode(), digest_size=16).digest()
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
            "stream": _STREAM,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over the key of the saved run and continue after its last release."""
        self._notice_fork()
        last_release, key = self.read_last_release(state), bytes.fromhex(state["key"])
        if state.get("stream", 1) != _STREAM:
            logger.info("The checkpoint is of another version: the run goes on with new noise of the same scale.")
        if key == self._key and last_release < self._last_release:
            logger.warning(
                "Noise went back from release %d to %d of the same stream: what was released in between and "
                "what will be released now share their noise. Publish only one of the two.",
                self._last_release,
                last_release,
            )
        self._key, self._seeded, self._last_release = key, bool(state["seeded"]), last_release

    def _enter_new_process(self) -> None:
        self._key = secrets.token_bytes(16)  # whether seeded or not: noise is used once

    def _bind(self, release: int, values: Sequence[Tensor]) -> None:
        """Derive the key of a release from the key, and from a code (GMAC, under the key) of what its noise is for.

        As in deterministic signatures (RFC 6979), a secret random number is a function of the secret key and of what it
        is used for: the same again for the same, and independent of it for everything else.
        """
        if not values:
            return
        self._bound_keys = dict(list(self._bound_keys.items())[-7:])  # of the latest releases, for tests of repeats
        code = Cipher(algorithms.AES128(self._key), modes.GCM(release.to_bytes(12, "big"))).encryptor()
        for value in values:
            if value.numel():
                code.authenticate_additional_data(_bytes_of(value))
        code.finalize()
        kinds = _described(tuple([(value.dtype, value.shape) for value in values]))
        self._bound_keys[release] = key = self._release_key(release, kinds + code.tag)
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

    def _release_key(self, release: int, bound_to: bytes = b"") -> bytes:
        text = b"noise" + release.to_bytes(8, "big") + bound_to
        return hashlib.blake2b(text, key=self._key, digest_size=16).digest()

    def _draw(self, targets: list[Target], release: int) -> None:
        key = self._bound_keys.get(release) or self._release_key(release)
        streams: dict[torch.device | torch.dtype, list[Target]] = {}
        for target in targets:
            if target.tensor.is_cuda and not self._portable:
                streams.setdefault(target.tensor.device, []).append(target)
            else:  # float64 gets float64 noise; narrower types are rounded from float32
                dtype = torch.float64 if target.tensor.dtype == torch.float64 else torch.float32
                streams.setdefault(dtype, []).append(target)
        for stream, members in streams.items():
            if isinstance(stream, torch.dtype):
                self._draw_on_cpu(members, stream, key)
            else:
                self._draw_on_cuda(members, stream, key)

    def _draw_on_cpu(self, targets: list[Target], dtype: torch.dtype, key: bytes) -> None:
        places, detours = list[_Place](), list[tuple[Tensor, Tensor]]()
        for tensor, _, name, start in targets:
            skipped = start % BLOCK
            if is_flat(tensor) and tensor.dtype == dtype and not skipped:
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
        copy_back(detours)

    def _draw_on_cuda(self, targets: list[Target], device: torch.device, key: bytes) -> None:
        if any(target.start for target in targets):
            raise ValueError("On CUDA noise cannot be drawn in parts; use FastNoise(portable=True), or the CPU.")
        if device not in self._cuda:
            self._cuda[device] = torch.Generator(device)
        seed = hashlib.blake2b(str(device).encode(), key=key, digest_size=8).digest()
        generator = self._cuda[device].manual_seed(int.from_bytes(seed, "little"))
        for dtype in dict.fromkeys(target.tensor.dtype for target in targets):
            tensors = [target.tensor for target in targets if target.tensor.dtype == dtype]
            # in one piece: many small tensors would take a launch each
            flat = torch.empty(sum(tensor.numel() for tensor in tensors), dtype=dtype, device=device)
            draw_on_device(flat, targets[0].std, generator)
            parts = flat.split([tensor.numel() for tensor in tensors])
            torch._foreach_copy_(tensors, [part.view(each.shape) for part, each in zip(parts, tensors, strict=True)])


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
    chunks = -(-blocks * BLOCK // _FAST_CHUNK)
    chunks += -chunks % 4 if chunks > 2 else 0
    return -(-blocks // chunks)


class _Lane:
    """One thread's cipher and working memory, for one type."""

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

    def draw(self, chunk: list[_Place], std: float, key: bytes) -> None:
        """Draw one chunk."""
        if key != self._key:
            self._key, self._cipher = key, Cipher(algorithms.AES128(key), modes.CTR(bytes(16))).encryptor()
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

        draw_chunk(self._make, self._words, self._numbers, self._tiny, std, [place.flat for place in chunk], second)

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


@lru_cache(64)
def _described(kinds: tuple[tuple[torch.dtype, torch.Size], ...]) -> bytes:
    return repr([(dtype, tuple(shape)) for dtype, shape in kinds]).encode()


def _bytes_of(value: Tensor) -> memoryview:
    """Return the bytes of a tensor that is not empty, in the order of its elements."""
    plain = value.detach().contiguous()
    return (plain if plain.dtype in _WORDS else plain.view(-1).view(torch.uint8)).numpy().data.cast("B")
