# SPDX-License-Identifier: Apache-2.0
"""The sweep: every row is what a replay of that policy alone gives, to the bit, however the norms arrive; leads and
chance against counts by hand; the suggestion keeps to its order; memory does not grow with the trace."""

import tracemalloc
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reference.norms import random_norms

from trimtab import Policy, TrimtabError, replay
from trimtab.control.sweep import WINDOW, Peaks, Row, Sweep, quiet_rows, suggest, sweep


def random_policy(rng: np.random.Generator) -> Policy:
    def pick(*values: Any) -> Any:
        return values[int(rng.integers(len(values)))]

    alpha_warmup = pick(None, 0.5, 1.5, 3.0)
    return Policy(
        max_high=pick(0, 1, 2, 3, 7, 0.3),
        alpha=pick(0.4, 0.9, 1.0, 1.1, 2.0),
        alpha_warmup=alpha_warmup,
        warmup_steps=pick(None, 0, 5, 12),
        beta=pick(None, 0.8, 1.0, 1.5),
        window=pick(1, 2, 5),
        lock_steps=pick(0, 1, 1, 2, 3),
        warmup=pick("threshold", "threshold", "threshold", "high", "monitor"),
        history=pick("cumulative", "cumulative", "winsorized", "exclude_triggered", "ema", "window"),
        memory=pick(None, None, 3),
        span=4,
        rebase_at=pick((), (), (), (4,)),
        prefer_locked=pick(False, False, True),
        lock_growth=pick(1.0, 1.0, 2.0),
        replay_step=pick(None, None, None, 2.0),
    )


def same(found: dict[str, float], wanted: dict[str, float]) -> None:
    assert list(found) == list(wanted)
    np.testing.assert_array_equal(list(found.values()), list(wanted.values()))


@settings(max_examples=150)
@given(seed=st.integers(0, 2**32 - 1), rows=st.sampled_from([1, 3, 7, 1024]))
def test_every_row_is_a_replay_of_its_policy_alone(seed: int, rows: int) -> None:
    rng = np.random.default_rng(seed)
    norms, seen, recoverable = random_norms(rng, 40)
    policies = [random_policy(rng) for _ in range(6)]
    policies += [policies[0].replace(alpha=a, max_high=2) for a in (0.7, 1.3)]  # share a history
    policies += [Policy(alpha_warmup=None, lock_steps=k, max_high=m) for k in (1, 2) for m in (1, 2)]
    policies += [Policy(alpha=1.0, alpha_warmup=3.0, warmup_steps=k, max_high=2) for k in (0, 12)]
    quiet = rng.random(len(norms)) < 0.7
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("trimtab.control.replay.ROWS", rows)
        found = sweep(norms, policies, seen=seen, recoverable=recoverable, total_steps=60, quiet=quiet)
    for row, policy in zip(found, policies, strict=True):
        alone = replay(norms, policy, seen=seen, recoverable=recoverable, total_steps=60)
        assert row.policy is policy
        assert row.limits == alone.limits
        same(row.summary, alone.summary(quiet))
        np.testing.assert_array_equal(row.alarmed, alone.alarmed)
        assert row.firings == alone.alarmed.sum()


@pytest.mark.parametrize("detector", ["zscore", "relative", "gnmr:full", {"name": "zscore", "sigmas": 3.0}])
def test_other_detectors_are_advanced_as_a_replay_does(detector: Any) -> None:
    norms = np.exp(np.random.default_rng(0).normal(0, 0.5, (300, 5))).astype(np.float32)
    policies = [Policy(alpha=a, max_high=2, alpha_warmup=None) for a in (0.8, 1.0, 1.5)]
    for row in sweep(norms, policies, detector=detector):
        alone = replay(norms, row.policy, detector=detector)
        same(row.summary, alone.summary(np.ones(300, bool)))
        np.testing.assert_array_equal(row.alarmed, alone.alarmed)


def test_a_column_that_a_detector_needs_is_asked_for_by_name() -> None:
    with pytest.raises(TrimtabError, match=r"judges the column 'update'"):
        sweep(np.ones((3, 2)), [Policy()], detector="update")
    norms = np.exp(np.random.default_rng(1).normal(0, 0.5, (60, 3))).astype(np.float32)
    (row,) = sweep(norms, [Policy(max_high=1)], detector="update", columns={"update": norms[::-1].copy()})
    alone = replay(norms, Policy(max_high=1), detector="update", columns={"update": norms[::-1].copy()})
    same(row.summary, alone.summary(np.ones(60, bool)))


def test_blocks_of_any_size_give_the_same_rows() -> None:
    rng = np.random.default_rng(3)
    norms = np.exp(rng.normal(0, 0.4, (500, 4))).astype(np.float32)
    policies = [Policy(max_high=1), Policy(max_high=2, lock_steps=3), Policy.preset("steady")]
    whole = sweep(norms, policies)
    pieces = Sweep(policies, np.ones(4, bool), 500)
    for start, stop in ((0, 1), (1, 250), (250, 250), (250, 500)):
        pieces.add(norms[start:stop])
    for a, b in zip(whole, pieces.rows(), strict=True):
        same(a.summary, b.summary)
        np.testing.assert_array_equal(a.alarmed, b.alarmed)


