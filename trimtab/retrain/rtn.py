# SPDX-License-Identifier: Apache-2.0
"""The 4-bit check: round a trained model as it stands, and see what is left of it.

    report = rtn_(model, 4, 4, 16)      # weights and activations in 4 bits, keys and values as they were
    evaluate(model)                     # a model with outliers falls apart here
    report.remove()                     # quantizers off; the weights stay rounded

This is the W-A-KV protocol of OSP (arXiv 2506.19697); `rounding.py` has its formulas.

    weight of every linear              rounded in place
    input of every linear               rounded per token by a forward pre-hook
    input of attention's output linear  the same per head, because heads differ in size
    keys, values                        per token and head, at the seam of `attention.py`
    "+ Had" (ffn_hadamard)              the input of every down projection is rotated before it is rounded, its weight
                                        beforehand: their product does not change, but outliers are spread

Left at 16 bits, each with its reason in the report: embeddings, the output head, the routers of mixtures (as in
`convert_`), `lora_*` adapters, and EmbProj matrices, which OSP multiplies into embedding and head before it
quantizes: leaving them alone gives the same numbers. Biases and norms are never touched. What holds a weight matrix
but is no linear (a fused stack of experts, `nn.MultiheadAttention`) is not covered, and the report names it.

A converted model (`convert_`) keeps its paths: its low path rounds what is rounded here once more. For the protocol's
own numbers call `revert_` first, or evaluate under `running(model, "high")`.
"""

import functools
import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from trimtab.errors import NoEffectWarning, TrimtabError
from trimtab.retrain.attention import Undo, check_seams, wrap
from trimtab.retrain.cover import Linears, attention_modules, cover, down_projections, head_sizes
from trimtab.retrain.rounding import KEEP, check_bits, mix, quantize_activation, quantize_weight, wide


@dataclass(frozen=True, eq=False)
class RtnReport:
    """What `rtn_` did, what it left alone and why, and the way back."""

    w_bits: int
    a_bits: int
    kv_bits: int
    weights: tuple[str, ...] = ()
    """Paths of the linears whose weight is rounded."""
    inputs: Mapping[str, int | None] = field(default_factory=dict)
    """Path -> group size, for the linears whose input is rounded; None is a whole token."""
    rotated: tuple[str, ...] = ()
    """Paths of the linears whose input and weight are rotated."""
    attentions: tuple[str, ...] = ()
    """Paths of the attention modules whose keys and values are rounded."""
    skipped: Mapping[str, str] = field(default_factory=dict)
    """Path -> reason, for every other linear and weight matrix."""
    undo: list[Undo] = field(default_factory=list, repr=False)

    def remove(self) -> None:
        """Take the quantizers of inputs, keys and values out; the weights stay rounded (rotated ones turn back)."""
        while self.undo:
            self.undo.pop()()

    def __str__(self) -> str:
        groups = [group for group in self.inputs.values() if group is not None]
        sizes = "/".join(map(str, sorted(set(groups))))
        per_head = f", {len(groups)} of them in groups of {sizes}" if groups else ""
        parts = [
            f"{len(self.weights)} weights" if self.weights else "",
            f"{len(self.inputs)} inputs{per_head}" if self.inputs else "",
            f"{len(self.rotated)} inputs rotated" if self.rotated else "",
            f"keys and values of {len(self.attentions)} attention modules" if self.attentions else "",
        ]
        done = "; ".join(part for part in parts if part) or "nothing rounded"
        lines = [f"{self.w_bits}-{self.a_bits}-{self.kv_bits} (weights-activations-kv): {done}"]
        reasons: dict[str, list[str]] = {}
        for path, reason in self.skipped.items():
            reasons.setdefault(reason, []).append(path)
        for reason, paths in reasons.items():
            more = f" and {len(paths) - 3} more" if len(paths) > 3 else ""
            lines.append(f"  left alone {len(paths)} ({reason}): {', '.join(paths[:3])}{more}")
        return "\n".join(lines)


