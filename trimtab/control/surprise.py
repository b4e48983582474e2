# SPDX-License-Identifier: Apache-2.0
"""Surprise: how far a value lies from what its unit's own past foretold, in deviations.

Each unit has a level, a slope and a variance of what was left over. For a new value x:

    foretold = level + slope
    e        = x - foretold
    z        = e / max(sqrt(variance), floor)         0 for the first `least` values
    level   <- foretold + w e
    slope   <- slope + trend w e                      trend 0: a plain running mean
    variance <- (1 - v) (variance + v e^2)            with v = 1 / count Welford's rule, exactly

With w = v = 1 / count it is the z-score of a running mean. With w bounded from below it follows values that drift,
and with a trend it does not lag behind them. e enters clipped to `clip` deviations, so that a lasting fault is not
taken for normal at once. Values of a unit that was not measured are passed over.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from trimtab.control.policy import Policy
from trimtab.control.values import Bools, Floats

Weights = Callable[[NDArray[np.int64]], Floats]
"""The weight of a new value, given how many there are with it."""


class Track(NamedTuple):
    """What is remembered of each unit's values."""

    num: NDArray[np.int64]  # (U,) values so far
    level: Floats  # (U,)
    slope: Floats  # (U,)
    variance: Floats  # (U,)


def fresh_track(num_units: int) -> Track:
    """Nothing yet."""
    zeros = np.zeros(num_units)
    return Track(np.zeros(num_units, np.int64), zeros, zeros, zeros)


def surprise(
    track: Track,
    values: Floats,  # (T, U)
    live: Bools,  # (T, U)
    weight: Weights,
    spread: Weights,
    *,
    floor: float,
    clip: float = np.inf,
    trend: float = 0.0,
    least: int = 1,
) -> tuple[Floats, Track]:
    """z of T steps of values, 0 where a unit is not live, and the track after them."""
    z = np.zeros(values.shape)
    count, level, slope, variance = track
    for t in range(len(values)):
        foretold = np.where(count > 0, level + slope, values[t])
        deviation = np.maximum(np.sqrt(variance), floor)
        error = values[t] - foretold
        old = count >= least
        z[t] = np.where(live[t] & old, error / deviation, 0.0)
        limit = np.where(old, clip * deviation, np.inf)
        error = np.clip(error, -limit, limit)
        w, v = weight(count + 1), spread(count + 1)
        level = np.where(live[t], foretold + w * error, level)
        slope = np.where(live[t], slope + trend * w * error, slope)
        variance = np.where(live[t], (1 - v) * (variance + v * error * error), variance)
        count = count + live[t]
    return z, Track(count, level, slope, variance)


def policy_weights(policy: Policy) -> Weights:
    """The weights of a policy's history: 1 / count, bounded by its memory, or those of its bias-corrected decay."""
    if policy.history == "ema":
        return lambda count: (1 - policy.decay) / (1 - policy.decay ** count.astype(np.float64))
    most = np.inf if policy.memory is None else policy.memory
    return lambda count: 1 / np.minimum(count, most)


def at_least(least: float) -> Weights:
    """1 / count, but never below `least`."""
    return lambda count: np.maximum(1 / count, least)
