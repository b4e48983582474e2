# SPDX-License-Identifier: Apache-2.0
"""Sources: which unit a fault began in, not which unit it shows in.

A damaged output changes everything after it in the forward and therefore every gradient; a damaged gradient changes
every unit before it. So the largest norm ratio is seldom the culprit (one forward fault in five or ten). What tells is
what a unit makes of what it is given:

    forward    size of its outputs over size of its inputs: the column `output`
    backward   its gradient's norm over that of the gradient that arrives at its outputs: `norm` over `grad_output`

What comes from elsewhere scales both sides of a gain and cancels, so a gain moves where the fault is: up (a wrong
scale) or down (saturation, zeroed blocks, underflow). The sources of a step are

    1  who makes an output not finite out of finite inputs; else who makes its gradient not finite out of a finite
       `grad_output`
    2  else, if the surprise |z| of a forward gain is large, the largest and all that are at least a third of it: a
       forward fault disturbs other gains too, mostly by a fifth of its own surprise and less
    3  else the same of the backward gains
    4  else, where norms rose though no gain moved (only what a unit hands on was damaged), the *last* unit in the
       model's order whose surprise is at least half the largest, because a bad gradient travels towards the first

Surprises are those of `surprise.py`, against a level that follows drift within a few steps. Sources alone trigger;
another unit's risk r is explained by them and becomes r / (1 + r), below 1 and in the same order. Units must come in
the order in which they run. A loss scale that changes (FP16 with a GradScaler) moves every `grad_output` at once and is
an alarm of one step.
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
        source = _sources(gains, backs, norms, alpha)
        poisoned = seen & ~np.isfinite(norm)
        broken, torn = seen & np.isinf(gain), poisoned & np.isfinite(arrived)
        begun = np.where(broken.any(axis=1, keepdims=True), broken, torn)
        source = np.where((poisoned | begun).any(axis=1, keepdims=True), begun, source)
        ratio = np.where(broken | poisoned, np.inf, np.maximum(np.maximum(gains, backs), norms))
        risk = ratio / alpha[:, None]
        with np.errstate(invalid="ignore"):
            explained = np.where(np.isinf(risk), np.finfo(np.float64).max, risk / (1 + risk))
        risk = np.where(source.any(axis=1, keepdims=True) & ~source, explained, risk)
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


def _sources(gains: Floats, backs: Floats, norms: Floats, alpha: Floats) -> Bools:
    """The sources of each step by their surprises, (T, U)."""
    level = alpha[:, None]
    risen = np.zeros(norms.shape, bool)
    raised = norms >= norms.max(axis=1, keepdims=True) / 2
    last = norms.shape[1] - 1 - np.argmax(raised[:, ::-1], axis=1)
    risen[np.arange(len(norms)), last] = norms.max(axis=1) > alpha
    forward, backward = ((x > level) & (x >= x.max(axis=1, keepdims=True) / 3) for x in (gains, backs))
    found = np.where(backward.any(axis=1, keepdims=True), backward, risen)
    return np.where(forward.any(axis=1, keepdims=True), forward, found)
