# SPDX-License-Identifier: Apache-2.0
"""What both systems make sure of before they send: that all ranks mean the same, and that DDP has room for a hook.

Ranks that were given other settings send messages of other sizes. The backend then waits until its timeout, or ends
the process from one of its threads, and names neither the setting nor the rank. One small collective at the start
costs 8 bytes per fact and says both.
"""

import hashlib
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from trimtab.comm.traffic import Group, all_gather
from trimtab.errors import TrimtabError


def require_same(facts: Mapping[str, object], group: Group, device: torch.device) -> None:
    """Refuse facts that differ between ranks, on every rank and by name; a collective."""
    num = dist.get_world_size(group)
    if num == 1:
        return
    mine = torch.tensor([_digest(fact) for fact in facts.values()], device=device)
    theirs = mine.new_empty(num * len(facts))
    all_gather(theirs, mine, group)
    other = (theirs.view(num, -1) != mine).cpu()
    for name, differs in zip(facts, other.unbind(1), strict=True):
        if differs.any():
            where = dist.get_process_group_ranks(group)[int(differs.int().argmax())]
            raise TrimtabError(
                f"{name} must be the same on all ranks, got {facts[name]!r} here and another on rank {where}: "
                "build it alike everywhere, from nothing that depends on the rank"
            )


def _digest(fact: object) -> int:
    """64 bits that are the same in every process."""
    return int.from_bytes(hashlib.blake2b(repr(fact).encode(), digest_size=8).digest(), "big", signed=True)


def require_room(ddp: DistributedDataParallel) -> None:
    """Refuse a DDP model that has a hook already: it takes one, for good."""
    if ddp.mixed_precision is not None:
        raise TrimtabError(
            "DDP's mixed_precision registers a hook of its own and leaves no place for another, "
            f"got {ddp.mixed_precision}: use torch.autocast, or parameters in bf16"
        )
    if ddp._comm_hooks:
        raise TrimtabError(
            f"a DDP model has one hook, got one that has {ddp._comm_hooks[0][0].__qualname__}: wrap the model anew"
        )
