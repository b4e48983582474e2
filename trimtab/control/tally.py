# SPDX-License-Identifier: Apache-2.0
"""Tally: the paper's controller metrics, counted as the steps go by, in memory that does not grow.

The names are the paper's, the definitions ours (it gives none). All count *executed* sets: what was selected
from step t runs high in step t + 1, so the first step executes the opening set and the last selection has not
run yet. Steps of a `high` or `monitor` warm-up, in which nothing is decided, are left out of the alarms, the promotion
ratio and the budget, and shown apart.

    false_alarms_per_1k   steps on which any unit triggered, per 1,000 quiet steps
    promotion_ratio       unit-steps that ran high, over all unit-steps of recoverable units
    hit_maxO              share of steps with the budget full
    exceed_gnmr           share of unit-steps with ratio > alpha
    exceed_delta          share of unit-steps with jump > beta
    denied                triggered unit-steps that did not fit in the budget
    switches_per_1k       path changes, summed over units, per 1,000 steps
    nonfinite             steps with a NaN or Inf norm
    median_ratio          median of all ratios, what alpha means in this run (to about 1.4 %)
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from trimtab.control.advance import Verdict, concatenate
from trimtab.control.policy import Limits, Policy
from trimtab.control.values import Bools

COUNTS = ("steps", "ruled_steps", "high", "full", "over_alpha", "over_beta", "denied", "switches", "alarms")
COUNTS += ("nonfinite", "reruns")
TOGETHER = 64  # passes of a live controller that are counted at once
BINS = 512
LOG_RANGE = 3.0  # ratios from 1e-3 to 1e3, in logarithmic bins of 2.7 %


class Tally:
    """Running counts over the passes of a run."""

    def __init__(self, recoverable: Bools, executed: Bools, policy: Policy, limits: Limits) -> None:
        self._recoverable, self._policy, self._limits = recoverable, policy, limits
        self.executed = executed.copy()  # the set that runs in the coming step, as planned
        self.last = executed.copy()  # the set that ran last
        # Nothing is decided during a `high` or `monitor` warm-up, so its steps are shown apart.
        self._unruled = limits.warmup_steps if policy.warmup in ("high", "monitor") else 0
        self.counts = dict.fromkeys(COUNTS, 0)
        self.ratios = np.zeros((len(recoverable), BINS), np.int64)
        self._waiting: list[tuple[Verdict, Bools | None]] = []

    def add_later(self, verdict: Verdict, ran: Bools | None) -> None:
        """Count passes some time before they are asked for: many at once are far cheaper than one by one."""
        self._waiting.append((verdict, ran))
        if len(self._waiting) >= TOGETHER:
            self._catch_up()

    def _catch_up(self) -> None:
        waiting, self._waiting = self._waiting, []
        if waiting:
            sets = [ran for _, ran in waiting if ran is not None]
            self.add(concatenate([verdict for verdict, _ in waiting]), np.concatenate(sets) if sets else None)

    def add(self, verdict: Verdict, ran: Bools | None = None) -> Bools:
        """Count T passes; returns which of them had a trigger.

        Args:
            ran: (T, U) the sets executed in these passes; the plan's own if not given.
        """
        ratio, jump, risk = verdict.risk
        if ran is None:
            ran = np.concatenate([self.executed[None], verdict.choice.high])[:-1]
        entered = np.concatenate([self.last[None], ran])
        finite = np.isfinite(ratio)
        ruled = verdict.steps > self._unruled
        triggered: Bools = np.any((risk > 1) & self._recoverable, axis=1) & ruled
        sizes = ran.sum(axis=1)
        counts, beta = self.counts, self._policy.beta
        counts["steps"] += len(ran)
        counts["ruled_steps"] += int(ruled.sum())
        counts["high"] += int(sizes[ruled].sum())
        counts["full"] += int((sizes[ruled] == self._limits.max_high).sum())
        counts["over_alpha"] += int((finite & (ratio > verdict.alpha[:, None])).sum())
        counts["over_beta"] += 0 if beta is None else int((finite & (jump > beta)).sum())
        counts["denied"] += int(verdict.choice.denied.sum())
        counts["switches"] += int((entered[1:] != entered[:-1]).sum())
        counts["nonfinite"] += int(np.isinf(risk).any(axis=1).sum())
        counts["alarms"] += int(triggered.sum())
        counts["reruns"] += int(verdict.rerun.sum())
        if len(ran):
            self.last, self.executed = ran[-1].copy(), verdict.choice.high[-1].copy()
        self._count_ratios(ratio, finite)
        return triggered

    def _count_ratios(self, ratio: NDArray[np.float64], finite: Bools) -> None:
        with np.errstate(divide="ignore", invalid="ignore"):
            bins = np.floor((np.log10(ratio) + LOG_RANGE) * (BINS / (2 * LOG_RANGE)))
        bins = np.clip(np.where(finite, bins, 0), 0, BINS - 1).astype(np.int64)
        flat = bins + np.arange(bins.shape[1]) * BINS
        self.ratios += np.bincount(flat[finite], minlength=self.ratios.size).reshape(self.ratios.shape)

    def median_ratios(self) -> NDArray[np.float64]:
        """Median ratio of each unit, NaN where none was observed."""
        self._catch_up()
        return np.array([_median(row) for row in self.ratios])

    def summary(self, quiet: Bools | None = None, alarmed: Bools | None = None) -> dict[str, float]:
        """The metrics, false alarms first; `quiet` and `alarmed` (T,) narrow them to steps without a known fault."""
        self._catch_up()
        c, num_units = self.counts, int(self._recoverable.sum())
        steps, ruled = max(c["steps"], 1), max(c["ruled_steps"], 1)
        alarms, quiet_steps = c["alarms"], c["ruled_steps"]
        if quiet is not None and alarmed is not None:
            alarms, quiet_steps = int((alarmed & quiet).sum()), int(quiet[self._unruled :].sum())
        return {
            "false_alarms_per_1k": 1000 * alarms / max(quiet_steps, 1),
            "promotion_ratio": c["high"] / (ruled * max(num_units, 1)),
            "hit_maxO": c["full"] / ruled,
            "exceed_gnmr": c["over_alpha"] / (steps * max(len(self._recoverable), 1)),
            "exceed_delta": c["over_beta"] / (steps * max(len(self._recoverable), 1)),
            "denied": c["denied"],
            "switches_per_1k": 1000 * c["switches"] / steps,
            "nonfinite": c["nonfinite"],
            "reruns": c["reruns"],
            "median_ratio": _median(self.ratios.sum(axis=0)),
            "steps": c["steps"],
            "warmup_steps": c["steps"] - c["ruled_steps"],
        }

    def state_dict(self) -> dict[str, Any]:
        """Counts and ratio histogram as plain values."""
        self._catch_up()
        return {"counts": dict(self.counts), "ratios": self.ratios, "executed": self.executed, "last": self.last}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from earlier counts."""
        self._waiting = []
        self.counts = self.counts | dict(state_dict["counts"])
        self.ratios = np.asarray(state_dict["ratios"]).astype(np.int64)
        self.executed = np.asarray(state_dict["executed"]).astype(bool)
        self.last = np.asarray(state_dict["last"]).astype(bool)


def _median(histogram: NDArray[np.int64]) -> float:
    """Median of a ratio histogram: the middle of its bin."""
    total = int(histogram.sum())
    if total == 0:
        return float("nan")
    middle = int(np.searchsorted(np.cumsum(histogram), (total + 1) // 2))
    return float(10 ** ((middle + 0.5) * (2 * LOG_RANGE / BINS) - LOG_RANGE))
