# SPDX-License-Identifier: Apache-2.0
"""Columns: a detector on any one column, held against its unit's past, the other units, or a level.

The triggers that the paper compares with are of this kind (its Table 11): a spectral norm that is large beside the
others', a gradient signal-to-noise ratio that is small, an update that leaves its history, a quantization error above a
level. What differs is only the column and what it is divided by.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from trimtab.checks import is_positive, require
from trimtab.control.judge import History, judge
from trimtab.control.measures import median_of, settle
from trimtab.control.policy import Policy
from trimtab.control.values import Bools, Floats, Risk

Columns = Mapping[str, NDArray[np.float32]]


class Held(NamedTuple):
    """The last value of each unit."""

    last: Floats  # (U,)


@dataclass(frozen=True)
class OnColumn:
    """One column, against its unit's own history (GNMR's arithmetic), the other units of the step, or a level.

    Against units or a level, a unit that was not measured (a high unit has no low path to measure) keeps its last
    value, which fades: it stays risky for a while and is then looked at again.
    """

    name: str
    column: str
    against: Literal["history", "units"] | float = "history"
    inverse: bool = False
    """Small values are risky."""
    fade: float = 0.9
    """How much of an unmeasured value is left after a step."""

    def __post_init__(self) -> None:
        fine = self.against in ("history", "units") or is_positive(self.against)
        require(fine, 'against must be "history", "units" or a level above 0', self.against)
        require(0 <= self.fade <= 1, "fade must lie in [0, 1]", self.fade)

    @property
    def columns(self) -> tuple[str, ...]:
        """The one column, unless it is the norm, which is always there."""
        return () if self.column == "norm" else (self.column,)

    def fresh(self, num_units: int, policy: Policy) -> History | Held:
        """Empty histories, or no values."""
        return History.fresh(num_units, policy) if self.against == "history" else Held(np.full(num_units, np.nan))

    def judge(self, memory: Any, columns: Columns, seen: Bools, policy: Policy, alpha: Floats) -> tuple[Risk, Any]:
        """The column as a ratio."""
        values = columns[self.column]
        if self.inverse:
            with np.errstate(divide="ignore"):
                values = np.float32(1) / values
        if self.against == "history":
            risk, memory = judge(memory, values, seen & ~np.isnan(values), policy, alpha)
            return settle(risk.ratio, risk.jump, columns["norm"], seen, policy, alpha), memory
        values, memory = self._held(memory, values)
        level = median_of(np.where(seen, values, np.nan)) if self.against == "units" else self.against
        ratio = values / level
        return settle(ratio, np.zeros_like(ratio), columns["norm"], seen, policy, alpha), memory

    def _held(self, memory: Held, values: NDArray[np.float32]) -> tuple[Floats, Held]:
        """Fill what was not measured with what was measured last; an infinite value is not kept."""
        wide, last = values.astype(np.float64), memory.last
        missing = np.isnan(wide)
        for t in np.flatnonzero((missing | np.isinf(wide)).any(axis=1)):
            last = wide[t - 1] if t else last
            before = np.where(np.isinf(last), np.nan, last)
            wide[t] = np.where(missing[t], before * self.fade, wide[t])
        last = wide[-1] if len(wide) else last
        return wide, Held(np.where(np.isinf(last), np.nan, last))

    def rescaled(self, memory: Any, factor: float) -> Any:
        """Only the norm itself scales with the gradient; an update, a weight or a relative error does not."""
        if self.column != "norm":
            return memory
        if isinstance(memory, Held):
            return Held(memory.last * factor)
        return memory._replace(mean=memory.mean * factor, recent=memory.recent * factor)
