# SPDX-License-Identifier: Apache-2.0
"""Clipping: each rule against its paper's letters over thousands of norms, what its thresholds can and cannot do, and
AdaGC step by step against pytorch_optimizer."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from reference import transforms as reference
from torch import nn

from trimtab.errors import TrimtabError
from trimtab.optim.clipping import (
    AdaGC,
    AutoClip,
    Thresholds,
    Window,
    ZClip,
    ZHistory,
    ada_gc,
    auto_clip,
    z_clip,
)


def spiky(steps: int, seed: int = 0) -> np.ndarray:
    """Norms that fall slowly, vary, and spike now and then."""
    rng = np.random.default_rng(seed)
    norms = 5.0 / np.sqrt(1 + np.arange(steps) / 50) * rng.lognormal(0.0, 0.2, steps)
    norms[rng.random(steps) < 0.03] *= 30.0
    return norms


def clipped(function, state, norms, **options) -> np.ndarray:
    """The norms after clipping, one column per tensor, in float64."""
    found = []
    for row in np.atleast_2d(norms.T).T:
        scales, state = function(torch.tensor(row), state, **options)
        found.append(scales.numpy() * row)
    return np.array(found)


def z_history(tensors: int = 1) -> ZHistory:
    return ZHistory(*torch.zeros(3, tensors, dtype=torch.float64))


def fresh(*shapes) -> list[nn.Parameter]:
    return [nn.Parameter(torch.zeros(shape)) for shape in shapes]


# ZClip


@pytest.mark.parametrize("warmup", [2, 25])
def test_zclip_is_the_papers(warmup):
    norms = spiky(2_000)
    letters = reference.ZClip(warmup=warmup)
    expected = [letters(n) for n in norms]
    found = clipped(z_clip, z_history(), norms, warmup=warmup)[:, 0]
    np.testing.assert_allclose(found, expected, rtol=1e-8)
    assert (found < norms * 0.5).sum() > 20  # it did clip


def test_zclip_treats_each_tensor_by_itself():
    norms = np.stack([spiky(300, seed) for seed in range(3)], 1)
    found = clipped(z_clip, z_history(3), norms)
    for column in range(3):
        alone = clipped(z_clip, z_history(), norms[:, column])[:, 0]
        np.testing.assert_array_equal(found[:, column], alone)


@pytest.mark.parametrize(("mode", "deviations"), [("reciprocal", 2.5**2 / 10), ("threshold", 2.5), ("mean", 0.0)])
def test_zclip_clips_ten_deviations_to(mode, deviations):
    history = ZHistory(*(torch.tensor([v], dtype=torch.float64) for v in (3.0, 0.5, 40.0)))
    scales, after = z_clip(torch.tensor([8.0], dtype=torch.float64), history, mode=mode, eps=1e-15)
    target = 3.0 + deviations * 0.5
    assert float(scales) * 8.0 == pytest.approx(target)
    assert float(after.mean) == pytest.approx(0.97 * 3.0 + 0.03 * target)  # the clipped norm enters


def test_zclip_leaves_the_warm_up_alone_but_for_a_fixed_limit():
    [param] = fresh((4,))
    free, held = ZClip([param]), ZClip([param], max_norm=1.0)
    for step in range(25):
        for transform in (free, held):
            param.grad = torch.full((4,), 50.0 if step == 20 else 2.0)
            transform.step_()
            assert float(param.grad.norm()) == pytest.approx(1.0 if transform is held else 100.0 if step == 20 else 4.0)
    for one, other in zip(free.state_dict().values(), held.state_dict().values(), strict=True):
        assert torch.equal(one, other)  # the fixed limit does not touch the statistics
    assert float(free.state_dict()["mean"]) == pytest.approx((24 * 4 + 100) / 25)


@given(st.lists(st.floats(1e-10, 1e10), min_size=1, max_size=60))
def test_no_rule_ever_lengthens_a_gradient(norms):
    norms = np.array(norms)
    states = {
        z_clip: (z_history(), {"warmup": 3}),
        ada_gc: (Thresholds(*torch.zeros(2, 1, dtype=torch.float64)), {"warmup": 3}),
        auto_clip: (Window(torch.zeros(8, 1, dtype=torch.float64), torch.zeros(1, dtype=torch.int64)), {}),
    }
    for function, (state, options) in states.items():
        found = clipped(function, state, norms, **options)[:, 0]
        assert (found <= norms * (1 + 1e-12)).all()
        assert (found > 0).all()


# AdaGC


def test_adagc_is_the_papers():
    norms = np.stack([spiky(1_000, seed) * 10.0**-seed for seed in range(4)], 1)
    letters = reference.AdaGC()
    expected = [letters(list(row)) for row in norms]
    state = Thresholds(*torch.zeros(2, 4, dtype=torch.float64))
    found = clipped(ada_gc, state, norms)
    np.testing.assert_allclose(found, expected, rtol=1e-12)
    assert (found[100:] < norms[100:] * 0.2).mean() > 0.01


def test_adagc_thresholds_rise_by_a_tenth_of_a_percent_a_step():
    state = Thresholds(torch.tensor([1.0], dtype=torch.float64), torch.tensor([100.0], dtype=torch.float64))
    for _ in range(10):
        _, state = ada_gc(torch.tensor([1e6], dtype=torch.float64), state)
    assert float(state.gamma) == pytest.approx(1.001**10)


def test_a_tensor_that_joins_late_has_a_warm_up_of_its_own():
    early, late = fresh((2,), (2,))
    transform = AdaGC([early, late], warmup=3, lambda_abs=1.0)
    for _ in range(10):
        early.grad = torch.tensor([0.3, 0.4])
        transform.step_()
    for step in range(3):
        early.grad, late.grad = torch.tensor([0.3, 0.4]), torch.tensor([30.0, 40.0])
        transform.step_()
        total = math.hypot(0.5, 50.0)
        assert float(early.grad.norm()) == pytest.approx(0.5)  # its own threshold
        assert float(late.grad.norm()) == pytest.approx(50.0 / total)  # still the fixed limit
        assert transform.state_dict()["steps"].tolist() == [11.0 + step, 1.0 + step]
    late.grad = torch.tensor([30.0, 40.0])
    transform.step_()
    assert float(late.grad.norm()) == pytest.approx(1.05 * 50.0 / total, rel=1e-6)


def test_a_zero_gradient_in_the_warm_up_does_not_freeze_a_tensor():
    """The first gradient of LoRA's A is zero, because B is: a minimum of zero would clip A to zero for ever."""
    [param] = fresh((2,))
    transform = AdaGC([param], warmup=3)
    for value in (0.0, 0.1, 0.1, 0.1, 0.1):
        param.grad = torch.full((2,), value)
        transform.step_()
    assert param.grad.tolist() == pytest.approx([0.1, 0.1])


