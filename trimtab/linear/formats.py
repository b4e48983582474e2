# SPDX-License-Identifier: Apache-2.0
"""The number formats, as data. No torch here: a table that reports and tests can read alone.

A format ExMy has E exponent bits and M mantissa bits. Its values are

    normal      +-(1 + m / 2^M) * 2^e      for e >= log2(min_normal)
    subnormal   +- m * 2^-M * min_normal   below min_normal, one constant step

so one rule rounds them all: around y the grid has the step 2^(max(floor(log2 |y|), log2 min_normal) - M).
A symmetric integer is the same thing without normals: INT8 is written with min_normal = 128 and M = 7,
above its own maximum of 127, so that its step is 1 everywhere. -128 and -8 are not used.

`max` and `min_normal` agree with the OCP MX specification and with the FP8 formats of arXiv 2209.05433:
E4M3 is the "fn" variant (NaN, no Inf, maximum 448), E5M2 the IEEE-like one (maximum 57344).
"""

from dataclasses import dataclass

from trimtab.errors import TrimtabError


@dataclass(frozen=True)
class Format:
    """One element format: a symmetric grid of values, given by its step rule and its largest value."""

    name: str
    exponent_bits: int
    mantissa_bits: int
    max: float
    min_normal: float

    @property
    def bits(self) -> int:
        """Storage bits of one element, sign included."""
        return 1 + self.exponent_bits + self.mantissa_bits

    @property
    def min_subnormal(self) -> float:
        """The smallest positive value (the step below `min_normal`)."""
        return self.min_normal * 2.0**-self.mantissa_bits

    @property
    def is_integer(self) -> bool:
        """Whether the grid is uniform."""
        return self.exponent_bits == 0


FORMATS: dict[str, Format] = {
    f.name: f
    for f in (
        Format("e2m1", 2, 1, max=6.0, min_normal=1.0),
        Format("e3m2", 3, 2, max=28.0, min_normal=2.0**-2),
        Format("e2m3", 2, 3, max=7.5, min_normal=1.0),
        Format("e4m3", 4, 3, max=448.0, min_normal=2.0**-6),
        Format("e5m2", 5, 2, max=57344.0, min_normal=2.0**-14),
        Format("int8", 0, 7, max=127.0, min_normal=2.0**7),
        Format("int4", 0, 3, max=7.0, min_normal=2.0**3),
    )
}


def format_of(fmt: str | Format) -> Format:
    """Look a format up by name; a `Format` passes through."""
    if isinstance(fmt, Format):
        return fmt
    if fmt not in FORMATS:
        raise TrimtabError(f"fmt must be one of {', '.join(FORMATS)}, got {fmt!r}")
    return FORMATS[fmt]
