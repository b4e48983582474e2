# SPDX-License-Identifier: Apache-2.0
"""Spikes: where a loss left its range, and where a norm did, from a curve alone.

    baseline   median and spread (1.4826 median absolute deviations) of the 128 values before, at least 16
    out        not finite, or more than 6 spreads above the median; a spread counts as at least 0.5 % of the median
    spike      from the first value that is out to the last one before 8 in a row are back below that same level;
               one that never comes back lasts to the end
    drift      the median itself is 3 spreads above the lowest it has been: a loss that rises slowly

Medians, because a mean and its deviation learn from the spike itself. The level of a spike is that of its beginning, so
that a loss which diverges does not become its own baseline. Norms are measured on a log scale, where their noise is
even: there a spread counts as at least 5 %.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

BEFORE, LEAST = 128, 16
SPREADS = 6.0
DRIFT = 3.0
BACK = 8
FLOOR = 0.005
NORM_FLOOR = 0.05
CHUNK = 4096

Floats = NDArray[np.float64]


class Spike(NamedTuple):
    """One stretch in which a curve was out of its range; places are indices into the curve."""

    first: int
    last: int
    level: float
    """The median before it."""
    peak: float
    """Its largest finite value; NaN where there is none."""
    nonfinite: int
    """How many of its values were not finite."""
    returned: bool


def spikes(values: Floats) -> list[Spike]:
    """Every spike of a loss curve."""
    level, spread = _before(values)
    spread = np.maximum(spread, FLOOR * np.abs(level))
    limit = np.where(np.isnan(level), np.inf, level + SPREADS * spread)
    known = np.where(np.isnan(level), np.inf, level)
    drifting = level > np.minimum.accumulate(np.where(np.isnan(level), np.inf, known + DRIFT * spread))
    with np.errstate(invalid="ignore"):
        out = ~np.isfinite(values) | (values > limit)
    found: list[Spike] = []
    at = risen_from = 0
    while at < len(values):
        sudden = _next(out, at)
        slow = _next(drifting, max(at, risen_from))
        first = min(sudden, slow)
        if first == len(values):
            break
        with np.errstate(invalid="ignore"):
            still = ~np.isfinite(values[first:]) | (values[first:] > limit[first])
        length = _length(drifting[first:] if slow < sudden else still)
        part = values[first : first + length]
        fine = part[np.isfinite(part)]
        peak = float(fine.max()) if len(fine) else float("nan")
        ends = first + length == len(values)
        before = float(level[max(first - BEFORE, 0) if slow < sudden else first])
        found.append(Spike(first, first + length - 1, before, peak, len(part) - len(fine), not ends))
        at = first + length
        risen_from = at + BEFORE  # until then the median still holds the spike
    return found


def out_of_range(norms: Floats, since: int = 0) -> tuple[NDArray[np.bool_], Floats]:
    """Which norms are out of their range, and each one's ratio to the median before it (inf where not finite).

    Args:
        since: the place from which on it is asked for; before it nothing is out.
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        logs = np.log(np.where(norms > 0, norms, np.nan))  # a zero is no gradient: no verdict
    level, spread = _before(logs, since)
    with np.errstate(invalid="ignore", over="ignore"):
        poisoned = ~np.isfinite(norms)
        ratio = np.where(poisoned, np.inf, np.exp(logs - level))
        out = poisoned | (logs > level + SPREADS * np.maximum(spread, NORM_FLOOR))
    out[:since] = False
    return out, ratio


def _before(values: Floats, since: int = 0) -> tuple[Floats, Floats]:
    """Median and spread of the `BEFORE` finite values before each; NaN where fewer than `LEAST` are there."""
    finite = np.isfinite(values)
    kept, count = values[finite], np.cumsum(finite) - finite
    found = np.full((2, len(kept) + 1), np.nan)
    least = int(count[since]) if since < len(count) else len(kept)
    for end in range(max(LEAST, least), min(BEFORE, len(kept) + 1)):
        found[:, end : end + 1] = _measures(kept[None, :end])
    if len(kept) >= BEFORE:
        windows = np.lib.stride_tricks.sliding_window_view(kept, BEFORE)
        for start in range(max(least - BEFORE, 0), len(windows), CHUNK):
            part = windows[start : start + CHUNK]
            found[:, BEFORE + start : BEFORE + start + len(part)] = _measures(part)
    level, spread = found[:, count]
    return level, spread


def _measures(windows: Floats) -> tuple[Floats, Floats]:
    middle = np.median(windows, axis=1)
    return middle, 1.4826 * np.median(np.abs(windows - middle[:, None]), axis=1)


def _next(flags: NDArray[np.bool_], start: int) -> int:
    """The first place from `start` on that is flagged, or the end."""
    ahead = np.flatnonzero(flags[start:])
    return start + int(ahead[0]) if len(ahead) else len(flags)


def _length(out: NDArray[np.bool_]) -> int:
    """How long a stretch lasts: up to `BACK` values in a row that are not out, or to the end."""
    if len(out) < BACK:
        return len(out)
    back = np.flatnonzero(np.convolve(~out, np.ones(BACK, int), "valid") == BACK)
    return int(back[0]) if len(back) else len(out)
