# SPDX-License-Identifier: Apache-2.0
"""The summary's claims: counted on what ran, the same in any blocks, and a verdict that fits the run."""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trimtab.control.policy import Policy
from trimtab.control.replay import replay
from trimtab.report.passes import CAUSES, passes, replayed, rules_of
from trimtab.report.read import Run, Trace, iter_trace, read_run
from trimtab.report.summary import Counts, known_faults, quiet_steps, spike_score, summarize

POLICY = Policy(max_high=2, alpha=1.5, beta=None, alpha_warmup=None)
Make = Callable[..., np.ndarray]


def trace_of(norms: np.ndarray, high: np.ndarray, policy: Policy = POLICY, **changes: Any) -> Trace:
    norms = np.asarray(norms, np.float32)
    steps, units = norms.shape
    limits = policy.resolve(units, steps)
    values = {
        "steps": np.arange(1, steps + 1), "norms": norms, "seen": np.ones(norms.shape, bool), "high": high,
        "units": tuple(f"u{i}" for i in range(units)), "recoverable": np.ones(units, bool),
        "policy": policy.to_dict(), "max_high": limits.max_high, "warmup_steps": limits.warmup_steps,
    }  # fmt: skip
    return Trace(**(values | changes))


def run_of(trace: Trace | None, config: dict[str, Any] | None = None, losses: list[float] | None = None) -> Run:
    metrics = tuple({"step": i + 1, "loss": x} for i, x in enumerate(losses or []))
    return Run(Path("nowhere"), {"config": config or {}}, metrics, trace)


def none(steps: int, units: int) -> np.ndarray:
    return np.zeros((steps, units), bool)


def test_metrics_count_the_sets_that_ran_not_those_that_were_chosen() -> None:
    high = none(10, 4)
    high[2:5, 1] = True
    high[3, 2] = True  # by another rule: these norms trigger nothing
    metrics = summarize(run_of(trace_of(np.ones((10, 4)), high))).metrics
    assert metrics["promotion_ratio"] == 4 / 40
    assert metrics["hit_maxO"] == 1 / 10
    assert metrics["switches_per_1k"] == 1000 * 4 / 10
    assert metrics["false_alarms_per_1k"] == 0
    assert next(iter(metrics)) == "false_alarms_per_1k"


def test_shares_above_the_thresholds_and_refusals() -> None:
    norms = np.ones((8, 4))
    norms[4, :3] = 100  # three trigger, two seats
    high = none(8, 4)
    high[5, :2] = high[6, :2] = True
    s = summarize(run_of(trace_of(norms, high)))
    assert s.metrics["exceed_gnmr"] == 3 / 32
    assert s.metrics["exceed_delta"] == 0
    assert s.metrics["denied"] == 1
    assert {o.unit: o.denied for o in s.offenders} == {"u0": 0, "u1": 0, "u2": 1}
    assert s.offenders[0].worst_step == 5
    assert s.offenders[0].worst_risk == pytest.approx(100 / 1.5)


def test_false_alarms_leave_out_known_faults_and_their_aftermath() -> None:
    norms = np.ones((200, 2))
    for step in (50, 75, 76, 150):  # the fault covers [50, 56), its aftermath [56, 76)
        norms[step - 1, 0] = 1000 * step
    faults = [{"unit": "u0", "kind": "scale", "start": 50, "width": 6}, {"unit": "u1"}, "nonsense"]
    with_faults = summarize(run_of(trace_of(norms, none(200, 2)), {"faults": faults}))
    assert with_faults.quiet_passes == 200 - 26
    assert with_faults.metrics["false_alarms_per_1k"] == pytest.approx(1000 * 2 / 174)
    assert summarize(run_of(trace_of(norms, none(200, 2)))).metrics["false_alarms_per_1k"] == 1000 * 4 / 200


def test_a_fault_that_repeats_is_several_windows() -> None:
    fault = {"unit": "u", "kind": "scale", "start": 10, "every": 50, "count": 3}
    assert known_faults({"faults": [fault, {"start": 7, "width": 2}]}) == [(10, 11), (60, 61), (110, 111), (7, 9)]
    quiet = quiet_steps(np.arange(1, 200), {"faults": [fault]})
    assert np.flatnonzero(~quiet).tolist() == [*range(9, 30), *range(59, 80), *range(109, 130)]
    assert quiet_steps(np.arange(3), {"faults": "none"}).all()


def brute_force(high: np.ndarray, within: int) -> list[tuple[int, int, int]]:
    """Times high, steps high and returns of each unit, by walking."""
    found = []
    for column in high.T:
        times = steps = returns = 0
        last = None
        for row, on in enumerate(column):
            if on:
                steps += 1
                if row == 0 or not column[row - 1]:
                    times += 1
                    returns += last is not None and row - last <= within
                last = row
        found.append((times, steps, returns))
    return found


