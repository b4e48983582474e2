# SPDX-License-Identifier: Apache-2.0
"""Excess kurtosis: how much of a vector sits in a few large entries, and a probe that measures it inside a model.

    k(x) = mean( ((x - mu) / sigma)^4 ) - 3         over the features of one token; sigma^2 = mean((x - mu)^2)

    Gaussian entries     -6 / (d + 1) on average, with standard deviation sqrt(24 / d) from vector to vector
    one entry alone      d - 5 + 1 / (d - 1), the largest value there is
    uniform entries      -1.2

It is the population form (centred, biased, not clamped), free of shift and scale, as in equation 4 of OSP (arXiv
2506.19697). The script published with that paper computes something else: an uncentred fourth moment over an unbiased
variance, clamped at zero, on sequences of a single token. It reads about 0.04 on plain Gaussian noise of 2,048
features, and 40 where this one reads 0, on entries with mean 2 and variance 1. Do not compare the two.

A vector without spread has no kurtosis: the function gives NaN, as scipy does, and the probe counts it apart.
"""

import functools
import math
import warnings
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from trimtab.errors import NoEffectWarning, TrimtabError
from trimtab.modules import block_of, in_backward, is_router, output_head


@torch.no_grad()
def excess_kurtosis(x: Tensor, dim: int = -1) -> Tensor:
    """The excess kurtosis along one dimension, in float32 (in float64 for float64); NaN where there is no spread."""
    x = x if x.dtype == torch.float64 else x.float()
    low, high = torch.aminmax(x, dim=dim, keepdim=True)
    # In units of the spread no fourth power can overflow or vanish, and equal entries give 0 / 0 or inf / inf.
    square = ((x - x.mean(dim=dim, keepdim=True)) / (high - low)).square()
    return square.square().mean(dim=dim) / square.mean(dim=dim).square() - 3


class Kurtosis(NamedTuple):
    """What a probe saw at one place."""

    mean: float
    """Mean over the tokens; NaN where there were none."""
    max: float
    """Largest of a single token; NaN where there were none."""
    tokens: int
    undefined: int
    """Tokens left out because their vector had no spread or was not finite."""


Modules = Sequence[str] | Callable[[nn.Module, str], bool]


