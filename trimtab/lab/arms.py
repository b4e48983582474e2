# SPDX-License-Identifier: Apache-2.0
"""Arms: the ways of getting through one and the same training run that a bench holds side by side.

An arm is settings laid over a suite's, and sometimes a selection made from another arm's run:

    references     high, low everywhere; clean: low without the injected faults; plain: not converted at all
    control        gnmr (the suite's policy), with and without its parts; other detectors, thresholded and with the
                   whole budget in every step (`-full`)
    who else       random units at another arm's own count per step; round-robin; the largest norms; oracle
    static         adapt: a list learned in a warm-up; ends: the first and last blocks
    on the low path, nobody high     clipping, skipping, spike-aware optimizers; trigger-clip: control without recovery
    together       gnmr with clipping, gnmr with stabilized gradients

Everything an arm does is a setting of `trimtab train` or a selection of `trimtab.control`, so each can be used alone.
Arms of one seed see the same batches, begin with the same weights and keep the suite's budget; an arm that names a
preset starts the policy anew but for that budget and the warm-up that the suite asks for.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from trimtab.checks import meant
from trimtab.control.policy import Policy
from trimtab.control.record import TRACE
from trimtab.control.replay import replay
from trimtab.control.selections import Fixed, RandomUnits, Selection
from trimtab.errors import TrimtabError
from trimtab.lab.config import TABLES, Config
from trimtab.lab.run import Watcher
from trimtab.lab.train import Result, train
from trimtab.report.read import Trace, read_trace

DETECTORS = ("gsnr", "jacobian", "relative", "zscore", "update", "snr", "source", "gap")
ADAPT_SHARE = 0.25


@dataclass(frozen=True)
class Arm:
    """One way of training."""

    name: str
    what: str
    """One line for people."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Laid over the suite's; tables such as `policy` are merged."""
    after: str | None = None
    """The arm whose run must exist first."""
    select: Callable[[Path, int], Selection] | None = None
    """Makes a selection from that run's folder and the seed."""

    def over(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """The settings of this arm over a suite's."""
        merged = {**settings, **self.settings}
        for table in TABLES:
            merged[table] = {**settings.get(table, {}), **self.settings.get(table, {})}
        if merged.get("recipe") == "none":
            merged["recipe_options"] = {}
        own, suite = self.settings.get("policy", {}), settings.get("policy", {})
        if "preset" in own:
            budget = Config.from_dict({"policy": suite}).build_policy().max_high
            kept = {key: suite[key] for key in ("warmup", "warmup_steps") if key in suite}
            merged["policy"] = {"max_high": budget, **kept, **own}
        return merged

    def selection(self, done: Mapping[str, Path], seed: int) -> Selection | None:
        """Who chooses instead of the policy, from the runs that are there."""
        if self.select is None:
            return None
        if self.after is None or self.after not in done:
            raise TrimtabError(
                f"the arm {self.name} is made from the run of {self.after}, got {list(done)}: run {self.after} first"
            )
        return self.select(done[self.after], seed)


def run_arm(
    arm: Arm, settings: Mapping[str, Any], out: Path, *, done: Mapping[str, Path], watcher: Watcher | None = None
) -> Result:
    """Train an arm into a run folder, or go on with what is there; a finished run is left alone.

    Args:
        settings: the suite's.
        done: the folders of the arms that were run before, with the same seed.
    """
    chosen = arm.over(settings)
    selection = arm.selection(done, int(chosen.get("seed", 0)))
    return train(chosen, out, resume=True, watcher=watcher, selection=selection)


def random_like(after: str, name: str | None = None) -> Arm:
    """Random units at another arm's own count per step: what that arm's choice is worth."""
    return Arm(
        name or f"random-{after}",
        f"random units, as many in each step as {after} had",
        {**ACT, "policy": ONCE},
        after,
        random_from,
    )


def find_arm(name: str) -> Arm:
    """An arm by its name; `random-NAME` is there for every other."""
    if name not in ARMS and name.removeprefix("random-") in ARMS:
        return random_like(name.removeprefix("random-"))
    if name not in ARMS:
        raise TrimtabError(f"there is no arm {name!r}: {meant(name, ARMS)}")
    return ARMS[name]


def random_from(folder: Path, seed: int) -> RandomUnits:
    """Random units, as many in each step as a run had high in it (in its last pass, where it ran a batch again)."""
    trace = _trace_of(folder)
    last = np.flatnonzero(np.append(trace.steps[1:] != trace.steps[:-1], True))
    return RandomUnits(trace.high[last].sum(axis=1).tolist(), trace.recoverable, seed=seed)


def adapt_from(folder: Path, seed: int) -> Fixed:
    """The top quarter of the units by mean GNMR over the warm-up, fixed.

    The paper's proxy (E.4) warms up for 500 steps in 16 bit, 2.5 % of its 130M run. Here the warm-up is that of
    `Policy(warmup="high")`: 5 % of the run unless the policy has `warmup_steps`. During it the arm is the run of
    `high` to the bit, so its norms are read there.
    """
    trace = _trace_of(folder)
    mean = _mean_ratio(trace, _adapt_steps(trace))
    choices = np.flatnonzero(trace.recoverable)
    count = max(1, math.floor(ADAPT_SHARE * len(choices) + 1e-9))
    mask = np.zeros(len(trace.units), bool)
    mask[choices[np.argsort(-mean[choices], kind="stable")[:count]]] = True
    return Fixed(mask)


def _trace_of(folder: Path) -> Trace:
    """The trace of a run that another is made from; without all its rows that would be a different one."""
    trace = read_trace(folder / TRACE)
    if not len(trace) or trace.dropped_bytes:
        torn = "is empty" if not len(trace) else f"is torn, {trace.dropped_bytes:,} bytes at its end are no rows"
        raise TrimtabError(f"{folder / TRACE} must hold every step of its run, and {torn}: run {folder} again")
    return trace


def _adapt_steps(trace: Trace) -> int:
    policy = Policy.from_dict(trace.policy).replace(warmup="high")
    steps = policy.resolve(int(trace.recoverable.sum()), trace.total_steps).warmup_steps
    if steps < 1:
        raise TrimtabError("adapt learns its list in the warm-up, got policy.warmup_steps=0: give it some steps")
    return steps


def _mean_ratio(trace: Trace, steps: int) -> np.ndarray:
    """Mean GNMR of each unit over the first steps, against the paper's own history; -inf where it was never seen."""
    rows = trace.steps <= steps
    seen = trace.seen[rows]
    ratio = replay(trace.norms[rows], Policy(alpha_warmup=None), seen=seen, total_steps=steps).ratio
    return np.where(seen.any(axis=0), np.nansum(ratio, axis=0) / np.maximum(seen.sum(axis=0), 1), -np.inf)


ACT = {"mode": "act", "path": "plan"}
LOW = {"mode": "observe", "path": "low"}
ONCE = {"replay_step": None}  # where nobody decides by risk, no batch is worth running again
ALONE = {"max_high": 0, "replay_step": None}  # the controller itself seats nobody


def _arms() -> list[Arm]:
    own = "the suite's policy"
    arms = [
        Arm("high", "every unit on its high path: what is possible", {"mode": "observe", "path": "high"}),
        Arm("low", "every unit on its low path: what is lost", LOW),
        Arm(
            "clean",
            "low everywhere without the faults: what a perfect repair reaches",
            {**LOW, "faults": ""},
        ),
        Arm("plain", "not converted at all", {"recipe": "none", "mode": "observe", "path": "plan", "faults": ""}),
        Arm("gnmr", own, ACT),
        Arm("gnmr-no-jump", f"{own} without the jump term", {**ACT, "policy": {"beta": None}}),
        Arm("gnmr-replay", f"{own}, a batch of extreme risk is run again", {**ACT, "policy": {"replay_step": 10.0}}),
        Arm("steady", "the preset steady: a history without spikes, growing locks", {**ACT, "policy": STEADY}),
        Arm(
            "steady-replay",
            "the preset steady, 10 % of the units at most; a batch of high risk is run again",
            {**ACT, "policy": STEADY_REPLAY},
        ),
        Arm(
            "source-replay",
            "the preset repair with the detector source: who makes more or less than usual of what it is given",
            {**ACT, "detector": "source", "policy": {"preset": "repair", "max_high": 0.1}},
        ),
        Arm("secondhand", "not the paper's figures, but those told of it", {**ACT, "policy": SECONDHAND}),
        Arm("gnmr-full", "the largest GNMR risks, the whole budget in every step", {**ACT, **_detector("gnmr", True)}),
    ]
    for name in DETECTORS:
        split = {"split": 2} if name == "gsnr" else {}  # it needs two backward passes in a step
        arms.append(Arm(name, f"the detector {name} instead of GNMR", {**ACT, **split, **_detector(name, False)}))
        what = f"the detector {name}, the whole budget in every step"
        arms.append(Arm(f"{name}-full", what, {**ACT, **split, **_detector(name, True)}))
    arms += [
        random_like("gnmr", "random"),
        *(random_like(name) for name in ("gnmr-replay", "steady", "gap", "gap-full")),
        *(
            Arm(name, f"{what}, the whole budget in every step", {**ACT, "selection": selection, "policy": ONCE})
            for name, selection, what in (
                ("round-robin", "round_robin", "one unit after the other"),
                ("top-norm", "top_norm", "the largest gradient norms"),
                (
                    "oracle",
                    "oracle",
                    "the largest recovery gaps, measured exactly before each step: no method, a limit",
                ),
            )
        ),
        Arm(
            "by-lot",
            "the whole budget in every step, drawn in proportion to the recovery gaps",
            {**ACT, **_detector("gap", False), "selection": "by_lot", "policy": ONCE},
        ),
        Arm(
            "adapt",
            "everything high in a warm-up, then the quarter with the largest mean GNMR for good",
            {**ACT, "policy": {**ALONE, "warmup": "high"}},
            "high",
            adapt_from,
        ),
        Arm("ends", "the first 2/62 and last 8/62 of the blocks", {**ACT, "fixed_high": "ends", "policy": ALONE}),
        Arm(
            "trigger-clip",
            "whom GNMR flags is clipped to its own mean norm, nobody runs high",
            {**ACT, "guard": "clip_flagged", "policy": ONCE},
        ),
    ]
    return (
        arms
        + [
            Arm(name, f"low everywhere, {what}", {**LOW, **settings})
            for name, what, settings in (
                ("clip", "all gradients together clipped at norm 1", {"clip": 1.0}),
                ("autoclip", "clipped at the 10th percentile of all norms so far", {"transform": "autoclip"}),
                ("zclip", "clipped by z-score", {"transform": "zclip", "transform_options": {"max_norm": 1.0}}),
                ("adagc", "each tensor clipped against its own average", {"transform": "adagc"}),
                ("skip-step", "no update where loss or norm is an outlier", {"guard": "skip_step"}),
                ("spam", "SPAM: coordinates clipped, moments reset", {"optimizer": "spam"}),
                ("stable-spam", "SPAM on stabilized gradients", {"optimizer": "stable_spam"}),
                ("stabilizer", "gradients scaled to their usual size", {"transform": "stabilizer"}),
            )
        ]
        + [
            Arm("gnmr-clip", f"{own}, and clip", {**ACT, "clip": 1.0}),
            Arm("gnmr-stabilizer", f"{own}, and stabilizer", {**ACT, "transform": "stabilizer"}),
        ]
    )


def _detector(name: str, full: bool) -> dict[str, Any]:
    return {"detector": name, "detector_options": {"full": True} if full else {}}


STEADY = {"preset": "steady"}
STEADY_REPLAY = {**STEADY, "replay_step": 2.0, "max_high": 0.1}
SECONDHAND = {"preset": "secondhand", "max_high": 0.01}

ARMS: dict[str, Arm] = {arm.name: arm for arm in _arms()}
"""Every arm by name; `find_arm` knows random units like any of them, too."""
