# SPDX-License-Identifier: Apache-2.0
"""Real FP8 products against their emulation: outputs and all gradients, scales, padding, shared casts, refusals.

torch multiplies FP8 matrices on a CPU too, slowly: so the arithmetic around the kernels is held to the emulation here,
and the kernels themselves where there is a GPU that has them.
"""

import copy
import math

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from trimtab.errors import TrimtabError
from trimtab.linear import RECIPES, convert_, real
from trimtab.linear.linear import switch_linears
from trimtab.linear.paths import Path, Recipe
from trimtab.linear.quantize import group_amax
from trimtab.linear.recipes import hybrid_fp8

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 9)
DEVICES = [
    "cpu",
    pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not HOPPER, reason="needs FP8 units")]),
]
FLOORS = {"output": 40.0, "input": 38.0, "weight": 38.0, "bias": 100.0}
"""Least signal to noise against the emulation in dB, BF16: its own rounding, and the order and width of the sums."""


def decibels(wanted: Tensor, got: Tensor) -> float:
    wanted, got = wanted.double(), got.double()
    error = (wanted - got).norm()
    return math.inf if error == 0 else float(20 * torch.log10(wanted.norm() / error))


def pair(
    recipe: str | Recipe = "fp8", *, device: str = "cpu", bias: bool = True, sizes=(96, 160)
) -> list[nn.Sequential]:
    """The same linear twice: emulated, and real."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(*sizes, bias=bias)).to(device, torch.bfloat16)
    made = [copy.deepcopy(plain) for _ in range(2)]
    for model in made:
        convert_(model, recipe, backend="emulated")
    for linear in switch_linears(made[1]):
        linear.real = True
    return made


def run(model: nn.Module, x: Tensor, grad: Tensor | None = None) -> dict[str, Tensor]:
    x = x.clone().requires_grad_()
    y = model(x)
    y.backward(torch.ones_like(y) if grad is None else grad)
    found = {"output": y.detach(), "input": x.grad}
    for name, parameter in model.named_parameters():
        found[name.rpartition(".")[2]] = parameter.grad.clone()
        parameter.grad = None
    return found


def data(device: str, *shape: int, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device, torch.bfloat16)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("tokens", [(210,), (2, 64), (1,), (3, 5, 7)])
@pytest.mark.parametrize("recipe", ["fp8", "fp8_delayed", "fp8_row", "int8"])
def test_outputs_and_all_gradients_are_those_of_the_emulation(recipe, tokens, device):
    emulated, actual = pair(recipe, device=device)
    for turn in range(3):  # delayed scales come from the steps before
        x, grad = data(device, *tokens, 96, seed=turn), data(device, *tokens, 160, seed=10 + turn)
        wanted, got = run(emulated, x, grad), run(actual, x, grad)
        assert got.keys() == wanted.keys()
        for name, tensor in wanted.items():
            assert got[name].shape == tensor.shape
            assert got[name].dtype == tensor.dtype
            assert decibels(tensor, got[name]) > FLOORS[name], name


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("roles", [("output",), ("grad_input",), ("grad_weight",), ("output", "grad_weight")])
def test_a_role_that_is_not_quantized_is_the_plain_product(roles, device):
    recipe = Recipe(hybrid_fp8(), Path.plain(), name="fp8").only(*roles)
    emulated, actual = pair(recipe, device=device)
    x, grad = data(device, 64, 96), data(device, 64, 160)
    wanted, got = run(emulated, x, grad), run(actual, x, grad)
    for name, role in (("output", "output"), ("input", "grad_input"), ("weight", "grad_weight")):
        if role in roles:
            assert decibels(wanted[name], got[name]) > FLOORS[name]
        else:
            assert torch.equal(wanted[name], got[name])


@pytest.mark.parametrize("device", DEVICES)
def test_a_frozen_weight_or_input_gets_no_gradient_and_the_others_are_right(device):
    emulated, actual = pair(device=device, bias=False)
    for model in (emulated, actual):
        model[0].weight.requires_grad_(False)
    x = data(device, 32, 96)
    found = []
    for model in (emulated, actual):
        given = x.clone().requires_grad_()
        model(given).sum().backward()
        assert model[0].weight.grad is None
        found.append(given.grad)
    assert decibels(*found) > FLOORS["input"]
    for model in (emulated, actual):
        model[0].weight.requires_grad_(True)
        model(x).sum().backward()
    assert decibels(emulated[0].weight.grad, actual[0].weight.grad) > FLOORS["weight"]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_what_is_not_finite_stays_visible(bad, device):
    _, actual = pair(device=device)
    x = data(device, 32, 96)
    x[3, 5] = bad
    assert not run(actual, x)["output"].isfinite().any()
    grad = data(device, 32, 160)
    grad[0, 0] = bad
    found = run(actual, data(device, 32, 96), grad)
    assert not found["input"].isfinite().any()
    assert not found["weight"].isfinite().any()


@pytest.mark.parametrize("device", DEVICES)
def test_zeros_give_zeros(device):
    _, actual = pair(device=device, bias=False)
    found = run(actual, torch.zeros(16, 96, device=device, dtype=torch.bfloat16))
    assert not found["output"].any()
    assert not found["weight"].any()


def test_linears_that_share_an_input_cast_it_once(monkeypatch):
    torch.manual_seed(0)
    q, k = (pair(bias=False)[1][0] for _ in range(2))
    other = pair("fp8_delayed", bias=False)[1][0]
    seen = []
    plain = real._quantize
    monkeypatch.setattr(real, "_quantize", lambda x, *rest: seen.append(tuple(x.shape)) or plain(x, *rest))
    x = data("cpu", 32, 96).requires_grad_()
    y = q(x) + k(x)
    assert seen.count((32, 96)) == 1
    x.data.add_(1)  # another content
    with torch.no_grad():
        x.add_(1)
    q(x)
    assert seen.count((32, 96)) == 2
    other(x)  # remembered scales are its own
    assert seen.count((32, 96)) == 3
    seen.clear()
    x = data("cpu", 32, 96)
    y = q(x) + k(x)
    y.sum().backward()
    assert seen.count((32, 96)) == 2  # once as it is, once transposed
    assert seen.count((32, 160)) == 2  # each gradient is its own tensor


def test_a_shared_cast_keeps_no_tensor_alive():
    import gc
    import weakref

    q = pair(bias=False)[1][0]
    x = data("cpu", 32, 96)
    alive = weakref.ref(x)
    with torch.no_grad():
        q(x)
    del x
    gc.collect()
    assert alive() is None


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("recipe", ["fp8", "fp8_row", "int8", "saved4"])
def test_a_second_backward_measures_its_own_gradient(recipe, device):
    found = []
    for model in pair(recipe, device=device):
        x = data(device, 32, 96).requires_grad_()
        y, grad = model(x), data(device, 32, 160)
        y.backward(grad / 1024, retain_graph=True)
        x.grad = None
        model.zero_grad()
        y.backward(grad)
        found.append((x.grad, model[0].weight.grad))
    for wanted, got in zip(*found, strict=True):
        assert decibels(wanted, got) > 38


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("recipe", ["fp8", "fp8_row", "int8", "saved4"])
def test_a_linear_used_twice_in_a_checkpoint_measures_both_inputs(recipe, reentrant):
    """Both recomputes repeat the last call; the size of its input is not the other's."""
    _, model = pair(recipe, sizes=(96, 96))
    found = []
    for region in (lambda x: model(x * 1000) + model(x), lambda x: model(x)):
        for recompute in (False, True):
            x = data("cpu", 32, 96).requires_grad_()
            y = checkpoint(region, x, use_reentrant=reentrant) if recompute else region(x)
            y.backward(data("cpu", 32, 96, seed=2))
            found.append([y.detach(), x.grad, model[0].weight.grad])
            model.zero_grad()
    for one, other in (found[:2], found[2:]):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_a_measured_scale_is_not_taken_from_the_history_of_the_other_path():
    recipe = Recipe(hybrid_fp8(), RECIPES["fp8_delayed"].low)
    emulated, actual = pair(recipe)
    for size in (1, 1024):  # the history knows the small ones only
        wanted, got = (run(model, data("cpu", 32, 96) * size) for model in (emulated, actual))
    for name, tensor in wanted.items():
        assert decibels(tensor, got[name]) > FLOORS[name], name


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_what_is_not_finite_stays_visible_with_a_remembered_scale(bad, device):
    found = []
    for model in pair("fp8_delayed", device=device):
        run(model, data(device, 32, 96))
        x, grad = data(device, 32, 96), data(device, 32, 160)
        x[3, 5] = grad[1, 2] = bad
        found.append({name: t.isfinite() for name, t in run(model, x, grad).items()})
    for name, wanted in found[0].items():
        assert not wanted.all()
        assert torch.equal(found[1][name], wanted), name


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("recipe", ["fp8", "fp8_delayed", "fp8_row", "int8", "saved4"])
def test_no_tokens_give_no_output_and_zero_gradients(recipe, device):
    """An expert that nobody was sent to."""
    for tokens in ((0,), (2, 0)):
        found = run(pair(recipe, device=device)[1], data(device, *tokens, 96))
        assert found["output"].shape == (*tokens, 160)
        assert found["input"].shape == (*tokens, 96)
        assert found["weight"].shape == (160, 96)
        assert not found["weight"].any()
        assert not found["bias"].any()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("recipe", ["fp8", "fp8_row", "int8"])
