# SPDX-License-Identifier: Apache-2.0
"""Norms and maxima of whole tensors when each process may hold only a piece of them.

Under FSDP2 and tensor parallelism a gradient is a DTensor: this process holds a shard, and the number wanted is
the whole tensor's. Peers get this wrong by sqrt(number of shards), or pay one collective per tensor. Here:

    local     foreach calls on the local pieces, one per (device, dtype), no wait for the device
    across    ONE all-reduce of a short vector per process group over which any of the tensors is sharded
    result    one number per tensor, in order, FP32, on the device of the first tensor

A mesh dimension that replicates a tensor holds equal copies and is left alone, so a copy counts once. A tensor
sharded over two dimensions (FSDP x TP) is summed over one, then over the other. A pending sum (`Partial`) has no
norm until it is added up: it is redistributed first, which costs a collective of the tensor's own size. Plain
tensors take no part in any collective. Every process of a mesh must pass its tensors in the same order.

Squares are summed in float64: 1e30 squared overflows FP32, and 1e-30 squared vanishes in it, while float64 holds
both, makes one process agree with many to the last bit or two of FP32, and costs nothing where memory bandwidth is
the limit. (On a device without float64, Apple's, sums are FP32, with FP32's range.) A sum with an Inf or a NaN in it
is not finite, on every process. A maximum reads any Inf or NaN as Inf, because collectives may drop a NaN in a max.

`None` (a parameter without a gradient) and an empty shard give 0.
"""

import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeGuard

import torch
import torch.distributed as dist
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

Entries = Sequence[Tensor | None]
Measure = Callable[[list[Tensor]], Sequence[Tensor]]


def local(tensor: Tensor) -> Tensor:
    """The piece of a tensor that this process holds: itself, unless it is a DTensor; the values of a sparse one."""
    if is_dtensor(tensor):
        with torch.no_grad():  # without autograd the piece shares the DTensor's memory: writing to it writes there
            tensor = tensor.to_local()
    return tensor.coalesce().values() if tensor.is_sparse else tensor


def is_dtensor(tensor: object) -> "TypeGuard[DTensor]":
    """Whether a tensor is a DTensor. Who holds one has imported their module; nobody else pays its half second."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def is_partial(tensor: Tensor) -> bool:
    """Whether a DTensor is a sum that is still to be added up over some mesh dimension."""
    return is_dtensor(tensor) and any(placement.is_partial() for placement in tensor.placements)


def by_kind(tensors: Sequence[Tensor]) -> dict[tuple[torch.device, torch.dtype], list[int]]:
    """Positions of the tensors that one foreach call can take together."""
    kinds: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for position, tensor in enumerate(tensors):
        kinds.setdefault((tensor.device, tensor.dtype), []).append(position)
    return kinds


@torch.no_grad()
def tensor_norms(tensors: Entries) -> Tensor:  # (T,) float32
    """The L2 norm of each whole tensor, as a vector in their order; 0 for None."""
    return _measure(tensors, _norms, dist.ReduceOp.SUM)


@torch.no_grad()
def tensor_maxima(tensors: Entries) -> Tensor:  # (T,) float32
    """The largest absolute value in each whole tensor, as a vector in their order; 0 for None, Inf if not finite."""
    return _measure(tensors, _maxima, dist.ReduceOp.MAX)


def total_norm(norms: Tensor) -> Tensor:  # (T,) -> (1,)
    """The norm of all tensors together, from the norms of each; does not overflow where FP32 squares would."""
    limits = torch.finfo(norms.dtype)
    peak = norms.max().clamp(limits.tiny, limits.max)
    return (torch.linalg.vector_norm(norms / peak) * peak).reshape(1)


def _norms(pieces: list[Tensor]) -> Sequence[Tensor]:
    return torch._foreach_norm(pieces, 2, _wide(pieces[0].device))  # pyright: ignore[reportPrivateImportUsage]


def _maxima(pieces: list[Tensor]) -> Sequence[Tensor]:
    maxima = torch._foreach_norm(pieces, float("inf"))  # pyright: ignore[reportPrivateImportUsage]
    wide = _wide(pieces[0].device)
    return torch.stack(maxima).to(wide).nan_to_num(nan=float("inf"), posinf=float("inf")).unbind()


def _wide(device: torch.device) -> torch.dtype:
    return torch.float32 if device.type == "mps" else torch.float64


def _measure(tensors: Entries, measure: Measure, op: dist.ReduceOp.RedOpType) -> Tensor:
    """Measure the local pieces, combine the numbers over the meshes, and line them up as one vector."""
    whole = [None if tensor is None else _settled(tensor) for tensor in tensors]
    pieces = {i: local(tensor) for i, tensor in enumerate(whole) if tensor is not None}
    place = next(iter(pieces.values())).device if pieces else torch.device("cpu")
    devices = [pieces[i].device if i in pieces else place for i in range(len(whole))]
    zero = {device: torch.zeros((), dtype=_wide(device), device=device) for device in {place, *devices}}
    numbers = [zero[device] for device in devices]
    filled = [i for i, piece in pieces.items() if piece.numel()]  # no norm is defined on nothing
    for kind in by_kind([pieces[i] for i in filled]).values():
        for k, number in zip(kind, measure([pieces[filled[k]] for k in kind]), strict=True):
            numbers[filled[k]] = number
    _combine(numbers, whole, op)
    return torch.stack([number.to(place) for number in numbers]).to(torch.float32) if numbers else torch.zeros(0)


def _combine(numbers: list[Tensor], tensors: Entries, op: dist.ReduceOp.RedOpType) -> None:
    """Reduce the numbers of sharded tensors in place, one batch per process group."""
    batches: dict[tuple[str, torch.device], tuple[dist.ProcessGroup, list[int]]] = {}
    for position, tensor in enumerate(tensors):
        for group in _groups(tensor):
            key = group.group_name, numbers[position].device
            batches.setdefault(key, (group, []))[1].append(position)
    for group, positions in batches.values():
        batch = torch.stack([numbers[position] for position in positions])
        batch = batch.square() if op == dist.ReduceOp.SUM else batch  # norms add up as squares
        dist.all_reduce(batch, op, group)
        batch = batch.sqrt() if op == dist.ReduceOp.SUM else batch
        for position, number in zip(positions, batch.unbind(), strict=True):
            numbers[position] = number


def _groups(tensor: Tensor | None) -> list[dist.ProcessGroup]:
    """The process groups over which a tensor is cut into pieces."""
    if not is_dtensor(tensor):
        return []
    mesh = tensor.device_mesh
    cut = [dim for dim, placement in enumerate(tensor.placements) if not placement.is_replicate()]
    return [mesh.get_group(dim) for dim in cut if mesh.size(dim) > 1]


def _settled(tensor: Tensor) -> Tensor:
    """The tensor with every pending sum added up."""
    if not (is_dtensor(tensor) and is_partial(tensor)):
        return tensor
    from torch.distributed.tensor import Replicate

    return tensor.redistribute(placements=[Replicate() if p.is_partial() else p for p in tensor.placements])
