# SPDX-License-Identifier: Apache-2.0
"""Judge (Algorithm 1): ratio and jump of one unit against its own past, the edge cases that the specification fixes,
and every named departure from the paper's history against a slow version written here, one number at a time."""

import math
from collections import deque

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import trimtab
from trimtab import Decisions, Policy
from trimtab.control import replay as replay_module

EPS = 1e-12


def scores(*norms: float, **settings: object) -> Decisions:
    """One unit, a constant alpha."""
    policy = Policy(**({"alpha_warmup": None, "alpha": 1.1, "max_high": 1} | settings))  # type: ignore[arg-type]
    return trimtab.replay(np.array(norms, np.float64)[:, None], policy)


# The paper's history: the reference behaviours of the specification


def test_the_first_step_is_neutral_and_selects_nobody() -> None:
    first = scores(7.0)
    assert (first.ratio[0, 0], first.jump[0, 0]) == (1, 1)
    assert not first.high.any()


@pytest.mark.parametrize("alpha", [0.9, 0.4])
def test_below_one_the_placeholder_of_the_first_step_triggers(alpha: float) -> None:
    assert scores(7.0, alpha=alpha).high[0, 0]


@pytest.mark.parametrize("norm", [1e-6, 0.25, 1.0, 3.0, 1e8])
def test_constant_norms_stay_at_one_and_never_trigger(norm: float) -> None:
    constant = scores(*[norm] * 60, alpha=1.0, beta=1.0)
    np.testing.assert_allclose(constant.ratio, 1, rtol=2e-6)
    np.testing.assert_allclose(constant.jump, 1, rtol=2e-6)
    assert not constant.high.any()


def test_a_risk_of_exactly_one_does_not_trigger() -> None:
    at = scores(1.0, alpha=1.0, beta=1.0)  # the placeholder: exactly 1 over exactly 1
    assert at.risk[0, 0] == 1.0
    assert not at.high.any()
    assert scores(1.0, alpha=np.nextafter(1.0, 0), beta=None).high.all()


def test_neither_the_mean_nor_the_window_holds_the_current_value() -> None:
    n = [1.0, 3.0, 2.0, 6.0]
    judged = scores(*n, window=2)
    ratios = [1.0, 3 / (1 + EPS), 2 / (2 + EPS), 6 / (2 + EPS)]
    np.testing.assert_allclose(judged.ratio[:, 0], ratios, rtol=1e-15)
    jumps = [1.0, 1.0, ratios[2] / ((ratios[0] + ratios[1]) / 2), ratios[3] / ((ratios[1] + ratios[2]) / 2)]
    np.testing.assert_allclose(judged.jump[:, 0], jumps, rtol=1e-9)


@pytest.mark.parametrize("window", [1, 2, 5, 9])
def test_the_jump_stays_at_one_until_the_window_is_full(window: int) -> None:
    norms = [1.0] + [2.0**k for k in range(1, window + 3)]
    jump = scores(*norms, window=window).jump[:, 0]
    assert (jump[:window] == 1).all()
    assert jump[window] != 1


def test_the_first_window_holds_the_placeholder() -> None:
    judged = scores(4.0, 8.0, 12.0, window=2)
    assert judged.jump[2, 0] == pytest.approx(judged.ratio[2, 0] / ((1 + 2) / 2))


def test_a_norm_after_only_zeros_has_ratio_one() -> None:
    judged = scores(0.0, 0.0, 0.0, 5.0, 5.0)
    assert judged.ratio[:4, 0].tolist() == [1, 1, 1, 1]
    assert judged.ratio[4, 0] == pytest.approx(4.0)  # the zeros are in the mean all the same


def test_a_window_of_zeros_gives_a_huge_but_finite_jump() -> None:
    judged = scores(1.0, 0.0, 0.0, 0.0, 1e30, window=3)
    assert judged.ratio[1:4, 0].tolist() == [0, 0, 0]
    assert 1e12 < judged.jump[4, 0] < math.inf
    assert judged.high[4, 0]


def test_spikes_enter_the_mean() -> None:
    norms = [1.0] * 9 + [100.0] + [1.0] * 5
    assert scores(*norms).ratio[-1, 0] == pytest.approx(0.12, abs=0.005)  # U9: 0.12 five steps later
    late = scores(*norms[:10], *[1.0] * 500).ratio[-1, 0]
    assert late == pytest.approx(0.84, abs=0.005)  # and 0.84 after 500


def test_a_spike_blinds_the_jump_to_a_second_one() -> None:
    norms = [1.0] * 9 + [100.0] + [1.0] * 5
    jump = scores(*norms, window=5).jump[:, 0]
    assert (jump[10:15] < 0.05).all()
    assert scores(*norms[:10], 10.0).ratio[-1, 0] == pytest.approx(0.92, abs=0.005)


