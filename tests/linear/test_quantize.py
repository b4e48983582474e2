# SPDX-License-Identifier: Apache-2.0
"""fake_quant against three oracles: torch's own FP8 casts, an enumeration of the small grids, and the formulas."""

import itertools
import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trimtab.errors import TrimtabError
from trimtab.linear import FORMATS, affine_quant, fake_quant
from trimtab.linear.quantize import group_amax

SMALL = ("e2m1", "e3m2", "e2m3", "int4")
FP8 = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


def grid(name: str) -> list[float]:
    """Every non-negative value of a format, from its bit patterns; even positions have an even mantissa."""
    fmt = FORMATS[name]
    if fmt.is_integer:
        return [float(i) for i in range(int(fmt.max) + 1)]
    bias = 2 ** (fmt.exponent_bits - 1) - 1
    values = []
    for e, m in itertools.product(range(2**fmt.exponent_bits), range(2**fmt.mantissa_bits)):
        fraction = m / 2**fmt.mantissa_bits
        values.append(2.0 ** (1 - bias) * fraction if e == 0 else 2.0 ** (e - bias) * (1 + fraction))
    return [v for v in values if v <= fmt.max]


def nearest_even(y: float, values: list[float]) -> float:
    """Nearest value of the grid in exact arithmetic; a tie goes to the even code."""
    exact = Fraction(abs(y))
    best = min(range(len(values)), key=lambda i: (abs(Fraction(values[i]) - exact), i % 2))
    return math.copysign(values[best], y)


def snr_db(reference: torch.Tensor, x: torch.Tensor) -> float:
    noise = (reference.double() - x.double()).square().sum()
    return float(10 * torch.log10(reference.double().square().sum() / noise))


@pytest.mark.parametrize("name", SMALL)
def test_grids_have_the_published_maximum_and_smallest_values(name):
    fmt, values = FORMATS[name], grid(name)
    assert values[-1] == fmt.max
    assert values[1] == fmt.min_subnormal
    assert values == sorted(values)


