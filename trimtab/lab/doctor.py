# SPDX-License-Identifier: Apache-2.0
"""Doctor: the known traps of a model, a recipe and a machine, before a run is spent on finding them.

    for finding in trimtab.doctor(model, "fp8"):
        print(finding)

Each trap is one small function over `Facts`, what is known of the case: the model's own modules (never changed, and on
the meta device never more than shapes), what `convert_` would cover, the recipe, how it is trained and on what. A
finding is an `error` (the run will fail, or is not what it seems), or a `warning` (it will be slower or worse than it
could be); each comes with its remedy. No finding does not prove health: only these traps were looked for.

    code                  severity       trap
    nothing-to-convert    error          no linear that can be switched
    already-quantized     error          the weights are stored in few bits: nothing to convert, no high path
    low-weights-gathered  error          FSDP gathers FP8 weights only, so high runs on a weight that was rounded
    tied-head-low         error          the head shares the embedding's weight and runs low
    clipped-norms         error          norms are read after clipping, which hides spikes
    shape-16              error/warning  sizes that FP8 and INT8 matrix units cannot take
    shape-128             warning        sizes that block scaling pads
    no-kernel             error          real kernels are asked for, and the recipe has none
    no-fp8-units          error/warning  the machine has no such matrix units: numbers by emulation, no speed
    delayed-scaling       warning        scales of the past clip a sudden rise, and go stale while a unit is high
    reentrant-recompute   warning        the old kind of activation checkpointing
    nothing-saved         warning        4-bit saved activations beside recompute, which saves none
    cuda-graphs           warning        compile modes that record CUDA graphs, which switches cut to pieces
    precision-casts       warning        row-wise FP8, compiled, with recompute: NaN after some steps in the wild
    small-gemms           warning        GEMMs below the size from which FP8 gains
    row-wise-slow         warning        row-wise FP8 is slower than BF16 at this width
    bf16-weights          warning        weights in BF16 lose small updates
    adapters-low          warning        LoRA adapters in FP8, whose zeros made zero scales

Sizes are torchao's heuristics for an H100 (`_auto_filter_for_recipe`) and our own step of 0.9B parameters on an H200
(docs/results.md): row-wise 0.97x of BF16, per tensor 1.18x.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import nn

from trimtab.checks import require
from trimtab.lab.config import Config
from trimtab.lab.model import ModelConfig
from trimtab.lab.task import build_model
from trimtab.linear import real
from trimtab.linear.convert import FilterFn, candidates
from trimtab.linear.linear import SwitchLinear
from trimtab.linear.paths import Cast, Recipe
from trimtab.linear.recipes import build
from trimtab.modules import bare_modules

COMPILE_MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
GRAPH_MODES = ("reduce-overhead", "max-autotune")
CHECKPOINTING = ("none", "reentrant", "nonreentrant")
CLIPPING = ("none", "before", "after")
BACKENDS = ("auto", "emulated", "real")
LISTED = 3
"""Paths that a message names."""
ROW_WISE_WIDTH = 4096
"""Widths below which row-wise FP8 was not seen to gain."""


@dataclass(frozen=True)
class Finding:
    """One trap that this case walks into."""

    code: str
    severity: str
    """`error` or `warning`."""
    message: str
    remedy: str
    where: tuple[str, ...] = ()
    """Paths of the modules, all of them."""

    def __str__(self) -> str:
        return f"{self.severity}: {self.message} [{self.code}]\n  remedy: {self.remedy}"


@dataclass(frozen=True)
class Machine:
    """What a run would be on."""

    device: str
    """`cpu` or `cuda`."""
    capability: tuple[int, int] = (0, 0)
    """Compute capability of a CUDA device."""
    name: str = "CPU"

    @classmethod
    def here(cls) -> "Machine":
        """This machine."""
        if not torch.cuda.is_available():
            return cls("cpu")
        major, minor = torch.cuda.get_device_capability()
        return cls("cuda", (major, minor), torch.cuda.get_device_name())


@dataclass(frozen=True, eq=False)
class Facts:
    """What is known of a case."""

    model: nn.Module | None
    recipe: Recipe | None
    machine: Machine
    backend: str = "auto"
    compile_mode: str | None = None
    checkpointing: str = "none"
    clipping: str = "none"
    fp8_all_gather: bool = False
    filter_fn: FilterFn | None = None
    head: nn.Module | str | None = None

    @cached_property
    def modules(self) -> dict[str, nn.Module]:
        """The model's modules by path."""
        return {} if self.model is None else bare_modules(self.model)

    @cached_property
    def low(self) -> dict[str, nn.Module]:
        """The linears that run low, or would after `convert_`, by path."""
        if self.model is None:
            return {}
        found = {path: m for path, m in self.modules.items() if isinstance(m, SwitchLinear) or _is_float8(m)}
        plain = candidates(self.model, self.modules, self.filter_fn, self.head)[0] if self.recipe is not None else []
        return found or {path: self.modules[path] for path in plain}

    @cached_property
    def casts(self) -> tuple[Cast, ...]:
        """Every cast of the low path."""
        gemms = () if self.recipe is None else [gemm for _, gemm in self.recipe.low.gemms()]
        return tuple(cast for gemm in gemms for cast in (gemm.left, gemm.right) if cast is not None)

    @property
    def multiplies_low(self) -> bool:
        """Whether the low path is one for FP8 or INT8 matrix units."""
        return bool(self.casts) and all(c.fmt in ("e4m3", "e5m2", "int8") for c in self.casts) and not self.saves

    @property
    def saves(self) -> bool:
        """Whether the low path only keeps activations in few bits."""
        return self.recipe is not None and self.recipe.low.saves

    @property
    def row_wise(self) -> bool:
        """Whether scales are per row."""
        return self.multiplies_low and any(c.group in ("token", "column") and c.fmt != "int8" for c in self.casts)

    @property
    def tiled(self) -> bool:
        """Whether scales are per block of 128."""
        return any(isinstance(c.group, tuple) and 128 in c.group for c in self.casts)

    @property
    def real(self) -> bool:
        """Whether matrix units would be used, and a shape they cannot take refused."""
        return self.backend == "real" or (self.backend == "auto" and self.machine.device == "cuda")

    @cached_property
    def recompute(self) -> str:
        """Which kind of activation checkpointing there is, by the model itself or by what was said."""
        modules = () if self.model is None else self.model.modules()
        kinds = {kind for module in modules if (kind := _recompute(module))}
        return "reentrant" if "reentrant" in kinds else kinds.pop() if kinds else self.checkpointing

    @cached_property
    def compiled(self) -> str | None:
        """The compile mode, by what was said or by the model itself; None for a model that is not compiled."""
        if self.compile_mode is not None or self.model is None:
            return self.compile_mode
        found = [mode for module in self.model.modules() if (mode := _compile_mode(module))]
        return next((mode for mode in found if mode in GRAPH_MODES), found[0] if found else None)


