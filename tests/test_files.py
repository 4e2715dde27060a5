"""Files are whole or not there, and damage is noticed: every single bit of it."""

from __future__ import annotations

import json
import os
import stat
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
import torch

from dphero._files import (
    DamagedFile,
    open_for_lock,
    open_json,
    open_zip,
    read_bytes,
    seal_json,
    seal_zip,
    write_atomically,
)


def zipped(value: Any) -> bytes:
    packed = BytesIO()
    torch.save(value, packed)
    seal_zip(packed)
    return packed.getvalue()


def read_json(contents: bytes) -> Any:
    try:
        return open_json(json.loads(contents), "a file")
    except AttributeError as error:  # no object at all
        raise ValueError from error


VALUES = {"accuracy": 0.97, "steps": 12, "other": [1, None, "ä"]}
SEALED = {
    "json": (json.dumps(seal_json(VALUES)).encode(), read_json),
    "zip": (zipped({"w": torch.arange(4.0)}), lambda read: open_zip(read, "a file")),
}


@pytest.mark.parametrize("kind", SEALED)
def test_a_seal_notices_every_bit_and_every_cut(kind: str) -> None:
    contents, read = SEALED[kind]
    whole = read(contents)
    for place in range(len(contents)):
        for bit in range(8) if len(contents) < 500 else (place % 8,):
            flipped = bytearray(contents)
            flipped[place] ^= 1 << bit
            try:
                found = read(bytes(flipped))
            except ValueError:
                continue
            assert kind == "json" and found == whole  # a letter of an escape, say: the same values
    for length in range(0, len(contents), 7):
        with pytest.raises(ValueError):
            read(contents[:length])


def test_what_was_sealed_is_what_others_read() -> None:
    assert open_json(seal_json(VALUES), "a file") == VALUES
    assert open_json(dict(reversed(seal_json(seal_json(VALUES)).items())), "a file") == VALUES  # in any order, once
    assert torch.load(BytesIO(SEALED["zip"][0]), weights_only=True)["w"].tolist() == [0, 1, 2, 3]


def test_files_from_before_there_were_seals() -> None:
    for required in (False, True):
        for found, given in (
            (lambda r: open_json(VALUES, "a file", required=r), VALUES),
            (lambda r: open_zip(b"PK", "a file", required=r), b"PK"),
        ):
            if required:
                with pytest.raises(DamagedFile, match=r"a file is damaged: the SHA-256 digest .* is gone"):
                    found(required)
            else:
                assert found(required) == given


def test_only_regular_files_are_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "victim").write_text("kept")
    (tmp_path / "link").symlink_to("victim")
    for path, what in ((tmp_path / "pipe", "a pipe"), (tmp_path, "a directory"), (Path("/dev/zero"), "a device")):
        with pytest.raises(ValueError, match=f"is {what}, not a regular file"):
            read_bytes(path)
    assert read_bytes(tmp_path / "link") == b"kept"
    with pytest.raises(ValueError, match="is a symbolic link"):
        read_bytes(tmp_path / "link", follow=False)
    with pytest.raises(ValueError, match="is a symbolic link"):
        open_for_lock(tmp_path / "link")
    with pytest.raises(FileNotFoundError):
        read_bytes(tmp_path / "none")
    os.close(open_for_lock(tmp_path / "victim"))
    assert (tmp_path / "victim").read_text() == "kept"  # a lock empties nothing


@pytest.mark.parametrize("contents", [b"new", lambda path: path.write_bytes(b"new")], ids=["bytes", "function"])
def test_a_link_is_replaced_and_not_followed(contents: Any, tmp_path: Path) -> None:
    (tmp_path / "victim").write_text("kept")
    (tmp_path / "file").symlink_to("victim")
    write_atomically(tmp_path / "file", contents, private=True)
    assert (tmp_path / "victim").read_text() == "kept" and (tmp_path / "file").read_bytes() == b"new"
    assert not (tmp_path / "file").is_symlink()
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == 0o600
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "victim"]
