# SPDX-License-Identifier: Apache-2.0
"""A museum of failures: public threads about broken low-precision runs, each as a small run of the reference trainer.

Each exhibit (`trimtab.lab.exhibits`) trains a micro model in five arms and some of its own, over paired seeds:

    high      every unit on its high path, which no defect reaches
    low       every unit on its low path: nobody helps, and a non-finite step is taken
    control   preset `steady`, at most two units high; a non-finite step is skipped
    random    random units, as many in each step as control had; a non-finite step is skipped here too
    repair    preset `repair` with the detector `source`, as many units; the batch of a fault is run again

and asks: does low die, or what does it lose; who saves it; which unit is blamed, and after how many steps. The defect
comes from the thread's mechanism wherever the emulation can express it. Where control does not help, the row says so.
"""

import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from trimtab.checks import is_whole, require
from trimtab.control.record import TRACE, Recorder
from trimtab.control.selections import RandomUnits
from trimtab.errors import NonFiniteError
from trimtab.lab.config import Config
from trimtab.lab.exhibits import EXHIBITS, Arm, Exhibit
from trimtab.lab.intervals import interval
from trimtab.lab.run import Run, Silent, Watcher
from trimtab.linear.linear import switch_linears
from trimtab.report.read import Trace, read_trace

Watch = Callable[[str], AbstractContextManager[Watcher]]

NEAR = 10
"""Steps after the first bad one in which blame is laid."""


@dataclass(frozen=True)
class Outcome:
    """How one arm of one exhibit ended, with one seed."""

    survived: int
    """Steps before the first that could not be survived; all of them if there was none."""
    steps: int
    """Steps that were wanted."""
    loss: float
    """Held-out loss on the high path; NaN for a run that died."""
    losses: tuple[float, ...]
    """Training loss of each step."""
    begins: int
    """The first bad step."""
    skipped: int
    """Steps skipped as not finite."""
    promotion: float
    """Share of unit-steps that ran high, from the exhibit's first bad step on."""
    blamed: str | None
    """The unit that ran high most in the ten steps after the first bad one."""
    delay: int | None
    """Steps from the first bad one to the first in which a guilty unit ran high; None if none did in ten."""
    ms: float
    """Milliseconds per step."""
    counts: tuple[int, ...] = ()
    """Units high in each step."""

    @property
    def died(self) -> bool:
        """Whether the run ended early."""
        return math.isnan(self.loss)


def run_museum(
    out: Path,
    *,
    seeds: int = 3,
    watch: Watch | None = None,
    exhibits: Sequence[Exhibit] = EXHIBITS,
    settings: Mapping[str, Any] | None = None,
) -> list[dict[str, Any]]:
    """Run every exhibit into folders below `out`; returns one row per case and arm, over all seeds.

    Args:
        seeds: how many, from 0; they are paired across the arms.
        watch: what looks on, for the name of each run.
        settings: of the trainer, on top of each exhibit's own: other text, shorter runs.
    """
    require(is_whole(seeds, 1), "seeds must be a whole number of at least 1", seeds)
    rows = []
    for exhibit in exhibits:
        outcomes: dict[str, list[Outcome]] = {arm.name: [] for arm in exhibit.arms}
        for seed in range(seeds):
            counts: tuple[int, ...] = ()
            begins = exhibit.begins
            for arm in exhibit.arms:
                name = f"{exhibit.name}/{arm.name}-{seed}"
                with nullcontext(Silent()) if watch is None else watch(name) as watcher:
                    outcome = run_arm(
                        exhibit, arm, out / name, watcher, {"seed": seed, **(settings or {})}, begins, counts
                    )
                counts = outcome.counts if arm.name == "control" else counts
                if arm.name == "low" and outcome.died:
                    begins = outcome.survived + 1  # where low died, the others begin to suffer
                outcomes[arm.name].append(outcome)
        rows += [row(exhibit, arm, outcomes) for arm in exhibit.arms]
    return rows


def run_arm(
    exhibit: Exhibit,
    arm: Arm,
    folder: Path,
    watcher: Watcher,
    settings: Mapping[str, Any],
    begins: int = 1,
    counts: Sequence[int] = (),
) -> Outcome:
    """Train one arm with one seed until its end or its death; delays are counted from step `begins`."""
    config = Config.from_dict({"device": "cpu", "checkpoint_every": 0, **exhibit.settings, **arm.settings, **settings})
    run = Run(config, watcher)
    before = (arm.prepare or exhibit.prepare)(run, arm.broken)
    if arm.name == "random":
        units = len({module.switch.name for module in switch_linears(run.model)})
        run.selection = RandomUnits(list(counts), np.ones(units, bool), seed=config.seed)
    described = {**run.describe(), "museum": exhibit.name, "thread": exhibit.thread, "arm": arm.name}
    run.record(Recorder(folder, run=described, force=True))
    watcher.started(run)
    started, skipped, alive, losses = time.perf_counter(), 0, True, []
    with run.recorder:
        while alive and run.step < config.steps:
            if before is not None:
                before(run.step + 1)
            try:
                info = run.train_step()
            except NonFiniteError:  # it tried `max_nonfinite` times
                skipped += 1
                alive = False
                break
            watcher.stepped(info)
            losses.append(info.loss)
            skipped += info.plan.nonfinite
            alive = config.mode == "act" or not info.plan.nonfinite  # nothing skips the step where nobody acts
        seconds = (time.perf_counter() - started) / max(run.step, 1)
        loss = run.evaluate()["eval_loss_high"] if alive else math.nan
    fatal = config.build_policy().max_nonfinite if config.mode == "act" else 1
    survived = run.step if alive else run.step - fatal
    found = _blame(read_trace(folder / TRACE), exhibit, begins)
    return Outcome(
        survived=survived,
        steps=config.steps,
        loss=loss,
        losses=tuple(losses),
        begins=begins,
        skipped=skipped,
        ms=1000 * seconds,
        **found,
    )


