# SPDX-License-Identifier: Apache-2.0
"""Adopting the low-precision modules of another library: they become units, in place.

As with `convert_`, a module only changes its class, to a subclass that reads the unit's switch when a forward starts:
weights, hooks, optimizers and checkpoints stay what they were. Low is what the library does, high is up to the
subclass. What a forward chose travels in the library's own autograd graph, so its backward takes the same path; a
recompute (activation checkpointing) repeats the module's last choice.
"""

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field

from torch import nn

from trimtab.control.units import Grouping, Switch, group, roots_of
from trimtab.errors import NoEffectWarning, TrimtabError
from trimtab.modules import bare_modules, in_backward

FilterFn = Callable[[nn.Module, str], bool]


class Switched(nn.Module):
    """What an adopted module has besides its own: a switch, and the memory of its last choice."""

    switch: Switch
    _went_high: bool | None

    def goes_high(self) -> bool:
        """Which path this forward takes; a recompute takes that of the forward it repeats."""
        if self._went_high is None or not in_backward():
            self._went_high = self.switch.high
        return self._went_high


@dataclass(frozen=True)
class AdoptReport:
    """What was adopted, and what was left alone and why."""

    paths: str
    """What low and high are, and for which GEMMs."""
    covered: tuple[str, ...] = ()
    skipped: dict[str, str] = field(default_factory=dict)
    units: dict[str, tuple[str, ...]] = field(default_factory=dict)

    def __str__(self) -> str:
        total = len(self.covered) + len(self.skipped)
        lines = [f"{len(self.covered)} of {total} modules switchable in {len(self.units)} units; {self.paths}"]
        for reason in dict.fromkeys(self.skipped.values()):
            names = [name for name, why in self.skipped.items() if why == reason]
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            lines.append(f"  skipped {len(names)} ({reason}): {', '.join(names[:3])}{more}")
        return "\n".join(lines)


def adopt_(
    model: nn.Module,
    switched: Callable[[nn.Module], type[Switched] | str | None],
    paths: str,
    *,
    unit: Grouping,
    filter_fn: FilterFn | None,
) -> AdoptReport:
    """Give modules their switched class; every unit starts low.

    Args:
        switched: a module's new class, the reason why it has none, or None for what is not the library's.
    """
    modules = bare_modules(model)
    found: dict[str, type[Switched]] = {}
    skipped: dict[str, str] = {}
    for path, module in modules.items():
        new = "adopted already" if isinstance(module, Switched) else switched(module)
        if isinstance(new, type) and filter_fn is not None and not filter_fn(module, path):
            new = "filter_fn said no"
        if isinstance(new, str):
            skipped[path] = new
        elif new is not None:
            found[path] = new
    units = {name: tuple(members) for name, members in group(found, unit).items()}
    covered = {path for members in units.values() for path in members}
    skipped |= {path: "matches no unit pattern" for path in found if path not in covered}
    switches = [getattr(module, "switch", None) for module in modules.values()]
    taken = {switch.name for switch in switches if isinstance(switch, Switch)} & set(units)
    if taken:
        raise TrimtabError(
            f"unit names must be unique, but the model already has {', '.join(sorted(taken))}: adopt all modules of a "
            "unit in one call, or name the units by patterns"
        )
    report = AdoptReport(paths, tuple(path for path in found if path in covered), skipped, units)
    if not covered:
        warnings.warn(f"nothing was adopted, units stay as they were: {report}", NoEffectWarning, stacklevel=3)
    for name, members in units.items():
        switch = Switch(name, roots_of(name, members, modules, unit))
        for path in members:
            module = modules[path]
            module.__class__ = found[path]
            assert isinstance(module, Switched)
            module.switch, module._went_high = switch, None
    return report


def release_(model: nn.Module) -> int:
    """Give every adopted module its own class back; returns how many there were."""
    adopted = [module for module in model.modules() if isinstance(module, Switched)]
    for module in adopted:
        del module.__dict__["switch"], module.__dict__["_went_high"]
        module.__class__ = type(module).__mro__[2]  # Switched comes first, then the library's class
    return len(adopted)
