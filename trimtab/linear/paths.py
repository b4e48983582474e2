# SPDX-License-Identifier: Apache-2.0
"""What `low` and `high` mean: a linear layer described by its three GEMMs.

    role          computes                    left           right          inner dimension
    output        Y  (tokens, out) = X W^T    X (input)      W (weight)     in
    grad_input    dX (tokens, in)  = dY W     dY             W              out
    grad_weight   dW (out, in)     = dY^T X   dY             X              tokens

A `Cast` says how one operand is quantized, a `Gemm` what happens to both operands and the result of one
role, a `Path` what each role does (None: the plain GEMM), and a `Recipe` names two paths, low and high.
They are frozen values without behaviour: `emulated.py` carries them out. `recipes.py` holds the named ones.

Groups refer to the operand as it is stored: X (tokens, in), W (out, in), dY (tokens, out). So tiles along
the inner dimension are (1, 128) for X in `output` and (128, 1) for X in `grad_weight`.
"""

from collections.abc import Iterator
from dataclasses import KW_ONLY, dataclass, replace
from functools import cached_property
from typing import Any, Literal

from trimtab.errors import TrimtabError
from trimtab.linear.formats import format_of
from trimtab.linear.hadamard import check_size
from trimtab.linear.packing import BITS
from trimtab.linear.quantize import Group, Rounding, check_group, check_rounding

Role = Literal["output", "grad_input", "grad_weight"]
Operand = Literal["input", "weight", "grad_output"]

SIDES: dict[str, tuple[Operand, Operand]] = {
    "output": ("input", "weight"),
    "grad_input": ("grad_output", "weight"),
    "grad_weight": ("grad_output", "input"),
}
"""Which operand stands left and which right in each role."""

ROLES = tuple(SIDES)


@dataclass(frozen=True)
class Cast:
    """How one tensor is quantized."""

    fmt: str
    group: Group = "token"
    pow2_scale: bool = False
    _: KW_ONLY
    scale: Literal["amax", "shared", "two_level", "std"] = "amax"
    """The scale rule, see `scales.py`."""
    range_factor: float = 1.0
    """With `scale="shared"`: the share of the range that is used (3/4 in Quartet's backward)."""
    rounding: Rounding = "nearest"
    delayed: bool = False
    """Take amax from the last `history` steps instead of measuring it; the first step measures."""
    history: int = 1024
    margin: int = 0
    """Delayed scaling: leave 2^margin of headroom."""
    static: bool = False
    """Delayed scaling: keep the first `history` steps instead of the last, a scale that is calibrated once."""

    def __post_init__(self) -> None:
        format_of(self.fmt)
        object.__setattr__(self, "group", check_group(self.group))
        check_rounding(self.rounding)
        if self.scale not in ("amax", "shared", "two_level", "std"):
            raise TrimtabError(f'scale must be "amax", "shared", "two_level" or "std", got {self.scale!r}')
        if self.delayed and (self.group != "tensor" or self.scale != "amax"):
            raise TrimtabError(
                f'delayed scaling keeps one amax per tensor: it needs group="tensor" and scale="amax", '
                f"got group={self.group!r}, scale={self.scale!r}"
            )
        if self.static and not self.delayed:
            raise TrimtabError("static scaling remembers the amax of its first steps: it needs delayed=True")
        if self.history < 1:
            raise TrimtabError(f"history must be at least 1 step, got {self.history}")
        if not 0 < self.range_factor <= 1:
            raise TrimtabError(f"range_factor must lie in (0, 1], got {self.range_factor}")


@dataclass(frozen=True)
class Gemm:
    """One role: how its operands are quantized (None: not), rotated, and how its result is quantized again."""

    left: Cast | None = None
    right: Cast | None = None
    result: Cast | None = None
    _: KW_ONLY
    hadamard: int = 0
    """Rotate both operands along the inner dimension in groups of this size (0: no rotation)."""
    signs: Literal["none", "fixed", "fresh"] = "none"
    """Flip signs before the rotation: by one constant vector, or by one drawn for each call."""

    def __post_init__(self) -> None:
        check_size(self.hadamard)
        if self.signs not in ("none", "fixed", "fresh"):
            raise TrimtabError(f'signs must be "none", "fixed" or "fresh", got {self.signs!r}')
        if self.hadamard and any(c.delayed for c in (self.left, self.right) if c):
            raise TrimtabError("delayed scaling remembers the amax of unrotated operands: use hadamard=0 with it")
        if self.result and self.result.delayed:
            raise TrimtabError("a result cannot have delayed scaling: there is no history for it")

    @property
    def random(self) -> bool:
        """Whether carrying it out draws random numbers."""
        casts = [c for c in (self.left, self.right, self.result) if c]
        return (self.hadamard > 0 and self.signs == "fresh") or any(c.rounding == "stochastic" for c in casts)


