# SPDX-License-Identifier: Apache-2.0
"""What all gradient transforms share: the gradients as short vectors, and a state that can be saved.

A transform stands between `backward()` (and `unscale_`) and any `optimizer.step()`, and changes `p.grad` in place:

    transform = GradStabilizer(model.parameters())
    loss.backward()
    transform.step_()
    optimizer.step()

Its maths is a pure function over vectors with one number per parameter, or one number for all of them:

    norms, state  ->  scales, state

The class around it only measures (`Gradients.norms`), calls the function and multiplies (`Gradients.scale_`).
Nothing waits for the device: what happens to a gradient is decided there, by `torch.where`.

One rule holds for all: **a norm enters a history only if it is finite and not zero** (`seen`). A parameter without
a gradient reads as zero, so its averages do not move. An all-zero gradient has no direction and says nothing about
scale: counting it would pull a mean, or AdaGC's running minimum, to zero and freeze the tensor. An Inf or a NaN
leaves the history as it was for ever, and the gradient too (scale 1), so that the loop's own check finds it.

The state is a NamedTuple of FP32 vectors on the device of the first parameter, complete from the start. With
parameters on several devices their norms travel there and the scales back.
"""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from trimtab.checks import is_number, require
from trimtab.devices import has_triton
from trimtab.errors import TrimtabError
from trimtab.shards import by_kind, is_partial, local, tensor_maxima, tensor_norms, total_norm

LEAST_NORM = 1e-30  # a smaller one counts as zero: its reciprocal, times any factor in use, must stay finite in FP32

Params = Iterable[Tensor] | Iterable[Mapping[str, Any]] | Iterable[tuple[str, Tensor]]
State = TypeVar("State", bound=NamedTuple)


def seen(norms: Tensor) -> Tensor:
    """Where a norm may enter a history: finite and not zero."""
    return torch.isfinite(norms) & (norms >= LEAST_NORM)


def is_decay(value: object) -> bool:
    """A number that an average may keep of itself: above 0, below 1."""
    return is_number(value) and 0 < value < 1  # pyright: ignore[reportOperatorIssue]


class Gradients:
    """The gradients of a fixed list of parameters; a parameter listed twice counts once."""

    def __init__(self, params: Params) -> None:
        self.params = list({id(param): param for param in _flatten(params)}.values())
        require(bool(self.params), "params must name at least one parameter", self.params)
        require(any(p.requires_grad for p in self.params), "params must have one that requires a gradient", "none")

    def zeros(self, *, together: bool = False) -> Tensor:  # (P,), or (1,) together
        """A vector for a state: one number per parameter, or one for all together."""
        return torch.zeros(1 if together else len(self.params), device=self._device())

    def norms(self, *, together: bool = False) -> Tensor:  # (P,), or (1,) together
        """The norm of each whole gradient, 0 where there is none; or the norm of all together."""
        norms = tensor_norms(self._entries()).to(self._device())
        return total_norm(norms) if together else norms

    def maxima(self) -> Tensor:  # (P,)
        """The largest absolute value in each whole gradient, 0 where there is none."""
        return tensor_maxima(self._entries()).to(self._device())

    def scale_(self, scales: Tensor) -> None:  # (P,) or (1,)
        """Multiply each gradient by its number, or all by the one."""
        pieces, positions = self._pieces()
        self._tell()
        for (device, dtype), kind in by_kind(pieces).items():
            grads = [pieces[k] for k in kind]
            if scales.numel() > 1 and fused_multiply(grads, [positions[k] for k in kind], scales):
                continue
            factors = scales.to(device).split(1)
            if len(factors) == 1 and dtype == torch.float32:
                torch._foreach_mul_(grads, factors[0].reshape(()))  # pyright: ignore[reportPrivateImportUsage]
                continue
            # A factor of shape (1,) keeps the product of a BF16 gradient in FP32 until it is stored; one without
            # dimensions would be rounded to BF16 first.
            chosen = [factors[0] if len(factors) == 1 else factors[positions[k]] for k in kind]
            torch._foreach_mul_(grads, chosen)  # pyright: ignore[reportPrivateImportUsage]

    def shrink_(self, limits: Tensor, factors: Tensor) -> None:  # (P,), (P,)
        """Multiply by its factor each coordinate whose absolute value is above its gradient's limit."""
        if any(param.grad is not None and is_partial(param.grad) for param in self.params):
            raise TrimtabError(
                "clipping single coordinates needs gradients that are added up, got one with a Partial placement: "
                "redistribute it to Replicate or Shard first, or leave clip_gamma out"
            )
        pieces, positions = self._pieces()
        self._tell()
        for (device, _), kind in by_kind(pieces).items():
            if fused_multiply([pieces[k] for k in kind], [positions[k] for k in kind], factors, limits):
                continue
            above, by = limits.to(device).split(1), factors.to(device).split(1)
            one = torch.ones(1, device=device)
            for k in kind:  # no foreach call compares
                piece, i = pieces[k], positions[k]
                piece.mul_(torch.where(piece.abs() > above[i], by[i], one))

    def _device(self) -> torch.device:
        return local(self.params[0]).device

    def _entries(self) -> list[Tensor | None]:
        for param in self.params:
            if param.grad is not None and param.grad.is_sparse:
                raise TrimtabError(
                    f"gradients must be dense, got a sparse one of shape {tuple(param.shape)}: "
                    "build the embedding with sparse=False"
                )
        return [param.grad for param in self.params]

    def _tell(self) -> None:
        """Count the coming change in the gradients' versions: neither a kernel nor a write to a shard does it."""
        increment_version([param.grad for param in self.params if param.grad is not None])

    def _pieces(self) -> tuple[list[Tensor], list[int]]:
        """The local pieces of the gradients that exist, none without dimensions, and whose they are."""
        positions = [position for position, param in enumerate(self.params) if param.grad is not None]
        pieces = [local(grad) for grad in (self.params[i].grad for i in positions) if grad is not None]
        return [piece if piece.dim() else piece.view(1) for piece in pieces], positions


