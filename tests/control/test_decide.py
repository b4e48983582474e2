# SPDX-License-Identifier: Apache-2.0
"""Decide (Algorithm 2): the budget, the lock, ties and denials, the three warm-ups, and the options beyond the paper
(locked units first, growing locks) against a slow version written here. Norms are chosen so that risks are plain."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import trimtab
from trimtab import Decisions, Policy
from trimtab.control.decide import Ledger, Quota
from trimtab.control.decide import decide as algorithm_2
from trimtab.control.policy import Limits

# A ratio threshold alone, over a window history of span 1: the ratio is this norm over the last one. Risks are
# then set step by step through `norms_for`.
PLAIN = {"alpha": 1.0, "alpha_warmup": None, "beta": None, "history": "window", "span": 1, "eps": 1e-300}


def norms_for(ratios: np.ndarray) -> np.ndarray:
    """Norms whose ratios over their predecessors are these (exact for powers of two)."""
    return np.cumprod(np.vstack([np.ones(ratios.shape[1]), ratios]), axis=0)


def decide(ratios: list[list[float]], **settings: object) -> Decisions:
    """Decisions from a matrix of risks; the neutral first step is cut off."""
    policy = Policy(**(PLAIN | settings))  # type: ignore[arg-type]
    d = trimtab.replay(norms_for(np.array(ratios, np.float64)), policy)
    np.testing.assert_array_equal(d.risk[1:], np.array(ratios, np.float64) / policy.alpha)
    return d


def active(decisions: Decisions, unit: int = 0) -> str:
    """A unit's selections after the neutral first step, as a string of 0 and 1."""
    return "".join("01"[int(x)] for x in decisions.high[1:, unit])


@pytest.mark.parametrize("lock", [0, 1, 2, 3, 7])
def test_an_isolated_trigger_gives_one_plus_lock_active_steps(lock: int) -> None:
    quiet = [[0.5]] * 12
    d = decide([[0.5], [2.0], *quiet], lock_steps=lock, max_high=1)
    assert active(d) == "0" + "1" * (1 + lock) + "0" * (12 - lock)


def test_a_new_trigger_while_locked_renews_the_lock() -> None:
    d = decide([[2.0], [0.5], [2.0], [0.5], [0.5], [0.5]], lock_steps=2, max_high=1)
    assert active(d) == "111110"


def test_a_locked_unit_without_rivals_is_not_kept_forever() -> None:
    assert active(decide([[2.0]] + [[0.5]] * 8, lock_steps=1, max_high=1)) == "110000000"


def test_a_locked_unit_is_evicted_by_a_riskier_one_and_its_lock_is_gone() -> None:
    d = decide([[2.0, 0.5], [0.5, 2.0], [0.5, 0.5], [0.5, 0.5]], lock_steps=3, max_high=1)
    assert active(d, 0) == "1000"  # with a lock left it would come back once unit 1's seat is free
    assert active(d, 1) == "0111"
    longer = decide([[2.0, 0.5], [0.5, 2.0], *[[0.5, 0.5]] * 5], lock_steps=3, max_high=1)
    assert active(longer, 1) == "0111100"
    assert active(longer, 0) == "1000000"


def test_a_triggered_unit_outside_the_budget_holds_no_lock() -> None:
    d = decide([[4.0, 2.0], [0.5, 0.5], [0.5, 0.5]], lock_steps=1, max_high=1)
    assert d.denied[1].tolist() == [False, True]
    assert active(d, 1) == "000"
    free = decide([[4.0, 2.0], [0.5, 0.5], [0.5, 0.5]], lock_steps=0, max_high=1)
    assert active(free, 1) == "000"  # not even once unit 0 has left


def test_a_lock_gives_no_bonus_in_the_ranking() -> None:
    d = decide([[2.0, 0.5], [0.25, 1.0], [0.25, 2.0]], lock_steps=2, max_high=1)
    assert active(d, 0) == "110"
    assert active(d, 1) == "001"


def test_on_equal_risk_the_lowest_index_wins() -> None:
    d = decide([[2.0, 4.0, 4.0, 4.0]], max_high=2)
    assert d.high[1].tolist() == [False, True, True, False]
    assert d.denied[1].tolist() == [True, False, False, True]


