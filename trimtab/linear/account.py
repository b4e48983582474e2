# SPDX-License-Identifier: Apache-2.0
"""What a high unit costs in memory: the activations that its linears keep for their backward.

The paper's model (arXiv 2606.00539, eq. 67): in a step whose high set is E,

    extra bytes = (p_high - p_low) / 8 * sum over b in E of Act_b,

with Act_b the elements that unit b saves and p the bits per element on each path. Query, key and value read one
tensor, gate and up another, so a layer has seven linears but four saved inputs: the sum is given per unit, as in the
paper, and once per distinct tensor. Scales are not counted. Emulated paths keep their tensors in the input's type;
these are the bytes that the formats stand for.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from trimtab.linear.formats import format_of
from trimtab.linear.linear import switch_linears
from trimtab.linear.paths import Path


class SavedInput(NamedTuple):
    """One tensor that linears keep for their backward."""

    elements: int
    units: tuple[str, ...]
    """The unit of each linear that reads it, one entry per linear."""


def saved_bits(path: Path, dtype: torch.dtype) -> int:
    """Bits per element of the input that a path keeps for its backward."""
    cast = path.grad_weight.right if path.grad_weight is not None else None
    return dtype.itemsize * 8 if cast is None else format_of(cast.fmt).bits


@torch.no_grad()
def saved_inputs(model: nn.Module, forward: Callable[[], object]) -> list[SavedInput]:
    """Run a forward and see which tensors the converted linears read; changes no state of the model."""
    seen: dict[tuple[int, tuple[int, ...]], tuple[Tensor, list[str]]] = {}
    training = model.training

    def note(module: nn.Module, args: tuple[Any, ...]) -> None:
        x = args[0]  # kept alive until the end, so that no two tensors share an address
        seen.setdefault((x.data_ptr(), tuple(x.shape)), (x, []))[1].append(module.switch.name)  # type: ignore[union-attr]

    hooks = [linear.register_forward_pre_hook(note) for linear in switch_linears(model)]
    model.eval()
    try:
        forward()
    finally:
        model.train(training)
        for hook in hooks:
            hook.remove()
    return [SavedInput(x.numel(), tuple(units)) for x, units in seen.values()]


def describe_saved(model: nn.Module, forward: Callable[[], object]) -> dict[str, Any]:
    """The saved inputs of a converted model and the bits of both paths, as a run folder keeps them."""
    first = next(switch_linears(model))
    bits = [saved_bits(path, first.weight.dtype) for path in (first.recipe.low, first.recipe.high)]
    inputs = [{"elements": x.elements, "units": list(x.units)} for x in saved_inputs(model, forward)]
    return {"bits": bits, "inputs": inputs}
