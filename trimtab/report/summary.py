# SPDX-License-Identifier: Apache-2.0
"""Summary: the numbers of a run, and what they say in one sentence.

False alarms come first, because a controller that fires on a quiet run is switched off. A false alarm is a
pass on which some unit triggers while no fault is known: every pass of an ordinary run, and where the config
lists `faults`, every pass outside their windows and the 20 steps after each. The paper's metrics
(promotion_ratio, hit_maxO, ...) are counted by `trimtab.control.tally` on the sets that really ran.

    summarize(folder or Run)      Summary: metrics, offenders, keep-high list, losses, verdict

An offender is a unit that ran high or was refused. It is persistent when it came back within
`repeat_within` steps of its release `persistent_after` times (20 and 5 unless the policy says otherwise): a
lasting problem that a lock cannot solve. Persistent offenders are the list to keep high for good; where
there are none, the few units with the most steps high are suggested.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trimtab.control.advance import State
from trimtab.control.record import TRACE
from trimtab.control.tally import Tally
from trimtab.report.memory import memory_of
from trimtab.report.passes import Passes, Rules, passes, replayed, rules_of
from trimtab.report.read import Run, Trace, iter_trace, read_run, scan_trace
from trimtab.report.verdict import sentences

AFTERMATH = 20
"""Steps after a known fault that do not count as quiet."""
MAX_REPEATS = 10_000
SPIKE_WINDOW, SPIKE_SIGMAS = 128, 6.0
SUGGESTED = 5
"""How many units a keep-high list names when none is persistent."""


@dataclass(frozen=True)
class Offender:
    """A unit that ran high or was refused."""

    unit: str
    times_high: int
    steps_high: int
    denied: int
    worst_risk: float
    worst_step: int
    returns: int
    """How often it triggered again soon after its release."""
    persistent: bool
    median_ratio: float


@dataclass(frozen=True)
class Losses:
    """What the metrics say about quality."""

    first: float | None = None
    last: float | None = None
    nonfinite: int = 0
    best_evals: Mapping[str, float] = field(default_factory=dict)
    spike_score: float | None = None
    """Share of steps more than 6 sigma above the mean of the 128 before; None for fewer losses than that."""


@dataclass(frozen=True)
class Summary:
    """The numbers of one run."""

    metrics: Mapping[str, float]
    """Spec names, false alarms first; empty without a trace."""
    num_units: int
    num_recoverable: int
    num_passes: int
    quiet_passes: int
    max_high: int
    """The budget as a count, at most all units that can run high."""
    acted: bool
    """False: nothing was executed, the figures say what would have been."""
    times_high: int
    units_high: int
    offenders: tuple[Offender, ...]
    """By steps high, then by refusals, then by worst risk."""
    keep_high: tuple[str, ...]
    median_ratios: Mapping[str, float]
    first_nonfinite: tuple[int, str] | None
    losses: Losses
    verdict: str


def summarize(run: Run | str | Path) -> Summary:
    """Summarize a run; given a folder, its trace is streamed."""
    if not isinstance(run, Run):
        run = read_run(run, with_trace=False)
    path = run.folder / TRACE
    if run.trace is not None:
        header, acted, blocks = run.trace, bool(run.trace.high.any()), iter([run.trace])
    elif path.is_file():
        scan = scan_trace(path)
        header, acted, blocks = scan.header, scan.acted, iter_trace(path)
    else:
        return Counts(None, None, run.config).summary(run)
    rules = rules_of(header, acted=acted)
    counts = Counts(header, rules, run.config)
    for block in passes(rules, replayed(rules, blocks)):
        counts.add(block)
    return counts.summary(run)


class Counts:
    """Adds up blocks of passes, in memory that grows by a few bytes a pass."""

    def __init__(self, header: Trace | None, rules: Rules | None, config: Mapping[str, Any]) -> None:
        self.header, self.rules = header, rules
        self.config = config
        num_units = 0 if header is None else len(header.units)
        if rules is not None:
            opening = State.fresh(rules.recoverable, rules.policy, rules.limits).ledger.high
            self.tally = Tally(rules.recoverable, opening, rules.policy, rules.limits)
        max_high = 0 if rules is None else rules.limits.max_high
        self.memory = None if header is None else memory_of(config, header.units, max_high)
        self.rows = 0
        self.alarmed: list[NDArray[np.bool_]] = []
        self.quiet: list[NDArray[np.bool_]] = []
        self.peaks: list[NDArray[np.float32]] = []  # (T, 2) largest finite ratio and jump of each pass
        self.times_high, self.steps_high, self.denied, self.returns = np.zeros((4, num_units), np.int64)
        self.worst = np.zeros(num_units)
        self.worst_step = np.zeros(num_units, np.int64)
        self.triggered = np.zeros(num_units, bool)
        self.first_nonfinite: tuple[int, str] | None = None
        self._was_high = np.zeros((1, num_units), bool)
        self._last_high = np.full((1, num_units), -1, np.int64)

    def add(self, block: Passes) -> None:
        """Count a block."""
        assert self.rules is not None
        assert self.header is not None
        alarmed = self.tally.add(block.verdict, block.ran)
        self.alarmed.append(alarmed)
        self.quiet.append(quiet_steps(block.steps, self.config))
        self.peaks.append(np.stack([_peak(block.verdict.risk.ratio), _peak(block.verdict.risk.jump)], axis=1))
        self.triggered |= (block.verdict.risk.risk > 1).any(axis=0)
        self.denied += block.refused.sum(axis=0)
        if self.memory is not None:
            self.memory.add(block.ran)
        self._count_entries(block.ran & block.ruled[:, None])
        worst, rows = block.verdict.risk.risk.max(axis=0), block.verdict.risk.risk.argmax(axis=0)
        better = worst > self.worst
        self.worst[better] = worst[better]
        self.worst_step[better] = block.steps[rows[better]]
        if self.first_nonfinite is None and block.poisoned.any():
            row, unit = np.argwhere(block.poisoned)[0]
            self.first_nonfinite = (int(block.steps[row]), self.header.units[unit])
        self.rows += len(block.steps)

    def _count_entries(self, ran: NDArray[np.bool_]) -> None:
        """Count steps high, entries, and entries that came soon after a release."""
        assert self.rules is not None
        entered = ran & ~np.concatenate([self._was_high, ran])[:-1]
        index = self.rows + np.arange(len(ran))[:, None]
        last_high = np.maximum.accumulate(np.concatenate([self._last_high, np.where(ran, index, -1)]))
        soon = (last_high[:-1] >= 0) & (index - last_high[:-1] <= self.rules.policy.repeat_within)
        self.times_high += entered.sum(axis=0)
        self.steps_high += ran.sum(axis=0)
        self.returns += (entered & soon).sum(axis=0)
        self._was_high, self._last_high = ran[-1:], last_high[-1:]

    def summary(self, run: Run) -> Summary:
        """Close the books."""
        losses = _losses(run)
        if self.header is None or self.rules is None:
            text = "There is no trace in this folder, so only what was logged can be shown."
            return Summary({}, 0, 0, 0, 0, 0, False, 0, 0, (), (), {}, None, losses, text)
        alarmed, quiet = _cat(self.alarmed, bool), _cat(self.quiet, bool)
        metrics = self.tally.summary(quiet, alarmed) if self.rows else {}
        metrics |= {} if self.memory is None else self.memory.metrics()
        times = run.column("controller_ms")[1]
        metrics |= {"controller_ms": float(np.nanmedian(times))} if np.isfinite(times).any() else {}
        medians = self.tally.median_ratios()
        offenders = self._offenders(medians)
        summary = Summary(
            metrics=metrics,
            num_units=len(self.header.units),
            num_recoverable=int(self.rules.recoverable.sum()),
            num_passes=self.rows,
            quiet_passes=int(quiet.sum()),
            max_high=min(self.rules.limits.max_high, int(self.rules.recoverable.sum())),
            acted=self.rules.acted or not self.times_high.any(),
            times_high=int(self.times_high.sum()),
            units_high=int((self.times_high > 0).sum()),
            offenders=offenders,
            keep_high=_keep_high(offenders),
            median_ratios=dict(zip(self.header.units, medians.tolist(), strict=True)),
            first_nonfinite=self.first_nonfinite,
            losses=losses,
            verdict="",
        )
        return replace(summary, verdict=" ".join(sentences(summary, self._too_low(quiet) if self.rows else "")))

    def _offenders(self, medians: NDArray[np.float64]) -> tuple[Offender, ...]:
        assert self.header is not None
        assert self.rules is not None
        rows = [
            Offender(
                unit=self.header.units[i],
                times_high=int(self.times_high[i]),
                steps_high=int(self.steps_high[i]),
                denied=int(self.denied[i]),
                worst_risk=float(self.worst[i]),
                worst_step=int(self.worst_step[i]),
                returns=int(self.returns[i]),
                persistent=bool(self.returns[i] >= self.rules.policy.persistent_after),
                median_ratio=float(medians[i]),
            )
            for i in np.flatnonzero(self.times_high + self.denied)
        ]
        return tuple(sorted(rows, key=lambda o: (-o.steps_high, -o.denied, -o.worst_risk)))

    def _too_low(self, quiet: NDArray[np.bool_]) -> str:
        """Which threshold fires too easily, and the value that quiet passes would call for."""
        assert self.rules is not None
        policy = self.rules.policy
        peaks = np.concatenate(self.peaks)[AFTERMATH:][quiet[AFTERMATH:]]
        if len(peaks) < 50 or self.triggered.sum() <= 3 * max(self.rules.limits.max_high, 1):
            return ""
        name, value, column = "alpha", policy.alpha, peaks[:, 0]
        if policy.beta is not None and (peaks[:, 1] > policy.beta).sum() > (peaks[:, 0] > policy.alpha).sum():
            name, value, column = "beta", policy.beta, peaks[:, 1]
        column = column[np.isfinite(column)]
        if not len(column):
            return ""
        per = 1000 if len(column) >= 2000 else 100  # a rarer step than these passes can show is no quantile
        share = (1 if policy.beta is None else 0.5) / per
        level = math.ceil(100 * float(np.quantile(column, 1 - share, method="higher"))) / 100
        return f"{name} {value:g} is too low for these norms; {level:g} would trigger on 1 quiet step in {per:,}"


def known_faults(config: Mapping[str, Any]) -> list[tuple[int, int]]:
    """The fault windows a config lists, as (start, stop), repetitions included; what has no start is left out."""
    windows = []
    faults = config.get("faults")
    for fault in faults if isinstance(faults, Sequence) and not isinstance(faults, str) else ():
        if isinstance(fault, Mapping) and isinstance(fault.get("start"), int):
            width, every, count = (fault.get(key) for key in ("width", "every", "count"))
            repeats = min(count, MAX_REPEATS) if isinstance(every, int) and isinstance(count, int) else 1
            for again in range(repeats):
                start = fault["start"] + again * (every or 0)
                windows.append((start, start + (width if isinstance(width, int) else 1)))
    return windows


def quiet_steps(steps: NDArray[np.int64], config: Mapping[str, Any]) -> NDArray[np.bool_]:
    """Which steps lie outside every known fault and the 20 steps after it."""
    quiet = np.ones(len(steps), bool)
    for start, stop in known_faults(config):
        quiet &= (steps < start) | (steps >= stop + AFTERMATH)
    return quiet


def spike_score(losses: NDArray[np.float64]) -> float | None:
    """Share of losses more than 6 sigma above the mean of the 128 before; None if there are not that many."""
    if len(losses) <= SPIKE_WINDOW:
        return None
    centred = losses - losses.mean()
    sums = np.cumsum(np.concatenate([[0.0], centred]))
    squares = np.cumsum(np.concatenate([[0.0], centred**2]))
    mean = (sums[SPIKE_WINDOW:-1] - sums[: -SPIKE_WINDOW - 1]) / SPIKE_WINDOW
    variance = (squares[SPIKE_WINDOW:-1] - squares[: -SPIKE_WINDOW - 1]) / SPIKE_WINDOW - mean**2
    sigma = np.sqrt(np.maximum(variance, 1e-16))
    return float((centred[SPIKE_WINDOW:] > mean + SPIKE_SIGMAS * sigma).sum() / len(losses))


def _losses(run: Run) -> Losses:
    _, values = run.column("loss")
    finite = values[np.isfinite(values)]
    evals: dict[str, float] = {}
    for key in eval_keys(run):
        found = run.column(key)[1]
        found = found[np.isfinite(found)]
        if len(found):
            evals[key] = float(found.min())
    return Losses(
        first=float(finite[0]) if len(finite) else None,
        last=float(finite[-1]) if len(finite) else None,
        nonfinite=int(len(values) - len(finite)),
        best_evals=evals,
        spike_score=spike_score(finite),
    )


def eval_keys(run: Run) -> list[str]:
    """The evaluation losses that were logged, in the order of their first line."""
    return list(dict.fromkeys(key for line in run.metrics for key in line if key.startswith("eval_loss")))


def _keep_high(offenders: Iterable[Offender]) -> tuple[str, ...]:
    offenders = [o for o in offenders if o.steps_high]
    persistent = tuple(o.unit for o in offenders if o.persistent)
    return persistent or tuple(o.unit for o in offenders[:SUGGESTED])


def _peak(values: NDArray[np.float64]) -> NDArray[np.float32]:
    """The largest finite value of each pass."""
    best = np.where(np.isfinite(values), values, -math.inf).max(axis=1, initial=-math.inf)
    with np.errstate(over="ignore"):
        return best.astype(np.float32)


def _cat(parts: list[NDArray], dtype: type) -> NDArray:
    return np.concatenate([np.zeros(0, dtype), *parts])
