# SPDX-License-Identifier: Apache-2.0
"""SkipStep: it drops exactly the outliers, as a plain loop over the rule says, leaves everything else alone, and a
dropped step changes neither weights nor moments."""

import math
from collections.abc import Sequence
from statistics import mean, stdev

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from trimtab.errors import TrimtabError
from trimtab.optim import SkipStep

NORMS = np.random.default_rng(0).lognormal(0.0, 0.2, 400)
LOSSES = 3 + np.random.default_rng(1).normal(0.0, 0.1, 400)


def parameters() -> list[nn.Parameter]:
    return [nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(2, 2))]


def give(params: Sequence[nn.Parameter], norm: float) -> None:
    """Gradients of this norm together."""
    for param in params:
        param.grad = torch.full_like(param, norm / math.sqrt(sum(p.numel() for p in params)))


def dropped(
    skip: SkipStep, params: Sequence[nn.Parameter], norms: Sequence[float], losses: Sequence | None
) -> list[int]:
    found = []
    for i, norm in enumerate(norms):
        give(params, norm)
        said = skip.step_() if losses is None else skip.step_(losses[i])
        gone = [param.grad is None for param in params]
        assert gone == [said] * len(params)
        assert said == skip.skipped
        if said:
            found.append(i)
    return found


def by_hand(series: Sequence[Sequence[float]], sigmas: float, window: int, warmup: int) -> list[int]:
    """The rule as one reads it."""
    found = []
    for i in range(len(series[0])):
        for values in series:
            before = values[max(0, i - window) : i]
            if len(before) >= warmup and values[i] > mean(before) + sigmas * stdev(before):
                found.append(i)
                break
    return found


@pytest.mark.parametrize(("sigmas", "window", "warmup"), [(6.0, 128, 64), (2.0, 128, 64), (1.0, 10, 3), (3.0, 4, 4)])
def test_it_drops_what_the_rule_says(sigmas: float, window: int, warmup: int) -> None:
    norms, losses = NORMS.copy(), LOSSES.copy()
    norms[[30, 90, 200]] *= 20
    losses[[40, 150, 200, 201]] += 3
    params = parameters()
    skip = SkipStep(params, sigmas=sigmas, window=window, warmup=warmup)
    wanted = by_hand([norms.tolist(), losses.tolist()], sigmas, window, warmup)
    assert dropped(skip, params, norms.tolist(), losses.tolist()) == wanted
    assert {90, 150, 200} <= set(wanted) or window == 4
    assert (30 in wanted) == (warmup < 30)


def test_by_the_norm_alone_losses_do_not_matter() -> None:
    norms = NORMS.copy()
    norms[100] *= 20
    params = parameters()
    assert dropped(SkipStep(params), params, norms.tolist(), None) == [100]


def test_a_loss_may_be_a_tensor_and_drops_a_quiet_gradient() -> None:
    losses: list[Tensor] = [torch.tensor(value) for value in LOSSES[:100]]
    losses[80] += 5
    params = parameters()
    assert dropped(SkipStep(params), params, NORMS[:100].tolist(), losses) == [80]


def test_constant_values_and_falling_ones_are_never_dropped() -> None:
    for norms in ([0.1] * 300, [1 / (1 + i) for i in range(300)]):
        params = parameters()
        assert dropped(SkipStep(params), params, norms, [0.3] * 300) == []


def test_a_level_that_rises_for_good_is_accepted_after_a_while() -> None:
    norms = NORMS.copy()
    norms[100:] *= 10
    params = parameters()
    found = dropped(SkipStep(params), params, norms.tolist(), None)
    assert found[0] == 100
    assert found[-1] < 110


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_is_dropped_from_the_start_and_enters_nothing(bad: float) -> None:
    params = parameters()
    skip, clean = SkipStep(params, warmup=5, window=9), SkipStep(params, warmup=5, window=9)
    norms = NORMS[:40].tolist()
    assert dropped(skip, params, [bad, *norms[:20], bad, *norms[20:]], None) == [0, 21]
    assert dropped(clean, params, norms, None) == []
    for mine, theirs in zip(skip.state_dict().values(), clean.state_dict().values(), strict=True):
        assert mine.equal(theirs)
    give(params, 1.0)
    assert skip.step_(loss=bad)


def test_a_step_without_a_gradient_or_with_a_zero_one_says_nothing() -> None:
    params = parameters()
    skip = SkipStep(params, warmup=2, window=4)
    for param in params:
        param.grad = None
    assert not skip.step_(loss=9.0)
    assert skip.state_dict()["steps"].tolist() == [0, 0]
    give(params, 0.0)
    assert not skip.step_(loss=9.0)
    assert skip.state_dict()["steps"].tolist() == [0, 1]
    assert params[0].grad is not None


def test_a_dropped_step_leaves_weights_and_moments_as_they_were() -> None:
    params = parameters()
    optimizer, skip = torch.optim.AdamW(params, lr=0.1), SkipStep(params, warmup=3, window=8)
    for norm in (1.0, 1.1, 0.9, 1.0):
        give(params, norm)
        assert not skip.step_()
        optimizer.step()
    before = [param.detach().clone() for param in params]
    moments = [value.clone() for state in optimizer.state.values() for value in state.values()]
    give(params, 50.0)
    assert skip.step_()
    optimizer.step()
    assert all(param.equal(old) for param, old in zip(params, before, strict=True))
    after = [value for state in optimizer.state.values() for value in state.values()]
    assert all(new.equal(old) for new, old in zip(after, moments, strict=True))


def test_a_saved_state_goes_on_bit_for_bit() -> None:
    norms, losses = NORMS.copy().tolist(), LOSSES.copy().tolist()
    norms[150], norms[250] = 50.0, 60.0
    params = parameters()
    whole, first, second = SkipStep(params), SkipStep(params), SkipStep(params)
    wanted = dropped(whole, params, norms, losses)
    found = dropped(first, params, norms[:200], losses[:200])
    second.load_state_dict(first.state_dict())
    found += [200 + i for i in dropped(second, params, norms[200:], losses[200:])]
    assert found == wanted == [150, 250]
    for mine, theirs in zip(second.state_dict().values(), whole.state_dict().values(), strict=True):
        assert mine.equal(theirs)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sigmas": 0}, "sigmas must be above 0, got 0"),
        ({"warmup": 1}, "warmup must be at least 2 values"),
        ({"window": 32}, "window must hold at least the warmup of 64 values, got 32"),
    ],
)
def test_what_cannot_work_is_refused(options: dict[str, float], message: str) -> None:
    with pytest.raises(TrimtabError, match=message):
        SkipStep(parameters(), **options)  # type: ignore[arg-type]
