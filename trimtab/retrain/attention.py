# SPDX-License-Identifier: Apache-2.0
"""Reach a model's keys and values after the rotary positions: there is no module to hook there, but there is a seam.

    attn.attend    a callable attribute (q, k, v) -> y, as the lab's decoder has it: it is wrapped
    attn.config    a Transformers config: the attention function is looked up in it by name at every call. The module
                   gets a copy of its config with a name of ours, whose function quantizes and then calls the one
                   before. The model's own config, which makes the masks and may be shared, stays as it is.

A model with neither is refused: keys that stay at 16 bits must not pass for 4-bit ones. A Transformers cache keeps the
keys as they were and they are quantized whenever they are read, which gives the same numbers.
"""

import copy
import functools
import sys
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from trimtab.errors import TrimtabError, missing_extra
from trimtab.retrain.rounding import quantize_kv

PREFIX = "trimtab_rtn_"

Undo = Callable[[], object]


def check_seams(attentions: Mapping[str, nn.Module]) -> None:
    """Refuse attention modules whose keys and values cannot be reached, or are quantized already."""
    if not attentions:
        raise TrimtabError(
            "kv_bits below 16 needs attention modules, which have head_dim and a linear named o or o_proj, and the "
            "model has none: set kv_bits=16"
        )
    for path, module in attentions.items():
        attend, implementation = getattr(module, "attend", None), _implementation(module)
        if getattr(attend, "func", None) is _attend or (implementation or "").startswith(PREFIX):
            raise TrimtabError(f"the keys and values of {path!r} are quantized already: call remove() on that report")
        if not callable(attend) and implementation is None:
            raise TrimtabError(
                f"the keys and values of {path!r} ({type(module).__name__}) cannot be reached: give it an attribute "
                "`attend`, a callable (q, k, v) -> y that it calls after the rotary positions, or set kv_bits=16"
            )


def wrap(module: nn.Module, bits: int, *, hadamard: bool) -> Undo:
    """Quantize what an attention module attends to; returns what takes that back."""
    name = "attend" if callable(getattr(module, "attend", None)) else "config"
    before = after = getattr(module, name)
    if name == "attend":
        after = functools.partial(_attend, before, bits=bits, hadamard=hadamard)
    else:
        after = copy.copy(before)
        after._attn_implementation = _register(before._attn_implementation, bits, hadamard)
    setattr(module, name, after)
    return functools.partial(setattr, module, name, before)


def _implementation(module: nn.Module) -> str | None:
    """The name of a Transformers module's attention function; None for anything else."""
    name = getattr(getattr(module, "config", None), "_attn_implementation", None)
    return name if isinstance(name, str) else None


def _attend(inner: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, *, bits: int, hadamard: bool) -> Tensor:
    return inner(*quantize_kv(q, k, v, bits, hadamard=hadamard))


def _register(before: str, bits: int, hadamard: bool) -> str:
    """Tell Transformers of a function that quantizes and then does what `before` does; returns its name."""
    try:
        from transformers import AttentionInterface
    except ImportError:
        raise missing_extra("transformers", "hf", "quantizing the keys and values of a Transformers model") from None
    name = f"{PREFIX}{'rotated_' if hadamard else ''}kv{bits}_{before}"
    AttentionInterface.register(name, functools.partial(_attention, before, bits, hadamard))
    return name


def _attention(before: str, bits: int, hadamard: bool, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """An attention function of Transformers, (module, query, key, value, mask, ...) -> (output, weights)."""
    from transformers import AttentionInterface

    # Eager attention is not in the registry: it is a function of the file that defines the model.
    eager = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    inner = AttentionInterface().get(before, eager)
    if inner is None:
        raise TrimtabError(f"the attention function {before!r} of {type(module).__name__} is not known: use sdpa")
    q, k, v, *rest = args
    return inner(module, *quantize_kv(q, k, v, bits, hadamard=hadamard), *rest, **kwargs)
