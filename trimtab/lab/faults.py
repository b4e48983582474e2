# SPDX-License-Identifier: Apache-2.0
"""Fault windows: on chosen units and steps the low path misbehaves; the high path is immune.

Small clean runs do not fail by themselves, so a bench that wants to show recovery must bring its own
failures: known ones, at known places and times, the same in every arm. A window names a unit (or a glob
over units), a kind, its first step (counted from 1) and its width in steps, and may repeat:

    blocks.1.mlp.down:grad_scale:start=200,width=20,size=64
    blocks.*.attn.q:stale_scale:start=100,width=5,size=8,every=50,count=4; blocks.0.mlp.up:nan:start=300

A switchable module carries `fault = None`. While a window is open on its unit it carries an object whose
methods its low path calls, and its high path never does:

    fault.output(y)              replaces the result of the forward; the backward does not know
    fault.grad_output(g)         replaces the gradient that enters the backward
    fault.grad_weight(g)         replaces the weight's gradient, after the backward has made it
    fault.amax(operand, amax)    replaces the amax that an operand's scale is made from

`Faults.at(step)` arms and disarms. It is called once before a step's first forward, so micro-batches,
backward and recompute of that step all see the same fault; call `disarm()` before an evaluation. What is
hit within a tensor is fixed by the module's path and by `seed`, never drawn, so two runs fail alike.

With units of several modules a name that is no unit's may be a module's path: `blocks.1.mlp.down` hits that
linear alone, whether units are linears or blocks.
"""

import dataclasses
import math
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from trimtab.checks import is_number, shown
from trimtab.control.units import Switch
from trimtab.errors import TrimtabError
from trimtab.lab.damage import flipped, spiked, with_nan, zeroed

KINDS: dict[str, float | None] = {
    "grad_scale": 64.0,  # the output gradient times size
    "output_scale": 8.0,  # the output times size
    "stale_scale": 8.0,  # the input's amax over size: a scale from when activations were smaller, they saturate
    "stuck_scale": 1.0,  # the input's amax stays what it was at the window's first low forward, over size
    "zero_blocks": 0.25,  # this share of the output's feature blocks is zero
    "bit_flip": 1 / 1024,  # this share of the output gradient's elements times 2^8: an exponent bit that flipped
    "grad_burst": 1000.0,  # the weight's gradient times size; unlike grad_scale, nothing upstream notices
    "grad_spike": 1000.0,  # one in 4,096 coordinates of the weight's gradient is size times the mean magnitude
    "nan": None,  # one NaN in the output gradient
    "nan_output": None,  # one NaN in the output
}
"""Each kind with its usual size; None where a size has no meaning."""

MOST_WINDOWS = 100_000
"""Repetitions of a fault: each becomes a window of its own."""
SHARES = ("zero_blocks", "bit_flip")
SCALES = ("stale_scale", "stuck_scale")


