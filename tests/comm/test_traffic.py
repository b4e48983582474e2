# SPDX-License-Identifier: Apache-2.0
"""The byte count: by the table, for our collectives and for others', from any thread, never twice; and on the wire."""

import json
import os
import shutil
import subprocess
import sys
import threading
from fractions import Fraction
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks import in_ranks
from torch import nn

from trimtab.comm import traffic
from trimtab.comm.traffic import OPERATORS, SHARES, Tally, Traffic, all_gather, all_reduce, all_to_all, broadcast

DDP = nn.parallel.DistributedDataParallel


# The table


def test_shares_are_those_of_the_table():
    for n in (1, 2, 3, 4, 7):
        whole_job = {kind: share(n) * n for kind, share in SHARES.items() if kind != "send"}
        assert whole_job["all_reduce"] == 2 * (n - 1)
        assert whole_job["broadcast"] == whole_job["all_to_all"] == whole_job["reduce_scatter"] == n - 1
        assert whole_job["all_gather"] == n * (n - 1)


def test_every_collective_of_torch_has_a_place_in_it():
    """One that is added, renamed or changes an argument shows up here."""
    spaces = ("c10d::", "_c10d_functional::")
    names = {name for name in torch._C._dispatch_get_all_op_names() if name.startswith(spaces)}
    silent = {"barrier", "monitored_barrier_", "recv_", "recv_any_source_", "check_for_nan"}
    silent |= {"wait_tensor", "_wrap_tensor_autograd", "irecv", "isend", "batch_p2p_ops"}
    assert {name for name in names if name.split("::")[1] not in silent} == set(OPERATORS)
    for name, (kind, argument) in OPERATORS.items():
        space, op = name.split("::")
        given = {one.name for one in getattr(getattr(torch.ops, space), op).default._schema.arguments}
        assert kind in SHARES
        assert argument in given, name
        assert {"process_group", "group_name"} & given, name


def test_sums_are_exact():
    t = Traffic()
    for _ in range(3):
        t.add("all_reduce", 1, 3)
    assert t.by_kind == {"all_reduce": Tally(3, 3, 4.0)}
    t.add("broadcast", 10**15 + 1, 2)
    assert (t.calls, t.payload) == (4, 10**15 + 4)
    assert t.sent == float(Fraction(10**15 + 1, 2) + 4)


def test_it_prints_as_a_table():
    t = Traffic()
    t.add("all_reduce", 1_000_000, 4)
    t.add("broadcast", 4, 4)
    lines = str(t).splitlines()
    assert [line.split() for line in lines[1:]] == [
        ["all_reduce", "1", "1,000,000", "1,500,000"],
        ["broadcast", "1", "4", "3"],
        ["all", "2", "1,000,004", "1,500,003"],
    ]
    assert Traffic().total == Tally()


# In several processes


def tensors(num):
    return torch.ones(12), torch.ones(12 * num)


def kinds(rank):
    """The count of one call of each collective, ours and torch's own."""
    import torch.distributed._functional_collectives as functional

    num = dist.get_world_size()
    part, whole = tensors(num)
    parts, group = [torch.ones(12) for _ in range(num)], dist.group.WORLD
    calls = {
        "our all_reduce": lambda: all_reduce(part),
        "our broadcast": lambda: broadcast(part, 0),
        "our all_to_all": lambda: all_to_all(torch.empty_like(whole), whole),
        "our all_gather": lambda: all_gather(whole, part),
        "all_reduce": lambda: dist.all_reduce(part),
        "all_reduce bf16": lambda: dist.all_reduce(part.bfloat16()),
        "broadcast": lambda: dist.broadcast(part, 0),
        "reduce": lambda: dist.reduce(part, 0),
        "gather": lambda: dist.gather(part, parts if rank == 0 else None, 0),
        "scatter": lambda: dist.scatter(part, parts if rank == 0 else None, 0),
        "all_gather": lambda: dist.all_gather(parts, part),
        "all_gather flat": lambda: dist.all_gather_into_tensor(whole, part),
        "all_to_all flat": lambda: dist.all_to_all_single(torch.empty_like(whole), whole),
        "reduce_scatter": lambda: dist.reduce_scatter(part, parts),
        "reduce_scatter flat": lambda: dist.reduce_scatter_tensor(part, whole),
        "functional all_reduce": lambda: functional.all_reduce(part, "sum", group).add(0),
        "barrier": dist.barrier,
    }
    out = {}
    for name, call in calls.items():
        with traffic() as t:
            call()
        out[name] = t.by_kind
    with traffic() as t:
        if rank == 0:
            dist.send(part, 1)
        elif rank == 1:
            dist.recv(part, 0)
    out["send"] = t.by_kind
    return out


