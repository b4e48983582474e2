# SPDX-License-Identifier: Apache-2.0
"""What is divided by zero, and what is never written.

LORA. An adapter's B is zero at the start, so the scale of its rows is zero, and so is every scale of the output
gradient of A. A quantizer that divides by them makes NaN in the first forward. trimtab gives a group of zeros the
scale 1.

EXPERT. An expert without tokens has nothing to multiply, and a kernel that skips it leaves the memory of its weight's
gradient as it found it. The forward is finite; the first backward in which an expert is empty is not. (The thread
names the expert's down projection as the first non-finite gradient; we found no cause in it. That an expert without
tokens gets uninitialised memory is the cause in meta-pytorch/MSLK#158; NaN stands for that memory here.) COLLAPSE is
the same at a learning rate at which routers collapse, so that more experts are empty than the budget has seats.
"""

from dataclasses import replace

import torch
from torch import Tensor, nn

from trimtab.lab.exhibits.case import SMALL, STEADY, Arm, Exhibit, Quirk, convert_anew_, quirks_
from trimtab.lab.model import Attention, Mixture, route
from trimtab.lab.run import Run
from trimtab.linear.paths import Cast, Gemm, Path, Recipe

RANK, SCALING = 8, 2.0


class Adapted(nn.Module):
    """A frozen linear and its adapter: base(x) + scaling * up(down(x)), with up zero at the start (LoRA's B)."""

    def __init__(self, base: nn.Linear, generator: torch.Generator) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Linear(base.in_features, RANK, bias=False)
        self.up = nn.Linear(RANK, base.out_features, bias=False)
        with torch.no_grad():
            self.down.weight.normal_(0.0, base.in_features**-0.5, generator=generator)
            self.up.weight.zero_()

    def forward(self, x: Tensor) -> Tensor:
        """The linear with its adapter."""
        return self.base(x) + SCALING * self.up(self.down(x))


class Unfloored(Quirk):
    """A scale of amax / 448 without a floor: a group of zeros is 0 / 0."""

    def amax(self, operand: str, amax: Tensor) -> Tensor:
        """NaN for a group of zeros."""
        return amax.masked_fill(amax == 0, float("nan"))


def rowwise() -> Recipe:
    """E4M3 with one scale per row (the thread's `PerRow`), gradients included."""
    row = Cast("e4m3", "token")
    return Recipe(Path("fp8-row", Gemm(row, row), Gemm(row, row), Gemm(row, row)), Path.plain(), name="fp8-row")


def adapted(run: Run, broken: bool) -> None:
    """Adapters on queries and values; everything else is frozen, and every linear of a block is low precision."""
    generator = torch.Generator().manual_seed(run.config.seed)
    frozen = list(run.model.parameters())
    for attention in [module for module in run.model.modules() if isinstance(module, Attention)]:
        for name in ("q", "v"):
            setattr(attention, name, Adapted(getattr(attention, name), generator))
    convert_anew_(run, rowwise(), freeze=frozen)
    if broken:
        quirks_(run.model, Unfloored)


class Unwritten(Quirk):
    """A kernel that skips an expert without tokens and does not write its gradient, which would be zero."""

    def grad_weight(self, g: Tensor) -> Tensor:
        """What was in memory."""
        return g if g.any() else torch.full_like(g, float("nan"))


class Grouped(Mixture):
    """All experts in one grouped product: each takes part, with a row of padding after its tokens."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """As the mixture, but that an expert without tokens is called too."""
        flat = x.reshape(-1, x.shape[-1])
        weights, chosen, balance = route(self.router(flat), self.top_k)
        out, padding = torch.zeros_like(flat), torch.zeros_like(flat[:1])
        for index, expert in enumerate(self.experts):
            token, slot = (chosen == index).nonzero(as_tuple=True)
            rows = expert(torch.cat((flat[token], padding)))[:-1]
            out.index_add_(0, token, rows * weights[token, slot, None])
        return out.view_as(x), balance


def grouped(run: Run, broken: bool) -> None:
    """Every expert is called, and the kernel of the down projections forgets the empty ones."""
    for module in run.model.modules():
        if isinstance(module, Mixture):
            module.__class__ = Grouped
    if broken:
        quirks_(run.model, Unwritten, lambda name: name.endswith(".down"))


LORA = Exhibit(
    name="lora",
    thread="pytorch/ao#3356",
    what="FP8 with LoRA is NaN from the first step because a scale is zero; a floor under it is the cure",
    settings=SMALL | {"steps": 40, "recipe": "fp8"},
    prepare=adapted,
    guilty=lambda name: name.endswith((".up", ".down")) and ".attn." in name,
    more=(
        Arm("warm", {"policy": STEADY | {"warmup": "high", "warmup_steps": 3}}, note="control, all high for 3 steps"),
        Arm("floored", {"mode": "observe", "path": "low"}, broken=False, note="low, trimtab's own scale"),
    ),
    note="the adapters are quantized too; the base is random, not pre-trained",
)

EXPERT = Exhibit(
    name="expert",
    thread="marin-community/marin#7480",
    what="the first forward is finite, the first backward leaves NaN in the experts' down projection",
    settings=SMALL | {"steps": 40, "recipe": "fp8", "lr": 1e-3, "num_experts": 8, "top_k": 2, "unit": "expert"},
    prepare=grouped,
    guilty=lambda name: ".experts." in name,
    more=(Arm("written", {"mode": "observe", "path": "low"}, broken=False, note="low, the gradient is written"),),
    note="per-tensor FP8 instead of MXFP8; the cause is that of meta-pytorch/MSLK#158",
)

COLLAPSE = replace(
    EXPERT,
    name="collapse",
    what=f"{EXPERT.what}; with a hotter router, which leaves many experts empty at once",
    settings={**EXPERT.settings, "lr": 4e-3},
)
