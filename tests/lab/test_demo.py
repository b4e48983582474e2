# SPDX-License-Identifier: Apache-2.0
"""The demonstration: its four runs differ in nothing but who runs high, random units are as many as control's, and the
numbers it states can be recomputed from the run folders."""

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from trimtab.control.record import Recorder
from trimtab.errors import TrimtabError
from trimtab.lab.demo import ARMS, Outcome, blame, run_demo
from trimtab.lab.run import Silent
from trimtab.report.read import Trace, read_run

FAULTS = "blocks.1.mlp.up:grad_scale:start=4,width=3,size=64; blocks.0.attn.v:grad_scale:start=9,width=3,size=64"


def traced(folder: Path) -> Trace:
    found = read_run(folder).trace
    assert found is not None
    return found


def last_passes(trace: Trace) -> np.ndarray:
    """The set that each step ended with, step by step."""
    return np.array([trace.high[trace.steps == step][-1] for step in range(1, trace.steps.max() + 1)])


@pytest.fixture(scope="module", params=[None, 4.0], ids=["plain", "guard"])
def demo(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, small: dict[str, Any]) -> Outcome:
    policy = {**small["policy"], "alpha": 1.6, "beta": 1.6, "replay_step": request.param}
    settings = {**small, "steps": 12, "faults": FAULTS, "policy": policy}
    return run_demo(settings, tmp_path_factory.mktemp("demo"), lambda arm: nullcontext(Silent()))


def test_the_four_arms_share_all_but_who_runs_high(demo: Outcome) -> None:
    runs = {arm: read_run(result.folder) for arm, result in demo.results.items()}
    assert list(runs) == list(ARMS)
    assert [run.folder.name for run in runs.values()] == list(ARMS)
    arms = {arm: (run.config["mode"], run.config["path"]) for arm, run in runs.items()}
    assert arms == {
        "high": ("observe", "high"),
        "low": ("observe", "low"),
        "control": ("act", "plan"),
        "random": ("act", "plan"),
    }
    shared = [{k: v for k, v in run.config.items() if k not in ("mode", "path", "policy")} for run in runs.values()]
    assert all(config == shared[0] for config in shared)
    first = {run.column("loss")[1][0] for arm, run in runs.items() if arm != "high"}
    assert len(first) == 1  # all are low in the first step


def test_random_units_are_as_many_as_controls_and_others(demo: Outcome) -> None:
    control, random = traced(demo.results["control"].folder), traced(demo.results["random"].folder)
    assert random.steps.tolist() == list(range(1, 13))
    assert random.high.sum(axis=1).tolist() == last_passes(control).sum(axis=1).tolist()
    assert random.high.any()
    assert (random.high != last_passes(control)).any()


def test_the_stated_numbers_are_those_of_the_folders(demo: Outcome) -> None:
    runs = {arm: read_run(result.folder) for arm, result in demo.results.items()}
    loss = {arm: run.column("eval_loss_high")[1][-1] for arm, run in runs.items()}
    damage = loss["low"] - loss["high"]
    assert demo.damage == pytest.approx(damage)
    assert demo.closed_control == pytest.approx((loss["low"] - loss["control"]) / damage)
    assert demo.closed_random == pytest.approx((loss["low"] - loss["random"]) / damage)
    assert demo.promotion == pytest.approx(traced(demo.results["control"].folder).high.mean())
    assert (demo.windows, demo.blamed) == blame(demo.results["control"].folder)
    assert demo.windows == 2
    assert f"{demo.closed_control:.0%} of the damage" in demo.sentence()
    assert f"{demo.promotion:.1%} of unit-steps" in demo.sentence()
    assert "the faults were injected" in demo.sentence()


@pytest.mark.parametrize(
    ("blamed", "words"), [(4, "unit was right;"), (3, "right in 3 of 4 windows"), (0, "unit was wrong;")]
)
def test_the_sentence_says_how_often_the_blame_was_right(blamed: int, words: str) -> None:
    assert words in Outcome(results(high=1.0, low=2.0), 0.5, 0.1, 0.02, windows=4, blamed=blamed).sentence()


def results(**losses: float) -> dict[str, Any]:
    arms = dict.fromkeys(ARMS, 1.5) | losses
    return {arm: SimpleNamespace(summary={"reruns": 0}, steps=10, eval_loss_high=arms[arm]) for arm in ARMS}


@pytest.mark.parametrize(("low", "windows"), [(1.0, 4), (0.9, 4), (2.0, 0)])
def test_without_faults_or_damage_the_sentence_claims_nothing(low: float, windows: int) -> None:
    said = Outcome(results(high=1.0, low=low), float("nan"), 0.0, 0.02, windows=windows, blamed=0).sentence()
    assert said.startswith("There was no damage to close")
    assert "%" not in said


def test_the_same_demo_is_not_written_over(demo: Outcome, small: dict[str, Any]) -> None:
    with pytest.raises(TrimtabError, match="already holds a run"):
        run_demo(small, demo.results["high"].folder.parent, lambda arm: nullcontext(Silent()))


def recorded(folder: Path, high: dict[int, str], faults: list[tuple[str, int, int]]) -> Path:
    """A run of 40 steps over the units a and b, where some steps executed one of them high."""
    windows = [{"unit": unit, "kind": "nan", "start": start, "width": width} for unit, start, width in faults]
    with Recorder(folder, run={"faults": windows}) as recorder:
        recorder.open_trace(["a", "b"], np.ones(2, bool), {}, 1, 0, 40)
        for step in range(1, 41):
            mask = np.array([high.get(step) == "a", high.get(step) == "b"])
            recorder.observe(step, np.ones(2, np.float32), np.ones(2, bool), mask, 1.0)
    return folder


@pytest.mark.parametrize(
    ("high", "right"),
    [
        ({11: "b", 12: "b", 13: "a"}, 1),
        ({11: "a", 12: "a", 13: "b"}, 0),
        ({}, 0),
        ({10: "b"}, 0),  # chosen from step 9, before the fault could be seen
        ({15: "b"}, 1),  # chosen from step 14, the last of the window
        ({16: "b"}, 0),
    ],
)
def test_blame_goes_to_who_ran_high_most_from_the_step_after_the_start(
    tmp_path: Path, high: dict[int, str], right: int
) -> None:
    assert blame(recorded(tmp_path / "run", high, [("b", 10, 5)])) == (1, right)


def test_each_window_is_blamed_for_itself(tmp_path: Path) -> None:
    high = {6: "a", 7: "a", 16: "b", 26: "b"}
    assert blame(recorded(tmp_path / "run", high, [("a", 5, 5), ("b", 15, 5), ("a", 25, 5), ("a", 35, 5)])) == (4, 2)
