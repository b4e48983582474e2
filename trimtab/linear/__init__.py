# SPDX-License-Identifier: Apache-2.0
"""Linears with two paths: number formats, quantizers, recipes, and the conversion of a model.

formats.py    the number formats, as data
scales.py     rounding to a grid, and the scale rules
quantize.py   fake_quant and affine_quant
hadamard.py   the blockwise rotation
paths.py      Cast, Gemm, Path, Recipe: what low and high mean, as data
recipes.py    the named recipes
casts.py      one Cast applied to one operand
state.py      what a module remembers between steps, and between a forward and its backward
gemms.py      the three GEMMs of a forward and its backward, on one of two engines:
emulated.py   ordinary products of rounded operands, on any device
real.py       FP8 and INT8 matrix units; saved activations packed (packing.py)
opaque.py     the switch under torch.compile
kernels.py    casts as single Triton launches
linear.py     SwitchLinear
convert.py    convert_ and revert_
"""

from trimtab.linear.convert import ConvertReport, convert_, revert_
from trimtab.linear.formats import FORMATS, Format
from trimtab.linear.linear import Fault, SwitchLinear, load_path_state, path_state
from trimtab.linear.paths import Cast, Gemm, Path, Recipe
from trimtab.linear.quantize import affine_quant, fake_quant
from trimtab.linear.recipes import RECIPES

__all__ = [
    "FORMATS",
    "RECIPES",
    "Cast",
    "ConvertReport",
    "Fault",
    "Format",
    "Gemm",
    "Path",
    "Recipe",
    "SwitchLinear",
    "affine_quant",
    "convert_",
    "fake_quant",
    "load_path_state",
    "path_state",
    "revert_",
]
