# SPDX-License-Identifier: Apache-2.0
"""Judge: how far each unit's gradient norm lies outside its own history (Algorithm 1 of arXiv 2606.00539).

Each unit remembers the mean A of its past norms, how many there were (c), and its last `window` ratios (Q).
For a new norm n:

    ratio = n / (A + eps)                 1 while there is no history (c = 0 or A = 0)
    jump  = ratio / (mean(Q) + eps)       1 until Q is full
    A    <- A + (n - A) / c               after the ratio: a norm is not in its own mean
    Q    <- Q with ratio, newest kept     after the jump: a ratio is not in its own window
    risk  = max(ratio / alpha, jump / beta)

Every observed norm enters A and Q, spikes and recovered steps included. A NaN or Inf norm is a risk of +inf
and leaves the history untouched; a unit without a gradient has risk 0 and keeps its state. Named departures
from the paper (`Policy.history`) change only what enters A and Q:

    winsorized          min(n, kappa A) and min(ratio, kappa): a spike is remembered as a small one
    exclude_triggered   a triggering norm is left out, at most `max_freeze` times in a row
    ema                 A is a bias-corrected exponential mean
    window              A is the mean of the last `span` norms
    (and `memory`)      c is capped, so that the mean follows norms that rise or fall

Everything here is a pure function of float64 arrays over U units and T steps: a live controller judges
T = 1, a replay judges thousands of steps with the same code, bit for bit. Only the recurrence of A runs row
by row; ratios, jumps and risks are computed for the whole stretch at once. Gaps are closed first: a unit's
history is the sequence of its own observations, so each column is packed, judged, and spread out again.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from trimtab.control.policy import Policy
from trimtab.control.values import Bools, Floats, Risk


class History(NamedTuple):
    """What judge remembers of each unit; complete at birth."""

    num_seen: NDArray[np.int64]  # (U,) finite observations, the paper's t
    mean: Floats  # (U,) mean of past norms (for `ema`, before bias correction)
    queue: Floats  # (window, U) last ratios, newest last; full once count >= window
    recent: Floats  # (span, U) last norms, newest last; only `window` uses it, else (0, U)
    frozen: NDArray[np.int64]  # (U,) norms left out in a row; only `exclude_triggered` uses it

    @classmethod
    def fresh(cls, num_units: int, policy: Policy) -> "History":
        """The history before the first step."""
        span = policy.span if policy.history == "window" else 0
        zeros = np.zeros
        return cls(
            num_seen=zeros(num_units, np.int64),
            mean=zeros(num_units),
            queue=zeros((policy.window, num_units)),
            recent=zeros((span, num_units)),
            frozen=zeros(num_units, np.int64),
        )


def judge(
    history: History, norms: NDArray[np.float32], seen: Bools, policy: Policy, alpha: Floats
) -> tuple[Risk, History]:
    """Judge T steps of norms against each unit's history; returns the risks and the history after them.

    Args:
        norms: (T, U) gradient norms, rounded to float32 as they stand in the trace.
        seen: (T, U) whether the unit had a gradient in that step.
        alpha: (T,) threshold of the ratio at each step.
    """
    live = seen & np.isfinite(norms)
    values = np.where(live, norms, 0).astype(np.float64)
    if policy.history == "exclude_triggered":
        rows = []
        for t in range(len(norms)):
            ratio, jump, history = _exclude_row(history, values[t], live[t], policy, float(alpha[t]))
            rows.append((ratio, jump))
        shape = values.shape
        ratio = np.array([r for r, _ in rows]).reshape(shape)
        jump = np.array([j for _, j in rows]).reshape(shape)
    elif live.all():
        ratio, jump, history = _judge_packed(history, values, None, policy)
    else:
        ratio, jump, history = _judge_gaps(history, values, live, policy)
    if live.all():
        return Risk(ratio, jump, risk_of(ratio, jump, policy, alpha)), history
    poisoned = seen & ~live
    ratio = np.where(live, ratio, np.where(poisoned, np.inf, np.nan))
    jump = np.where(live, jump, np.where(poisoned, np.inf, np.nan))
    return Risk(ratio, jump, risk_of(ratio, jump, policy, alpha)), history


def risk_of(ratio: Floats, jump: Floats, policy: Policy, alpha: Floats) -> Floats:
    """Combine ratio and jump into the risk; unobserved units (NaN) have risk 0."""
    risk = ratio / alpha[:, None]
    if policy.beta is not None:
        risk = np.maximum(risk, jump / policy.beta)
    return np.where(np.isnan(risk), 0.0, risk)


def _judge_gaps(history: History, values: Floats, live: Bools, policy: Policy) -> tuple[Floats, Floats, History]:
    """Close the gaps of each column, judge, and put the results back where they belong."""
    order = np.argsort(~live, axis=0, kind="stable")  # (T, U) each unit's observations first, in order
    packed = np.take_along_axis(values, order, axis=0)
    packed_ratio, packed_jump, history = _judge_packed(history, packed, live.sum(axis=0), policy)
    ratio, jump = np.empty_like(values), np.empty_like(values)
    np.put_along_axis(ratio, order, packed_ratio, axis=0)
    np.put_along_axis(jump, order, packed_jump, axis=0)
    return ratio, jump, history


def _judge_packed(
    history: History, values: Floats, lengths: NDArray[np.int64] | None, policy: Policy
) -> tuple[Floats, Floats, History]:
    """Judge gapless columns; unit b has `lengths[b]` observations (None: every row), rows past them are padding."""
    steps = len(values)
    before, mean, recent = _means(history, values, lengths, policy)  # (T, U): the mean each norm is held against
    ratio = np.where(before == 0, 1.0, values / (before + policy.eps))
    pushed = np.minimum(ratio, policy.kappa) if policy.history == "winsorized" else ratio
    ratios = np.concatenate([history.queue, pushed])  # row i + window is the ratio of step i
    total = ratios[:steps].copy()
    for k in range(1, policy.window):  # oldest first, one order of addition on every machine
        total += ratios[k : k + steps]
    counts = history.num_seen + np.arange(steps)[:, None]  # observations before each step
    jump = np.where(counts >= policy.window, ratio / (total / policy.window + policy.eps), 1.0)
    if lengths is None:
        return ratio, jump, History(history.num_seen + steps, mean, ratios[steps:].copy(), recent, history.frozen)
    queue = np.take_along_axis(ratios, lengths + np.arange(policy.window)[:, None], axis=0)
    return ratio, jump, History(history.num_seen + lengths, mean, queue, recent, history.frozen)


def _means(
    history: History, values: Floats, lengths: NDArray[np.int64] | None, policy: Policy
) -> tuple[Floats, Floats, Floats]:
    """Run the recurrence of the mean; returns the mean before each step, and mean and recent norms at the end."""
    steps = len(values)
    before = np.empty_like(values)
    mean, recent = history.mean, history.recent
    for t in range(steps):
        count = history.num_seen + t  # observations so far
        before[t] = _mean_now(mean, recent, count, policy)
        new_mean, new_recent = _fold(mean, recent, values[t], before[t], count + 1, policy)
        if lengths is None:
            mean, recent = new_mean, new_recent
        else:
            growing = t < lengths
            mean = np.where(growing, new_mean, mean)
            recent = np.where(growing, new_recent, recent)
    return before, mean, recent


def _mean_now(mean: Floats, recent: Floats, count: NDArray[np.int64], policy: Policy) -> Floats:
    """The mean a new norm is held against."""
    if policy.history == "ema":
        return np.where(count > 0, mean / (1 - policy.decay ** np.maximum(count, 1)), 0.0)
    if policy.history == "window":
        return recent.sum(axis=0) / np.clip(count, 1, policy.span)
    return mean


def _fold(
    mean: Floats, recent: Floats, norm: Floats, now: Floats, count: NDArray[np.int64], policy: Policy
) -> tuple[Floats, Floats]:
    """Let one norm into the mean; `now` is the mean before it, `count` includes it."""
    if policy.history == "ema":
        return policy.decay * mean + (1 - policy.decay) * norm, recent
    if policy.history == "window":
        return mean, np.concatenate([recent[1:], norm[None]])
    if policy.history == "winsorized":
        norm = np.where(now > 0, np.minimum(norm, policy.kappa * now), norm)
    weight = count if policy.memory is None else np.minimum(count, policy.memory)
    return mean + (norm - mean) / weight, recent


def _exclude_row(
    history: History, values: Floats, live: Bools, policy: Policy, alpha: float
) -> tuple[Floats, Floats, History]:
    """One step of `exclude_triggered`: judge, then keep the history of units that triggered as it was."""
    ratio, jump, after = _judge_packed(history, values[None], None, policy)
    risk = risk_of(ratio, jump, policy, np.array([alpha]))[0]
    left_out = live & (risk > 1) & (history.frozen < policy.max_freeze) & (history.num_seen > 0)
    folds = live & ~left_out
    frozen = np.where(left_out, history.frozen + 1, np.where(folds, 0, history.frozen))
    kept = [np.where(folds, new, old) for new, old in zip(after[:4], history[:4], strict=True)]
    return ratio[0], jump[0], History(*kept, frozen=frozen)
