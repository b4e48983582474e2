# SPDX-License-Identifier: Apache-2.0
"""Replay: the paper's Algorithms 1 and 2 bit for bit against the letter-by-letter reference on thousands of random
matrices, the published false-trigger rates, the streamed summary, and every metric against a naive recount."""

import math
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import gnmr
from reference.norms import random_norms

import trimtab
from trimtab import Policy, TrimtabError
from trimtab.control import replay as replay_module

COLUMNS = ("ratio", "jump", "risk", "high", "denied")


def random_case(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray | None, np.ndarray | None, Policy]:
    """Norms with zeros, ties, NaN and Inf, masks, and a policy of the paper's own settings."""
    norms, seen, recoverable = random_norms(rng, 31)
    policy = Policy(
        max_high=int(rng.integers(0, 8)),
        alpha=float(rng.choice([0.4, 0.9, 1.0, 1.1, 2.0])),
        alpha_warmup=None if rng.random() < 0.4 else float(rng.choice([0.5, 1.5, 3.0])),
        warmup_steps=None if rng.random() < 0.3 else int(rng.integers(0, 12)),
        beta=None if rng.random() < 0.3 else float(rng.choice([0.8, 1.0, 1.3, 1.5, 2.0])),
        window=int(rng.integers(1, 8)),
        lock_steps=int(rng.integers(0, 4)),
    )
    return norms, seen, recoverable, policy


def expected(norms: np.ndarray, seen: np.ndarray | None, recoverable: np.ndarray | None, policy: Policy) -> dict:
    warmup = policy.warmup_steps
    if warmup is None:
        warmup = math.ceil(0.025 * len(norms) - 1e-9)

    def alpha(t: int) -> float:
        return policy.alpha_warmup if policy.alpha_warmup is not None and t <= warmup else policy.alpha

    return gnmr.run(
        norms,
        alpha=alpha,
        beta=policy.beta,
        delta=policy.window,
        max_high=int(policy.max_high),
        lock_steps=policy.lock_steps,
        seen=seen,
        recoverable=recoverable,
    )


def assert_same(norms: np.ndarray, seen: np.ndarray | None, recoverable: np.ndarray | None, policy: Policy) -> None:
    found = trimtab.replay(norms, policy, seen=seen, recoverable=recoverable)
    wanted = expected(norms, seen, recoverable, policy)
    for name in COLUMNS:
        np.testing.assert_array_equal(getattr(found, name), wanted[name], err_msg=f"{name} under {policy}")


@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), rows=st.sampled_from([1, 3, 7, 1024]))
def test_replay_is_the_paper_bit_for_bit(seed: int, rows: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replay_module, "ROWS", rows)
        assert_same(*random_case(np.random.default_rng(seed)))


@pytest.mark.parametrize(("rows", "matrices"), [(1, 300), (3, 400), (7, 800), (1024, 1600)])
def test_replay_is_the_paper_bit_for_bit_on_thousands(
    rows: int, matrices: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replay_module, "ROWS", rows)
    rng = np.random.default_rng(rows)
    for _ in range(matrices):
        assert_same(*random_case(rng))


@given(
    st.lists(st.lists(st.floats(0, width=32), min_size=2, max_size=2), min_size=1, max_size=12),
    st.integers(1, 3),
    st.integers(0, 2),
)
def test_replay_is_the_paper_on_the_nastiest_floats(rows: list[list[float]], window: int, lock: int) -> None:
    norms = np.array(rows, np.float32)
    assert_same(norms, None, None, Policy(max_high=1, window=window, lock_steps=lock, alpha_warmup=None))


def test_a_large_matrix_crosses_block_borders_as_the_reference_does() -> None:
    rng = np.random.default_rng(5)
    norms = np.exp(rng.normal(0, 0.4, (2500, 6))).astype(np.float32)
    norms[rng.random(norms.shape) < 0.01] = np.nan
    seen = rng.random(norms.shape) < 0.95
    assert_same(norms, seen, None, Policy(max_high=2))


# What is executed


def test_the_choice_of_a_step_runs_in_the_next_and_the_first_runs_low() -> None:
    norms = np.ones((6, 3))
    norms[2, 1] = 50.0
    policy = Policy(max_high=1, alpha_warmup=None, beta=None, lock_steps=0)
    assert trimtab.replay(norms, policy).high[2].tolist() == [False, True, False]
    executed = [trimtab.replay(norms[:t], policy).summary()["promotion_ratio"] * t * 3 for t in range(1, 7)]
    np.testing.assert_allclose(executed, [0, 0, 0, 1, 1, 1])  # unit-steps that ran high up to each step


