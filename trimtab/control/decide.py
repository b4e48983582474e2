# SPDX-License-Identifier: Apache-2.0
"""Decide: who runs high in the next step (Algorithm 2 of arXiv 2606.00539).

    candidates  C = { risk > 1 }  union  { lock > 0 }            strictly above 1
    selected    S = the first min(max_high, |C|) of C by (risk descending, index ascending)
    lock        in S and risk > 1:  lock_steps
                in S otherwise:     lock - 1
                not in S:           0, also if it had triggered or was locked

The budget caps the whole active set, and a lock only keeps a unit *eligible*: riskier units evict it and
its lock is gone at once. One isolated trigger without rivals gives 1 + lock_steps active steps. A unit that
triggered and did not fit is denied. What is selected from step t runs high in step t + 1, because the norms
of step t exist only after its backward.

Beyond the paper (off by default): with `lock_growth` a unit that triggers again within `repeat_within`
steps of its release gets a lock that many times longer, because under a lasting fault the paper's unit
toggles: high, high, low, high, high, low. Repeats are counted in any case; they name persistent offenders. With quotas
each part of the units has a budget of its own, and S is chosen part by part: no pipeline stage then waits for another
one's recoveries.

Pure functions of arrays, as in `judge`: one step live, thousands in a replay, the same code. Steps on which
nothing triggers and nothing is locked are skipped, since they select nobody and change no lock.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from trimtab.control.policy import Limits, Policy
from trimtab.control.values import Bools, Floats


class Ledger(NamedTuple):
    """What decide remembers of each unit; complete at birth."""

    lock: NDArray[np.int64]  # (U,) remaining lock
    high: Bools  # (U,) the set selected last
    last_high: NDArray[np.int64]  # (U,) last step from which the unit was selected, 0 = never
    repeats: NDArray[np.int64]  # (U,) triggers in a row that came soon after a release

    @classmethod
    def fresh(cls, recoverable: Bools, policy: Policy, limits: Limits) -> "Ledger":
        """The ledger before the first step; its `high` is E_1, empty but for a high warm-up."""
        num_units = len(recoverable)
        all_high = policy.warmup == "high" and limits.warmup_steps > 0
        high = recoverable.copy() if all_high else np.zeros(num_units, bool)
        zeros = np.zeros(num_units, np.int64)
        return cls(zeros, high, zeros, zeros)

    def copied(self) -> "Ledger":
        """A ledger that can be written without changing this one."""
        return Ledger(self.lock.copy(), self.high.copy(), self.last_high.copy(), self.repeats.copy())


class Quota(NamedTuple):
    """The budget of a part of the units, in place of one for all."""

    units: tuple[int, ...]
    max_high: int


def quotas_of(parts: Sequence[Sequence[int]], recoverable: Bools, policy: Policy) -> tuple[Quota, ...]:
    """A budget for each part of the units: `policy.max_high` of those in it that may be chosen."""
    policy = policy.replace(alpha_warmup=None, warmup="threshold")  # the budget alone is asked for
    budgets = [policy.resolve(int(recoverable[list(units)].sum()), None).max_high for units in parts]
    return tuple(Quota(tuple(units), most) for units, most in zip(parts, budgets, strict=True))


class Choice(NamedTuple):
    """What decide says, one row per step."""

    high: Bools  # (T, U) selected from this step, executed in the next
    denied: Bools  # (T, U) triggered, but over the budget


def decide(
    ledger: Ledger,
    risk: Floats,
    recoverable: Bools,
    policy: Policy,
    limits: Limits,
    steps: NDArray[np.int64],
    quotas: Sequence[Quota] = (),
) -> tuple[Choice, Ledger]:
    """Choose the high set from each of T steps of risks; returns the choices and the ledger after them.

    Args:
        risk: (T, U) risks as judged.
        recoverable: (U,) which units have a high path.
        steps: (T,) the number of each step, from 1.
        quotas: budgets that take the place of `limits.max_high`, each for its own units.
    """
    warm = np.zeros(len(steps), bool)  # steps of a warm-up in which nothing is decided
    if policy.warmup == "high":
        warm = steps < limits.warmup_steps
    elif policy.warmup == "monitor":
        warm = steps <= limits.warmup_steps
    triggered = (risk > 1) & recoverable & ~warm[:, None]
    high = np.zeros(risk.shape, bool)
    if policy.warmup == "high":
        high[warm] = recoverable
    ledger = ledger.copied()  # the caller's stays as it was
    any_triggered, warming = np.any(triggered, axis=1).tolist(), warm.tolist()
    for t, step in enumerate(steps.tolist()):
        if warming[t]:
            ledger.lock[:] = 0
        elif any_triggered[t] or ledger.lock.any():
            if quotas:
                selected = np.concatenate(
                    [_of_part(part, risk[t], triggered[t], ledger.lock, policy) for part in quotas]
                )
            else:
                selected = select(risk[t], triggered[t], ledger.lock, limits.max_high, policy.prefer_locked)
            _enter(ledger, selected, triggered[t], policy, step)
            high[t, selected] = True
        ledger.high[:] = high[t]
    return Choice(high, triggered & ~high), ledger


def _of_part(part: Quota, risk: Floats, triggered: Bools, lock: NDArray[np.int64], policy: Policy) -> NDArray[np.int64]:
    """The set S of one part of the units."""
    units = np.array(part.units, np.int64)
    return units[select(risk[units], triggered[units], lock[units], part.max_high, policy.prefer_locked)]


def select(
    risk: Floats, triggered: Bools, lock: NDArray[np.int64], max_high: int, prefer_locked: bool = False
) -> NDArray[np.int64]:
    """The set S of one step: the first `max_high` candidates by (risk descending, index ascending)."""
    locked = lock > 0
    index = (triggered | locked).nonzero()[0]
    if len(index) <= max_high:
        return index
    if prefer_locked:
        order = np.lexsort((~locked[index], -risk[index]))
    else:
        order = (-risk[index]).argsort(kind="stable")  # equal risks keep their index order
    return index[order[:max_high]]


def _enter(ledger: Ledger, selected: NDArray[np.int64], triggered: Bools, policy: Policy, step: int) -> None:
    """Write one step's set S into the ledger: locks renewed, counted down or cleared."""
    hit = triggered[selected]
    entering = selected[hit & ~ledger.high[selected]]
    if len(entering):
        last = ledger.last_high[entering]
        soon = (last > 0) & (step - last <= policy.repeat_within)
        ledger.repeats[entering] = np.where(soon, ledger.repeats[entering] + 1, 0)
    lock = np.maximum(ledger.lock[selected] - 1, 0)
    lock = np.where(hit, lock_length(ledger.repeats[selected], policy), lock)
    ledger.lock.fill(0)
    ledger.lock[selected] = lock
    ledger.last_high[selected] = step


def lock_length(repeats: NDArray[np.int64], policy: Policy) -> int | NDArray[np.int64]:
    """Length of a new lock: the paper's constant, or grown with the unit's repeats."""
    if policy.lock_growth == 1.0:
        return policy.lock_steps
    with np.errstate(over="ignore"):  # an infinite length is capped like any other
        grown = np.minimum(
            max(policy.lock_steps, 1) * float(policy.lock_growth) ** np.minimum(repeats, 64), policy.lock_max
        )
    return np.where(repeats > 0, np.maximum(grown.astype(np.int64), policy.lock_steps), policy.lock_steps)
