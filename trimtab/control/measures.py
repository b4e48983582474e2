# SPDX-License-Identifier: Apache-2.0
"""Measures: the two steps that every detector shares, from a ratio to a risk and from a value to its step's median."""

import numpy as np
from numpy.typing import NDArray

from trimtab.control.judge import risk_of
from trimtab.control.policy import Policy
from trimtab.control.values import Bools, Floats, Risk


def settle(ratio: Floats, jump: Floats, norm: NDArray[np.float32], seen: Bools, policy: Policy, alpha: Floats) -> Risk:
    """Ratio and jump as a risk: +inf where the norm or the ratio is not finite, NaN and 0 without a gradient."""
    poisoned = seen & ~(np.isfinite(norm) & ~np.isinf(ratio))
    ratio, jump = (np.where(poisoned, np.inf, np.where(seen, x, np.nan)) for x in (ratio, jump))
    return Risk(ratio, jump, risk_of(ratio, jump, policy, alpha))


def median_of(values: Floats) -> Floats:
    """The median of each row's finite values, (T, 1); 1 where there is none or it is 0, which divides nothing."""
    finite = np.isfinite(values)
    count = finite.sum(axis=1)
    ordered = np.sort(np.where(finite, values, np.inf), axis=1)
    rows, last = np.arange(len(values)), max(values.shape[1] - 1, 0)
    low = ordered[rows, np.clip((count - 1) // 2, 0, last)]
    high = ordered[rows, np.clip(count // 2, 0, last)]
    median = np.where(count > 0, (low + high) / 2, 1.0)
    return np.where((median > 0) & np.isfinite(median), median, 1.0)[:, None]
