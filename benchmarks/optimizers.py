# SPDX-License-Identifier: Apache-2.0
"""What the optimizers cost: their step alone, a whole training step, and SSNorm against RMSNorm.

    python benchmarks/optimizers.py [--device cpu|cuda] [--model tiny 10m 100m] [--threads 1 2]

`step` runs optimizers on one set of parameters and gradients shaped like the model: only the moments differ. SPAM is
past its grace steps, so it looks for spikes at every step. `train` is forward, backward and update of a decoder (BF16
autocast on a GPU), each arm with a model of its own. `norm` is a forward and a backward over (batch * seq, width).
Whole steps of a small batch are bound by the host, which is noisy: give a GPU at least 128 sequences.
Ratios are to fused AdamW on a GPU and to foreach AdamW on a CPU, within a round.
"""

import argparse
import dataclasses
import time
from collections.abc import Callable
from typing import Any

import torch
from common import against, interleave, save
from torch import nn

from trimtab.lab.model import Decoder, ModelConfig
from trimtab.nn.ssnorm import SSNorm
from trimtab.optim.groups import osp_optimizers, spam_groups
from trimtab.optim.spam import SPAM
from trimtab.optim.stabilizer import GradStabilizer

BETWEEN = {
    "10m": ModelConfig(vocab_size=4096, width=320, layers=6, heads=5, ffn=864, max_seq=256),
    "100m": ModelConfig(vocab_size=32_000, width=640, layers=12, heads=10, ffn=1712, max_seq=256),
}
PLAIN: dict[str, Any] = {"lr": 1e-5, "reset_every": None, "grace": 2}
Arms = dict[str, Callable[[], object]]


def timed(call: Callable[[], object], device: str, repeats: int) -> Callable[[], float]:
    """A call as an arm: seconds each, the device's own work included."""

    def run() -> float:
        wait(device)
        started = time.perf_counter()
        for _ in range(repeats):
            call()
        wait(device)
        return (time.perf_counter() - started) / repeats

    return run


def wait(device: str) -> None:
    """Let the device finish."""
    if device == "cuda":
        torch.cuda.synchronize()


def measure(arms: Arms, baseline: str, device: str, rounds: int, repeats: int) -> dict[str, dict[str, float]]:
    """Interleave the arms after a warm-up of three calls each."""
    for call in arms.values():
        for _ in range(3):
            call()
    runs = {name: timed(call, device, repeats) for name, call in arms.items()}
    return against(interleave(runs, rounds), baseline)


def step_arms(config: ModelConfig, device: str) -> Arms:
    """The update alone."""
    model = Decoder(config, seed=0).to(device)
    parameters = list(model.parameters())
    for p in parameters:
        p.grad = torch.randn_like(p)
    optimizers: dict[str, torch.optim.Optimizer] = {
        "adamw foreach": torch.optim.AdamW(parameters, lr=1e-5, foreach=True),
        "adamw fused": torch.optim.AdamW(parameters, lr=1e-5, fused=True),
        "spam loop": SPAM(parameters, foreach=False, **PLAIN),
        "spam foreach": SPAM(parameters, foreach=True, **PLAIN),
        "spam density 0.25": SPAM(spam_groups(model, 0.25), **PLAIN),
    }
    if device == "cuda":
        optimizers["spam fused"] = SPAM(parameters, fused=True, **PLAIN)
    return {name: optimizer.step for name, optimizer in optimizers.items()}


def train_arms(config: ModelConfig, device: str, batch: int) -> Arms:
    """Forward, backward and update."""

    def adamw(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=1e-5, fused=device == "cuda", foreach=device == "cpu")

    def stabilized(model: nn.Module) -> list[Callable[[], object]]:
        return [GradStabilizer(model.parameters()).step_, adamw(model).step]

    builds: dict[str, Callable[[nn.Module], list[Callable[[], object]]]] = {
        "adamw fused" if device == "cuda" else "adamw foreach": lambda model: [adamw(model).step],
        "spam": lambda model: [SPAM(model.parameters(), **PLAIN).step],
        "spam density 0.25": lambda model: [SPAM(spam_groups(model, 0.25), **PLAIN).step],
        "stabilizer + adamw": stabilized,
        "muon + adamw (osp)": lambda model: [optimizer.step for optimizer in osp_optimizers(model)],
    }
    arms = {name: train_arm(config, device, batch, build) for name, build in builds.items()}
    safe = dataclasses.replace(config, norm="ssnorm", embproj=True)
    arms["osp with ssnorm and embproj"] = train_arm(safe, device, batch, builds["muon + adamw (osp)"])
    return arms


