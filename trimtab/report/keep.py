# SPDX-License-Identifier: Apache-2.0
"""Keep: the persistent offenders of a run as a list of what to keep high for good, in another tool's own form.

    torchao     a Python file with `module_filter_fn`, for `torchao.float8.convert_to_float8_training`
    te          a Python file with `keep_high_`, which puts a nested autocast around the listed modules of Transformer
                Engine
    megatron    the YAML of `--te-precision-config-file`: ordered globs, of which the first that matches decides

A persistent offender triggered again soon after its release, time after time (`summary.py`): a lock does not cure it, a
high path for good does, and a static list needs no controller any more.

A unit's name is the path of a linear, of a block or expert with everything below it, or a glob, as the run was
converted. Paths are those of the bare model, without what DDP, FSDP and torch.compile put before them.

Megatron has other names than Transformers, and fuses q, k, v and gate, up: those are translated here, and a fused GEMM
stays high as a whole. What has no name there is named in a comment and must be added by hand. With pipeline parallelism
the number of a layer in a name is its place in its stage.

Names are somebody's text: they are written as literals of the target's language, and never into a comment as they are.
"""

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path

from trimtab.errors import TrimtabError
from trimtab.report.summary import summarize

INDEX = re.compile(r"^(?:.*?\.)?(?:layers|blocks|h)\.(\d+)(?:\.(.*))?$")
MEGATRON = {
    ("q_proj", "k_proj", "v_proj", "q", "k", "v", "qkv_proj", "c_attn", "linear_qkv"): "self_attention.linear_qkv",
    ("o_proj", "o", "out_proj", "linear_proj"): "self_attention.linear_proj",
    ("gate_proj", "up_proj", "gate", "up", "gate_up_proj", "c_fc", "linear_fc1"): "mlp.linear_fc1",
    ("down_proj", "down", "linear_fc2"): "mlp.linear_fc2",
}
"""What the last part of a linear's path is called there; `c_proj` is two things in GPT-2, see `_megatron_name`."""
SPECIAL = re.compile(r"([*?[])")

_MATCH = '''

def is_kept(fqn: str) -> bool:
    """Whether a module is in the list, or inside of what is."""
    return any(fqn == name or fqn.startswith(name + ".") or fnmatchcase(fqn, name) for name in KEEP_HIGH)
'''
_TORCHAO = '''

def module_filter_fn(module, fqn: str) -> bool:
    """False for what stays in high precision.

    convert_to_float8_training(model, module_filter_fn=module_filter_fn), before compile and FSDP. It says yes to every
    other linear: join it with your own filter for the output head and for sizes that are no multiple of 16.
    """
    return not is_kept(fqn)
'''
_TE = '''

def keep_high_(model) -> list[str]:
    """Run the listed modules outside of FP8, in place; returns their names. Call it once, before training."""
    import transformer_engine.pytorch as te

    autocast = getattr(te, "autocast", None) or te.fp8_autocast
    found = []
    for fqn, module in model.named_modules():
        if is_kept(fqn) and not is_kept(fqn.rpartition(".")[0]):
            module.forward = _high(module.forward, autocast)
            found.append(fqn)
    return found


def _high(forward, autocast):
    def high(*args, **kwargs):
        with autocast(enabled=False):
            return forward(*args, **kwargs)

    return high
'''


def keep_list(folder: str | Path, top: int | None = None) -> tuple[str, ...]:
    """The units of a run to keep high: its persistent offenders, or the `top` ones with the most steps high."""
    if top is not None and top < 1:
        raise TrimtabError(f"top must be at least 1 unit, got {top}")
    offenders = [offender for offender in summarize(folder).offenders if offender.steps_high]
    chosen = [o for o in offenders if o.persistent] if top is None else offenders[:top]
    if not chosen:
        reason = "no unit of it ever ran high" if not offenders else "none of its units is a persistent offender"
        remedy = "" if not offenders else "; --top N takes the N units with the most steps high"
        raise TrimtabError(f"there is nothing to keep high in {folder}: {reason}{remedy}")
    return tuple(offender.unit for offender in chosen)


