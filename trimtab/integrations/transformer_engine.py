# SPDX-License-Identifier: Apache-2.0
"""Transformer Engine: its linears become units, through a nested `autocast`.

    print(adopt_(model))
    controller = trimtab.Controller(model, policy, total_steps=1000)
    for batch in loader:
        with te.autocast(enabled=True, recipe=Float8CurrentScaling()):
            loss = model(batch)
        loss.backward()
        controller.step()
        ...

What it can switch: all GEMMs of `Linear`, `LayerNormLinear`, `LayerNormMLP` and `GroupedLinear` together. Low is what
the surrounding autocast says, high the same module inside `autocast(enabled=False)`: the weight's own type. Transformer
Engine keeps the choice of a forward for its backward.

Left alone, with the reason in the report: modules whose primary weights are FP8, because their high-precision weight
would be a dequantized copy. Under delayed scaling a high forward is run with `calibrating=True`, so that amaxes of
inputs and weights stay fresh; those of gradients do not. Current or block scaling has no such memory: prefer it.

Its forward is a graph break under `torch.compile` anyway; the switch is read outside the graph.
"""

import functools
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from trimtab.control.units import Grouping
from trimtab.errors import MissingExtraError
from trimtab.integrations import switching
from trimtab.integrations.switching import AdoptReport, FilterFn, Switched

try:
    import transformer_engine.pytorch as te  # pyright: ignore[reportMissingImports]

    try:
        from transformer_engine.pytorch.quantization import (  # pyright: ignore[reportMissingImports]
            FP8GlobalStateManager,
        )
    except ImportError:  # before 2.8
        from transformer_engine.pytorch.fp8 import FP8GlobalStateManager  # pyright: ignore[reportMissingImports]
except ImportError as error:
    raise MissingExtraError(
        "trimtab.integrations.transformer_engine needs transformer_engine, which is not installed: "
        "pip install --no-build-isolation 'transformer_engine[pytorch]'"
    ) from error

KINDS = ("Linear", "LayerNormLinear", "LayerNormMLP", "GroupedLinear")

release_ = switching.release_


def adopt_(model: nn.Module, *, unit: Grouping = "linear", filter_fn: FilterFn | None = None) -> AdoptReport:
    """Make a model's Transformer Engine linears switchable, in place; every unit starts low.

    Args:
        unit: what switches together: `"linear"`, `"block"`, `"expert"`, or a list of name patterns.
        filter_fn: `filter_fn(module, fqn) -> bool`; False leaves that module alone.
    """
    paths = "low as Transformer Engine's autocast says, high with it off, all GEMMs of a module"
    return switching.adopt_(model, _switched, paths, unit=unit, filter_fn=filter_fn)


def _switched(module: nn.Module) -> type[Switched] | str | None:
    kinds = tuple(getattr(te, kind) for kind in KINDS if hasattr(te, kind))
    if not isinstance(module, kinds):
        return None
    if getattr(module, "primary_weights_in_fp8", False):
        return "its primary weights are FP8: there is no high-precision weight"
    return _subclass(type(module))


@functools.cache
def _subclass(kind: type[nn.Module]) -> type[Switched]:
    """A module's class with a switch."""

    @torch.compiler.disable
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        with _high() if self.goes_high() else nullcontext():
            return kind.forward(self, *args, **kwargs)

    return type(f"Switched{kind.__name__}", (Switched, kind), {"forward": forward, "__module__": __name__})


def _high() -> AbstractContextManager[Any]:
    """The surrounding autocast, turned off; its recipe and group stay for whoever calibrates."""
    if not FP8GlobalStateManager.is_fp8_enabled():
        return nullcontext()
    recipe, ranks = FP8GlobalStateManager.get_fp8_recipe(), FP8GlobalStateManager.get_fp8_group()
    how = {"enabled": False, "calibrating": recipe.delayed()}
    if hasattr(te, "autocast"):
        return te.autocast(**how, recipe=recipe, amax_reduction_group=ranks)
    return te.fp8_autocast(**how, fp8_recipe=recipe, fp8_group=ranks)
