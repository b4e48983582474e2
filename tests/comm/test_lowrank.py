# SPDX-License-Identifier: Apache-2.0
"""The functions of one matrix: orientation, basis, choice of columns, contraction, bytes."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trimtab.comm.lowrank import (
    Size,
    compress,
    low_rank_numbers,
    mean_bytes,
    mix,
    orient,
    pays,
    probes,
    refresh,
    residual,
    scores,
    select,
    size_of,
    unorient,
)


def spectrum(a, b, decay=0.9, dtype=torch.float64):
    """A matrix with singular values 1, decay, decay^2, ..."""
    u, _ = torch.linalg.qr(torch.randn(a, a, dtype=dtype))
    v, _ = torch.linalg.qr(torch.randn(b, a, dtype=dtype))
    return u * decay ** torch.arange(a) @ v.T


# Orientation


@pytest.mark.parametrize("shape", [(3, 5), (5, 3), (4, 4), (8, 3, 3, 3), (40, 2, 3), (1, 6), (6, 1)])
def test_orientation_is_wide_and_comes_undone(shape):
    tensor = torch.randn(shape)
    matrix = orient(tensor)
    assert matrix.shape == tuple(sorted((shape[0], math.prod(shape[1:]))))
    assert torch.equal(unorient(matrix, tensor.shape), tensor)


def test_orientation_does_not_depend_on_the_memory_format():
    tensor = torch.randn(8, 3, 3, 3)
    assert torch.equal(orient(tensor.to(memory_format=torch.channels_last)), orient(tensor))


@pytest.mark.parametrize(
    ("rank", "resolved"), [(4, 4), (99, 10), (0.5, 5), (0.25, 2), (0.3, 3), (1e-9, 1), (1.0, 10), (1, 1)]
)
def test_a_rank_is_a_count_or_a_share_of_the_shorter_side(rank, resolved):
    assert size_of(torch.Size((20, 10)), rank) == (10, 20, resolved)


# The basis


@pytest.mark.parametrize("scale", [1.0, 1e-30, 1e30])
@pytest.mark.parametrize("kind", ["full", "rank one", "zero"])
def test_the_basis_is_complete_and_orthonormal_whatever_it_is_of(kind, scale):
    matrix = torch.randn(12, 30)
    matrix = {"full": matrix, "rank one": matrix[:, :1] @ matrix[:1], "zero": 0 * matrix}[kind] * scale
    basis = refresh(matrix)
    torch.testing.assert_close(basis.T @ basis, torch.eye(12), atol=2e-6, rtol=0)


def test_its_columns_are_the_left_singular_vectors_the_strongest_first():
    matrix = spectrum(10, 20)
    u = torch.linalg.svd(matrix)[0]
    torch.testing.assert_close((u.T @ refresh(matrix)).abs(), torch.eye(10).double(), atol=1e-10, rtol=0)


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_a_matrix_that_is_not_finite_still_gives_a_basis(bad):
    matrix = torch.randn(6, 9)
    matrix[2, 3] = bad
    basis = refresh(matrix)
    torch.testing.assert_close(basis.T @ basis, torch.eye(6), atol=1e-6, rtol=0)


# The choice


def test_equal_scores_go_to_the_lower_index():
    assert select(torch.tensor([[1.0, -2.0, 2.0, 0.0, 2.0, 1.0]]), 4).tolist() == [1, 2, 4, 0]
    assert select(torch.zeros(3, 1000), 5).tolist() == [0, 1, 2, 3, 4]


def test_probes_add_up_as_squares():
    assert select(torch.tensor([[3.0, 0.0, 2.0], [-3.0, 4.0, 2.0]]), 2).tolist() == [0, 1]


def test_the_squared_score_estimates_the_energy_of_each_column():
    matrix, basis = spectrum(6, 12, 0.5), refresh(spectrum(6, 12))
    squares = torch.stack([scores(matrix, basis, probes(0, step, 0, 1, matrix))[0] ** 2 for step in range(4000)])
    energy = (basis.T @ matrix).square().sum(1)
    torch.testing.assert_close(squares.mean(0), energy, rtol=0.15, atol=0)


def test_scores_are_linear_so_their_mean_is_that_of_the_mean_gradient():
    matrices, basis = [torch.randn(8, 20).double() for _ in range(3)], refresh(torch.randn(8, 20).double())
    mean = sum(matrices) / 3
    each = [scores(m, basis, probes(1, 2, 3, 4, m)) for m in matrices]
    torch.testing.assert_close(sum(each) / 3, scores(mean, basis, probes(1, 2, 3, 4, mean)))


def test_the_greedy_choice_is_of_the_mean_and_not_of_the_ranks():
    """Each rank has a large part which the other cancels: only what they share is worth sending."""
    basis, shared, noise = torch.eye(4), torch.zeros(4, 50), torch.zeros(4, 50)
    shared[3], noise[0] = 1.0, 20.0
    matrices = [shared + noise, shared - noise]
    hits = 0
    for step in range(50):
        each = [scores(m, basis, probes(0, step, 0, 1, m)) for m in matrices]
        hits += select(sum(each) / 2, 1).item() == 3
    assert hits == 50


def test_probes_depend_on_seed_step_and_matrix_and_leave_the_global_generator_alone():
    like, before = torch.zeros(3, 4), torch.get_rng_state()
    draw = [next(probes(*key, 1, like)) for key in ((0, 1, 2), (0, 1, 2), (1, 1, 2), (0, 2, 2), (0, 1, 3), (2, 1, 0))]
    assert torch.equal(draw[0], draw[1])
    assert len({tuple(one.flatten().tolist()) for one in draw}) == 5
    first, second = probes(0, 1, 2, 2, like)
    assert not torch.equal(first, second)
    assert torch.equal(torch.get_rng_state(), before)


def test_seeds_do_not_collide_in_the_32_bits_that_torch_uses_on_a_cpu():
    low = {mix(0, step, index) & 0xFFFFFFFF for step in range(300) for index in range(100)}
    assert len(low) > 29_990


# The message


@pytest.mark.parametrize(("a", "b", "r"), [(24, 40, 3), (16, 16, 1), (10, 30, 9)])
@pytest.mark.parametrize("decay", [1.0, 0.8])
def test_it_contracts_at_least_as_well_as_random_columns(a, b, r, decay):
    """The basis is of another matrix, as it is in the middle of a period."""
    matrix, basis = spectrum(a, b, decay), refresh(spectrum(a, b))
    left = []
    for step in range(400):
        chosen = select(scores(matrix, basis, probes(0, step, 0, 1, matrix)), r)
        left.append(residual(matrix, *compress(matrix, basis, chosen)).square().sum())
    bound = (1 - r / a) * matrix.square().sum()  # reached where all columns are equal
    assert torch.stack(left).mean() <= bound * (1 + 1e-9 if decay == 1 else 0.97)


def test_more_probes_choose_better():
    matrix, basis = spectrum(32, 64, 0.8), refresh(spectrum(32, 64))
    rows = (basis.T @ matrix).square().sum(1)
    best = rows.sort(descending=True).values[:4].sum()

    def captured(num):
        chosen = [select(scores(matrix, basis, probes(0, t, 0, num, matrix)), 4) for t in range(200)]
        return float(torch.stack([rows[j].sum() for j in chosen]).mean() / best)

    few, many = captured(1), captured(16)
    assert few < many - 0.1
    assert many > 0.85


def test_message_and_residual_make_up_the_matrix():
    matrix, basis = torch.randn(12, 30), refresh(torch.randn(12, 30))
    p, r = compress(matrix, basis, torch.tensor([0, 5, 7]))
    assert (p.shape, r.shape) == ((12, 3), (3, 30))
    rounded = r.bfloat16().float()
    torch.testing.assert_close(p @ rounded + residual(matrix, p, rounded), matrix, rtol=0, atol=1e-6)


# Bytes


def test_a_low_rank_step_sends_scores_and_factor():
    assert low_rank_numbers(Size(96, 256, 4), 1) == 1120
    assert low_rank_numbers(Size(96, 256, 4), 8) == 8 * 96 + 4 * 256


def llama(hidden, ffn, layers):
    """Sides of the matrices in the blocks of a LLaMA: four of attention, three of the MLP."""
    return [*[(hidden, hidden)] * 4, *[(hidden, ffn)] * 3] * layers


@pytest.mark.parametrize(
    ("shape", "rank", "alone", "whole", "rest"),
    [
        ((512, 1376, 8), 32, 14.0, 1.68, 32_776_704),
        ((512, 1376, 8), 128, 3.9, 1.48, 32_776_704),
        ((768, 2048, 12), 32, 19.9, 2.51, 49_171_200),
        ((768, 2048, 12), 256, 2.9, 1.72, 49_171_200),
        ((1024, 2736, 24), 32, 25.3, 4.75, 65_586_176),
        ((2048, 5461, 24), 32, 42.1, 8.38, 131_172_352),
        ((4096, 11008, 32), 32, 63.2, 18.5, 262_410_240),
        ((4096, 11008, 32), 256, 14.2, 9.4, 262_410_240),
    ],
)
def test_the_ratios_of_llama_models_are_those_of_the_specification(shape, rank, alone, whole, rest):
    sides = llama(*shape)
    dense = 4 * sum(a * b for a, b in sides)
    sent = sum(mean_bytes(Size(a, b, rank), 200, 1, 4) for a, b in sides)
    assert dense / sent == pytest.approx(alone, abs=0.051)
    assert (dense + 4 * rest) / (sent + 4 * rest) == pytest.approx(whole, rel=0.005)


@given(st.integers(1, 300), st.integers(0, 900), st.integers(1, 64), st.integers(1, 300), st.integers(1, 8))
def test_the_gate_is_the_specified_inequality(a, more, r, every, q):
    b, r = a + more, min(r, a)
    numbers = a * b / every + (1 - 1 / every) * (q * a + r * b) + a * a / every
    if not math.isclose(numbers, a * b / 2):
        assert pays(Size(a, b, r), every, q, 4) == (numbers <= a * b / 2)


def test_half_as_wide_messages_pay_twice_for_the_basis():
    size = Size(100, 100, 1)
    assert mean_bytes(size, 10, 1, 4) == 4 * (10_000 + 9 * 200 + 10_000) / 10
    assert mean_bytes(size, 10, 1, 2) == 2 * (10_000 + 9 * 200 + 20_000) / 10
    assert mean_bytes(size, 10, 1, 8) == 8 * (10_000 + 9 * 200 + 10_000) / 10