def test_every_floating_type_is_taken(recipe, dtype, device):
    emulated, actual = (model.to(dtype) for model in pair(recipe, device=device))
    x = data(device, 32, 96).to(dtype)
    wanted, got = run(emulated, x), run(actual, x)
    for name, tensor in wanted.items():
        assert got[name].dtype == dtype
        assert decibels(tensor, got[name]) > FLOORS[name], name


@pytest.mark.parametrize("recipe", ["fp8", "fp8_row", "int8", "saved4"])
def test_inference_mode_has_the_numbers_of_training(recipe):
    _, actual = pair(recipe)
    x = data("cpu", 32, 96)
    wanted = actual(x.clone()).detach()
    with torch.inference_mode():
        assert torch.equal(actual(x), wanted)
        assert torch.equal(actual(x.clone()), wanted)  # a tensor without a version
    assert torch.equal(actual(x).detach(), wanted)


def test_a_tensor_that_was_given_other_data_is_cast_again():
    _, actual = pair()
    x = data("cpu", 32, 96)
    actual(x)
    x.data = data("cpu", 32, 96, seed=2)  # the version stays
    assert torch.equal(actual(x), actual(x.clone()))


@pytest.mark.parametrize("device", DEVICES)
def test_a_fault_strikes_real_kernels_as_it_strikes_the_emulation(device):
    from trimtab.lab.faults import Faults

    for kind in ("grad_scale", "output_scale", "stale_scale"):
        emulated, actual = pair(device=device)
        for model in (emulated, actual):
            Faults(model, f"0:{kind}:start=1").at(1)
        x, grad = data(device, 64, 96), data(device, 64, 160)
        wanted, got = run(emulated, x, grad), run(actual, x, grad)
        for name in ("output", "input", "weight"):
            assert decibels(wanted[name], got[name]) > 30, (kind, name)


