# SPDX-License-Identifier: Apache-2.0
"""Picture: a run as one small SVG without scripts: its loss, and below it the ratio of its most restless units.

A page needs a browser; an issue or a chat takes a picture. Losses are pooled so that every peak stays, the heat strip
keeps the largest ratio of each cell, and the colours follow the reader's scheme, light or dark.
"""

import math
from collections.abc import Sequence
from html import escape
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from trimtab.report.names import visible
from trimtab.report.page import loss_data
from trimtab.report.pool import Pool, curve
from trimtab.report.read import Run
from trimtab.report.summary import known_faults
from trimtab.report.verdict import brief

WIDTH, LEFT, RIGHT, TOP, HEIGHT = 960, 170, 16, 16, 220
POINTS, COLUMNS, UNITS, ROW = 700, 240, 20, 13
LEVELS = 9
"""Colours of a ratio, from a quarter to four times."""
COLOURS = ("#1f6feb", "#b4561f", "#2f7d4f", "#7a1fa2", "#dd9a1f", "#0f8b8d", "#c2451e", "#5b5bd6")
STYLE = """
text { font: 12px system-ui, sans-serif; fill: #5c6670; } .name { font: 11px ui-monospace, monospace; }
.card { fill: #fff; } .grid { stroke: #e1e3e0; } .fault { fill: #7a5a14; fill-opacity: .13; } .bad { fill: #7a1fa2; }
.h0 { fill: #8fb4d1; } .h1 { fill: #a9c4d9; } .h2 { fill: #c3d5e2; } .h3 { fill: #dde6ea; } .h4 { fill: #f6f6f3; }
.h5 { fill: #e9c9bd; } .h6 { fill: #dd9d87; } .h7 { fill: #cf7152; } .h8 { fill: #c2451e; }
@media (prefers-color-scheme: dark) {
text { fill: #9aa4ad; } .card { fill: #1b1f23; } .grid { stroke: #30363c; }
.fault { fill: #f0c864; } .bad { fill: #c678f0; }
.h0 { fill: #36566f; } .h1 { fill: #304a5d; } .h2 { fill: #2b3d4c; } .h3 { fill: #25313a; } .h4 { fill: #1f2429; }
.h5 { fill: #543930; } .h6 { fill: #894d3a; } .h7 { fill: #bd6242; } .h8 { fill: #f2764a; } }
"""


def picture(runs: Sequence[Run], pool: Pool | None, units: Sequence[str]) -> str:
    """The SVG of one run with its heat strip, or of several runs' losses."""
    curves = [_points(run) for run in runs]
    ends = [x for xs, _ in curves for x in (xs[:1], xs[-1:]) for x in x]
    if pool is not None:
        ends += [pool.first, pool.first + len(pool.ratio) * pool.width - 1]
    first, last = (min(ends), max(ends)) if ends else (0, 1)
    scale = (WIDTH - LEFT - RIGHT) / max(last - first + 1, 1)

    def place(step: float) -> float:
        return LEFT + (step - first + 0.5) * scale

    body = _loss(curves, place)
    bottom = TOP + HEIGHT
    if len(runs) == 1:
        body += [
            f'<rect class="fault" x="{place(a) - scale / 2:.1f}" y="{TOP}" '
            f'width="{max((b - a) * scale, 1):.1f}" height="{HEIGHT}"/>'
            for a, b in known_faults(runs[0].config)[:100]
            if a <= last and b >= first
        ]
        marks = loss_data(runs[0])["nonfinite"]
        body += [f'<rect class="bad" x="{place(x) - 2:.1f}" y="{TOP + 2}" width="4" height="4"/>' for x in marks[:100]]
    else:
        body += _legend(runs, bottom + 34)
        bottom += 18 * len(runs)
    if pool is not None:
        strip, tall = _strip(pool, units, place, bottom + 34)
        body += strip
        bottom += tall + 8
    ticks = _ticks(first, last)
    body += [f'<text x="{place(t):.1f}" y="{TOP + HEIGHT + 16}" text-anchor="middle">{t:,}</text>' for t in ticks]
    name = escape(visible(", ".join(brief(run.name) for run in runs[:4])))
    height = bottom + 40
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}">\n'
        f"<title>{name}</title>\n<style>{STYLE}</style>\n"
        f'<rect class="card" width="{WIDTH}" height="{height}"/>\n' + "\n".join(body) + "\n</svg>\n"
    )


