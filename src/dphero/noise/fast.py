"""Gaussian noise from torch's own generators."""

from __future__ import annotations

import hashlib
import logging
import operator
import secrets
import struct
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dphero.noise.source import OneTimeSource, Target, close, cut, deal, is_flat, size_of

__all__ = ["FastNoise"]

logger = logging.getLogger(__name__)

_FAST_CHUNK = 1 << 17  # half a millisecond of work, which hides the seeding (some 10 µs)
_BLOCK = 16  # torch draws normals on the CPU in blocks of 16 and treats a shorter tail differently
_MERSENNE_WORDS = slice(3, 627)  # where `torch.Generator.get_state()` holds the generator's 624 words


class FastNoise(OneTimeSource):
    """Gaussian noise from torch's own generators, repeatable from a key.

    On the CPU, position p of release t is a function of (key, t, p) alone: not of the thread count, of
    torch's global seed, of how the positions are split among tensors, or of how many follow. The
    concatenation of the tensors is cut in chunks of 131,072; chunk c is drawn by a Mersenne Twister whose
    whole state of 624 words is SHAKE-128(key, t, c). (`torch.Generator.manual_seed` would not do: on the CPU
    it keeps 32 of its 64 bits, so that after 80,000 chunks one is expected to have repeated.) float64 tensors
    form a concatenation of their own. On CUDA, one Philox generator per device and release has a 64-bit seed
    hashed from (key, t, device).

    What it does not promise: the generators are not cryptographic, tails in float32 end at 5.8 standard
    deviations (torch uses 24-bit uniforms), CPU and CUDA streams differ. Against an adversary who attacks the
    generator, use `SecureNoise`.

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
        self._pool: ThreadPoolExecutor | None = None
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
        self._lanes, self._pool = [], None  # threads do not survive a fork
        if not self._seeded:
            self._key = secrets.token_bytes(16)

    def _draw(self, targets: list[Target], std: float, release: int) -> None:
        streams: dict[torch.device | torch.dtype, list[Target]] = {}
        for target in targets:
            if target.tensor.is_cuda:
                streams.setdefault(target.tensor.device, []).append(target)
            else:  # float64 gets float64 noise; narrower types are rounded from float32
                dtype = torch.float64 if target.tensor.dtype == torch.float64 else torch.float32
                streams.setdefault(dtype, []).append(target)
        for stream, members in streams.items():
            if isinstance(stream, torch.dtype):
                self._draw_on_cpu(members, stream, std, release)
            else:
                self._draw_on_cuda(members, stream, std, release)

    def _draw_on_cpu(self, targets: list[Target], dtype: torch.dtype, std: float, release: int) -> None:
        chunks, detours = cut(targets, _FAST_CHUNK, dtype)
        threads = min(torch.get_num_threads(), len(chunks))
        if threads > len(self._lanes):
            self._lanes += [_Lane() for _ in range(threads - len(self._lanes))]
            self._pool = ThreadPoolExecutor(threads, thread_name_prefix="dphero-noise")
        todo = iter(list(enumerate(chunks)))  # shared: whoever is free takes the next chunk

        @torch.no_grad()  # a new thread starts with gradients on
        def work(lane: _Lane) -> None:
            for number, pieces in todo:
                name = struct.pack("<QQ?", release, number, dtype == torch.float64)
                lane.draw(pieces, dtype, std, self._key + name)

        assert self._pool is not None
        helpers = [self._pool.submit(work, lane) for lane in self._lanes[1:threads]]
        work(self._lanes[0])
        for helper in helpers:
            helper.result()
        close(detours)

    def _draw_on_cuda(self, targets: list[Target], device: torch.device, std: float, release: int) -> None:
        if device not in self._cuda:
            self._cuda[device] = torch.Generator(device)
        name = struct.pack("<Q", release) + str(device).encode()
        seed = hashlib.blake2b(name, key=self._key, digest_size=8).digest()
        generator = self._cuda[device].manual_seed(int.from_bytes(seed, "little"))
        for target in targets:
            target.tensor.normal_(0.0, std, generator=generator)


class _Lane:
    """One thread's generator and buffers."""

    def __init__(self) -> None:
        self._generator = torch.Generator()
        self._state = _pristine_state()
        self._words = self._state.numpy().view(np.int64)[_MERSENNE_WORDS]
        self._buffers: dict[torch.dtype, Tensor] = {}

    def draw(self, pieces: list[Target], dtype: torch.dtype, std: float, name: bytes) -> None:
        """Fill the pieces of one chunk, in order, with the noise that belongs to `name`, drawn as `dtype`."""
        self._words[:] = np.frombuffer(hashlib.shake_128(name).digest(624 * 4), dtype="<u4")
        self._generator.set_state(self._state)
        total = size_of(pieces)
        piece, kept = pieces[0]
        if total % _BLOCK == 0 and len(pieces) == 1 and not kept and piece.dtype == dtype and is_flat(piece):
            piece.normal_(0.0, std, generator=self._generator)  # the values that the buffer would hold
            return
        if dtype not in self._buffers:
            self._buffers[dtype] = torch.empty(_FAST_CHUNK, dtype=dtype)
        buffer = self._buffers[dtype][: total + -total % _BLOCK]
        deal(buffer.normal_(0.0, std, generator=self._generator), pieces)


def _pristine_state() -> Tensor:
    """State of a just-seeded CPU generator, whose 624 words the caller overwrites.

    Raises:
        RuntimeError: this torch lays the state out in another way than the one known here.
    """
    state = torch.Generator().manual_seed(5489).get_state()
    # The seed; left = 1 and seeded = 1; next = 0; then the words, which MT19937 starts like this from 5489.
    known = [5489, (1 << 32) + 1, 0, 5489, 1301868182, 2938499221]
    if state.numel() != 5056 or state.view(torch.int64)[: len(known)].tolist() != known:
        raise RuntimeError(
            f"FastNoise does not know the generator state of torch {torch.__version__}: use SecureNoise."
        )
    return state
