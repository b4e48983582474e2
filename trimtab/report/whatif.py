# SPDX-License-Identifier: Apache-2.0
"""What if: a recorded run under many policies, as a table and as a page.

    found = whatif(read_log("runs/a"), grid_of(Policy()))
    found.advice.row.policy, found.advice.reason
    write_sweep_page(found, "sweep.html")
    replayed(read_log("runs/a"), {"what if": Policy(alpha=2)})        # a few policies, with all their metrics

The grid crosses thresholds with what norms are measured against, beside the run's own policy and the named presets.
Spikes are those of the logged loss (`spikes`), quiet steps those outside spikes and known faults. The page shows every
policy as a point (false alarms against spikes announced, or against unit-steps high where there is no spike) and
when the suggested one would have fired.
"""

import itertools
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trimtab.control.policy import PRESETS, Policy
from trimtab.control.replay import Replay
from trimtab.control.sweep import WINDOW, Advice, Peaks, Row, Sweep, quiet_rows, suggest
from trimtab.errors import TrimtabError
from trimtab.report.assets import asset, scripts, write
from trimtab.report.imports import Log
from trimtab.report.names import visible
from trimtab.report.parts import card, text
from trimtab.report.pool import curve
from trimtab.report.spikes import Spike, spikes
from trimtab.report.summary import quiet_steps
from trimtab.report.verdict import percent, plural

OPEN_LOOP = (
    "Open-loop: the norms were recorded under another policy and carry what its decisions did to them. A policy that "
    "looks good here is one to try next, not one that is proven."
)
KINDS = ("", " w20")
"""What marks the histories of `bases_of` in a name; w20 is winsorized with a memory of 20."""
ALPHAS, BETAS = (1.1, 1.3, 1.5, 2.0, 3.0), (1.5, 2.0, 3.0, None)
LEFT_OUT = ("paper-pangu", "paper-moe", "repair")
"""Presets of other runs' schedules, and of another detector."""
MOST_POLICIES = 1000
MAX_MARKS = 2000
HEADS = ("policy", "fires", "alarms/1k", "high", "full", "denied")
SPIKE_HEADS = ("spikes", "lead", "chance")
MEANINGS = {
    "fires": "steps on which any unit triggers",
    "alarms/1k": "of them, per 1,000 steps that are quiet: no spike and no known fault near",
    "high": "unit-steps run high",
    "full": "steps with the budget full",
    "denied": "triggered unit-steps that did not fit in the budget",
    "spikes": f"loss spikes with a trigger in their first step or in the {WINDOW} before",
    "lead": "median steps from that trigger to the spike; 0 is too late to act before it",
    "chance": "how often a trigger falls into such a window where nothing happens",
}
CALIBRATED = (1.0, 10.0)
"""False alarms per 1,000 quiet steps for which thresholds are set from the run itself."""