def doctor(
    model: nn.Module | None = None,
    recipe: str | Recipe | None = "fp8",
    *,
    backend: str = "auto",
    compile_mode: str | None = None,
    checkpointing: str = "none",
    clipping: str = "none",
    fp8_all_gather: bool = False,
    filter_fn: FilterFn | None = None,
    head: nn.Module | str | None = None,
    machine: Machine | None = None,
) -> tuple[Finding, ...]:
    """Look for known traps; errors come first. The model is not changed.

    Args:
        model: plain, converted by `convert_` or by torchao, wrapped, compiled; None looks at the rest.
        recipe: what low means; None for a model that stays as it is.
        backend: as of `convert_`.
        compile_mode: of `torch.compile`, where the model does not show it.
        checkpointing: `"none"`, `"reentrant"` or `"nonreentrant"`, where the model does not show it.
        clipping: when gradients are clipped: `"before"` or `"after"` `controller.step()`; `"none"` also stands for
            `controller.clip_grad_norm_`, which may come at any time.
        fp8_all_gather: whether FSDP gathers weights in FP8.
        filter_fn, head: as of `convert_`.
        machine: where it will run; this machine by default.
    """
    for name, value, valid in (
        ("backend", backend, BACKENDS),
        ("compile_mode", compile_mode, (None, *COMPILE_MODES)),
        ("checkpointing", checkpointing, CHECKPOINTING),
        ("clipping", clipping, CLIPPING),
    ):
        require(value in valid, f"{name} must be one of {', '.join(map(str, valid))}", value)
    facts = Facts(
        model,
        build(recipe) if isinstance(recipe, str) else recipe,
        Machine.here() if machine is None else machine,
        backend,
        compile_mode,
        checkpointing,
        clipping,
        fp8_all_gather,
        filter_fn,
        head,
    )
    found = [finding for check in CHECKS for finding in check(facts)]
    return tuple(sorted(found, key=lambda finding: finding.severity != "error"))


