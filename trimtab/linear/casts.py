# SPDX-License-Identifier: Apache-2.0
"""Apply one `Cast` to one operand: group it, find the scale by the cast's rule, round, scale back.

This is `fake_quant` with the other scale rules of `scales.py` and without autograd: it runs inside the
linear's own autograd function. `change_amax` sees the amax before it becomes a scale and may replace it (delayed
scaling, injected faults); the values may then lie beyond the scale, so they saturate.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from trimtab.linear.formats import FORMATS
from trimtab.linear.paths import Cast
from trimtab.linear.quantize import amax_cast, from_groups, group_amax, scaled_round, spread, to_groups
from trimtab.linear.scales import shared_scale, std_scale, two_level_scale


def apply_cast(
    x: Tensor,
    cast: Cast,
    *,
    change_amax: Callable[[Tensor], Tensor] | None = None,
    generator: torch.Generator | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Quantize and dequantize x; the second result is the mask of values inside the range, for `scale="std"` only."""
    fmt = FORMATS[cast.fmt]
    if x.numel() == 0:
        return x, torch.ones_like(x, dtype=torch.bool) if cast.scale == "std" else None
    amax = None if cast.scale == "std" or change_amax is None else change_amax(group_amax(x, cast.group))
    rounding: dict[str, Any] = {"rounding": cast.rounding, "generator": generator}
    if cast.scale == "amax":
        return amax_cast(x, fmt, cast.group, pow2_scale=cast.pow2_scale, amax=amax, **rounding), None
    groups, dims = to_groups(x.float(), cast.group)
    if cast.scale == "std":
        scale = std_scale(groups, dims, fmt)
    else:
        found = group_amax(x, cast.group) if amax is None else amax
        shared = cast.scale == "shared"
        scale = shared_scale(found, fmt, range_factor=cast.range_factor) if shared else two_level_scale(found, fmt)
        scale = spread(scale, cast.group)
    # A measured amax keeps every value in range; one that came from elsewhere does not.
    out = scaled_round(groups, scale, fmt, saturate=change_amax is not None, **rounding)
    mask = None
    if cast.scale == "std":
        mask = from_groups((groups / scale).abs() < fmt.max, cast.group, x.shape)
    return from_groups(out, cast.group, x.shape).to(x.dtype), mask
