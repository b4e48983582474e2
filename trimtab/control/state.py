# SPDX-License-Identifier: Apache-2.0
"""State: what a checkpoint holds of the controller, and what may be loaded into it.

Plain Python values and tensors only, so `torch.load(..., weights_only=True)` takes it. Every array has the
units along its last axis (the first for the tally) and travels with their names: a model whose modules come
in another order still finds its own histories, and a checkpoint of another model or policy is refused by name.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from trimtab.control.policy import Policy
from trimtab.control.units import Unit
from trimtab.errors import TrimtabError

STATE_VERSION = 1


def check_state(
    state_dict: Mapping[str, Any], names: Sequence[str], policy: Policy, detector: Mapping[str, Any] | None = None
) -> None:
    """Refuse the state of another version, model, policy or detector, and say what differs."""
    version = state_dict.get("version")
    if version != STATE_VERSION:
        raise TrimtabError(
            f"controller state must be of version {STATE_VERSION}, got {version!r}: it is from another trimtab"
        )
    saved = set(state_dict["units"])
    missing, extra = sorted(set(names) - saved), sorted(saved - set(names))
    if missing or extra:
        raise TrimtabError(
            f"the checkpoint is of another model: it lacks {missing[:3] or 'nothing'} and has {extra[:3] or 'nothing'} "
            "besides; build the same model with the same units"
        )
    ours, theirs = policy.to_dict(), Policy.from_dict(state_dict["policy"]).to_dict()
    changed = [f"{key} {theirs[key]!r} -> {ours[key]!r}" for key in ours if ours[key] != theirs[key]]
    if changed:
        raise TrimtabError(
            f"the checkpoint was made under another policy ({'; '.join(changed)}): "
            "use Policy.from_dict(state['policy']), or start with a fresh controller"
        )
    was = state_dict.get("detector", {"name": "gnmr"})  # a state from before there were others
    if detector is not None and dict(was) != dict(detector):
        raise TrimtabError(
            f"the checkpoint was made with another detector, {dict(was)}, and this is {dict(detector)}: use "
            "Controller(detector=state['detector']), or start with a fresh controller"
        )


def load_sensors(sensors: Mapping[str, Any], states: Mapping[str, Mapping[str, Any]]) -> None:
    """Give each sensor its own state back, by column."""
    if set(sensors) != set(states):
        raise TrimtabError(
            f"the checkpoint was made with sensors of {sorted(states) or 'nothing'}, this controller has "
            f"{sorted(sensors) or 'none'}: give the same detector and sensors"
        )
    for name, sensor in sensors.items():
        sensor.load_state_dict(states[name])


def to_tensors(values: Mapping[str, Any]) -> dict[str, Any]:
    """Arrays as tensors (copies), everything else as it is."""
    return {k: torch.from_numpy(v.copy()) if isinstance(v, np.ndarray) else v for k, v in values.items()}


def column(value: Any, order: list[int], axis: int = -1) -> np.ndarray:
    """One array with its units put into this controller's order."""
    return np.ascontiguousarray(np.take(torch.as_tensor(value).numpy(), order, axis=axis))


def columns(values: Mapping[str, Any], order: list[int]) -> dict[str, Any]:
    """Several such arrays, by name."""
    return {name: column(value, order) for name, value in values.items()}


def path_states(units: Sequence[Unit]) -> dict[str, dict[str, Any]]:
    """What the paths themselves remember (amax histories, draw counters), by unit and module name."""
    return {
        unit.name: {module.fqn: module.memory.state_dict() for module in _remembering(unit)}
        for unit in units
        if unit.recoverable
    }


def load_path_states(units: Sequence[Unit], states: Mapping[str, Mapping[str, Any]]) -> None:
    """Give each module its own path state back."""
    for unit in units:
        for module in _remembering(unit):
            if module.fqn not in states.get(unit.name, {}):
                raise TrimtabError(
                    f"the checkpoint holds no path state of {module.fqn!r} in unit {unit.name!r}: "
                    "convert the model with the same recipe and units"
                )
            module.memory.load_state_dict(states[unit.name][module.fqn])


def _remembering(unit: Unit) -> list[Any]:
    """The modules of a unit that keep a state between steps: they have a path (`fqn`) and a `memory`."""
    return [module for module in unit.modules if hasattr(module, "memory") and hasattr(module, "fqn")]
