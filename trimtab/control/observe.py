# SPDX-License-Identifier: Apache-2.0
"""Observe: one gradient norm per unit, read once per optimizer step.

    per parameter   foreach norms in FP32, on the device, one call per (device, dtype)
    one copy        all of them to the host at once: P floats, no `.item()` per parameter; whoever needs them waits
    per unit        n_b = sqrt(sum of squares over its parameters), in float64, rounded to float32

What `sensors` have measured besides travels in the same copy. Where several ranks share a model, each measures the
pieces it answers for, and one collective adds them up on the device before the copy (`ranks.py`).

Norms are of the gradient as the optimizer would see it before clipping: reduced, un-scaled, averaged over
micro-batches. A tied weight counts in each unit that holds it and once in the total. A parameter without a
gradient adds nothing; a unit without any gradient is not `seen`. Neither is an expert of a stack whose slice of the
gradient is exactly zero: it got no token, and a module of its own would have no gradient. All slices of a stack are one
reduction.

Clipping needs the very same norms, so `clip_grad_norm_` reuses them. A reading is reused only while it is
true: every gradient must still be the same tensor at the same version as when it was read.
"""

import operator
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from trimtab.control.ranks import Ranks, alone
from trimtab.control.sensors import Sensor
from trimtab.control.units import Unit
from trimtab.control.values import Reading
from trimtab.shards import by_kind, is_dtensor, local


class Pending(NamedTuple):
    """A reading on its way to the host."""

    vector: Tensor
    """Norms of the gradients that exist, then the sensors' columns; of several ranks, what `Ranks.add_up` returns."""
    arrived: "torch.cuda.Event | None"
    present: NDArray[np.bool_]
    """Which parameters had a gradient."""

    def wait(self) -> NDArray[np.floating]:
        """The numbers, once they are there."""
        if self.arrived is not None:
            self.arrived.synchronize()
        return self.vector.numpy()


