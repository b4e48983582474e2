# SPDX-License-Identifier: Apache-2.0
"""Policy: what is refused and how, that it survives plain values, that every preset is its row of the paper, how
warm-up and budget become counts, and that calibration keeps its promise on the very stretch it was made from."""

import dataclasses
import json
import math
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import trimtab
from trimtab import Policy, TrimtabError
from trimtab.control.policy import HISTORIES, PRESETS, WARMUPS

NAN, INF = math.nan, math.inf

INVALID = {
    "max_high": [-1, 0.0, -0.5, 1.5, NAN, INF, True, "4", None],
    "alpha": [0, -1.0, NAN, INF, True, "1.1", None],
    "alpha_warmup": [0, -1.5, NAN, INF, True, "1.5"],
    "warmup_steps": [-1, 2.5, True, "100"],
    "beta": [0, -1.5, NAN, INF, True, "1.5"],
    "window": [0, -5, 2.5, True, None],
    "lock_steps": [-1, 1.5, True, None],
    "warmup": ["none", "", None, 3],
    "eps": [0, -1e-12, NAN, INF, None],
    "max_nonfinite": [0, -1, 1.5, True, None],
    "history": ["mean", "", None, 3],
    "kappa": [0, -1.0, NAN, INF, None],
    "memory": [0, -1, 1.5, True, "20"],
    "max_freeze": [0, 1.5, None],
    "decay": [0, 1, -0.5, 1.5, NAN, True, "0.9", None],
    "span": [0, 1.5, None],
    "rebase_at": [(0,), (-3,), (2.5,), 2.5, (True,), "10", None],
    "prefer_locked": ["yes", 2, None],
    "lock_growth": [0.5, 0, -1, NAN, INF, None, "2"],
    "lock_max": [0, 1.5, None],
    "repeat_within": [0, 1.5, None],
    "persistent_after": [0, 1.5, None],
    "replay_step": [0, -10.0, NAN, INF, True, "10"],
}


@pytest.mark.parametrize(("name", "value"), [(n, v) for n, values in INVALID.items() for v in values])
def test_every_invalid_value_is_refused_with_its_rule_and_itself(name: str, value: object) -> None:
    with pytest.raises(TrimtabError) as caught:
        Policy(**{name: value})
    message = str(caught.value)
    assert name in message
    assert "must" in message
    assert repr(value) in message


def test_every_setting_has_its_invalid_values_tested() -> None:
    assert set(INVALID) == {field.name for field in dataclasses.fields(Policy)}


@pytest.mark.parametrize(
    "values",
    [
        {"max_high": 0},
        {"max_high": 10**6},
        {"max_high": 1.0},
        {"alpha": 0.4},
        {"alpha_warmup": None},
        {"alpha": 2.0, "alpha_warmup": 1.0},
        {"warmup_steps": 0},
        {"beta": None},
        {"window": 1},
        {"lock_steps": 0},
        {"rebase_at": 7},
        {"replay_step": 10},
    ],
)
def test_the_edges_of_the_valid_ranges_are_accepted(values: dict) -> None:
    assert isinstance(Policy(**values), Policy)


def test_a_policy_cannot_be_changed_after_it_was_checked() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Policy().alpha = -1.0  # type: ignore[misc]


def test_a_single_rebase_step_is_a_tuple_of_one() -> None:
    assert Policy(rebase_at=7).rebase_at == (7,)  # type: ignore[arg-type]
    assert Policy(rebase_at=[3, 5]).rebase_at == (3, 5)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("wrong", "right"), [("alfa", "alpha"), ("max_hihg", "max_high"), ("lock_step", "lock_steps"), ("deccay", "decay")]
)
def test_an_unknown_setting_names_the_nearest(wrong: str, right: str) -> None:
    with pytest.raises(TrimtabError, match=rf"{wrong!r}.*did you mean {right!r}"):
        Policy.from_dict({wrong: 1})
    with pytest.raises(TrimtabError, match=rf"did you mean {right!r}"):
        Policy().replace(**{wrong: 1})


def test_an_unknown_setting_far_from_all_lists_the_valid_ones() -> None:
    with pytest.raises(TrimtabError, match=r"'zzzzqqq'.*max_high.*replay_step"):
        Policy.from_dict({"zzzzqqq": 1})


def policies() -> st.SearchStrategy[Policy]:
    positive = st.floats(0.01, 100)
    return st.builds(
        Policy,
        max_high=st.one_of(st.integers(0, 50), st.floats(0.001, 1.0)),
        alpha=positive,
        alpha_warmup=st.none() | positive,
        warmup_steps=st.none() | st.integers(0, 50),
        beta=st.none() | positive,
        window=st.integers(1, 9),
        lock_steps=st.integers(0, 5),
        warmup=st.sampled_from(WARMUPS),
        history=st.sampled_from(HISTORIES),
        memory=st.none() | st.integers(1, 99),
        rebase_at=st.lists(st.integers(1, 99), max_size=3).map(tuple),
        prefer_locked=st.booleans(),
        lock_growth=st.floats(1, 8),
        replay_step=st.none() | positive,
    )


