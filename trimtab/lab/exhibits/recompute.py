# SPDX-License-Identifier: Apache-2.0
"""Activation checkpointing: the forward runs again inside the backward, where the world may have changed.

RECOMPUTE. The recompute does not remember that its forward ran in low precision. `ForgetfulLinear` is such a linear:
called inside a backward it takes the plain path. What the forward saved is gone, so the whole backward is that of a
forward that never happened: exact, but at other activations than those the loss was computed from. The checkpoint is
the reentrant kind, as the thread's: torch's newer kind compares what is saved twice and raises.

STUCK. Under checkpointing the scales of the backward are not updated: they keep the value they started with, 1. E5M2
has no number below 1.5e-5 but 0, and the output gradients of a mean loss over many tokens lie below that. A batch
here has few tokens, so its gradients are larger; the grid is made coarser by as much, to stand for 131,072 tokens.

trimtab's own linear carries its decision and its scales to the recompute; `faithful` is the arm with it.
"""

from functools import partial

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from trimtab.lab.exhibits.case import SMALL, Arm, Exhibit, Quirk, quirks_
from trimtab.lab.model import Block
from trimtab.lab.run import Run
from trimtab.linear.formats import FORMATS
from trimtab.linear.linear import SwitchLinear, switch_linears
from trimtab.linear.paths import Path
from trimtab.linear.state import Call
from trimtab.modules import in_backward

BATCH = 131_072
FAITHFUL = Arm("faithful", {"mode": "observe", "path": "low"}, broken=False, note="low, trimtab's own linear")


class ForgetfulLinear(SwitchLinear):
    """A linear whose recompute is plain, whatever its forward was."""

    def begin(self, mark: int | None = None) -> Call:
        return Call(Path.plain(), self.memory, self.fqn) if in_backward() else super().begin(mark)


class Reentrant(Block):
    """A block that is recomputed in the backward, and that compares nothing."""

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor | None]:
        """The block, checkpointed."""
        if not torch.is_grad_enabled():
            return super().forward(x, cos, sin)
        return checkpoint(super().forward, x, cos, sin, use_reentrant=True)  # pyright: ignore[reportReturnType]


def forgetful(run: Run, broken: bool) -> None:
    """Recomputes that forget the forward's precision."""
    for block in run.model.blocks:  # pyright: ignore[reportGeneralTypeIssues]  (the lab's decoder)
        block.__class__ = Reentrant
    for module in list(switch_linears(run.model)) if broken else ():
        module.__class__ = ForgetfulLinear


class Stuck(Quirk):
    """The scale of the output gradient is for ever what would be 1 in a batch of `BATCH` tokens."""

    def __init__(self, module: SwitchLinear, tokens: int) -> None:
        super().__init__(module)
        self.stuck = FORMATS["e5m2"].max * BATCH / tokens

    def amax(self, operand: str, amax: Tensor) -> Tensor:
        """The amax that gives this scale."""
        return torch.full_like(amax, self.stuck) if operand == "grad_output" else amax


def stuck(run: Run, broken: bool) -> None:
    """Backward scales that are never updated."""
    if broken:
        quirks_(run.model, partial(Stuck, tokens=run.tokens_per_step))


RECOMPUTE = Exhibit(
    name="recompute",
    thread="NVIDIA/Megatron-LM#7538",
    what="the recompute leaves the FP8 context and silently runs in BF16 while its forward ran in FP8",
    settings=SMALL | {"steps": 60, "recipe": "fp4"},
    prepare=forgetful,
    more=(FAITHFUL,),
    note="E2M1 instead of FP8, to make the mismatch large",
)

STUCK = Exhibit(
    name="stuck",
    thread="NVIDIA/TransformerEngine#1190",
    what="with checkpointing the FP8 scales of the backward are not updated, and training becomes unstable",
    settings=SMALL | {"steps": 50, "recipe": "fp8_delayed", "checkpointing": True},
    prepare=stuck,
    more=(FAITHFUL,),
    note="gradients are scaled to a batch of 131,072 tokens",
)
