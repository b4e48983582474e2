# SPDX-License-Identifier: Apache-2.0
"""Intervals are Student's, differences are paired, and what died is left out and counted."""

import math

import numpy as np
import pytest
from scipy import stats

from trimtab.lab.intervals import gap_closed, interval, paired, t_95


def test_the_quantile_is_students_at_every_size() -> None:
    freedoms = [*range(1, 200), 1000, 100_000]
    assert [t_95(v) for v in freedoms] == pytest.approx([stats.t.ppf(0.975, v) for v in freedoms], abs=3e-6)


@pytest.mark.parametrize("n", [2, 3, 5, 12, 40])
def test_a_mean_and_its_interval_are_scipys(n: int) -> None:
    values = np.random.default_rng(n).normal(3.0, 2.0, n)
    found = interval(values)
    low, high = stats.t.interval(0.95, n - 1, loc=values.mean(), scale=stats.sem(values))
    assert (found.mean - found.half, found.mean + found.half) == pytest.approx((low, high), rel=1e-5)
    assert found.n == n


@pytest.mark.parametrize("n", [3, 8])
def test_a_paired_difference_excludes_zero_exactly_when_scipys_test_rejects(n: int) -> None:
    draw = np.random.default_rng(0)
    verdicts = []
    for _ in range(60):
        theirs = draw.normal(0.0, 5.0, n)
        ours = theirs + draw.normal(0.4, 0.5, n)
        found = paired(dict(enumerate(ours.tolist())), dict(enumerate(theirs.tolist())))
        assert found.mean == pytest.approx((ours - theirs).mean())
        verdicts.append(found.excludes_zero)
        assert found.excludes_zero == (stats.ttest_rel(ours, theirs).pvalue < 0.05)
    assert 0 < sum(verdicts) < 60


def test_pairs_are_by_seed_and_need_both() -> None:
    found = paired({0: 1.0, 1: 5.0, 2: None, 7: 3.0}, {7: 2.0, 2: 1.0, 1: None, 0: 0.5})
    assert (found.mean, found.n) == (0.75, 2)


def test_what_is_missing_or_not_finite_is_left_out_and_counted() -> None:
    assert interval([1.0, None, math.nan, math.inf, 3.0])[::2] == (2.0, 2)
    assert interval([None]).to_dict() == {"mean": None, "half": None, "n": 0}
    one = interval([2.0])
    assert one.to_dict() == {"mean": 2.0, "half": None, "n": 1}
    assert not one.excludes_zero  # one seed says nothing


def test_the_gap_runs_from_low_to_high() -> None:
    assert [gap_closed(arm, 2.0, 1.0) for arm in (2.0, 1.0, 1.5, 2.5)] == [0.0, 1.0, 0.5, -0.5]
    assert gap_closed(1.0, 1.0, 1.0) is None
    assert gap_closed(None, 2.0, 1.0) is None
