# SPDX-License-Identifier: Apache-2.0
"""What the controller costs: a training step of the demo model with and without it, interleaved.

    python benchmarks/overhead.py [--rounds 400] [--steps 1] [--model micro] [--device cuda]
    python benchmarks/overhead.py --model tiny --batch 8 --detectors gnmr,source,gap,update,jacobian,snr

All arms run the same converted FP8 model on the low path, on the same batches. `plain` has no controller;
`control` reads norms, judges and decides; `control+record` also writes the trace and a metrics line per step;
`item` is what peers do instead: one `.item()` per parameter, and no decision at all. A step varies more than
the controller costs, so its own call is timed as well (`call_ms`). With `--detectors` each is an arm instead: what
its sensors cost is in the step, not in the call.
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


def arm(size: str, batch: int, device: str, after_backward: Callable[[nn.Module], Callable[[], object]], steps: int):
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
            hook()
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

    costs: list[float] = []

    def control(model: nn.Module) -> Callable[[], object]:
        controller = Controller(model, policy)

        def hook() -> None:
            controller.step()
            costs.append(controller.seconds)

        return hook

    def judge(detector: str) -> Callable[[nn.Module], Callable[[], object]]:
        return lambda model: Controller(model, policy, detector=detector).step

    def items(model: nn.Module) -> Callable[[], object]:
        return lambda: [p.grad.norm().item() for p in model.parameters() if p.grad is not None]

    with tempfile.TemporaryDirectory() as folder:
        hooks: dict[str, Callable[[nn.Module], Callable[[], object]]] = {
            "plain": lambda model: lambda: None,
            "control": control,
            "control+record": lambda model: Controller(model, policy, recorder=Recorder(Path(folder) / "run")).step,
            "item": items,
        }
        if args.detectors:
            judges = args.detectors.split(",")
            hooks = {"plain": hooks["plain"]} | {name: judge(name) for name in judges}
        arms = {name: arm(args.model, args.batch, args.device, hook, args.steps) for name, hook in hooks.items()}
        for run in arms.values():
            run()  # warm up
        table = against(interleave(arms, args.rounds), "plain")
    if args.detectors:
        details = {"rounds": args.rounds, "steps": args.steps, "batch": args.batch, "seed": 0}
        save(f"detectors_{args.device}_{args.model}", table, **details)
        return
    table["control"]["call_ms"] = round(1000 * statistics.median(costs), 4)
    table["control"]["call_share"] = round(1000 * statistics.median(costs) / table["plain"]["ms"], 5)
    save(f"overhead_{args.device}_{args.model}", table, rounds=args.rounds, steps=args.steps, batch=args.batch, seed=0)


if __name__ == "__main__":
    main()
