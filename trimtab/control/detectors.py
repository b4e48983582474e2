# SPDX-License-Identifier: Apache-2.0
"""Detectors: what a unit's risk is read from. `gnmr` is the paper's; the others are there to be held against it.

A detector turns named columns of readings into risks, unit by unit: above 1 a unit triggers, and `decide` takes the
largest. All of them are pure functions of float64 arrays with an explicit memory, as `judge` is, so a replay of a trace
that holds the columns gives the run's own decisions, bit for bit.

    name       a unit is risky when                                                  columns
    gnmr       its gradient norm leaves its own history (Algorithm 1)                norm
    relative   its ratio leaves those of the other units in the same step            norm
    zscore     its log-norm lies `sigmas` deviations above its mean                  norm
    update     its last parameter update leaves its own history                      update
    jacobian   its weights' spectral norm is large beside the other units'           spectral
    gsnr       its gradient's signal-to-noise ratio is small beside the others'      gsnr
    snr        the low path's relative error is above that of 20 dB                  noise
    source     a fault began in it: its gain surprises (`sources.py`)                output, grad_output
    gap        the low path perturbs its gradient more than others' (`estimates.py`) gap

In every one `ratio` is what `policy.alpha` is held against. For `gnmr`, `relative` and `update` also the jump counts,
and `policy.history` says what they are measured against. For `zscore` the ratio is z / sigmas (0 below the mean), so
that alpha 1 means `sigmas` deviations and alpha 1.5 half as many again. For `jacobian` and `gsnr` it is the value, or
its inverse, over the median unit's; for `snr` the error over 10^(-decibels / 20). These have no jump.

A unit without a gradient has risk 0 and keeps its memory; a norm that is not finite is a risk of +inf; a column that
was not measured (NaN) says nothing about the unit in that step.

`full_budget(detector)` lets the riskiest `max_high` units trigger in every step, whatever the thresholds say: the
paper's Table 11 compares triggers in both ways.
"""

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from trimtab.checks import meant, require
from trimtab.control.columns import OnColumn
from trimtab.control.estimates import Gap
from trimtab.control.judge import History, judge
from trimtab.control.measures import median_of, settle
from trimtab.control.policy import Policy
from trimtab.control.sources import Source
from trimtab.control.values import Bools, Floats, Risk
from trimtab.control.zscore import ZScore
from trimtab.errors import TrimtabError

Columns = Mapping[str, NDArray[np.float32]]


class Detector(Protocol):
    """Judges columns against a memory: a NamedTuple of arrays with the units along the last axis."""

    @property
    def name(self) -> str:
        """What a checkpoint and a trace call it."""
        ...

    @property
    def columns(self) -> tuple[str, ...]:
        """What it needs in a reading besides `norm`."""
        ...

    def fresh(self, num_units: int, policy: Policy) -> Any:
        """The memory before the first step."""
        ...

    def judge(self, memory: Any, columns: Columns, seen: Bools, policy: Policy, alpha: Floats) -> tuple[Risk, Any]:
        """Judge T steps: columns and `seen` are (T, U), alpha is (T,); returns the risks and the memory after."""
        ...

    def rescaled(self, memory: Any, factor: float) -> Any:
        """The memory as if all gradient norms had been `factor` times as large."""
        ...


@dataclass(frozen=True)
class Gnmr:
    """The paper's: `judge`, as it stands."""

    name = "gnmr"
    columns = ()

    def fresh(self, num_units: int, policy: Policy) -> History:
        """Empty histories."""
        return History.fresh(num_units, policy)

    def judge(
        self, memory: History, columns: Columns, seen: Bools, policy: Policy, alpha: Floats
    ) -> tuple[Risk, History]:
        """Algorithm 1."""
        return judge(memory, columns["norm"], seen, policy, alpha)

    def rescaled(self, memory: History, factor: float) -> History:
        """Norms are remembered as mean and recent ones; ratios do not change."""
        return memory._replace(mean=memory.mean * factor, recent=memory.recent * factor)


GNMR = Gnmr()


@dataclass(frozen=True)
class Relative(Gnmr):
    """Ratio and jump over their median of that step over the observed units, so that whole-batch swings cancel.

    Under `exclude_triggered` what is left out of a history is still decided by the plain risk.
    """

    name = "relative"

    def fresh(self, num_units: int, policy: Policy) -> History:
        """Empty histories."""
        require(num_units >= 3, "relative compares units with their median and needs at least 3 of them", num_units)
        return super().fresh(num_units, policy)

    def judge(
        self, memory: History, columns: Columns, seen: Bools, policy: Policy, alpha: Floats
    ) -> tuple[Risk, History]:
        """Algorithm 1, then the medians."""
        risk, memory = super().judge(memory, columns, seen, policy, alpha)
        ratio, jump = (x / median_of(x) for x in (risk.ratio, risk.jump))
        return settle(ratio, jump, columns["norm"], seen, policy, alpha), memory


