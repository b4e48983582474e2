# SPDX-License-Identifier: Apache-2.0
"""What a fault does to a tensor: pure functions that return a damaged copy.

Which elements are hit follows from a number, `place`, and the shape; nothing is drawn, so two runs fail alike.
"""

import math

import torch
from torch import Tensor

FEATURE_BLOCK = 16
FLIP = 256.0
SPIKE_EVERY = 4096


def zeroed(features: int, share: float, place: int) -> Tensor:
    """Which features are zeroed: a share of the blocks of 16, evenly spaced from a place on; at least one block."""
    num_blocks = math.ceil(features / FEATURE_BLOCK)
    num_hit = max(1, round(share * num_blocks))
    hit = torch.zeros(num_blocks, dtype=torch.bool)
    hit[(place + torch.arange(num_hit) * num_blocks // num_hit) % num_blocks] = True
    return hit.repeat_interleave(FEATURE_BLOCK)[:features]


def flipped(g: Tensor, share: float, place: int) -> Tensor:
    """Multiply every n-th element by 2^8, n = 1 / share, from a place on; at least one element."""
    flat = g.reshape(-1).clone()
    every = min(round(1 / share), max(flat.numel(), 1))
    flat[place % every :: every] *= FLIP
    return flat.view(g.shape)


def spiked(g: Tensor, size: float, place: int) -> Tensor:
    """Set every 4,096th coordinate to `size` times the mean magnitude, its own sign kept; at least one coordinate.

    Size is then the spike score of SPAM (arXiv 2501.06842), up to 1,000 in the runs it reports.
    """
    flat = g.reshape(-1).clone()
    every = min(SPIKE_EVERY, max(flat.numel(), 1))
    hit = flat[place % every :: every]
    hit.copy_(torch.where(hit < 0, -1.0, 1.0) * size * flat.abs().mean())
    return flat.view(g.shape)


def with_nan(x: Tensor, place: int) -> Tensor:
    """A copy with one NaN."""
    flat = x.reshape(-1).clone()
    if flat.numel():
        flat[place % flat.numel()] = math.nan
    return flat.view(x.shape)
