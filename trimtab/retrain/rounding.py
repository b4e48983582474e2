# SPDX-License-Identifier: Apache-2.0
"""Round to nearest: the quantizers of the 4-bit check, as pure functions.

They are those of the evaluation of OSP (arXiv 2506.19697 and its repository): quantized and at once dequantized
values, no calibration data, b bits.

    weight        one symmetric grid per output channel
                      s = p * max(amax, 1e-5) / (2^(b-1) - 1)       q = round(w / s) in [-2^(b-1), 2^(b-1) - 1]
                  p = 1, or by clip search that of 1.00, 0.99, ..., 0.21 with the least sum |q s - w|^2.4; the first on
                  ties. Clipping a few large weights pays when the many small ones gain more.
    activation    one asymmetric grid per token, from the token's own values
                      s = (hi - lo) / (2^b - 1)    zero = round(-lo / s)    q = round(x / s + zero) in [0, 2^b - 1]
                  lo = min(x, 0) and hi = max(x, 0) over a whole token. In groups (one head each), lo and hi are those
                  of the group, with or without 0 between them.
    keys, values  such groups, one per token and head; keys (and queries) are rotated first

A token of zeros stays zeros. A group of one repeated value has no range of its own: it gets 0 as its other end, and
the value stays exact. All arithmetic is in FP32 (FP64 for FP64), the result in the type of the input; the published
code computes in the type of the model. A NaN or Inf makes its whole grid NaN.

The rotation is the Hadamard matrix over the whole width where that is a power of two. For a width 2^m * n with n odd
it is the Hadamard matrix of 2^m times the Hartley matrix of n, cas(2 pi j k / n) / sqrt(n) with cas = cos + sin: just
as orthogonal, symmetric and its own inverse, every entry at most sqrt(2) times a Hadamard matrix's. (The published
code looks up Hadamard matrices of some twelve sizes in tables, 172 among them, and refuses all others.)
"""

import math

import torch
from torch import Tensor

from trimtab.checks import is_whole, require
from trimtab.errors import TrimtabError
from trimtab.linear.hadamard import rotate
from trimtab.linear.quantize import affine_quant

KEEP = 16
"""The number of bits that means: leave it as it is."""
SHRINKS = tuple(1 - i / 100 for i in range(80))
"""The factors of the clip search."""
POWER = 2.4
FLOOR = 1e-5
CHUNK = 2**18
"""Weights per pass of the clip search: its few temporary tensors stay small."""


def check_bits(bits: int, what: str = "bits") -> int:
    """Refuse a number of bits other than 2 to 8, or 16."""
    known = is_whole(bits, 2) and (bits <= 8 or bits == KEEP)
    require(known, f"{what} must be 2 to 8, or {KEEP} to leave it as it is", bits)
    return bits


def quantize_weight(
    w: Tensor,  # (out_features, in_features)
    bits: int,
    *,
    clip_search: bool = True,
) -> Tensor:
    """Round a weight to a symmetric grid per row; a new tensor of the same type.

    Without the clip search rounding a rounded weight again changes nothing. With it, it may: a clipped row can have
    the value -2^(b-1) s, which then counts as its amax.
    """
    if check_bits(bits) == KEEP or w.numel() == 0:
        return w.detach().clone()
    rows = max(1, CHUNK // w.shape[1])
    return torch.cat([_round_rows(part, bits, clip_search) for part in w.detach().split(rows)])


def _round_rows(w: Tensor, bits: int, clip_search: bool) -> Tensor:
    exact = wide(w)
    amax = exact.abs().amax(dim=1, keepdim=True).clamp(min=FLOOR)  # (rows, 1)
    zero, top = torch.full_like(amax, 2 ** (bits - 1)), 2 ** (bits - 1) - 1
    scale, least = amax / top, torch.full_like(amax, math.inf)
    for shrink in SHRINKS if clip_search else ():
        trial = shrink * amax / top
        error = affine_quant(exact, trial, zero, bits).sub_(exact).abs_().pow_(POWER).sum(dim=1, keepdim=True)
        better = error < least
        scale, least = torch.where(better, trial, scale), torch.where(better, error, least)
    return affine_quant(exact, scale, zero, bits).to(w.dtype)


def quantize_activation(
    x: Tensor,  # (..., features)
    bits: int,
    *,
    group: int | None = None,
) -> Tensor:
    """Round each token, or each group of `group` features of it, to an asymmetric grid of its own.

    The gradient is straight-through, with the grids held constant.
    """
    if check_bits(bits) == KEEP or x.numel() == 0:
        return x
    if group is not None and (not is_whole(group, 1) or x.shape[-1] % group):
        raise TrimtabError(
            f"a group must divide the {x.shape[-1]} features of the input, got {group!r}: give the size of a head, "
            "or None for whole tokens"
        )
    groups = wide(x).unflatten(-1, (-1, group or x.shape[-1]))  # (..., groups, group)
    lo, hi = groups.detach().amin(dim=-1, keepdim=True), groups.detach().amax(dim=-1, keepdim=True)
    with_zero = (lo == hi) if group is not None else torch.ones_like(lo, dtype=torch.bool)
    lo, hi = torch.where(with_zero, lo.clamp(max=0), lo), torch.where(with_zero, hi.clamp(min=0), hi)
    scale = (hi - lo) / (2**bits - 1)
    scale = torch.where(scale == 0, 2 / (2**bits - 1), scale)  # zeros (or what underflows to them): the grid of +-1
    return affine_quant(groups, scale, torch.round(-lo / scale), bits).flatten(-2).to(x.dtype)


def quantize_kv(
    q: Tensor,  # (batch, heads, seq, head_dim)
    k: Tensor,  # (batch, kv_heads, seq, head_dim)
    v: Tensor,  # (batch, kv_heads, seq, head_dim)
    bits: int,
    *,
    hadamard: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, and keys and values as a cache of `bits` would hold them: a grid per token and head.

    Queries and keys are rotated, which leaves their products as they were and spreads a key's outliers.
    """
    if hadamard:
        q, k = mix(q), mix(k)
    return q, quantize_activation(k, bits, group=k.shape[-1]), quantize_activation(v, bits, group=v.shape[-1])


def mix(x: Tensor) -> Tensor:
    """Rotate the last dimension by the orthogonal, symmetric matrix of this file's docstring."""
    width = x.shape[-1]
    if x.numel() == 0:
        return x
    size = width & -width  # the largest power of two that divides it
    y = rotate(wide(x), size, dim=-1)
    if size < width:
        index = torch.arange(width // size, dtype=torch.float64, device=x.device)
        angle = torch.outer(index, index).remainder_(len(index)) * (2 * math.pi / len(index))
        hartley = (angle.cos() + angle.sin()) / math.sqrt(len(index))
        with torch.autocast(x.device.type, enabled=False):  # which would narrow the product
            y = (hartley.to(y.dtype) @ y.unflatten(-1, (-1, size))).flatten(-2)
    return y.to(x.dtype)


def wide(x: Tensor) -> Tensor:
    """The type to compute in: FP32, or FP64 for FP64."""
    return x if x.dtype == torch.float64 else x.float()
