# SPDX-License-Identifier: Apache-2.0
"""Many ranks on one machine: gloo processes that run one function and hand back what it returns.

They are forked from a clean server that has torch loaded, so that a world of four takes a second and not twenty.
"""

import multiprocessing
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

PRELOAD = ["torch", "torch.distributed.tensor", "torch.nn.parallel", "torch._dynamo", "trimtab.comm.greedylore"]


def in_ranks(num: int, work: Callable[..., Any], folder: Path, *args: Any, start: str = "forkserver") -> list[Any]:
    """Call `work(rank, *args)` in `num` processes; returns what each returned, and raises what one raised."""
    if start == "forkserver":
        multiprocessing.set_forkserver_preload(PRELOAD)
    mp.start_processes(_process, (num, work, folder, args), nprocs=num, start_method=start)
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(num)]


def _process(rank: int, num: int, work: Callable[..., Any], folder: Path, args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=num, timeout=timedelta(seconds=60)
    )
    try:
        torch.save(work(rank, *args), folder / f"{rank}.pt")
    finally:
        dist.destroy_process_group()
