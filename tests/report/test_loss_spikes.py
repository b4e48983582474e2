# SPDX-License-Identifier: Apache-2.0
"""Spikes: found where they were put, absent where there are none, and never their own baseline."""

import numpy as np
import pytest

from trimtab.report.spikes import BACK, BEFORE, LEAST, out_of_range, spikes


def falling(steps: int, *, noise: float = 0.05, seed: int = 0) -> np.ndarray:
    return 2 + 4 / np.sqrt(1 + np.arange(steps) / 20) + np.random.default_rng(seed).normal(0, noise, steps)


@pytest.mark.parametrize("seed", range(5))
def test_a_healthy_loss_has_none(seed: int) -> None:
    assert spikes(falling(5000, noise=0.1, seed=seed)) == []


def test_spikes_are_found_where_they_were_put() -> None:
    loss = falling(2000)
    loss[500:520] += 2
    loss[900] = np.nan
    loss[1500:1503] = [np.inf, 9.0, 8.0]
    found = spikes(loss)
    assert [(s.first, s.last, s.nonfinite, s.returned) for s in found] == [
        (500, 519, 0, True),
        (900, 900, 1, True),
        (1500, 1502, 1, True),
    ]
    assert found[0].level == pytest.approx(np.median(loss[500 - BEFORE : 500]))
    assert found[0].peak == loss[500:520].max()
    assert np.isnan(found[1].peak)
    assert found[2].peak == 9.0


def test_a_loss_that_diverges_is_one_spike_to_the_end() -> None:
    loss = falling(1000)
    loss[600:] += np.minimum(np.arange(400) * 0.1, 5)
    (found,) = spikes(loss)
    assert 600 < found.first < 615
    assert (found.last, found.returned) == (999, False)


def test_a_loss_that_rises_slowly_is_found_too() -> None:
    loss = falling(6000)
    loss[4000:] += np.linspace(0, 2, 2000)  # 0.05 spreads a step: no single value is out
    (found,) = spikes(loss)
    assert 4050 < found.first < 4600
    assert not found.returned


def test_a_spike_needs_some_calm_values_to_end() -> None:
    loss = falling(400, noise=0.01)
    loss[200] += 3
    loss[200 + BACK - 1] += 3
    assert [(s.first, s.last) for s in spikes(loss)] == [(200, 200 + BACK - 1)]
    loss = falling(400, noise=0.01)
    loss[[200, 200 + BACK + 1]] += 3
    assert [s.first for s in spikes(loss)] == [200, 200 + BACK + 1]


@pytest.mark.parametrize("loss", [np.zeros(0), np.ones(1), np.ones(LEAST), np.zeros(500), falling(LEAST - 1)])
def test_short_and_constant_curves_have_none(loss: np.ndarray) -> None:
    assert spikes(loss) == []


def test_a_loss_that_was_never_finite_is_one() -> None:
    (found,) = spikes(np.full(30, np.nan))
    assert (found.first, found.last, found.nonfinite, found.returned) == (0, 29, 30, False)


def test_norms_are_out_above_their_own_past_and_where_not_finite() -> None:
    norms = np.random.default_rng(0).lognormal(0, 0.2, 500)
    norms[300], norms[310], norms[320] = 50.0, np.nan, 0.0
    out, ratio = out_of_range(norms)
    assert np.flatnonzero(out).tolist() == [300, 310]
    assert ratio[300] == pytest.approx(50 / np.exp(np.median(np.log(norms[300 - BEFORE : 300]))))
    assert ratio[310] == np.inf
    assert not out[norms < 0.5].any()  # below is not out


def test_asking_from_a_place_on_gives_the_same_there() -> None:
    norms = np.random.default_rng(0).lognormal(0, 0.2, 700)
    norms[[200, 650]] = 50.0
    norms[100:140] = 0.0
    whole, part = out_of_range(norms), out_of_range(norms, 600)
    np.testing.assert_array_equal(whole[0][600:], part[0][600:])
    np.testing.assert_array_equal(whole[1][600:], part[1][600:])
    assert not part[0][:600].any()
