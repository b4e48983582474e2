# SPDX-License-Identifier: Apache-2.0
"""Sweep: what many policies would have decided on the same recorded norms, in one pass over them.

    rows = sweep(norms, [Policy(alpha=a) for a in (1.1, 1.5, 2, 3)], spikes=[(812, 860)])
    rows[0].summary           what `trimtab.replay(norms, policy).summary(quiet)` gives, to the bit
    rows[0].caught            how many of the spikes some unit announced, and `lead`, how many steps before

Ratios and jumps depend on what a norm is measured against (history, window, ...), not on thresholds, budget and lock.
So they are judged once for all policies that share the former, risks once for all that also share thresholds, and only
the decisions are taken for each policy by itself. A unit that triggers always ranks before one that is only locked
(risk above 1 against at most 1), so the seats of all triggered units of a block are given out at once, and only rows
with locks and free seats are gone through one by one. Policies whose judging depends on their own decisions
(`exclude_triggered`, `replay_step`), that start their histories anew (`rebase_at`), or that use another detector than
GNMR, are advanced alone: the same numbers, more slowly. Blocks come one after another and memory grows by one byte per
step and policy.

A spike is a stretch of steps in which the loss left its range (`trimtab.report.spikes`). It is caught when any unit
triggers in the `WINDOW` steps before it begins or in its first step; the lead is counted from the first such trigger. A
lead of 0 comes too late: what is decided from a step acts in the next. A policy that fires all the time catches
everything, so `by_chance` says how often a window of that length has a trigger in it where nothing happened.

All of this is open-loop: the norms were recorded under another policy, whose decisions they carry.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trimtab.control.advance import State, Verdict, advance
from trimtab.control.decide import Choice, Ledger, decide
from trimtab.control.detectors import Detector, Gnmr, detector_of
from trimtab.control.judge import History, judge, risk_of
from trimtab.control.policy import Limits, Policy, peaks, quiet_level
from trimtab.control.replay import as_float32, blocks_of
from trimtab.control.tally import Tally
from trimtab.control.values import Bools, Floats, Risk
from trimtab.errors import TrimtabError

WINDOW = 20
"""Steps before a spike in which a trigger counts as its announcement."""
SHARED = ("history", "window", "eps", "kappa", "memory", "decay", "span")
"""What ratios and jumps depend on."""


@dataclass(frozen=True, eq=False)
class Row:
    """What one policy would have done."""

    policy: Policy
    limits: Limits
    summary: dict[str, float]
    """As `Decisions.summary(quiet)`."""
    firings: int
    """Steps on which any unit triggered."""
    spikes: int
    caught: int
    """Spikes with a trigger in the window before them or in their first step."""
    lead: float | None
    """Median steps from the first such trigger to the spike, over the spikes that were caught."""
    by_chance: float | None
    """Share of windows of that length, on quiet steps, that have a trigger in them."""
    alarmed: Bools = field(repr=False)  # (T,)

    def to_dict(self) -> dict[str, Any]:
        """The row as plain values."""
        names = ("firings", "spikes", "caught", "lead", "by_chance")
        summary = {key: None if np.isnan(value) else value for key, value in self.summary.items()}
        return {"policy": self.policy.to_dict(), **{name: getattr(self, name) for name in names}, "summary": summary}


class Sweep:
    """Advances many policies over blocks of norms."""

    def __init__(
        self,
        policies: Sequence[Policy],
        recoverable: Bools,
        total_steps: int | None,
        *,
        detector: str | Mapping[str, Any] | Detector = "gnmr",
    ) -> None:
        if not policies:
            raise TrimtabError("a sweep needs at least one policy, got none")
        self._recoverable, self._detector = np.asarray(recoverable, bool), detector_of(detector)
        self._entrants = [_Entrant(policy, self._recoverable, total_steps, self._detector) for policy in policies]
        groups: dict[tuple, list[_Entrant]] = {}
        for number, entrant in enumerate(self._entrants):
            groups.setdefault(_key(entrant.policy, self._detector) or (number,), []).append(entrant)
        self._groups = [
            _Alone(members[0], self._detector) if _key(members[0].policy, self._detector) is None else _Group(members)
            for members in groups.values()
        ]
        self._steps = 0

    def add(
        self,
        norms: NDArray[np.floating],  # (T, U)
        seen: Bools | None = None,
        columns: Mapping[str, NDArray[np.floating]] | None = None,
    ) -> None:
        """Take the next steps."""
        if norms.ndim != 2 or norms.shape[1] != len(self._recoverable):
            raise TrimtabError(f"norms must have shape (steps, {len(self._recoverable)}), got {norms.shape}")
        for block, mask, part in blocks_of(norms, seen, columns, self._recoverable, self._detector):
            steps = self._steps + 1 + np.arange(len(block))
            for group in self._groups:
                group.add(block, mask, part, steps)
            self._steps += len(block)

    def rows(self, quiet: Bools | None = None, spikes: Iterable[tuple[int, int]] = ()) -> tuple[Row, ...]:
        """What each policy did, in the order of the policies.

        Args:
            quiet: (T,) rows without a known fault; all that do not belong to a spike unless told otherwise.
            spikes: (first, last) row of each, from 0.
        """
        spikes = list(spikes)
        quiet = quiet_rows(self._steps, spikes) if quiet is None else np.asarray(quiet, bool)
        if quiet.shape != (self._steps,):
            raise TrimtabError(f"quiet must have one entry per step, {self._steps}, got shape {quiet.shape}")
        return tuple(entrant.row(quiet, spikes) for entrant in self._entrants)


def sweep(
    norms: NDArray[np.floating],  # (T, U)
    policies: Sequence[Policy],
    *,
    seen: Bools | None = None,
    recoverable: Bools | None = None,
    total_steps: int | None = None,
    detector: str | Mapping[str, Any] | Detector = "gnmr",
    columns: Mapping[str, NDArray[np.floating]] | None = None,
    quiet: Bools | None = None,
    spikes: Iterable[tuple[int, int]] = (),
) -> tuple[Row, ...]:
    """Run many policies over recorded norms; arguments as those of `trimtab.replay` and `Sweep.rows`."""
    norms = np.asarray(norms)
    if norms.ndim != 2:
        raise TrimtabError(f"norms must have shape (steps, units), got {norms.shape}")
    mask = np.ones(norms.shape[1], bool) if recoverable is None else recoverable
    found = Sweep(policies, mask, len(norms) if total_steps is None else total_steps, detector=detector)
    found.add(norms, seen, columns)
    return found.rows(quiet, spikes)


def quiet_rows(length: int, spikes: Iterable[tuple[int, int]], window: int = WINDOW) -> Bools:
    """Which of some rows lie outside every spike, the window before it, and as many rows after it."""
    quiet = np.ones(length, bool)
    for first, last in spikes:
        quiet[max(first - window, 0) : last + 1 + window] = False
    return quiet


class Peaks:
    """Each step's largest ratio and jump, from which thresholds follow as in `Policy.calibrated`, block by block."""

    def __init__(self, base: Policy, num_units: int) -> None:
        self.base = base.replace(replay_step=None, rebase_at=())
        self._memory = History.fresh(num_units, self.base)
        self._peaks: list[Floats] = [np.zeros((0, 2))]

    def add(self, norms: NDArray[np.floating], seen: Bools) -> None:
        """Take the next steps."""
        judged, self._memory = judge(self._memory, as_float32(norms), seen, self.base, np.ones(len(norms)))
        self._peaks.append(np.stack([peaks(column) for column in judged[:2]], axis=1))

    def calibrated(self, quiet: Bools, false_alarms_per_1k: float, skip: int = 20) -> Policy | None:
        """The base with thresholds that so many of 1,000 quiet steps pass; None where fewer than 50 are quiet."""
        found = np.concatenate(self._peaks)[skip:][quiet[skip:]]
        if np.isfinite(found).all(axis=1).sum() < 50:
            return None
        share = false_alarms_per_1k / 1000 / (1 if self.base.beta is None else 2)
        alpha = quiet_level(found[:, :1], share)
        beta = None if self.base.beta is None else quiet_level(found[:, 1:], share)
        warm = None if self.base.alpha_warmup is None else alpha * max(1.0, self.base.alpha_warmup / self.base.alpha)
        if not (alpha > 0 and (beta is None or beta > 0)):
            return None
        return self.base.replace(alpha=alpha, beta=beta, alpha_warmup=warm)


