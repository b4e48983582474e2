# SPDX-License-Identifier: Apache-2.0
"""Strip: a run that is still going on, in a bounded number of columns.

Nobody knows how long a live run will become, so a column is one step at first. When there are no columns left they are
joined in pairs and each is twice as many steps, and so on: memory stays the same from the first step to the millionth,
and what a column shows is still the extreme of its steps (`pool.py` says why).

    units       the largest ratio of a unit in a column; in how many of its steps it ran high, or would have
    curves      smallest, largest and mean value of a metric in a column, and how many values were not finite

Each column knows the `tick` of its last change, so that a page asks for what is newer than the tick it has.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trimtab.control.values import Bools

MAX_COLUMNS = 720
MAX_CELLS = 1_000_000
MIN_COLUMNS = 64
LOW, HIGH, SUM, COUNT, BAD = range(5)
"""Rows of a curve: smallest, largest, sum and number of finite values, number of others."""
EMPTY = np.array([np.inf, -np.inf, 0.0, 0.0, 0.0])


class Strip:
    """Columns of equal numbers of steps."""

    def __init__(self, num_units: int) -> None:
        most = min(MAX_COLUMNS, max(MIN_COLUMNS, MAX_CELLS // max(num_units, 1)))
        self.most = most - most % 2
        self.first: int | None = None
        """The step of the first column."""
        self.width = 1
        """Steps per column."""
        self.used = 0
        self.ratio = np.full((self.most, num_units), -np.inf, np.float32)
        self.ran = np.zeros((self.most, num_units), np.int32)
        self.would = np.zeros((self.most, num_units), np.int32)
        self.curves: dict[str, NDArray[np.float64]] = {}  # each (columns, 5)
        self.changed = np.zeros(self.most, np.int64)

    def add_passes(self, tick: int, steps: NDArray[np.int64], ratio: NDArray, ran: Bools, would: Bools) -> None:
        """Add T passes: ratios with NaN where a unit had no gradient, who ran high, and who would have."""
        column = self._place(tick, steps)
        if not len(column):
            return
        starts = np.flatnonzero(np.diff(column, prepend=-1))
        at = column[starts]
        with np.errstate(over="ignore"):
            largest = np.where(np.isnan(ratio), -np.inf, ratio).astype(np.float32)
        np.maximum.at(self.ratio, at, np.maximum.reduceat(largest, starts))
        for counts, high in ((self.ran, ran), (self.would, would)):
            np.add.at(counts, at, np.add.reduceat(high, starts, dtype=np.int32))

    def add_values(self, tick: int, name: str, steps: Sequence[int], values: Sequence[float]) -> None:
        """Add values of a metric; what is not finite is counted and left out of the curve."""
        column, found = self._place(tick, np.array(steps, np.int64)), np.array(values, np.float64)
        if name not in self.curves:
            self.curves[name] = np.tile(EMPTY, (self.most, 1))
        curve, fine = self.curves[name], np.isfinite(found)
        at, finite = column[fine], found[fine]
        np.minimum.at(curve[:, LOW], at, finite)
        np.maximum.at(curve[:, HIGH], at, finite)
        np.add.at(curve[:, SUM], at, finite)
        np.add.at(curve[:, COUNT], at, 1)
        np.add.at(curve[:, BAD], column[~fine], 1)

    def newer(self, tick: int) -> int:
        """The first column that changed after a tick; `used` if none did."""
        later = np.flatnonzero(self.changed[: self.used] > tick)
        return int(later[0]) if len(later) else self.used

    def _place(self, tick: int, steps: NDArray[np.int64]) -> NDArray[np.int64]:
        """The column of each step, once there is room for all of them; a step before the first falls into it."""
        if not len(steps):
            return steps
        if self.first is None:
            self.first = int(steps[0])
        while (int(steps.max()) - self.first) // self.width >= self.most:
            self._join()
        column = np.maximum(steps - self.first, 0) // self.width
        self.used = max(self.used, int(column.max()) + 1)
        self.changed[column] = tick
        return column

    def _join(self) -> None:
        """Make one column of two."""
        self.ratio = _pairs(self.ratio, np.maximum, -np.inf)
        self.ran, self.would = (_pairs(matrix, np.add, 0) for matrix in (self.ran, self.would))
        self.changed = _pairs(self.changed, np.maximum, 0)
        reducers = (np.minimum, np.maximum, np.add, np.add, np.add)
        for name, curve in self.curves.items():
            columns = [_pairs(curve[:, i], reducers[i], EMPTY[i]) for i in range(len(EMPTY))]
            self.curves[name] = np.stack(columns, axis=1)
        self.width *= 2
        self.used = -(-self.used // 2)


def _pairs(matrix: NDArray[Any], how: Callable[..., NDArray[Any]], empty: Any) -> NDArray[Any]:
    """Neighbouring rows as one, in the upper half; the lower half is empty."""
    joined = np.full_like(matrix, empty)
    joined[: len(matrix) // 2] = how(matrix[::2], matrix[1::2])
    return joined
