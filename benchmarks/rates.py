# SPDX-License-Identifier: Apache-2.0
"""4-bit forwards and learning rates: where Adam stops working, and whether clipping or stabilizing widens the range.

    python benchmarks/rates.py [--model tiny] [--steps 500] [--rates 0.001,0.002,0.004,0.008] [--seeds 3] [--jobs 2]
    python benchmarks/rates.py --parts decays,ablation          (at 2e-3 alone)

`rates` trains every arm with weights and activations in E2M1 during the forward (`recipe=fp4`, `roles=output`), as the
papers of Stable-SPAM and GradientStabilizer do, without injected faults, and Adam unconverted beside them. `decays`
moves the decays of the stabilizer and of Stable-SPAM, and its reset period; `ablation` puts Stable-SPAM's parts on Adam
one after the other, unconverted. Held-out loss of every seed; all arms of a seed see the same text.
"""

import argparse
from pathlib import Path
from typing import Any

import torch
from common import rounded, save, train_all

NO_CLIP = {"threshold": 1e30, "warmup": 0, "grace": 0}
PARTS: dict[str, dict[str, dict[str, Any]]] = {
    "rates": {
        "adam, 16 bits": {"recipe": "none"},
        "adam": {},
        "adam, clip 1": {"clip": 1.0},
        "zclip": {"transform": "zclip"},
        "stabilizer": {"transform": "stabilizer"},
        "spam": {"optimizer": "spam", "optimizer_options": {"reset_every": 150, "warmup": 45}},
        "stable spam": {"optimizer": "stable_spam", "optimizer_options": {"reset_every": 150}},
    },
    "decays": {
        f"stabilizer, {one} {two}": {"transform": "stabilizer", "transform_options": {"gammas": [one, two]}}
        for one, two in ((0.6, 0.999), (0.7, 0.999), (0.8, 0.999), (0.6, 0.99), (0.6, 0.9999))
    }
    | {
        f"stable spam, resets every {period}": {
            "optimizer": "stable_spam",
            "optimizer_options": {"reset_every": period},
        }
        for period in (75, 150, 250)
    }
    | {
        f"stable spam, {one} {two}, clip {clip}": {
            "optimizer": "stable_spam",
            "optimizer_options": {"reset_every": 150},
            "transform_options": {"gammas": [one, two], "clip_gamma": clip},
        }
        for one, two, clip in ((0.6, 0.9, 0.999), (0.7, 0.9, 0.999), (0.85, 0.999, 0.999), (0.7, 0.9, 0.99))
    },
    "ablation": {
        "adam": {"recipe": "none"},
        "adam + reset": {
            "recipe": "none",
            "optimizer": "spam",
            "optimizer_options": {"reset_every": 150, **NO_CLIP, "eps": 1e-8},
        },
        "adam + reset + norm": {
            "recipe": "none",
            "optimizer": "stable_spam",
            "optimizer_options": {"reset_every": 150},
            "transform_options": {"clip_gamma": None},
        },
        "stable spam": {"recipe": "none", "optimizer": "stable_spam", "optimizer_options": {"reset_every": 150}},
    },
}


def settings(arm: dict[str, Any], rate: float, seed: int, args: argparse.Namespace) -> dict[str, Any]:
    """The settings of one run: low throughout, nobody controls."""
    base = {name: getattr(args, name) for name in ("model", "steps", "data", "batch")}
    base |= {"lr": rate, "seed": seed, "mode": "off", "checkpoint_every": 0, "eval_batches": 32}
    low = {} if arm.get("recipe") == "none" else {"recipe": "fp4", "roles": "output", "path": "low"}
    return base | low | arm


def main() -> None:
    """Run the comparison."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--data", default="stdlib")
    parser.add_argument("--rates", default="0.001,0.002,0.004,0.008")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--parts", default="rates", help=", ".join(PARTS))
    parser.add_argument("--out", type=Path, default=Path("runs/rates"))
    args = parser.parse_args()
    rates = [float(one) for one in args.rates.split(",")]
    runs = {
        f"{part}/{arm}/{rate:g}/{seed}": settings(chosen, rate, seed, args)
        for seed in range(args.seeds)
        for part in args.parts.split(",")
        for arm, chosen in PARTS[part].items()
        for rate in (rates if part == "rates" else [0.002])
    }
    figures = train_all(runs, args.out / args.model, jobs=args.jobs)
    table: dict[str, dict[str, dict[str, list[float | None]]]] = {}
    for name, found in figures.items():
        part, arm, rate, _ = name.split("/")
        table.setdefault(part, {}).setdefault(arm, {}).setdefault(rate, []).append(rounded(found["eval_loss"]))
    where = "gpu" if torch.cuda.is_available() else "cpu"
    save(f"rates_{where}_{args.model}", table, steps=args.steps, batch=args.batch, seeds=args.seeds)


if __name__ == "__main__":
    main()
