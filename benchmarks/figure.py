# SPDX-License-Identifier: Apache-2.0
"""Draw the README's figure from a demo's run folders: the four losses, and who ran high under control.

    python benchmarks/figure.py runs/demo docs/demo.svg

Plain SVG without a plotting library, so that the picture in the repository is small and can be read as text.
"""

import sys
from pathlib import Path

import numpy as np

from trimtab.report.read import read_run

WIDTH, LEFT, RIGHT, TOP, PLOT, GAP, STRIP = 860, 56, 120, 28, 220, 34, 13
COLORS = {"high": "#2a7f62", "control": "#1f6feb", "random": "#9a6b00", "low": "#c0392b"}


def smooth(values: np.ndarray, span: int = 12) -> np.ndarray:
    """A running mean, so that the eye sees the trend."""
    kernel = np.ones(span) / span
    padded = np.concatenate([np.full(span - 1, values[0]), values])
    return np.convolve(padded, kernel, mode="valid")


def main(folder: Path, out: Path) -> None:
    """Draw the figure."""
    runs = {arm: read_run(folder / arm) for arm in COLORS}
    curves = {arm: smooth(run.column("loss")[1]) for arm, run in runs.items()}
    steps = len(curves["high"])
    start = steps // 8
    low, high = min(c[start:].min() for c in curves.values()), max(c[start:].max() for c in curves.values())

    def x(step: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * (step - start) / (steps - start)

    def y(loss: float) -> float:
        return TOP + PLOT * (high - loss) / (high - low)

    trace = runs["control"].trace
    assert trace is not None
    used = [i for i in np.argsort(-trace.high.sum(axis=0)) if trace.high[:, i].any()][:8]
    bottom = TOP + PLOT + GAP
    height = bottom + STRIP * len(used) + 26
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif"',
        ' font-size="12">',
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
    ]
    for fault in runs["control"].config["faults"]:
        a, b = x(fault["start"]), x(fault["start"] + fault["width"])
        parts.append(f'<rect x="{a:.1f}" y="{TOP}" width="{b - a:.1f}" height="{height - TOP - 22}" fill="#f2d7d5"/>')
    for loss in np.arange(np.ceil(low * 5) / 5, high, 0.2):
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(loss):.1f}" y2="{y(loss):.1f}" stroke="#e5e5e5"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y(loss) + 4:.1f}" text-anchor="end" fill="#555">{loss:.1f}</text>')
    for arm, curve in curves.items():
        points = " ".join(f"{x(s):.1f},{y(v):.1f}" for s, v in enumerate(curve) if s >= start)
        parts.append(f'<polyline points="{points}" fill="none" stroke="{COLORS[arm]}" stroke-width="1.8"/>')
    ends = sorted(((y(curve[-1]), arm) for arm, curve in curves.items()))
    place = -100.0
    for at, arm in ends:
        place = max(at, place + 15)
        parts.append(f'<text x="{WIDTH - RIGHT + 8}" y="{place + 4:.1f}" fill="{COLORS[arm]}">{arm}</text>')
    parts.append(
        f'<text x="{LEFT}" y="16" fill="#333">training loss, four runs from one seed; shaded: injected faults</text>'
    )
    parts.append(f'<text x="{LEFT}" y="{bottom - 10}" fill="#333">who ran high under control</text>')
    for row, unit in enumerate(used):
        top = bottom + STRIP * row
        name = trace.units[unit].replace("blocks.", "")
        parts.append(f'<text x="{WIDTH - RIGHT + 8}" y="{top + 10}" fill="#555" font-size="11">{name}</text>')
        for step in trace.steps[trace.high[:, unit]]:
            if step >= start:
                parts.append(
                    f'<rect x="{x(step):.1f}" y="{top + 1}" width="{x(1) - x(0):.1f}" height="{STRIP - 3}" '
                    f'fill="{COLORS["control"]}"/>'
                )
    for step in range(0, steps + 1, 100):
        if step >= start:
            parts.append(f'<text x="{x(step):.1f}" y="{height - 6}" text-anchor="middle" fill="#555">{step}</text>')
    out.write_text("\n".join([*parts, "</svg>"]) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
