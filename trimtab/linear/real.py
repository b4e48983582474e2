# SPDX-License-Identifier: Apache-2.0
"""Carry a path out on real low-precision matrix units.

Hardware multiplies two matrices that both have the *inner* dimension last, in memory without gaps, with one scale per
matrix, per row or, on Hopper, per 128 numbers (`tiles.py`). So an operand is quantized with its inner dimension last,
whatever side it stands on:

    output        x  (tokens, in)  as it is          w  (out, in)     as it is
    grad_input    dY (tokens, out) as it is          w  transposed to (in, out)
    grad_weight   dY transposed to (out, tokens)     x  transposed to (in, tokens)

dY is read once and written in both layouts. Of x and w only the plain 16-bit tensors are kept for backward, which
quantizes them again, transposed, with the amax that forward has measured: that costs a read of x, and saves its memory.
Linears that share an input (q, k, v; gate, up) share its cast: the last one made is remembered. An input is the same if
it is the same tensor at the same version, as for autograd itself: what is written through `x.data` is not seen.

Saved activations (`saved4`) need no matrix units: the products are plain, and what is kept of x is packed
(`packing.py`): 4 bits a number, or 8 when high, on any device.

INT8 multiplies in the forward only (W8A8); its backward is a plain product through the rounded weight, which
`emulated.py` does.

The numbers are those of `emulated.py` up to two things: hardware accumulates in fewer bits than FP32, and a quotient
may differ by an ulp before it is rounded. `tests/linear/test_real.py` holds both together.

What a kernel cannot take: `why_not` says it, with the rule and the value. Tokens may have any number; the inner
dimension is padded with zeros to a multiple of 16, or 128 where that many share a scale.
"""

from collections.abc import Callable, Sequence
from functools import cache
from importlib import import_module
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.weak import TensorWeakRef

from trimtab.devices import has_triton
from trimtab.linear import emulated, packing, tiles
from trimtab.linear.formats import FORMATS
from trimtab.linear.paths import SIDES, Cast, Gemm, Path
from trimtab.linear.quantize import as_matrix, group_amax
from trimtab.linear.scales import amax_scale
from trimtab.linear.state import Call, whole

Made = TypeVar("Made")
Change = Callable[[Tensor], Tensor]
"""What a fault, or delayed scaling, makes of an amax."""
TYPES = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2, "int8": torch.int8}
INNER_LAST = {"output": (True, True), "grad_input": (True, False), "grad_weight": (False, False)}
"""Whether the left and the right operand of a role are stored with the inner dimension last."""
ALIGN = 16
"""The inner and the right outer dimension of a product must be multiples of this."""
LEAST_ROWS = 16
"""The integer product wants more rows than this."""
WRITTEN = (torch.bfloat16, torch.float16, torch.float32)
"""What a product can be written in; with scales per row only in the first."""
FAST = {"output": True, "grad_input": False, "grad_weight": False}
"""Where the tensor cores may keep the whole sum in their own registers (about 14 bits), as torchao and Transformer
Engine do: in the forward only."""


Kept = tuple[Tensor | None, Tensor | None, Tensor | None]
"""x (or its codes), the weight, and the scales of the codes."""


class Operand(NamedTuple):
    """One side of a product: (outer, inner) in few bits, and the scale of its numbers, () or (outer, 1)."""

    data: Tensor
    scale: Tensor


Side = Operand | tiles.Tiled
"""Either kind of operand."""
KEPT = 3


