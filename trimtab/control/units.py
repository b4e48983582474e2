# SPDX-License-Identifier: Apache-2.0
"""Units: what is watched, and what can be switched.

A unit is a named group with two sides. Its *signal* is a set of parameters: the L2 norm of their
gradient is what the controller reads. Its *switch* is one bit, low or high, that any number of modules
read when their forward starts. The two sides may differ: under LoRA the switch sits on the frozen base
linears and the signal on the adapters.

    Switch      the seat of one decision, shared by the modules that must move together
    Unit        name + signal + switch (None: watched, never switched)
    group()     which modules form one unit: per linear, per block, per expert, by name pattern
    find_units  the units of a model, converted or plain

This file is all that `control` and `linear` know of each other: `linear` puts a `Switch` on its modules
as the attribute `switch`, `control` finds it there. Names are those of the bare model, without what DDP,
torch.compile or activation checkpointing add to them.

Experts that are slices of one parameter are units by slice: an `index` says which slice of its parameters is
a unit's signal. They have no path of their own to switch, so they are watched.
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from trimtab.errors import TrimtabError
from trimtab.modules import bare_modules, block_of, expert_of, output_head, stacked

Grouping = str | Sequence[str]

log = logging.getLogger(__name__)


@dataclass(eq=False)
class Switch:
    """One unit's decision, read by its modules when their forward starts."""

    name: str
    roots: tuple[nn.Module, ...] = ()
    """Modules whose trainable parameters form the unit's signal (the linear, the block, the expert)."""
    planned: bool = False
    """What the plan says; set by `control.act` alone."""
    forced: bool | None = None
    """What `trimtab.running` says, over the plan, while it is open."""
    pending: Callable[[], object] | None = field(default=None, repr=False)
    """Makes the plan, where it is still to be made when the next forward begins (`Controller(wait="forward")`)."""

    @property
    def high(self) -> bool:
        """Whether the next forward takes the high path."""
        if self.forced is not None:
            return self.forced
        if self.pending is not None:
            self.pending()
        return self.planned

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "pending": None}  # a copy waits for nobody


@dataclass(frozen=True, eq=False)
class Unit:
    """A watched group: its name, the parameters whose gradient is its signal, and its switch if it has one."""

    name: str
    parameters: tuple[nn.Parameter, ...]
    switch: Switch | None = None
    modules: tuple[nn.Module, ...] = field(default=(), repr=False)
    bystander: bool = False
    """Watched on request (`watch=`) and never chosen, not even on a plain model, where choices are on paper."""
    index: int | None = None
    """Which slice of its parameters' first dimension is the signal (an expert of a stack); None: all of them."""

    @property
    def recoverable(self) -> bool:
        """Whether the unit has a high path to go to."""
        return self.switch is not None


def group(paths: Iterable[str], unit: Grouping) -> dict[str, list[str]]:
    """Group module paths into units; returns {unit name: paths}, in model order.

    Args:
        unit: `"linear"` (each path alone), `"block"`, `"expert"` (paths outside any block or expert stand
            alone), or a list of glob patterns: each is one unit, the first match wins, and a path that
            matches none is left out.
    """
    if isinstance(unit, str):
        namers = {"linear": lambda path: path, "block": block_of, "expert": expert_of}
        if unit not in namers:
            raise TrimtabError(f'unit must be "linear", "block", "expert" or a list of name patterns, got {unit!r}')
        name_of = lambda path: namers[unit](path) or path  # noqa: E731
    else:
        name_of = lambda path: next((p for p in unit if fnmatchcase(path, p)), None)  # noqa: E731
    grouped: dict[str, list[str]] = {}
    for path in paths:
        name = name_of(path)
        if name is not None:
            grouped.setdefault(name, []).append(path)
    return grouped


def roots_of(
    name: str, paths: Sequence[str], modules: Mapping[str, nn.Module], unit: Grouping
) -> tuple[nn.Module, ...]:
    """The modules whose parameters are a unit's signal: the whole block or expert, or just the grouped modules."""
    if isinstance(unit, str) and unit in ("block", "expert") and name in modules:
        return (modules[name],)
    return tuple(modules[path] for path in paths)


