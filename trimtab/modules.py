# SPDX-License-Identifier: Apache-2.0
"""What trimtab knows about the shape of a model, without knowing any model.

Three questions come up in several rooms and must have one answer: which module is the output head
(`convert_` leaves it alone, optimizers treat it apart), which block a module lies in, and which expert.
Blocks and experts are read off the dotted path: `model.layers.3.mlp.up` lies in block `model.layers.3`,
`blocks.1.moe.experts.5.down` in expert `blocks.1.moe.experts.5`.
"""

import re
from collections.abc import Mapping

import torch
from torch import nn

from trimtab.errors import TrimtabError

EXPERT = re.compile(r"^(.*?\bexperts\.\d+)(\.|$)")


def block_of(fqn: str) -> str | None:
    """The path up to its first index (`blocks.1.mlp.down` -> `blocks.1`), or None outside any block."""
    parts = fqn.split(".")
    for position, part in enumerate(parts):
        if part.isdigit():
            return ".".join(parts[: position + 1])
    return None


def expert_of(fqn: str) -> str | None:
    """The path up to its expert (`blocks.1.moe.experts.5.down` -> `blocks.1.moe.experts.5`), or None."""
    match = EXPERT.match(fqn)
    return match.group(1) if match else None


def is_router(fqn: str, modules: Mapping[str, nn.Module]) -> bool:
    """Whether a linear is the router of a mixture: it stands right beside a module named `experts`."""
    return hasattr(modules[fqn.rpartition(".")[0]], "experts")


def output_head(model: nn.Module, head: nn.Module | str | None = None) -> nn.Module | None:
    """Find the output head: the projection onto the vocabulary.

    `head` (a module or its path) overrides. Otherwise it is `model.get_output_embeddings()` where that
    exists, else a Linear that shares an Embedding's weight, else a Linear with as many outputs as an
    Embedding has rows (the last such one). None if the model has none of these.
    """
    if isinstance(head, nn.Module):
        return head
    if isinstance(head, str):
        named = dict(model.named_modules())
        if head not in named:
            raise TrimtabError(
                f"head must be the path of a module of the model, got {head!r}: see model.named_modules()"
            )
        return named[head]
    getter = getattr(model, "get_output_embeddings", None)
    if callable(getter):
        found = getter()
        if isinstance(found, nn.Module):
            return found
    embeddings = [m for m in model.modules() if isinstance(m, nn.Embedding)]
    linears = [m for m in model.modules() if isinstance(m, nn.Linear)]
    shared = {id(m.weight) for m in embeddings}
    rows = {m.num_embeddings for m in embeddings}
    for match in (lambda m: id(m.weight) in shared, lambda m: m.out_features in rows):
        found = [m for m in linears if match(m)]
        if found:
            return found[-1]
    return None


def in_backward() -> bool:
    """Whether a backward pass is running on this thread: a forward seen now is activation recompute."""
    return torch._C._current_graph_task_id() != -1
