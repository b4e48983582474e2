# SPDX-License-Identifier: Apache-2.0
"""Sparse momentum: the mask as a function (uniform, unique, independent, the same everywhere), what moves and what does
not, and SPAM on sharded parameters, dense and sparse, in two processes."""

import copy
import math
import socket

import pytest
import torch
import torch.multiprocessing as mp
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from trimtab.errors import TrimtabError
from trimtab.optim import sparse
from trimtab.optim.spam import SPAM, clock
from trimtab.optim.sparse import Mask, columns, key_of, moment_shape

KEY = key_of(0, 0, 0)

PINNED_KEY = 2558736989570252433
PINNED_EVEN = [[2, 4, 11, 13], [2, 6, 11, 15], [0, 5, 11, 13]]
PINNED_ODD = [[1, 2, 9], [6, 10, 3], [6, 10, 0]]


# The mask


@given(st.integers(1, 60), st.data(), st.integers(0, 2**70), st.integers(0, 10**6))
def test_every_row_has_exactly_its_count_of_different_columns(cols, data, seed, first_row):
    kept = data.draw(st.integers(1, cols))
    chosen = columns(Mask(key_of(seed, 3, 1), first_row, cols, kept), 0, 9)
    assert chosen.shape == (9, kept)
    assert chosen.min() >= 0
    assert chosen.max() < cols
    assert all(len(set(row)) == kept for row in chosen.tolist())


@given(st.integers(0, 20), st.integers(0, 20), st.integers(1, 20))
def test_a_row_has_the_same_columns_whoever_asks(first_row, start, more):
    for kept in (4, 5):
        whole = columns(Mask(KEY, 0, 16, kept), 0, 64)
        part = columns(Mask(KEY, first_row, 16, kept), start, start + more)
        assert torch.equal(part, whole[first_row + start : first_row + start + more])


def test_the_mask_is_pinned():
    """A resumed run must find its mask again: these values may never change."""
    assert key_of(0, 0, 0) == PINNED_KEY
    assert columns(Mask(key_of(1, 2, 3), 0, 16, 4), 0, 3).tolist() == PINNED_EVEN
    assert columns(Mask(key_of(1, 2, 3), 0, 11, 3), 0, 3).tolist() == PINNED_ODD


def chi_square(counts: torch.Tensor, expected: float, freedom: int) -> float:
    """How many standard deviations a chi-square lies from its mean."""
    return ((counts - expected).square().sum().item() / expected - freedom) / math.sqrt(2 * freedom)


@pytest.mark.parametrize(("cols", "kept"), [(64, 16), (64, 1), (10, 3), (50, 49), (7, 4)])
def test_every_column_is_equally_likely(cols, kept):
    rows = 20_000
    counts = torch.bincount(columns(Mask(KEY, 0, cols, kept), 0, rows).flatten(), minlength=cols).double()
    expected = rows * kept / cols
    # Without replacement the counts vary less than a chi-square's: too even is no fault, too uneven is one.
    assert chi_square(counts, expected, cols - 1) < 4
    assert (counts / expected - 1).abs().max() < 5 / math.sqrt(expected)


def test_the_choices_of_two_slots_are_independent():
    chosen = columns(Mask(KEY, 0, 64, 16), 0, 16_000) % 4  # which of its four columns a slot took
    for one, two in ((0, 1), (0, 15), (7, 8)):
        table = torch.bincount(chosen[:, one] * 4 + chosen[:, two], minlength=16).double()
        assert abs(chi_square(table, 1000, 15)) < 4
    table = torch.bincount(chosen[:-1, 5] * 4 + chosen[1:, 5], minlength=16).double()  # and of two rows
    assert abs(chi_square(table, 15_999 / 16, 15)) < 4


@pytest.mark.parametrize("other", [(0, 0, 1), (0, 1, 0), (1, 0, 0), (1, 1, 0), (0, 1, 1)])
@pytest.mark.parametrize(("cols", "kept"), [(64, 16), (50, 12)])
def test_resets_parameters_and_seeds_choose_independently(cols, kept, other):
    rows = 4000
    one, two = (columns(Mask(key_of(*key), 0, cols, kept), 0, rows) for key in ((0, 0, 0), other))
    picked = [torch.zeros(rows, cols, dtype=torch.bool).scatter_(1, chosen, True) for chosen in (one, two)]
    common = (picked[0] & picked[1]).sum().item() / (rows * kept)
    share = kept / cols
    assert abs(common - share) < 5 * math.sqrt(share * (1 - share) / (rows * kept))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_draws_the_same_mask():
    for kept in (16, 13):
        mask = Mask(key_of(5, 6, 7), 1000, 64, kept)
        assert torch.equal(columns(mask, 0, 500, "cuda").cpu(), columns(mask, 0, 500))


