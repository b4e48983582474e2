# SPDX-License-Identifier: Apache-2.0
"""The emulation on a GPU: the quantizer has the same bits there, and every recipe runs."""

import copy
import math

import pytest
import torch
from torch import nn

from trimtab.linear import FORMATS, RECIPES, Recipe, convert_, fake_quant
from trimtab.linear.hadamard import fixed_signs, rotate
from trimtab.linear.state import PathState

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def assert_same_bits(a: torch.Tensor, b: torch.Tensor) -> None:
    assert torch.equal(a.isnan(), b.isnan())
    assert torch.equal(a.view(torch.uint8)[~a.isnan().repeat_interleave(a.element_size(), -1)],
                       b.view(torch.uint8)[~a.isnan().repeat_interleave(a.element_size(), -1)])  # fmt: skip


def numbers(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Rows of very different sizes, subnormal ones and one of zeros among them."""
    powers = (-14, 8) if dtype == torch.float16 else (-146, 100)
    x = torch.randn(shape) * torch.exp2(torch.randint(*powers, (shape[0], 1)).float())
    x[1] = 0
    return x.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("pow2_scale", [False, True])
@pytest.mark.parametrize("group", ["tensor", "token", (1, 128), (128, 128)])
@pytest.mark.parametrize("name", FORMATS)
def test_fake_quant_has_the_same_bits_as_on_the_cpu(name, group, pow2_scale, dtype):
    x = numbers((300, 1000), dtype)
    assert_same_bits(*(fake_quant(t, name, group=group, pow2_scale=pow2_scale).cpu() for t in (x, x.cuda())))
    x[7, 3], x[9, 4] = torch.inf, torch.nan
    assert_same_bits(*(fake_quant(t, name, group=group, pow2_scale=pow2_scale).cpu() for t in (x, x.cuda())))


@pytest.mark.parametrize("shape", [(300, 1000), (4, 20_000), (5,), (2, 3, 64)])
@pytest.mark.parametrize("group", ["tensor", "token"])
@pytest.mark.parametrize("name", FORMATS)
def test_a_given_amax_saturates_alike_on_both(name, group, shape):
    x = torch.randn(shape)
    x.view(-1)[:4] = torch.tensor([torch.inf, -torch.inf, torch.nan, 1e30])
    for amax in (torch.tensor(0.5), torch.full((*shape[:-1], 1), 0.7) if group == "token" else torch.tensor(0.0)):
        assert_same_bits(*(fake_quant(t, name, group=group, amax=amax).cpu() for t in (x, x.cuda())))


def test_the_fused_cast_takes_one_launch_per_row_scale():
    pytest.importorskip("triton")
    x = torch.randn(64, 128, device="cuda")
    fake_quant(x, "e4m3")
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as found:
        fake_quant(x, "e4m3")
        torch.cuda.synchronize()
    kernels = [event for event in found.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    assert len(kernels) == 1, [event.name for event in kernels]


def test_the_rotation_has_the_same_bits_as_on_the_cpu():
    x = torch.randn(64, 100)
    on_gpu = rotate(x.cuda(), 16, dim=1, signs=fixed_signs(16).cuda())
    assert torch.equal(on_gpu.cpu(), rotate(x, 16, dim=1, signs=fixed_signs(16)))


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_trains_on_the_gpu_as_on_the_cpu(name, autocast):
    plain = nn.Sequential(nn.Linear(96, 160), nn.Linear(160, 96))
    results = []
    for device in ("cpu", "cuda"):
        model = copy.deepcopy(plain).to(device)
        convert_(model, name, backend="emulated")
        x = torch.linspace(-3, 3, 64 * 96).sin().reshape(2, 32, 96).to(device).requires_grad_()
        with torch.autocast(device, torch.bfloat16, enabled=autocast):
            y = model(x)
        y.float().square().mean().backward()
        results.append([t.detach().float().cpu() for t in (y, x.grad, *(p.grad for p in model.parameters()))])
    loose = autocast or any(g.random for _, g in RECIPES[name].low.gemms()) or RECIPES[name].low.output is not None
    for a, b in zip(*results, strict=True):
        # A last-bit difference in a GEMM may cross a rounding boundary of the next quantizer.
        assert (a - b).norm() <= (0.6 if RECIPES[name].low.random else 0.1 if loose else 1e-4) * a.norm()


def test_the_plain_high_path_is_bit_equal_on_the_gpu():
    plain = nn.Linear(96, 160).cuda()
    model = nn.Sequential(copy.deepcopy(plain))
    convert_(model, "fp8_delayed", backend="emulated")
    model[0].switch.planned = True
    x = torch.randn(32, 96, device="cuda")
    for module in (plain, model):
        module(x).square().sum().backward()
    assert torch.equal(plain.weight.grad, model[0].weight.grad)
    assert torch.equal(plain.bias.grad, model[0].bias.grad)
    assert model[0].memory.histories["grad_output"].is_cuda


@pytest.mark.parametrize("recipe", ["fp8_delayed", "int8_static"])
def test_the_history_of_delayed_scaling_is_the_same_on_both_devices(recipe):
    here, there = PathState(Recipe.named(recipe)), PathState(Recipe.named(recipe))
    operand = next(iter(here.histories))
    amaxes = [0.0, 1.5, math.nan, 2.0, math.inf, 0.25, 1e-30, 7.0] * 3
    for step, amax in enumerate(amaxes):
        current, remember = torch.tensor(amax), step % 5 != 3
        expected = here.past_amax(operand, current, remember=remember)
        found = there.past_amax(operand, current.cuda(), remember=remember).cpu()
        torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(there.histories[operand].cpu(), here.histories[operand])
    assert there.counts == here.counts
