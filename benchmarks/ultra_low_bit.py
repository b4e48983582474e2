# SPDX-License-Identifier: Apache-2.0
"""WikiText-2 perplexity in 2 and 3 bits: what clipping, LoRA and the saliency term are each worth.

    python benchmarks/ultra_low_bit.py --model smollm2 --data wikitext-2 [--bits 2,3] [--sequences 32] [--epochs 5]
    python benchmarks/ultra_low_bit.py --model FOLDER --data wikitext-2 --sequences 128 --length 2048 --epochs 20 \\
        --batch 4 --seeds 3 --device cuda          (the papers' recipe)

`--data` is a folder with train.txt (calibration) and test.txt (perplexity), or one text file, whose last tenth is
tested. All arms see the same calibration sequences, which differ by seed; the test windows are the same for all. Bits
per weight are the true ones, LoRA included. `saliency` has the term at each of `--lams`. With `--tasks DIR` the
commonsense tasks below DIR are answered too, whole sets, and each saliency arm is compared with `clipping + lora`:
paired by item (the mean over seeds first), intervals over items.

Every arm leaves a file in `--out`; what is there is not run again, so seeds can be shared among processes (`--first`)
and gathered by one call with all of them.

`loftq` is LoftQ's alternation (arXiv 2310.08659, five rounds) over the same grid, written here: peft has it for 4 bits
on a GPU only. `auto-round` runs where that package is installed, and is named as left out where it is not.
"""

import argparse
import copy
import importlib.util
import json
import time
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import rounded, save
from torch import Tensor, nn

from trimtab.lab.downstream.compare import compare
from trimtab.lab.downstream.own import Asked
from trimtab.lab.downstream.results import Set, evaluate_set, load_sets
from trimtab.lab.downstream.tasks import COMMONSENSE
from trimtab.lab.pretrained import Pretrained, load
from trimtab.lab.quantize import encode
from trimtab.retrain import ClippedLora, Settings, bits_per_weight, perplexity, retrain_, saliency, windows
from trimtab.retrain.blocks import find_blocks
from trimtab.retrain.cover import cover

ARMS: dict[str, dict[str, Any]] = {
    "rtn": {"rank": 0, "epochs": 0},
    "clipping": {"rank": 0},
    "clipping + lora": {"lam": 0.0},
}
PLAIN = "16 bits"
BLIND = ("rtn", "loftq")
"""Arms that look at no data: one seed tells all."""
Cell = dict[str, Any]
"""What one arm came to with one seed."""