def gather_units(
    model: nn.Module, units: Grouping | Sequence[Unit] | None, watch: Sequence[str], mode: str
) -> tuple[Unit, ...]:
    """The units to control and to watch; a controller without any raises."""
    ready = [] if units is None or isinstance(units, str) else [unit for unit in units if isinstance(unit, Unit)]
    if ready:
        found = tuple(ready)
    else:
        found = find_units(model, units)  # pyright: ignore[reportArgumentType]
    if any(hasattr(p, "ds_id") or hasattr(p, "_hp_mapping") for unit in found for p in unit.parameters):
        raise TrimtabError(
            "norms are read from p.grad, got a model of DeepSpeed's ZeRO, which leaves it empty: use "
            "trimtab.integrations.deepspeed.ZeroController(engine)"
        )
    if not found:
        raise TrimtabError("the model has no unit to watch: it needs at least one module with a trainable matrix")
    if mode == "act" and not any(unit.recoverable for unit in found):
        raise TrimtabError(
            "mode 'act' needs units that can switch, and this model has none: call trimtab.convert_(model, recipe) "
            "first, or look without acting: Controller(model, mode='observe')"
        )
    for pattern in watch:
        taken = {unit.name for unit in found}
        more = tuple(u for u in _watchable(model) if fnmatchcase(u.name, pattern) and u.name not in taken)
        if not more:
            raise TrimtabError(f"watch pattern {pattern!r} matches no further module with trainable parameters")
        found += more
    silent = [unit.name for unit in found if not unit.parameters]
    if silent:
        log.warning(
            "%d of %d units have no trainable parameter and are never judged: %s",
            len(silent),
            len(found),
            ", ".join(silent[:5]),
        )
    return found


def find_units(model: nn.Module, unit: Grouping | None = None) -> tuple[Unit, ...]:
    """The units of a model.

    A converted model carries its switches: each is a unit. With `unit=` given, or where there is no
    switch, the model's own parameter-owning modules are grouped and merely watched.
    """
    switches: dict[int, tuple[Switch, list[nn.Module]]] = {}
    for module in bare_modules(model).values():  # a wrapper may show its module's switch as its own
        switch = getattr(module, "switch", None)
        if isinstance(switch, Switch):
            switches.setdefault(id(switch), (switch, []))[1].append(module)
    if switches and unit is None:
        signals = _signals(model, [switch.roots for switch, _ in switches.values()])
        return tuple(
            Unit(switch.name, signal, switch, tuple(modules))
            for (switch, modules), signal in zip(switches.values(), signals, strict=True)
        )
    return _watched(model, "linear" if unit is None else unit)


def _watched(model: nn.Module, unit: Grouping) -> tuple[Unit, ...]:
    """Group the modules that own a trainable matrix; embeddings and the output head stay outside, as in the paper."""
    head = output_head(model)
    modules = bare_modules(model)
    owners = [
        path
        for path, module in modules.items()
        if module is not head
        and not isinstance(module, nn.Embedding)
        and any(p.requires_grad and _num_dims(p) >= 2 for p in module.parameters(recurse=False))
    ]
    units = []
    for name, paths in group(owners, unit).items():
        if unit == "expert" and paths == [name] and (slices := _slices(name, modules[name])):
            units += slices
            continue
        roots = roots_of(name, paths, modules, unit)
        units.append(Unit(name, trainable(roots), None, tuple(modules[path] for path in paths)))
    return tuple(units)


def _num_dims(p: nn.Parameter) -> int:
    """Of the whole parameter: ZeRO-3 leaves an empty one, with its shape beside it."""
    return len(getattr(p, "ds_shape", p.shape))


def _watchable(model: nn.Module) -> Iterator[Unit]:
    """Everything that `watch=` may name: each module with a trainable parameter, each expert of a stack."""
    for path, module in bare_modules(model).items():
        if own := trainable([module]):
            yield Unit(path, own, bystander=True)
        yield from _slices(path, module, bystander=True)


def _slices(path: str, module: nn.Module, *, bystander: bool = False) -> list[Unit]:
    """One unit per expert of a stack, or nothing if the module holds none that is trained."""
    parameters = tuple(p for p in stacked(path, module).values() if p.requires_grad)
    return [
        Unit(f"{path}.{i}", parameters, None, (module,), bystander, i)
        for i in range(len(parameters[0]) if parameters else 0)
    ]


def trainable(roots: Iterable[nn.Module]) -> tuple[nn.Parameter, ...]:
    """The trainable parameters below some modules, each once."""
    found = {id(p): p for root in roots for p in root.parameters() if p.requires_grad}
    return tuple(found.values())


def _signals(model: nn.Module, roots: Sequence[tuple[nn.Module, ...]]) -> list[tuple[nn.Parameter, ...]]:
    """Each unit's trainable parameters; a frozen unit borrows those of its nearest ancestor that holds no other unit.

    That ancestor is the LoRA layer when adapters were put around a linear that was already converted.
    """
    above = {id(child): parent for parent in model.modules() for child in parent.children()}
    signals = []
    for own in roots:
        signal = trainable(own)
        others = {id(m) for group_ in roots if group_ is not own for root in group_ for m in root.modules()}
        ancestor = above.get(id(own[0])) if own and not signal else None
        while ancestor is not None and not signal and not any(id(m) in others for m in ancestor.modules()):
            signal = trainable([ancestor])
            ancestor = above.get(id(ancestor))
        signals.append(signal)
    return signals
