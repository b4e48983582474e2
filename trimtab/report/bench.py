# SPDX-License-Identifier: Apache-2.0
"""Bench: the page and the table of a bench, from the plain dict that its bench.json holds.

    write_bench_page(result, "runs/bench/report.html")      one file, opens offline, light and dark
    heads, rows = table(cell, result["metrics"])            the main columns as text, for a terminal

From top to bottom: what was run, four figures; for the chosen cell the loss of every arm, its paired difference to low
and the gap it closed, with 95 % intervals, and the sweep it belongs to; then every number of every cell, what the
numbers mean, and the facts. The gap is that between low and the cell's top (`high`, or `clean` where faults are
injected). It is shown only where there is one: where the paired interval of low minus top includes zero, a share of it
would be noise over noise, and the table says "no gap".

Names come from somebody's command line, so nothing is trusted: text is escaped, data is JSON in which `<` cannot occur.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from trimtab.report.assets import asset, scripts, write
from trimtab.report.parts import card, text
from trimtab.report.verdict import percent, plural

QUALITY = ("eval_high", "vs_low", "vs_random", "gap")
"""Columns that stand before the counts; the two in the middle are paired differences."""
PAIRED = {"vs_low": "vs low", "vs_random": "vs random"}
OMITTED = ("eval_low", "loss", "gap_low", "nonfinite")
"""In bench.json only."""
DETAILS = ("detected", "exceed_gnmr", "exceed_delta", "reruns", "extra_bytes_peak", "extra_bytes_bound", "peak_bytes")
"""On the page and not in a terminal, and so are the intervals of what is not quality."""
ENDS = ("high", "low", "clean")
PLUS_MINUS = "\u00b1"
LIMITS = (
    "What this page cannot tell: intervals are Student's t over few seeds, 95 %, each on its own; among twenty of them "
    "one misses by chance. Low precision is emulated, so times compare arms with each other and say nothing of real "
    "kernels. Extra bytes are those that the formats stand for (eq. 67), not what the emulation keeps."
)


def write_bench_page(result: Mapping[str, Any], path: str | Path) -> Path:
    """Write the page of a bench and return its path."""
    return write(render_bench(result), path)


def render_bench(result: Mapping[str, Any]) -> str:
    """The page as HTML."""
    html = {
        "title": text(f"{result['suite']} - trimtab bench"),
        "kind": "trimtab bench",
        "heading": text(result["suite"]),
        "verdict": text(result["what"]),
        "notes": "\n".join(f'<p class="note">{text(note)}</p>' for note in (_size(result), *says(result))),
        "figures": "\n".join(card(*figure) for figure in _figures(result)),
        "plots": _plots(result),
        "offenders": "\n".join(_cell_table(cell, result) for cell in result["cells"]) + _rates(result),
        "numbers": _meanings(result),
        "facts": _facts(result),
        "limits": text(LIMITS),
        "scripts": scripts(_data(result), "bench.js"),
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda m: html[m.group(1)], asset("template.html"))


def table(
    cell: Mapping[str, Any], metrics: Mapping[str, Mapping[str, str]], *, brief: bool = True
) -> tuple[list[str], list[list[str]]]:
    """The heads and the rows of a cell, one row per arm; columns that are empty throughout are left out.

    Args:
        brief: for a terminal: fewer columns, and intervals for quality only.
    """
    left_out = (*QUALITY, *OMITTED, *(DETAILS if brief else ()))
    names = [*QUALITY, *(name for name in metrics if name not in left_out)]
    columns = {name: [_entry(cell, arm, name, metrics, brief) for arm in cell["arms"].values()] for name in names}
    died = [f"{len(arm['died'])} of {len(arm['runs'])}" if arm["died"] else "" for arm in cell["arms"].values()]
    kept = {name: column for name, column in {**columns, "died": died}.items() if any(column)}
    heads = ["arm", *(PAIRED.get(name) or metrics.get(name, {"title": name})["title"] for name in kept)]
    rows = [[arm, *(column[i] or "-" for column in kept.values())] for i, arm in enumerate(cell["arms"])]
    return heads, rows


def says(result: Mapping[str, Any]) -> Iterable[str]:
    """Per arm: in how many cells its paired interval excludes zero, and on which side."""
    for name in result["arms"]:
        if name in ENDS:
            continue
        words = []
        for key, other in (("vs_low", "low"), ("vs_random", "random units at equal count")):
            stats = [s for cell in result["cells"] if name in cell["arms"] and (s := cell["arms"][name][key])]
            clear = [s["mean"] for s in stats if s["half"] is not None and abs(s["mean"]) > s["half"]]
            if stats:
                better, worse = sum(mean < 0 for mean in clear), sum(mean > 0 for mean in clear)
                words.append(f"better than {other} in {better} of {plural(len(stats), 'cell')}, worse in {worse}")
        if words:
            yield f"{name}: {'; '.join(words)}."


def show(kind: str, value: float) -> str:
    """One value of a kind of metric."""
    if kind == "loss":
        return f"{value:.4f}"
    if kind == "share":
        return f"{100 * value:.3g} %" if abs(value) < 0.1 else f"{100 * value:.0f} %"
    if kind == "bytes":
        for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
            if abs(value) >= size:
                return f"{value / size:.3g} {unit}"
        return f"{value:.0f} B"
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"


def _entry(
    cell: Mapping[str, Any],
    arm: Mapping[str, Any],
    name: str,
    metrics: Mapping[str, Mapping[str, str]],
    brief: bool,
) -> str:
    """One cell of the table: a mean, and its half width where there is one."""
    stats = arm[name] if name in PAIRED else arm["stats"].get(name)
    if not stats or stats["mean"] is None:
        return ""
    kind = "loss" if name in PAIRED else metrics[name]["kind"]
    if name in ("gap", "gap_low") and not cell["damage"]["clear"]:
        return "no gap"
    mean = show(kind, stats["mean"])
    mean = f"+{mean}" if name in PAIRED and stats["mean"] > 0 else mean
    if stats["half"] is None or (name not in QUALITY and (brief or not stats["half"])):
        return mean
    return f"{mean} {'+-' if brief else PLUS_MINUS} {show(kind, stats['half'])}"


def _size(result: Mapping[str, Any]) -> str:
    return (
        f"{plural(len(result['cells']), 'cell')}, {plural(len(result['arms']), 'arm')}, seeds "
        f"{', '.join(map(str, result['seeds']))}: {plural(_runs(result), 'run')}. Intervals are 95 %, over seeds; "
        "differences are paired, seed by seed. Below, better and worse count intervals that exclude zero."
    )


def _runs(result: Mapping[str, Any]) -> int:
    return sum(len(arm["runs"]) for cell in result["cells"] for arm in cell["arms"].values())


def _figures(result: Mapping[str, Any]) -> Iterable[tuple[str, str, str]]:
    cells = result["cells"]
    clear = [cell for cell in cells if cell["damage"]["clear"]]
    died = sum(len(arm["died"]) for cell in cells for arm in cell["arms"].values())
    yield str(len(result["seeds"])), "seeds per arm", f"{plural(len(cells), 'cell')}"
    yield (
        f"{len(clear)} of {len(cells)}",
        "cells with a gap",
        "low worse than the best possible, paired interval above zero",
    )
    lead = next((name for name in result["arms"] if name not in ENDS and not name.startswith("random")), None)
    gaps = [
        m for cell in clear if lead in cell["arms"] and (m := cell["arms"][lead]["stats"]["gap"]["mean"]) is not None
    ]
    high = [
        m
        for cell in cells
        if lead in cell["arms"] and (m := cell["arms"][lead]["stats"]["promotion_ratio"]["mean"]) is not None
    ]
    closed = percent(sum(gaps) / len(gaps)) if gaps else "-"
    yield closed, f"of the gap closed by {lead}", f"mean over {plural(len(gaps), 'cell')} with a gap"
    ratio = percent(sum(high) / len(high)) if high else "-"
    yield ratio, f"of unit-steps high under {lead}", f"{died} of {plural(_runs(result), 'run')} died"


def _plots(result: Mapping[str, Any]) -> str:
    options = "".join(f"<option value={i}>{text(cell['name'])}</option>" for i, cell in enumerate(result["cells"]))
    pick = f'<div class="panel"><p><label>Cell <select id="pick">{options}</select></label></p></div>'
    panels = [
        ("curves", "Training loss", "Mean over seeds of each arm; shaded where a fault was injected."),
        ("versus", "Held-out loss against low", "Paired difference to low, 95 %: left of zero is better."),
        (
            "gap",
            "Gap closed",
            "Share of the loss between low (0) and the cell's top (1) that an arm wins back, 95 %.",
        ),
    ]
    if result["sweeps"]:
        panels.append(("sweep", "Across the sweep", "Every arm over the cells of this line."))
    rest = "".join(
        f'<div class="panel"><h2>{title}</h2><p class="caption" id="say-{name}">{says}</p>'
        f'<div class="plot" id="plot-{name}"></div></div>'
        for name, title, says in panels
    )
    return f'<section class="plots" id="plots">{pick}{rest}</section>'


def _cell_table(cell: Mapping[str, Any], result: Mapping[str, Any]) -> str:
    heads, rows = table(cell, result["metrics"], brief=False)
    damage = cell["damage"]
    says = (
        "no run finished on both"
        if damage["mean"] is None
        else f"low minus {cell['top']}: {show('loss', damage['mean'])}"
    )
    says += "" if damage["half"] is None else f" {PLUS_MINUS} {show('loss', damage['half'])}"
    head = "".join(f"<th{'' if i == 0 else ' class=n'}>{text(name)}</th>" for i, name in enumerate(heads))
    body = "".join(
        f'<tr><td class="unit">{text(row[0])}</td>'
        + "".join(f'<td class="n">{text(c)}</td>' for c in row[1:])
        + "</tr>"
        for row in rows
    )
    inner = f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
    return f'<section><h2>{text(cell["name"])}</h2><p class="note">{text(says)}</p>{inner}</section>'


def _rates(result: Mapping[str, Any]) -> str:
    rows = [row for row in result["sweeps"] if "largest_stable" in row]
    if not rows:
        return ""
    body = "".join(
        f'<tr><td class="unit">{text(row["group"])}</td><td class="unit">{text(row["arm"])}</td>'
        + "".join(
            f'<td class="n">{"-" if row[key] is None else text(f"{row[key]:.4g}")}</td>'
            for key in ("largest_stable", "sensitivity")
        )
        + "</tr>"
        for row in rows
    )
    head = "<th>line</th><th>arm</th><th class=n>largest stable rate</th><th class=n>sensitivity</th>"
    inner = f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
    return f"<section><h2>Learning rates</h2>{inner}</section>"


def _meanings(result: Mapping[str, Any]) -> str:
    arms = [(name, what) for name, what in result["arms"].items()]
    metrics = [("vs low, vs random", "paired difference of the held-out loss; below zero is better")]
    metrics += [(m["title"], m["means"]) for name, m in result["metrics"].items() if name not in OMITTED]
    parts = []
    for title, rows in (("Arms", arms), ("Columns", metrics)):
        body = "".join(f"<tr><th>{text(name)}</th><td>{text(says)}</td></tr>" for name, says in rows)
        inner = f'<div class="scroll"><table class="facts"><tbody>{body}</tbody></table></div>'
        parts.append(f"<section><h2>{title}</h2>{inner}</section>")
    return "".join(parts)


def _facts(result: Mapping[str, Any]) -> str:
    keys = ("finished", "seeds", "given", "versions", "platform", "cpu_count", "hardware", "corpus", "git")
    rows = [("command", " ".join(result["command"]))]
    rows += [(key, json.dumps(result.get(key), ensure_ascii=False)) for key in keys]
    rows += [(f"cell {cell['name']}", json.dumps(cell["settings"], ensure_ascii=False)) for cell in result["cells"]]
    body = "".join(f"<tr><th>{text(name)}</th><td>{text(value)}</td></tr>" for name, value in rows)
    inner = f'<div class="scroll"><table class="facts"><tbody>{body}</tbody></table></div>'
    return f"<section><details><summary>Settings, versions, command</summary>{inner}</details></section>"


def _data(result: Mapping[str, Any]) -> dict[str, Any]:
    """What the page's script draws."""
    cells = []
    for cell in result["cells"]:
        stats = {
            name: {
                "versus": arm["vs_low"],
                "gap": arm["stats"]["gap"] if cell["damage"]["clear"] else None,
                "promotion": arm["stats"]["promotion_ratio"]["mean"],
            }
            for name, arm in cell["arms"].items()
        }
        cells.append({key: cell[key] for key in ("name", "curves", "windows", "group", "axis")} | {"arms": stats})
    return {"arms": list(result["arms"]), "cells": cells, "sweeps": result["sweeps"]}


def plain_table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns of text, the first aligned left and the others right; never wrapped, so that it can be cut and pasted."""
    widths = [max(len(row[i]) for row in (heads, *rows)) for i in range(len(heads))]
    lines = [
        "  ".join(c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True)))
        for row in (heads, *rows)
    ]
    return "\n".join(line.rstrip() for line in lines)