# False triggers of independent lognormal norms at a flat baseline (specification, section 9)

TABLE = {
    0.1: {"ratio": {1.1: 15.7, 1.5: 0, 2.0: 0}, "jump": {1.3: 0.72, 1.5: 0.007, 2.0: 0}},
    0.2: {"ratio": {1.1: 28.1, 1.5: 1.65, 2.0: 0.02}, "jump": {1.3: 10.2, 1.5: 2.7, 2.0: 0.06}},
    0.3: {"ratio": {1.1: 32.1, 1.5: 6.7, 2.0: 0.68}, "jump": {1.3: 18.1, 1.5: 9.0, 2.0: 1.4}},
}


@pytest.mark.parametrize("sigma", TABLE)
def test_false_triggers_at_a_flat_baseline_are_as_published(sigma: float) -> None:
    norms = np.exp(np.random.default_rng(7).normal(0, sigma, (2200, 150)))
    for kind, column in TABLE[sigma].items():
        for threshold, percent in column.items():
            if kind == "ratio":
                policy = Policy(alpha=threshold, alpha_warmup=None, beta=None, max_high=0)
            else:
                policy = Policy(alpha=1e9, alpha_warmup=None, beta=threshold, window=5, max_high=0)
            triggered = trimtab.replay(norms, policy).denied[200:]  # histories long enough to be a baseline
            assert 100 * triggered.mean() == pytest.approx(percent, abs=0.25), (kind, threshold)


# The summary


def naive_summary(d: trimtab.Decisions, policy: Policy, recoverable: np.ndarray, opening: np.ndarray) -> dict:
    """Section 6.9, counted with plain loops over the executed sets."""
    steps, units = d.high.shape
    executed = [opening.tolist(), *d.high[:-1].tolist()]
    warm = d.limits.warmup_steps if policy.warmup in ("high", "monitor") else 0
    ruled = range(warm, steps)
    out: dict[str, float] = {}
    out["promotion_ratio"] = sum(sum(executed[t]) for t in ruled) / max(len(ruled), 1) / max(recoverable.sum(), 1)
    out["hit_maxO"] = sum(sum(executed[t]) == d.limits.max_high for t in ruled) / max(len(ruled), 1)
    over_alpha = over_beta = denied = switches = nonfinite = alarms = 0
    for t in range(steps):
        alpha = policy.alpha
        if policy.alpha_warmup is not None and t + 1 <= d.limits.warmup_steps:
            alpha = policy.alpha_warmup
        for b in range(units):
            g, j = d.ratio[t, b], d.jump[t, b]
            over_alpha += math.isfinite(g) and g > alpha
            over_beta += math.isfinite(j) and policy.beta is not None and j > policy.beta
            denied += bool(d.denied[t, b])
            if t:
                switches += executed[t][b] != executed[t - 1][b]
        nonfinite += any(math.isinf(r) for r in d.risk[t])
        alarms += t in ruled and any(d.risk[t, b] > 1 and recoverable[b] for b in range(units))
    out |= {"exceed_gnmr": over_alpha / (steps * units), "exceed_delta": over_beta / (steps * units)}
    out |= {"denied": denied, "switches_per_1k": 1000 * switches / steps, "nonfinite": nonfinite}
    out |= {"false_alarms_per_1k": 1000 * alarms / max(len(ruled), 1), "steps": steps, "warmup_steps": min(warm, steps)}
    return out | {"reruns": int(d.rerun.sum())}


@pytest.mark.parametrize("warmup", ["threshold", "high", "monitor"])
@pytest.mark.parametrize("rows", [7, 1024])
def test_the_metrics_equal_a_naive_recount(warmup: str, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay_module, "ROWS", rows)
    rng = np.random.default_rng(rows)
    for _ in range(25):
        norms, seen, recoverable, policy = random_case(rng)
        policy = policy.replace(warmup=warmup)
        mask = np.ones(norms.shape[1], bool) if recoverable is None else recoverable
        d = trimtab.replay(norms, policy, seen=seen, recoverable=recoverable)
        opening = mask if warmup == "high" and d.limits.warmup_steps else np.zeros_like(mask)
        found = d.summary()
        for name, value in naive_summary(d, policy, mask, opening).items():
            assert found[name] == pytest.approx(value), (name, policy)


