# SPDX-License-Identifier: Apache-2.0
"""Sensors: what else than the gradient norm can be read of a unit, one float32 per unit and step.

A detector names the columns it judges (`detectors.py`); a sensor fills one. It is attached once, collects while the
step runs, and is read after its last backward: a vector on the device, which travels to the host with the norms in
one copy. NaN means "not measured in this step", Inf "measured, and not finite".

    column       of a unit                                            cost in a step
    update       norm of its last parameter update                    one pass over the parameters, a copy of them kept
    spectral     largest singular value of its matrices               two matrix-vector products per matrix
    gsnr         (mean g)^2 / Var g over the micro-batches            one pass per backward, two FP32 copies kept
    output       gain of its linears: size of outputs over inputs     one pass over 1,024 tokens of both
    grad_output  norm of the gradient that arrives at its outputs     one pass over it
    noise        how far low is from high, all three GEMMs            these GEMMs once more, so nearly the whole step
    gap          the same times its gradient norm, few units a step   a share of that: 2 % unless asked otherwise

The first two are here, the next three listen to the passes (`listeners.py`), the last two need the watch of a converted
linear (`gaps.py`). `attach_sensors` finds those that a detector needs (`sensing.py`).

Steps are what `read` separates: micro-batches add up, a recompute inside a backward does not count, nor does an
evaluation. What a sensor remembers from step to step is in its `state_dict`, by unit name.
"""

import zlib
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trimtab.control.units import Unit


class Sensor(Protocol):
    """Fills one column of a reading."""

    column: str

    def attach(self, units: Sequence[Unit]) -> None:
        """Start collecting on these units; called once."""
        ...

    def read(self) -> Tensor:
        """The column of the step that is over, (U,) float32 on the device, and begin the next; nothing waits."""
        ...

    def aim(self, risk: NDArray[np.float64], high: NDArray[np.bool_]) -> None:
        """Learn each unit's risk, and who runs high in the coming step."""
        ...

    def detach(self) -> None:
        """Leave the model as it was."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """What the next steps depend on: plain values and tensors."""
        ...

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from such a state."""
        ...


class Base:
    """A sensor that remembers nothing and does not care who is at risk."""

    column: str
    units: Sequence[Unit] = ()

    def attach(self, units: Sequence[Unit]) -> None:
        """Bind to the units."""
        self.units = tuple(units)

    def aim(self, risk: NDArray[np.float64], high: NDArray[np.bool_]) -> None:
        """Measure every unit alike."""

    def detach(self) -> None:
        """Nothing was changed."""

    def state_dict(self) -> dict[str, Any]:
        """Nothing is remembered."""
        return {}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Nothing was remembered."""


class UpdateNorm(Base):
    """Column `update`: the norm of a unit's last parameter update.

    Read before the optimizer steps, so it speaks of the step before. Where nothing has moved since (a skipped step,
    a second pass) the last update is still the last. A copy of the watched parameters is kept, in their own type.
    """

    column = "update"

    def __init__(self) -> None:
        self._before: list[list[Tensor]] | None = None
        self._last: dict[str, float] | Tensor = {}

    @torch.no_grad()
    def read(self) -> Tensor:
        """Compare with the copy, and renew it."""
        column = self._now()
        self._before = [[p.detach().clone() for p in unit.parameters] for unit in self.units]
        self._last = column
        return column

    def _now(self) -> Tensor:
        last = self._last
        if not isinstance(last, Tensor):
            last = torch.tensor([last.get(unit.name, torch.nan) for unit in self.units])
        if self._before is None:
            return last
        moved = [
            _norm(torch._foreach_sub([p.detach() for p in unit.parameters], before))  # pyright: ignore
            for unit, before in zip(self.units, self._before, strict=True)
        ]
        now = together(moved)
        return torch.where(now == 0, last.to(now.device), now.nan_to_num(nan=torch.inf))

    @torch.no_grad()
    def state_dict(self) -> dict[str, Any]:
        """The norms alone: a checkpoint between two steps need not hold the parameters a second time."""
        return {"last": dict(zip([u.name for u in self.units], self._now().tolist(), strict=True))}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue; the next reading gives these norms."""
        self._last, self._before = dict(state_dict["last"]), None


class SpectralNorm(Base):
    """Column `spectral`: the largest singular value among a unit's matrices, by power iteration.

    One iteration per step with the vector kept from the step before: weights move slowly, so the estimate follows.
    A parameter of more than two dimensions counts as (first, rest).
    """

    column = "spectral"

    def __init__(self) -> None:
        self._vectors: dict[str, list[Tensor]] = {}

    def attach(self, units: Sequence[Unit]) -> None:
        """Draw a first vector per matrix, the same in every run."""
        super().attach(units)
        for unit in units:
            sizes = [_as_matrix(p).shape[1] for p in unit.parameters if p.dim() >= 2]
            self._vectors[unit.name] = [_direction(f"{unit.name}/{i}", size) for i, size in enumerate(sizes)]

    @torch.no_grad()
    def read(self) -> Tensor:
        """Iterate once."""
        found = []
        for unit in self.units:
            values = []
            for i, p in enumerate(p for p in unit.parameters if p.dim() >= 2):
                matrix = _as_matrix(p).float()
                left = matrix @ self._vectors[unit.name][i].to(matrix.device)
                right = matrix.t() @ (left / left.norm().clamp_min(torch.finfo(torch.float32).tiny))
                size = right.norm()
                self._vectors[unit.name][i] = torch.where(size > 0, right / size, right + 1.0)
                values.append(size)
            found.append(torch.stack(values).amax().nan_to_num(nan=torch.inf) if values else torch.tensor(torch.nan))
        return together(found)

    def state_dict(self) -> dict[str, Any]:
        """The vectors."""
        return {"vectors": {name: [v.clone() for v in vectors] for name, vectors in self._vectors.items()}}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue with these vectors."""
        self._vectors = {name: [v.clone() for v in vectors] for name, vectors in state_dict["vectors"].items()}


def together(values: Sequence[Tensor]) -> Tensor:
    """Scalars as one float32 vector, on the first device that is not the host."""
    place = next((v.device for v in values if v.device.type != "cpu"), torch.device("cpu"))
    return torch.stack([v.to(place, torch.float32, non_blocking=True) for v in values])


def _norm(tensors: Sequence[Tensor]) -> Tensor:
    if not tensors:
        return torch.tensor(0.0)
    return torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(t, dtype=torch.float32) for t in tensors]))


def _as_matrix(p: Tensor) -> Tensor:
    return p.detach().reshape(p.shape[0], -1)


def _direction(name: str, size: int) -> Tensor:
    """A unit vector that depends on the name alone."""
    vector = torch.randn(size, generator=torch.Generator().manual_seed(zlib.crc32(name.encode())))
    return vector / vector.norm()
