# SPDX-License-Identifier: Apache-2.0
"""Scores of a run: where a fault was, how soon its unit ran high, and whether that unit stood out."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trimtab.lab.scores import METRICS, Fault, chance_in_top, fault_windows, localise, score_run, worst_risks
from trimtab.lab.train import train
from trimtab.report.memory import memory_of
from trimtab.report.read import Trace, read_run, read_trace
from trimtab.report.summary import summarize

UNITS = ("a", "b", "c", "d")
FAULT = "blocks.1.mlp.up:grad_scale:start=6,width=3,size=64"


def trace(*rows: tuple[int, str]) -> Trace:
    """A trace from pairs of a step and the units that ran high in that pass."""
    high = np.array([[unit in names for unit in UNITS] for _, names in rows])
    steps = np.array([step for step, _ in rows], np.int64)
    shape = high.shape
    return Trace(steps, np.ones(shape, np.float32), np.ones(shape, bool), high, UNITS, np.ones(4, bool), max_high=2)


def test_a_window_is_detected_in_the_step_after_its_last_at_the_latest() -> None:
    rows = [(step, "") for step in range(1, 5)]
    found = [
        localise(trace(*rows, (5, names), (6, more)), [Fault(1, 4, 5)], [])
        for names, more in (("b", ""), ("", "b"), ("a", ""))
    ]
    assert [f["detected"] for f in found] == [1.0, 0.0, 0.0]
    assert [f["delay"] for f in found] == [1.0, None, None]


def test_delay_and_blocked_count_the_faulty_units_own_steps() -> None:
    rows = trace((1, ""), (2, ""), (3, "a"), (4, "b"), (5, "ab"), (6, "b"), (7, ""))
    found = localise(rows, [Fault(1, 2, 6)], [])
    assert (found["detected"], found["delay"], found["blocked"]) == (1.0, 2.0, 0.5)  # steps 4 and 5 of 2 to 5


def test_a_pass_that_was_run_again_is_no_faulty_step_and_no_delay() -> None:
    found = localise(trace((1, ""), (2, ""), (2, "b"), (3, "b"), (4, "")), [Fault(1, 2, 4)], [])
    assert (found["delay"], found["blocked"], found["top1"]) == (0.0, 1.0, 1.0)


def test_who_ran_high_most_after_the_first_faulty_pass_is_blamed() -> None:
    before = [(1, "aa"), (2, "a")]  # what ran high in the first faulty step was chosen before it
    right = localise(trace(*before, (3, "ab"), (4, "b"), (5, "b")), [Fault(1, 2, 5)], [])
    wrong = localise(trace(*before, (3, "ab"), (4, "a"), (5, "a")), [Fault(1, 2, 5)], [])
    assert (right["top1"], wrong["top1"], wrong["top3"]) == (1.0, 0.0, 1.0)


def test_equal_counts_are_told_apart_by_risk_and_else_by_lot() -> None:
    rows, fault = trace((1, ""), (2, ""), (3, "abcd")), [Fault(1, 2, 3)]
    assert localise(rows, fault, [])["top1"] == 0.25
    assert localise(rows, fault, [])["top3"] == 0.75
    assert localise(rows, fault, [(2, "b", 9.0), (2, "a", 2.0)])["top1"] == 1.0
    assert localise(rows, fault, [(2, "b", 2.0), (2, "a", 9.0)])["top1"] == 0.0
    assert localise(rows, fault, [(1, "b", 9.0)])["top1"] == 0.25  # before the fault


def test_units_that_are_faulty_together_do_not_compete() -> None:
    rows = trace((1, ""), (2, ""), (3, "ab"), (4, "a"))
    both = localise(rows, [Fault(0, 2, 4), Fault(1, 2, 4)], [])
    apart = localise(rows, [Fault(1, 2, 4)], [])
    assert (both["top1"], apart["top1"]) == (1.0, 0.0)


def test_a_unit_that_nothing_speaks_for_is_not_found_by_lot() -> None:
    nothing = np.zeros(4, int)
    assert chance_in_top(1, nothing, np.zeros(4), np.ones(4, bool), 3) == 0.0


def test_random_units_find_the_fault_as_often_as_chance() -> None:
    draw = np.random.default_rng(0)
    hits = []
    for _ in range(2000):
        names = "".join(UNITS[i] for i in draw.choice(4, 2, replace=False))
        hits.append(localise(trace((1, ""), (2, ""), (3, names)), [Fault(1, 2, 3)], [])["top1"])
    assert np.mean([hit or 0.0 for hit in hits]) == pytest.approx(0.25, abs=0.03)


def test_a_fault_on_a_linear_belongs_to_the_unit_it_is_in() -> None:
    config = {"faults": [{"unit": "blocks.1.mlp.up", "kind": "nan", "start": 5}, {"unit": "blocks.10", "start": 2}]}
    assert fault_windows(config, ("blocks.1", "blocks.10", "blocks.1.mlp")) == [Fault(2, 5, 6), Fault(1, 2, 3)]


def test_risks_are_those_of_triggers_and_a_missing_one_was_infinite() -> None:
    events: list[dict[str, Any]] = [
        {"kind": "high", "unit": "a", "risk": 2.0},
        {"kind": "denied", "unit": "b"},
        {"kind": "low", "unit": "c"},
        {"kind": "budget_full"},
    ]
    assert worst_risks([{"step": 4, "events": events}, {"step": 5}]) == [(4, "a", 2.0), (4, "b", np.inf)]


@pytest.fixture(name="runs", scope="module")
def _runs(tmp_path_factory: pytest.TempPathFactory, small: dict[str, Any]) -> dict[str, Path]:
    out = tmp_path_factory.mktemp("scores")
    arms = {"plan": {}, "high": {"path": "high", "mode": "observe"}, "low": {"path": "low", "mode": "off"}}
    for name, settings in arms.items():
        train({**small, "steps": 12, "faults": FAULT, **settings}, out / name)
    return {name: out / name for name in arms}


def test_the_scores_are_those_of_the_report(runs: dict[str, Path]) -> None:
    run, scores, summary = read_run(runs["plan"]), score_run(runs["plan"]), summarize(runs["plan"])
    assert scores["eval_high"] == run.column("eval_loss_high")[1][-1]
    assert scores["eval_low"] == run.column("eval_loss_low")[1][-1]
    for name in ("promotion_ratio", "hit_maxO", "denied", "false_alarms_per_1k", "controller_ms", "extra_bytes_mean"):
        assert scores[name] == pytest.approx(summary.metrics[name])
    assert scores["promotion_ratio"] == pytest.approx(read_trace(runs["plan"] / "trace.arrow").high.mean())
    assert scores["detected"] is not None
    assert set(scores) == set(METRICS)


def test_a_run_without_control_is_not_credited_with_what_it_would_have_done(runs: dict[str, Path]) -> None:
    high, low = score_run(runs["high"]), score_run(runs["low"])
    assert (high["promotion_ratio"], low["promotion_ratio"]) == (1.0, 0.0)
    for name in ("hit_maxO", "denied", "false_alarms_per_1k", "detected", "delay", "top1"):
        assert high[name] is None
        assert low[name] is None
    config, units = read_run(runs["high"]).config, read_trace(runs["high"] / "trace.arrow").units
    memory = memory_of(config, units, len(units))
    assert memory is not None
    assert high["extra_bytes_mean"] == memory.bound > 0  # every unit high in every step


def test_a_guard_that_clips_instead_promotes_nobody(tmp_path: Path, small: dict[str, Any]) -> None:
    train({**small, "guard": "clip_flagged"}, tmp_path / "run")
    scores = score_run(tmp_path / "run", triggers=False)
    assert summarize(tmp_path / "run").metrics["promotion_ratio"] > 0  # what would have run
    assert (scores["promotion_ratio"], scores["hit_maxO"], scores["extra_bytes_mean"]) == (0.0, 0.0, 0.0)
    assert (scores["denied"], scores["false_alarms_per_1k"]) == (None, None)


def test_a_warm_up_in_which_everything_runs_high_is_no_promotion(tmp_path: Path, small: dict[str, Any]) -> None:
    policy = {**small["policy"], "warmup": "high", "warmup_steps": 4}
    train({**small, "policy": policy}, tmp_path / "run")
    found, trace = score_run(tmp_path / "run"), read_trace(tmp_path / "run" / "trace.arrow")
    assert trace.high[:4].all()
    assert found["promotion_ratio"] == pytest.approx(trace.high[4:].mean())
    metrics = summarize(tmp_path / "run").metrics
    assert (found["promotion_ratio"], found["hit_maxO"]) == (metrics["promotion_ratio"], metrics["hit_maxO"])


def test_the_time_of_a_step_is_that_of_its_tokens(runs: dict[str, Path]) -> None:
    _, speed = read_run(runs["plan"]).column("tokens_per_s")
    assert score_run(runs["plan"])["ms_per_step"] == pytest.approx(np.mean(1000 * 2 * 16 / speed[5:]))
