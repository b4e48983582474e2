# SPDX-License-Identifier: Apache-2.0
"""Casts as single Triton launches: for the emulation, for real kernels, and into packed codes.

    amax_cast               to a format and back, for the emulation
    cast_both, cast_tiles   into FP8, in the layouts that matrix products need
    cast_together           some weights into FP8 at once
    past_amax               the amax of delayed scaling, and its history moved on
    pack, unpack            into codes of 4 or 8 bits, and back

The usual cast of the emulation is: scale by amax, round to nearest, scale back.

`quantize.py` does this in about thirty launches, each over the whole tensor or a handful of scales: on a GPU the host
cannot issue them as fast as they run. Here a row finds its own amax, or is given one, and is read and written once. The
bits are those of `quantize.py` and `scales.py`, where the rules are explained; `tests/linear/test_cuda.py` holds both
together. Three things keep them equal:

- quotients are rounded (`div_rn`, `_narrow`); the GPU's own `/` is off by up to two ulps;
- dividing by a power of two is a multiplication by its reciprocal, which is exact and has its bits computed;
- NaN is carried by hand, because a GPU's minimum and maximum drop it.

`cast_both` reads a matrix once and writes it in FP8 as it is, transposed, or both: the two layouts that matrix products
need (`real.py`). Its quotients are the same, so that what real kernels multiply is what the emulation multiplies.
`cast_tiles` does so with a scale per 128 numbers or 128 x 128, which it finds on the way (`tiles.py`).

One conversion to FP8 must not feed both layouts. Where a converted pair is stored packed and its upper byte is wanted
for the transpose too, ptxas 12.8 (Triton 3.6) reads that byte from a register before it is written; 13.0 does not. A
16-bit input is transposed before it is converted, so its two layouts have conversions of their own; a wider one that
wants both gets two launches (`_apart`).

`pack` and `unpack` write a token in codes of 4 or 8 bits and read it again (`packing.py`). A code is cut out of the
FP32 bits with integer operations, so that GPUs without FP8 can do it too.

Importing this file needs Triton; the files that use it import it only then.
"""

import itertools
import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

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
Both = tuple[tuple[Tensor, Tensor] | None, tuple[Tensor, Tensor] | None]
"""Numbers and scale in each of two layouts, None where it was not asked for."""


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
def _grid(y, QMAX: tl.constexpr, LEAST: tl.constexpr, MANTISSA: tl.constexpr):
    """`scales.round_to`, to nearest."""
    power = tl.maximum(y.to(tl.int32, bitcast=True) & 0x7F800000, LEAST)  # exponents compare as integers
    step = (power - (MANTISSA << 23)).to(tl.float32, bitcast=True)
    inverse = (0x7F000000 - (power - (MANTISSA << 23))).to(tl.float32, bitcast=True)
    q = tl.minimum(tl.maximum(libdevice.rint(y * inverse) * step, -QMAX), QMAX)
    return tl.where(y != y, y, q)


@triton.jit
def _round(x, scale, QMAX: tl.constexpr, LEAST: tl.constexpr, MANTISSA: tl.constexpr, SATURATE: tl.constexpr):
    """`quantize.scaled_round`."""
    y = tl.div_rn(x, scale)
    if SATURATE:
        y = tl.where(tl.abs(x) < float("inf"), tl.minimum(tl.maximum(y, -2 * QMAX), 2 * QMAX), float("nan"))
    return _grid(y, QMAX, LEAST, MANTISSA) * scale


@triton.jit
def _sizes(x):
    """Magnitudes for an amax: a NaN counts as infinite, because a GPU's maximum drops it."""
    size = tl.abs(x)
    return tl.where(size < float("inf"), size, float("inf"))


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
        amax = tl.max(_sizes(x))
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


_empty_cuda = getattr(torch._C._dynamo.guards, "_empty_strided_cuda", None)  # pyright: ignore[reportAttributeAccessIssue]
"""What compiled code allocates with, in half the time."""


def _new_cuda(_: Tensor, shape: tuple[int, ...], *, dtype: torch.dtype) -> Tensor:
    """A matrix or a number on the current device, without values."""
    assert _empty_cuda is not None
    return _empty_cuda(shape, (shape[1], 1) if shape else (), dtype)


def _is_elsewhere(x: Tensor) -> bool:
    """Whether x is not on the current device; a CPU tensor comes from Triton's interpreter."""
    return x.is_cuda and x.device.index != torch.cuda.current_device()


