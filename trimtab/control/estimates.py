# SPDX-License-Identifier: Apache-2.0
"""Estimates: each unit's recovery gap, kept up to date from a few measurements per step.

The recovery gap of a unit is how much its low path perturbs the gradient: what running it high would win back
(Corollary 1 of arXiv 2606.00539 bounds the benefit of a recovery by it). A gradient norm does not show it. A sensor
measures it directly on a few units per step (column `gap`, NaN elsewhere; `gaps.py`):

    gap = n sqrt(e_y^2 + e_x^2 + e_w^2)       n: the unit's gradient norm; e: relative errors of the low path in its
                                              output, in the gradient it passes on, and in its weights' gradient

The relative part changes slowly while norms move from step to step, so what is remembered is gap / n:

    measured    fast <- fast + pace (gap / n - fast),  slow <- slow + slow_pace (min(gap / n, kappa slow) - slow)
    otherwise   fast <- slow + fade (fast - slow)
    estimate  = n fast

A unit that runs high cannot be measured: the excess of a fault fades and it is tried again, while its steady part
stays, so a unit that is always bad keeps its seat. The risk is the larger of

    estimate / (alpha * mean estimate of the measured units)
    the risk of GNMR / caution

The second finds a fault in a unit whose turn has not come. `caution` above 1 leaves small excesses of the norm to be
confirmed by a measurement: the riskiest units are measured first.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from trimtab.checks import is_positive, require
from trimtab.control.judge import History, judge
from trimtab.control.policy import Policy
from trimtab.control.values import Bools, Floats, Risk


class Estimates(NamedTuple):
    """The histories of the norms (as in `judge`), and the relative gaps; NaN before the first measurement."""

    num_seen: NDArray[np.int64]
    mean: Floats
    queue: Floats
    recent: Floats
    frozen: NDArray[np.int64]
    fast: Floats  # (U,)
    slow: Floats  # (U,)


@dataclass(frozen=True)
class Gap:
    """The online estimate of the recovery gap."""

    pace: float = 0.5
    """Weight of a new measurement."""
    slow_pace: float = 0.1
    """Its weight in what stays."""
    fade: float = 0.8
    """How much of an excess is left after a step without measurement."""
    kappa: float = 3.0
    """A measurement enters what stays as at most kappa times that."""
    caution: float | None = 2.0
    """By how much GNMR must exceed its thresholds to trigger by itself; None: it does not."""
    share: float = 0.02
    """What measuring may cost, as a share of the step's matrix products."""
    units_per_step: int | None = None
    """Measure so many units in every step instead."""

    name = "gap"
    columns = ("gap",)

    @property
    def sensor_options(self) -> dict[str, dict[str, object]]:
        """What the sensor of each column is built with."""
        return {"gap": {"share": self.share, "units_per_step": self.units_per_step}}

    def __post_init__(self) -> None:
        for field in ("pace", "slow_pace"):
            value = getattr(self, field)
            require(is_positive(value) and value <= 1, f"{field} must lie in (0, 1]", value)
        require(0 <= self.fade <= 1, "fade must lie in [0, 1]", self.fade)
        require(is_positive(self.kappa), "kappa must be a positive number", self.kappa)
        require(self.caution is None or is_positive(self.caution), "caution must be positive or None", self.caution)

    def fresh(self, num_units: int, policy: Policy) -> Estimates:
        """Empty histories, nothing measured."""
        unknown = np.full(num_units, np.nan)
        return Estimates(*History.fresh(num_units, policy), unknown, unknown)

    def judge(
        self,
        memory: Estimates,
        columns: Mapping[str, NDArray[np.float32]],
        seen: Bools,
        policy: Policy,
        alpha: Floats,
    ) -> tuple[Risk, Estimates]:
        """Follow the measurements, and hold each unit's estimate against the mean."""
        norm, gap = columns["norm"], columns["gap"]
        own, history = judge(History(*memory[:5]), norm, seen, policy, alpha)
        estimate, fast, slow = self._follow(memory, norm, gap, seen)
        known = np.isfinite(estimate) & seen
        total = np.where(known, estimate, 0.0).sum(axis=1)
        mean = total / np.maximum(known.sum(axis=1), 1)
        ratio = np.where(known, estimate, 0.0) / np.where(mean > 0, mean, 1.0)[:, None]
        ratio = np.where(seen & (np.isinf(gap) | np.isinf(own.risk)), np.inf, ratio)
        risk = ratio / alpha[:, None]
        jump = np.where(np.isinf(ratio), np.inf, 0.0)
        if self.caution is not None:
            risk = np.maximum(risk, own.risk / self.caution)
        ratio, jump = np.where(seen, ratio, np.nan), np.where(seen, jump, np.nan)
        return Risk(ratio, jump, np.where(seen, risk, 0.0)), Estimates(*history, fast, slow)

    def _follow(
        self, memory: Estimates, norm: NDArray[np.float32], gap: NDArray[np.float32], seen: Bools
    ) -> tuple[Floats, Floats, Floats]:
        """Run the recurrences; returns the estimates (T, U) and both relative gaps at the end."""
        live = seen & np.isfinite(norm)
        wide = np.where(live, norm, 0).astype(np.float64)
        measured = live & np.isfinite(gap) & (wide > 0)
        relative = np.where(measured, gap, 0) / np.where(wide > 0, wide, 1.0)
        fast, slow = memory.fast, memory.slow
        estimate = np.empty(wide.shape)
        for t in range(len(wide)):
            new = np.isnan(fast)
            onto = np.where(new, relative[t], fast + self.pace * (relative[t] - fast))
            small = np.where(slow > 0, np.minimum(relative[t], self.kappa * slow), relative[t])
            under = np.where(new, relative[t], slow + self.slow_pace * (small - slow))
            fast = np.where(measured[t], onto, slow + self.fade * (fast - slow))
            slow = np.where(measured[t], under, slow)
            estimate[t] = wide[t] * fast
        return estimate, fast, slow

    def rescaled(self, memory: Estimates, factor: float) -> Estimates:
        """Relative gaps do not change, remembered norms do."""
        return memory._replace(mean=memory.mean * factor, recent=memory.recent * factor)