def to_torchao(units: Sequence[str], run: str = "") -> str:
    """A Python file with a filter for torchao."""
    return _python(units, run, "torchao.float8") + _MATCH + _TORCHAO


def to_te(units: Sequence[str], run: str = "") -> str:
    """A Python file that takes modules of Transformer Engine out of FP8."""
    return _python(units, run, "Transformer Engine") + _MATCH + _TE


def to_megatron(units: Sequence[str], run: str = "") -> str:
    """The YAML of Megatron's --te-precision-config-file."""
    named: dict[str, list[str]] = {}
    unknown = []
    for unit in units:
        pattern = _megatron_name(unit)
        if pattern is None:
            unknown.append(unit)
        else:
            named.setdefault(pattern, []).append(unit)
    if not named:
        raise TrimtabError(
            f"no name of Megatron is known for {', '.join(map(repr, unknown[:3]))}: its own are such as "
            "decoder.layers.3.mlp.linear_fc2; write the matchers by hand from --to torchao"
        )
    lines = [
        f"# Units of the run {json.dumps(run)} to keep in BF16: --te-precision-config-file THIS.yaml",
        "# Modules that match nothing keep the precision that Megatron's other arguments give them. With pipeline",
        "# parallelism the number of a layer is its place in its stage: change it there.",
    ]
    lines += [f"# no name of Megatron is known for {json.dumps(unit)}: add a matcher by hand" for unit in unknown]
    lines += [
        "configs:",
        "  bf16:",
        '    transformer_engine_config_type: "TEQuantizationParams"',
        "    training_recipe: {}",
        "matchers:",
    ]
    for number, (pattern, sources) in enumerate(named.items()):
        lines += [
            f"  # {', '.join(map(json.dumps, sources))}",
            f"  keep_high_{number}:",
            '    type: "glob"',
            "    enabled: true",
            f"    pattern: {json.dumps(pattern)}",
            '    config: "bf16"',
        ]
    return "\n".join(lines) + "\n"


TARGETS: dict[str, Callable[[Sequence[str], str], str]] = {
    "torchao": to_torchao,
    "te": to_te,
    "megatron": to_megatron,
}


def _python(units: Sequence[str], run: str, tool: str) -> str:
    names = "".join(f"    {unit!a},\n" for unit in units)
    return (
        f'"""Units of a run to keep high in {tool}; written by trimtab export."""\n\n'
        f"from fnmatch import fnmatchcase\n\nRUN = {run!a}\nKEEP_HIGH = [\n{names}]\n"
    )


def _megatron_name(unit: str) -> str | None:
    """The glob of what a unit is called in Megatron; None if that is not known."""
    found = INDEX.match(unit)
    if found is None:
        return None
    layer, rest = f"*decoder.layers.{found[1]}.", found[2] or ""
    if SPECIAL.search(unit):
        return None
    if not rest:
        return f"{layer}*"
    parts = rest.removesuffix(".base_layer").split(".")
    for names, place in MEGATRON.items():
        if parts[-1] in names:
            return layer + _inside_experts(parts, place)
    if parts[-1] == "c_proj":
        return layer + ("self_attention.linear_proj" if "attn" in parts else "mlp.linear_fc2")
    if parts[-1] in ("self_attn", "self_attention", "attn", "attention"):
        return f"{layer}self_attention.*"
    if parts[-1] == "mlp" or (len(parts) > 1 and parts[-2] == "experts"):  # experts are one grouped GEMM there
        return f"{layer}mlp.*"
    return None


def _inside_experts(parts: Sequence[str], place: str) -> str:
    """Where a linear of an expert is: all experts of a layer are one grouped GEMM."""
    inside = next((part for part in ("experts", "shared_experts") if part in parts), None)
    return place if inside is None else place.replace("mlp.", f"mlp.{inside}.")
