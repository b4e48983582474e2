# SPDX-License-Identifier: Apache-2.0
"""Replay: what a policy would have decided on norms that were recorded.

    decisions = trimtab.replay(norms, trimtab.Policy(alpha=2.0))       # norms: (steps, units)
    decisions.high[t]         who is chosen from step t (and runs high in t + 1)
    decisions.summary()       false alarms, promotion, budget pressure, ...

Another detector judges further columns, which a trace holds if the run was recorded with them:

    trace = trimtab.report.read_trace("runs/a/trace.arrow")
    trimtab.replay(trace.norms, policy, seen=trace.seen, detector="gap", columns=trace.columns)

It is the live controller's own code (`advance`) run over a matrix, so on a run's own trace and policy it gives
the run's own decisions, bit for bit. With another policy it is open-loop: in the recorded run a unit that went
high changed the norms that followed, and a replay cannot know what they would have been otherwise.

A trace that is larger than memory is given block by block, and two bytes per step are kept:

    going = Replay(policy, recoverable, total_steps)
    for block in trimtab.report.read.iter_trace("runs/a/trace.arrow"):
        going.add(block.norms, block.seen)
    going.decisions().summary()
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from trimtab.control.advance import State, Verdict, advance
from trimtab.control.decide import quotas_of
from trimtab.control.detectors import Detector, check_columns, detector_of
from trimtab.control.policy import Limits, Policy
from trimtab.control.tally import Tally
from trimtab.control.values import Bools, Floats
from trimtab.errors import TrimtabError

ROWS = 1024  # steps judged at once: large enough to amortise numpy calls, small enough for the cache
CELLS = 1 << 20  # norms judged at once: with thousands of units fewer steps, so that memory does not grow with them


@dataclass(frozen=True, eq=False)
class Decisions:
    """What a replay decided; the matrices are empty when only the summary was kept."""

    ratio: Floats = field(repr=False)  # (T, U)
    jump: Floats = field(repr=False)  # (T, U)
    risk: Floats = field(repr=False)  # (T, U)
    high: Bools = field(repr=False)  # (T, U) chosen from step t, executed in t + 1
    denied: Bools = field(repr=False)  # (T, U) triggered, but over the budget
    rerun: Bools = field(repr=False)  # (T,) the pass was dropped and its batch run again
    alarmed: Bools = field(repr=False)  # (T,) any unit triggered
    limits: Limits
    tally: Tally = field(repr=False)

    def summary(self, quiet: Bools | None = None) -> dict[str, float]:
        """The metrics of `trimtab.control.tally`; `quiet` (T,) marks the steps without a known fault."""
        return self.tally.summary(quiet, self.alarmed)


def replay(
    norms: NDArray[np.floating],
    policy: Policy,
    *,
    seen: Bools | None = None,
    recoverable: Bools | None = None,
    total_steps: int | None = None,
    keep: Literal["all", "summary"] = "all",
    detector: str | Mapping[str, Any] | Detector = "gnmr",
    columns: Mapping[str, NDArray[np.floating]] | None = None,
    parts: Sequence[Sequence[int]] = (),
) -> Decisions:
    """Run a policy over recorded norms.

    Args:
        norms: (steps, units); NaN or Inf is a poisoned norm. Rounded to float32 first, as a live one is.
        seen: (steps, units) mask of observed norms, all by default.
        recoverable: (units,) mask of units that may be chosen, all by default.
        total_steps: length of the run, which fixes the warm-up; the number of rows by default.
        keep: `"summary"` keeps no matrix, for traces larger than memory (pass a memory-mapped array).
        detector: what risks are read from (`trimtab.control.detectors`).
        columns: what it needs besides the norms, each (steps, units); NaN where a unit was not measured.
        parts: units with a budget of their own, as stages of a pipeline may have (`[q.units for q in trace.quotas]`).
    """
    norms, seen, recoverable = _checked(norms, seen, recoverable)
    if keep not in ("all", "summary"):
        raise TrimtabError(f'keep must be "all" or "summary", got {keep!r}')
    kept: list[Verdict] = []
    total_steps = len(norms) if total_steps is None else total_steps
    going = Replay(policy, recoverable, total_steps, detector=detector, parts=parts)
    going.add(norms, seen, columns, each=kept.append if keep == "all" else None)
    return going.decisions(kept)


class Replay:
    """A replay of norms that come block by block; the blocks' lengths do not matter.

    Args:
        recoverable: (units,) mask of units that may be chosen.
        total_steps: length of the run, which fixes the warm-up.
        detector: what risks are read from.
        parts: units that have a budget of their own; none: there is one for all.
    """

    def __init__(
        self,
        policy: Policy,
        recoverable: Bools,  # (U,)
        total_steps: int,
        *,
        detector: str | Mapping[str, Any] | Detector = "gnmr",
        parts: Sequence[Sequence[int]] = (),
    ) -> None:
        self._policy, self._recoverable = policy, np.asarray(recoverable, bool)
        self._judge = detector_of(detector)
        self._limits = policy.resolve(int(self._recoverable.sum()), total_steps)
        self._quotas = quotas_of(parts, self._recoverable, policy)
        if self._quotas:
            self._limits = self._limits._replace(max_high=sum(part.max_high for part in self._quotas))
        self._state = State.fresh(self._recoverable, policy, self._limits, self._judge)
        self._tally = Tally(self._recoverable, self._state.ledger.high, policy, self._limits)
        self._alarmed, self._rerun = [np.zeros(0, bool)], [np.zeros(0, bool)]

    def add(
        self,
        norms: NDArray[np.floating],  # (T, U)
        seen: Bools | None = None,  # (T, U)
        columns: Mapping[str, NDArray[np.floating]] | None = None,  # each (T, U)
        *,
        each: Callable[[Verdict], None] | None = None,
    ) -> None:
        """Take the next passes, as `replay` takes all of them; `each` is given every verdict, some rows at a time."""
        for block, mask, part in blocks_of(norms, seen, columns, self._recoverable, self._judge):
            verdict, self._state = advance(
                self._state,
                block,
                mask,
                self._recoverable,
                self._policy,
                self._limits,
                self._judge,
                part,
                self._quotas,
            )
            self._alarmed.append(self._tally.add(verdict))
            self._rerun.append(verdict.rerun)
            if each is not None:
                each(verdict)

    def decisions(self, kept: Sequence[Verdict] = ()) -> Decisions:
        """What was decided so far; the matrices are those of the verdicts that somebody kept."""

        def column(pick: int, part: Literal["risk", "choice"], dtype: type) -> np.ndarray:
            empty = np.zeros((0, len(self._recoverable)), dtype)
            return np.concatenate([empty] + [getattr(v, part)[pick] for v in kept])

        return Decisions(
            ratio=column(0, "risk", np.float64),
            jump=column(1, "risk", np.float64),
            risk=column(2, "risk", np.float64),
            high=column(0, "choice", np.bool_),
            denied=column(1, "choice", np.bool_),
            rerun=np.concatenate(self._rerun),
            alarmed=np.concatenate(self._alarmed),
            limits=self._limits,
            tally=self._tally,
        )


def blocks_of(
    norms: NDArray[np.floating],
    seen: Bools | None,
    columns: Mapping[str, NDArray[np.floating]] | None,
    recoverable: Bools,
    detector: Detector,
) -> Iterator[tuple[NDArray[np.float32], Bools, dict[str, NDArray[np.float32]]]]:
    """Norms, mask and the detector's columns as a live run would have had them, checked, some rows at a time."""
    norms, seen, _ = _checked(norms, seen, recoverable)
    further = _checked_columns(norms, columns)
    check_columns(detector, {"norm": norms} | further)
    together = max(min(ROWS, CELLS // max(norms.shape[1], 1)), 1)
    for start in range(0, len(norms), together):
        rows = slice(start, start + together)
        block = as_float32(norms[rows])
        if (block < 0).any():
            raise TrimtabError("norms must not be negative: this is not a matrix of gradient norms")
        mask = np.ones(block.shape, bool) if seen is None else np.asarray(seen[rows])
        yield block, mask, {name: as_float32(further[name][rows]) for name in detector.columns}


def as_float32(norms: NDArray[np.floating]) -> NDArray[np.float32]:
    """Rounded as the trace rounds."""
    with np.errstate(over="ignore"):  # a norm beyond float32 is infinite, as it would have been live
        return np.asarray(norms, dtype=np.float32)


def _checked_columns(
    norms: NDArray[np.floating], columns: Mapping[str, NDArray[np.floating]] | None
) -> dict[str, NDArray[np.floating]]:
    found = {name: np.asarray(column) for name, column in (columns or {}).items()}
    for name, column in found.items():
        if column.shape != norms.shape:
            raise TrimtabError(f"column {name!r} must have the shape of norms, {norms.shape}, got {column.shape}")
    return found


def _checked(
    norms: NDArray[np.floating], seen: Bools | None, recoverable: Bools | None
) -> tuple[NDArray[np.floating], Bools | None, Bools]:
    norms = norms if isinstance(norms, np.ndarray) else np.asarray(norms)
    if norms.ndim != 2 or norms.dtype.kind not in "fiu":
        raise TrimtabError(f"norms must be numbers of shape (steps, units), got {norms.dtype} of shape {norms.shape}")
    if seen is not None and np.shape(seen) != norms.shape:
        raise TrimtabError(f"seen must have the shape of norms, {norms.shape}, got {np.shape(seen)}")
    mask = np.ones(norms.shape[1], bool) if recoverable is None else np.asarray(recoverable, bool)
    if mask.shape != (norms.shape[1],):
        raise TrimtabError(f"recoverable must have one entry per unit, {norms.shape[1]}, got shape {mask.shape}")
    return norms, seen, mask
