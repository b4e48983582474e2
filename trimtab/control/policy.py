# SPDX-License-Identifier: Apache-2.0
"""When a unit may run high: thresholds, budget and lock, as one frozen value.

The paper (GNMR, arXiv 2606.00539) triggers a unit when its risk exceeds 1,

    risk = max(ratio / alpha, jump / beta),

and lets at most `max_high` units run high at once. The defaults are the paper's two-stage rule: alpha 1.5
for the first 2.5 % of the steps, then 1.1, beta 1.5 over a window of 5 ratios, a lock of 1 step. Every row
of its settings is a preset. What goes beyond the paper is off by default and stands in its own part of
the class.

A threshold of 1 is not "normal": norms that fall like t^-p settle at a ratio of 1 - p against a cumulative
mean, which is why 1.1 is sparse on falling norms and fills the budget on flat ones. `Policy.calibrated`
sets alpha and beta from a quiet stretch of a run instead.

No torch here: a policy is judged on a laptop from a recorded trace.
"""

import dataclasses
import math
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from trimtab.checks import is_positive, is_whole, meant, require
from trimtab.errors import TrimtabError

if TYPE_CHECKING:
    from trimtab.control.replay import Replay

HISTORIES = ("cumulative", "winsorized", "exclude_triggered", "ema", "window")
WARMUPS = ("threshold", "high", "monitor")
LONGEST = 1 << 16
"""Most past values that a unit may be asked to remember: a policy also comes from files, and memory grows with it."""


class Limits(NamedTuple):
    """A policy made concrete for one run: its counts."""

    max_high: int
    warmup_steps: int


