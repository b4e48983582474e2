# SPDX-License-Identifier: Apache-2.0
"""A mean over ranks that sends one bit per number, and remembers what the bits left out.

C(z) = scale * sign(z) keeps the signs of a tensor and one number. What it drops is kept as an error and added to the
next message, so over many steps nothing is lost. Two rounds give every rank the same mean, bit for bit; with N ranks,
and every tensor cut into N chunks of which rank j serves the j-th:

    worker i    c_i = C(x_i + e_i)                  e_i <- x_i + e_i - c_i          signs of chunk j go to rank j
    server j    u_j = C(mean_i c_i + d_j)           d_j <- mean_i c_i + d_j - u_j   signs of u_j go to everybody
    all         mean = u_1, ..., u_N                mean + mean_i e_i' + d' = mean_i x_i + mean_i e_i + d

    scale    "l2": |z|_2 / sqrt(n), the paper's; "l1": |z|_1 / n, under which C never expands (|z - C(z)| < |z|)
    sign     +1 for zero
    n        elements of the tensor (worker), or of its part in the chunk (server); padding never counts

All tensors travel together. On rank j's row, tensor after tensor, lie the packed signs of its chunk, then one FP32
scale per tensor, so a step is two collectives of this many bytes, whatever the number of tensors:

    chunk_k = n_k / N, rounded up to a multiple of 8        row = sum_k (chunk_k / 8 + 4)
    all_to_all of N rows, all_gather of one                 2 (N - 1) row sent per rank: 1/32 of dense FP32

The scales carry two more facts for free. A scale below zero says that its worker has no gradient for this tensor; if
no worker has, the tensor is left alone. A scale that is not finite says that a gradient is not, or that a worker
wants no step, and all is left alone. Every rank reads the same scales, so all decide alike, without asking the host.

    a flat buffer holds every tensor, one after the other, each padded with zeros to N chunks: x_i, e_i, the mean
    a server's holds this rank's chunk of every tensor, one after the other: d_j
"""

# pyright: reportPrivateImportUsage=false
# (foreach operations are what torch.optim itself is written with)

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from trimtab.checks import require
from trimtab.comm.traffic import Group, all_gather, all_reduce, all_to_all

SCALES = ("l2", "l1")
GATHER = 0x0102040810204080
"""Eight bytes of 0 or 1, the first in the lowest, times this are bits in the highest byte, the first in its lowest."""
Device = torch.device | None


def sign_pack(x: Tensor) -> Tensor:  # (..., n) -> (..., ceil(n / 8)) uint8
    """The signs along the last dimension, eight to a byte, the first in the lowest bit; a short byte ends in ones."""
    bits = torch.nn.functional.pad(x >= 0, (0, -x.shape[-1] % 8), value=True)
    words = bits.contiguous().view(torch.int64)  # eight bytes of 0 or 1; the product gathers them in the highest
    return (words.mul_(GATHER) >> 56).to(torch.uint8)


def sign_unpack(packed: Tensor, n: int, dtype: torch.dtype = torch.float32) -> Tensor:  # (..., ceil(n / 8)) -> (..., n)
    """What was packed, as numbers: +1 or -1."""
    return _signs(packed.device, dtype)[packed.int()].flatten(-2)[..., :n]


@lru_cache(maxsize=16)
def _signs(device: torch.device, dtype: torch.dtype) -> Tensor:  # (256, 8)
    """The eight signs of every byte."""
    return ((torch.arange(256).unsqueeze(1) >> torch.arange(8)) & 1).mul(2).sub(1).to(device, dtype)


def scaled_(pieces: Sequence[Tensor], scales: Tensor) -> None:  # K pieces, (K,)
    """Multiply each piece by its scale."""
    for piece, scale in zip(pieces, scales.unbind(), strict=True):
        piece.mul_(scale)


