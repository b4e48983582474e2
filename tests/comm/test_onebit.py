# SPDX-License-Identifier: Apache-2.0
"""The 1-bit mean: packing, layout and scales in one process; in two, three and four gloo processes the conservation
law, a dense simulation, equal bits on all ranks, bytes to the last one, and what is left alone."""

import math

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from ranks import in_ranks
from reference import onebit as reference

from trimtab.comm.onebit import Errors, Layout, onebit_mean, scales_of, sign_pack, sign_unpack
from trimtab.comm.traffic import traffic
from trimtab.errors import TrimtabError

SIZES = (100, 7, 33, 1, 0, 192, 40_000)
STEPS = 5
PAPER_SIZES = (100_000, 211_200, 7, 40_960, 1)
ROWS = {2: 22_032, 3: 14_696, 4: 11_027}


# In one process


@given(st.lists(st.sampled_from([-1.5, -1e-30, -0.0, 0.0, 1e-30, 2.0]), max_size=40))
def test_signs_survive_packing_at_any_length_and_zero_is_positive(values):
    x = torch.tensor(values)
    packed = sign_pack(x)
    assert packed.dtype == torch.uint8
    assert packed.shape == (math.ceil(len(values) / 8),)
    assert sign_unpack(packed, len(values)).tolist() == [1.0 if v >= 0 else -1.0 for v in values]


def test_the_first_sign_is_the_lowest_bit_and_rows_are_packed_apart():
    x = torch.tensor([[1.0, -1, -1, -1, -1, -1, -1, -1, -1, 1], [-1.0, 1, -1, -1, -1, -1, -1, 1, -1, -1]])
    assert sign_pack(x).tolist() == [[0b1, 0b11111110], [0b10000010, 0b11111100]]


@pytest.mark.parametrize("num_ranks", ROWS)
def test_rows_have_the_bytes_of_the_formula(num_ranks):
    layout = Layout(PAPER_SIZES, num_ranks)
    assert layout.row_bytes == ROWS[num_ranks]
    assert layout.row_bytes == sum(math.ceil(n / (8 * num_ranks)) + 4 for n in PAPER_SIZES)


@given(st.lists(st.integers(0, 100), min_size=1, max_size=5), st.integers(1, 6))
def test_chunks_are_whole_bytes_and_their_parts_are_the_tensor(sizes, num_ranks):
    layout = Layout(tuple(sizes), num_ranks)
    assert all(chunk % 8 == 0 for chunk in layout.chunks)
    assert [sum(column) for column in zip(*map(layout.parts, range(num_ranks)), strict=True)] == sizes
    flat = torch.arange(float(sum(layout.spans)))
    rows = torch.cat([piece.view(num_ranks, -1) for piece in flat.split(layout.spans)], dim=1)
    assert torch.equal(layout.flat(rows), flat)
    assert [view.numel() for view in layout.views(flat)] == sizes


def left_out(z, scale):
    """|z - C(z)|^2 / |z|^2."""
    size = scales_of([z], [z.numel()], scale).double()
    c = torch.where(z >= 0, size, -size)
    return float((z - c).square().sum() / z.square().sum())


@given(st.lists(st.integers(-1000, 1000), min_size=1, max_size=30).filter(any))
def test_l1_never_expands(values):
    z = torch.tensor(values, dtype=torch.float64)
    c = float(z.abs().sum() / (math.sqrt(len(values)) * z.norm()))
    assert left_out(z, "l1") < 1
    assert left_out(z, "l1") == pytest.approx(1 - c**2, abs=1e-6)
    assert left_out(z, "l2") == pytest.approx(2 - 2 * c, abs=1e-6)


def test_l2_expands_where_most_is_zero():
    z = torch.randn(1_000_000, dtype=torch.float64)
    assert left_out(z, "l2") == pytest.approx(0.404, abs=0.005)
    assert left_out(z, "l1") == pytest.approx(0.363, abs=0.005)
    z[torch.rand(z.shape) < 0.99] = 0
    assert left_out(z, "l2") == pytest.approx(1.84, abs=0.02)
    assert left_out(z, "l1") == pytest.approx(0.99, abs=0.01)


