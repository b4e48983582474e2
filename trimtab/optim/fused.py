# SPDX-License-Identifier: Apache-2.0
"""SPAM as one Triton kernel: all parameters in one launch, each of p, g, m, v read once, p, m, v written once.

Besides the blocks of `launch.py` the kernel gets two tables:

    places    (tensors, 9) int64      addresses of p, g, m, v; number of elements; and of a sparse one its mask
    numbers   (tensors, 10) float32   the coefficients of its step: tensors of different groups, learning rates and ages
                                      share a launch

Only dtypes, sparsity and alignment split a step into several launches.

A block of a sparse parameter computes its own columns from the hash of `sparse.py`: the very same integers.
Differences to `kernels.spam_` are those of rounding: coefficients in FP32, and fused multiply-adds.

Importing this file needs Triton, which comes with torch's CUDA builds; `spam.py` imports it only then.
"""

# pyright: reportPrivateImportUsage=false
# (foreach operations are what torch.optim itself is written with)

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]
from torch import Tensor

from trimtab.optim import sparse
from trimtab.optim.kernels import Coefficients, Work, flat
from trimtab.optim.launch import BLOCK, blocks, table
from trimtab.optim.scaling import DTYPES

GOLDEN, FIRST, SECOND = (tl.constexpr(word) for word in (sparse.GOLDEN, sparse.FIRST, sparse.SECOND))
MASK34, MASK37, MASK31 = (tl.constexpr(mask) for mask in (sparse.MASK34, sparse.MASK37, sparse.MASK31))


@triton.jit
def _uniform31(counter, key):
    x = counter * GOLDEN + key
    x ^= (x >> 30) & MASK34
    x *= FIRST
    x ^= (x >> 27) & MASK37
    x *= SECOND
    return (x >> 33) & MASK31


@triton.jit
def _entry(at, key, first_row, cols, kept):
    """Where in the matrix the moments' element `at` belongs: `sparse.columns`, element by element."""
    row, slot = at // kept, at % kept
    start = slot * cols // kept
    width = (slot + 1) * cols // kept - start
    chosen = start + (_uniform31((first_row + row) * kept + slot, key) * width >> 31)
    turn = _uniform31(first_row + row, ~key) * cols >> 31
    chosen += tl.where(cols % kept != 0, turn, 0)
    return row * cols + tl.where(chosen >= cols, chosen - cols, chosen)


