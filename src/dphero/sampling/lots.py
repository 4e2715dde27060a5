"""Where training stands: the lot under way, and which of its physical batches."""

from __future__ import annotations

import os
from dataclasses import dataclass

from dphero.sampling.padding import Padding
from dphero.sampling.randomness import SecretGenerators


@dataclass(frozen=True)
class PhysicalBatch:
    """What the user holds: ``rows`` rows, of which the first ``real`` are examples, the rest padding.

    ``padding`` tells how rows were filled up to the longest of them, where that is still to be looked into.
    """

    lot: int
    rows: int
    real: int
    first: bool
    last: bool
    padding: Padding | None = None


class Lots:
    """Where training stands within a lot: the loader moves it on, the engine reads it.

    It goes on in one process only. A forked one has the same lots to come, and the same key: both would release the
    same people under what is priced as independent draws, and neither ledger would know of the other.

    Attributes:
        next: Index of the lot that will be released next. A lot that was handed out but not released comes
            again when the loader is next iterated over: no lot can be skipped by looking at it.
        current: The physical batch in the user's hands; the last one stays here until another is delivered.
        captured: Whether the gradients of that batch have been taken.
        failed: Whether something went wrong as they were, so that the lot has to begin anew.
        generators: Random numbers for the batch in the user's hands: secret until its gradients have been taken.
    """

    def __init__(self) -> None:
        self._closed = False
        self.generators = SecretGenerators()
        self.restart(0)

    def close(self) -> None:
        """Hand out nothing any more: nobody takes gradients, or adds noise."""
        self.generators.end()
        self._closed = True

    def restart(self, lot: int) -> None:
        """Stand before a lot, with nothing in the user's hands."""
        self.generators.end()
        self.next, self.captured, self.failed = lot, False, False
        self.current: PhysicalBatch | None = None
        self._process = os.getpid()

    def deliver(self, batch: PhysicalBatch) -> None:
        """Hand a physical batch to the user."""
        self.current, self.captured = batch, False
        self.failed &= not batch.first

    @property
    def pending(self) -> PhysicalBatch | None:
        """The batch in the user's hands if its lot has not been released, else ``None``."""
        return self.current if self.current is not None and self.current.lot == self.next else None

    @property
    def in_parts(self) -> bool:
        """Whether gradients of some, not all, physical batches of a lot have been taken."""
        return self.pending is not None and (self.captured or not self.pending.first)

    def require_open(self) -> None:
        """Refuse to train where nobody counts: after the engine was detached, or in a forked process.

        Raises:
            RuntimeError: If it was closed, or if this is another process than the one in which training began or was
                resumed.
        """
        if self._closed:
            raise RuntimeError(
                "the engine was detached: what is trained from here on is not private, and its loader hands out "
                "nothing any more. Call make_private again, or iterate over an ordinary loader."
            )
        if os.getpid() != self._process:
            raise RuntimeError(
                "the model was made private in another process, of which this one is a fork: both would train on the "
                "same lots, and neither ledger would count the other's releases. Call make_private, or load a "
                "checkpoint into an engine that has released nothing, in the process that trains."
            )

    def capture(self) -> PhysicalBatch:
        """Note that the gradients of the batch in hand are being taken: once, before the lot is released.

        Raises:
            RuntimeError: If they were taken before, if the engine was detached, or if this is a forked process.
        """
        self.require_open()
        if self.failed:
            raise RuntimeError(
                f"lot {self.next} was spoiled by an error in an earlier backward pass; iterate over the loader anew to "
                "get it again, whole"
            )
        if self.pending is None or self.captured:
            raise RuntimeError(
                "this batch was back-propagated already: its examples would count twice. Add up the losses and call "
                "backward() once for each batch of the private loader."
            )
        self.captured = True
        self.generators.end()
        return self.pending

    def mark_failed(self) -> None:
        """Mark the lot as failed: the gradients of the batch in hand are incomplete."""
        self.captured, self.failed = False, True

    def require_captured(self) -> None:
        """Refuse to move on from a batch whose gradients were not taken.

        Raises:
            RuntimeError: If the batch in hand was not back-propagated.
        """
        if not self.captured:
            raise RuntimeError(
                f"a batch of lot {self.next} was handed out but not back-propagated before the next was asked for. "
                "Call backward() once for every batch of the private loader. Losses of several batches cannot be added "
                "up first, nor batches be fetched ahead, as the Hugging Face Trainer does to accumulate gradients "
                "(gradient_accumulation_steps: set it to 1): for larger lots give a larger expected_batch_size, and "
                "physical_batch_size if it does not fit in memory. Nor can a batch be left out because of its loss: "
                "that tells what it holds, and is not private. Iterate "
                "over the loader anew to get this lot again. (To evaluate, iterate over an ordinary loader. And "
                "only the model that was made private takes part, not a copy of it.)"
            )

    def release(self) -> None:
        """Move on to the next lot."""
        self.next += 1
