"""What a checkpoint holds of the mechanism, and what it must not contradict."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from dphero.accounting import Event, Ledger

if TYPE_CHECKING:
    from dphero.mechanism.release import Mechanism


def save(mechanism: Mechanism) -> dict[str, Any]:
    """Return what a checkpoint needs for the coming releases to be what they would have been."""
    return {
        "mode": mechanism.mode,
        "releases": mechanism.releases,
        "noise_multiplier": mechanism.noise_multiplier,
        "noise": mechanism.noise.state_dict(),
        "clipping": mechanism.clipping.state_dict(),
        "ledger": mechanism.ledger.to_json(),
        **mechanism.shape.state_dict(),
    }


def require_consistent(mechanism: Mechanism, state: Mapping[str, Any], next_lot: int) -> None:
    """Refuse the state of another mechanism, and one whose parts contradict each other; nothing is changed.

    Raises:
        ValueError: If so.
    """
    if state["mode"] != mechanism.mode:
        raise ValueError(
            f"the checkpoint was made with mechanism {state['mode']!r}, this engine has {mechanism.mode!r}"
        )
    if state["noise_multiplier"] != mechanism.noise_multiplier:
        raise ValueError(
            f"the checkpoint was made with noise multiplier {state['noise_multiplier']}, this engine has "
            f"{mechanism.noise_multiplier}; make the model private with the same value to resume"
        )
    releases, ledger = int(state["releases"]), Ledger.from_json(state["ledger"])
    noises = mechanism.noise.read_last_release(state["noise"]) + 1
    counts = {"releases": releases, "next lot": next_lot, "noises": noises}
    if not releases == next_lot >= noises or not 0 <= int(state["renewed_at"]) <= releases:
        raise ValueError(f"the checkpoint contradicts itself, and cannot be trusted: {counts}")
    if ledger.steps < releases:
        raise ValueError(
            f"the checkpoint contradicts itself: {releases} releases were made, its ledger has {ledger.steps}"
        )


def load(mechanism: Mechanism, state: Mapping[str, Any]) -> None:
    """Continue from a checkpoint that was checked; all but its noise."""
    ledger = Ledger.from_json(state["ledger"])
    mechanism.clipping.load_state_dict(state["clipping"])
    mechanism.shape.load_state_dict(state, mechanism.device)
    mechanism.releases, mechanism.ledger = int(state["releases"]), ledger


def require_own_ledger(mechanism: Mechanism) -> None:
    """Refuse a ledger in which the releases of this training cost something else than they do here.

    Raises:
        ValueError: If so.
    """
    own = mechanism.full_price()
    for event in _latest(mechanism.ledger, mechanism.releases):
        if not mechanism.rule.may_have_cost(event, own):
            raise ValueError(
                f"the checkpoint's ledger holds {event} for a release of this training, which costs {own}: make the "
                "model private with the same arguments to resume"
            )


def _latest(ledger: Ledger, count: int) -> list[Event]:
    """Return the events of the latest releases, equal ones that follow each other once."""
    found: list[Event] = []
    for event, times in reversed(list(ledger.runs())):
        if count <= 0:
            break
        found.append(event)
        count -= times
    return found
