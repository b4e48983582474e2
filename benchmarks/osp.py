# SPDX-License-Identifier: Apache-2.0
"""OSP's ablation (arXiv 2506.19697, its table of six rows) at small size: outliers, and what 4 bits cost.

    python benchmarks/osp.py [--model tiny] [--steps 3000] [--seeds 3] [--jobs 2] [--rows adam,osp]

Six rows from the same seeds, steps and batches; plain linears, nobody controls. After training each run is measured as
it is and after round-to-nearest by OSP's protocol (`trimtab.retrain.rtn_`): excess kurtosis of the residual stream,
held-out loss at 16 bits, and its increase at each width (weights-activations-keys and values).
"""

import argparse
import statistics
from pathlib import Path
from typing import Any

import torch
from common import rounded, save, train_all

from trimtab.lab.evaluate import evaluate_run

OSP = {"optimizer": "osp"}
ROWS: dict[str, dict[str, Any]] = {
    "adam": {},
    "muon everywhere": {**OSP, "optimizer_options": {"embeddings": "muon"}},
    "muon": OSP,
    "muon + ssnorm": {**OSP, "norm": "ssnorm"},
    "muon + embproj": {**OSP, "embproj": True},
    "osp": {**OSP, "norm": "ssnorm", "embproj": True},
}
BITS = ("4-8-8", "4-4-16", "4-4-4", "4-4-4+had")


def measure(folder: Path) -> dict[str, float]:
    """Kurtosis, and the loss at each width."""
    found = evaluate_run(folder, bits=BITS)
    figures = {"kurtosis": found.kurtosis_mean, "kurtosis_max": found.kurtosis_max}
    losses = {str(score.bits): score.loss for score in found.scores[1:]}
    return figures | {"16": found.scores[0].loss} | losses


def main() -> None:
    """Run the ablation."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--data", default="stdlib")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--rows", default=",".join(ROWS))
    parser.add_argument("--name", default="")
    parser.add_argument("--out", type=Path, default=Path("runs/osp"))
    args = parser.parse_args()
    base = {"model": args.model, "steps": args.steps, "lr": args.lr, "batch": args.batch, "data": args.data}
    base |= {"weight_decay": 0.01, "lr_schedule": "trapezoid", "recipe": "none", "mode": "off"}
    base |= {"checkpoint_every": 1000, "eval_batches": 32}
    rows = args.rows.split(",")
    runs = {f"{row}/{seed}": base | ROWS[row] | {"seed": seed} for seed in range(args.seeds) for row in rows}
    figures = train_all(runs, args.out / f"{args.model}{args.name}", jobs=args.jobs, measure=measure)
    table = {}
    for row in rows:
        seeds = [figures[f"{row}/{seed}"] for seed in range(args.seeds)]
        table[row] = {
            key: [rounded(one.get(key)) for one in seeds] for key in ("seconds", "kurtosis", "kurtosis_max", "16")
        }
        for bits in BITS:
            table[row][bits] = [rounded(one[bits] - one["16"]) if bits in one else None for one in seeds]
        whole = [one["kurtosis"] for one in seeds if "kurtosis" in one]
        table[row]["median_kurtosis"] = rounded(statistics.median(whole)) if whole else None
    name = "gpu" if torch.cuda.is_available() else "cpu"
    save(f"osp_{name}_{args.model}{args.name}", table, settings=base, seeds=args.seeds)


if __name__ == "__main__":
    main()
