# SPDX-License-Identifier: Apache-2.0
"""Parts: the page's fragments of HTML, each a function of the summary or of the data it shows.

Every string that may come from a run passes `text`, which escapes it; what is not escaped is written here.
"""

import html
import json
import math
from collections.abc import Iterable, Mapping
from typing import Any

from trimtab.report.names import visible
from trimtab.report.passes import CAUSES
from trimtab.report.read import Run
from trimtab.report.summary import Offender, Summary
from trimtab.report.verdict import percent

TABLE_ROWS = 25
KEEP_ROWS = 200
FACT_ROWS = 300
HINTS = {
    "heat": "Point at a cell to read it."
    '<span class="wide"> Drag in any figure to zoom all, double-click to go back.</span>',
    "timeline": "Point at a bar to read it.",
}
CAUSE_WORDS = ("", "chosen otherwise", "warm-up", "locked", "jump", "ratio", "not finite")

MEANINGS = {
    "false_alarms_per_1k": "passes on which a unit triggered without a known fault, per 1,000 quiet ones",
    "promotion_ratio": "unit-steps run high, over all unit-steps of units that can run high",
    "hit_maxO": "share of steps with the budget full",
    "exceed_gnmr": "share of unit-steps with ratio above alpha",
    "exceed_delta": "share of unit-steps with jump above beta",
    "denied": "triggered unit-steps that did not fit in the budget",
    "switches_per_1k": "path changes, summed over units, per 1,000 steps",
    "nonfinite": "steps with a norm that was not finite",
    "reruns": "passes that were dropped and run again",
    "median_ratio": "median of all ratios: what alpha is held against in this run",
    "extra_bytes_mean": "activations kept for high units by eq. 67, mean per step, summed over units",
    "extra_bytes_peak": "the same in the worst step",
    "extra_bytes_bound": "what eq. 68 allows: the most expensive units, the budget full",
    "extra_bytes_mean_shared": "mean per step, a tensor that several units read counted once",
    "extra_bytes_peak_shared": "the same in the worst step",
    "controller_ms": "median time of the controller per step, milliseconds",
    "warmup_steps": "steps of a warm-up in which nothing is decided, counted apart",
}
SHARES = ("promotion_ratio", "hit_maxO", "exceed_gnmr", "exceed_delta")
LIMITS = (
    "What this page cannot tell: it sees gradient norms only, so a fault that leaves every norm in its range is "
    "invisible here. It shows what this policy did in this run; a replay of another policy on the same norms is "
    "open-loop, because a unit that runs high changes the norms that follow."
)


def figures(s: Summary) -> Iterable[tuple[str, str, str]]:
    """The four headline figures: value, name, remark."""
    if s.metrics:
        rate = s.metrics["false_alarms_per_1k"]
        alarms = round(rate * s.quiet_passes / 1000)
        yield _digits(float(f"{rate:.3g}")), "false alarms per 1,000 quiet steps", f"{alarms:,} on {s.quiet_passes:,}"
    else:
        yield "-", "false alarms per 1,000 quiet steps", "no trace"
    yield _loss_figure(s)
    if s.metrics:
        name = "of unit-steps ran high" if s.acted else "of unit-steps would have run high"
        remark = f"budget {s.max_high} of {s.num_recoverable}" + ("" if s.acted else "; nothing was switched")
        yield percent(s.metrics["promotion_ratio"]), name, remark
    else:
        yield "-", "of unit-steps ran high", "no trace"
    bad = int(s.metrics.get("nonfinite", 0))
    if bad and s.first_nonfinite:
        yield f"{bad:,}", "non-finite steps", f"first at step {s.first_nonfinite[0]:,}"
    else:
        persistent = sum(o.persistent for o in s.offenders)
        yield f"{len(s.offenders):,}" if s.metrics else "-", "offenders", f"{persistent} persistent"


def _loss_figure(s: Summary) -> tuple[str, str, str]:
    evals = s.losses.best_evals
    if evals:
        key = "eval_loss_high" if "eval_loss_high" in evals else next(iter(evals))
        others = ", ".join(
            f"{name.removeprefix('eval_loss_')} {_digits(value)}" for name, value in evals.items() if name != key
        )
        remark = f"{key}; {others}" if others else key
        return _digits(evals[key]), "best evaluation loss", remark
    if s.losses.last is not None:
        bad = f", {s.losses.nonfinite:,} not finite" if s.losses.nonfinite else ""
        return _digits(s.losses.last), "last loss", f"first {_digits(s.losses.first)}{bad}"
    return (
        "-",
        "last loss",
        f"{s.losses.nonfinite:,} losses, none finite" if s.losses.nonfinite else "no loss was logged",
    )