def test_e2m1_grid_and_its_midpoints_round_to_even():
    assert grid("e2m1") == [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    x = torch.tensor([6.0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    assert fake_quant(x, "e2m1").tolist() == [6, 0, 1, 1, 2, 2, 4, 4]
    assert fake_quant(-x, "e2m1").tolist() == [-6, -0.0, -1, -1, -2, -2, -4, -4]


@pytest.mark.parametrize("name", SMALL)
def test_small_formats_equal_the_enumerated_grid(name):
    fmt, values = FORMATS[name], grid(name)
    midpoints = [(a + b) / 2 for a, b in itertools.pairwise(values)]
    near = [math.nextafter(m, s) for m in midpoints for s in (0, 100)]
    random = (torch.rand(2000, dtype=torch.float64) * fmt.max).tolist()
    points = torch.tensor([fmt.max, *values, *midpoints, *near, *random], dtype=torch.float32)
    points = torch.cat((points, -points))
    expected = [nearest_even(v, values) for v in points.tolist()]
    assert fake_quant(points, name).tolist() == expected  # amax is the maximum, so the scale is 1


@pytest.mark.parametrize("name", FP8)
def test_fp8_is_bit_equal_to_torchs_cast_at_scale_one(name):
    fmt, dtype = FORMATS[name], FP8[name]
    codes = torch.arange(256, dtype=torch.uint8).view(dtype).float()
    codes = codes[codes.isfinite()]
    positive = codes[codes >= 0].sort().values
    midpoints = (positive[1:].double() + positive[:-1].double()).div(2).float()
    spread = torch.randn(20_000) * torch.exp(torch.randn(20_000) * 4)
    x = torch.cat((codes, midpoints, -midpoints, midpoints.nextafter(torch.tensor(0.0)), spread))
    x = torch.cat((x.clamp(-fmt.max, fmt.max), torch.tensor([fmt.max])))
    assert torch.equal(fake_quant(x, name), x.to(dtype).float())


@pytest.mark.parametrize("name", FP8)
@pytest.mark.parametrize("group", ["tensor", "token"])
def test_fp8_is_bit_equal_to_torchs_cast_on_scaled_data(name, group):
    fmt, x = FORMATS[name], torch.randn(64, 130) * torch.exp(3 * torch.randn(64, 1))
    amax = x.abs().amax() if group == "tensor" else x.abs().amax(-1, keepdim=True)
    scale = amax / torch.tensor(fmt.max)
    expected = (x / scale).clamp(-fmt.max, fmt.max).to(FP8[name]).float() * scale
    assert torch.equal(fake_quant(x, name, group=group), expected)


@pytest.mark.parametrize("name", FORMATS)
def test_pow2_scale_follows_the_formula(name):
    fmt, x = FORMATS[name], torch.randn(200, 32) * torch.exp2(torch.randint(-30, 30, (200, 1)))
    scale = torch.exp2(torch.ceil(torch.log2(x.abs().amax(-1, keepdim=True).double() / fmt.max))).float()
    exact = torch.cat((x / scale, torch.full((200, 1), fmt.max)), dim=-1)  # amax at the maximum: scale 1
    expected = fake_quant(exact, name)[:, :-1] * scale
    assert torch.equal(fake_quant(x, name, pow2_scale=True), expected)


def test_pow2_scale_keeps_an_exact_power():
    x = torch.tensor([448.0 * 2**-20, 1.7 * 2**-20])
    assert torch.equal(fake_quant(x, "e4m3", pow2_scale=True), fake_quant(x * 2**20, "e4m3") / 2**20)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("group", ["tensor", "token", (1, 4), (2, 3)])
def test_a_group_of_zeros_returns_zeros(name, group):
    assert torch.equal(fake_quant(torch.zeros(4, 8), name, group=group), torch.zeros(4, 8))


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("pow2_scale", [False, True])
@pytest.mark.parametrize("name", FORMATS)
def test_a_non_finite_value_turns_its_whole_group_into_nan_and_no_other(name, pow2_scale, bad):
    x = torch.randn(4, 8)
    x[1, 5] = bad
    out = fake_quant(x, name, group=(2, 4), pow2_scale=pow2_scale)
    expected = torch.zeros(4, 8, dtype=torch.bool)
    expected[0:2, 4:8] = True
    assert torch.equal(out.isnan(), expected)


@pytest.mark.parametrize("pow2_scale", [False, True])
@pytest.mark.parametrize("name", FORMATS)
def test_subnormal_groups_survive(name, pow2_scale):
    smallest = 2.0**-149
    counts = torch.arange(1, 4000, 7, dtype=torch.float64)
    for top in (1, 5, 100, 3000, 10**6, 10**8):
        x = (torch.cat((counts.clamp(max=top), torch.tensor([float(top)]))) * smallest).float()
        out = fake_quant(x, name, pow2_scale=pow2_scale)
        assert out.isfinite().all()
        # Half a step of the grid (at most half of 2/8 of the value's power of two) and half a subnormal of the result.
        assert (out[-1] - x[-1]).abs() <= 0.26 * x[-1] + smallest


@pytest.mark.parametrize("name", FORMATS)
def test_tiny_gradients_are_not_flushed(name):
    x = torch.randn(16, 64)
    tiny = fake_quant(x * 2.0**-100, name)
    assert snr_db(x * 2.0**-100, tiny) == pytest.approx(snr_db(x, fake_quant(x, name)), abs=0.01)
    assert (fake_quant(torch.tensor([1e-30, -1e-30]), name) != 0).all()


@pytest.mark.parametrize("shape", [(7,), (5, 9), (2, 3, 10), (2, 2, 5, 6)])
@pytest.mark.parametrize("block", [(1, 4), (4, 1), (2, 3), (128, 128)])
def test_blocks_may_be_short_at_the_end(shape, block):
    x = torch.randn(shape)
    rows = x.reshape(-1, *x.shape[-2:]) if x.dim() > 1 else x.reshape(1, 1, -1)
    expected = torch.empty_like(rows)
    r, c = block
    for b, i, j in itertools.product(range(len(rows)), range(0, rows.shape[1], r), range(0, rows.shape[2], c)):
        part = rows[b, i : i + r, j : j + c]
        expected[b, i : i + r, j : j + c] = fake_quant(part, "e4m3", group="tensor")
    assert torch.equal(fake_quant(x, "e4m3", group=block), expected.reshape(shape))


@pytest.mark.parametrize("shape", [(0,), (0, 8), (3, 0), (2, 0, 4)])
@pytest.mark.parametrize("group", ["tensor", "token", (2, 3)])
def test_empty_tensors_pass(shape, group):
    assert fake_quant(torch.zeros(shape), "e2m1", group=group).shape == shape
    assert group_amax(torch.zeros(shape), group).sum() == 0


def test_scalars_and_row_alias_and_dtypes():
    assert fake_quant(torch.tensor(3.3), "e4m3").shape == ()
    w = torch.randn(4, 6)
    assert torch.equal(fake_quant(w, "e3m2", group="row"), fake_quant(w, "e3m2", group="token"))
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        out = fake_quant(w.to(dtype), "e3m2")
        assert out.dtype == dtype
        assert torch.equal(out, fake_quant(w.to(dtype).float(), "e3m2").to(dtype))


def test_fake_quant_leaves_its_input_alone_and_works_on_views():
    x = torch.randn(6, 8).t()
    before = x.clone()
    assert torch.equal(fake_quant(x, "e2m1"), fake_quant(before.contiguous(), "e2m1"))
    assert torch.equal(x, before)


def test_the_gradient_is_straight_through():
    x = torch.randn(3, 5, requires_grad=True)
    g = torch.randn(3, 5)
    fake_quant(x, "e2m1").backward(g)
    assert torch.equal(x.grad, g)


def test_a_given_amax_saturates_finite_values_and_shows_non_finite_ones():
    x = torch.tensor([1.0, -3.0, 1e38, -math.inf, math.nan, 0.25])
    out = fake_quant(x, "e4m3", group="tensor", amax=torch.tensor(1e-3))
    limit = 448.0 * (torch.tensor(1e-3) / 448.0)
    assert torch.equal(out.isnan(), torch.tensor([False, False, False, True, True, False]))
    assert torch.equal(out[[0, 1, 2, 5]], torch.stack((limit, -limit, limit, limit)))


@pytest.mark.parametrize("group", ["tensor", "token", (2, 3)])
def test_giving_the_measured_amax_changes_nothing(group):
    x = torch.randn(3, 4, 7)
    assert torch.equal(
        fake_quant(x, "e2m1", group=group, amax=group_amax(x, group)), fake_quant(x, "e2m1", group=group)
    )


def test_a_given_amax_may_be_one_number_for_all_groups_but_not_a_wrong_shape():
    x, one = torch.randn(4, 6), torch.tensor(2.0)
    for group, shape in (("token", (4, 1)), ((2, 3), (2, 2))):
        expected = fake_quant(x, "e2m1", group=group, amax=torch.full(shape, 2.0))
        assert torch.equal(fake_quant(x, "e2m1", group=group, amax=one), expected)
        with pytest.raises(TrimtabError, match="amax must be one number or of shape"):
            fake_quant(x, "e2m1", group=group, amax=torch.ones(4))


def test_a_given_amax_of_zero_means_scale_one():
    x = torch.tensor([5.1, -0.3, 100.0])
    assert fake_quant(x, "e2m1", amax=torch.zeros(1)).tolist() == [6.0, -0.5, 6.0]


# Not up to the very top of FP32: there, rounding up to the next grid value may overflow.
values = st.floats(-(2.0**126), 2.0**126, width=32, allow_subnormal=True)


@settings(max_examples=60, deadline=None)
@given(st.lists(values, min_size=1, max_size=12), st.sampled_from(sorted(FORMATS)), st.booleans())
def test_quantization_is_odd(xs, name, pow2_scale):
    x = torch.tensor(xs)
    assert torch.equal(fake_quant(-x, name, pow2_scale=pow2_scale), -fake_quant(x, name, pow2_scale=pow2_scale))


@settings(max_examples=60, deadline=None)
@given(st.lists(values, min_size=1, max_size=12), st.sampled_from(sorted(FORMATS)))
def test_quantizing_twice_with_the_same_amax_is_quantizing_once(xs, name):
    x = torch.tensor(xs)
    amax = group_amax(x)
    once = fake_quant(x, name, amax=amax)
    torch.testing.assert_close(fake_quant(once, name, amax=amax), once, rtol=3e-7, atol=1e-44)


@settings(max_examples=60, deadline=None)
@given(st.lists(values, min_size=1, max_size=12), st.sampled_from(sorted(FORMATS)), st.booleans())
def test_the_error_is_at_most_half_a_step(xs, name, pow2_scale):
    x, fmt = torch.tensor(xs), FORMATS[name]
    out = fake_quant(x, name, pow2_scale=pow2_scale)
    scale = x.abs().max().double() / fmt.max
    scale = scale * (2 if pow2_scale or scale < 2.0**-126 else 1)  # a scale below FP32's normals is a power of two too
    step = torch.maximum(x.abs().double(), scale * fmt.min_normal) * 2.0**-fmt.mantissa_bits
    assert ((out.double() - x.double()).abs() <= step / 2 * (1 + 1e-5) + 2.0**-148).all()


@pytest.mark.parametrize("name", FORMATS)
def test_stochastic_rounding_is_unbiased_and_hits_only_the_neighbours(name):
    x = torch.cat((torch.rand(20) * FORMATS[name].max, torch.tensor([FORMATS[name].max])))
    x = torch.cat((x, -x))
    draws = fake_quant(x.repeat(4000, 1), name, rounding="stochastic", generator=torch.Generator().manual_seed(1))
    gap = draws.max(0).values - draws.min(0).values
    sigma = (gap / 2 / math.sqrt(4000)).clamp(min=1e-9)
    assert ((draws.mean(0) - x).abs() < 5 * sigma + 1e-4 * x.abs()).all()
    assert max(len(column.unique()) for column in draws.t()) <= 2


def test_stochastic_rounding_repeats_with_its_generator_and_keeps_grid_points_and_nan():
    x = torch.randn(50, 32)
    a, b, c = (
        fake_quant(x, "e2m1", rounding="stochastic", generator=torch.Generator().manual_seed(seed))
        for seed in (3, 3, 4)
    )
    assert torch.equal(a, b)
    assert not torch.equal(a, c)
    points = torch.tensor(grid("e2m1")).repeat(1000, 1)
    assert torch.equal(fake_quant(points, "e2m1", rounding="stochastic"), points)
    integers = torch.arange(128.0).repeat(20_000, 1)  # large codes, where code + noise would round up in FP32
    assert torch.equal(fake_quant(integers, "int8", rounding="stochastic"), integers)
    x[0, 0] = math.nan
    assert fake_quant(x, "e2m1", rounding="stochastic")[0].isnan().all()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"fmt": "e9m9"}, "e2m1, e3m2, e2m3, e4m3, e5m2, int8, int4"),
        ({"fmt": "e2m1", "group": "diagonal"}, '"tensor", "token"'),
        ({"fmt": "e2m1", "group": (0, 4)}, "two positive ints"),
        ({"fmt": "e2m1", "rounding": "up"}, '"nearest" or "stochastic"'),
    ],
)
def test_bad_arguments_list_the_valid_ones(arguments, message):
    with pytest.raises(TrimtabError, match=message):
        fake_quant(torch.ones(2, 2), **arguments)