def why_not(path: Path, linear: nn.Linear) -> str | None:
    """Why a path of a linear cannot run for real; None if it can."""
    if path.is_plain or path.saves:
        return None
    if not path.is_w8a8:
        for role, gemm in path.gemms():
            if gemm.hadamard or gemm.result is not None or gemm.left is None or gemm.right is None:
                return f"{path.name} rotates, rounds its results or quantizes one side only in {role}"
            for cast, last in zip((gemm.left, gemm.right), INNER_LAST[role], strict=True):
                along = ("tensor", "token" if last else "column")
                usual = cast.fmt in ("e4m3", "e5m2") and cast.scale == "amax" and cast.rounding == "nearest"
                if not usual or (cast.group not in along and not tiles.is_tiled(cast)):
                    return f"there is no kernel for {cast.fmt} with a scale per {cast.group} in {role} of {path.name}"
            if _kind(gemm.left) != _kind(gemm.right):
                return f"both sides of {role} must have scales per tensor, per row or per 128, got {path.name}"
            reason = tiles.why_not(role, gemm, INNER_LAST[role]) if tiles.is_tiled(gemm.left) else None
            if reason is not None:
                return reason
    for name, size in (("in_features", linear.in_features), ("out_features", linear.out_features)):
        if size % ALIGN:
            return f"{name} must be a multiple of {ALIGN}, got {size}"
    return _lacks(linear.weight.device, any(c is not None and tiles.is_tiled(c) for c in _casts(path)))


def _casts(path: Path) -> list[Cast | None]:
    return [cast for _, gemm in path.gemms() for cast in (gemm.left, gemm.right)]


def _kind(cast: Cast) -> str:
    """Of which kind a scale is, as a product sees it."""
    return "tiled" if tiles.is_tiled(cast) else "tensor" if cast.group == "tensor" else "row"


def _lacks(device: torch.device, tiled: bool) -> str | None:
    """Why a device has no FP8 matrix units, or none with a scale per 128 numbers; None if it has."""
    if device.type == "meta" and torch.cuda.is_available():
        device = torch.device("cuda")  # where a model that has no memory yet is going to be
    if device.type != "cuda":
        return f"real kernels need a CUDA device, got {device.type}"
    major, minor = torch.cuda.get_device_capability(device)
    if (major, minor) < (8, 9):
        return f"FP8 needs compute capability 8.9 or more (Ada, Hopper), got {major}.{minor}"
    return tiles.lacks(device) if tiled else None


def output(
    call: Call, x: Tensor, weight: Tensor, bias: Tensor | None, need_x: bool, need_w: bool
) -> tuple[Tensor, Kept]:
    """The result of a path, and what its backward needs."""
    kept = keep(call, x, weight, need_x, need_w or call.path.output is not None)
    if call.path.output is None:
        y = nn.functional.linear(x, weight, bias)
    elif call.path.saves:
        y = nn.functional.linear(_unpacked(call, kept, x.dtype).reshape(x.shape), weight, bias)
    else:
        a, b = _shared(call, "output", x), _weight(call, weight)
        y = _multiply("output", a, b, x.dtype, bias).reshape(*x.shape[:-1], weight.shape[0])
    return y, (kept if need_w else (None, *kept[1:2], None))


def keep(call: Call, x: Tensor, weight: Tensor, need_x: bool, need_w: bool) -> Kept:
    """What the backward of a forward needs: the tensors themselves, or x in few bits and its scales."""
    if call.path.saves:
        return _packed(call, x, weight) if need_w else (None, weight, None)
    return (x if need_w else None), (weight if need_x else None), None


