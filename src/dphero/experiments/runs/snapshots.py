"""Snapshots: the weights of a run at chosen epochs, and the gradient that it released there.

A run that is to be explained keeps them (``--keep-epochs``) as ``snapshots/step-00000100.safetensors``. All of it has
been released, so the guarantee of the methods on the privacy engine covers it, step by step; of a run without privacy
nothing is covered, as ever. The files are for their owner's eyes: ``dphero publish`` leaves them behind.

A run that was killed takes the same steps again and writes the same snapshots. Each file carries its own digest, and a
finished run's ``result.json`` the digests of all.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from dphero._files import DamagedFile, open_safetensors, read_bytes, seal_safetensors, write_atomically

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


FOLDER = "snapshots"
"""The folder of a run that holds them."""

_NAME = re.compile(r"step-(\d{8})\.safetensors")
_WEIGHT, _GRADIENT = "weight:", "gradient:"


@dataclass(frozen=True, eq=False)
class Snapshot:
    """What was kept of one step.

    Attributes:
        step: Steps taken.
        weights: The model's ``state_dict``.
        gradient: What that step released, by the name of the parameter; empty where the method has no such thing, and
            before the first step.
    """

    step: int
    weights: Mapping[str, Tensor]
    gradient: Mapping[str, Tensor]


def kept_steps(keep_epochs: Sequence[float] | None, epoch_steps: int, steps: int) -> frozenset[int]:
    """Return after which steps a run of so many steps an epoch, and in all, keeps its weights."""
    return frozenset(min(round(epoch * epoch_steps), steps) for epoch in keep_epochs or ())


def save_snapshot(run: Path, step: int, model: nn.Module, gradient: Mapping[str, Tensor]) -> None:
    """Write the snapshot of a step, whole or not at all.

    Raises:
        OSError: If it cannot be written.
    """
    from safetensors.torch import save

    tensors = {_WEIGHT + name: _copy(value) for name, value in model.state_dict().items()}
    tensors |= {_GRADIENT + name: _copy(value) for name, value in gradient.items()}
    (run / FOLDER).mkdir(exist_ok=True)
    path = run / FOLDER / f"step-{step:08d}.safetensors"
    write_atomically(path, seal_safetensors(lambda metadata: save(tensors, metadata)), private=True)


def kept_files(run: Path) -> list[str]:
    """Return the snapshots of a run as names below its directory, earliest first; half-written ones do not count."""
    folder = run / FOLDER
    if not os.path.isdir(folder):
        return []
    return [f"{FOLDER}/{name}" for name in sorted(os.listdir(folder)) if _NAME.fullmatch(name)]


def step_of(name: str) -> int:
    """Return the step of a snapshot named as :func:`kept_files` does."""
    found = _NAME.fullmatch(name.rpartition("/")[2])
    assert found is not None
    return int(found[1])


def read_snapshot(run: Path, name: str, contents: bytes | None = None) -> Snapshot:
    """Read a snapshot that :func:`kept_files` has named.

    Args:
        run: The run's directory.
        name: The snapshot's.
        contents: What the file holds, if that was read already.

    Raises:
        ValueError: If it is damaged; the message names the file.
        OSError: If it cannot be read.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load

    path = run / name
    raw = open_safetensors(read_bytes(path, follow=False) if contents is None else contents, path)
    try:
        tensors = load(raw)
    except (SafetensorError, ValueError, KeyError) as error:
        raise DamagedFile(path, error) from error
    return Snapshot(
        step_of(name),
        {key.removeprefix(_WEIGHT): value for key, value in tensors.items() if key.startswith(_WEIGHT)},
        {key.removeprefix(_GRADIENT): value for key, value in tensors.items() if key.startswith(_GRADIENT)},
    )


def _copy(tensor: Tensor) -> Tensor:
    """A tensor of its own in the order in which it is read: the format knows neither shared memory nor strides."""
    return tensor.detach().to("cpu", copy=True).clone(memory_format=torch.contiguous_format)
