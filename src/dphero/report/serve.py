"""A live page: a server on this machine's loopback that watches directories and tells the page what is new.

The address holds a secret word, as other users of the machine reach the loopback too. Requests that name another host,
or come from a page of another origin, are refused: a web page elsewhere could send those.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import sys
import threading
from collections.abc import Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

from dphero.experiments.reproduction.items import ITEMS
from dphero.report.page import Report, build
from dphero.report.reading.gather import read

_HOST = "127.0.0.1"
_WATCHED = (
    "recipe.toml", "plan.json", "table.json", "metrics.jsonl", "ledger.json", "result.json", "statement.txt",
    "federation.json", "partition.csv", "audit.json", "explain.json", *(f"{name}.json" for name in ITEMS),
)  # fmt: skip
_NOT_WATCHED = {"tensorboard", "snapshots", "clients"}
_DEEPEST = 4  # comparison/runs/name/audit/audit.json


class LiveServer(ThreadingHTTPServer):
    """Serves one page, and what is new on it.

    Args:
        sources: Directories to watch.
        port: On the loopback; 0 takes a free one.
        private_diagnostics: As in :func:`dphero.report.build`.

    Raises:
        ValueError: If there is nothing to watch.
        OSError: If the port is taken.
    """

    daemon_threads = True

    def __init__(self, sources: Sequence[Path], port: int = 0, *, private_diagnostics: bool = False) -> None:
        self.sources, self.private_diagnostics = list(sources), private_diagnostics
        self.word = secrets.token_urlsafe(16)
        self._lock = threading.Lock()
        self._version = fingerprint(self.sources)
        self._report = build(read(self.sources), private_diagnostics=private_diagnostics)
        super().__init__((_HOST, port), _Handler)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing of a reader who has gone: the terminal belongs to the user."""
        if not isinstance(sys.exception(), ConnectionError | TimeoutError):
            super().handle_error(request, client_address)

    @property
    def address(self) -> str:
        """Where to look."""
        return f"http://{_HOST}:{self.server_address[1]}/{self.word}/"

    def hosts(self) -> set[str]:
        """Names by which the server may be called."""
        port = self.server_address[1]
        return {f"{_HOST}:{port}", f"localhost:{port}"}

    def latest(self) -> tuple[str, Report]:
        """Return the page of the files as they are now, and its version."""
        with self._lock:
            now = fingerprint(self.sources)
            if now != self._version:
                self._report = build(read(self.sources), private_diagnostics=self.private_diagnostics)
                self._version = now
            return self._version, self._report


def fingerprint(sources: Sequence[Path]) -> str:
    """Return a text that changes when a watched file does."""
    found = hashlib.sha256()
    for source in sources:
        top = source.parent if source.is_file() else source
        for folder, folders, names in [(str(top), [], [source.name])] if source.is_file() else os.walk(source):
            depth = len(Path(folder).relative_to(top).parts)
            folders[:] = sorted(set(folders) - _NOT_WATCHED) if depth < _DEEPEST else []
            for name in sorted(set(names) & set(_WATCHED)):
                try:
                    state = os.stat(os.path.join(folder, name))
                except OSError:  # it is being replaced
                    continue
                found.update(f"{folder}/{name} {state.st_mtime_ns} {state.st_size} {state.st_ino}\n".encode())
    return found.hexdigest()[:16]


class _Handler(BaseHTTPRequestHandler):
    """Answers the page and its questions, and nothing else."""

    server: LiveServer
    server_version, sys_version = "dphero", ""
    timeout = 30  # seconds for which a connection may say nothing

    def do_GET(self) -> None:
        """Send the page, or what is new."""
        path, _, query = self.path.partition("?")
        prefix, hosts = f"/{self.server.word}/", self.server.hosts()
        if self.headers.get("Host") not in hosts:
            self._send(HTTPStatus.FORBIDDEN, b"this host is not served", "text/plain")
        elif self.headers.get("Origin") not in (None, *(f"http://{host}" for host in hosts)):
            self._send(HTTPStatus.FORBIDDEN, b"pages from elsewhere are not served", "text/plain")
        elif path not in (prefix, f"{prefix}update"):
            self._send(HTTPStatus.NOT_FOUND, b"there is nothing here", "text/plain")
        else:
            try:
                version, report = self.server.latest()
            except (ValueError, OSError) as error:  # a directory went away; it may come back
                words = str(error).encode(errors="replace")
                self._send(HTTPStatus.SERVICE_UNAVAILABLE, words, "text/plain; charset=utf-8")
                return
            if path == prefix:
                page = report.html(live=version).encode(errors="replace")
                self._send(HTTPStatus.OK, page, "text/html; charset=utf-8")
            else:
                self._update(version, report, parse_qs(query).get("known", [""])[0])

    def _update(self, version: str, report: Report, known: str) -> None:
        if version == known:
            self._send(HTTPStatus.NO_CONTENT, b"", "text/plain")
            return
        news = {"version": version, "title": report.title, "header": report.header, "main": report.main}
        body = json.dumps(news | {"figures": report.figures}, allow_nan=False).encode()
        self._send(HTTPStatus.OK, body, "application/json")

    def _send(self, status: HTTPStatus, body: bytes, kind: str) -> None:
        self.send_response(status)
        if status != HTTPStatus.NO_CONTENT:
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("X-Frame-Options", "DENY")
        self.send_header("Cross-Origin-Resource-Policy", "same-origin")
        self.send_header("Referrer-Policy", "no-referrer")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *arguments: object) -> None:
        """Say nothing: the terminal belongs to the user."""