def card(value: str, name: str, remark: str) -> str:
    return f'<div class="figure"><b>{text(value)}</b><span>{text(name)}</span><small>{text(remark)}</small></div>'


def plots(data: Mapping[str, Any], s: Summary) -> str:
    """The panels that have something to show."""
    panels = []
    if any(data["loss"][key] for key in ("train", "evals", "nonfinite")):
        panels.append(_panel("loss", "Loss", "", _loss_keys(data["loss"]) + _fault_key(data)))
    if "heat" in data:
        shown, total = len(data["heat"]["units"]), s.num_units
        says = "Each unit's gradient norm over the mean of its own past norms. Red is above its history, blue below."
        says += f" The {shown} units with the largest ratios, of {total:,}." if shown < total else ""
        keys = [("ramp", "mid", "x 0.25 to x 4"), ("", "bad", "not finite"), ("", "none", "no gradient")]
        panels.append(_panel("heat", "Ratio of every unit", says, keys))
    if data.get("time", {}).get("units"):
        shown, total = len(data["time"]["units"]), data["time"]["total"]
        title = "Who ran high, and why" if s.acted else "Who would have run high, and why"
        says = "A decision taken from one step acts in the next."
        says += f" The {shown} with the most columns, of {total:,}." if shown < total else ""
        panels.append(_panel("timeline", title, says, _cause_keys(data["time"], acted=s.acted)))
    if "high" in data and (s.max_high or any(data["high"])):
        word = "units high" if s.acted else "units that would be high"
        keys = [("", "locked", word), ("dash", "mark", f"budget, {s.max_high}")]
        keys += [("line", "jump", "asked for")] if data["asked"] != data["high"] else []
        panels.append(_panel("budget", "Budget", "", keys))
    body = "".join(panels) or '<div class="panel"><p class="caption">There is nothing to draw yet.</p></div>'
    return f'<section class="plots" id="plots">{body}</section>'