def train_arm(
    config: ModelConfig, device: str, batch: int, build: Callable[[nn.Module], list[Callable[[], object]]]
) -> Callable[[], object]:
    """One arm with a model of its own; every call trains a step on the same random tokens."""
    model = Decoder(config, seed=0).to(device)
    calls = build(model)
    draw = torch.Generator().manual_seed(0)
    tokens = torch.randint(config.vocab_size, (batch, config.max_seq + 1), generator=draw).to(device)

    def train() -> None:
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            loss = model(tokens[:, :-1], tokens[:, 1:]).loss
        loss.backward()
        for call in calls:
            call()
        model.zero_grad()

    return train


def norm_arms(width: int, rows: int, device: str, dtype: torch.dtype) -> Arms:
    """A norm's forward and backward; on a GPU also as it is compiled, and all of them replayed from a graph.

    A norm is a few short kernels: called from Python it is the host that is timed, replayed it is the GPU.
    """

    def arm(norm: nn.Module) -> Callable[[], object]:
        norm = norm.to(device, dtype)
        x = torch.randn(rows, width, device=device, dtype=dtype, requires_grad=True)
        grad, inputs = torch.randn_like(x), [x, *norm.parameters()]
        return lambda: torch.autograd.grad(norm(x), inputs, grad)

    norms = {"rmsnorm": nn.RMSNorm(width), "ssnorm": SSNorm(width)}
    if device != "cuda":
        return {name: arm(norm) for name, norm in norms.items()}
    arms: Arms = {}
    for name, norm in norms.items():
        arms |= {f"{name} called": arm(norm), name: graph(arm(norm))}
        arms[f"{name} compiled"] = graph(arm(torch.compile(norm)))  # pyright: ignore[reportArgumentType]
    return arms


def graph(call: Callable[[], object]) -> Callable[[], object]:
    """A call recorded once and replayed."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    torch.cuda.synchronize()
    recorded = torch.cuda.CUDAGraph()
    with torch.cuda.graph(recorded):
        call()
    return recorded.replay


def main() -> None:
    """Run the comparison."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--model", nargs="+", help="sizes of the lab, 10m or 100m")
    parser.add_argument("--parts", nargs="+", choices=("step", "train", "norm"), default=["step", "train", "norm"])
    parser.add_argument("--threads", nargs="+", type=int, default=[torch.get_num_threads()], help="on a CPU")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--batch", type=int, help="sequences in a training step")
    args = parser.parse_args()
    device = args.device
    batch = args.batch or (128 if device == "cuda" else 4)
    baseline, repeats = ("adamw fused", 5) if device == "cuda" else ("adamw foreach", 1)
    table: dict[str, Any] = {}
    for name in args.model or (["100m"] if device == "cuda" else ["tiny", "10m", "100m"]):
        config = BETWEEN.get(name) or ModelConfig.size(name)
        for threads in args.threads:
            torch.set_num_threads(threads)
            size = Decoder(config, seed=0).num_parameters() / 1e6
            found = table[f"{name}, {size:.1f}M parameters" + (f", {threads} threads" if device == "cpu" else "")] = {}
            for part in args.parts:
                if part == "train" and device == "cpu" and size > 20:
                    continue  # minutes a step
                if part == "norm":
                    dtype = torch.bfloat16 if device == "cuda" else torch.float32
                    arms, base = norm_arms(config.width, batch * config.max_seq, device, dtype), "rmsnorm"
                else:
                    arms = step_arms(config, device) if part == "step" else train_arms(config, device, batch)
                    base = baseline
                found[part] = measure(arms, base, device, args.rounds, repeats)
                del arms  # the next part's models need the memory
    save(f"optimizers_{device}", table, rounds=args.rounds, repeats=repeats, batch=batch, seed=0)


if __name__ == "__main__":
    main()
