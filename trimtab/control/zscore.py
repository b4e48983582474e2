# SPDX-License-Identifier: Apache-2.0
"""Z-score: a log-norm against the mean and deviation of its unit's own history.

GNMR asks by what factor a norm exceeds its mean; this asks by how many deviations, so that a unit whose norm always
swings is allowed to. In logarithms a norm is closer to normal, and a factor is a difference.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from trimtab.checks import is_positive, require
from trimtab.control.measures import settle
from trimtab.control.policy import Policy
from trimtab.control.surprise import Track, fresh_track, policy_weights, surprise
from trimtab.control.values import Bools, Floats, Risk
from trimtab.errors import TrimtabError

Columns = Mapping[str, NDArray[np.float32]]


@dataclass(frozen=True)
class ZScore:
    """z of the log-norm against the running mean and deviation of the unit's own history."""

    sigmas: float = 3.0
    """Deviations above the mean that alpha 1 stands for."""
    floor: float = 0.05
    """Least deviation of a log-norm, so that a nearly constant norm does not alarm on a trifle."""

    name = "zscore"
    columns = ()

    def __post_init__(self) -> None:
        for field in ("sigmas", "floor"):
            require(is_positive(getattr(self, field)), f"{field} must be a positive number", getattr(self, field))

    def fresh(self, num_units: int, policy: Policy) -> Track:
        """Empty tracks."""
        if policy.history in ("exclude_triggered", "window"):
            raise TrimtabError(
                f"zscore measures against a running mean, got history={policy.history!r}: use cumulative (with "
                "memory=), winsorized or ema"
            )
        return fresh_track(num_units)

    def judge(self, memory: Track, columns: Columns, seen: Bools, policy: Policy, alpha: Floats) -> tuple[Risk, Track]:
        """z / sigmas; 0 for the first `window` norms of a unit. A norm of zero has no logarithm and is passed over."""
        norm = columns["norm"]
        live = seen & np.isfinite(norm) & (norm > 0)
        logs = np.log(np.where(live, norm, 1).astype(np.float64))
        clip = policy.kappa if policy.history == "winsorized" else np.inf
        weights = policy_weights(policy)
        z, memory = surprise(memory, logs, live, weights, weights, floor=self.floor, clip=clip, least=policy.window)
        ratio = np.maximum(z, 0.0) / self.sigmas
        return settle(ratio, np.zeros_like(ratio), norm, seen, policy, alpha), memory

    def rescaled(self, memory: Track, factor: float) -> Track:
        """A factor shifts the logarithm."""
        return memory._replace(level=np.where(memory.num > 0, memory.level + np.log(factor), 0.0))