@pytest.mark.parametrize(
    ("recipe", "sizes", "reason"),
    [
        ("fp8", (90, 160), "in_features must be a multiple of 16, got 90"),
        ("fp8", (96, 150), "out_features must be a multiple of 16, got 150"),
        ("fp4", (96, 160), "rounds its results"),
        ("mxfp4", (96, 160), "rotates"),
        ("fp8_block", (96, 160), "there is no kernel for e4m3 with a scale per (1, 128) in output of fp8-block"),
    ],
)
def test_what_a_kernel_cannot_take_is_said_with_rule_and_value(recipe, sizes, reason):
    found = real.why_not(RECIPES[recipe].low, nn.Linear(*sizes))
    assert found is not None
    assert reason in found


@pytest.mark.parametrize("name", ["fp8", "fp8_delayed", "fp8_row", "int8"])
def test_only_the_device_is_missing_for_these(name):
    assert real.why_not(RECIPES[name].low, nn.Linear(96, 160)) == "real kernels need a CUDA device, got cpu"
    assert real.why_not(RECIPES["saved4"].low, nn.Linear(97, 3)) is None  # packing needs nothing


def test_a_cpu_has_no_such_kernels():
    with pytest.raises(TrimtabError, match=r"'0' cannot run on them: real kernels need a CUDA device, got cpu"):
        convert_(nn.Sequential(nn.Linear(96, 160)), "fp8", backend="real")
    assert convert_(nn.Sequential(nn.Linear(96, 160)), "fp8").backend == "emulated"


@pytest.mark.gpu
@pytest.mark.skipif(not HOPPER, reason="needs FP8 units")
@pytest.mark.parametrize("shape", [(64, 64), (100, 48), (1, 16), (513, 4096), (17, 33)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
@pytest.mark.parametrize("per", ["tensor", "token", "column"])
@pytest.mark.parametrize("name", ["e4m3", "e5m2", "int8"])
def test_one_launch_writes_both_layouts_with_the_bits_of_the_torch_operations(name, per, dtype, shape):
    from trimtab.linear import kernels
    from trimtab.linear.formats import FORMATS
    from trimtab.linear.paths import Cast

    x = torch.randn(shape).to(dtype)
    amax = group_amax(x, per)
    layouts = {"tensor": ((True, True), (True, False), (False, True)), "token": ((True, False),)}
    for ask in layouts.get(per, ((False, True),)):
        wanted = real._quantize(x, Cast(name, per), amax, ask)
        got = kernels.cast_both(x.cuda(), FORMATS[name], real.TYPES[name], amax.cuda(), ask, align=real.ALIGN)
        for one, other, asked in zip(wanted, got, ask, strict=True):
            assert (other is not None) == asked
            if one is not None and other is not None:
                assert torch.equal(one.data.view(torch.uint8), other[0].cpu().view(torch.uint8))
                assert torch.equal(one.scale, other[1].cpu())
