# SPDX-License-Identifier: Apache-2.0
"""Make a model's linears switchable in place, and plain again.

`convert_` changes the class of each covered `nn.Linear` to `SwitchLinear` and adds a few attributes (the way
`fully_shard` makes a module an `FSDPModule`). Nothing is rebuilt: parameters, hooks, optimizers and tied
references go on pointing at the same objects, and there is no second copy of any weight.

Covered are linears of exactly the type `nn.Linear`. Left alone, each with its reason in the report: the output
head, the routers of mixtures (DeepSeek-V3 keeps both high), `lora_*` adapters, subclasses of `nn.Linear` (what they
compute is not known), what `filter_fn` refuses, what no unit pattern matches, and what is converted already. Experts
that are slices of one parameter have no linear to convert: the report lists such weights as seen, observe only.

A linear wrapped by an adapter layer (peft: `...q_proj.base_layer`) belongs to the unit `...q_proj`, and the signal
of that unit is the whole wrapper: the base is frozen, the gradients are on the adapters.
"""

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field

from torch import nn

from trimtab.control.units import Grouping, Switch, group, roots_of
from trimtab.errors import NoEffectWarning, TrimtabError
from trimtab.linear import real
from trimtab.linear.kin import introduce
from trimtab.linear.linear import SwitchLinear, switch_linears
from trimtab.linear.paths import Recipe
from trimtab.linear.recipes import build
from trimtab.modules import bare_modules, cubes, is_router, output_head

FilterFn = Callable[[nn.Module, str], bool]

_BACKENDS = ("auto", "emulated", "real")


