# SPDX-License-Identifier: Apache-2.0
"""Selections: other ways to fill the seats, to hold the controller against.

A selection replaces who is chosen, not what is judged: it is called once per pass with the step and the
verdict, and returns the mask that runs high in the next step. It keeps nothing from one call to the next, so a
resumed run goes on as the uninterrupted one would.

    RandomUnits   as many random units as another run had high in that step: what the choice itself is worth.
                  Every claim needs it beside it; if control does no better, its choice adds nothing
    RoundRobin    the whole budget in every step, one unit after the other: what the budget alone is worth
    TopNorm       the whole budget in every step, to the largest gradients: what a history of them adds
    ByLot         the whole budget in every step, drawn with chances in proportion to risk: where the harm is steady,
                  the largest risk alone would hold the seat for good, and the other units would never be helped
    Fixed         the same units in every step, beside what is chosen otherwise
"""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from trimtab.checks import is_whole, require
from trimtab.control.advance import Verdict
from trimtab.control.values import Bools

Selection = Callable[[int, Verdict], Bools]


class RandomUnits:
    """As many random units as another run had high in the same step."""

    def __init__(self, counts: Sequence[int], recoverable: Bools, *, seed: int = 0) -> None:
        """Take the number of high units of each executed step, the first step first."""
        self._counts, self._choices, self._seed = list(counts), np.flatnonzero(recoverable), seed

    def __call__(self, step: int, verdict: Verdict) -> Bools:
        """Choose for step + 1; a pure function of the seed and the step."""
        wanted = self._counts[step] if step < len(self._counts) else 0  # counts[step] is that of step + 1
        draw = np.random.default_rng([self._seed, step])
        return _mask(verdict, draw.permutation(self._choices)[:wanted])


class RoundRobin:
    """A full budget that moves on by its own size: each unit has its turn once in units / count steps."""

    def __init__(self, count: int, recoverable: Bools) -> None:
        require(is_whole(count), "count must be a whole number of at least 0", count)
        self._choices = np.flatnonzero(recoverable)
        self._count = min(count, len(self._choices))

    def __call__(self, step: int, verdict: Verdict) -> Bools:
        """Choose for step + 1; a pure function of the step."""
        turn = step * self._count + np.arange(self._count)
        return _mask(verdict, self._choices[turn % max(len(self._choices), 1)])


class TopNorm:
    """A full budget to the units with the largest gradient norms, equal ones by index; a NaN counts as largest."""

    def __init__(self, count: int, recoverable: Bools, norms: Callable[[], NDArray[np.floating]]) -> None:
        """Take a function that gives the norms of the present step, (U,): a verdict knows only their ratios."""
        require(is_whole(count), "count must be a whole number of at least 0", count)
        self._count, self._choices, self._norms = count, np.flatnonzero(recoverable), norms

    def __call__(self, step: int, verdict: Verdict) -> Bools:
        """Choose for step + 1, by the norms of this step."""
        norms = np.asarray(self._norms(), np.float64)[self._choices]
        order = np.argsort(-np.where(np.isfinite(norms), norms, np.inf), kind="stable")
        return _mask(verdict, self._choices[order[: self._count]])


class ByLot:
    """A full budget to units drawn without putting back, each draw with chances in proportion to risk."""

    def __init__(self, count: int, recoverable: Bools, *, seed: int = 0) -> None:
        require(is_whole(count), "count must be a whole number of at least 0", count)
        self._count, self._choices, self._seed = count, np.flatnonzero(recoverable), seed

    def __call__(self, step: int, verdict: Verdict) -> Bools:
        """Choose for step + 1; a pure function of the seed, the step and the risks."""
        limits = np.finfo(np.float64)
        risk = np.clip(verdict.risk.risk[0, self._choices], limits.tiny, limits.max)
        noise = np.random.default_rng([self._seed, step]).gumbel(size=len(risk))
        order = np.argsort(-(np.log(risk) + noise), kind="stable")  # the largest of these keys are such a draw
        return _mask(verdict, self._choices[order[: self._count]])


class Fixed:
    """The same units in every step, beside what another selection chooses, or the controller itself.

    A fixed unit that triggers takes a seat of the budget like any other; the rest stay outside it.
    """

    def __init__(self, mask: Bools, beside: Selection | None = None) -> None:
        self.mask, self._beside = np.asarray(mask, bool).copy(), beside

    def __call__(self, step: int, verdict: Verdict) -> Bools:
        """Choose for step + 1."""
        chosen = verdict.choice.high[0] if self._beside is None else self._beside(step, verdict)
        return self.mask | chosen


def _mask(verdict: Verdict, chosen: NDArray[np.int64]) -> Bools:
    mask = np.zeros(verdict.choice.high.shape[1], bool)
    mask[chosen] = True
    return mask