def test_memory_does_not_grow_with_the_trace() -> None:
    policies = [Policy(max_high=2, alpha=a) for a in (1.5, 2.0, 3.0)]
    rng = np.random.default_rng(0)

    def largest(blocks: int) -> int:
        found = Sweep(policies, np.ones(32, bool), 100_000)
        found.add(np.ones((1024, 32), np.float32))
        tracemalloc.start()
        for _ in range(blocks):
            found.add(np.exp(rng.normal(0, 0.3, (1024, 32))).astype(np.float32))
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return most

    assert largest(24) < largest(4) + 24 * 1024 * len(policies) * 2


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: sweep(np.ones((3, 2)), []), "at least one policy"),
        (lambda: sweep(np.ones(3), [Policy()]), "shape"),
        (lambda: sweep(-np.ones((3, 2)), [Policy()]), "must not be negative"),
        (lambda: sweep(np.ones((3, 2)), [Policy()], quiet=np.ones(4, bool)), "one entry per step, 3"),
        (lambda: Sweep([Policy()], np.ones(2, bool), 9).add(np.ones((3, 5))), "(steps, 2)"),
    ],
)
def test_bad_input_is_refused(call: Any, words: str) -> None:
    with pytest.raises(TrimtabError) as refused:
        call()
    assert words in str(refused.value)


# Spikes: what was announced, how long before, and what chance would have given.


def spiky(*alarms: int, steps: int = 200) -> np.ndarray:
    """Norms of one unit that is ten times its usual in some rows."""
    norms = np.ones((steps, 1), np.float32)
    norms[list(alarms)] = 10.0
    return norms


WATCH = Policy(max_high=1, alpha=3.0, alpha_warmup=None, beta=None, lock_steps=0)


def test_lead_is_counted_from_the_first_trigger_in_the_window() -> None:
    spikes = [(60, 65), (100, 100), (150, 160)]
    (row,) = sweep(spiky(53, 57, 100, 129), [WATCH], spikes=spikes)  # 7 before; in the first step; 21 before: too early
    assert np.flatnonzero(row.alarmed).tolist() == [53, 57, 100, 129]
    assert (row.spikes, row.caught, row.lead) == (3, 2, 3.5)
    (none,) = sweep(spiky(129), [WATCH], spikes=spikes)
    assert (none.caught, none.lead) == (0, None)


def test_chance_is_the_share_of_quiet_windows_with_a_trigger() -> None:
    (row,) = sweep(spiky(100), [WATCH])
    assert row.by_chance == pytest.approx((WINDOW + 1) / (200 - WINDOW))
    quiet = quiet_rows(200, [(100, 100)])
    (row,) = sweep(spiky(100), [WATCH], quiet=quiet, spikes=[(100, 100)])
    assert row.by_chance == 0  # the one trigger belongs to the spike
    assert row.summary["false_alarms_per_1k"] == 0
    assert sweep(spiky(2, steps=10), [WATCH])[0].by_chance is None


def test_quiet_rows_keep_away_from_spikes_on_both_sides() -> None:
    quiet = quiet_rows(100, [(50, 55)], window=10)
    assert np.flatnonzero(~quiet).tolist() == list(range(40, 66))
    assert quiet_rows(5, [(2, 3)]).sum() == 0


def test_the_suggestion_is_quiet_enough_then_announces_most() -> None:
    norms = np.random.default_rng(0).lognormal(0, 0.05, (1000, 4)).astype(np.float32)
    norms[495, 2] *= 3  # five steps before the spike
    policies = [Policy(alpha=a, alpha_warmup=None, beta=None, max_high=1) for a in (1.02, 2.0, 5.0)]
    rows = sweep(norms, policies, spikes=[(500, 510)])
    best = suggest(rows, 10)
    assert best.row is rows[1]
    assert "1 of 1" in best.reason
    assert "5 steps before" in best.reason
    assert "2 of 3 policies" in best.reason
    loud = suggest(rows[:1], 10)
    assert "no policy here stays within 10" in loud.reason
    deaf = suggest(rows[2:], 10)
    assert "none of the 1 loss spikes" in deaf.reason
    calm = suggest(sweep(norms, policies[1:]), 10)
    assert calm.row.policy.alpha == 2.0  # the closest watch
    assert "no loss spike is known" in calm.reason


def test_a_policy_that_can_never_act_is_not_suggested_beside_one_that_can() -> None:
    rows = sweep(spiky(53), [WATCH.replace(max_high=0), WATCH], spikes=[(60, 60)])
    assert suggest(rows, 10).row is rows[1]


def test_a_row_is_plain_values() -> None:
    (row,) = sweep(np.full((3, 2), np.nan), [Policy(max_high=1, alpha_warmup=None)])
    told = row.to_dict()
    assert told["summary"]["median_ratio"] is None
    assert told["policy"] == row.policy.to_dict()
    assert isinstance(row, Row)


@pytest.mark.parametrize("base", [Policy(), Policy(beta=None), Policy(history="winsorized", memory=20, window=3)])
def test_levels_block_by_block_are_those_of_a_calibrated_policy(base: Policy) -> None:
    norms = np.exp(np.random.default_rng(2).normal(0, 0.3, (700, 5))).astype(np.float32)
    norms[3, 2] = np.inf
    peaks = Peaks(base, 5)
    for start in range(0, 700, 90):
        peaks.add(norms[start : start + 90], np.ones(norms[start : start + 90].shape, bool))
    assert peaks.calibrated(np.ones(700, bool), 5.0) == Policy.calibrated(norms, 5.0, base=base)
    assert peaks.calibrated(np.zeros(700, bool), 5.0) is None
