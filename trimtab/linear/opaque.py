# SPDX-License-Identifier: Apache-2.0
"""A switch that torch.compile cannot see: one opaque operator per linear, which looks its path up when it runs.

A flag that a compiled region reads becomes a guard, and every new pattern of flags a recompilation; a block of seven
linears has 128 patterns. So under `torch.compile` a `SwitchLinear` is the operator `trimtab::linear`. It gets the
module's number as a *tensor* (an int would be guarded, and equal blocks would stop sharing one graph), finds the
module, and does what that does without compilation: read the switch, or in a recompute repeat what it read before.

    trimtab::linear(x, weight, bias, number, mark, amax, measure)  -> y       what the module writes into the graph
    trimtab::linear_forward(x, weight, bias, number, mark, amax)   -> y, token
    trimtab::linear_backward(grad, x, weight, token, amax, needs)  -> gradients of x, weight, bias

The first is an autograd function of the other two, and dissolves into them when its gradient is traced, so that what
runs has no autograd layer. The host must stay ahead of the GPU with a hundred such calls a step: hence the plain
`torch.library.Library`, whose operators cost a tenth of what `custom_op` puts around each call.

A path that keeps x in few bits has operators of its own, `trimtab::linear_saving`: there x is not saved, and the codes
stay with the call. Otherwise autograd saves x and weight as they are, which the graph mostly holds anyway, and backward
quantizes what it needs again.

The token is the serial number of the `Call`: it ties a backward to the path, the scales and the random numbers of its
forward, whatever has happened since, even to the module. Autograd keeps the token as long as the graph, and the call
goes with it. So saved-tensor hooks must hand back the token itself: one that copies integers too loses the call, and
backward says so.

Real kernels cast an input once for the linears that share it (`real.py`). Compiled code writes new values into old
tensors, unseen by their versions, so here `trimtab::mark` numbers the input as a value: linears on the same value have
the same mark, because the compiler merges equal operations, and where it does not, the cast is made again.

The amax of an input and of a gradient stays outside of the operators, where the compiler joins it to whatever makes the
tensor: a pass over memory less for each. On the high path nobody needs it.

Module hooks cannot listen to a compiled module without breaking its graph; who wants to hear puts an `Ear` on it.

All this happens on the host, so none of it can be recorded in a CUDA graph; the operators are tagged accordingly.
"""

import itertools
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from trimtab.errors import TrimtabError
from trimtab.linear import gemms
from trimtab.linear.state import whole
from trimtab.modules import in_backward

if TYPE_CHECKING:
    from trimtab.linear.linear import SwitchLinear
    from trimtab.linear.state import Call

Kept = tuple[Tensor | None, ...]

_modules: "weakref.WeakValueDictionary[int, SwitchLinear]" = weakref.WeakValueDictionary()
_numbers, _serials, _marks = itertools.count(), itertools.count(), itertools.count()

_library = torch.library.Library("trimtab", "FRAGMENT")
_unsafe = getattr(torch.Tag, "cudagraph_unsafe", None)  # older ones record no graph that has a CPU tensor in it


def _operator(schema: str, kernel: Callable[..., Any], fake: Callable[..., Any]) -> Any:
    """An operator that autograd does not look at."""
    name = schema.split("(")[0]
    _library.define(schema, tags=() if _unsafe is None else (_unsafe,))
    _library.impl(name, kernel, "CompositeExplicitAutograd")
    _library.impl(name, torch.library.fallthrough_kernel, "Autograd")
    torch.library.register_fake(f"trimtab::{name}", fake, lib=_library)
    return getattr(torch.ops.trimtab, name).default


def _differentiable(schema: str, function: type[torch.autograd.Function]) -> Any:
    """An operator that is an autograd function, for a graph to hold until its gradient is traced."""
    name = schema.split("(")[0]
    _library.define(schema)
    _library.impl(name, function.apply, "CompositeImplicitAutograd")
    return getattr(torch.ops.trimtab, name).default


