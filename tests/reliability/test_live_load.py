# SPDX-License-Identifier: Apache-2.0
"""The live page under load and under attack: fifty readers while a run writes, clients that are slow, huge or rude, and
what a web page elsewhere could try. Every answer, also a refusal, carries the headers that keep a browser in."""

import http.client
import json
import os
import socket
import statistics
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trimtab.control.policy import Policy
from trimtab.control.record import Recorder
from trimtab.report import live as lives
from trimtab.report.live import Live

UNITS = 40
POLICY = Policy(max_high=2, alpha=1.5, beta=2.0, warmup_steps=3)


class Writer:
    """A run that somebody writes."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.step = folder, 0
        self.recorder = Recorder(folder, run={"name": folder.name})
        self.rng = np.random.default_rng(0)
        units, limits = [f"layers.{i}.down" for i in range(UNITS)], POLICY.resolve(UNITS, 100_000)
        self.recorder.open_trace(units, np.ones(UNITS, bool), POLICY.to_dict(), *limits, 100_000)

    def write(self, steps: int) -> None:
        seen, high = np.ones(UNITS, bool), np.zeros(UNITS, bool)
        for _ in range(steps):
            self.step += 1
            norms = self.rng.lognormal(0, 0.02, UNITS).astype(np.float32)
            self.recorder.observe(self.step, norms, seen, high, 1.0)
            self.recorder.log(self.step, loss=2 + 1 / self.step)
        self.recorder.flush()


class Served:
    """A live page, and a client of it."""

    def __init__(self, folder: Path) -> None:
        self.live = Live([folder], 0)
        self.thread = threading.Thread(target=self.live.serve, daemon=True)
        self.thread.start()

    def data(self, token: str = "", tick: int = -1) -> dict[str, Any]:
        link = http.client.HTTPConnection("127.0.0.1", self.live.port, timeout=30)
        link.request("GET", f"/data?run=0&token={token}&tick={tick}")
        answer = link.getresponse()
        body = answer.read()
        link.close()
        assert answer.status == 200
        return json.loads(body)

    def raw(self, sent: bytes, *, end: bool = True) -> bytes:
        """What comes back for some bytes."""
        with socket.create_connection(("127.0.0.1", self.live.port), 10) as link:
            link.sendall(sent)
            if end:
                link.shutdown(socket.SHUT_WR)
            found = b""
            while part := link.recv(65536):
                found += part
        return found

    def close(self) -> None:
        self.live.stop()
        self.thread.join(10)
        self.live.close()


@pytest.fixture(name="writer")
def _writer(tmp_path: Path) -> Iterator[Writer]:
    writer = Writer(tmp_path / "run")
    writer.write(300)
    yield writer
    writer.recorder.close()


@pytest.fixture(name="served")
def _served(writer: Writer) -> Iterator[Served]:
    served = Served(writer.folder)
    yield served
    served.close()


def resident() -> int:
    """What this process holds now, in bytes."""
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGESIZE")


def test_fifty_readers_see_a_run_grow(served: Served, writer: Writer, rounds: Callable[[int, int], int]) -> None:
    """Nobody gets an error or an older state than before, and the last answer has the last step."""
    readers, seconds = 50, rounds(3, 60)
    waits: list[float] = []
    problems: list[str] = []
    until = time.monotonic() + seconds

    def read() -> None:
        known: dict[str, Any] = {"token": "", "tick": -1, "step": 0}
        try:
            while time.monotonic() < until:
                began = time.monotonic()
                told = served.data(known["token"], known["tick"])
                waits.append(time.monotonic() - began)
                if told["step"] < known["step"] or told["tick"] < known["tick"]:
                    problems.append(f"from {known['step']} back to {told['step']}")
                known = told
                time.sleep(0.5)  # a page asks once a second
            if served.data()["step"] != writer.step:
                problems.append("the end was not told")
        except Exception as error:
            problems.append(repr(error))

    threads = [threading.Thread(target=read) for _ in range(readers)]
    for thread in threads:
        thread.start()
    held = [resident()]
    while time.monotonic() < until - 0.5:
        writer.write(20)
        time.sleep(0.05)
        held.append(resident())
    for thread in threads:
        thread.join(60)
    assert not problems
    assert len(waits) > readers * 2
    median, late = statistics.median(waits), float(np.quantile(waits, 0.99))
    grown = held[-1] - held[len(held) // 3]
    print(
        f"{readers} readers, {len(waits)} answers in {seconds} s, {writer.step:,} steps: median {median * 1e3:.0f} ms, "
        f"p99 {late * 1e3:.0f} ms, memory {held[-1] / 1e6:.0f} MB, {grown / 1e6:+.1f} MB since a third of the time"
    )
    assert grown < 32 << 20
    assert late < 5  # on two busy cores; each would wait 50 readings in a row if none were shared


def test_readers_that_wait_share_a_reading(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    follower = served.live.followers[0]
    readings, refresh = [], type(follower).refresh

    def slow(self: Any, seconds: float = 1.0) -> None:
        refresh(self, seconds)
        readings.append(time.monotonic())
        time.sleep(0.3)

    monkeypatch.setattr(type(follower), "refresh", slow)
    threads = [threading.Thread(target=served.data) for _ in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert 1 <= len(readings) <= 4


def test_memory_stays_flat_however_often_a_growing_run_is_read(served: Served, writer: Writer) -> None:
    def read(times: int) -> int:
        for _ in range(times):
            writer.write(30)
            served.data()
        return tracemalloc.get_traced_memory()[0]

    tracemalloc.start()
    try:
        first = read(10)
        assert read(20) - first < 1 << 18
    finally:
        tracemalloc.stop()


def test_slow_clients_keep_nobody_out(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """More half requests than there is room for, each kept alive: a reader is answered at once all the same."""
    links = []
    for _ in range(lives.MOST_OPEN + 20):
        link = socket.create_connection(("127.0.0.1", served.live.port), 10)
        link.sendall(b"GET / HTTP/1.1\r\nX-Slow: ")
        links.append(link)
    began = time.monotonic()
    assert served.data()["step"] == 300
    assert time.monotonic() - began < 5
    assert threading.active_count() < lives.MOST_OPEN + 40
    for link in links:
        link.close()
    monkeypatch.setattr(lives, "PATIENCE", 0.5)
    with socket.create_connection(("127.0.0.1", served.live.port), 10) as link:
        began = time.monotonic()
        link.settimeout(0.1)
        while time.monotonic() - began < 10 and not is_closed(link):
            continue
        assert 0.4 < time.monotonic() - began < 5  # a byte now and then does not buy more time


def is_closed(link: socket.socket) -> bool:
    """Whether the other side has hung up, after one more byte and a short wait."""
    try:
        link.sendall(b"G")
        return not link.recv(100)
    except TimeoutError:
        return False
    except ConnectionError:
        return True


HOST = "Host: localhost:{port}\r\n"
OWN, FOREIGN = "Origin: http://localhost:{port}\r\n", "Origin: http://evil.example\r\n"


@pytest.mark.parametrize(
    ("sent", "code"),
    [
        ("GET /" + "a" * 70_000 + " HTTP/1.1\r\n" + HOST + "\r\n", 414),
        ("GET / HTTP/1.1\r\n" + HOST + "X-A: b\r\n" * 150 + "\r\n", 431),
        ("GET / HTTP/1.1\r\n" + HOST + "X-A: " + "b" * 70_000 + "\r\n\r\n", 431),
        ("GET / HTTP/1.1\r\n" + HOST + ("X-A: " + "b" * 9_000 + "\r\n") * 9 + "\r\n", 431),  # each is small
        ("PROPFIND / HTTP/1.1\r\n" + HOST + "\r\n", 501),
        ("GET / HTTP/9.9\r\n" + HOST + "\r\n", 505),
        ("GET /../../etc/passwd HTTP/1.1\r\n" + HOST + "\r\n", 404),
        ("GET /%2e%2e/%2e%2e/etc/passwd HTTP/1.1\r\n" + HOST + "\r\n", 404),
        ("GET /data/../run.json HTTP/1.1\r\n" + HOST + "\r\n", 404),
        ("GET /run.json\0.js HTTP/1.1\r\n" + HOST + "\r\n", 404),
        ("GET /%00 HTTP/1.1\r\n" + HOST + "\r\n", 404),
        ("GET //[ HTTP/1.1\r\n" + HOST + "\r\n", 404),
        ("GET http://[x/ HTTP/1.1\r\n" + HOST + "\r\n", 404),
        ("GET /data?run=" + "9" * 5000 + " HTTP/1.1\r\n" + HOST + "\r\n", 404),
        ("GET /data?run=0&tick=%FF%00 HTTP/1.1\r\n" + HOST + "\r\n", 404),
        ("GET /data?run=0 HTTP/1.1\r\n" + HOST + OWN + FOREIGN + "\r\n", 403),
        ("GET / HTTP/1.1\r\n" + HOST + "Sec-Fetch-Site: none\r\nSec-Fetch-Site: cross-site\r\n\r\n", 403),
        ("GET /data HTTP/1.1\r\nHost: localhost.evil.example:{port}\r\n\r\n", 403),
        ("GET /data HTTP/1.1\r\nHost: [::1]:{port}\r\n\r\n", 403),
        ("GET /data HTTP/1.1\r\nHost: 0.0.0.0:{port}\r\n\r\n", 403),
        ("POST / HTTP/1.1\r\n" + HOST + "Content-Length: 99999999999\r\n\r\n", 405),
    ],
)  # fmt: skip
def test_a_hostile_request_is_refused_with_the_usual_headers(served: Served, sent: str, code: int) -> None:
    answer = served.raw(sent.replace("{port}", str(served.live.port)).encode("latin-1"))
    head, _, body = answer.partition(b"\r\n\r\n")
    assert int(head.split()[1]) == code
    assert b"Content-Security-Policy: default-src 'none'" in head
    assert b"X-Content-Type-Options: nosniff" in head
    assert b"Content-Type: text/plain" in head
    assert len(body) < 100
    assert b"evil" not in answer
    assert b"root:" not in answer
    assert served.data()["step"] == 300


def test_a_refused_client_that_goes_on_sending_gets_its_answer_and_no_reset(served: Served) -> None:
    with socket.create_connection(("127.0.0.1", served.live.port), 10) as link:
        link.sendall(b"GET / HTTP/1.1\r\n" + b"X-A: b\r\n" * 20_000)
        time.sleep(0.3)  # it has been refused by now
        link.sendall(b"X-A: b\r\n" * 20_000)
        link.shutdown(socket.SHUT_WR)
        answer = b""
        while part := link.recv(1 << 16):
            answer += part
    assert answer.startswith(b"HTTP/1.0 431 ")


def test_a_request_of_the_first_protocol_learns_nothing(served: Served) -> None:
    answer = served.raw(b"GET /data\r\n\r\n")  # no version, no Host
    assert answer.startswith(b"HTTP/1.0 403 ")
    assert b"layers" not in answer


def test_an_error_inside_is_told_and_the_next_request_is_answered(
    served: Served, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    request = f"GET /data HTTP/1.1\r\nHost: localhost:{served.live.port}\r\n\r\n".encode()
    with monkeypatch.context() as patched:
        patched.setattr(type(served.live.followers[0]), "since", lambda *_: 1 / 0)
        answer = served.raw(request)
    assert b" 500 " in answer
    assert b"Traceback" not in answer
    assert b"ZeroDivision" not in answer
    assert "could not be answered" in caplog.text
    assert b" 200 " in served.raw(request)


def test_a_file_that_points_out_of_the_folder_is_not_shown(tmp_path: Path) -> None:
    """What is served are numbers out of three files: another file in their place gives none of its text."""
    secret = tmp_path / "secret.txt"
    secret.write_text("root:x:0:0\n" * 50, encoding="utf-8")
    folder = tmp_path / "run"
    folder.mkdir()
    for name in ("metrics.jsonl", "trace.arrow", "run.json"):
        (folder / name).symlink_to(secret)
    served = Served(folder)
    try:
        port = served.live.port
        for target in ("/", "/data", "/metrics.jsonl", "/secret.txt"):
            answer = served.raw(f"GET {target} HTTP/1.1\r\nHost: localhost:{port}\r\n\r\n".encode())
            assert b"root:x" not in answer
    finally:
        served.close()