def test_several_infinite_risks_are_a_tie_too() -> None:
    norms = np.array([[1.0] * 4, [5.0, np.nan, np.inf, np.nan]])
    d = trimtab.replay(norms, Policy(max_high=2, alpha_warmup=None))
    assert d.high[1].tolist() == [False, True, True, False]


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    units=st.integers(1, 12),
    budget=st.integers(0, 14),
    lock=st.integers(0, 4),
    growth=st.sampled_from([1.0, 2.0, 3.5]),
    prefer=st.booleans(),
)
def test_the_budget_is_never_exceeded(
    seed: int, units: int, budget: int, lock: int, growth: float, prefer: bool
) -> None:
    rng = np.random.default_rng(seed)
    norms = np.exp(rng.normal(0, 1, (40, units)))
    norms[rng.random(40) < 0.1] = np.inf  # every unit at once
    norms[rng.random(norms.shape) < 0.1] = np.nan
    policy = Policy(max_high=budget, lock_steps=lock, lock_growth=growth, prefer_locked=prefer, alpha_warmup=None)
    d = trimtab.replay(norms, policy)
    assert d.high.sum(axis=1).max() <= budget
    triggered = d.risk > 1
    assert ((d.high & triggered) | d.denied == triggered).all()  # selected or denied, never both
    assert not (d.high & d.denied).any()
    full = d.high.sum(axis=1) == min(budget, units)
    assert full[d.denied.any(axis=1)].all()  # nobody is denied beside an empty seat


def test_a_budget_of_zero_selects_nobody_and_denies_everyone_who_triggers() -> None:
    d = decide([[2.0, 4.0], [0.5, 0.5]], max_high=0)
    assert not d.high.any()
    assert d.denied[1].all()


def test_a_budget_beyond_the_units_is_allowed() -> None:
    assert decide([[2.0, 4.0]], max_high=99).high[1].all()


def test_a_unit_that_cannot_switch_is_judged_and_never_chosen() -> None:
    norms = norms_for(np.array([[8.0, 2.0], [8.0, 2.0]]))
    d = trimtab.replay(norms, Policy(**PLAIN, max_high=1), recoverable=np.array([False, True]))
    assert (d.risk[1:, 0] == 8).all()
    assert not d.high[:, 0].any()
    assert not d.denied.any()
    assert d.high[1:, 1].all()


def test_a_fraction_is_of_the_units_that_can_switch() -> None:
    norms = norms_for(np.full((1, 10), 2.0))
    mask = np.array([True] * 4 + [False] * 6)
    d = trimtab.replay(norms, Policy(**PLAIN, max_high=0.5), recoverable=mask)
    assert d.high[1].sum() == d.limits.max_high == 2


# Warm-ups

RATIOS = np.tile([[2.0, 0.5], [0.5, 2.0]], (6, 1))


def test_a_threshold_warm_up_only_raises_alpha_for_its_steps() -> None:
    ratios = np.full((8, 1), 1.25)
    policy = Policy(**(PLAIN | {"alpha_warmup": 1.5, "warmup_steps": 4, "lock_steps": 0}), max_high=1)
    d = trimtab.replay(norms_for(ratios), policy)
    assert d.high[:, 0].tolist() == [False] * 4 + [True] * 5
    np.testing.assert_allclose(d.risk[1:4], 1.25 / 1.5)
    np.testing.assert_allclose(d.risk[4:], 1.25)


def test_a_high_warm_up_runs_exactly_its_steps_with_every_switchable_unit_high() -> None:
    mask = np.array([True, False, True])
    policy = Policy(alpha=1e6, alpha_warmup=None, beta=None, warmup="high", warmup_steps=4, max_high=1)
    d = trimtab.replay(np.ones((10, 3)), policy, recoverable=mask)
    chosen = d.high.sum(axis=1).tolist()  # from step t, run in t + 1; E_1 is the opening set
    assert chosen == [2, 2, 2, 0, 0, 0, 0, 0, 0, 0]
    assert not d.high[:, 1].any()
    assert d.summary()["warmup_steps"] == 4
    assert d.summary()["switches_per_1k"] == 1000 * 2 / 10  # only the way down: step 1 was high already


