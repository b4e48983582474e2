# SPDX-License-Identifier: Apache-2.0
"""Family C of the GNMR paper on a pretrained model: what INT8 costs a LoRA run, and what control wins back.

    python benchmarks/finetune.py --model FOLDER --data DIR --steps 350 --batch 64 --seq 512 --device cuda --seeds 3

DIR holds GSM8K's train.jsonl and test.jsonl. Every arm trains on the same batches from the same weights:

    high       every layer on its high path (BF16 on a GPU, FP32 on a CPU)
    low        every layer in INT8
    gnmr       the controller decides, at most a quarter of the layers high
    random     random layers, as many in each step as gnmr had

with the recipe `int8` (dynamic, per token and output row) and, as a stress, with `int8_static` (one scale per tensor,
calibrated on the first batches; names end in `-static`). What is wrong in every step needs layers that are high in
every step, so with --keep the stress has two arms more, scored with those layers high on the low path too:

    keep       always the layers given and no others: those that `trimtab diagnose MODEL DATA --recipe int8_static
               --unit block --keep 0.25` lists, say
    spread     as many, at equal distances

The measure is the log-likelihood per token of the gold answers of the test set, on the high path and on the low one,
saved item by item in each run's `scores.json`. Differences are paired by item (the mean over seeds first); intervals
are 95 % bootstrap over items, and so do not cover other seeds. A finished run is not repeated, an unfinished one goes
on: give the same --out.
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import save
from numpy.typing import NDArray

from trimtab.control.act import running
from trimtab.control.record import CHECKPOINTS
from trimtab.lab import checkpoint
from trimtab.lab.chat import Example, encode, pad_id, pieces, read_dialogues
from trimtab.lab.finetune import Finetuning, answer_scores, finetune, spread
from trimtab.lab.finetune_config import FinetuneConfig
from trimtab.lab.pretrained import shapes
from trimtab.lab.run import Run, Silent
from trimtab.report.read import read_run

RECIPES = {"": "int8", "-static": "int8_static"}
RESAMPLES = 10_000
Scores = dict[str, NDArray[np.float64]]
"""Of each path, (items,) log-likelihoods; `tokens`, (items,)."""


class Lines(Silent):
    """A line now and then."""

    def __init__(self, name: str) -> None:
        self._name, self._due = name, 0.0

    def stepped(self, info: Any) -> None:
        if time.monotonic() >= self._due:
            self._due = time.monotonic() + 30
            print(f"{self._name} step {info.step} loss {info.loss:.4f} {info.tokens_per_s:.0f} tok/s", flush=True)


def arms(args: argparse.Namespace, seed: int) -> dict[str, dict[str, Any]]:
    """The settings of each arm, in the order they run."""
    base = {
        "model": args.model,
        "data": args.data,
        "steps": args.steps,
        "batch": args.batch,
        "seq": args.seq,
        "lr": args.lr,
        "device": args.device,
        "dtype": "bf16" if args.device.startswith("cuda") else "fp32",
        "accumulate": args.accumulate,
        "checkpoint_every": 100,
        "seed": seed,
    }
    found: dict[str, dict[str, Any]] = {"high": {**base, "mode": "off", "path": "high", "backend": args.backend}}
    for suffix in [""] if args.plain_only else RECIPES:
        one = {**base, "recipe": RECIPES[suffix], "backend": "emulated" if suffix else args.backend}
        found[f"low{suffix}"] = {**one, "mode": "off", "path": "low"}
        found[f"gnmr{suffix}"] = one
        found[f"random{suffix}"] = {**one, "random_like": str(folder(args, f"gnmr{suffix}", seed))}
        for name, layers in args.fixed.items() if suffix else ():
            patterns = [f"*.layers.{layer}" for layer in layers]
            found[f"{name}{suffix}"] = {**one, "fixed_high": patterns, "policy": {"max_high": 0}}
    return found


def folder(args: argparse.Namespace, arm: str, seed: int) -> Path:
    return args.out / f"{arm}-{seed}"


def run_arm(args: argparse.Namespace, arm: str, settings: dict[str, Any]) -> Path:
    """Train and score one arm, or read what is there."""
    out = folder(args, arm, settings["seed"])
    if not (out / "scores.json").is_file():
        finetune(settings, out, resume=True, watcher=Lines(out.name))
        scores = score(args, settings, out)
        (out / "scores.tmp").write_text(json.dumps(scores))
        (out / "scores.tmp").replace(out / "scores.json")
        means = {path: round(sum(scores[path]) / sum(scores["tokens"]), 5) for path in ("high", "low")}
        print(f"{out.name}: log-likelihood per answer token {means}", flush=True)
    return out


def score(args: argparse.Namespace, settings: dict[str, Any], out: Path) -> dict[str, list[float]]:
    """The answers of the test set by the last checkpoint, on both paths."""
    run = Run(FinetuneConfig.from_dict({**settings, "random_like": None}), Silent(), task=Finetuning)
    found = checkpoint.latest(out / CHECKPOINTS)
    assert found is not None
    run.load(*found)
    run.model.eval()
    assert isinstance(run.task, Finetuning)
    tokenizer = run.task.base.tokenizer
    examples = test_items(args, tokenizer)
    result: dict[str, list[float]] = {}
    for path in ("high", "low"):
        with running(run.model, "plan" if path == "low" and settings.get("fixed_high") else path):
            pairs = answer_scores(run.model, examples, batch=args.score_batch, pad=pad_id(tokenizer))
        result |= {path: [pair[0] for pair in pairs], "tokens": [float(pair[1]) for pair in pairs]}
    return result


def test_items(args: argparse.Namespace, tokenizer: Any) -> list[Example]:
    file = Path(args.data) / "test.jsonl"
    dialogues = [pieces(messages, tokenizer, where) for where, messages in read_dialogues(file, file.read_bytes())]
    return spread(encode(dialogues, tokenizer), args.limit or len(dialogues))


def read_scores(args: argparse.Namespace, arm: str, seeds: range) -> Scores:
    """An arm's scores, averaged over seeds item by item."""
    runs = [json.loads((folder(args, arm, seed) / "scores.json").read_text()) for seed in seeds]
    if len({tuple(run["tokens"]) for run in runs}) != 1:
        raise SystemExit(f"the runs of {arm} in {args.out} were scored on different items: remove their scores.json")
    return {key: np.mean([run[key] for run in runs], axis=0) for key in ("high", "low", "tokens")}


