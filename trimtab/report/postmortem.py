# SPDX-License-Identifier: Apache-2.0
"""Postmortem: a run that went wrong, read from what it logged.

    found = postmortem(read_log("tb/run1"))
    print(found.verdict)
    print("\\n".join(lines(found)))

From the loss alone: where it left its range, how high it went, whether it came back (`spikes`). With the global norm:
when that left its own range in the `LOOK` steps before, which is the warning there was, and how often it does so where
nothing happens, which is what the warning is worth. With the norms of single units: who left first, in order. Every
norm is held against the median and spread of its own 128 values before, on a log scale; a detector with a memory, which
could have acted, is what `trimtab sweep` tries on the same norms.

What cannot be known is said: from a global norm never which unit it was, and from norms alone never whether low
precision was the cause. The last lines are the code that records the rest next time.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trimtab.errors import TrimtabError
from trimtab.report.imports import Curve, Log
from trimtab.report.markdown import code, escaped
from trimtab.report.names import visible
from trimtab.report.read import Trace
from trimtab.report.spikes import BEFORE, Spike, out_of_range, spikes
from trimtab.report.verdict import brief, percent, plural

LOOK = 50
"""Logged steps before a spike in which a norm that leaves its range is a warning."""
SHOWN = 5
UNITS = 10
NEXT_TIME = (
    'recorder = trimtab.Recorder("runs/next")  # before the loop',
    'controller = trimtab.Controller(model, mode="observe", total_steps=total_steps, recorder=recorder)',
    "controller.step(), recorder.log(step, loss=loss.item())  # after loss.backward(), before optimizer.step()",
)


@dataclass(frozen=True)
class Left:
    """A unit that left its range before a spike."""

    unit: str
    step: int
    lead: int
    """Steps before the spike."""
    ratio: float
    """Largest norm up to the spike, in times the median before; inf where it was not finite."""


@dataclass(frozen=True)
class Case:
    """One spike, and what came before it."""

    step: int
    last: int
    level: float
    peak: float
    nonfinite: int
    returned: bool
    warning: Left | None
    """What the global norm did; None where it stayed in its range, or was not logged."""
    units: tuple[Left, ...]
    """Units by who left first, then by how far; only of the first spike and the gravest."""


@dataclass(frozen=True, eq=False)
class Postmortem:
    """What a log tells of its own end."""

    log: Log
    cases: tuple[Case, ...]
    """In order of steps."""
    first_step: int
    last_step: int
    by_chance: float | None
    """How often the global norm leaves its range within as many steps, where nothing happens."""
    poisoned: Left | None
    """The first norm of a unit that was not finite."""
    verdict: str

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain values; what is not finite is None."""

        def plain(left: Left | None) -> dict[str, Any] | None:
            if left is None:
                return None
            return {**left.__dict__, "ratio": left.ratio if np.isfinite(left.ratio) else None}

        def case(one: Case) -> dict[str, Any]:
            numbers = {k: v if np.isfinite(v) else None for k, v in (("level", one.level), ("peak", one.peak))}
            rest = {"warning": plain(one.warning), "units": [plain(left) for left in one.units]}
            return {**one.__dict__, **numbers, **rest}

        told = {"run": self.log.name, "first_step": self.first_step, "last_step": self.last_step}
        told |= {"verdict": self.verdict, "spikes": [case(one) for one in self.cases], "by_chance": self.by_chance}
        told |= {"first_nonfinite_norm": plain(self.poisoned), "notes": list(self.log.notes)}
        return told | {"unknown": list(unknown(self)), "next_time": list(NEXT_TIME)}


def postmortem(log: Log) -> Postmortem:
    """Find the spikes of a log's loss and what its norms did before them; without a loss, those of the global norm."""
    curve = log.loss or log.grad_norm
    if curve is None and not log.rows:
        raise TrimtabError(f"{visible(log.name)} has neither a loss nor gradient norms: there is nothing to look at")
    trace = log.trace() if log.per_unit and log.rows else None
    found = [] if curve is None else spikes(curve.values)
    cases = [] if curve is None else [_case(curve, spike) for spike in found]
    chance = None
    if log.loss is not None and log.grad_norm is not None:
        out, ratio = out_of_range(log.grad_norm.values)
        chance = _by_chance(log.grad_norm, out, cases)
        warnings = [_left("global norm", log.grad_norm.steps, out, ratio, case.step) for case in cases]
        cases = [replace(case, warning=warning) for case, warning in zip(cases, warnings, strict=True)]
    poisoned = None
    if trace is not None:
        looked = {case.step for case in (*cases[:1], *_gravest(cases))}
        cases = [replace(case, units=_units(trace, case.step)) if case.step in looked else case for case in cases]
        bad = trace.seen & ~np.isfinite(trace.norms)
        if bad.any():
            row, unit = np.argwhere(bad)[0]
            poisoned = Left(trace.units[unit], int(trace.steps[row]), 0, float("inf"))
    known = [one.steps for one in (log.loss, log.grad_norm, trace) if one is not None]
    ends = min(int(steps[0]) for steps in known), max(int(steps[-1]) for steps in known)
    result = Postmortem(log, tuple(cases), *ends, chance, poisoned, "")
    return replace(result, verdict=" ".join(_sentences(result)))