class KurtosisProbe:
    """Measures the excess kurtosis of every token's vector at some places of a model, while its `with` block runs.

        with KurtosisProbe(model) as probe:
            model(tokens)
        probe.summary()["blocks.3"].mean

    Nothing is copied to the host before `summary()`, and outside the block the model has no trace of the probe. Entered
    again it goes on counting. A forward that repeats another one in the backward (activation checkpointing) is not
    counted, and each process counts its own tokens. What was compiled before does not call hooks: measure it under
    `torch.compiler.set_stance("force_eager")`. A block in which nothing was measured warns.

    Args:
        modules: where to measure, at the input of modules: name patterns such as `"blocks.*.mlp_norm"`, or a function
            of (module, path). Instead of `where`.
        where: `"residual"` (the default), the residual stream as it enters each block, and as it leaves the last one
            (`"blocks.3 output"`); `"linears"`, what each linear in a block multiplies, routers left out.
    """

    def __init__(self, model: nn.Module, modules: Modules | None = None, *, where: str | None = None) -> None:
        self._places = _places(model, modules, where)
        self._seen: dict[str, Tensor] = {}  # name -> sum, tokens, undefined, max
        self._hooks: list[RemovableHandle] = []
        self._called = False

    def __enter__(self) -> "KurtosisProbe":
        if self._hooks:
            raise TrimtabError("a probe is entered once at a time, and this one is active: make a second one")
        self._called = False
        for name, (module, after) in self._places.items():
            hook = functools.partial(self._after if after else self._before, name)
            register = module.register_forward_hook if after else module.register_forward_pre_hook
            self._hooks.append(register(hook, with_kwargs=True))
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        if kind is None and not self._called:
            warnings.warn(
                "a probe measured nothing: run the model inside its block; a compiled one calls no hooks, so run it "
                'under torch.compiler.set_stance("force_eager")',
                NoEffectWarning,
                stacklevel=2,
            )

    def summary(self) -> dict[str, Kurtosis]:
        """What was seen so far, by place; one copy to the host."""
        device = next((seen.device for seen in self._seen.values()), None)
        rows = [seen.to(device, non_blocking=True) for seen in self._seen.values()]
        seen = dict(zip(self._seen, torch.stack(rows).tolist() if rows else (), strict=True))
        found = {}
        for name in self._places:
            total, tokens, undefined, most = seen.get(name, (0.0, 0, 0, 0.0))
            mean, most = (total / tokens, most) if tokens else (math.nan, math.nan)
            found[name] = Kurtosis(mean, most, int(tokens), int(undefined))
        return found

    def mean(self) -> float:
        """The mean over the places that saw a token: one number for a model. NaN if none did."""
        means = [row.mean for row in self.summary().values() if row.tokens]
        return sum(means) / len(means) if means else math.nan

    def _before(self, name: str, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._add(name, (*args, *kwargs.values()))

    def _after(self, name: str, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        self._add(name, output if isinstance(output, tuple) else (output,))

    @torch.no_grad()
    def _add(self, name: str, values: tuple[Any, ...]) -> None:
        self._called = True
        x = next((value for value in values if isinstance(value, Tensor) and value.is_floating_point()), None)
        if x is None:
            raise TrimtabError(f"a probe measures vectors of numbers, but {name!r} has none: choose other modules")
        if x.numel() == 0 or in_backward():  # a recompute is not a second look
            return
        kurtosis = excess_kurtosis(x).double()
        known = ~kurtosis.isnan()
        most = kurtosis.where(known, -math.inf).max()
        new = torch.stack([kurtosis.nansum(), known.sum().double(), (~known).sum().double(), most])
        old = self._seen.get(name)
        self._seen[name] = new if old is None else torch.cat([old[:3] + new[:3], torch.maximum(old[3:], new[3:])])


def _places(model: nn.Module, modules: Modules | None, where: str | None) -> dict[str, tuple[nn.Module, bool]]:
    """Name -> the module to measure at, and whether after it."""
    named = dict(model.named_modules())
    if modules is not None:
        if where is not None:
            raise TrimtabError(f"a probe takes modules or where, got both ({where!r}): leave one out")
        paths = _chosen(named, modules)
    elif where == "linears":
        head = output_head(model)
        linears = [path for path, module in named.items() if isinstance(module, nn.Linear) and module is not head]
        paths = [path for path in linears if block_of(path) is not None and not is_router(path, named)]
    elif where in (None, "residual"):
        paths = [path for path in named if block_of(path) == path]
    else:
        raise TrimtabError(f"where must be 'residual' or 'linears', got {where!r}: for other places use modules=")
    if not paths:
        raise TrimtabError("a probe needs a place to measure at, got none: name some by modules=[patterns]")
    places = {path: (named[path], False) for path in paths}
    if modules is None and where != "linears":
        last = {path.rpartition(".")[0]: path for path in paths}  # of each stack of blocks
        places |= {f"{path} output": (named[path], True) for path in last.values()}
    return places


def _chosen(named: dict[str, nn.Module], modules: Modules) -> list[str]:
    """The paths that some patterns or a function choose; each pattern must match."""
    if callable(modules):
        return [path for path, module in named.items() if modules(module, path)]
    if isinstance(modules, str):
        raise TrimtabError(f"modules must be patterns or a function, got {modules!r}: write [{modules!r}]")
    for pattern in modules:
        if not any(fnmatchcase(path, pattern) for path in named):
            raise TrimtabError(f"a pattern must match a module, got {pattern!r}: see model.named_modules()")
    return [path for path in named if any(fnmatchcase(path, pattern) for pattern in modules)]
