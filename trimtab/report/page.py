# SPDX-License-Identifier: Apache-2.0
"""Page: one HTML file that says what happened in a run, opens offline, and can be attached to an issue.

    write_page("runs/a")             runs/a/report.html
    render(run)                      the same as text

From top to bottom: the verdict in one sentence, four figures, then on one shared x axis the loss, every unit's
ratio, who ran high and why, and the budget; then the offenders with a list to keep high, the numbers, the run's
facts, and what a page like this cannot tell. Curves and matrices are pooled (`pool`), so the page has the same
size for a thousand steps and for a million: plotly (4.8 MB, inlined) and less than 1 MB of ours.

Unit names and config values come from somebody's run, so nothing of them is trusted: text is escaped for HTML,
data sits in a JSON block in which `<` cannot occur, and the page's own content policy forbids it the network.
"""

import html
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

from trimtab.control.record import REPORT, TRACE
from trimtab.errors import missing_extra
from trimtab.report.passes import CAUSES, DecisionsLike, Passes, given, passes, replayed, rules_of
from trimtab.report.pool import Pool, curve
from trimtab.report.read import Run, Scan, Trace, iter_trace, read_run, scan_trace
from trimtab.report.summary import Counts, Offender, Summary, eval_keys, known_faults, percent

TABLE_ROWS = 50
MAX_FAULTS = 200
MAX_MARKS = 300

MEANINGS = {
    "false_alarms_per_1k": "passes on which a unit triggered without a known fault, per 1,000 quiet ones",
    "promotion_ratio": "unit-steps run high, over all unit-steps of units that can run high",
    "hit_maxO": "share of steps with the budget full",
    "exceed_gnmr": "share of unit-steps with ratio above alpha",
    "exceed_delta": "share of unit-steps with jump above beta",
    "denied": "triggered unit-steps that did not fit in the budget",
    "switches_per_1k": "path changes, summed over units, per 1,000 steps",
    "nonfinite": "steps with a NaN or Inf norm",
    "reruns": "passes that were dropped and run again",
    "median_ratio": "median of all ratios: what alpha is held against in this run",
    "warmup_steps_high": "steps of a warm-up in which everything ran high, counted apart",
}
SHARES = ("promotion_ratio", "hit_maxO", "exceed_gnmr", "exceed_delta")
LIMITS = (
    "What this page cannot tell: it sees gradient norms only, so a fault that leaves every norm in its range is "
    "invisible here. It shows what this policy did in this run; a replay of another policy on the same norms is "
    "open-loop, because a unit that runs high changes the norms that follow."
)


def write_page(run_folder: str | Path, out: str | Path | None = None) -> Path:
    """Write a run's report and return its path; `out` defaults to report.html in the run folder."""
    run = read_run(run_folder, with_trace=False)
    text = render(run)
    path = run.folder / REPORT if out is None else Path(out)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def render(run: Run, decisions: DecisionsLike | None = None) -> str:
    """The report as HTML.

    Args:
        run: with its trace in memory, or without: then the trace is streamed from the run's folder.
        decisions: what `trimtab.replay` gave for this trace; computed block by block if not given.
    """
    scan, blocks = _open(run, decisions)
    counts, pool = Counts(None, None, run.config), None
    if scan is not None and scan.header.units:
        rules = rules_of(scan.header, acted=scan.acted)
        counts = Counts(scan.header, rules, run.config)
        pool = Pool(len(scan.header.units), scan.first_step, scan.last_step) if scan.rows else None
        pairs = replayed(rules, blocks()) if decisions is None else given(rules, next(iter(blocks())), decisions)
        for block in passes(rules, pairs):
            _feed(counts, pool, block)
    summary = counts.summary(run)
    data = _data(run, scan, pool, summary)
    parts = {
        "title": _text(f"{run.name} - trimtab report"),
        "kind": "trimtab run report",
        "heading": _text(run.name),
        "verdict": _text(summary.verdict),
        "notes": "\n".join(f'<p class="note">{_text(note)}</p>' for note in _notes(run, scan, pool, summary)),
        "figures": "\n".join(_figure(*figure) for figure in _figures(summary)),
        "plots": _plots(data, summary),
        "offenders": _offenders(summary),
        "numbers": _numbers(summary),
        "facts": _facts(run),
        "limits": _text(LIMITS),
        "scripts": _scripts(data),
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda m: parts[m.group(1)], _asset("template.html"))


