# SPDX-License-Identifier: Apache-2.0
"""Sparse momentum: SPAM's moments for a random share of a matrix, with a mask that nobody stores.

With density d < 1 a matrix of `cols` columns keeps moments for `kept = max(1, floor(d * cols))` entries of each row.
Between two resets only these entries move (the others only decay); at each reset the choice is drawn anew. So it
is a random subset that is trained, not only a state that is compressed.

The mask is a function, not a tensor. Slot j of a row takes one column of its own stratum,

    stratum j   = [ floor(j * cols / kept), floor((j + 1) * cols / kept) )           a partition of the columns
    column(j)   = its start + floor(u * its width),     u in [0, 1) from the hash of (key, global row, j)
    key         = hash of (seed, the parameter's position in the optimizer, the number of resets so far)

so that a row has exactly `kept` different columns: the moments are a plain (rows, kept) matrix which shards, saves
and resumes like any other. If kept does not divide cols, strata differ in width; each row is then turned by a
hashed offset (modulo cols), which makes every column equally likely again: exactly kept / cols.

The hash is splitmix64's finalizer on a counter, in int64 tensor operations that wrap and never round: the same mask
on every device, on every torch, and (rows being numbered globally) for every number of processes.

The published code (arXiv 2501.06842) draws the first mask with an exact count over the whole matrix and later ones
as independent coin flips, and stores them. Then the state changes its size at every reset, a boolean per entry is
kept beside it, and each rank of a sharded run draws its own. Marginals are the same; ours trains each row evenly.
"""

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trimtab.checks import require
from trimtab.optim.kernels import Work, spam_
from trimtab.shards import is_dtensor

WORD = 1 << 64
CHUNK = 1 << 17
"""Slots in a piece on a CPU; their hashes and columns are int64, so it is smaller than a dense piece."""


def signed(word: int) -> int:
    """The 64 bits of a word as torch's int64 sees them."""
    word %= WORD
    return word - WORD if word >= WORD // 2 else word


GOLDEN, FIRST, SECOND = signed(0x9E3779B97F4A7C15), signed(0xBF58476D1CE4E5B9), signed(0x94D049BB133111EB)
MASK34, MASK37, MASK31 = (1 << 34) - 1, (1 << 37) - 1, (1 << 31) - 1


def is_sparse(shape: torch.Size, density: float) -> bool:
    """Whether a parameter of this shape has sparse moments: matrices do, everything else stays dense."""
    return density < 1 and len(shape) == 2 and shape.numel() > 0


def moment_shape(shape: torch.Size, density: float) -> torch.Size:
    """The shape of a parameter's moments: (rows, kept) if they are sparse."""
    if not is_sparse(shape, density):
        return shape
    return torch.Size((shape[0], max(1, math.floor(density * shape[1] + 1e-9))))


def key_of(seed: int, position: int, num_resets: int) -> int:
    """The key of a parameter's mask, as a signed 64-bit integer."""
    key = 0
    for part in (seed, position, num_resets):
        key = ((key ^ part) + GOLDEN) % WORD
        key = ((key ^ (key >> 30)) * FIRST) % WORD
        key = ((key ^ (key >> 27)) * SECOND) % WORD
        key ^= key >> 31
    return signed(key)


class Mask(NamedTuple):
    """All that is needed to draw the mask of a shard."""

    key: int
    first_row: int
    """The global number of the shard's first row."""
    cols: int
    kept: int


def uniform31_(counter: Tensor, key: int) -> Tensor:
    """31 random bits for each counter, in its place: the top bits of splitmix64."""
    x = counter.mul_(GOLDEN).add_(key)
    x ^= (x >> 30).bitwise_and_(MASK34)
    x *= FIRST
    x ^= (x >> 27).bitwise_and_(MASK37)
    x *= SECOND
    x >>= 33
    return x.bitwise_and_(MASK31)


def columns(mask: Mask, start: int, stop: int, device: torch.device | str = "cpu") -> Tensor:
    """The chosen columns of the shard's rows start to stop: (stop - start, kept) int64, all different in a row."""
    rows = torch.arange(mask.first_row + start, mask.first_row + stop, device=device)[:, None]
    slots = torch.arange(mask.kept, device=device)
    bounds = torch.arange(mask.kept + 1, device=device).mul_(mask.cols).div_(mask.kept, rounding_mode="floor")
    chosen = uniform31_(rows * mask.kept + slots, mask.key)
    chosen.mul_(bounds.diff()).bitwise_right_shift_(31).add_(bounds[:-1])
    if mask.cols % mask.kept:
        turn = uniform31_(rows.clone(), ~mask.key).mul_(mask.cols).bitwise_right_shift_(31)
        chosen += turn
        chosen -= (chosen >= mask.cols) * mask.cols
    return chosen


def loop_(work: Sequence[Work]) -> None:
    """One SPAM update of the chosen entries of each matrix; then the decay of all its entries."""
    for p, g, m, v, c, mask in work:
        assert mask is not None
        rows = max(1, CHUNK // mask.kept) if p.is_cpu else len(p)
        for start in range(0, len(p), rows):
            part = slice(start, start + rows)
            chosen = columns(mask, start, min(start + rows, len(p)), p.device)
            values = p[part].gather(1, chosen)
            spam_(values, g[part].gather(1, chosen), m[part], v[part], c._replace(decay=0.0))
            p[part].scatter_(1, chosen, values)
        if c.decay:
            p.mul_(1 - c.decay)


def zeros(p: Tensor, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """Sparse moments of a matrix, sharded as it is."""
    if not is_dtensor(p):
        return torch.zeros(shape, dtype=dtype, device=p.device)
    _check_rows(p.placements)
    local = torch.zeros(len(p.to_local()), shape[1], dtype=dtype, device=p.device)
    # The full shape must be told: without it torch multiplies, and is wrong where shards are uneven.
    return type(p).from_local(local, p.device_mesh, p.placements, run_check=False, shape=shape, stride=(shape[1], 1))


def first_row(p: Tensor) -> int:
    """The global number of the first row that this process holds."""
    return _first_row(p.shape, p.device_mesh, p.placements) if is_dtensor(p) else 0


def _check_rows(placements: Sequence[Any]) -> None:
    from torch.distributed.tensor import Replicate, Shard

    # A strided shard (FSDP over tensor parallel) may be a Shard by inheritance, but its rows are not one range.
    rows = all(type(one) is Replicate or (type(one) is Shard and one.dim == 0) for one in placements)
    rule = "sparse momentum needs whole rows on each rank (Shard(0) or Replicate): give this parameter density=1.0"
    require(rows, rule, tuple(placements))


@lru_cache(maxsize=4096)
def _first_row(shape: torch.Size, mesh: Any, placements: tuple[Any, ...]) -> int:
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    return compute_local_shape_and_global_offset(shape, mesh, placements)[1][0]
