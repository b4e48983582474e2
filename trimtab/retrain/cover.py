# SPDX-License-Identifier: Apache-2.0
"""Which weights of a model the 4-bit check covers, and which linears have a part to play in it.

It asks for the structure, not for the model: every `nn.Linear` is covered except those with a reason not to be
(`reason_to_keep`), attention is a module with `head_dim` and a linear named `o` or `o_proj`, and the feed-forward
layer's second linear is named `down` or `down_proj`. Patterns name others; a pattern that matches nothing is refused.
"""

from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase

from torch import nn

from trimtab.checks import is_whole
from trimtab.errors import TrimtabError
from trimtab.modules import is_router, output_head
from trimtab.nn.embproj import EmbProj

OUT = ("o", "o_proj")
"""Names of attention's output linear."""
DOWN = ("down", "down_proj")
"""Names of the feed-forward layer's second linear."""

Linears = dict[str, nn.Linear]


def cover(model: nn.Module, skip: Sequence[str], head: nn.Module | str | None) -> tuple[Linears, dict[str, str]]:
    """The linears to round, by path, and the reason for every other weight matrix but embeddings to stay."""
    modules = dict(model.named_modules())
    head = output_head(model, head)
    kept = [module for module in modules.values() if isinstance(module, nn.Embedding) or module is head]
    tied = {id(getattr(module, "weight", None)) for module in kept}
    linears = {path: module for path, module in modules.items() if isinstance(module, nn.Linear)}
    reasons = {
        path: "output head" if module is head else reason_to_keep(path, modules, tied)
        for path, module in linears.items()
    } | dict.fromkeys(match(skip, linears, "skip"), "skip")
    skipped = {path: reason for path, reason in reasons.items() if reason is not None}
    for path, module in modules.items():
        if not isinstance(module, nn.Linear | nn.Embedding):
            own = [name for name, parameter in module.named_parameters(recurse=False) if parameter.dim() > 1]
            skipped |= {join(path, name): f"part of a {type(module).__name__}, not a linear" for name in own}
    return {path: linear for path, linear in linears.items() if path not in skipped}, skipped


def reason_to_keep(path: str, modules: Mapping[str, nn.Module], tied: set[int]) -> str | None:
    """Why a linear stays at 16 bits; None if it does not."""
    linear, parent = modules[path], modules[path.rpartition(".")[0]]
    assert isinstance(linear, nn.Linear)
    if isinstance(linear, EmbProj):
        return "EmbProj, to be absorbed by embedding or head"
    if is_router(path, modules):
        return "router"
    if any(part.startswith("lora_") for part in path.split(".")):
        return "LoRA adapter"
    if id(linear.weight) in tied:
        return "shares its weight with an embedding or the head"
    if isinstance(parent, nn.MultiheadAttention):
        return "nn.MultiheadAttention does not call it"
    if "weight" not in linear._parameters:  # weight norms, parametrizations: what is rounded would be thrown away
        return "its weight is computed anew at each call"
    if not linear.weight.is_floating_point() or linear.weight.shape != (linear.out_features, linear.in_features):
        return "its weight is no matrix of floats"
    return None


def attention_modules(model: nn.Module) -> dict[str, nn.Module]:
    """The attention modules, by path."""
    return {
        path: module
        for path, module in model.named_modules()
        if is_whole(getattr(module, "head_dim", None), 1)
        and any(isinstance(getattr(module, name, None), nn.Module) for name in OUT)
    }


def head_sizes(
    attentions: Mapping[str, nn.Module], linears: Linears, given: Mapping[str, int] | None
) -> dict[str, int]:
    """Path -> size of a head, for the output linears of attention; `given` maps patterns to sizes."""
    if given is not None:
        sizes: dict[str, int] = {path: given[pattern] for path, pattern in match(given, linears, "out_proj").items()}
    else:
        named = {join(path, name): getattr(module, "head_dim") for path, module in attentions.items() for name in OUT}  # noqa: B009
        sizes = {path: named[unwrapped(path)] for path in linears if unwrapped(path) in named}
    for path, size in sizes.items():
        if not is_whole(size, 1) or linears[path].in_features % size:
            raise TrimtabError(
                f"the size of a head must divide the {linears[path].in_features} inputs of {path}, got {size!r}: "
                f"give it in out_proj, such as {{{path!r}: 64}}"
            )
    return sizes


def down_projections(linears: Linears, given: Sequence[str] | None) -> list[str]:
    """Paths of the second linear of each feed-forward layer."""
    if given is not None:
        return list(match(given, linears, "down_proj"))
    found = [path for path in linears if unwrapped(path).rpartition(".")[2] in DOWN]
    if not found:
        raise TrimtabError(
            f"ffn_hadamard rotates the linears named {' or '.join(DOWN)}, and the model has none: give patterns of "
            "yours in down_proj"
        )
    return found


def match(patterns: Iterable[str], paths: Iterable[str], what: str) -> dict[str, str]:
    """Path -> the last pattern that matches it."""
    patterns = [patterns] if isinstance(patterns, str) else list(patterns)
    paths = list(paths)
    for pattern in patterns:
        if not any(fnmatchcase(path, pattern) for path in paths):
            raise TrimtabError(
                f"{what}: a pattern must match the path of a linear, got {pattern!r}, which matches none"
            )
    return {path: pattern for pattern in patterns for path in paths if fnmatchcase(path, pattern)}


def unwrapped(path: str) -> str:
    """The path of a linear; an adapter's base linear goes by the name of what it is the base of."""
    return path.removesuffix(".base_layer")


def join(path: str, name: str) -> str:
    """The path of a child; the model's own path is empty."""
    return f"{path}.{name}" if path else name
