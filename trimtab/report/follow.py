# SPDX-License-Identifier: Apache-2.0
"""Follow: a run folder read again and again while somebody writes it.

    follower = Follower("runs/a")
    follower.refresh()                     # reads what is new
    follower.since(token, tick)            # what a page that knows `tick` must be told

Each call reads on from where the last one stopped: whole lines of metrics.jsonl, whole batches of trace.arrow. What is
half written waits for the next call. Ratios are not in the trace; the policy's own code gives them back from the norms
(`advance`), with its state kept between calls, so that a step is judged once.

A resumed run cuts both files back to its checkpoint and writes other bytes there, and a run that is started again
replaces them. Sizes alone do not show that: the new file may be longer already. So the last bytes that were read are
remembered, and where they are no longer there, or the file or run.json is another one, everything is read anew.

Memory does not grow with the run (`strip.py`), and a long run is read in slices of a second or so: `behind` says that
there is more.
"""

import base64
import math
import os
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from trimtab.checks import is_number, parse_json
from trimtab.control.advance import State
from trimtab.control.record import METRICS, RUN, TRACE
from trimtab.errors import TrimtabError
from trimtab.report.names import visible
from trimtab.report.passes import Rules, judged, rules_of
from trimtab.report.pool import encode
from trimtab.report.read import Trace, is_step, iter_batches, number_of
from trimtab.report.strip import BAD, COUNT, HIGH, LOW, SUM, Strip

REMEMBERED = 4096
"""How many of the last bytes must still be there."""
CHUNK = 1 << 20
MAX_SHOWN = 256
"""Most units in the heat-map; of more, those with the largest ratios."""
MAX_EVALS = 6
MAX_EVENTS = 120
LONGEST_MESSAGE = 1000
NOTABLE = ("nonfinite", "rerun", "persistent", "budget_full")
NOW_ROWS = 10
CURVES = ("loss", "grad_norm", "num_high")
TOLD = (*CURVES, "lr", "tokens_per_s")
LONGEST_LINE = 16 << 20
"""Bytes of a line of metrics.jsonl; a longer one is no line of a run, and is counted as broken and never held."""


