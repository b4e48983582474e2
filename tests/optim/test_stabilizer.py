# SPDX-License-Identifier: Apache-2.0
"""GradStabilizer: rho against the paper's letters, its supremum on any norms and the norms that attain it, AdaClip, and
Stable-SPAM step by step against pytorch_optimizer, across resets too."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from reference import transforms as reference
from torch import nn

from trimtab.errors import TrimtabError
from trimtab.optim.stabilizer import Ceiling, GradStabilizer, NormHistory, ada_clip, stabilize, supremum

LIMIT = 15.816  # (1-g1) / sqrt(1-g2) / sqrt(1 - g1^2/g2) for the paper's 0.6 and 0.999


def rhos(norms, dtype=torch.float64, **options) -> list[float]:
    """rho after each of the norms, from the pure function on a vector of one."""
    history = NormHistory(*torch.zeros(3, 1, dtype=dtype))
    found = []
    for norm in norms:
        scale, history = stabilize(torch.tensor([norm], dtype=dtype), history, **options)
        found.append(float(scale) * norm)
    return found


def lognormal(steps: int, sigma: float = 1.0) -> list[float]:
    return np.random.default_rng(0).lognormal(0.0, sigma, steps).tolist()


@pytest.mark.parametrize("correct", [True, False])
@pytest.mark.parametrize("gammas", [(0.6, 0.999), (0.7, 0.9), (0.85, 0.99999)])
def test_rho_is_the_papers(gammas, correct):
    norms = lognormal(300)
    letters = reference.Stabilizer(*gammas, correct=correct, eps=1e-3)
    expected = [letters.rho(norm) for norm in norms]
    options = {"gammas": gammas, "bias_correction": correct, "eps": 1e-3}
    assert rhos(norms, **options) == pytest.approx(expected, rel=1e-11)
    assert rhos(norms, torch.float32, **options) == pytest.approx(expected, rel=5e-6)


norms_of_any_kind = st.lists(
    st.one_of(st.floats(1e-20, 1e20), st.sampled_from([1e-25, 1.0, 1e25])), min_size=1, max_size=60
)


@given(norms_of_any_kind)
def test_no_norms_can_push_rho_above_its_supremum(norms):
    found = rhos(norms)
    assert found[0] == pytest.approx(1.0, rel=1e-12)
    for step, rho in enumerate(found, 1):
        assert 0 < rho <= supremum(step) * (1 + 1e-9)


@given(norms_of_any_kind)
def test_without_correction_rho_stays_below_the_papers_bound(norms):
    found = rhos(norms, bias_correction=False)
    assert found[0] == pytest.approx(0.4 / math.sqrt(0.001), rel=1e-12)  # 12.65
    assert max(found) <= LIMIT


def test_the_supremum_has_the_values_of_the_specification():
    assert [supremum(t) for t in (1, 2, 10, 100)] == pytest.approx([1.0, 1.0307, 1.5876, 4.8801], abs=5e-5)
    assert supremum(100_000) == pytest.approx(LIMIT, abs=5e-4)


@pytest.mark.parametrize("steps", [1, 2, 10, 40, 100])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_norms_that_grow_by_gamma2_over_gamma1_attain_the_supremum(steps, dtype):
    norms = [(0.999 / 0.6) ** t for t in range(steps)]  # up to 1e22: FP32 does not hold its square
    assert rhos(norms, dtype)[-1] == pytest.approx(supremum(steps), rel=1e-6)


def test_steady_noise_settles_at_one_over_the_root_of_one_plus_cv_squared():
    sigma, tensors = 0.5, 400
    history = NormHistory(*torch.zeros(3, tensors))
    for _ in range(1_500):
        norms = torch.exp(sigma * torch.randn(tensors))
        scales, history = stabilize(norms, history)
    cv_squared = math.exp(sigma**2) - 1
    assert float((scales * norms).mean()) == pytest.approx(1 / math.sqrt(1 + cv_squared), rel=0.03)


def test_a_spike_of_any_size_leaves_the_next_norms_alone():
    for spike in (1e3, 1e30):
        found = rhos([1.0] * 50 + [spike], torch.float32)
        assert found[49] == pytest.approx(1.0, rel=1e-5)
        assert found[50] <= supremum(51)


def fresh(*shapes) -> list[nn.Parameter]:
    return [nn.Parameter(torch.zeros(shape)) for shape in shapes]


def test_the_class_gives_each_tensor_the_norm_of_the_reference():
    params = fresh((3, 4), (5,))
    transform = GradStabilizer(params)
    letters = [reference.Stabilizer(0.6, 0.999) for _ in params]
    for step in range(30):
        torch.manual_seed(step)
        for param in params:
            param.grad = torch.randn_like(param) * torch.exp(torch.randn(()))
        expected = [letter(p.grad.double().numpy()) for letter, p in zip(letters, params, strict=True)]
        transform.step_()
        for param, want in zip(params, expected, strict=True):
            np.testing.assert_allclose(param.grad.numpy(), want, rtol=5e-6)


def test_the_global_norm_keeps_the_proportions_of_all_tensors():
    params = fresh((3,), (4,))
    transform = GradStabilizer(params, global_norm=True)
    params[0].grad, params[1].grad = torch.full((3,), 1.0), torch.full((4,), 3.0)
    transform.step_()
    together = torch.cat([p.grad for p in params])
    torch.testing.assert_close(together, torch.tensor([1.0] * 3 + [3.0] * 4) / math.sqrt(39))
    assert transform.norms.tolist() == pytest.approx([math.sqrt(39)])


def test_the_ratio_is_to_the_average_of_the_norms_before():
    params = fresh((1,), (1,), (1,))
    transform = GradStabilizer(params)
    seen = []
    for values in ([2.0, 1.0, None], [2.0, 4.0, 5.0], [2000.0, None, 5.0], [2.0, math.inf, 5.0]):
        for param, value in zip(params, values, strict=True):
            param.grad = None if value is None else torch.tensor([value])
        transform.step_()
        seen.append(transform.ratio.tolist())
    mean = (0.6 * 0.4 * 1 + 0.4 * 4) / (1 - 0.6**2)  # of 1 and 4, had the third norm been finite
    assert seen[0] == pytest.approx([1.0, 1.0, 0.0], rel=1e-6)
    assert seen[1] == pytest.approx([1.0, 4.0, 1.0], rel=1e-6)
    assert seen[2] == pytest.approx([1000.0, 0.0, 1.0], rel=1e-6)
    assert seen[3][1] == math.inf
    params[1].grad = torch.tensor([mean])
    transform.step_()
    assert transform.ratio[1].item() == pytest.approx(1.0, rel=1e-6)


# AdaClip and Stable-SPAM


def test_adaclip_is_the_papers_and_keeps_the_ratios_among_what_it_clips():
    param = nn.Parameter(torch.zeros(4, 5))
    transform = GradStabilizer([param], clip_gamma=0.9)
    clip, letters = reference.AdaClip(0.9), reference.Stabilizer(0.6, 0.999)
    for step in range(40):
        torch.manual_seed(step)
        param.grad = torch.randn(4, 5)
        if step == 20:
            param.grad[1, 2], param.grad[3, 0] = 800.0, -400.0
        expected = letters(clip(param.grad.double().numpy()))
        transform.step_()
        np.testing.assert_allclose(param.grad.numpy(), expected, rtol=5e-5, atol=1e-7)
        if step == 20:
            assert param.grad[1, 2] / param.grad[3, 0] == pytest.approx(-2.0, rel=1e-5)


def test_the_ceiling_ignores_what_is_not_finite_or_missing():
    ceiling = Ceiling(torch.tensor([1.0, 1.0, 1.0]), torch.tensor([5.0, 5.0, 5.0]))
    limits, factors, after = ada_clip(torch.tensor([math.inf, 0.0, 4.0]), ceiling, 0.9)
    assert limits[:2].tolist() == [math.inf, math.inf]
    assert factors[:2].tolist() == [1.0, 1.0]
    assert after.mean[:2].tolist() == [1.0, 1.0]
    assert after.steps.tolist() == [5.0, 5.0, 6.0]
    assert 0 < factors[2] < 1


def noisy_gradients(steps: int):
    """Gradients with a spiked coordinate now and then."""
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        grads = [torch.randn(shape, generator=generator) for shape in [(6, 5), (7,)]]
        if step % 9 == 5:
            grads[0][2, 3] *= 1e3
            grads[1][4] *= 50.0
        yield grads


@pytest.mark.parametrize("foreach", [False, True])
def test_with_adam_it_is_stable_spam_as_pytorch_optimizer_has_it(foreach):
    library = pytest.importorskip("pytorch_optimizer")
    ours, theirs = fresh((6, 5), (7,)), fresh((6, 5), (7,))
    transform = GradStabilizer(ours, (0.7, 0.9), clip_gamma=0.999, eps=1e-8)
    adam = torch.optim.Adam(ours, lr=1e-2, betas=(0.9, 0.999), eps=1e-8)
    other = library.StableSPAM(theirs, lr=1e-2, update_proj_gap=10_000, foreach=foreach)
    for grads in noisy_gradients(60):
        for a, b, grad in zip(ours, theirs, grads, strict=True):
            a.grad, b.grad = grad.clone(), grad.clone()
        transform.step_()
        adam.step()
        other.step()
        for a, b in zip(ours, theirs, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    assert ours[0].abs().max() > 0.1


def test_resets_of_the_optimizer_do_not_touch_its_averages():
    library = pytest.importorskip("pytorch_optimizer")
    ours, theirs = fresh((6, 5), (7,)), fresh((6, 5), (7,))
    transform = GradStabilizer(ours, (0.7, 0.9), clip_gamma=0.999, eps=1e-8)
    adams = [reference.Adam(np.zeros(p.shape), 1e-2, (0.9, 0.999), 1e-8, reset_every=13) for p in ours]
    other = library.StableSPAM(theirs, lr=1e-2, update_proj_gap=13)
    for grads in noisy_gradients(60):
        for a, b, grad in zip(ours, theirs, grads, strict=True):
            a.grad, b.grad = grad.clone(), grad.clone()
        transform.step_()
        other.step()
        for a, b, adam in zip(ours, theirs, adams, strict=True):
            adam.step(a.grad.double().numpy())
            np.testing.assert_allclose(adam.p, b.detach().numpy(), rtol=1e-4, atol=2e-6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gammas": (0.6, 1.0)}, "two numbers in"),
        ({"gammas": (0.6,)}, "two numbers in"),
        ({"gammas": (0.99, 0.9)}, "gamma1\\^2 < gamma2"),
        ({"clip_gamma": 1.0}, "clip_gamma"),
        ({"eps": -1.0}, "eps"),
    ],
)
def test_settings_without_a_meaning_are_refused(options, message):
    with pytest.raises(TrimtabError, match=message):
        GradStabilizer(fresh((2,)), **options)


@pytest.mark.parametrize("clipped", [True, False])
def test_a_state_saved_with_adaclip_does_not_load_without_it(clipped):
    with_clip, without = GradStabilizer(fresh((2,)), clip_gamma=0.9), GradStabilizer(fresh((2,)))
    one, other = (with_clip, without) if clipped else (without, with_clip)
    with pytest.raises(TrimtabError, match="the same clip_gamma"):
        one.load_state_dict(other.state_dict())
