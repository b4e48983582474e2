# SPDX-License-Identifier: Apache-2.0
"""Pool: a run of any length on a page of bounded size.

A page has perhaps a thousand pixels across; a run has a hundred thousand steps. Averaging would hide the one
bad step that the page exists to show, so everything here keeps extremes:

    curves      cut into bins, the smallest and the largest point of each bin kept in order
    matrices    steps fall into equal columns, a cell is the largest value of its unit in its column
    timeline    runs of equal columns become intervals; columns are joined until few enough remain

Ratios travel as one byte each: log2 of the ratio from 1/8 to 8 in steps of 0.024, and two codes for "not
finite" and "no gradient". Blocks arrive one after another, so memory does not grow with the run.
"""

import base64
import itertools
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trimtab.report.passes import Passes

MAX_COLUMNS = 2000
MAX_CELLS = 400_000
MAX_SHOWN = 512
"""Most units in the heat-map; of more, those with the largest ratios are shown."""
MAX_ROWS = 40
"""Most units in the timeline."""
MAX_INTERVALS = 4000
LEVELS = 250
"""Codes 0 to LEVELS are log2 ratios from -SPAN to SPAN."""
SPAN = 3.0
CODE_NONFINITE, CODE_UNSEEN = 254, 255


def curve(x: NDArray, y: NDArray[np.float64], points: int = MAX_COLUMNS) -> tuple[NDArray, NDArray[np.float64]]:
    """A curve of at most `points` points that still touches every peak and every dip; y must be finite."""
    if len(y) <= points:
        return x, y
    edges = np.linspace(0, len(y), points // 2 + 1).astype(int)
    keep = set()
    for start, stop in itertools.pairwise(edges):
        keep |= {int(start + y[start:stop].argmin()), int(start + y[start:stop].argmax())}
    index = np.array(sorted(keep))
    return x[index], y[index]


def encode(ratio: NDArray[np.floating]) -> NDArray[np.uint8]:
    """Ratios as one byte each; -inf says that there was no gradient, inf that it was not finite."""
    with np.errstate(divide="ignore", invalid="ignore"):
        level = (np.clip(np.log2(np.maximum(ratio, 0)), -SPAN, SPAN) + SPAN) * (LEVELS / (2 * SPAN))
    codes = np.rint(np.nan_to_num(level)).astype(np.uint8)
    codes[ratio == np.inf] = CODE_NONFINITE
    codes[ratio == -np.inf] = CODE_UNSEEN
    return codes


class Pool:
    """The matrices of a run, max-pooled into columns of equal numbers of steps."""

    def __init__(self, num_units: int, first_step: int, last_step: int) -> None:
        length = max(last_step - first_step + 1, 1)
        columns = max(1, min(MAX_COLUMNS, MAX_CELLS // max(1, min(num_units, MAX_SHOWN))))
        self.first = first_step
        self.width = -(-length // columns)
        """Steps per column."""
        shape = (-(-length // self.width), num_units)
        self.ratio = np.full(shape, -np.inf, np.float32)
        self.why = np.zeros(shape, np.uint8)
        self.refused = np.zeros(shape, bool)
        self.num_high = np.zeros(shape[0], np.int64)
        self.num_asked = np.zeros(shape[0], np.int64)

    def add(self, block: Passes) -> None:
        """Pool a block."""
        column = np.clip((block.steps - self.first) // self.width, 0, len(self.ratio) - 1)
        starts = np.flatnonzero(np.diff(column, prepend=-1))
        for a, b in zip(starts, [*starts[1:], len(column)], strict=True):
            at, rows = column[a], slice(a, b)
            ratio = block.verdict.risk.ratio[rows]
            largest = np.where(np.isnan(ratio), -np.inf, ratio).max(axis=0)
            self.ratio[at] = np.maximum(self.ratio[at], np.minimum(largest, np.where(np.isinf(largest), np.inf, 3e38)))
            self.why[at] = np.maximum(self.why[at], block.why[rows].max(axis=0))
            self.refused[at] |= block.refused[rows].any(axis=0)
            high = block.ran[rows].sum(axis=1)
            self.num_high[at] = max(self.num_high[at], high.max())
            self.num_asked[at] = max(self.num_asked[at], (high + block.refused[rows].sum(axis=1)).max())

    def heatmap(self) -> dict[str, Any]:
        """Bytes of the heat-map, unit by unit, base64; and which units it shows."""
        shown = np.arange(self.ratio.shape[1])
        if len(shown) > MAX_SHOWN:
            shown = np.sort(np.argsort(-self.ratio.max(axis=0), kind="stable")[:MAX_SHOWN])
        codes = encode(self.ratio[:, shown])
        data = base64.b64encode(np.ascontiguousarray(codes.T).tobytes()).decode("ascii")
        return {"units": shown.tolist(), "columns": len(codes), "data": data}

    def timeline(self) -> dict[str, Any]:
        """Intervals [row, first step, steps, cause code] of the units that ran high or were refused (code 0)."""
        steps_high, refused = (self.why > 0).sum(axis=0), self.refused.sum(axis=0)
        order = np.lexsort((-refused, -steps_high))
        order = order[(steps_high + refused)[order] > 0]
        rows = np.sort(order[:MAX_ROWS])
        why, refused, width = self.why[:, rows], self.refused[:, rows], self.width
        while True:
            intervals = _intervals(why, refused & (why == 0))
            if len(intervals) <= MAX_INTERVALS:
                break
            why, refused, width = _halve(why), _halve(refused), 2 * width
        spans = [[row, self.first + start * width, count * width, code] for row, start, count, code in intervals]
        return {"units": rows.tolist(), "total": len(order), "width": width, "intervals": spans}


def _halve(matrix: NDArray) -> NDArray:
    """Join neighbouring columns, keeping the larger."""
    if len(matrix) % 2:
        matrix = np.concatenate([matrix, np.zeros_like(matrix[:1])])
    return np.maximum(matrix[::2], matrix[1::2])


def _intervals(why: NDArray[np.uint8], refused: NDArray[np.bool_]) -> list[list[int]]:
    """Stretches of equal code as [row, first column, columns, code]; refusals have code 0."""
    codes = np.where(refused, 255, why).astype(np.int16)
    found = []
    for row in range(codes.shape[1]):
        line = codes[:, row]
        starts = np.flatnonzero(np.diff(line, prepend=-1))
        lengths = np.diff(np.append(starts, len(line)))
        for start, length in zip(starts.tolist(), lengths.tolist(), strict=True):
            if line[start]:
                found.append([row, start, length, 0 if line[start] == 255 else int(line[start])])
    return found