@dataclass(frozen=True, eq=False)
class WhatIf:
    """A run under many policies."""

    log: Log
    names: tuple[str, ...]
    rows: tuple[Row, ...]
    advice: Advice
    steps: NDArray[np.int64]  # (T,)
    spikes: tuple[Spike, ...]
    """Of the loss; places are indices into its curve."""
    quiet: NDArray[np.bool_]  # (T,)

    @property
    def suggested(self) -> str:
        """The name of the suggested policy."""
        return self.names[self.rows.index(self.advice.row)]

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain values."""
        return {
            "run": self.log.name,
            "steps": len(self.steps),
            "quiet_steps": int(self.quiet.sum()),
            "units": len(self.log.header.units),
            "spikes": [self.spike_step(spike) for spike in self.spikes],
            "open_loop": OPEN_LOOP,
            "notes": list(self.log.notes),
            "suggested": {"name": self.suggested, "reason": self.advice.reason},
            "policies": [{"name": n, **row.to_dict()} for n, row in zip(self.names, self.rows, strict=True)],
        }

    def spike_step(self, spike: Spike) -> int:
        """The step at which a spike begins."""
        assert self.log.loss is not None
        return int(self.log.loss.steps[spike.first])


def grid_of(own: Policy, settings: Mapping[str, Sequence[Any]] | None = None) -> dict[str, Policy]:
    """Policies to try by name: every combination of some settings, or the usual grid."""
    found = {"own": own}
    if settings:
        sizes = [len(values) for values in settings.values()]
        if np.prod(sizes, dtype=object) > MOST_POLICIES:
            raise TrimtabError(f"a grid may have {MOST_POLICIES:,} policies, got {np.prod(sizes, dtype=object):,}")
        for values in itertools.product(*settings.values()):
            changes = dict(zip(settings, values, strict=True))
            found[", ".join(f"{key} {_short(value)}" for key, value in changes.items())] = own.replace(**changes)
        return found
    for kind, base in zip(KINDS, bases_of(own), strict=False):
        for alpha, beta in itertools.product(ALPHAS, BETAS):
            warm = None if base.alpha_warmup is None else max(base.alpha_warmup, alpha)
            name = f"alpha {_short(alpha)} beta {_short(beta)}{kind}"
            found[name] = base.replace(alpha=alpha, beta=beta, alpha_warmup=warm)
    found |= {name: policy for name, policy in PRESETS.items() if name not in LEFT_OUT}
    kept: dict[Policy, str] = {}
    for name, policy in found.items():  # the same policy by two names is one row
        kept.setdefault(policy, name)
    return {name: policy for policy, name in kept.items()}


def bases_of(own: Policy) -> list[Policy]:
    """What norms are measured against in the usual grid: the policy's own history, and one that follows them.

    A run that only watched had no budget; what it would have done is asked with the default one.
    """
    able = own if own.max_high else own.replace(max_high=Policy().max_high)
    follows = able.replace(history="winsorized", memory=20)
    return [able] if able == follows else [able, follows]


def whatif(
    log: Log, policies: Mapping[str, Policy], *, most_alarms: float = 10.0, calibrate: Sequence[Policy] = ()
) -> WhatIf:
    """Run policies over a log.

    Args:
        most_alarms: false alarms per 1,000 quiet steps that the suggested policy may have.
        calibrate: policies to add with thresholds set from the quiet steps of the run itself.
    """
    if not log.rows:
        raise TrimtabError(f"a sweep needs gradient norms, and {visible(log.name)} has none: record or name them")
    total = log.header.total_steps or log.rows
    steps = np.concatenate([block.steps for block in log.blocks()])
    found_spikes = [] if log.loss is None else spikes(log.loss.values)
    placed = [(spike, place) for spike in found_spikes if (place := _places(steps, log, spike)) is not None]
    spiked, places = tuple(spike for spike, _ in placed), [place for _, place in placed]
    quiet = quiet_steps(steps, log.config) & quiet_rows(len(steps), places)
    if log.header.detector["name"] == "gnmr":
        policies = {**policies, **_calibrated(log, quiet, calibrate)}
    found = Sweep(list(policies.values()), log.recoverable, total, detector=log.header.detector)
    for block in log.blocks():
        found.add(block.norms, block.seen, block.columns)
    rows = found.rows(quiet, places)
    return WhatIf(log, tuple(policies), rows, suggest(rows, most_alarms), steps, spiked, quiet)


def replayed(log: Log, policies: Mapping[str, Policy]) -> dict[str, dict[str, float]]:
    """What each policy would have done: one pass over the norms, with one block of them in memory at a time."""
    header = log.header
    total = log.rows if header.total_steps is None else header.total_steps
    how = {"detector": header.detector, "parts": [part.units for part in header.quotas]}
    going = {name: Replay(policy, log.recoverable, total, **how) for name, policy in policies.items()}
    quiet = []
    for block in log.blocks():
        quiet.append(quiet_steps(block.steps, log.config))
        for one in going.values():
            one.add(block.norms, block.seen, block.columns)
    return {name: one.decisions().summary(np.concatenate(quiet)) for name, one in going.items()}


def _calibrated(log: Log, quiet: NDArray[np.bool_], bases: Sequence[Policy]) -> dict[str, Policy]:
    """Policies whose thresholds are quantiles of the run's own quiet steps."""
    chosen = log.recoverable
    peaks = {
        kind: Peaks(base, int(chosen.sum()))
        for kind, base in zip(KINDS, bases, strict=False)
        if base.history != "exclude_triggered"
    }
    for block in log.blocks() if peaks else ():
        for one in peaks.values():
            one.add(block.norms[:, chosen], block.seen[:, chosen])
    found = {}
    for (kind, one), rate in itertools.product(peaks.items(), CALIBRATED):
        if policy := one.calibrated(quiet, rate):
            found[f"calibrated {rate:g}/1k{kind}"] = policy
    return found