class Observer:
    """Reads the norms of a fixed set of parameters, grouped into units."""

    def __init__(
        self,
        units: Sequence[Unit],
        parameters: Sequence[nn.Parameter],
        sensors: Sequence[Sensor] = (),
        ranks: Ranks | None = None,
    ) -> None:
        """Bind to the units, to all trainable parameters of the model, watched or not, and to attached sensors.

        Args:
            ranks: those who share the model, made for these very parameters (`measured`).
        """
        self._sensors = tuple(sensors)
        self.parameters = measured(units, parameters)
        self._ranks, self._num_units = ranks, len(units)
        self._slots = alone(units, self.parameters) if ranks is None else ranks.slots
        self._is_stack = [bool(self._slots.sliced[places].any()) for places in self._slots.places]
        self._norms: Tensor | None = None  # (P',) norms of the gradients that exist, on the device
        self._present: NDArray[np.bool_] = np.zeros(0, bool)
        self._key: list[tuple[weakref.ref[Tensor], Any]] = []
        self._places: tuple[bytes, NDArray[np.int64]] | None = None
        is_cut = any(map(is_dtensor, self.parameters))
        self._piece = _shard if is_cut else _values
        self._version: Callable[[Tensor], Any] = _versions if is_cut else operator.attrgetter("_version")
        self._clipped = False
        self._dropped = False

    def read(self) -> Reading:
        """The norms of every unit, the total and the sensors' columns: start, and wait."""
        return self.finish(self.start())

    def start(self, found_inf: Tensor | None = None) -> Pending:
        """Measure on the device and send everything to the host in one copy, without waiting for it.

        Args:
            found_inf: is set to 1 on the device if any gradient is not finite, else to 0.
        """
        further = [sensor.read() for sensor in self._sensors]
        added = bool(further)
        if self._dropped or not self._is_current():
            self._measure(further)
            added = self._ranks is None and added
        norms = self._norms
        assert norms is not None
        if found_inf is not None:
            found_inf.copy_((~torch.isfinite(self._only_norms()).all()).float())
        vector = torch.cat([norms, *self._columns(further, norms.device)]) if added else norms
        return Pending(*_to_host(vector), self._present)

    def _columns(self, further: Sequence[Tensor], place: torch.device) -> list[Tensor]:
        """The sensors' columns, added up over the ranks where these have not travelled with the norms."""
        if self._ranks is not None:
            return [self._ranks.add_up_columns(further, place)]
        return [column.to(place, non_blocking=True) for column in further]

    def finish(self, pending: Pending) -> Reading:
        """Wait for a reading that was started."""
        host, slots = pending.wait(), self._slots
        if self._ranks is None:
            exist = self._existing(pending.present)
            squares, present = np.zeros(slots.num), np.zeros(slots.num, bool)
            squares[exist], present[exist] = host[: len(exist)].astype(np.float64) ** 2, True
            columns = host[len(exist) :]
        else:
            squares, present = host[: slots.num], host[slots.num : 2 * slots.num] > 0
            columns = host[2 * slots.num :]
        present = present & ~(slots.sliced & (squares == 0))
        with np.errstate(over="ignore"):
            sums = np.bincount(slots.unit_of, squares[slots.slot_of], self._num_units)
            norms = np.sqrt(sums).astype(np.float32)
            columns = columns.reshape(-1, self._num_units).astype(np.float32)
        seen = np.bincount(slots.unit_of, present[slots.slot_of], self._num_units) > 0
        named = {sensor.column: column for sensor, column in zip(self._sensors, columns, strict=True)}
        return Reading({"norm": norms} | named, seen, float(np.sqrt(squares.sum())))

    def _existing(self, present: NDArray[np.bool_]) -> NDArray[np.int64]:
        """The slots of the gradients that exist, in order; found once for each pattern of them."""
        key = present.tobytes()
        if self._places is None or self._places[0] != key:
            here = [self._slots.places[i] for i in np.flatnonzero(present)]
            self._places = key, np.concatenate([*here, np.zeros(0, np.int64)])
        return self._places[1]

    def clip_(self, max_norm: float) -> Tensor:
        """Scale all gradients so that their total norm is at most `max_norm`; returns the norm before.

        The arithmetic is that of `torch.nn.utils.clip_grad_norm_`.
        """
        if not self._is_current():
            self._measure()
        # A second clip is of the clipped gradients; what `read` gives stays the norms before the first.
        kept = self._norms
        if self._clipped:
            self._norms = self._now()
        norms = self._only_norms()
        self._norms = kept
        total = torch.linalg.vector_norm(norms).float() if len(norms) else torch.zeros(())
        scale = torch.clamp(max_norm / (total + 1e-6), max=1.0)
        grads = self._gradients()
        if self._piece is _shard:
            grads = [local(g) if is_dtensor(g) else g for g in grads]
        for (device, dtype), kind in by_kind(grads).items():
            factor = scale.to(device, dtype)  # of another type it would not be one launch for all
            torch._foreach_mul_([grads[i] for i in kind], factor)  # pyright: ignore[reportPrivateImportUsage]
        self._clipped = True
        self._remember()  # the norms still speak of the gradient before clipping
        return total

    def drop(self) -> None:
        """Throw the gradients away, so that a following `optimizer.step()` does nothing."""
        for parameter in self.parameters:
            parameter.grad = None
        self._dropped = True  # never read again; a clip that follows still returns their norm
        self._remember()

    def _gradients(self) -> list[Tensor]:
        return [p.grad for p in self.parameters if p.grad is not None]

    def _measure(self, further: Sequence[Tensor] = ()) -> None:
        """Take the norms, on the device; where several ranks share them, the sensors' columns with them."""
        self._present = np.array([p.grad is not None for p in self.parameters], bool)
        self._norms = self._now(further)
        self._clipped = self._dropped = False
        self._remember()

    def _now(self, further: Sequence[Tensor] = ()) -> Tensor:
        """Norms of the gradients that exist now; of several ranks, what `Ranks.add_up` returns."""
        # Every piece, because a pending sum needs all ranks; then those that this rank answers for.
        pieces = {i: self._piece(p.grad, p) for i, p in enumerate(self.parameters) if p.grad is not None}
        answered = list(pieces) if self._ranks is None else [i for i in pieces if self._slots.owned[i]]
        norms = _norms([pieces[i] for i in answered], [self._is_stack[i] for i in answered])
        if self._ranks is None:
            return norms
        if not len(norms) and self.parameters:
            norms = norms.to(local(self.parameters[0]).device)
        return self._ranks.add_up(norms, self._present, further)

    def _only_norms(self) -> Tensor:
        """The norms without anything that travels beside them."""
        assert self._norms is not None
        return self._norms if self._ranks is None else self._norms[: self._slots.num].sqrt()

    def _remember(self) -> None:
        self._key = [(weakref.ref(g), self._version(g)) for g in self._gradients()]

    def _is_current(self) -> bool:
        grads = self._gradients()
        return (
            self._norms is not None
            and len(grads) == len(self._key)
            and all(
                ref() is grad and version == self._version(grad)
                for grad, (ref, version) in zip(grads, self._key, strict=True)
            )
        )


