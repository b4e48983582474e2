# SPDX-License-Identifier: Apache-2.0
"""A whole training step in BF16, in torchao's FP8 and in trimtab's, with the controller and without.

    python benchmarks/step.py [--model 936m] [--rounds 12] [--steps 5] [--arms bf16,fp8,...]

A decoder with compiled blocks, BF16 weights, fused AdamW, gradients clipped; forward, backward, clipping and update are
timed together on random tokens. Every round runs each arm once, in rotating order; a ratio is that of two arms in one
round, and speed-ups are ratios to BF16.

    bf16                  the plain model
    ao tensorwise, rowwise    torchao's float8 training, where it can be imported
    fp8                   trimtab's recipe `fp8` on real kernels, nobody watching
    control 0 %           the same under a controller whose budget is 0: what watching costs
    control 1, 5, 25 %    random units high in every step, so many on average: what recovery costs

Python's garbage collector rests while the clock runs, as in the loops that people use at scale: one full collection
takes as long as two steps, and falls on whichever arm is next.

trimtab's arms share one model: only what happens after the backward differs. When the host waits for the norms is the
controller's `wait` (`trimtab/control/waiting.py`).
"""

import argparse
import gc
import time
from collections.abc import Callable

import numpy as np
import torch
from common import against, interleave, save
from torch import nn

from trimtab import Controller, Policy, convert_
from trimtab.control import act
from trimtab.control.advance import Verdict
from trimtab.control.units import find_units
from trimtab.control.values import Bools
from trimtab.lab.model import Decoder, ModelConfig

MODELS = {
    "tiny": ModelConfig(vocab_size=512, width=256, layers=2, heads=4, ffn=512, max_seq=128),
    "936m": ModelConfig(vocab_size=32_000, width=2048, layers=12, heads=16, ffn=8192, max_seq=2048),
    "3b": ModelConfig(vocab_size=32_000, width=3072, layers=24, heads=24, ffn=8192, max_seq=2048),
}
SHARES = {"control 0 %": 0.0, "control 1 %": 0.01, "control 5 %": 0.05, "control 25 %": 0.25}
AO = {"ao tensorwise": "tensorwise", "ao rowwise": "rowwise"}


class Share:
    """Random units, a share of them on average, whatever their risk."""

    def __init__(self, units: int) -> None:
        self.share, self._units = 0.0, units

    def draw(self, step: int) -> Bools:
        """Who runs high in a step."""
        wanted = int((step + 1) * self.share * self._units) - int(step * self.share * self._units)
        return np.random.default_rng(step).permutation(self._units) < wanted

    def __call__(self, step: int, verdict: Verdict) -> Bools:
        """Choose for the next step."""
        return self.draw(step)


def build(name: str, device: str) -> Decoder:
    """The model in BF16."""
    torch.manual_seed(0)
    return Decoder(MODELS[name], seed=0).to(device, torch.bfloat16)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer of every arm."""
    return torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)


def trained(
    model: Decoder, batch: int, device: str, after: Callable[[], object], optimizer: torch.optim.Optimizer | None = None
) -> Callable[[], None]:
    """One training step of a model; `after` comes between backward and update."""
    for block in model.blocks:
        block.compile()
    optimizer = optimizer or adamw(model)
    size = (batch, model.config.max_seq + 1)
    tokens = torch.randint(0, model.config.vocab_size, size, device=device)

    def step() -> None:
        loss = model(tokens[:, :-1], tokens[:, 1:]).loss
        assert loss is not None
        loss.backward()
        after()
        optimizer.step()
        optimizer.zero_grad()

    return step


def timed(step: Callable[[], None], steps: int, before: Callable[[], object] = lambda: None) -> Callable[[], float]:
    """Seconds per step of a few in a row."""

    def run() -> float:
        before()
        step()  # the plan of another arm is over after this one
        gc.collect()
        gc.disable()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        started = time.perf_counter()
        for _ in range(steps):
            step()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        seconds = (time.perf_counter() - started) / steps
        gc.enable()
        return seconds

    return run


def arms(
    name: str, wanted: list[str], batch: int, steps: int, wait: str, device: str
) -> dict[str, Callable[[], float]]:
    """Every arm that is asked for and can be built."""
    found: dict[str, Callable[[], float]] = {}

    def clip(model: nn.Module) -> Callable[[], object]:
        return lambda: nn.utils.clip_grad_norm_(model.parameters(), 1.0)

    if "bf16" in wanted:
        model = build(name, device)
        found["bf16"] = timed(trained(model, batch, device, clip(model)), steps)
    for arm, recipe in AO.items():
        if arm in wanted:
            try:
                from torchao.float8 import (  # pyright: ignore[reportMissingImports]
                    Float8LinearConfig,
                    convert_to_float8_training,
                )
            except ImportError:
                print(f"{arm} is left out: torchao cannot be imported", flush=True)
                continue
            model = build(name, device)
            convert_to_float8_training(
                model,
                config=Float8LinearConfig.from_recipe_name(recipe),
                module_filter_fn=lambda module, fqn: "head" not in fqn and not fqn.endswith("lm_head"),
            )
            found[arm] = timed(trained(model, batch, device, clip(model)), steps)
    mine = [arm for arm in ("fp8", *SHARES) if arm in wanted]
    if mine:
        model = build(name, device)
        print(convert_(model, "fp8"), flush=True)
        share = Share(len(find_units(model)))
        optimizer = adamw(model)
        policy = Policy(max_high=1.0, alpha_warmup=None)
        controller = Controller(model, policy, selection=share, wait=wait, optimizer=optimizer)
        plain, watched = clip(model), [False]

        def after() -> None:
            if watched[0]:
                controller.step()
                controller.clip_grad_norm_(1.0)
            else:
                plain()

        step = trained(model, batch, device, after, optimizer)
        for arm in mine:

            def before(arm: str = arm) -> None:
                watched[0], share.share = arm in SHARES, SHARES.get(arm, 0.0)
                act.apply(controller.units, share.draw(0))

            found[arm] = timed(step, steps, before)
    return found


def main() -> None:
    """Run the comparison."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="936m", choices=list(MODELS))
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--wait", default="forward", choices=["step", "forward", "never"])
    parser.add_argument("--arms", default=",".join(["bf16", *AO, "fp8", *SHARES]))
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    built = arms(args.model, args.arms.split(","), args.batch, args.steps, args.wait, device)
    for name, run in built.items():
        started = time.perf_counter()
        run()
        print(f"{name}: ready after {time.perf_counter() - started:.0f} s", flush=True)
    torch._dynamo.config.error_on_recompile = True
    times = interleave(built, args.rounds)
    baseline = "bf16" if "bf16" in times else next(iter(times))
    table = against(times, baseline)
    for row in table.values():
        row["speed_up"] = round(1 / row["ratio"], 4)
    peak = torch.cuda.max_memory_allocated() if device == "cuda" else None
    waited = "" if args.wait == "forward" else f"{args.wait}_"
    save(
        f"step_{waited}{device}_{args.model}",
        table,
        batch=args.batch,
        rounds=args.rounds,
        steps=args.steps,
        wait=args.wait,
        peak=peak,
        rounds_ms={name: [round(1e3 * second, 2) for second in seconds] for name, seconds in times.items()},
    )


if __name__ == "__main__":
    main()