def gradients(
    call: Call, g: Tensor, kept: Sequence[Tensor | None], x_shape: torch.Size, need_x: bool, need_w: bool
) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of input and weight, where they are needed, from that of the output as a matrix."""
    x, weight, _ = kept
    if call.path.saves:
        assert weight is not None
        grad_x = (g @ weight).reshape(x_shape) if need_x else None
        return grad_x, (g.t() @ _unpacked(call, kept, g.dtype) if need_w else None)
    if call.path.is_w8a8:
        operands = (x if x is not None else g.new_empty(0), weight if weight is not None else g.new_empty(0))
        return emulated.gradients(call, g, emulated.keep(call, *operands, need_x, need_w), x_shape, need_x, need_w)
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
            grad_w = g.t() @ as_matrix(x)
        else:
            grad_w = _multiply("grad_weight", columns, _shared(call, "grad_weight", x), g.dtype)
    return grad_x, grad_w


def _gradient(call: Call, g: Tensor, need_x: bool, need_w: bool) -> tuple[Side | None, Side | None]:
    """dY in the layouts of both backward products, from one read where they quantize it alike; None: not quantized."""
    path = call.path
    first = path.grad_input.left if path.grad_input is not None and need_x else None
    second = path.grad_weight.left if path.grad_weight is not None and need_w else None
    if first is not None and second is not None and tiles.is_tiled(first) and tiles.is_tiled(second):
        change = call.change_amax("grad_output", first)  # the fault's, if any: tiles are not delayed
        amaxes = (_amax(call, "grad_output", first, g, change), _amax(call, "grad_output", second, g, change))
        return tiles.quantize(g, first, second, amaxes)
    if first is not None and first == second:
        return _measured(call, "grad_output", first, g, (True, True))
    rows = columns = None
    if first is not None:
        rows, _ = _measured(call, "grad_output", first, g, (True, False))
    if second is not None:
        _, columns = _measured(call, "grad_output", second, g, (False, True))
    return rows, columns


def _cast(call: Call, role: str, operand: str, x: Tensor) -> Side:
    """An operand of a role, in the layout that the role needs."""
    gemm: Gemm = getattr(call.path, role)
    cast = (gemm.left, gemm.right)[SIDES[role].index(operand)]  # type: ignore[arg-type]
    assert cast is not None
    columns = role != "output"
    found = _measured(call, operand, cast, as_matrix(x), (not columns, columns))[columns]
    assert found is not None
    return found


def _measured(
    call: Call, operand: str, cast: Cast, x: Tensor, wanted: tuple[bool, bool]
) -> tuple[Side | None, Side | None]:
    """A matrix of a call as operands, by the amax of `_amax`."""
    change = call.change_amax(operand, cast)
    return _quantize(x, cast, _amax(call, operand, cast, x, change), wanted, saturate=change is not None)


def _key(operand: str, cast: Cast) -> str:
    return f"{operand} per {cast.group}"


def _amax(call: Call, operand: str, cast: Cast, x: Tensor, change: Change | None) -> Tensor | None:
    """The amax that an operand, as a matrix, is scaled by: measured, or remembered, or replaced by a fault.

    Input and weight are measured once per call. A gradient is measured in each backward: there may be two. None: the
    cast measures for itself, because it has each group at hand as a whole.
    """
    if change is not None and cast.delayed:
        return change(torch.empty(0))  # what is remembered needs no measurement
    if tiles.is_tiled(cast):
        return None if change is None else change(group_amax(x, cast.group))
    key = _key(operand, cast)
    amax = call.measured.get(key)
    if amax is None:
        amax = _measure(x, cast)
        if operand != "grad_output":
            call.measured[key] = amax
    return amax if change is None else change(amax.float())


def _measure(x: Tensor, cast: Cast) -> Tensor:
    """`quantize.group_amax` of a matrix in one pass over memory and in its own type; NaN stays NaN."""
    if x.numel() == 0:
        return group_amax(x, cast.group)
    if cast.group == "tensor":
        return torch.linalg.vector_norm(x, torch.inf)
    return torch.linalg.vector_norm(x, torch.inf, dim=-1 if cast.group == "token" else -2, keepdim=True)


class _Last(NamedTuple):
    """The last cast of an input, and of which value it is."""

    tensor: TensorWeakRef
    value: tuple[int, ...]
    cast: Cast
    columns: bool
    amax: Tensor | None
    made: Any


_last: dict[torch.device, _Last] = {}


def _stream(x: Tensor) -> int:
    return torch._C._cuda_getCurrentRawStream(x.device.index) if x.is_cuda else 0  # pyright: ignore


def value_of(x: Tensor) -> tuple[int, ...]:
    """Which numbers a tensor object holds, and on which stream: what writes past the version is not seen."""
    return _stream(x), x._version, x.data_ptr()


def _value(call: Call, x: Tensor) -> tuple[int, ...]:
    """The same of an input: by its mark where compiled code writes past the version."""
    return value_of(x) if call.mark is None else (_stream(x), call.mark)


def _is_of(last: _Last, call: Call, x: Tensor, cast: Cast) -> bool:
    """Whether a cast of the same value is of this tensor, and the same cast."""
    return (call.mark is not None or last.tensor() is x) and (last.cast is cast or last.cast == cast)


def _once(call: Call, x: Tensor, cast: Cast, columns: bool, make: Callable[[], Made]) -> Made:
    """A cast of an input, made once for the linears that follow each other on the same tensor."""
    if cast.delayed or call.fault is not None:  # these have scales of their own
        return make()
    if x.is_inference() or torch.is_inference_mode_enabled():  # no versions, and nothing that autograd may keep
        return make()
    last, value = _last.get(x.device), _value(call, x)
    if last is not None and last.value == value and _is_of(last, call, x, cast):
        if last.amax is not None:
            call.measured[_key("input", cast)] = last.amax
        if last.columns == columns:
            return last.made
    made = make()
    _last[x.device] = _Last(TensorWeakRef(x), value, cast, columns, call.measured.get(_key("input", cast)), made)
    return made


def _shared(call: Call, role: str, x: Tensor) -> Side:
    """The input as an operand."""
    gemm: Gemm = getattr(call.path, role)
    cast = gemm.left if role == "output" else gemm.right
    assert cast is not None
    return _once(call, x, cast, role != "output", lambda: _cast(call, role, "input", x))


def _weight(call: Call, weight: Tensor) -> Side:
    """The weight of the forward as an operand: made with those of its kin, or by itself."""
    made = None if call.kin is None or call.fault is not None else call.kin.take(call.place, weight)
    if made is None:
        return _cast(call, "output", "weight", weight)
    call.measured[whole("weight")] = made.amax
    return made.operand


def together(weights: list[Tensor], cast: Cast) -> list[tuple[Operand, Tensor]]:
    """Some weights as operands of the forward, each with its amax; on a GPU in two launches."""
    kernels = _kernels() if weights[0].is_cuda else None
    if kernels is None or not kernels.takes_together(weights):
        found = [(one, _measure(one, cast)) for one in weights]
        return [(_quantize(one, cast, amax, (True, False), saturate=False)[0], amax) for one, amax in found]  # type: ignore[misc]
    amaxes = torch._foreach_norm(weights, torch.inf)  # pyright: ignore[reportPrivateImportUsage]
    made = kernels.cast_together(weights, FORMATS[cast.fmt], TYPES[cast.fmt], amaxes, pow2_scale=cast.pow2_scale)
    return [(Operand(data, scale), amax) for (data, scale), amax in zip(made, amaxes, strict=True)]


def _packed(call: Call, x: Tensor, weight: Tensor) -> Kept:
    """The input in few bits, with the weight."""
    gemm = call.path.grad_weight
    assert gemm is not None
    assert gemm.right is not None
    cast = gemm.right

    def pack() -> tuple[Tensor, Tensor]:
        matrix, change = as_matrix(x), call.change_amax("input", cast)
        return packing.pack(matrix, cast.fmt, None if change is None else change(group_amax(matrix, cast.group)))

    codes, scale = _once(call, x, cast, False, pack)
    return codes, weight, scale


def _unpacked(call: Call, kept: Sequence[Tensor | None], dtype: torch.dtype) -> Tensor:
    """What `_packed` kept of the input, as a matrix."""
    codes, weight, scale = kept
    assert codes is not None
    assert weight is not None
    assert scale is not None
    return packing.unpack(codes, scale, call.path.grad_weight.right.fmt, weight.shape[1], dtype)  # type: ignore[union-attr]


def _multiply(role: str, a: Side, b: Side, dtype: torch.dtype, bias: Tensor | None = None) -> Tensor:
    """The product over the inner dimensions, (outer of a, outer of b)."""
    if isinstance(a, tiles.Tiled):
        assert isinstance(b, tiles.Tiled)
        return tiles.multiply(a, b, dtype, bias)
    if a.data.dtype == torch.int8:
        return _multiply_int(a, b, dtype, bias)
    if not a.data.numel() or not b.data.numel():  # no tokens
        y = a.scale.new_zeros(a.data.shape[0], b.data.shape[0], dtype=dtype)
        return y if bias is None else y + bias
    rowwise = a.scale.dim() > 0
    written = torch.bfloat16 if rowwise else dtype if dtype in WRITTEN else torch.float32
    fused = bias is not None and bias.dtype == written != torch.float32
    y = torch._scaled_mm(  # pyright: ignore[reportPrivateImportUsage]
        a.data,
        b.data.t(),
        scale_a=a.scale,
        scale_b=b.scale.reshape(1, -1) if rowwise else b.scale,
        bias=bias if fused else None,
        out_dtype=written,
        use_fast_accum=FAST[role],
    )
    y = y if written == dtype else y.to(dtype)
    return y if bias is None or fused else y + bias


def _multiply_int(a: Side, b: Side, dtype: torch.dtype, bias: Tensor | None) -> Tensor:
    """The same of integers: exact sums in INT32, then both scales."""
    rows = a.data.shape[0]
    data = a.data if rows > LEAST_ROWS else nn.functional.pad(a.data, (0, 0, 0, 2 * LEAST_ROWS - rows))
    y = torch._int_mm(data, b.data.t())[:rows]  # pyright: ignore[reportPrivateImportUsage]
    y = (y.float() * a.scale * b.scale.t()).to(dtype)
    return y if bias is None else y + bias


@cache
def _kernels() -> Any:
    """`kernels.py` where Triton is installed; every cast asks, and an import statement takes a microsecond."""
    return import_module("trimtab.linear.kernels") if has_triton() else None


def _quantize(
    x: Tensor, cast: Cast, amax: Tensor | None, wanted: tuple[bool, bool], *, saturate: bool = True
) -> tuple[Side | None, Side | None]:
    """A matrix (rows, columns) as an operand with the columns inside, with the rows inside, or both from one read.

    Args:
        amax: one number; or (rows, 1) for the first layout, (1, columns) for the second.
        saturate: False if that is what x measures, so that nothing lies beyond the scale.
    """
    if tiles.is_tiled(cast):
        first, second = (cast if want else None for want in wanted)
        return tiles.quantize(x, first, second, (amax, amax))
    assert amax is not None
    fmt, dtype = FORMATS[cast.fmt], TYPES[cast.fmt]
    kernels = _kernels() if x.is_cuda else None
    if kernels is not None:
        rows, columns = kernels.cast_both(
            x, fmt, dtype, amax, wanted, align=ALIGN, pow2_scale=cast.pow2_scale, saturate=saturate
        )
        return rows and Operand(*rows), columns and Operand(*columns)
    scale = amax_scale(amax.float(), fmt, pow2_scale=cast.pow2_scale)
    x = x.float()
    y = torch.where(x.isfinite(), (x / scale).clamp(-fmt.max, fmt.max), torch.nan)  # also of a remembered scale
    y = (y.round() if fmt.is_integer else y).to(dtype)
    rows = Operand(_padded(y), scale) if wanted[0] else None
    columns = Operand(_padded(y.t()), scale if scale.dim() == 0 else scale.reshape(-1, 1)) if wanted[1] else None
    return rows, columns


def _padded(x: Tensor) -> Tensor:
    """Zeros after the last column, up to a multiple of ALIGN."""
    missing = -x.shape[1] % ALIGN
    if not missing:
        return x.contiguous()
    return torch.cat([x, x.new_zeros(x.shape[0], missing)], dim=1)
