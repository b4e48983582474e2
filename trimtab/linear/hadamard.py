# SPDX-License-Identifier: Apache-2.0
"""The blockwise Hadamard rotation: spreads an outlier over its group before the group is quantized.

Both operands of a GEMM are rotated along the inner dimension; the rotation R is orthogonal, so

    (A R)(B R)^T = A B^T

and the result does not change, only the quantization error does. R is block-diagonal: each group of `size`
elements is multiplied by H / sqrt(size), H the Sylvester matrix, after an optional flip of signs. An inner
dimension that is no multiple of `size` is padded with zeros, which the GEMM does not notice.

It is computed by butterflies (log2(size) rounds of sums and differences) in FP32: no matrix product, so the
bits are the same on every device and TF32 settings do not matter.
"""

import functools
import zlib

import torch
from torch import Tensor, nn

from trimtab.errors import TrimtabError


def check_size(size: int) -> int:
    """Refuse a rotation size that is not 0 (none) or a power of two."""
    if not isinstance(size, int) or size < 0 or size & (size - 1):
        raise TrimtabError(f"hadamard must be 0 (no rotation) or a power of two such as 16 or 32, got {size!r}")
    return size


def _transform(groups: Tensor) -> Tensor:
    """H x / sqrt(size) along the last dimension."""
    size = groups.shape[-1]
    x, half = groups, 1
    while half < size:
        a, b = x.reshape(*groups.shape[:-1], size // (2 * half), 2, half).unbind(-2)
        x = torch.stack((a + b, a - b), dim=-2)
        half *= 2
    return x.reshape(groups.shape) * size**-0.5


def rotate(x: Tensor, size: int, *, dim: int, signs: Tensor | None = None) -> Tensor:
    """Rotate x (FP32) along `dim` in groups of `size`; the dimension grows to a multiple of `size`."""
    x = x.movedim(dim, -1)
    x = nn.functional.pad(x, (0, -x.shape[-1] % size))
    groups = x.reshape(*x.shape[:-1], x.shape[-1] // size, size)
    if signs is not None:
        groups = groups * signs
    return _transform(groups).reshape(x.shape).movedim(-1, dim)


def unrotate(x: Tensor, size: int, *, dim: int, length: int, signs: Tensor | None = None) -> Tensor:
    """Undo `rotate`: H is its own inverse, so the signs come last; the padding beyond `length` is dropped."""
    x = x.movedim(dim, -1)
    groups = _transform(x.reshape(*x.shape[:-1], x.shape[-1] // size, size))
    if signs is not None:
        groups = groups * signs
    return groups.reshape(x.shape)[..., :length].movedim(-1, dim)


def random_signs(size: int, key: str) -> Tensor:
    """A vector of +-1 drawn from the key, the same on every device and every rank."""
    generator = torch.Generator().manual_seed(zlib.crc32(key.encode()))
    return torch.randint(0, 2, (size,), generator=generator).float() * 2 - 1


@functools.cache
def fixed_signs(size: int) -> Tensor:
    """The one sign vector that every layer and step shares (NVFP4, arXiv 2509.25149)."""
    return random_signs(size, "hadamard")