@dataclass(frozen=True)
class FullBudget:
    """Another detector whose riskiest `max_high` units trigger in every step; `advance` sees to it."""

    inner: Detector

    @property
    def name(self) -> str:
        """The inner name, marked."""
        return f"{self.inner.name}:full"

    @property
    def columns(self) -> tuple[str, ...]:
        """Those of the inner one."""
        return self.inner.columns

    def fresh(self, num_units: int, policy: Policy) -> Any:
        """The inner memory."""
        return self.inner.fresh(num_units, policy)

    def judge(self, memory: Any, columns: Columns, seen: Bools, policy: Policy, alpha: Floats) -> tuple[Risk, Any]:
        """The inner risk."""
        return self.inner.judge(memory, columns, seen, policy, alpha)

    def rescaled(self, memory: Any, factor: float) -> Any:
        """The inner memory, scaled."""
        return self.inner.rescaled(memory, factor)


def full_budget(detector: "str | Mapping[str, Any] | Detector") -> FullBudget:
    """A detector that always fills the budget."""
    return FullBudget(detector_of(detector))


def fill(risk: Floats, seen: Bools, recoverable: Bools, max_high: int) -> Floats:
    """Risks (T, U) of which exactly the first `max_high` observed units of each step, by risk, are above 1."""
    key = np.where(seen & recoverable, risk, -1.0)
    order = np.argsort(-key, axis=1, kind="stable")[:, :max_high]
    chosen = np.zeros(risk.shape, bool)
    np.put_along_axis(chosen, order, True, axis=1)
    chosen &= key >= 0
    return np.where(chosen, np.maximum(risk, np.nextafter(1.0, 2.0)), np.minimum(risk, 1.0))


def _snr(*, decibels: float = 20.0, **options: Any) -> OnColumn:
    return OnColumn("snr", "noise", **_with(options, against=10 ** (-decibels / 20)))


def _with(options: dict[str, Any], **usual: Any) -> dict[str, Any]:
    return usual | options


DETECTORS: dict[str, Callable[..., Detector]] = {
    "gnmr": Gnmr,
    "relative": Relative,
    "zscore": ZScore,
    "update": lambda **options: OnColumn("update", "update", **options),
    "jacobian": lambda **options: OnColumn("jacobian", "spectral", **_with(options, against="units")),
    "gsnr": lambda **options: OnColumn("gsnr", "gsnr", **_with(options, against="units", inverse=True)),
    "snr": _snr,
    "source": Source,
    "gap": Gap,
}


def detector_of(which: "str | Mapping[str, Any] | Detector", /, **options: Any) -> Detector:
    """A detector by name (`"gsnr"`, `"gsnr:full"`), by name and options, or itself.

    Args:
        options: the detector's own settings; `full=True` for a full budget.
    """
    if not isinstance(which, str | Mapping):
        whole = all(hasattr(which, name) for name in ("name", "columns", "fresh", "judge", "rescaled"))
        require(whole, "a detector is a name, or has name, columns, fresh, judge and rescaled", which)
        require(not options, "a ready-made detector takes no options", options)
        return which
    if isinstance(which, Mapping):
        options = {key: value for key, value in which.items() if key != "name"} | options
        which = str(which["name"])
    name, _, end = which.partition(":")
    if name not in DETECTORS or end not in ("", "full"):
        raise TrimtabError(
            f"unknown detector {which!r}: {meant(which, [*DETECTORS, *(f'{d}:full' for d in DETECTORS)])}"
        )
    full = bool(options.pop("full", False)) or end == "full"
    try:
        found = DETECTORS[name](**options)
    except TypeError:
        raise TrimtabError(f"detector {name} does not have all of these options: {', '.join(options)}") from None
    return FullBudget(found) if full else found


def described(detector: Detector) -> dict[str, Any]:
    """A detector as plain values, for a checkpoint or a trace; `detector_of` builds it again if it is one of ours."""
    inner = detector.inner if isinstance(detector, FullBudget) else detector
    options = dataclasses.asdict(inner) if dataclasses.is_dataclass(inner) and not isinstance(inner, type) else {}
    if isinstance(inner, OnColumn):  # the name says which column
        options = {key: value for key, value in options.items() if key not in ("name", "column")}
    return {**options, "name": detector.name}


def check_columns(detector: Detector, columns: Mapping[str, Any]) -> None:
    """Refuse to judge without a column, and say where it comes from."""
    missing = [name for name in detector.columns if name not in columns]
    if missing:
        raise TrimtabError(
            f"detector {detector.name!r} judges the column {missing[0]!r}, which is not there (there are "
            f"{', '.join(columns)}): record the run with Controller(detector={detector.name!r}), or with a sensor of it"
        )
