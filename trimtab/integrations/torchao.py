# SPDX-License-Identifier: Apache-2.0
"""torchao float8: an already converted `Float8Linear` becomes a unit.

    convert_to_float8_training(model, config=Float8LinearConfig.from_recipe_name("tensorwise"))
    print(adopt_(model))
    controller = trimtab.Controller(model, policy, total_steps=1000)

What it can switch: the three GEMMs of a linear together. Low is torchao's own forward and backward, high is the plain
linear on the same weight, in its own type and autocast. `Float8Linear` keeps the high-precision weight and no history
of scales, so a unit comes and goes without a trace.

Left alone, with the reason in the report: linears whose weight FSDP2 gathers in FP8 (`enable_fsdp_float8_all_gather`):
only FP8 data arrives, and a high path on it would be high in name alone.

Not under `torch.compile`: a switch that a compiled region reads recompiles it with each new plan. The linears of
`trimtab.convert_(model, "fp8")` have an operator for that; observing works on any compiled model.
"""

import torch
from torch import Tensor, nn

from trimtab.control.units import Grouping
from trimtab.errors import TrimtabError, missing_extra
from trimtab.integrations import switching
from trimtab.integrations.switching import AdoptReport, FilterFn, Switched

try:
    from torchao.float8.float8_linear import Float8Linear
except ImportError as error:
    raise missing_extra("torchao", "torchao", "trimtab.integrations.torchao") from error

release_ = switching.release_


class SwitchedFloat8Linear(Switched, Float8Linear):
    """A `Float8Linear` that runs plain while its unit is high. Made by `adopt_`."""

    def forward(self, input: Tensor) -> Tensor:
        if torch.compiler.is_compiling():
            raise TrimtabError(
                "an adopted Float8Linear cannot be compiled, because every new plan would recompile it: use "
                'trimtab.convert_(model, "fp8") in place of torchao\'s conversion, or observe without adopt_'
            )
        if self.goes_high():
            return nn.functional.linear(input, self.weight, self.bias)
        return Float8Linear.forward(self, input)


def adopt_(model: nn.Module, *, unit: Grouping = "linear", filter_fn: FilterFn | None = None) -> AdoptReport:
    """Make a model's `Float8Linear` modules switchable, in place; every unit starts low.

    Args:
        unit: what switches together: `"linear"`, `"block"`, `"expert"`, or a list of name patterns.
        filter_fn: `filter_fn(module, fqn) -> bool`; False leaves that linear alone.
    """
    paths = "low torchao float8, high the plain linear, all three GEMMs"
    return switching.adopt_(model, _switched, paths, unit=unit, filter_fn=filter_fn)


def _switched(module: nn.Module) -> type[Switched] | str | None:
    if not isinstance(module, Float8Linear):
        return None
    if type(module) is not Float8Linear:
        return f"subclass {type(module).__name__}"
    if module.config.enable_fsdp_float8_all_gather:
        return "its weight is gathered in FP8: no high-precision weight arrives"
    return SwitchedFloat8Linear
