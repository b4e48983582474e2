# SPDX-License-Identifier: Apache-2.0
"""What a person sees while a run goes on.

On a terminal: one bar with step, loss, tokens/s, who is high now, and the time left. Elsewhere (a pipe, a log
file): a plain line every few seconds. Both show each evaluation and, once each, the events that need an eye; every
switch only where it was asked for, because on a noisy run that is a line per step.
"""

import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from trimtab.report.names import visible

if TYPE_CHECKING:
    from trimtab.control.values import Event
    from trimtab.lab.run import Run, StepInfo
    from trimtab.lab.train import Result

NOTABLE = ("nonfinite", "rerun", "persistent", "budget_full")
LINE_SECONDS = 5.0

console = Console(highlight=False, soft_wrap=True, emoji=False)


class Display:
    """Shows a run as it goes; a `Watcher` of the lab's trainer, and a context manager."""

    def __init__(self, label: str = "train", *, switches: bool = False, notes: bool = True) -> None:
        self._label, self._kinds = label, (*(NOTABLE if notes else ()), *(("high",) if switches else ()))
        self._bar: Progress | None = None
        self._task: Any = None
        self._steps = 0
        self._due = 0.0
        self._began, self._first = 0.0, 0
        self._loss: float | None = None

    def __enter__(self) -> "Display":
        if console.is_terminal:
            self._bar = Progress(
                TextColumn("[bold]{task.description}"),
                BarColumn(bar_width=24),
                MofNCompleteColumn(),
                TextColumn("{task.fields[note]}"),
                TimeRemainingColumn(),
                console=console,
                transient=True,
            )
            self._bar.start()
        return self

    def __exit__(self, *exc: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def started(self, run: "Run") -> None:
        """Show where the run begins."""
        self._steps = run.last_step
        for note in run.task.notes():
            self.line(note)
        if run.step:
            self.line(f"resuming at step {run.step}")
        if self._bar is not None:
            self._task = self._bar.add_task(self._label, total=self._steps, completed=run.step, note="")
        self._began, self._first = time.monotonic(), run.step
        self._due = self._began + LINE_SECONDS

    def stepped(self, info: "StepInfo") -> None:
        """Move the bar, or print a line now and then."""
        self._loss = info.loss if self._loss is None else 0.9 * self._loss + 0.1 * info.loss
        high = info.plan.high
        who = f"high: {', '.join(high[:2])}{f' +{len(high) - 2}' if len(high) > 2 else ''}" if high else "all low"
        speed = f"{info.tokens_per_s / 1000:.1f}k" if info.tokens_per_s >= 1000 else f"{info.tokens_per_s:.0f}"
        note = f"loss {self._loss:.3f}  {speed} tok/s  {who}"
        if self._bar is not None:
            self._bar.update(self._task, completed=info.step, note=escape(visible(note)))
        elif time.monotonic() >= self._due or info.step == self._steps:
            self._due = time.monotonic() + LINE_SECONDS
            pace = (time.monotonic() - self._began) / (info.step - self._first)
            left = _clock(pace * (self._steps - info.step))
            self.line(f"{self._label} {info.step}/{self._steps}  {note}  {left} left")

    def evaluated(self, step: int, losses: Mapping[str, float]) -> None:
        """Show an evaluation."""
        high, low = losses["eval_loss_high"], losses["eval_loss_low"]
        self.line(f"step {step}  held-out loss {high:.4f} on the high path, {low:.4f} on the low path")

    def happened(self, event: "Event") -> None:
        """Show what needs an eye, and each switch if asked for."""
        if event.kind in self._kinds:
            self.line(f"step {event.step}  {event.message}")

    def line(self, text: str) -> None:
        """Print one line above the bar."""
        console.print(escape(visible(text)))
        if not console.is_terminal:
            sys.stdout.flush()


def show_result(result: "Result", out: Path) -> None:
    """Say how a run ended, and what to do next."""
    if result.finished_before:
        console.print(f"{out} is finished: {result.steps} steps; --set steps=N with a larger N goes on")
        return
    console.print(f"{result.steps} steps, loss {result.loss:.4f}")
    if result.summary:
        s = result.summary
        console.print(
            f"{s['false_alarms_per_1k']:.1f} alarms per 1,000 steps, {s['promotion_ratio']:.2%} of unit-steps high, "
            f"budget full on {s['hit_maxO']:.1%} of steps, {s['denied']:.0f} denied, {s['nonfinite']:.0f} non-finite"
        )
    console.print(f"next: trimtab report {out}   trimtab replay {out} --set alpha=2")


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}:{rest:02d}"
