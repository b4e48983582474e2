# SPDX-License-Identifier: Apache-2.0
"""The named recipes: which formats, groups and scale rules each published scheme uses in each GEMM.

    name         low                                                       high              source
    saved4       forward exact, saved input E2M1 per token in grad_weight   the same in E4M3  GNMR bench A, 2606.00539
    fp8          X, W E4M3 and dY E5M2, one current scale per tensor        plain             hybrid FP8, 2209.05433
    fp8_delayed  the same, scales from the last 1024 steps                  plain             Transformer Engine
    fp8_row      E4M3, one scale per row of each GEMM's operands            plain             torchao, row-wise
    fp8_block    E4M3; tiles of 128 along the inner dim, W 128 x 128        plain             DeepSeek-V3, 2412.19437
    fp6, fp4     E3M2 / E2M1 operands and results, per token and row        hybrid FP8        GNMR bench B(ii)
    int8         W8A8 per token and output row; dX through Q(W)             plain             GNMR bench C
    int8_static  W8A8 per tensor, X by the scale of its first 8 steps       plain             a stress of bench C
    mxfp4        E2M1, groups of 32, Hadamard 32                            plain             Quartet, 2505.14669
    nvfp4        E2M1, blocks of 16, two-level scales                       plain             NVFP4, 2509.25149

`plain` is the module's own linear, in its own type and autocast. Where the papers leave something open:

- saved4: the text of the paper says that only the saved activation is quantized (`scope="saved"`); its appendix
  can be read as quantizing the forward too (`scope="forward"`, straight-through). The elements are floating-point
  by default, INT4/INT8 with `element="int"`.
- fp6, fp4: the paper quantizes w, x, then y; then dY, dW, dX. The backward GEMMs here use the forward's
  quantized w and x, as a low-precision GEMM must. A bias is added after y has been quantized.
- fp8_block: FP32 scales, which the paper allows in most places; `pow2_scale=True` rounds them up.
"""

import difflib
from collections.abc import Callable
from typing import Any

from trimtab.errors import TrimtabError
from trimtab.linear.paths import Cast, Gemm, Path, Recipe


def _choice(option: str, value: str, valid: tuple[str, ...]) -> str:
    if value not in valid:
        raise TrimtabError(f"{option} must be one of {', '.join(valid)}, got {value!r}")
    return value


def _saved(name: str, fmt: str, scope: str) -> Path:
    cast = Cast(fmt, "token")
    return Path(name, output=Gemm(left=cast) if scope == "forward" else None, grad_weight=Gemm(right=cast))


def saved4(*, scope: str = "saved", element: str = "float") -> Recipe:
    """Bench A: 4-bit saved activations, 8-bit as recovery."""
    _choice("scope", scope, ("saved", "forward"))
    low, high = {"float": ("e2m1", "e4m3"), "int": ("int4", "int8")}[_choice("element", element, ("float", "int"))]
    suffix = "" if scope == "saved" else ":forward"
    return Recipe(
        _saved(f"saved-{low}{suffix}", low, scope), _saved(f"saved-{high}{suffix}", high, scope), name="saved4"
    )


def hybrid_fp8(*, delayed: bool = False) -> Path:
    """E4M3 forward, E5M2 gradients, one scale per tensor."""
    forward, gradient = Cast("e4m3", "tensor", delayed=delayed), Cast("e5m2", "tensor", delayed=delayed)
    return Path(
        "fp8-hybrid-delayed" if delayed else "fp8-hybrid",
        output=Gemm(forward, forward),
        grad_input=Gemm(gradient, forward),
        grad_weight=Gemm(gradient, forward),
    )


def fp8() -> Recipe:
    """Hybrid FP8 with current scaling."""
    return Recipe(hybrid_fp8(), Path.plain(), name="fp8")


def fp8_delayed() -> Recipe:
    """Hybrid FP8 with delayed scaling, as in Transformer Engine: history 1024, margin 0, maximum."""
    return Recipe(hybrid_fp8(delayed=True), Path.plain(), name="fp8_delayed")


def fp8_row() -> Recipe:
    """Row-wise FP8: every operand has one scale for each of its vectors along the inner dimension."""
    row, column = Cast("e4m3", "token"), Cast("e4m3", "column")
    low = Path("fp8-row", output=Gemm(row, row), grad_input=Gemm(row, column), grad_weight=Gemm(column, column))
    return Recipe(low, Path.plain(), name="fp8_row")