def texts(data: Path) -> tuple[bytes, bytes]:
    """The text to calibrate with and the text to test on."""
    if data.is_dir():
        return (data / "train.txt").read_bytes(), (data / "test.txt").read_bytes()
    raw = data.read_bytes()
    return raw[: len(raw) * 9 // 10], raw[len(raw) * 9 // 10 :]


def linears_of(model: nn.Module) -> dict[str, nn.Linear]:
    """What is quantized."""
    blocks = tuple(f"{path}." for path in find_blocks(model))
    return {path: linear for path, linear in cover(model, (), None)[0].items() if path.startswith(blocks)}


@torch.no_grad()
def loftq_(model: nn.Module, settings: Settings, device: str, rounds: int = 5) -> float:
    """Alternate between rounding what the factors leave and factors of what rounding leaves."""
    plain = Settings.from_dict(settings.to_dict() | {"rank": 0})
    linears = linears_of(model)
    for linear in linears.values():
        weight = linear.weight.to(device, torch.float32)
        low, base = torch.zeros_like(weight), weight
        for _ in range(rounds):
            base = ClippedLora(weight - low, plain).quantized()
            U, S, V = torch.linalg.svd(weight - base, full_matrices=False)
            low = U[:, : settings.rank] * S[: settings.rank] @ V[: settings.rank]
        linear.weight.copy_(base + low)
    return bits_per_weight([(one.out_features, one.in_features) for one in linears.values()], settings)


def auto_round_(pretrained: Pretrained, model: nn.Module, settings: Settings, sequences: Tensor, device: str) -> float:
    """The nearest kin in production: rounding and range tuned block by block."""
    from auto_round import AutoRound  # pyright: ignore[reportMissingImports]

    batches = [{"input_ids": one[None], "attention_mask": torch.ones_like(one[None])} for one in sequences]
    tuner = AutoRound(
        model,
        pretrained.tokenizer,
        bits=settings.bits,
        group_size=settings.group,
        sym=settings.symmetric,
        dataset=batches,
        nsamples=len(sequences),
        seqlen=sequences.shape[1],
        seed=settings.seed,
        device_map=device,
    )
    tuned, _ = tuner.quantize()
    model.load_state_dict(tuned.state_dict())
    shapes = [(one.out_features, one.in_features) for one in linears_of(model).values()]
    return bits_per_weight(shapes, Settings.from_dict(settings.to_dict() | {"rank": 0}))


class Bench:
    """The model, what it is calibrated with and tested on, and the folder of what is done."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.pretrained = args, load(args.model, dtype=args.dtype)
        self.on_gpu = args.device.startswith("cuda")
        calibration, test = texts(args.data)
        self.tokens = encode(self.pretrained.tokenizer, calibration)
        self.held_out = encode(self.pretrained.tokenizer, test)[: args.test_tokens or None]
        self._seed, self._fisher = -1, ({}, 0.0)

    @cached_property
    def sets(self) -> list[Set]:
        """The tasks, whole."""
        return [] if self.args.tasks is None else load_sets(list(COMMONSENSE), self.args.tasks)

    def settings(self, bits: int, seed: int, arm: dict[str, Any]) -> Settings:
        given = {name: getattr(self.args, name) for name in ("group", "rank", "symmetric", "epochs", "batch")}
        return Settings.from_dict(given | {"bits": bits, "seed": seed} | arm)

    def fisher(self, seed: int, sequences: Tensor) -> tuple[dict[str, Tensor], float]:
        """The saliency by these sequences, and the seconds it took; the last one is kept."""
        if seed != self._seed:
            began = time.perf_counter()
            found = saliency(self.pretrained.model.to(self.args.device), sequences)
            self.pretrained.model.to("cpu")
            self._seed, self._fisher = seed, (found, time.perf_counter() - began)
        return self._fisher

    def cell(self, name: str, settings: Settings | None) -> Cell:
        """Run one arm and measure it, or read what is there; without settings, measure the model as it is."""
        about = {
            "settings": None if settings is None else settings.to_dict(),
            "calibration": [self.args.sequences, self.args.length],
            "test": [len(self.held_out), self.args.test_length],
            "tasks": [one.sha256 for one in self.sets],
        }
        label = name if settings is None else f"{settings.bits} bits, {name}, seed {settings.seed}"
        file = self.args.out / f"{label}.json"
        if file.is_file():
            before = json.loads(file.read_text())
            if before["about"] != json.loads(json.dumps(about)):
                raise SystemExit(f"{file} was made with other settings: give another --out, or remove it")
            return before
        model, cost, seconds = copy.deepcopy(self.pretrained.model), 16.0, 0.0
        if self.on_gpu:
            torch.cuda.reset_peak_memory_stats()
        if settings is not None:
            sequences = windows(self.tokens, self.args.sequences, self.args.length, seed=settings.seed)
            F, extra = self.fisher(settings.seed, sequences) if name.startswith("saliency") else (None, 0.0)
            began = time.perf_counter()
            cost = run(name, self.pretrained, model, sequences, settings, F, self.args.device)
            seconds = time.perf_counter() - began + extra
        found: Cell = {"about": about, "bits_per_weight": rounded(cost), "seconds": round(seconds, 1)}
        if self.on_gpu:
            found["peak_mib"] = round(torch.cuda.max_memory_allocated() / 2**20)
        model.to(self.args.device)
        found["perplexity"] = rounded(
            perplexity(model, self.held_out, self.args.test_length, batch=4 if self.on_gpu else 1)
        )
        asked = Asked(model, self.pretrained.tokenizer, self.args.task_batch)
        found["tasks"] = {one.task.name: _narrowed(evaluate_set(asked, one)) for one in self.sets}
        self.args.out.mkdir(parents=True, exist_ok=True)
        part = file.with_suffix(".tmp")
        part.write_text(json.dumps(found))
        part.replace(file)
        print(f"{label}: {found['perplexity']} at {cost:.3f} bits, {seconds:.0f} s", flush=True)
        return found


def _narrowed(result: dict[str, Any]) -> dict[str, Any]:
    """Without the likelihoods of every choice."""
    items = {key: column for key, column in result["items"].items() if key != "choices_ll"}
    return result | {"items": items}


def averaged(cells: list[Cell]) -> dict[str, Any]:
    """The answers of some seeds as those of one arm: the mean, item by item."""
    tasks = {}
    for name, first in cells[0]["tasks"].items():
        columns = {
            key: column if key == "id" else np.mean([cell["tasks"][name]["items"][key] for cell in cells], 0).tolist()
            for key, column in first["items"].items()
        }
        tasks[name] = first | {"items": columns}
    return {"tasks": tasks}


def row_of(cells: list[Cell], against: list[Cell]) -> dict[str, Any]:
    """An arm's row; `against` are the cells of what it is compared with, if it is."""
    row: dict[str, Any] = {key: [cell[key] for cell in cells] for key in ("perplexity", "seconds")}
    row["bits_per_weight"] = cells[0]["bits_per_weight"]
    if "peak_mib" in cells[0]:
        row["peak_mib"] = max(cell["peak_mib"] for cell in cells)
    if cells[0]["tasks"]:
        chosen = {
            task: [round(float(np.mean(cell["tasks"][task]["items"][measure])), 4) for cell in cells]
            for task, measure in COMMONSENSE.items()
        }
        row |= {"accuracy": chosen, "commonsense": np.mean(list(chosen.values()), axis=0).round(4).tolist()}
        if against:
            pairs = [(one, COMMONSENSE.get(one.task, "average")) for one in compare(averaged(cells), averaged(against))]
            row["against_lora"] = [one.to_dict() for one, measure in pairs if one.measure == measure]
    return row


def main() -> None:
    """Run the arms."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--tasks", type=Path, help="a folder as of trimtab evaluate --data")
    parser.add_argument("--bits", default="2,3")
    parser.add_argument("--group", type=int, default=64)
    parser.add_argument("--rank", type=int, default=64)
    parser.add_argument("--symmetric", action="store_true")
    parser.add_argument("--sequences", type=int, default=32)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--lams", default="0.1,1")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--seeds", type=int, default=1, help="how many")
    parser.add_argument("--arms", default="rtn,clipping,clipping + lora,saliency,loftq,auto-round")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="fp32")
    parser.add_argument("--test-tokens", type=int, default=0, help="0: all of test.txt")
    parser.add_argument("--test-length", type=int, default=1024)
    parser.add_argument("--task-batch", type=int, default=64)
    parser.add_argument("--out", type=Path, default=Path("runs/bench-ultra-low-bit"), help="what is done")
    parser.add_argument("--name", default="")
    args = parser.parse_args()
    torch.set_float32_matmul_precision("high")  # TF32 where there is a GPU: arms are compared, not certified

    wanted = [name.strip() for name in args.arms.split(",")]
    arms = {name: ARMS[name] for name in wanted if name in ARMS}
    if "saliency" in wanted:
        arms |= {f"saliency {lam}": {"lam": float(lam)} for lam in args.lams.split(",")}
    arms |= {name: {} for name in wanted if name in ("loftq", "auto-round")}
    left_out = {}
    if "auto-round" in arms and importlib.util.find_spec("auto_round") is None:
        del arms["auto-round"]
        left_out["auto-round"] = "not installed"
        print("auto-round is left out: it is not installed")

    bench, seeds = Bench(args), range(args.first, args.first + args.seeds)
    cells: dict[str, list[Cell]] = {PLAIN: [bench.cell(PLAIN, None)]}
    for seed in seeds:
        for bits in map(int, args.bits.split(",")):
            for name, arm in arms.items():
                if name in BLIND and seed:
                    continue
                try:
                    found = bench.cell(name, bench.settings(bits, seed, arm))
                except Exception as error:
                    if name != "auto-round":
                        raise
                    left_out[f"{bits} bits, {name}"] = repr(error)  # somebody else's package must not cost the others
                    print(f"{bits} bits  {name} failed: {error!r}", flush=True)
                else:
                    cells.setdefault(f"{bits} bits, {name}", []).append(found)
    table = {}
    for name, found in cells.items():
        bits, _, arm = name.partition(", ")
        lora = cells.get(f"{bits}, clipping + lora", []) if arm.startswith("saliency") else []
        table[name] = row_of(found, lora)
    names = ("group", "rank", "symmetric", "epochs", "batch", "sequences", "length", "dtype")
    save(
        f"ultra_low_bit_{'gpu' if bench.on_gpu else 'cpu'}_{bench.pretrained.name}{args.name}",
        table,
        settings={name: getattr(args, name) for name in names},
        test={"tokens": len(bench.held_out) // args.test_length * (args.test_length - 1), "window": args.test_length},
        seeds=list(seeds),
        left_out=left_out,
    )


def run(
    name: str,
    pretrained: Pretrained,
    model: nn.Module,
    sequences: Tensor,
    settings: Settings,
    F: dict[str, Tensor] | None,
    device: str,
) -> float:
    """Carry one arm out, in place; its true bits per weight."""
    others: dict[str, Callable[[], float]] = {
        "loftq": lambda: loftq_(model, settings, device),
        "auto-round": lambda: auto_round_(pretrained, model, settings, sequences, device),
    }
    if name in others:
        return others[name]()
    used = F if name.startswith("saliency") else None
    return retrain_(model, sequences, settings, saliency=used, device=device).bits_per_weight


if __name__ == "__main__":
    main()
