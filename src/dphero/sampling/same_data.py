"""Whether a data set is the one with which a run was begun, by a few of its records."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, Dataset, TensorDataset

from dphero.numerics.generators import generators_restored, seed_generators

_ROWS = 8
_CHANGED = 0.5
"""The share of records that have to differ: a transform that is random now and then changes fewer."""


def describe_data(source: DataLoader[Any] | Dataset[Any], size: int, salt: str | None = None) -> dict[str, Any]:
    """Return digests of the number of records, of what a record is made of, and of a few records.

    They are keyed by a random salt, and as secret as the checkpoint that holds them. Records that come out differently
    when they are fetched again (random augmentation) are left out. So are all of a loader with workers: files that a
    data set opens in the main process would be shared by its workers.

    Args:
        source: The user's loader or data set.
        size: Its number of records.
        salt: That of an earlier description, to compare with it.
    """
    salt = salt or secrets.token_hex(16)

    def digest(*parts: object) -> str:
        return hashlib.blake2b(repr(parts).encode(), key=bytes.fromhex(salt), digest_size=16).hexdigest()

    dataset = source.dataset if isinstance(source, DataLoader) else source
    found: dict[str, Any] = {"salt": salt, "records": digest("records", size), "kinds": "", "rows": []}
    if isinstance(source, DataLoader) and source.num_workers and type(dataset) is not TensorDataset:
        return found
    try:
        for number in range(_ROWS):
            place = int(digest("row", number), 16) % size
            first, again = (_fetched(dataset, place, turn) for turn in range(2))
            row = digest("row", *(_contents(leaf) for leaf in first))
            found["rows"].append(row if row == digest("row", *(_contents(leaf) for leaf in again)) else "")
            found["kinds"] = digest("kinds", *(_kind(leaf) for leaf in first))
    except Exception:  # a record that cannot be fetched says so when it is trained on
        found["rows"], found["kinds"] = [], ""
    return found


def require_same_data(saved: Mapping[str, Any], source: DataLoader[Any] | Dataset[Any], size: int) -> None:
    """Raise unless the data are those that were described, as far as a few records tell.

    Raises:
        ValueError: If the number of records differs, what they are made of, or most of those that were looked at.
    """
    here = describe_data(source, size, saved["salt"])
    compared = [(was, now) for was, now in zip(saved["rows"], here["rows"], strict=False) if was and now]
    changed = sum(was != now for was, now in compared)
    if here["records"] != saved["records"]:
        what = "their number differs"
    elif "" not in (here["kinds"], saved["kinds"]) and here["kinds"] != saved["kinds"]:
        what = "the values of a record differ in number or type"
    elif compared and changed > _CHANGED * len(compared):
        what = f"{changed} of {len(compared)} records that were looked at differ"
    else:
        return
    raise ValueError(
        f"the checkpoint was made with other data than are given here: {what}. Its ledger says what was spent on those "
        "data, and its noise is theirs. Resume with the same data and transforms in the same order; for other data, "
        "make a new PrivacyEngine"
    )


def _fetched(dataset: Any, place: int, turn: int) -> list[Any]:
    """Fetch a record while all generators stand elsewhere than the time before; they are put back."""
    with generators_restored():
        seed_generators(turn)
        return tree_leaves(dataset[place])


def _contents(leaf: Any) -> object:
    """What tells a value from others of its kind."""
    if isinstance(leaf, Tensor):
        leaf = leaf.detach().cpu().contiguous()
        return str(leaf.dtype), tuple(leaf.shape), leaf.view(-1).view(torch.uint8).numpy().tobytes()
    if isinstance(leaf, np.ndarray | np.generic):
        return str(leaf.dtype), leaf.shape, leaf.tobytes()
    if isinstance(leaf, str | bytes | int | float | complex | bool | None):
        return leaf
    to_bytes: Callable[[], object] | None = getattr(leaf, "tobytes", None)  # images
    return type(leaf).__name__, to_bytes() if callable(to_bytes) else None


def _kind(leaf: Any) -> object:
    if isinstance(leaf, Tensor | np.ndarray):
        return str(leaf.dtype), leaf.ndim
    return type(leaf).__name__
