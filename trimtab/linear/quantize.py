# SPDX-License-Identifier: Apache-2.0
"""Quantize and dequantize: the numbers a low-precision format would have kept, in the tensor's own type.

For a group of elements with largest magnitude amax and a format with largest value Qmax (all in FP32):

    s    = amax / Qmax                                or 2^ceil(log2(amax / Qmax)) with pow2_scale
    y    = x / s                                      divided: multiplying by 1/s differs by an ulp
    e    = max(floor(log2 |y|), log2 min_normal)      from the exponent field, so exact on every device
    step = 2^(e - M)
    q    = round_half_even(y / step) * step           then clamped to +-Qmax
    out  = q * s                                      in the type of x

A group is the whole tensor, a token (the last dimension), a column (the last but one), or a block (r, c) of the last
two dimensions; the last block of a row or a column may be short.

Where we differ from what is around: the clamp comes after the rounding (COAT's reference has none); ties go
to even (DeepGEMM's E2M1 sends them down); there is no floor under amax (DeepSeek's 1e-4 flushes small
gradients); and non-finite input stays visible. A group whose amax is Inf or NaN returns NaN throughout, where a
saturating cast would turn an Inf into an ordinary large number. With a given (stale) amax, finite values
beyond it saturate, and non-finite elements become NaN one by one. (At the very top of the type's own range, a
value rounded up to the next grid point may overflow to Inf; with scale amax / Qmax it cannot exceed amax.)

On a GPU the usual case is one Triton launch with the same bits (`kernels.py`).
The gradient is straight-through. Stochastic rounding takes a generator of its own: its bits depend on the device.
"""

from typing import Any, Literal

import torch
from torch import Tensor, nn

from trimtab.devices import has_triton
from trimtab.errors import TrimtabError
from trimtab.linear.formats import Format, format_of
from trimtab.linear.scales import amax_scale, round_to

Group = str | tuple[int, int]
Rounding = Literal["nearest", "stochastic"]


def check_group(group: Group) -> Group:
    """Return the group in its one spelling (`"row"` is `"token"`, seen from a weight), or raise."""
    if group in ("tensor", "token", "column"):
        return group
    if group == "row":
        return "token"
    if isinstance(group, tuple | list) and len(group) == 2 and all(isinstance(n, int) and n > 0 for n in group):
        return (group[0], group[1])
    raise TrimtabError(
        f'group must be "tensor", "token" (alias "row"), "column" or a block shape of two positive ints such as '
        f"(1, 128), got {group!r}"
    )


def check_rounding(rounding: str) -> None:
    """Refuse an unknown rounding."""
    if rounding not in ("nearest", "stochastic"):
        raise TrimtabError(f'rounding must be "nearest" or "stochastic", got {rounding!r}')


def as_matrix(x: Tensor) -> Tensor:
    """All leading dimensions as one (tokens, features); spelled out because reshape(-1) fails on empty tensors."""
    return x if x.dim() == 2 else x.reshape(x.shape[:-1].numel(), x.shape[-1])


