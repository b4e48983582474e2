# SPDX-License-Identifier: Apache-2.0
"""A switch that torch.compile cannot see: one opaque operator per linear, which looks its path up when it runs.

A flag that a compiled region reads becomes a guard, and every new pattern of flags a recompilation; a block of seven
linears has 128 patterns. So under `torch.compile` a `SwitchLinear` is the operator `trimtab::linear`. It gets the
module's number as a *tensor* (an int would be guarded, and equal blocks would stop sharing one graph), finds the
module, and does what that does without compilation: read the switch, or in a recompute repeat what it read before.

    trimtab::linear(x, weight, bias, number)            -> y, token
    trimtab::linear_backward(grad, x, weight, number, token, needs)  -> gradients of x, weight, bias

Autograd saves x and weight as they are, which the graph mostly holds anyway; backward quantizes what it needs again.
The token is the serial number of the `Call`: it ties a backward to the path, the scales and the random numbers of its
forward, whatever has happened since. A module remembers its last `PENDING` calls.
"""

import itertools
import weakref
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from trimtab.errors import TrimtabError
from trimtab.linear import gemms

if TYPE_CHECKING:
    from trimtab.linear.linear import SwitchLinear
    from trimtab.linear.state import Call

PENDING = 256
"""Forwards of one linear that may wait for their backward: micro-batches of a pipeline, say."""

_modules: "weakref.WeakValueDictionary[int, SwitchLinear]" = weakref.WeakValueDictionary()
_numbers, _serials = itertools.count(), itertools.count()


def enroll(module: "SwitchLinear") -> Tensor:
    """Give a module the number by which the operator finds it."""
    number = next(_numbers)
    _modules[number] = module
    return torch.tensor(number)


class Calls:
    """The calls of one module that a backward may still ask for, by serial number."""

    def __init__(self) -> None:
        self._calls: dict[int, Call] = {}

    def put(self, call: "Call") -> int:
        """Remember a call; the oldest is forgotten."""
        serial = next(_serials)
        self._calls[serial] = call
        if len(self._calls) > PENDING:
            del self._calls[next(iter(self._calls))]
        return serial

    def get(self, serial: int, name: str) -> "Call":
        """The call of a forward."""
        if serial not in self._calls:
            raise TrimtabError(
                f"at most {PENDING} forwards of a linear may wait for their backward, and {name!r} had more: run the "
                "backward of some first, or compile without this linear"
            )
        return self._calls[serial]


@torch.library.custom_op("trimtab::linear", mutates_args=())
def linear(x: Tensor, weight: Tensor, bias: Tensor | None, number: Tensor) -> tuple[Tensor, Tensor]:
    """The module's forward on operands that are cast already, and the token of its call."""
    module = _modules[int(number)]
    call = module.begin()
    call.observe("input", x)
    call.observe("weight", weight)
    y, _ = gemms.forward(call, x, weight, bias, False, False)
    return y.contiguous(), torch.tensor(module.calls.put(call))


@linear.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor | None, number: Tensor) -> tuple[Tensor, Tensor]:
    return x.new_empty((*x.shape[:-1], weight.shape[0])), torch.empty((), dtype=torch.int64)


@torch.library.custom_op("trimtab::linear_backward", mutates_args=())
def linear_backward(
    grad: Tensor, x: Tensor, weight: Tensor, number: Tensor, token: Tensor, needs: list[bool]
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients that are needed; an empty tensor stands for one that is not."""
    module = _modules[int(number)]
    call = module.calls.get(int(token), module.fqn)
    kept = gemms.keep(call, x, weight, needs[0], needs[1])
    found = gemms.backward(call, grad, kept, x.shape, needs)
    return tuple(grad.new_empty(0) if g is None else g.contiguous() for g in found)  # type: ignore[return-value]


@linear_backward.register_fake
def _(
    grad: Tensor, x: Tensor, weight: Tensor, number: Tensor, token: Tensor, needs: list[bool]
) -> tuple[Tensor, Tensor, Tensor]:
    shapes = (x.shape, weight.shape, weight.shape[:1])
    return tuple(grad.new_empty(s if need else (0,)) for s, need in zip(shapes, needs, strict=True))  # type: ignore[return-value]


def _setup(ctx: torch.autograd.function.FunctionCtx, inputs: tuple, output: tuple) -> None:
    x, weight, _bias, number = inputs
    _, token = output
    ctx.mark_non_differentiable(token)
    ctx.save_for_backward(x, weight, number, token)
    ctx.needs = list(ctx.needs_input_grad[:3])  # type: ignore[attr-defined]


def _backward(ctx: torch.autograd.function.FunctionCtx, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    x, weight, number, token = ctx.saved_tensors  # type: ignore[attr-defined]
    needs = ctx.needs  # type: ignore[attr-defined]
    found = linear_backward(grad, x, weight, number, token, needs)
    return *(g if need else None for g, need in zip(found, needs, strict=True)), None


linear.register_autograd(_backward, setup_context=_setup)
