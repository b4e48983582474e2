# SPDX-License-Identifier: Apache-2.0
"""A run that is written a few steps at a time, through the real recorder."""

from pathlib import Path
from typing import Any

import numpy as np

from trimtab.control.policy import Policy
from trimtab.control.record import Recorder

POLICY = Policy(max_high=2, alpha=1.5, beta=2.0, warmup_steps=3)


class Writer:
    """Writes a run folder; each unit's norm is noise around 1, times a spike where one is asked for."""

    def __init__(self, folder: Path, units: list[str] | int = 5, *, seed: int = 0, total: int = 1000, **options: Any):
        self.folder = folder
        self.units = [f"layers.{i}.down" for i in range(units)] if isinstance(units, int) else units
        self.rng = np.random.default_rng(seed)
        self.total = total
        self.start(Recorder(folder, run={"name": folder.name}, **options), 0)

    def start(self, recorder: Recorder, step: int) -> None:
        self.recorder, self.step = recorder, step
        limits = POLICY.resolve(len(self.units), self.total)
        recorder.open_trace(
            self.units, np.ones(len(self.units), bool), POLICY.to_dict(), *limits, total_steps=self.total
        )

    def resume(self, offsets: dict[str, int], step: int) -> None:
        """Go on from a checkpoint, as a run that was killed does."""
        self.recorder.close()
        self.start(Recorder.resume(self.folder, offsets), step)

    def write(
        self, steps: int, *, spikes: dict[int, float] | None = None, high: tuple[int, ...] = (), events: tuple = ()
    ) -> None:
        """Write some steps and flush them; spikes are {unit: factor}, events are of the last step."""
        ran = np.isin(np.arange(len(self.units)), high)
        for number in range(steps):
            self.step += 1
            norms = self.rng.lognormal(0, 0.02, len(self.units)).astype(np.float32)
            for unit, factor in (spikes or {}).items():
                norms[unit] *= np.float32(factor)
            told = list(events) if number == steps - 1 else []
            with np.errstate(invalid="ignore"):
                total = float(np.linalg.norm(norms))
            self.recorder.observe(self.step, norms, np.ones(len(norms), bool), ran, total, told)
            self.recorder.log(self.step, loss=2 + 1 / self.step + self.rng.normal(0, 0.01), lr=1e-3)
        self.recorder.flush()
