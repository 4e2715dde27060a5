"""Curves for TensorBoard, where that is installed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self


class Curves:
    """Writes every evaluation of a run; does nothing where TensorBoard is missing.

    Args:
        path: Directory of the event files.
        step: Where the run stands: what is later in the files was lost in a crash, and is hidden.
    """

    def __init__(self, path: Path, step: int) -> None:
        self._path, self._step = path, step

    def __enter__(self) -> Self:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            self._writer: Any = None
        else:
            if self._path.is_symlink():
                raise ValueError(f"{self._path} is a symbolic link, which is not followed here: remove it")
            self._path.mkdir(mode=0o700, parents=True, exist_ok=True)  # losses and accuracies are for the owner's eyes
            self._writer = SummaryWriter(str(self._path), purge_step=self._step + 1 if self._step else None)
        return self

    def add(self, values: Mapping[str, Any]) -> None:
        """Write the numbers of one evaluation."""
        if self._writer is None:
            return
        for name, value in values.items():
            if name not in ("step", "epoch") and value is not None:
                self._writer.add_scalar(name, value, values["step"])
        self._writer.flush()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._writer is not None:
            self._writer.close()
