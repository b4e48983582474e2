# SPDX-License-Identifier: Apache-2.0
"""Alerts: the few events that are worth a message, once an hour for each unit, delivered beside training; and a dead
endpoint or a failing program never slows or breaks it."""

import json
import logging
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from trimtab import Event, TrimtabError
from trimtab.control import alerts as module
from trimtab.control.alerts import Alerts, Message, command, wandb_alert, webhook
from trimtab.control.values import KINDS


class Clock:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Endpoint:
    """A local server that keeps what is posted to it."""

    def __init__(self, code: int = 200) -> None:
        got: list[dict[str, Any]] = []
        self.got, self.headers = got, {}

        class Handler(BaseHTTPRequestHandler):
            def do_POST(handler) -> None:  # noqa: N805
                got.append(json.loads(handler.rfile.read(int(handler.headers["Content-Length"]))))
                self.headers = dict(handler.headers)
                handler.send_response(code)
                handler.end_headers()

            def log_message(handler, *args: object) -> None:  # noqa: N805
                pass

        self.server = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}/secret-path"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()


@pytest.fixture(name="endpoint")
def _endpoint() -> Iterator[Endpoint]:
    endpoint = Endpoint()
    yield endpoint
    endpoint.close()


def bad(unit: str | None = "u1", kind: str = "nonfinite", step: int = 7) -> Event:
    return Event(step, kind, unit, message=f"{unit} is in trouble")


def test_a_webhook_gets_the_message_as_json(endpoint: Endpoint) -> None:
    alerts = Alerts(webhook(endpoint.url), run="night")
    alerts(bad())
    assert alerts.flush(20)
    (got,) = endpoint.got
    assert got["text"] == got["content"] == "trimtab: night, step 7: u1 is in trouble"
    assert (got["step"], got["kind"], got["unit"], got["run"]) == (7, "nonfinite", "u1", "night")
    assert endpoint.headers["Content-Type"] == "application/json"


def test_only_what_is_worth_it_is_sent() -> None:
    got: list[Message] = []
    alerts = Alerts(got.append)
    for number, kind in enumerate(KINDS):
        alerts(bad(f"u{number}", kind))
    alerts(Event(9, "budget_full", message="full"))
    assert alerts.flush(20)
    assert {message["kind"] for message in got} == {"nonfinite", "persistent", "budget_full"}


def test_one_an_hour_for_each_unit_and_the_next_says_how_many_were_held_back() -> None:
    got, clock = [], Clock()
    alerts = Alerts(got.append, clock=clock)
    for second in range(0, 3600, 600):
        clock.now = second
        alerts(bad("u1", "nonfinite"))
        alerts(bad("u1", "persistent"))
    alerts(bad("u2", "persistent"))
    assert alerts.flush(20)
    assert [message["unit"] for message in got] == ["u1", "u2"]
    clock.now = 3600
    alerts(bad("u1", "persistent", step=99))
    assert alerts.flush(20)
    assert got[-1]["text"] == "trimtab: step 99: u1 is in trouble (11 more since the last message)"
    clock.now = 7200
    alerts(bad("u1"))
    assert alerts.flush(20)
    assert "more since" not in got[-1]["text"]


def test_a_full_budget_does_not_hold_back_a_gradient_that_is_not_finite() -> None:
    got: list[Message] = []
    alerts = Alerts(got.append, clock=Clock())
    for _ in range(2):
        alerts(bad(None, "budget_full"))
        alerts(bad(None, "nonfinite"))
    assert alerts.flush(20)
    assert [message["kind"] for message in got] == ["budget_full", "nonfinite"]


def test_training_does_not_wait_for_an_endpoint_that_does_not_answer() -> None:
    asked, answered = threading.Event(), threading.Event()

    def hanging(message: Message) -> None:
        asked.set()
        answered.wait(60)

    alerts = Alerts(hanging, clock=Clock())
    for number in range(module.WAITING + 50):  # more than can wait
        alerts(bad(f"u{number}"))
    assert asked.wait(20)
    assert not alerts.flush(0.05)  # all of them were taken while nothing was delivered
    answered.set()
    assert alerts.flush(20)


def test_more_than_can_wait_is_dropped_and_told(caplog: pytest.LogCaptureFixture) -> None:
    free = threading.Event()
    got: list[Message] = []
    alerts = Alerts(lambda message: (free.wait(60), got.append(message))[1], clock=Clock())
    with caplog.at_level(logging.WARNING, "trimtab.control.alerts"):
        for number in range(module.WAITING + 10):
            alerts(bad(f"u{number}"))
    free.set()
    assert alerts.flush(20)
    dropped = [record for record in caplog.records if "dropped" in record.getMessage()]
    assert len(got) + len(dropped) == module.WAITING + 10
    assert len(dropped) in (9, 10)


