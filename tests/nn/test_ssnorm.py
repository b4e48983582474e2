# SPDX-License-Identifier: Apache-2.0
"""SSNorm: its formula, its one gain, its gradients, and the RMSNorm it turns into (oracle E2)."""

import copy
import warnings

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from trimtab.errors import NoEffectWarning, TrimtabError
from trimtab.nn import SSNorm, to_rmsnorms_

cuda = pytest.param(
    "cuda",
    marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")],
)


def _norm(dim: int, gain: float = 1.7, **options) -> SSNorm:
    norm = SSNorm(dim, **options)
    with torch.no_grad():
        norm.weight.fill_(gain)
    return norm


@given(st.integers(1, 40), st.floats(-3, 3), st.sampled_from([1e-6, 1e-3]), st.integers(0, 1000))
def test_it_is_its_formula(dim: int, gain: float, eps: float, seed: int) -> None:
    x = torch.randn(3, dim, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    expected = gain * x / (x.square().sum(-1, keepdim=True) / dim + eps).sqrt()
    torch.testing.assert_close(_norm(dim, gain, eps=eps, dtype=torch.float64)(x), expected)


def test_it_has_one_trainable_number_that_starts_at_one() -> None:
    norm = SSNorm(64)
    assert [(name, tuple(p.shape), p.item()) for name, p in norm.named_parameters()] == [("weight", (1,), 1.0)]
    x = torch.randn(10, 64) * 37 + 5
    assert norm(x).square().mean(-1).sqrt().tolist() == pytest.approx([1.0] * 10)


@pytest.mark.parametrize("device", ["cpu", cuda])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_values_types_and_gradients_are_those_of_the_filled_rmsnorm(device: str, dtype: torch.dtype) -> None:
    norm = _norm(48, dtype=dtype, device=device)
    plain = norm.to_rmsnorm()
    inputs = [torch.randn(5, 7, 48).to(device, dtype).requires_grad_() for _ in range(2)]
    with torch.no_grad():
        inputs[1].copy_(inputs[0])
    outputs = [module(x) for module, x in zip((norm, plain), inputs, strict=True)]
    assert outputs[0].dtype == outputs[1].dtype
    tolerance = {"rtol": max(1e-6, torch.finfo(dtype).eps), "atol": 1e-6}
    torch.testing.assert_close(outputs[0], outputs[1], **tolerance)
    weights = torch.randn_like(outputs[0])
    for y in outputs:
        (y * weights).sum().backward()
    loose = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 0.02, "atol": 0.02}
    torch.testing.assert_close(inputs[0].grad, inputs[1].grad, **loose)
    total = plain.weight.grad.float().sum().item()  # one number moves as all the features together
    assert norm.weight.grad.item() == pytest.approx(total, rel=0.02, abs=0.2 if dtype.itemsize == 2 else 1e-4)


def test_gradients_pass_the_numeric_check() -> None:
    norm = _norm(6, dtype=torch.float64)
    x = torch.randn(2, 6, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x, _: norm(x), (x, norm.weight))
    assert torch.autograd.gradgradcheck(lambda x, _: norm(x), (x, norm.weight))


def test_with_two_types_and_under_autocast_it_gives_what_an_rmsnorm_gives() -> None:
    norm, x = _norm(32), torch.randn(4, 32)
    plain = norm.to_rmsnorm()
    for autocast in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            for value in (x, x.bfloat16()):
                y = norm(value)
                with warnings.catch_warnings():  # torch's own, of two types in one call
                    warnings.filterwarnings("ignore", "Mismatch dtype between input and weight")
                    expected = plain(value)
                assert y.dtype == expected.dtype
                torch.testing.assert_close(y, expected, rtol=1e-6 if value is x else 0.01, atol=1e-6)


def test_zeros_stay_zeros() -> None:
    x = torch.zeros(2, 8, requires_grad=True)
    y = SSNorm(8)(x)
    y.sum().backward()
    assert torch.equal(y, torch.zeros(2, 8))
    assert x.grad.isfinite().all()


def test_the_export_keeps_what_a_norm_is() -> None:
    norm = _norm(16, eps=1e-4, dtype=torch.bfloat16).eval()
    norm.weight.requires_grad_(False)
    plain = norm.to_rmsnorm()
    assert type(plain) is nn.RMSNorm
    assert plain.eps == 1e-4
    assert torch.equal(plain.weight, norm.weight.expand(16))
    assert (plain.weight.dtype, plain.weight.requires_grad, plain.training) == (torch.bfloat16, False, False)
    plain.weight.data.zero_()
    assert norm.weight.item() != 0, "the two share nothing"


def test_all_norms_of_a_model_are_replaced_in_place() -> None:
    shared = _norm(8, 0.5)
    model = nn.Sequential(nn.Linear(8, 8), _norm(8), nn.ModuleDict({"a": nn.Sequential(shared), "b": shared}))
    inner = copy.deepcopy(model)
    assert to_rmsnorms_(model) == 2
    assert not any(isinstance(module, SSNorm) for module in model.modules())
    assert model[2]["a"][0] is model[2]["b"], "a norm that stood in two places still does"
    x = torch.randn(4, 8)
    torch.testing.assert_close(model[:2](x), inner[:2](x), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(model[2]["b"](x), inner[2]["b"](x), rtol=1e-6, atol=1e-6)
    with pytest.warns(NoEffectWarning, match="no SSNorm"):
        assert to_rmsnorms_(model) == 0
    with pytest.raises(TrimtabError, match=r"an SSNorm itself: use its to_rmsnorm"):
        to_rmsnorms_(shared)


def test_what_cannot_be_is_refused() -> None:
    for arguments, name in (((0,), "dim"), ((2.5,), "dim"), ((4, 0.0), "eps"), ((4, None), "eps")):
        with pytest.raises(TrimtabError, match=f"{name} must"):
            SSNorm(*arguments)
    with pytest.raises(TrimtabError, match=r"last dimension must be dim = 4.*\(2, 1\)"):
        SSNorm(4)(torch.ones(2, 1))


def test_it_survives_the_meta_device_and_a_state_dict() -> None:
    late = SSNorm(8, device="meta").to_empty(device="cpu")
    late.load_state_dict(_norm(8, 0.25).state_dict())
    assert late.weight.tolist() == [0.25]
    late.reset_parameters()
    assert late.weight.tolist() == [1.0]
