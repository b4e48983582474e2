# SPDX-License-Identifier: Apache-2.0
"""A low-rank message for one gradient matrix, and a basis that makes it a good one.

A matrix H (a x b, a <= b) is sent as R = P^T H (r x b) and read as P R, where P holds r columns of a complete
orthonormal basis U. What P R misses, E = H - P R, stays here and is added to the next gradient. U comes from one
eigendecomposition of a mean gradient and serves for many steps; which r of its columns are used is decided in every
step. Because U is complete, nothing can hide from it: columns drawn at random miss (1 - r/a) |H|^2 on average, the
strongest ones less, whereas r *fixed* columns would let the rest pile up for ever (arXiv 2507.08784, Proposition 1).

The choice has to be the same on all ranks and good for their mean. One number per column tells: with v ~ N(0, I),
lambda_j = <row j of U^T H, v_j> is linear in H, so that its mean over ranks is that of the mean gradient, and its
square has the expectation |row j of U^T mean(H)|^2. Averaging comes first, squaring second; the other way round would
measure the ranks' noise. All that travels is linear in H: N ranks do exactly what one would do with their mean.
"""

from collections.abc import Iterable, Iterator
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor


class Size(NamedTuple):
    """What the byte counts need to know of a matrix."""

    a: int
    """The shorter side, and that of the basis."""
    b: int
    rank: int


# Orientation


def orient(tensor: Tensor) -> Tensor:  # (m, n) or (m, ...) -> (a, b)
    """The tensor as a matrix with a <= b: dimensions after the first are flattened, a tall matrix is transposed."""
    flat = tensor.flatten(1)
    return flat.t() if flat.shape[0] > flat.shape[1] else flat


def unorient(matrix: Tensor, shape: torch.Size) -> Tensor:  # (a, b) -> shape
    """The oriented matrix in the shape that it came from."""
    return (matrix.t() if shape[0] > prod(shape[1:]) else matrix).reshape(shape)


def size_of(shape: torch.Size, rank: int | float) -> Size:
    """The sides of an oriented tensor, and its rank: a count, or a share of the shorter side; at least 1, at most a."""
    a, b = sorted((shape[0], prod(shape[1:])))
    return Size(a, b, min(a, rank if isinstance(rank, int) else max(1, int(rank * a + 1e-9))))


# The method


def refresh(mean: Tensor) -> Tensor:  # (a, b) -> (a, a)
    """A complete orthonormal basis: the left singular vectors of a matrix, the strongest first.

    They are found as eigenvectors of the Gram matrix, whose squared condition number does no harm, because any
    complete orthonormal basis is valid. Dividing by the largest entry keeps squares from overflow and underflow, and
    entries that are not finite count as 0, because `eigh` raises on them.
    """
    limits = torch.finfo(mean.dtype)
    mean = mean.nan_to_num(0.0, 0.0, 0.0)
    mean = mean / mean.abs().amax().clamp_min(limits.tiny)
    return torch.linalg.eigh(mean @ mean.t()).eigenvectors.flip(1)


def probes(seed: int, step: int, index: int, num: int, like: Tensor) -> Iterator[Tensor]:  # num of (a, b)
    """The shared Gaussian vectors of one matrix in one step; the generator is private and the same on every rank."""
    generator = torch.Generator(like.device).manual_seed(mix(seed, step, index))
    for _ in range(num):
        yield torch.randn(like.shape, generator=generator, device=like.device, dtype=like.dtype)


def scores(matrix: Tensor, basis: Tensor, vectors: Iterable[Tensor]) -> Tensor:  # (a, b), (a, a) -> (q, a)
    """lambda: for each probe and each column of the basis, one number that is linear in the matrix."""
    rows = basis.t() @ matrix
    return torch.stack([(rows * v).sum(1) for v in vectors])


def select(mean_scores: Tensor, rank: int) -> Tensor:  # (q, a) -> (rank,)
    """J: the columns with the largest sum of squared mean scores; of equal ones the first."""
    return mean_scores.square().sum(0).sort(descending=True, stable=True).indices[:rank]


def compress(matrix: Tensor, basis: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:  # (a, b) -> (a, r), (r, b)
    """P and R: the chosen columns, and the matrix as they see it."""
    p = basis.index_select(1, chosen)
    return p, p.t() @ matrix


def residual(matrix: Tensor, p: Tensor, r: Tensor) -> Tensor:  # (a, b)
    """E: what the message does not say. Give it R as it was sent, after rounding, and nothing is lost."""
    return torch.addmm(matrix, p, r, alpha=-1)


def mix(*numbers: int) -> int:
    """One 64-bit seed from several numbers, by the finalizer of SplitMix64: near numbers give unrelated seeds."""
    mask, mixed = (1 << 64) - 1, 0
    for number in numbers:
        mixed = (mixed + number + 0x9E3779B97F4A7C15) & mask
        mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & mask
        mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & mask
        mixed ^= mixed >> 31
    return mixed


# Bytes


def low_rank_numbers(size: Size, num_probes: int) -> int:
    """Numbers that one matrix sends in a low-rank step: scores and factor."""
    return num_probes * size.a + size.rank * size.b


def mean_bytes(size: Size, every: int, num_probes: int, itemsize: int) -> float:
    """Bytes per step of one matrix, over a whole period: one dense step with its basis, every - 1 low-rank ones."""
    numbers = size.a * size.b + (every - 1) * low_rank_numbers(size, num_probes)
    return (itemsize * numbers + basis_itemsize(itemsize) * size.a**2) / every


def basis_itemsize(itemsize: int) -> int:
    """Bytes of a number in a basis, which is FP32 at least."""
    return max(4, itemsize)


def pays(size: Size, every: int, num_probes: int, itemsize: int) -> bool:
    """The gate: whether a matrix sends at most half of its bytes, all costs included."""
    return 2 * mean_bytes(size, every, num_probes, itemsize) <= itemsize * size.a * size.b
