# SPDX-License-Identifier: Apache-2.0
"""What trimtab knows about the shape of a model, without knowing any model.

Some questions come up in several rooms and must have one answer: which module is the output head
(`convert_` leaves it alone, optimizers treat it apart), which block a module lies in, and which expert.
Blocks and experts are read off the dotted path: `model.layers.3.mlp.up` lies in block `model.layers.3`,
`blocks.1.moe.experts.5.down` in expert `blocks.1.moe.experts.5`.

Experts may also be the slices of one parameter of shape (experts, ...), as Transformers 5 and grouped GEMMs keep them:
`blocks.1.moe.experts.down` of shape (8, in, out) holds a piece of each of `blocks.1.moe.experts.0` to `.7`.

Wrappers add to a path (`module.` by DDP, `_orig_mod.` by torch.compile, `_checkpoint_wrapped_module.`). Names here are
those of the bare model, so that what was saved under one wrapping is found under another.
"""

import re
from collections.abc import Mapping

import torch
from torch import nn

from trimtab.errors import TrimtabError

EXPERT = re.compile(r"^(.*?\bexperts\.\d+)(\.|$)")
WRAPPED = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")


def bare_modules(model: nn.Module) -> dict[str, nn.Module]:
    """The modules of a model by path, as `named_modules` gives them, without any wrapper and its part of the path."""
    found: dict[str, nn.Module] = {}
    visited: set[nn.Module] = set()

    def visit(module: nn.Module, path: str) -> None:
        module = _unwrapped(module)
        if module in visited:
            return
        visited.add(module)
        found[path] = module
        for name, child in module.named_children():
            visit(child, f"{path}.{name}" if path else name)

    visit(model, "")
    return found


def _unwrapped(module: nn.Module) -> nn.Module:
    while True:
        if isinstance(module, nn.parallel.DistributedDataParallel | nn.DataParallel):
            inner = module.module
        else:
            inner = next((module._modules[name] for name in WRAPPED if name in module._modules), None)
        if inner is None:
            return module
        module = inner


def stacked(path: str, module: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters of a module that hold one slice per expert along their first dimension, by their own name.

    They are those of a module that owns a weight of three dimensions and is called `experts`, or has their number as
    an attribute (`num_experts`, ...); a bias of shape (experts, out) beside it is one of them.
    """
    own = dict(module.named_parameters(recurse=False))
    numbers = {value for name, value in vars(module).items() if "experts" in name and isinstance(value, int)}
    is_called = path.rpartition(".")[2].endswith("experts")
    lengths = {len(p) for p in cubes(module).values() if is_called or len(p) in numbers}
    return {name: p for name, p in own.items() if p.dim() and len(p) in lengths} if len(lengths) == 1 else {}


def cubes(module: nn.Module) -> dict[str, nn.Parameter]:
    """The weights of three dimensions that a module owns, by their own name; those of convolutions are none."""
    own = () if isinstance(module, nn.modules.conv._ConvNd) else module.named_parameters(recurse=False)
    return {name: p for name, p in own if p.dim() == 3}


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
        named = bare_modules(model)
        if head not in named:
            raise TrimtabError(
                f"head must be the path of a module of the model, got {head!r}: see model.named_modules()"
            )
        return named[head]
    getter = getattr(_unwrapped(model), "get_output_embeddings", None)
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
