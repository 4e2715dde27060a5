"""The ledger: an append-only list of what was released, run-length coded."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

from dphero import _checks as checks
from dphero.accounting.events.base import Event, Relation

LEDGER_VERSION = 1


class Ledger:
    """What a run has released, in order. Events can be recorded, never taken back.

    The object that adds the noise records the event; accountants read. All events must share one neighbouring
    relation, because their prices would not add otherwise.

    Example:
        >>> from dphero.accounting import Ledger, PoissonGaussian
        >>> ledger = Ledger()
        >>> ledger.record(PoissonGaussian(sample_rate=0.01, noise_multiplier=1.0), count=100)
        >>> ledger.steps
        100
    """

    __slots__ = ("_counts", "_latest", "_runs", "_steps")

    def __init__(self) -> None:
        self._runs: list[tuple[Event, int]] = []
        self._counts: dict[Event, int] = {}
        self._latest: dict[type[Event], Event] = {}
        self._steps = 0

    def record(self, event: Event, count: int = 1) -> None:
        """Appends ``count`` releases of ``event``.

        Raises:
            ValueError: If ``count`` is not a whole number of at least 0, if the event's relation is not the
                ledger's, or if the event cannot follow the earlier ones. The ledger is then unchanged.
        """
        if not isinstance(event, Event):
            raise ValueError(f"a ledger records events, got {event!r}: give an Event such as PoissonGaussian")
        count = checks.whole("count", count, least=0)
        if count == 0:
            return
        if self.relation not in (None, event.relation):
            raise ValueError(
                f"cannot record {event}: its neighbouring relation is {event.relation!r}, the ledger's is "
                f"{self.relation!r}; keep one ledger per relation"
            )
        latest = self._latest.get(type(event))
        if latest is not None:
            event.check_follows(latest)
        if self._runs and self._runs[-1][0] == event:
            self._runs[-1] = (event, self._runs[-1][1] + count)
        else:
            self._runs.append((event, count))
        self._counts[event] = self._counts.get(event, 0) + count
        self._latest[type(event)] = event
        self._steps += count

    @property
    def steps(self) -> int:
        """How many releases were made."""
        return self._steps

    @property
    def relation(self) -> Relation | None:
        """The neighbouring relation of every event; ``None`` while nothing is recorded."""
        return self._runs[0][0].relation if self._runs else None

    @property
    def counts(self) -> Mapping[Event, int]:
        """How often each event happened, whatever the order."""
        return MappingProxyType(self._counts)

    @property
    def run_count(self) -> int:
        """How many runs of equal events there are."""
        return len(self._runs)

    def runs(self, start: int = 0) -> Iterator[tuple[Event, int]]:
        """The runs of equal events in order, from run ``start`` on. Every run but the last is final."""
        return (self._runs[index] for index in range(start, len(self._runs)))

    def __iter__(self) -> Iterator[tuple[Event, int]]:
        return self.runs()

    def charges(self) -> Mapping[Event, int]:
        """What has to be paid for: the counts after each kind's own rule (a shuffled epoch pays once)."""
        by_kind: dict[type[Event], dict[Event, int]] = {}
        for event, count in self._counts.items():
            by_kind.setdefault(type(event), {})[event] = count
        charges: dict[Event, int] = {}
        for kind, counts in by_kind.items():
            charges.update(kind.charged(counts))
        return charges

    def copy(self) -> Ledger:
        """A ledger with the same events that can go its own way."""
        other = Ledger()
        other._runs = list(self._runs)
        other._counts = dict(self._counts)
        other._latest = dict(self._latest)
        other._steps = self._steps
        return other

    def with_event(self, event: Event, count: int = 1) -> Ledger:
        """A copy in which ``count`` more releases of ``event`` are recorded; this ledger stays as it is."""
        other = self.copy()
        other.record(event, count)
        return other

    def begins_with(self, earlier: Ledger) -> bool:
        """Whether this ledger may have grown from another: its first releases are all that the other holds."""
        if not earlier._runs:
            return True
        *before, (last, count) = earlier._runs
        if len(self._runs) <= len(before) or self._runs[: len(before)] != before:
            return False
        event, here = self._runs[len(before)]
        return event == last and here >= count

    def to_dict(self) -> dict[str, Any]:
        """The ledger as plain values: ``{"version": 1, "events": [{"kind": ..., "count": ...}, ...]}``."""
        events = [{**event.to_dict(), "count": count} for event, count in self]
        return {"version": LEDGER_VERSION, "events": events}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Ledger:
        """The ledger that ``to_dict`` wrote.

        Raises:
            ValueError: If the version or an event kind is unknown, or anything is missing or left over.
        """
        version = data.get("version") if isinstance(data, Mapping) else None
        if type(version) is not int or version != LEDGER_VERSION:
            found = data.get("version") if isinstance(data, Mapping) else data
            raise ValueError(
                f"ledger version {found!r} is unknown, this dphero reads version {LEDGER_VERSION}: "
                "use the dphero that wrote the file"
            )
        if data.keys() != {"version", "events"} or not isinstance(data["events"], list):
            raise ValueError(f"a ledger has exactly 'version' and a list 'events', got keys {sorted(data)}")
        ledger = cls()
        for entry in data["events"]:
            if not isinstance(entry, Mapping) or "count" not in entry:
                raise ValueError(f"a ledger entry is an object with 'kind' and 'count', got {entry!r}")
            values = dict(entry)
            count = checks.whole("count", values.pop("count"), least=1)
            ledger.record(Event.from_dict(values), count)
        return ledger

    def to_json(self) -> str:
        """``to_dict`` as one JSON text; floats survive the round trip bit for bit."""
        return json.dumps(self.to_dict(), allow_nan=False)

    @classmethod
    def from_json(cls, text: str | bytes) -> Ledger:
        """The ledger that ``to_json`` wrote; raises ``ValueError`` as ``from_dict`` does."""
        try:
            data = json.loads(text, object_pairs_hook=_without_repeats)
        except (ValueError, TypeError, RecursionError) as error:
            raise ValueError(f"the ledger is not JSON ({error}): give what Ledger.to_json wrote") from None
        return cls.from_dict(data)

    def __eq__(self, other: object) -> bool:
        return self._runs == other._runs if isinstance(other, Ledger) else NotImplemented

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Ledger({', '.join(f'{count} x {event}' for event, count in self)})"


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Refuse what JSON allows: of two entries of one name the second would count, and the first be forgotten."""
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError(f"one of {sorted(found)} is there twice")
    return found
