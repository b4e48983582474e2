# SPDX-License-Identifier: Apache-2.0
"""What the loopback of a network namespace of its own transmits, next to what `traffic` counts.

It runs three ranks and prints one JSON line.
"""

import fcntl
import json
import socket
import struct
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from ranks import in_ranks
from torch import nn

from trimtab.comm import GreedyLore, traffic
from trimtab.comm.traffic import all_gather, all_reduce, all_to_all, broadcast

MEGABYTE = 1 << 18  # numbers in FP32
REPEATS = 5


def loopback_up() -> None:
    """Switch the loopback on: a new namespace has one that is down."""
    get_flags, set_flags, up = 0x8913, 0x8914, 0x1
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        request = struct.pack("16sh14x", b"lo", 0)
        flags = struct.unpack("16sh14x", fcntl.ioctl(any_socket, get_flags, request))[1]
        fcntl.ioctl(any_socket, set_flags, struct.pack("16sh14x", b"lo", flags | up))


def transmitted() -> int:
    """Bytes that the loopback of this namespace has transmitted."""
    line = next(line for line in Path("/proc/self/net/dev").read_text().splitlines() if line.strip().startswith("lo:"))
    return int(line.split(":")[1].split()[8])


def settled() -> int:
    dist.barrier()
    time.sleep(0.2)
    seen = transmitted()
    dist.barrier()
    return seen


def measure(rank: int) -> dict[str, tuple[float, int]]:
    num = dist.get_world_size()
    part, whole = torch.ones(MEGABYTE), torch.ones(4 * MEGABYTE // num * num)
    model = nn.parallel.DistributedDataParallel(nn.Linear(1024, 1024, bias=False), bucket_cap_mb=100)
    gl = GreedyLore(rank=256, every=6, start=0, compress=lambda name, p: True)
    gl.attach(model)

    def step() -> None:
        model(torch.randn(2, 1024)).sum().backward()

    step()
    calls = {
        "all_reduce": lambda: all_reduce(whole),
        "broadcast": lambda: broadcast(whole, 0),
        "all_gather": lambda: all_gather(torch.empty(num * MEGABYTE), part),
        "all_to_all": lambda: all_to_all(torch.empty_like(whole), whole),
        "GreedyLore, low rank": step,
        "GreedyLore, refresh": step,
    }
    seen = {}
    for name, call in calls.items():
        refresh = name.endswith("refresh")
        before = settled()
        with traffic() as t:
            for _ in range(1 if refresh else REPEATS):
                call()
        seen[name] = t.sent * num, settled() - before
    return seen


if __name__ == "__main__":
    loopback_up()
    print(json.dumps(in_ranks(3, measure, Path(sys.argv[1]), start="fork")[0]))