def _scalar(number: int) -> Tensor:
    return torch.scalar_tensor(number, dtype=torch.int64, device="cpu")  # whatever the default device is


def _blank_scalar() -> Tensor:
    return torch.empty((), dtype=torch.int64, device="cpu")


def enroll(module: "SwitchLinear") -> Tensor:
    """Give a module the number by which the operator finds it."""
    number = next(_numbers)
    _modules[number] = module
    return _scalar(number)


class _Token(weakref.ref[Tensor]):
    """Knows its serial number when the tensor is gone; a closure would be four objects more in every forward."""

    __slots__ = ("serial",)
    serial: int


class Calls:
    """The calls that a backward may still ask for: each lives as long as its token, and its graph."""

    def __init__(self) -> None:
        self._calls: dict[int, tuple[Call, Kept, _Token]] = {}
        self._forget = lambda token: self._calls.pop(token.serial, None)

    def of(self, name: str) -> list[tuple["Call", Kept]]:
        """Those of the modules with this path."""
        return [(call, kept) for call, kept, _ in self._calls.values() if call.name == name]

    def put(self, call: "Call", kept: Kept = ()) -> Tensor:
        """Remember a call and what it kept outside the graph; its token."""
        serial = next(_serials)
        tensor = _scalar(serial)
        token = _Token(tensor, self._forget)
        token.serial = serial
        self._calls[serial] = call, kept, token
        return tensor

    def get(self, token: Tensor) -> tuple["Call", Kept]:
        """The call of a forward, and what it kept."""
        found = self._calls.get(int(token))
        if found is None:
            raise TrimtabError(
                f"a compiled linear must get back in backward the token that its forward saved, got a copy of token "
                f"{int(token)}: let saved-tensor hooks copy or offload floating-point tensors only"
            )
        return found[:2]


calls = Calls()

mark = _operator("mark(Tensor x) -> Tensor", lambda x: _scalar(next(_marks)), lambda x: _blank_scalar())
"""A number for the value that x is at this point of the graph."""


def _begin(number: Tensor, mark: Tensor | None) -> "Call":
    return _modules[int(number)].begin(None if mark is None else int(mark))


def _tell(call: "Call", x: Tensor, y: Tensor) -> None:
    """Let those listen who cannot hook a compiled module."""
    if call.ears and not in_backward():
        for ear in call.ears:
            ear.heard(x, y)


def amax_of(x: Tensor) -> Tensor:
    """The largest magnitude, row by row first: so the compiler measures in the same pass that makes x."""
    return x.abs().amax(-1).amax()


