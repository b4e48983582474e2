# SPDX-License-Identifier: Apache-2.0
"""Casts as single Triton launches: for the emulation (`amax_cast`), and into FP8 for real kernels (`cast_both`).

The usual cast of the emulation is: scale by amax, round to nearest, scale back.

`quantize.py` does this in about thirty launches, each over the whole tensor or a handful of scales: on a GPU the host
cannot issue them as fast as they run. Here a row finds its own amax, or is given one, and is read and written once. The
bits are those of `quantize.py` and `scales.py`, where the rules are explained; `tests/linear/test_cuda.py` holds both
together. Three things keep them equal:

- quotients are rounded (`div_rn`); the GPU's own `/` is off by up to two ulps;
- dividing by a power of two is a multiplication by its reciprocal, which is exact and has its bits computed;
- NaN is carried by hand, because a GPU's minimum and maximum drop it.

`cast_both` reads a matrix once and writes it in FP8 as it is, transposed, or both: the two layouts that matrix products
need (`real.py`). Its quotients are the same, so that what real kernels multiply is what the emulation multiplies.

Importing this file needs Triton; `quantize.py` and `real.py` import it only then.
"""

import math

import torch
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]
from torch import Tensor
from triton.language.extra import libdevice  # pyright: ignore[reportMissingImports]

from trimtab.linear.formats import Format

WIDEST = 16_384
"""The longest row that one program holds."""
FLAT = 4096
"""Elements of a program where the whole tensor shares one scale."""
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@triton.jit
def _pow2_ceil(x):
    return ((x.to(tl.int32, bitcast=True) + 0x007FFFFF) & 0x7F800000).to(tl.float32, bitcast=True)


@triton.jit
def _scale(amax, QMAX: tl.constexpr, POW2: tl.constexpr):
    """`scales.amax_scale`."""
    ratio = tl.div_rn(amax, QMAX)
    lifted = tl.div_rn(amax * 18446744073709551616.0, QMAX)
    tiny = (_pow2_ceil(lifted) * 5.421010862427522e-20).to(tl.int32, bitcast=True)
    tiny = tl.maximum(tiny, 1).to(tl.float32, bitcast=True)  # at least 2^-149, whose bits are 1
    scale = tl.where(ratio < 1.1754943508222875e-38, tiny, _pow2_ceil(ratio) if POW2 else ratio)
    scale = tl.where(amax == 0, 1.0, scale)
    return tl.where(amax < float("inf"), scale, float("nan"))


@triton.jit
def _round(x, scale, QMAX: tl.constexpr, LEAST: tl.constexpr, MANTISSA: tl.constexpr, SATURATE: tl.constexpr):
    """`quantize.scaled_round` with `scales.round_to`, to nearest."""
    y = tl.div_rn(x, scale)
    if SATURATE:
        y = tl.where(tl.abs(x) < float("inf"), tl.minimum(tl.maximum(y, -2 * QMAX), 2 * QMAX), float("nan"))
    power = tl.maximum(y.to(tl.int32, bitcast=True) & 0x7F800000, LEAST)  # exponents compare as integers
    step = (power - (MANTISSA << 23)).to(tl.float32, bitcast=True)
    inverse = (0x7F000000 - (power - (MANTISSA << 23))).to(tl.float32, bitcast=True)
    q = tl.minimum(tl.maximum(libdevice.rint(y * inverse) * step, -QMAX), QMAX)
    return tl.where(y != y, y, q) * scale


@triton.jit
def _rows(
    x_ptr, amax_ptr, out_ptr, cols,
    GIVEN: tl.constexpr, QMAX: tl.constexpr, LEAST: tl.constexpr, MANTISSA: tl.constexpr, POW2: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, WIDTH)
    x = tl.load(x_ptr + row * cols + at, mask=at < cols, other=0.0).to(tl.float32)
    if GIVEN:
        amax = tl.load(amax_ptr + row)
    else:
        size = tl.abs(x)
        amax = tl.max(tl.where(size < float("inf"), size, float("inf")))  # a NaN counts as infinite
    q = _round(x, _scale(amax, QMAX, POW2), QMAX, LEAST, MANTISSA, GIVEN)
    tl.store(out_ptr + row * cols + at, q.to(out_ptr.dtype.element_ty), mask=at < cols)


