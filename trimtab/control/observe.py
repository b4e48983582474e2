# SPDX-License-Identifier: Apache-2.0
"""Observe: one gradient norm per unit, read once per optimizer step.

    per parameter   foreach norms in FP32, on the device, one call per (device, dtype)
    one copy        all of them to the host at once: P floats, no `.item()` per parameter; whoever needs them waits
    per unit        n_b = sqrt(sum of squares over its parameters), in float64, rounded to float32

What `sensors` have measured besides travels in the same copy.

Norms are of the gradient as the optimizer would see it before clipping: reduced, un-scaled, averaged over
micro-batches. A tied weight counts in each unit that holds it and once in the total. A parameter without a
gradient adds nothing; a unit without any gradient is not `seen`.

Clipping needs the very same norms, so `clip_grad_norm_` reuses them. A reading is reused only while it is
true: every gradient must still be the same tensor at the same version as when it was read.
"""

import weakref
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from trimtab.control.sensors import Sensor
from trimtab.control.units import Unit
from trimtab.control.values import Reading
from trimtab.shards import by_kind


class Pending(NamedTuple):
    """A reading on its way to the host."""

    vector: Tensor
    """Norms of the gradients that exist, then the sensors' columns."""
    arrived: "torch.cuda.Event | None"
    present: NDArray[np.bool_]
    """Which parameters had a gradient."""

    def wait(self) -> NDArray[np.float32]:
        """The numbers, once they are there."""
        if self.arrived is not None:
            self.arrived.synchronize()
        return self.vector.numpy()


class Observer:
    """Reads the norms of a fixed set of parameters, grouped into units."""

    def __init__(
        self, units: Sequence[Unit], parameters: Sequence[nn.Parameter], sensors: Sequence[Sensor] = ()
    ) -> None:
        """Bind to the units, to all trainable parameters of the model, watched or not, and to attached sensors."""
        self._sensors = tuple(sensors)
        watched = [p for unit in units for p in unit.parameters]
        self.parameters = list({id(p): p for p in [*parameters, *watched]}.values())
        position = {id(p): i for i, p in enumerate(self.parameters)}
        pairs = [(position[id(p)], u) for u, unit in enumerate(units) for p in unit.parameters]
        self._parameter_of = np.array([p for p, _ in pairs], np.int64)
        self._unit_of = np.array([u for _, u in pairs], np.int64)
        self._num_units = len(units)
        self._norms: Tensor | None = None  # (P',) norms of the gradients that exist, on the device
        self._present: NDArray[np.bool_] = np.zeros(0, bool)
        self._key: list[tuple[weakref.ref[Tensor], int]] = []
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
        if self._dropped or not self._is_current():
            self._measure()
        norms = self._norms
        assert norms is not None
        if found_inf is not None:
            found_inf.copy_((~torch.isfinite(norms).all()).float())
        vector = torch.cat([norms, *(f.to(norms.device, non_blocking=True) for f in further)]) if further else norms
        return Pending(*_to_host(vector), self._present)

    def finish(self, pending: Pending) -> Reading:
        """Wait for a reading that was started."""
        host = pending.wait()
        count = int(pending.present.sum())
        squares = np.zeros(len(self.parameters))
        with np.errstate(over="ignore"):
            squares[pending.present] = host[:count].astype(np.float64) ** 2
            sums = np.bincount(self._unit_of, squares[self._parameter_of], self._num_units)
            norms = np.sqrt(sums).astype(np.float32)
        seen = np.bincount(self._unit_of, pending.present[self._parameter_of], self._num_units) > 0
        columns = host[count:].reshape(-1, self._num_units)
        named = {sensor.column: column for sensor, column in zip(self._sensors, columns, strict=True)}
        return Reading({"norm": norms} | named, seen, float(np.sqrt(squares.sum())))

    def clip_(self, max_norm: float) -> Tensor:
        """Scale all gradients so that their total norm is at most `max_norm`; returns the norm before.

        The arithmetic is that of `torch.nn.utils.clip_grad_norm_`.
        """
        if not self._is_current():
            self._measure()
        # A second clip is of the clipped gradients; what `read` gives stays the norms before the first.
        norms = _norms(self._dense()) if self._clipped else self._norms
        assert norms is not None
        total = torch.linalg.vector_norm(norms) if len(norms) else torch.zeros(())
        scale = torch.clamp(max_norm / (total + 1e-6), max=1.0)
        grads = self._gradients()
        for (device, _), kind in by_kind(grads).items():
            torch._foreach_mul_([grads[i] for i in kind], scale.to(device))  # pyright: ignore[reportPrivateImportUsage]
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

    def _dense(self) -> list[Tensor]:
        return [g.coalesce().values() if g.is_sparse else g for g in self._gradients()]

    def _measure(self) -> None:
        """Take the norms, on the device."""
        self._present = np.array([p.grad is not None for p in self.parameters], bool)
        self._norms = _norms(self._dense())
        self._clipped = self._dropped = False
        self._remember()

    def _remember(self) -> None:
        self._key = [(weakref.ref(g), g._version) for g in self._gradients()]

    def _is_current(self) -> bool:
        grads = self._gradients()
        return (
            self._norms is not None
            and len(grads) == len(self._key)
            and all(
                ref() is grad and version == grad._version
                for grad, (ref, version) in zip(grads, self._key, strict=True)
            )
        )


def _to_host(vector: Tensor) -> "tuple[Tensor, torch.cuda.Event | None]":
    """Send a vector to the host; the event says when it has arrived."""
    if not vector.is_cuda:
        return vector.cpu(), None
    host = torch.empty(vector.shape, dtype=vector.dtype, pin_memory=True)
    host.copy_(vector, non_blocking=True)
    arrived = torch.cuda.Event()
    arrived.record(torch.cuda.current_stream(vector.device))
    return host, arrived


def _norms(tensors: Sequence[Tensor]) -> Tensor:
    """FP32 L2 norm of each tensor as one vector, in order; foreach calls, no wait for the device."""
    if not tensors:
        return torch.zeros(0)
    found: dict[int, Tensor] = {}
    kinds = by_kind(tensors)
    for (_, dtype), kind in kinds.items():
        wide = dtype if dtype == torch.float64 else torch.float32  # torch refuses to narrow inside a norm
        norms = torch._foreach_norm([tensors[i] for i in kind], 2, wide)  # pyright: ignore[reportPrivateImportUsage]
        if len(kinds) == 1 and wide == torch.float32:
            return torch.stack(norms)
        found |= dict(zip(kind, norms, strict=True))
    place = tensors[0].device
    return torch.stack([found[i].to(place, torch.float32, non_blocking=True) for i in range(len(tensors))])
