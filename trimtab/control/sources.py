# SPDX-License-Identifier: Apache-2.0
"""Sources: which unit a fault began in, not which unit it shows in.

A damaged output changes everything after it in the forward and therefore every gradient; a damaged gradient changes
every unit before it. So the largest norm ratio is seldom the culprit (one forward fault in five or ten). What tells is
what a unit makes of what it is given:

    forward    size of its outputs over size of its inputs: the column `output`
    backward   its gradient's norm over that of the gradient that arrives at its outputs: `norm` over `grad_output`

What comes from elsewhere scales both sides of a gain and cancels, so a gain moves where the fault is: up (a wrong
scale) or down (saturation, zeroed blocks, underflow). The source of a step is

    1  the earliest unit that makes an output not finite out of finite inputs; else the last one that makes its gradient
       not finite out of a finite `grad_output`
    2  else the largest surprise |z| of a forward gain, if one is large: a forward fault disturbs backward gains too
    3  else that of a backward gain
    4  else, where norms rose though no gain moved (only what a unit hands on was damaged), the *last* unit in the
       model's order whose surprise is at least half the largest, because a bad gradient travels towards the first

Surprises are those of `surprise.py`, against a level that follows drift within a few steps. The source alone triggers;
another unit's risk r is explained by it and becomes r / (1 + r), below 1 and in the same order. A second fault is
found in the next step, when the first source runs high. Units must come in the order in which they run. A loss scale
that changes (FP16 with a GradScaler) moves every `grad_output` at once and is an alarm of one step.
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
    """The tracks of log forward gain, log backward gain and log norm."""

    num: NDArray[np.int64]
    level: Floats
    slope: Floats
    variance: Floats
    back_num: NDArray[np.int64]
    back_level: Floats
    back_slope: Floats
    back_variance: Floats
    norm_num: NDArray[np.int64]
    norm_level: Floats
    norm_slope: Floats
    norm_variance: Floats


@dataclass(frozen=True)
class Source:
    """The source of a fault: by forward gains, then backward gains, then norms."""

    sigmas: float = 6.0
    """Deviations of a gain that alpha 1 stands for."""
    norm_sigmas: float = 8.0
    """The same of a norm."""
    floor: float = 0.005
    """Least deviation of a log forward gain."""
    back_floor: float = 0.05
    """Least deviation of a log backward gain."""
    norm_floor: float = 0.1
    """Least deviation of a log norm."""
    least: int = 8
    """Values of a unit before it is judged."""

    name = "source"
    columns = ("output", "grad_output")

    def __post_init__(self) -> None:
        for field in ("sigmas", "norm_sigmas", "floor", "back_floor", "norm_floor", "least"):
            require(is_positive(getattr(self, field)), f"{field} must be a positive number", getattr(self, field))

    def fresh(self, num_units: int, policy: Policy) -> Sources:
        """Empty tracks."""
        return Sources(*fresh_track(num_units), *fresh_track(num_units), *fresh_track(num_units))

    def judge(
        self, memory: Sources, columns: Mapping[str, NDArray[np.float32]], seen: Bools, policy: Policy, alpha: Floats
    ) -> tuple[Risk, Sources]:
        """Surprises, the source of each step, and what it explains."""
        gain, norm, arrived = columns["output"], columns["norm"], columns["grad_output"]
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            back = norm / arrived
        gains, tracked = self._surprise(Track(*memory[:4]), gain, seen, self.floor, follow=0.25, trend=0.1)
        backs, back_tracked = self._surprise(Track(*memory[4:8]), back, seen, self.back_floor, follow=0.05)
        norms, norm_tracked = self._surprise(Track(*memory[8:]), norm, seen, self.norm_floor, follow=0.05)
        gains, backs = np.abs(gains) / self.sigmas, np.abs(backs) / self.sigmas
        norms = np.maximum(norms, 0.0) / self.norm_sigmas
        source, found = _sources(gains, backs, norms, alpha)
        poisoned = seen & ~np.isfinite(norm)
        broken, torn = seen & np.isinf(gain), poisoned & np.isfinite(arrived)
        in_forward, begun = broken.any(axis=1), broken.any(axis=1) | torn.any(axis=1)
        source = np.where(begun, np.where(in_forward, np.argmax(broken, axis=1), _last(torn)), source)
        found = np.where(poisoned.any(axis=1), begun, found | begun)
        ratio = np.where(broken | poisoned, np.inf, np.maximum(np.maximum(gains, backs), norms))
        risk = ratio / alpha[:, None]
        with np.errstate(invalid="ignore"):
            explained = np.where(np.isinf(risk), np.finfo(np.float64).max, risk / (1 + risk))
        is_source = np.arange(risk.shape[1]) == source[:, None]
        risk = np.where(found[:, None] & ~is_source, explained, risk)
        blank = np.where(poisoned, np.inf, 0.0)
        ratio, blank = np.where(seen, ratio, np.nan), np.where(seen, blank, np.nan)
        memory = Sources(*tracked, *back_tracked, *norm_tracked)
        return Risk(ratio, blank, np.where(seen, risk, 0.0)), memory

    def _surprise(
        self, track: Track, values: NDArray[np.float32], seen: Bools, floor: float, *, follow: float, trend: float = 0.0
    ) -> tuple[Floats, Track]:
        live = seen & np.isfinite(values) & (values > 0)
        logs = np.log(np.where(live, values, 1).astype(np.float64))
        weight, spread = at_least(follow), at_least(0.05)
        return surprise(track, logs, live, weight, spread, floor=floor, clip=4.0, trend=trend, least=self.least)

    def rescaled(self, memory: Sources, factor: float) -> Sources:
        """A factor shifts the log norm; gains do not know of it."""
        shifted = np.where(memory.norm_num > 0, memory.norm_level + np.log(factor), 0.0)
        return memory._replace(norm_level=shifted)


def _sources(gains: Floats, backs: Floats, norms: Floats, alpha: Floats) -> tuple[NDArray[np.int64], Bools]:
    """The source of each step by its surprises and whether there is one, (T,)."""
    forward, backward, risen = (x.max(axis=1) > alpha for x in (gains, backs, norms))
    source = _last(norms >= norms.max(axis=1, keepdims=True) / 2)
    source = np.where(backward, np.argmax(backs, axis=1), source)
    return np.where(forward, np.argmax(gains, axis=1), source), forward | backward | risen


def _last(which: Bools) -> NDArray[np.int64]:
    """The last unit of each step that is marked, (T,)."""
    return which.shape[1] - 1 - np.argmax(which[:, ::-1], axis=1)