def to_groups(x: Tensor, group: Group) -> tuple[Tensor, tuple[int, ...]]:
    """View x so that reducing over the returned dimensions reduces over one group; short blocks are zero-padded."""
    if x.dim() == 0:
        x = x.reshape(1)
    if group == "column" and x.dim() == 1:
        x = x.unsqueeze(0)
    if isinstance(group, str):
        return x, {"token": (-1,), "column": (-2,)}.get(group, tuple(range(x.dim())))
    r, c = group
    if x.dim() == 1:
        x = x.unsqueeze(0)
    rows, cols = x.shape[-2:]
    pad_rows, pad_cols = -rows % r, -cols % c
    if pad_rows or pad_cols:
        x = nn.functional.pad(x, (0, pad_cols, 0, pad_rows))
    return x.reshape(*x.shape[:-2], x.shape[-2] // r, r, x.shape[-1] // c, c), (-3, -1)


def from_groups(groups: Tensor, group: Group, shape: torch.Size) -> Tensor:
    """Undo `to_groups`: drop the padding and restore the shape."""
    if isinstance(group, str):
        return groups.reshape(shape)
    *lead, num_rows, r, num_cols, c = groups.shape
    x = groups.reshape(*lead, num_rows * r, num_cols * c)
    rows, cols = shape[-2:] if len(shape) > 1 else (1, shape.numel())
    return x[..., :rows, :cols].reshape(shape)


def amax_shape(shape: torch.Size, group: Group) -> tuple[int, ...]:
    """The shape of `group_amax`: () of a tensor, (..., 1) of tokens, (..., 1, C) of columns, (..., R, C) of blocks."""
    if group == "column":
        return (*shape[:-2], 1, shape[-1] if shape else 1)
    if isinstance(group, str):
        return (*shape[:-1], 1) if group == "token" else ()
    rows, cols = shape[-2:] if len(shape) > 1 else (1, shape.numel())
    return (*shape[:-2], -(-rows // group[0]), -(-cols // group[1]))


def group_amax(x: Tensor, group: Group = "token") -> Tensor:
    """The largest magnitude of each group, FP32; 0 for a group without elements, as for a group of zeros."""
    group = check_group(group)
    shape = amax_shape(x.shape, group)
    if x.numel() == 0:
        return torch.zeros(shape, device=x.device)
    groups, dims = to_groups(x.detach(), group)
    return groups.abs().amax(dim=dims).float().reshape(shape)


def spread(amax: Tensor, group: Group) -> Tensor:
    """Reshape a `group_amax` so that it broadcasts against `to_groups`; a single number always does."""
    return amax if isinstance(group, str) or amax.dim() == 0 else amax.unsqueeze(-1).unsqueeze(-3)


def scaled_round(groups: Tensor, scale: Tensor, fmt: Format, *, saturate: bool = False, **rounding: Any) -> Tensor:
    """round_to(groups / scale) * scale, FP32. A scale of 0 (an underflowed block scale) returns zeros.

    Args:
        saturate: the scale was not measured on these values: bring finite ones into range before the division
            overflows, and turn non-finite ones into NaN before a clamp hides them.
    """
    y = groups / torch.where(scale == 0, torch.ones_like(scale), scale)
    if saturate:
        finite = torch.isfinite(groups)
        y = torch.where(finite, y.clamp(-2 * fmt.max, 2 * fmt.max), torch.full_like(y, torch.nan))
    return round_to(y, fmt, **rounding).mul_(scale)


def amax_cast(
    x: Tensor, fmt: Format, group: Group, *, pow2_scale: bool = False, amax: Tensor | None = None, **rounding: Any
) -> Tensor:
    """Quantize and dequantize with scale amax / Qmax, in the type of x; a given amax saturates what lies beyond it."""
    if x.is_cuda and has_triton() and rounding.get("rounding", "nearest") == "nearest":
        from trimtab.linear import kernels

        if kernels.takes(x, group):
            return kernels.amax_cast(x, fmt, str(group), pow2_scale=pow2_scale, amax=amax)
    scale = spread(amax_scale(group_amax(x, group) if amax is None else amax, fmt, pow2_scale=pow2_scale), group)
    groups, _ = to_groups(x.float(), group)
    out = scaled_round(groups, scale, fmt, saturate=amax is not None, **rounding)
    return from_groups(out, group, x.shape).to(x.dtype)


class _StraightThrough(torch.autograd.Function):
    """The identity to autograd, `compute` to everyone else."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, compute: Any) -> Tensor:
        return compute(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0], None


def fake_quant(
    x: Tensor,
    fmt: str | Format,
    *,
    group: Group = "token",
    pow2_scale: bool = False,
    amax: Tensor | None = None,
    rounding: Rounding = "nearest",
    generator: torch.Generator | None = None,
) -> Tensor:
    """Quantize x to a format and back, with one scale per group; straight-through in backward.

    Args:
        fmt: `"e2m1"`, `"e3m2"`, `"e2m3"`, `"e4m3"`, `"e5m2"`, `"int8"` or `"int4"`.
        group: `"tensor"`, `"token"` (each row of the last dimension; `"row"` says the same of a weight), `"column"`, or
            a block shape over the last two dimensions.
        pow2_scale: round each scale up to a power of two.
        amax: use this instead of the measured one (one number, or the shape of `amax_shape`): delayed scaling.
    """
    fmt, group = format_of(fmt), check_group(group)
    check_rounding(rounding)
    if not x.is_floating_point():
        raise TrimtabError(f"x must be a floating-point tensor, got {x.dtype}: convert it first")
    if amax is not None and amax.dim() and tuple(amax.shape) != amax_shape(x.shape, group):
        raise TrimtabError(f"amax must be one number or of shape {amax_shape(x.shape, group)}, got {tuple(amax.shape)}")

    def compute(x: Tensor) -> Tensor:
        if x.numel() == 0:
            return x.clone()
        given = None if amax is None else amax.detach().to(x.device, torch.float32)
        return amax_cast(x, fmt, group, pow2_scale=pow2_scale, amax=given, rounding=rounding, generator=generator)

    if x.requires_grad and torch.is_grad_enabled():
        return _StraightThrough.apply(x, compute)  # type: ignore[return-value]
    return compute(x.detach())


def affine_quant(x: Tensor, scale: Tensor, zero: Tensor, bits: int) -> Tensor:
    """The asymmetric integer grid with learned scale and zero point.

        q = clamp(round(x / scale + zero), 0, 2^bits - 1)        out = (q - zero) * scale

    The rounding is straight-through and everything else is differentiated as it stands (LSQ, arXiv 1902.08153).
    With m = 1 where q was not clamped: d out/dx = m, d out/d scale = q - zero - m * x / scale, and
    d out/d zero = -(1 - m) * scale.

    Args:
        scale, zero: broadcast against x, for example (rows, 1) for one grid per row.
        bits: 2 to 8.
    """
    if bits not in range(2, 9):
        raise TrimtabError(f"bits must be an int from 2 to 8, got {bits!r}")
    levels: Tensor = _StraightThrough.apply(x / scale + zero, torch.round)  # type: ignore[assignment]
    return (levels.clamp(0, 2**bits - 1) - zero) * scale