# What moves


@pytest.mark.parametrize(
    ("shape", "density", "wanted"),
    [
        ((8, 100), 0.25, (8, 25)),
        ((8, 100), 0.29, (8, 29)),  # 0.29 * 100 is 28.999...
        ((8, 3), 0.1, (8, 1)),
        ((8, 3), 1.0, (8, 3)),
        ((8,), 0.25, (8,)),
        ((2, 3, 4), 0.25, (2, 3, 4)),
        ((8, 0), 0.25, (8, 0)),
    ],
)
def test_matrices_have_sparse_moments_and_nothing_else_has(shape, density, wanted):
    assert moment_shape(torch.Size(shape), density) == wanted


def test_the_state_is_as_small_as_the_density_says():
    model = nn.Sequential(nn.Linear(64, 40), nn.Linear(40, 128, bias=False))
    optimizer = SPAM(model.parameters(), density=0.25)
    moments = [t for state in optimizer.state.values() for name, t in state.items() if name != "step"]
    matrices = 64 * 40 + 40 * 128
    assert sum(t.nbytes for t in moments) == 2 * 4 * (0.25 * matrices + 40)
    assert set(optimizer.state[model[0].weight]) == {"step", "exp_avg", "exp_avg_sq"}  # and no mask beside them


SETTINGS = {"lr": 1e-2, "reset_every": 8, "warmup": 3, "grace": 2, "threshold": 20.0}


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("cols", [16, 11])
def test_the_chosen_entries_move_as_if_dense_and_the_others_only_decay(cols, dtype, weight_decay, monkeypatch):
    monkeypatch.setattr(sparse, "CHUNK", 20)  # several pieces
    p = nn.Parameter(torch.randn(9, cols, dtype=dtype))
    dense = copy.deepcopy(p)
    vector = nn.Parameter(torch.randn(4, dtype=dtype))
    settings = SETTINGS | {"weight_decay": weight_decay}
    optimizer, oracle = SPAM([vector, p], density=0.25, seed=7, **settings), SPAM([dense], **settings)
    kept, moved = moment_shape(p.shape, 0.25)[1], torch.zeros(9, cols, dtype=torch.bool)
    for t in range(1, 41):
        before = p.detach().clone()
        p.grad = torch.randn(9, cols, dtype=dtype) * (100 if t % 6 == 0 else 1)
        dense.grad, vector.grad = p.grad.clone(), torch.ones(4, dtype=dtype)
        optimizer.step()
        oracle.step()
        chosen = columns(Mask(key_of(7, 1, clock(t, 8, 3, 2).num_resets), 0, cols, kept), 0, 9)
        picked = torch.zeros(9, cols, dtype=torch.bool).scatter_(1, chosen, True)
        with torch.no_grad():  # the oracle trains everything; what was not chosen is put back
            dense.copy_(torch.where(picked, dense, before * (1 - 1e-2 * weight_decay)))
        assert torch.equal(p, dense)
        moved |= picked
    assert moved.float().mean() > 0.6  # six masks: 1 - 0.75^6 = 0.82
    assert not moved.all()


def test_a_density_that_changes_is_refused():
    p = nn.Parameter(torch.zeros(4, 8))
    optimizer = SPAM([p], density=0.5)
    optimizer.param_groups[0]["density"] = 0.25
    p.grad = torch.ones(4, 8)
    with pytest.raises(TrimtabError, match=r"density cannot change.*\(4, 4\).*\(4, 2\)"):
        optimizer.step()


# Shards


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


ARMS = {
    "dense": {},
    "foreach": {"foreach": True, "reference": True},
    "sparse": {"density": 0.5},
}