def _open(run: Run, decisions: DecisionsLike | None) -> tuple[Scan | None, Callable[[], Iterable[Trace]]]:
    """What the trace holds, and how to walk through it."""
    path, trace = run.folder / TRACE, run.trace
    if trace is None and decisions is not None and path.is_file():
        trace = read_run(run.folder).trace
    if trace is not None:
        rows = len(trace)
        ends = (int(trace.steps[0]), int(trace.steps[-1])) if rows else (0, 0)
        return Scan(trace, rows, *ends, acted=bool(trace.high.any())), lambda: [trace]
    if path.is_file():
        return scan_trace(path), lambda: iter_trace(path)
    return None, lambda: []


def _feed(counts: Counts, pool: Pool | None, block: Passes) -> None:
    counts.add(block)
    assert pool is not None  # there are passes, so there are rows
    pool.add(block)


def _data(run: Run, scan: Scan | None, pool: Pool | None, summary: Summary) -> dict[str, Any]:
    """Everything the page's script draws."""
    loss = _loss_data(run)
    ends = [x for series in (loss["train"], *loss["evals"]) if series for x in (series["x"][0], series["x"][-1])]
    ends += loss["nonfinite"][:1] + loss["nonfinite"][-1:]
    if scan is not None and scan.rows:
        ends += [scan.first_step, scan.last_step]
    first, last = (min(ends), max(ends)) if ends else (0, 0)
    data: dict[str, Any] = {"range": [first - 0.5, last + 0.5], "loss": loss, "last": last, "causes": CAUSES}
    data["faults"] = [window[:2] for window in known_faults(run.config)[:MAX_FAULTS]]
    if scan is not None and pool is not None:
        data |= {"first": pool.first, "width": pool.width, "units": scan.header.units, "heat": pool.heatmap()}
        data |= {"time": pool.timeline(), "high": pool.num_high.tolist(), "asked": pool.num_asked.tolist()}
        data |= {"max_high": summary.max_high, "acted": summary.acted, "last": scan.last_step}
    return data


def _loss_data(run: Run) -> dict[str, Any]:
    """Curves of the training loss and of every evaluation, and where the loss was not finite."""
    steps, values = run.column("loss")
    fine = np.isfinite(values)
    marks = steps[~fine]
    marks = marks[np.unique(np.linspace(0, len(marks) - 1, min(len(marks), MAX_MARKS)).astype(int))] if len(marks) else marks
    evals = []
    for key in eval_keys(run):
        x, y = run.column(key)
        series = _series(x[np.isfinite(y)], y[np.isfinite(y)])
        if series:
            evals.append({"name": key, **series})
    low, high = (values[fine].min(), values[fine].max()) if fine.any() else (1.0, 1.0)
    wide = bool(low > 0 and high / low > 50)
    return {"train": _series(steps[fine], values[fine]), "evals": evals, "nonfinite": marks.tolist(), "log": wide}


def _series(x: np.ndarray, y: np.ndarray) -> dict[str, list] | None:
    if not len(x):
        return None
    x, y = curve(x, y)
    return {"x": x.tolist(), "y": [float(f"{value:.6g}") for value in y]}


def _notes(run: Run, scan: Scan | None, pool: Pool | None, summary: Summary) -> Iterable[str]:
    """What a reader must know before believing the figures."""
    if summary.num_passes:
        limits = f"at most {summary.max_high} of {summary.num_recoverable} units high at once"
        yield f"{summary.num_passes:,} passes over {summary.num_units:,} units, {limits}."
    if scan is not None and scan.rows and scan.first_step > 1:
        yield f"The recording starts at step {scan.first_step:,}; the units' histories before it are not in the trace."
    if pool is not None and pool.width > 1:
        yield f"Each column of the figures is {pool.width:,} steps and shows their largest value."
    torn = (scan.header.dropped_bytes if scan is not None else 0) + run.dropped_bytes
    if torn:
        yield f"The last {torn:,} bytes of the record were torn, as after a crash, and are left out."


def _figures(s: Summary) -> Iterable[tuple[str, str, str]]:
    """The four headline figures: value, name, remark."""
    if s.metrics:
        remark = f"{s.quiet_passes:,} quiet passes"
        yield _digits(s.metrics["false_alarms_per_1k"]), "false alarms per 1,000", remark
    else:
        yield "-", "false alarms per 1,000", "no trace"
    yield _loss_figure(s)
    if s.metrics:
        remark = f"budget {s.max_high} of {s.num_recoverable}" + ("" if s.acted else "; would have been, nothing was switched")
        yield percent(s.metrics["promotion_ratio"]), "of unit-steps ran high", remark
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
        others = ", ".join(f"{name.removeprefix('eval_loss_')} {_digits(value)}" for name, value in evals.items() if name != key)
        remark = f"{key}; {others}" if others else key
        return _digits(evals[key]), "best evaluation loss", remark
    if s.losses.last is not None:
        bad = f", {s.losses.nonfinite:,} not finite" if s.losses.nonfinite else ""
        return _digits(s.losses.last), "last loss", f"first {_digits(s.losses.first)}{bad}"
    return "-", "last loss", f"{s.losses.nonfinite:,} losses, none finite" if s.losses.nonfinite else "no loss was logged"