def test_integer_tensors_are_refused():
    with pytest.raises(TrimtabError, match="floating-point"):
        fake_quant(torch.ones(2, dtype=torch.int64), "int8")


@pytest.mark.parametrize("bits", range(2, 9))
def test_affine_quant_values_and_gradients_follow_the_hand_derivation(bits):
    x = (torch.randn(6, 40, dtype=torch.float64) * 3).requires_grad_()
    scale = (torch.rand(6, 1, dtype=torch.float64) * 4 / 2**bits + 0.05).requires_grad_()
    zero = (torch.rand(6, 1, dtype=torch.float64) * 2**bits).requires_grad_()
    g = torch.randn(6, 40, dtype=torch.float64)
    out = affine_quant(x, scale, zero, bits)
    out.backward(g)
    with torch.no_grad():
        level = torch.round(x / scale + zero)
        q = level.clamp(0, 2**bits - 1)
        inside = (level == q).double()
        assert inside.mean() > 0
        assert torch.equal(out, (q - zero) * scale)
        torch.testing.assert_close(x.grad, g * inside)
        torch.testing.assert_close(scale.grad, (g * (q - zero - inside * x / scale)).sum(1, keepdim=True))
        torch.testing.assert_close(zero.grad, -(g * (1 - inside) * scale).sum(1, keepdim=True))


@pytest.mark.parametrize("bits", [1, 9, 2.5])
def test_affine_quant_refuses_other_widths(bits):
    with pytest.raises(TrimtabError, match="from 2 to 8"):
        affine_quant(torch.ones(2), torch.ones(1), torch.zeros(1), bits)