def _filled(found: gemms.Gradients, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients as an operator returns them: an empty tensor stands for one that is not needed."""
    x, weight, bias = (grad.new_empty(0) if g is None else g.contiguous() for g in found)
    return x, weight, bias


def _blank(shapes: Sequence[Sequence[int]], needs: Sequence[bool], grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The same without values."""
    x, weight, bias = (grad.new_empty(tuple(s) if need else (0,)) for s, need in zip(shapes, needs, strict=True))
    return x, weight, bias


def _asked(found: Sequence[Tensor], needs: Sequence[bool]) -> tuple[Tensor | None, ...]:
    """The same as autograd wants them."""
    return tuple(g if need else None for g, need in zip(found, needs, strict=True))


def _forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, number: Tensor, mark: Tensor | None, amax: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The module's forward on operands that are cast already, and the token of its call."""
    call = _begin(number, mark)
    if amax is not None:
        call.measured[whole("input")] = amax
    call.observe("input", x)
    call.observe("weight", weight)
    y, _ = gemms.forward(call, x, weight, bias, False, False)
    _tell(call, x, y)
    return y.contiguous(), calls.put(call)


def _backward(
    grad: Tensor, x: Tensor, weight: Tensor, token: Tensor, amax: Tensor | None, needs: Sequence[bool]
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients that are needed; an empty tensor stands for one that is not."""
    call, _ = calls.get(token)
    if amax is not None and call.fault is None:  # a fault changes the gradient first
        call.measured[whole("grad_output")] = amax
    for ear in call.ears:
        ear.felt(grad)
    kept = gemms.keep(call, x, weight, needs[0], needs[1])
    return _filled(gemms.backward(call, grad, kept, x.shape, needs), grad)


linear_forward = _operator(
    "linear_forward(Tensor x, Tensor weight, Tensor? bias, Tensor number, Tensor? mark, Tensor? amax) -> "
    "(Tensor, Tensor)",
    _forward,
    lambda x, weight, *_: (x.new_empty((*x.shape[:-1], weight.shape[0])), _blank_scalar()),
)
linear_backward = _operator(
    "linear_backward(Tensor grad, Tensor x, Tensor weight, Tensor token, Tensor? amax, bool[] needs) -> "
    "(Tensor, Tensor, Tensor)",
    _backward,
    lambda grad, x, weight, token, amax, needs: _blank((x.shape, weight.shape, weight.shape[:1]), needs, grad),
)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        number: Tensor,
        mark: Tensor | None,
        amax: Tensor | None,
        measure: bool,
    ) -> Tensor:
        y, token = linear_forward(x, weight, bias, number, mark, amax)
        ctx.save_for_backward(x, weight, token)
        ctx.needs, ctx.measure = list(ctx.needs_input_grad[:3]), measure
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        amax = amax_of(grads[0]) if ctx.measure and grads[0].numel() else None
        found = linear_backward(grads[0], *ctx.saved_tensors, amax, ctx.needs)
        return *_asked(found, ctx.needs), None, None, None, None


linear = _differentiable(
    "linear(Tensor x, Tensor weight, Tensor? bias, Tensor number, Tensor? mark, Tensor? amax, bool measure) -> Tensor",
    _Linear,
)


def _saving_forward(
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


def _saving_backward(
    grad: Tensor, weight: Tensor, token: Tensor, needs: Sequence[bool]
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients that are needed; an empty tensor stands for one that is not."""
    call, (codes, _, *more) = calls.get(token)
    for ear in call.ears:
        ear.felt(grad)
    shape = torch.Size((*grad.shape[:-1], weight.shape[1]))
    return _filled(gemms.backward(call, grad, (codes, weight, *more), shape, needs), grad)


linear_saving_forward = _operator(
    "linear_saving_forward(Tensor x, Tensor weight, Tensor? bias, Tensor number, Tensor? mark, bool keeps) -> "
    "(Tensor, Tensor)",
    _saving_forward,
    lambda x, weight, *_: (x.new_empty((*x.shape[:-1], weight.shape[0])), _blank_scalar()),
)
linear_saving_backward = _operator(
    "linear_saving_backward(Tensor grad, Tensor weight, Tensor token, bool[] needs) -> (Tensor, Tensor, Tensor)",
    _saving_backward,
    lambda grad, weight, _, needs: _blank(
        ((*grad.shape[:-1], weight.shape[1]), weight.shape, weight.shape[:1]), needs, grad
    ),
)


class _LinearSaving(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, number: Tensor, mark: Tensor | None, keeps: bool
    ) -> Tensor:
        y, token = linear_saving_forward(x, weight, bias, number, mark, keeps)
        ctx.save_for_backward(weight, token)
        ctx.needs = list(ctx.needs_input_grad[:3])
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        found = linear_saving_backward(grads[0], *ctx.saved_tensors, ctx.needs)
        return *_asked(found, ctx.needs), None, None, None


linear_saving = _differentiable(
    "linear_saving(Tensor x, Tensor weight, Tensor? bias, Tensor number, Tensor? mark, bool keeps) -> Tensor",
    _LinearSaving,
)
