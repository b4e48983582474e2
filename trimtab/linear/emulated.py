# SPDX-License-Identifier: Apache-2.0
"""Carry a path out with ordinary matrix products: quantize, dequantize, multiply.

One autograd function runs the three GEMMs of a linear as its `Path` says. The path chosen in forward travels
in the autograd context, so a backward always belongs to its forward, whatever the switch says by then.

- What backward needs of x is quantized in forward and saved in that form (dequantized values, in the type of
  x: emulation saves accuracy questions, not memory). The weight is quantized once where two roles agree.
- A role without quantization is the very GEMM that autograd would run for `F.linear`, so its bits are the same.
- Operands are multiplied in the input's own type. On CPU, 16-bit products are 10 to 60 times slower than FP32
  ones, so there the rounded operands are multiplied in FP32 and the result is rounded, which is also what a
  GPU's FP32 accumulation does up to the order of the sum. FP8 hardware may accumulate in fewer bits (about 14
  on Hopper): the emulation is slightly better than that.
- A watched call (`call.shadow`) runs the same operands through the high path too and reports both results. The
  reference starts from the gradient as it came in, before any fault, and feeds no history.
- The bias gradient is exact. Gradients are computed only where they are needed. There is no double backward.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from trimtab.linear.casts import apply_cast
from trimtab.linear.hadamard import rotate, unrotate
from trimtab.linear.paths import SIDES, Cast, Gemm
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


def _matrix(x: Tensor) -> Tensor:
    """All leading dimensions as one (tokens, features); spelled out because reshape(-1) fails on empty tensors."""
    return x.reshape(x.shape[:-1].numel(), x.shape[-1])


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


class SwitchedGemms(torch.autograd.Function):
    """A linear whose three GEMMs follow `call.path`. Autocast is off in here: the caller has cast already."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, call: Call, grad_enabled: bool) -> Tensor:
        need_x, need_w = (grad_enabled and need for need in ctx.needs_input_grad[:2])
        y, saved = _output(call, x, weight, bias, need_x, need_w)
        y = y if call.fault is None else call.fault.output(y)
        ctx.call, ctx.x_shape = call, x.shape
        if call.shadow is None:
            ctx.save_for_backward(*saved)
            return y
        wanted, kept = _output(call.shadow, x, weight, bias, need_x, need_w)
        ctx.save_for_backward(*saved, *kept)
        call.report("output", y, wanted)  # type: ignore[misc]  # comes with the shadow
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:  # type: ignore[override]  # the decorator hides the names
        (grad,) = grads
        with torch.autocast(grad.device.type, enabled=False):
            return *_gradients(ctx, grad), None, None


def _output(
    call: Call, x: Tensor, weight: Tensor, bias: Tensor | None, need_x: bool, need_w: bool
) -> tuple[Tensor, Saved]:
    """The forward of a path, and what its backward needs."""
    path, prepared = call.path, _Prepared(call)
    saved_x, saved_w = (x if need_w else None), (weight if need_x else None)
    mask_x = mask_w = None
    chained = _chained(call)
    if path.output is None:
        y = nn.functional.linear(x, weight, bias)
    else:
        a, mask_x = prepared.get("output", "input", _matrix(x))
        b, mask_w = prepared.get("output", "weight", weight)
        if path.output.result is None:
            y = _linear(a, b, bias)
        else:
            y = _finish(call, "output", _linear(a, b, None))
            y = y if bias is None else y + bias
        y = y.reshape(*x.shape[:-1], weight.shape[0])
        if chained and need_w and path.grad_weight is not None:
            saved_x = a
        if chained and need_x and path.grad_input is not None:
            saved_w = b
    if not chained and need_w and path.grad_weight is not None:
        saved_x = prepared.get("grad_weight", "input", _matrix(x))[0]
    if not chained and need_x and path.grad_input is not None:
        saved_w = prepared.get("grad_input", "weight", weight)[0]
    return y, Saved(saved_x, saved_w, mask_x if chained and need_x else None, mask_w if chained and need_w else None)


def _chained(call: Call) -> bool:
    return call.path.chained and call.path.output is not None


def _gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    call: Call = ctx.call
    need_x, need_w, need_b = ctx.needs_input_grad[:3]
    tensors = ctx.saved_tensors  # once: checkpointing unpacks only once
    saved, kept = Saved(*tensors[:4]), tensors[4:]
    came = grad
    if call.fault is not None:
        grad = call.fault.grad_output(grad)
    g = _matrix(grad)
    call.observe("grad_output", g)
    prepared = _Prepared(call)
    grad_x = _grad_input(prepared, g, saved, ctx.x_shape) if need_x else None
    grad_w = _grad_weight(prepared, g, saved, ctx.x_shape) if need_w else None
    if call.fault is not None and grad_w is not None:
        grad_w = call.fault.grad_weight(grad_w)
    if call.shadow is not None and call.report is not None:
        true, high, wanted = _matrix(came), Saved(*kept), _Prepared(call.shadow)
        if grad_x is not None:
            call.report("grad_input", grad_x, _grad_input(wanted, true, high, ctx.x_shape))
        if grad_w is not None:
            call.report("grad_weight", grad_w, _grad_weight(wanted, true, high, ctx.x_shape))
    return grad_x, grad_w, g.sum(0) if need_b else None


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
        return g.t() @ _matrix(x)
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
