# SPDX-License-Identifier: Apache-2.0
"""Markdown tables for docs/results.md from the bench.json files of `trimtab bench`.

python benchmarks/table.py benchmarks/results/faults_gpu.json
python benchmarks/table.py benchmarks/results/harm_gpu.json --matrix difference
python benchmarks/table.py /tmp/a/bench.json /tmp/b/bench.json --merge benchmarks/results/faults_gpu.json
"""

import argparse
import json
from pathlib import Path
from typing import Any

TITLES = {
    "eval_high": "held-out loss",
    "difference": "minus low",
    "beyond": "minus random at its count",
    "gap": "closed",
    "promotion_ratio": "promoted",
    "blocked": "blocked",
    "top1": "top-1",
    "delay": "delay",
    "false_alarms_per_1k": "alarms per 1,000",
    "reruns": "run twice",
    "hit_maxO": "budget full",
    "denied": "denied",
    "spike_score": "spikes",
    "nonfinite": "not finite",
    "ms_per_step": "ms per step",
    "controller_ms": "control ms",
    "extra_bytes_mean": "extra kB",
}
USUAL = "eval_high,gap,beyond,promotion_ratio,blocked,top1,false_alarms_per_1k,reruns,controller_ms"
SHARES = ("gap", "promotion_ratio", "blocked", "top1", "hit_maxO", "spike_score")


def main() -> None:
    """Print one table per cell."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--columns", default=USUAL)
    parser.add_argument("--cells", default="", help="only these, comma separated")
    parser.add_argument("--wide", action="store_true", help="one table, one row per cell and arm")
    parser.add_argument("--matrix", default="", help="one table of this column, arms down and cells across")
    parser.add_argument("--merge", type=Path, help="write the files as one, without their curves")
    args = parser.parse_args()
    columns = args.columns.split(",")
    benches = [json.loads(file.read_text()) for file in args.files]
    cells = [cell for bench in benches for cell in bench["cells"]]
    cells = [cell for cell in cells if not args.cells or cell["name"] in args.cells.split(",")]
    if args.merge is not None:
        merge(benches, cells, args.merge)
        return
    if args.matrix:
        matrix(cells, args.matrix)
        return
    for i, cell in enumerate(cells):
        if i == 0 or not args.wide:
            first = ["cell", "arm"] if args.wide else [cell["name"]]
            print("\n| " + " | ".join([*first, *(TITLES[c] for c in columns)]) + " |")
            print("|---" * len(first) + "|--:" * len(columns) + "|")
        for name, arm in cell["arms"].items():
            first = [cell["name"], name] if args.wide else [name]
            print("| " + " | ".join([*first, *(entry(arm, column) for column in columns)]) + " |")


def matrix(cells: list[dict[str, Any]], column: str) -> None:
    """Print one column of all cells."""
    print("| " + " | ".join(["", *(cell["name"] for cell in cells)]) + " |")
    print("|---" + "|--:" * len(cells) + "|")
    for name in dict.fromkeys(name for cell in cells for name in cell["arms"]):
        found = [entry(cell["arms"][name], column) if name in cell["arms"] else "" for cell in cells]
        print("| " + " | ".join([name, *found]) + " |")


def merge(benches: list[dict[str, Any]], cells: list[dict[str, Any]], out: Path) -> None:
    """Cells of several calls in one file: what was common, and every command."""
    kept = {
        key: value
        for key, value in benches[0].items()
        if key not in ("command", "cells", "sweeps", "given", "platform")
    }
    kept |= {"commands": [bench["command"] for bench in benches]}
    kept["cells"] = [{key: value for key, value in cell.items() if key != "curves"} for cell in cells]
    out.write_text(json.dumps(kept, indent=1) + "\n")


def entry(arm: dict[str, Any], column: str) -> str:
    """One figure with its 95 % half interval; a dash where there is none."""
    found = {"difference": arm["vs_low"], "beyond": arm["vs_random"]}.get(column, arm["stats"].get(column))
    if not found or found["mean"] is None:
        return "-"
    mean, half = found["mean"], found["half"]
    if column in SHARES:
        return _pair(100 * mean, half and 100 * half, 3 if column == "promotion_ratio" else 0) + " %"
    if column in ("eval_high", "difference", "beyond"):
        return _pair(mean, half, 3)
    if column == "extra_bytes_mean":
        return f"{mean / 1000:.0f}"
    return f"{mean:.3g}" if mean < 1000 else f"{mean:,.0f}"


def _pair(mean: float, half: float | None, digits: int) -> str:
    if digits == 3 and abs(mean) >= 0.1 and half is not None and half > 0.1:
        digits = 2
    text = f"{mean:.{digits}f}"
    return text if not half else f"{text} ± {half:.{digits}f}"


if __name__ == "__main__":
    main()
