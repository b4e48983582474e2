# SPDX-License-Identifier: Apache-2.0
"""Listeners: sensors that hear every forward or every gradient of a step as it passes.

A model keeps its hooks longer than a controller that was replaced, so hooks hold their sensor weakly and go with it.

Under torch.compile a module hook would be traced: its memory would be guarded, and compiled again in every step. A
switchable linear has `ears` for that case, which its operator calls when it runs; a plain module is left where it is
heard, at the price of a break in its graph.
"""

import math
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from trimtab.control.sensors import Base, together
from trimtab.control.units import Unit
from trimtab.errors import TrimtabError
from trimtab.modules import in_backward

ROWS = 1024
"""Tokens of a forward that a gain is taken from, at most."""


class GradientSNR(Base):
    """Column `gsnr`: sum of (mean g)^2 over sum of Var g of a unit's parameters, over the step's micro-batches.

    The ratio of the sums, not the mean of the ratios: with two micro-batches a single ratio has no finite mean.
    """

    column = "gsnr"

    def __init__(self) -> None:
        self._sums: dict[int, tuple[Tensor, Tensor]] = {}
        self._passes: dict[int, int] = {}
        self._handles: list[Any] = []

    def attach(self, units: Sequence[Unit]) -> None:
        """Listen to every gradient that enters the accumulation."""
        super().attach(units)
        parameters = {id(p): p for unit in units for p in unit.parameters}
        self._handles = [p.register_hook(_listen(self, key)) for key, p in parameters.items()]
        _removed_with(self, self._handles)

    @torch.no_grad()
    def take(self, key: int, grad: Tensor) -> None:
        """Add one micro-batch's gradient of one parameter."""
        grad = grad.detach().float()
        if key in self._sums:
            self._sums[key][0].add_(grad)
            self._sums[key][1].addcmul_(grad, grad)
        else:
            self._sums[key] = grad.clone(), grad.square()
        self._passes[key] = self._passes.get(key, 0) + 1

    @torch.no_grad()
    def read(self) -> Tensor:
        """Close the step."""
        if self._passes and max(self._passes.values()) < 2:
            raise TrimtabError(
                "the gradient's signal-to-noise ratio needs at least 2 backward passes per step, got 1: accumulate "
                "over micro-batches (in the lab: accumulate=2), or choose another detector"
            )
        found = [self._of(unit) for unit in self.units]
        self._sums, self._passes = {}, {}
        return together(found)

    def _of(self, unit: Unit) -> Tensor:
        signal, noise = [], []
        for key in map(id, unit.parameters):
            times = self._passes.get(key, 0)
            if times > 1:
                mean = self._sums[key][0] / times
                signal.append(mean.square().sum())
                noise.append((self._sums[key][1] / times - mean.square()).clamp_min(0).sum() * (times / (times - 1)))
        if not signal:
            return torch.tensor(torch.nan)
        ratio = torch.stack(signal).sum() / torch.stack(noise).sum()
        return ratio.nan_to_num(nan=torch.inf)

    def detach(self) -> None:
        """Stop listening."""
        _remove(self._handles)


class Listener(Base):
    """A sensor that hears the forwards of its units' modules, and feels the gradients of their outputs."""

    def __init__(self) -> None:
        self._sums: dict[int, Any] = {}
        self._handles: list[Any] = []

    def attach(self, units: Sequence[Unit]) -> None:
        """Listen to every module of a unit."""
        super().attach(units)
        self._handles = _listen_to(units, self)
        _removed_with(self, self._handles)

    def hear(self, key: int, x: Tensor, y: Tensor) -> None:
        """A training forward of one module, perhaps a recompute."""

    def feel(self, key: int, grad: Tensor) -> None:
        """The gradient of one output of one module."""

    def collected(self) -> list[list[Any]]:
        """What was kept of each unit's modules in this step; begins the next."""
        found = [[self._sums[key] for key in map(id, unit.modules) if key in self._sums] for unit in self.units]
        self._sums = {}
        return found

    def detach(self) -> None:
        """Unhook."""
        _remove(self._handles)


class OutputGain(Listener):
    """Column `output`: the gain of a unit's linears, size of the output over size of the input.

        gain = (mean sqrt|y|)^2 / sqrt(mean x^2)

    What happens upstream scales both and cancels: the gain moves where the fault is. The mean of roots is a size like
    the RMS, but one that zeroed features move four times as far (a quarter of them: to 0.56 instead of 0.87), and
    that no outlier governs. A unit of several modules has the geometric mean of theirs. Of a forward with more than
    `ROWS` tokens every k-th is read, evenly spread: enough for a mean, and the cost does not grow with the batch.
    """

    column = "output"

    def hear(self, key: int, x: Tensor, y: Tensor) -> None:
        """Take a forward, unless it is a recompute."""
        if not in_backward():
            self.take(key, x, y)

    @torch.no_grad()
    def take(self, key: int, x: Tensor, y: Tensor) -> None:
        """Add one forward of one module."""
        x, y = _sample(x), _sample(y)
        into = torch.linalg.vector_norm(x, dtype=torch.float32) / math.sqrt(max(x.numel(), 1))
        out = y.abs().sqrt_().mean(dtype=torch.float32)
        before = self._sums.get(key)
        self._sums[key] = (into, out, 1) if before is None else _mean(before, into, out)

    @torch.no_grad()
    def read(self) -> Tensor:
        """Close the step; all modules at once, because a GPU counts launches and not numbers."""
        heard = self.collected()
        flat = [sums for unit in heard for sums in unit]
        if not flat:
            return torch.full((len(heard),), torch.nan)
        into, out = together([x for x, _, _ in flat]), together([y for _, y, _ in flat])
        logs = (2 * out.log() - into.log()).nan_to_num(nan=torch.inf, posinf=torch.inf, neginf=-torch.inf)
        logs = logs.masked_fill(~torch.isfinite(into), torch.nan)
        if all(len(unit) == 1 for unit in heard):
            return logs.exp()
        parts = iter(logs.split([len(unit) for unit in heard if unit]))
        return together([next(parts).mean().exp() if unit else torch.tensor(torch.nan) for unit in heard])