def _case(curve: Curve, spike: Spike) -> Case:
    steps = int(curve.steps[spike.first]), int(curve.steps[spike.last])
    return Case(*steps, spike.level, spike.peak, spike.nonfinite, spike.returned, None, ())


def _units(trace: Trace, at: int) -> tuple[Left, ...]:
    """The units that left their range before a spike, by who left first, then by how far."""
    end = int(np.searchsorted(trace.steps, at, side="right"))
    start = max(end - 1 - LOOK - 2 * BEFORE, 0)
    rows, since = slice(start, end), max(end - 1 - LOOK - start, 0)
    steps, norms = trace.steps[rows], np.where(trace.seen[rows], trace.norms[rows], 0.0)  # a zero says nothing
    found = [_left(name, steps, *out_of_range(norms[:, u], since), at) for u, name in enumerate(trace.units)]
    return tuple(sorted((one for one in found if one), key=lambda one: (one.step, -one.ratio)))


def _by_chance(norm: Curve, out: NDArray[np.bool_], cases: list[Case]) -> float | None:
    """The share of quiet stretches of `LOOK` steps in which the global norm is out of its range."""
    calm = np.ones(len(out), bool)
    for case in cases:
        first, last = np.searchsorted(norm.steps, (case.step, case.last))
        calm[max(first - LOOK, 0) : last + 1 + LOOK] = False
    if len(out) <= LOOK:
        return None
    window = np.ones(LOOK + 1, int)
    fired, whole = np.convolve(out, window, "valid") > 0, np.convolve(calm, window, "valid") == LOOK + 1
    return float(fired[whole].mean()) if whole.any() else None


def _left(
    name: str, steps: NDArray[np.int64], out: NDArray[np.bool_], ratio: NDArray[np.float64], at: int
) -> Left | None:
    """When a norm left its range in the `LOOK` logged steps up to a spike."""
    end = int(np.searchsorted(steps, at, side="right"))
    start = max(end - 1 - LOOK, 0)
    hits = np.flatnonzero(out[start:end])
    if not len(hits):
        return None
    first = start + int(hits[0])
    return Left(name, int(steps[first]), at - int(steps[first]), float(np.nanmax(ratio[first:end])))


def _sentences(found: Postmortem) -> Iterator[str]:
    log, what = found.log, "loss" if found.log.loss is not None else "global norm"
    if not found.cases:
        tail = "" if log.loss is not None or log.grad_norm is not None else " (no loss was logged)"
        yield f"The {what} never left its range between steps {found.first_step:,} and {found.last_step:,}{tail}."
        if found.poisoned:
            yield f"A norm was not finite at step {found.poisoned.step:,}, in {brief(visible(found.poisoned.unit))}."
        return
    first = found.cases[0]
    bad = first.nonfinite and not np.isfinite(first.peak)
    how = "was not finite" if bad else f"rose from {first.level:.4g} to {first.peak:.4g}"
    end = "" if first.returned else ", and did not come back"
    more = f", the first of {len(found.cases)} times" if len(found.cases) > 1 else ""
    yield f"The {what} {how} at step {first.step:,}{end}{more}."
    if log.loss is not None and log.grad_norm is not None:
        warned = [case.warning for case in found.cases if case.warning and case.warning.lead > 0]
        chance = (
            "" if found.by_chance is None else f" (by chance it does so before {percent(found.by_chance)} of steps)"
        )
        if warned:
            lead = float(np.median([one.lead for one in warned]))
            yield (
                f"The global norm left its range before {len(warned)} of {plural(len(found.cases), 'spike')}, "
                f"{lead:g} steps ahead{chance}."
            )
        else:
            yield "The global norm gave no warning: it left its range in no step before."
    if first.units:
        who = first.units[0]
        yield f"The first unit to leave its range was {brief(visible(who.unit))}, {_when(who)}."
    elif log.per_unit and log.rows:
        yield "No single unit left its range before it."


