# SPDX-License-Identifier: Apache-2.0
"""Pooling's claims: bounded, and no extreme is lost."""

import base64

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from trimtab.control.advance import Verdict
from trimtab.control.decide import Choice
from trimtab.control.values import Risk
from trimtab.report import pool as pooling
from trimtab.report.passes import Passes
from trimtab.report.pool import CODE_NONFINITE, CODE_UNSEEN, LEVELS, SPAN, Pool, curve


def block(
    steps: np.ndarray, ratio: np.ndarray, why: np.ndarray | None = None, refused: np.ndarray | None = None
) -> Passes:
    no = np.zeros(ratio.shape, bool)
    why = no.astype(np.uint8) if why is None else why
    refused = no if refused is None else refused
    rows = np.zeros(len(steps), bool)
    verdict = Verdict(Risk(ratio, ratio, ratio), Choice(no, no), np.ones(len(steps)), steps, rows)
    return Passes(steps, verdict, no, why > 0, why, refused, ~rows)


def decode(heat: dict) -> np.ndarray:
    codes = np.frombuffer(base64.b64decode(heat["data"]), np.uint8).astype(float)
    codes = codes.reshape(len(heat["units"]), heat["columns"]).T
    ratio = 2 ** (codes * 2 * SPAN / LEVELS - SPAN)
    return np.where(codes == CODE_NONFINITE, np.inf, np.where(codes == CODE_UNSEEN, np.nan, ratio))


@settings(max_examples=40, deadline=None)
@given(hnp.arrays(np.float64, st.integers(1, 400), elements=st.floats(-1e6, 1e6)), st.sampled_from([10, 50]))
def test_a_curve_keeps_its_peak_its_dip_and_its_order(y: np.ndarray, points: int) -> None:
    x = np.arange(len(y)) * 3
    cx, cy = curve(x, y, points)
    assert len(cx) <= points
    assert (cy.max(), cy.min()) == (y.max(), y.min())
    assert (np.diff(cx) > 0).all()
    assert np.array_equal(y[cx // 3], cy)


@pytest.mark.parametrize("rows", [1, 13, 10_000])
def test_a_cell_is_the_largest_ratio_of_its_steps_in_any_blocks(monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    monkeypatch.setattr(pooling, "MAX_COLUMNS", 10)
    rng = np.random.default_rng(0)
    ratio = rng.lognormal(0, 0.5, (95, 4))
    ratio[17, 2] = 5.0
    ratio[60:70, 1] = np.nan
    ratio[33, 3] = np.inf
    steps = np.arange(1, 96)
    pool = Pool(4, 1, 95)
    assert pool.width == 10
    for start in range(0, 95, rows):
        pool.add(block(steps[start : start + rows], ratio[start : start + rows]))
    got = decode(pool.heatmap())
    parts = [ratio[start : start + 10] for start in range(0, 95, 10)]
    want = np.array([np.where(np.isnan(part), -np.inf, part).max(axis=0) for part in parts])
    assert np.isnan(got[6, 1])
    assert np.isinf(got[3, 3])
    fine = np.isfinite(want)
    assert np.allclose(got[fine], np.clip(want[fine], 1 / 8, 8), rtol=0.009)


def test_a_step_that_was_run_twice_shares_its_column() -> None:
    pool = Pool(1, 1, 3)
    pool.add(block(np.array([1, 2, 2, 3]), np.array([[1.0], [4.0], [2.0], [1.0]])))
    assert decode(pool.heatmap())[:, 0] == pytest.approx([1, 4, 1], rel=0.01)


def test_the_heat_map_is_bounded_and_keeps_the_worst_units(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = Pool(500, 1, 1_000_000)
    assert pool.ratio.size <= pooling.MAX_CELLS
    monkeypatch.setattr(pooling, "MAX_SHOWN", 2)
    pool = Pool(5, 1, 1)
    pool.add(block(np.array([1]), np.array([[1.0, 3.0, 2.0, 0.5, 1.5]])))
    assert pool.heatmap()["units"] == [1, 2]


def test_intervals_are_the_runs_of_the_matrix() -> None:
    why = np.array([[0, 5, 5, 3, 0, 5], [0, 0, 0, 0, 0, 0], [6, 0, 0, 0, 0, 0]], np.uint8).T
    refused = np.array([[0, 0, 0, 0, 1, 1], [0, 0, 0, 0, 0, 0], [0, 0, 1, 1, 0, 0]], bool).T
    pool = Pool(3, 11, 16)
    pool.add(block(np.arange(11, 17), np.ones((6, 3)), why, refused))
    time = pool.timeline()
    assert (time["units"], time["total"], time["width"]) == ([0, 2], 2, 1)
    assert time["intervals"] == [
        [0, 12, 2, 5], [0, 14, 1, 3], [0, 15, 1, 0], [0, 16, 1, 5], [1, 11, 1, 6], [1, 13, 2, 0],
    ]  # fmt: skip


def test_the_timeline_is_bounded_and_still_covers_what_ran(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pooling, "MAX_INTERVALS", 20)
    rng = np.random.default_rng(0)
    why = (rng.random((500, 3)) < 0.3).astype(np.uint8) * 5
    pool = Pool(3, 1, 500)
    pool.add(block(np.arange(1, 501), np.ones((500, 3)), why))
    time = pool.timeline()
    assert 0 < len(time["intervals"]) <= 20
    covered = np.zeros((600, 3), bool)
    for row, start, count, code in time["intervals"]:
        assert code == 5
        covered[start - 1 : start - 1 + count, row] = True
    assert covered[:500][why > 0].all()


def test_the_budget_keeps_the_fullest_step_of_a_column(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pooling, "MAX_COLUMNS", 2)
    why = np.array([[5, 0], [5, 5], [0, 0], [0, 5]], np.uint8)
    refused = np.array([[0, 1], [0, 0], [1, 1], [0, 0]], bool)
    pool = Pool(2, 1, 4)
    pool.add(block(np.arange(1, 5), np.ones((4, 2)), why, refused))
    assert pool.num_high.tolist() == [2, 1]
    assert pool.num_asked.tolist() == [2, 2]