def _device(x: Tensor) -> AbstractContextManager[Any]:
    """Launch where x is."""
    return torch.cuda.device(x.device) if _is_elsewhere(x) else nullcontext()


_ready: dict[tuple[Any, ...], "_Launch"] = {}
"""What `cast_both` has launched before, by all that Triton makes a binary for: types, numbers, alignments. Triton
itself looks at every argument of every launch, which takes longer than a small cast."""
MOST = 4096
"""How many of them are kept: batches may have a new length each time."""
TOGETHER = 8
"""How many tensors `cast_together` takes."""
_joint: dict[tuple[Any, ...], Any] = {}
"""What it has launched before."""


def _apart(x: Tensor, both: bool) -> bool:
    """Whether two layouts with equal numbers need two launches: see the opening of this file."""
    return both and x.element_size() > 2


def _least(fmt: Format) -> int:
    """The exponent field of the smallest normal number, as FP32 bits."""
    return (127 + round(math.log2(fmt.min_normal))) << 23


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
    with _device(x):
        kernel[grid](  # pyright: ignore[reportIndexIssue]
            x, found, out, last,
            GIVEN=given, QMAX=fmt.max, LEAST=_least(fmt), MANTISSA=fmt.mantissa_bits, POW2=pow2_scale,
            WIDTH=width, num_warps=4 if width <= 4096 else 8,
        )  # fmt: skip
    return out


@triton.jit
def _prepare(scale):
    """What `_narrow` divides by: a power of two that brings the scale near 1, their product, and 1 over that."""
    lift = tl.where(scale < 9.094947017729282e-13, 1.2676506002282294e30, 1.0)  # below 2^-40: 2^100
    lift = tl.where(scale > 1.152921504606847e18, 8.673617379884035e-19, lift)  # above 2^60: 2^-60
    lifted = scale * lift
    return lift, lifted, tl.div_rn(1.0, lifted)


@triton.jit
def _narrow(x, lift, lifted, inverse, QMAX: tl.constexpr, SATURATE: tl.constexpr):
    """x / scale, rounded to nearest: an estimate, by how much it exceeds, and the correction that this asks for.

    `div_rn` has three times the operations, and a cast would wait for them rather than for memory. A measured amax
    keeps every value in range and makes the scale NaN if one is not finite; one that came from elsewhere does not.
    """
    near = x * lift
    q = near * inverse
    y = tl.fma(tl.fma(q, lifted, -near), -inverse, q)  # with these signs a negative zero stays one
    if SATURATE:
        y = tl.where(tl.abs(q) < 2 * QMAX, y, q)
        y = tl.where(y != y, y, tl.minimum(tl.maximum(y, -QMAX), QMAX))
        y = tl.where(tl.abs(x) < float("inf"), y, float("nan"))
    return y


