# SPDX-License-Identifier: Apache-2.0
"""Gaps: how far the low path is from the high one, measured on the run's own operands.

A converted linear has a seat for a `watch`. While one sits there, the low path also computes what the high path would
have given for the same operands, and reports the squared error and the squared reference of its output, of the gradient
it passes on, and of its weight's gradient: scalars on the device, no wait, and not a bit of the run changes. The
gradient that comes in is the true one, before any fault, so a damaged unit shows in its own numbers and not in
those of its neighbours. Over a unit's linears and the step's micro-batches both sides add up:

    e_role = sqrt(sum of squared errors / sum of squared references)
    noise  = sqrt(e_output^2 + e_grad_input^2 + e_grad_weight^2)
    gap    = noise * the unit's gradient norm

Why this stands for the recovery gap. The error of the weight's gradient is e_grad_weight times its norm, exactly. The
other two reach the gradients of other units: an error of the output everything after it, an error of the passed
gradient everything before. To first order they scale those parts of the gradient that flow through this unit by e, and
a unit's own gradient norm is the one measure of that flow which is at hand.

Watching a linear costs its three GEMMs once more (on the high path). `Noise` watches every unit, in every step, which
nearly doubles the step. `Gap` spends a share of the step's matrix products, 2 % unless told otherwise: it saves up
until it can afford a unit. Every other measurement goes to the riskiest unit that triggered and still runs low, if
there is one, the others to the units in turn. A unit that runs high has no low path to measure (NaN).
"""

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trimtab.checks import is_positive, is_whole, require
from trimtab.control.sensors import Base, together
from trimtab.control.units import Unit
from trimtab.errors import TrimtabError

ROLES = ("output", "grad_input", "grad_weight")


class _Seat:
    """What sits on a module: adds up its reports for a sensor, and holds that sensor weakly."""

    def __init__(self, sensor: "Noise", unit: int) -> None:
        self._sensor, self._unit = weakref.ref(sensor), unit

    def output(self, module: Any, error_sq: Tensor, reference_sq: Tensor) -> None:
        self._add(0, error_sq, reference_sq)

    def grad_input(self, module: Any, error_sq: Tensor, reference_sq: Tensor) -> None:
        self._add(1, error_sq, reference_sq)

    def grad_weight(self, module: Any, error_sq: Tensor, reference_sq: Tensor) -> None:
        self._add(2, error_sq, reference_sq)

    def _add(self, role: int, error_sq: Tensor, reference_sq: Tensor) -> None:
        if (sensor := self._sensor()) is not None:
            sensor.add(self._unit, role, torch.stack([error_sq, reference_sq]))


class Noise(Base):
    """Column `noise`: the relative error of each low unit, all units in every step."""

    column = "noise"
    uses_watch = True

    def __init__(self) -> None:
        self._sums: dict[tuple[int, int], Tensor] = {}
        self._seats: list[tuple[Any, _Seat]] = []

    def attach(self, units: Sequence[Unit]) -> None:
        """Take a seat on every converted linear; who sat there before has to leave."""
        super().attach(units)
        for index, unit in enumerate(units):
            seat = _Seat(self, index)
            self._seats += [(module, seat) for module in unit.modules if hasattr(module, "watch")]
        if not self._seats:
            raise TrimtabError(
                f"column {self.column!r} compares the low path with the high one, and no unit here has both: call "
                "trimtab.convert_(model, recipe) first"
            )
        weakref.finalize(self, _leave, self._seats)
        self._watch(range(len(units)))

    def _watch(self, units: Sequence[int] | range) -> None:
        """Sit on the modules of these units and on no other."""
        wanted = set(units)
        for module, seat in self._seats:
            if seat._unit in wanted:
                module.watch = seat
            elif module.watch is seat:
                module.watch = None

    def add(self, unit: int, role: int, pair: Tensor) -> None:
        """Take one report: squared error and squared reference."""
        key = (unit, role)
        self._sums[key] = self._sums[key] + pair if key in self._sums else pair

    @torch.no_grad()
    def read(self) -> Tensor:
        """Close the step."""
        sums, self._sums = self._sums, {}
        return together([self._of(index, sums) for index in range(len(self.units))])

    def _of(self, unit: int, sums: Mapping[tuple[int, int], Tensor]) -> Tensor:
        found = [sums[unit, role] for role in range(len(ROLES)) if (unit, role) in sums]
        if not found:
            return torch.tensor(torch.nan)
        error, reference = torch.stack(found).unbind(1)
        relative = torch.where(error == 0, 0.0, error / reference)  # nothing wrong with nothing; else infinite
        return relative.sum().sqrt().nan_to_num(nan=torch.inf)

    def detach(self) -> None:
        """Leave every seat."""
        _leave(self._seats)