@given(policies())
def test_plain_values_give_the_same_policy_back(policy: Policy) -> None:
    assert Policy.from_dict(policy.to_dict()) == policy
    assert Policy.from_dict(json.loads(json.dumps(policy.to_dict()))) == policy


def test_plain_values_hold_every_setting() -> None:
    assert set(Policy().to_dict()) == {field.name for field in dataclasses.fields(Policy)}


def test_replace_changes_what_it_is_told_and_nothing_else() -> None:
    changed = Policy(alpha=2.0, window=3).replace(beta=None)
    assert changed == Policy(alpha=2.0, window=3, beta=None)


# Presets: the rows of the paper's table of settings; what a row does not state is the default.

ROWS = {
    "paper-a": {"alpha": 1.5, "beta": 1.3, "alpha_warmup": None},
    "paper-a-matched": {"max_high": 4, "lock_steps": 1},
    "paper-b8": {"alpha": 1.1, "alpha_warmup": 1.5, "warmup_share": 0.025, "beta": None, "max_high": 6},
    "paper-b6": {"alpha": 1.1, "alpha_warmup": 1.5, "warmup_share": 0.025, "beta": 1.5, "max_high": 6},
    "paper-c": {"alpha": 1.1, "alpha_warmup": 1.5, "beta": 1.5, "window": 5, "max_high": 10, "lock_steps": 1},
    "paper-moe": {"alpha": 0.9, "warmup": "high", "warmup_share": 0.05, "alpha_warmup": None},
    "paper-pangu": {"alpha": 0.4, "alpha_warmup": None},
}


@pytest.mark.parametrize("name", ROWS)
def test_a_preset_is_its_row_of_the_paper(name: str) -> None:
    policy, row = Policy.preset(name), dict(ROWS[name])
    share = row.pop("warmup_share", None)
    assert {key: getattr(policy, key) for key in row} == row
    if share is not None:
        assert policy.resolve(24, 100_000).warmup_steps == round(share * 100_000)
    beyond = ("history", "memory", "rebase_at", "prefer_locked", "lock_growth", "replay_step")
    assert all(getattr(policy, key) == getattr(Policy(), key) for key in (*beyond, "window", "lock_steps", "eps"))


def test_a_constant_alpha_preset_has_no_threshold_warm_up() -> None:
    for name in ("paper-a", "paper-a-matched", "paper-pangu"):
        assert Policy.preset(name).resolve(84, 10_000).warmup_steps == 0


def test_every_preset_is_known_here() -> None:
    assert set(PRESETS) == set(ROWS) | {"steady", "repair", "secondhand"}


def test_secondhand_is_what_summaries_of_the_paper_say() -> None:
    policy = Policy.preset("secondhand")
    assert (policy.history, policy.decay, policy.alpha, policy.lock_steps) == ("ema", 0.9, 2.0, 10)
    assert (policy.beta, policy.window, policy.alpha_warmup) == (1 + 0.5, 5, None)
    assert policy.resolve(400, None).max_high == 4


def test_the_defaults_are_the_paper_s_two_stage_rule() -> None:
    p = Policy()
    assert (p.alpha_warmup, p.alpha, p.beta, p.window, p.lock_steps, p.eps) == (1.5, 1.1, 1.5, 5, 1, 1e-12)
    assert (p.history, p.warmup, p.rebase_at, p.prefer_locked, p.lock_growth) == (
        "cumulative",
        "threshold",
        (),
        False,
        1,
    )
    assert (p.rebase_at, p.prefer_locked, p.replay_step, p.memory) == ((), False, None, None)
    assert p.resolve(84, 20_000) == (4, 500)


def test_an_unknown_preset_names_the_nearest_and_all() -> None:
    with pytest.raises(TrimtabError, match=r"'paper-b9'.*paper-pangu.*did you mean 'paper-b"):
        Policy.preset("paper-b9")


# Resolution


@given(st.floats(1e-4, 1.0), st.integers(1, 3000))
def test_a_fraction_is_rounded_down_to_at_least_one_unit(fraction: float, units: int) -> None:
    budget = Policy(max_high=fraction).resolve(units, 100).max_high
    assert budget == max(1, math.floor(fraction * units + 1e-9))


@pytest.mark.parametrize(("fraction", "units", "budget"), [(0.29, 100, 29), (0.05, 84, 4), (0.25, 24, 6), (0.05, 3, 1)])
def test_a_fraction_means_what_it_says_in_decimals(fraction: float, units: int, budget: int) -> None:
    assert Policy(max_high=fraction).resolve(units, 100).max_high == budget


def test_a_count_stays_a_count() -> None:
    assert Policy(max_high=0).resolve(10, 100).max_high == 0
    assert Policy(max_high=500).resolve(10, 100).max_high == 500
    assert Policy(max_high=1).resolve(10, 100).max_high == 1
    assert Policy(max_high=1.0).resolve(10, 100).max_high == 10


