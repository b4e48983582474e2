# SPDX-License-Identifier: Apache-2.0
"""The demonstration: one small model, four times, from one seed, under the same injected faults.

    high      every unit on its high path: the faults cannot reach it. What is possible.
    low       every unit on its low path: nobody helps. What is lost.
    control   the controller decides who runs high.
    random    random units, as many in each step as control had: what the choice itself is worth.

The damage is the held-out loss of `low` over that of `high`, both measured on the high path; an arm closes the
share of it that it wins back. The faults are injected on purpose: small clean runs do not fail by themselves, and
a demonstration that waited for an accident would show nothing or be tuned until it did.
"""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from trimtab.lab import arms
from trimtab.lab.run import Watcher
from trimtab.lab.train import Result, train
from trimtab.report.read import read_run

ARMS = {
    "high": arms.ARMS["high"],
    "low": arms.ARMS["low"],
    "control": arms.ARMS["gnmr"],
    "random": arms.random_like("control"),
}


@dataclass(frozen=True)
class Outcome:
    """What the four runs say together."""

    results: dict[str, Result]
    closed_control: float
    """Share of the damage that control won back."""
    closed_random: float
    promotion: float
    """Share of unit-steps that ran high under control."""
    windows: int
    blamed: int
    """Fault windows in which the unit that ran high most was the faulty one."""

    @property
    def damage(self) -> float:
        """Held-out loss that the faults cost when nobody helps."""
        return self.results["low"].eval_loss_high - self.results["high"].eval_loss_high

    def sentence(self) -> str:
        """The result as one sentence a person can repeat."""
        control = self.results["control"]
        if not self.windows or self.damage <= 0:
            losses = ", ".join(f"{arm} {result.eval_loss_high:.4f}" for arm, result in self.results.items())
            return f"There was no damage to close (held-out loss: {losses})."
        again = f"{control.summary['reruns']:.0f} of {control.steps} batches ran twice"
        right = "right" if self.blamed == self.windows else f"right in {self.blamed} of {self.windows} windows"
        right = "wrong" if self.blamed == 0 else right
        return (
            f"Control closed {self.closed_control:.0%} of the damage, random units {self.closed_random:.0%}; "
            f"{self.promotion:.1%} of unit-steps ran high and {again}; "
            f"the blamed unit was {right}; the faults were injected."
        )


def run_demo(
    settings: dict[str, Any], out: Path, watch: Callable[[str], AbstractContextManager[Watcher]], *, force: bool = False
) -> Outcome:
    """Train the four arms into folders below `out`, each watched by what `watch` gives for its name."""
    results: dict[str, Result] = {}
    for name, arm in ARMS.items():
        done = {earlier: result.folder for earlier, result in results.items()}
        selection = arm.selection(done, int(settings.get("seed", 0)))
        with watch(name) as watcher:
            results[name] = train(arm.over(settings), out / name, force=force, watcher=watcher, selection=selection)
    return _compare(results)


def _compare(results: dict[str, Result]) -> Outcome:
    loss = {arm: result.eval_loss_high for arm, result in results.items()}
    damage = loss["low"] - loss["high"]
    windows, blamed = blame(results["control"].folder)
    return Outcome(
        results=results,
        closed_control=(loss["low"] - loss["control"]) / damage if damage else math.nan,
        closed_random=(loss["low"] - loss["random"]) / damage if damage else math.nan,
        promotion=results["control"].summary["promotion_ratio"],
        windows=windows,
        blamed=blamed,
    )


def blame(folder: Path) -> tuple[int, int]:
    """How many fault windows a run had, and in how many the unit that ran high most was the faulty one."""
    run = read_run(folder)
    assert run.trace is not None
    faults, trace = run.config["faults"], run.trace
    right = 0
    for fault in faults:
        inside = (trace.steps > fault["start"]) & (trace.steps <= fault["start"] + fault.get("width", 1))
        steps_high = trace.high[inside].sum(axis=0)
        right += bool(steps_high.any()) and trace.units[int(np.argmax(steps_high))] == fault["unit"]
    return len(faults), right
