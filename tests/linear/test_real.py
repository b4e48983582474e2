# SPDX-License-Identifier: Apache-2.0
"""Real FP8 products against their emulation: outputs and all gradients, scales, padding, shared casts, refusals.

torch multiplies FP8 matrices on a CPU too, slowly: so the arithmetic around the kernels is held to the emulation here,
and the kernels themselves where there is a GPU that has them. With a scale per 128 numbers a stand-in multiplies on a
CPU, which is as strict about shapes and strides as the real product.
"""

import copy
import itertools
import math

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from trimtab.errors import TrimtabError
from trimtab.linear import RECIPES, convert_, fake_quant, real, tiles
from trimtab.linear.linear import switch_linears
from trimtab.linear.paths import Cast, Gemm, Path, Recipe
from trimtab.linear.quantize import group_amax
from trimtab.linear.recipes import hybrid_fp8

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 9)
TILES = HOPPER and tiles.lacks(torch.device("cuda")) is None
DEVICES = [
    "cpu",
    pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not HOPPER, reason="needs FP8 units")]),
]
TILED_DEVICES = [
    "cpu",
    pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not TILES, reason="needs Hopper, CUDA 12.9")]),
]
BLOCKS = pytest.mark.skipif(not hasattr(nn.functional, "scaled_mm"), reason="needs torch 2.10")
FLOORS = {"output": 40.0, "input": 38.0, "weight": 38.0, "bias": 100.0}
"""Least signal to noise against the emulation in dB, BF16: its own rounding, and the order and width of the sums."""


def dequantized(data: Tensor, scale: Tensor, kind: str) -> Tensor:
    """An operand (outer, K) in FP32; says what the real product would say of scales that do not fit."""
    outer, inner = data.shape
    blocks, height = math.ceil(inner / 128), math.ceil(inner / 512) * 4
    assert data.dtype == torch.float8_e4m3fn
    assert scale.dtype == torch.float32
    assert data.is_contiguous()
    assert inner % 128 == 0
    assert outer % 4 == 0
    if kind == "BlockWise1x128":
        assert scale.shape == (outer, blocks)
        assert scale.stride() == (1, outer)
        wide = scale
    else:
        assert scale.shape == (height, math.ceil(outer / 128))
        assert scale.stride() == (1, height)
        wide = scale[:blocks].t().repeat_interleave(128, 0)[:outer]
    return data.float() * wide.repeat_interleave(128, 1)


@pytest.fixture(autouse=True)
def tiled_products_on_a_cpu(monkeypatch):
    """There is none in torch."""
    plain = getattr(nn.functional, "scaled_mm", None)
    if plain is None:
        return

    def scaled_mm(a, b, scale_a, kind_a, scale_b, kind_b, *, output_dtype):
        if a.is_cuda:
            return plain(a, b, scale_a, kind_a, scale_b, kind_b, output_dtype=output_dtype)
        kinds = (kind_a.name, kind_b.name)
        assert kinds != ("BlockWise128x128", "BlockWise128x128")
        assert b.shape[1] % 16 == 0
        assert output_dtype in (torch.bfloat16, torch.float32)
        left, right = dequantized(a, scale_a, kinds[0]), dequantized(b.t(), scale_b, kinds[1])
        return (left @ right.t()).to(output_dtype)

    monkeypatch.setattr(nn.functional, "scaled_mm", scaled_mm)


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


def need_tiles(recipe: str, device: str) -> None:
    """Skip where there is no product with a scale per 128 numbers."""
    if recipe == "fp8_block" and not (TILES if device == "cuda" else hasattr(nn.functional, "scaled_mm")):
        pytest.skip("needs Hopper, CUDA 12.9 and torch 2.10")


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


def assert_like(got, wanted):
    """Shapes, types, and values within the floors."""
    assert got.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert got[name].shape == tensor.shape
        assert got[name].dtype == tensor.dtype
        assert decibels(tensor, got[name]) > FLOORS[name], name


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("tokens", [(210,), (2, 64), (1,), (3, 5, 7)])
@pytest.mark.parametrize("recipe", ["fp8", "fp8_delayed", "fp8_row", "int8"])
def test_outputs_and_all_gradients_are_those_of_the_emulation(recipe, tokens, device):
    emulated, actual = pair(recipe, device=device)
    for turn in range(3):  # delayed scales come from the steps before
        x, grad = data(device, *tokens, 96, seed=turn), data(device, *tokens, 160, seed=10 + turn)
        wanted, got = run(emulated, x, grad), run(actual, x, grad)
        assert_like(got, wanted)


