# SPDX-License-Identifier: Apache-2.0
"""The decoder blocks of a model, and how the model calls them.

Blocks are the members of the longest `nn.ModuleList` each of whose members holds a linear; a list inside such a member
(experts) is not looked at. Nothing is known of names: `model.layers`, `gpt_neox.layers` and `blocks` are found alike.

A block is more than a function of the residual stream: it is called with positions, masks, rotary tables. One forward
of one sequence records the arguments of every block (some models give other tables to every other block), and they are
repeated for all sequences, which have the same length. They carry a batch dimension of 1 at most, so they fit any
batch. The stream before the first block is recorded for each sequence by a forward that stops there.
"""

import inspect
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from trimtab.errors import TrimtabError


def find_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """The decoder blocks of a model by path, in order."""
    found: dict[str, nn.Module] = {}

    def visit(module: nn.Module, path: str) -> None:
        nonlocal found
        if isinstance(module, nn.ModuleList) and len(module) and all(map(_has_linear, module)):
            if len(module) > len(found):
                found = {f"{path}.{index}" if path else str(index): block for index, block in enumerate(module)}
            return
        for name, child in module.named_children():
            visit(child, f"{path}.{name}" if path else name)

    visit(model, "")
    if not found:
        raise TrimtabError(
            f"retraining walks over decoder blocks, an nn.ModuleList whose members hold nn.Linear, and "
            f"{type(model).__name__} has none: give a model that is built so"
        )
    return found


def _has_linear(module: nn.Module) -> bool:
    return any(isinstance(one, nn.Linear) for one in module.modules())


@dataclass(frozen=True)
class Call:
    """The arguments a block is called with, beside the residual stream."""

    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    name: str | None = None
    """The keyword that the stream goes by; None: it is the first argument."""

    def on(self, device: torch.device) -> "Call":
        """The same with its tensors there."""
        return Call(_moved(self.args, device), _moved(self.kwargs, device), self.name)

    def arguments(self, x: Tensor) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """All arguments, for a residual stream x."""
        if self.name is None:
            return (x, *self.args), dict(self.kwargs)
        return self.args, {**self.kwargs, self.name: x}


class _StopError(Exception):
    """The first block is reached."""


@torch.no_grad()
def record_calls(
    model: nn.Module, blocks: dict[str, nn.Module], tokens: Tensor, device: torch.device | None = None
) -> list[Call]:
    """How the model calls each of its blocks for one sequence; tokens (1, length).

    With a device each block is moved there for its own turn, so that the forward needs no more than one block on it.
    """
    calls: dict[str, Call] = {}
    home = next(model.parameters()).device
    last = list(blocks)[-1]

    def recorder(path: str) -> Callable[..., Any]:
        def record(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if path in calls:
                raise TrimtabError(f"the block {path} is called twice in one forward: such a model is not supported")
            calls[path] = _split(path, args, kwargs)[1]
            if path == last:
                raise _StopError
            if device is None:
                return None
            module.to(device)
            return _moved(args, device), _moved(kwargs, device)

        return record

    def back(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        module.to(home)
        return _moved(output, home)

    hooks = []
    for path, block in blocks.items():
        hooks.append(block.register_forward_pre_hook(recorder(path), with_kwargs=True, prepend=True))
        if device is not None:
            hooks.append(block.register_forward_hook(back))
    try:
        with suppress(_StopError):
            run(model, tokens)
    finally:
        for hook in hooks:
            hook.remove()
    if list(calls) != list(blocks):
        raise TrimtabError(
            "the model must call each of its blocks once and in order, and called "
            f"{', '.join(calls) or 'none'}: such a model is not supported"
        )
    return list(calls.values())


@torch.no_grad()
def first_inputs(model: nn.Module, first: nn.Module, sequences: Tensor) -> Tensor:
    """The residual stream before the first block, (sequences, length, width)."""
    seen: list[Tensor] = []

    def stop(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        seen.append(_split("the first block", args, kwargs)[0].detach())
        raise _StopError

    hook = first.register_forward_pre_hook(stop, with_kwargs=True, prepend=True)
    try:
        for sequence in sequences:
            with suppress(_StopError):
                run(model, sequence.unsqueeze(0))
    finally:
        hook.remove()
    return torch.cat(seen)


def run(model: nn.Module, tokens: Tensor) -> Any:
    """Call a language model on tokens (batch, length), where its weights are, without a cache."""
    takes = inspect.signature(model.forward).parameters
    kwargs = {"use_cache": False} if "use_cache" in takes else {}
    return model(tokens.to(next(model.parameters()).device), **kwargs)


def stream(output: Any) -> Tensor:
    """The residual stream that a block returns, alone or first of several."""
    first = output[0] if isinstance(output, tuple) else output
    if not isinstance(first, Tensor):
        raise TrimtabError(f"a block must return its residual stream, alone or first, got a {type(first).__name__}")
    return first


def _split(path: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, Call]:
    """The residual stream among the arguments of a block, and the rest."""
    if args and isinstance(args[0], Tensor):
        return args[0], Call(args[1:], dict(kwargs))
    if not args and isinstance(kwargs.get("hidden_states"), Tensor):
        rest = {name: value for name, value in kwargs.items() if name != "hidden_states"}
        return kwargs["hidden_states"], Call((), rest, "hidden_states")
    raise TrimtabError(f"{path} must be called with the residual stream as its first argument, or as hidden_states")


def _moved(value: Any, device: torch.device) -> Any:
    if isinstance(value, Tensor):
        return value.detach().to(device)
    if isinstance(value, tuple | list):
        return type(value)(_moved(one, device) for one in value)
    if isinstance(value, dict):
        return {name: _moved(one, device) for name, one in value.items()}
    return value
