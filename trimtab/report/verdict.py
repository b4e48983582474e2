# SPDX-License-Identifier: Apache-2.0
"""Verdict: a run's numbers in one or two plain sentences, the gravest first.

A non-finite gradient comes before everything. Then a budget that is always full, because then the controller
no longer chooses: either a threshold is too low for these norms, or a few units hold the seats (unless known faults
explain it, and the quiet steps are quiet). Otherwise what control did, and to whom; or that there was nothing to do.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trimtab.report.summary import Summary

CROWDED = 0.2
"""Share of steps with a full budget from which on that is the news."""


def sentences(s: "Summary", too_low: str) -> Iterator[str]:
    """What the numbers say, in plain words, the gravest first."""
    if not s.num_passes:
        yield "Nothing has been recorded yet."
        return
    bad = int(s.metrics["nonfinite"])
    if bad and s.first_nonfinite:
        step, unit = s.first_nonfinite
        yield f"The gradient was not finite on {plural(bad, 'step')}, first at step {step:,} in {brief(unit)}."
    full = s.metrics["hit_maxO"]
    main = brief(s.offenders[0].unit) if s.offenders else ""
    would = "" if s.acted else "would have "
    faults_explain = s.quiet_passes < s.num_passes and s.metrics["false_alarms_per_1k"] < 1000 * CROWDED
    if s.max_high and full > CROWDED and not faults_explain:
        cure = too_low or f"{plural(s.units_high, 'unit')} took it, {main} most often"
        was = "was" if s.acted else "would have been"
        yield f"The budget {was} full on {percent(full)} of steps: {cure}."
    elif s.times_high:
        lead = "Control acted" if s.acted else "Observed only: control would have acted"
        yield (
            f"{lead} {plural(s.times_high, 'time')} on {s.units_high} of {plural(s.num_recoverable, 'unit')}; "
            f"{percent(s.metrics['promotion_ratio'])} of unit-steps {would}{'ran' if s.acted else 'run'} high; "
            f"{main} is the main offender."
        )
    elif s.offenders:
        their = "its" if len(s.offenders) == 1 else "their"
        who = plural(len(s.offenders), "unit")
        yield f"{who} left {their} range, and the budget of {s.max_high} let none run high."
    elif s.metrics["false_alarms_per_1k"]:
        yield "Units left their range, but nothing ran high: the run only watched, or ended there."
    elif not bad:
        yield f"Nothing left its range: no risk passed 1 in {plural(s.num_passes, 'step')}."


def brief(name: str, most: int = 60) -> str:
    """A name that fits in a sentence: both ends of it where it is long."""
    return name if len(name) <= most else f"{name[: most // 3]}...{name[-2 * most // 3 + 3 :]}"


def percent(share: float) -> str:
    """A share as a percentage with two significant digits, never a rounded-off zero."""
    value = 100 * share
    if value == 0 or value >= 10:
        return f"{value:.0f} %"
    return f"{value:.1f} %" if value >= 0.1 else f"{value:.1g} %" if value >= 0.001 else "< 0.001 %"


def plural(number: int, one: str, many: str = "") -> str:
    """A number and its noun."""
    return f"{number:,} {one if number == 1 else many or one + 's'}"
