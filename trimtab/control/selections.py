# SPDX-License-Identifier: Apache-2.0
"""Selections: other ways to fill the seats, to hold the controller against.

A selection replaces who is chosen, not what is judged: it is called once per pass with the step and the
verdict, and returns the mask that runs high in the next step. The one that every claim needs beside it is
random units at the controller's own count per step: if control does no better than that, its choice adds
nothing.
"""

from collections.abc import Callable, Sequence

import numpy as np

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
        mask = np.zeros(verdict.choice.high.shape[1], bool)
        wanted = self._counts[step] if step < len(self._counts) else 0  # counts[step] is that of step + 1
        draw = np.random.default_rng([self._seed, step])
        mask[draw.permutation(self._choices)[:wanted]] = True
        return mask