def test_a_dead_endpoint_is_told_once_without_its_address_and_the_others_are_served(
    endpoint: Endpoint, caplog: pytest.LogCaptureFixture
) -> None:
    refused = Endpoint(500)
    gone = Endpoint()
    gone.close()
    with caplog.at_level(logging.WARNING, "trimtab.control.alerts"):
        alerts = Alerts(webhook(gone.url, timeout=5), webhook(refused.url), webhook(endpoint.url), clock=Clock())
        for number in range(3):
            alerts(bad(f"u{number}"))
        assert alerts.flush(20)
    refused.close()
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 2
    assert all(text.startswith("an alert was not delivered: webhook of 127.0.0.1") for text in said)
    assert "secret-path" not in "".join(said)
    assert [got["unit"] for got in endpoint.got] == ["u0", "u1", "u2"]


def test_a_command_gets_the_message_on_its_standard_input(tmp_path: Path) -> None:
    target = tmp_path / "got.json"
    script = f"import sys; open({str(target)!r}, 'w').write(sys.stdin.read())"
    alerts = Alerts(command([sys.executable, "-c", script]))
    alerts(bad("$(touch x); u1"))
    assert alerts.flush(60)
    assert json.loads(target.read_text())["unit"] == "$(touch x); u1"


def test_a_command_that_fails_is_told_and_nothing_else_happens(caplog: pytest.LogCaptureFixture) -> None:
    failing = command([sys.executable, "-c", "import sys; sys.exit('no mail today')"])
    with caplog.at_level(logging.WARNING, "trimtab.control.alerts"):
        alerts = Alerts(failing, command("no-such-program-anywhere --now"), clock=Clock())
        alerts(bad())
        assert alerts.flush(60)
    said = [record.getMessage() for record in caplog.records]
    assert "ended with code 1: no mail today" in said[0]
    assert "no-such-program-anywhere" in said[1]


def test_a_target_that_recovers_may_fail_again(caplog: pytest.LogCaptureFixture) -> None:
    outcomes = [True, True, False, True]

    def flaky(message: Message) -> None:
        if outcomes.pop(0):
            raise RuntimeError("down")

    with caplog.at_level(logging.WARNING, "trimtab.control.alerts"):
        alerts = Alerts(flaky, clock=Clock())
        for number in range(4):
            alerts(bad(f"u{number}"))
            assert alerts.flush(20)
    assert len(caplog.records) == 2


def test_wandb_is_alerted_through_its_run(caplog: pytest.LogCaptureFixture) -> None:
    class Run:
        calls: tuple[dict[str, str], ...] = ()

        def alert(self, **options: str) -> None:
            self.calls += (options,)

    run = Run()
    alerts = Alerts(wandb_alert(run))
    alerts(bad())
    alerts(bad("u2", "persistent"))
    assert alerts.flush(20)
    assert [(call["title"], call["level"]) for call in run.calls] == [
        ("trimtab: nonfinite", "ERROR"),
        ("trimtab: persistent", "WARN"),
    ]
    assert run.calls[0]["text"].endswith("u1 is in trouble")


def test_what_waits_at_the_end_of_the_process_is_still_sent(endpoint: Endpoint) -> None:
    script = f"""
from trimtab.control.alerts import Alerts, webhook
from trimtab.control.values import Event
Alerts(webhook({endpoint.url!r}))(Event(3, "nonfinite", "u", message="last words"))
raise SystemExit(1)
"""
    subprocess.run([sys.executable, "-c", script], check=False, timeout=60)
    assert [got["text"] for got in endpoint.got] == ["trimtab: step 3: last words"]


def test_a_dead_endpoint_does_not_keep_a_process_alive() -> None:
    script = """
import threading
from trimtab.control import alerts
from trimtab.control.values import Event
alerts.Alerts.flush.__defaults__ = (0.2,)
alerts.Alerts(lambda message: threading.Event().wait())(Event(3, "nonfinite", "u", message="nobody listens"))
"""
    assert subprocess.run([sys.executable, "-c", script], check=False, timeout=60).returncode == 0


@pytest.mark.parametrize("url", ["file:///etc/passwd", "ftp://x/y", "hooks.example/x", "http://"])
def test_a_webhook_is_a_web_address(url: str) -> None:
    with pytest.raises(TrimtabError, match=r"http:// or https:// address"):
        webhook(url)


def test_bad_settings_are_refused() -> None:
    with pytest.raises(TrimtabError, match="no target"):
        Alerts()
    with pytest.raises(TrimtabError, match="must name a program"):
        command("  ")
