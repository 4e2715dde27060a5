"""Where Gaussian noise comes from. Where it is added, and priced, is `dphero.mechanism`.

Two sources share one interface, `NoiseSource`:

* `FastNoise`: torch's generators under a secret 128-bit key. Noise is a function of (key, release, position),
  so a resumed run continues exactly where the saved one stopped. Statistically sound, not cryptographic.
* `SecureNoise`: an AES-256 key stream, turned into Gaussians in float64. The key is never saved.

Both refuse to serve one release twice: two sums under the same noise differ by exactly the people in them.
"""

from __future__ import annotations

import hashlib
import logging
import math
import operator
import os
import secrets
import struct
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain, repeat
from typing import Any, NamedTuple, NoReturn, Protocol, SupportsIndex

import numpy as np
import torch
from torch import Tensor
from torch._utils import _unflatten_dense_tensors

__all__ = ["FastNoise", "NoiseSource", "SecureNoise", "can_keep"]

logger = logging.getLogger(__name__)

# Up to these sizes torch keeps to one thread. Small work must not wake the others: on a busy machine each
# wait for them costs milliseconds.
_SERIAL = 1 << 15
_SERIAL_TRIGONOMETRY = 1 << 11
_FAST_CHUNK = 1 << 17  # half a millisecond of work, which hides the seeding (some 10 µs)
_SECURE_CHUNK = 1 << 17  # for large work, where torch's threads help with logarithms and cosines
_BLOCK = 16  # torch draws normals on the CPU in blocks of 16 and treats a shorter tail differently
_MANTISSA = (1 << 53) - 1
_MERSENNE_WORDS = slice(3, 627)  # where `torch.Generator.get_state()` holds the generator's 624 words


class _Target(NamedTuple):
    """A tensor, or a flat part of one, that gets `keep` times itself plus noise."""

    tensor: Tensor
    keep: float


def can_keep(tensor: Tensor) -> bool:
    """Tell whether noise can be added to the tensor in place."""
    return _is_flat(tensor) and tensor.dtype in (torch.float32, torch.float64)


class NoiseSource(Protocol):
    """Gaussian noise on demand, each release once."""

    @property
    def seeded(self) -> bool:
        """Whether a user chose the seed: then the guarantee holds only while that seed stays secret."""

    def fill(self, tensors: Sequence[Tensor], std: float, release: int, keep: Sequence[float] = ()) -> None:
        """Overwrite every tensor in place with independent N(0, std²), or add to a multiple of what it holds.

        Args:
            tensors: floating-point tensors of any shape, strides and device; empty ones are fine.
            std: standard deviation, σ·C. Zero gives zeros, and uses the release up all the same.
            release: index of this release, larger than every index served before.
            keep: for each tensor, what its values are multiplied by before noise is added; 0, or left out, for
                overwriting. Others than 0 need a contiguous tensor on the CPU, of 32 or 64 bits.

        Raises:
            RuntimeError: `release` is not larger than the last one served.
            ValueError: an argument no noise can be made for; nothing was written and nothing used up.
        """

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint must hold for the run to go on; plain values only."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue after the last release of the run that `state` was saved from."""


