# SPDX-License-Identifier: Apache-2.0
"""Scores: what one run folder says about its arm, as a flat table of numbers.

Quality and the controller's counts are those of `trimtab.report`; what is added here needs to know where the faults
were (`faults` in the run's config). A fault window on unit u covers the steps [start, stop):

    detected   u ran high in [start, stop]: the decision from the last faulty step acts in the step after it
    delay      steps from `start` to the first such step; 0 where the batch was run again
    blocked    share of the faulty steps in which u ran high, so that the fault did nothing
    top1, top3 u is among the 1 or 3 units that ran high most often in the passes that knew of the fault (all from
               the second pass on, up to step `stop`), a unit's largest risk deciding between equals, chance between
               what is still equal; units that are faulty at the same time do not compete

Localisation by what *ran* is the same question for every arm, whatever detector it has. A number that has no meaning
for a run (the delay where nothing acts, a fault's where there is none) is None.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from trimtab.lab.model import ModelConfig
from trimtab.report.memory import memory_of
from trimtab.report.read import Run, Trace, read_run
from trimtab.report.summary import summarize

LAST = 20
"""Training losses whose mean is the final one."""
SETTLED = 5
"""First steps whose time is not counted."""


@dataclass(frozen=True)
class Metric:
    """How a score is shown."""

    title: str
    kind: str
    """`loss`, `share`, `number`, `ms` or `bytes`."""
    means: str


METRICS: dict[str, Metric] = {
    "eval_high": Metric("held-out", "loss", "held-out loss on the high path"),
    "eval_low": Metric("on low", "loss", "held-out loss on the low path"),
    "loss": Metric("training", "loss", f"mean training loss of the last {LAST} steps"),
    "gap": Metric(
        "gap closed",
        "share",
        "(low - arm) / (low - top), held-out loss on the high path, per seed; top: see the cell",
    ),
    "gap_low": Metric("gap on low", "share", "the same on the low path"),
    "promotion_ratio": Metric("promoted", "share", "unit-steps that ran high"),
    "hit_maxO": Metric("hit maxO", "share", "steps with the budget full"),
    "denied": Metric("denied", "number", "triggered unit-steps that did not fit in the budget"),
    "false_alarms_per_1k": Metric("alarms/1k", "number", "steps with a trigger, per 1,000 quiet ones"),
    "detected": Metric("detected", "share", "fault windows in which the faulty unit ran high"),
    "delay": Metric("delay", "number", "steps until it did"),
    "blocked": Metric("blocked", "share", "faulty steps in which the faulty unit ran high"),
    "top1": Metric("top-1", "share", "fault windows whose faulty unit ran high most"),
    "top3": Metric("top-3", "share", "fault windows whose faulty unit was among the three that ran high most"),
    "spike_score": Metric("spikes", "share", "steps more than 6 sigma above the mean loss of the 128 before"),
    "exceed_gnmr": Metric("> alpha", "share", "unit-steps with ratio above alpha"),
    "exceed_delta": Metric("> beta", "share", "unit-steps with jump above beta"),
    "nonfinite": Metric("not finite", "number", "steps with a norm that was not finite"),
    "reruns": Metric("reruns", "number", "passes that were dropped and run again"),
    "ms_per_step": Metric("ms/step", "ms", f"mean time of a step, the first {SETTLED} left out"),
    "controller_ms": Metric("control ms", "ms", "median time of the controller's own call"),
    "extra_bytes_mean": Metric("extra mean", "bytes", "activations kept for high units by eq. 67, mean per step"),
    "extra_bytes_peak": Metric("extra peak", "bytes", "the same in the worst step"),
    "extra_bytes_bound": Metric("eq. 68", "bytes", "what eq. 68 allows with the budget full"),
    "peak_bytes": Metric("peak", "bytes", "peak memory of the device, measured; CUDA only"),
}
"""Every score by name, in the order of tables."""
OF_TRIGGER = ("denied", "false_alarms_per_1k", "exceed_gnmr", "exceed_delta")
"""Scores of a rule that triggers; a run whose units are chosen otherwise has none."""
Scores = dict[str, float | None]


class Fault(NamedTuple):
    """One fault window of a run: the unit's index and the steps [start, stop)."""

    unit: int
    start: int
    stop: int


def score_run(folder: str | Path, *, triggers: bool = True) -> Scores:
    """The scores of a finished run; `gap` and `gap_low` need other runs and are left to `gather`.

    Args:
        triggers: False for a run whose units were not chosen by a trigger (random ones, fixed ones).
    """
    run = read_run(folder)
    summary, config = summarize(run), run.config
    acts = config.get("mode") == "act" and config.get("path") == "plan"
    scores: Scores = dict.fromkeys(METRICS)
    for path in ("high", "low"):
        scores[f"eval_{path}"] = _last(run, f"eval_loss_{path}")
    losses = run.column("loss")[1][-LAST:]
    scores["loss"] = _finite(float(losses.mean())) if len(losses) else None
    scores["spike_score"] = summary.losses.spike_score
    scores["ms_per_step"] = _time(run)
    names = ("reruns", *(OF_TRIGGER if triggers else ())) if acts else ()
    for name in ("nonfinite", "controller_ms", *names):
        scores[name] = _finite(summary.metrics.get(name))
    if not acts and config.get("recipe") != "none":
        scores["promotion_ratio"] = float(config.get("path") == "high")
    if run.trace is not None and len(run.trace):
        scores |= seats(run.trace) if acts else {}
        scores |= _memory(run, run.trace, acts=acts)
        found = fault_windows(config, run.trace.units)
        scores |= localise(run.trace, found, worst_risks(run.metrics)) if acts and found else {}
    return scores


