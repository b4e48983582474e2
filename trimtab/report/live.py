# SPDX-License-Identifier: Apache-2.0
"""Live: a page on this machine that shows runs while they go on.

    with Live(["runs/a", "runs/b"]) as live:
        print(live.url)
        live.serve()          # until interrupted

Training may hold secrets in names and losses, and a browser will talk to any local port for any web site. So the server

    listens on 127.0.0.1 only, and answers nothing but GET and HEAD: it changes nothing
    answers only requests addressed to localhost or 127.0.0.1 with its own port (a foreign name that was made to point
        here is refused) and none that another site's page has sent
    knows three routes, and takes two numbers and a token from the client: no path ever comes from outside
    sends a page that may load nothing from anywhere else; names from runs are put into it as text
    reads 64 KiB of a request at most, and hangs up on one that is not over after a minute
    serves 64 connections at once: when one more comes, the oldest has to go, so nobody can keep the others out by
        being slow

Whoever has an account on this machine can read the page, as with other tools of this kind.

Nothing is read while nobody looks. A request reads what is new for a second at most and says if there is more. Requests
that wait for the same folder share a reading, as long as it began after they came: fifty readers cost what two do.
"""

import contextlib
import errno
import json
import logging
import socket
import threading
import time
from collections.abc import Sequence
from http.client import LineTooLong
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import parse_qs, urlsplit

from trimtab.errors import TrimtabError
from trimtab.report.assets import asset
from trimtab.report.follow import Follower

log = logging.getLogger(__name__)

HOST = "127.0.0.1"
PORT = 8642
MOST_OPEN = 64
"""Connections at once."""
IDLE, PATIENCE = 20.0, 60.0
"""Seconds that a client may say nothing, and that a whole request may take."""
LONGEST = 1 << 16
"""Bytes of a request: its line and its headers."""
DRAINED, DRAIN_SECONDS = 1 << 20, 1.0
"""Bytes that are taken in after a refusal, and how long none may come."""
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'unsafe-inline'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}
REFUSED = "GET and HEAD on /, /live.js and /data are all there is.\n"


class Live:
    """A server of one page about some run folders.

    Args:
        folders: run folders, in the order in which they are shown.
        port: None takes the usual one, or any free one if that is taken; 0 any free one.
    """

    def __init__(self, folders: Sequence[str | Path], port: int | None = None) -> None:
        self.followers = [Follower(folder) for folder in folders]
        if not self.followers:
            raise TrimtabError("there must be a run folder to watch, got none: give one")
        self._locks = [threading.Lock() for _ in self.followers]
        self._server = _bind(port)
        self._server.live = self
        self.port: int = self._server.server_address[1]
        self.hosts = {f"{name}:{self.port}" for name in ("localhost", HOST)}
        self.hosts |= {"localhost", HOST} if self.port == 80 else set()

    @property
    def url(self) -> str:
        """Where the page is."""
        return f"http://{HOST}:{self.port}/"

    def serve(self) -> None:
        """Answer requests until `stop` is called from another thread, or the process is interrupted."""
        self._server.serve_forever(poll_interval=0.2)

    def stop(self) -> None:
        """Make `serve` return."""
        self._server.shutdown()

    def close(self) -> None:
        """Give the port back."""
        self._server.server_close()

    def __enter__(self) -> "Live":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def answer(self, target: str) -> tuple[str, bytes] | None:
        """The kind and body of what a request asks for; None if there is no such thing."""
        try:
            parts = urlsplit(target)
        except ValueError:  # such as brackets that are no address
            return None
        if parts.scheme or parts.netloc:
            return None
        if parts.path == "/":
            return "text/html; charset=utf-8", asset("live.html").encode()
        if parts.path == "/live.js":
            return "text/javascript; charset=utf-8", asset("live.js").encode()
        if parts.path == "/data":
            return self._data(parts.query)
        return None

    def _data(self, query: str) -> tuple[str, bytes] | None:
        """What is new in one run, `run=0&token=...&tick=...`."""
        try:
            asked = {key: values[-1] for key, values in parse_qs(query, max_num_fields=8).items()}
            number, tick = int(asked.get("run", "0")), int(asked.get("tick", "-1"))
        except ValueError:
            return None
        if not 0 <= number < len(self.followers):
            return None
        follower, came = self.followers[number], time.monotonic()
        with self._locks[number]:
            if follower.began < came:
                follower.refresh()
            told = follower.since(asked.get("token", ""), tick)
        body = json.dumps(told | {"runs": len(self.followers)}, allow_nan=False, separators=(",", ":"))
        return "application/json", body.encode()