def test_the_first_choice_after_a_high_warm_up_is_the_rule_s() -> None:
    policy = Policy(**PLAIN, warmup="high", warmup_steps=3, max_high=1, lock_steps=0)
    d = trimtab.replay(norms_for(np.array([[4.0, 4.0], [0.5, 4.0], [4.0, 0.5]])), policy)
    assert d.high.tolist() == [[True, True], [True, True], [False, True], [True, False]]
    assert not d.denied[:2].any()


def test_a_high_warm_up_of_zero_steps_is_none() -> None:
    d = trimtab.replay(np.ones((3, 2)), Policy(**PLAIN, warmup="high", warmup_steps=0))
    assert not d.high.any()
    assert d.summary()["promotion_ratio"] == 0


def test_a_monitor_warm_up_judges_but_chooses_nobody() -> None:
    policy = Policy(**PLAIN, warmup="monitor", warmup_steps=5, max_high=1)
    d = trimtab.replay(norms_for(RATIOS), policy)
    free = trimtab.replay(norms_for(RATIOS), Policy(**PLAIN, max_high=1))
    np.testing.assert_array_equal(d.risk, free.risk)
    assert not d.high[:5].any()
    assert not d.denied[:5].any()
    assert d.high[5:].any(axis=1).all()


# Beyond the paper: locked first, growing locks


def slow_decide(risk: np.ndarray, policy: Policy, max_high: int, warmup_steps: int) -> tuple[np.ndarray, np.ndarray]:
    """Algorithm 2 with its options, one unit at a time."""
    steps, units = risk.shape
    lock, high_now, last, repeats = [0] * units, [False] * units, [0] * units, [0] * units
    if policy.warmup == "high" and warmup_steps:
        high_now = [True] * units
    highs, denieds = [], []
    for t in range(1, steps + 1):
        R = risk[t - 1]
        triggered = [bool(R[b] > 1) for b in range(units)]
        if policy.warmup == "high" and t < warmup_steps:
            lock, high_now, denied = [0] * units, [True] * units, [False] * units
        elif policy.warmup == "monitor" and t <= warmup_steps:
            lock, high_now, denied = [0] * units, [False] * units, [False] * units
        else:
            C = [b for b in range(units) if triggered[b] or lock[b] > 0]
            favour = (lambda b: lock[b] == 0) if policy.prefer_locked else (lambda b: 0)  # noqa: B023
            S = sorted(C, key=lambda b: (-R[b], favour(b), b))[:max_high]
            new_lock = [0] * units
            for b in S:
                if triggered[b]:
                    if not high_now[b]:
                        soon = last[b] > 0 and t - last[b] <= policy.repeat_within
                        repeats[b] = repeats[b] + 1 if soon else 0
                    length = policy.lock_steps
                    if policy.lock_growth > 1 and repeats[b]:
                        base = max(policy.lock_steps, 1)
                        grown = int(min(base * policy.lock_growth ** repeats[b], policy.lock_max))
                        length = max(grown, policy.lock_steps)
                    new_lock[b] = length
                else:
                    new_lock[b] = max(lock[b] - 1, 0)
                last[b] = t
            lock, high_now = new_lock, [b in S for b in range(units)]
            denied = [triggered[b] and b not in S for b in range(units)]
        highs.append(list(high_now))
        denieds.append(denied)
    return np.array(highs), np.array(denieds)


@settings(max_examples=250, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    units=st.integers(1, 7),
    budget=st.integers(0, 8),
    lock=st.integers(0, 4),
    growth=st.sampled_from([1.0, 1.5, 2.0, 3.0]),
    lock_max=st.sampled_from([1, 5, 64]),
    within=st.integers(1, 8),
    prefer=st.booleans(),
    warmup=st.sampled_from(["threshold", "high", "monitor"]),
    warmup_steps=st.integers(0, 6),
)
def test_choices_equal_a_slow_version_with_every_option(
    seed: int,
    units: int,
    budget: int,
    lock: int,
    growth: float,
    lock_max: int,
    within: int,
    prefer: bool,
    warmup: str,
    warmup_steps: int,
) -> None:
    rng = np.random.default_rng(seed)
    ratios = rng.choice([0.25, 0.5, 1.0, 2.0, 4.0], p=[0.2, 0.4, 0.2, 0.1, 0.1], size=(50, units))
    policy = Policy(
        **PLAIN,
        max_high=budget,
        lock_steps=lock,
        lock_growth=growth,
        lock_max=lock_max,
        repeat_within=within,
        prefer_locked=prefer,
        warmup=warmup,
        warmup_steps=warmup_steps,
    )
    norms = norms_for(ratios)
    norms[rng.random(norms.shape) < 0.03] = np.nan
    d = trimtab.replay(norms, policy)
    high, denied = slow_decide(d.risk, policy, budget, warmup_steps)
    np.testing.assert_array_equal(d.high, high)
    np.testing.assert_array_equal(d.denied, denied)


