"""What a network can learn from synthetic images before it sees private ones."""

from __future__ import annotations

import copy
import fcntl
import hashlib
import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from io import BytesIO
from pathlib import Path
from typing import IO, Any

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from dphero._files import open_for_lock, open_zip, read_bytes, seal_zip, write_atomically
from dphero.data import directory
from dphero.guidance.prior.processes import PROCESSES
from dphero.methods.trainers.head import Head, features, headless
from dphero.methods.trainers.views import view

logger = logging.getLogger(__name__)

_VERSION = 2  # of what pre-training does: kept weights of another version are not used
_EMBEDDING = 128
_RATE, _DECAY = 2e-3, 1e-4
_DRAWN_TOGETHER, _PASSES = 16, 4  # batches of images drawn at a time, and how often each image is used
_WHITENED_BY = 8192  # images, or as many as were learned from, if those are fewer
_LONG = 2000  # steps from which compiling pays
_SAVE_SECONDS = 30.0


def pretrain(
    model: nn.Module, head: Head, shape: tuple[int, int, int], process: str, steps: int, batch: int
) -> Iterator[float]:
    """Teach a network, all but its head, to know two views of one synthetic image among many; then set the head's map.

    The result is a function of the first weights and of the arguments alone, so it is public; it is kept in the folder
    of the data sets and used again. Of several processes that want the same, one learns and the others wait. Half-done
    work is kept too, every half minute.

    Yields:
        The share that is done, after every step.
    """
    kept = directory() / "pretrained" / f"{_name(model, process, steps, batch)}.pt"
    half_done = kept.with_suffix(".half")
    lock = _lock(kept.with_suffix(".lock"))
    while lock is not None and not _taken(lock):
        yield 0.0
        time.sleep(0.1)
    try:
        if (weights := _found(kept)) is not None:
            model.load_state_dict(weights)
            return
        lesson = _Lesson(model, shape, process, steps, batch)
        if (state := _found(half_done)) is not None:
            lesson.load(state)
        saved = time.monotonic()
        for _ in lesson.run():
            if lesson.pool_is_used_up and time.monotonic() - saved > _SAVE_SECONDS:
                _keep(half_done, lesson.state())
                saved = time.monotonic()
            yield lesson.step / steps
        model.load_state_dict(lesson.body.state_dict(), strict=False)  # all but the head
        with torch.no_grad():
            model.eval()
            head.whiten_by(torch.cat([features(model, views) for views in lesson.views()]))
        _keep(kept, model.state_dict())
        with suppress(OSError):
            half_done.unlink()
    finally:
        if lock is not None:
            lock.close()


