# SPDX-License-Identifier: Apache-2.0
"""Passes on chosen paths that leave no trace: forward, backward, and everything put back.

A probe asks what the gradient of a batch would be with these units low and those high. To compare two such gradients,
both passes must differ in nothing else, so each starts from the same state:

    path memories       amax histories, and draw counters: the same stochastic rounding in every pass
    random numbers      torch's generators: the same dropout
    buffers, modes      of every module
    captured scales     of an armed fault

and after the last one the state is what it was, bit for bit, together with the switches, the recipes and what a pending
backward may still need. Gradients are taken with `torch.autograd.grad`, so `.grad` and the weights are never touched.
Not restored: what somebody's own module hooks count, and Python's and numpy's generators.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from trimtab.control.act import running
from trimtab.control.units import Switch, Unit, find_units
from trimtab.errors import TrimtabError
from trimtab.lab.faults import Armed
from trimtab.linear.linear import SwitchLinear, switch_linears
from trimtab.linear.paths import Path, Recipe
from trimtab.linear.state import Fault

LossFn = Callable[[nn.Module, Any], Tensor]


class Reference(NamedTuple):
    """The gradient of a batch with every unit high."""

    grads: list[Tensor | None]
    norm: float
    loss: float


class Seen(NamedTuple):
    """How a pass compares to its reference: one entry of each column of `Probe`."""

    error: float
    relative: float
    cosine: float
    own: float
    loss: float


@contextmanager
def probing(model: nn.Module, loss_fn: LossFn, advance: Callable[[], None]) -> Iterator["Prober"]:
    """Lend a prober, and put everything back after it; `advance` is called after each pass."""
    state = _State(model)
    with running(model, "plan"):  # it remembers what the switches are forced to, and gives it back
        try:
            yield Prober(model, loss_fn, state, advance)
        finally:
            state.restore()


class Prober:
    """Runs passes, each from the same state; made by `probing`."""

    def __init__(self, model: nn.Module, loss_fn: LossFn, state: "_State", advance: Callable[[], None]) -> None:
        self._model, self._loss_fn, self._state, self._advance = model, loss_fn, state, advance
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        self._switches = [unit.switch for unit in find_units(model) if unit.switch is not None]
        if not self._parameters:
            raise TrimtabError("probes compare gradients, and this model has no trainable parameter: unfreeze some")

    def reference(self, batch: Any, name: str = "the batch") -> Reference:
        """Everything high; refused where there is nothing to compare with."""
        loss, grads = self._gradient(batch, ())
        norm = math.sqrt(sum(g.double().square().sum().item() for g in grads if g is not None))
        if not (math.isfinite(loss) and math.isfinite(norm) and norm > 0):
            raise TrimtabError(
                f"with every unit high the loss must be finite and the gradient finite and not zero, got loss "
                f"{loss:.4g} and gradient norm {norm:.4g} on {name}: check the weights and the data"
            )
        return Reference(grads, norm, loss)

    def low(self, batch: Any, reference: Reference, *units: Unit, own: Unit | None = None) -> Seen:
        """Exactly these units low; `own` looks at the gradient of one unit apart."""
        return self._measure(batch, reference, [unit.switch for unit in units], own)

    def high(self, batch: Any, reference: Reference, *units: Unit, own: Unit | None = None) -> Seen:
        """Exactly these units high."""
        high = [unit.switch for unit in units]
        return self._measure(batch, reference, [switch for switch in self._switches if switch not in high], own)

    def _gradient(self, batch: Any, low: Sequence[Switch | None]) -> tuple[float, list[Tensor | None]]:
        self._state.rewind()
        for switch in self._switches:
            switch.forced = switch not in low
        with torch.enable_grad():
            loss = self._loss_fn(self._model, batch)
            if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
                what = f"shape {tuple(loss.shape)}, no gradient" if isinstance(loss, Tensor) else type(loss).__name__
                raise TrimtabError(f"loss_fn must return one number with a gradient, got {what}: give another loss_fn")
            grads = torch.autograd.grad(loss, self._parameters, allow_unused=True)
        self._advance()
        return loss.item(), list(grads)

    def _measure(self, batch: Any, reference: Reference, low: Sequence[Switch | None], own: Unit | None) -> Seen:
        loss, grads = self._gradient(batch, low)
        mine = {id(parameter) for parameter in own.parameters} if own is not None else set()
        sums, own_sums = torch.zeros(4, dtype=torch.float64), torch.zeros(4, dtype=torch.float64)
        for parameter, g, r in zip(self._parameters, grads, reference.grads, strict=True):
            if g is None and r is None:
                continue  # an expert that got no token
            a, b = (torch.zeros((), dtype=torch.float64) if t is None else t.double() for t in (g, r))
            part = torch.stack(((a - b).square().sum(), a.square().sum(), (a * b).sum(), b.square().sum())).cpu()
            sums += part
            own_sums += part if id(parameter) in mine else 0.0
        error, square, dot, _ = sums.tolist()
        if not math.isfinite(error):
            loss = loss if math.isfinite(loss) else math.inf
            return Seen(math.inf, math.inf, math.nan, _relative(own_sums) if mine else math.nan, loss)
        scale = math.sqrt(square) * reference.norm
        cosine = dot / scale if scale else math.nan
        return Seen(error, math.sqrt(error) / reference.norm, cosine, _relative(own_sums) if mine else math.nan, loss)


def _relative(sums: Tensor) -> float:
    """The length of an error over that of what it is the error of."""
    error, _, _, square = sums.tolist()
    if not math.isfinite(error):
        return math.inf
    return math.sqrt(error / square) if square else math.inf if error else 0.0


class _State:
    """Everything that a pass may change, as it was."""

    def __init__(self, model: nn.Module) -> None:
        self._linears = [(linear, linear.memory.state_dict(), linear._last) for linear in switch_linears(model)]
        faults = [linear.fault for linear, _, _ in self._linears if isinstance(linear.fault, Armed)]
        self._captured = [(fault.captured, dict(fault.captured)) for fault in faults]
        self._modes = [(module, module.training) for module in model.modules()]
        self._buffers = [
            (module, name, buffer, buffer.detach().clone())
            for module in model.modules()
            for name, buffer in module._buffers.items()
            if buffer is not None
        ]
        self._rng = torch.get_rng_state()
        self._cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []

    @torch.no_grad()
    def rewind(self) -> None:
        """Put back what the next pass starts from."""
        for linear, memory, _ in self._linears:
            linear.memory.load_state_dict(memory)
        for captured, kept in self._captured:
            captured.clear()
            captured.update(kept)
        for module, training in self._modes:
            module.training = training
        for module, name, buffer, kept in self._buffers:
            module._buffers[name] = buffer
            if not torch.equal(buffer, kept):
                buffer.copy_(kept)
        torch.set_rng_state(self._rng)
        if self._cuda:
            torch.cuda.set_rng_state_all(self._cuda)

    def restore(self) -> None:
        """Put back all of it, the call that a recompute would repeat included."""
        self.rewind()
        for linear, _, last in self._linears:
            linear._last = last


@contextmanager
def only_role(unit: Unit, role: str) -> Iterator[None]:
    """Let the low path of a unit be its high path in all roles but one."""
    before = [(m, m.recipe, m.fault) for m in unit.modules if isinstance(m, SwitchLinear)]
    for linear, recipe, fault in before:
        linear.recipe = replace(recipe, low=mixed(recipe, role))
        linear.fault = None if fault is None else _Part(fault, role)
    try:
        yield
    finally:
        for linear, recipe, fault in before:
            linear.recipe, linear.fault = recipe, fault


def mixed(recipe: Recipe, role: str) -> Path:
    """The high path with one role of the low one; where high is plain this is `recipe.low.only(role)`."""
    changes: dict[str, Any] = {role: getattr(recipe.low, role)}
    return replace(recipe.high, name=f"{recipe.low.name}[{role}]", chained=recipe.low.chained, **changes)


class _Part:
    """A fault as far as it lies in one role: a damaged output in `output`, a damaged dY in both backward roles."""

    def __init__(self, fault: Fault, role: str) -> None:
        self._fault, self._role = fault, role

    def output(self, y: Tensor) -> Tensor:
        return self._fault.output(y) if self._role == "output" else y

    def grad_output(self, g: Tensor) -> Tensor:
        return g if self._role == "output" else self._fault.grad_output(g)

    def grad_weight(self, g: Tensor) -> Tensor:
        return self._fault.grad_weight(g) if self._role == "grad_weight" else g

    def amax(self, operand: str, amax: Tensor) -> Tensor:
        return self._fault.amax(operand, amax)