@triton.jit
def _both(
    x_ptr, amax_ptr, rows_ptr, columns_ptr, scale_ptr, num_rows, num_columns, rows_pad, columns_pad, stride,
    PER: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, INTEGER: tl.constexpr, QMAX: tl.constexpr,
    POW2: tl.constexpr, SATURATE: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * HEIGHT + tl.arange(0, HEIGHT)
    column = tl.program_id(1).to(tl.int64) * WIDTH + tl.arange(0, WIDTH)
    inside = (row < num_rows)[:, None] & (column < num_columns)[None, :]
    x = tl.load(x_ptr + row[:, None] * stride + column[None, :], mask=inside, other=0.0).to(tl.float32)
    if PER == "tensor":
        scale = _scale(tl.load(amax_ptr).to(tl.float32), QMAX, POW2)
        if tl.program_id(0) + tl.program_id(1) == 0:
            tl.store(scale_ptr, scale)
        lift, lifted, inverse = _prepare(scale)
    elif PER == "row":
        scale = _scale(tl.load(amax_ptr + row, mask=row < num_rows, other=0.0).to(tl.float32), QMAX, POW2)
        if tl.program_id(1) == 0:
            tl.store(scale_ptr + row, scale, mask=row < num_rows)
        lift, lifted, inverse = _prepare(scale[:, None])
    else:
        scale = _scale(tl.load(amax_ptr + column, mask=column < num_columns, other=0.0).to(tl.float32), QMAX, POW2)
        if tl.program_id(0) == 0:
            tl.store(scale_ptr + column, scale, mask=column < num_columns)
        lift, lifted, inverse = _prepare(scale[None, :])
    y = _narrow(x, lift, lifted, inverse, QMAX, SATURATE)
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
    saturate: bool = True,
) -> Both:
    """x in few bits as it is, transposed, or both from one read, each with its scale; the inner side padded with zeros.

    Finite values beyond the scale saturate, others become NaN, and a non-finite amax makes the scale NaN.

    Args:
        saturate: False only with the amax of this very x, which leaves nothing to saturate.
    """
    if x.stride(1) != 1:
        x = x.contiguous()
    if not amax.is_contiguous():
        amax = amax.contiguous()
    key = (
        x.device, x.dtype, x.shape, x.stride(0), x.data_ptr() % 16, amax.dtype, amax.shape, amax.data_ptr() % 16,
        fmt.name, dtype, wanted, align, pow2_scale, saturate,
    )  # fmt: skip
    ready = _ready.get(key)
    if ready is not None and not _is_elsewhere(x):
        return ready(x, amax)
    with _device(x):
        if ready is not None:
            return ready(x, amax)
        if _apart(x, all(wanted) and not fmt.is_integer):
            options = {"align": align, "pow2_scale": pow2_scale, "saturate": saturate}
            first, _ = cast_both(x, fmt, dtype, amax, (True, False), **options)
            _, second = cast_both(x, fmt, dtype, amax, (False, True), **options)
            return first, second
        launch = _Launch(x, fmt, dtype, amax, wanted, align, pow2_scale, saturate)
        made = launch(x, amax)
        if launch.binary is not None:  # an interpreter has nothing to keep
            if len(_ready) == MOST:
                _ready.clear()
            _ready[key] = launch
        return made


