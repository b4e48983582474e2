# SPDX-License-Identifier: Apache-2.0
"""What a switchable linear remembers: from step to step, and from a forward to its backward.

`PathState` lives as long as the module: the amax history of delayed scaling and the counter of random draws.
It is outside `state_dict()`, so that a converted model saves like a plain one, and has its own (`path_state`).

`Call` lives for one forward, its backward, and any recompute of it: the path that was chosen, the fault, the
number of the draw, the amax values in use, and who watches. A recompute gets the same `Call` again, so it repeats
the forward bit for bit even if the switch or the history has moved on.

Delayed scaling (Transformer Engine's rule, history 1024, margin 0):

    amax used at step t = 2^margin * max(amax of steps t - 1024 ... t - 1),  the current amax if that is 0

The last clause covers the first step and a gradient that has been exactly zero so far. A non-finite amax is
not remembered, because it would poison 1024 steps; the values that caused it stay visible in the result.
A static scale is calibrated on its first `history` steps in the same way and does not move any more.
The history is fed on the high path too, forward and backward, so that a unit comes back with fresh scales
(Transformer Engine's calibration mode does this for the forward only). Each process keeps its own history.

Randomness is counter-based: every draw has its own generator, seeded by module name, draw number, role and operand.
The only state is the counter.
"""

import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from trimtab.devices import has_triton
from trimtab.errors import TrimtabError
from trimtab.linear.hadamard import fixed_signs, random_signs
from trimtab.linear.paths import Cast, Gemm, Path, Recipe
from trimtab.linear.quantize import group_amax

if TYPE_CHECKING:
    from trimtab.linear.kin import Kin


class Fault(Protocol):
    """Something that damages the low path on purpose; the high path never consults it."""

    def output(self, y: Tensor) -> Tensor:
        """Replace the forward result; the backward does not know."""
        ...

    def grad_output(self, g: Tensor) -> Tensor:
        """Replace the incoming gradient before any use of it."""
        ...

    def grad_weight(self, g: Tensor) -> Tensor:
        """Replace the weight's gradient."""
        ...

    def amax(self, operand: str, amax: Tensor) -> Tensor:
        """Replace an amax (of "input", "weight" or "grad_output") before it becomes a scale."""
        ...


class Ear(Protocol):
    """Listens to a linear under torch.compile, where a hook would break the graph; without it, hooks do."""

    def heard(self, x: Tensor, y: Tensor) -> None:
        """Input and output of a training forward that is no recompute."""

    def felt(self, grad: Tensor) -> None:
        """The gradient that arrives at the output."""


class Watch(Protocol):
    """Somebody who wants to know how far the low path is from the high one; the high path never reports.

    Each number is a scalar on the module's device: nobody waits for it. A recompute is not reported again.
    """

    def output(self, module: Any, error_sq: Tensor, reference_sq: Tensor) -> None:
        """Of one forward: |low - high|^2 and |high|^2 of the result, a fault on the low path included."""
        ...

    def grad_input(self, module: Any, error_sq: Tensor, reference_sq: Tensor) -> None:
        """The same of the gradient that is passed on; the reference starts from the gradient as it came in."""
        ...

    def grad_weight(self, module: Any, error_sq: Tensor, reference_sq: Tensor) -> None:
        """The same of the weight's gradient."""
        ...


class PathState:
    """The memory of one module's paths; complete from the start, plain tensors and ints in its state dict."""

    def __init__(self, recipe: Recipe) -> None:
        delayed = recipe.high.delayed() | recipe.low.delayed()
        self.histories = {operand: torch.zeros(cast.history) for operand, cast in sorted(delayed.items())}
        self.counts = dict.fromkeys(self.histories, 0)
        self._static = {operand for operand, cast in delayed.items() if cast.static}
        self.draws = 0

    def _history(self, operand: str, device: torch.device) -> Tensor:
        """The history, moved to where the module is now; it is no buffer, so `model.to` does not move it."""
        if self.histories[operand].device != device:
            with torch.inference_mode(False):  # a tensor made in inference mode could not be written to later
                self.histories[operand] = self.histories[operand].to(device)
        return self.histories[operand]

    def past_amax(self, operand: str, current: Tensor, *, remember: bool) -> Tensor:
        """The largest remembered amax, or the current one while there is none. Nothing waits.

        Args:
            remember: whether the current one takes the place of the oldest, unless a static scale has all it needs.
        """
        history = self._history(operand, current.device)
        place = self.counts[operand]
        remember = remember and not (operand in self._static and place >= len(history))
        self.counts[operand] += remember
        if current.is_cuda and has_triton():
            from trimtab.linear import kernels

            return kernels.past_amax(history, current, place % len(history) if remember else None)
        past = history.amax()
        past = torch.where(past > 0, past, current)
        if remember:
            history[place % len(history)] = torch.where(torch.isfinite(current), current, torch.zeros_like(current))
        return past

    def state_dict(self) -> dict[str, Any]:
        """A copy of everything remembered."""
        state: dict[str, Any] = {"draws": self.draws}
        for operand, history in self.histories.items():
            state[f"{operand}_amax"] = history.clone()
            state[f"{operand}_count"] = self.counts[operand]
        return state

    def check(self, state_dict: dict[str, Any], name: str) -> None:
        """Raise, naming the module, unless `load_state_dict` would succeed."""
        mine = self.state_dict()
        if set(state_dict) != set(mine):
            raise TrimtabError(
                f"path state of {name!r} must have the keys {sorted(mine)}, got {sorted(state_dict)}: "
                "convert the model with the recipe it was saved with"
            )
        for operand, history in self.histories.items():
            shape = tuple(state_dict[f"{operand}_amax"].shape)
            if shape != tuple(history.shape):
                raise TrimtabError(f"{operand}_amax of {name!r} must have shape {tuple(history.shape)}, got {shape}")

    def load_state_dict(self, state_dict: dict[str, Any], name: str = "this module") -> None:
        """Take over a state, if it fits; the caller's dict and tensors stay as they are."""
        self.check(state_dict, name)
        self.draws = int(state_dict["draws"])
        for operand in self.histories:
            self.histories[operand] = state_dict[f"{operand}_amax"].detach().clone().float()
            self.counts[operand] = int(state_dict[f"{operand}_count"])