@dataclass(frozen=True)
class ConvertReport:
    """What `convert_` did, and what it left alone and why."""

    recipe: Recipe
    backend: str
    covered: tuple[str, ...] = ()
    """Paths of the linears that are switchable now."""
    skipped: dict[str, str] = field(default_factory=dict)
    """Path -> reason, for every other linear."""
    units: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Unit name -> the paths of its linears."""
    observed: dict[str, int] = field(default_factory=dict)
    """Weights of three dimensions (stacks of experts), path -> number of slices: seen, and not switchable."""

    def __str__(self) -> str:
        total = len(self.covered) + len(self.skipped)
        lines = [
            f"{len(self.covered)} of {total} linears switchable in {len(self.units)} units, {self.backend}; "
            f"recipe {self.recipe.short_str()}"
        ]
        reasons: dict[str, list[str]] = {}
        for path, reason in self.skipped.items():
            reasons.setdefault(reason, []).append(path)
        for reason, paths in reasons.items():
            more = f" and {len(paths) - 3} more" if len(paths) > 3 else ""
            lines.append(f"  skipped {len(paths)} ({reason}): {', '.join(paths[:3])}{more}")
        if self.observed:
            more = f" and {len(self.observed) - 3} more" if len(self.observed) > 3 else ""
            lines.append(
                f"  seen, observe only, {len(self.observed)} (experts as slices of one parameter): "
                f'{", ".join(list(self.observed)[:3])}{more}; Controller(watch=["*.experts.*"]) watches each expert'
            )
        return "\n".join(lines)


def convert_(
    model: nn.Module,
    recipe: str | Recipe,
    *,
    unit: Grouping = "linear",
    filter_fn: FilterFn | None = None,
    head: nn.Module | str | None = None,
    backend: str = "auto",
) -> ConvertReport:
    """Make the linears of a model switchable, in place; every unit starts low.

    Args:
        recipe: a name (`"fp8"`, `"saved4"`, ...) or a `Recipe`.
        unit: what switches together: `"linear"`, `"block"`, `"expert"`, or a list of name patterns.
        filter_fn: `filter_fn(module, fqn) -> bool`; False leaves that linear alone.
        head: the output head (a module or its path), where it is not found by itself.
        backend: `"emulated"` quantizes and dequantizes around ordinary GEMMs and runs anywhere; `"real"` uses the
            GPU's FP8 units and refuses what they cannot take; `"auto"` is the first on CPU and the second on CUDA.
    """
    if not isinstance(recipe, Recipe):
        recipe = build(recipe)
    modules = bare_modules(model)
    found, skipped = candidates(model, modules, filter_fn, head)
    by_unit_path = {_unit_path(path): path for path in found}
    grouped = group(by_unit_path, unit)
    units = {name: tuple(by_unit_path[p] for p in paths) for name, paths in grouped.items()}
    matched = {path for paths in units.values() for path in paths}
    covered = tuple(path for path in found if path in matched)
    skipped |= {path: "matches no unit pattern" for path in found if path not in matched}
    linears = {path: modules[path] for path in covered}
    carried = _backend(backend, recipe, linears)  # type: ignore[arg-type]
    observed = {f"{path}.{name}": len(p) for path, module in modules.items() for name, p in cubes(module).items()}
    report = ConvertReport(recipe, carried, covered, skipped, units, observed)
    taken = {module.switch.name for module in switch_linears(model)} & set(units)
    if taken:
        raise TrimtabError(
            f"unit names must be unique, but the model already has {', '.join(sorted(taken))}: convert all linears of "
            "a unit in one call, or name the units by patterns"
        )
    if not covered:
        told = skipped or observed
        seen = f"{len(skipped)} linears, all skipped:\n{report}" if told else "no nn.Linear at all"
        remedy = (
            "pass the model that holds the linears, and check filter_fn, unit and head; revert_ undoes a conversion"
        )
        warnings.warn(f"convert_ changed nothing: it saw {seen}; {remedy}", NoEffectWarning, stacklevel=2)
    for name, paths in grouped.items():
        switch = Switch(name, roots_of(name, paths, modules, unit))
        for path in units[name]:
            linear = modules[path]
            linear.__class__ = SwitchLinear
            assert isinstance(linear, SwitchLinear)
            linear.attach(switch, recipe, path, real=carried == "real")
    introduce([linear for linear in linears.values() if isinstance(linear, SwitchLinear)])
    return report


def revert_(model: nn.Module) -> int:
    """Make every converted linear a plain `nn.Linear` again; returns how many there were."""
    linears = list(switch_linears(model))
    for linear in linears:
        linear.detach()
        linear.__class__ = nn.Linear  # type: ignore[assignment]
    return len(linears)


def _unit_path(path: str) -> str:
    return path.removesuffix(".base_layer")


def candidates(
    model: nn.Module, modules: dict[str, nn.Module], filter_fn: FilterFn | None, head: nn.Module | str | None
) -> tuple[list[str], dict[str, str]]:
    """The paths of the linears to convert, and of those to skip with their reasons."""
    head = output_head(model, head)
    found: list[str] = []
    skipped: dict[str, str] = {}
    for path, module in modules.items():
        if not isinstance(module, nn.Linear):
            continue
        if isinstance(module, SwitchLinear):
            skipped[path] = "already converted"
        elif module is head:
            skipped[path] = "output head"
        elif is_router(path, modules):
            skipped[path] = "router"
        elif any(part.startswith("lora_") for part in path.split(".")):
            skipped[path] = "LoRA adapter"
        elif type(module) is not nn.Linear:
            skipped[path] = f"subclass {type(module).__name__}"
        elif filter_fn is not None and not filter_fn(module, path):
            skipped[path] = "filter_fn said no"
        else:
            found.append(path)
    return found, skipped


def _backend(backend: str, recipe: Recipe, linears: dict[str, nn.Linear]) -> str:
    """Emulated or real: by what was asked, where the weights are, and what the kernels can take."""
    if backend not in _BACKENDS:
        raise TrimtabError(f"backend must be one of {', '.join(_BACKENDS)}, got {backend!r}")
    devices = {linear.weight.device for linear in linears.values()}
    if backend == "emulated" or (backend == "auto" and all(device.type in ("cpu", "meta") for device in devices)):
        return "emulated"
    for path, linear in linears.items():
        reason = real.why_not(recipe.low, linear) or real.why_not(recipe.high, linear)
        if reason is not None:
            raise TrimtabError(
                f'backend="{backend}" means real kernels here, and {path!r} cannot run on them: {reason}. Pass '
                'backend="emulated" (same numbers, no speed-up), or leave the linear out with filter_fn'
            )
    return "real"