@dataclass(frozen=True)
class Path:
    """What a linear does in each role; None is the plain GEMM in the module's own type."""

    name: str
    output: Gemm | None = None
    grad_input: Gemm | None = None
    grad_weight: Gemm | None = None
    _: KW_ONLY
    chained: bool = False
    """Quartet: the backward GEMMs start from the forward's rotated, quantized operands, and where the forward
    clipped a value its gradient is zero. Holds for each backward role that is quantized, if `output` is."""

    @staticmethod
    def plain() -> "Path":
        """The path that quantizes nothing: exactly `F.linear`."""
        return Path("plain")

    @property
    def is_plain(self) -> bool:
        """Whether no role is quantized."""
        return self.output is None and self.grad_input is None and self.grad_weight is None

    @cached_property
    def random(self) -> bool:
        """Whether any role draws random numbers."""
        return any(gemm.random for _, gemm in self.gemms())

    @cached_property
    def whole(self) -> frozenset[str]:
        """The operands that some role scales by the amax of the whole tensor."""
        casts = ((name, c) for role, g in self.gemms() for name, c in zip(SIDES[role], (g.left, g.right), strict=True))
        return frozenset(name for name, c in casts if c is not None and c.group == "tensor" and c.scale == "amax")

    @cached_property
    def saves(self) -> bool:
        """Whether it only keeps the input in 4 or 8 bits for backward (and, in one reading, uses it so in forward)."""
        if self.grad_input is not None or self.grad_weight is None or self.grad_weight.right is None:
            return False
        cast = self.grad_weight.right
        usual = cast.fmt in BITS and cast == Cast(cast.fmt, "token")
        return usual and self.grad_weight == Gemm(right=cast) and self.output in (None, Gemm(left=cast))

    @cached_property
    def is_w8a8(self) -> bool:
        """Whether it multiplies integers in forward, and quantizes nothing in backward but the weight."""
        token = Cast("int8", "token")
        inward = self.grad_input is None or self.grad_input == Gemm(right=token)
        return self.output == Gemm(token, token) and inward and self.grad_weight is None

    def gemms(self) -> Iterator[tuple[str, Gemm]]:
        """The quantized roles."""
        for role in ROLES:
            gemm = getattr(self, role)
            if gemm is not None:
                yield role, gemm

    def delayed(self) -> dict[str, Cast]:
        """The operands with delayed scaling, each with the cast that has the longest history."""
        found: dict[str, Cast] = {}
        for role, gemm in self.gemms():
            for operand, cast in zip(SIDES[role], (gemm.left, gemm.right), strict=True):
                if cast and cast.delayed and cast.history > getattr(found.get(operand), "history", 0):
                    found[operand] = cast
        return found

    def only(self, *roles: str) -> "Path":
        """The same path with its quantization kept in these roles; the others become plain GEMMs."""
        if not roles or not set(roles) <= set(ROLES):
            raise TrimtabError(
                f"roles must be one or more of {', '.join(ROLES)}, got {roles!r}: for none of them use Path.plain()"
            )
        kept: dict[str, Any] = {role: getattr(self, role) if role in roles else None for role in ROLES}
        return replace(self, name=f"{self.name}[{','.join(r for r in ROLES if r in roles)}]", **kept)


@dataclass(frozen=True)
class Recipe:
    """A complete choice: the cheap path and the one to go back to."""

    low: Path
    high: Path
    name: str = "custom"

    def __post_init__(self) -> None:
        for side in ("low", "high"):
            if not isinstance(getattr(self, side), Path):
                raise TrimtabError(f"Recipe.{side} must be a Path, got {getattr(self, side)!r}: see Path.plain()")

    @staticmethod
    def named(name: str, **options: Any) -> "Recipe":
        """Build a recipe by name; some take options (`saved4`: scope, element; `fp8_block`: pow2_scale)."""
        from trimtab.linear.recipes import build  # the named recipes are built from this file

        return build(name, **options)

    def only(self, *roles: str) -> "Recipe":
        """The same recipe with the low path quantized in these roles only."""
        low = self.low.only(*roles)
        return replace(self, low=low, name=f"{self.name}[{','.join(r for r in ROLES if r in roles)}]")

    def short_str(self) -> str:
        """One line for reports and `print(model)`."""
        return f"{self.name}: low {self.low.name}, high {self.high.name}"