def measured(units: Sequence[Unit], parameters: Sequence[nn.Parameter]) -> list[nn.Parameter]:
    """All that is measured, each once: the parameters of the model, then of units beside it."""
    watched = [p for unit in units for p in unit.parameters]
    return list({id(p): p for p in [*parameters, *watched]}.values())


def _versions(grad: Tensor) -> tuple[int, int]:
    """What changes with a gradient: FSDP2 adds to a DTensor's own piece behind its back."""
    return grad._version, local(grad)._version if is_dtensor(grad) else 0


def _to_host(vector: Tensor) -> "tuple[Tensor, torch.cuda.Event | None]":
    """Send a vector to the host; the event says when it has arrived."""
    if not vector.is_cuda:
        return vector.cpu(), None
    host = torch.empty(vector.shape, dtype=vector.dtype, pin_memory=True)
    host.copy_(vector, non_blocking=True)
    arrived = torch.cuda.Event()
    arrived.record(torch.cuda.current_stream(vector.device))
    return host, arrived


def _values(grad: Tensor, parameter: nn.Parameter) -> Tensor:
    """A gradient's values, added up where it is sparse."""
    return grad.coalesce().values() if grad.is_sparse else grad


def _shard(grad: Tensor, parameter: nn.Parameter) -> Tensor:
    """What is here of a gradient, cut as its parameter is; a sum that is still pending is made first."""
    if is_dtensor(grad) and is_dtensor(parameter) and grad.placements != parameter.placements:
        grad = grad.redistribute(placements=parameter.placements)
    return local(grad)


def _norms(tensors: Sequence[Tensor], is_stack: Sequence[bool]) -> Tensor:
    """FP32 L2 norm of each tensor, of a stack each slice's, as one vector in order; nothing waits for the device."""
    if not tensors:
        return torch.zeros(0)
    found: dict[int, Tensor] = {}
    kinds = by_kind(tensors)
    for (_, dtype), kind in kinds.items():
        wide = dtype if dtype == torch.float64 else torch.float32  # torch refuses to narrow inside a norm
        whole = [i for i in kind if not is_stack[i]]
        norms = torch._foreach_norm([tensors[i] for i in whole], 2, wide) if whole else ()  # pyright: ignore[reportPrivateImportUsage]
        if len(whole) == len(tensors) and wide == torch.float32:
            return torch.stack(norms)
        found |= dict(zip(whole, norms, strict=True))
        found |= {i: _slice_norms(tensors[i], wide) for i in kind if is_stack[i]}
    place = tensors[0].device
    return torch.cat([found[i].to(place, torch.float32, non_blocking=True).reshape(-1) for i in range(len(tensors))])


def _slice_norms(stack: Tensor, wide: torch.dtype) -> Tensor:
    """The norm of each slice along the first dimension, in one reduction."""
    return torch.linalg.vector_norm(stack.reshape(len(stack), max(1, stack[:1].numel())), dim=1, dtype=wide)