class _Launch:
    """One kind of cast, with all of it decided that does not depend on where the numbers lie."""

    def __init__(
        self,
        x: Tensor,
        fmt: Format,
        dtype: torch.dtype,
        amax: Tensor,
        wanted: tuple[bool, bool],
        align: int,
        pow2_scale: bool,
        saturate: bool,
    ) -> None:
        num_rows, num_columns = x.shape
        rows_pad, columns_pad = -(-num_rows // align) * align, -(-num_columns // align) * align
        per = "tensor" if amax.dim() == 0 else "row" if amax.shape[1] == 1 else "column"
        height, width, self._warps = (4, 1024, 8) if not wanted[1] else (32, 64 if wanted[0] else 128, 4)  # measured
        self._grid = (-(-(rows_pad if wanted[1] else num_rows) // height), -(-columns_pad // width), 1)
        self._shapes = [(num_rows, columns_pad) if wanted[0] else None, (num_columns, rows_pad) if wanted[1] else None]
        self._dtype, self._scales = dtype, () if per == "tensor" else (amax.numel(), 1)
        self._new = _new_cuda if x.is_cuda and _empty_cuda is not None else Tensor.new_empty
        self._rest = (
            num_rows, num_columns, rows_pad, columns_pad, x.stride(0),
            per, *wanted, fmt.is_integer, fmt.max, pow2_scale, saturate, height, width,
        )  # fmt: skip
        self.binary: Any = None

    def __call__(self, x: Tensor, amax: Tensor) -> Both:
        """Launch it; from the second time on without Triton's search."""
        (first, second), new = self._shapes, self._new
        scale = new(x, self._scales, dtype=torch.float32)
        rows = None if first is None else new(x, first, dtype=self._dtype)
        columns = None if second is None else new(x, second, dtype=self._dtype)
        # A kernel wants an address even where it writes nothing.
        args = x, amax, columns if rows is None else rows, rows if columns is None else columns, scale, *self._rest
        if self.binary is None:
            made = _both[self._grid](*args, num_warps=self._warps)  # pyright: ignore[reportIndexIssue]
            self.binary = None if made is None else made[self._grid]
        else:
            self.binary(*args, stream=torch._C._cuda_getCurrentRawStream(x.device.index))  # pyright: ignore
        return None if rows is None else (rows, scale), None if columns is None else (columns, scale)


@triton.jit
def _piece(x_ptr, amax_ptr, out_ptr, scale_ptr, piece, QMAX: tl.constexpr, POW2: tl.constexpr, SIZE: tl.constexpr):
    """One piece of a tensor with one scale."""
    at = piece.to(tl.int64) * SIZE + tl.arange(0, SIZE)
    scale = _scale(tl.load(amax_ptr).to(tl.float32), QMAX, POW2)
    if piece == 0:
        tl.store(scale_ptr, scale)
    lift, lifted, inverse = _prepare(scale)
    y = _narrow(tl.load(x_ptr + at).to(tl.float32), lift, lifted, inverse, QMAX, False)
    tl.store(out_ptr + at, y.to(out_ptr.dtype.element_ty))


@triton.jit(do_not_specialize=["end0", "end1", "end2", "end3", "end4", "end5", "end6"])
def _together(
    x0, x1, x2, x3, x4, x5, x6, x7, amax0, amax1, amax2, amax3, amax4, amax5, amax6, amax7, out_ptr, scale_ptr,
    end0, end1, end2, end3, end4, end5, end6, QMAX: tl.constexpr, POW2: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0)
    if at < end0:
        _piece(x0, amax0, out_ptr, scale_ptr, at, QMAX, POW2, SIZE)
    elif at < end1:
        _piece(x1, amax1, out_ptr + end0.to(tl.int64) * SIZE, scale_ptr + 4, at - end0, QMAX, POW2, SIZE)
    elif at < end2:
        _piece(x2, amax2, out_ptr + end1.to(tl.int64) * SIZE, scale_ptr + 8, at - end1, QMAX, POW2, SIZE)
    elif at < end3:
        _piece(x3, amax3, out_ptr + end2.to(tl.int64) * SIZE, scale_ptr + 12, at - end2, QMAX, POW2, SIZE)
    elif at < end4:
        _piece(x4, amax4, out_ptr + end3.to(tl.int64) * SIZE, scale_ptr + 16, at - end3, QMAX, POW2, SIZE)
    elif at < end5:
        _piece(x5, amax5, out_ptr + end4.to(tl.int64) * SIZE, scale_ptr + 20, at - end4, QMAX, POW2, SIZE)
    elif at < end6:
        _piece(x6, amax6, out_ptr + end5.to(tl.int64) * SIZE, scale_ptr + 24, at - end5, QMAX, POW2, SIZE)
    else:
        _piece(x7, amax7, out_ptr + end6.to(tl.int64) * SIZE, scale_ptr + 28, at - end6, QMAX, POW2, SIZE)


def takes_together(tensors: Sequence[Tensor]) -> bool:
    """Whether one launch can cast these: as many as it has arguments for, each a whole number of pieces."""
    return 1 < len(tensors) <= TOGETHER and all(
        x.numel() % FLAT == 0 and x.numel() > 0 and x.is_contiguous() and x.data_ptr() % 16 == 0 for x in tensors
    )


def cast_together(
    tensors: Sequence[Tensor], fmt: Format, dtype: torch.dtype, amaxes: Sequence[Tensor], *, pow2_scale: bool
) -> list[tuple[Tensor, Tensor]]:
    """Some tensors of one type in few bits, each with the scale of its own amax, from one launch.

    Args:
        amaxes: what these very tensors measure, so that nothing lies beyond a scale.
    """
    sizes = [x.numel() for x in tensors]
    ends = list(itertools.accumulate(size // FLAT for size in sizes))
    first, missing = tensors[0], TOGETHER - len(tensors)
    out = first.new_empty(sum(sizes), dtype=dtype)
    scales = first.new_empty(TOGETHER, 4, dtype=torch.float32)  # a product wants each on 16 bytes
    grid = (ends[-1], 1, 1)
    args = (
        *tensors, *[first] * missing, *amaxes, *[amaxes[0]] * missing, out, scales,
        *ends[:-1], *ends[-1:] * missing, fmt.max, pow2_scale, FLAT,
    )  # fmt: skip
    aligned = tuple(x.data_ptr() % 16 for x in amaxes)
    key = first.device, first.dtype, amaxes[0].dtype, dtype, fmt.name, pow2_scale, aligned
    ready = _joint.get(key)
    with _device(first):
        if ready is None:
            _joint[key] = _together[grid](*args, num_warps=8)  # pyright: ignore[reportIndexIssue]
        else:
            ready[grid](*args, stream=torch._C._cuda_getCurrentRawStream(first.device.index))  # pyright: ignore
    parts = zip(out.split(sizes), tensors, scales[:, 0].unbind()[: len(tensors)], strict=True)
    return [(data.view(x.shape), scale) for data, x, scale in parts]


@triton.jit(do_not_specialize=["place"])
def _past(history_ptr, current_ptr, past_ptr, place, SIZE: tl.constexpr, REMEMBER: tl.constexpr, WIDTH: tl.constexpr):
    at = tl.arange(0, WIDTH)
    past = tl.max(tl.load(history_ptr + at, mask=at < SIZE, other=0.0))
    current = tl.load(current_ptr)
    tl.store(past_ptr, tl.where(past > 0, past, current))
    if REMEMBER:
        tl.store(history_ptr + place, tl.where(tl.abs(current) < float("inf"), current, 0.0))


def past_amax(history: Tensor, current: Tensor, place: int | None) -> Tensor:
    """The largest of a history, or `current` while all of it is 0; a finite `current` is put at `place`, else a 0."""
    past = torch.empty_like(current)
    size, width = len(history), triton.next_power_of_2(len(history))
    with _device(history):  # one warp: every read is done before the write
        _past[(1,)](history, current, past, place or 0, size, place is not None, width, num_warps=1)  # pyright: ignore[reportIndexIssue]
    return past


@triton.jit
def _square_scale(scale_ptr, scale, outer, inner, last, height):
    """Store the scale of a square; the last one of a column also fills its padding, with zeros."""
    at = tl.arange(0, 4)
    mask = (at == 0) | ((inner == last) & (inner + at < height))
    tl.store(scale_ptr + outer * height + inner + at, tl.where(at == 0, scale, 0.0), mask=mask)


@triton.jit
def _tiles(
    x_ptr, rows_ptr, columns_ptr, row_scale_ptr, column_scale_ptr, num_rows, num_columns,
    row_outer, row_inner, row_height, column_outer, column_inner, column_height, stride,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, ROW_SQUARE: tl.constexpr, COLUMN_SQUARE: tl.constexpr,
    QMAX: tl.constexpr, POW2: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * HEIGHT + tl.arange(0, HEIGHT)
    column = tl.program_id(1).to(tl.int64) * WIDTH + tl.arange(0, WIDTH)
    down, across = tl.program_id(0).to(tl.int64) * HEIGHT // 128, tl.program_id(1).to(tl.int64) * WIDTH // 128
    inside = (row < num_rows)[:, None] & (column < num_columns)[None, :]
    x = tl.load(x_ptr + row[:, None] * stride + column[None, :], mask=inside, other=0.0).to(tl.float32)
    size = _sizes(x)
    if ROWS:
        if ROW_SQUARE:
            scale = _scale(tl.max(tl.max(size, axis=1), axis=0), QMAX, POW2)
            _square_scale(row_scale_ptr, scale, down, across, tl.num_programs(1) - 1, row_height)
            lift, lifted, inverse = _prepare(scale)
        else:
            scale = _scale(tl.max(size, axis=1), QMAX, POW2)
            tl.store(row_scale_ptr + across * row_outer + row, scale, mask=row < row_outer)
            lift, lifted, inverse = _prepare(scale[:, None])
        q = _narrow(x, lift, lifted, inverse, QMAX, False).to(rows_ptr.dtype.element_ty)
        place = rows_ptr + row[:, None] * row_inner + column[None, :]
        tl.store(place, q, mask=(row < row_outer)[:, None] & (column < row_inner)[None, :])
    if COLUMNS:
        if COLUMN_SQUARE:
            scale = _scale(tl.max(tl.max(size, axis=1), axis=0), QMAX, POW2)
            _square_scale(column_scale_ptr, scale, across, down, tl.num_programs(0) - 1, column_height)
            lift, lifted, inverse = _prepare(scale)
        else:
            scale = _scale(tl.max(size, axis=0), QMAX, POW2)
            tl.store(column_scale_ptr + down * column_outer + column, scale, mask=column < column_outer)
            lift, lifted, inverse = _prepare(scale[None, :])
        q = _narrow(x, lift, lifted, inverse, QMAX, False).to(columns_ptr.dtype.element_ty)
        place = columns_ptr + column[:, None] * column_inner + row[None, :]
        tl.store(place, tl.trans(q), mask=(column < column_outer)[:, None] & (row < column_inner)[None, :])


def cast_tiles(
    x: Tensor,  # (rows, columns)
    fmt: Format,
    rows: bool | None,
    columns: bool | None,
    *,
    outer: int,
    pow2_scale: bool = False,
) -> tuple[tuple[Tensor, Tensor] | None, tuple[Tensor, Tensor] | None]:
    """x in E4M3 as it is, transposed, or both from one read, with scales as `tiles.py` lays them out.

    Args:
        rows, columns: of each layout, whether a scale is for a square of 128 x 128 or a tile of 128; None: not wanted.
        outer: the outer dimension is padded to a multiple of this, the inner one to a multiple of 128.
    """
    if _apart(x, rows is True and columns is True):
        first, _ = cast_tiles(x, fmt, True, None, outer=outer, pow2_scale=pow2_scale)
        _, second = cast_tiles(x, fmt, None, True, outer=outer, pow2_scale=pow2_scale)
        return first, second
    x, side = x if x.stride(1) == 1 else x.contiguous(), 128
    blocks = [triton.cdiv(size, side) for size in x.shape]
    made = []
    for square, size, (across, along) in zip((rows, columns), x.shape, (blocks, blocks[::-1]), strict=True):
        if square is None:
            made.append((x.new_empty(0, 0, dtype=torch.float8_e4m3fn), x.new_empty(0, 0, dtype=torch.float32)))
            continue
        padded, height = triton.cdiv(size, outer) * outer, triton.cdiv(along, 4) * 4
        data = torch.empty(padded, along * side, dtype=torch.float8_e4m3fn, device=x.device)
        shape = (across, height) if square else (along, padded)
        made.append((data, torch.empty(shape, dtype=torch.float32, device=x.device).t()))
    (first, row_scale), (second, column_scale) = made
    # A program has its groups as a whole: a tile one way leaves the other way free.
    height = 16 if columns is None and rows is False else side
    width = 32 if rows is None and columns is False else side
    grid = (blocks[0] * side // height, blocks[1] * side // width)
    with _device(x):
        _tiles[grid](  # pyright: ignore[reportIndexIssue]
            x, first, second, row_scale, column_scale, *x.shape,
            *first.shape, row_scale.shape[0], *second.shape, column_scale.shape[0], x.stride(0),
            ROWS=rows is not None, COLUMNS=columns is not None, ROW_SQUARE=bool(rows), COLUMN_SQUARE=bool(columns),
            QMAX=fmt.max, POW2=pow2_scale, HEIGHT=height, WIDTH=width,
            num_warps=4 if height * width < side * side else 16,
        )  # fmt: skip
    return None if rows is None else made[0], None if columns is None else made[1]


@triton.jit
def _encode(
    q, LEAST: tl.constexpr, STEP: tl.constexpr, MANTISSA: tl.constexpr, INTEGER: tl.constexpr, BITS: tl.constexpr
):
    """The code of a number on the grid: sign, exponent and mantissa, or an integer (in 4 bits plus 8)."""
    if INTEGER:
        number = tl.where(q != q, 0.0, q).to(tl.int32)
        return number + 8 if BITS == 4 else number & 255
    bits = q.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    normal = (size >> (23 - MANTISSA)) - (((LEAST >> 23) - 1) << MANTISSA)
    small = (tl.abs(tl.where(q != q, 0.0, q)) * (1.0 / STEP)).to(tl.int32)
    code = tl.where(size < LEAST, small, tl.minimum(normal, (1 << (BITS - 1)) - 1))
    return code | (((bits >> 31) & 1) << (BITS - 1))


@triton.jit
def _decode(
    code, LEAST: tl.constexpr, STEP: tl.constexpr, MANTISSA: tl.constexpr, INTEGER: tl.constexpr, BITS: tl.constexpr
):
    """The number of a code."""
    if INTEGER:
        number = code - 8 if BITS == 4 else (code << 24) >> 24
        return number.to(tl.float32)
    size = code & ((1 << (BITS - 1)) - 1)
    normal = ((size + (((LEAST >> 23) - 1) << MANTISSA)) << (23 - MANTISSA)).to(tl.float32, bitcast=True)
    if BITS == 8:
        normal = tl.where(size == 127, float("nan"), normal)
    number = tl.where(size < (1 << MANTISSA), size.to(tl.float32) * STEP, normal)
    return (number.to(tl.int32, bitcast=True) | ((code >> (BITS - 1)) << 31)).to(tl.float32, bitcast=True)


@triton.jit
def _pack(
    x_ptr, amax_ptr, codes_ptr, scale_ptr, cols, stride, width,
    GIVEN: tl.constexpr, QMAX: tl.constexpr, LEAST: tl.constexpr, STEP: tl.constexpr, MANTISSA: tl.constexpr,
    INTEGER: tl.constexpr, BITS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    start = tl.program_id(1) * WIDTH
    at = start + tl.arange(0, WIDTH)
    x = tl.load(x_ptr + row * stride + at, mask=at < cols, other=0.0).to(tl.float32)
    amax = tl.load(amax_ptr + row) if GIVEN else tl.max(_sizes(x))
    scale = _scale(amax, QMAX, False)
    if start == 0:
        tl.store(scale_ptr + row, scale)
    code = _encode(_grid(tl.div_rn(x, scale), QMAX, LEAST, MANTISSA), LEAST, STEP, MANTISSA, INTEGER, BITS)
    if BITS == 4:
        even, odd = tl.split(tl.reshape(tl.where(at < cols, code, 0), (WIDTH // 2, 2)))
        place = start // 2 + tl.arange(0, WIDTH // 2)
        tl.store(codes_ptr + row * width + place, (even | (odd << 4)).to(tl.uint8), mask=place < width)
    else:
        tl.store(codes_ptr + row * width + at, code.to(tl.uint8), mask=at < cols)


@triton.jit
def _unpack(
    codes_ptr, scale_ptr, out_ptr, cols, width,
    LEAST: tl.constexpr, STEP: tl.constexpr, MANTISSA: tl.constexpr, INTEGER: tl.constexpr, BITS: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    start = tl.program_id(1) * WIDTH
    at = start + tl.arange(0, WIDTH)
    if BITS == 4:
        place = start // 2 + tl.arange(0, WIDTH // 2)
        pair = tl.load(codes_ptr + row * width + place, mask=place < width, other=0).to(tl.int32)
        code = tl.reshape(tl.join(pair & 15, pair >> 4), (WIDTH,))
    else:
        code = tl.load(codes_ptr + row * width + at, mask=at < cols, other=0).to(tl.int32)
    x = _decode(code, LEAST, STEP, MANTISSA, INTEGER, BITS) * tl.load(scale_ptr + row)
    tl.store(out_ptr + row * cols + at, x.to(out_ptr.dtype.element_ty), mask=at < cols)


def pack(x: Tensor, fmt: Format, bits: int) -> tuple[Tensor, Tensor]:
    """`packing.pack` with measured scales: tokens (T, K) as codes of 4 or 8 bits, and scales (T, 1)."""
    x = x if x.stride(1) == 1 else x.contiguous()
    tokens, cols = x.shape
    width, given = cols if bits == 8 else triton.cdiv(cols, 2), cols > WIDEST
    codes = torch.empty(tokens, width, dtype=torch.uint8, device=x.device)
    scale = torch.empty(tokens, 1, dtype=torch.float32, device=x.device)
    found = torch.linalg.vector_norm(x, torch.inf, dim=1).float() if given else x
    block = FLAT if given else max(triton.next_power_of_2(cols), 2)
    with _device(x):
        _pack[(tokens, triton.cdiv(cols, block))](  # pyright: ignore[reportIndexIssue]
            x, found, codes, scale, cols, x.stride(0), width,
            GIVEN=given, QMAX=fmt.max, LEAST=_least(fmt), STEP=fmt.min_subnormal, MANTISSA=fmt.mantissa_bits,
            INTEGER=fmt.is_integer, BITS=bits, WIDTH=block, num_warps=4 if block <= 4096 else 8,
        )  # fmt: skip
    return codes, scale


def unpack(codes: Tensor, scale: Tensor, fmt: Format, bits: int, columns: int, dtype: torch.dtype) -> Tensor:
    """`packing.unpack`: the tokens (T, columns) again, in a type."""
    codes = codes.contiguous()
    out = torch.empty(codes.shape[0], columns, dtype=dtype, device=codes.device)
    block = min(max(triton.next_power_of_2(columns), 2), FLAT)
    with _device(codes):
        _unpack[(codes.shape[0], triton.cdiv(columns, block))](  # pyright: ignore[reportIndexIssue]
            codes, scale, out, columns, codes.shape[1],
            LEAST=_least(fmt), STEP=fmt.min_subnormal, MANTISSA=fmt.mantissa_bits, INTEGER=fmt.is_integer, BITS=bits,
            WIDTH=block, num_warps=4,
        )  # fmt: skip
    return out