@given(
    st.lists(st.lists(st.floats(0.01, 100), min_size=3, max_size=3), min_size=1, max_size=40),
    st.floats(1e-3, 1e4),
)
def test_scaling_a_unit_from_the_first_step_changes_no_decision(rows: list[list[float]], factor: float) -> None:
    norms = np.array(rows, np.float32)
    exact = 2.0 ** round(math.log2(factor))  # a power of two: the norms are scaled without rounding
    scaled = norms * np.array([1.0, exact, 1.0], np.float32)
    policy = Policy(max_high=2, alpha_warmup=None, eps=1e-30)
    one, two = trimtab.replay(norms, policy), trimtab.replay(scaled, policy)
    np.testing.assert_allclose(one.ratio, two.ratio, rtol=1e-12)
    np.testing.assert_array_equal(one.high, two.high)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_poisoned_norm_selects_the_unit_and_leaves_its_history_untouched(bad: float) -> None:
    norms = [1.0, 2.0, 1.5, 3.0, 1.0, 2.5, 4.0]
    clean, poisoned = scores(*norms, window=3), scores(*norms[:4], bad, bad, *norms[4:], window=3)
    assert np.isinf(poisoned.risk[4:6, 0]).all()
    assert poisoned.high[4:6, 0].all()
    np.testing.assert_array_equal(np.delete(poisoned.ratio, [4, 5], axis=0), clean.ratio)
    np.testing.assert_array_equal(np.delete(poisoned.jump, [4, 5], axis=0), clean.jump)


def test_an_unseen_unit_keeps_its_history_and_has_no_risk() -> None:
    norms = np.array([1.0, 2.0, 1.5, 99.0, 3.0, 1.0])[:, None]
    seen = np.array([1, 1, 1, 0, 1, 1], bool)[:, None]
    policy = Policy(window=2, alpha_warmup=None)
    gap, closed = trimtab.replay(norms, policy, seen=seen), trimtab.replay(np.delete(norms, 3, axis=0), policy)
    assert np.isnan(gap.ratio[3, 0])
    assert gap.risk[3, 0] == 0
    np.testing.assert_array_equal(np.delete(gap.ratio, 3, axis=0), closed.ratio)
    np.testing.assert_array_equal(np.delete(gap.jump, 3, axis=0), closed.jump)


def test_a_norm_beyond_float32_is_poisoned_as_it_would_be_live() -> None:
    assert np.isinf(scores(1.0, 1e39).risk[1, 0])


@pytest.mark.parametrize("p", [0.25, 0.5, 0.75])
def test_falling_norms_settle_at_one_minus_p(p: float) -> None:
    steps = np.arange(1, 10_001, dtype=np.float64)
    judged = scores(*(steps**-p))
    limit = {0.25: 0.75, 0.5: 0.504, 0.75: 0.25}[p]
    assert judged.ratio[-1, 0] == pytest.approx(limit, abs=0.001 if p == 0.5 else 0.03)
    assert judged.jump[-1, 0] == pytest.approx(1, abs=1e-3)


def test_without_beta_the_ratio_alone_decides() -> None:
    norms = np.exp(np.random.default_rng(0).normal(0, 0.5, (200, 6)))
    alone = trimtab.replay(norms, Policy(beta=None, alpha_warmup=None))
    np.testing.assert_array_equal(alone.risk, alone.ratio / 1.1)
    never = trimtab.replay(norms, Policy(beta=1e300, alpha_warmup=None))
    np.testing.assert_array_equal(alone.high, never.high)
    assert (trimtab.replay(norms, Policy(alpha_warmup=None)).high != alone.high).any()


# Departures from the paper, each against a slow version of its one line of description


def slow(norms: np.ndarray, seen: np.ndarray, policy: Policy) -> tuple[np.ndarray, np.ndarray]:
    """Ratio and jump of every unit, one number at a time; a constant alpha."""
    ratio, jump = np.full(norms.shape, np.nan), np.full(norms.shape, np.nan)
    for b in range(norms.shape[1]):
        past: list[float] = []  # norms as they entered the history
        queue: deque[float] = deque(maxlen=policy.window)
        left_out = 0
        for t in range(len(norms)):
            if t + 1 in policy.rebase_at:
                past, left_out = [], 0
                queue.clear()
            if not seen[t, b]:
                continue
            n = float(np.float32(norms[t, b]))
            if not math.isfinite(n):
                ratio[t, b] = jump[t, b] = math.inf
                continue
            mean = slow_mean(past, policy)
            g = 1.0 if mean == 0 else n / (mean + policy.eps)
            d = g / (sum(queue) / policy.window + policy.eps) if len(queue) == policy.window else 1.0
            ratio[t, b], jump[t, b] = g, d
            risk = max(g / policy.alpha, 0 if policy.beta is None else d / policy.beta)
            if policy.history == "exclude_triggered":
                if risk > 1 and past and left_out < policy.max_freeze:
                    left_out += 1
                    continue
                left_out = 0
            if policy.history == "winsorized":
                n, g = (min(n, policy.kappa * mean) if mean > 0 else n), min(g, policy.kappa)
            past.append(n)
            queue.append(g)
    return ratio, jump


def slow_mean(past: list[float], policy: Policy) -> float:
    if not past:
        return 0.0
    if policy.history == "ema":
        weights = [policy.decay ** (len(past) - 1 - i) for i in range(len(past))]
        return sum(w * n for w, n in zip(weights, past, strict=True)) / sum(weights)
    if policy.memory is not None and policy.history != "window":
        mean = 0.0
        for i, n in enumerate(past, start=1):
            mean += (n - mean) / min(i, policy.memory)
        return mean
    used = past[-policy.span :] if policy.history == "window" else past
    return sum(used) / len(used)


