# SPDX-License-Identifier: Apache-2.0
"""The quantizers of the 4-bit check against plain loops in float64, and the properties that every input must have."""

import math

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from trimtab.errors import TrimtabError
from trimtab.retrain.rounding import mix, quantize_activation, quantize_kv, quantize_weight

NUMBERS = st.floats(-1e4, 1e4, width=32, allow_subnormal=False)
BITS = st.integers(2, 8)


def matrices(columns: int = 8):
    return arrays(np.float32, st.tuples(st.integers(1, 4), st.integers(1, columns)), elements=NUMBERS)


def on_grid(value: float, scale: float, zero: int, low: int, high: int) -> float:
    """One number on one grid; Python rounds half to even."""
    return (min(max(round(value / scale) + zero, low), high) - zero) * scale


def reference_weight(w: np.ndarray, bits: int, clip_search: bool) -> np.ndarray:
    """Every factor of the clip search tried on every row, one number after the other."""
    rows = []
    for row in w.astype(np.float64):
        amax = max(max(abs(value) for value in row), 1e-5)
        best, least = None, math.inf
        for percent in range(100, 20, -1) if clip_search else (100,):
            scale = amax * percent / 100 / (2 ** (bits - 1) - 1)
            rounded = [on_grid(value, scale, 0, -(2 ** (bits - 1)), 2 ** (bits - 1) - 1) for value in row]
            error = sum(abs(a - b) ** 2.4 for a, b in zip(rounded, row, strict=True))
            if error < least:
                best, least = rounded, error
        rows.append(best)
    return np.array(rows)


def reference_token(token: np.ndarray, bits: int, with_zero: bool) -> list[float]:
    low, high = float(token.min()), float(token.max())
    if with_zero:
        low, high = min(low, 0.0), max(high, 0.0)
    if low == high == 0.0:
        low, high = -1.0, 1.0
    scale = (high - low) / (2**bits - 1)
    return [on_grid(float(value), scale, round(-low / scale), 0, 2**bits - 1) for value in token]


def step_of(x: np.ndarray, bits: int) -> float:
    """The step of a token's own grid, zero included."""
    return (max(float(x.max()), 0.0) - min(float(x.min()), 0.0)) / (2**bits - 1)


