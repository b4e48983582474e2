# SPDX-License-Identifier: Apache-2.0
"""Events: what happened, in the few lines a person wants to read.

One line per change of state, never a line per step. A unit that goes high says why (its ratio, its jump, a
non-finite norm), a unit that comes back says how (its lock ran out, or riskier units took its seat), a unit
that stays denied says so once. Two lines are about the run as a whole: a persistent offender, which triggers
again after each release and is more likely a bug than noise; and a full budget, which on norms that do not
fall is usually a threshold that means something else here than it did in the paper. A detector that fills the
budget by itself (`:full`) is not told that it is full.
"""

from typing import Any

import numpy as np

from trimtab.control.advance import Verdict
from trimtab.control.decide import Ledger
from trimtab.control.policy import Limits, Policy, quiet_level, without_outliers
from trimtab.control.values import Event

LOOK_BACK = 200  # steps over which the pressure on the budget is judged
OF_ITSELF = {"gnmr": "norm", "relative": "norm beside the others'", "update": "update"}
"""Detectors whose ratio is a value of the unit over its own mean, and that value."""


class Narrator:
    """Turns decisions into events; remembers just enough to say each thing once."""

    def __init__(
        self, names: tuple[str, ...], policy: Policy, limits: Limits, *, acting: bool = True, detector: str = "gnmr"
    ) -> None:
        self._names, self._policy, self._limits, self._acting = names, policy, limits, acting
        self._detector = detector
        self._against = "its history" if detector == "gnmr" else f"its range ({detector})"
        shape = (LOOK_BACK, len(names))
        self._ratios, self._jumps = np.full(shape, np.nan, np.float32), np.full(shape, np.nan, np.float32)
        self._full = np.zeros(LOOK_BACK, bool)
        self._denied = np.zeros(len(names), bool)
        self._told_full = False
        self._passes = 0

    def tell(self, before: Ledger, verdict: Verdict, after: Ledger, nonfinite: bool) -> list[Event]:
        """The events of one pass."""
        step, names = int(verdict.steps[0]), self._names
        risk, denied = verdict.risk.risk[0], verdict.choice.denied[0]
        events = [self._nonfinite(step, risk)] if nonfinite else []
        if verdict.rerun[0]:
            events.append(Event(step, "rerun", message="an extreme risk: the batch is run again under the new plan"))
        for b in np.flatnonzero(after.high & ~before.high).tolist():
            events.append(self._triggered("high", verdict, b))
        for b in np.flatnonzero(before.high & ~after.high).tolist():
            cause = "evicted" if before.lock[b] > 0 or risk[b] > 1 else "quiet"
            events.append(Event(step, "low", names[b], cause, message=f"{names[b]}  {cause} -> low"))
        for b in np.flatnonzero(denied & ~self._denied).tolist():
            events.append(self._triggered("denied", verdict, b))
        newly = (after.repeats == self._policy.persistent_after) & (after.repeats > before.repeats)
        events += [self._persistent(step, b) for b in np.flatnonzero(newly).tolist()]
        self._denied = denied
        return events + self._budget(step, verdict, int(after.high.sum()))

    def _triggered(self, kind: str, verdict: Verdict, b: int) -> Event:
        """A unit that triggered: why, by how much, and what became of it."""
        name, policy = self._names[b], self._policy
        ratio, jump, risk = (float(column[0, b]) for column in verdict.risk)
        if np.isinf(risk):
            cause, text = "nonfinite", "is not finite"
        elif not risk > 1:
            cause, text = "selection", "is chosen"  # not by Algorithm 2: see `selections`
        elif policy.beta is not None and jump / policy.beta > ratio / float(verdict.alpha[0]):
            cause, text = "jump", f"{jump:.2g}x its last {policy.window} steps"
        else:
            cause, text = "ratio", f"{ratio:.2g}x {self._against}"
        end = "high" if kind == "high" else f"denied, the budget of {self._limits.max_high} is full"
        return Event(int(verdict.steps[0]), kind, name, cause, ratio, jump, risk, f"{name}  {text} -> {end}")

    def _nonfinite(self, step: int, risk: np.ndarray) -> Event:
        guilty = [self._names[b] for b in np.flatnonzero(np.isinf(risk))]
        where = (
            f"{len(guilty)} of {len(self._names)} units, first {guilty[0]}"
            if guilty
            else "parameters outside every unit"
        )
        return Event(
            step,
            "nonfinite",
            guilty[0] if guilty else None,
            "nonfinite",
            message=f"the gradient is not finite ({where})"
            + (": the optimizer step is skipped" if self._acting else ""),
        )

    def _persistent(self, step: int, b: int) -> Event:
        name, times = self._names[b], self._policy.persistent_after
        text = (
            f"{name} triggered again within {self._policy.repeat_within} steps of its release {times} times in a row: "
            "probably a bug or a layer to keep high, not noise"
        )
        return Event(step, "persistent", name, message=text)

    def _budget(self, step: int, verdict: Verdict, num_high: int) -> list[Event]:
        row = self._passes % LOOK_BACK
        with np.errstate(over="ignore"):
            self._ratios[row], self._jumps[row] = verdict.risk.ratio[0], verdict.risk.jump[0]
        self._full[row] = 0 < self._limits.max_high <= num_high and not self._detector.endswith(":full")
        self._passes += 1
        if self._told_full or self._passes < LOOK_BACK or int(self._full.sum()) * 2 <= LOOK_BACK:
            return []
        if not (np.isfinite(self._ratios) & (self._ratios > 0)).any():
            return []  # nothing but broken or dead units: no threshold would help
        self._told_full = True
        text = f"the budget was full on {int(self._full.sum())} of the last {LOOK_BACK} steps. "
        text += _advice(self._ratios, self._jumps, self._policy, self._detector)
        return [Event(step, "budget_full", message=text)]

    def state_dict(self) -> dict[str, Any]:
        """What has been said already, and the steps that the line about the budget looks back on."""
        told = {"told_full": self._told_full, "denied": self._denied}
        bits = {"ratios": self._ratios.view(np.int32), "jumps": self._jumps.view(np.int32)}  # so that NaN equals NaN
        seen = {**bits, "full": self._full, "passes": self._passes}
        return {**told, "units": list(self._names), **seen}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Do not say it again after a resume, and say the rest when it would have been said."""
        self._told_full, self._denied = bool(state_dict["told_full"]), np.array(state_dict["denied"])
        if "passes" not in state_dict:  # a state from before these were kept: the look-back begins anew
            return
        order = [list(state_dict["units"]).index(name) for name in self._names]
        bits = (np.asarray(state_dict[name])[:, order] for name in ("ratios", "jumps"))
        self._ratios, self._jumps = (np.ascontiguousarray(values).view(np.float32) for values in bits)
        self._full, self._passes = np.asarray(state_dict["full"]).copy(), int(state_dict["passes"])


def _advice(ratios: np.ndarray, jumps: np.ndarray, policy: Policy, detector: str) -> str:
    """What the thresholds mean on some steps, and which would have been quiet; ratios and jumps are (steps, units)."""
    whole = np.isfinite(ratios).any(axis=1)
    ratios, jumps = ratios[whole], np.where(np.isfinite(jumps), jumps, 0)[whole]
    beta = 0.0 if policy.beta is None else quiet_level(without_outliers(jumps), 0.0005)  # 0: there is no jump
    alpha = quiet_level(without_outliers(ratios), 0.0005 if beta else 0.001)
    if alpha <= policy.alpha and beta <= (policy.beta or 0.0):
        return "The usual ratios are below the thresholds: look for spikes, norms that are not finite, or long locks"
    offered = f"alpha={max(alpha, policy.alpha):.3g}" + (f", beta={max(beta, policy.beta or 0.0):.3g}" if beta else "")
    if detector in OF_ITSELF:
        median = float(np.median(ratios[np.isfinite(ratios) & (ratios > 0)]))
        return (
            f"The median ratio here is {median:.2f}, so alpha={policy.alpha:g} asks for {policy.alpha / median:.2f} "
            f"times a unit's usual {OF_ITSELF[detector]}; Policy({offered}) would have stayed quiet on these steps, "
            "spikes apart"
        )
    peaks = np.where(np.isfinite(ratios), ratios, -np.inf).max(axis=1)
    return (
        f"Half of these have a ratio ({detector}) above {float(np.median(peaks)):.2f}, and alpha is {policy.alpha:g}; "
        f"no ratio here exceeds Policy({offered}), spikes apart"
    )