class _OneTimeSource(ABC):
    """What both sources share: arguments are checked, a release is claimed before its noise exists."""

    def __init__(self) -> None:
        self._last_release = -1
        self._process = os.getpid()

    @property
    def last_release(self) -> int:
        """Index of the last release served; -1 before the first."""
        return self._last_release

    def fill(self, tensors: Sequence[Tensor], std: float, release: int, keep: Sequence[float] = ()) -> None:
        """Overwrite every tensor in place with independent N(0, std²), or add to it; see `NoiseSource.fill`."""
        release = operator.index(release)
        targets = [_Target(tensor, kept) for tensor, kept in zip(tensors, chain(keep, repeat(0.0)), strict=False)]
        if not (math.isfinite(std) and std >= 0):
            raise ValueError(f"std must be finite and not negative, got {std!r}.")
        if not 0 <= release < 1 << 64:
            raise ValueError(f"release must be an index from 0, got {release}.")
        for tensor, kept in targets:
            if not tensor.is_floating_point() or tensor.layout != torch.strided:
                raise ValueError(
                    f"Noise needs dense floating-point tensors, got {tensor.dtype} in layout {tensor.layout}."
                )
            if kept and not can_keep(tensor):
                raise ValueError("Noise is added in place on the CPU only, to contiguous tensors of 32 or 64 bits.")
        if release <= self._last_release:
            raise RuntimeError(
                f"Release {release} asked for, but release {self._last_release} was already served: a noise "
                f"vector is never used twice. Ask for {self._last_release + 1} or later, or load the state "
                f"of the run to be resumed."
            )
        self._notice_fork()
        # Claimed first: noise that was written in part before an error is not handed out again either.
        self._last_release = release
        with torch.no_grad():
            if std == 0:
                for tensor, kept in targets:
                    tensor.mul_(kept) if kept else tensor.zero_()
            elif filled := [target for target in targets if target.tensor.numel()]:
                self._draw(filled, float(std), release)

    @abstractmethod
    def _draw(self, targets: list[_Target], std: float, release: int) -> None:
        """Fill non-empty tensors; all arguments are checked."""

    def _notice_fork(self) -> None:
        if self._process != os.getpid():
            self._process = os.getpid()
            self._enter_new_process()

    @abstractmethod
    def _enter_new_process(self) -> None:
        """Called once in a forked child, before it draws: it must not share its parent's stream."""

    def _read_last_release(self, state: Mapping[str, Any]) -> int:
        name = type(self).__name__
        if state.get("source") != name:
            raise ValueError(
                f"This state was saved by {state.get('source')!r} and cannot be loaded into {name}: resume "
                f"with the kind of noise source that the run was started with."
            )
        return int(state["last_release"])

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise TypeError(
            f"{type(self).__name__} cannot be copied or pickled: two copies would add the same noise. "
            f"Make a new source, or carry state_dict() over to one that replaces this."
        )


class FastNoise(_OneTimeSource):
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

    def _draw(self, targets: list[_Target], std: float, release: int) -> None:
        streams: dict[torch.device | torch.dtype, list[_Target]] = {}
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

    def _draw_on_cpu(self, targets: list[_Target], dtype: torch.dtype, std: float, release: int) -> None:
        chunks, detours = _cut(targets, _FAST_CHUNK, dtype)
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
        _close(detours)

    def _draw_on_cuda(self, targets: list[_Target], device: torch.device, std: float, release: int) -> None:
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

    def draw(self, pieces: list[_Target], dtype: torch.dtype, std: float, name: bytes) -> None:
        """Fill the pieces of one chunk, in order, with the noise that belongs to `name`, drawn as `dtype`."""
        self._words[:] = np.frombuffer(hashlib.shake_128(name).digest(624 * 4), dtype="<u4")
        self._generator.set_state(self._state)
        total = _size(pieces)
        piece, kept = pieces[0]
        if total % _BLOCK == 0 and len(pieces) == 1 and not kept and piece.dtype == dtype and _is_flat(piece):
            piece.normal_(0.0, std, generator=self._generator)  # the values that the buffer would hold
            return
        if dtype not in self._buffers:
            self._buffers[dtype] = torch.empty(_FAST_CHUNK, dtype=dtype)
        buffer = self._buffers[dtype][: total + -total % _BLOCK]
        _deal(buffer.normal_(0.0, std, generator=self._generator), pieces)


