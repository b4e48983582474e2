# SPDX-License-Identifier: Apache-2.0
"""What an exhibit is: a thread, a run of the reference trainer, and what breaks it the thread's way.

`prepare(run, broken)` gets a run that is built and has not stepped. It may change the model (put adapters in, convert
it anew), and if `broken` it puts the thread's defect in. It returns what is to be called before each step, or None.
An arm that asks for `broken=False` gets the same run without the defect: what trimtab itself does in that place.

A defect of a quantizer is a `Quirk`: an object that a switchable linear consults on its low path only (the
`Fault` protocol of `trimtab.linear`), here as the code at fault would compute, from the first step to the last. It is
no window of time: it acts when its own condition holds.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from trimtab.lab.optimizers import Update
from trimtab.lab.run import Run
from trimtab.linear.convert import convert_, revert_
from trimtab.linear.linear import SwitchLinear, switch_linears
from trimtab.linear.paths import Recipe

BeforeStep = Callable[[int], None]
Prepare = Callable[[Run, bool], BeforeStep | None]

STEADY: dict[str, Any] = {"preset": "steady", "max_high": 2}
"""The control of every exhibit: `steady`, two units at most."""


SMALL: dict[str, Any] = {"model": "micro", "batch": 8, "seq": 32, "lr": 4e-3, "eval_batches": 16}
"""What the exhibits have in common: a model of 0.1M parameters, 256 tokens a step."""


def as_built(run: Run, broken: bool) -> None:
    """Leave a run as its settings made it."""


@dataclass(frozen=True)
class Arm:
    """One way to run an exhibit."""

    name: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    """On top of the exhibit's own."""
    broken: bool = True
    """Whether the defect is in."""
    prepare: "Prepare | None" = None
    """Instead of the exhibit's own."""
    note: str = ""


HIGH = Arm("high", {"mode": "observe", "path": "high"}, note="every unit on its high path")
LOW = Arm("low", {"mode": "observe", "path": "low"}, note="nobody helps, nothing is skipped")
CONTROL = Arm("control", {"policy": STEADY}, note="steady, at most 2 units high")
RANDOM = Arm("random", {"policy": STEADY}, note="random units, control's count in each step; skips as control does")
REPAIR = Arm(
    "repair",
    {"policy": {"preset": "repair", "max_high": 2}, "detector": "source"},
    note="the detector source, a batch with a fault is run again; at most 2 units high",
)


@dataclass(frozen=True)
class Exhibit:
    """One public thread, small."""

    name: str
    thread: str
    """owner/repository#number."""
    what: str
    """The thread's mechanism in one sentence."""
    settings: Mapping[str, Any]
    """Of the trainer, in every arm."""
    prepare: Prepare = as_built
    begins: int = 1
    """The first step in which it can go wrong: where delays are counted from."""
    guilty: Callable[[str], bool] = lambda name: True
    """Which units are at fault, by name."""
    more: tuple[Arm, ...] = ()
    """Arms of its own, beside high, low, control, random and repair."""
    note: str = ""
    """What the emulation cannot express."""

    @property
    def arms(self) -> tuple[Arm, ...]:
        """All its arms, in the order they run."""
        return (HIGH, LOW, CONTROL, RANDOM, REPAIR, *self.more)


class Quirk:
    """A defect of the low path, doing nothing until a method is overridden."""

    def __init__(self, module: SwitchLinear) -> None:
        self.module = module

    def output(self, y: Tensor) -> Tensor:
        """The forward's result."""
        return y

    def grad_output(self, g: Tensor) -> Tensor:
        """The gradient that enters the backward."""
        return g

    def grad_weight(self, g: Tensor) -> Tensor:
        """The weight's gradient."""
        return g

    def amax(self, operand: str, amax: Tensor) -> Tensor:
        """The amax that a scale is made from."""
        return amax


def quirks_(
    model: nn.Module, quirk: Callable[[SwitchLinear], Quirk], names: Callable[[str], bool] = lambda name: True
) -> None:
    """Give every switchable linear whose path passes `names` the defect."""
    for module in switch_linears(model):
        if names(module.fqn):
            module.fault = quirk(module)


def convert_anew_(run: Run, recipe: Recipe, *, freeze: Iterable[nn.Parameter] = ()) -> None:
    """Convert a run's model with another recipe than a named one; its optimizer is rebuilt if some weights freeze."""
    revert_(run.model)
    run.report = convert_(run.model, recipe, unit=run.config.unit, backend=run.config.backend)
    for parameter in freeze:
        parameter.requires_grad_(False)
    run.update = Update(run.model, run.config)