def seats(trace: Trace) -> Scores:
    """Promotion and full budgets of the sets that ran; a warm-up in which nothing is decided is left out.

    A report shows what *would* have run where nothing did (a guard that clips instead); here that is zero.
    """
    first = trace.warmup_steps if trace.policy.get("warmup") in ("high", "monitor") else 0
    high = trace.high[trace.steps > first][:, trace.recoverable]
    full = float((high.sum(axis=1) == trace.max_high).mean()) if trace.max_high and len(high) else None
    return {"promotion_ratio": float(high.mean()) if high.size else None, "hit_maxO": full}


def fault_windows(config: Mapping[str, Any], units: Sequence[str]) -> list[Fault]:
    """The fault windows of a run; one on a module belongs to the unit that the module is in."""
    faults = []
    for fault in config.get("faults") or ():
        within = [i for i, unit in enumerate(units) if f"{fault['unit']}.".startswith(f"{unit}.")]
        if within:
            best = max(within, key=lambda i: len(units[i]))
            faults.append(Fault(best, fault["start"], fault["start"] + fault.get("width", 1)))
    return faults


def worst_risks(metrics: Iterable[Mapping[str, Any]]) -> list[tuple[int, str, float]]:
    """Step, unit and risk of everything that triggered; a risk that JSON could not hold was infinite."""
    return [
        (line["step"], event["unit"], math.inf if event.get("risk") is None else float(event["risk"]))
        for line in metrics
        for event in line.get("events", ())
        if event.get("kind") in ("high", "denied") and event.get("unit") is not None
    ]


def localise(trace: Trace, faults: Sequence[Fault], risks: Sequence[tuple[int, str, float]]) -> Scores:
    """Whether, how soon and how surely the faulty units were found; means over the windows."""
    place = {name: i for i, name in enumerate(trace.units)}
    counted = np.append(trace.steps[1:] != trace.steps[:-1], True)  # a pass that was run again does not count
    rows: dict[str, list[float]] = {name: [] for name in ("detected", "delay", "blocked", "top1", "top3")}
    for fault in faults:
        steps, high = trace.steps, trace.high
        when = steps[(steps >= fault.start) & (steps <= fault.stop) & high[:, fault.unit]]
        rows["detected"].append(float(len(when) > 0))
        rows["delay"] += [float(when[0] - fault.start)] if len(when) else []
        faulty = counted & (steps >= fault.start) & (steps < fault.stop)
        rows["blocked"] += [float(high[faulty, fault.unit].mean())] if faulty.any() else []
        after = np.flatnonzero(steps >= fault.start)[1:]  # from the second pass on the decision knew of the fault
        times = high[after[steps[after] <= fault.stop]].sum(axis=0)
        worst = np.zeros(len(trace.units))
        for step, unit, risk in risks:
            if fault.start <= step < fault.stop and unit in place:
                worst[place[unit]] = max(worst[place[unit]], risk)
        rivals = np.ones(len(trace.units), bool)
        rivals[[f.unit for f in faults if f.start < fault.stop and fault.start < f.stop]] = False
        for k in (1, 3):
            rows[f"top{k}"].append(chance_in_top(fault.unit, times, worst, rivals, k))
    return {name: float(np.mean(values)) if values else None for name, values in rows.items()}


def chance_in_top(
    unit: int,
    times: NDArray[np.int64],  # (U,) passes each unit ran high
    worst: NDArray[np.float64],  # (U,) each unit's largest risk
    rivals: NDArray[np.bool_],  # (U,) whom it competes with
    k: int,
) -> float:
    """The chance that a unit is among the first k, by passes high, then by risk, then by lot."""
    if not times[unit] and not worst[unit]:
        return 0.0
    same = times == times[unit]
    ahead = int((rivals & ((times > times[unit]) | (same & (worst > worst[unit])))).sum())
    equal = int((rivals & same & (worst == worst[unit])).sum())
    return min(1.0, max(0.0, (k - ahead) / (equal + 1)))


def _memory(run: Run, trace: Trace, *, acts: bool) -> Scores:
    """Extra bytes by the paper's equations, of the sets that really ran."""
    memory = memory_of(run.config, trace.units, trace.max_high)
    if memory is None:
        return {}
    forced = np.full_like(trace.high, run.config.get("path") == "high")
    memory.add(trace.high if acts else forced)
    names = ("extra_bytes_mean", "extra_bytes_peak", "extra_bytes_bound")
    return {name: value for name, value in memory.metrics().items() if name in names}


def _time(run: Run) -> float | None:
    """Mean milliseconds of a step; a mean, because what an arm does on some steps only is part of its cost."""
    _, speed = run.column("tokens_per_s")
    speed = speed[SETTLED:] if len(speed) > SETTLED else speed
    seq = run.config["seq"] or ModelConfig.size(run.config["model"]).max_seq
    tokens = run.config["batch"] * run.config["accumulate"] * seq
    return _finite(float(np.mean(1000 * tokens / speed))) if len(speed) else None


def _last(run: Run, key: str) -> float | None:
    _, values = run.column(key)
    return _finite(float(values[-1])) if len(values) else None


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