@pytest.mark.parametrize("num", [2, 3])
def test_every_kind_is_counted_by_the_table(num, tmp_path):
    out = in_ranks(num, kinds, tmp_path)
    ring, one, all_ = 2 * (num - 1) / num, (num - 1) / num, num - 1
    for rank, seen in enumerate(out):
        assert seen["our all_reduce"] == seen["all_reduce"] == {"all_reduce": (1, 48, pytest.approx(48 * ring))}
        assert seen["functional all_reduce"] == seen["all_reduce"]
        assert seen["all_reduce bf16"] == {"all_reduce": (1, 24, pytest.approx(24 * ring))}
        assert seen["our broadcast"] == seen["broadcast"] == {"broadcast": (1, 48, pytest.approx(48 * one))}
        assert seen["our all_gather"] == seen["all_gather"] == {"all_gather": (1, 48, 48 * all_)}
        assert seen["all_gather flat"] == seen["all_gather"]
        assert seen["our all_to_all"] == seen["all_to_all flat"] == {"all_to_all": (1, 48 * num, 48 * all_)}
        assert seen["reduce_scatter"] == seen["reduce_scatter flat"] == {"reduce_scatter": (1, 48 * num, 48 * all_)}
        for kind in ("reduce", "gather", "scatter"):
            assert seen[kind] == {kind: (1, 48, pytest.approx(48 * one))}
        assert seen["barrier"] == {}
        assert seen["send"] == ({"send": (1, 48, 48)} if rank == 0 else {})


def blocks(rank):
    part = torch.ones(4)
    all_reduce(part)  # nobody counts
    with traffic() as outer:
        all_reduce(part)
        dist.all_reduce(part)
        with traffic() as inner:
            work = all_reduce(part, async_op=True)
            assert work is not None
            work.wait()
            dist.broadcast(part, 0)
        all_reduce(part, op=dist.ReduceOp.AVG)
    all_reduce(part)
    average = part.clone()
    with pytest.raises(KeyError), traffic() as failed:
        raise KeyError
    all_reduce(part)
    return outer.total, inner.total, failed.total, average


def test_blocks_may_be_nested_and_end_when_they_end(tmp_path):
    outer, inner, failed, average = in_ranks(2, blocks, tmp_path)[0]
    assert inner == (2, 32, 16 + 8)
    assert outer == (5, 80, 16 * 4 + 8)
    assert failed == (0, 0, 0)
    assert average.tolist() == [32.0] * 4  # 2 * 2 * 2 * 2, an average, 2


def threads(rank):
    """Ours from a callback of a future and from another thread; torch's own in a backward."""
    part = torch.ones(4)
    with traffic() as t:
        work = all_reduce(part, async_op=True)
        assert work is not None
        ended = threading.Event()

        def more(_):
            again = all_reduce(torch.ones(8), async_op=True)
            assert again is not None
            again.get_future().add_done_callback(lambda _: ended.set())

        work.get_future().add_done_callback(more)
        assert ended.wait(30)
        other = threading.Thread(target=lambda: all_reduce(torch.ones(16)))
        other.start()
        other.join()
    with traffic() as foreign:
        thread = threading.Thread(target=lambda: dist.all_reduce(torch.ones(16)))
        thread.start()
        thread.join()
    return t.total, foreign.total


def test_ours_are_counted_on_any_thread(tmp_path):
    for ours, foreign in in_ranks(2, threads, tmp_path):
        assert ours == (3, 4 * (4 + 8 + 16), 4 * (4 + 8 + 16))
        assert foreign == (0, 0, 0)  # as the docstring says: others' only in the thread of the `with`


def wrapped(rank):
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import init_device_mesh

    torch.manual_seed(0)
    model, out = DDP(nn.Linear(30, 20)), []
    for _ in range(3):
        with traffic() as t:
            model(torch.ones(2, 30)).sum().backward()
        out.append(t.by_kind)
    sharded = nn.Linear(30, 20, bias=False)
    fully_shard(sharded, mesh=init_device_mesh("cpu", (2,)))
    with traffic() as t:
        sharded(torch.ones(2, 30)).sum().backward()
    return out, t.by_kind


def test_what_ddp_and_fsdp_send_is_counted_too(tmp_path):
    for ddp, fsdp in in_ranks(2, wrapped, tmp_path):
        assert [step["all_reduce"] for step in ddp] == [(1, 4 * 620, 4 * 620)] * 3
        assert [step.get("broadcast", Tally()).calls for step in ddp] == [0, 2, 0]  # DDP rebuilds its buckets
        assert fsdp["all_gather"].payload == fsdp["all_gather"].calls * 4 * 300
        assert fsdp["reduce_scatter"].payload == 4 * 600


# On the wire


def test_the_loopback_of_a_private_network_sees_the_bytes_that_are_counted(tmp_path):
    """The kernel's own counter; 3 % are left for headers, acknowledgements and the barriers between."""
    if shutil.which("unshare") is None:
        pytest.skip("needs the command unshare")
    private = ["unshare", "--map-root-user", "--net"]
    if subprocess.run([*private, "true"], capture_output=True, timeout=30).returncode:
        pytest.skip("network namespaces are forbidden here")
    path = os.pathsep.join([str(Path(__file__).parents[2]), str(Path(__file__).parent)])
    done = subprocess.run(
        [*private, sys.executable, str(Path(__file__).with_name("wire.py")), str(tmp_path)],
        env={**os.environ, "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout.splitlines()[-1])
    assert len(seen) == 6
    for name, (expected, bytes_seen) in seen.items():
        assert expected > 1e7, name
        assert bytes_seen == pytest.approx(expected, rel=0.03), name