def build(seed: int = 0) -> nn.Module:
    """Rows that two ranks cannot share evenly: 7, 3 and 1."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 3), nn.Tanh(), nn.Linear(3, 1))


def train(model: nn.Module, optimizer: SPAM, steps: range) -> None:
    for t in steps:
        x = torch.randn(8, 6, generator=torch.Generator().manual_seed(t))
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def assert_equal_runs(model: nn.Module, optimizer: SPAM, single: nn.Module, alone: SPAM) -> None:
    for p, q in zip(model.parameters(), single.parameters(), strict=True):
        assert torch.equal(whole(p.detach()), q.detach())
        assert optimizer.state[p]["exp_avg"].placements == p.placements
        for name, value in alone.state[q].items():
            assert torch.equal(whole(optimizer.state[p][name]), value), name


def process(rank: int, port: int, folder: str) -> None:
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import (
        StateDictOptions,
        get_optimizer_state_dict,
        set_optimizer_state_dict,
    )
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))

    def sharded(settings: dict, seed: int = 0) -> tuple[nn.Module, SPAM]:
        model = build(seed)
        fully_shard(model, mesh=mesh)
        return model, SPAM(model.parameters(), **SETTINGS, weight_decay=0.1, **settings)

    for arm, settings in ARMS.items():
        single = build()
        alone = SPAM(single.parameters(), **SETTINGS, weight_decay=0.1, **settings)
        train(single, alone, range(10))
        model, optimizer = sharded(settings)
        fresh = get_optimizer_state_dict(model, optimizer)
        assert {int(state["step"]) for state in fresh["state"].values()} == {0}  # asking moved no clock
        train(model, optimizer, range(10))  # both ranks see the same data, so the mean gradient is exact
        assert_equal_runs(model, optimizer, single, alone)

        # Through a distributed checkpoint, and through a full state that every rank holds whole.
        state = get_optimizer_state_dict(model, optimizer)
        dcp.save(state, checkpoint_id=f"{folder}/{arm}")
        full = get_optimizer_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True))
        weights = {name: whole(p.detach()).clone() for name, p in model.named_parameters()}
        train(single, alone, range(10, 20))
        for way in ("sharded", "full"):
            again, resumed = sharded(settings, seed=1)
            with torch.no_grad():
                for name, p in again.named_parameters():
                    p.copy_(distribute_tensor(weights[name], mesh, p.placements))
            if way == "sharded":
                target = get_optimizer_state_dict(again, resumed)
                dcp.load(target, checkpoint_id=f"{folder}/{arm}")
                set_optimizer_state_dict(again, resumed, target)
            else:
                options = StateDictOptions(full_state_dict=True)
                set_optimizer_state_dict(again, resumed, copy.deepcopy(full), options=options)
            train(again, resumed, range(10, 20))
            assert_equal_runs(again, resumed, single, alone)

    # A gradient that is still a pending sum counts as the sum, and is left as it was.
    p = nn.Parameter(distribute_tensor(torch.zeros(4), mesh, [Replicate()]))
    pending = DTensor.from_local(torch.full((4,), 1.0 + rank), mesh, [Partial()])
    p.grad = pending
    optimizer = SPAM([p], lr=1.0, eps=1.0)
    optimizer.step()
    torch.testing.assert_close(p.detach().to_local(), torch.full((4,), -0.75))  # 3 / (3 + 1)
    assert p.grad is pending
    assert torch.equal(pending.to_local(), torch.full((4,), 1.0 + rank))

    # Sparse moments need whole rows.
    q = nn.Parameter(distribute_tensor(torch.zeros(4, 4), mesh, [Shard(1)]))
    with pytest.raises(TrimtabError, match=r"density=1\.0"):
        SPAM([q], density=0.5)
    optimizer, fine = SPAM([q]), nn.Parameter(torch.zeros(4, 4))
    bad = nn.Parameter(distribute_tensor(torch.zeros(4, 4), mesh, [Shard(1)]))
    with pytest.raises(TrimtabError, match=r"density=1\.0"):
        optimizer.add_param_group({"params": [fine, bad], "density": 0.5})
    assert list(optimizer.state) == [q]

    # A whole state for a sharded parameter is refused, not misread.
    r = nn.Parameter(distribute_tensor(torch.zeros(4, 4), mesh, [Shard(0)]))
    with pytest.raises(TrimtabError, match=r"torch\.distributed\.checkpoint\.state_dict"):
        SPAM([r]).load_state_dict(SPAM([nn.Parameter(torch.zeros(4, 4))]).state_dict())
    dist.destroy_process_group()


def test_two_processes_equal_one_and_resume_bit_by_bit(tmp_path):
    mp.spawn(process, args=(free_port(), str(tmp_path)), nprocs=2)
