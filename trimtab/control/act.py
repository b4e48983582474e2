# SPDX-License-Identifier: Apache-2.0
"""Act: the only place that changes which path a unit takes.

The controller applies a whole plan between two optimizer steps. A person may override it for a while:

    with trimtab.running(model, "high"):
        evaluate(model)

A module reads its switch when its forward starts and carries the answer to its backward, so what happens
here never reaches into a step that is under way.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import nn

from trimtab.control.units import Switch, Unit
from trimtab.control.values import Bools
from trimtab.errors import TrimtabError


def apply(units: Sequence[Unit], mask: Bools) -> None:
    """Let exactly the units of `mask` run high from the next forward on."""
    for unit, high in zip(units, mask.tolist(), strict=True):
        if unit.switch is not None:
            unit.switch.planned = high


@contextmanager
def running(model: nn.Module, path: str) -> Iterator[None]:
    """Run every switchable unit of a model on one path: `"high"`, `"low"`, or `"plan"` (what the controller says)."""
    if path not in ("high", "low", "plan"):
        raise TrimtabError(f'a path is "high", "low" or "plan", got {path!r}')
    switches = {id(s): s for m in model.modules() if isinstance(s := getattr(m, "switch", None), Switch)}
    before = {key: switch.forced for key, switch in switches.items()}
    for switch in switches.values():
        switch.forced = None if path == "plan" else path == "high"
    try:
        yield
    finally:
        for key, switch in switches.items():
            switch.forced = before[key]
