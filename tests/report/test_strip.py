# SPDX-License-Identifier: Apache-2.0
"""Strip: however a run arrives, its columns hold the extremes of their steps, and there are never too many."""

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from trimtab.report import strip as strips
from trimtab.report.strip import BAD, COUNT, HIGH, LOW, MAX_COLUMNS, SUM, Strip


@given(
    length=st.integers(1, 400),
    first=st.integers(1, 50),
    cuts=st.lists(st.integers(0, 400), max_size=6),
    seed=st.integers(0, 2**16),
)
def test_columns_hold_the_extremes_of_their_steps_however_they_arrive(
    length: int, first: int, cuts: list[int], seed: int
) -> None:
    rng = np.random.default_rng(seed)
    steps = first + np.cumsum(rng.integers(0, 3, length)) + 1  # some twice, some left out
    ratio = np.where(rng.random((length, 3)) < 0.1, np.nan, rng.lognormal(0, 1, (length, 3)))
    ran, would = rng.random((length, 3)) < 0.2, rng.random((length, 3)) < 0.2
    loss = np.where(rng.random(length) < 0.1, np.nan, rng.normal(size=length))
    strip = Strip(3)
    strip.most = 16  # so that columns are joined
    for name in ("ratio", "ran", "would", "changed"):
        setattr(strip, name, getattr(strip, name)[:16])
    edges = sorted({0, length, *(cut for cut in cuts if cut < length)})
    for tick, (a, b) in enumerate(itertools.pairwise(edges)):
        strip.add_passes(tick, steps[a:b], ratio[a:b], ran[a:b], would[a:b])
        strip.add_values(tick, "loss", steps[a:b].tolist(), loss[a:b].tolist())
    column = (steps - steps[0]) // strip.width
    assert strip.used == column.max() + 1 <= 16
    assert strip.width == 1 or (steps.max() - steps[0]) // (strip.width // 2) >= 16  # no wider than it must be
    for c in range(strip.used):
        rows = column == c
        wanted = np.where(np.isnan(ratio[rows]), -np.inf, ratio[rows]).max(axis=0, initial=-np.inf)
        assert np.array_equal(strip.ratio[c], wanted.astype(np.float32))
        assert np.array_equal(strip.ran[c], ran[rows].sum(axis=0))
        assert np.array_equal(strip.would[c], would[rows].sum(axis=0))
        values, curve = loss[rows], strip.curves["loss"][c]
        fine = values[np.isfinite(values)]
        assert (curve[COUNT], curve[BAD]) == (len(fine), len(values) - len(fine))
        assert (curve[LOW], curve[HIGH]) == (fine.min(initial=np.inf), fine.max(initial=-np.inf))
        assert np.isclose(curve[SUM], fine.sum())


def test_memory_is_the_same_for_any_number_of_steps() -> None:
    strip = Strip(4)
    before = strip.ratio.nbytes
    for start in range(0, 200_000, 20_000):
        steps = np.arange(start + 1, start + 20_001)
        strip.add_passes(0, steps, np.ones((20_000, 4)), np.zeros((20_000, 4), bool), np.zeros((20_000, 4), bool))
    assert strip.ratio.nbytes == before
    assert MAX_COLUMNS / 2 <= strip.used <= MAX_COLUMNS
    many = Strip(50_000)
    assert many.ratio.size <= strips.MIN_COLUMNS * 50_000


def test_what_is_newer_than_a_tick_begins_at_the_first_column_that_changed() -> None:
    strip, nobody = Strip(1), np.zeros((1, 1), bool)
    for step in range(1, 6):
        strip.add_passes(step, np.array([step]), np.ones((1, 1)), nobody, nobody)
    assert strip.newer(-1) == 0
    assert strip.newer(4) == 4
    assert strip.newer(5) == strip.used == 5
    strip.add_values(6, "loss", [2], [1.0])  # a late line
    assert strip.newer(5) == 1