@triton.jit
def _spam(
    places, numbers, owner, start,
    P: tl.constexpr, G: tl.constexpr, SPARSE: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    which = tl.load(owner + block)
    place, number = places + which * 9, numbers + which * 10
    p_ptr = tl.load(place).to(tl.pointer_type(P))
    g_ptr = tl.load(place + 1).to(tl.pointer_type(G))
    m_ptr = tl.load(place + 2).to(tl.pointer_type(tl.float32))
    v_ptr = tl.load(place + 3).to(tl.pointer_type(tl.float32))
    size = tl.load(place + 4)
    if ALIGNED:  # else the compiler must assume the worst and loads word by word
        p_ptr, g_ptr = tl.multiple_of(p_ptr, 16), tl.multiple_of(g_ptr, 16)
        m_ptr, v_ptr = tl.multiple_of(m_ptr, 16), tl.multiple_of(v_ptr, 16)
        size = tl.multiple_of(size, 8)
    at = tl.multiple_of(tl.load(start + block), BLOCK) + tl.arange(0, BLOCK)
    inside = at < size
    entry = at
    if SPARSE:
        key, first_row, cols, kept = (tl.load(place + 5), tl.load(place + 6), tl.load(place + 7), tl.load(place + 8))
        entry = _entry(at, key, first_row, cols, kept)
    p = tl.load(p_ptr + entry, mask=inside, other=0.0).to(tl.float32)
    g = tl.load(g_ptr + entry, mask=inside, other=0.0).to(tl.float32)
    m = tl.load(m_ptr + at, mask=inside, other=0.0)
    v = tl.load(v_ptr + at, mask=inside, other=0.0)

    reset = tl.load(number) != 0
    m, v = tl.where(reset, 0.0, m), tl.where(reset, 0.0, v)  # not a product: a reset wipes NaN as well
    inverse, root, least = tl.load(number + 6), tl.load(number + 7), tl.load(number + 8)
    spike = (v - inverse * g * g < 0) & (v > least)  # inverse is 0 where nothing is clipped
    bound = tl.sqrt_rn(v) * root
    g = tl.where(spike, tl.where(g < 0, -bound, bound), g)
    m += tl.load(number + 1) * (g - m)
    v = tl.load(number + 2) * v + tl.load(number + 3) * g * g
    p -= tl.load(number + 4) * tl.div_rn(m, tl.sqrt_rn(v) + tl.load(number + 5))
    p *= tl.load(number + 9)
    tl.store(p_ptr + entry, p.to(P), mask=inside)
    tl.store(m_ptr + at, m, mask=inside)
    tl.store(v_ptr + at, v, mask=inside)


def takes(work: Work) -> bool:
    """Whether the kernel can do this one: usual dtypes, memory without gaps."""
    return work.p.dtype in DTYPES and work.g.dtype in DTYPES and _plain(work) is not None


def fused_(work: Sequence[Work]) -> None:
    """Update all tensors: one launch per device, pair of dtypes, kind of moments, and alignment."""
    kinds: dict[tuple[Any, ...], list[tuple[Work, Sequence[Tensor], list[int]]]] = {}
    for one in work:
        tensors = _plain(one)
        assert tensors is not None
        p, g, m, v = addresses = [tensor.data_ptr() for tensor in tensors]
        aligned = (p | g | m | v) % 16 == 0 and one.m.numel() % 8 == 0
        key = (one.p.device, one.p.dtype, one.g.dtype, one.mask is not None, aligned)
        # The tensors stay in the list: a gradient that had to be copied must outlive the launch.
        kinds.setdefault(key, []).append((one, tensors, addresses))
    for (device, p, g, is_sparse, aligned), kind in kinds.items():
        places = [[*addresses, one.m.numel(), *(one.mask or (0, 0, 1, 1))] for one, _, addresses in kind]
        numbers = [_numbers(one.c, is_sparse) for one, _, _ in kind]
        owner, start = blocks(tuple(row[4] for row in places), device)
        with torch.cuda.device_of(owner):
            _spam[(len(owner),)](  # pyright: ignore[reportIndexIssue]
                table(places, torch.int64, device), table(numbers, torch.float32, device), owner, start,
                P=DTYPES[p], G=DTYPES[g], SPARSE=is_sparse, ALIGNED=aligned, BLOCK=BLOCK, num_warps=8,
            )  # fmt: skip
    _decay_([one for one in work if one.mask is not None])


def _plain(one: Work) -> Sequence[Tensor] | None:
    """p, g, m and v with equal elements at equal places (g may be a copy), or None where that cannot be had."""
    p, g, m, v = one.p, one.g, one.m, one.v
    if not (p.is_contiguous() and m.is_contiguous() and v.is_contiguous()):
        return None if one.mask else flat(one)
    return p, g.contiguous(), m, v


def _decay_(work: Sequence[Work]) -> None:
    """The decay of sparse ones: of all entries, not only those with moments."""
    factors: dict[float, list[Tensor]] = {}
    for one in work:
        if one.c.decay:
            factors.setdefault(1 - one.c.decay, []).append(one.p)
    for factor, tensors in factors.items():
        torch._foreach_mul_(tensors, factor)


@lru_cache(maxsize=64)
def _numbers(c: Coefficients, is_sparse: bool) -> list[float]:
    inverse, root = (1 / c.threshold, math.sqrt(c.threshold)) if c.threshold < math.inf else (0.0, 0.0)
    rates = (1 - c.beta1, c.beta2, 1 - c.beta2, c.size, c.eps)
    least = -1.0 if c.literal else 0.0  # what v must exceed to be cut against
    return [float(c.reset), *rates, inverse, root, least, 1.0 if is_sparse else 1 - c.decay]