def _nothing_to_convert(facts: Facts) -> Iterator[Finding]:
    if facts.model is not None and facts.recipe is not None and not facts.low:
        yield Finding(
            "nothing-to-convert",
            "error",
            "the model has no linear that can be switched: convert_ would change nothing",
            "pass the model that holds the nn.Linear modules, and check filter_fn; mode='observe' needs no conversion",
        )


def _already_quantized(facts: Facts) -> Iterator[Finding]:
    config = getattr(getattr(facts.model, "config", None), "quantization_config", None)
    if config:
        method = config.get("quant_method") if isinstance(config, dict) else getattr(config, "quant_method", None)
        yield Finding(
            "already-quantized",
            "error",
            f"the weights are stored quantized ({getattr(method, 'value', method)}): there is no high-precision weight",
            "load a checkpoint in BF16 or FP32, or dequantize it first",
        )


def _low_weights_gathered(facts: Facts) -> Iterator[Finding]:
    told = [path for path, module in facts.modules.items() if _gathers_low(module)]
    if told or facts.fp8_all_gather:
        yield Finding(
            "low-weights-gathered",
            "error",
            "weights are gathered in FP8, so a unit that runs high would multiply with a weight rounded to FP8",
            "gather in BF16: Float8LinearConfig(enable_fsdp_float8_all_gather=False), in accelerate AORecipeKwargs "
            "with that config",
            tuple(told),
        )


def _tied_head_low(facts: Facts) -> Iterator[Finding]:
    if facts.model is None:
        return
    shared = {id(m.weight) for m in facts.modules.values() if isinstance(m, nn.Embedding)}
    tied = [path for path, module in facts.low.items() if id(getattr(module, "weight", None)) in shared]
    if tied:
        yield Finding(
            "tied-head-low",
            "error",
            f"{_names(tied)} shares the embedding's weight and runs low, which DeepSeek-V3 and NVFP4 keep high",
            "leave the head out: convert_ does so by itself, torchao by module_filter_fn",
            tuple(tied),
        )


def _clipped_norms(facts: Facts) -> Iterator[Finding]:
    if facts.clipping == "before":
        yield Finding(
            "clipped-norms",
            "error",
            "gradients are clipped before controller.step(), so every norm is scaled by the same spike and none "
            "stands out",
            "call controller.step() first, or clip with controller.clip_grad_norm_",
        )


def _shapes(facts: Facts) -> Iterator[Finding]:
    if not facts.multiplies_low:
        return
    odd = [path for path, module in facts.low.items() if any(size % 16 for size in _sizes(module))]
    if odd:
        yield Finding(
            "shape-16",
            "error" if facts.real else "warning",
            f"{_names(odd, facts)} {'has' if len(odd) == 1 else 'have'} a size that is no multiple of 16, which "
            "matrix units cannot take",
            "pad the size, leave them out with filter_fn, or use backend='emulated' (same numbers, no speed-up)",
            tuple(odd),
        )
    padded = [path for path, m in facts.low.items() if any(size % 128 for size in _sizes(m)) and path not in odd]
    if facts.tiled and padded:
        yield Finding(
            "shape-128",
            "warning",
            f"{_names(padded, facts)} {'has' if len(padded) == 1 else 'have'} a size that is no multiple of 128: "
            "blocks are padded with zeros",
            "round the size up to a multiple of 128 (1376 to 1408, 5461 to 5504)",
            tuple(padded),
        )


def _no_kernel(facts: Facts) -> Iterator[Finding]:
    if facts.recipe is None or not facts.real:
        return
    reason = real.why_not(facts.recipe.low, nn.Linear(128, 128, device="meta"))
    if reason is not None and "CUDA device" not in reason:
        yield Finding(
            "no-kernel",
            "error",
            f"real kernels are asked for, and {reason}",
            "backend='emulated' (true numbers, no speed-up), or a recipe that has them: fp8, fp8_row, fp8_block, int8",
        )