def unknown(found: Postmortem) -> Iterator[str]:
    """What this log cannot tell."""
    log = found.log
    if log.loss is None:
        yield "when the loss went wrong: no loss was logged"
    if not log.per_unit:
        yield "which unit it began in, and whether one or all went: that takes the norm of every unit"
        yield "whether a controller would have caught it: a policy needs the norms of units to choose among"
    if log.grad_norm is None:
        yield "whether the gradient gave a warning: its global norm was not logged"
    if not log.ours:
        yield "whether low precision was the cause: that takes the same steps on the high path (trimtab diagnose)"


def lines(found: Postmortem) -> Iterator[str]:
    """The whole account as plain lines."""
    yield found.verdict
    yield from (f"- {visible(note)}" for note in found.log.notes)
    for case in _gravest(found.cases):
        yield ""
        yield _case_line(case, found.log)
        if case.warning:
            yield f"  global norm: {_left_line(case.warning)}"
        yield from (f"  {n}. {visible(one.unit)}: {_left_line(one)}" for n, one in enumerate(case.units[:UNITS], 1))
        if len(case.units) > UNITS:
            yield f"  and {len(case.units) - UNITS:,} more units"
    if len(found.cases) > SHOWN:
        yield f"(the {SHOWN} gravest of {len(found.cases):,})"
    told = list(unknown(found))
    if told:
        yield ""
        yield "What this log cannot tell:"
        yield from (f"- {line}" for line in told)
    if not (found.log.ours and found.log.loss is not None):
        yield ""
        yield "Three lines record it next time, and change nothing else in the run:"
        yield from (f"    {line}" for line in NEXT_TIME)


def to_markdown(found: Postmortem) -> str:
    """The same for an issue or a chat."""
    out = [f"### Postmortem: {code(found.log.name)}", "", escaped(found.verdict), ""]
    out += [f"- {escaped(note)}" for note in found.log.notes]
    for case in _gravest(found.cases):
        out += ["", f"**{escaped(_case_line(case, found.log))}**", ""]
        if case.warning:
            out.append(f"- global norm: {escaped(_left_line(case.warning))}")
        if case.units:
            out += ["", "| | unit | left its range | largest |", "|--:|---|---|--:|"]
            out += [
                f"| {n} | {code(one.unit, table=True)} | step {one.step:,}, {_when(one)} | {_times(one)} |"
                for n, one in enumerate(case.units[:UNITS], 1)
            ]
    told = list(unknown(found))
    out += ["", "What this log cannot tell:", "", *(f"- {escaped(line)}" for line in told)] if told else []
    if not (found.log.ours and found.log.loss is not None):
        out += ["", "Three lines record it next time:", "", "```python", *NEXT_TIME, "```"]
    return "\n".join(out) + "\n"


def _gravest(cases: Sequence[Case]) -> list[Case]:
    """The cases to show, in order of steps: those without a way back first, then the highest."""

    def weight(case: Case) -> tuple:
        rise = case.peak / case.level if case.level > 0 and np.isfinite(case.peak) else np.inf
        return (case.returned, not case.nonfinite, -rise)

    return sorted(sorted(cases, key=weight)[:SHOWN], key=lambda case: case.step)


def _case_line(case: Case, log: Log) -> str:
    what = "loss" if log.loss is not None else "global norm"
    if np.isfinite(case.peak):
        rise = (
            f"{what} {case.level:.4g} -> {case.peak:.4g}"
            if np.isfinite(case.level)
            else f"{what} up to {case.peak:.4g}"
        )
        rise += f", {case.nonfinite:,} not finite" if case.nonfinite else ""
    else:
        rise = f"{what} not finite in {plural(case.nonfinite, 'step')}"
    end = f"back after step {case.last:,}" if case.returned else "not back by the end"
    return f"step {case.step:,}: {rise}, {end}"


def _left_line(left: Left) -> str:
    return f"left its range at step {left.step:,}, {_when(left)}; largest {_times(left)}"


def _when(left: Left) -> str:
    return "in the same step" if left.lead == 0 else f"{plural(left.lead, 'step')} before"


def _times(left: Left) -> str:
    return f"{left.ratio:.3g} times its median" if np.isfinite(left.ratio) else "not finite"
