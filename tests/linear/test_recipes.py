# SPDX-License-Identifier: Apache-2.0
"""Every recipe: its arithmetic against a literal reference, its noise in dB, its roles, and its plain high path."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.functional import linear

from trimtab.errors import TrimtabError
from trimtab.linear import RECIPES, Cast, Gemm, Path, Recipe, convert_, fake_quant
from trimtab.linear.hadamard import fixed_signs, rotate, unrotate
from trimtab.linear.paths import ROLES
from trimtab.linear.state import Call, PathState

T, K, N = 40, 72, 56  # no multiple of 128 or 32: the last blocks are short


def setup(recipe, *, high=False, bias=True, dtype=torch.float32):
    """A converted linear, its plain twin, and data."""
    plain = nn.Linear(K, N, bias=bias).to(dtype)
    model = nn.Sequential(copy.deepcopy(plain))
    convert_(model, recipe)
    model[0].switch.planned = high
    return model[0], plain, torch.randn(2, T // 2, K, dtype=dtype), torch.randn(2, T // 2, N, dtype=dtype)


def run(module, x, g):
    """Forward and backward; returns output, grad_input, grad_weight, bias gradient."""
    x = x.detach().clone().requires_grad_()
    module.zero_grad()
    y = module(x)
    y.backward(g)
    bias = None if module.bias is None else module.bias.grad.clone()
    return {"output": y.detach(), "grad_input": x.grad, "grad_weight": module.weight.grad.clone(), "bias": bias}


def snr_db(reference, x):
    noise = (reference.double() - x.double()).square().sum()
    return float(10 * torch.log10(reference.double().square().sum() / noise))


def literal(x, w, g, bias, *, out, dx, dw, result=lambda t: t):
    """The three GEMMs spelled out, each from its own pair of operands."""
    x, g = x.reshape(-1, K), g.reshape(-1, N)
    xo, wo = out(x, w)
    gi, wi = dx(g, w)
    gw, xw = dw(g, x)
    return {
        "output": (result(xo @ wo.t()) + bias).reshape(2, T // 2, N),
        "grad_input": result(gi @ wi).reshape(2, T // 2, K),
        "grad_weight": result(gw.t() @ xw),
        "bias": g.sum(0),
    }


def pair(left, right):
    return lambda a, b: (left(a), right(b))


def q(fmt, group="token", **options):
    return lambda t: fake_quant(t, fmt, group=group, **options)


def exact(t):
    return t


def hybrid():
    x, g = q("e4m3", "tensor"), q("e5m2", "tensor")
    return {"out": pair(x, x), "dx": pair(g, x), "dw": pair(g, x)}


def simulated(fmt):
    t = q(fmt)
    return {"out": pair(t, t), "dx": pair(t, t), "dw": pair(t, t), "result": t}


def saved(fmt, *, forward=False):
    t = q(fmt)
    return {"out": pair(t if forward else exact, exact), "dx": pair(exact, exact), "dw": pair(exact, t)}


def block(**options):
    row, column, square = (q("e4m3", shape, **options) for shape in ((1, 128), (128, 1), (128, 128)))
    return {"out": pair(row, square), "dx": pair(row, square), "dw": pair(column, column)}


def rows():
    row, column = q("e4m3"), lambda t: fake_quant(t.t(), "e4m3").t()
    return {"out": pair(row, row), "dx": pair(row, column), "dw": pair(column, column)}


LITERAL = {
    "saved4": (Recipe.named("saved4"), False, saved("e2m1")),
    "saved4-high": (Recipe.named("saved4"), True, saved("e4m3")),
    "saved4-int": (Recipe.named("saved4", element="int"), False, saved("int4")),
    "saved4-int-high": (Recipe.named("saved4", element="int"), True, saved("int8")),
    "saved4-forward": (Recipe.named("saved4", scope="forward"), False, saved("e2m1", forward=True)),
    "saved4-forward-high": (Recipe.named("saved4", scope="forward"), True, saved("e4m3", forward=True)),
    "fp8": (Recipe.named("fp8"), False, hybrid()),
    "fp8_delayed-first-step": (Recipe.named("fp8_delayed"), False, hybrid()),
    "fp8_row": (Recipe.named("fp8_row"), False, rows()),
    "fp8_block": (Recipe.named("fp8_block"), False, block()),
    "fp8_block-pow2": (Recipe.named("fp8_block", pow2_scale=True), False, block(pow2_scale=True)),
    "fp6": (Recipe.named("fp6"), False, simulated("e3m2")),
    "fp6-high": (Recipe.named("fp6"), True, hybrid()),
    "fp4": (Recipe.named("fp4"), False, simulated("e2m1")),
    "fp4-high": (Recipe.named("fp4"), True, hybrid()),
    "int8": (
        Recipe.named("int8"),
        False,
        {"out": pair(q("int8"), q("int8")), "dx": pair(exact, q("int8")), "dw": pair(exact, exact)},
    ),
}


@pytest.mark.parametrize("case", LITERAL)
def test_arithmetic_equals_the_literal_reference(case):
    recipe, high, reference = LITERAL[case]
    module, plain, x, g = setup(recipe, high=high)
    got = run(module, x, g)
    with torch.no_grad():
        expected = literal(x, plain.weight, g, plain.bias, **reference)
    for name in ("output", "grad_input", "grad_weight", "bias"):
        # A fused bias differs from a separate one in the last bit.
        torch.testing.assert_close(got[name], expected[name], rtol=2e-6, atol=5e-6, msg=lambda m, n=name: f"{n}: {m}")


E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def e2m1(y):
    """Nearest E2M1 value by comparing with all eight; ties to the even code."""
    distance = (y.abs().unsqueeze(-1) - E2M1).abs()
    distance[..., 1::2] *= 1 + 1e-6  # an odd code must be strictly nearer
    return E2M1[distance.argmin(-1)] * y.sign()


def dense_rotation(length, size, signs=None):
    """The block-diagonal rotation as a matrix, padded length first."""
    h = torch.ones(1, 1)
    while len(h) < size:
        h = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]]), h)
    h = h / size**0.5
    if signs is not None:
        h = signs.unsqueeze(1) * h
    return torch.block_diag(*[h] * -(-length // size))[:length]


def test_the_butterfly_rotation_equals_the_dense_one_and_is_undone():
    x = torch.randn(5, K)
    for size, signs in ((16, fixed_signs(16)), (32, None), (1, None)):
        rotated = rotate(x, size, dim=1, signs=signs)
        torch.testing.assert_close(rotated, x @ dense_rotation(K, size, signs), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(unrotate(rotated, size, dim=1, length=K, signs=signs), x, rtol=1e-5, atol=1e-5)
    columns = rotate(x.t().contiguous(), 16, dim=0, signs=fixed_signs(16))
    assert torch.equal(columns.t(), rotate(x, 16, dim=1, signs=fixed_signs(16)))


def quartet_forward(x):
    """Rotate in groups of 32, clip at a power of two below 2.9225 deviations, round half to even."""
    x = x @ dense_rotation(K, 32)
    groups = x.reshape(len(x), -1, 32)
    scale = torch.exp2(torch.floor(torch.log2(2.92247856 / 6 * groups.std(-1, keepdim=True, correction=0))))
    y = groups / scale
    return (e2m1(y) * scale).reshape(x.shape), (y.abs() < 6).reshape(x.shape)


def test_quartet_forward_is_literal_and_its_backward_is_unbiased():
    module, plain, x, g = setup("mxfp4")
    runs = [run(module, x, g) for _ in range(160)]
    with torch.no_grad():
        xq, mask_x = quartet_forward(x.reshape(-1, K))
        wq, mask_w = quartet_forward(plain.weight)
        rotation, g2 = dense_rotation(K, 32), g.reshape(-1, N)
        expected = {
            "grad_input": ((g2 @ wq * mask_x) @ rotation.t()).reshape(x.shape),
            "grad_weight": (g2.t() @ xq * mask_w) @ rotation.t(),
        }
        assert not mask_x.all()
    torch.testing.assert_close(runs[0]["output"], linear(xq, wq, plain.bias).detach().reshape(2, T // 2, N))
    assert torch.equal(runs[0]["output"], runs[1]["output"])
    for role, mean in expected.items():
        draws = torch.stack([r[role] for r in runs])
        one, many = snr_db(mean, draws[0]), snr_db(mean, draws.mean(0))
        assert many - one == pytest.approx(22, abs=1.5), role  # 10 log10(160): the error is noise, not bias
    assert torch.equal(runs[0]["bias"], g2.sum(0))


def nvfp4_literal(x, block):
    """E2M1 with one E4M3 scale per block of 16 and one FP32 scale per tensor, block by block."""
    out, total = torch.empty_like(x), x.abs().max() / torch.tensor(448.0 * 6)
    for i in range(0, x.shape[0], block[0]):
        for j in range(0, x.shape[1], block[1]):
            part = x[i : i + block[0], j : j + block[1]]
            relative = (part.abs().max() / torch.tensor(6.0)) / total
            scale = relative.clamp(max=448).to(torch.float8_e4m3fn).float() * total
            out[i : i + block[0], j : j + block[1]] = e2m1((part / scale).clamp(-6, 6)) * scale
    return out


def test_nvfp4_forward_is_literal_and_its_gradients_are_unbiased_where_stochastic():
    module, plain, x, g = setup("nvfp4")
    runs = [run(module, x, g) for _ in range(160)]
    with torch.no_grad():
        x2, g2, w = x.reshape(-1, K), g.reshape(-1, N), plain.weight
        wq = nvfp4_literal(w, (16, 16))
        rotation = dense_rotation(T, 16, fixed_signs(16))
        x_rotated = nvfp4_literal(rotation.t() @ x2, (16, 1))
        expected = {"grad_input": (g2 @ wq).reshape(x.shape), "grad_weight": (rotation.t() @ g2).t() @ x_rotated}
        y = linear(nvfp4_literal(x2, (1, 16)), wq, plain.bias).reshape(2, T // 2, N)
    torch.testing.assert_close(runs[0]["output"], y, rtol=1e-5, atol=1e-5)
    for role, mean in expected.items():
        draws = torch.stack([r[role] for r in runs])
        gain = snr_db(mean, draws.mean(0)) - snr_db(mean, draws[0])
        # The E4M3 block scale may round down, which clips the block's largest value by up to 6 %: a small bias.
        assert gain > 11, role


def test_an_nvfp4_block_far_below_the_tensors_maximum_becomes_zero_not_nan():
    module, _, x, _ = setup(Recipe(Path("x", output=Gemm(Cast("e2m1", (1, 16), scale="two_level"))), Path.plain()))
    x[0, 0, :16] = 1e-8
    x[0, 0, 16] = 1e4
    assert module(x).isfinite().all()


def test_quartet_groups_of_zeros_and_constants_stay_finite():
    module, _, x, g = setup("mxfp4")
    x[0, 0] = 0
    x[0, 1] = 1
    got = run(module, x, g)
    assert all(t.isfinite().all() for t in got.values())
    x[1, 2, 3] = torch.inf
    assert run(module, x, g)["output"][1, 2].isnan().all()


def test_fresh_signs_change_with_every_draw_and_role_and_fixed_ones_never():
    quartet, nvidia = RECIPES["mxfp4"], RECIPES["nvfp4"]
    device = torch.device("cpu")

    def signs(recipe, role, draw, name="a"):
        call = Call(recipe.low, PathState(recipe), name, draw=draw)
        return tuple(call.signs(role, getattr(recipe.low, role), device).tolist())

    fresh = [signs(quartet, role, draw) for role in ("grad_input", "grad_weight") for draw in range(4)]
    assert len(set(fresh)) == 8
    assert signs(quartet, "grad_input", 0) == fresh[0] != signs(quartet, "grad_input", 0, name="b")
    fixed = {signs(nvidia, "grad_weight", draw, name) for draw in range(4) for name in "ab"}
    assert len(fixed) == 1
    assert set(fixed.pop()) == {-1.0, 1.0}


# Signal to quantization noise in dB on Gaussian data: output, grad_input, grad_weight. None: exact.
FLOORS = {
    ("saved4", "low"): (None, None, 18),
    ("saved4", "high"): (None, None, 30),
    ("fp8", "low"): (27, 23, 23),
    ("fp8_delayed", "low"): (27, 23, 23),
    ("fp8_row", "low"): (27, 27, 27),
    ("fp8_block", "low"): (27, 27, 27),
    ("fp6", "low"): (20, 20, 20),
    ("fp6", "high"): (27, 23, 23),
    ("fp4", "low"): (13, 13, 13),
    ("fp4", "high"): (27, 23, 23),
    ("int8", "low"): (41, 46, None),
    ("int8_static", "low"): (36, 46, None),
    ("mxfp4", "low"): (10, 7, 6),
    ("nvfp4", "low"): (15.5, 14, 14),
}


@torch.no_grad()
def test_a_static_scale_is_calibrated_on_its_first_steps_and_then_stays():
    module, plain, x, _ = setup(Recipe.named("int8_static", calibrate=2))
    calls = [x, 2 * x, 8 * x, 0.5 * x]
    results = [module(call) for call in calls]
    amax = 2 * x.abs().max()
    assert module.memory.histories["input"].tolist() == [x.abs().max(), amax]
    weight = fake_quant(module.weight, "int8", group="tensor")
    clipped = nn.functional.linear((8 * x * 127 / amax).round().clamp(-127, 127) * amax / 127, weight, plain.bias)
    torch.testing.assert_close(results[2], clipped, rtol=1e-4, atol=1e-4)
    assert snr_db(plain(8 * x), results[2]) < 10 < 30 < snr_db(plain(x), results[0])
    with pytest.raises(TrimtabError, match=r"static scaling .* needs delayed=True"):
        Cast("int8", "tensor", static=True)


def test_every_quantized_path_has_a_row_in_the_noise_table():
    quantized = {(n, s) for n, r in RECIPES.items() for s in ("low", "high") if not getattr(r, s).is_plain}
    assert set(FLOORS) == quantized


@pytest.mark.parametrize("key", FLOORS, ids="-".join)
def test_noise_is_above_its_floor_and_quantization_really_happens(key):
    name, side = key
    module, plain, x, g = setup(name, high=side == "high")
    got, reference = run(module, x, g), run(plain, x, g)
    for role, floor in zip(ROLES, FLOORS[key], strict=True):
        if floor is None:
            assert torch.equal(got[role], reference[role]), role
        else:
            assert floor <= snr_db(reference[role], got[role]) < floor + 8, role
    assert torch.equal(got["bias"], reference["bias"])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", RECIPES)
def test_half_precision_modules_meet_the_same_floors(name, dtype):
    module, plain, x, g = setup(name, dtype=dtype)
    got, reference = run(module, x, g), run(plain.float(), x.float(), g.float())
    for role, floor in zip(ROLES, FLOORS[name, "low"], strict=True):
        assert got[role].dtype == dtype
        assert snr_db(reference[role], got[role]) >= (40 if floor is None else floor - 0.5), role


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("name", [n for n, r in RECIPES.items() if r.high.is_plain])
def test_a_plain_high_path_is_bit_equal_to_the_unconverted_model(name, autocast):
    plain = nn.Sequential(nn.Linear(24, 40), nn.GELU(), nn.Linear(40, 24, bias=False))
    model = copy.deepcopy(plain)
    convert_(model, name)
    for module in (model[0], model[2]):
        module.switch.planned = True
    results = []
    for m in (plain, model):
        x = torch.linspace(-2, 2, 4 * 5 * 24).reshape(4, 5, 24).requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            y = m(x)
        y.float().square().sum().backward()
        results.append([y.detach(), x.grad, *(p.grad for p in m.parameters())])
    assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("name", RECIPES)
def test_the_low_path_under_autocast_casts_like_a_linear(name):
    module, plain, x, g = setup(name)
    half = copy.deepcopy(plain).bfloat16()
    converted = nn.Sequential(half)
    convert_(converted, name)
    expected = run(half, x.bfloat16(), g.bfloat16())
    x = x.clone().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        y = module(x)
        y.backward(g.bfloat16())  # a backward inside autocast must not cast a second time
    assert y.dtype == torch.bfloat16
    assert torch.equal(y, expected["output"])
    assert x.grad.dtype == module.weight.grad.dtype == module.bias.grad.dtype == torch.float32
    assert torch.equal(x.grad, expected["grad_input"].float())
    assert torch.equal(module.weight.grad, expected["grad_weight"].float())
    assert torch.equal(module.bias.grad, expected["bias"].float())


@pytest.mark.parametrize("name", RECIPES)
def test_a_backward_inside_autocast_repeats_an_fp32_forward_in_fp32(name):
    results = []
    for inside in (False, True):
        torch.manual_seed(0)
        module, _, x, g = setup(name)
        x.requires_grad_()
        y = module(x)
        with torch.autocast("cpu", torch.bfloat16, enabled=inside):
            y.backward(g)
        results.append((x.grad, module.weight.grad, module.bias.grad))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_roles_that_share_a_cast_but_not_a_rotation_do_not_share_the_operand():
    cast = Cast("e2m1", (1, 16))
    path = Path("mixed", output=Gemm(cast, cast), grad_weight=Gemm(None, cast, hadamard=16))
    results = []
    for low in (path, path.only("grad_weight")):
        torch.manual_seed(0)
        module, _, x, g = setup(Recipe(low, Path.plain()))
        results.append(run(module, x, g)["grad_weight"])
    assert torch.equal(*results)


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("name", RECIPES)
def test_one_role_alone_is_quantized_exactly_there(name, role):
    recipe = Recipe.named(name)
    module, plain, x, g = setup(recipe.only(role))
    whole = nn.Sequential(copy.deepcopy(plain))
    convert_(whole, recipe)
    got, reference, full = run(module, x, g), run(plain, x, g), run(whole[0], x, g)
    for other in ROLES:
        if other != role or getattr(recipe.low, role) is None:
            assert torch.equal(got[other], reference[other]), other
    if getattr(recipe.low, role) is not None:
        assert not torch.equal(got[role], reference[role])
        if not recipe.low.chained:  # Quartet's backward starts from the forward's quantized operands
            assert torch.equal(got[role], full[role])


def test_recipes_say_what_they_are_and_reject_what_they_are_not():
    assert Recipe.named("fp8") == RECIPES["fp8"]
    assert RECIPES["fp6"].short_str() == "fp6: low simulated-e3m2, high fp8-hybrid"
    assert Path.plain().is_plain
    assert Recipe.named("fp8").only("grad_weight", "output").low.name == "fp8-hybrid[output,grad_weight]"
    with pytest.raises(TrimtabError, match=r"saved4, fp8, .*did you mean 'fp8_block'"):
        Recipe.named("fp8-blck")
    with pytest.raises(TrimtabError, match="takes no options, got scope"):
        Recipe.named("fp8", scope="saved")
    with pytest.raises(TrimtabError, match="saved, forward"):
        Recipe.named("saved4", scope="back")
    with pytest.raises(TrimtabError, match="output, grad_input, grad_weight"):
        Path.plain().only("fprop")
    with pytest.raises(TrimtabError, match=r"Path\.plain"):
        Recipe("fp8", None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Cast("e1m1"), "fmt must be one of"),
        (lambda: Cast("e2m1", scale="mean"), "scale must be"),
        (lambda: Cast("e2m1", "token", delayed=True), 'group="tensor"'),
        (lambda: Cast("e2m1", "tensor", delayed=True, history=0), "at least 1"),
        (lambda: Cast("e2m1", range_factor=0), "range_factor"),
        (lambda: Gemm(hadamard=12), "power of two"),
        (lambda: Gemm(signs="random"), "signs must be"),
        (lambda: Gemm(Cast("e4m3", "tensor", delayed=True), hadamard=16), "unrotated"),
        (lambda: Gemm(result=Cast("e4m3", "tensor", delayed=True)), "no history"),
    ],
)
def test_impossible_paths_are_refused_where_they_are_written(build, message):
    with pytest.raises(TrimtabError, match=message):
        build()