def leave_(errors: Sequence[Tensor], values: Sequence[Tensor], scales: Tensor, live: Tensor) -> None:
    """What C leaves out of each value becomes its error, where the tensor is live."""
    for error, value, scale, is_live in zip(errors, values, scales.unbind(), live.unbind(), strict=True):
        made = (value >= 0).to(value.dtype).mul_(2).sub_(1).mul_(scale)
        put_(error, torch.sub(value, made, out=made), is_live)


def put_(into: Tensor, new: Tensor, wanted: Tensor) -> None:
    """Copy where a flag says so. On a GPU nobody waits for it; on a CPU a look is cheaper than a choice per number."""
    if wanted.device.type != "cpu":
        new = torch.where(wanted, new, into)
    elif not wanted:
        return
    into.copy_(new)


@dataclass(frozen=True)
class Layout:
    """Where each tensor lies in a flat buffer, and each chunk in a row."""

    sizes: tuple[int, ...]
    num_ranks: int

    @cached_property
    def chunks(self) -> list[int]:
        """Elements of each tensor's chunk, padding included: a multiple of 8."""
        return [-(-size // (8 * self.num_ranks)) * 8 for size in self.sizes]

    @cached_property
    def spans(self) -> list[int]:
        """Elements of each padded tensor."""
        return [chunk * self.num_ranks for chunk in self.chunks]

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return sum(self.chunks) // 8 + 4 * len(self.sizes)

    def parts(self, rank: int) -> list[int]:
        """Real elements of each tensor in the chunk that `rank` serves."""
        return [min(max(size - rank * c, 0), c) for size, c in zip(self.sizes, self.chunks, strict=True)]

    def views(self, flat: Tensor, shapes: Sequence[torch.Size] | None = None) -> list[Tensor]:
        """The tensors in a flat buffer, without their padding."""
        pieces = [piece[:size] for piece, size in zip(flat.split(self.spans), self.sizes, strict=True)]
        return pieces if shapes is None else [p.view(shape) for p, shape in zip(pieces, shapes, strict=True)]

    def chunked(self, flat: Tensor) -> list[tuple[Tensor, int]]:
        """Each padded tensor in a flat buffer, and the size of its chunks."""
        return list(zip(flat.split(self.spans), self.chunks, strict=True))

    def rows(self, packed: Tensor, scales: Tensor) -> Tensor:  # (total / 8,), (K,) -> (N, row_bytes)
        """What is sent: to each rank the signs of its chunk, and all scales."""
        pieces = packed.split([span // 8 for span in self.spans])
        numbers = scales.view(torch.uint8).expand(self.num_ranks, -1)
        return torch.cat([*(piece.view(self.num_ranks, -1) for piece in pieces), numbers], dim=1)

    def read(self, rows: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """What C made on the rows of N ranks (N, sum of chunks), and its scales as they were sent (N, K)."""
        packed, numbers = rows.split([sum(self.chunks) // 8, 4 * len(self.sizes)], dim=1)
        values, scales = sign_unpack(packed, sum(self.chunks), dtype), numbers.contiguous().view(torch.float32)
        for value, scale in zip(values, scales.abs().to(dtype), strict=True):
            scaled_(value.split(self.chunks), scale)
        return values, scales

    def flat(self, rows: Tensor) -> Tensor:  # (N, sum of chunks) -> (total,)
        """The flat buffer of which row j is what rank j serves."""
        return torch.cat([part.reshape(-1) for part in rows.split(self.chunks, dim=1)])


def scales_of(pieces: Sequence[Tensor], counts: Sequence[int], scale: str) -> Tensor:  # (K,) float32
    """The scale of each piece, over its real number of elements; 0 for an empty one."""
    wide = torch.float32 if pieces[0].device.type == "mps" else torch.float64
    norms = torch._foreach_norm(list(pieces), 2 if scale == "l2" else 1, wide)
    real = [float(max(count, 1)) for count in counts]
    torch._foreach_div_(norms, [math.sqrt(n) for n in real] if scale == "l2" else real)
    return torch.stack(norms).float()


def clear_padding_(flat: Tensor, spans: Sequence[int], counts: Sequence[int]) -> Tensor:
    """Zero what lies behind the real elements of each piece."""
    padding = [piece[n:] for piece, n in zip(flat.split(list(spans)), counts, strict=True) if n < piece.numel()]
    if padding:
        torch._foreach_zero_(padding)
    return flat


class Errors(NamedTuple):
    """What compression has left out so far, on this rank: e_i and d_j."""

    layout: Layout
    worker: Tensor  # (sum of spans,)
    server: Tensor  # (sum of chunks,)

    @classmethod
    def zeros(cls, layout: Layout, dtype: torch.dtype = torch.float32, device: Device = None) -> "Errors":
        """Errors of the first step."""
        sums = sum(layout.spans), sum(layout.chunks)
        return cls(layout, *(torch.zeros(n, dtype=dtype, device=device) for n in sums))

    def pieces(self) -> list[tuple[Tensor, Tensor]]:
        """Both errors of each tensor, as views."""
        return list(zip(self.layout.views(self.worker), self.server.split(self.layout.chunks), strict=True))

    def residuals(self, group: Group = None) -> list[Tensor]:
        """mean_i e_i + d of each tensor, equal on all ranks; a collective."""
        whole, rank = self.worker.clone(), dist.get_rank(group)
        mine = [piece[rank * c : (rank + 1) * c] for piece, c in self.layout.chunked(whole)]
        torch._foreach_add_(mine, self.server.split(self.layout.chunks), alpha=self.layout.num_ranks)
        all_reduce(whole, group, op=dist.ReduceOp.AVG)
        return self.layout.views(whole)


@torch.no_grad()
def onebit_mean(
    flat: Tensor,  # (sum of spans,)
    errors: Errors,
    group: Group = None,
    *,
    scale: str = "l2",
    absent: Collection[int] = (),
    found_inf: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # (sum of spans,), (K,) bool
    """The mean over ranks in two collectives, and which tensors it is good for; errors change in place.

    Args:
        flat: this rank's tensors; the memory is used up.
        absent: numbers of the tensors for which this rank has no gradient.
        found_inf: above zero, this rank wants no step.
    """
    layout, worker_err, server_err = errors
    num_ranks = dist.get_world_size(group)
    require(num_ranks == layout.num_ranks, f"the layout is one of {layout.num_ranks} ranks: build another", num_ranks)
    parts = layout.parts(dist.get_rank(group))

    z = flat.add_(worker_err)
    mine = scales_of(layout.views(z), layout.sizes, scale)
    for k in absent:
        mine[k].neg_()
    if found_inf is not None:
        mine = torch.where(found_inf.to(mine.device) > 0, math.nan, mine)
    rows = layout.rows(sign_pack(z), mine)
    received, replies = torch.empty_like(rows), torch.empty_like(rows)
    all_to_all(received, rows, group)

    values, theirs = layout.read(received, z.dtype)
    y = values.mean(0).add_(server_err)
    clear_padding_(y, layout.chunks, parts)
    served = scales_of(y.split(layout.chunks), parts, scale)
    served = torch.where(theirs.signbit().all(0), -served, served)
    all_gather(replies.view(-1), torch.cat([sign_pack(y), served.view(torch.uint8)]), group)

    values, final = layout.read(replies, z.dtype)
    mean = layout.flat(values)
    live = ~final[0].signbit() & final.isfinite().all()
    leave_(layout.views(worker_err), layout.views(z), mine.abs().to(z.dtype), live)
    ours, chunks = server_err.split(layout.chunks), y.split(layout.chunks)
    ours, chunks = ([piece[:n] for piece, n in zip(pieces, parts, strict=True)] for pieces in (ours, chunks))
    leave_(ours, chunks, served.abs().to(z.dtype), live)
    return mean, live
