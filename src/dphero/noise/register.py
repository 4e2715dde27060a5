"""What keys were used for, in this process: a second run under a key of the first is noticed."""

from __future__ import annotations

import hashlib
from array import array

_MOST = 1 << 20  # releases of a key that are remembered: 8 MB at most

_used: dict[bytes, array[int]] = {}
_warned_of: set[bytes] = set()


def is_new(key: bytes, release: int, code: bytes) -> bool:
    """Note what the noise of a release was bound to, by its code; tell whether no other was noted for it before."""
    if release >= _MOST:
        return True
    notes = _used.setdefault(_hashed(key), array("Q"))
    notes.extend([0] * (release + 1 - len(notes)))
    note = int.from_bytes(code[:8], "little") | 1
    earlier, notes[release] = notes[release], note
    return earlier in (0, note)


def to_be_warned_of(key: bytes) -> bool:
    """Tell whether the user is to be warned that runs share this key: once for each key in a process."""
    if (known := _hashed(key)) in _warned_of:
        return False
    _warned_of.add(known)
    return True


def _hashed(key: bytes) -> bytes:
    return hashlib.blake2b(key, digest_size=16, person=b"used").digest()