HISTORY_POLICIES = {
    "cumulative": Policy(alpha=1.3),
    "winsorized": Policy(alpha=1.3, history="winsorized", kappa=1.7),
    "exclude_triggered": Policy(alpha=1.3, history="exclude_triggered", max_freeze=3),
    "exclude_triggered, alpha below 1": Policy(alpha=0.9, beta=None, history="exclude_triggered", max_freeze=4),
    "ema": Policy(alpha=1.3, history="ema", decay=0.8),
    "window": Policy(alpha=1.3, history="window", span=4),
    "window of one": Policy(alpha=1.3, history="window", span=1, window=1),
    "memory": Policy(alpha=1.3, memory=6),
    "winsorized with a memory": Policy(alpha=1.3, history="winsorized", memory=5),
    "exclude_triggered with a memory": Policy(alpha=1.3, history="exclude_triggered", max_freeze=3, memory=4),
    "rebased": Policy(alpha=1.3, rebase_at=(5, 6, 23)),
    "rebased at the first step": Policy(alpha=1.3, rebase_at=(1,)),
    "rebased ema": Policy(alpha=1.3, history="ema", rebase_at=(11,)),
    "rebased window": Policy(alpha=1.3, history="window", span=6, rebase_at=(11,)),
    "rebased exclude_triggered": Policy(alpha=1.3, history="exclude_triggered", rebase_at=(11, 30)),
}


@pytest.mark.parametrize("rows", [1, 3, 7, 1024])
@pytest.mark.parametrize("name", HISTORY_POLICIES)
def test_a_history_is_what_its_line_says(name: str, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay_module, "ROWS", rows)
    policy = HISTORY_POLICIES[name].replace(alpha_warmup=None, max_high=2)
    rng = np.random.default_rng(rows)
    for _ in range(8):
        norms = np.exp(rng.normal(0, 0.6, (40, 5)))
        norms[rng.random(norms.shape) < 0.05] = 0
        norms[rng.random(norms.shape) < 0.05] = rng.choice([np.nan, np.inf])
        norms[:3, 4] = 0
        seen = rng.random(norms.shape) > 0.1
        ratio, jump = slow(norms, seen, policy)
        fast = trimtab.replay(norms, policy, seen=seen)
        np.testing.assert_allclose(fast.ratio, ratio, rtol=1e-9)
        np.testing.assert_allclose(fast.jump, jump, rtol=1e-9)


@pytest.mark.parametrize("name", ["winsorized", "exclude_triggered", "ema", "window", "memory", "rebased"])
def test_a_named_history_differs_from_the_paper_s(name: str) -> None:
    norms = np.exp(np.random.default_rng(1).normal(0, 0.6, (40, 5)))
    policy = HISTORY_POLICIES[name].replace(alpha_warmup=None)
    paper = HISTORY_POLICIES["cumulative"].replace(alpha_warmup=None)
    assert not np.allclose(trimtab.replay(norms, policy).ratio, trimtab.replay(norms, paper).ratio)


def test_a_winsorized_history_sees_a_second_spike() -> None:
    norms = [1.0] * 20 + [100.0, 100.0]
    assert scores(*norms).ratio[-1, 0] < 20
    assert scores(*norms, history="winsorized").ratio[-1, 0] > 90


def test_a_memory_follows_norms_that_wander_and_a_long_one_is_the_paper_s() -> None:
    norms = [2.0 ** (t / 20) for t in range(200)]
    assert scores(*norms, memory=10).ratio[-1, 0] < 1.5 < scores(*norms).ratio[-1, 0]
    np.testing.assert_array_equal(scores(*norms, memory=200).ratio, scores(*norms).ratio)


def test_an_excluded_history_gives_in_after_max_freeze() -> None:
    norms = [1.0] * 10 + [8.0] * 10
    ratio = scores(*norms, history="exclude_triggered", max_freeze=4, beta=None).ratio[:, 0]
    assert (ratio[10:15] == 8.0 / (1 + EPS)).all()  # four are left out, the fifth is let in after it was judged
    assert ratio[15] < 8


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from(sorted(HISTORY_POLICIES)), st.sampled_from([1, 2, 5]))
def test_blocks_and_single_steps_give_the_same_bits(seed: int, name: str, rows: int) -> None:
    rng = np.random.default_rng(seed)
    policy = HISTORY_POLICIES[name].replace(alpha_warmup=None)
    norms = np.exp(rng.normal(0, 0.6, (30, rng.integers(1, 9)))).astype(np.float32)
    norms[rng.random(norms.shape) < 0.05] = np.nan
    whole = trimtab.replay(norms, policy)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replay_module, "ROWS", rows)
        cut = trimtab.replay(norms, policy)
    for column in ("ratio", "jump", "risk", "high", "denied"):
        np.testing.assert_array_equal(getattr(whole, column), getattr(cut, column))
