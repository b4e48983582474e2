# SPDX-License-Identifier: Apache-2.0
"""Advance: judge and decide over some steps, as one pure function of an explicit state.

This is the whole controller without its hands and eyes. A live `Controller` advances by one step, `replay`
by thousands; both get the same bits. Two options need to look at each step before the next can be judged and
therefore go row by row here: `rebase_at`, which starts the histories anew, and the `replay_step` guard:

    when a risk is infinite or above `replay_step`, the pass is not counted: its norms do not enter the
    history, the step number stays, the plan changes at once, and the trainer runs the same batch again under
    it. The second pass of a step always counts.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from trimtab.control.decide import Choice, Ledger, Quota, decide
from trimtab.control.detectors import GNMR, Detector, FullBudget, fill
from trimtab.control.policy import Limits, Policy
from trimtab.control.values import Bools, Risk


class State(NamedTuple):
    """All that decisions depend on."""

    step: int
    """Optimizer steps taken so far."""
    again: bool
    """Whether the coming pass is the second one of its step."""
    history: Any
    """The detector's memory: a NamedTuple of arrays with the units along the last axis."""
    ledger: Ledger

    @classmethod
    def fresh(cls, recoverable: Bools, policy: Policy, limits: Limits, detector: Detector = GNMR) -> "State":
        """The state before the first step."""
        history = detector.fresh(len(recoverable), policy)
        return cls(0, False, history, Ledger.fresh(recoverable, policy, limits))


class Verdict(NamedTuple):
    """What judge and decide said about T passes."""

    risk: Risk
    choice: Choice
    alpha: NDArray[np.float64]  # (T,)
    steps: NDArray[np.int64]  # (T,)
    rerun: Bools  # (T,)


def advance(
    state: State,
    norms: NDArray[np.float32],
    seen: Bools,
    recoverable: Bools,
    policy: Policy,
    limits: Limits,
    detector: Detector = GNMR,
    columns: Mapping[str, NDArray[np.float32]] | None = None,
    quotas: Sequence[Quota] = (),
) -> tuple[Verdict, State]:
    """Judge and decide T passes of norms of shape (T, U), and of the further columns that the detector asks for."""
    verdicts = []
    whole = {"norm": norms} | {name: columns[name] for name in detector.columns if columns is not None}
    for rows in _stretches(state.step, len(norms), policy):
        part = {name: column[rows] for name, column in whole.items()}
        verdict, state = _advance_stretch(state, part, seen[rows], recoverable, policy, limits, detector, quotas)
        verdicts.append(verdict)
    return (verdicts[0] if len(verdicts) == 1 else concatenate(verdicts)), state


def _stretches(step: int, length: int, policy: Policy) -> Iterator[slice]:
    """Cut T passes where the state must be looked at in between."""
    if policy.replay_step is not None and length > 1:
        yield from (slice(t, t + 1) for t in range(length))
        return
    cuts = sorted({0, length} | {s - 1 - step for s in policy.rebase_at if 0 < s - 1 - step < length})
    yield from (slice(a, b) for a, b in zip(cuts, cuts[1:] if length else [0], strict=False))


def _advance_stretch(
    state: State,
    columns: Mapping[str, NDArray[np.float32]],
    seen: Bools,
    recoverable: Bools,
    policy: Policy,
    limits: Limits,
    detector: Detector,
    quotas: Sequence[Quota],
) -> tuple[Verdict, State]:
    length = len(seen)
    steps = state.step + 1 + np.arange(length)
    alpha = policy.alpha_at(steps, limits.warmup_steps)
    before = state.history
    if length and state.step + 1 in policy.rebase_at:
        before = detector.fresh(seen.shape[1], policy)
    risk, history = detector.judge(before, columns, seen, policy, alpha)
    if isinstance(detector, FullBudget):
        risk = risk._replace(risk=fill(risk.risk, seen, recoverable, limits.max_high))
    choice, ledger = decide(state.ledger, risk.risk, recoverable, policy, limits, steps, quotas)
    rerun = _reruns(state, risk, recoverable, choice, policy)
    counted = not rerun.any()  # with `replay_step` a stretch is one pass
    after = State(
        step=state.step + (length if counted else 0),
        again=not counted,
        history=history if counted else before,
        ledger=ledger,
    )
    return Verdict(risk, choice, alpha, steps, rerun), after


def _reruns(state: State, risk: Risk, recoverable: Bools, choice: Choice, policy: Policy) -> Bools:
    """Whether a pass must be run again: an extreme risk on a unit that the new plan takes up, once per step."""
    if policy.replay_step is None or state.again:
        return np.zeros(len(risk.risk), bool)
    extreme = (risk.risk > policy.replay_step) & recoverable
    return np.any(extreme & choice.high & ~state.ledger.high, axis=1)


def concatenate(verdicts: list[Verdict]) -> Verdict:
    """Verdicts of consecutive passes as one."""

    def join(parts: list) -> np.ndarray:
        return np.concatenate(parts)

    return Verdict(
        risk=Risk(*(join([v.risk[i] for v in verdicts]) for i in range(3))),
        choice=Choice(*(join([v.choice[i] for v in verdicts]) for i in range(2))),
        alpha=join([v.alpha for v in verdicts]),
        steps=join([v.steps for v in verdicts]),
        rerun=join([v.rerun for v in verdicts]),
    )
