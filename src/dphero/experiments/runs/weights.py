"""The weights of a run, in a file that holds numbers and no code."""

from __future__ import annotations

from pathlib import Path

from torch import nn

from dphero._files import DamagedFile, write_atomically


def write_weights(path: Path, model: nn.Module) -> None:
    """Write a model's weights, whole or not at all.

    Raises:
        OSError: If they cannot be written.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_model

    def write(partial: Path) -> None:
        try:
            save_model(model, str(partial))
        except SafetensorError as error:  # a full disk, for example
            raise OSError(f"the weights cannot be written to {path.parent}: {error}") from error

    write_atomically(path, write)


def read_weights(path: Path, model: nn.Module) -> None:
    """Read weights into a model.

    Raises:
        ValueError: If the file is damaged, or holds numbers that are not finite.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_model

    try:
        load_model(model, str(path))
    except SafetensorError as error:
        raise DamagedFile(path, error) from error
    for name, value in model.state_dict().items():
        if value.is_floating_point() and not value.isfinite().all():
            raise ValueError(
                f"{path} holds NaN or infinity in {name!r}: the training has diverged (begin a new run with a "
                "smaller --lr), or the file is damaged"
            )
