"""What a client keeps on its own disk: the ledger of everything that left it, and its latest answer.

======================  ============================================================================================
``client.json``         ledger, noise multiplier, and which request was answered last: one file, so one moment counts
``ledger.json``         a copy of the ledger for other tools; written before an answer leaves
``answer-….pt``         the latest answer: asked the same again, the client sends the same again, and pays nothing
``shared.pt``           the data set that all clients share, if there is one
``errors.log``          why rounds failed, for the client's own eyes: the server hears only that they did
======================  ============================================================================================

An answer may be sent once ``client.json`` says that it was charged. Before that nothing has left the client: after a
crash the round is simply trained anew. After that, the stored answer is sent again, bit for bit.
"""

from __future__ import annotations

import fcntl
import json
import os
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from io import BytesIO
from pathlib import Path
from typing import Any

import torch

from dphero._files import DamagedFile, open_for_lock, open_json, open_zip, read_bytes, seal_json, seal_zip
from dphero._files import write_atomically as write
from dphero.accounting import Ledger
from dphero.data import Split

_VERSION = 1


@dataclass
class ClientState:
    """What a client remembers from one round to the next.

    Attributes:
        ledger: Everything that left the client.
        noise_multiplier: σ of its training, once it is calibrated; it stays the same in all rounds.
        answered: The request that was answered last, by its digest.
    """

    ledger: Ledger = field(default_factory=Ledger)
    noise_multiplier: float | None = None
    answered: str | None = None


class ClientFiles:
    """The files of one client.

    Args:
        path: Its directory; made if it is not there.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        path.mkdir(parents=True, exist_ok=True)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Wait until no other process answers for this client: two answers at once would each forget the other."""
        with open(open_for_lock(self.path / ".lock"), "w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def load(self) -> ClientState:
        """Return what the client remembers; a client that never took part remembers nothing.

        Raises:
            ValueError: If the file is damaged, or gone although there is a ledger: its price must not be forgotten.
        """
        path, copy = self.path / "client.json", self.path / "ledger.json"
        if not path.exists():
            if copy.exists():
                raise ValueError(
                    f"{path} is missing, but {copy} has releases on record, whose price must not be forgotten: restore "
                    "it from a copy"
                )
            return ClientState()
        try:
            values = open_json(json.loads(read_bytes(path)), path)
            if values["version"] != _VERSION:
                raise ValueError(f"version {values['version']!r} is unknown")
            state = ClientState(Ledger.from_dict(values["ledger"]), values["noise_multiplier"], values["answered"])
        except DamagedFile:
            raise
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise DamagedFile(path, error) from error
        self._write_copy(state.ledger)  # a crash may have come between the two files
        return state

    def commit(self, state: ClientState, answer: Mapping[str, Any]) -> None:
        """Put an answer and its price on disk. After this, and not before, the answer may leave the client."""
        assert state.answered is not None
        packed = BytesIO()
        torch.save(dict(answer), packed)
        seal_zip(packed)
        write(self._answer(state.answered), packed.getvalue(), private=True)
        self.save(state)
        for old in self.path.glob("answer-*.pt"):
            if old != self._answer(state.answered):
                old.unlink(missing_ok=True)

    def save(self, state: ClientState) -> None:
        """Write what the client remembers."""
        values = {
            "version": _VERSION,
            "ledger": state.ledger.to_dict(),
            "noise_multiplier": state.noise_multiplier,
            "answered": state.answered,
        }
        write(self.path / "client.json", (json.dumps(seal_json(values)) + "\n").encode())
        self._write_copy(state.ledger)

    def _write_copy(self, ledger: Ledger) -> None:
        path, text = self.path / "ledger.json", ledger.to_json() + "\n"
        if not path.exists() or read_bytes(path).decode() != text:
            write(path, text.encode())

    def answer(self, digest: str) -> dict[str, Any]:
        """Return the stored answer to a request.

        Raises:
            ValueError: If it is gone or damaged: to compute it anew would be a second release.
        """
        path = self._answer(digest)
        try:
            return torch.load(BytesIO(open_zip(read_bytes(path), path)), map_location="cpu", weights_only=True)
        except DamagedFile:
            raise
        except Exception as error:
            raise DamagedFile(path, error) from error

    def save_shared(self, shared: Split) -> None:
        """Keep the data set that all clients share."""
        packed = BytesIO()
        torch.save({"images": shared.images, "labels": shared.labels}, packed)
        seal_zip(packed)
        write(self.path / "shared.pt", packed.getvalue())

    def load_shared(self) -> Split:
        """Return the data set that all clients share.

        Raises:
            ValueError: If it did not come yet, or is damaged.
        """
        path = self.path / "shared.pt"
        if not path.exists():
            raise ValueError(f"the shared data set did not come to this client: there is no {path}")
        try:
            found = torch.load(BytesIO(open_zip(read_bytes(path), path)), map_location="cpu", weights_only=True)
            return Split(found["images"], found["labels"])
        except DamagedFile:
            raise
        except Exception as error:
            raise DamagedFile(path, error) from error

    def note_failure(self, error: Exception) -> None:
        """Write down why a round failed."""
        text = "".join(traceback.format_exception(error))
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW
        with open(os.open(self.path / "errors.log", flags, 0o600), "a", encoding="utf-8") as file:
            file.write(f"{datetime.now(UTC).isoformat(timespec='seconds')}\n{text}\n")

    def _answer(self, digest: str) -> Path:
        return self.path / f"answer-{digest[:16]}.pt"
