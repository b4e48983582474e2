# SPDX-License-Identifier: Apache-2.0
"""Does `diagnose` name one deliberately bad unit first: 40 trials, by kind of fault.

    OMP_NUM_THREADS=1 python benchmarks/diagnose.py [--trials 40] [--recipe fp8]

A trial draws one of four briefly trained micro models (14 linears, 100 steps each, seeds 0 to 3), a unit and a size,
and opens a fault of that size on the unit's low path. Kinds take turns, so that each has as many trials; sizes are
log-uniform in the ranges below, which hold each kind's usual size. Counted is how often the unit comes first over four
batches by `own`, the error of its own gradient with only it low (what is broken), by the recovery gap (what is worth
recovering), and by the error of the whole gradient and the change of the loss with only it low. Chance is 1 in 14.

A small fault in a unit that hardly matters can spoil the gradient less than the plain FP8 rounding of another unit:
then the gap rightly names the other one. Draws 7 and 8 were seen before `own` was chosen, those from 9 on were not.
"""

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import save
from torch import nn

from trimtab.lab.data import Corpus, Sampler, load_corpus
from trimtab.lab.diagnose import diagnose, switchable
from trimtab.lab.faults import Faults, FaultWindow
from trimtab.lab.subject import load_subject
from trimtab.lab.train import train

SIZES = {
    "grad_scale": (4.0, 64.0),
    "output_scale": (2.0, 8.0),
    "stale_scale": (4.0, 16.0),
    "zero_blocks": (0.125, 0.5),
    "bit_flip": (1 / 4096, 1 / 256),
}
"""The smallest and the largest fault of each kind."""
SCORES = ("own", "gap", "error_alone", "loss_alone")
STEPS, BATCH, SEQ, BATCHES, MODELS = 100, 4, 64, 4, 4


def trained(seed: int, recipe: str, folder: Path) -> nn.Module:
    """A micro model after a few steps, converted."""
    settings = {"seed": seed, "steps": STEPS, "batch": BATCH, "seq": SEQ, "device": "cpu", "mode": "off"}
    train({**settings, "recipe": recipe, "eval_batches": 1}, folder)
    return load_subject(folder, "stdlib", recipe=recipe, batches=1, device="cpu").model


def trial(number: int, seed: int, models: list[nn.Module], corpus: Corpus) -> dict[str, Any]:
    """One bad unit, and where each ranking puts it."""
    draw = np.random.default_rng([seed, number])
    kind = list(SIZES)[number % len(SIZES)]
    least, most = SIZES[kind]
    size = float(least * (most / least) ** draw.random())
    model = models[draw.integers(len(models))]
    sampler = Sampler(corpus.train, batch=BATCH, seq=SEQ, seed=1000 + number)
    units = [unit.name for unit in switchable(model)]
    unit = units[draw.integers(len(units))]
    faults = Faults(model, FaultWindow(unit, kind, start=1, size=size, seed=number))
    faults.at(1)
    try:
        found = diagnose(model, [sampler.batch_at(i) for i in range(BATCHES)], roles=())
    finally:
        faults.disarm()
    bad = found.units.index(unit)
    scores = {
        "gap": found.gaps.mean(axis=1),
        "own": found.only_low.own.mean(axis=1),
        "error_alone": found.only_low.error.mean(axis=1),
        "loss_alone": (found.only_low.loss - found.loss).mean(axis=1),
    }
    ranks = {name: int((score > score[bad]).sum()) + 1 for name, score in scores.items()}
    return {"kind": kind, "size": size, "unit": unit, "first": found.units[found.order()[0]], **ranks}


def main() -> None:
    """Run the trials."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=40)
    parser.add_argument("--recipe", default="fp8")
    parser.add_argument("--seed", type=int, default=9, help="of the units and sizes")
    args = parser.parse_args()
    torch.set_num_threads(1)
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        models = [trained(seed, args.recipe, Path(folder, str(seed))) for seed in range(MODELS)]
    ready = time.perf_counter()
    corpus = load_corpus()
    trials = [trial(number, args.seed, models, corpus) for number in range(args.trials)]
    table = {}
    for kind in ("all", *SIZES):
        some = [one for one in trials if kind in ("all", one["kind"])]
        table[kind] = {"trials": len(some)} | {f"{n}_first": sum(one[n] == 1 for one in some) for n in SCORES}
    missed = [one for one in trials if one["own"] != 1 or one["gap"] != 1]
    seconds = {"training": round(ready - started, 1), "trials": round(time.perf_counter() - ready, 1)}
    settings = {"steps": STEPS, "batch": BATCH, "seq": SEQ, "batches": BATCHES, "models": MODELS, "sizes": SIZES}
    settings |= {"recipe": args.recipe, "seed": args.seed, "seconds": seconds, "missed": missed}
    save(f"diagnose_{args.recipe}_{args.seed}", table, **settings)
    print("missed", missed, "seconds", seconds)


if __name__ == "__main__":
    main()