def _loss_keys(loss: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    keys = [("line", "loss", "training")] if loss["train"] else []
    keys += [("line", "ink", "its mean")] if loss["mean"] else []
    keys += [("line", "eval-b" if i % 2 else "eval-a", e["name"]) for i, e in enumerate(loss["evals"])]
    return keys + ([("", "nonfinite", "not finite")] if loss["nonfinite"] else [])


def _cause_keys(time: Mapping[str, Any], *, acted: bool) -> list[tuple[str, str, str]]:
    present = {interval[3] for interval in time["intervals"]}
    kind = "" if acted else "hollow"
    keys = [(kind, CAUSES[code], CAUSE_WORDS[code]) for code in sorted(present - {0}, reverse=True)]
    return keys + ([("hollow", "soft", "refused, budget full")] if 0 in present else [])


def _fault_key(data: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    return [("", "fault", "known fault")] if data["faults"] else []


def _panel(name: str, title: str, says: str, keys: Iterable[tuple[str, str, str]]) -> str:
    """One figure: heading, caption, legend of (swatch, colour, words), a line that says what is pointed at."""
    swatch = '<span><i class="{}" style="--c: var(--{})"></i>{}</span>'
    rows = [f'<div class="panel" id="{name}"><h2>{text(title)}</h2>']
    if says:
        rows.append(f'<p class="caption">{text(says)}</p>')
    rows.append('<p class="legend">' + "".join(swatch.format(kind, color, text(word)) for kind, color, word in keys))
    rows.append("</p>")
    if name in HINTS:
        rows.append(f'<p class="readout" id="say-{name}">{HINTS[name]}</p>')
    rows.append(f'<div class="plot" id="plot-{name}"></div></div>')
    return "".join(rows)


def offenders(s: Summary) -> str:
    if not s.metrics:
        return ""
    if not s.offenders:
        body = '<p class="note">No unit ran high and none was refused.</p>'
        return f'<section id="offenders"><h2>Offenders</h2>{body}</section>'
    heads = ("unit", "times high", "steps high", "refused", "worst risk", "at step", "median ratio", "persistent")
    head = "".join(f"<th{'' if i == 0 else ' class=n'}>{name}</th>" for i, name in enumerate(heads))
    rows = "".join(_offender(o) for o in s.offenders[:TABLE_ROWS])
    more = len(s.offenders) - TABLE_ROWS
    tail = f'<p class="note">And {more:,} more.</p>' if more > 0 else ""
    table = f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>{tail}'
    return f'<section id="offenders"><h2>Offenders</h2>{table}</section>{_keep(s)}'


def _offender(o: Offender) -> str:
    risk = _digits(o.worst_risk) if math.isfinite(o.worst_risk) else "not finite"
    cells = (
        f"{o.times_high:,}",
        f"{o.steps_high:,}",
        f"{o.denied:,}",
        risk,
        f"{o.worst_step:,}",
        _digits(o.median_ratio),
    )
    numbers = "".join(f'<td class="n">{cell}</td>' for cell in cells)
    last = f'<td class="n">{f"yes, {o.returns} returns" if o.persistent else "no"}</td>'
    return f'<tr><td class="unit">{text(o.unit)}</td>{numbers}{last}</tr>'


def _keep(s: Summary) -> str:
    if not s.keep_high:
        return ""
    persistent = sum(o.persistent for o in s.offenders)
    if persistent > s.num_recoverable / 2:
        says = "Most units came back again and again: that speaks of thresholds set too low, not of these units."
    elif persistent:
        says = "These came back again and again: a lock cannot solve that, a fixed high path can."
    else:
        says = "No unit was persistent; these had the most steps high, if some are to stay high for good."
    if len(s.keep_high) > KEEP_ROWS:
        says += f" The first {KEEP_ROWS} of {len(s.keep_high):,}."
    listed = json.dumps(s.keep_high[:KEEP_ROWS], indent=2, ensure_ascii=False)
    names = "\n".join(text(line) for line in listed.split("\n"))
    box = f'<div class="keep"><pre id="keep-list">{names}</pre><button type="button" id="copy">Copy</button></div>'
    return f'<section id="keep"><h2>Keep high</h2><p class="note">{text(says)}</p>{box}</section>'


def numbers(s: Summary) -> str:
    rows = []
    for name, says in MEANINGS.items():
        if name in s.metrics and not (name in ("reruns", "warmup_steps") and not s.metrics[name]):
            value = s.metrics[name]
            rows.append((name, percent(value) if name in SHARES else _digits(value), says))
    if s.losses.spike_score is not None:
        rows.append(
            (
                "spike_score",
                percent(s.losses.spike_score),
                "share of steps more than 6 sigma above the mean of the 128 before",
            )
        )
    rows += [(f"best {key}", _digits(value), "lowest of this run") for key, value in s.losses.best_evals.items()]
    if not rows:
        return ""
    body = "".join(
        f'<tr><th>{text(n)}</th><td class="n">{text(v)}</td><td class="say">{text(w)}</td></tr>' for n, v, w in rows
    )
    would = (
        ""
        if s.acted or not s.metrics
        else '<p class="note">Nothing was switched in this run: these count what would have run.</p>'
    )
    table = f'<div class="scroll"><table class="numbers"><tbody>{body}</tbody></table></div>'
    return f'<section id="numbers"><h2>Numbers</h2>{would}{table}</section>'


def facts(run: Run, policy: Mapping[str, Any]) -> str:
    """Config, versions and command, folded up."""
    info = {key: value for key, value in run.info.items() if key != "config"}
    if isinstance(info.get("command"), list):
        info["command"] = " ".join(str(word) for word in info["command"])
    rows = [*_flat("", info), *_flat("config.", run.config), *_flat("policy.", policy)]
    rows = rows[:FACT_ROWS] + ([("...", f"and {len(rows) - FACT_ROWS:,} more")] if len(rows) > FACT_ROWS else [])
    body = "".join(f"<tr><th>{text(name)}</th><td>{text(value)}</td></tr>" for name, value in rows)
    if not body:
        return '<section id="facts"><h2>Run</h2><p class="note">This folder has no run.json.</p></section>'
    table = f'<div class="scroll"><table class="facts"><tbody>{body}</tbody></table></div>'
    title = "<summary>Run: configuration, versions, command</summary>"
    return f'<section id="facts"><details>{title}{table}</details></section>'


def _flat(prefix: str, values: Mapping[str, Any]) -> Iterable[tuple[str, str]]:
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(f"{prefix}{key}.", value)
        else:
            text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            yield f"{prefix}{key}", text if len(text) <= 2000 else text[:2000] + " ..."


def text(value: object) -> str:
    """Text for HTML: escaped, and every character of it visible."""
    return html.escape(visible(str(value)), quote=True).replace(" %", "&nbsp;%")


def _digits(value: float | None) -> str:
    """A number for people: four significant digits, whole numbers as they are."""
    if value is None or math.isnan(value):
        return "-"
    if float(value).is_integer() and abs(value) < 1e9:
        return f"{int(value):,}"
    return f"{value:.4g}" if abs(value) < 1e4 else f"{value:,.0f}"