@BLOCKS
@pytest.mark.parametrize("device", TILED_DEVICES)
@pytest.mark.parametrize("pow2_scale", [False, True])
@pytest.mark.parametrize("sizes", [(96, 160), (128, 128), (640, 272), (1376, 16)])
@pytest.mark.parametrize("tokens", [(210,), (2, 64), (1,), (3, 5, 7), (300,)])
def test_block_scaling_is_that_of_the_emulation(tokens, sizes, pow2_scale, device):
    """Shapes with and without padding, on either side."""
    emulated, actual = pair(Recipe.named("fp8_block", pow2_scale=pow2_scale), device=device, sizes=sizes)
    x, grad = data(device, *tokens, sizes[0]), data(device, *tokens, sizes[1], seed=2)
    x = x * torch.exp2(torch.arange(sizes[0]) % 7 - 3).to(x)
    wanted, got = run(emulated, x, grad), run(actual, x, grad)
    assert_like(got, wanted)


@BLOCKS
@pytest.mark.parametrize("device", TILED_DEVICES)
@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_with_block_scaling_a_bad_number_spoils_what_it_spoils_in_the_emulation(bad, device):
    found = []
    for model in pair("fp8_block", device=device, sizes=(256, 160)):
        x, grad = data(device, 300, 256), data(device, 300, 160, seed=2)
        x[130, 5] = grad[7, 150] = bad
        found.append({name: t.isfinite() for name, t in run(model, x, grad).items()})
    for name, wanted in found[0].items():
        assert not wanted.all()
        assert torch.equal(found[1][name], wanted), name


@BLOCKS
@pytest.mark.parametrize("group", [(1, 128), (128, 1), (128, 128)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
def test_tiles_hold_the_numbers_of_the_emulation(dtype, group):
    x = (torch.randn(200, 300) * torch.exp2(torch.arange(300.0) % 9)).to(dtype)
    columns = group[1] == 1
    rows = (None, Cast("e4m3", group)) if columns else (Cast("e4m3", group), None)
    made = tiles.quantize(x, *rows)[columns]
    assert made is not None
    back = dequantized(made.data, made.scale, "BlockWise128x128" if made.square else "BlockWise1x128")
    back = back.t() if columns else back
    assert torch.equal(back[:200, :300].to(dtype), fake_quant(x, "e4m3", group=group))
    assert not back[200:].any()
    assert not back[:, 300:].any()


@BLOCKS
def test_a_square_may_stand_on_the_left_and_roles_may_differ_in_kind():
    tile, column, square = (Cast("e4m3", group) for group in ((1, 128), (128, 1), (128, 128)))
    tensor = Cast("e4m3", "tensor")
    low = Path("mixed", Gemm(square, tile), Gemm(tensor, tensor), Gemm(square, column))
    assert "CUDA device" in str(real.why_not(low, nn.Linear(96, 160)))
    emulated, actual = pair(Recipe(low, Path.plain()))
    x, grad = data("cpu", 210, 96), data("cpu", 210, 160, seed=2)
    wanted, got = run(emulated, x, grad), run(actual, x, grad)
    for name, tensor in wanted.items():
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
    monkeypatch.setattr(
        real, "_quantize", lambda x, *rest, **options: seen.append(tuple(x.shape)) or plain(x, *rest, **options)
    )
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
@pytest.mark.parametrize("recipe", ["fp8", "fp8_row", "fp8_block", "int8", "saved4"])
def test_a_second_backward_measures_its_own_gradient(recipe, device):
    need_tiles(recipe, device)
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
@pytest.mark.parametrize("recipe", ["fp8", "fp8_row", pytest.param("fp8_block", marks=BLOCKS), "int8", "saved4"])
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
@pytest.mark.parametrize("recipe", ["fp8", "fp8_delayed", "fp8_row", "fp8_block", "int8", "saved4"])
def test_no_tokens_give_no_output_and_zero_gradients(recipe, device):
    """An expert that nobody was sent to."""
    need_tiles(recipe, device)
    for tokens in ((0,), (2, 0)):
        found = run(pair(recipe, device=device)[1], data(device, *tokens, 96))
        assert found["output"].shape == (*tokens, 160)
        assert found["input"].shape == (*tokens, 96)
        assert found["weight"].shape == (160, 96)
        assert not found["weight"].any()
        assert not found["bias"].any()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("recipe", ["fp8", "fp8_row", "fp8_block", "int8"])
def test_every_floating_type_is_taken(recipe, dtype, device):
    need_tiles(recipe, device)
    emulated, actual = (model.to(dtype) for model in pair(recipe, device=device))
    x = data(device, 32, 96).to(dtype)
    wanted, got = run(emulated, x), run(actual, x)
    for name, tensor in wanted.items():
        assert got[name].dtype == dtype
        assert decibels(tensor, got[name]) > FLOORS[name], name


@pytest.mark.parametrize("recipe", ["fp8", "fp8_row", pytest.param("fp8_block", marks=BLOCKS), "int8", "saved4"])
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
@pytest.mark.parametrize("recipe", ["fp8", "fp8_block"])
def test_a_fault_strikes_real_kernels_as_it_strikes_the_emulation(recipe, device):
    from trimtab.lab.faults import Faults

    need_tiles(recipe, device)
    for kind in ("grad_scale", "output_scale", "stale_scale"):
        emulated, actual = pair(recipe, device=device)
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
        ("nvfp4", (96, 160), "there is no kernel for e2m1 with a scale per (1, 16) in output of nvfp4"),
        ("fp8_block", (96, 150), "out_features must be a multiple of 16, got 150"),
    ],
)
def test_what_a_kernel_cannot_take_is_said_with_rule_and_value(recipe, sizes, reason):
    found = real.why_not(RECIPES[recipe].low, nn.Linear(*sizes))
    assert found is not None
    assert reason in found


