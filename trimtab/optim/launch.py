# SPDX-License-Identifier: Apache-2.0
"""One Triton launch for many tensors: the tables that tell each block of it what to work on.

A model has hundreds of tensors, and a launch each would cost the host more than the GPU. So a kernel gets a table of
addresses, one row per tensor, and two of blocks:

    owner, start   (blocks,)    which tensor a block works on, and from which element; kept between steps

Tables go up from pinned memory, so nobody waits. What runs on them is in `fused.py` and `scaling.py`, which need Triton
to be imported; this file does not.
"""

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

BLOCK = 2048


def table(rows: Any, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A table on the device."""
    values = torch.as_tensor(rows, dtype=dtype)
    return values.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else values


@lru_cache(maxsize=64)
def blocks(sizes: tuple[int, ...], device: torch.device) -> tuple[Tensor, Tensor]:
    """Of each block: its tensor, and its first element there."""
    counts = [-(-size // BLOCK) for size in sizes]
    owner = torch.arange(len(sizes)).repeat_interleave(torch.tensor(counts))
    start = torch.cat([torch.arange(count) for count in counts]) * BLOCK
    return table(owner, torch.int32, device), table(start, torch.int64, device)
