# SPDX-License-Identifier: Apache-2.0
"""Do real kernels learn what their emulation learns? The same short runs on both, seed by seed.

    python benchmarks/real_loss.py [--model 60m] [--steps 200] [--seeds 3] [--recipes fp8,fp8_row,fp8_block,int8]

Per recipe and seed, with the same weights and batches: every linear on its low path, emulated and on real kernels.
`difference` is the held-out loss of the second minus that of the first, mean and half of its 95 % interval over seeds;
beside it stand the plain model and the spread of each arm over seeds. Needs a GPU with FP8 units.
"""

import argparse
from pathlib import Path

from common import rounded, save, train_all

from trimtab.lab.intervals import interval


def main() -> None:
    """Run the comparison."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="60m")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--seq", type=int, default=256)
    parser.add_argument("--jobs", type=int, default=6)
    parser.add_argument("--recipes", default="fp8,fp8_row,fp8_block,int8")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path, default=Path("runs/real_loss"))
    args = parser.parse_args()
    base = {
        "model": args.model, "steps": args.steps, "batch": args.batch, "seq": args.seq, "lr": 1e-3, "mode": "off",
        "dtype": "bf16", "device": args.device, "checkpoint_every": 0, "eval_batches": 16, "threads": 1,
    }  # fmt: skip
    low = base | {"path": "low"}
    runs = {}
    for seed in range(args.seeds):
        runs[f"plain/{seed}"] = base | {"recipe": "none", "seed": seed}
        for recipe in args.recipes.split(","):
            for backend in ("emulated", "real"):
                runs[f"{recipe} {backend}/{seed}"] = low | {"recipe": recipe, "backend": backend, "seed": seed}
    found = train_all(runs, args.out, jobs=args.jobs)
    losses = {name: figures["eval_loss"] for name, figures in found.items()}
    table = {"plain": {"loss": [rounded(losses[f"plain/{seed}"]) for seed in range(args.seeds)]}}
    for recipe in args.recipes.split(","):
        pairs = [(losses[f"{recipe} emulated/{seed}"], losses[f"{recipe} real/{seed}"]) for seed in range(args.seeds)]
        broken = any(one is None or other is None for one, other in pairs)
        differences = [] if broken else [real - emulated for emulated, real in pairs]
        table[recipe] = {
            "emulated": [rounded(one) for one, _ in pairs],
            "real": [rounded(other) for _, other in pairs],
            "difference": None if broken else interval(differences).to_dict(),
        }
    save(f"real_loss_{args.model}", table, settings=base, seeds=args.seeds)


if __name__ == "__main__":
    main()
