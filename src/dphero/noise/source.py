"""What noise sources share: arguments are checked, and each release is served once."""

from __future__ import annotations

import math
import operator
import os
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, NoReturn, Protocol, SupportsIndex, runtime_checkable

import torch
from torch import Tensor

Tensors = Mapping[str, Tensor] | Sequence[Tensor]
"""Tensors by name, or in an order: then they are called "0", "1", …"""


class Target(NamedTuple):
    """A tensor to be overwritten: all of what is called `name`, or, flattened, a part of it from `start` on."""

    tensor: Tensor
    std: float
    name: str = "0"
    start: int = 0


@runtime_checkable
class NoiseSource(Protocol):
    """Gaussian noise on demand, each release once.

    What the price relies on: every number is drawn from N(0, std²), independently of all others and of the data, by a
    generator that nobody can predict; and no noise is handed out twice, in this process or after a checkpoint was
    loaded. The engine cannot check that.
    """

    @property
    def seeded(self) -> bool:
        """Whether a user chose the seed: then the guarantee holds only while that seed stays secret."""

    def fill(self, tensors: Tensors, std: float, release: int, *, bound_to: Sequence[Tensor] = ()) -> None:
        """Overwrite every tensor in place with independent N(0, std²).

        Args:
            tensors: floating-point tensors of any shape, strides and device, by name or in an order; empty ones are
                fine.
            std: standard deviation, σ·C. Zero gives zeros, and uses the release up all the same.
            release: index of this release, larger than every index served before.
            bound_to: what the noise is for, as tensors on the CPU: the sum it will hide, or numbers that tell that sum
                from others. A source that a key repeats gives the same noise for the same values and `std`, and
                independent noise for any others: one noise at two scales can be taken off both sums.

        Raises:
            RuntimeError: `release` is not larger than the last one served.
            ValueError: an argument no noise can be made for; nothing was written and nothing used up.
        """

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint must hold for the run to go on; plain values only."""

    def read_last_release(self, state: Mapping[str, Any]) -> int:
        """Return the index of the last release of a saved source.

        Raises:
            ValueError: If it was saved by another kind of source.
        """

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue after the last release of the run that `state` was saved from."""


class OneTimeSource(ABC):
    """What both sources share: arguments are checked, a release is claimed before its noise exists."""

    def __init__(self) -> None:
        self._last_release = -1
        self._process = os.getpid()

    @property
    def last_release(self) -> int:
        """Index of the last release served; -1 before the first."""
        return self._last_release

    def fill(
        self,
        tensors: Tensors,
        std: float,
        release: int,
        *,
        bound_to: Sequence[Tensor] = (),
        starts: Mapping[str, int] | None = None,
    ) -> None:
        """Overwrite every tensor in place with independent N(0, std²); see `NoiseSource.fill`.

        `starts` is for parts of tensors, by name: the place of their first element in the whole, flattened. A source
        that a key repeats gives a part the noise that the whole would have got there.
        """
        release, std = operator.index(release), float(std)
        if not (math.isfinite(std) and std >= 0):
            raise ValueError(f"std must be finite and not negative, got {std!r}.")
        if not 0 <= release < 1 << 64:
            raise ValueError(f"release must be an index from 0, got {release}.")
        named = tensors.items() if isinstance(tensors, Mapping) else ((str(i), each) for i, each in enumerate(tensors))
        begin = starts or {}
        targets = [Target(tensor, std, name, begin.get(name, 0)) for name, tensor in named]
        self._require_drawable(targets, begin)
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
                for target in targets:
                    target.tensor.zero_()
            elif filled := [target for target in targets if target.tensor.numel()]:
                if bound_to:
                    bound_to = [*bound_to, torch.tensor(std, dtype=torch.float64, device="cpu")]
                self._bind(release, bound_to)
                self._draw(filled, release)

    def _require_drawable(self, targets: Sequence[Target], starts: Mapping[str, int]) -> None:
        """Raise ``ValueError`` for a tensor that noise cannot be drawn for."""
        for tensor, _, _, start in targets:
            if not tensor.is_floating_point() or tensor.layout != torch.strided:
                raise ValueError(
                    f"Noise needs dense floating-point tensors, got {tensor.dtype} in layout {tensor.layout}."
                )
            if start < 0:
                raise ValueError(f"A part of a tensor starts at 0 or later, got {start}.")
        if starts and (unknown := starts.keys() - {target.name for target in targets}):
            raise ValueError(f"Starts were given for {sorted(unknown)}, which are not among the tensors.")

    def _bind(self, release: int, values: Sequence[Tensor]) -> None:  # noqa: B027 (not all have a key to repeat)
        """Make the noise of a release a function of these values too; for sources that a key repeats."""

    @abstractmethod
    def _draw(self, targets: list[Target], release: int) -> None:
        """Fill non-empty tensors; all arguments are checked."""

    def _notice_fork(self) -> None:
        if self._process != os.getpid():
            self._process = os.getpid()
            self._enter_new_process()

    @abstractmethod
    def _enter_new_process(self) -> None:
        """Called once in a forked child, before it draws: it must not share its parent's stream."""

    def read_last_release(self, state: Mapping[str, Any]) -> int:
        """Return the index of the last release of a saved source, which must be of this kind."""
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
