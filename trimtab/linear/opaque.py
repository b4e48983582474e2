# SPDX-License-Identifier: Apache-2.0
"""A switch that torch.compile cannot see: one opaque operator per linear, which looks its path up when it runs.

A flag that a compiled region reads becomes a guard, and every new pattern of flags a recompilation; a block of seven
linears has 128 patterns. So under `torch.compile` a `SwitchLinear` is the operator `trimtab::linear`. It gets the
module's number as a *tensor* (an int would be guarded, and equal blocks would stop sharing one graph), finds the
module, and does what that does without compilation: read the switch, or in a recompute repeat what it read before.

    trimtab::linear(x, weight, bias, number)            -> y, token
    trimtab::linear_backward(grad, x, weight, number, token, needs)  -> gradients of x, weight, bias

A path that keeps x in few bits has a pair of its own, `trimtab::linear_saving`: there x is not saved, and the codes
stay with the call. Otherwise autograd saves x and weight as they are, which the graph mostly holds anyway, and backward
quantizes what it needs again.

The token is the serial number of the `Call`: it ties a backward to the path, the scales and the random numbers of its
forward, whatever has happened since. Autograd keeps the token as long as the graph, and the call goes with it.
"""

import itertools
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from trimtab.linear import gemms

if TYPE_CHECKING:
    from trimtab.linear.linear import SwitchLinear
    from trimtab.linear.state import Call

Kept = tuple[Tensor | None, ...]

_modules: "weakref.WeakValueDictionary[int, SwitchLinear]" = weakref.WeakValueDictionary()
_numbers, _serials = itertools.count(), itertools.count()


def enroll(module: "SwitchLinear") -> Tensor:
    """Give a module the number by which the operator finds it."""
    number = next(_numbers)
    _modules[number] = module
    return torch.tensor(number)


class Calls:
    """The calls of one module that a backward may still ask for: each lives as long as its token, and its graph."""

    def __init__(self) -> None:
        self._calls: dict[int, tuple[Call, Kept]] = {}

    def __len__(self) -> int:
        return len(self._calls)

    def put(self, call: "Call", kept: Kept = ()) -> Tensor:
        """Remember a call and what it kept outside the graph; its token."""
        serial = next(_serials)
        self._calls[serial] = call, kept
        token = torch.tensor(serial)
        weakref.finalize(token, self._calls.pop, serial, None)
        return token

    def get(self, token: Tensor) -> tuple["Call", Kept]:
        """The call of a forward, and what it kept."""
        return self._calls[int(token)]


@torch.library.custom_op("trimtab::linear", mutates_args=())
def linear(x: Tensor, weight: Tensor, bias: Tensor | None, number: Tensor) -> tuple[Tensor, Tensor]:
    """The module's forward on operands that are cast already, and the token of its call."""
    module = _modules[int(number)]
    call = module.begin()
    call.observe("input", x)
    call.observe("weight", weight)
    y, _ = gemms.forward(call, x, weight, bias, False, False)
    return y.contiguous(), module.calls.put(call)


@linear.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor | None, number: Tensor) -> tuple[Tensor, Tensor]:
    return x.new_empty((*x.shape[:-1], weight.shape[0])), torch.empty((), dtype=torch.int64)


@torch.library.custom_op("trimtab::linear_backward", mutates_args=())
def linear_backward(
    grad: Tensor, x: Tensor, weight: Tensor, number: Tensor, token: Tensor, needs: list[bool]
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients that are needed; an empty tensor stands for one that is not."""
    module = _modules[int(number)]
    call, _ = module.calls.get(token)
    kept = gemms.keep(call, x, weight, needs[0], needs[1])
    found = gemms.backward(call, grad, kept, x.shape, needs)
    return tuple(grad.new_empty(0) if g is None else g.contiguous() for g in found)  # type: ignore[return-value]


@linear_backward.register_fake
def _(
    grad: Tensor, x: Tensor, weight: Tensor, number: Tensor, token: Tensor, needs: list[bool]
) -> tuple[Tensor, Tensor, Tensor]:
    shapes = (x.shape, weight.shape, weight.shape[:1])
    return tuple(grad.new_empty(s if need else (0,)) for s, need in zip(shapes, needs, strict=True))  # type: ignore[return-value]


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
    x, weight, _bias, number = inputs
    _, token = output
    ctx.mark_non_differentiable(token)
    ctx.save_for_backward(x, weight, number, token)
    ctx.needs = list(ctx.needs_input_grad[:3])


def _backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    found = linear_backward(grad, *ctx.saved_tensors, ctx.needs)
    return *(g if need else None for g, need in zip(found, ctx.needs, strict=True)), None


linear.register_autograd(_backward, setup_context=_setup)


@torch.library.custom_op("trimtab::linear_saving", mutates_args=())
def linear_saving(x: Tensor, weight: Tensor, bias: Tensor | None, number: Tensor) -> tuple[Tensor, Tensor]:
    """The same for a path that keeps x in few bits: they stay with the call, and autograd does not keep x."""
    module = _modules[int(number)]
    call = module.begin()
    y, (codes, _weight, *more) = gemms.forward(call, x, weight, bias, False, True)
    return y.contiguous(), module.calls.put(call, (codes, None, *more))  # the weight comes again with the backward


@linear_saving.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor | None, number: Tensor) -> tuple[Tensor, Tensor]:
    return x.new_empty((*x.shape[:-1], weight.shape[0])), torch.empty((), dtype=torch.int64)


@torch.library.custom_op("trimtab::linear_saving_backward", mutates_args=())
def linear_saving_backward(
    grad: Tensor, weight: Tensor, number: Tensor, token: Tensor, needs: list[bool]
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients that are needed; an empty tensor stands for one that is not."""
    call, (codes, _, *more) = _modules[int(number)].calls.get(token)
    shape = torch.Size((*grad.shape[:-1], weight.shape[1]))
    found = gemms.backward(call, grad, (codes, weight, *more), shape, needs)
    return tuple(grad.new_empty(0) if g is None else g.contiguous() for g in found)  # type: ignore[return-value]


@linear_saving_backward.register_fake
def _(grad: Tensor, weight: Tensor, number: Tensor, token: Tensor, needs: list[bool]) -> tuple[Tensor, Tensor, Tensor]:
    shapes = ((*grad.shape[:-1], weight.shape[1]), weight.shape, weight.shape[:1])
    return tuple(grad.new_empty(s if need else (0,)) for s, need in zip(shapes, needs, strict=True))  # type: ignore[return-value]


def _setup_saving(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
    _x, weight, _bias, number = inputs
    _, token = output
    ctx.mark_non_differentiable(token)
    ctx.save_for_backward(weight, number, token)
    ctx.needs = list(ctx.needs_input_grad[:3])


def _backward_saving(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    found = linear_saving_backward(grad, *ctx.saved_tensors, ctx.needs)
    return *(g if need else None for g, need in zip(found, ctx.needs, strict=True)), None


linear_saving.register_autograd(_backward_saving, setup_context=_setup_saving)