def heavy(rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    """Rows with a few large entries, for which clipping pays."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, columns, generator=generator, dtype=torch.float64)
    x[:, ::17] *= 6
    return x


# Weights.


@pytest.mark.parametrize("clip_search", [True, False])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_a_weight_is_what_a_plain_search_finds(bits: int, clip_search: bool) -> None:
    w = heavy(6, 40)
    ours = quantize_weight(w, bits, clip_search=clip_search)
    np.testing.assert_allclose(ours.numpy(), reference_weight(w.numpy(), bits, clip_search), rtol=1e-12)


def test_the_clip_search_chooses_each_rows_own_factor() -> None:
    w = heavy(32, 64)
    ours, top = quantize_weight(w, 4), 7
    amax = w.abs().amax(dim=1)
    factors = set()
    for row, peak in zip(ours, amax, strict=True):
        steps = torch.unique(row).diff().min()  # neighbouring levels of a row of 64 are one step apart
        factors.add(round(float(100 * steps * top / peak)))
    assert len(factors) > 5
    assert all(21 <= factor <= 100 for factor in factors)


def test_the_clip_search_goes_down_to_021_and_no_further() -> None:
    w = torch.full((1, 20_000), 0.2, dtype=torch.float64)
    w[0, 0] = 1.0  # so many small weights are worth the loss of the large one: 0.20 would hold them exactly
    assert torch.unique(quantize_weight(w, 2)).tolist() == [pytest.approx(0.21)]


def test_a_long_weight_is_searched_in_parts_with_the_same_result(monkeypatch: pytest.MonkeyPatch) -> None:
    w = heavy(9, 20).float()
    whole = quantize_weight(w, 4)
    monkeypatch.setattr("trimtab.retrain.rounding.CHUNK", 41)
    assert torch.equal(quantize_weight(w, 4), whole)


def test_the_floor_keeps_tiny_and_zero_channels_finite() -> None:
    w = torch.tensor([[0.0, 0.0], [1e-12, -1e-12], [1.0, -0.5]])
    out = quantize_weight(w, 4)
    assert torch.equal(out[:2], torch.zeros(2, 2))  # 1e-12 is far below the smallest step, 0.21 * 1e-5 / 7
    assert out[2, 0] != 0


@settings(max_examples=60)
@given(matrices(), BITS)
def test_clip_search_never_increases_the_error(w: np.ndarray, bits: int) -> None:
    weight = torch.from_numpy(w).double()
    errors = [(quantize_weight(weight, bits, clip_search=c) - weight).abs().pow(2.4).sum(dim=1) for c in (True, False)]
    assert (errors[0] <= errors[1] * (1 + 1e-12)).all()


@settings(max_examples=100)
@given(matrices(), BITS, st.booleans())
def test_a_weight_has_few_levels(w: np.ndarray, bits: int, clip_search: bool) -> None:
    for row in quantize_weight(torch.from_numpy(w), bits, clip_search=clip_search):
        assert len(torch.unique(row)) <= 2**bits


@settings(max_examples=100)
@given(matrices(), BITS)
def test_an_unclipped_weight_is_off_by_half_a_step_and_stays_when_rounded_again(w: np.ndarray, bits: int) -> None:
    weight = torch.from_numpy(w).double()
    step = weight.abs().amax(dim=1, keepdim=True).clamp(min=1e-5) / (2 ** (bits - 1) - 1)
    once = quantize_weight(weight, bits, clip_search=False)
    assert ((once - weight).abs() <= step / 2 * (1 + 1e-9)).all()
    torch.testing.assert_close(quantize_weight(once, bits, clip_search=False), once, rtol=1e-6, atol=1e-12)


# Activations.


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_an_activation_is_what_the_formula_says(bits: int) -> None:
    x = heavy(5, 24) + 0.3
    whole = quantize_activation(x.reshape(5, 1, 24), bits).reshape(5, 24)
    expected = [reference_token(token, bits, with_zero=True) for token in x.numpy()]
    np.testing.assert_allclose(whole.numpy(), expected, rtol=1e-12, atol=1e-12)
    grouped = quantize_activation(x, bits, group=8)
    parts = [reference_token(token, bits, with_zero=False) for token in x.numpy().reshape(15, 8)]
    np.testing.assert_allclose(grouped.numpy().reshape(15, 8), parts, rtol=1e-12, atol=1e-12)


def test_a_tokens_range_includes_zero_and_a_groups_does_not() -> None:
    x = torch.tensor([[1.0, 2.0, 3.0, 4.0]])
    torch.testing.assert_close(quantize_activation(x, 2), torch.tensor([[4.0, 8.0, 8.0, 12.0]]) / 3)  # steps of 4/3
    assert torch.equal(quantize_activation(x, 2, group=4), x)  # steps of 1 from 1 on
    assert torch.equal(quantize_activation(-x, 2, group=4), -x)


def test_groups_of_one_value_and_tokens_of_zeros_stay() -> None:
    x = torch.tensor([[0.0, 0.0, 3.7, 3.7, -2.2, -2.2]])
    torch.testing.assert_close(quantize_activation(x, 4, group=2), x, rtol=1e-6, atol=0)
    assert torch.equal(quantize_activation(torch.zeros(3, 5), 4), torch.zeros(3, 5))
    assert torch.equal(quantize_activation(torch.full((1, 2), 1e-45), 8), torch.zeros(1, 2))  # a step that underflows


@settings(max_examples=150)
@given(arrays(np.float32, st.integers(1, 12), elements=NUMBERS), BITS, st.booleans())
def test_an_activation_has_few_levels_within_half_a_step(x: np.ndarray, bits: int, grouped: bool) -> None:
    token = torch.from_numpy(x).double()
    group = len(x) if grouped else None
    out = quantize_activation(token, bits, group=group)
    span = float(x.max()) - float(x.min()) if grouped else step_of(x, bits) * (2**bits - 1)
    step = (span or abs(float(x[0]))) / (2**bits - 1)
    assert len(torch.unique(out)) <= 2**bits
    assert (out - token).abs().max() <= step / 2 * (1 + 1e-9) + 1e-9 * float(np.abs(x).max())
    if not grouped:
        assert (out[token == 0] == 0).all()  # zero is on the grid
        low = -min(float(x.min()), 0.0)
        assume(step == 0 or abs(low / step % 1 - 0.5) > 1e-6)  # at an exact tie of the zero point an end may be lost
        torch.testing.assert_close(quantize_activation(out, bits), out, rtol=1e-6, atol=1e-6 * step)


def test_the_gradient_goes_straight_through() -> None:
    x = torch.randn(3, 8, requires_grad=True)
    quantize_activation(x, 4).sum().backward()
    assert x.grad is not None
    assert (x.grad > 0.5).sum() >= 3 * 6  # the ends of a range may be clamped by less than half a step


# Keys and values, and the rotation.


def sylvester(size: int) -> np.ndarray:
    return np.ones((1, 1)) if size == 1 else np.kron(sylvester(size // 2), np.array([[1.0, 1.0], [1.0, -1.0]]))


@pytest.mark.parametrize("bits", [2, 4, 16])
def test_keys_are_rotated_and_rounded_and_values_rounded(bits: int) -> None:
    q, k, v = (torch.randn(2, heads, 3, 8, dtype=torch.float64) for heads in (4, 2, 2))
    rotated = k.numpy() @ sylvester(8) / math.sqrt(8)
    new_q, new_k, new_v = quantize_kv(q, k, v, bits)
    np.testing.assert_allclose(new_q, q.numpy() @ sylvester(8) / math.sqrt(8), atol=1e-12)
    for ours, plain in ((new_k, rotated), (new_v, v.numpy())):
        expected = plain if bits == 16 else [reference_token(t, bits, with_zero=False) for t in plain.reshape(-1, 8)]
        np.testing.assert_allclose(ours.reshape(-1, 8), np.reshape(expected, (-1, 8)), atol=1e-12)


def test_the_rotation_leaves_the_products_of_queries_and_keys() -> None:
    q, k, v = (torch.randn(2, 3, 5, 12, dtype=torch.float64) for _ in range(3))
    new_q, new_k, new_v = quantize_kv(q, k, v, 16)
    assert not torch.allclose(new_k, k)
    torch.testing.assert_close(new_q @ new_k.mT, q @ k.mT)
    assert torch.equal(new_v, v)
    assert torch.equal(quantize_kv(q, k, v, 16, hadamard=False)[1], k)


@pytest.mark.parametrize("width", [1, 2, 8, 64, 3, 12, 43, 172, 344])
def test_the_rotation_is_orthogonal_symmetric_and_spreads_every_entry(width: int) -> None:
    matrix = mix(torch.eye(width, dtype=torch.float64))
    torch.testing.assert_close(matrix @ matrix, torch.eye(width, dtype=torch.float64), rtol=0, atol=1e-12)
    torch.testing.assert_close(matrix, matrix.T, rtol=0, atol=1e-12)
    assert matrix.abs().max() <= math.sqrt(2 / width) + 1e-12 or width == 1
    if width & (width - 1) == 0:
        np.testing.assert_allclose(matrix, sylvester(width) / math.sqrt(width), atol=1e-12)


def test_a_key_with_an_outlier_gains_by_the_rotation() -> None:
    k = torch.randn(1, 1, 64, 32)
    k[..., 5] *= 40
    q = torch.randn(1, 1, 64, 32)
    plain, rotated = (quantize_kv(q, k, k, 4, hadamard=h) for h in (False, True))
    errors = [(a @ b.mT - q @ k.mT).norm() for a, b, _ in (plain, rotated)]
    assert errors[1] < 0.7 * errors[0]


# Types and bad input.


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_types_are_kept_and_computed_wide(dtype: torch.dtype) -> None:
    w = heavy(4, 32).to(dtype)
    for quantize in (quantize_weight, quantize_activation):
        out = quantize(w, 4)
        assert out.dtype == dtype
        wide = w.double() if dtype == torch.float64 else w.float()
        assert torch.equal(out, quantize(wide, 4).to(dtype))
    assert mix(w).dtype == dtype


def test_autocast_changes_nothing() -> None:
    x = torch.randn(5, 12)
    with torch.autocast("cpu", torch.bfloat16):
        under = mix(x), quantize_activation(x, 4, group=3), quantize_weight(x, 4)
    for a, b in zip(under, (mix(x), quantize_activation(x, 4, group=3), quantize_weight(x, 4)), strict=True):
        assert torch.equal(a, b)


def test_sixteen_bits_leave_everything() -> None:
    x = torch.randn(3, 4)
    assert torch.equal(quantize_weight(x, 16), x)
    assert quantize_activation(x, 16) is x


@pytest.mark.parametrize("shape", [(0, 4), (4, 0), (0, 0)])
def test_empty_input_stays_empty(shape: tuple[int, int]) -> None:
    x = torch.zeros(shape)
    assert quantize_weight(x, 4).shape == quantize_activation(x, 4).shape == mix(x).shape == shape


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_stays_visible(bad: float) -> None:
    x = torch.randn(2, 6)
    x[1, 2] = bad
    assert quantize_activation(x, 4)[1].isnan().all()
    assert quantize_activation(x, 4, group=3)[1, :3].isnan().all()
    assert quantize_activation(x, 4)[0].isfinite().all()
    assert quantize_weight(x, 4)[1].isnan().any()
    assert quantize_weight(x, 4)[0].isfinite().all()


@pytest.mark.parametrize("bits", [1, 9, 15, 17, 0, -4, True, 4.0, "4"])
def test_other_bits_are_refused(bits: object) -> None:
    for quantize in (quantize_weight, quantize_activation):
        with pytest.raises(TrimtabError, match="must be 2 to 8, or 16 to leave it as it is, got"):
            quantize(torch.ones(2, 2), bits)  # type: ignore[operator]


@pytest.mark.parametrize("group", [5, 0, -2])
def test_a_group_that_does_not_divide_is_refused(group: int) -> None:
    with pytest.raises(TrimtabError, match="must divide the 8 features"):
        quantize_activation(torch.ones(2, 8), 4, group=group)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_finds_the_same() -> None:
    w = heavy(64, 172).float()
    here, there = (quantize_activation(x, 4, group=43).cpu() for x in (w, w.cuda()))
    close = torch.isclose(here, there, rtol=1e-5, atol=1e-6)  # a GPU contracts the multiply and the add
    assert close.float().mean() > 0.99
    here, there = ((quantize_weight(x, 4).cpu() - w).abs().pow(2.4).sum(dim=1) for x in (w, w.cuda()))
    torch.testing.assert_close(here, there, rtol=1e-4, atol=0)
    torch.testing.assert_close(mix(w.cuda()).cpu(), mix(w), rtol=1e-4, atol=1e-5)
