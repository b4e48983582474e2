# SPDX-License-Identifier: Apache-2.0
"""Gradient spikes: how much they hurt Adam, and how much of that SPAM, the stabilizer and clipping repair.

    python benchmarks/spikes.py [--model micro] [--steps 1200] [--seeds 3] [--jobs 2] [--arms adam,spam,...]

Every arm trains three times per seed, on the same text: `clean`; with `spikes` (from a sixth of the run on, every 50
steps, one in 4,096 coordinates of each linear's weight gradient is 1,000 times the mean magnitude: the spike score up
to which SPAM's paper saw them); and with `bursts` (the whole weight gradient of each linear times 1,000, as often).
An arm's damage is what its loss rises by against its own clean run; *repaired* is 1 - damage / Adam's damage.

`--probe` instead trains Adam once, clean, and counts natural spikes by kind of layer.
"""

import argparse
import statistics
from pathlib import Path
from typing import Any

import torch
from common import rounded, save, train_all

from trimtab.lab.config import Config
from trimtab.lab.data import Sampler, load_corpus
from trimtab.lab.optimizers import Update, schedule
from trimtab.lab.task import build_model
from trimtab.optim.spikes import GradSpikes

NEVER = {"reset_every": None}
ARMS: dict[str, dict[str, Any]] = {
    "adam": {},
    "adam, clip 1": {"clip": 1.0},
    "spam": {"optimizer": "spam"},
    "spam, clip only": {"optimizer": "spam", "optimizer_options": NEVER},
    "spam, reset only": {"optimizer": "spam", "optimizer_options": {"threshold": 1e30}},
    "spam, density 0.25": {"optimizer": "spam", "optimizer_options": {"density": 0.25}},
    "stabilizer": {"transform": "stabilizer"},
    "stable spam": {"optimizer": "stable_spam"},
    "zclip": {"transform": "zclip"},
    "adagc": {"transform": "adagc"},
    "autoclip": {"transform": "autoclip"},
}
SCENES = {"clean": None, "spikes": "grad_spike", "bursts": "grad_burst"}


def settings(arm: str, scene: str, seed: int, args: argparse.Namespace) -> dict[str, Any]:
    """The settings of one run: emulated FP8 on its low path throughout, nobody controls."""
    base: dict[str, Any] = {
        "model": args.model,
        "steps": args.steps,
        "data": args.data,
        "seed": seed,
        "batch": args.batch,
    }
    base |= {"lr": args.lr, "recipe": "fp8", "path": "low", "mode": "off", "checkpoint_every": 0, "eval_batches": 32}
    found = base | ARMS[arm]
    if SCENES[scene] is not None:
        start = args.steps // 6
        found["faults"] = f"*:{SCENES[scene]}:start={start},every=50,count={(args.steps - start) // 50},size=1000"
    if "spam" in arm and args.period and "clip only" not in arm:
        period = {"reset_every": args.period}
        if arm != "stable spam":
            period |= {"warmup": round(0.3 * args.period)}
        found["optimizer_options"] = {**period, **found.get("optimizer_options", {})}
    return found


def summarize(figures: dict[str, dict[str, float]], seeds: range, arms: list[str], scenes: list[str]) -> dict[str, Any]:
    """Per arm and scene: the held-out loss of each seed, and the share of Adam's damage that is repaired."""
    loss = {name: result["eval_loss"] for name, result in figures.items()}
    table: dict[str, Any] = {}
    for arm in arms:
        row: dict[str, Any] = {}
        for scene in scenes:
            row[scene] = [rounded(loss[f"{scene}/{arm}/{seed}"]) for seed in seeds]
            if scene != "clean" and "clean" in scenes and "adam" in arms:
                pairs = [[loss[f"{s}/{a}/{seed}"] for a in (arm, "adam") for s in (scene, "clean")] for seed in seeds]
                row[f"{scene}_repaired"] = [
                    None if None in four else round(1 - (four[0] - four[1]) / (four[2] - four[3]), 3) for four in pairs
                ]
        row["seconds"] = round(statistics.median(figures[f"{scenes[0]}/{arm}/{s}"].get("seconds", 0) for s in seeds), 1)
        table[arm] = row
    return table


def probe(args: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Train Adam once on plain linears and count the spikes that come by themselves."""
    config = Config(model=args.model, steps=args.steps, recipe="none", mode="off", lr=args.lr, data=args.data)
    corpus = load_corpus(config.data)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = build_model(config, corpus.vocab_size).to(device)
    update, spikes = Update(model, config), GradSpikes(model)
    sampler = Sampler(corpus.train, batch=args.batch, seq=model.config.max_seq, seed=0)
    for step in range(1, config.steps + 1):
        inputs, targets = sampler.batch_at(step)
        loss = model(inputs.to(device), targets.to(device)).loss
        assert loss is not None
        loss.backward()
        spikes.step()
        update.step(schedule(step, config))
        update.zero_grad()
    return spikes.summary()


def main() -> None:
    """Run the comparison."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="micro")
    parser.add_argument("--steps", type=int, default=1200)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--data", default="stdlib")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--period", type=int, default=300, help="steps between SPAM's resets; 0 means its default")
    parser.add_argument("--arms", default=",".join(name.replace(", ", "/") for name in ARMS))
    parser.add_argument("--scenes", default=",".join(SCENES))
    parser.add_argument("--probe", action="store_true")
    parser.add_argument("--out", type=Path, default=Path("runs/spikes"))
    args = parser.parse_args()
    name = "gpu" if torch.cuda.is_available() else "cpu"
    if args.probe:
        save(f"spikes_probe_{name}_{args.model}", probe(args), steps=args.steps, lr=args.lr)
        return
    arms, scenes = [name.replace("/", ", ") for name in args.arms.split(",")], args.scenes.split(",")
    runs = {
        f"{scene}/{arm}/{seed}": settings(arm, scene, seed, args)
        for seed in range(args.seeds)
        for scene in scenes
        for arm in arms
    }
    figures = train_all(runs, args.out / args.model, jobs=args.jobs)
    table = summarize(figures, range(args.seeds), arms, scenes)
    save(f"spikes_{name}_{args.model}", table, steps=args.steps, lr=args.lr, batch=args.batch, period=args.period)


if __name__ == "__main__":
    main()
