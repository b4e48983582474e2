# SPDX-License-Identifier: Apache-2.0
"""Carry a path out on real low-precision matrix units.

Hardware multiplies two matrices that both have the *inner* dimension last, in memory without gaps, and one scale per
matrix, per row, or per block. So an operand is quantized with its inner dimension last, whatever side it stands on:

    output        x  (tokens, in)  as it is          w  (out, in)     as it is
    grad_input    dY (tokens, out) as it is          w  transposed to (in, out)
    grad_weight   dY transposed to (out, tokens)     x  transposed to (in, tokens)

dY is read once and written in both layouts. Of x and w only the plain 16-bit tensors are kept for backward, which
quantizes them again, transposed, with the amax that forward has measured: that costs a read of x, and saves its memory.
Linears that share an input (q, k, v; gate, up) share its cast: the last one made is remembered.

The numbers are those of `emulated.py` up to two things: hardware accumulates in fewer bits than FP32, and a quotient
may differ by an ulp before it is rounded. `tests/linear/test_real.py` holds both together.

What a kernel cannot take: `why_not` says it, with the rule and the value. Tokens may have any number; the inner
dimension is padded with zeros to a multiple of 16.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.weak import TensorWeakRef

from trimtab.devices import has_triton
from trimtab.linear.formats import FORMATS
from trimtab.linear.paths import SIDES, Cast, Gemm, Path
from trimtab.linear.quantize import group_amax
from trimtab.linear.scales import amax_scale
from trimtab.linear.state import Call

FLOAT8 = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
ALIGN = 16
"""The inner and the right outer dimension of a product must be multiples of this."""
FAST = {"output": True, "grad_input": False, "grad_weight": False}
"""Where the tensor cores may keep the whole sum in their own registers (about 14 bits), as torchao and Transformer
Engine do: in the forward only."""


class Operand(NamedTuple):
    """One side of a product: (outer, inner) in FP8, and what its numbers are to be multiplied by."""

    data: Tensor
    scale: Tensor


KEPT = 2


def why_not(path: Path, linear: nn.Linear) -> str | None:
    """Why real kernels cannot run a path of a linear; None if they can."""
    if path.is_plain:
        return None
    for role, gemm in path.gemms():
        if gemm.hadamard or gemm.result is not None or gemm.left is None or gemm.right is None:
            return f"{path.name} rotates, rounds its results or quantizes one side only in {role}"
        for cast in (gemm.left, gemm.right):
            if cast.fmt not in FLOAT8 or cast.group != "tensor" or cast.scale != "amax" or cast.rounding != "nearest":
                return f"{path.name} needs {cast.fmt} with a scale per {cast.group}, and there is no kernel for it"
    for name, size in (("in_features", linear.in_features), ("out_features", linear.out_features)):
        if size % ALIGN:
            return f"{name} must be a multiple of {ALIGN}, got {size}"
    return None


def lacks(device: torch.device) -> str | None:
    """Why a device has no FP8 matrix units; None if it has."""
    if device.type != "cuda":
        return f"real kernels need a CUDA device, got {device.type}"
    major, minor = torch.cuda.get_device_capability(device)
    if (major, minor) < (8, 9):
        return f"FP8 needs compute capability 8.9 or more (Ada, Hopper), got {major}.{minor}"
    return None


def output(
    call: Call, x: Tensor, weight: Tensor, bias: Tensor | None, need_x: bool, need_w: bool
) -> tuple[Tensor, tuple[Tensor | None, Tensor | None]]:
    """The result of a path, and what its backward needs."""
    if call.path.output is None:
        y = nn.functional.linear(x, weight, bias)
    else:
        a, b = _shared(call, "output", x), _cast(call, "output", "weight", weight)
        y = _multiply("output", a, b, x.dtype, bias).reshape(*x.shape[:-1], weight.shape[0])
    return y, keep(call, x, weight, need_x, need_w)


def keep(call: Call, x: Tensor, weight: Tensor, need_x: bool, need_w: bool) -> tuple[Tensor | None, Tensor | None]:
    """What the backward of a forward needs: the tensors themselves."""
    return (x if need_w else None), (weight if need_x else None)


def gradients(
    call: Call, g: Tensor, kept: Sequence[Tensor | None], x_shape: torch.Size, need_x: bool, need_w: bool
) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of input and weight, where they are needed, from that of the output as a matrix."""
    x, weight = kept
    grad_x = grad_w = None
    rows, columns = _gradient(call, g, need_x, need_w)
    if need_x:
        assert weight is not None
        if rows is None:
            grad_x = g @ weight
        else:
            grad_x = _multiply("grad_input", rows, _cast(call, "grad_input", "weight", weight), g.dtype)
        grad_x = grad_x.reshape(x_shape)
    if need_w:
        assert x is not None
        if columns is None:
            grad_w = g.t() @ _matrix(x)
        else:
            grad_w = _multiply("grad_weight", columns, _shared(call, "grad_weight", x), g.dtype)
    return grad_x, grad_w


