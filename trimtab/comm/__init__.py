# SPDX-License-Identifier: Apache-2.0
"""Gradient exchange that sends less, and a count of what is sent.

greedylore.py    GreedyLore: a DDP hook that sends a low-rank part of each gradient and keeps the rest for later
lowrank.py       its method, as functions of one matrix; choice.py which tensors it compresses, and why;
                 exchange.py how it talks to other ranks without waiting
onebit_adam.py   OneBitAdam: Adam whose momentum travels as signs; onebit.py its compressed mean; onebit_steps.py its
                 two kinds of step
guards.py        what both ask first: that all ranks mean the same, and that DDP has room for a hook
traffic.py       traffic: counts the bytes of every collective; the collectives that this room sends through
"""

import importlib
from typing import TYPE_CHECKING

from trimtab.comm.traffic import traffic

if TYPE_CHECKING:
    from trimtab.comm.greedylore import GreedyLore as GreedyLore
    from trimtab.comm.onebit_adam import OneBitAdam as OneBitAdam

__all__ = ["GreedyLore", "OneBitAdam", "traffic"]

_HOMES = {"GreedyLore": "trimtab.comm.greedylore", "OneBitAdam": "trimtab.comm.onebit_adam"}


def __getattr__(name: str) -> object:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'trimtab.comm' has no attribute {name!r}; it has {', '.join(__all__)}")