def test_nothing_has_scale_zero():
    assert scales_of([torch.zeros(0), torch.ones(4)], [0, 4], "l2").tolist() == [0, 1]


# In several


def example(step, rank, sizes):
    generator = torch.Generator().manual_seed(100 * step + rank)
    return [torch.randn(n, generator=generator) * 10.0 ** (k % 3 - 1) for k, n in enumerate(sizes)]


def fill(layout, tensors):
    flat = torch.zeros(sum(layout.spans))
    torch._foreach_copy_(layout.views(flat), tensors)
    return flat


def snapshot(errors):
    return errors.worker.clone(), errors.server.clone()


def measure(rank):
    """What one rank sees, for the tests below."""
    torch.set_num_threads(1 + rank)
    num = dist.get_world_size()
    layout = Layout(SIZES, num)
    seen = {}
    for scale in ("l2", "l1"):
        errors = Errors.zeros(layout)
        seen[scale] = []
        for step in range(STEPS):
            before = snapshot(errors)
            x = fill(layout, example(step, rank, SIZES))
            mean, live = onebit_mean(x.clone(), errors, scale=scale)
            seen[scale].append({"x": x, "before": before, "after": snapshot(errors), "mean": mean, "live": live})
    seen["residuals"] = errors.residuals()

    seen["held"] = []
    for case in ("nan", "inf", "found_inf", "absent here", "absent everywhere"):
        x, before = example(9, rank, SIZES), snapshot(errors)
        x[2][5] = {"nan": math.nan, "inf": math.inf}.get(case, 1.0) if rank == 1 else 1.0
        found = torch.tensor(float(rank == 1)) if case == "found_inf" else None
        absent = [0] if case == "absent everywhere" or (case == "absent here" and rank == 1) else []
        mean, live = onebit_mean(fill(layout, x), errors, scale="l1", absent=absent, found_inf=found)
        seen["held"].append({"case": case, "live": live, "before": before, "after": snapshot(errors), "mean": mean})

    big = Layout(PAPER_SIZES, num)
    with traffic() as counted:
        onebit_mean(fill(big, example(0, rank, PAPER_SIZES)), Errors.zeros(big))
    seen["bytes"] = counted.calls, counted.payload, counted.sent, sorted(counted.by_kind)

    try:
        onebit_mean(torch.zeros(8), Errors.zeros(Layout((3,), 1)))
    except TrimtabError as error:
        seen["refused"] = str(error)
    return seen


@pytest.fixture(scope="module", params=[2, 3, 4])
def world(request, tmp_path_factory):
    return in_ranks(request.param, measure, tmp_path_factory.mktemp("ranks"))


def whole(layout, pieces_by_rank):
    """Server errors of all ranks, put together: one array per tensor."""
    parts = [server.double().split(layout.chunks) for server in pieces_by_rank]
    return [torch.cat([part[k] for part in parts])[:n].numpy() for k, n in enumerate(layout.sizes)]


def arrays(layout, flat):
    return [view.double().numpy() for view in layout.views(flat)]


