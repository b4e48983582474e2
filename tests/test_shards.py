# SPDX-License-Identifier: Apache-2.0
"""Norms of whole tensors: equal to float64's over any dtype and range in one process, and in two gloo processes equal
to one process for every placement, with one all-reduce per process group; transforms on FSDP2 gradients too."""

import copy
import math
import socket
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from trimtab.shards import tensor_maxima, tensor_norms, total_norm


def true_norms(tensors):
    return torch.tensor([0.0 if t is None else float(np.linalg.norm(t.double().numpy())) for t in tensors])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_norms_and_maxima_equal_those_in_float64(dtype):
    tensors = [torch.randn(shape).to(dtype) for shape in [(7,), (3, 5), (), (2, 3, 4), (0,)]]
    tensors.insert(1, None)
    torch.testing.assert_close(tensor_norms(tensors), true_norms(tensors), rtol=2e-7, atol=0)
    maxima = [0.0 if t is None or not t.numel() else float(t.double().abs().max()) for t in tensors]
    assert tensor_maxima(tensors).tolist() == torch.tensor(maxima).tolist()


def test_dtypes_may_be_mixed():
    tensors = [torch.randn(9).to(d) for d in (torch.bfloat16, torch.float64, torch.float32, torch.bfloat16)]
    torch.testing.assert_close(tensor_norms(tensors), true_norms(tensors), rtol=2e-7, atol=0)


@given(st.integers(-35, 37), st.integers(1, 50))
def test_no_norm_overflows_or_vanishes_that_float32_can_hold(exponent, size):
    value = torch.full((size,), 10.0**exponent)
    norm = float(np.linalg.norm(value.double().numpy()))
    assert tensor_norms([value]).item() == pytest.approx(norm, rel=2e-7)
    assert total_norm(tensor_norms([value, value])).item() == pytest.approx(math.sqrt(2) * norm, rel=1e-6)


def test_what_is_not_finite_stays_so():
    tensors = [torch.tensor([1.0, value, 2.0]) for value in (math.inf, -math.inf, math.nan, 1.0)]
    assert torch.isfinite(tensor_norms(tensors)).tolist() == [False, False, False, True]
    assert tensor_maxima(tensors).tolist() == [math.inf, math.inf, math.inf, 2.0]
    for bad in (math.inf, math.nan):
        assert not torch.isfinite(total_norm(torch.tensor([1.0, bad])))


def test_nothing_has_norm_zero():
    assert tensor_norms([]).shape == (0,)
    assert tensor_norms([None, None]).tolist() == [0.0, 0.0]
    assert tensor_maxima([torch.zeros(3), None]).tolist() == [0.0, 0.0]
    assert total_norm(torch.zeros(3)).tolist() == [0.0]


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # torch before 2.12 says so whatever is passed
def test_a_sparse_gradient_is_added_up_before_it_is_measured():
    twice = torch.sparse_coo_tensor(
        torch.tensor([[1, 1]]), torch.tensor([[3.0, 0.0], [0.0, 4.0]]), (5, 2), check_invariants=True
    )
    assert tensor_norms([twice]).tolist() == [5.0]
    assert tensor_maxima([twice]).tolist() == [4.0]


# In two processes


def full_tensors() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    shapes = [(6, 4), (5, 3), (4,), (1, 7), (3, 8)]  # 5 and 3 rows: uneven shards; 1 row: an empty one
    return [torch.randn(shape, generator=generator) for shape in shapes]


def check_placements() -> None:
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor, init_device_mesh

    line, grid = init_device_mesh("cpu", (2,)), init_device_mesh("cpu", (1, 2))
    full = full_tensors()
    expected, largest = true_norms(full), torch.stack([t.abs().max() for t in full])
    for placed in (
        [distribute_tensor(t, line, [Shard(0)]) for t in full],
        [distribute_tensor(t, line, [Replicate()]) for t in full],  # a copy counts once
        [distribute_tensor(t, grid, [Replicate(), Shard(t.dim() - 1)]) for t in full],
        [distribute_tensor(t, grid, [Shard(0), Shard(0)]) for t in full],
        [t if i % 2 else distribute_tensor(t, line, [Shard(0)]) for i, t in enumerate(full)],  # plain ones between
    ):
        torch.testing.assert_close(tensor_norms(placed), expected, rtol=2e-7, atol=0)
        assert torch.equal(tensor_maxima(placed), largest)

    sharded = [distribute_tensor(t, line, [Shard(0)]) for t in full]
    mixed = [*sharded, None, distribute_tensor(full[0], grid, [Replicate(), Shard(0)]), full[0]]
    with mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as reduce:
        tensor_norms(mixed)
    assert reduce.call_count == len({line.get_group(0).group_name, grid.get_group(1).group_name})
    assert sum(call.args[0].numel() for call in reduce.call_args_list) == 6

    huge = distribute_tensor(torch.full((8,), 1e30), line, [Shard(0)])
    assert tensor_norms([huge]).item() == pytest.approx(math.sqrt(8) * 1e30, rel=2e-7)
    poisoned = torch.ones(8)
    poisoned[7] = math.nan  # on the second process alone
    poisoned = distribute_tensor(poisoned, line, [Shard(0)])
    assert not torch.isfinite(tensor_norms([poisoned])).item()
    assert tensor_maxima([poisoned]).item() == math.inf

    mine = torch.full((3,), 1.0 + dist.get_rank())
    pending = DTensor.from_local(mine, line, [Partial()])  # 1 + 2
    assert tensor_norms([pending]).item() == pytest.approx(3 * math.sqrt(3))
    assert tensor_maxima([pending]).item() == 3.0


