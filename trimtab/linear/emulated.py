# SPDX-License-Identifier: Apache-2.0
"""Carry a path out with ordinary matrix products: quantize, dequantize, multiply.

The three GEMMs of a linear as its `Path` says, on any device; `gemms.py` calls them.

- What backward needs of x is quantized in forward and saved in that form (dequantized values, in the type of
  x: emulation saves accuracy questions, not memory). The weight is quantized once where two roles agree.
- A role without quantization is the very GEMM that autograd would run for `F.linear`, so its bits are the same.
- Operands are multiplied in the input's own type. On CPU, 16-bit products are 10 to 60 times slower than FP32
  ones, so there the rounded operands are multiplied in FP32 and the result is rounded, which is also what a
  GPU's FP32 accumulation does up to the order of the sum. FP8 hardware may accumulate in fewer bits (about 14
  on Hopper): the emulation is slightly better than that.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from trimtab.linear.casts import apply_cast
from trimtab.linear.hadamard import rotate, unrotate
from trimtab.linear.paths import SIDES, Cast, Gemm
from trimtab.linear.quantize import as_matrix
from trimtab.linear.state import Call

_INNER = {"output": (1, 1), "grad_input": (1, 0), "grad_weight": (0, 0)}
"""The inner dimension of the left and the right operand, as stored."""


def _slow_half(x: Tensor) -> bool:
    return x.device.type == "cpu" and x.dtype in (torch.bfloat16, torch.float16)


def _mm(a: Tensor, b: Tensor) -> Tensor:
    return (a.float() @ b.float()).to(a.dtype) if _slow_half(a) else a @ b


def _linear(a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
    if _slow_half(a):
        return nn.functional.linear(a.float(), b.float(), None if bias is None else bias.float()).to(a.dtype)
    return nn.functional.linear(a, b, bias)


def prepare(call: Call, role: str, operand: str, x: Tensor) -> tuple[Tensor, Tensor | None]:
    """Rotate and quantize one operand of a role; returns it in its own type, and the mask of unclipped values."""
    gemm: Gemm = getattr(call.path, role)
    side = SIDES[role].index(operand)  # type: ignore[arg-type]
    cast = (gemm.left, gemm.right)[side]
    dtype, mask = x.dtype, None
    if gemm.hadamard:
        x = rotate(x.float(), gemm.hadamard, dim=_INNER[role][side], signs=call.signs(role, gemm, x.device))
    if cast is not None:
        x, mask = _cast(call, cast, role, operand, x)
    return x.to(dtype), mask


def _cast(call: Call, cast: Cast, role: str, operand: str, x: Tensor) -> tuple[Tensor, Tensor | None]:
    generator = call.generator(role, operand, x.device) if cast.rounding == "stochastic" else None
    change_amax = call.change_amax(operand, cast) if operand != "result" else None
    return apply_cast(x, cast, change_amax=change_amax, generator=generator)


def _finish(call: Call, role: str, y: Tensor) -> Tensor:
    """Quantize the result of a role if its path says so."""
    cast = getattr(call.path, role).result
    return y if cast is None else _cast(call, cast, role, "result", y)[0]


class _Prepared:
    """The operands of one forward or backward, each prepared once for all roles that treat it alike."""

    def __init__(self, call: Call) -> None:
        self.call = call
        self.cache: dict[tuple[Any, ...], tuple[Tensor, Tensor | None]] = {}

    def get(self, role: str, operand: str, x: Tensor) -> tuple[Tensor, Tensor | None]:
        gemm: Gemm = getattr(self.call.path, role)
        cast = (gemm.left, gemm.right)[SIDES[role].index(operand)]  # type: ignore[arg-type]
        if cast is None and not gemm.hadamard:
            return x, None
        alike = not gemm.hadamard and cast is not None and cast.rounding == "nearest"
        key = (operand, cast) if alike else (role, operand)
        if key not in self.cache:
            self.cache[key] = prepare(self.call, role, operand, x)
        return self.cache[key]


class Saved(NamedTuple):
    """What the backward of one forward needs."""

    x: Tensor | None
    weight: Tensor | None
    mask_x: Tensor | None
    mask_w: Tensor | None


KEPT = len(Saved._fields)


def output(
    call: Call, x: Tensor, weight: Tensor, bias: Tensor | None, need_x: bool, need_w: bool
) -> tuple[Tensor, Saved]:
    """The result of a path, and what its backward needs."""
    prepared = _Prepared(call)
    return _output(prepared, x, weight, bias), _saved(prepared, x, weight, need_x, need_w)


def keep(call: Call, x: Tensor, weight: Tensor, need_x: bool, need_w: bool) -> Saved:
    """What the backward of a forward needs, made again from its operands."""
    return _saved(_Prepared(call), x, weight, need_x, need_w)


def gradients(
    call: Call, g: Tensor, kept: Sequence[Tensor | None], x_shape: torch.Size, need_x: bool, need_w: bool
) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of input and weight, where they are needed, from that of the output as a matrix."""
    prepared, saved = _Prepared(call), Saved(*kept)
    return (
        _grad_input(prepared, g, saved, x_shape) if need_x else None,
        _grad_weight(prepared, g, saved, x_shape) if need_w else None,
    )