@pytest.mark.parametrize(
    ("gemm", "reason"),
    [
        (Gemm(Cast("e4m3", (128, 128)), Cast("e4m3", (128, 128))), "tiles along the inner dimension, got (128, 128)"),
        (Gemm(Cast("e4m3", (128, 1)), Cast("e4m3", (128, 128))), "(1, 128) or (128, 128), got (128, 1)"),
        (Gemm(Cast("e5m2", (1, 128)), Cast("e4m3", (128, 128))), "must be of e4m3, got e5m2 in output"),
        (Gemm(Cast("e4m3", "token"), Cast("e4m3", (128, 128))), "per tensor, per row or per 128, got low"),
        (Gemm(Cast("e4m3", (1, 64)), Cast("e4m3", (128, 128))), "no kernel for e4m3 with a scale per (1, 64)"),
    ],
)
def test_what_block_scaling_cannot_take_is_said_too(gemm, reason):
    found = real.why_not(Path("low", output=gemm), nn.Linear(96, 160))
    assert found is not None
    assert reason in found


@pytest.mark.parametrize(
    ("capability", "version", "reason"),
    [
        ((10, 0), "13.0", "compute capability 9.x (Hopper), got 10.0"),
        ((8, 9), "13.0", "compute capability 9.x (Hopper), got 8.9"),
        ((9, 0), "12.8", "CUDA 12.9 or later, got 12.8"),
        ((9, 0), "12.9", None),
        ((9, 0), "13.0", None),
    ],
)
@BLOCKS
def test_block_scaling_needs_hopper_and_a_library_that_has_it(capability, version, reason, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.version, "cuda", version)
    found = tiles.lacks(torch.device("cuda"))
    assert (found is None) == (reason is None)
    assert reason is None or reason in str(found)


@pytest.mark.parametrize("name", ["fp8", "fp8_delayed", "fp8_row", "fp8_block", "int8"])
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

    x = torch.randn(shape).to(dtype)
    amax = group_amax(x, per)
    layouts = {"tensor": ((True, True), (True, False), (False, True)), "token": ((True, False),)}
    trials = [(x, amax, False), (x, amax, True), (x, amax / 3, True)]  # the last one saturates
    if dtype != torch.float16:
        trials += [(x * size, group_amax(x * size, per), False) for size in (1e-37, 1e-20, 1e25)]
    for ask, (y, most, saturate) in itertools.product(layouts.get(per, ((False, True),)), trials):
        wanted = real._quantize(y, Cast(name, per), most, ask)
        options = {"align": real.ALIGN, "saturate": saturate}
        got = kernels.cast_both(y.cuda(), FORMATS[name], real.TYPES[name], most.cuda(), ask, **options)
        for one, other, asked in zip(wanted, got, ask, strict=True):
            assert (other is not None) == asked
            if one is not None and other is not None:
                assert torch.equal(one.data.view(torch.uint8), other[0].cpu().view(torch.uint8))
                assert torch.equal(one.scale, other[1].cpu())