class _Lesson:
    """Alignment and uniformity (Wang and Isola 2020), a step at a time.

    The loss is, of unit vectors z, a small network's outputs for what goes into the head: the mean of ‖z₁ − z₂‖² over
    the two views of an image, plus ln mean exp(−2 ‖z − z′‖²) over pairs of images.

    Attributes:
        body: The network that learns: a copy of the one given, without its head.
        step: How many steps were taken.
        loss: The last.
        pool_is_used_up: Whether the next step draws new images; only then can :meth:`state` be gone on with.
    """

    def __init__(self, model: nn.Module, shape: tuple[int, int, int], process: str, steps: int, batch: int) -> None:
        self.body = copy.deepcopy(headless(model)).eval()
        self.step, self.loss, self.pool_is_used_up = 0, math.nan, True
        self._shape, self._process, self._steps, self._batch = shape, process, steps, batch
        device = next(model.buffers()).device
        with torch.no_grad():
            width = self.body(torch.zeros(1, *shape, device=device)).shape[1]
        self.body.train()
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(0)
            top = nn.Sequential(nn.Linear(width, 2 * width), nn.ReLU(), nn.Linear(2 * width, _EMBEDDING))
        self._network = nn.Sequential(self.body, top.to(device))
        self._optimizer = torch.optim.AdamW(self._network.parameters(), lr=_RATE, weight_decay=_DECAY)
        self._random = Generator(device).manual_seed(0)

    def run(self) -> Iterator[None]:
        """Take all steps that are left."""
        embed: Callable[[Tensor], Tensor] | None = None
        while self.step < self._steps:
            for images in self._pool():
                both = torch.cat([view(images, self._random), view(images, self._random)])
                embed = embed or _fast(self._network, both, self._steps)
                with _chance(self.step, both.device):
                    outputs = embed(both)
                first, second = F.normalize(outputs).chunk(2)
                loss = (first - second).square().sum(1).mean() + (_uniformity(first) + _uniformity(second)) / 2
                for group in self._optimizer.param_groups:
                    group["lr"] = _RATE * self._pace()
                self._optimizer.zero_grad()
                loss.backward()
                self._optimizer.step()
                self.step += 1
                yield
                if self.step == self._steps:
                    self.loss = loss.item()
                    break

    def views(self) -> Iterator[Tensor]:
        """Further views, as they were learned from."""
        for _ in range(-(-min(_WHITENED_BY, self._steps * self._batch) // self._batch)):
            yield view(self._images(self._batch), self._random)

    def state(self) -> dict[str, Any]:
        """Return what :meth:`load` needs."""
        return {
            "step": self.step,
            "network": self._network.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "random": self._random.get_state(),
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from a state as the lesson that it is of would have gone on."""
        self.step = int(state["step"])
        self._network.load_state_dict(state["network"])
        self._optimizer.load_state_dict(state["optimizer"])
        self._random.set_state(state["random"])

    def _pace(self) -> float:
        """Share of the learning rate: up within a tenth of the steps, down along a cosine."""
        warm = max(1, min(200, self._steps // 10))
        return min(1.0, (self.step + 1) / warm) * (1 + math.cos(math.pi * self.step / self._steps)) / 2

    def _images(self, count: int) -> Tensor:
        """Images of twice the size that is wanted: a view is a part of them."""
        channels, height, width = self._shape
        return PROCESSES[self._process](count, (channels, 2 * height, 2 * width), self._random)

    def _pool(self) -> Iterator[Tensor]:
        """Batches of images drawn together, which costs a GPU little more than one, and used several times."""
        quarters = -(-min(_DRAWN_TOGETHER, -(-self._steps // _PASSES)) // 4)
        pool = torch.cat([self._images(4 * self._batch) for _ in range(quarters)])
        for number in range(_PASSES):
            order = torch.randperm(len(pool), generator=self._random, device=self._random.device)
            batches = pool[order].split(self._batch)
            for place, batch in enumerate(batches):
                self.pool_is_used_up = number == _PASSES - 1 and place == len(batches) - 1
                yield batch


@contextmanager
def _chance(step: int, device: torch.device) -> Iterator[None]:
    """Let what a network draws itself, for its dropout, depend on the step alone; torch's generators stay as they are.

    Else what is learned would depend on the run that learns it, and a run on whether it found it learned.
    """
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        torch.default_generator.manual_seed(step)
        for each in devices:
            torch.cuda.default_generators[each.index or 0].manual_seed(step)
        yield


def _uniformity(z: Tensor) -> Tensor:
    """How close unit vectors are to one another: ln mean exp(−2 ‖z − z′‖²) over pairs."""
    close = torch.exp(4 * (z @ z.mT) - 4)
    return ((close.sum() - close.diagonal().sum()) / (len(z) * (len(z) - 1))).log()


def _fast(network: nn.Module, example: Tensor, steps: int) -> Callable[[Tensor], Tensor]:
    """Return the network as a GPU runs it fastest: in bfloat16, and compiled where that works and pays."""
    if example.device.type != "cuda":
        return network

    def run(x: Tensor) -> Tensor:
        with torch.autocast("cuda", torch.bfloat16):
            outputs: Tensor = network(x)
        return outputs.float()

    if steps < _LONG:
        return run
    compiled: Callable[[Tensor], Tensor] = torch.compile(run)
    try:
        compiled(example).sum().backward()
    except Exception as error:  # whatever a compiler may lack: the network itself works too
        logger.info("the network was not compiled: %s", error)
        return run
    return compiled


def _name(model: nn.Module, *settings: Any) -> str:
    """A name for what pre-training makes of these weights."""
    digest = hashlib.sha256(repr((_VERSION, str(model), *settings)).encode())
    for name, value in model.state_dict().items():
        digest.update(name.encode() + value.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()[:32]


def _lock(path: Path) -> IO[bytes] | None:
    """Open a file that processes take in turn; where it cannot be made, nothing is shared."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return open(open_for_lock(path), "rb")
    except (OSError, ValueError):
        return None


def _taken(lock: IO[bytes]) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _found(path: Path) -> dict[str, Any] | None:
    """Return what was kept; ``None`` if that is nothing, or damaged: it is learned again then."""
    try:
        whole = open_zip(read_bytes(path), path)
        found: dict[str, Any] = torch.load(BytesIO(whole), map_location="cpu", weights_only=True)
    except FileNotFoundError:
        return None
    except Exception as error:
        logger.warning("pre-trained weights are learned again: %s", error)
        return None
    return found


def _keep(path: Path, state: dict[str, Any]) -> None:
    """Write weights, whole or not at all; where that is not possible, they are learned again next time."""
    packed = BytesIO()
    torch.save(state, packed)
    seal_zip(packed)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, packed.getbuffer())
    except OSError as error:
        logger.warning("pre-trained weights could not be kept in %s: %s", path.parent, error)
