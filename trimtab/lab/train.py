# SPDX-License-Identifier: Apache-2.0
"""The reference trainer: a run from start to end, into a run folder, with evaluations and checkpoints on the way.

`run.py` says what one optimizer step is, `resume.py` which settings a continued run has, `checkpoint.py` what is saved,
docs/runs.md what the folder holds.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trimtab.control.record import CHECKPOINTS, Recorder
from trimtab.control.selections import Selection
from trimtab.lab import checkpoint
from trimtab.lab.resume import merge_settings, stored_settings
from trimtab.lab.run import Run, Silent, Watcher


@dataclass(frozen=True)
class Result:
    """How a run ended."""

    folder: Path
    steps: int
    loss: float
    """Mean training loss of the last 20 steps that this process ran; NaN if it ran none."""
    eval_loss_high: float
    eval_loss_low: float
    summary: dict[str, float]
    finished_before: bool = False
    """The run had been finished already; nothing was done."""


def train(
    settings: Mapping[str, Any],
    out: str | Path,
    *,
    resume: bool = False,
    force: bool = False,
    watcher: Watcher | None = None,
    selection: Selection | None = None,
) -> Result:
    """Train from settings (those of `Config`; missing ones have defaults) into a run folder.

    Args:
        resume: continue the run in `out` from its last checkpoint, or start it if there is none. Settings may be
            repeated; a different one is refused by name, except a larger `steps`.
        force: replace the run that is in `out`.
    """
    out, watcher = Path(out), Silent() if watcher is None else watcher
    stored = stored_settings(out) if resume else None
    found = checkpoint.latest(out / CHECKPOINTS) if stored is not None else None
    path, state = found if found is not None else (None, None)
    config, steps = merge_settings(stored, settings, None if state is None else int(state["steps"]))
    if state is not None and int(state["step"]) >= steps:
        return _finished(out, state)
    run = Run(config, watcher, selection)
    run.check_faults(settings.get("faults", config.faults))
    if path is None or state is None:
        run.record(Recorder(out, run=run.describe(), force=force or stored is not None))
    else:
        run.check(path, state)
        run.record(Recorder.resume(out, state["offsets"]))
        run.load(state)
    run.last_step = steps
    return _drive(run)


def _drive(run: Run) -> Result:
    """From the run's step to the last, with evaluations and checkpoints on the way."""
    config, recent = run.config, []
    losses = {"eval_loss_high": math.nan, "eval_loss_low": math.nan}
    run.watcher.started(run)
    with run.recorder:
        while run.step < run.last_step:
            info = run.train_step()
            recent = [*recent[-19:], info.loss]
            run.watcher.stepped(info)
            last = run.step == run.last_step
            if last or (config.eval_every and run.step % config.eval_every == 0):
                losses = run.evaluate()
                run.watcher.evaluated(run.step, losses)
            if last or (config.checkpoint_every and run.step % config.checkpoint_every == 0):
                run.save()
    return Result(
        folder=run.recorder.folder,
        steps=run.step,
        loss=sum(recent) / len(recent),
        eval_loss_high=losses["eval_loss_high"],
        eval_loss_low=losses["eval_loss_low"],
        summary=run.controller.summary() if config.mode != "off" else {},
    )


def _finished(folder: Path, state: Mapping[str, Any]) -> Result:
    nan = math.nan
    return Result(folder, int(state["step"]), nan, nan, nan, {}, finished_before=True)
