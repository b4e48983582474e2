# SPDX-License-Identifier: Apache-2.0
"""One SPAM update, carried out three ways: the arithmetic that `spam.py` explains, without clocks or groups.

    spam_       the method itself, on one tensor and its moments: read this
    loop_       tensor after tensor, in pieces that stay in the processor's cache; fastest on a CPU
    foreach_    many tensors per call; the same bits as `loop_` on a CPU
    fused_      one Triton launch for all tensors, one pass over memory (`fused.py`); fastest on a GPU

All the numbers of a step arrive in `Coefficients`, plain Python values that the host computed: nothing here asks
the device for anything. (`clipped` looks whether there is a spike at all, but only where the tensor is on the CPU.)

Moments are FP32 whatever the parameter's dtype (FP64 for FP64): in BF16, 0.999 * v rounds back to v and the second
moment would never fall. The update is computed in the moments' dtype and written back in the parameter's own.
"""

# pyright: reportPrivateImportUsage=false
# (foreach operations are what torch.optim itself is written with)

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from trimtab.optim.sparse import Mask

CHUNK = 1 << 19
"""Elements in a piece: five FP32 pieces are 10 MB. Measured on Zen 3 with a 32 MB cache: with pieces of a quarter of
this two threads mostly wait for each other; without pieces a model of 100M parameters takes 1.5 times as long."""


class Coefficients(NamedTuple):
    """The numbers of one step. Equal ones may share a call."""

    reset: bool
    """Whether the moments are wiped before the gradient is used."""
    beta1: float
    beta2: float
    size: float
    """lr * s * sqrt(1 - beta2^n) / (1 - beta1^n)."""
    eps: float
    """What is added to the uncorrected sqrt(v)."""
    threshold: float
    """theta; infinite where nothing is clipped."""
    literal: bool
    """Whether a coordinate with v = 0 is clipped too (to zero), as in the published code."""
    decay: float
    """lr * weight_decay."""


class Work(NamedTuple):
    """One parameter's share of a step: its local tensors and its numbers."""

    p: Tensor
    g: Tensor
    m: Tensor
    v: Tensor
    c: Coefficients
    mask: "Mask | None" = None
    """Where the moments of a sparse one belong; a dense one has moments of its own shape."""


def moment_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of the moments of a parameter."""
    return dtype if dtype == torch.float64 else torch.float32


def spam_(p: Tensor, g: Tensor, m: Tensor, v: Tensor, c: Coefficients, scratch: Tensor | None = None) -> None:
    """Update p, m and v in place; g is only read. All have one shape, and p, g may be narrower than the moments.

    Args:
        scratch: memory of the moments' shape and dtype to work in.
    """
    wide, g = p.to(m.dtype), g.to(m.dtype)
    if c.reset:
        m.zero_()
        v.zero_()
    if c.threshold < math.inf:
        scratch = torch.addcmul(v, g, g, value=-1 / c.threshold, out=scratch)
        g = clipped(g, v, scratch, c)
    m.lerp_(g, 1 - c.beta1)
    v.mul_(c.beta2).addcmul_(g, g, value=1 - c.beta2)
    wide.addcdiv_(m, torch.sqrt(v, out=scratch).add_(c.eps), value=-c.size)
    if c.decay:
        wide.mul_(1 - c.decay)
    if wide is not p:
        p.copy_(wide)


def clipped(
    g: Tensor,
    v: Tensor,
    margin: Tensor,  # v - g^2 / threshold: negative where g is a spike
    c: Coefficients,
) -> Tensor:
    """The gradient with its spikes cut to sqrt(threshold * v), in a new tensor if there are any."""
    if margin.is_cpu and margin.amin().item() >= 0:  # spikes are rare, and a CPU need not wait to look
        return g
    spike = margin < 0 if c.literal else (margin < 0) & (v > 0)
    bound = v.sqrt().mul_(math.sqrt(c.threshold))  # root by root: theta * v would overflow long before v does
    return torch.where(spike, torch.copysign(bound, g), g)


def loop_(work: Sequence[Work]) -> None:
    """`spam_` on one tensor after the other."""
    scratches: dict[torch.dtype, Tensor] = {}
    for one in work:
        if one.p.numel() <= CHUNK or not one.p.is_cpu or (vectors := flat(one)) is None:
            spam_(one.p, one.g, one.m, one.v, one.c)
            continue
        if one.m.dtype not in scratches:
            scratches[one.m.dtype] = torch.empty(CHUNK, dtype=one.m.dtype)
        for p, g, m, v in zip(*(vector.split(CHUNK) for vector in vectors), strict=True):
            spam_(p, g, m, v, one.c, scratches[one.m.dtype][: len(m)])


def foreach_(work: Sequence[Work]) -> None:
    """`spam_` on many tensors per call: those with the same numbers, device and dtypes go together."""
    kinds: dict[tuple[object, ...], list[Work]] = {}
    for one in work:
        kinds.setdefault((one.c, one.p.device, one.p.dtype, one.g.dtype), []).append(one)
    for kind in kinds.values():
        _foreach_kind_(kind)


def _foreach_kind_(work: Sequence[Work]) -> None:
    c = work[0].c
    ms, vs = [one.m for one in work], [one.v for one in work]
    ps, gs = [one.p.to(one.m.dtype) for one in work], [one.g.to(one.m.dtype) for one in work]
    if c.reset:
        torch._foreach_zero_([*ms, *vs])
    if c.threshold < math.inf:
        margins = torch._foreach_addcmul(vs, gs, gs, value=-1 / c.threshold)
        gs = [clipped(g, v, margin, c) for g, v, margin in zip(gs, vs, margins, strict=True)]
        del margins
    torch._foreach_lerp_(ms, gs, 1 - c.beta1)
    torch._foreach_mul_(vs, c.beta2)
    torch._foreach_addcmul_(vs, gs, gs, value=1 - c.beta2)
    denominators = torch._foreach_sqrt(vs)
    torch._foreach_add_(denominators, c.eps)
    torch._foreach_addcdiv_(ps, ms, denominators, value=-c.size)
    if c.decay:
        torch._foreach_mul_(ps, 1 - c.decay)
    if ps[0] is not work[0].p:
        torch._foreach_copy_([one.p for one in work], ps)


def flat(one: Work) -> list[Tensor] | None:
    """p, g, m and v as vectors over the same memory (g may be a copy), or None if p has gaps or another order than m.

    A transposed parameter is dense as well: its dimensions are first put into the order of its strides.
    """
    p, g, m, v = one.p, one.g, one.m, one.v
    if not p.is_contiguous():
        order = sorted(range(p.dim()), key=lambda i: -one.p.stride(i))
        p, g, m, v = (tensor.permute(order) for tensor in (p, g, m, v))
    if not all(tensor.is_contiguous() for tensor in (p, m, v)):
        return None
    return [p.view(-1), g.reshape(-1), m.view(-1), v.view(-1)]