@pytest.mark.parametrize("rows", [1, 7, 64, 1000])
def test_offenders_are_counted_alike_in_any_blocks(tmp_path: Path, make_run: Make, rows: int) -> None:
    make_run(tmp_path / "r", steps=300, units=9, noise=0.2, faults=((2, 40, 150, 6),))
    run = read_run(tmp_path / "r")
    assert run.trace is not None
    rules = rules_of(run.trace, acted=True)
    counts = Counts(run.trace, rules, {})
    for block in passes(rules, replayed(rules, iter_trace(tmp_path / "r" / "trace.arrow", rows))):
        counts.add(block)
    expected = brute_force(run.trace.high, 20)
    assert list(zip(counts.times_high, counts.steps_high, counts.returns, strict=True)) == expected
    assert counts.summary(run) == summarize(run) == summarize(tmp_path / "r")
    persistent = {run.trace.units[i] for i, (_, _, returns) in enumerate(expected) if returns >= 5}
    assert persistent == {o.unit for o in summarize(run).offenders if o.persistent} == set(summarize(run).keep_high)
    assert "blocks.0.v" in persistent  # the faulty one


def test_a_run_is_explained_by_its_own_replay(tmp_path: Path, make_run: Make) -> None:
    make_run(tmp_path / "r", steps=500, units=8, noise=0.3, faults=((1, 90, 1, np.nan), (3, 200, 40, 4)))
    trace = read_run(tmp_path / "r").trace
    assert trace is not None
    rules = rules_of(trace, acted=True)
    [block] = passes(rules, replayed(rules, [trace]))
    decisions = replay(trace.norms, Policy.from_dict(trace.policy), seen=trace.seen)
    assert np.array_equal(trace.high[1:], decisions.high[:-1])
    found = {CAUSES[code] for code in np.unique(block.why)} - {""}
    assert found == {"ratio", "jump", "nonfinite", "locked"}  # and never "other"
    assert np.array_equal(block.why > 0, trace.high)
    assert block.why[90, 1] == CAUSES.index("nonfinite")
    assert np.array_equal(block.refused[1:], decisions.denied[:-1])


@pytest.mark.parametrize("rows", [1, 7])
def test_causes_and_refusals_cross_the_borders_of_blocks(tmp_path: Path, make_run: Make, rows: int) -> None:
    make_run(tmp_path / "r", steps=200, units=8, noise=0.4)
    trace = read_run(tmp_path / "r").trace
    assert trace is not None
    for acted in (True, False):
        rules = rules_of(trace, acted=acted)
        [whole] = passes(rules, replayed(rules, [trace]))
        parts = list(passes(rules, replayed(rules, iter_trace(tmp_path / "r" / "trace.arrow", rows))))
        assert whole.refused.any()
        for name in ("steps", "ran", "why", "refused", "poisoned", "ruled"):
            assert np.array_equal(np.concatenate([getattr(part, name) for part in parts]), getattr(whole, name)), name


def test_causes_by_hand() -> None:
    norms = np.ones((12, 3))
    norms[4, 0] = 10  # the ratio of u0 at step 5
    norms[7, 1] = np.inf
    high = none(12, 3)
    high[5:7, 0] = True  # 1 + lock_steps
    high[8, 1] = True
    high[2, 2] = True  # for no reason of ours
    rules = rules_of(trace_of(norms, high), acted=True)
    [block] = passes(rules, replayed(rules, [trace_of(norms, high)]))
    named = {(row + 1, unit): CAUSES[block.why[row, unit]] for row, unit in np.argwhere(block.why)}
    assert named == {(3, 2): "other", (6, 0): "ratio", (7, 0): "locked", (9, 1): "nonfinite"}


def test_a_high_warm_up_is_counted_apart() -> None:
    policy = Policy(max_high=1, alpha=1.5, alpha_warmup=None, beta=None, warmup="high", warmup_steps=4)
    high = none(10, 3)
    high[:4] = True
    s = summarize(run_of(trace_of(np.ones((10, 3)), high, policy)))
    assert s.metrics["promotion_ratio"] == 0
    assert s.metrics["warmup_steps"] == 4
    assert s.offenders == ()


def test_an_observed_run_says_what_would_have_been() -> None:
    norms = np.ones((20, 4))
    norms[9, 2] = 50
    s = summarize(run_of(trace_of(norms, none(20, 4), recoverable=np.zeros(4, bool))))
    assert not s.acted
    assert s.metrics["promotion_ratio"] == 2 / 80
    assert s.verdict.startswith("Observed only: control would have acted 1 time on 1 of 4 units; 2.5 % of unit-steps")