def test_the_median_ratio_is_right_to_its_bin() -> None:
    norms = np.exp(np.random.default_rng(3).normal(0, 0.5, (3000, 4))) * np.arange(1, 3001)[:, None] ** -0.5
    d = trimtab.replay(norms, Policy())
    assert d.summary()["median_ratio"] == pytest.approx(np.median(d.ratio), rel=0.014)
    np.testing.assert_allclose(d.tally.median_ratios(), np.median(d.ratio, axis=0), rtol=0.014)


def test_known_faults_are_no_false_alarms() -> None:
    norms = np.ones((100, 2))
    norms[40] = 30.0
    norms[70] = 30.0
    d = trimtab.replay(norms, Policy(beta=None))
    quiet = np.ones(100, bool)
    assert d.summary()["false_alarms_per_1k"] == 1000 * d.alarmed.sum() / 100 == 20
    quiet[40] = False
    assert d.summary(quiet)["false_alarms_per_1k"] == pytest.approx(1000 / 99)


@pytest.mark.parametrize("replay_step", [None, 4.0])
@pytest.mark.parametrize("warmup", ["threshold", "high", "monitor"])
def test_the_streamed_summary_is_the_whole_one_s(warmup: str, replay_step: float | None) -> None:
    norms = np.exp(np.random.default_rng(2).normal(0, 0.8, (1300, 5)))
    policy = Policy(max_high=2, warmup=warmup, replay_step=replay_step)
    whole, streamed = trimtab.replay(norms, policy), trimtab.replay(norms, policy, keep="summary")
    assert streamed.summary() == whole.summary()
    np.testing.assert_array_equal(streamed.tally.median_ratios(), whole.tally.median_ratios())
    quiet = np.arange(1300) % 2 == 0
    assert streamed.summary(quiet) == whole.summary(quiet)
    assert all(len(getattr(streamed, name)) == 0 for name in COLUMNS)


def test_a_streamed_summary_needs_no_memory_for_the_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay_module, "ROWS", 64)

    def peak(steps: int) -> int:
        norms = np.broadcast_to(np.ones(100, np.float32), (steps, 100))  # as a memory map: no memory of its own
        tracemalloc.start()
        trimtab.replay(norms, Policy(), keep="summary")
        size = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return size

    peak(64)
    grown = peak(20_000) - peak(1_000)
    assert grown < 20 * 19_000  # a few bytes a step (which steps alarmed), not one byte a unit and step


# The replay_step guard and the edges of the input


def slow_guard(norms: np.ndarray, policy: Policy, max_high: int) -> tuple[list[bool], np.ndarray, list[int]]:
    """The guard told pass by pass: an extreme pass is undone for the history, kept for the plan."""
    counted: list[np.ndarray] = []  # norms that entered the history
    lock, high, again = np.zeros(norms.shape[1], int), np.zeros(norms.shape[1], bool), False
    reruns, highs, steps = [], [], []
    for row in norms:
        steps.append(len(counted) + 1)
        scores = gnmr.run(
            np.array([*counted, row]),
            alpha=lambda t: policy.alpha,
            beta=policy.beta,
            delta=policy.window,
            max_high=max_high,
            lock_steps=policy.lock_steps,
        )
        risk = scores["risk"][-1]
        C = [b for b in range(len(row)) if risk[b] > 1 or lock[b] > 0]
        S = sorted(C, key=lambda b: (-risk[b], b))[:max_high]
        new = np.isin(np.arange(len(row)), S)
        lock = np.array(
            [0 if not new[b] else policy.lock_steps if risk[b] > 1 else max(lock[b] - 1, 0) for b in range(len(row))]
        )
        rerun = not again and bool(((risk > policy.replay_step) & new & ~high).any())
        if not rerun:
            counted.append(row)
        high, again = new, rerun
        reruns.append(rerun)
        highs.append(new)
    return reruns, np.array(highs), steps


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10**6), budget=st.integers(0, 4), lock=st.integers(0, 2), rows=st.sampled_from([1, 5, 1024]))
def test_the_guard_equals_a_slow_version(seed: int, budget: int, lock: int, rows: int) -> None:
    rng = np.random.default_rng(seed)
    norms = np.exp(rng.normal(0, 1.0, (25, 3))).astype(np.float32)
    norms[rng.random(norms.shape) < 0.05] = np.nan
    policy = Policy(alpha=1.2, alpha_warmup=None, replay_step=3.0, lock_steps=lock, max_high=budget)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replay_module, "ROWS", rows)
        d = trimtab.replay(norms, policy)
    reruns, high, _ = slow_guard(norms, policy, budget)
    assert d.rerun.tolist() == reruns
    np.testing.assert_array_equal(d.high, high)


