# SPDX-License-Identifier: Apache-2.0
"""Means with 95 % intervals, and paired differences: what a handful of seeds allows one to say.

    mean +- t(0.975, n - 1) * s / sqrt(n)        s the sample's standard deviation (n - 1)

Two arms that share a seed share weights, data order and faults, so most of what makes seeds differ is common to both.
The interval of the *differences*, seed by seed, leaves that out; it is usually several times narrower than the two
intervals side by side, and it is the one that says whether an arm helps. It assumes that differences are roughly
normal, and says nothing about seeds beyond the kind that was drawn.

What is not finite (a run that died) is left out, and `n` says how many were left. One value has a mean and no interval.
"""

import math
from collections.abc import Iterable, Mapping
from typing import NamedTuple

# Student's t, two-sided 95 %, for 1 to 30 degrees of freedom.
T_95 = (
    *(12.706205, 4.302653, 3.182446, 2.776445, 2.570582, 2.446912, 2.364624, 2.306004, 2.262157, 2.228139),
    *(2.200985, 2.178813, 2.160369, 2.144787, 2.131450, 2.119905, 2.109816, 2.100922, 2.093024, 2.085963),
    *(2.079614, 2.073873, 2.068658, 2.063899, 2.059539, 2.055529, 2.051831, 2.048407, 2.045230, 2.042272),
)
Z_95 = 1.959963985


class Interval(NamedTuple):
    """A mean and the half width of its 95 % interval."""

    mean: float
    half: float
    """NaN for fewer than two values."""
    n: int

    @property
    def excludes_zero(self) -> bool:
        """Whether zero lies outside; False where there is no interval."""
        return abs(self.mean) > self.half

    def to_dict(self) -> dict[str, float | int | None]:
        """Plain values for JSON, None where a value is not finite."""
        mean, half = (value if math.isfinite(value) else None for value in (self.mean, self.half))
        return {"mean": mean, "half": half, "n": self.n}


def t_95(freedom: int) -> float:
    """The two-sided 95 % quantile of Student's t; past the table by Cornish and Fisher's expansion, to 2e-6."""
    if freedom <= len(T_95):
        return T_95[freedom - 1]
    z, v = Z_95, freedom
    first = (z**3 + z) / 4
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + first / v + second / v**2 + third / v**3


def interval(values: Iterable[float | None]) -> Interval:
    """Mean and 95 % half width of the finite values."""
    found = [float(value) for value in values if value is not None and math.isfinite(value)]
    n = len(found)
    if n == 0:
        return Interval(math.nan, math.nan, 0)
    mean = math.fsum(found) / n
    if n == 1:
        return Interval(mean, math.nan, 1)
    variance = math.fsum((value - mean) ** 2 for value in found) / (n - 1)
    return Interval(mean, t_95(n - 1) * math.sqrt(variance / n), n)


def paired(ours: Mapping[int, float | None], theirs: Mapping[int, float | None]) -> Interval:
    """The interval of ours minus theirs, over the seeds that both have."""
    both = ((ours[seed], theirs.get(seed)) for seed in ours)
    return interval(a - b for a, b in both if a is not None and b is not None)


def gap_closed(arm: float | None, low: float | None, high: float | None) -> float | None:
    """The share of the loss between low and high that an arm wins back; None where there is none to measure."""
    if arm is None or low is None or high is None or low == high:
        return None
    return (low - arm) / (low - high)
