# SPDX-License-Identifier: Apache-2.0
"""Equations 67 and 68 by hand: extra bytes per unit and per distinct tensor, and the bound that holds for any set."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from trimtab.report.memory import Memory, memory_of

SAVED = {"bits": [4, 8], "inputs": [{"elements": 100, "units": ["q", "k", "v"]}, {"elements": 300, "units": ["down"]}]}
UNITS = ["q", "k", "v", "down"]


def account(rows: list[list[bool]], max_high: int = 2) -> dict[str, float]:
    memory = Memory(SAVED, UNITS, max_high)
    memory.add(np.array(rows, bool))
    return memory.metrics()


def test_extra_bytes_follow_equation_67() -> None:
    found = account([[True, True, False, False], [False, False, False, True], [False] * 4])
    assert found["extra_bytes_peak"] == 150  # down: 300 elements, half a byte each
    assert found["extra_bytes_mean"] == (50 + 50 + 150) / 3
    assert found["extra_bytes_mean_shared"] == (50 + 150) / 3  # q and k read one tensor
    assert found["extra_bytes_peak_shared"] == 150


def test_the_bound_is_the_most_expensive_units_that_fit() -> None:
    assert account([[False] * 4], max_high=1)["extra_bytes_bound"] == 150
    assert account([[False] * 4], max_high=2)["extra_bytes_bound"] == 200


@given(st.lists(st.lists(st.booleans(), min_size=4, max_size=4), min_size=1, max_size=8))
def test_no_set_within_the_budget_exceeds_the_bound(rows: list[list[bool]]) -> None:
    budget = max(sum(row) for row in rows)
    found = account(rows, max_high=budget)
    assert found["extra_bytes_peak_shared"] <= found["extra_bytes_peak"] <= found["extra_bytes_bound"]


def test_a_run_that_says_nothing_or_something_else_has_no_account() -> None:
    assert memory_of({}, UNITS, 2) is None
    assert memory_of({"saved": True}, UNITS, 2) is None
    assert memory_of({"saved": {"bits": 3}}, UNITS, 2) is None
    assert memory_of({"saved": SAVED}, ["other"], 2) is None
