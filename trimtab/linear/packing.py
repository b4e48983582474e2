# SPDX-License-Identifier: Apache-2.0
"""Activations kept for backward in few bits: packed codes, and one scale per token.

    e2m1    4 bits: sign, and the place of the magnitude among 0, 0.5, 1, 1.5, 2, 3, 4, 6; two codes to a byte
    int4    4 bits: the integer plus 8; two codes to a byte
    e4m3    the 8 bits of the format
    int8    the integer

What `unpack` gives is bit for bit what the emulation keeps in 16 bits (`quantize.amax_cast`): the same grid, the same
scale, the same product. A token whose values are not all finite has the scale NaN, and comes back as NaN.

On a GPU each of the two is one Triton launch with the same bits (`kernels.py`).
"""

import torch
from torch import Tensor

from trimtab.devices import has_triton
from trimtab.linear.formats import FORMATS
from trimtab.linear.quantize import group_amax
from trimtab.linear.scales import amax_scale, round_to

MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
BETWEEN = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
BITS = {"e2m1": 4, "int4": 4, "e4m3": 8, "int8": 8}
TYPES = (torch.float32, torch.bfloat16, torch.float16)
"""What a launch reads and writes; other types go by torch operations."""


def pack(x: Tensor, fmt: str, amax: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Tokens (T, K) as codes (T, K) or (T, ceil(K / 2)) uint8, and their scales (T, 1) float32.

    Args:
        amax: (T, 1), in place of what is measured; what lies beyond it saturates.
    """
    if amax is None and _fused(x, x.dtype):
        from trimtab.linear import kernels

        return kernels.pack(x, FORMATS[fmt], BITS[fmt])
    if amax is None:
        amax = group_amax(x, "token")
    else:
        amax = torch.where(x.isfinite().all(1, keepdim=True), amax, torch.nan)
    scale = amax_scale(amax, FORMATS[fmt])
    y = round_to(x.float() / scale, FORMATS[fmt])
    if fmt == "e4m3":
        return y.to(torch.float8_e4m3fn).view(torch.uint8), scale
    if fmt == "int8":
        return y.nan_to_num().to(torch.int8).view(torch.uint8), scale
    if fmt == "int4":
        codes = (y.nan_to_num() + 8).to(torch.uint8)
    else:
        codes = torch.bucketize(y.abs(), x.new_tensor(BETWEEN, dtype=torch.float32)).to(torch.uint8)
        codes |= torch.signbit(y).to(torch.uint8) << 3
    if codes.shape[1] % 2:
        codes = torch.nn.functional.pad(codes, (0, 1))
    return codes[:, ::2] | codes[:, 1::2] << 4, scale


def unpack(codes: Tensor, scale: Tensor, fmt: str, columns: int, dtype: torch.dtype) -> Tensor:
    """The tokens (T, columns) again, in a type."""
    if _fused(codes, dtype):
        from trimtab.linear import kernels

        return kernels.unpack(codes, scale, FORMATS[fmt], BITS[fmt], columns, dtype)
    if fmt == "e4m3":
        y = codes.view(torch.float8_e4m3fn).float()
    elif fmt == "int8":
        y = codes.view(torch.int8).float()
    else:
        pairs = torch.stack((codes & 15, codes >> 4), dim=-1).flatten(1)[:, :columns]
        y = pairs.float() - 8 if fmt == "int4" else _table(codes.device)[pairs.int()]
    return (y * scale).to(dtype)


def _fused(x: Tensor, dtype: torch.dtype) -> bool:
    """Whether one launch does it."""
    return x.is_cuda and has_triton() and x.numel() > 0 and dtype in TYPES


def _table(device: torch.device) -> Tensor:
    return torch.tensor([*MAGNITUDES, *(-m for m in MAGNITUDES)], device=device)
