# SPDX-License-Identifier: Apache-2.0
"""Compare: several runs on one page: losses over each other, what control did in each, every number side by side.

    write_comparison(compare(["runs/a", "runs/b"]))           runs/comparison.html
    write_comparison_markdown(compare(["runs/a", "runs/b"]))  runs/comparison.md, and a picture beside it

Runs are compared as they are. The page says what differs in their settings and lengths, and no more than that the last
losses differ: whether that is more than chance takes seeds (`trimtab bench`). A loss at the end is the median of the
last 5 % of the logged ones, at least 5, so that one bad batch does not name the winner.
"""

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np

from trimtab.control.values import KINDS
from trimtab.errors import TrimtabError
from trimtab.report.assets import asset, scripts, write
from trimtab.report.markdown import code, escaped
from trimtab.report.markdown import table as markdown_table
from trimtab.report.names import visible
from trimtab.report.page import loss_data, survey
from trimtab.report.parts import MEANINGS, SHARES, card, text
from trimtab.report.picture import picture
from trimtab.report.pool import curve
from trimtab.report.read import Run, read_run
from trimtab.report.summary import Summary
from trimtab.report.verdict import brief, percent, plural
from trimtab.report.whatif import html_table, panels

MOST = 40
POINTS = 1000
CHANGES = 60
LIMITS = (
    "What this page cannot tell: one run of each is no proof. Losses differ from seed to seed, and a difference is "
    "believed when it holds over several (trimtab bench)."
)


@dataclass(frozen=True, eq=False)
class Compared:
    """One run of a comparison."""

    name: str
    """Its own, with its folder where two have the same."""
    run: Run
    summary: Summary
    end: float | None
    """Median of its last losses."""
    last_step: int
    policy: Mapping[str, Any]
    high: tuple[list[int], list[float]]
    """Steps, and the share of units that ran high there."""
    events: Mapping[str, int]


def compare(folders: Sequence[str | Path]) -> tuple[Compared, ...]:
    """Go through each run once."""
    if not 2 <= len(folders) <= MOST:
        raise TrimtabError(f"a comparison takes 2 to {MOST} runs, got {len(folders)}")
    runs = [read_run(folder, with_trace=False) for folder in folders]
    names = [run.name for run in runs]
    taken = Counter(names)
    shown = [name if taken[name] == 1 else f"{name} ({run.folder})" for name, run in zip(names, runs, strict=True)]
    return tuple(_compared(name, run) for name, run in zip(_told_apart(shown), runs, strict=True))


def _told_apart(names: Sequence[str]) -> Iterable[str]:
    """Names of which none occurs twice, even where a folder was given twice."""
    seen: Counter[str] = Counter()
    for name in names:
        seen[name] += 1
        yield name if seen[name] == 1 else f"{name} #{seen[name]}"


