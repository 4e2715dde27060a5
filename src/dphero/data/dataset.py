"""What every data set looks like once it is loaded."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Split:
    """Images and labels, ready for training.

    Attributes:
        images: float32, N×C×H×W (or N×D for vectors), finite. Pixels of 8 bits are scaled to [-1, 1] by the range of
            the file format; nothing is fitted to the images, so that scaling costs no privacy.
        labels: int64, N, from 0.

    Raises:
        ValueError: If a shape, type or value is not as described, or there is no example.
    """

    images: Tensor
    labels: Tensor

    def __post_init__(self) -> None:
        for name, tensor, wanted in (("images", self.images, torch.float32), ("labels", self.labels, torch.int64)):
            if not isinstance(tensor, Tensor) or tensor.dtype != wanted:
                found = tensor.dtype if isinstance(tensor, Tensor) else type(tensor).__name__
                raise ValueError(f"{name} must be a tensor of {wanted}, got {found}")
        if self.images.dim() not in (2, 4):
            raise ValueError(f"images must be N×C×H×W, or N×D for vectors, got shape {_shape(self.images)}")
        if self.labels.dim() != 1:
            raise ValueError(f"labels must be one number for each image, got shape {_shape(self.labels)}")
        if len(self.images) != len(self.labels):
            raise ValueError(f"there are {len(self.images)} images but {len(self.labels)} labels")
        if not self.images.numel():
            raise ValueError(f"there are no images (shape {_shape(self.images)})")
        if not all(end.isfinite() for end in self.images.aminmax()):  # NaN wins both minimum and maximum
            where = int((~self.images.flatten(1).isfinite()).any(1).nonzero()[0])
            raise ValueError(f"image {where} holds NaN or infinity: repair or remove such images")
        if int(self.labels.min()) < 0:
            raise ValueError(f"labels count from 0, got {int(self.labels.min())}")

    def __len__(self) -> int:
        return len(self.labels)


@dataclass(frozen=True, eq=False)
class Data:
    """A data set: what is trained on, what is held out, and what the labels mean.

    Attributes:
        name: What reports call it.
        train: The examples to protect.
        test: Examples held out for measuring.
        classes: The name of each label. Public: to be known without looking at the examples.
        public_size: Whether everybody knows how many training examples there are, as with a public benchmark. Then
            that number may enter the sampling rate as it is.

    Raises:
        ValueError: If train and test do not fit together, or a label has no name.
    """

    name: str
    train: Split
    test: Split
    classes: tuple[str, ...]
    public_size: bool

    def __post_init__(self) -> None:
        if self.train.images.shape[1:] != self.test.images.shape[1:]:
            raise ValueError(
                f"{self.name}: training images are {_shape(self.train.images[0])} but test images are "
                f"{_shape(self.test.images[0])}; all must have one shape"
            )
        if len(self.classes) < 2 or len(set(self.classes)) < len(self.classes):
            raise ValueError(f"{self.name}: at least two different class names are needed, got {_few(self.classes)}")
        for name in self.classes:
            if not is_text(name):
                raise ValueError(f"{self.name}: the class name {name!r} cannot be written as UTF-8: rename it")
        for half, split in (("train", self.train), ("test", self.test)):
            if (largest := int(split.labels.max())) >= len(self.classes):
                raise ValueError(
                    f"{self.name}, {half}: label {largest} is out of range, there are {len(self.classes)} classes "
                    f"(labels 0 to {len(self.classes) - 1})"
                )

    def digest(self) -> str:
        """Return the SHA-256 of the training examples and class names. Secret: it tells whether a guess is right."""
        found = hashlib.sha256(repr((self.train.images.shape, self.classes)).encode())
        for tensor in (self.train.images, self.train.labels):
            found.update(tensor.detach().cpu().contiguous().numpy().data)
        return found.hexdigest()


def is_text(name: str) -> bool:
    """Whether a name can be written to a file; names that file systems hold in other encodings cannot."""
    try:
        str(name).encode()
    except UnicodeEncodeError:
        return False
    return True


def _shape(tensor: Tensor) -> str:
    return "×".join(map(str, tensor.shape)) or "()"


def _few(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names[:5])) + (f" and {len(names) - 5} more" if len(names) > 5 else "") or "none"