def _figure(value: str, name: str, remark: str) -> str:
    return f'<div class="figure"><b>{_text(value)}</b><span>{_text(name)}</span><small>{_text(remark)}</small></div>'


def _plots(data: Mapping[str, Any], s: Summary) -> str:
    """The panels that have something to show."""
    panels = []
    loss = data["loss"]
    if loss["train"] or loss["evals"] or loss["nonfinite"]:
        keys = [("line", "loss", "training")] if loss["train"] else []
        keys += [("line", "eval-b" if i % 2 else "eval-a", e["name"]) for i, e in enumerate(loss["evals"])]
        keys += [("", "nonfinite", "not finite")] if loss["nonfinite"] else []
        panels.append(_panel("loss", "Loss", "", keys + _fault_key(data)))
    if "heat" in data:
        shown, total = len(data["heat"]["units"]), len(data["units"])
        some = f" The {shown} units with the largest ratios, of {total:,}." if shown < total else ""
        says = "Each unit's gradient norm over the mean of its own past norms. Red is above its history, blue below." + some
        panels.append(_panel("heat", "Ratio of every unit", says, _heat_keys(), readout=True))
    if data.get("time", {}).get("units"):
        present = {interval[3] for interval in data["time"]["intervals"]}
        keys = [("" if s.acted else "hollow", CAUSES[code], CAUSE_WORDS[code]) for code in sorted(present - {0}, reverse=True)]
        keys += [("hollow", "soft", "refused, budget full")] if 0 in present else []
        shown, total = len(data["time"]["units"]), data["time"]["total"]
        some = f" The {shown} with the most columns, of {total:,}." if shown < total else ""
        title = "Who ran high, and why" if s.acted else "Who would have run high, and why"
        panels.append(_panel("timeline", title, "A decision taken from one step acts in the next." + some, keys, readout=True))
    if "high" in data and (s.max_high or any(data["high"])):
        keys = [("", "locked", "units high" if s.acted else "units that would be high"), ("dash", "mark", f"budget, {s.max_high}")]
        keys += [("line", "jump", "asked for")] if data["asked"] != data["high"] else []
        panels.append(_panel("budget", "Budget", "", keys))
    if not panels:
        return '<section class="plots" id="plots"><div class="panel"><p class="caption">There is nothing to draw yet.</p></div></section>'
    return f'<section class="plots" id="plots">{"".join(panels)}</section>'


CAUSE_WORDS = ("", "chosen otherwise", "warm-up", "locked", "jump", "ratio", "not finite")


def _heat_keys() -> list[tuple[str, str, str]]:
    return [("ramp", "mid", "x 0.25 to x 4"), ("", "bad", "not finite"), ("", "none", "no gradient")]


