# SPDX-License-Identifier: Apache-2.0
"""Memory: the extra bytes that high units kept for their backward, by the paper's equations 67 and 68.

A run may say what its linears save (`saved` in its config, see `trimtab.linear.account`): the bits per element on
each path, and each saved tensor with the units that read it. From the executed sets follow, for every step, the extra
bytes summed per unit (a tensor read by two high units counts twice, as in the paper) and per distinct tensor (it
counts once, if any reader is high). Equation 68 bounds the first by the `max_high` most expensive units.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray


class Memory:
    """Running mean and peak of the extra bytes."""

    def __init__(self, saved: Mapping[str, Any], units: Sequence[str], max_high: int) -> None:
        low, high = saved["bits"]
        place = {name: i for i, name in enumerate(units)}
        readers = np.zeros((len(units), len(saved["inputs"])))  # linears of a unit that read a tensor
        for column, tensor in enumerate(saved["inputs"]):
            for name in tensor["units"]:
                readers[place[name], column] += 1
        elements = np.array([tensor["elements"] for tensor in saved["inputs"]], float)
        self._bytes = elements * (high - low) / 8
        self._readers, self._per_unit = readers, readers @ self._bytes
        self.bound = float(np.sort(self._per_unit)[::-1][:max_high].sum())
        self._steps, self._sums, self._peaks = 0, np.zeros(2), np.zeros(2)

    def add(self, ran: NDArray[np.bool_]) -> None:
        """Count the executed sets of T steps."""
        if not len(ran):
            return
        active = ran.astype(float)
        both = np.stack([active @ self._per_unit, ((active @ self._readers) > 0) @ self._bytes])
        self._steps += len(ran)
        self._sums += both.sum(axis=1)
        self._peaks = np.maximum(self._peaks, both.max(axis=1))

    def metrics(self) -> dict[str, float]:
        """Mean and peak per step, per unit and per distinct tensor, and the bound."""
        mean = self._sums / max(self._steps, 1)
        return {
            "extra_bytes_mean": float(mean[0]),
            "extra_bytes_peak": float(self._peaks[0]),
            "extra_bytes_bound": self.bound,
            "extra_bytes_mean_shared": float(mean[1]),
            "extra_bytes_peak_shared": float(self._peaks[1]),
        }


def memory_of(config: Mapping[str, Any], units: Sequence[str], max_high: int) -> Memory | None:
    """The account of a run that says what it saves; None for one that does not, or says it of other units."""
    saved = config.get("saved")
    try:
        return Memory(saved, units, max_high) if isinstance(saved, Mapping) else None
    except (KeyError, TypeError, ValueError):
        return None  # somebody else's key of the same name
