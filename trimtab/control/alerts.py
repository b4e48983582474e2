# SPDX-License-Identifier: Apache-2.0
"""Alerts: a message to somebody who is not looking, for the few events that are worth one.

    from trimtab.control.alerts import Alerts, webhook

    controller = trimtab.Controller(model, total_steps=10_000, on_event=Alerts(webhook("https://hooks.example/x")))

Worth one are a gradient that is not finite, a persistent offender, and a budget that is always full. At most one an
hour goes out for each unit, and the next one says how many were held back: a run that is broken all night sends one
message an hour, not ten thousand. On many ranks give it to the first one only: all have the same events.

Training never waits for it and never fails by it. Messages go through a thread of their own; a target that fails or
does not answer is named once in the log, and is asked again for the next message. At exit what is still waiting has
five seconds.

    webhook(url)       POST of JSON: `text` and `content` (what Slack and Discord read), step, kind, unit, run
    command(args)      a program with the same JSON on its standard input
    wandb_alert(run)   the alert of a W&B run, by mail or Slack as its owner has set it
"""

import atexit
import json
import logging
import queue
import shlex
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from trimtab.control.sinks import import_wandb
from trimtab.control.values import Event
from trimtab.errors import TrimtabError

log = logging.getLogger(__name__)

KINDS = ("nonfinite", "persistent", "budget_full")
WAITING = 64
"""Most messages that wait; more are dropped, because nobody reads them any more."""
LAST_SECONDS = 5.0

Message = Mapping[str, Any]
Target = Callable[[Message], None]
"""Delivers one message, or raises."""


class Alerts:
    """Called with each event of a controller; sends the few that are worth it.

    Args:
        targets: who is told.
        run: name of the run, for whoever has several.
        every: seconds between two messages about the same unit.
        clock: what the time is, in seconds.
    """

    def __init__(
        self, *targets: Target, run: str = "", every: float = 3600.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        if not targets:
            raise TrimtabError("alerts need somebody to tell, got no target: give webhook(url), command(args), ...")
        self._targets, self._run, self._every, self._clock = targets, run, every, clock
        self._sent: dict[str, float] = {}
        self._held: dict[str, int] = {}
        self._failing: set[int] = set()
        self._queue: queue.Queue[Message] = queue.Queue(WAITING)
        threading.Thread(target=self._deliver, name="trimtab-alerts", daemon=True).start()
        atexit.register(self.flush)

    def __call__(self, event: Event) -> None:
        """Send a message about an event, if it is worth one and none about its unit went out in the last hour."""
        if event.kind not in KINDS:
            return
        about, now = event.unit or f"({event.kind})", self._clock()
        if about in self._sent and now - self._sent[about] < self._every:
            self._held[about] = self._held.get(about, 0) + 1
            return
        self._sent[about] = now
        held = self._held.pop(about, 0)
        more = f" ({held} more since the last message)" if held else ""
        where = f"{self._run}, step {event.step}" if self._run else f"step {event.step}"
        text = f"trimtab: {where}: {event.message}{more}"
        message = {"text": text, "content": text, "step": event.step, "kind": event.kind, "unit": event.unit}
        try:
            self._queue.put_nowait({**message, "run": self._run, "held_back": held})
        except queue.Full:
            log.warning("an alert was dropped, %d are waiting already: %s", WAITING, text)

    def flush(self, seconds: float = LAST_SECONDS) -> bool:
        """Wait until everything is delivered, but not longer than so; whether it was."""
        until = time.monotonic() + seconds
        while self._queue.unfinished_tasks and time.monotonic() < until:
            time.sleep(0.01)
        return not self._queue.unfinished_tasks

    def _deliver(self) -> None:
        while True:
            message = self._queue.get()
            for number, target in enumerate(self._targets):
                try:
                    target(message)
                    self._failing.discard(number)
                except Exception as error:
                    if number not in self._failing:
                        log.warning("an alert was not delivered: %s", " ".join(str(error).split()))
                    self._failing.add(number)
            self._queue.task_done()


def webhook(url: str, *, timeout: float = 5.0) -> Target:
    """A target that POSTs each message as JSON."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise TrimtabError(f"a webhook is an http:// or https:// address, got {parts.scheme or 'no scheme'!r}")

    def send(message: Message) -> None:
        headers = {"Content-Type": "application/json", "User-Agent": "trimtab"}
        request = urllib.request.Request(url, json.dumps(message).encode(), headers, method="POST")
        try:
            with urllib.request.urlopen(request, timeout=timeout) as answer:
                answer.read(1)
        except (OSError, ValueError) as error:  # the address itself is a secret, and stays out of the log
            raise RuntimeError(f"webhook of {parts.hostname}: {getattr(error, 'reason', error)}") from None

    return send


def command(args: str | Sequence[str], *, timeout: float = 30.0) -> Target:
    """A target that runs a program, without a shell, with each message as JSON on its standard input."""
    words = shlex.split(args) if isinstance(args, str) else list(args)
    if not words:
        raise TrimtabError("a command must name a program, got nothing")

    def run(message: Message) -> None:
        try:
            done = subprocess.run(
                words, input=json.dumps(message), capture_output=True, text=True, timeout=timeout, check=False
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise RuntimeError(f"command {words[0]}: {error}") from None
        if done.returncode:
            said = (done.stderr.strip().splitlines() or [""])[-1][:200]
            raise RuntimeError(f"command {words[0]} ended with code {done.returncode}: {said}")

    return run


def wandb_alert(run: Any = None) -> Target:
    """A target that sends each message as an alert of a W&B run; None means the one that is open then."""
    wandb = None if run is not None else import_wandb()

    def alert(message: Message) -> None:
        to = run if run is not None else getattr(wandb, "run", None)
        if to is None:
            raise RuntimeError("W&B alert: no run is open, call wandb.init first")
        level = "ERROR" if message["kind"] == "nonfinite" else "WARN"
        to.alert(title=f"trimtab: {message['kind']}", text=message["text"], level=level)

    return alert