@dataclass(frozen=True)
class Advice:
    """The policy that a sweep suggests, and why."""

    row: Row
    reason: str


def suggest(rows: Sequence[Row], most_alarms: float) -> Advice:
    """The policy to try first: quiet enough, then the one that announces most spikes, then the cheapest.

    Args:
        most_alarms: false alarms per 1,000 quiet steps that are still taken.
    """

    def alarms(row: Row) -> float:
        return row.summary["false_alarms_per_1k"]

    able = [row for row in rows if row.limits.max_high] or list(rows)
    calm = [row for row in able if alarms(row) <= most_alarms]
    if not calm:
        best = min(able, key=lambda row: (alarms(row), row.summary["promotion_ratio"]))
        return Advice(
            best,
            f"no policy here stays within {most_alarms:g} false alarms per 1,000 quiet steps; this one has the fewest, "
            f"{alarms(best):.3g}: raise alpha and beta further",
        )
    within = f"within {most_alarms:g} false alarms per 1,000 quiet steps ({len(calm)} of {len(able)} policies are)"
    if not rows[0].spikes:
        best = max(calm, key=lambda row: (alarms(row), -row.policy.alpha))
        return Advice(best, f"{within} it watches most closely; no loss spike is known here, so none could be foretold")
    best = max(calm, key=lambda row: (row.caught, row.lead or 0.0, -alarms(row), -row.summary["promotion_ratio"]))
    told = f"{within} it announces the most loss spikes, {best.caught} of {best.spikes}"
    if not best.caught:
        return Advice(best, f"{within}, but none of the {best.spikes} loss spikes was announced by any policy so quiet")
    chance = "" if best.by_chance is None else f"; by chance it would be {best.by_chance:.0%} of them"
    when = f"{best.lead:g} steps before" if best.lead else "in their first step, too late to act before"
    return Advice(best, f"{told}, {when}{chance}")


