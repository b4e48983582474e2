# SPDX-License-Identifier: Apache-2.0
"""Passes: what each pass of a run did, beside what its policy said about it.

A trace holds norms and executed sets; ratios, jumps and risks are not stored, because `advance` gives them
back from the norms, bit for bit. This file runs it over the trace in blocks and lines the two sides up: what
a policy chose from pass i is what ran in pass i + 1, so causes and refusals are shifted by one row.

Why a unit ran high, in the order in which one cause hides another:

    nonfinite   its norm was NaN or Inf
    ratio       its ratio over alpha was its risk, and above 1
    jump        its jump over beta was
    locked      it did not trigger, but ran high in the pass before and its lock held
    warmup      everything runs high at first (`Policy(warmup="high")`)
    other       none of these: chosen by hand, by another rule, or from a history that the trace does not hold

A run that only observed executed nothing. Its passes then show what *would* have run, and say so.
"""

import logging
from collections.abc import Iterable, Iterator
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from trimtab.control.advance import State, Verdict, advance
from trimtab.control.decide import Choice, Quota
from trimtab.control.detectors import GNMR, Detector, detector_of
from trimtab.control.policy import Limits, Policy
from trimtab.control.values import Risk
from trimtab.errors import TrimtabError
from trimtab.report.read import Trace

log = logging.getLogger(__name__)

CAUSES = ("", "other", "warmup", "locked", "jump", "ratio", "nonfinite")
"""Names of the causes by their code; a larger code hides a smaller one when passes are pooled."""
OTHER, WARMUP, LOCKED, JUMP, RATIO, NONFINITE = range(1, 7)
ROWS = 2048

Bools = NDArray[np.bool_]


class DecisionsLike(Protocol):
    """What `trimtab.replay` returns, as far as a report needs it; all of shape (T, U)."""

    @property
    def ratio(self) -> NDArray[np.floating]: ...
    @property
    def jump(self) -> NDArray[np.floating]: ...
    @property
    def risk(self) -> NDArray[np.floating]: ...
    @property
    def high(self) -> Bools: ...
    @property
    def denied(self) -> Bools: ...


class Rules(NamedTuple):
    """What the passes are judged by."""

    policy: Policy
    limits: Limits
    recoverable: Bools  # (U,) all units where none has a high path: a run that only watches
    acted: bool
    """Whether the trace's executed sets are shown, or what would have run."""
    detector: Detector = GNMR
    quotas: tuple[Quota, ...] = ()


class Passes(NamedTuple):
    """A block of passes; all rows are aligned with the pass in which something *ran*."""

    steps: NDArray[np.int64]  # (T,)
    verdict: Verdict
    poisoned: Bools  # (T, U) the norm was NaN or Inf
    ran: Bools  # (T, U) executed high, or would have
    why: NDArray[np.uint8]  # (T, U) cause code where it ran, else 0
    refused: Bools  # (T, U) triggered in the pass before, and the budget was full
    ruled: Bools  # (T,) False inside a `high` warm-up, which is counted apart


def rules_of(header: Trace, *, acted: bool) -> Rules:
    """The rules a trace was recorded under."""
    recoverable = header.recoverable if header.recoverable.any() else np.ones(len(header.units), bool)
    policy = Policy.from_dict(header.policy)
    if not acted:  # a run that only observes never asks for a batch to be run again
        policy = policy.replace(replay_step=None)
    return Rules(
        policy, Limits(header.max_high, header.warmup_steps), recoverable, acted, _detector(header), header.quotas
    )


def _detector(header: Trace) -> Detector:
    """The detector of a run, as far as it is known here: somebody's own is judged by GNMR, and that is said."""
    try:
        return detector_of(header.detector)
    except TrimtabError:
        log.warning("detector %r is not one of trimtab's: risks are shown as gnmr sees them", header.detector["name"])
        return GNMR


def judged(rules: Rules, state: State, block: Trace, *, first: bool) -> tuple[Verdict, State]:
    """Judge one block of a trace."""
    if first and len(block):  # a recording that starts in the middle keeps its step numbers
        state = state._replace(step=max(int(block.steps[0]) - 1, 0))
    return advance(
        state,
        block.norms,
        block.seen,
        rules.recoverable,
        rules.policy,
        rules.limits,
        rules.detector,
        block.columns,
        rules.quotas,
    )


def replayed(rules: Rules, blocks: Iterable[Trace]) -> Iterator[tuple[Trace, Verdict]]:
    """Judge a trace block by block."""
    state = State.fresh(rules.recoverable, rules.policy, rules.limits, rules.detector)
    for number, block in enumerate(blocks):
        verdict, state = judged(rules, state, block, first=number == 0)
        yield block, verdict


def given(rules: Rules, trace: Trace, decisions: DecisionsLike) -> Iterator[tuple[Trace, Verdict]]:
    """Pair a trace with decisions that somebody else computed."""
    risk = Risk(*(np.asarray(x, np.float64) for x in (decisions.ratio, decisions.jump, decisions.risk)))
    alpha = rules.policy.alpha_at(trace.steps, rules.limits.warmup_steps)
    choice = Choice(np.asarray(decisions.high, bool), np.asarray(decisions.denied, bool))
    yield trace, Verdict(risk, choice, alpha, trace.steps, np.zeros(len(trace), bool))


def passes(rules: Rules, pairs: Iterable[tuple[Trace, Verdict]]) -> Iterator[Passes]:
    """Line up what ran with why it ran."""
    num_units = len(rules.recoverable)
    last_code = np.zeros((1, num_units), np.uint8)
    last_denied = np.zeros((1, num_units), bool)
    last_ran = last_denied
    last_chosen = State.fresh(rules.recoverable, rules.policy, rules.limits, rules.detector).ledger.high[None]
    for block, verdict in pairs:
        if not len(block):
            continue
        poisoned = block.seen & ~np.isfinite(block.norms)
        codes = np.concatenate([last_code, _codes(verdict, poisoned, rules.policy.beta)])
        denied = np.concatenate([last_denied, verdict.choice.denied])
        chosen = np.concatenate([last_chosen, verdict.choice.high])
        ran = block.high if rules.acted else chosen[:-1]
        before = np.concatenate([last_ran, ran])[:-1]
        warm = (verdict.steps <= rules.limits.warmup_steps) & (rules.policy.warmup == "high")
        quiet_cause = np.where(before, LOCKED, OTHER).astype(np.uint8)
        why = np.where(codes[:-1] > 0, codes[:-1], quiet_cause)
        why[warm] = WARMUP
        why[~ran] = 0
        yield Passes(block.steps, verdict, poisoned, ran, why, denied[:-1] & ~ran, ~warm)
        last_code, last_denied, last_chosen, last_ran = codes[-1:], denied[-1:], chosen[-1:], ran[-1:]


def _codes(verdict: Verdict, poisoned: Bools, beta: float | None) -> NDArray[np.uint8]:
    """The cause of each trigger, 0 where nothing triggered."""
    ratio, jump, risk = verdict.risk
    codes = np.zeros(risk.shape, np.uint8)
    codes[risk > 1] = RATIO
    if beta is not None:
        with np.errstate(invalid="ignore"):
            codes[(risk > 1) & (jump / beta > ratio / verdict.alpha[:, None])] = JUMP
    codes[poisoned] = NONFINITE
    return codes
