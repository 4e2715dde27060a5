"""Gaussian noise from a cryptographic key stream."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from torch import Tensor
from torch._utils import _unflatten_dense_tensors

from dphero.noise.source import OneTimeSource, Target, copy_back, is_flat

__all__ = ["SecureNoise"]

# Up to these sizes torch keeps to one thread. Small work must not wake the others: on a busy machine each
# wait for them costs milliseconds.
_SERIAL = 1 << 15
_SERIAL_TRIGONOMETRY = 1 << 11
_SECURE_CHUNK = 1 << 17  # for large work, where torch's threads help with logarithms and cosines
_MANTISSA = (1 << 53) - 1


class SecureNoise(OneTimeSource):
    """Gaussian noise from a cryptographic key stream: AES-256 in counter mode, key from the operating system.

    64-bit words of the stream become 53-bit uniforms, these become Gaussians by Box-Muller in float64, are
    scaled in float64 and rounded once to the tensor's type. Tails reach 9.49 standard deviations. Whoever
    predicts the noise from other noise breaks AES.

    The key lives in memory only. After `load_state_dict`, and in a forked process, a new key is drawn:
    nothing is ever replayed, and a resumed run is not bitwise the unbroken one. Noise for other devices is
    made on the CPU and copied.

    What it does not promise: adding float32 noise to a float32 sum still shows the grid of floating-point
    numbers. A caller who must exclude that attack adds in float64 (pass float64 tensors) and rounds
    afterwards.
    """

    def __init__(self, *, _key: bytes | None = None) -> None:
        super().__init__()
        # Reused, because fresh memory would cost more than the cipher. It wants 15 spare bytes at the end.
        self._bits = np.empty(_SECURE_CHUNK + 2, dtype=np.int64)
        self._zeros = memoryview(bytes(8 * _SECURE_CHUNK))
        self._normals = torch.empty(_SECURE_CHUNK, dtype=torch.float64, device="cpu")
        self._start(_key)  # only tests of the distribution give a key

    def _start(self, key: bytes | None = None) -> None:
        self._seeded = key is not None
        cipher = Cipher(algorithms.AES256(key or os.urandom(32)), modes.CTR(bytes(16)))
        self._stream = cipher.encryptor()

    @property
    def seeded(self) -> bool:
        """False: the operating system chooses the key, and no user can."""
        return self._seeded

    def state_dict(self) -> dict[str, Any]:
        """The last release; the key is not saved."""
        return {"source": "SecureNoise", "last_release": self._last_release}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue after the last release of the saved run, under a new key."""
        self._notice_fork()
        self._last_release = self.read_last_release(state)
        self._start()

    def _enter_new_process(self) -> None:
        self._start()

    def _draw(self, targets: list[Target], release: int) -> None:
        large = _size_of(targets) > 2 * _SECURE_CHUNK
        chunks, detours = _cut(targets, _SECURE_CHUNK if large else _SERIAL, torch.float64)
        for pieces in chunks:
            total = _size_of(pieces)
            even = total + total % 2
            self._stream.update_into(self._zeros[: 8 * even], self._bits.data.cast("B"))
            bits = torch.from_numpy(self._bits[:even])
            _hand_out(_box_muller(bits, pieces[0].std, out=self._normals[:even]), pieces)
        copy_back(detours)


def _box_muller(bits: Tensor, std: float, out: Tensor) -> Tensor:
    """Turn an even number n of random 64-bit words into n independent N(0, std²), in float64.

    u = (low 53 bits + 1) / 2⁵³ lies in (0, 1], so that its logarithm is finite; v = low 53 bits / 2⁵³ lies in
    [0, 1); the result is std · √(−2 ln u) · (cos 2πv, sin 2πv). Where all low bits of u are 0, the high 11 bits h
    say where in (0, 2⁻⁵³] it lies: u = (h + ½) / 2⁶⁴. `bits` is overwritten.
    """
    half = bits.numel() // 2
    cosine, sine = out[:half], out[half:]
    high = bits[:half] >> 53
    bits.bitwise_and_(_MANTISSA)
    radius = bits[:half].to(torch.float64)
    if not radius.all():
        smallest = radius == 0
        radius[smallest] = (high[smallest] & 0x7FF).to(torch.float64).add_(0.5).mul_(2.0**-11).sub_(1)
    radius.add_(1).mul_(2.0**-53)
    sine.copy_(bits[half:]).mul_(2 * math.pi * 2.0**-53)
    cosine.copy_(sine)
    step = half if bits.numel() > _SERIAL else _SERIAL_TRIGONOMETRY
    for function, argument in ((torch.log_, radius), (torch.cos_, cosine), (torch.sin_, sine)):
        for part in argument.split(step):
            function(part)
    radius.mul_(-2).sqrt_().mul_(std)
    cosine.mul_(radius)
    sine.mul_(radius)
    return out


def _size_of(targets: Sequence[Target]) -> int:
    """Return how many numbers the targets hold in all."""
    return sum(target.tensor.numel() for target in targets)


def _cut(
    targets: Sequence[Target], size: int, dtype: torch.dtype
) -> tuple[list[list[Target]], list[tuple[Tensor, Tensor]]]:
    """Cut the concatenation of tensors in chunks of `size` elements.

    Returns:
        The chunks, each as the pieces it is made of (whole tensors where they fit, flat views otherwise), and
        the detours: (tensor, scratch) where the pieces lie in a scratch of type `dtype`, to be copied over at
        the end.
    """
    chunks: list[list[Target]] = []
    detours: list[tuple[Tensor, Tensor]] = []
    left = 0
    for tensor, std, name, _ in targets:
        pieces: Sequence[Tensor] = (tensor,)
        if tensor.numel() > (left or size):
            if is_flat(tensor):
                flat = tensor.view(-1)
            else:
                flat = torch.empty(tensor.numel(), dtype=dtype, device="cpu")
                detours.append((tensor, flat))
            pieces = (flat[:left], *flat[left:].split(size)) if left else flat.split(size)
        for piece in pieces:
            if left == 0:
                chunks.append([])
                left = size
            chunks[-1].append(Target(piece, std, name))
            left -= piece.numel()
    return chunks, detours


def _hand_out(noise: Tensor, pieces: list[Target]) -> None:
    """Hand flat noise out to the pieces in order, rounding to each one's type."""
    tensors = [piece.tensor for piece in pieces]
    # one call for all: for many small tensors a third of the cost of a loop over views and copies
    torch._foreach_copy_(tensors, list(_unflatten_dense_tensors(noise, tensors)))