def test_adagc_with_adam_is_pytorch_optimizers():
    library = pytest.importorskip("pytorch_optimizer")
    ours, theirs = fresh((6, 5), (7,)), fresh((6, 5), (7,))
    transform = AdaGC(ours, warmup=9)
    adam = torch.optim.Adam(ours, lr=1e-2)
    other = library.AdaGC(theirs, lr=1e-2, weight_decay=0.0, warmup_steps=10)  # theirs ends one step before its number
    for step in range(50):
        generator = torch.Generator().manual_seed(step)
        for a, b in zip(ours, theirs, strict=True):
            grad = torch.randn(a.shape, generator=generator) * (40.0 if step % 11 == 7 else 1.0)
            a.grad, b.grad = grad.clone(), grad.clone()
        transform.step_()
        adam.step()
        other.step()
        for a, b in zip(ours, theirs, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


# AutoClip


@pytest.mark.parametrize("percentile", [0.0, 10.0, 37.5, 90.0, 100.0])
def test_autoclip_is_the_papers_while_the_window_holds_all(percentile):
    norms = spiky(400)
    letters = reference.AutoClip(percentile)
    expected = [letters(n) for n in norms]
    window = Window(torch.zeros(400, 1, dtype=torch.float64), torch.zeros(1, dtype=torch.int64))
    found = clipped(auto_clip, window, norms, percentile=percentile)[:, 0]
    np.testing.assert_allclose(found, expected, rtol=1e-12)


def test_autoclip_forgets_what_left_its_window():
    norms = spiky(100)
    window = Window(torch.zeros(20, 1, dtype=torch.float64), torch.zeros(1, dtype=torch.int64))
    found = clipped(auto_clip, window, norms, percentile=10.0)[:, 0]
    expected = [min(n, np.percentile(norms[max(0, t - 19) : t + 1], 10.0)) for t, n in enumerate(norms)]
    np.testing.assert_allclose(found, expected, rtol=1e-12)


def test_autoclip_shortens_nine_steps_in_ten():
    [param] = fresh((8,))
    transform = AutoClip([param])
    shortened = 0
    for norm in np.random.default_rng(0).lognormal(0.0, 0.3, 300):
        param.grad = torch.full((8,), float(norm))
        transform.step_()
        shortened += bool(transform.scales < 1)
    assert shortened / 300 == pytest.approx(0.9, abs=0.04)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda p: ZClip(p, alpha=1.0), "alpha"),
        (lambda p: ZClip(p, z_threshold=0.0), "z_threshold"),
        (lambda p: ZClip(p, warmup=1), "warmup"),
        (lambda p: ZClip(p, max_norm=0.0), "max_norm"),
        (lambda p: ZClip(p, eps=0.0), "eps"),
        (lambda p: ZClip(p, mode="recipocal"), "did you mean 'reciprocal'"),
        (lambda p: AdaGC(p, beta=1.0), "beta"),
        (lambda p: AdaGC(p, lambda_rel=1.0), "lambda_rel"),
        (lambda p: AdaGC(p, lambda_abs=0.0), "lambda_abs"),
        (lambda p: AdaGC(p, warmup=0), "warmup"),
        (lambda p: AutoClip(p, percentile=101.0), "percentile"),
        (lambda p: AutoClip(p, window=0), "window"),
    ],
)
def test_settings_without_a_meaning_are_refused(make, message):
    with pytest.raises(TrimtabError, match=message):
        make(fresh((2,)))
