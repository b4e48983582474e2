# SPDX-License-Identifier: Apache-2.0
"""The reference trainer: a run from start to end, into a run folder, with evaluations and checkpoints on the way.

`run.py` says what one optimizer step is, `resume.py` which settings a continued run has, `checkpoint.py` what is saved,
`parallel.py` how several ranks share it, docs/runs.md what the folder holds.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trimtab.control.record import CHECKPOINTS, Recorder
from trimtab.control.selections import Selection
from trimtab.control.sinks import Sinks
from trimtab.lab import checkpoint
from trimtab.lab.meeting import meet
from trimtab.lab.parallel import Unwritten, World
from trimtab.lab.resume import merge_settings, stored_settings
from trimtab.lab.run import Run, Silent, Watcher
from trimtab.lab.task import Pretraining, Task


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
    task: type[Task] = Pretraining,
    sinks: Sinks | None = None,
) -> Result:
    """Train from settings (those of `Config`; missing ones have defaults) into a run folder.

    Args:
        resume: continue the run in `out` from its last checkpoint, or start it if there is none. Settings may be
            repeated; a different one is refused by name, except a larger `steps`.
        force: replace the run that is in `out`.
        task: what is trained on what, with settings of its own.
        sinks: where the controller's few values go besides the run folder (`dashboard.py`).

    With the setting `parallel` every rank calls this, with the same arguments. A failure of one ends all: it raises its
    error, with its rank as a note, and the others `RankError`.
    """
    out, watcher = Path(out), Silent() if watcher is None else watcher
    before = stored_settings(out) if resume else None
    kind = settings.get("parallel", (before or {}).get("parallel")) or "none"
    with meet(kind) as world:
        stored, found = world.first(lambda: _found(out, resume))
        reached = None if found is None else int(found[1]["steps"])
        config, steps = merge_settings(stored, settings, reached, task.settings)
        if found is not None and int(found[1]["step"]) >= steps:
            return _finished(out, found[1])
        watcher, sinks = (watcher, sinks) if world.leads else (Silent(), None)
        run = Run(config, watcher, selection, world, task, sinks)
        run.check_faults(settings.get("faults", config.faults))
        if found is None:
            described, replaced = run.describe(), force or stored is not None
            run.record(_recorder(out, world, lambda: Recorder(out, run=described, force=replaced)))
        else:
            path, state = found
            run.check(path, state)
            run.record(_recorder(out, world, lambda: Recorder.resume(out, state["offsets"])))
            run.load(path, state)
        run.last_step = steps
        return _drive(run)


def _found(out: Path, resume: bool) -> tuple[dict[str, Any] | None, tuple[Path, dict[str, Any]] | None]:
    """The settings and the last checkpoint of the run that is continued; None where there is none."""
    stored = stored_settings(out) if resume else None
    return stored, checkpoint.latest(out / CHECKPOINTS) if stored is not None else None


def _recorder(out: Path, world: World, make: Callable[[], Recorder]) -> Recorder | Unwritten:
    return make() if world.leads else Unwritten(out)


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