@dataclass(frozen=True)
class FaultWindow:
    """One fault: where, what and when."""

    unit: str
    """A unit's name, or a glob over the names."""
    kind: str
    """One of `KINDS`."""
    start: int
    """The first step it acts in; the first step of a run is 1."""
    width: int = 1
    """How many steps it lasts."""
    size: float | None = None
    """How bad it is, in the kind's own sense; None means the kind's usual size."""
    every: int | None = None
    """Steps from one repetition's start to the next."""
    count: int | None = None
    """How many repetitions, the first included."""
    seed: int = 0
    """Which elements or blocks are hit, for the kinds that hit some."""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise TrimtabError(f"a fault's kind must be one of {', '.join(KINDS)}, got {self.kind!r}")
        if not self.unit:
            raise TrimtabError(f"a fault needs the name of a unit or a glob, got {self.unit!r}")
        for name in ("start", "width", "every", "count"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or value < 1):
                raise TrimtabError(f"a fault's {name} must be an integer of at least 1, got {shown(value)}")
        if self.count is not None and self.count > MOST_WINDOWS:
            raise TrimtabError(f"a fault's count must be at most {MOST_WINDOWS:,}, got {shown(self.count)}")
        if not isinstance(self.seed, int):
            raise TrimtabError(f"a fault's seed must be an integer, got {self.seed!r}")
        if (self.every is None) != (self.count is None):
            raise TrimtabError(
                f"every and count repeat a fault together, got every={self.every} and count={self.count}: give both"
            )
        if self.every is not None and self.every < self.width:
            raise TrimtabError(
                f"every must be at least the width ({self.width}), got {self.every}: windows would overlap"
            )
        self._check_size()

    def _check_size(self) -> None:
        if self.size is None:
            return
        if KINDS[self.kind] is None:
            raise TrimtabError(f"a {self.kind} fault has no size, got {self.size}: leave it out")
        if not is_number(self.size):
            raise TrimtabError(f"a fault's size must be a finite number, got {shown(self.size)}")
        if self.kind in SHARES and not 0 < self.size <= 1:
            raise TrimtabError(f"the size of a {self.kind} fault is a share in (0, 1], got {self.size}")
        if self.kind in SCALES and self.size <= 0:
            raise TrimtabError(f"the size of a {self.kind} fault must be above 0, got {self.size}")

    @property
    def amount(self) -> float:
        """The size in effect: its own, or the kind's usual one."""
        return float(self.size if self.size is not None else KINDS[self.kind] or 0.0)

    def contains(self, step: int) -> bool:
        """Whether the fault acts in a step."""
        return any(one.start <= step < one.start + one.width for one in self.expanded())

    def expanded(self) -> list["FaultWindow"]:
        """Its repetitions, each as a window of its own."""
        if self.every is None or self.count is None:
            return [self]
        once = dataclasses.replace(self, every=None, count=None)
        return [dataclasses.replace(once, start=self.start + i * self.every) for i in range(self.count)]

    def to_dict(self) -> dict[str, Any]:
        """Its fields, those at their default left out."""
        fields = dataclasses.fields(self)
        return {f.name: getattr(self, f.name) for f in fields if getattr(self, f.name) != f.default}

    def __str__(self) -> str:
        """The compact form that `parse_faults` reads."""
        rest = {key: value for key, value in self.to_dict().items() if key not in ("unit", "kind")}
        return f"{self.unit}:{self.kind}:" + ",".join(f"{key}={value}" for key, value in rest.items())

    @classmethod
    def from_dict(cls, fields: Mapping[Any, Any]) -> "FaultWindow":
        """The inverse of `to_dict`."""
        known = [field.name for field in dataclasses.fields(cls)]
        for key in fields:
            if key not in known:
                raise TrimtabError(f"a fault has no key {key!r}: it has {', '.join(known)}")
        for key in ("unit", "kind", "start"):
            if key not in fields:
                raise TrimtabError(f"a fault needs unit, kind and start, got {dict(fields)}: add {key}")
        return cls(**fields)

    @classmethod
    def parse(cls, text: str) -> "FaultWindow":
        """Read one window from its compact form."""
        parts = [part.strip() for part in text.split(":")]
        if len(parts) != 3:
            raise TrimtabError(f'a fault is written "unit:kind:start=N,width=N,size=X", got {text.strip()!r}')
        fields: dict[str, Any] = {"unit": parts[0], "kind": parts[1]}
        for pair in filter(None, (pair.strip() for pair in parts[2].split(","))):
            key, _, value = (part.strip() for part in pair.partition("="))
            try:
                fields[key] = float(value) if key == "size" else int(value)
            except ValueError:
                raise TrimtabError(f'each of a fault\'s settings is written "key=number", got {pair!r}') from None
        return cls.from_dict(fields)


Windows = str | FaultWindow | Mapping[str, Any] | Iterable["str | FaultWindow | Mapping[str, Any]"] | None


def parse_faults(windows: Windows) -> tuple[FaultWindow, ...]:
    """Read windows from a string (several separated by ";"), a window, a dict, or a list of these."""
    if isinstance(windows, str):
        return tuple(FaultWindow.parse(text) for text in windows.split(";") if text.strip())
    if isinstance(windows, FaultWindow):
        return (windows,)
    if isinstance(windows, Mapping):
        return (FaultWindow.from_dict(windows),)
    if windows is None:
        return ()
    if not isinstance(windows, Iterable):
        raise TrimtabError(f'faults are text such as "unit:kind:start=N", windows, or a list of these, got {windows!r}')
    return tuple(window for entry in windows for window in parse_faults(entry))


class Armed:
    """What a module carries while windows are open on it; a backward keeps the one its forward began with."""

    def __init__(self, path: str, windows: list[FaultWindow], captured: dict[FaultWindow, Tensor]) -> None:
        self.path, self.windows, self.captured = path, windows, captured

    def output(self, y: Tensor) -> Tensor:  # (..., features)
        for window in self.windows:
            if window.kind == "output_scale":
                y = y * window.amount
            elif window.kind == "zero_blocks":
                y = y.masked_fill(zeroed(y.shape[-1], window.amount, self._place(window)).to(y.device), 0.0)
            elif window.kind == "nan_output":
                y = with_nan(y, self._place(window))
        return y

    def grad_output(self, g: Tensor) -> Tensor:
        for window in self.windows:
            if window.kind == "grad_scale":
                g = g * window.amount
            elif window.kind == "bit_flip":
                g = flipped(g, window.amount, self._place(window))
            elif window.kind == "nan":
                g = with_nan(g, self._place(window))
        return g

    def grad_weight(self, g: Tensor) -> Tensor:
        for window in self.windows:
            if window.kind == "grad_burst":
                g = g * window.amount
            elif window.kind == "grad_spike":
                g = spiked(g, window.amount, self._place(window))
        return g

    def amax(self, operand: str, amax: Tensor) -> Tensor:
        for window in self.windows if operand == "input" else ():
            if window.kind == "stale_scale":
                amax = amax / window.amount
            elif window.kind == "stuck_scale":
                if window not in self.captured:  # one number, because a later step may have other groups
                    self.captured[window] = amax.detach().max().clone()
                amax = (self.captured[window].to(amax) / window.amount).expand_as(amax).clone()
        return amax

    def _place(self, window: FaultWindow) -> int:
        return zlib.crc32(f"{self.path}:{window.seed}".encode())