def _points(run: Run) -> tuple[list[int], list[float]]:
    steps, values = run.column("loss")
    fine = np.isfinite(values)
    x, y = curve(steps[fine], values[fine], POINTS)
    return x.tolist(), y.tolist()


def _loss(curves: Sequence[tuple[list[int], list[float]]], place) -> list[str]:
    values = [y for _, ys in curves for y in ys]
    if not values:
        return [f'<text x="{LEFT}" y="{TOP + HEIGHT / 2}">no finite loss was logged</text>']
    low, high = min(values), max(values)
    log = low > 0 and high / low > 20
    near, far = (math.log(low), math.log(high)) if log else (low, high)
    span = (far - near) or 1.0

    def rise(y: float) -> float:
        return TOP + HEIGHT - 8 - ((math.log(y) if log else y) - near) / span * (HEIGHT - 16)

    body = []
    for share in (0, 0.25, 0.5, 0.75, 1):
        level = math.exp(near + share * span) if log else near + share * span
        y = rise(level)
        body.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        body.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{level:.3g}</text>')
    body.append(f'<text x="12" y="{TOP + HEIGHT / 2}">loss</text>')
    for number, (xs, ys) in enumerate(curves):
        path = " ".join(f"{place(x):.1f},{rise(y):.1f}" for x, y in zip(xs, ys, strict=True))
        colour = COLOURS[number % len(COLOURS)]
        body.append(f'<polyline fill="none" stroke="{colour}" stroke-width="1.4" points="{path}"/>')
    return body


def _legend(runs: Sequence[Run], top: float) -> list[str]:
    body = []
    for number, run in enumerate(runs):
        y, colour = top + 18 * number, COLOURS[number % len(COLOURS)]
        body.append(f'<rect x="{LEFT}" y="{y - 8}" width="14" height="4" fill="{colour}"/>')
        body.append(f'<text x="{LEFT + 22}" y="{y}">{escape(visible(brief(run.name, 90)))}</text>')
    return body


def _strip(pool: Pool, units: Sequence[str], place, top: float) -> tuple[list[str], float]:
    """The heat strip: one path per colour."""
    shown = np.sort(np.argsort(-pool.ratio.max(axis=0), kind="stable")[:UNITS])
    join = -(-len(pool.ratio) // COLUMNS)
    starts = np.arange(0, len(pool.ratio), join)
    ratio: NDArray = np.maximum.reduceat(pool.ratio[:, shown], starts, axis=0)
    with np.errstate(divide="ignore"):
        level = np.log2(np.maximum(ratio, 1e-9))
    codes = np.clip(np.rint((level + 2) / 4 * (LEVELS - 1)), 0, LEVELS - 1).astype(int)
    codes[np.isposinf(ratio)], codes[np.isneginf(ratio)] = LEVELS, -1
    edges = [place(pool.first + int(s) * pool.width - 0.5) for s in (*starts, len(pool.ratio))]
    paths: dict[int, list[str]] = {}
    for row in range(len(shown)):
        cuts = [0, *(np.flatnonzero(np.diff(codes[:, row])) + 1).tolist(), len(codes)]
        for a, b in pairwise(cuts):
            box = (
                f"M{edges[a]:.1f} {top + row * ROW:.0f}h{edges[b] - edges[a]:.1f}v{ROW - 1}h{edges[a] - edges[b]:.1f}z"
            )
            paths.setdefault(int(codes[a, row]), []).append(box)
    body = [
        f'<path class="{"bad" if code == LEVELS else f"h{code}"}" d="{"".join(boxes)}"/>'
        for code, boxes in sorted(paths.items())
        if code >= 0
    ]
    for row, unit in enumerate(shown):
        name = escape(visible(brief(units[int(unit)], 24)))
        body.append(f'<text class="name" x="{LEFT - 8}" y="{top + row * ROW + 10:.0f}" text-anchor="end">{name}</text>')
    says = f"norm over its own mean: blue below, red above, x 0.25 to x 4; {len(shown)} of {len(units):,} units"
    body.append(f'<text x="{LEFT}" y="{top + len(shown) * ROW + 16:.0f}">{says}</text>')
    return body, len(shown) * ROW + 24


def _ticks(first: int, last: int, count: int = 6) -> list[int]:
    """Round steps across a range."""
    span = max(last - first, 1)
    unit = 10 ** math.floor(math.log10(span / count)) if span > count else 1
    every = next(int(unit * k) for k in (1, 2, 5, 10, 20) if span / (unit * k) <= count)
    start = -(-first // every) * every
    return list(range(int(start), int(last) + 1, max(every, 1)))
