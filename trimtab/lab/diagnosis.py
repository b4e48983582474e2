# SPDX-License-Identifier: Apache-2.0
"""A diagnosis as values: what `diagnose` measured, ranked, and summed up with intervals over batches.

    Probe        what one choice of paths did to the gradient and the loss, batch by batch
    Row          one unit: its recovery gap, only this unit low, only this unit high, each role
    Diagnosis    all of it: `.ranked()`, `.keep_high(budget)`, `.to_dict()`

What is measured, and the words, are explained in `diagnose.py`. Plain numpy: nothing here runs a model.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from trimtab.control.policy import Policy
from trimtab.control.values import Floats
from trimtab.errors import TrimtabError
from trimtab.lab.intervals import Interval, interval


class Probe(NamedTuple):
    """What one choice of paths did; each (batches,), or (units, batches) where every unit was probed."""

    error: Floats
    """|g - g_high|^2; infinite where the gradient is not finite."""
    relative: Floats
    """|g - g_high| / |g_high|."""
    cosine: Floats
    """Between g and g_high; NaN where one of them is zero or not finite."""
    own: Floats
    """`relative`, but over the unit's own parameters alone; NaN where no single unit was probed or it has none."""
    loss: Floats


RANKINGS = ("gap", "own")

Measures = dict[str, Interval]
"""error, relative, cosine, own, and loss_change."""


def gap(low: Floats, high: Floats) -> Floats:
    """The error that goes away; nothing, where it is infinite with and without."""
    with np.errstate(invalid="ignore"):
        return np.where(np.isinf(low) & np.isinf(high), 0.0, low - high)


def over_batches(values: Floats) -> Interval:
    """Mean and 95 % interval; one infinite value makes the mean infinite and leaves no interval."""
    if np.isfinite(values).all():
        return interval(values.tolist())
    return Interval(float(_mean(values)), math.nan, len(values))


@dataclass(frozen=True)
class Row:
    """One unit's findings, each over the batches."""

    unit: str
    gap: Interval
    share: float | None
    """The gap over the error with everything low: what part of it goes away when this unit alone runs high."""
    only_low: Measures
    """Only this unit low; its loss_change is against everything high."""
    only_high: Measures
    """Only this unit high; its loss_change is against everything low."""
    roles: dict[str, Measures]
    """Only this role of this unit low; loss_change as in `only_low`."""

    @property
    def worst_role(self) -> str | None:
        """The role with the largest error alone; None where none has any."""
        errors = {role: found["error"].mean for role, found in self.roles.items()}
        worst = max(errors, key=errors.__getitem__, default=None)
        return worst if worst is not None and errors[worst] > 0 else None


