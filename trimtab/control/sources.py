# SPDX-License-Identifier: Apache-2.0
"""Sources: which unit a fault began in, not which unit it shows in.

A damaged output changes everything after it in the forward and therefore every gradient; a damaged gradient changes
every unit before it. So the largest norm ratio is seldom the culprit (one forward fault in five or ten). Two things
tell:

    forward    the gain of a unit's linears, size of output over input. What comes from upstream scales both and
               cancels, so the gain moves where the fault is, up (a wrong scale) or down (saturation, zeroed blocks):
               the source is the unit with the largest surprise |z| of its log gain
    backward   no gain moved, but norms rose: the source is the *last* unit, in the model's order, whose surprise
               is at least half the largest, because a bad gradient travels towards the first

Both are surprises in the sense of `surprise.py`, against a level that follows drift within a few steps. The source
alone triggers; another unit's risk r is explained by it and becomes r / (1 + r), below 1 and in the same order. A
second fault is found in the next step, when the first source runs high. Units must come in the order in which they run.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from trimtab.checks import is_positive, require
from trimtab.control.policy import Policy
from trimtab.control.surprise import Track, at_least, fresh_track, surprise
from trimtab.control.values import Bools, Floats, Risk


class Sources(NamedTuple):
    """The tracks of log gain and log norm."""

    num: NDArray[np.int64]
    level: Floats
    slope: Floats
    variance: Floats
    norm_num: NDArray[np.int64]
    norm_level: Floats
    norm_slope: Floats
    norm_variance: Floats


@dataclass(frozen=True)
class Output:
    """The source of a fault, by gains first and by norms second."""

    sigmas: float = 4.0
    """Deviations of a gain that alpha 1 stands for."""
    norm_sigmas: float = 4.0
    """The same of a norm. Fewer find weaker faults, at a few alarms per 1,000 steps."""
    floor: float = 0.005
    """Least deviation of a log gain."""
    norm_floor: float = 0.1
    """Least deviation of a log norm."""
    least: int = 8
    """Values of a unit before it is judged."""

    name = "output"
    columns = ("output",)

    def __post_init__(self) -> None:
        for field in ("sigmas", "norm_sigmas", "floor", "norm_floor", "least"):
            require(is_positive(getattr(self, field)), f"{field} must be a positive number", getattr(self, field))

    def fresh(self, num_units: int, policy: Policy) -> Sources:
        """Empty tracks."""
        return Sources(*fresh_track(num_units), *fresh_track(num_units))

    def judge(
        self, memory: Sources, columns: Mapping[str, NDArray[np.float32]], seen: Bools, policy: Policy, alpha: Floats
    ) -> tuple[Risk, Sources]:
        """Surprises, the source of each step, and what it explains."""
        gain, norm = columns["output"], columns["norm"]
        gains, tracked = self._surprise(Track(*memory[:4]), gain, seen, self.floor, follow=0.25, trend=0.1)
        norms, norm_tracked = self._surprise(Track(*memory[4:]), norm, seen, self.norm_floor, follow=0.05, trend=0.0)
        gains, norms = np.abs(gains) / self.sigmas, np.maximum(norms, 0.0) / self.norm_sigmas
        broken = seen & np.isinf(gain)  # what an output makes not finite, everything after it inherits
        ratio = np.where(broken, np.inf, np.maximum(gains, norms))
        poisoned = seen & ~np.isfinite(norm)
        source, found = _sources(gains, norms, broken, poisoned, alpha)
        risk = ratio / alpha[:, None]
        risk = np.where(poisoned & ~broken, np.inf, risk)
        with np.errstate(invalid="ignore"):
            explained = np.where(np.isinf(risk), np.finfo(np.float64).max, risk / (1 + risk))
        explained = np.where(poisoned & ~broken.any(axis=1, keepdims=True), np.inf, explained)
        is_source = np.arange(risk.shape[1]) == source[:, None]
        risk = np.where(found[:, None] & ~is_source, explained, risk)
        ratio = np.where(poisoned, np.inf, ratio)
        blank = np.where(poisoned, np.inf, 0.0)
        ratio, blank = np.where(seen, ratio, np.nan), np.where(seen, blank, np.nan)
        return Risk(ratio, blank, np.where(seen, risk, 0.0)), Sources(*tracked, *norm_tracked)

    def _surprise(
        self, track: Track, values: NDArray[np.float32], seen: Bools, floor: float, *, follow: float, trend: float
    ) -> tuple[Floats, Track]:
        live = seen & np.isfinite(values) & (values > 0)
        logs = np.log(np.where(live, values, 1).astype(np.float64))
        weight, spread = at_least(follow), at_least(0.05)
        return surprise(track, logs, live, weight, spread, floor=floor, clip=4.0, trend=trend, least=self.least)

    def rescaled(self, memory: Sources, factor: float) -> Sources:
        """A factor shifts the log norm; gains do not know of it."""
        shifted = np.where(memory.norm_num > 0, memory.norm_level + np.log(factor), 0.0)
        return memory._replace(norm_level=shifted)


def _sources(
    gains: Floats, norms: Floats, broken: Bools, poisoned: Bools, alpha: Floats
) -> tuple[NDArray[np.int64], Bools]:
    """The source of each step and whether there is one, (T,)."""
    units = norms.shape[1]
    forward, backward = gains.max(axis=1) > alpha, norms.max(axis=1) > alpha
    raised = norms >= norms.max(axis=1, keepdims=True) / 2
    last = units - 1 - np.argmax(raised[:, ::-1], axis=1)
    source = np.where(forward, np.argmax(gains, axis=1), last)
    found = forward | backward
    any_broken = broken.any(axis=1)
    source = np.where(any_broken, np.argmax(broken, axis=1), source)  # the earliest output that is not finite
    return source, np.where(poisoned.any(axis=1), any_broken, found | any_broken)
