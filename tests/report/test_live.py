# SPDX-License-Identifier: Apache-2.0
"""Live, over HTTP: who is answered and who is refused, that nothing but three routes exists, and that a page can be
brought up to date by asking for what is new."""

import http.client
import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from growing import Writer

from trimtab.errors import TrimtabError
from trimtab.report import live as lives
from trimtab.report.live import Live


class Answer(NamedTuple):
    code: int
    headers: Any
    body: bytes


class Served:
    """A server on some run folders, and a client that sends what it is told to."""

    def __init__(self, folders: list[Path]) -> None:
        self.live = Live(folders, 0)
        self.thread = threading.Thread(target=self.live.serve)
        self.thread.start()

    def ask(self, target: str = "/", method: str = "GET", **headers: str) -> Answer:
        link = http.client.HTTPConnection("127.0.0.1", self.live.port, timeout=10)
        link.putrequest(method, target, skip_host=True)
        headers = {"Host": f"127.0.0.1:{self.live.port}"} | {k.replace("_", "-"): v for k, v in headers.items()}
        for name, value in headers.items():
            if value:
                link.putheader(name, value)
        link.endheaders()
        answer = link.getresponse()
        found = Answer(answer.status, answer.headers, answer.read())
        link.close()
        return found

    def data(self, query: str = "run=0") -> dict[str, Any]:
        answer = self.ask(f"/data?{query}")
        assert answer.code == 200
        return json.loads(answer.body)

    def close(self) -> None:
        self.live.stop()
        self.thread.join(10)
        self.live.close()
        assert not self.thread.is_alive()


@pytest.fixture(name="writer")
def _writer(tmp_path: Path) -> Writer:
    writer = Writer(tmp_path / "a")
    writer.write(12, spikes={1: 5.0})
    return writer


@pytest.fixture(name="own")
def _own(writer: Writer) -> Iterator[Served]:
    """A server on a run that a test writes to."""
    served = Served([writer.folder])
    yield served
    served.close()