def _places(steps: NDArray[np.int64], log: Log, spike: Spike) -> tuple[int, int] | None:
    """The rows of the norms in which a spike of the loss lies; None outside of them."""
    assert log.loss is not None
    first, last = log.loss.steps[spike.first], log.loss.steps[spike.last]
    start, stop = int(np.searchsorted(steps, first)), int(np.searchsorted(steps, last, side="right")) - 1
    return (start, max(start, stop)) if start < len(steps) else None


def table(found: WhatIf) -> tuple[list[str], list[list[str]]]:
    """Heads and rows as text; the columns about spikes only where there are some."""
    heads = [*HEADS, *(SPIKE_HEADS if found.rows[0].spikes else ())]
    return heads, [_cells(name, row) for name, row in zip(found.names, found.rows, strict=True)]


def _cells(name: str, row: Row) -> list[str]:
    s = row.summary
    cells = [name, _count(row.firings), f"{s['false_alarms_per_1k']:.1f}", percent(s["promotion_ratio"])]
    cells += [percent(s["hit_maxO"]) if row.limits.max_high else "-", _count(s["denied"])]
    if row.spikes:
        lead = "-" if row.lead is None else f"{row.lead:g}"
        cells += [f"{row.caught} of {row.spikes}", lead, "-" if row.by_chance is None else percent(row.by_chance)]
    return cells


def _count(number: float) -> str:
    """A count in at most six characters, or so."""
    if number < 10_000:
        return f"{number:,.0f}"
    return f"{number / 1e3:.1f}k" if number < 1e6 else f"{number / 1e6:.2f}M"


def says(found: WhatIf) -> list[str]:
    """The suggestion, in sentences."""
    changes = changed(found.advice.row.policy, Policy.from_dict(found.log.header.policy))
    what = changes or ("those of the run itself" if found.log.ours else "the defaults")
    told = [f"Suggested: {found.suggested}: {found.advice.reason}.", f"Its settings: {what}."]
    if not found.spikes:
        known = "no loss was logged" if found.log.loss is None else "the loss has no spike"
        told.append(f"Lead times are not shown: {known}.")
    if any(name.endswith(KINDS[1]) for name in found.names):
        told.append("w20: norms are held against a winsorized mean of memory 20, which follows them.")
    return told


def changed(policy: Policy, own: Policy) -> str:
    """What a policy changes of another, as settings that `--set` takes."""
    before = own.to_dict()
    return " ".join(f"--set {k}={_short(v)}" for k, v in policy.to_dict().items() if v != before[k])


def _short(value: object) -> str:
    return "none" if value is None else f"{value:.6g}" if isinstance(value, float) else str(value)


def write_sweep_page(found: WhatIf, path: str | Path) -> Path:
    """Write the page of a sweep and return its path."""
    return write(render_sweep(found), path)


def render_sweep(found: WhatIf) -> str:
    """The page as HTML."""
    heads, rows = table(found)
    notes = [*says(found)[1:], OPEN_LOOP, *found.log.notes]
    html = {
        "title": text(f"{found.log.name} - trimtab sweep"),
        "kind": "trimtab sweep: what if",
        "heading": text(found.log.name),
        "verdict": text(says(found)[0]),
        "notes": "\n".join(f'<p class="note">{text(note)}</p>' for note in notes),
        "figures": "\n".join(card(*figure) for figure in _figures(found)),
        "plots": panels(_plots(found)),
        "offenders": f'<section id="policies"><h2>Policies</h2>{html_table(heads, rows, found.suggested)}</section>',
        "numbers": "",
        "facts": _facts(found),
        "limits": text(f"{OPEN_LOOP} A spike counts as announced when any unit triggers in its first step or in the "
                       f"{WINDOW} before; by chance says how often that happens where nothing does."),
        "scripts": scripts({"figures": _plots(found)}, "figures.js"),
    }  # fmt: skip
    return re.sub(r"\{\{(\w+)\}\}", lambda m: html[m.group(1)], asset("template.html"))


def panels(figures: Sequence[Mapping[str, Any]]) -> str:
    """The places of some figures on a page."""
    body = "".join(
        f'<div class="panel" id="{f["id"]}"><h2>{text(f["title"])}</h2><p class="caption">{text(f["says"])}</p>'
        f'<div class="plot" id="plot-{f["id"]}"></div></div>'
        for f in figures
    )
    return f'<section class="plots" id="plots">{body}</section>' if body else ""


