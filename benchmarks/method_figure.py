# SPDX-License-Identifier: Apache-2.0
"""Draw the method page's figure from a run folder: one unit's norm, its mean, the threshold, and when it ran high.

    trimtab train --set model=micro --set steps=160 --set policy.preset=steady --set policy.warmup_steps=20 \\
        --set policy.max_high=4 --set "faults=blocks.0.mlp.down:grad_scale:start=90,width=12,size=24" --out runs/method
    python benchmarks/method_figure.py runs/method blocks.0.mlp.down docs/method.svg

Ratio and mean are those of `trimtab.replay` on the recorded norms. Plain SVG, as in `figure.py`.
"""

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np

from trimtab import Policy, replay
from trimtab.report.read import read_run

WIDTH, LEFT, RIGHT, TOP, PLOT, STRIP = 860, 56, 150, 30, 220, 16
NORM, MEAN, LIMIT, HIGH = "#1f6feb", "#2a7f62", "#c0392b", "#9a6b00"


def main(folder: Path, unit: str, out: Path) -> None:
    """Draw the figure."""
    run = read_run(folder)
    assert run.trace is not None
    given = dict(run.config["policy"])
    policy = replace(Policy.preset(given.pop("preset")), **given)
    column = run.trace.units.index(unit)
    norms = run.trace.norms[:, column : column + 1]
    ratio = replay(norms, policy, total_steps=len(norms)).ratio[:, 0]
    norm, first = norms[:, 0].astype(float), 10
    mean = norm / ratio
    limit = mean * policy.alpha
    values = np.log(np.concatenate([norm[first:], mean[first:], limit[first:]]))
    low, high = values.min() - 0.1, values.max() + 0.1

    def x(step: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * (step - first) / (len(norm) - first)

    def y(value: float) -> float:
        return TOP + PLOT * (high - np.log(value)) / (high - low)

    height = TOP + PLOT + STRIP + 34
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif"',
        ' font-size="12">',
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
        f'<text x="{LEFT}" y="16" fill="#333">gradient norm of {unit} (log); shaded: its low path is wrong</text>',
    ]
    for fault in run.config["faults"]:
        a, b = x(fault["start"] - 1), x(fault["start"] + fault["width"] - 1)
        parts.append(f'<rect x="{a:.1f}" y="{TOP}" width="{b - a:.1f}" height="{PLOT + STRIP + 10}" fill="#f2d7d5"/>')
    place = -100.0
    for curve, color, name in ((limit, LIMIT, "alpha x mean"), (norm, NORM, "norm"), (mean, MEAN, "mean of its past")):
        points = " ".join(f"{x(s):.1f},{y(v):.1f}" for s, v in enumerate(curve) if s >= first)
        parts.append(f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="1.6"/>')
        place = max(y(curve[-1]) + 4, place + 15)
        parts.append(f'<text x="{WIDTH - RIGHT + 8}" y="{place:.1f}" fill="{color}">{name}</text>')
    top = TOP + PLOT + 8
    parts.append(f'<text x="{WIDTH - RIGHT + 8}" y="{top + 11}" fill="{HIGH}">ran high</text>')
    for row in np.flatnonzero(run.trace.high[:, column]):
        if row >= first:
            parts.append(
                f'<rect x="{x(row):.1f}" y="{top}" width="{x(1) - x(0):.1f}" height="{STRIP - 3}" fill="{HIGH}"/>'
            )
    for step in range(0, len(norm) + 1, 20):
        if step >= first:
            parts.append(f'<text x="{x(step):.1f}" y="{height - 6}" text-anchor="middle" fill="#555">{step}</text>')
    out.write_text("\n".join([*parts, "</svg>"]) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))