def interval(values: NDArray[np.float64]) -> list[float]:
    return [round(float(v), 6) for v in np.quantile(values, (0.025, 0.975))]


def table_of(scores: dict[str, Scores], path: str, promotion: dict[str, float]) -> dict[str, dict[str, Any]]:
    """Each arm against `high`, and the share of the damage of its own recipe's `low` arm that it closed."""
    tokens = scores["high"]["tokens"]
    drawn = np.random.default_rng(0).integers(0, len(tokens), size=(RESAMPLES, len(tokens)))
    weight = tokens[drawn].sum(axis=1)

    def resampled(values: NDArray[np.float64]) -> NDArray[np.float64]:
        return values[drawn].sum(axis=1) / weight

    top, rows = scores["high"]["high"], {}  # trained and scored on the high path: what both tables are held against
    for arm, found in scores.items():
        suffix = "-static" if arm.endswith("-static") else ""
        loss = found[path] - top
        row: dict[str, Any] = {
            "log_likelihood": round(float(found[path].sum() / tokens.sum()), 6),
            "against_high": round(float(loss.sum() / tokens.sum()), 6),
            "against_high_95": interval(resampled(loss)),
            "promotion": promotion[arm],
        }
        if arm.startswith(("gnmr", "random", "keep", "spread")):
            low = scores[f"low{suffix}"][path]
            damage = resampled(top - low)
            row["closed"] = round(float((found[path] - low).sum() / (top - low).sum()), 4)
            row["damage_is_clear"] = bool(np.quantile(damage, 0.025) > 0)
            if row["damage_is_clear"]:
                row["closed_95"] = interval(resampled(found[path] - low) / damage)
        if arm.startswith("gnmr"):
            other = found[path] - scores[f"random{suffix}"][path]
            row["against_random"] = round(float(other.sum() / tokens.sum()), 6)
            row["against_random_95"] = interval(resampled(other))
        rows[arm] = row
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a causal LM folder, a GGUF file, or smollm2")
    parser.add_argument("--data", required=True, help="a folder with GSM8K's train.jsonl and test.jsonl")
    parser.add_argument("--steps", type=int, default=350)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--seq", type=int, default=512)
    parser.add_argument("--lr", type=float, default=2e-4)
    parser.add_argument("--limit", type=int, default=0, help="test items, evenly spread; 0 means all")
    parser.add_argument("--score-batch", type=int, default=32)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--backend", default="auto", choices=("auto", "emulated", "real"), help="of the recipe int8")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--seeds", type=int, default=1, help="how many")
    parser.add_argument(
        "--keep", type=numbers, default=[], help="layers that stay high in an arm of the stress, such as 0,1,29"
    )
    parser.add_argument("--plain-only", action="store_true", help="leave the stress recipe out")
    parser.add_argument("--out", type=Path, default=Path("runs/bench-finetune"), help="the run folders")
    parser.add_argument("--name", default="finetune", help="of the result file")
    args = parser.parse_args()
    args.out, seeds = args.out.resolve(), range(args.first, args.first + args.seeds)
    args.fixed = {}
    if args.keep:
        layers = range(len(shapes(args.model)[1].model.layers))
        args.fixed = {"keep": args.keep, "spread": spread(list(layers), len(args.keep))}
    for seed in seeds:
        for arm, settings in arms(args, seed).items():
            run_arm(args, arm, settings)
    names = list(arms(args, args.first))
    scores = {arm: read_scores(args, arm, seeds) for arm in names}
    promotion = {arm: round(float(np.mean([promoted(folder(args, arm, seed)) for seed in seeds])), 4) for arm in names}
    tables = {f"scored on {path}": table_of(scores, path, promotion) for path in ("high", "low")}
    save(args.name, tables, items=len(scores["high"]["tokens"]), seeds=args.seeds, runs=str(args.out.name))


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def promoted(out: Path) -> float:
    """Share of unit-steps that ran high by plan."""
    trace = read_run(out).trace
    return 0.0 if trace is None else float(trace.high.mean())


if __name__ == "__main__":
    main()