@triton.jit
def _whole(
    x_ptr, amax_ptr, out_ptr, size,
    GIVEN: tl.constexpr, QMAX: tl.constexpr, LEAST: tl.constexpr, MANTISSA: tl.constexpr, POW2: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * WIDTH + tl.arange(0, WIDTH)
    x = tl.load(x_ptr + at, mask=at < size, other=0.0).to(tl.float32)
    amax = tl.load(amax_ptr).to(tl.float32)
    q = _round(x, _scale(amax, QMAX, POW2), QMAX, LEAST, MANTISSA, GIVEN)
    tl.store(out_ptr + at, q.to(out_ptr.dtype.element_ty), mask=at < size)


def takes(x: Tensor, group: object) -> bool:
    """Whether a kernel can do this one: usual dtypes, one scale for the tensor or for each row that fits."""
    return x.dtype in DTYPES and x.numel() > 0 and (group == "tensor" or (group == "token" and x.shape[-1] <= WIDEST))


def amax_cast(x: Tensor, fmt: Format, group: str, *, pow2_scale: bool, amax: Tensor | None) -> Tensor:
    """x on the grid of the format; `amax` as in `quantize.fake_quant`."""
    x, given = x.contiguous(), amax is not None
    out = torch.empty_like(x)
    if group == "tensor" or (amax is not None and amax.dim() == 0):
        kernel, last, width = _whole, x.numel(), FLAT
        found = torch.linalg.vector_norm(x, torch.inf) if amax is None else amax  # one pass, and NaN stays NaN
        grid = (triton.cdiv(x.numel(), FLAT),)
    else:
        kernel, last, width = _rows, x.shape[-1], triton.next_power_of_2(x.shape[-1])
        found = x if amax is None else amax.contiguous()
        grid = (x.numel() // x.shape[-1],)
    least = (127 + round(math.log2(fmt.min_normal))) << 23  # its exponent field
    with torch.cuda.device_of(x):
        kernel[grid](  # pyright: ignore[reportIndexIssue]
            x, found, out, last,
            GIVEN=given, QMAX=fmt.max, LEAST=least, MANTISSA=fmt.mantissa_bits, POW2=pow2_scale,
            WIDTH=width, num_warps=4 if width <= 4096 else 8,
        )  # fmt: skip
    return out


@triton.jit
def _both(
    x_ptr, amax_ptr, rows_ptr, columns_ptr, scale_ptr, num_rows, num_columns, rows_pad, columns_pad, stride,
    PER: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, INTEGER: tl.constexpr, QMAX: tl.constexpr,
    POW2: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * HEIGHT + tl.arange(0, HEIGHT)
    column = tl.program_id(1).to(tl.int64) * WIDTH + tl.arange(0, WIDTH)
    inside = (row < num_rows)[:, None] & (column < num_columns)[None, :]
    x = tl.load(x_ptr + row[:, None] * stride + column[None, :], mask=inside, other=0.0).to(tl.float32)
    if PER == "tensor":
        scale = _scale(tl.load(amax_ptr).to(tl.float32), QMAX, POW2)
        if tl.program_id(0) + tl.program_id(1) == 0:
            tl.store(scale_ptr, scale)
        divisor = tl.broadcast_to(scale, (HEIGHT, WIDTH))
    elif PER == "row":
        scale = _scale(tl.load(amax_ptr + row, mask=row < num_rows, other=0.0).to(tl.float32), QMAX, POW2)
        if tl.program_id(1) == 0:
            tl.store(scale_ptr + row, scale, mask=row < num_rows)
        divisor = tl.broadcast_to(scale[:, None], (HEIGHT, WIDTH))
    else:
        scale = _scale(tl.load(amax_ptr + column, mask=column < num_columns, other=0.0).to(tl.float32), QMAX, POW2)
        if tl.program_id(0) == 0:
            tl.store(scale_ptr + column, scale, mask=column < num_columns)
        divisor = tl.broadcast_to(scale[None, :], (HEIGHT, WIDTH))
    y = tl.div_rn(x, divisor)
    y = tl.where(y != y, y, tl.minimum(tl.maximum(y, -QMAX), QMAX))
    y = tl.where(tl.abs(x) < float("inf"), y, float("nan"))
    if INTEGER:
        y = libdevice.rint(y)
    q = y.to(rows_ptr.dtype.element_ty)
    if ROWS:  # zeros fill the padding: what lies outside was loaded as zero
        place = rows_ptr + row[:, None] * columns_pad + column[None, :]
        mask = (row < num_rows)[:, None] & (column < columns_pad)[None, :]
        tl.store(place, q, mask=mask)
    if COLUMNS:
        place = columns_ptr + column[:, None] * rows_pad + row[None, :]
        mask = (column < num_columns)[:, None] & (row < rows_pad)[None, :]
        tl.store(place, tl.trans(q), mask=mask)


def cast_both(
    x: Tensor,  # (rows, columns)
    fmt: Format,
    dtype: torch.dtype,
    amax: Tensor,  # one number, (rows, 1) or (1, columns)
    wanted: tuple[bool, bool],
    *,
    align: int,
    pow2_scale: bool = False,
) -> tuple[tuple[Tensor, Tensor] | None, tuple[Tensor, Tensor] | None]:
    """x in few bits as it is, transposed, or both from one read, each with its scale; the inner side padded with zeros.

    Finite values beyond the scale saturate, others become NaN, and a non-finite amax makes the scale NaN.
    """
    x = x if x.stride(1) == 1 else x.contiguous()
    num_rows, num_columns = x.shape
    rows_pad, columns_pad = (-(-size // align) * align for size in x.shape)
    per = "tensor" if amax.dim() == 0 else "row" if amax.shape[1] == 1 else "column"
    shape = () if per == "tensor" else (amax.numel(), 1)
    scale = torch.empty(shape, dtype=torch.float32, device=x.device)
    rows = torch.empty((num_rows, columns_pad) if wanted[0] else (0, 0), dtype=dtype, device=x.device)
    columns = torch.empty((num_columns, rows_pad) if wanted[1] else (0, 0), dtype=dtype, device=x.device)
    height, width = (64, 64) if wanted[1] else (16, 256)
    grid = (triton.cdiv(rows_pad if wanted[1] else num_rows, height), triton.cdiv(columns_pad, width))
    with torch.cuda.device_of(x):
        _both[grid](  # pyright: ignore[reportIndexIssue]
            x, amax.contiguous(), rows, columns, scale, num_rows, num_columns, rows_pad, columns_pad, x.stride(0),
            PER=per, ROWS=wanted[0], COLUMNS=wanted[1], INTEGER=fmt.is_integer, QMAX=fmt.max, POW2=pow2_scale,
            HEIGHT=height, WIDTH=width, num_warps=4,
        )  # fmt: skip
    return (rows, scale) if wanted[0] else None, (columns, scale) if wanted[1] else None