def _compared(name: str, run: Run) -> Compared:
    scan, pool, summary = survey(run)
    steps, values = run.column("loss")
    fine = np.isfinite(values)
    tail = values[fine][-max(5, fine.sum() // 20) :]
    high: tuple[list[int], list[float]] = ([], [])
    if pool is not None and summary.num_recoverable:
        at = pool.first + np.arange(len(pool.num_high)) * pool.width
        x, y = curve(at, pool.num_high / summary.num_recoverable, POINTS)
        high = (x.tolist(), [round(float(v), 5) for v in y])
    told = [event for line in run.metrics if isinstance(events := line.get("events"), list) for event in events]
    events = Counter(str(event.get("kind")) for event in told if isinstance(event, Mapping))
    ends = [int(steps[-1])] if len(steps) else []
    ends += [scan.last_step] if scan is not None and scan.rows else []
    return Compared(
        name=name,
        run=run,
        summary=summary,
        end=float(np.median(tail)) if len(tail) else None,
        last_step=max(ends, default=0),
        policy={} if scan is None else scan.header.policy,
        high=high,
        events=events,
    )


def verdict(runs: Sequence[Compared]) -> str:
    """What the losses say, and what they do not."""
    known = sorted((one for one in runs if one.end is not None), key=lambda one: one.end or 0.0)
    if len(known) < 2:
        return "At most one of these runs logged a finite loss, so their losses cannot be compared."
    best, last = known[0], known[-1]
    assert best.end is not None
    assert last.end is not None
    told = (
        f"{brief(visible(best.name))} ends lowest, at {best.end:.4g}; {brief(visible(last.name))} highest, at "
        f"{last.end:.4g}. One run of each is no proof."
    )
    lengths = {one.last_step for one in runs}
    if len(lengths) > 1:
        told += f" They are not of equal length: {min(lengths):,} to {max(lengths):,} steps."
    return told


def rows_of(runs: Sequence[Compared]) -> list[tuple[str, list[str], str]]:
    """Every number that any run has: its name, one value per run, and what it means."""
    rows = [("last loss", [_digits(one.end) for one in runs], "median of the last 5 % of the logged losses")]
    keys = dict.fromkeys(key for one in runs for key in one.summary.losses.best_evals)
    rows += [
        (f"best {key}", [_digits(one.summary.losses.best_evals.get(key)) for one in runs], "lowest of the run")
        for key in keys
    ]
    rows.append(("losses not finite", [f"{one.summary.losses.nonfinite:,}" for one in runs], ""))
    rows.append(("steps", [f"{one.last_step:,}" for one in runs], "last step"))
    rows.append(("units", [f"{one.summary.num_recoverable:,}" if one.summary.metrics else "-" for one in runs], ""))
    rows.append(("budget", [str(one.summary.max_high) if one.summary.metrics else "-" for one in runs], ""))
    for key, says in MEANINGS.items():
        values = [one.summary.metrics.get(key) for one in runs]
        if any(value is not None for value in values):
            shown = [percent(v) if key in SHARES and v is not None else _digits(v) for v in values]
            rows.append((key, shown, says))
    for kind in _kinds(runs):
        rows.append((f"events: {kind}", [f"{one.events.get(kind, 0):,}" for one in runs], ""))
    return rows


def _kinds(runs: Sequence[Compared]) -> list[str]:
    """The kinds of events that occur, the known ones first."""
    found = {kind for one in runs for kind in one.events}
    return [kind for kind in KINDS if kind in found] + sorted(found - set(KINDS))[:10]


def differences(runs: Sequence[Compared]) -> list[tuple[str, list[str]]]:
    """Settings and policy entries that are not the same in all runs."""
    flat = [dict([*_flat("", one.run.config), *_flat("policy.", one.policy)]) for one in runs]
    keys = dict.fromkeys(key for values in flat for key in values)
    return [
        (key, [values.get(key, "-") for values in flat])
        for key in keys
        if len({values.get(key, "-") for values in flat}) > 1
    ]


def _flat(prefix: str, values: Mapping[str, Any]) -> Iterable[tuple[str, str]]:
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(f"{prefix}{key}.", value)
        else:
            shown = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            yield f"{prefix}{key}", brief(shown, 120)


def write_comparison(runs: Sequence[Compared], out: str | Path | None = None) -> Path:
    """Write the page and return its path; comparison.html beside the first run unless told otherwise."""
    return write(render_comparison(runs), _beside(runs, "comparison.html") if out is None else out)


def write_comparison_markdown(runs: Sequence[Compared], out: str | Path | None = None) -> Path:
    """Write the table in Markdown, and a picture beside it; returns the path of the former."""
    path = _beside(runs, "comparison.md") if out is None else Path(out)
    image = write(picture([one.run for one in runs], None, ()), path.with_suffix(".svg"))
    return write(comparison_markdown(runs, image.name), path)


def _beside(runs: Sequence[Compared], name: str) -> Path:
    return runs[0].run.folder.resolve().parent / name


def render_comparison(runs: Sequence[Compared]) -> str:
    """The page as HTML."""
    figures = _plots(runs)
    names = [one.name for one in runs]
    changed = differences(runs)
    settings = html_table(["setting", *names], [[key, *values] for key, values in changed[:CHANGES]])
    more = f'<p class="note">And {len(changed) - CHANGES:,} more.</p>' if len(changed) > CHANGES else ""
    html = {
        "title": text(f"{len(runs)} runs - trimtab report"),
        "kind": "trimtab comparison of runs",
        "heading": text(", ".join(brief(name, 40) for name in names[:4]) + (", ..." if len(names) > 4 else "")),
        "verdict": text(verdict(runs)),
        "notes": "\n".join(
            f'<p class="note"><b>{text(brief(one.name))}</b>: {text(one.summary.verdict)}</p>' for one in runs[:12]
        ),
        "figures": "\n".join(card(*figure) for figure in _figures(runs)),
        "plots": panels(figures),
        "offenders": f'<section id="table"><h2>Side by side</h2>{_table(runs)}</section>',
        "numbers": f'<section id="settings"><h2>What differs</h2>{settings}{more}</section>'
        if changed
        else '<section id="settings"><h2>What differs</h2><p class="note">No setting.</p></section>',
        "facts": "",
        "limits": text(LIMITS),
        "scripts": scripts({"figures": figures}, "figures.js"),
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda m: html[m.group(1)], asset("template.html"))


def comparison_markdown(runs: Sequence[Compared], image: str) -> str:
    """The comparison for an issue or a chat."""
    wanted = ("last loss", "steps", "false_alarms_per_1k", "promotion_ratio", "hit_maxO", "denied", "nonfinite")
    rows = [row for row in rows_of(runs) if row[0] in wanted or row[0].startswith("best ")]
    body = [[escaped(name), *map(escaped, values)] for name, values, _ in rows]
    lines = [f"### {plural(len(runs), 'run')}", "", escaped(verdict(runs)), "", f"![losses]({quote(image)})", ""]
    lines += markdown_table(["", *(code(one.name, table=True) for one in runs)], body)
    return "\n".join(lines) + "\n"


def _table(runs: Sequence[Compared]) -> str:
    rows = [[name, *values] for name, values, _ in rows_of(runs)]
    return html_table(["", *(one.name for one in runs)], rows)


def _figures(runs: Sequence[Compared]) -> Iterable[tuple[str, str, str]]:
    ends = [one.end for one in runs if one.end is not None]
    yield str(len(runs)), "runs", f"up to {max(one.last_step for one in runs):,} steps"
    best = min((one for one in runs if one.end is not None), key=lambda one: one.end or 0.0, default=None)
    yield _digits(min(ends, default=None)), "lowest last loss", "-" if best is None else brief(best.name, 40)
    yield _digits(max(ends) - min(ends) if ends else None), "between the lowest and the highest", "last loss"
    acted = [one for one in runs if one.summary.times_high and one.summary.acted]
    yield f"{len(acted)} of {len(runs)}", "runs in which control acted", ""


def _plots(runs: Sequence[Compared]) -> list[dict[str, Any]]:
    figures = []
    lines, spread = [], []
    for number, one in enumerate(runs):
        loss = loss_data(one.run)
        if loss["train"]:
            smooth = loss["mean"] is not None
            base = {"type": "scatter", "mode": "lines", "color": number}
            lines.append(
                base
                | _thinned(loss["train"])
                | {"name": one.name, "quiet": smooth, "width": 1, "opacity": 0.35 if smooth else 1}
            )
            lines += [base | loss["mean"] | {"name": one.name, "width": 2}] if smooth else []
            spread += [y for y in loss["train"]["y"] if y is not None]
    if lines:
        wide = min(spread) > 0 and max(spread) / min(spread) > 20
        says = "Training loss; where there are many steps, faint, and its mean over it."
        figures.append(
            {"id": "losses", "title": "Loss", "says": says, "traces": lines, "x": "step", "y": "loss", "ylog": wide}
        )
    high = [
        {"type": "scatter", "mode": "lines", "x": x, "y": y, "color": number, "name": one.name, "shape": "hv"}
        for number, one in enumerate(runs)
        for x, y in (one.high,)
        if x
    ]
    if high:
        says = "Share of the units that ran high (in a run that only watched: that would have)."
        figures.append(
            {
                "id": "promotion",
                "title": "Units high",
                "says": says,
                "traces": high,
                "x": "step",
                "y": "units high",
                "percent": True,
            }
        )
    kinds = _kinds(runs)
    if kinds:
        names = [one.name for one in runs]
        bars = [
            {"type": "bar", "x": names, "y": [one.events.get(kind, 0) for one in runs], "name": kind, "color": number}
            for number, kind in enumerate(kinds)
        ]
        says = "What the controller reported, by kind."
        figures.append({"id": "events", "title": "Events", "says": says, "traces": bars, "x": "", "y": "events"})
    return figures


def _thinned(series: Mapping[str, list]) -> dict[str, list]:
    """At most `POINTS` points of a curve; a curve with breaks stays as it is."""
    if len(series["x"]) <= POINTS or None in series["y"]:
        return dict(series)
    x, y = curve(np.array(series["x"]), np.array(series["y"], float), POINTS)
    return {"x": x.tolist(), "y": y.tolist()}


def _digits(value: float | None) -> str:
    if value is None or np.isnan(value):
        return "-"
    return f"{int(value):,}" if float(value).is_integer() and abs(value) < 1e9 else f"{value:.4g}"
