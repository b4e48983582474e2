# SPDX-License-Identifier: Apache-2.0
"""A switch that torch.compile cannot see: one opaque operator per linear, which looks its path up when it runs.

A flag that a compiled region reads becomes a guard, and every new pattern of flags a recompilation; a block of seven
linears has 128 patterns. So under `torch.compile` a `SwitchLinear` is the operator `trimtab::linear`. It gets the
module's number as a *tensor* (an int would be guarded, and equal blocks would stop sharing one graph), finds the
module, and does what that does without compilation: read the switch, or in a recompute repeat what it read before.

    trimtab::linear(x, weight, bias, number, mark)           -> y, token
    trimtab::linear_backward(grad, x, weight, token, needs)  -> gradients of x, weight, bias

A path that keeps x in few bits has a pair of its own, `trimtab::linear_saving`: there x is not saved, and the codes
stay with the call. Otherwise autograd saves x and weight as they are, which the graph mostly holds anyway, and backward
quantizes what it needs again.

The token is the serial number of the `Call`: it ties a backward to the path, the scales and the random numbers of its
forward, whatever has happened since, even to the module. Autograd keeps the token as long as the graph, and the call
goes with it. So saved-tensor hooks must hand back the token itself: one that copies integers too loses the call, and
backward says so.

Real kernels cast an input once for the linears that share it (`real.py`). Compiled code writes new values into old
tensors, unseen by their versions, so here `trimtab::mark` numbers the input as a value: linears on the same value have
the same mark, because the compiler merges equal operations, and where it does not, the cast is made again.

Module hooks cannot listen to a compiled module without breaking its graph; who wants to hear puts an `Ear` on it.

All this happens on the host, so none of it can be recorded in a CUDA graph; the operators are tagged accordingly.
"""

import functools
import itertools
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from trimtab.errors import TrimtabError
from trimtab.linear import gemms
from trimtab.modules import in_backward

if TYPE_CHECKING:
    from trimtab.linear.linear import SwitchLinear
    from trimtab.linear.state import Call

Kept = tuple[Tensor | None, ...]

_modules: "weakref.WeakValueDictionary[int, SwitchLinear]" = weakref.WeakValueDictionary()
_numbers, _serials, _marks = itertools.count(), itertools.count(), itertools.count()

_unsafe = getattr(torch.Tag, "cudagraph_unsafe", None)  # older ones record no graph that has a CPU tensor in it
_tags: dict[str, Any] = {} if _unsafe is None else {"tags": (_unsafe,)}
_operator: Any = functools.partial(torch.library.custom_op, mutates_args=(), **_tags)


def _scalar(number: int) -> Tensor:
    return torch.tensor(number, device="cpu")  # whatever the default device is


def enroll(module: "SwitchLinear") -> Tensor:
    """Give a module the number by which the operator finds it."""
    number = next(_numbers)
    _modules[number] = module
    return _scalar(number)


class Calls:
    """The calls that a backward may still ask for: each lives as long as its token, and its graph."""

    def __init__(self) -> None:
        self._calls: dict[int, tuple[Call, Kept]] = {}

    def of(self, name: str) -> list[tuple["Call", Kept]]:
        """Those of the modules with this path."""
        return [(call, kept) for call, kept in self._calls.values() if call.name == name]

    def put(self, call: "Call", kept: Kept = ()) -> Tensor:
        """Remember a call and what it kept outside the graph; its token."""
        serial = next(_serials)
        self._calls[serial] = call, kept
        token = _scalar(serial)
        weakref.finalize(token, self._calls.pop, serial, None)
        return token

    def get(self, token: Tensor) -> tuple["Call", Kept]:
        """The call of a forward, and what it kept."""
        found = self._calls.get(int(token))
        if found is None:
            raise TrimtabError(
                f"a compiled linear must get back in backward the token that its forward saved, got a copy of token "
                f"{int(token)}: let saved-tensor hooks copy or offload floating-point tensors only"
            )
        return found


calls = Calls()


@_operator("trimtab::mark")
def mark(x: Tensor) -> Tensor:
    """A number for the value that x is at this point of the graph."""
    return _scalar(next(_marks))


@mark.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty((), dtype=torch.int64, device="cpu")


def _begin(number: Tensor, mark: Tensor | None) -> "Call":
    return _modules[int(number)].begin(None if mark is None else int(mark))


def _tell(call: "Call", x: Tensor, y: Tensor) -> None:
    """Let those listen who cannot hook a compiled module."""
    if call.ears and not in_backward():
        for ear in call.ears:
            ear.heard(x, y)