def test_prefer_locked_lets_the_locked_unit_keep_its_seat_on_equal_risk() -> None:
    ratios = [[0.5, 2.0], [4.0, 4.0]]
    assert decide(ratios, max_high=1).high[2].tolist() == [True, False]
    assert decide(ratios, max_high=1, prefer_locked=True).high[2].tolist() == [False, True]


def test_prefer_locked_does_not_beat_a_greater_risk() -> None:
    d = decide([[0.5, 2.0], [8.0, 4.0]], max_high=1, prefer_locked=True)
    assert d.high[2].tolist() == [True, False]


def runs_of_ones(text: str) -> list[int]:
    return [len(run) for run in text.split("0") if run]


def test_under_a_lasting_fault_the_paper_s_unit_toggles_and_a_growing_lock_does_not() -> None:
    def fault(lengths: list[int]) -> list[list[float]]:
        return [row for length in lengths for row in ([[2.0]] + [[0.5]] * length)]

    paper = active(decide(fault([2, 2, 2, 2]), lock_steps=1, max_high=1))
    assert runs_of_ones(paper) == [2, 2, 2, 2]
    grown = active(decide(fault([2, 3, 5, 9]), lock_steps=1, lock_growth=2.0, repeat_within=9, max_high=1))
    assert runs_of_ones(grown) == [2, 3, 5, 9]  # locks of 1, 2, 4, 8


def test_a_grown_lock_is_capped_and_forgotten_after_a_long_quiet() -> None:
    row = [[2.0]] + [[0.5]] * 6
    capped = active(decide(row * 4, lock_steps=1, lock_growth=3.0, lock_max=4, repeat_within=9, max_high=1))
    assert runs_of_ones(capped) == [2, 4, 5, 5]
    calm = [[2.0]] + [[0.5]] * 30
    assert runs_of_ones(active(decide(calm * 3, lock_steps=1, lock_growth=3.0, repeat_within=9, max_high=1))) == [
        2,
        2,
        2,
    ]


def test_growth_without_end_stays_within_its_cap() -> None:
    fault = np.tile([[4.0], [0.25], [1.0], [1.0]], (150, 1))  # every trigger a repeat
    policy = Policy(**PLAIN, lock_steps=0, lock_growth=1e9, lock_max=1, repeat_within=20, max_high=1)
    d = trimtab.replay(norms_for(fault), policy)
    assert runs_of_ones(active(d)) == [1] + [2] * 149


# Quotas


@given(st.integers(0, 2**31), st.integers(0, 3), st.integers(0, 3))
@settings(max_examples=30)
def test_with_quotas_each_part_decides_as_if_it_were_alone(seed: int, left: int, right: int) -> None:
    risk = np.exp(np.random.default_rng(seed).normal(0, 1, (40, 7)))
    policy, limits, steps = Policy(alpha_warmup=None, lock_steps=2, lock_growth=2.0), Limits(9, 0), np.arange(1, 41)
    able = np.ones(7, bool)
    parts = [Quota((0, 2, 4), left), Quota((1, 3, 5, 6), right)]
    choice, ledger = algorithm_2(Ledger.fresh(able, policy, limits), risk, able, policy, limits, steps, parts)
    for units, most in parts:
        own = np.array(units)
        fresh, alone = Ledger.fresh(able[own], policy, limits), Limits(most, 0)
        wanted, after = algorithm_2(fresh, risk[:, own], able[own], policy, alone, steps)
        np.testing.assert_array_equal(choice.high[:, own], wanted.high)
        np.testing.assert_array_equal(choice.denied[:, own], wanted.denied)
        for mine, theirs in zip(ledger, after, strict=True):
            np.testing.assert_array_equal(mine[own], theirs)