def test_a_pass_is_run_again_at_most_once_in_a_row() -> None:
    norms = np.ones((12, 2))
    norms[4:] = [[1.0, 1e6]] * 8
    d = trimtab.replay(norms, Policy(alpha_warmup=None, max_high=1, replay_step=10.0, history="exclude_triggered"))
    assert d.rerun[4]
    assert not (d.rerun[1:] & d.rerun[:-1]).any()


def test_an_extreme_risk_without_a_seat_is_not_run_again() -> None:
    norms = np.ones((6, 2))
    norms[4] = 1e6
    assert not trimtab.replay(norms, Policy(alpha_warmup=None, max_high=0, replay_step=10.0)).rerun.any()


def test_a_warm_up_step_run_again_is_still_the_same_step() -> None:
    norms = np.ones((10, 1))
    norms[2] = 1e6
    policy = Policy(alpha=1.1, alpha_warmup=100.0, warmup_steps=3, beta=None, max_high=1, replay_step=10.0)
    d = trimtab.replay(norms, policy)  # passes 3 and 4 are both step 3
    assert d.rerun.tolist() == [False, False, True] + [False] * 7
    np.testing.assert_allclose(d.risk[3, 0], 1 / 100)
    np.testing.assert_allclose(d.risk[4, 0], 1 / 1.1)


@pytest.mark.parametrize("shape", [(0, 4), (5, 0), (0, 0), (1, 1)])
def test_an_empty_matrix_gives_empty_decisions(shape: tuple[int, int]) -> None:
    d = trimtab.replay(np.ones(shape), Policy())
    assert d.high.shape == d.ratio.shape == shape
    assert d.summary()["steps"] == shape[0]


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda: trimtab.replay(np.ones(5), Policy()), r"shape \(steps, units\)"),
        (lambda: trimtab.replay(np.array([["a"]]), Policy()), "must be numbers"),
        (lambda: trimtab.replay(np.array([[1.0, -1.0]]), Policy()), "negative"),
        (lambda: trimtab.replay(np.array([[1.0], [-np.inf]]), Policy()), "negative"),
        (lambda: trimtab.replay(np.ones((4, 2)), Policy(), seen=np.ones((4, 1), bool)), "seen"),
        (lambda: trimtab.replay(np.ones((4, 2)), Policy(), recoverable=np.ones(3, bool)), "recoverable"),
        (lambda: trimtab.replay(np.ones((4, 2)), Policy(), keep="none"), "keep"),  # type: ignore[arg-type]
    ],
)
def test_what_is_no_matrix_of_norms_is_refused(call: object, match: str) -> None:
    with pytest.raises(TrimtabError, match=match):
        call()  # type: ignore[operator]


def test_a_late_negative_norm_is_refused_too() -> None:
    norms = np.ones((3000, 2), np.float32)
    norms[2900, 1] = -1
    with pytest.raises(TrimtabError, match="negative"):
        trimtab.replay(norms, Policy(), keep="summary")


def test_the_run_s_length_fixes_the_warm_up() -> None:
    d = trimtab.replay(np.ones((100, 1)), Policy(), total_steps=4000)
    assert d.limits.warmup_steps == 100
    assert trimtab.replay(np.ones((100, 1)), Policy()).limits.warmup_steps == 3


def test_whole_numbers_and_other_float_widths_are_the_same_norms() -> None:
    norms = np.random.default_rng(0).integers(0, 9, (50, 3))
    wanted = trimtab.replay(norms.astype(np.float32), Policy())
    for dtype in (np.int64, np.uint8, np.float16, np.float64):
        np.testing.assert_array_equal(trimtab.replay(norms.astype(dtype), Policy()).risk, wanted.risk)


def test_the_caller_s_matrix_is_left_alone() -> None:
    norms = np.random.default_rng(0).random((50, 3)).astype(np.float32)
    norms.setflags(write=False)
    before = norms.copy()
    trimtab.replay(norms, Policy(history="winsorized", rebase_at=(7,)))
    np.testing.assert_array_equal(norms, before)
