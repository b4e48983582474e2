# SPDX-License-Identifier: Apache-2.0
"""The demo over several seeds, with and without running bad batches again: what holds, and how far it spreads.

    python benchmarks/demo_seeds.py [--first 0] [--seeds 3] [--out runs/demo_seeds]

Per seed: high, low, control (the demo's policy), random at control's own count per step; and `next step`, the same
policy without `replay_step`, where one bad update per trigger always reaches the weights.
"""

import argparse
from contextlib import nullcontext
from pathlib import Path

from common import save

from trimtab.cli.demo import POLICY, SETTINGS
from trimtab.lab.demo import run_demo
from trimtab.lab.run import Silent
from trimtab.lab.train import train


def main() -> None:
    """Run the comparison."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--out", type=Path, default=Path("runs/demo_seeds"))
    args = parser.parse_args()
    table = {}
    for seed in range(args.first, args.first + args.seeds):
        settings = SETTINGS | {"seed": seed}
        out = args.out / str(seed)
        outcome = run_demo(settings, out, lambda _: nullcontext(Silent()), force=True)
        later = train(settings | {"policy": POLICY | {"replay_step": None}}, out / "next_step", force=True)
        losses = {arm: round(result.eval_loss_high, 4) for arm, result in outcome.results.items()}
        table[f"seed {seed}"] = {
            **losses,
            "next_step": round(later.eval_loss_high, 4),
            "closed_control": round(outcome.closed_control, 3),
            "closed_next_step": round((losses["low"] - later.eval_loss_high) / outcome.damage, 3),
            "closed_random": round(outcome.closed_random, 3),
            "promotion": round(outcome.promotion, 4),
            "batches_run_twice": outcome.results["control"].summary["reruns"],
            "blamed_right": f"{outcome.blamed}/{outcome.windows}",
        }
        print(seed, table[f"seed {seed}"], flush=True)
    save(f"demo_seeds_{args.first}", table, settings=SETTINGS, seeds=args.seeds)


if __name__ == "__main__":
    main()
