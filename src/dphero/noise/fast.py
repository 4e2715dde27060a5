"""Gaussian noise that a key repeats."""

from __future__ import annotations

import hashlib
import logging
import math
import operator
import secrets
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from torch import Tensor

from dphero.noise import register
from dphero.noise.key_stream import WORDS, KeyStream
from dphero.noise.source import OneTimeSource, Target
from dphero.numerics.one_piece import whole_of

logger = logging.getLogger(__name__)

_OTHER_VERSION = "The checkpoint is of another version: the run goes on with new noise of the same scale."
_STREAM = 3
"""Which noise comes from a key: in 1 words went by the place in a release, in 2 noise was not bound to its scale."""
_CUDA_STREAM = 2
"""The same where more than ``_PIECE`` numbers are drawn on CUDA: in 1 the second normals were drawn all at once."""
_PIECE = 1 << 24
"""On CUDA so many second normals are drawn at a time: together they would take the memory of all gradients."""


class FastNoise(OneTimeSource):
    """Gaussian noise from a key stream, repeatable from the key.

    On the CPU noise is a function of (key, release, what it is bound to, the tensor's name, the place in that tensor,
    32 or 64 bits) and of nothing else (:mod:`dphero.noise.key_stream`), so that a part of a tensor can be drawn alone
    (`starts`). Each release has an AES-128 key of its own, hashed from the key, its number, and what it is bound to.
    On CUDA one Philox generator per device and release has a 64-bit seed hashed from the release's key and the device:
    there noise goes by the order of the tensors, and none can be drawn in parts.

    Tails reach 11.5 standard deviations in float32 (see :mod:`dphero.noise.box_muller`), 9.42 in float64, and 9.5
    on CUDA, where a normal is the sum of two, over √2: torch's own end at 6.76. What it does not promise: CPU and
    CUDA streams differ (unless `portable`), and the generator on CUDA is not cryptographic; other processors and
    versions of torch may round logarithms and sines differently in the last bits; the key is in every checkpoint. For a
    key that is never saved, and noise that is always made in float64, use `SecureNoise`.

    Two sums under one noise vector differ by exactly the people in them. So where a release says what its noise is for
    (`bound_to`), its key is hashed from that and from `std` too: a run that is resumed, or started again with its seed,
    draws the same noise for the same sum, and independent noise as soon as anything is different. `state_dict()` holds
    the key: keep it as secret as the data. A forked process draws a new key, also if there was a seed.

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
        self._stream = KeyStream()
        self._cuda: dict[torch.device, torch.Generator] = {}
        self._other_on_cuda = False  # than in the version that saved what was loaded

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
            "cuda_stream": _CUDA_STREAM,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over the key of the saved run and continue after its last release."""
        self._notice_fork()
        last_release, key = self.read_last_release(state), bytes.fromhex(state["key"])
        if state.get("stream", 1) != _STREAM:
            logger.info(_OTHER_VERSION)
        else:
            self._other_on_cuda = state.get("cuda_stream", 1) != _CUDA_STREAM
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
                self._stream.draw(members, stream, key)
            else:
                self._draw_on_cuda(members, stream, key)

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
            whole = whole_of(tensors)
            size = sum(tensor.numel() for tensor in tensors) if whole is None else whole.numel()
            if self._other_on_cuda and size > _PIECE:
                self._other_on_cuda = False
                logger.info(_OTHER_VERSION)
            if whole is not None:
                draw_on_device(whole, targets[0].std, generator)
                continue
            flat = torch.empty(size, dtype=dtype, device=device)
            draw_on_device(flat, targets[0].std, generator)
            parts = flat.split([tensor.numel() for tensor in tensors])
            torch._foreach_copy_(tensors, [part.view(each.shape) for part, each in zip(parts, tensors, strict=True)])


def draw_on_device(tensor: Tensor, std: float, generator: torch.Generator) -> None:
    """Overwrite a tensor with (z + z') σ / √2, rounded once.

    Each of the two ends where torch's normals end on a GPU: at 6.76 standard deviations in float32, whose uniforms are
    at least 2⁻³³. Their sum reaches √2 times as far. Types of fewer than 32 bits are drawn in float32. The generator
    goes on from the first normals to each piece of the second: all are independent.
    """
    dtype = tensor.dtype if tensor.dtype in WORDS else torch.float32
    in_place = dtype == tensor.dtype and tensor.is_contiguous()
    noise = tensor if in_place else torch.empty(tensor.shape, dtype=dtype, device=tensor.device)
    half = std / math.sqrt(2)
    noise.normal_(0.0, half, generator=generator)
    for piece in noise.view(-1).split(_PIECE):
        piece.add_(torch.empty_like(piece).normal_(0.0, half, generator=generator))
    if not in_place:
        tensor.copy_(noise)


_BYTES_AS_THEY_ARE = {torch.uint8, *WORDS}


@lru_cache(64)
def _described(kinds: tuple[tuple[torch.dtype, torch.Size], ...]) -> bytes:
    return repr([(dtype, tuple(shape)) for dtype, shape in kinds]).encode()


def _bytes_of(value: Tensor) -> memoryview:
    """Return the bytes of a tensor that is not empty, in the order of its elements."""
    plain = (value.detach() if value.requires_grad else value).contiguous()
    return (plain if plain.dtype in _BYTES_AS_THEY_ARE else plain.view(-1).view(torch.uint8)).numpy().data.cast("B")
