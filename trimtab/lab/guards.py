# SPDX-License-Identifier: Apache-2.0
"""Guards: what stands between the controller and the update, to compare recovery with.

    skip_step      no update at all where loss or norm is an outlier (`trimtab.optim.SkipStep`)
    clip_flagged   nobody runs high; the units that the controller would have taken up from this step have their
                   gradient scaled down to their own mean norm, in this very step

The second takes precision out of the comparison. Recovery removes a bad gradient's cause and its size together; if
clipping the flagged units does as well, it was the size. A flagged unit's ratio n / mean is what GNMR judged, so its
factor is min(1, 1 / ratio): as in AdaGC, but of those units alone.

A guard's `step_` comes after `controller.step()` and before clipping and the optimizer, and says what to log.
"""

from typing import Any, Protocol

import numpy as np
import torch
from torch import nn

from trimtab.control.advance import Verdict
from trimtab.control.units import Unit
from trimtab.control.values import Bools
from trimtab.errors import NonFiniteError
from trimtab.lab.config import Settings
from trimtab.lab.optimizers import checked_options
from trimtab.optim.skipping import SkipStep


class Guard(Protocol):
    """Changes or drops the gradients of a step."""

    def step_(self, loss: float) -> dict[str, int]:
        """Do so; what came of it, for metrics.jsonl."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """All it remembers."""
        ...

    def load_state_dict(self, state_dict: Any) -> None:
        """Take that back."""


class Skipping:
    """Drops the update of a step whose loss or norm is an outlier.

    Steps that are not finite it drops too, and a run that makes only such steps learns nothing more: so it has the
    controller's patience with them, whatever the controller's mode.
    """

    def __init__(self, model: nn.Module, options: dict[str, Any], max_nonfinite: int) -> None:
        self._skip = SkipStep(model.parameters(), **options)
        self._most, self._bad_steps = max_nonfinite, 0

    def step_(self, loss: float) -> dict[str, int]:
        skipped = int(self._skip.step_(loss))
        self._bad_steps = self._bad_steps + 1 if self._skip.nonfinite else 0
        if self._bad_steps >= self._most:
            raise NonFiniteError(
                f"loss or gradient was not finite, and the step skipped, {self._bad_steps} times in a row "
                f"(max_nonfinite={self._most}): lower the learning rate, or go back to an earlier checkpoint"
            )
        return {"skipped": skipped}

    def state_dict(self) -> dict[str, Any]:
        return self._skip.state_dict()

    def load_state_dict(self, state_dict: Any) -> None:
        self._skip.load_state_dict(state_dict)


class ClipFlagged:
    """A selection that lets nobody run high, and a guard that clips those it was told of instead."""

    def __init__(self, units: tuple[Unit, ...]) -> None:
        self._units, self._factors = units, np.ones(len(units))

    def __call__(self, step: int, verdict: Verdict) -> Bools:
        """Note whom the controller chose from this step, and choose nobody."""
        flagged, ratio = verdict.choice.high[0], verdict.risk.ratio[0]
        over = flagged & np.isfinite(ratio) & (ratio > 1)
        self._factors = np.where(over, 1 / np.where(over, ratio, 1.0), 1.0)
        return np.zeros_like(flagged)

    @torch.no_grad()
    def step_(self, loss: float) -> dict[str, int]:
        clipped = np.flatnonzero(self._factors < 1).tolist()
        for b in clipped:
            grads = [p.grad for p in self._units[b].parameters if p.grad is not None]
            torch._foreach_mul_(grads, float(self._factors[b]))  # pyright: ignore[reportPrivateImportUsage]
        return {"clipped": len(clipped)}

    def state_dict(self) -> dict[str, Any]:
        """Nothing outlives a step."""
        return {}

    def load_state_dict(self, state_dict: Any) -> None:
        """Nothing to take back."""


def build_guard(model: nn.Module, config: Settings, units: tuple[Unit, ...]) -> Guard | None:
    """The guard that settings name."""
    if config.guard == "skip_step":
        options = checked_options("guard_options", SkipStep, config.guard_options)
        return Skipping(model, options, config.build_policy().max_nonfinite)
    return ClipFlagged(units) if config.guard == "clip_flagged" else None