@torch.no_grad()
def rtn_(
    model: nn.Module,
    w_bits: int = 4,
    a_bits: int = 4,
    kv_bits: int = KEEP,
    *,
    clip_search: bool = True,
    skip: Sequence[str] = (),
    head: nn.Module | str | None = None,
    ffn_hadamard: bool = False,
    kv_hadamard: bool = True,
    out_proj: Mapping[str, int] | None = None,
    down_proj: Sequence[str] | None = None,
) -> RtnReport:
    """Round a model's weights in place, and its activations, keys and values from now on.

    Args:
        w_bits, a_bits, kv_bits: 2 to 8, or 16 to leave that part as it is.
        skip: patterns of further linears to leave at 16 bits, such as `"blocks.0.*"`.
        head: the output head (a module or its path), where it is not found by itself.
        ffn_hadamard: the protocol's "+ Had".
        kv_hadamard: rotate queries and keys before keys are rounded; the protocol always does.
        out_proj: pattern -> head size of attention's output linears. None finds them: a linear named `o` or `o_proj`
            in a module with `head_dim`.
        down_proj: patterns of the linears that `ffn_hadamard` rotates. None means those named `down` or `down_proj`.
    """
    for name, bits in (("w_bits", w_bits), ("a_bits", a_bits), ("kv_bits", kv_bits)):
        check_bits(bits, name)
    linears, skipped = cover(model, skip, head)
    attentions = attention_modules(model)
    heads = head_sizes(attentions, linears, out_proj)
    down = down_projections(linears, down_proj) if ffn_hadamard else []
    weights = _by_weight(linears, down)
    if any(getattr(h, "func", None) is _round_input for m in linears.values() for h in m._forward_pre_hooks.values()):
        raise TrimtabError("the inputs of the model are quantized already: call remove() on that report first")
    if kv_bits == KEEP:
        attentions = {}
    else:
        check_seams(attentions)
    if not linears:
        seen = f"{len(skipped)} weights with a reason to stay" if skipped else "no nn.Linear at all"
        warnings.warn(f"rtn_ rounds no linear: it saw {seen}; check skip and head", NoEffectWarning, stacklevel=3)

    undo: list[Undo] = [_forget_compiled]  # last; from here on the model changes
    for weight, is_down in weights:
        if is_down:
            weight.copy_(quantize_weight(mix(wide(weight)), w_bits, clip_search=clip_search))
            undo.append(functools.partial(_turn_back, weight))
        elif w_bits != KEEP:
            weight.copy_(quantize_weight(weight, w_bits, clip_search=clip_search))
    for path, linear in linears.items():
        if a_bits != KEEP or path in down:
            hook = functools.partial(_round_input, bits=a_bits, group=heads.get(path), rotate=path in down)
            undo.append(linear.register_forward_pre_hook(hook, with_kwargs=True).remove)
    undo += [wrap(module, kv_bits, hadamard=kv_hadamard) for module in attentions.values()]
    _forget_compiled()
    return RtnReport(
        w_bits,
        a_bits,
        kv_bits,
        weights=() if w_bits == KEEP else tuple(linears),
        inputs={} if a_bits == KEEP else {path: heads.get(path) for path in linears},
        rotated=tuple(down),
        attentions=tuple(attentions),
        skipped=skipped,
        undo=undo,
    )


def _by_weight(linears: Linears, down: Sequence[str]) -> list[tuple[Tensor, bool]]:
    """Each weight once, however many linears share it, and whether it is rotated."""
    users: dict[Tensor, list[str]] = {}
    for path, linear in linears.items():
        users.setdefault(linear.weight, []).append(path)
    for paths in users.values():
        rotated = [path for path in paths if path in down]
        if rotated and rotated != paths:
            raise TrimtabError(
                f"linears that share a weight are rotated together, but of {', '.join(paths)} only "
                f"{', '.join(rotated)} would be: name all or none of them in down_proj"
            )
    return [(weight, paths[0] in down) for weight, paths in users.items()]


def _round_input(
    module: nn.Module, args: tuple, kwargs: dict[str, Any], *, bits: int, group: int | None, rotate: bool
) -> tuple[tuple, dict[str, Any]]:
    """The forward pre-hook of a linear."""
    x, *rest = args or (kwargs.pop("input"),)
    return (quantize_activation(mix(x) if rotate else x, bits, group=group), *rest), kwargs


def _forget_compiled() -> None:
    """Have what was compiled compiled anew: it does not look whether hooks have come or gone, and would go on without.

    That takes time, for all of the process; a weight rotated for an input that is not would cost the result.
    """
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()


@torch.no_grad()
def _turn_back(weight: Tensor) -> None:
    weight.copy_(mix(weight))