@pytest.mark.parametrize("scale", ["l2", "l1"])
def test_what_is_not_sent_is_remembered(world, scale):
    layout, sums = Layout(SIZES, len(world)), [np.zeros(n) for n in SIZES]
    for step in range(STEPS):
        ranks = [rank[scale][step] for rank in world]
        x, e, e2 = (
            [np.mean(c, axis=0) for c in zip(*(arrays(layout, f) for f in flats), strict=True)]
            for flats in ([r["x"] for r in ranks], [r["before"][0] for r in ranks], [r["after"][0] for r in ranks])
        )
        d, d2 = (whole(layout, [r[when][1] for r in ranks]) for when in ("before", "after"))
        out = arrays(layout, ranks[0]["mean"])
        for k in range(len(SIZES)):
            due = x[k] + e[k] + d[k]
            np.testing.assert_allclose(out[k] + e2[k] + d2[k], due, atol=1e-6 * np.abs(due).max(initial=1.0))
            sums[k] += x[k] - out[k]
    for k in range(len(SIZES)):  # over all steps
        np.testing.assert_allclose(e2[k] + d2[k], sums[k], atol=1e-5 * np.abs(sums[k]).max(initial=1.0))
        if scale == "l1":
            np.testing.assert_allclose(world[0]["residuals"][k].numpy(), e2[k] + d2[k], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("scale", ["l2", "l1"])
def test_it_is_the_dense_simulation(world, scale):
    num = len(world)
    layout = Layout(SIZES, num)
    for step in range(STEPS):
        ranks = [rank[scale][step] for rank in world]
        d = whole(layout, [r["before"][1] for r in ranks])
        for k, n in enumerate(SIZES):
            mean = reference.Mean(n, num, scale)
            mean.worker, mean.server = [arrays(layout, r["before"][0])[k] for r in ranks], d[k]
            expected = mean([arrays(layout, r["x"])[k] for r in ranks])
            got = arrays(layout, ranks[0]["mean"])[k]
            np.testing.assert_allclose(np.abs(got), np.abs(expected), rtol=1e-6)
            clear = np.abs(expected + mean.server) > 1e-6 * np.abs(expected)  # the value before the sign
            assert (np.sign(got) == np.sign(expected))[clear].all()
            assert n < 100 or clear.mean() > 0.99
            for r, e in zip(ranks, mean.worker, strict=True):
                np.testing.assert_allclose(arrays(layout, r["after"][0])[k], e, atol=1e-5)


def test_every_chunk_has_two_values(world):
    layout = Layout(SIZES, len(world))
    for step in range(STEPS):
        for view, chunk in zip(layout.views(world[0]["l2"][step]["mean"]), layout.chunks, strict=True):
            for part in view.split(chunk) if chunk else ():
                assert part.abs().unique().numel() == 1
                assert part.unique().numel() == 2 or part.numel() < 20


def test_all_ranks_have_the_same_bits_whatever_their_threads(world):
    for scale in ("l2", "l1"):
        for step in range(STEPS):
            first = world[0][scale][step]["mean"]
            assert all(torch.equal(rank[scale][step]["mean"], first) for rank in world)
    assert all(
        torch.equal(a, b) for rank in world for a, b in zip(rank["residuals"], world[0]["residuals"], strict=True)
    )


def test_two_collectives_send_the_bytes_of_the_formula(world):
    num = len(world)
    row = ROWS[num]
    assert 2 * (num - 1) * row == {2: 44_064, 3: 58_784, 4: 66_162}[num]
    for rank in world:
        assert rank["bytes"] == (2, num * row + row, 2 * (num - 1) * row, ["all_gather", "all_to_all"])


def test_padding_never_enters_an_error(world):
    layout = Layout(SIZES, len(world))
    for number, rank in enumerate(world):
        worker, server = rank["l2"][-1]["after"]
        for piece, n in zip(worker.split(layout.spans), SIZES, strict=True):
            assert not piece[n:].any()
        for piece, n in zip(server.split(layout.chunks), layout.parts(number), strict=True):
            assert not piece[n:].any()
            assert piece[:n].any() or n < 8


@pytest.mark.parametrize("case", ["nan", "inf", "found_inf"])
def test_what_is_not_finite_on_one_rank_stops_all(world, case):
    for rank in world:
        seen = next(one for one in rank["held"] if one["case"] == case)
        assert not seen["live"].any()
        assert all(torch.equal(a, b) for a, b in zip(seen["before"], seen["after"], strict=True))


def test_a_tensor_without_gradient_is_left_alone_if_nobody_has_one(world):
    layout = Layout(SIZES, len(world))
    for rank in world:
        here, nowhere = rank["held"][-2:]
        assert here["live"].all()
        assert nowhere["live"].tolist() == [False] + [True] * (len(SIZES) - 1)
        for buffer, spans in ((0, layout.spans), (1, layout.chunks)):
            before, after = (nowhere[when][buffer].split(spans) for when in ("before", "after"))
            assert torch.equal(before[0], after[0])
            assert not torch.equal(before[-1], after[-1])
            assert not torch.equal(here["before"][buffer].split(spans)[0], here["after"][buffer].split(spans)[0])


def test_a_layout_of_other_ranks_is_refused(world):
    assert all("the layout is one of 1 ranks" in rank["refused"] for rank in world)
