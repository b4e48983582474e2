# SPDX-License-Identifier: Apache-2.0
"""trimtab watches each operator's gradient norm and runs the risky few in high precision, within a budget.

    import trimtab

    trimtab.convert_(model, "fp8")                                  # linears become switchable, in place
    controller = trimtab.Controller(model, total_steps=10_000)
    for batch in loader:
        model(batch).loss.backward()
        controller.step()                                           # read norms, choose who runs high next
        optimizer.step()
        optimizer.zero_grad()

The names below load on first use (PEP 562), so that the command line, `replay` and `report` need no torch.
Everything else is reached through its room: `trimtab.linear`, `trimtab.optim`, `trimtab.nn`, ...
"""

import importlib
import importlib.metadata
from typing import TYPE_CHECKING

__version__ = "0.1.0"

_HOMES = {
    # the controller
    "Controller": "trimtab.control.controller",
    "Policy": "trimtab.control.policy",
    "Plan": "trimtab.control.values",
    "Event": "trimtab.control.values",
    "Recorder": "trimtab.control.record",
    # what-if
    "replay": "trimtab.control.replay",
    "Decisions": "trimtab.control.replay",
    # the switch
    "convert_": "trimtab.linear.convert",
    "revert_": "trimtab.linear.convert",
    "running": "trimtab.control.act",
    "Recipe": "trimtab.linear.paths",
    "Path": "trimtab.linear.paths",
    # what goes wrong
    "doctor": "trimtab.lab.doctor",
    "TrimtabError": "trimtab.errors",
    "NonFiniteError": "trimtab.errors",
    "NoEffectWarning": "trimtab.errors",
}

__all__ = [
    "Controller",
    "Decisions",
    "Event",
    "NoEffectWarning",
    "NonFiniteError",
    "Path",
    "Plan",
    "Policy",
    "Recipe",
    "Recorder",
    "TrimtabError",
    "__version__",
    "convert_",
    "doctor",
    "replay",
    "revert_",
    "running",
]

TORCH_FLOOR = (2, 6)

if TYPE_CHECKING:
    from trimtab.control.act import running as running
    from trimtab.control.controller import Controller as Controller
    from trimtab.control.policy import Policy as Policy
    from trimtab.control.record import Recorder as Recorder
    from trimtab.control.replay import Decisions as Decisions
    from trimtab.control.replay import replay as replay
    from trimtab.control.values import Event as Event
    from trimtab.control.values import Plan as Plan
    from trimtab.errors import NoEffectWarning as NoEffectWarning
    from trimtab.errors import NonFiniteError as NonFiniteError
    from trimtab.errors import TrimtabError as TrimtabError
    from trimtab.lab.doctor import doctor as doctor
    from trimtab.linear.convert import convert_ as convert_
    from trimtab.linear.convert import revert_ as revert_
    from trimtab.linear.paths import Path as Path
    from trimtab.linear.paths import Recipe as Recipe


def _check_torch_floor() -> None:
    """Refuse a torch older than the floor, by its metadata alone; pre-releases of the floor count as it."""
    try:
        version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return  # what needs torch will say so itself; reading run folders does not
    release = tuple(int(part) for part in version.split("+")[0].split(".")[:2] if part.isdigit())
    if release < TORCH_FLOOR:
        floor = ".".join(map(str, TORCH_FLOOR))
        raise ImportError(f"trimtab needs torch >= {floor}, found {version}: pip install --upgrade 'torch>={floor}'")


_check_torch_floor()


def __getattr__(name: str) -> object:
    if name in _HOMES:
        value = getattr(importlib.import_module(_HOMES[name]), name)
        globals()[name] = value
        return value
    if name in ("comm", "control", "integrations", "lab", "linear", "nn", "optim", "report", "retrain"):
        return importlib.import_module(f"trimtab.{name}")
    raise AttributeError(f"module 'trimtab' has no attribute {name!r}; it has {', '.join(__all__)}")


def __dir__() -> list[str]:
    return sorted(__all__)