@dataclass(frozen=True, kw_only=True)
class Policy:
    """Thresholds, budget and lock of the controller; see the module for the rule."""

    max_high: int | float = 0.05
    """Most units high at once: a count (0 = never act), or a fraction of the units in (0, 1], at least one unit."""
    alpha: float = 1.1
    """Threshold of the ratio, in times the unit's own mean norm."""
    alpha_warmup: float | None = 1.5
    """Alpha during the first `warmup_steps`; None means one constant alpha."""
    warmup_steps: int | None = None
    """Steps of warm-up; None means 2.5 % of the total (5 % for `warmup="high"`), rounded up."""
    beta: float | None = 1.5
    """Threshold of the jump, in times the mean of the last `window` ratios; None drops the jump."""
    window: int = 5
    """How many earlier ratios the jump is measured against."""
    lock_steps: int = 1
    """Steps a unit stays eligible after its last trigger; a lock never beats the budget."""
    warmup: str = "threshold"
    """`threshold` (alpha_warmup applies), `high` (every unit runs high) or `monitor` (nothing acts)."""
    eps: float = 1e-12
    """Added to both denominators."""
    max_nonfinite: int = 10
    """Non-finite optimizer steps in a row after which the run is stopped with an error."""

    # Beyond the paper, off by default.
    history: str = "cumulative"
    """What a unit's norms are measured against: `cumulative` (the paper), `winsorized`, `exclude_triggered`,
    `ema` or `window`."""
    kappa: float = 2.5
    """`winsorized`: a norm enters the history as at most kappa times the mean."""
    memory: int | None = None
    """`cumulative`, `winsorized`, `exclude_triggered`: a new norm weighs at least 1 / memory, so that the mean
    follows norms that rise or fall; None never forgets, as in the paper."""
    max_freeze: int = 50
    """`exclude_triggered`: most norms in a row that are kept out of a unit's history."""
    decay: float = 0.98
    """`ema`: decay of the bias-corrected mean."""
    span: int = 128
    """`window`: how many past norms the mean covers."""
    rebase_at: tuple[int, ...] = ()
    """Steps at which every history starts anew (for example the end of the learning-rate warm-up)."""
    prefer_locked: bool = False
    """On equal risk, a locked unit goes first."""
    lock_growth: float = 1.0
    """A unit that triggers again soon after its release gets this many times its last lock."""
    lock_max: int = 64
    """Longest lock that growth may reach."""
    repeat_within: int = 4
    """How many steps after its release a trigger counts as a repeat."""
    persistent_after: int = 5
    """Repeats after which a unit is reported as a persistent offender."""
    replay_step: float | None = None
    """Run the same batch again when a risk exceeds this (10.0 is a good value), before the bad update."""

    def __post_init__(self) -> None:
        steps = self.rebase_at if isinstance(self.rebase_at, list | tuple) else (self.rebase_at,)
        require(all(is_whole(s, 1) for s in steps), "rebase_at must hold steps from 1 on", self.rebase_at)
        object.__setattr__(self, "rebase_at", tuple(steps))
        _check_max_high(self.max_high)
        for name in ("alpha", "eps", "kappa"):
            require(is_positive(getattr(self, name)), f"{name} must be a positive number", getattr(self, name))
        for name in ("alpha_warmup", "beta", "replay_step"):
            value = getattr(self, name)
            require(value is None or is_positive(value), f"{name} must be a positive number or None", value)
        least = {"window": 1, "lock_steps": 0, "max_nonfinite": 1, "max_freeze": 1, "span": 1, "lock_max": 1}
        least |= {"repeat_within": 1, "persistent_after": 1}
        for name, low in least.items():
            value = getattr(self, name)
            require(is_whole(value, low), f"{name} must be a whole number of at least {low}", value)
            require(value < 1 << 62, f"{name} must lie below 2^62", value)
        for name in ("window", "span"):
            value = getattr(self, name)
            require(value <= LONGEST, f"{name} must be at most {LONGEST:,}, all of which are kept", value)
        for name, low in {"memory": 1, "warmup_steps": 0}.items():
            value = getattr(self, name)
            fine = value is None or is_whole(value, low)
            require(fine, f"{name} must be a whole number of at least {low}, or None", value)
        require(is_positive(self.decay) and self.decay < 1, "decay must lie between 0 and 1", self.decay)
        require(
            is_positive(self.lock_growth) and self.lock_growth >= 1, "lock_growth must be at least 1", self.lock_growth
        )
        require(isinstance(self.prefer_locked, bool), "prefer_locked must be True or False", self.prefer_locked)
        require(self.history in HISTORIES, f"history must be one of {', '.join(HISTORIES)}", self.history)
        require(self.warmup in WARMUPS, f"warmup must be one of {', '.join(WARMUPS)}", self.warmup)

    def resolve(self, num_units: int, total_steps: int | None) -> Limits:
        """Make the budget a count of units and the warm-up a count of steps."""
        budget = self.max_high
        if isinstance(budget, float):
            budget = max(1, math.floor(budget * num_units + 1e-9))
        if self.warmup == "threshold" and self.alpha_warmup is None:
            return Limits(budget, 0)
        if self.warmup_steps is not None:
            return Limits(budget, self.warmup_steps)
        if total_steps is None:
            raise TrimtabError(
                "the warm-up is a share of the run, but total_steps is not known: pass total_steps=, "
                "or Policy(warmup_steps=100), or Policy(alpha_warmup=None) for one constant alpha"
            )
        share = 0.05 if self.warmup == "high" else 0.025
        return Limits(budget, math.ceil(share * total_steps - 1e-9))

    def alpha_at(self, steps: np.ndarray, warmup_steps: int) -> np.ndarray:
        """Alpha at each of some steps (counted from 1)."""
        if self.alpha_warmup is None:
            return np.full(steps.shape, float(self.alpha))
        return np.where(steps <= warmup_steps, float(self.alpha_warmup), float(self.alpha))

    def replace(self, /, **changes: Any) -> "Policy":
        """A copy with some fields changed; unknown names raise."""
        return Policy.from_dict(self.to_dict() | changes)

    def to_dict(self) -> dict[str, Any]:
        """The policy as plain values (JSON, checkpoints)."""
        return dataclasses.asdict(self) | {"rebase_at": list(self.rebase_at)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Policy":
        """Build a policy from plain values; an unknown name raises and names the nearest."""
        names = [f.name for f in dataclasses.fields(cls)]
        for name in values:
            if name not in names:
                raise TrimtabError(f"unknown policy setting {name!r}: {meant(name, names)}")
        return cls(**values)

    @classmethod
    def preset(cls, name: str) -> "Policy":
        """A policy by name: the rows of the paper's settings, `steady` for norms that do not fall, and
        `repair` for the detector `source`.
        """
        if not isinstance(name, str) or name not in PRESETS:
            raise TrimtabError(f"unknown preset {name!r} (there are {', '.join(PRESETS)}): {meant(name, PRESETS)}")
        return PRESETS[name]

    @classmethod
    def calibrated(
        cls,
        trace: Any,
        false_alarms_per_1k: float = 1.0,
        *,
        base: "Policy | None" = None,
        skip: int = 20,
        detector: Any = "gnmr",
    ) -> "Policy":
        """Set alpha and beta from a quiet stretch, by quantiles of each step's largest ratio and largest jump.

        On that stretch at most `false_alarms_per_1k` of 1,000 steps would have triggered anything.

        Args:
            trace: norms of shape (steps, units), or an object with `.norms` (and `.seen`), such as a read trace, or a
                `trimtab.report.imports.Log`, which is read block by block and never held whole.
            base: the policy whose other settings are kept; `Policy()` if not given.
            skip: first steps of the stretch to leave out, while the histories are short.
            detector: whose ratios and jumps are meant; its columns are taken from `trace.columns`. One without a jump
                leaves beta as it is.
        """
        from trimtab.control.replay import Replay  # replay builds on policy: imported late to keep the arrow one-way

        base = cls() if base is None else base
        if not (is_positive(false_alarms_per_1k) and false_alarms_per_1k <= 1000):
            raise TrimtabError(f"false_alarms_per_1k must lie in (0, 1000], got {false_alarms_per_1k!r}")
        blocks, shape = _blocks_of(trace)
        if len(shape) != 2 or shape[0] < skip + 50:
            raise TrimtabError(
                f"calibration needs norms of shape (steps, units) with at least {skip + 50} steps, got {shape}: "
                "record a longer quiet stretch"
            )
        # Under `exclude_triggered` the ratios themselves depend on the thresholds: start from thresholds that
        # exclude nothing and raise them until they hold for the ratios they bring about.
        watching = base.replace(alpha=sys.float_info.max, alpha_warmup=None, beta=None, replay_step=None)
        share = false_alarms_per_1k / 1000 / (1 if base.beta is None else 2)
        levels = (0.0, 0.0)
        while True:
            going = Replay(watching, np.ones(shape[1], bool), shape[0], detector=detector)
            ratio, jump = _largest(going, blocks())[:, skip:, None]
            alpha = max(levels[0], quiet_level(ratio, share))
            beta = None if base.beta is None else max(levels[1], quiet_level(jump, share)) or base.beta
            warm = None if base.alpha_warmup is None else alpha * max(1.0, base.alpha_warmup / base.alpha)
            policy = base.replace(alpha=alpha, beta=beta, alpha_warmup=warm)
            if base.history != "exclude_triggered" or levels == (alpha, beta or 0.0):
                return policy
            levels, watching = (alpha, beta or 0.0), policy.replace(replay_step=None)


def _blocks_of(trace: Any) -> tuple[Callable[[], Iterable[Any]], tuple[int, ...]]:
    """How to go through norms, as often as one likes, and their shape."""
    if hasattr(trace, "blocks"):
        return trace.blocks, (trace.rows, len(trace.header.units))
    norms = np.asarray(getattr(trace, "norms", trace), dtype=np.float32)
    whole = SimpleNamespace(norms=norms, seen=getattr(trace, "seen", None), columns=getattr(trace, "columns", None))
    return lambda: [whole], norms.shape


def _largest(going: "Replay", blocks: Iterable[Any]) -> np.ndarray:
    """Each step's largest ratio and largest jump, (2, T)."""
    found: list[np.ndarray] = []
    for block in blocks:
        going.add(
            block.norms,
            block.seen,
            block.columns,
            each=lambda verdict: found.append(np.stack([peaks(column) for column in verdict.risk[:2]])),
        )
    return np.concatenate(found, axis=1)


def peaks(values: np.ndarray) -> np.ndarray:
    """Each step's largest finite value; -inf where it has none."""
    return np.where(np.isfinite(values), values, -np.inf).max(axis=1, initial=-np.inf)


def quiet_level(values: np.ndarray, share: float) -> float:
    """The level that each step's largest finite value exceeds on at most `share` of the steps."""
    finite = peaks(values)
    finite = finite[np.isfinite(finite)]
    if finite.size == 0:
        raise TrimtabError("calibration needs finite norms, and this stretch has none: choose another stretch")
    return float(np.quantile(finite, 1 - share, method="higher"))


def without_outliers(values: np.ndarray) -> np.ndarray:
    """The steps whose largest value is not far above the others' (log scale, 3 quartile ranges past the third)."""
    peaks = np.log(np.maximum(np.where(np.isfinite(values), values, 0).max(axis=1), 1e-30))
    first, third = np.quantile(peaks, (0.25, 0.75))
    return values[peaks <= third + 3 * (third - first)]


def _check_max_high(value: int | float) -> None:
    if isinstance(value, int) and not isinstance(value, bool):
        require(value >= 0, "max_high as a count must be at least 0 (0 = never act)", value)
    else:
        fine = isinstance(value, float) and 0 < value <= 1
        require(fine, "max_high must be a count of units, or a fraction of them in (0, 1]", value)


PRESETS: dict[str, Policy] = {
    # Table 1: saved activations at 4/8 bit, no schedule; budget and window are not stated, ours are the defaults.
    "paper-a": Policy(alpha=1.5, beta=1.3, alpha_warmup=None),
    # Table 11: the matched-trigger test, 4 of 84 units; its thresholds are not stated, Table 1's are used.
    "paper-a-matched": Policy(alpha=1.5, beta=1.3, alpha_warmup=None, max_high=4),
    # Table 2: hybrid FP8 / BF16 by block, without the jump.
    "paper-b8": Policy(beta=None, max_high=6),
    # Table 2: E3M2 / hybrid FP8 by block.
    "paper-b6": Policy(beta=1.5, max_high=6),
    # Table 7: INT8 / BF16 fine-tuning, 10 of 40 layers.
    "paper-c": Policy(beta=1.5, window=5, max_high=10, lock_steps=1),
    # Tables 12 and 13: 5 % of the steps in 16 bit, then alpha 0.9.
    "paper-moe": Policy(alpha=0.9, alpha_warmup=None, warmup="high"),
    # Tables 14 and 15: alpha 0.4 throughout.
    "paper-pangu": Policy(alpha=0.4, alpha_warmup=None),
    # Not the paper's: for norms that rise or wander, and for faults that last.
    "steady": Policy(
        alpha=3.0,
        alpha_warmup=None,
        beta=3.0,
        history="winsorized",
        memory=20,
        lock_steps=4,
        lock_growth=2.0,
    ),
    # The same locks for `Controller(detector="source")`, whose risks are surprises of a gain: 1 is one that does not
    # happen by chance. The batch in which it happens is run again, so that no faulty update reaches the weights.
    "repair": Policy(
        max_high=0.1, alpha=1.0, alpha_warmup=None, beta=None, lock_steps=4, lock_growth=2.0, replay_step=1.0
    ),
    # Not the paper's, but what its summaries say: EMA 0.9, ratio above 2, 1 % of the units, a lock of 10, and "a 5-step
    # difference above 0.5". A policy measures a jump as a ratio; from the usual ratio of 1, 0.5 more is 1.5 times.
    "secondhand": Policy(
        alpha=2.0,
        alpha_warmup=None,
        beta=1.5,
        window=5,
        max_high=0.01,
        lock_steps=10,
        history="ema",
        decay=0.9,
    ),
}
