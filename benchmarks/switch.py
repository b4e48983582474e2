# SPDX-License-Identifier: Apache-2.0
"""Three ways to switch a compiled model, block by block: what a step, a flip and the compilation cost.

    python benchmarks/switch.py [--model 936m] [--rounds 8] [--steps 4]

    opaque      trimtab's: an operator that looks its path up when it runs; casts are its own kernels
    variants    a flag that the compiled block reads: two graphs, chosen by a guard; casts are fused by the compiler
    predicate   `torch.cond` on a device tensor inside of the compiled block: one graph with both branches

Each holds the same decoder with compiled blocks, BF16 weights, fused AdamW, low = hybrid FP8 with current scaling, and
high = BF16. Every arm runs with 0, 5 and 25 % of the blocks high, drawn anew in every step. `flip_us` is the host's
time to change one unit, `compile_s` the first two steps, `graphs` how many were compiled.
"""

import argparse
import time
from collections.abc import Callable

import numpy as np
import torch
from common import against, interleave, save
from step import MODELS, build, timed, trained
from torch import Tensor, nn

from trimtab import convert_
from trimtab.control import act
from trimtab.control.units import find_units

SHARES = (0.0, 0.05, 0.25)


def narrow(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """x in FP8 and what it was divided by."""
    scale = x.abs().amax().float().clamp_min(1e-12) / torch.finfo(dtype).max
    return (x / scale).clamp(-torch.finfo(dtype).max, torch.finfo(dtype).max).to(dtype), scale


def product(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor], out: torch.dtype, *, fast: bool = False) -> Tensor:
    """a @ b of FP8 operands, a in rows and b in columns; multiplied out on a CPU."""
    if not a[0].is_cuda:
        return ((a[0].float() * a[1]) @ (b[0].float() * b[1])).to(out)
    return torch._scaled_mm(a[0], b[0], scale_a=a[1], scale_b=b[1], out_dtype=out, use_fast_accum=fast)


class InlineFp8(torch.autograd.Function):
    """A hybrid FP8 linear that the compiler can see through."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        x8, w8 = narrow(x, torch.float8_e4m3fn), narrow(weight, torch.float8_e4m3fn)
        return product(x8, (w8[0].t(), w8[1]), x.dtype, fast=True)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        g8 = narrow(grad, torch.float8_e5m2)
        w8, x8 = narrow(weight.t().contiguous(), torch.float8_e4m3fn), narrow(x.t().contiguous(), torch.float8_e4m3fn)
        back = product(g8, (w8[0].t(), w8[1]), grad.dtype)
        gt8 = g8[0].t().contiguous(), g8[1]
        return back, product(gt8, (x8[0].t(), x8[1]), grad.dtype)


def inline_fp8(x: Tensor, weight: Tensor) -> Tensor:
    """The low path of a linear without bias."""
    return InlineFp8.apply(x.flatten(0, -2), weight).unflatten(0, x.shape[:-1])  # pyright: ignore


class Flagged(nn.Linear):
    """Two paths behind an attribute of Python, which becomes a guard."""

    high = False

    def forward(self, input: Tensor) -> Tensor:
        return nn.functional.linear(input, self.weight) if self.high else inline_fp8(input, self.weight)


class Predicated(nn.Linear):
    """Two paths behind a tensor, which becomes a branch of the graph."""

    where: Tensor

    def forward(self, input: Tensor) -> Tensor:
        return torch.cond(self.where, nn.functional.linear, inline_fp8, (input, self.weight))


def linears(block: nn.Module) -> list[nn.Linear]:
    """The linears of a block."""
    return [module for module in block.modules() if isinstance(module, nn.Linear)]


def switchable(model: nn.Module, kind: str, device: str) -> Callable[[np.ndarray], None]:
    """Make the blocks of a model switchable in one of the ways; what applies a plan to it."""
    blocks = list(model.blocks)  # type: ignore[attr-defined, arg-type]
    if kind == "opaque":
        convert_(model, "fp8", unit="block")
        units = find_units(model)
        return lambda plan: act.apply(units, plan)
    for block in blocks:
        for linear in linears(block):
            linear.__class__ = Flagged if kind == "variants" else Predicated
            if kind == "predicate":
                linear.where = torch.zeros((), dtype=torch.bool, device=device)

    def flip(plan: np.ndarray) -> None:
        for block, high in zip(blocks, plan.tolist(), strict=True):
            for linear in linears(block):
                if kind == "variants":
                    linear.high = high  # type: ignore[assignment]
                else:
                    linear.where.fill_(high)  # type: ignore[operator, union-attr]

    return flip


def main() -> None:
    """Run the comparison."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="936m", choices=list(MODELS))
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--kinds", default="opaque,variants,predicate")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    built: dict[str, Callable[[], float]] = {}
    more: dict[str, dict[str, float | str]] = {}
    for kind in args.kinds.split(","):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        model = build(args.model, device)
        flip, draw, share = switchable(model, kind, device), np.random.default_rng(0), [0.0]
        num = len(list(model.blocks))

        def after(flip: Callable = flip, share: list[float] = share, draw: np.random.Generator = draw) -> None:
            flip(draw.random(num) < share[0])  # noqa: B023

        step = trained(model, args.batch, device, after)
        try:
            started = time.perf_counter()
            for plan in (np.zeros(num, bool), np.ones(num, bool)):
                flip(plan)
                step()
            compiled = time.perf_counter() - started
            started = time.perf_counter()
            for i in range(200):
                flip(np.full(num, i % 2 == 0))
            flip_us = 1e6 * (time.perf_counter() - started) / 200 / num
        except Exception as error:  # a way that does not work is a result too
            more[kind] = {"failed": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"}
            print(kind, more[kind], flush=True)
            continue
        graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        more[kind] = {"compile_s": round(compiled, 1), "flip_us": round(flip_us, 1), "graphs": graphs}
        print(kind, more[kind], flush=True)
        for part in SHARES:

            def before(part: float = part, share: list[float] = share) -> None:
                share[0] = part

            built[f"{kind} {part:.0%}"] = timed(step, args.steps, before)
    times = interleave(built, args.rounds)
    table = against(times, next(iter(times)))
    save(f"switch_{device}_{args.model}", table, kinds=more, batch=args.batch, rounds=args.rounds, steps=args.steps)


if __name__ == "__main__":
    main()