def build() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 5), nn.LayerNorm(5), nn.Linear(5, 3))


def check_transforms_under_fsdp() -> None:
    """Every transform on sharded gradients does what it does on whole ones."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import init_device_mesh

    from trimtab.optim.clipping import AdaGC, AutoClip, ZClip
    from trimtab.optim.stabilizer import GradStabilizer

    for make in (
        lambda p: GradStabilizer(p),
        lambda p: GradStabilizer(p, clip_gamma=0.9),
        lambda p: GradStabilizer(p, global_norm=True),
        lambda p: ZClip(p, warmup=2, max_norm=1.0),
        lambda p: AdaGC(p, warmup=2),
        lambda p: AutoClip(p, window=4, per_tensor=True),
    ):
        plain, sharded = build(), build()
        fully_shard(sharded, mesh=init_device_mesh("cpu", (2,)))
        transforms = [make(model.parameters()) for model in (plain, sharded)]
        for step in range(5):
            batch = torch.randn(8, 6, generator=torch.Generator().manual_seed(step)) * (30.0 if step == 3 else 1.0)
            for model, transform in zip((plain, sharded), transforms, strict=True):
                model.zero_grad()
                model(batch).square().mean().backward()  # the same batch in both processes: the mean is that batch's
                transform.step_()
            for one, other in zip(plain.parameters(), sharded.parameters(), strict=True):
                assert one.grad is not None
                torch.testing.assert_close(other.grad.full_tensor(), one.grad, rtol=1e-5, atol=1e-8)


def check_adaclip_refuses_partial() -> None:
    from torch.distributed.tensor import DTensor, Partial, Replicate, distribute_tensor, init_device_mesh

    from trimtab.errors import TrimtabError
    from trimtab.optim.stabilizer import GradStabilizer

    mesh = init_device_mesh("cpu", (2,))
    for clip_gamma in (None, 0.9):
        param = nn.Parameter(distribute_tensor(torch.zeros(3), mesh, [Replicate()]))
        param.grad = DTensor.from_local(torch.tensor([3.0, 4.0, 0.0]), mesh, [Partial()])  # 6, 8, 0 in all
        if clip_gamma is None:
            GradStabilizer([param]).step_()
            torch.testing.assert_close(param.grad.full_tensor(), torch.tensor([0.6, 0.8, 0.0]))
        else:
            with pytest.raises(TrimtabError, match="Partial"):
                GradStabilizer([param], clip_gamma=clip_gamma).step_()


def check_spikes_on_shards() -> None:
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import init_device_mesh

    from trimtab.optim.spikes import GradSpikes

    model = copy.deepcopy(build())
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    probe = GradSpikes(model, warmup=1)
    for scale in (1.0, 1.0, 1e4):
        model.zero_grad()
        (model(torch.ones(2, 6)).square().sum() * scale).backward()
        probe.step()
    scored = torch.tensor(sum(entry["scored"] for entry in probe.summary().values()))
    dist.all_reduce(scored)
    assert scored.item() <= 2 * sum(p.numel() for p in model.parameters())
    assert sum(entry["spikes"] for entry in probe.summary().values()) > 0


def process(rank: int, port: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    try:
        check_placements()
        check_transforms_under_fsdp()
        check_adaclip_refuses_partial()
        check_spikes_on_shards()
    finally:
        dist.destroy_process_group()


def test_two_processes_measure_and_transform_what_one_does():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.spawn(process, args=(port,), nprocs=2)
