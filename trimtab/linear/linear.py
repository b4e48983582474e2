# SPDX-License-Identifier: Apache-2.0
"""`SwitchLinear`: an `nn.Linear` with two paths and one switch.

It has no parameters or buffers of its own, so its `state_dict()` is the plain one, and it is made by giving an
existing `nn.Linear` this class (`convert_`): the module, its weight, its hooks and every reference stay the same.

The switch is read once, when a forward starts. What it said is kept in the `Call` that goes through autograd:
the backward of a forward takes the same path even if the switch has moved since. Activation checkpointing
runs the forward again inside a backward; such a recompute gets the module's most recent `Call` instead of
reading the switch. (Known bugs of this kind: NVIDIA/TransformerEngine #1190, NVIDIA/Megatron-LM #7538.)
One limit: where checkpointed forwards of the same module are pending together (a pipeline schedule, a module
used twice in one region), their recomputes all repeat the last one. The path is still right, because decisions
change only between optimizer steps; delayed scales and random numbers are then those of the last call.

A plain path is exactly `F.linear(x, self.weight, self.bias)`: same kernel, same bits, same autocast. Any other
path does to its inputs what autocast would do, then runs `SwitchedGemms` with autocast off.

Under `torch.compile` the module is one opaque operator that does all this when it runs (`opaque.py`): a switch that a
compiled region could see would recompile it.

Under FSDP2 a forward sees whole weights, in the type that its mixed precision says. Under tensor parallelism the weight
is a DTensor: emulated paths of plain casts go through DTensor's own operations, and other paths are refused.

Where a module carries a `watch`, its low path also computes what the high path would have given for the same operands
and reports how far apart they are. That costs the linear once more and changes no number of the run.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from trimtab.control.units import Switch
from trimtab.errors import TrimtabError
from trimtab.linear.gemms import SwitchedGemms
from trimtab.linear.kin import Kin
from trimtab.linear.opaque import amax_of, enroll, linear, linear_saving, mark
from trimtab.linear.paths import Recipe
from trimtab.linear.state import Call, Ear, Fault, PathState, Watch
from trimtab.modules import in_backward
from trimtab.shards import is_dtensor

__all__ = ["Fault", "SwitchLinear", "Watch", "load_path_state", "path_state", "switch_linears"]


class SwitchLinear(nn.Linear):
    """A linear that runs its recipe's low or high path, as its unit's switch says. Made by `convert_`."""

    switch: Switch
    recipe: Recipe
    fqn: str
    """Path of the module in the model that was converted: the key of its path state, and its random seed."""
    real: bool
    """Whether quantized paths run on real kernels (`real.py`) or are emulated."""
    memory: PathState
    fault: Fault | None
    """Damages the low path on purpose (see `Fault`); None costs nothing."""
    watch: Watch | None
    """Is told how far the low path is from the high one in training (see `Watch`); None costs nothing."""
    ears: list[Ear]
    """Who listens under torch.compile (see `Ear`); without it, module hooks do."""
    _last: Call | None
    number: Tensor
    """How the operator of a compiled region finds this module (`opaque.py`)."""
    saves: bool
    """Whether its low path keeps the input in few bits; looked up here, where a compiler can read it."""
    whole: tuple[bool, bool]
    """Whether input and output gradient are scaled by the amax of the whole tensor."""
    kin: Kin | None
    """With whom it casts its weight on real kernels."""
    place: int
    """Its place among them."""

    def __init__(self, *_: Any, **__: Any) -> None:
        raise TrimtabError("a SwitchLinear is made from an nn.Linear inside a model: use convert_(model, recipe)")

    def attach(self, switch: Switch, recipe: Recipe, fqn: str, *, real: bool = False) -> None:
        """Set what an `nn.Linear` lacks; `convert_` calls this right after it has changed the class."""
        self.switch, self.recipe, self.fqn, self.real = switch, recipe, fqn, real
        self.memory, self.fault, self.watch, self._last, self.ears = PathState(recipe), None, None, None, []
        self.number, self.saves = enroll(self), recipe.low.saves
        whole = recipe.low.whole | recipe.high.whole
        self.whole = "input" in whole, "grad_output" in whole
        self.kin, self.place = None, 0

    def detach(self) -> None:
        """Remove what `attach` set, so that the class can go back to `nn.Linear`."""
        mine = (
            "switch",
            "recipe",
            "fqn",
            "real",
            "memory",
            "fault",
            "watch",
            "ears",
            "_last",
            "number",
            "saves",
            "whole",
            "kin",
            "place",
        )
        for attribute in mine:
            del self.__dict__[attribute]

    def forward(self, input: Tensor) -> Tensor:
        if torch.compiler.is_compiling():
            x, weight, bias = _cast((input, self.weight, self.bias), _autocast_dtype(input))
            self._check(x, weight)
            # torch.compiler.is_exporting() reads as True in every traced function before torch 2.13
            if getattr(torch.compiler, "_is_exporting_flag", False):
                raise TrimtabError(
                    f"{self.fqn!r} cannot be exported, because its switch is not part of a graph: revert_(model) first"
                )
            value = mark(x) if self.real else None
            if self.real and self.saves:
                keeps = torch.is_grad_enabled() and weight.requires_grad
                return linear_saving(x, weight, bias, self.number, value, keeps)
            # As part of the graph an amax costs little: the compiler finds it where x is made.
            amax = amax_of(x.detach()) if self.real and self.whole[0] and x.numel() else None
            return linear(x, weight, bias, self.number, value, amax, self.real and self.whole[1])
        if is_dtensor(self.weight):
            self._check_cut()
        call = self.begin()
        plain = call.path.is_plain and call.fault is None
        if plain and not self.memory.histories:
            return nn.functional.linear(input, self.weight, self.bias)
        dtype = _autocast_dtype(input)
        if self.memory.histories:
            call.observe("input", input, dtype)
            call.observe("weight", self.weight, dtype)
        if plain:  # calibrating: the numbers are the plain ones, the history is fed
            y = nn.functional.linear(input, self.weight, self.bias)
            if y.requires_grad:
                y.register_hook(lambda grad: call.observe("grad_output", grad))
            return y
        tensors = (input, self.weight, self.bias)
        if dtype is None:
            return self._low_precision(call, *tensors)
        with torch.autocast(input.device.type, enabled=False):
            return self._low_precision(call, *_cast(tensors, dtype))

    def begin(self, mark: int | None = None) -> Call:
        """The call this forward belongs to: a new one, or in a recompute the one it repeats."""
        if self._last is not None and in_backward():
            return replace(self._last, measured={}, mark=mark)
        high = self.switch.high
        path = self.recipe.high if high else self.recipe.low
        fault = None if high else self.fault
        call = Call(path, self.memory, self.fqn, fault=fault, record=self.training, real=self.real, mark=mark)
        if path.random:
            call.draw = self.memory.draws
            self.memory.draws += self.training  # an evaluation must not move the training's random numbers
        if self.watch is not None and self.training and not high:
            call.shadow = Call(self.recipe.high, self.memory, self.fqn, draw=call.draw, amaxes=call.amaxes)
            call.report = _reporter(self, self.watch)
        if self.ears and self.training:
            call.ears = tuple(self.ears)
        if self.kin is not None:
            Kin.turns += 1
            call.kin, call.place = (None if high else self.kin), self.place
        self.__dict__["_last"] = call  # past nn.Module, which would ask whether it is a parameter
        return call

    def _low_precision(self, call: Call, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        self._check(x, weight)
        return SwitchedGemms.apply(x, weight, bias, call, torch.is_grad_enabled())  # type: ignore[return-value]

    def _check(self, x: Tensor, weight: Tensor) -> None:
        if x.dtype != weight.dtype or x.shape[-1:] != weight.shape[1:]:
            raise TrimtabError(
                f"the input of {self.fqn!r} must be {weight.dtype} with last dimension {weight.shape[1]}, got "
                f"{x.dtype} of shape {tuple(x.shape)}: cast it, or use autocast"
            )

    def _check_cut(self) -> None:
        """Refuse what is not known to work on a weight that tensor parallelism cuts: the rest goes through DTensor."""
        gemms = [gemm for path in (self.recipe.low, self.recipe.high) for _, gemm in path.gemms()]
        if self.real or self.memory.histories or any(g.hadamard or g.random or g.result for g in gemms):
            raise TrimtabError(
                "under tensor parallelism a path must be emulated, without delayed scales, rotations, random numbers "
                f"or quantized results, got {self.recipe.short_str()} on {self.fqn!r}: use fp8, fp8_row, fp8_block, "
                'int8 or saved4 with backend="emulated", or leave the linear out with filter_fn'
            )

    def extra_repr(self) -> str:
        recipe = self.recipe
        return f"{super().extra_repr()}, unit={self.switch.name!r}, low={recipe.low.name}, high={recipe.high.name}"

    def __getstate__(self) -> dict[str, Any]:
        # A copy starts outside any backward, unwatched, unheard and without kin, and under a number of its own.
        state = super().__getstate__() | {"_last": None, "watch": None, "ears": [], "kin": None}
        del state["number"]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.number = enroll(self)


def _reporter(module: SwitchLinear, watch: Watch) -> Callable[[str, Tensor, Tensor], None]:
    """Tell a watch of each role, the forward once: activation checkpointing runs it a second time."""
    told: list[str] = []

    @torch.no_grad()
    def report(role: str, low: Tensor, high: Tensor) -> None:
        if role == "output" and role in told:
            return
        told.append(role)
        high = high.float()
        getattr(watch, role)(module, (low.float() - high).square().sum(), high.square().sum())

    return report


def _cast(tensors: Iterable[Tensor | None], dtype: torch.dtype | None) -> Iterator[Any]:
    """What autocast would do to the operands of a linear."""
    return (t if t is None or dtype is None or t.dtype == torch.float64 else t.to(dtype) for t in tensors)


def _autocast_dtype(x: Tensor) -> torch.dtype | None:
    """The type autocast would give the operands of a linear, or None where it is off or does not exist."""
    device = x.device.type
    if device == "meta" or not torch.is_autocast_enabled(device):
        return None
    return torch.get_autocast_dtype(device)


def switch_linears(model: nn.Module) -> Iterator[SwitchLinear]:
    """The converted linears of a model, each once."""
    return (module for module in model.modules() if isinstance(module, SwitchLinear))


def path_state(model: nn.Module) -> dict[str, dict[str, Any]]:
    """What the paths remember, by module: amax histories, positions, draw counters. Tensors and ints only."""
    return {module.fqn: module.memory.state_dict() for module in switch_linears(model)}


def load_path_state(model: nn.Module, state_dict: dict[str, dict[str, Any]]) -> None:
    """Restore `path_state`; nothing is changed unless every module of the model and of the state matches."""
    modules = {module.fqn: module for module in switch_linears(model)}
    for what, names in (("has no entry for", set(modules) - set(state_dict)), ("has", set(state_dict) - set(modules))):
        if names:
            raise TrimtabError(
                f"path state must match the converted linears one to one, but it {what} {', '.join(sorted(names))}: "
                "convert the model as it was converted when the state was saved"
            )
    for name, module in modules.items():
        module.memory.check(state_dict[name], name)
    for name, module in modules.items():
        module.memory.load_state_dict(state_dict[name], name)
