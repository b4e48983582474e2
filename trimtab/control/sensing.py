# SPDX-License-Identifier: Apache-2.0
"""Sensing: which sensor fills which column, and putting those that a detector needs to work."""

from collections.abc import Callable, Sequence
from typing import Any

from trimtab.checks import meant
from trimtab.control.detectors import Detector, FullBudget
from trimtab.control.gaps import Gap, Noise
from trimtab.control.listeners import GradientSNR, GradOutput, OutputGain
from trimtab.control.sensors import Sensor, SpectralNorm, UpdateNorm
from trimtab.control.units import Unit
from trimtab.errors import TrimtabError

SENSORS: dict[str, Callable[..., Sensor]] = {
    kind.column: kind for kind in (UpdateNorm, SpectralNorm, GradientSNR, OutputGain, GradOutput, Noise, Gap)
}
"""The sensor of each column."""


def sensor_of(column: str, **options: Any) -> Sensor:
    """The sensor that fills a column; `gap` takes `share` or `units_per_step`."""
    if column not in SENSORS:
        raise TrimtabError(
            f"there is no sensor for the column {column!r}, pass one as sensors=[...]: {meant(column, SENSORS)}"
        )
    return SENSORS[column](**options)


def attach_sensors(detector: Detector, given: Sequence[Sensor], units: Sequence[Unit]) -> dict[str, Sensor]:
    """The sensors by column, those that the detector needs added, all at work."""
    found = {sensor.column: sensor for sensor in given}
    if len(found) != len(given) or "norm" in found:
        raise TrimtabError(f"each sensor fills a column of its own, got {[s.column for s in given]}: leave one out")
    options = getattr(detector.inner if isinstance(detector, FullBudget) else detector, "sensor_options", {})
    for name in detector.columns:
        if name not in found:
            found[name] = sensor_of(name, **options.get(name, {}))
    watching = [name for name, sensor in found.items() if getattr(sensor, "uses_watch", False)]
    if len(watching) > 1:
        raise TrimtabError(
            f"a linear has one seat for a watch, and {' and '.join(watching)} both want it: leave one out"
        )
    for sensor in found.values():
        sensor.attach(units)
    return found