class _Server(ThreadingHTTPServer):
    """A thread for each connection, of which there are only so many and none for long."""

    daemon_threads = True
    request_queue_size = MOST_OPEN
    live: Live

    def __init__(self, *args: Any) -> None:
        self._since: dict[socket.socket, float] = {}  # open connections, the oldest first
        self._lock = threading.Lock()
        super().__init__(*args)

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            oldest = next(iter(self._since)) if len(self._since) >= MOST_OPEN else None
            self._since[request] = time.monotonic()
        if oldest is not None:
            self._hang_up(oldest)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._since.pop(request, None)
        super().shutdown_request(request)

    def service_actions(self) -> None:
        """Called by `serve_forever` several times a second: hang up on whoever takes too long."""
        with self._lock:
            late = [link for link, since in self._since.items() if time.monotonic() - since > PATIENCE]
        for link in late:
            self._hang_up(link)

    def _hang_up(self, link: socket.socket) -> None:
        """Wake the thread of a connection with the end of its input; it closes the rest."""
        with self._lock:
            self._since.pop(link, None)
        with contextlib.suppress(OSError):
            link.shutdown(socket.SHUT_RDWR)


class _Bounded:
    """The lines of a request, as long as they are not too many bytes together."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self._left, self.close = file, LONGEST + 1, file.close

    def readline(self, size: int) -> bytes:
        if self._left <= 0:
            raise LineTooLong("headers")
        line = self._file.readline(min(size, self._left))
        self._left -= len(line)
        return line


class _Handler(BaseHTTPRequestHandler):
    server: _Server  # pyright: ignore[reportIncompatibleVariableOverride]
    server_version, sys_version = "trimtab", ""
    timeout = IDLE  # pyright: ignore[reportAssignmentType]

    def setup(self) -> None:
        super().setup()
        self.rfile: Any = _Bounded(self.rfile)
        self._refused = False

    def finish(self) -> None:
        """Take in what a refused client still sends: a connection that is closed over it is reset, answer and all."""
        super().finish()
        if not self._refused:
            return
        left = DRAINED
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_WR)
            self.connection.settimeout(DRAIN_SECONDS)
            while left > 0 and (part := self.connection.recv(1 << 16)):
                left -= len(part)

    def do_GET(self) -> None:
        self._answer()

    def do_HEAD(self) -> None:
        self._answer()

    def _answer(self) -> None:
        if not self._is_ours():
            return self._send(403, "text/plain; charset=utf-8", b"This page is for a browser on this machine.\n")
        try:
            found = self.server.live.answer(self.path)
        except Exception:
            log.exception("%s could not be answered", self.path[:100])
            return self.send_error(500)
        if found is None:
            return self._send(404, "text/plain; charset=utf-8", REFUSED.encode())
        return self._send(200, *found)

    def _is_ours(self) -> bool:
        """Whether the request is addressed to this machine, and not sent by another site's page."""
        hosts, origins, sites = (self.headers.get_all(name, []) for name in ("Host", "Origin", "Sec-Fetch-Site"))
        ours = self.server.live.hosts
        if len(hosts) != 1 or hosts[0].lower() not in ours:
            return False
        if any(origin.lower() not in {f"http://{host}" for host in ours} for origin in origins):
            return False
        return all(site in ("same-origin", "none") for site in sites)

    def _refuse(self) -> None:
        self._send(405, "text/plain; charset=utf-8", REFUSED.encode(), Allow="GET, HEAD")

    do_POST = do_PUT = do_PATCH = do_DELETE = do_OPTIONS = do_CONNECT = do_TRACE = _refuse  # noqa: N815

    def _send(self, code: int, kind: str, body: bytes, **more: str) -> None:
        self._refused = code >= 400
        self.request_version = self.protocol_version  # headers also for who has named no version, or a wrong one
        self.send_response(code)
        for name, value in (HEADERS | {"Content-Type": kind, "Content-Length": str(len(body))} | more).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Refuse as everything is answered: as plain text, and nothing of the request in it."""
        self._send(code, "text/plain; charset=utf-8", f"{code} {self.responses.get(code, ('',))[0]}\n".encode())

    def handle(self) -> None:
        with contextlib.suppress(ConnectionError, TimeoutError):  # the browser has gone away
            super().handle()

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing: a line per poll would bury the one line that matters, the address."""


def _bind(port: int | None) -> _Server:
    if port is not None and not 0 <= port <= 65535:
        raise TrimtabError(f"a port must lie between 0 and 65535, got {port}: leave it out to get a free one")
    try:
        return _Server((HOST, PORT if port is None else port), _Handler)
    except OSError as error:
        if port is None and error.errno == errno.EADDRINUSE:
            return _Server((HOST, 0), _Handler)
        raise TrimtabError(f"port {port} cannot be used ({error.strerror}): choose another, or leave it out") from None
