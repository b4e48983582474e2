# SPDX-License-Identifier: Apache-2.0
"""The weights of a block, cast together: two launches in place of two for each.

The host must stay ahead of the GPU, and has least time just after it has waited for the norms: what it needs for the
forward of a linear then decides whether the GPU ever waits. The linears of a block run one soon after the other, so the
first of them that runs low measures the weights of all, casts all, and the others find theirs made:

    q  measures and casts q, k, v, o, gate, up, down        k  takes its own        v  takes its own        ...

That holds the weights of one block in 8 bits while the block runs, or of one expert. Only low linears of `fp8`, with
one scale for a whole weight, have kin; the linears of an expert are kin among themselves. For one that is not called in
its turn nothing is made any more, until it is.

What was made is taken once, and must still be true: of the same memory at the same version, on the same stream, and
made a few turns ago. A turn is a forward of any linear that has kin. The last rule is for those who write weights past
their versions (`p.data`, FSDP2) and skip some linear of a block meanwhile: what it left behind is too old soon after.

A copy of a module has no kin; it casts for itself, as does one whose weight is cast by autocast before it gets here.
"""

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from trimtab.linear import real
from trimtab.linear.paths import Cast, Path
from trimtab.modules import block_of, expert_of

if TYPE_CHECKING:
    from trimtab.linear.linear import SwitchLinear

MOST = 8
"""How many a launch takes (`kernels.TOGETHER`, which cannot be read without Triton)."""
SOON = 4
"""What was made may be taken for this many turns per member: kin may be called with others in between."""


class Made(NamedTuple):
    """A weight of the forward as an operand, its amax, and what it was made of."""

    operand: real.Operand
    amax: Tensor
    value: tuple[int, ...]
    turn: int


def cast_of(path: Path) -> Cast | None:
    """How a path casts the weight of its forward, if kin can share that."""
    cast = None if path.output is None else path.output.right
    usual = cast is not None and cast.fmt in ("e4m3", "e5m2") and cast.group == "tensor" and not cast.delayed
    return cast if usual else None


def introduce(linears: Sequence["SwitchLinear"]) -> None:
    """Make those kin that run together: the linears of a block, or of an expert, as many as a launch takes."""
    families: dict[tuple[str, Cast], list[SwitchLinear]] = {}
    for linear in linears:
        name, cast = expert_of(linear.fqn) or block_of(linear.fqn), cast_of(linear.recipe.low)
        if linear.real and name is not None and cast is not None:
            families.setdefault((name, cast), []).append(linear)
    for (_, cast), family in families.items():
        for first in range(0, len(family), MOST):
            Kin(family[first : first + MOST], cast)


class Kin:
    """Some linears that run one soon after the other, and the casts of their weights that nobody has taken yet."""

    turns: ClassVar[int] = 0

    def __init__(self, linears: Sequence["SwitchLinear"], cast: Cast) -> None:
        self._linears = [weakref.ref(linear) for linear in linears]
        self._cast, self._made = cast, dict[int, Made]()
        self._idle: set[int] = set()  # who did not take what was made: next time nothing is
        for place, linear in enumerate(linears):
            linear.kin, linear.place = self, place

    def take(self, place: int, weight: Tensor) -> Made | None:
        """The cast of a member's weight, made now or a moment ago; None if this is not the weight that it owns."""
        own = self._linears[place]()
        if own is None or own.weight.data_ptr() != weight.data_ptr() or own.weight.dtype != weight.dtype:
            return None
        if weight.is_inference():  # it has no versions
            return None
        value = real.value_of(weight)
        made = self._made.pop(place, None)
        if made is None or made.value != value or Kin.turns - made.turn > SOON * len(self._linears):
            self._make(place, weight)
            made = self._made.pop(place)
        return made

    def _make(self, place: int, weight: Tensor) -> None:
        """Cast the weight of a member, and with it those of the others that run low and lie beside it."""
        weights = {place: weight}
        if place in self._idle:  # back again, amid the others
            self._idle.remove(place)
        else:
            self._idle |= self._made.keys()
            self._made.clear()
            for other, ref in enumerate(self._linears):
                linear = ref()
                if (
                    other not in weights
                    and other not in self._idle
                    and linear is not None
                    and self._is_like(linear, weight)
                ):
                    weights[other] = linear.weight
        with torch.no_grad():
            found = real.together(list(weights.values()), self._cast)
        for (other, one), (operand, amax) in zip(weights.items(), found, strict=True):
            self._made[other] = Made(operand, amax, real.value_of(one), Kin.turns)

    def _is_like(self, linear: "SwitchLinear", weight: Tensor) -> bool:
        """Whether a linear still belongs here, is going to run low, and has a whole weight of its own at hand."""
        if getattr(linear, "kin", None) is not self or linear.switch.high or linear.fault is not None:
            return False
        own = linear.weight  # a sharded, gathered or computed one has another type or shape
        whole = type(own) is nn.Parameter and own.shape == (linear.out_features, linear.in_features)
        return whole and own.dtype == weight.dtype and own.device == weight.device and not own.is_inference()
