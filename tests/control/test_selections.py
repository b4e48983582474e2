# SPDX-License-Identifier: Apache-2.0
"""Selections: each fills the seats by its own rule, among the recoverable, as a function of the step and the verdict
alone, so that asking in any order gives the same answers."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from trimtab.control.selections import ByLot, Fixed, RandomUnits, RoundRobin, Selection, TopNorm
from trimtab.errors import TrimtabError

RECOVERABLE = np.array([True, False, True, True, False, True])


def verdict(*chosen: int, units: int = 6) -> Any:
    """What the controller itself chose."""
    high = np.zeros((1, units), bool)
    high[0, list(chosen)] = True
    return SimpleNamespace(choice=SimpleNamespace(high=high))


def choose(selection: Selection, step: int, *chosen: int) -> list[int]:
    mask = selection(step, verdict(*chosen))
    assert (mask.shape, mask.dtype) == ((6,), bool)
    return np.flatnonzero(mask).tolist()


def test_random_units_follow_the_counts_and_stay_among_the_recoverable() -> None:
    selection = RandomUnits([0, 3, 1, 4, 0], RECOVERABLE, seed=7)
    chosen = [choose(selection, step) for step in range(8)]
    assert [len(units) for units in chosen] == [0, 3, 1, 4, 0, 0, 0, 0]  # counts[step] is for the step that follows
    assert set().union(*chosen) <= {0, 2, 3, 5}


def test_random_units_are_fixed_by_seed_and_step() -> None:
    def draws(seed: int) -> list[list[int]]:
        selection = RandomUnits([2] * 40, np.ones(6, bool), seed=seed)
        return [choose(selection, step) for step in range(40)]

    assert draws(0) == draws(0)
    backwards = RandomUnits([2] * 40, np.ones(6, bool), seed=0)
    assert [choose(backwards, step) for step in reversed(range(40))][::-1] == draws(0)
    assert draws(0) != draws(1)
    assert set().union(*draws(0)) == set(range(6))


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_round_robin_fills_the_budget_and_gives_everybody_the_same_number_of_turns(count: int) -> None:
    selection = RoundRobin(count, RECOVERABLE)
    chosen = [choose(selection, step) for step in range(1, 13)]
    assert all(len(units) == count for units in chosen)
    turns = np.bincount(np.concatenate(chosen), minlength=6)
    assert turns.tolist() == np.where(RECOVERABLE, 12 * count // 4, 0).tolist()
    waited = [choose(selection, step) for step in range(1, 1 + -(-4 // count))]
    assert set().union(*waited) == {0, 2, 3, 5}  # all within units / count steps


def test_a_lot_falls_on_units_in_proportion_to_their_risk_and_needs_no_memory() -> None:
    def draw(selection: ByLot, step: int, risk: list[float]) -> list[int]:
        seen = verdict()
        seen.risk = SimpleNamespace(risk=np.array([risk]))
        return np.flatnonzero(selection(step, seen)).tolist()

    risk = [1.0, 100.0, 2.0, 0.0, 100.0, 5.0]
    one = ByLot(1, RECOVERABLE, seed=3)
    draws = [draw(one, step, risk) for step in range(4000)]
    share = np.bincount(np.concatenate(draws), minlength=6) / 4000
    np.testing.assert_allclose(share, [1 / 8, 0, 2 / 8, 0, 0, 5 / 8], atol=0.03)
    assert [draw(one, step, risk) for step in reversed(range(50))][::-1] == draws[:50]
    assert draw(ByLot(3, RECOVERABLE), 1, risk) == [0, 2, 5]
    assert draw(ByLot(9, RECOVERABLE), 1, risk) == [0, 2, 3, 5]
    assert {draw(one, step, [np.inf, 0, 1, 1, 1, 1])[0] for step in range(50)} == {0}
    assert len({draw(one, step, [0.0] * 6)[0] for step in range(50)}) == 4


def test_round_robin_needs_no_memory_and_takes_a_budget_that_is_too_large() -> None:
    selection = RoundRobin(3, RECOVERABLE)
    forward = [choose(selection, step) for step in range(20)]
    assert [choose(selection, step) for step in reversed(range(20))][::-1] == forward
    assert choose(RoundRobin(99, RECOVERABLE), 5) == [0, 2, 3, 5]
    assert choose(RoundRobin(0, RECOVERABLE), 5) == []
    assert choose(RoundRobin(2, np.zeros(6, bool)), 5) == []


@pytest.mark.parametrize(
    ("norms", "chosen"),
    [
        ([1, 9, 3, 2, 9, 4], [2, 5]),
        ([1, 1, 1, 1, 1, 1], [0, 2]),  # equal ones by index
        ([1, 9, 3, np.nan, 9, np.inf], [3, 5]),
        ([0, 9, 3, np.nan, 9, 0], [2, 3]),
    ],
)
def test_top_norm_takes_the_largest_among_the_recoverable(norms: list[float], chosen: list[int]) -> None:
    selection = TopNorm(2, RECOVERABLE, lambda: np.array(norms, np.float32))
    assert choose(selection, 4) == chosen


def test_fixed_units_are_always_high_beside_what_is_chosen() -> None:
    mask = np.array([False, False, True, False, False, True])
    alone = Fixed(mask)
    assert all(choose(alone, step) == [2, 5] for step in range(9))
    assert choose(alone, 3, 0, 5) == [0, 2, 5]  # the controller chose 0 and 5
    turns = Fixed(mask, RoundRobin(1, RECOVERABLE))
    assert [choose(turns, step, 0) for step in range(4)] == [[0, 2, 5], [2, 5], [2, 3, 5], [2, 5]]
    mask[:] = True
    assert choose(alone, 0) == [2, 5]  # a mask that is changed later does not reach in


@pytest.mark.parametrize("count", [-1, 1.5, True])
def test_a_count_that_is_none_is_refused(count: Any) -> None:
    with pytest.raises(TrimtabError, match="count must be a whole number of at least 0, got"):
        RoundRobin(count, RECOVERABLE)
    with pytest.raises(TrimtabError, match="count must be a whole number of at least 0, got"):
        TopNorm(count, RECOVERABLE, lambda: np.zeros(6))
    with pytest.raises(TrimtabError, match="count"):
        ByLot(count, RECOVERABLE)