def _matrix(x: Tensor) -> Tensor:
    return x.reshape(x.shape[:-1].numel(), x.shape[-1])


def _gradient(call: Call, g: Tensor, need_x: bool, need_w: bool) -> tuple[Operand | None, Operand | None]:
    """dY in the layouts of both backward products, from one read where they quantize it alike; None: not quantized."""
    path = call.path
    first = path.grad_input.left if path.grad_input is not None and need_x else None
    second = path.grad_weight.left if path.grad_weight is not None and need_w else None
    if first is not None and first == second:
        return _quantize(g, first, _amax(call, "grad_output", first, g), (True, True))
    rows = columns = None
    if first is not None:
        rows, _ = _quantize(g, first, _amax(call, "grad_output", first, g), (True, False))
    if second is not None:
        _, columns = _quantize(g, second, _amax(call, "grad_output", second, g), (False, True))
    return rows, columns


def _cast(call: Call, role: str, operand: str, x: Tensor) -> Operand:
    """An operand of a role, in the layout that the role needs."""
    gemm: Gemm = getattr(call.path, role)
    cast = (gemm.left, gemm.right)[SIDES[role].index(operand)]  # type: ignore[arg-type]
    assert cast is not None
    columns = role != "output"
    found = _quantize(_matrix(x), cast, _amax(call, operand, cast, x), (not columns, columns))[columns]
    assert found is not None
    return found


def _amax(call: Call, operand: str, cast: Cast, x: Tensor) -> Tensor:
    """The amax that an operand is scaled by: measured once per call, or remembered, or replaced by a fault."""
    change = call.change_amax(operand, cast)
    if change is not None and cast.delayed:
        return change(torch.empty(0))  # what is remembered needs no measurement
    if operand not in call.amaxes:
        call.amaxes[operand] = torch.linalg.vector_norm(x, torch.inf).float() if x.is_cuda else group_amax(x, "tensor")
    amax = call.amaxes[operand]
    return amax if change is None else change(amax)


class _Last(NamedTuple):
    """The last cast of an input, and of which tensor it is."""

    tensor: TensorWeakRef
    version: int
    cast: Cast
    columns: bool
    amax: Tensor
    operand: Operand


_last: dict[torch.device, _Last] = {}


def _shared(call: Call, role: str, x: Tensor) -> Operand:
    """The input as an operand, cast once for the linears that follow each other on the same tensor."""
    gemm: Gemm = getattr(call.path, role)
    cast = gemm.left if role == "output" else gemm.right
    assert cast is not None
    columns = role != "output"
    last = _last.get(x.device)
    alone = cast.delayed or call.fault is not None  # these have scales of their own
    if last is not None and not alone and last.tensor() is x and last.version == x._version:
        if (last.cast, last.columns) == (cast, columns):
            call.amaxes["input"] = last.amax
            return last.operand
        call.amaxes.setdefault("input", last.amax)
    operand = _cast(call, role, "input", x)
    if not alone:
        _last[x.device] = _Last(TensorWeakRef(x), x._version, cast, columns, call.amaxes["input"], operand)
    return operand


def _multiply(role: str, a: Operand, b: Operand, dtype: torch.dtype, bias: Tensor | None = None) -> Tensor:
    """The product over the inner dimensions, (outer of a, outer of b)."""
    fused = bias is not None and dtype in (torch.bfloat16, torch.float16)
    y = torch._scaled_mm(  # pyright: ignore[reportPrivateImportUsage]
        a.data,
        b.data.t(),
        scale_a=a.scale,
        scale_b=b.scale,
        bias=bias if fused else None,
        out_dtype=dtype,
        use_fast_accum=FAST[role],
    )
    return y if bias is None or fused else y + bias


def _quantize(x: Tensor, cast: Cast, amax: Tensor, wanted: tuple[bool, bool]) -> tuple[Operand | None, Operand | None]:
    """A matrix (rows, columns) as an operand with the columns inside, with the rows inside, or both from one read."""
    fmt = FORMATS[cast.fmt]
    if x.is_cuda and has_triton():
        from trimtab.linear import kernels

        made = kernels.cast_both(x, fmt, FLOAT8[fmt.name], amax, wanted, align=ALIGN, pow2_scale=cast.pow2_scale)
        rows, columns = (None if one is None else Operand(*one) for one in made)
        return rows, columns
    scale = amax_scale(amax, fmt, pow2_scale=cast.pow2_scale)
    y = (x.float() / scale).clamp(-fmt.max, fmt.max).to(FLOAT8[fmt.name])
    rows = Operand(_padded(y), scale) if wanted[0] else None
    columns = Operand(_padded(y.t()), scale) if wanted[1] else None
    return rows, columns


def _padded(x: Tensor) -> Tensor:
    """Zeros after the last column, up to a multiple of ALIGN."""
    missing = -x.shape[1] % ALIGN
    if not missing:
        return x.contiguous()
    return torch.cat([x, x.new_zeros(x.shape[0], missing)], dim=1)
