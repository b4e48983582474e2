# SPDX-License-Identifier: Apache-2.0
"""WikiText-2 perplexity in 2 and 3 bits: what clipping, LoRA and the saliency term are each worth.

    python benchmarks/ultra_low_bit.py --model smollm2 --data wikitext-2 [--bits 2,3] [--sequences 32] [--epochs 5]
    python benchmarks/ultra_low_bit.py --model FOLDER --data wikitext-2 --sequences 128 --length 2048 --epochs 20 \\
        --batch 4 --seeds 3 --device cuda          (the papers' recipe)

`--data` is a folder with train.txt (calibration) and test.txt (perplexity), or one text file, whose last tenth is
tested. All arms see the same calibration sequences, which differ by seed; the test windows are the same for all. Bits
per weight are the true ones, LoRA included. `saliency` has the term at each of `--lams`.

`loftq` is LoftQ's alternation (arXiv 2310.08659, five rounds) over the same grid, written here: peft has it for 4 bits
on a GPU only. `auto-round` runs where that package is installed, and is named as left out where it is not.
"""

import argparse
import copy
import importlib.util
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from common import rounded, save
from torch import Tensor, nn

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


def main() -> None:
    """Run the arms."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--bits", default="2,3")
    parser.add_argument("--group", type=int, default=64)
    parser.add_argument("--rank", type=int, default=64)
    parser.add_argument("--symmetric", action="store_true")
    parser.add_argument("--sequences", type=int, default=32)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--lams", default="0.1,1")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--arms", default="rtn,clipping,clipping + lora,saliency,loftq,auto-round")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="fp32")
    parser.add_argument("--test-tokens", type=int, default=0, help="0: all of test.txt")
    parser.add_argument("--test-length", type=int, default=1024)
    parser.add_argument("--name", default="")
    args = parser.parse_args()
    torch.set_float32_matmul_precision("high")  # TF32 where there is a GPU: arms are compared, not certified

    pretrained = load(args.model, dtype=args.dtype)
    calibration, test = texts(args.data)
    tokens = encode(pretrained.tokenizer, calibration)
    held_out = encode(pretrained.tokenizer, test)[: args.test_tokens or None]
    on_gpu = args.device.startswith("cuda")

    def measure(model: nn.Module) -> float:
        return perplexity(model.to(args.device), held_out, args.test_length, batch=4 if on_gpu else 1)

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

    plain = measure(copy.deepcopy(pretrained.model))
    print(f"16 bits: perplexity {plain:.3f}", flush=True)
    table: dict[str, dict[str, Any]] = {"16 bits": {"bits_per_weight": 16.0, "perplexity": [rounded(plain)]}}
    settings = {name: getattr(args, name) for name in ("group", "rank", "symmetric", "epochs", "batch")}
    facts = {
        "settings": settings | {"sequences": args.sequences, "length": args.length, "dtype": args.dtype},
        "test": {"tokens": len(held_out) // args.test_length * (args.test_length - 1), "window": args.test_length},
        "seeds": args.seeds,
        "left_out": left_out,
    }
    where = "gpu" if on_gpu else "cpu"
    for seed in range(args.seeds):
        sequences = windows(tokens, args.sequences, args.length, seed=seed)
        F, fisher_seconds = None, 0.0
        if any(name.startswith("saliency") for name in arms):
            began = time.perf_counter()
            F = saliency(pretrained.model.to(args.device), sequences)
            pretrained.model.to("cpu")
            fisher_seconds = time.perf_counter() - began
            print(f"seed {seed}: saliency in {fisher_seconds:.1f} s", flush=True)
        for bits in map(int, args.bits.split(",")):
            for name, arm in arms.items():
                chosen = Settings.from_dict(settings | {"bits": bits, "seed": seed} | arm)
                model = copy.deepcopy(pretrained.model)
                if on_gpu:
                    torch.cuda.reset_peak_memory_stats()
                began = time.perf_counter()
                try:
                    cost = run(name, pretrained, model, sequences, chosen, F, args.device)
                except Exception as error:
                    if name != "auto-round":
                        raise
                    left_out[f"{bits} bits, {name}"] = repr(error)  # somebody else's package must not cost the others
                    print(f"{bits} bits  {name} failed: {error!r}", flush=True)
                    continue
                seconds = time.perf_counter() - began + (fisher_seconds if name.startswith("saliency") else 0)
                row = table.setdefault(f"{bits} bits, {name}", {"perplexity": [], "seconds": []})
                row["bits_per_weight"] = rounded(cost)
                if on_gpu:
                    row["peak_mib"] = round(torch.cuda.max_memory_allocated() / 2**20)
                found = measure(model)
                row["perplexity"].append(rounded(found))
                row["seconds"].append(round(seconds, 1))
                print(f"seed {seed}  {bits} bits  {name}: {found:.3f} at {cost:.3f} bits, {seconds:.0f} s", flush=True)
        save(f"ultra_low_bit_{where}_{pretrained.name}{args.name}", table, **facts)


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
