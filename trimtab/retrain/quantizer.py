# SPDX-License-Identifier: Apache-2.0
"""Learnable clipping and LoRA: one weight matrix in few bits, and the four small tensors that are trained for it.

The weight W is frozen. Each group of G numbers along a row has two trained numbers, a and c, both 4 at the start
(sigmoid(4) = 0.982): they pull in the ends of its range (OmniQuant's learnable weight clipping, used by ApiQ).

    hi = sigmoid(a) * max(w, 0)      lo = sigmoid(c) * min(w, 0)      N = 2^b - 1 levels above the lowest
    asymmetric   s = (hi - lo) / N                               z = round(-lo / s)
    symmetric    s = max(hi, -lo) / (2^(b-1) - 1)                z = 2^(b-1) - 1
    Q(w) = s * (clamp(round(w / s) + z, 0, N) - z)               s in [1e-5, 1e4]

Roundings are straight-through, so a and c learn through s, z and the clamp. A range always contains 0: then z is one of
the levels and needs b bits (ApiQ's formula differs only for a group of one sign, where its z may be any number). Two
bits symmetric are the levels -1, 0, 1, 2 times s, where 2 is never reached: three values, in truth.

Beside Q stand the LoRA factors A (r, in) and B (out, r), B = 0 at the start: the weight that is used is
Q + (alpha / r) * B A. It is multiplied out once per step, because the gradient of a and c needs that of the whole
matrix anyway; then the factors cost 3 * 2r operations per weight and step, and none per token.

`freeze` rounds what is stored, scale and factors, to 16 bits, and makes codes of the rest (`packed.py`).
"""

import torch
from torch import Tensor, nn

from trimtab.errors import TrimtabError
from trimtab.linear.quantize import affine_quant
from trimtab.retrain.packed import Packed
from trimtab.retrain.settings import Settings

START = 4.0
SCALE_RANGE = (1e-5, 1e4)


def to_groups(w: Tensor, group: int) -> Tensor:
    """A matrix (out, in) as (out, groups, group); a short last group is filled up with its last column."""
    missing = -w.shape[1] % group
    if missing:
        w = torch.cat((w, w[:, -1:].expand(-1, missing)), dim=1)
    return w.reshape(w.shape[0], -1, group)


def from_groups(groups: Tensor, columns: int) -> Tensor:
    """Undo `to_groups`."""
    return groups.flatten(1)[:, :columns]


def clipped_grid(
    high: Tensor,  # (..., 1) the largest weight of each group, at least 0
    low: Tensor,  # (..., 1) the least, at most 0
    a: Tensor,
    c: Tensor,
    *,
    bits: int,
    symmetric: bool,
) -> tuple[Tensor, Tensor]:
    """Scale and zero point of each group; both differentiable in a and c."""
    hi, lo = a.sigmoid() * high, c.sigmoid() * low
    if symmetric:
        half = 2 ** (bits - 1) - 1
        scale = torch.maximum(hi, -lo) / half
        return scale.clamp(*SCALE_RANGE), torch.full_like(scale, half)
    scale = ((hi - lo) / (2**bits - 1)).clamp(*SCALE_RANGE)
    exact = -lo / scale
    return scale, exact + (exact.round() - exact).detach()


class ClippedLora(nn.Module):
    """A frozen weight with its clipping and its LoRA factors; calling it gives the weight to use, in FP32.

    Args:
        weight: (out, in); it is copied and never changed.
        generator: for A, on the CPU: the same numbers on every device.
    """

    groups: Tensor
    high: Tensor
    low: Tensor

    def __init__(self, weight: Tensor, settings: Settings, *, generator: torch.Generator | None = None) -> None:
        super().__init__()
        rows, self.columns = weight.shape
        self.settings = settings
        groups = to_groups(weight.detach().to(torch.promote_types(weight.dtype, torch.float32)), settings.group)
        low, high = groups.aminmax(dim=-1, keepdim=True)
        if not bool(torch.isfinite(low + high).all()):
            raise TrimtabError("a weight to quantize must be finite, and this one is not: repair the model first")
        for name, value in (("groups", groups), ("high", high.clamp(min=0)), ("low", low.clamp(max=0))):
            self.register_buffer(name, value, persistent=False)
        self.a = nn.Parameter(torch.full_like(high, START))
        self.c = nn.Parameter(torch.full_like(low, START))
        self.A = self.B = None
        if settings.rank:
            bound = self.columns**-0.5  # of kaiming_uniform with a = sqrt(5), which peft draws A with
            drawn = torch.empty(settings.rank, self.columns).uniform_(-bound, bound, generator=generator)
            self.A = nn.Parameter(drawn.to(weight.device, groups.dtype))
            self.B = nn.Parameter(groups.new_zeros(rows, settings.rank))

    def grid(self) -> tuple[Tensor, Tensor]:
        """Scale and zero point of each group, (out, groups, 1)."""
        settings = self.settings
        return clipped_grid(self.high, self.low, self.a, self.c, bits=settings.bits, symmetric=settings.symmetric)

    def quantized(self) -> Tensor:
        """Q(W), of W's shape."""
        return from_groups(affine_quant(self.groups, *self.grid(), self.settings.bits), self.columns)

    def merged(self, quantized: Tensor) -> Tensor:
        """Q + (alpha / r) * B A."""
        if self.A is None or self.B is None:
            return quantized
        return torch.addmm(quantized, self.B, self.A, alpha=self.settings.factor)

    def forward(self) -> Tensor:
        return self.merged(self.quantized())

    def clipping(self) -> list[nn.Parameter]:
        """What learns with `lr_clip`."""
        return [self.a, self.c]

    def factors(self) -> list[nn.Parameter]:
        """What learns with `lr_lora`."""
        return [] if self.A is None or self.B is None else [self.A, self.B]

    @torch.no_grad()
    def freeze(self) -> Packed:
        """What is stored: codes, 16-bit scales and factors, zero points."""
        scale, zero = self.grid()
        scale = scale.half()
        bits = self.settings.bits
        codes = (self.groups / scale.to(self.groups.dtype) + zero).round().clamp(0, 2**bits - 1)
        return Packed.make(
            from_groups(codes, self.columns).to(torch.uint8),
            scale.squeeze(-1),
            None if self.settings.symmetric else zero.squeeze(-1).to(torch.uint8),
            None if self.A is None else self.A.half(),
            None if self.B is None else self.B.half(),
            settings=self.settings,
        )