def _filled(found: gemms.Gradients, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients as an operator returns them: an empty tensor stands for one that is not needed."""
    x, weight, bias = (grad.new_empty(0) if g is None else g.contiguous() for g in found)
    return x, weight, bias


def _blank(shapes: Sequence[Sequence[int]], needs: list[bool], grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The same without values."""
    x, weight, bias = (grad.new_empty(tuple(s) if need else (0,)) for s, need in zip(shapes, needs, strict=True))
    return x, weight, bias


@_operator("trimtab::linear")
def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, number: Tensor, mark: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The module's forward on operands that are cast already, and the token of its call."""
    call = _begin(number, mark)
    call.observe("input", x)
    call.observe("weight", weight)
    y, _ = gemms.forward(call, x, weight, bias, False, False)
    _tell(call, x, y)
    return y.contiguous(), calls.put(call)


@linear.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor | None, number: Tensor, mark: Tensor | None) -> tuple[Tensor, Tensor]:
    return x.new_empty((*x.shape[:-1], weight.shape[0])), torch.empty((), dtype=torch.int64, device="cpu")


@_operator("trimtab::linear_backward")
def linear_backward(
    grad: Tensor, x: Tensor, weight: Tensor, token: Tensor, needs: list[bool]
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients that are needed; an empty tensor stands for one that is not."""
    call, _ = calls.get(token)
    for ear in call.ears:
        ear.felt(grad)
    kept = gemms.keep(call, x, weight, needs[0], needs[1])
    found = gemms.backward(call, grad, kept, x.shape, needs)
    return _filled(found, grad)


@linear_backward.register_fake
def _(grad: Tensor, x: Tensor, weight: Tensor, token: Tensor, needs: list[bool]) -> tuple[Tensor, Tensor, Tensor]:
    shapes = (x.shape, weight.shape, weight.shape[:1])
    return _blank(shapes, needs, grad)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
    x, weight, *_ = inputs
    _, token = output
    ctx.mark_non_differentiable(token)
    ctx.save_for_backward(x, weight, token)
    ctx.needs = list(ctx.needs_input_grad[:3])


def _backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    found = linear_backward(grad, *ctx.saved_tensors, ctx.needs)
    return *(g if need else None for g, need in zip(found, ctx.needs, strict=True)), None, None


linear.register_autograd(_backward, setup_context=_setup)


@_operator("trimtab::linear_saving")
def linear_saving(
    x: Tensor, weight: Tensor, bias: Tensor | None, number: Tensor, mark: Tensor | None, keeps: bool
) -> tuple[Tensor, Tensor]:
    """The same for a path that keeps x in few bits: they stay with the call, and autograd does not keep x.

    Args:
        keeps: whether the weight will want a gradient.
    """
    call = _begin(number, mark)
    call.observe("input", x)
    call.observe("weight", weight)
    # Our own weight comes again with the backward; the reference of a watched call keeps its own.
    y, (codes, _weight, *more) = gemms.forward(call, x, weight, bias, call.shadow is not None, keeps)
    _tell(call, x, y)
    return y.contiguous(), calls.put(call, (codes, None, *more))


@linear_saving.register_fake
def _(
    x: Tensor, weight: Tensor, bias: Tensor | None, number: Tensor, mark: Tensor | None, keeps: bool
) -> tuple[Tensor, Tensor]:
    return x.new_empty((*x.shape[:-1], weight.shape[0])), torch.empty((), dtype=torch.int64, device="cpu")


@_operator("trimtab::linear_saving_backward")
def linear_saving_backward(
    grad: Tensor, weight: Tensor, token: Tensor, needs: list[bool]
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients that are needed; an empty tensor stands for one that is not."""
    call, (codes, _, *more) = calls.get(token)
    for ear in call.ears:
        ear.felt(grad)
    shape = torch.Size((*grad.shape[:-1], weight.shape[1]))
    found = gemms.backward(call, grad, (codes, weight, *more), shape, needs)
    return _filled(found, grad)


@linear_saving_backward.register_fake
def _(grad: Tensor, weight: Tensor, token: Tensor, needs: list[bool]) -> tuple[Tensor, Tensor, Tensor]:
    shapes = ((*grad.shape[:-1], weight.shape[1]), weight.shape, weight.shape[:1])
    return _blank(shapes, needs, grad)


def _setup_saving(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
    _, token = output
    ctx.mark_non_differentiable(token)
    ctx.save_for_backward(inputs[1], token)
    ctx.needs = list(ctx.needs_input_grad[:3])


def _backward_saving(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    found = linear_saving_backward(grad, *ctx.saved_tensors, ctx.needs)
    return *(g if need else None for g, need in zip(found, ctx.needs, strict=True)), None, None, None


linear_saving.register_autograd(_backward_saving, setup_context=_setup_saving)