def _output(prepared: _Prepared, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    call = prepared.call
    if call.path.output is None:
        return nn.functional.linear(x, weight, bias)
    a, _ = prepared.get("output", "input", as_matrix(x))
    b, _ = prepared.get("output", "weight", weight)
    if call.path.output.result is None:
        y = _linear(a, b, bias)
    else:
        y = _finish(call, "output", _linear(a, b, None))
        y = y if bias is None else y + bias
    return y.reshape(*x.shape[:-1], weight.shape[0])


def _saved(prepared: _Prepared, x: Tensor, weight: Tensor, need_x: bool, need_w: bool) -> Saved:
    path, chained = prepared.call.path, _chained(prepared.call)
    saved_x, saved_w = (x if need_w else None), (weight if need_x else None)
    mask_x = mask_w = None
    role_x, role_w = ("output", "output") if chained else ("grad_weight", "grad_input")
    if need_w and path.grad_weight is not None:
        saved_x, _ = prepared.get(role_x, "input", as_matrix(x))
    if need_x and path.grad_input is not None:
        saved_w, _ = prepared.get(role_w, "weight", weight)
    if chained:
        mask_x = prepared.get("output", "input", as_matrix(x))[1] if need_x else None
        mask_w = prepared.get("output", "weight", weight)[1] if need_w else None
    return Saved(saved_x, saved_w, mask_x, mask_w)


def _chained(call: Call) -> bool:
    return call.path.chained and call.path.output is not None


def _grad_input(prepared: _Prepared, g: Tensor, saved: Saved, x_shape: torch.Size) -> Tensor:
    call, weight = prepared.call, saved.weight
    assert weight is not None
    if call.path.grad_input is None:
        return (g @ weight).reshape(x_shape)
    left, _ = prepared.get("grad_input", "grad_output", g)
    if _chained(call):
        weight, _ = prepare(call, "grad_input", "weight", weight)
    out = _mm(left, weight)
    if _chained(call):
        out = _unchain(call, out, saved.mask_x, x_shape[-1])
    return _finish(call, "grad_input", out).reshape(x_shape)


def _grad_weight(prepared: _Prepared, g: Tensor, saved: Saved, x_shape: torch.Size) -> Tensor:
    call, x = prepared.call, saved.x
    assert x is not None
    if call.path.grad_weight is None:
        return g.t() @ as_matrix(x)
    left, _ = prepared.get("grad_weight", "grad_output", g)
    if _chained(call):
        x, _ = prepare(call, "grad_weight", "input", x)
    out = _mm(left.t(), x)
    if _chained(call):
        out = _unchain(call, out, saved.mask_w, x_shape[-1])
    return _finish(call, "grad_weight", out)


def _unchain(call: Call, out: Tensor, mask: Tensor | None, length: int) -> Tensor:
    """From the forward's rotated space back to the operand's own: zero what was clipped, then rotate back."""
    if mask is not None:
        out = out * mask
    gemm: Gemm = call.path.output  # type: ignore[assignment]
    if gemm.hadamard:
        signs = call.signs("output", gemm, out.device)
        out = unrotate(out.float(), gemm.hadamard, dim=1, length=length, signs=signs).to(out.dtype)
    return out
