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

import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np

from trimtab.control.record import REPORT, TRACE
from trimtab.report import parts
from trimtab.report.assets import asset, scripts, write
from trimtab.report.names import visible
from trimtab.report.passes import CAUSES, DecisionsLike, Passes, given, passes, replayed, rules_of
from trimtab.report.pool import Pool, curve
from trimtab.report.read import Run, Scan, Trace, iter_trace, read_run, scan_trace
from trimtab.report.summary import Counts, Summary, eval_keys, known_faults
from trimtab.report.verdict import plural

MAX_FAULTS = 200
MAX_MARKS = 300
MAX_EVALS = 8
MEAN_FROM = 1000
"""Losses from which on their mean is drawn, too."""


def write_page(run_folder: str | Path, out: str | Path | None = None) -> Path:
    """Write a run's report and return its path; `out` defaults to report.html in the run folder."""
    run = read_run(run_folder, with_trace=False)
    text = render(run)
    path = run.folder / REPORT if out is None else Path(out)
    return write(text, path)


def render(run: Run, decisions: DecisionsLike | None = None) -> str:
    """The report as HTML.

    Args:
        run: with its trace in memory, or without: then the trace is streamed from the run's folder.
        decisions: what `trimtab.replay` gave for this trace; computed block by block if not given.
    """
    scan, pool, summary = survey(run, decisions)
    data = _data(run, scan, pool, summary)
    html = {
        "title": parts.text(f"{run.name} - trimtab report"),
        "kind": "trimtab run report",
        "heading": parts.text(run.name),
        "verdict": parts.text(summary.verdict),
        "notes": "\n".join(f'<p class="note">{parts.text(note)}</p>' for note in _notes(run, scan, pool, summary)),
        "figures": "\n".join(parts.card(*figure) for figure in parts.figures(summary)),
        "plots": parts.plots(data, summary),
        "offenders": parts.offenders(summary),
        "numbers": parts.numbers(summary),
        "facts": parts.facts(run, {} if scan is None else scan.header.policy),
        "limits": parts.text(parts.LIMITS),
        "scripts": scripts(data, "page.js"),
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda m: html[m.group(1)], asset("template.html"))


def survey(run: Run, decisions: DecisionsLike | None = None) -> tuple[Scan | None, Pool | None, Summary]:
    """One walk through a run: what its trace holds, its pooled matrices, its numbers."""
    scan, blocks = _open(run, decisions)
    counts, pool = Counts(None, None, run.config), None
    if scan is not None and scan.header.units:
        rules = rules_of(scan.header, acted=scan.acted)
        counts = Counts(scan.header, rules, run.config)
        pool = Pool(len(scan.header.units), scan.first_step, scan.last_step) if scan.rows else None
        pairs = replayed(rules, blocks()) if decisions is None else given(rules, next(iter(blocks())), decisions)
        for block in passes(rules, pairs):
            _feed(counts, pool, block)
    return scan, pool, counts.summary(run)


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
    return None, list


def _feed(counts: Counts, pool: Pool | None, block: Passes) -> None:
    counts.add(block)
    assert pool is not None  # there are passes, so there are rows
    pool.add(block)


def _data(run: Run, scan: Scan | None, pool: Pool | None, summary: Summary) -> dict[str, Any]:
    """Everything the page's script draws."""
    loss = loss_data(run)
    ends = [x for series in (loss["train"], *loss["evals"]) if series for x in (series["x"][0], series["x"][-1])]
    ends += loss["nonfinite"][:1] + loss["nonfinite"][-1:]
    if scan is not None and scan.rows:
        ends += [scan.first_step, scan.last_step]
    first, last = (min(ends), max(ends)) if ends else (0, 0)
    data: dict[str, Any] = {"range": [first - 0.5, last + 0.5], "loss": loss, "last": last, "causes": CAUSES}
    data["faults"] = known_faults(run.config)[:MAX_FAULTS]
    if scan is not None and pool is not None:
        heat, time = pool.heatmap(), pool.timeline()
        shown = sorted({*heat["units"], *time["units"]})  # a model may have thousands of units: send the names in use
        place = {unit: index for index, unit in enumerate(shown)}
        for figure in (heat, time):
            figure["units"] = [place[unit] for unit in figure["units"]]
        data |= {"units": [visible(scan.header.units[unit]) for unit in shown], "heat": heat, "time": time}
        data |= {"first": pool.first, "width": pool.width}
        data |= {"high": pool.num_high.tolist(), "asked": pool.num_asked.tolist()}
        data |= {"max_high": summary.max_high, "acted": summary.acted, "last": scan.last_step}
    return data


def loss_data(run: Run) -> dict[str, Any]:
    """Curves of the training loss and of every evaluation, and where the loss was not finite."""
    steps, values = run.column("loss")
    fine = np.isfinite(values)
    marks = steps[~fine]
    marks = (
        marks[np.unique(np.linspace(0, len(marks) - 1, min(len(marks), MAX_MARKS)).astype(int))]
        if len(marks)
        else marks
    )
    evals = []
    for key in eval_keys(run)[:MAX_EVALS]:
        x, y = run.column(key)
        series = _series(x[np.isfinite(y)], y[np.isfinite(y)])
        if series:
            evals.append({"name": key, **series})
    low, high = (values[fine].min(), values[fine].max()) if fine.any() else (1.0, 1.0)
    wide = bool(low > 0 and high / low > 50)
    train, mean = _series(steps[fine], values[fine], steps[~fine]), _means(steps[fine], values[fine])
    return {"train": train, "mean": mean, "evals": evals, "nonfinite": marks.tolist(), "log": wide}


def _means(x: np.ndarray, y: np.ndarray) -> dict[str, list] | None:
    """Means over 200 stretches: the course of a loss whose extremes fill a band."""
    if len(x) < MEAN_FROM:
        return None
    parts_x, parts_y = np.array_split(x, 200), np.array_split(y, 200)
    return {"x": [round(float(p.mean()), 1) for p in parts_x], "y": [float(f"{p.mean():.6g}") for p in parts_y]}


def _series(x: np.ndarray, y: np.ndarray, gaps: np.ndarray | None = None) -> dict[str, list] | None:
    """A pooled curve; its line is broken where `gaps` (steps in order) lie between two points."""
    if not len(x):
        return None
    x, y = curve(x, y)
    xs: list[int] = x.tolist()
    ys: list[float | None] = [float(f"{value:.6g}") for value in y]
    for at in np.flatnonzero(np.diff(np.searchsorted(gaps, x)))[::-1] + 1 if gaps is not None and len(gaps) else ():
        xs.insert(at, xs[at - 1])
        ys.insert(at, None)
    return {"x": xs, "y": ys}


def _notes(run: Run, scan: Scan | None, pool: Pool | None, summary: Summary) -> Iterable[str]:
    """What a reader must know before believing the figures."""
    if summary.num_passes:
        limits = f"at most {summary.max_high} of {summary.num_recoverable} high at once"
        yield f"{plural(summary.num_passes, 'pass', 'passes')} over {plural(summary.num_units, 'unit')}, {limits}."
    if scan is not None and scan.rows and scan.first_step > 1:
        yield f"The recording starts at step {scan.first_step:,}; the units' histories before it are not in the trace."
    if pool is not None and pool.width > 1:
        yield f"Each column of the figures is {pool.width:,} steps and shows their largest value."
    torn = (scan.header.dropped_bytes if scan is not None else 0) + run.dropped_bytes
    if torn:
        yield f"The last {torn:,} bytes of the record were torn, as after a crash, and are left out."