def fused_multiply(gradients: list[Tensor], which: list[int], factors: Tensor, limits: Tensor | None = None) -> bool:
    """Multiply them in one launch, where Triton and the gradients allow it; says whether that was done."""
    if not gradients[0].is_cuda or not has_triton():
        return False
    from trimtab.optim import scaling

    if not all(map(scaling.takes, gradients)):
        return False
    device = gradients[0].device
    limits = torch.full_like(factors, -1.0) if limits is None else limits
    scaling.multiply_(gradients, which, factors.to(device), limits.to(device))
    return True


def saved(state: NamedTuple) -> dict[str, Tensor]:
    """A state as a plain dict. It needs no copies: a step makes new vectors and never writes to old ones."""
    return state._asdict()


def loaded(state: State, state_dict: Mapping[str, Any]) -> State:
    """A state of the same form and device as `state`, with the values of a saved one."""
    names = list(state._fields)
    require(sorted(state_dict) == sorted(names), f"the state of a transform has the keys {names}", list(state_dict))
    values: dict[str, Tensor] = {}
    for name, mine in state._asdict().items():
        theirs = state_dict[name]
        if theirs.shape != mine.shape:
            raise TrimtabError(
                f"{name} must have shape {tuple(mine.shape)}, got {tuple(theirs.shape)}: load the state into a "
                "transform of the same parameters and options"
            )
        values[name] = theirs.to(mine.device, mine.dtype)
    return state._replace(**values)


def moved(state: State, device: torch.device) -> State:
    """The state on the device of this step's norms: a model may be moved after the transform was built."""
    return state._replace(**{name: value.to(device) for name, value in state._asdict().items()})


def _flatten(params: Params) -> Iterable[Tensor]:
    if isinstance(params, Tensor):
        raise TrimtabError("params must be an iterable of parameters, got a single tensor: put it into a list")
    for entry in params:
        if isinstance(entry, Mapping):
            members = entry["params"]
            yield from _flatten([members] if isinstance(members, Tensor) else members)
        elif isinstance(entry, Tensor):
            yield entry
        elif isinstance(entry, tuple) and len(entry) == 2 and isinstance(entry[1], Tensor):
            yield entry[1]
        else:
            raise TrimtabError(
                f"params must hold parameters, (name, parameter) pairs or groups with a 'params' key, got {entry!r}"
            )
