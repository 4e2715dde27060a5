"""Public numbers: sampling rate and expected lot size, given or accepted by the user, never silently derived."""

from __future__ import annotations

import math
from collections.abc import Sized
from typing import Any, Literal, cast

from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, RandomSampler, SequentialSampler

from dphero._checks import positive, whole


def dataset_of(source: DataLoader[Any] | Dataset[Any]) -> tuple[Dataset[Any], int]:
    """Return the dataset behind a source, and its length (private: not to be published).

    Raises:
        ValueError: If the source cannot be sampled by index, is empty, or chooses examples by itself.
    """
    dataset = source.dataset if isinstance(source, DataLoader) else source
    indexable = hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")
    if isinstance(dataset, IterableDataset) or not indexable:
        raise ValueError(
            f"private training draws examples by index: {type(dataset).__name__} must have __len__ and __getitem__ "
            "(an iterable dataset or a loader without a length cannot be sampled)"
        )
    if isinstance(source, DataLoader):
        _require_plain_loader(source)
    try:
        size = len(cast(Sized, dataset))
    except (TypeError, NotImplementedError) as error:
        raise ValueError(f"private training needs the length of {type(dataset).__name__}: {error}") from error
    if size == 0:
        raise ValueError("the dataset is empty: there is nothing to train on")
    return dataset, size


def _require_plain_loader(loader: DataLoader[Any]) -> None:
    if loader.batch_sampler is None:
        raise ValueError("a DataLoader with batch_size=None does not form batches; give it a batch_size")
    if any(getattr(type(loader), name) is not getattr(DataLoader, name) for name in ("__iter__", "_get_iterator")):
        raise ValueError(
            f"{type(loader).__name__} makes its batches in an __iter__ of its own, which private lots would ignore. "
            "Give a torch.utils.data.DataLoader, with what is done to each batch in its collate_fn or in your loop."
        )
    sampler, records = loader.sampler, len(cast(Sized, loader.dataset))
    known = type(loader.batch_sampler) is BatchSampler and type(sampler) in (RandomSampler, SequentialSampler)
    if isinstance(sampler, RandomSampler):
        known = known and not sampler.replacement and sampler.num_samples in (0, records)
    if not known:
        raise ValueError(
            f"the DataLoader chooses its examples in its own way ({type(loader.batch_sampler).__name__}, "
            f"{type(sampler).__name__}), which private lots would ignore. Give a DataLoader without sampler or "
            "batch_sampler; to leave examples out, wrap the dataset in torch.utils.data.Subset."
        )


def public_lot(source: DataLoader[Any] | Dataset[Any], expected_batch_size: float | None) -> float | None:
    """Return B as the user wrote it down: the argument, else the loader's ``batch_size``, else ``None``."""
    if expected_batch_size is None:
        return source.batch_size if isinstance(source, DataLoader) else None
    return positive("expected_batch_size", expected_batch_size)


def public_rate(
    source: DataLoader[Any] | Dataset[Any],
    size: int,
    *,
    sample_rate: float | None,
    expected_batch_size: float | None,
    dataset_size: int | Literal["public"] | None,
) -> tuple[float, float]:
    """Return (q, B) from public numbers only.

    Args:
        source: The user's loader or dataset.
        size: Its number of records; used only where ``dataset_size="public"`` declares it public.
        sample_rate: q, if given.
        expected_batch_size: B, if given; else q N where both are given, else the loader's ``batch_size``, which its
            author wrote down.
        dataset_size: A public number of records, or ``"public"``.

    Raises:
        ValueError: If q or B is missing or impossible, or if the numbers contradict each other.
    """
    lot = public_lot(source, expected_batch_size)
    records = size if dataset_size == "public" else dataset_size
    if records is not None:
        records = whole('dataset_size (if not "public")', records)
    if sample_rate is not None and not 0 < positive("sample_rate", sample_rate) <= 1:
        raise ValueError(f"sample_rate must be in (0, 1], got {sample_rate}")
    if sample_rate is not None and expected_batch_size is not None and records is not None:
        assert lot is not None
        if not math.isclose(sample_rate * records, lot, rel_tol=0.01):
            raise ValueError(
                f"sample_rate={sample_rate}, expected_batch_size={expected_batch_size} and {records} records "
                "contradict each other (B = q N); give two of the three"
            )
    if expected_batch_size is None and sample_rate is not None and records is not None:
        lot = sample_rate * records  # whatever the loader's batch size: two of three numbers were given
    if sample_rate is None and lot is not None and records is not None:
        sample_rate = lot / records
        if sample_rate > 1:
            raise ValueError(
                f"a batch size of {lot:g} is more than the {records} records: sample_rate would be {sample_rate:g}, "
                "and must be in (0, 1]"
            )
    if sample_rate is None or lot is None:
        raise ValueError(
            "the sampling rate q and the expected batch size B are public numbers, and the number of records is not "
            "unless you say so. Give sample_rate= and expected_batch_size= (or a loader with a batch_size), or "
            'dataset_size=N (a public figure), or dataset_size="public" to declare len(dataset) public.'
        )
    return float(sample_rate), float(lot)