def _no_fp8_units(facts: Facts) -> Iterator[Finding]:
    if not facts.multiplies_low:
        return
    machine, (major, minor) = facts.machine, facts.machine.capability
    if machine.device != "cuda":
        lack = "there is no CUDA device here"
    elif facts.tiled and major != 9:
        lack = f"{machine.name} has compute capability {major}.{minor}, and block scaling needs 9.x (Hopper)"
    elif (major, minor) < (8, 9):
        lack = f"{machine.name} has compute capability {major}.{minor}, and FP8 needs 8.9 or more (Ada, Hopper)"
    else:
        return
    yield Finding(
        "no-fp8-units",
        "error" if facts.real else "warning",
        f"{lack}: the recipe runs by emulation, with its true numbers and no speed-up",
        "take it for a rehearsal (backend='emulated'), or train on a GPU that has them",
    )


def _delayed_scaling(facts: Facts) -> Iterator[Finding]:
    te = [path for path, module in facts.modules.items() if _is_delayed(module)]
    if te or any(cast.delayed for cast in facts.casts):
        yield Finding(
            "delayed-scaling",
            "warning",
            "scales come from earlier steps: a sudden rise is clipped before anything is measured, and in Transformer "
            "Engine they go stale while a unit is high",
            "use current scaling: recipe fp8 in place of fp8_delayed, Float8CurrentScaling in Transformer Engine",
            tuple(te),
        )


def _reentrant(facts: Facts) -> Iterator[Finding]:
    if facts.recompute == "reentrant":
        yield Finding(
            "reentrant-recompute",
            "warning",
            "reentrant activation checkpointing: a block whose inputs need no gradient (frozen embeddings, LoRA) gets "
            "none, and no saved-tensor hook sees the recompute",
            "use_reentrant=False; in Transformers gradient_checkpointing_kwargs={'use_reentrant': False}",
        )


def _nothing_saved(facts: Facts) -> Iterator[Finding]:
    if facts.saves and facts.recompute != "none":
        yield Finding(
            "nothing-saved",
            "warning",
            "the recipe keeps activations in few bits for the backward, and activation checkpointing keeps none of "
            "them: the memory is saved already",
            "use one of the two",
        )


def _cuda_graphs(facts: Facts) -> Iterator[Finding]:
    if facts.compiled in GRAPH_MODES and facts.recipe is not None:
        yield Finding(
            "cuda-graphs",
            "warning",
            f"mode={facts.compiled!r} records CUDA graphs, and a switch is read on the host at run time: the graphs "
            "are cut at every linear, and little of their gain is left",
            "torch.compile(mode='default') or 'max-autotune-no-cudagraphs'",
        )


def _precision_casts(facts: Facts) -> Iterator[Finding]:
    if facts.row_wise and facts.compiled is not None and facts.recompute != "none":
        yield Finding(
            "precision-casts",
            "warning",
            "row-wise FP8 with torch.compile and activation checkpointing gave NaN after about 40 steps in the wild "
            "(torchtitan #1056)",
            "torch._inductor.config.emulate_precision_casts = True",
        )


def _small_gemms(facts: Facts) -> Iterator[Finding]:
    if not facts.multiplies_low or any(cast.fmt == "int8" for cast in facts.casts):
        return
    is_small = _small_row_wise if facts.row_wise else _small
    small = [path for path, module in facts.low.items() if is_small(*_sizes(module))]
    if small:
        yield Finding(
            "small-gemms",
            "warning",
            f"{len(small)} of {len(facts.low)} linears ({_names(small, facts)}) are below the size from which FP8 is "
            "faster than BF16 on an H100",
            "leave them out with filter_fn, or take the run for its numbers and not for speed",
            tuple(small),
        )


def _small(inner: int, outer: int) -> bool:
    return inner <= 4096 and outer <= 1024


def _small_row_wise(inner: int, outer: int) -> bool:
    return outer <= 2048 or inner <= 1024 or (outer <= 4096 and inner <= 2048)


def _row_wise_slow(facts: Facts) -> Iterator[Finding]:
    widest = max((min(_sizes(module)) for module in facts.low.values()), default=ROW_WISE_WIDTH)
    if facts.row_wise and widest < ROW_WISE_WIDTH:
        yield Finding(
            "row-wise-slow",
            "warning",
            f"row-wise FP8 is slower than BF16 at width {widest:,}: 0.97x on an H200 at width 2,048, where one scale "
            "per tensor gave 1.18x; high is then also the fast path",
            "recipe fp8, or widths of 4,096 and more",
        )


