# SPDX-License-Identifier: Apache-2.0
"""What a run's linears and faults remember, kept the same on all ranks.

Weights and decisions are equal on all ranks by themselves. Three things are not, because each rank sees its own rows:

    draws     Every stochastic rounding has a number, and its random bits follow from that number alone. Ranks that all
              counted from 0 would round with the same bits, and their errors would not average out. So a rank's
              forwards are numbered as one process would that ran the parts of all ranks one after the other.
    amaxes    Delayed scales come from the largest values of past steps. After each micro-batch the ranks take the
              largest of theirs, which is that of the whole micro-batch (Transformer Engine reduces them as well).
    captured  The scale at which a `stuck_scale` fault is stuck: the largest, likewise.

Then any rank's memory is that of the run, and a checkpoint needs one of them.
"""

import torch

from trimtab.lab.faults import Faults
from trimtab.lab.parallel import World
from trimtab.linear.linear import SwitchLinear, switch_linears


class Memories:
    """Keeps the memories of a model's linears equal over the ranks, around each forward and backward.

    Args:
        split: parts into which this rank's share of a micro-batch is cut.
    """

    def __init__(self, model: torch.nn.Module, faults: Faults | None, world: World, split: int) -> None:
        self._faults, self._world, self._split = faults, world, split
        linears = list(switch_linears(model))
        self._random = [m for m in linears if m.recipe.low.random or m.recipe.high.random]
        self._delayed = [(m.memory, operand) for m in linears for operand in m.memory.histories]
        self._first: list[int] = []
        self._counts: list[int] = []

    def before(self, number: int) -> None:
        """Number the draws of this rank's forward `number` of the step, and remember what was there before it."""
        if number == 0:
            self._first = [m.memory.draws for m in self._random]
        micro, part = divmod(number, self._split)
        place = (micro * self._world.size + self._world.rank) * self._split + part
        for module, first in zip(self._random, self._first, strict=True):
            module.memory.draws = first + place
        self._counts = [memory.counts[operand] for memory, operand in self._delayed]

    def after(self, number: int) -> None:
        """Agree on what forward `number` and its backward have left; the draws stand as after those of all ranks."""
        total = (number // self._split + 1) * self._world.size * self._split
        for module, first in zip(self._random, self._first, strict=True):
            module.memory.draws = first + (total if _draws(module) else 0)
        if self._delayed:
            self._agree_on_amaxes()
        if self._faults is not None:
            self._faults.settle(self._world.largest)

    def _agree_on_amaxes(self) -> None:
        """A linear that some rank did not call (an expert without tokens) has seen 0 there."""
        amaxes, pushed = [], []
        for (memory, operand), count in zip(self._delayed, self._counts, strict=True):
            history = memory.histories[operand]
            pushed.append(float(memory.counts[operand] > count))
            amaxes.append(history[count % len(history)].float().cpu() if pushed[-1] else torch.zeros(()))
        amax, any_pushed = self._world.largest(torch.stack([torch.stack(amaxes), torch.tensor(pushed)]))
        for i, ((memory, operand), count) in enumerate(zip(self._delayed, self._counts, strict=True)):
            if any_pushed[i]:
                history = memory.histories[operand]
                history[count % len(history)] = amax[i]
                memory.counts[operand] = count + 1


def _draws(module: SwitchLinear) -> bool:
    """Whether a forward of the step under way draws random numbers."""
    return (module.recipe.high if module.switch.high else module.recipe.low).random