class GradOutput(Listener):
    """Column `grad_output`: the norm of the gradient that arrives at the outputs of a unit's modules.

    Together over its modules and the step's micro-batches: the root of the sum of squares.
    """

    column = "grad_output"

    def hear(self, key: int, x: Tensor, y: Tensor) -> None:
        """Listen to the gradient of an output; a recomputed output never gets one."""
        if y.requires_grad:
            alive = weakref.ref(self)
            y.register_hook(lambda grad: None if (found := alive()) is None else found.feel(key, grad))

    @torch.no_grad()
    def feel(self, key: int, grad: Tensor) -> None:
        """Add the gradient of one output of one module."""
        square = torch.linalg.vector_norm(grad.detach(), dtype=torch.float32).square_()
        self._sums[key] = self._sums[key] + square if key in self._sums else square

    @torch.no_grad()
    def read(self) -> Tensor:
        """Close the step, all units at once."""
        heard = self.collected()
        flat = [square for unit in heard for square in unit]
        if not flat:
            return torch.full((len(heard),), torch.nan)
        squares = together(flat)
        if not all(len(unit) == 1 for unit in heard):
            parts = iter(squares.split([len(unit) for unit in heard if unit]))
            squares = together([next(parts).sum() if unit else torch.tensor(torch.nan) for unit in heard])
            missing = torch.tensor([not unit for unit in heard], device=squares.device)
            return squares.sqrt().nan_to_num(nan=torch.inf, posinf=torch.inf).masked_fill(missing, torch.nan)
        return squares.sqrt().nan_to_num(nan=torch.inf, posinf=torch.inf)


def _listen_to(units: Sequence[Unit], sensor: Listener) -> list[Any]:
    """Let a sensor hear every forward of the units' modules, compiled or not; what must be removed afterwards."""
    modules = {id(m): m for unit in units for m in unit.modules}
    if not modules:
        raise TrimtabError("an output is that of a module, and these units name none: use units of find_units")
    handles: list[Any] = [m.register_forward_hook(_hook(sensor, key)) for key, m in modules.items()]
    return handles + [_Ear(sensor, key, m) for key, m in modules.items() if hasattr(m, "ears")]


class _Ear:
    """What a switchable linear tells a sensor under torch.compile."""

    def __init__(self, sensor: Listener, key: int, module: nn.Module) -> None:
        self._sensor, self._key, self._module = weakref.ref(sensor), key, weakref.ref(module)
        module.ears.append(self)  # type: ignore[union-attr, operator]

    def heard(self, x: Tensor, y: Tensor) -> None:
        """A forward; its output is none of autograd's, so that nobody listens to it twice."""
        if (sensor := self._sensor()) is not None:
            sensor.hear(self._key, x, y.detach())

    def felt(self, grad: Tensor) -> None:
        """The gradient of the output."""
        if (sensor := self._sensor()) is not None:
            sensor.feel(self._key, grad)

    def remove(self) -> None:
        """Stop listening."""
        module = self._module()
        if module is not None and self in getattr(module, "ears", ()):
            module.ears.remove(self)  # type: ignore[union-attr, operator]


def _sample(x: Tensor) -> Tensor:
    """At most `ROWS` of a tensor's tokens, evenly spread."""
    x = x.detach()
    if x.dim() < 2:
        return x
    rows = x.flatten(0, -2)
    return rows[:: max(-(-rows.shape[0] // ROWS), 1)]


def _mean(before: tuple[Tensor, Tensor, int], into: Tensor, out: Tensor) -> tuple[Tensor, Tensor, int]:
    """The sizes of one forward more: the RMS over all inputs, the mean of roots over all outputs."""
    times = before[2] + 1
    square = before[0].square().mul_(times - 1).add_(into.square())
    return square.div_(times).sqrt_(), before[1] + (out - before[1]) / times, times


def _listen(sensor: GradientSNR, key: int) -> Callable[[Tensor], None]:
    alive = weakref.ref(sensor)

    def hook(grad: Tensor) -> None:
        if (found := alive()) is not None:
            found.take(key, grad)

    return hook


def _hook(sensor: Listener, key: int) -> Callable[[nn.Module, Any, Any], None]:
    alive = weakref.ref(sensor)

    def hear(x: Tensor, y: Tensor) -> None:
        if (found := alive()) is not None:
            found.hear(key, x, y)

    apart = torch._disable_dynamo(hear)  # pyright: ignore[reportPrivateImportUsage]

    def hook(module: nn.Module, args: Any, y: Any) -> None:
        compiling = torch.compiler.is_compiling()
        if compiling and hasattr(module, "ears"):
            return
        if module.training and isinstance(y, Tensor) and args:
            (apart if compiling else hear)(args[0], y)

    return hook


def _remove(handles: list[Any]) -> None:
    for handle in handles:
        handle.remove()
    handles.clear()


def _removed_with(sensor: object, handles: list[Any]) -> None:
    weakref.finalize(sensor, _remove, handles)