class Growing:
    """A file that somebody appends to: how far it was read, and whether that part is still what it was."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.offset = 0
        self._file: tuple[int, int] | None = None
        self._tail = b""

    def is_other(self) -> bool:
        """Whether what was read is no longer what is there."""
        if self._file is None:
            return False
        try:
            with self.path.open("rb") as file:
                if _identity(file.fileno()) != self._file:
                    return True
                file.seek(self.offset - len(self._tail))
                return file.read(len(self._tail)) != self._tail
        except OSError:
            return True

    def read_to(self, offset: int) -> None:
        """Remember that everything before `offset` was read."""
        with self.path.open("rb") as file:
            start = max(0, offset - REMEMBERED)
            file.seek(start)
            self._tail = file.read(offset - start)
            self._file, self.offset = _identity(file.fileno()), offset

    def waiting(self) -> int:
        """Bytes behind what was read."""
        try:
            return max(self.path.stat().st_size - self.offset, 0)
        except OSError:
            return 0


class Follower:
    """One run folder, as far as it has been read."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        if not any((self.folder / name).is_file() for name in (RUN, METRICS, TRACE)):
            raise TrimtabError(
                f"{folder} is not a run folder: it has none of {RUN}, {METRICS} and {TRACE}; start the run first, or "
                "check the path"
            )
        self.generation = 0
        self.began = -math.inf
        """When the last reading began, by `time.monotonic`."""
        self._start()

    def _start(self) -> None:
        """Forget everything and begin at the first byte."""
        self.generation += 1
        self.tick = 0
        self.behind = False
        self.problem = ""
        self._metrics, self._trace = Growing(self.folder / METRICS), Growing(self.folder / TRACE)
        self._run = _stamp(self.folder / RUN)
        self.info = _read_json(self.folder / RUN)
        self.header: Trace | None = None
        self._rules: Rules | None = None
        self._state: State | None = None
        self.strip = Strip(0)
        self.step = 0
        self.last: dict[str, Any] = {}  # the newest values of some metrics
        self.events: deque[dict[str, Any]] = deque(maxlen=MAX_EVENTS)
        self.notable: deque[dict[str, Any]] = deque(maxlen=MAX_EVENTS // 4)
        self._told_at = 0
        self._broken_lines = 0
        self._shown: list[int] = []
        self._choice = 0

    def refresh(self, seconds: float = 1.0) -> None:
        """Read what is new, for about so long."""
        self.began = time.monotonic()
        until = self.began + seconds
        if self._run != _stamp(self.folder / RUN) or self._metrics.is_other() or self._trace.is_other():
            self._start()
        self.tick += 1
        self.problem, self.behind = "", False
        try:
            self._read_trace(until)
            self._read_metrics(until)
        except (TrimtabError, OSError) as error:
            self.problem = str(error)

    def _read_trace(self, until: float) -> None:
        if not self._trace.path.is_file():
            return
        reached = self._trace.offset
        for block, end in iter_batches(self._trace.path, self._trace.offset):
            if self.header is None:
                self._open(block)
            self._add(block)
            reached = end
            if len(block) and time.monotonic() > until:
                self.behind = True
                break
        if reached != self._trace.offset:
            self._trace.read_to(reached)

    def _open(self, header: Trace) -> None:
        """Learn what the rows of the trace mean."""
        rules = self._rules = rules_of(header, acted=True)  # first: it refuses a header that makes no sense
        self.header = header
        early, self.strip = self.strip, Strip(len(header.units))
        if early.curves:  # metrics came first: read them again, into columns that have units
            self._metrics, self._broken_lines = Growing(self._metrics.path), 0
            self.events.clear()
            self.notable.clear()
        num_units = len(header.units)
        self._state = State.fresh(rules.recoverable, rules.policy, rules.limits, rules.detector)
        self._chosen = self._state.ledger.high[None]  # by the pass before
        self._high = np.zeros(num_units, bool)
        self._since = np.zeros(num_units, np.int64)
        self._ratio, self._risk = np.full(num_units, np.nan), np.zeros(num_units)
        self.acted = False

    def _add(self, block: Trace) -> None:
        """Judge some passes."""
        if not len(block):
            return
        rules, state = self._rules, self._state
        assert rules is not None
        assert state is not None
        verdict, self._state = judged(rules, state, block, first=self.strip.first is None)
        chosen = np.concatenate([self._chosen, verdict.choice.high])
        would, self._chosen = chosen[:-1], chosen[-1:]
        self.strip.add_passes(self.tick, block.steps, verdict.risk.ratio, block.high, would)
        self.acted = self.acted or bool(block.high.any())
        self._keep_since(block.steps, block.high if self.acted else would)
        self._ratio, self._risk = verdict.risk.ratio[-1], verdict.risk.risk[-1]
        self.step = max(self.step, int(block.steps[-1]))

    def _keep_since(self, steps: np.ndarray, high: np.ndarray) -> None:
        """Who is high after these passes, and since which step."""
        low = len(high) - 1 - np.argmax(~high[::-1], axis=0)  # the last row in which each unit was low
        low = np.where(high.all(axis=0), -1, low)
        began = steps[np.minimum(low + 1, len(steps) - 1)]
        self._since = np.where((low < 0) & self._high, self._since, began)
        self._high = high[-1]

    def _read_metrics(self, until: float) -> None:
        if not self._metrics.path.is_file():
            return
        with self._metrics.path.open("rb") as file:
            file.seek(self._metrics.offset)
            while lines := _next_lines(file):
                self._take(lines)
                self._metrics.read_to(file.tell())
                if time.monotonic() > until:
                    self.behind = True
                    break

    def _take(self, raw_lines: list[bytes]) -> None:
        """Add lines of metrics.jsonl; one that is broken is counted, and the rest goes on."""
        found: dict[str, tuple[list[int], list[float]]] = {}
        for raw in raw_lines:
            try:
                line = parse_json(raw)
                step = line["step"]
                if not is_step(step):
                    raise TypeError
            except (ValueError, TypeError, KeyError):
                self._broken_lines += 1
                continue
            self.step = max(self.step, step)
            for key, value in line.items():
                if key == "events":
                    self._tell(step, value)
                elif value is None or isinstance(value, int | float):
                    if key in TOLD:
                        self.last[key] = value
                    if self._is_drawn(key, found):
                        steps, values = found.setdefault(key, ([], []))
                        steps.append(step)
                        values.append(number_of(value))
        for key, (steps, values) in found.items():
            self.strip.add_values(self.tick, key, steps, values)

    def _is_drawn(self, key: str, found: Mapping[str, Any]) -> bool:
        if key in CURVES or key in found or key in self.strip.curves:
            return True
        evals = {name for name in (*found, *self.strip.curves) if name.startswith("eval_loss")}
        return key.startswith("eval_loss") and len(evals) < MAX_EVALS

    def _tell(self, step: int, events: Any) -> None:
        for event in events if isinstance(events, list) else ():
            if isinstance(event, dict):
                kind, message = (str(event.get(name, ""))[:LONGEST_MESSAGE] for name in ("kind", "message"))
                told = {"step": step, "kind": visible(kind), "message": visible(message)}
                self.events.append(told)
                if kind in NOTABLE:
                    self.notable.append(told)
                self._told_at = self.tick

    @property
    def name(self) -> str:
        """What to call the run."""
        return str(self.config.get("name") or self.folder.resolve().name)

    @property
    def config(self) -> Mapping[str, Any]:
        """What run.json says was configured."""
        config = self.info.get("config")
        return config if isinstance(config, Mapping) else {}

    def since(self, token: str = "", tick: int = -1) -> dict[str, Any]:
        """What changed after a tick, as plain values; everything where the token is not ours any more."""
        strip, header = self.strip, self.header
        shown = self._pick()
        ours = f"{self.generation}.{strip.width}.{self._choice}"
        tick = tick if token == ours else -1
        start = strip.newer(tick)
        told: dict[str, Any] = {
            "token": ours,
            "tick": self.tick,
            "behind": self.behind,
            "name": visible(self.name),
            "step": self.step,
            "total": self._total(),
            "age": self._age(),
            "notes": [visible(note) for note in self._notes()],
            "last": {key: _plain(self.last.get(key)) for key in TOLD},
            "first": strip.first,
            "width": strip.width,
            "used": strip.used,
            "from": start,
            "curves": {name: _curve(values[start : strip.used]) for name, values in strip.curves.items()},
        }
        if tick < 0 or self._told_at > tick:
            told |= {"events": list(self.events), "notable": list(self.notable)}
        if header is not None:
            told |= {"now": self._now(), "acted": self.acted, "num_units": len(header.units)}
            limit = min(header.max_high, int(header.recoverable.sum()) or len(header.units))
            told |= {"max_high": limit, "num_high": int(self._high.sum())}
            rows = slice(start, strip.used)
            counts = (strip.ran if self.acted else strip.would)[rows][:, shown]
            share = np.minimum(np.ceil(counts * (255 / strip.width)), 255).astype(np.uint8)  # 0 means never
            told["heat"] = {"ratio": _packed(encode(strip.ratio[rows][:, shown])), "high": _packed(share)}
            if tick < 0:
                told["units"] = [visible(header.units[unit]) for unit in shown]
        return told

    def _pick(self) -> list[int]:
        """The units of the heat-map: all, or those with the largest ratios so far."""
        num_units = self.strip.ratio.shape[1]
        shown = np.arange(num_units)
        if num_units > MAX_SHOWN:
            peak = self.strip.ratio[: self.strip.used].max(axis=0, initial=-np.inf)
            shown = np.sort(np.argsort(-peak, kind="stable")[:MAX_SHOWN])
        if shown.tolist() != self._shown:
            self._shown = shown.tolist()
            self._choice += 1
        return self._shown

    def _now(self) -> list[dict[str, Any]]:
        """The units to look at: those that are high, then the riskiest."""
        assert self.header is not None
        order = np.lexsort((-self._risk, ~self._high))[: max(NOW_ROWS, min(int(self._high.sum()), 4 * NOW_ROWS))]
        return [
            {
                "unit": visible(self.header.units[i]),
                "ratio": _plain(float(self._ratio[i])),
                "risk": _plain(float(self._risk[i])),
                "nonfinite": bool(np.isinf(self._risk[i])),
                "since": int(self._since[i]) if self._high[i] else None,
            }
            for i in order.tolist()
        ]

    def _total(self) -> int | None:
        total = self.header.total_steps if self.header is not None else None
        steps = self.config.get("steps")
        total = steps if total is None and isinstance(steps, int) else total
        return None if total is None else max(total, self.step)

    def _age(self) -> float | None:
        """Seconds since something was written."""
        times = [stamp[0] for path in (self._metrics.path, self._trace.path) if (stamp := _stamp(path))]
        return round(max(time.time() - max(times) / 1e9, 0.0), 1) if times else None

    def _notes(self) -> list[str]:
        """What a reader must know before believing the figures."""
        notes = [self.problem] if self.problem else []
        if self.header is None and not self.strip.curves and not self.problem:
            notes.append("Nothing has been recorded yet.")
        if self._broken_lines:
            notes.append(f"{self._broken_lines} broken lines of {METRICS} are left out.")
        torn = 0 if self.behind else self._trace.waiting() + self._metrics.waiting()
        if torn and (self._age() or 0) > 30:
            notes.append(f"The last {torn:,} bytes are torn, as after a crash, and are left out.")
        if self.header is not None and len(self.header.units) > len(self._shown):
            notes.append(f"The {len(self._shown)} units with the largest ratios, of {len(self.header.units):,}.")
        return notes


def _next_lines(file: BinaryIO) -> list[bytes]:
    """The next whole lines, about a megabyte of them; pieces of one that is too long are empty ones."""
    lines: list[bytes] = []
    start = file.tell()
    while file.tell() - start < CHUNK and (raw := file.readline(LONGEST_LINE)):
        if raw.endswith(b"\n"):
            lines.append(raw)
        elif len(raw) == LONGEST_LINE:
            lines.append(b"")
        else:  # half written: it waits
            file.seek(-len(raw), os.SEEK_CUR)
            break
    return lines


def _identity(descriptor: int) -> tuple[int, int]:
    stat = os.fstat(descriptor)
    return stat.st_dev, stat.st_ino


def _stamp(path: Path) -> tuple[int, int, int] | None:
    """When a file was written, its length and its number; None if it is not there."""
    try:
        stat = path.stat()
    except OSError:
        return None
    return stat.st_mtime_ns, stat.st_size, stat.st_ino


def _read_json(path: Path) -> Mapping[str, Any]:
    try:
        found = parse_json(path.read_text(encoding="utf-8")) if path.is_file() else {}
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _plain(value: Any) -> float | int | None:
    """A number with six digits; None for what is no finite number."""
    if not is_number(value):
        return None
    return value if isinstance(value, int) else float(f"{value:.6g}")


def _curve(values: np.ndarray) -> dict[str, list[Any]]:
    """Columns of a curve as lists; None where there is no value."""
    count = values[:, COUNT]
    mean = np.divide(values[:, SUM], count, out=np.full(len(values), np.nan), where=count > 0)
    low, high = (np.where(count > 0, values[:, i], np.nan) for i in (LOW, HIGH))
    named = {"low": low, "high": high, "mean": mean}
    lists: dict[str, list[Any]] = {name: [_plain(x) for x in column.tolist()] for name, column in named.items()}
    return lists | {"bad": np.flatnonzero(values[:, BAD]).tolist()}


def _packed(codes: np.ndarray) -> str:
    return base64.b64encode(np.ascontiguousarray(codes).tobytes()).decode("ascii")