def _blame(trace: Trace, exhibit: Exhibit, begins: int) -> dict[str, Any]:
    """Read from a trace who ran high, and when."""
    last = np.flatnonzero(np.append(trace.steps[1:] != trace.steps[:-1], True))  # of a batch run twice, the second
    high, steps = trace.high[last], trace.steps[last]
    bad = steps >= begins
    near = bad & (steps <= begins + NEAR)
    soon = high[near].sum(axis=0)
    guilty = np.array([exhibit.guilty(name) for name in trace.units])
    acted = steps[near & high[:, guilty].any(axis=1)]
    return {
        "promotion": float(high[bad].mean()) if bad.any() else 0.0,
        "blamed": trace.units[int(np.argmax(soon))] if soon.any() else None,
        "delay": int(acted[0]) - begins if len(acted) else None,
        "counts": tuple(high.sum(axis=1).tolist()),
    }


def row(exhibit: Exhibit, arm: Arm, outcomes: dict[str, list[Outcome]]) -> dict[str, Any]:
    """One row of the museum's table; None where there is no number, as for the loss of an arm that died."""
    own, high, low = outcomes[arm.name], outcomes["high"], outcomes["low"]
    lost = [a.loss - b.loss for a, b in zip(own, high, strict=True)]
    delays = [one.delay for one in own if one.delay is not None]
    blamed = Counter(one.blamed for one in own if one.blamed is not None).most_common(1)
    table = {
        "case": exhibit.name,
        "thread": exhibit.thread,
        "what": exhibit.what,
        "arm": arm.name,
        "seeds": len(own),
        "died": sum(one.died for one in own),
        "steps": own[0].steps,
        "survived": float(np.mean([one.survived for one in own])),
        "loss": float(np.mean([one.loss for one in own])),
        "lost": float(np.mean(lost)),
        "interval": half_width(lost),
        "jump": float(np.mean([jump(a, b) for a, b in zip(own, high, strict=True)])),
        "hurt": hurt(lost),
        "saved": arm.name not in ("high", "low") and saved(own, high, low),
        "blamed": blamed[0][0] if blamed else None,
        "delay": float(np.mean(delays)) if delays else None,
        "skipped": float(np.mean([one.skipped for one in own])),
        "promotion": float(np.mean([one.promotion for one in own])),
        "ms": float(np.mean([one.ms for one in own])),
        "note": "; ".join(filter(None, (arm.note, exhibit.note if arm.name == "low" else ""))),
    }
    return {key: None if isinstance(value, float) and math.isnan(value) else value for key, value in table.items()}


def jump(own: Outcome, high: Outcome) -> float:
    """How far the training loss rose over that of high in the same step, at most, soon after the first bad one."""
    near = slice(own.begins - 1, own.begins + NEAR)
    rises = [a - b for a, b in zip(own.losses[near], high.losses[near], strict=False)]
    return float(np.max(rises)) if rises else math.nan  # numpy's maximum keeps NaN


def half_width(lost: Sequence[float]) -> float:
    """Half the 95 % interval of the mean of paired differences; NaN for one seed, or after a death."""
    return math.nan if any(map(math.isnan, lost)) else interval(lost).half


def saved(own: Sequence[Outcome], high: Sequence[Outcome], low: Sequence[Outcome]) -> bool:
    """Whether an arm wins back what low loses.

    Where low dies in some seed: it lives in all, and takes more than half of its steps. Where low only loses: it loses
    less than half of that. Where low loses nothing for sure, there is nothing to save.
    """
    lost, low_lost = ([a.loss - b.loss for a, b in zip(arm, high, strict=True)] for arm in (own, low))
    if any(one.died or one.skipped > one.steps / 2 for one in own) or not hurt(low_lost):
        return False
    return any(one.died for one in low) or float(np.mean(lost)) < 0.5 * float(np.mean(low_lost))


def hurt(lost: Sequence[float]) -> bool:
    """Whether an arm died in some seed, or its loss over high is surely above zero."""
    width = half_width(lost)
    return any(map(math.isnan, lost)) or float(np.mean(lost)) - (0.0 if math.isnan(width) else width) > 0
