# SPDX-License-Identifier: Apache-2.0
"""The values that travel down the pipe, all frozen.

    gradients --> observe --Reading--> judge --Risk--> decide --Plan--> act --> (next step's forward)

A `Reading` is what was measured in one step, a `Risk` what it means against each unit's own history, a
`Plan` the full set that runs high in the next step (never a diff, so applying it twice equals once), an
`Event` one line of the story that a person wants to hear. No stage reaches back into an earlier one.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class Reading:
    """The norms of one step: named float32 columns of length U; `norm` is always there."""

    columns: Mapping[str, NDArray[np.float32]]
    seen: Bools
    """Which units had a gradient at all; the others keep their history."""
    total: float
    """L2 norm over every trainable parameter, watched or not: what clipping uses."""

    @property
    def norm(self) -> NDArray[np.float32]:
        """Gradient norm of each unit (pre-clip, FP32)."""
        return self.columns["norm"]


class Risk(NamedTuple):
    """What judge says, one row per step: unobserved units have NaN ratio and jump and risk 0, poisoned ones +inf."""

    ratio: Floats  # (T, U) GNMR: norm over the mean of the unit's past norms
    jump: Floats  # (T, U) delta-GNMR: ratio over the mean of its last few values
    risk: Floats  # (T, U) max(ratio / alpha, jump / beta); above 1 it triggers


@dataclass(frozen=True, eq=False)
class Plan:
    """The full set of units that run high in the next step, and what else the trainer must know."""

    step: int
    """The optimizer step it was decided from; it acts in step + 1."""
    units: tuple[str, ...] = field(repr=False)
    mask: Bools = field(repr=False)  # (U,)
    nonfinite: bool = False
    """The gradient was NaN or Inf: the gradients are gone, the optimizer step does nothing."""
    rerun: bool = False
    """The same batch should be run again under this plan (`Policy(replay_step=...)`); the gradients are gone."""

    @property
    def high(self) -> tuple[str, ...]:
        """Names of the units that run high."""
        return tuple(name for name, on in zip(self.units, self.mask, strict=True) if on)

    @property
    def num_high(self) -> int:
        """How many units run high."""
        return int(self.mask.sum())


KINDS = ("high", "low", "denied", "nonfinite", "rerun", "persistent", "budget_full")


@dataclass(frozen=True)
class Event:
    """One change of state: who went high or back, and why; who was denied; what else needs a person's eye."""

    step: int
    kind: str
    """`high`, `low`, `denied`, `nonfinite`, `rerun`, `persistent` or `budget_full`."""
    unit: str | None = None
    cause: str = ""
    """`ratio`, `jump`, `nonfinite`, `selection`, or for a way back `quiet` (its lock ran out) or `evicted`."""
    ratio: float | None = None
    jump: float | None = None
    risk: float | None = None
    message: str = ""

    def to_dict(self) -> dict[str, object]:
        """The event as it stands in metrics.jsonl: set fields only."""
        fields = ("kind", "unit", "cause", "ratio", "jump", "risk", "message")
        return {name: value for name in fields if (value := getattr(self, name)) not in (None, "")}
