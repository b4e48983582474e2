# SPDX-License-Identifier: Apache-2.0
"""The grid and the scale: rounding to a format, and the number a group is divided by first.

    amax        s = amax / Qmax                                        one FP32 scale per group
    pow2        s = 2^ceil(log2(amax / Qmax))                          E8M0-like: DeepSeek-V3, Transformer Engine
    shared      s = 2^(floor(log2 amax) - floor(log2 Qmax)) / f        OCP MX; f = 3/4 keeps Quartet's inside the range
    two_level   s = E4M3((amax / Qmax) / g) * g,  g = tensor amax / (448 * Qmax)      NVFP4, arXiv 2509.25149
    std         s = 2^floor(log2(2.9225 / Qmax * std))                 Quartet's forward, arXiv 2505.14669

All in FP32. Exponents are read from the exponent field, never from a logarithm, so that the bits are the same
on every device. A quotient is a true quotient of two tensors: dividing by a Python number becomes, on a
GPU, a multiplication by its reciprocal and differs by an ulp.

Three cases are the same in every rule:

    amax = 0            s = 1: the group is all zeros and returns zeros, never 0/0
    amax Inf or NaN     s = NaN: the whole group returns NaN, so that a detector sees it
    s below 2^-126      s is rounded up to a power of two, at least 2^-149: an FP32 scale this small has too few
                        bits left (or none) to be a quotient. There is no floor under amax itself: the usual 1e-4
                        is harmless for activations and flushes small gradients to zero
"""

import math

import torch
from torch import Tensor

from trimtab.linear.formats import FORMATS, Format

MIN_NORMAL = 2.0**-126
MIN_SUBNORMAL = 2.0**-149
_LIFT = 2.0**64
_EXPONENT_FIELD = 0x7F800000
_MANTISSA_FIELD = 0x007FFFFF

QUARTET_RANGE = 2.92247856
"""The MSE-optimal clipping range of a Gaussian on the E2M1 grid, in standard deviations (arXiv 2505.14669)."""


def pow2_floor(x: Tensor) -> Tensor:
    """2^floor(log2 |x|), from the exponent field; 0 for zeros and subnormals."""
    return (x.view(torch.int32) & _EXPONENT_FIELD).view(torch.float32)


def pow2_ceil(x: Tensor) -> Tensor:
    """2^ceil(log2 x) of a positive normal FP32 number, from its bits."""
    return ((x.view(torch.int32) + _MANTISSA_FIELD) & _EXPONENT_FIELD).view(torch.float32)


def round_to(y: Tensor, fmt: Format, *, rounding: str = "nearest", generator: torch.Generator | None = None) -> Tensor:
    """Round scaled FP32 values to the format's grid and clamp; y may be overwritten.

    Stochastic rounding goes up with the probability of the distance covered. The fraction is compared, not
    added: y + noise would be rounded by FP32 itself and could move a value that is already on the grid.
    """
    step = pow2_floor(y).clamp_(min=fmt.min_normal).mul_(2.0**-fmt.mantissa_bits)
    y.div_(step)  # exact: step is a power of two
    if rounding == "nearest":
        y.round_()
    else:
        below = y.floor()
        noise = torch.rand(y.shape, generator=generator, device=y.device)
        y.sub_(below)
        y = below.add_(noise < y)
    return y.mul_(step).clamp_(-fmt.max, fmt.max)


def _quotient(x: Tensor, number: float) -> Tensor:
    return x / torch.full_like(x, number)


def _guarded(scale: Tensor, amax: Tensor) -> Tensor:
    """Apply the two special cases: a zero group has scale 1, a non-finite one NaN."""
    scale = torch.where(amax == 0, torch.ones_like(scale), scale)
    return torch.where(torch.isfinite(amax), scale, torch.full_like(scale, math.nan))


def amax_scale(amax: Tensor, fmt: Format, *, pow2_scale: bool = False) -> Tensor:
    """amax / Qmax, or the next power of two above it."""
    ratio = _quotient(amax, fmt.max)
    scale = pow2_ceil(ratio) if pow2_scale else ratio
    tiny = (pow2_ceil(_quotient(amax * _LIFT, fmt.max)) / _LIFT).clamp(min=MIN_SUBNORMAL)
    return _guarded(torch.where(ratio < MIN_NORMAL, tiny, scale), amax)


def shared_scale(amax: Tensor, fmt: Format, *, range_factor: float = 1.0) -> Tensor:
    """The OCP MX shared exponent: the power of two that brings amax into the format's top binade, over a factor.

    Without a factor, amax may land beyond Qmax (between 6 and 8 in E2M1) and is clipped. With f = 3/4 it
    cannot, which stochastic rounding needs to stay unbiased. As in E8M0, no scale is below 2^-126.
    """
    top = 2.0 ** math.floor(math.log2(fmt.max))
    scale = (pow2_floor(amax) * (1.0 / top)).clamp(min=MIN_NORMAL)
    return _guarded(_quotient(scale, range_factor), amax)


def two_level_scale(amax: Tensor, fmt: Format) -> Tensor:
    """NVFP4: an E4M3 scale per block, relative to one FP32 scale of the whole tensor.

    A block more than about 2^18 below the tensor's largest value gets the block scale 0 and returns zeros, as
    the hardware format would: the caller must not divide by it (see `quantize.scaled_round`).
    """
    e4m3 = FORMATS["e4m3"]
    largest = amax.amax()
    total = _guarded(_quotient(largest, e4m3.max * fmt.max).clamp(min=MIN_NORMAL), largest)
    block = round_to(_quotient(amax, fmt.max) / total, e4m3)
    return _guarded(block * total, torch.where(torch.isfinite(largest), amax, largest))


def std_scale(groups: Tensor, dims: tuple[int, ...], fmt: Format) -> Tensor:
    """Quartet's forward scale: the power of two below 2.9225 standard deviations spread over the grid.

    Values beyond Qmax * s are clipped on purpose. A constant group has no deviation; it falls back on its amax.
    The source adds 1e-8 to the deviation, which would act as a floor; we do not.
    """
    std = groups.var(dim=dims, keepdim=True, correction=0).sqrt()
    amax = groups.abs().amax(dim=dims, keepdim=True)
    scale = pow2_floor(std * (QUARTET_RANGE / fmt.max))
    fallback = amax_scale(amax, fmt, pow2_scale=True)
    return torch.where(torch.isfinite(amax) & (scale > 0), scale, fallback)