def html_table(heads: Sequence[str], rows: Iterable[Sequence[str]], marked: str = "") -> str:
    """A table whose first column is text and whose others are numbers; the marked row stands out."""
    head = "".join(f"<th{'' if i == 0 else ' class=n'}>{text(name)}</th>" for i, name in enumerate(heads))
    body = ""
    for first, *rest in rows:
        label = f"<b>{text(first)}</b>" if first == marked else text(first)
        numbers = "".join(f'<td class="n">{text(cell)}</td>' for cell in rest)
        body += f'<tr><td class="unit">{label}</td>{numbers}</tr>'
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _figures(found: WhatIf) -> Iterable[tuple[str, str, str]]:
    best = found.advice.row
    yield str(len(found.rows)), "policies", f"{plural(len(found.steps), 'step')}, {len(found.log.header.units):,} units"
    yield f"{best.summary['false_alarms_per_1k']:.3g}", "false alarms per 1,000 quiet steps", found.suggested
    yield percent(best.summary["promotion_ratio"]), "of unit-steps high", f"budget {best.limits.max_high}"
    if best.spikes:
        lead = "" if best.lead is None else f"{best.lead:g} steps before" if best.lead else "too late to act before"
        yield f"{best.caught} of {best.spikes}", "loss spikes announced", lead
    else:
        yield "-", "loss spikes announced", "no spike is known"


def _plots(found: WhatIf) -> list[dict[str, Any]]:
    """The figures: policies as points, and when the suggested one fires."""
    spiked = bool(found.rows[0].spikes)
    x = [max(row.summary["false_alarms_per_1k"], 0.05) for row in found.rows]
    high = [row.summary["promotion_ratio"] for row in found.rows]
    y = [row.caught / row.spikes for row in found.rows] if spiked else high
    cells = [_cells(name, row) for name, row in zip(found.names, found.rows, strict=True)]
    heads = table(found)[0]
    words = [[f"{h}: {c}" for h, c in zip(heads[1:], cell[1:], strict=True)] for cell in cells]
    best = found.rows.index(found.advice.row)
    points = {"type": "scatter", "mode": "markers", "x": x, "y": y, "names": list(found.names), "words": words}
    points |= {"colors": ["warm" if i == best else "eval-a" for i in range(len(x))]}
    points |= {"sizes": [14 if i == best else 9 for i in range(len(x))]}
    what = "spikes announced" if spiked else "unit-steps high"
    figures: list[dict[str, Any]] = [
        {
            "id": "policies-plot",
            "title": "Every policy",
            "says": f"One point per policy; the large one is suggested. Left is quieter, up is more {what}.",
            "traces": [points],
            "x": "false alarms per 1,000 quiet steps",
            "y": what,
            "xlog": True,
            "percent": True,
        }
    ]
    fired = found.steps[found.advice.row.alarmed]
    fired = (
        fired[np.unique(np.linspace(0, len(fired) - 1, min(len(fired), MAX_MARKS)).astype(int))]
        if len(fired)
        else fired
    )
    if found.log.loss is not None and np.isfinite(found.log.loss.values).any():
        figures.append(_loss_figure(found, fired))
    return figures


def _loss_figure(found: WhatIf, fired: NDArray[np.int64]) -> dict[str, Any]:
    assert found.log.loss is not None
    steps, values = found.log.loss
    fine = np.isfinite(values)
    x, y = curve(steps[fine], values[fine])
    line = {"type": "scatter", "mode": "lines", "x": x.tolist(), "y": [float(f"{v:.6g}") for v in y], "color": "loss"}
    low, most = float(y.min()), float(y.max())
    marks = {"type": "scatter", "mode": "markers", "x": fired.tolist(), "y": [0.02] * len(fired), "color": "warm"}
    marks |= {"symbol": "line-ns-open", "size": 9, "under": True, "name": "fires"}
    windows = [[int(steps[s.first]), int(steps[s.last])] for s in found.spikes][:200]
    return {
        "id": "fires",
        "title": f"When {found.suggested} fires",
        "says": "The logged loss, shaded where it left its range; a stroke for each step on which a unit triggers.",
        "traces": [line | {"name": "loss"}, marks],
        "x": "step",
        "y": "loss",
        "ylog": low > 0 and most / low > 20,
        "windows": windows,
    }


def _facts(found: WhatIf) -> str:
    rows = [(name, json.dumps(row.policy.to_dict())) for name, row in zip(found.names, found.rows, strict=True)]
    body = "".join(f"<tr><th>{text(name)}</th><td>{text(value)}</td></tr>" for name, value in rows)
    inner = f'<div class="scroll"><table class="facts"><tbody>{body}</tbody></table></div>'
    return f'<section id="facts"><details><summary>Every setting of every policy</summary>{inner}</details></section>'