@dataclass(eq=False)
class _Target:
    """One switchable module, and the windows bound to it."""

    path: str
    module: nn.Module
    unit: str
    windows: list[FaultWindow] = field(default_factory=list)
    captured: dict[FaultWindow, Tensor] = field(default_factory=dict)

    def arm(self, step: int | None) -> None:
        """Let the module carry the windows that contain the step; without such a window, nothing."""
        open_ = [window for window in self.windows if step is not None and window.contains(step)]
        armed = Armed(self.path, open_, self.captured) if open_ else None
        self.module.fault = armed  # type: ignore[assignment]


class Faults:
    """Fault windows bound to a model's switchable modules.

    Attributes:
        windows: every window, repetitions and globs written out: one entry per unit and start.
    """

    def __init__(self, model: nn.Module, windows: Windows) -> None:
        self._targets = [
            _Target(getattr(module, "fqn", path), module, switch.name)  # fqn: the path without wrappers such as DDP
            for path, module in model.named_modules()
            if isinstance(switch := getattr(module, "switch", None), Switch) and hasattr(module, "fault")
        ]
        if not self._targets:
            raise TrimtabError("faults need switchable modules, the model has none: call trimtab.convert_ first")
        self._units = list(dict.fromkeys(target.unit for target in self._targets))
        expanded: list[FaultWindow] = []
        for window in parse_faults(windows):
            for name in self._matching(window.unit):
                named = dataclasses.replace(window, unit=name).expanded()
                expanded += named
                for target in self._targets:
                    if name == target.unit or (name == target.path and name not in self._units):
                        target.windows += named
        self.windows = tuple(expanded)

    def _matching(self, pattern: str) -> list[str]:
        """The units that a pattern names; where it names none, the module paths."""
        paths = [target.path for target in self._targets]
        for names in (self._units, paths):
            if pattern in names:
                return [pattern]  # before globs: a unit's own name may be a glob
            if found := [name for name in names if fnmatchcase(name, pattern)]:
                return found
        nearest = get_close_matches(pattern, dict.fromkeys([*self._units, *paths]), n=3, cutoff=0.0)
        raise TrimtabError(f"a fault must name a unit, {pattern!r} matches none: nearest are {', '.join(nearest)}")

    def at(self, step: int) -> None:
        """Arm the modules whose windows contain the step and disarm all others."""
        for target in self._targets:
            target.arm(step)

    def disarm(self) -> None:
        """Take every fault off, as before an evaluation; the next `at` puts them back."""
        for target in self._targets:
            target.arm(None)

    def active(self, step: int) -> set[str]:
        """The names of the units with an open window in a step."""
        return {t.unit for t in self._targets if any(window.contains(step) for window in t.windows)}

    def state_dict(self) -> dict[str, dict[str, Tensor | None]]:
        """What stuck scales have captured, by window and module; None where nothing was captured yet."""
        captured = {}
        for target, window in self._stuck():
            value = target.captured.get(window)
            captured[f"{window} @ {target.path}"] = None if value is None else value.detach().cpu().clone()
        return {"captured": captured}

    def load_state_dict(self, state_dict: Mapping[str, Mapping[str, Tensor | None]]) -> None:
        """Take back what `state_dict` gave."""
        captured = state_dict["captured"]
        expected = {f"{window} @ {target.path}": (target, window) for target, window in self._stuck()}
        for name in set(captured) ^ set(expected):
            where = "is not among the run's faults" if name in captured else "is missing from the state"
            raise TrimtabError(f"a run resumes with the faults it began with, {name!r} {where}: give the same windows")
        for name, (target, window) in expected.items():
            value = captured[name]
            if value is None:
                target.captured.pop(window, None)
            else:
                target.captured[window] = value.clone()

    def settle(self, largest: Callable[[Tensor], Tensor]) -> None:
        """Let ranks agree on what stuck scales have captured; `largest` gives each value's maximum over them."""
        stuck = list(self._stuck())
        if stuck:
            found = [target.captured.get(window) for target, window in stuck]
            values = torch.stack([torch.tensor(-math.inf) if v is None else v.detach().float().cpu() for v in found])
            for (target, window), value in zip(stuck, largest(values), strict=True):
                if value > -math.inf:
                    target.captured[window] = value

    def _stuck(self) -> Iterable[tuple[_Target, FaultWindow]]:
        return ((t, window) for t in self._targets for window in t.windows if window.kind == "stuck_scale")