class Gap(Noise):
    """Column `gap`: noise times gradient norm, of a few units in each step.

    Args:
        share: what the measurements may cost, as a share of the step's matrix products, on average.
        units_per_step: measure so many units in every step instead, whatever it costs.
    """

    column = "gap"

    def __init__(self, *, share: float = 0.02, units_per_step: int | None = None) -> None:
        super().__init__()
        require(is_positive(share), "share must be a positive number", share)
        fine = units_per_step is None or is_whole(units_per_step, 1)
        require(fine, "units_per_step must be a whole number of at least 1, or None", units_per_step)
        self._share, self._per_step = share, units_per_step
        self._saved, self._turn, self._suspects_next = 0.0, 0, True
        self._measured: list[int] = []

    def attach(self, units: Sequence[Unit]) -> None:
        """Weigh the units, and choose the first."""
        super().attach(units)
        sizes = [sum(m.weight.numel() for m, seat in self._seats if seat._unit == u) for u in range(len(units))]
        self._cost = np.array(sizes) / sum(sizes)  # of all converted linears: the step's own products, thrice
        self._saved, self._turn, self._suspects_next = 0.0, 0, True
        self._choose(np.zeros(len(units)), np.zeros(len(units), bool))

    def aim(self, risk: NDArray[np.float64], high: NDArray[np.bool_]) -> None:
        """Choose whom to measure in the coming step."""
        self._choose(risk, high)

    def _choose(self, risk: NDArray[np.float64], high: NDArray[np.bool_]) -> None:
        able = (self._cost > 0) & ~high
        chosen: list[int] = []
        self._saved = min(self._saved + self._share, float(self._cost.max()) + self._share)
        while len(chosen) < int(able.sum()):
            unit = self._next(risk, able, chosen)
            if self._per_step is None and self._cost[unit] > self._saved:
                break
            chosen.append(unit)
            self._saved -= 0.0 if self._per_step is not None else float(self._cost[unit])
            suspect = self._suspects_next and risk[unit] > 1
            self._turn = self._turn if suspect else unit + 1
            self._suspects_next = not self._suspects_next
            if len(chosen) == self._per_step:
                break
        self._measured = sorted(chosen)
        self._watch(self._measured)

    def _next(self, risk: NDArray[np.float64], able: NDArray[np.bool_], chosen: list[int]) -> int:
        """The riskiest unit that triggered, if it is the suspects' turn and there is one; else the next in line."""
        open_ = able.copy()
        open_[chosen] = False
        suspects = np.flatnonzero(open_ & (risk > 1))
        if self._suspects_next and len(suspects):
            return int(suspects[np.argmax(risk[suspects])])
        line = np.flatnonzero(open_)
        return int(line[np.argmax(line >= self._turn % len(able))])

    @torch.no_grad()
    def read(self) -> Tensor:
        """Close the step: noise times the norm of the gradient that the unit has now."""
        noise = super().read()
        norms = {unit: _gradient_norm(self.units[unit]) for unit in self._measured}
        one = torch.tensor(1.0)
        return noise * together([norms.get(unit, one) for unit in range(len(self.units))]).to(noise.device)

    def state_dict(self) -> dict[str, Any]:
        """Whose turn it is."""
        return {
            "saved": self._saved,
            "turn": self._turn,
            "suspects_next": self._suspects_next,
            "measured": [self.units[unit].name for unit in self._measured],
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on where the rotation was."""
        self._saved, self._turn = float(state_dict["saved"]), int(state_dict["turn"])
        self._suspects_next = bool(state_dict["suspects_next"])
        names = set(state_dict["measured"])
        self._measured = [index for index, unit in enumerate(self.units) if unit.name in names]
        self._watch(self._measured)


def _leave(seats: list[tuple[Any, _Seat]]) -> None:
    for module, seat in seats:
        if getattr(module, "watch", None) is seat:
            module.watch = None
    seats.clear()


def _gradient_norm(unit: Unit) -> Tensor:
    grads = [p.grad for p in unit.parameters if p.grad is not None]
    if not grads:
        return torch.tensor(torch.nan)
    return torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(g, dtype=torch.float32) for g in grads]))