class SecureNoise(_OneTimeSource):
    """Gaussian noise from a cryptographic key stream: AES-256 in counter mode, key from the operating system.

    64-bit words of the stream become 53-bit uniforms, these become Gaussians by Box-Muller in float64, are
    scaled in float64 and rounded once to the tensor's type. Tails reach 8.57 standard deviations. Whoever
    predicts the noise from other noise breaks AES.

    The key lives in memory only. After `load_state_dict`, and in a forked process, a new key is drawn:
    nothing is ever replayed, and a resumed run is not bitwise the unbroken one. Noise for other devices is
    made on the CPU and copied.

    What it does not promise: adding float32 noise to a float32 sum still shows the grid of floating-point
    numbers. A caller who must exclude that attack adds in float64 (pass float64 tensors) and rounds
    afterwards.

    Raises:
        ModuleNotFoundError: the package `cryptography` is missing (`pip install 'dphero[secure]'`).
    """

    def __init__(self, *, _key: bytes | None = None) -> None:
        super().__init__()
        _require_cryptography()
        # Reused, because fresh memory would cost more than the cipher. It wants 15 spare bytes at the end.
        self._bits = np.empty(_SECURE_CHUNK + 2, dtype=np.int64)
        self._zeros = memoryview(bytes(8 * _SECURE_CHUNK))
        self._normals = torch.empty(_SECURE_CHUNK, dtype=torch.float64)
        self._start(_key)  # only tests of the distribution give a key

    def _start(self, key: bytes | None = None) -> None:
        from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

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
        self._last_release = self._read_last_release(state)
        self._start()

    def _enter_new_process(self) -> None:
        self._start()

    def _draw(self, targets: list[_Target], std: float, release: int) -> None:
        large = _size(targets) > 2 * _SECURE_CHUNK
        chunks, detours = _cut(targets, _SECURE_CHUNK if large else _SERIAL, torch.float64)
        for pieces in chunks:
            total = _size(pieces)
            even = total + total % 2
            self._stream.update_into(self._zeros[: 8 * even], self._bits.data.cast("B"))
            bits = torch.from_numpy(self._bits[:even])
            _deal(_box_muller(bits, std, out=self._normals[:even]), pieces)
        _close(detours)


def _is_flat(tensor: Tensor) -> bool:
    return tensor.is_cpu and tensor.is_contiguous()


def _size(targets: Sequence[_Target]) -> int:
    return sum(target.tensor.numel() for target in targets)


def _cut(
    targets: Sequence[_Target], size: int, dtype: torch.dtype
) -> tuple[list[list[_Target]], list[tuple[Tensor, Tensor]]]:
    """Cut the concatenation of tensors in chunks of `size` elements.

    Returns:
        The chunks, each as the pieces it is made of (whole tensors where they fit, flat views otherwise), and
        the detours: (tensor, scratch) where the pieces lie in a scratch of type `dtype`, to be copied over at
        the end.
    """
    chunks: list[list[_Target]] = []
    detours: list[tuple[Tensor, Tensor]] = []
    room = 0
    for tensor, keep in targets:
        pieces: Sequence[Tensor] = (tensor,)
        if tensor.numel() > (room or size):
            if _is_flat(tensor):
                flat = tensor.view(-1)
            else:
                flat = torch.empty(tensor.numel(), dtype=dtype)
                detours.append((tensor, flat))
            pieces = (flat[:room], *flat[room:].split(size)) if room else flat.split(size)
        for piece in pieces:
            if room == 0:
                chunks.append([])
                room = size
            chunks[-1].append(_Target(piece, keep))
            room -= piece.numel()
    return chunks, detours


def _close(detours: Sequence[tuple[Tensor, Tensor]]) -> None:
    for tensor, scratch in detours:
        tensor.copy_(scratch.view(tensor.shape))


def _deal(noise: Tensor, pieces: list[_Target]) -> None:
    """Hand the flat noise out to the pieces in order, rounding to each one's type."""
    parts = _unflatten_dense_tensors(noise, [piece.tensor for piece in pieces])
    fresh = [(piece.tensor, part) for piece, part in zip(pieces, parts, strict=True) if not piece.keep]
    if fresh:  # one call for all: for many small tensors a third of the cost of a loop over views and copies
        torch._foreach_copy_([tensor for tensor, _ in fresh], [part for _, part in fresh])
    for (tensor, keep), part in zip(pieces, parts, strict=True):
        if keep:
            torch.add(part, tensor, alpha=keep, out=tensor)


def _box_muller(bits: Tensor, std: float, out: Tensor) -> Tensor:
    """Turn an even number n of random 64-bit words into n independent N(0, std²), in float64.

    u = (low 53 bits + 1) / 2⁵³ lies in (0, 1], so that its logarithm is finite; v = low 53 bits / 2⁵³ lies in
    [0, 1); the result is std · √(−2 ln u) · (cos 2πv, sin 2πv). `bits` is overwritten.
    """
    half = bits.numel() // 2
    cosine, sine = out[:half], out[half:]
    bits.bitwise_and_(_MANTISSA)
    radius = bits[:half].to(torch.float64).add_(1).mul_(2.0**-53)
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


def _require_cryptography() -> None:
    try:
        import cryptography  # noqa: F401
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "SecureNoise needs the package 'cryptography', which is missing: pip install 'dphero[secure]'."
        ) from error