def test_a_recording_that_starts_late_keeps_its_step_numbers() -> None:
    policy = Policy(max_high=2, alpha=1.5, alpha_warmup=100.0, warmup_steps=50, beta=None)
    norms = np.ones((20, 2))
    norms[9, 0] = 20
    late = trace_of(norms, none(20, 2), policy, steps=np.arange(101, 121))
    assert summarize(run_of(late)).metrics["exceed_gnmr"] == 1 / 40
    assert summarize(run_of(replace(late, steps=np.arange(1, 21)))).metrics["exceed_gnmr"] == 0  # still warming up


def test_spike_score_by_walking() -> None:
    rng = np.random.default_rng(1)
    losses = 3 + 0.1 * rng.standard_normal(1000)
    losses[[200, 500, 501]] += 5
    count = sum(x > w.mean() + 6 * w.std() for x, w in ((losses[i], losses[i - 128 : i]) for i in range(128, 1000)))
    assert count >= 2
    assert spike_score(losses) == count / 1000
    assert spike_score(losses[:128]) is None
    assert spike_score(np.full(300, 2.0)) == 0


def test_losses_skip_what_is_not_finite(tmp_path: Path) -> None:
    metrics = ({"step": 1, "loss": None}, {"step": 2, "loss": 5.0}, {"step": 2, "eval_loss_low": 4.0},
               {"step": 3, "loss": 3.0, "eval_loss_low": 2.0, "eval_loss_high": 1.5})  # fmt: skip
    losses = summarize(Run(tmp_path, {}, metrics, None)).losses
    assert (losses.first, losses.last, losses.nonfinite) == (5.0, 3.0, 1)
    assert losses.best_evals == {"eval_loss_low": 2.0, "eval_loss_high": 1.5}


def test_verdicts(tmp_path: Path, make_run: Make) -> None:
    def verdict(name: str, **kwargs: Any) -> str:
        make_run(tmp_path / name, **kwargs)
        return summarize(tmp_path / name).verdict

    assert verdict("quiet", steps=100) == "Nothing left its range: no risk passed 1 in 100 steps."
    assert verdict("none", steps=0) == "Nothing has been recorded yet."
    said = verdict("acted", units=42, faults=((9, 100, 1, 8.0),))
    assert said.startswith(
        "Control acted 1 time on 1 of 42 units; 0.01 % of unit-steps ran high; blocks.1.o is the main"
    )
    said = verdict("nan", faults=((4, 30, 1, np.nan),))
    assert said.startswith(
        "The gradient was not finite on 1 step, first at step 30 in blocks.0.u. Control acted 1 time"
    )
    said = verdict(
        "holder", policy=Policy(max_high=1, alpha=1.5, beta=2.0, warmup_steps=5), faults=((4, 30, 300, 8.0),)
    )
    assert "The budget was full on" in said
    assert said.endswith("1 unit took it, blocks.0.u most often.")
    said = verdict("shut", policy=Policy(max_high=0, alpha=1.5, beta=2.0, warmup_steps=5), faults=((4, 30, 3, 8.0),))
    assert said == "1 unit left its range, and the budget of 0 let none run high."
    assert summarize(run_of(None)).verdict.startswith("There is no trace in this folder")


@pytest.mark.parametrize(("steps", "per"), [(600, 100), (2500, 1000)])
def test_a_full_budget_names_the_threshold_and_a_value_that_would_be_quiet(
    tmp_path: Path, make_run: Make, steps: int, per: int
) -> None:
    low = Policy(max_high=1, alpha=0.8, beta=None, alpha_warmup=None)
    make_run(tmp_path / "r", steps=steps, units=12, noise=0.1, policy=low, act=False)
    verdict = summarize(tmp_path / "r").verdict
    said = rf"alpha 0.8 is too low for these norms; ([\d.]+) would trigger on 1 quiet step in {per:,}\."
    found = re.search(said, verdict)
    assert found, verdict
    trace = read_run(tmp_path / "r").trace
    assert trace is not None
    alarmed = [replay(trace.norms, low.replace(alpha=float(found[1]) - less)).alarmed[20:].mean() for less in (0, 0.03)]
    assert alarmed[0] <= 1 / per < alarmed[1]  # this value, and hardly a lower one


def test_a_budget_that_known_faults_fill_is_not_blamed_on_anything_else(tmp_path: Path, make_run: Make) -> None:
    policy = Policy(max_high=1, alpha=1.5, beta=2.0, warmup_steps=5)
    fault = {"unit": "blocks.0.u", "kind": "grad_scale", "start": 30, "width": 300}
    for name, config in (("unknown", {}), ("known", {"faults": [fault]})):
        make_run(tmp_path / name, policy=policy, faults=((4, 30, 300, 8.0),), config=config)
    unknown, known = summarize(tmp_path / "unknown"), summarize(tmp_path / "known")
    assert known.metrics["hit_maxO"] == unknown.metrics["hit_maxO"] > 0.2
    assert unknown.verdict.startswith("The budget was full")
    assert known.verdict.startswith("Control acted")