def _bf16_weights(facts: Facts) -> Iterator[Finding]:
    if facts.model is None:
        return
    trained = [p for p in facts.model.parameters() if p.requires_grad]
    if trained and all(p.dtype == torch.bfloat16 for p in trained):
        yield Finding(
            "bf16-weights",
            "warning",
            "all trained weights are BF16: an update below 1/256 of a weight is lost, which no precision of a GEMM "
            "brings back",
            "keep the weights in FP32 and compute under torch.autocast, or use an optimizer with FP32 copies",
        )


def _adapters_low(facts: Facts) -> Iterator[Finding]:
    found = [p for p in facts.low if any(part.startswith("lora_") for part in p.split("."))]
    if found:
        yield Finding(
            "adapters-low",
            "warning",
            f"{_names(found, facts)}: adapters in low precision begin with zeros, which gave a zero scale and NaN in "
            "the wild (torchao #3356)",
            "leave lora_* out of the filter; convert_ does so by itself",
            tuple(found),
        )


CHECKS: Sequence[Callable[[Facts], Iterator[Finding]]] = (
    _nothing_to_convert,
    _already_quantized,
    _low_weights_gathered,
    _tied_head_low,
    _clipped_norms,
    _shapes,
    _no_kernel,
    _no_fp8_units,
    _delayed_scaling,
    _reentrant,
    _nothing_saved,
    _cuda_graphs,
    _precision_casts,
    _small_gemms,
    _row_wise_slow,
    _bf16_weights,
    _adapters_low,
)


def _names(paths: Sequence[str], facts: Facts | None = None) -> str:
    """A few paths, with their sizes where these matter."""
    shown = []
    for path in paths[:LISTED]:
        sizes = "" if facts is None else " ({}x{})".format(*_sizes(facts.modules[path]))
        shown.append(f"{path or 'the model itself'}{sizes}")
    return ", ".join(shown) + (f" and {len(paths) - LISTED} more" if len(paths) > LISTED else "")


def _sizes(module: nn.Module) -> tuple[int, int]:
    """in and out of a linear."""
    return module.in_features, module.out_features  # type: ignore[return-value]


def _is_float8(module: nn.Module) -> bool:
    """Whether it is torchao's low-precision linear; asked by name, so that torchao is not loaded for it."""
    return isinstance(module, nn.Linear) and any(kind.__name__ == "Float8Linear" for kind in type(module).__mro__)


def _gathers_low(module: nn.Module) -> bool:
    weight = type(getattr(module, "weight", None)).__name__
    flag = getattr(getattr(module, "config", None), "enable_fsdp_float8_all_gather", False)
    return weight == "WeightWithDynamicFloat8CastTensor" or (_is_float8(module) and bool(flag))


def _is_delayed(module: nn.Module) -> bool:
    """Whether it is a module of Transformer Engine that has run with delayed scaling."""
    meta: Any = getattr(module, "fp8_meta", None)
    return isinstance(meta, dict) and type(meta.get("recipe")).__name__ == "DelayedScaling"


def _recompute(module: nn.Module) -> str:
    """Which kind of activation checkpointing a module is under, as Transformers and torch's wrapper show it."""
    function = getattr(module, "_gradient_checkpointing_func", None)
    if getattr(module, "gradient_checkpointing", False) and isinstance(function, partial):
        return "reentrant" if function.keywords.get("use_reentrant", True) else "nonreentrant"
    wrapper = getattr(getattr(module, "checkpoint_impl", None), "name", "")  # torch's CheckpointWrapper
    if wrapper:
        return "reentrant" if wrapper == "REENTRANT" else "nonreentrant"
    if getattr(module, "checkpointing", False) is True:  # the lab's own decoder
        return "nonreentrant"
    return ""


def _compile_mode(module: nn.Module) -> str | None:
    """The mode in which a module was compiled, as far as it shows; None if it was not."""
    compiled = getattr(module, "_compiled_call_impl", None)
    context = getattr(module, "dynamo_ctx", None)
    if compiled is None and context is None:
        return None
    ask = getattr(module if context is not None else compiled, "get_compiler_config", None)
    config: Any = ask() if callable(ask) else None
    return "reduce-overhead" if config and config.get("triton.cudagraphs") else "default"


def decoder(config: Config) -> nn.Module:
    """The lab's model as settings describe it, on the meta device: shapes without numbers."""
    with torch.device("meta"):
        return build_model(config, ModelConfig.size(config.model).vocab_size)


def is_healthy(findings: Sequence[Finding]) -> bool:
    """Whether nothing is wrong; what could be better does not count."""
    return all(finding.severity != "error" for finding in findings)