def _key(policy: Policy, detector: Detector) -> tuple | None:
    """What ratios and jumps depend on; None where they depend on the policy's own decisions, or are not GNMR's."""
    alone = policy.history == "exclude_triggered" or policy.replay_step is not None or policy.rebase_at
    return None if alone or type(detector) is not Gnmr else tuple(getattr(policy, name) for name in SHARED)


class _Lean(Tally):
    """Counts everything but the histogram of the ratios, which a group counts once."""

    def _count_ratios(self, ratio: Floats, finite: Bools) -> None:
        pass


class _Entrant:
    """One policy on its way."""

    def __init__(self, policy: Policy, recoverable: Bools, total_steps: int | None, detector: Detector) -> None:
        self.policy, self.recoverable = policy, recoverable
        self.limits = policy.resolve(int(recoverable.sum()), total_steps)
        self.state = State.fresh(recoverable, policy, self.limits, detector)
        self.tally = self._tally(Tally)
        self.alarmed = [np.zeros(0, bool)]

    def _tally(self, kind: type[Tally]) -> Tally:
        return kind(self.recoverable, self.state.ledger.high, self.policy, self.limits)

    def share_ratios(self, other: "_Entrant") -> None:
        """Let another one of the group count the ratios."""
        self.tally = self._tally(_Lean)
        self.tally.ratios = other.tally.ratios

    def row(self, quiet: Bools, spikes: Sequence[tuple[int, int]]) -> Row:
        """Close the books."""
        alarmed = np.concatenate(self.alarmed)
        leads = [lead for first, _ in spikes if (lead := _lead(alarmed, first)) is not None]
        return Row(
            policy=self.policy,
            limits=self.limits,
            summary=self.tally.summary(quiet, alarmed),
            firings=int(alarmed.sum()),
            spikes=len(spikes),
            caught=len(leads),
            lead=float(np.median(leads)) if leads else None,
            by_chance=_by_chance(alarmed, quiet),
            alarmed=alarmed,
        )


class _Alone:
    """A policy whose judging cannot be shared."""

    def __init__(self, entrant: _Entrant, detector: Detector) -> None:
        self._entrant, self._detector = entrant, detector

    def add(self, norms: NDArray[np.float32], seen: Bools, columns: Mapping[str, Any], steps: NDArray) -> None:
        one = self._entrant
        verdict, one.state = advance(
            one.state, norms, seen, one.recoverable, one.policy, one.limits, self._detector, columns
        )
        one.alarmed.append(one.tally.add(verdict))