def fp8_block(*, pow2_scale: bool = False) -> Recipe:
    """DeepSeek-V3's fine-grained FP8."""
    tile, column, block = (Cast("e4m3", group, pow2_scale) for group in ((1, 128), (128, 1), (128, 128)))
    low = Path(
        "fp8-block-pow2" if pow2_scale else "fp8-block",
        output=Gemm(tile, block),
        grad_input=Gemm(tile, block),
        grad_weight=Gemm(column, column),
    )
    return Recipe(low, Path.plain(), name="fp8_block")


def _simulated(name: str, fmt: str) -> Recipe:
    cast = Cast(fmt, "token")  # per token for x, y, dY, dX; per output row for w and dW
    gemm = Gemm(cast, cast, cast)
    return Recipe(Path(f"simulated-{fmt}", output=gemm, grad_input=gemm, grad_weight=gemm), hybrid_fp8(), name=name)


def fp6() -> Recipe:
    """Bench B(ii), 6 bit."""
    return _simulated("fp6", "e3m2")


def fp4() -> Recipe:
    """Bench B(ii), 4 bit."""
    return _simulated("fp4", "e2m1")


def int8() -> Recipe:
    """Bench C: dynamic W8A8; the gradient flows through the dequantized weight, dW from the exact input."""
    cast = Cast("int8", "token")
    low = Path("int8-w8a8", output=Gemm(cast, cast), grad_input=Gemm(right=cast))
    return Recipe(low, Path.plain(), name="int8")


def int8_static(*, calibrate: int = 8) -> Recipe:
    """W8A8 as it was before scales were dynamic: one per tensor, that of X calibrated on the first steps; it hurts."""
    weight = Cast("int8", "tensor")
    low = Path(
        "int8-static",
        output=Gemm(Cast("int8", "tensor", delayed=True, static=True, history=calibrate), weight),
        grad_input=Gemm(right=weight),
    )
    return Recipe(low, Path.plain(), name="int8_static")


def mxfp4() -> Recipe:
    """Quartet: clipped, deterministic forward; unclipped, stochastic backward."""
    forward = Cast("e2m1", (1, 32), scale="std")
    rows, columns = (
        Cast("e2m1", group, scale="shared", range_factor=0.75, rounding="stochastic") for group in ((1, 32), (32, 1))
    )
    low = Path(
        "mxfp4-quartet",
        output=Gemm(forward, forward, hadamard=32),
        grad_input=Gemm(rows, columns, hadamard=32, signs="fresh"),
        grad_weight=Gemm(columns, columns, hadamard=32, signs="fresh"),
        chained=True,
    )
    return Recipe(low, Path.plain(), name="mxfp4")


def nvfp4() -> Recipe:
    """NVFP4: 16 x 16 weight blocks, 1 x 16 for the rest, rotation in grad_weight, stochastic gradients."""
    weight, tile, column = (Cast("e2m1", group, scale="two_level") for group in ((16, 16), (1, 16), (16, 1)))
    gradient, gradient_t = (
        Cast("e2m1", group, scale="two_level", rounding="stochastic") for group in ((1, 16), (16, 1))
    )
    low = Path(
        "nvfp4",
        output=Gemm(tile, weight),
        grad_input=Gemm(gradient, weight),
        grad_weight=Gemm(gradient_t, column, hadamard=16, signs="fixed"),
    )
    return Recipe(low, Path.plain(), name="nvfp4")


_BUILDERS: dict[str, Callable[..., Recipe]] = {
    builder.__name__: builder
    for builder in (saved4, fp8, fp8_delayed, fp8_row, fp8_block, fp6, fp4, int8, int8_static, mxfp4, nvfp4)
}

RECIPES: dict[str, Recipe] = {name: builder() for name, builder in _BUILDERS.items()}
"""Every named recipe with its default options."""


def build(name: str, **options: Any) -> Recipe:
    """Build a named recipe; an unknown name or option lists the valid ones."""
    if name not in _BUILDERS:
        near = difflib.get_close_matches(str(name), _BUILDERS, n=1, cutoff=0.3)
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        raise TrimtabError(f"recipe must be one of {', '.join(_BUILDERS)}, or a Recipe; got {name!r}{hint}")
    valid = _BUILDERS[name].__kwdefaults__ or {}
    unknown = set(options) - set(valid)
    if unknown:
        raise TrimtabError(
            f"recipe {name!r} takes {', '.join(valid) or 'no options'}, got {', '.join(sorted(unknown))}"
        )
    return _BUILDERS[name](**options)