@pytest.fixture(name="served", scope="module")
def _served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server on a run that stays as it is."""
    writer = Writer(tmp_path_factory.mktemp("runs") / "a")
    writer.write(12)
    served = Served([writer.folder])
    yield served
    served.close()


def test_the_page_its_script_and_its_data_are_served(served: Served) -> None:
    for target, kind in {"/": "text/html", "/live.js": "text/javascript", "/data?run=0": "application/json"}.items():
        answer = served.ask(target)
        assert answer.code == 200
        assert answer.headers["Content-Type"].startswith(kind)
        assert len(answer.body) == int(answer.headers["Content-Length"]) > 100


def test_a_page_may_load_nothing_from_elsewhere(served: Served) -> None:
    answer = served.ask()
    policy = answer.headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy
    assert "script-src 'self'" in policy
    assert "frame-ancestors 'none'" in policy
    assert answer.headers["X-Content-Type-Options"] == "nosniff"
    assert answer.headers["Cross-Origin-Resource-Policy"] == "same-origin"
    assert "Access-Control-Allow-Origin" not in answer.headers
    assert "Python" not in answer.headers["Server"]
    for text in (answer.body, served.ask("/live.js").body):
        assert b"//cdn" not in text
        assert b"https:" not in text
        assert b"innerHTML" not in text


def test_it_listens_on_this_machine_only(served: Served) -> None:
    assert served.live._server.server_address[0] == "127.0.0.1"
    assert served.live.url == f"http://127.0.0.1:{served.live.port}/"


@pytest.mark.parametrize("host", ["localhost:{port}", "127.0.0.1:{port}", "LOCALHOST:{port}"])
def test_its_own_names_are_answered(served: Served, host: str) -> None:
    assert served.ask(Host=host.format(port=served.live.port)).code == 200


@pytest.mark.parametrize(
    "host",
    [
        "",
        "evil.example",
        "evil.example:{port}",
        "localhost",
        "127.0.0.1",
        "localhost:1",
        "127.0.0.1.evil.example:{port}",
    ],
)
@pytest.mark.parametrize("target", ["/", "/live.js", "/data?run=0"])
def test_a_foreign_name_that_points_here_is_refused(served: Served, host: str, target: str) -> None:
    answer = served.ask(target, Host=host.format(port=served.live.port))
    assert answer.code == 403
    assert b"layers" not in answer.body


def test_two_names_in_one_request_are_refused(served: Served) -> None:
    port = served.live.port
    with socket.create_connection(("127.0.0.1", port), 10) as link:
        link.sendall(f"GET /data HTTP/1.1\r\nHost: evil.example\r\nHost: localhost:{port}\r\n\r\n".encode())
        assert b" 403 " in link.recv(100)


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "https://evil.example"},
        {"Origin": "null"},
        {"Origin": "http://localhost:1"},
        {"Sec_Fetch_Site": "cross-site"},
        {"Sec_Fetch_Site": "same-site"},
    ],
)
def test_what_another_sites_page_sends_is_refused(served: Served, headers: dict[str, str]) -> None:
    assert served.ask("/data?run=0", **headers).code == 403


def test_what_its_own_page_sends_is_answered(served: Served) -> None:
    own = f"http://localhost:{served.live.port}"
    assert served.ask("/data?run=0", Origin=own, Sec_Fetch_Site="same-origin").code == 200


@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "CONNECT"])
def test_it_changes_nothing(served: Served, method: str) -> None:
    answer = served.ask("/data?run=0", method)
    assert answer.code == 405
    assert answer.headers["Allow"] == "GET, HEAD"


def test_head_is_get_without_a_body(served: Served) -> None:
    got, headed = served.ask("/"), served.ask("/", "HEAD")
    assert (headed.code, headed.body) == (200, b"")
    assert headed.headers["Content-Length"] == got.headers["Content-Length"]


@pytest.mark.parametrize(
    "target",
    [
        "/run.json",
        "/metrics.jsonl",
        "/../a/run.json",
        "/%2e%2e/a/run.json",
        "//etc/passwd",
        "/data/",
        "/live.html",
        "/data?run=1",
        "/data?run=-1",
        "/data?run=../a",
        "/data?run=0&tick=x",
        "http://evil.example/",
        "/?" + "&".join(["a=1"] * 20) + "#/../",
    ],
)
def test_nothing_else_is_there(served: Served, target: str) -> None:
    answer = served.ask(target)
    wanted = 200 if target.startswith("/?") else 404
    assert answer.code == wanted
    assert b"versions" not in answer.body


def test_a_query_of_many_fields_is_refused(served: Served) -> None:
    assert served.ask("/data?" + "&".join(["run=0"] * 20)).code == 404


def test_what_is_new_is_told_when_it_is_written(own: Served, writer: Writer) -> None:
    first = own.data()
    writer.write(3)
    second = own.data(f"run=0&token={first['token']}&tick={first['tick']}")
    assert (first["used"], second["from"], second["used"]) == (12, 12, 15)
    assert second["runs"] == 1


def test_a_run_that_is_started_again_is_told_whole(own: Served, writer: Writer) -> None:
    first = own.data()
    writer.recorder.close()
    Writer(writer.folder, units=["other"], force=True).write(2)
    second = own.data(f"run=0&token={first['token']}&tick={first['tick']}")
    assert (second["from"], second["units"]) == (0, ["other"])


def test_several_runs_have_numbers(tmp_path: Path, writer: Writer) -> None:
    other = Writer(tmp_path / "b", units=["u", "v"])
    other.write(3)
    served = Served([writer.folder, other.folder])
    try:
        assert [served.data(f"run={number}")["name"] for number in (0, 1)] == ["a", "b"]
        assert served.data("run=1")["runs"] == 2
    finally:
        served.close()


def test_many_readers_at_once_see_the_same(served: Served) -> None:
    found: list[dict[str, Any]] = []
    readers = [threading.Thread(target=lambda: found.append(served.data())) for _ in range(8)]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join(20)
    assert len(found) == 8
    assert len({json.dumps({k: told[k] for k in ("curves", "heat", "units", "used")}) for told in found}) == 1


def test_a_reader_that_goes_away_breaks_nothing(served: Served) -> None:
    with socket.create_connection(("127.0.0.1", served.live.port), 10) as link:
        link.sendall(b"GET /da")
    assert served.ask().code == 200


def test_a_port_that_is_taken_is_told_unless_it_was_not_asked_for(
    served: Served, writer: Writer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(TrimtabError, match=rf"port {served.live.port} cannot be used .*choose another"):
        Live([writer.folder], served.live.port)
    monkeypatch.setattr(lives, "PORT", served.live.port)
    with Live([writer.folder]) as second:
        assert second.port not in (0, served.live.port)
    with pytest.raises(TrimtabError, match="between 0 and 65535"):
        Live([writer.folder], 70_000)
    with pytest.raises(TrimtabError, match="got none"):
        Live([])
