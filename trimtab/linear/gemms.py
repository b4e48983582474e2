# SPDX-License-Identifier: Apache-2.0
"""The three GEMMs of one forward and its backward, on whatever carries them out.

`emulated.py` and `real.py` are engines: the same three functions, `output`, `keep` and `gradients`. What does not
depend on the engine stands here: faults, watches, the bias, and the autograd function. The path chosen in forward
travels in the `Call`, so a backward always belongs to its forward, whatever the switch says by then.

- A watched call (`call.shadow`) runs the same operands through the high path too and reports both results. The
  reference starts from the gradient as it came in, before any fault, and feeds no history.
- The bias gradient is exact. Gradients are computed only where they are needed. There is no double backward.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from trimtab.linear import emulated, real
from trimtab.linear.quantize import as_matrix
from trimtab.linear.state import Call

Kept = tuple[Tensor | None, ...]
Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]


def engine(call: Call) -> ModuleType:
    """Who carries a call out."""
    return real if call.real else emulated


def forward(
    call: Call, x: Tensor, weight: Tensor, bias: Tensor | None, need_x: bool, need_w: bool
) -> tuple[Tensor, Kept]:
    """The result of a path, its fault included, and what the backward needs."""
    y, kept = engine(call).output(call, x, weight, bias, need_x, need_w)
    y = y if call.fault is None else call.fault.output(y)
    if call.shadow is None or call.report is None:
        return y, kept
    wanted, more = engine(call.shadow).output(call.shadow, x, weight, bias, need_x, need_w)
    call.report("output", y, wanted)
    return y, (*kept, *more)


def keep(call: Call, x: Tensor, weight: Tensor, need_x: bool, need_w: bool) -> Kept:
    """What the backward of a forward needs, made again from its operands."""
    kept = engine(call).keep(call, x, weight, need_x, need_w)
    if call.shadow is None:
        return kept
    return *kept, *engine(call.shadow).keep(call.shadow, x, weight, need_x, need_w)


def backward(
    call: Call, grad: Tensor, kept: Sequence[Tensor | None], x_shape: torch.Size, needs: Sequence[bool]
) -> Gradients:
    """The gradients of input, weight and bias where `needs` asks for them, from what the forward kept."""
    need_x, need_w, need_b = needs
    own = engine(call).KEPT
    device = grad.device.type
    mixed = device != "meta" and torch.is_autocast_enabled(device)
    with torch.autocast(device, enabled=False) if mixed else nullcontext():
        g = as_matrix(grad if call.fault is None else call.fault.grad_output(grad))
        call.observe("grad_output", g)
        grad_x, grad_w = engine(call).gradients(call, g, kept[:own], x_shape, need_x, need_w)
        if call.fault is not None and grad_w is not None:
            grad_w = call.fault.grad_weight(grad_w)
        if call.shadow is not None and call.report is not None:
            wanted = engine(call.shadow).gradients(call.shadow, as_matrix(grad), kept[own:], x_shape, need_x, need_w)
            for role, low, high in zip(("grad_input", "grad_weight"), (grad_x, grad_w), wanted, strict=True):
                if low is not None:
                    call.report(role, low, high)
        return grad_x, grad_w, g.sum(0) if need_b else None


class SwitchedGemms(torch.autograd.Function):
    """A linear whose three GEMMs follow `call.path`. Autocast is off in here: the caller has cast already."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, call: Call, grad_enabled: bool) -> Tensor:
        need_x, need_w = (grad_enabled and need for need in ctx.needs_input_grad[:2])
        y, kept = forward(call, x, weight, bias, need_x, need_w)
        ctx.call, ctx.x_shape = call, x.shape
        ctx.save_for_backward(*kept)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:  # type: ignore[override]  # the decorator hides the names
        kept = ctx.saved_tensors  # once: checkpointing unpacks only once
        return *backward(ctx.call, grads[0], kept, ctx.x_shape, ctx.needs_input_grad[:3]), None, None