@pytest.mark.parametrize(
    ("policy", "total", "steps"),
    [
        (Policy(), 1000, 25),
        (Policy(), 1001, 26),
        (Policy(), 1, 1),
        (Policy(warmup="high"), 1000, 50),
        (Policy(warmup="high"), 1001, 51),
        (Policy(warmup="high", alpha_warmup=None), 1000, 50),
        (Policy(warmup="monitor"), 1000, 25),
        (Policy(warmup_steps=100), None, 100),
        (Policy(warmup_steps=0), 1000, 0),
        (Policy(alpha_warmup=None), None, 0),
    ],
)
def test_the_warm_up_is_a_share_of_the_run_rounded_up(policy: Policy, total: int | None, steps: int) -> None:
    assert policy.resolve(10, total).warmup_steps == steps


@pytest.mark.parametrize("warmup", WARMUPS)
def test_an_unknown_run_length_is_refused_with_the_remedy(warmup: str) -> None:
    with pytest.raises(TrimtabError, match=r"total_steps.*warmup_steps=100"):
        Policy(warmup=warmup).resolve(10, None)


def test_alpha_changes_right_after_the_warm_up() -> None:
    steps = np.arange(1, 6)
    assert Policy(alpha=1.1, alpha_warmup=1.5).alpha_at(steps, 3).tolist() == [1.5, 1.5, 1.5, 1.1, 1.1]
    assert Policy(alpha=1.1, alpha_warmup=None).alpha_at(steps, 3).tolist() == [1.1] * 5


# Calibration


def quiet(seed: int, steps: int, units: int, sigma: float, slope: float = 0.0) -> np.ndarray:
    noise = np.random.default_rng(seed).normal(0, sigma, (steps, units))
    return np.exp(noise) * np.arange(1, steps + 1)[:, None] ** -slope


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    steps=st.integers(70, 900),
    units=st.integers(1, 12),
    sigma=st.floats(0.02, 0.8),
    slope=st.floats(0, 0.6),
    per_1k=st.sampled_from([0.5, 1.0, 5.0, 20.0, 100.0]),
    beta=st.sampled_from([None, 1.5]),
    history=st.sampled_from(HISTORIES),
    warmup=st.sampled_from(["threshold", "monitor"]),
)
def test_the_calibrated_policy_keeps_its_promise_on_its_own_stretch(
    seed: int,
    steps: int,
    units: int,
    sigma: float,
    slope: float,
    per_1k: float,
    beta: float | None,
    history: str,
    warmup: str,
) -> None:
    norms = quiet(seed, steps, units, sigma, slope)
    base = Policy(beta=beta, history=history, warmup=warmup)
    policy = Policy.calibrated(norms, per_1k, base=base, skip=20)
    alarmed = trimtab.replay(norms, policy.replace(max_high=units)).alarmed[20:]
    assert alarmed.sum() <= per_1k / 1000 * len(alarmed)


def test_calibration_is_not_idle_it_uses_up_what_was_asked() -> None:
    norms = quiet(1, 4020, 8, 0.2)
    policy = Policy.calibrated(norms, 50, base=Policy(beta=None, alpha_warmup=None), skip=20)
    alarmed = trimtab.replay(norms, policy).alarmed[20:]
    assert alarmed.mean() == pytest.approx(0.05, abs=0.002)


def test_calibration_keeps_the_base_s_other_settings() -> None:
    base = Policy(max_high=3, window=4, lock_steps=2, alpha=1.1, alpha_warmup=2.2, history="ema", lock_growth=2.0)
    policy = Policy.calibrated(quiet(2, 300, 4, 0.1), base=base)
    assert policy.replace(alpha=base.alpha, beta=base.beta, alpha_warmup=base.alpha_warmup) == base
    assert policy.alpha_warmup == pytest.approx(2 * policy.alpha)
    assert policy.alpha != base.alpha


def test_calibration_leaves_a_dropped_jump_dropped() -> None:
    policy = Policy.calibrated(quiet(3, 200, 4, 0.1), base=Policy(beta=None, alpha_warmup=None))
    assert policy.beta is None
    assert policy.alpha_warmup is None


def test_calibration_reads_a_trace_with_gaps() -> None:
    norms = quiet(4, 200, 3, 0.1)
    seen = np.ones(norms.shape, bool)
    seen[100, 0] = False
    spiked = norms.copy()
    spiked[100, 0] = 1e6
    with_gap = Policy.calibrated(SimpleNamespace(norms=spiked, seen=seen))
    assert with_gap.alpha < 10
    assert Policy.calibrated(spiked).alpha > 1000


@pytest.mark.parametrize("shape", [(69, 4), (0, 4), (500,)])
def test_a_stretch_too_short_to_calibrate_on_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(TrimtabError, match="at least 70 steps"):
        Policy.calibrated(np.ones(shape))


@pytest.mark.parametrize("value", [NAN, INF])
def test_a_stretch_without_finite_norms_is_refused(value: float) -> None:
    with pytest.raises(TrimtabError, match="finite norms"):
        Policy.calibrated(np.full((100, 4), value))


@pytest.mark.parametrize("asked", [0, -1, 1001, NAN, INF, True])
def test_an_impossible_share_of_false_alarms_is_refused(asked: float) -> None:
    with pytest.raises(TrimtabError, match=r"false_alarms_per_1k.*got"):
        Policy.calibrated(np.ones((100, 4)), asked)
