# SPDX-License-Identifier: Apache-2.0
"""Matrix products with a scale per 128 numbers: DeepSeek-V3's block scaling on Hopper's matrix units.

An operand has its inner dimension last (see `real.py`), and its scales in one of two shapes:

    tile     1 x 128      each row by itself: activations and gradients, whose rows differ most
    square   128 x 128    weights, so that a weight and its transpose have the same scales

The hardware multiplies tile by square, square by tile and tile by tile. Along tokens a tile of the stored matrix is
(128, 1): dY is quantized twice for its two products, along features and along tokens, from one read.

What `torch.nn.functional.scaled_mm` wants of scales, all FP32, with K the inner dimension:

    tile     (outer, K / 128), with the rows next to each other in memory: strides (1, outer)
    square   (K / 128 rounded up to a multiple of 4, outer / 128), strides (1, that)

Both are the transpose of a plain matrix. The library (cuBLAS 12.9 or later) reads them 16 bytes at a time, so `outer`
is padded to a multiple of 16 and K to one of 128: zeros, with scale 1. Results are BF16 or FP32, a bias is added after.
Sums are kept in FP32 (no fast accumulation), as the paper asks.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from trimtab.devices import has_triton
from trimtab.linear.formats import FORMATS
from trimtab.linear.paths import Cast, Gemm
from trimtab.linear.quantize import from_groups, group_amax, spread, to_groups
from trimtab.linear.scales import amax_scale

SIDE = 128
"""Numbers of a tile; rows and columns of a square."""
OUTER = 16
"""The outer dimension is padded to a multiple of this."""
FMT = "e4m3"
"""The one format that these products take."""


class Tiled(NamedTuple):
    """One side of a product: (outer, inner) in E4M3 with padding, its scales, and which kind they are."""

    data: Tensor
    scale: Tensor
    square: bool
    outer: int
    """How many rows are not padding."""


def is_tiled(cast: Cast) -> bool:
    """Whether a cast has a scale per tile or square of 128."""
    return cast.group in ((1, SIDE), (SIDE, 1), (SIDE, SIDE))


def why_not(role: str, gemm: Gemm, inner_last: tuple[bool, bool]) -> str | None:
    """Why the product of two tiled operands does not exist; None if it does."""
    casts = [cast for cast in (gemm.left, gemm.right) if cast is not None]
    for cast, last in zip(casts, inner_last, strict=True):
        along = (1, SIDE) if last else (SIDE, 1)
        if cast.group not in (along, (SIDE, SIDE)):
            return f"tiles of {role} must lie along its inner dimension, {along} or {(SIDE, SIDE)}, got {cast.group}"
        if cast.fmt != FMT:
            return f"products with a scale per {cast.group} must be of {FMT}, got {cast.fmt} in {role}"
    if all(cast.group == (SIDE, SIDE) for cast in casts):
        return f"one side of {role} must have tiles along the inner dimension, got {(SIDE, SIDE)} on both"
    return None


def lacks(device: torch.device) -> str | None:
    """Why a CUDA device has no such products; None if it has."""
    if not hasattr(nn.functional, "scaled_mm"):
        return f"block scaling needs torch.nn.functional.scaled_mm (torch 2.10 or later), got torch {torch.__version__}"
    major, minor = torch.cuda.get_device_capability(device)
    if major != 9:
        return f"block scaling needs compute capability 9.x (Hopper), got {major}.{minor}"
    version = torch.version.cuda
    if version is None or tuple(map(int, version.split(".")[:2])) < (12, 9):
        return f"block scaling needs a torch built for CUDA 12.9 or later, got {version}"
    return None


def quantize(
    x: Tensor,  # (rows, columns)
    rows: Cast | None,
    columns: Cast | None,
    amaxes: tuple[Tensor | None, Tensor | None] = (None, None),
) -> tuple[Tiled | None, Tiled | None]:
    """A matrix as an operand with the columns inside, with the rows inside, or both from one read; None: not wanted.

    Args:
        amaxes: in place of what is measured, in the shapes of `quantize.group_amax`.
    """
    given = any(amax is not None for amax in amaxes)
    alike = rows is None or columns is None or rows.pow2_scale == columns.pow2_scale
    if x.is_cuda and has_triton() and alike and not given and x.numel():
        from trimtab.linear import kernels

        squares = tuple(None if cast is None else cast.group == (SIDE, SIDE) for cast in (rows, columns))
        pow2 = any(cast is not None and cast.pow2_scale for cast in (rows, columns))
        made = kernels.cast_tiles(x, FORMATS[FMT], squares[0], squares[1], outer=OUTER, pow2_scale=pow2)
        first, second = (
            None if one is None else Tiled(*one, bool(square), size)
            for one, square, size in zip(made, squares, x.shape, strict=True)
        )
        return first, second
    return (
        None if rows is None else _quantize(x, rows, amaxes[0]),
        None if columns is None else _quantize(x.t(), columns, None if amaxes[1] is None else amaxes[1].t()),
    )


def _quantize(x: Tensor, cast: Cast, amax: Tensor | None) -> Tiled:
    """The same of a matrix (outer, inner), by torch operations."""
    square, outer, fmt = cast.group == (SIDE, SIDE), x.shape[0], FORMATS[FMT]
    group = (SIDE if square else 1, SIDE)
    x = nn.functional.pad(x.float(), (0, -x.shape[1] % SIDE, 0, -outer % OUTER))
    if amax is None:
        amax = group_amax(x, group)
    elif not square:
        amax = nn.functional.pad(amax, (0, 0, 0, -outer % OUTER))
    scale = amax_scale(amax, fmt, pow2_scale=cast.pow2_scale)
    groups, _ = to_groups(x, group)
    y = (groups / spread(scale, group)).clamp(-fmt.max, fmt.max)
    y = torch.where(groups.isfinite(), y, torch.nan)  # also of a replaced scale
    data = from_groups(y, group, x.shape).to(torch.float8_e4m3fn).contiguous()
    if square:
        scale = nn.functional.pad(scale, (0, -scale.shape[1] % 4))
        return Tiled(data, scale.contiguous().t(), square, outer)
    found = torch.empty(scale.shape[::-1], device=x.device)  # its strides are right for a single column too
    return Tiled(data, found.copy_(scale.t()).t(), square, outer)


def multiply(a: Tiled, b: Tiled, dtype: torch.dtype, bias: Tensor | None = None) -> Tensor:
    """The product over the inner dimensions, (outer of a, outer of b)."""
    if not a.data.numel() or not b.data.numel():  # no tokens
        y = a.scale.new_zeros(a.outer, b.outer, dtype=dtype)
    else:
        kinds = nn.functional.ScalingType  # type: ignore[attr-defined]
        per = {False: kinds.BlockWise1x128, True: kinds.BlockWise128x128}
        y = nn.functional.scaled_mm(
            a.data,
            b.data.t(),
            a.scale,
            per[a.square],
            b.scale,
            per[b.square],
            output_dtype=torch.bfloat16 if dtype == torch.bfloat16 else torch.float32,
        )[: a.outer, : b.outer].to(dtype)
    return y if bias is None else y + bias