@pytest.mark.gpu
@pytest.mark.skipif(not HOPPER, reason="needs FP8 units")
def test_a_corrected_estimate_has_the_bits_of_a_division():
    from trimtab.linear import kernels
    from trimtab.linear.formats import FORMATS

    generator = torch.Generator("cuda").manual_seed(0)
    for name in ("e4m3", "e5m2"):
        for _ in range(20):
            x = torch.randn(2048, 8192, device="cuda", generator=generator) * torch.rand((), device="cuda") * 4
            options = {"align": 16, "saturate": False}
            got, _ = kernels.cast_both(x, FORMATS[name], real.TYPES[name], x.abs().max(), (True, False), **options)
            assert got is not None
            assert torch.equal((x / got[1]).to(real.TYPES[name]).view(torch.uint8), got[0].view(torch.uint8))


@pytest.mark.gpu
@pytest.mark.skipif(not HOPPER, reason="needs FP8 units")
@pytest.mark.parametrize("shape", [(128, 128), (200, 300), (1, 16), (17, 33), (513, 4096), (300, 1376)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
@pytest.mark.parametrize("pow2_scale", [False, True])
@pytest.mark.parametrize(
    ("rows", "columns"),
    [((1, 128), (128, 1)), ((128, 128), (128, 128)), ((1, 128), None), (None, (128, 1)), (None, (128, 128))],
)
def test_one_launch_writes_tiles_with_the_bits_of_the_torch_operations(rows, columns, pow2_scale, dtype, shape):
    pytest.importorskip("triton")
    x = torch.randn(shape) * torch.exp2(torch.randint(-12, 6, (shape[0], 1)).float())
    x[0, 0] = -0.0
    casts = [None if group is None else Cast("e4m3", group, pow2_scale) for group in (rows, columns)]
    for bad in (None, torch.inf, torch.nan):
        if bad is not None:
            x[-1, -1] = bad
        for one, other in zip(*(tiles.quantize(t, *casts) for t in (x.to(dtype), x.to("cuda", dtype))), strict=True):
            assert (one is None) == (other is None)
            if one is None or other is None:
                continue
            nan = one.data.float().isnan()
            bits, found = one.data.view(torch.uint8), other.data.cpu()
            assert torch.equal(nan, found.float().isnan())
            assert torch.equal(bits[~nan], found.view(torch.uint8)[~nan])
            assert other.scale.stride() == one.scale.stride()
            assert torch.equal(one.scale.nan_to_num(-1), other.scale.cpu().nan_to_num(-1))


@pytest.mark.gpu
@pytest.mark.skipif(not TILES, reason="needs Hopper, CUDA 12.9")
@pytest.mark.parametrize("tokens", [16, 20, 128, 300, 4096])
@pytest.mark.parametrize("sizes", [(128, 128), (256, 384), (1376, 1024), (96, 160), (2048, 2736)])
@pytest.mark.parametrize("kinds", [((1, 128), (128, 128)), ((128, 128), (1, 128)), ((1, 128), (1, 128))])
def test_every_product_with_tiles_is_the_product_of_what_they_hold(kinds, sizes, tokens):
    """Row by row and column by column, so that a scale in the wrong place is seen."""
    inner, outer = sizes
    left = torch.randn(tokens, inner, device="cuda") * torch.exp2(torch.arange(tokens, device="cuda") % 9)[:, None]
    right = torch.randn(outer, inner, device="cuda") * torch.exp2(torch.arange(inner, device="cuda") // 128 % 5)
    casts = [Cast("e4m3", group) for group in kinds]
    a, b = (tiles.quantize(x, cast, None)[0] for x, cast in zip((left, right), casts, strict=True))
    assert a is not None
    assert b is not None
    names = ["BlockWise128x128" if side.square else "BlockWise1x128" for side in (a, b)]
    wide = [dequantized(s.data, s.scale, name).double() for s, name in zip((a, b), names, strict=True)]
    wanted = (wide[0] @ wide[1].t())[:tokens, :outer]
    for dtype, floor in ((torch.bfloat16, 45), (torch.float32, 55)):
        got = tiles.multiply(a, b, dtype).double()
        assert got.shape == wanted.shape
        for dim in (0, 1):
            noise = (got - wanted).norm(dim=dim) / wanted.norm(dim=dim)
            assert -20 * math.log10(float(noise.max()) + 1e-12) > floor - 10
        assert decibels(wanted, got) > floor