def whole(operand: str) -> str:
    """Where `Call.measured` has the amax of a whole operand."""
    return f"{operand} per tensor"


@dataclass(eq=False, slots=True)
class Call:
    """One forward with its backward and recompute."""

    path: Path
    state: PathState
    name: str
    fault: Fault | None = None
    record: bool = False
    """Whether amax values enter the history (training mode)."""
    real: bool = False
    """Whether real kernels carry it out (`real.py`)."""
    draw: int = 0
    amaxes: dict[str, Tensor] = field(default_factory=dict)
    """The delayed amax of each operand as first looked up: a second look, in a recompute, must find the same."""
    measured: dict[str, Tensor] = field(default_factory=dict)
    """On real kernels: the amax of input and weight as measured in forward, which backward uses again, and what
    compiled code has measured already. Not shared with a recompute: that may be of another forward's input."""
    mark: int | None = None
    """Under torch.compile: which value the input is (see `opaque.mark`)."""
    shadow: "Call | None" = None
    """The same forward on the high path, where somebody watches; it shares the amaxes and changes no state."""
    report: Callable[[str, Tensor, Tensor], None] | None = None
    """Takes (role, low result, high result) of a watched call."""
    ears: "tuple[Ear, ...]" = ()
    """Who listens to a compiled training forward and its backward."""
    kin: "Kin | None" = None
    """With whom the weight is cast on real kernels (`kin.py`)."""
    place: int = 0
    """Which of them this is."""

    def observe(self, operand: str, x: Tensor, dtype: torch.dtype | None = None) -> None:
        """Look up the amax that a delayed cast of x uses and feed the history; once per call and operand.

        Args:
            dtype: the type x will be cast to by autocast; rounding is monotonic, so rounding amax is enough.
        """
        if operand not in self.state.histories or operand in self.amaxes:
            return
        with torch.no_grad():
            given = self.measured.get(whole(operand))
            current = group_amax(x, "tensor") if given is None else given.float()
            if dtype is not None:
                current = current.to(dtype).float()
            if x.is_meta:  # shapes only: nothing to look up or remember
                self.amaxes[operand] = current
                return
            self.amaxes[operand] = self.state.past_amax(operand, current, remember=self.record)

    def change_amax(self, operand: str, cast: Cast) -> Callable[[Tensor], Tensor] | None:
        """What replaces the measured amax of an operand, or None."""
        if not cast.delayed and self.fault is None:
            return None

        def change(amax: Tensor) -> Tensor:
            if cast.delayed:
                amax = self.amaxes[operand] * 2.0**cast.margin
            return amax if self.fault is None else self.fault.amax(operand, amax)

        return change

    def generator(self, role: str, operand: str, device: torch.device) -> torch.Generator:
        """A fresh generator for one operand's stochastic rounding."""
        # Folded to 32 bits by the checksum itself: the CPU generator ignores the upper half of a seed.
        seed = zlib.crc32(f"{self.name}/{self.draw}/{role}/{operand}".encode())
        return torch.Generator(device).manual_seed(seed)

    def signs(self, role: str, gemm: Gemm, device: torch.device) -> Tensor | None:
        """The sign vector of one role, the same for both its operands."""
        if gemm.signs == "none":
            return None
        if gemm.signs == "fixed":
            return fixed_signs(gemm.hadamard).to(device)
        return random_signs(gemm.hadamard, f"{self.name}/{self.draw}/{role}/signs").to(device)