def _fault_key(data: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    return [("", "fault", "known fault")] if data["faults"] else []


def _panel(name: str, title: str, says: str, keys: Iterable[tuple[str, str, str]], *, readout: bool = False) -> str:
    legend = "".join(f'<span><i class="{kind}" style="--c: var(--{color})"></i>{_text(word)}</span>' for kind, color, word in keys)
    return (
        f'<div class="panel" id="{name}"><h2>{_text(title)}</h2>'
        + (f'<p class="caption">{_text(says)}</p>' if says else "")
        + f'<p class="legend">{legend}</p>'
        + (f'<p class="readout" id="say-{name}"></p>' if readout else "")
        + f'<div class="plot" id="plot-{name}"></div></div>'
    )


def _offenders(s: Summary) -> str:
    if not s.metrics:
        return ""
    if not s.offenders:
        body = '<p class="note">No unit ran high and none was refused.</p>'
        return f'<section id="offenders"><h2>Offenders</h2>{body}</section>'
    heads = ("unit", "times high", "steps high", "refused", "worst risk", "at step", "median ratio", "persistent")
    head = "".join(f'<th{"" if i == 0 else " class=n"}>{name}</th>' for i, name in enumerate(heads))
    rows = "".join(_offender(o) for o in s.offenders[:TABLE_ROWS])
    more = len(s.offenders) - TABLE_ROWS
    tail = f'<p class="note">And {more:,} more.</p>' if more > 0 else ""
    table = f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>{tail}'
    return f'<section id="offenders"><h2>Offenders</h2>{table}</section>{_keep(s)}'


def _offender(o: Offender) -> str:
    risk = _digits(o.worst_risk) if math.isfinite(o.worst_risk) else "not finite"
    cells = (f"{o.times_high:,}", f"{o.steps_high:,}", f"{o.denied:,}", risk, f"{o.worst_step:,}", _digits(o.median_ratio))
    numbers = "".join(f'<td class="n">{cell}</td>' for cell in cells)
    last = f'<td class="n">{f"yes, {o.returns} returns" if o.persistent else "no"}</td>'
    return f'<tr><td class="unit">{_text(o.unit)}</td>{numbers}{last}</tr>'


def _keep(s: Summary) -> str:
    if not s.keep_high:
        return ""
    persistent = any(o.persistent for o in s.offenders)
    says = (
        "These came back again and again: a lock cannot solve that, a fixed high path can."
        if persistent
        else "No unit was persistent; these had the most steps high, if some are to stay high for good."
    )
    names = _text(json.dumps(s.keep_high, indent=2, ensure_ascii=False))
    box = f'<div class="keep"><pre id="keep-list">{names}</pre><button type="button" id="copy">Copy</button></div>'
    return f'<section id="keep"><h2>Keep high</h2><p class="note">{_text(says)}</p>{box}</section>'


def _numbers(s: Summary) -> str:
    rows = []
    for name, says in MEANINGS.items():
        if name in s.metrics and not (name in ("reruns", "warmup_steps_high") and not s.metrics[name]):
            value = s.metrics[name]
            rows.append((name, percent(value) if name in SHARES else _digits(value), says))
    if s.losses.spike_score is not None:
        rows.append(("spike_score", percent(s.losses.spike_score), "share of steps more than 6 sigma above the mean of the 128 before"))
    rows += [(f"best {key}", _digits(value), "lowest of this run") for key, value in s.losses.best_evals.items()]
    if not rows:
        return ""
    body = "".join(f'<tr><th>{_text(n)}</th><td class="n">{_text(v)}</td><td class="say">{_text(w)}</td></tr>' for n, v, w in rows)
    would = "" if s.acted or not s.metrics else '<p class="note">Nothing was switched in this run: these count what would have run.</p>'
    return f'<section id="numbers"><h2>Numbers</h2>{would}<div class="scroll"><table class="numbers"><tbody>{body}</tbody></table></div></section>'


def _facts(run: Run) -> str:
    """Config, versions and command, folded up."""
    info = {key: value for key, value in run.info.items() if key != "config"}
    if isinstance(info.get("command"), list):
        info["command"] = " ".join(str(word) for word in info["command"])
    policy = run.trace.policy if run.trace is not None else {}
    rows = [*_flat("", info), *_flat("config.", run.config), *_flat("policy.", policy)]
    body = "".join(f"<tr><th>{_text(name)}</th><td>{_text(value)}</td></tr>" for name, value in rows)
    if not body:
        return '<section id="facts"><h2>Run</h2><p class="note">This folder has no run.json.</p></section>'
    table = f'<div class="scroll"><table class="facts"><tbody>{body}</tbody></table></div>'
    return f'<section id="facts"><details><summary>Run: configuration, versions, command</summary>{table}</details></section>'


def _flat(prefix: str, values: Mapping[str, Any]) -> Iterable[tuple[str, str]]:
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(f"{prefix}{key}.", value)
        else:
            text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            yield f"{prefix}{key}", text if len(text) <= 2000 else text[:2000] + " ..."


def _scripts(data: Mapping[str, Any]) -> str:
    try:
        from plotly.offline import get_plotlyjs
    except ImportError:
        raise missing_extra("plotly", "report", "Writing a report") from None
    # Inside a script element only "<" is dangerous ("</script", "<!--"); in JSON it only occurs in strings.
    text = json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    return (
        f'<script type="application/json" id="data">{text}</script>\n'
        f"<script>{get_plotlyjs()}</script>\n<script>{_asset('page.js')}</script>"
    )


def _asset(name: str) -> str:
    return (resources.files("trimtab.report") / name).read_text(encoding="utf-8")


def _text(value: object) -> str:
    return html.escape(str(value), quote=True)


def _digits(value: float | None) -> str:
    """A number for people: four significant digits, whole numbers as they are."""
    if value is None or math.isnan(value):
        return "-"
    if float(value).is_integer() and abs(value) < 1e9:
        return f"{int(value):,}"
    return f"{value:.4g}" if abs(value) < 1e4 else f"{value:,.0f}"