@dataclass(frozen=True, eq=False)
class Diagnosis:
    """What `diagnose` measured on U units and B batches."""

    recipe: str
    units: tuple[str, ...]
    patterns: tuple[str, ...]
    """For each unit a glob over module paths: what a filter needs to leave its linears alone."""
    norm: Floats
    """|g_high|, (B,)."""
    loss: Floats
    """The loss with everything high, (B,)."""
    low: Probe
    """Everything low, (B,)."""
    only_low: Probe
    """(U, B)."""
    only_high: Probe
    """(U, B)."""
    roles: dict[str, Probe]
    """Each (U, B)."""
    passes: int
    """How many forward and backward passes it took."""
    kept: tuple[str, ...] = ()
    """The keep-high list that was measured as a whole."""
    kept_high: Probe | None = None
    """Exactly that list high, (B,)."""

    @property
    def gaps(self) -> Floats:
        """The recovery gap of every unit and batch, (U, B)."""
        return gap(self.low.error, self.only_high.error)

    def order(self, by: str = "gap") -> list[int]:
        """The units' places, the largest mean of `by` first; equal ones by the error with only this unit low."""
        if by not in RANKINGS:
            raise TrimtabError(f"units are ranked by {' or '.join(RANKINGS)}, got {by!r}")
        values = (self.gaps if by == "gap" else self.only_low.own, self.only_low.error)
        first, second = (np.nan_to_num(_mean(column)) for column in values)
        return np.lexsort((-second, -first)).tolist()  # a stable sort: what is equal in both stays in model order

    def ranked(self, by: str = "gap") -> list[Row]:
        """A row per unit: by `gap`, who is most worth recovering, or by `own`, whose low path is most broken."""
        return [self._row(index) for index in self.order(by)]

    def keep_high(self, max_high: int | float = 0.05) -> list[str]:
        """The units to keep high for good: the largest gaps first, as many as the budget; never one without a gap.

        Args:
            max_high: a count, or a fraction of the units, as in `Policy`.
        """
        means = _mean(self.gaps)
        return [self.units[index] for index in self.order()[: num_high(max_high, len(self.units))] if means[index] > 0]

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON and for the page, the units in the order of their rank."""
        reference = {"loss": over_batches(self.loss).to_dict(), "grad_norm": over_batches(self.norm).to_dict()}
        return {
            "recipe": self.recipe,
            "batches": len(self.loss),
            "passes": self.passes,
            "reference": reference,
            "all_low": _plain(_measures(self.low, self.loss)),
            "units": [self._plain_row(row) for row in self.ranked()],
            "keep_high": self._plain_kept(),
        }

    def _row(self, index: int) -> Row:
        found = over_batches(self.gaps[index])
        return Row(
            self.units[index],
            found,
            self._share(found),
            _measures(_at(self.only_low, index), self.loss),
            _measures(_at(self.only_high, index), self.low.loss),
            {role: _measures(_at(probe, index), self.loss) for role, probe in self.roles.items()},
        )

    def _share(self, found: Interval) -> float | None:
        total = float(self.low.error.mean())
        return found.mean / total if total > 0 and math.isfinite(total) and math.isfinite(found.mean) else None

    def _plain_row(self, row: Row) -> dict[str, Any]:
        return {
            "unit": row.unit,
            "pattern": self.patterns[self.units.index(row.unit)],
            "gap": row.gap.to_dict(),
            "share": row.share,
            "only_low": _plain(row.only_low),
            "only_high": _plain(row.only_high),
            "roles": {role: _plain(found) for role, found in row.roles.items()},
            "worst_role": row.worst_role,
        }

    def _plain_kept(self) -> dict[str, Any] | None:
        if self.kept_high is None:
            return None
        places = [self.units.index(unit) for unit in self.kept]
        together = over_batches(gap(self.low.error, self.kept_high.error))
        return {
            "units": list(self.kept),
            "patterns": [self.patterns[place] for place in places],
            "gap": together.to_dict(),
            "share": self._share(together),
            "sum_of_gaps": over_batches(self.gaps[places].sum(axis=0)).to_dict(),
            **_plain(_measures(self.kept_high, self.low.loss)),
        }


def num_high(max_high: int | float, num_units: int) -> int:
    """A budget as a count of units, by the rule of `Policy`."""
    return Policy(max_high=max_high, alpha_warmup=None).resolve(num_units, None).max_high


def _mean(values: Floats) -> Floats:
    """Over the batches; infinities of both signs give NaN and no warning."""
    with np.errstate(invalid="ignore"):
        return values.mean(axis=-1)


def _at(probe: Probe, index: int) -> Probe:
    return Probe(*(column[index] for column in probe))


def _measures(probe: Probe, loss: Floats) -> Measures:
    """The findings of one choice of paths, its loss as the change against another one."""
    with np.errstate(invalid="ignore"):
        change = probe.loss - loss
    columns = {name: getattr(probe, name) for name in ("error", "relative", "cosine", "own")} | {"loss_change": change}
    return {name: over_batches(values) for name, values in columns.items()}


def _plain(measures: Mapping[str, Interval]) -> dict[str, dict[str, float | int | None]]:
    return {name: found.to_dict() for name, found in measures.items()}
