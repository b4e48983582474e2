# SPDX-License-Identifier: Apache-2.0
"""What the controller costs: a training step of the demo model with and without it, interleaved.

    python benchmarks/overhead.py [--rounds 400] [--steps 1] [--model micro] [--device cuda]
    python benchmarks/overhead.py --model tiny --batch 8 --detectors gnmr,source,gap,update,jacobian,snr

All arms run the same converted FP8 model on the low path, on the same batches.

    plain            nobody watches
    control          norms are read, judged and decided upon
    control+record   and the trace and a metrics line are written in every step
    item             what peers do instead: one `.item()` per parameter, and no decision
    histograms       what `wandb.watch(model, log_freq=1)` does: a histogram of 64 bins per parameter; nothing is sent

A step varies more than watching costs, so on a CPU, where nothing runs behind the host's back, what comes between
backward and update is timed as well (`call_ms`). With `--detectors` each is an arm instead: what its sensors cost is in
the step, not in the call.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from common import against, interleave, save
from torch import nn

from trimtab import Controller, Policy, Recorder, convert_
from trimtab.lab.data import Sampler, load_corpus
from trimtab.lab.model import Decoder, ModelConfig

Hook = Callable[[], object]


def items(model: nn.Module) -> Hook:
    """Every norm by itself, and a wait for each."""
    return lambda: [p.grad.norm().item() for p in model.parameters() if p.grad is not None]


def histograms(model: nn.Module) -> Hook:
    """Every gradient as 64 counts between its extremes, on the host."""

    def watch() -> None:
        for parameter in model.parameters():
            if parameter.grad is not None:
                flat = parameter.grad.reshape(-1)
                least, most = flat.min().item(), flat.max().item()
                flat.histc(64, least, most).tolist()

    return watch


def arm(
    size: str, batch: int, device: str, after_backward: Callable[[nn.Module], Hook], steps: int, calls: list[float]
) -> Callable[[], float]:
    """A model and optimizer of its own; each call trains a few steps and returns the seconds per step."""
    corpus = load_corpus()
    model = Decoder(ModelConfig.size(size, vocab_size=256), seed=0).to(device)
    convert_(model, "fp8", backend="emulated")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    sampler = Sampler(corpus.train, batch=batch, seq=model.config.max_seq, seed=0)
    hook, position = after_backward(model), [0]

    def run() -> float:
        started = time.perf_counter()
        for _ in range(steps):
            position[0] += 1
            inputs, targets = sampler.batch_at(position[0])
            model(inputs.to(device), targets.to(device)).loss.backward()
            before = time.perf_counter()
            hook()
            calls.append(time.perf_counter() - before)
            optimizer.step()
            optimizer.zero_grad()
        if device == "cuda":
            torch.cuda.synchronize()
        return (time.perf_counter() - started) / steps

    return run


def main() -> None:
    """Run the comparison."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=400)
    parser.add_argument("--steps", type=int, default=1, help="steps per round and arm")
    parser.add_argument("--model", default="micro")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--detectors", default="", help="compare these instead, comma separated")
    args = parser.parse_args()
    policy = Policy(max_high=0, warmup_steps=10)  # nobody goes high: only the controller's own cost is measured

    def judge(detector: str) -> Callable[[nn.Module], Hook]:
        return lambda model: Controller(model, policy, detector=detector).step

    with tempfile.TemporaryDirectory() as folder:
        hooks: dict[str, Callable[[nn.Module], Hook]] = {
            "plain": lambda model: lambda: None,
            "control": lambda model: Controller(model, policy).step,
            "control+record": lambda model: Controller(model, policy, recorder=Recorder(Path(folder) / "run")).step,
            "item": items,
            "histograms": histograms,
        }
        if args.detectors:
            judges = args.detectors.split(",")
            hooks = {"plain": hooks["plain"]} | {name: judge(name) for name in judges}
        calls: dict[str, list[float]] = {name: [] for name in hooks}
        arms = {
            name: arm(args.model, args.batch, args.device, hook, args.steps, calls[name])
            for name, hook in hooks.items()
        }
        for run in arms.values():
            run()  # warm up
        table = against(interleave(arms, args.rounds), "plain")
    if args.device == "cpu":
        for name, row in table.items():
            row["call_ms"] = round(1000 * statistics.median(calls[name]), 4)
            row["call_share"] = round(row["call_ms"] / table["plain"]["ms"], 5)
    kind = "detectors" if args.detectors else "overhead"
    save(f"{kind}_{args.device}_{args.model}", table, rounds=args.rounds, steps=args.steps, batch=args.batch, seed=0)


if __name__ == "__main__":
    main()