class _Group:
    """Policies that measure norms against the same history."""

    def __init__(self, members: list[_Entrant]) -> None:
        self._members = members
        self._memory: History = members[0].state.history
        self._deciders = [_Seats(one) if _is_plain(one.policy) else _Ledgers(one) for one in members]
        for other in members[1:]:
            other.share_ratios(members[0])

    def add(self, norms: NDArray[np.float32], seen: Bools, columns: Mapping[str, Any], steps: NDArray) -> None:
        judged, self._memory = judge(self._memory, norms, seen, self._members[0].policy, np.ones(len(norms)))
        rerun = np.zeros(len(norms), bool)
        risks: dict[tuple, _Ranked] = {}
        for one, decider in zip(self._members, self._deciders, strict=True):
            policy, warmup = one.policy, one.limits.warmup_steps
            key = (policy.alpha, policy.alpha_warmup, policy.beta, warmup)
            if key not in risks:
                alpha = policy.alpha_at(steps, warmup)
                risks[key] = _Ranked(alpha, risk_of(judged.ratio, judged.jump, policy, alpha), one.recoverable)
            ranked = risks[key]
            choice = decider.decide(ranked, steps)
            verdict = Verdict(Risk(judged.ratio, judged.jump, ranked.risk), choice, ranked.alpha, steps, rerun)
            one.alarmed.append(one.tally.add(verdict))


class _Ranked:
    """Risks of a block, and its triggers in the order in which seats are given out."""

    def __init__(self, alpha: Floats, risk: Floats, recoverable: Bools) -> None:
        self.alpha, self.risk = alpha, risk
        self.triggered = (risk > 1) & recoverable
        row, unit = self.triggered.nonzero()
        order = np.lexsort((-risk[row, unit], row))  # stable: equal risks keep their index order
        self.row, self.unit = row[order], unit[order]
        self.counts = np.bincount(row, minlength=len(risk))
        self.starts = np.cumsum(self.counts) - self.counts
        self.rank = np.arange(len(row)) - self.starts[self.row]


def _is_plain(policy: Policy) -> bool:
    """Whether a lock is the paper's: a constant, in a run that decides from its first step on."""
    return policy.lock_growth == 1.0 and not policy.prefer_locked and policy.warmup == "threshold"


class _Ledgers:
    """Decides as the controller does, for policies that remember more than locks."""

    def __init__(self, entrant: _Entrant) -> None:
        self._one = entrant
        self._ledger: Ledger = entrant.state.ledger

    def decide(self, ranked: _Ranked, steps: NDArray[np.int64]) -> Choice:
        one = self._one
        choice, self._ledger = decide(self._ledger, ranked.risk, one.recoverable, one.policy, one.limits, steps)
        return choice


class _Seats:
    """Decides a block at once: Algorithm 2 with the paper's lock."""

    def __init__(self, entrant: _Entrant) -> None:
        self._most, self._lock = entrant.limits.max_high, entrant.policy.lock_steps
        self._locked: dict[int, int] = {}  # unit: remaining lock

    def decide(self, ranked: _Ranked, steps: NDArray[np.int64]) -> Choice:
        high = np.zeros(ranked.risk.shape, bool)
        seated = ranked.rank < self._most
        high[ranked.row[seated], ranked.unit[seated]] = True
        if self._lock and self._most:
            self._keep_locked(ranked, high)
        return Choice(high, ranked.triggered & ~high)

    def _keep_locked(self, ranked: _Ranked, high: Bools) -> None:
        """Give free seats to units whose lock holds, row by row."""
        starts, units, locked = ranked.starts.tolist(), ranked.unit.tolist(), self._locked
        for t, count in enumerate(ranked.counts.tolist()):
            if not count and not locked:
                continue
            entered = dict.fromkeys(units[starts[t] : starts[t] + min(count, self._most)], self._lock)
            free = self._most - count
            if locked and free > 0:
                held = [unit for unit in locked if unit not in entered]
                if len(held) > free:
                    held = sorted(held, key=lambda unit: (-ranked.risk[t, unit], unit))[:free]
                high[t, held] = True
                entered |= {unit: locked[unit] - 1 for unit in held if locked[unit] > 1}
            locked = entered
        self._locked = locked


def _lead(alarmed: Bools, first: int) -> int | None:
    """Steps from the first trigger in the window to the spike that begins in row `first`."""
    start = max(first - WINDOW, 0)
    hits = np.flatnonzero(alarmed[start : first + 1])
    return None if not len(hits) else int(first - start - hits[0])


def _by_chance(alarmed: Bools, quiet: Bools) -> float | None:
    """Share of quiet rows with a trigger in them or in the window before, where the window is quiet as well."""
    if len(alarmed) <= WINDOW:
        return None
    fired = np.convolve(alarmed & quiet, np.ones(WINDOW + 1, int), "valid") > 0
    calm = np.convolve(quiet, np.ones(WINDOW + 1, int), "valid") == WINDOW + 1
    return float(fired[calm].mean()) if calm.any() else None
