# SPDX-License-Identifier: Apache-2.0
"""Multiply many gradients by numbers that lie on the device, in one launch.

torch multiplies a list of tensors by host numbers or by one device number in a single launch, but by a device number
each only in a launch per tensor. The kernel does it for a whole model (see `launch.py`), in FP32 up to the store:

    g = g * factor     where |g| > limit          a limit of -1 means everywhere

Importing this file needs Triton; `transform.py` imports it only then.
"""

from collections.abc import Sequence

import torch
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]
from torch import Tensor

from trimtab.optim.launch import BLOCK, blocks, table

DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@triton.jit
def _multiply(places, limits, factors, owner, start, G: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr):
    block = tl.program_id(0)
    place = places + tl.load(owner + block) * 3
    g_ptr = tl.load(place).to(tl.pointer_type(G))
    size, which = tl.load(place + 1), tl.load(place + 2)
    if ALIGNED:
        g_ptr, size = tl.multiple_of(g_ptr, 16), tl.multiple_of(size, 8)
    at = tl.multiple_of(tl.load(start + block), BLOCK) + tl.arange(0, BLOCK)
    g = tl.load(g_ptr + at, mask=at < size, other=0.0).to(tl.float32)
    factor = tl.where(tl.abs(g) > tl.load(limits + which), tl.load(factors + which), 1.0)
    tl.store(g_ptr + at, (g * factor).to(G), mask=at < size)


def takes(gradient: Tensor) -> bool:
    """Whether the kernel can do this one: usual dtypes, memory without gaps."""
    return gradient.dtype in DTYPES and gradient.is_contiguous()


def multiply_(
    gradients: Sequence[Tensor],  # on one device, of one dtype
    which: Sequence[int],
    factors: Tensor,  # (P,) float32, on that device
    limits: Tensor,  # (P,) float32, on that device
) -> None:
    """Multiply gradient i by `factors[which[i]]`, where it exceeds `limits[which[i]]`."""
    alike: dict[bool, list[list[int]]] = {}
    for gradient, number in zip(gradients, which, strict=True):
        aligned = gradient.data_ptr() % 16 == 0 and gradient.numel() % 8 == 0
        alike.setdefault(aligned, []).append([gradient.data_ptr(), gradient.numel(), number])
    device, dtype = gradients[0].device, gradients[0].dtype
    for aligned, places in alike.items():
        owner, start = blocks(tuple(size for _, size, _ in places), device)
        if not len(owner):
            continue
        with torch.cuda.device_of(owner):
            _multiply[(len(owner),)](  # pyright: ignore[reportIndexIssue]
                table(places, torch.int64, device), limits, factors, owner, start,
                G=DTYPES[dtype], ALIGNED=aligned, BLOCK=BLOCK, num_warps=8,
            )  # fmt: skip
