# SPDX-License-Identifier: Apache-2.0
"""A controller for gradients that are not in `p.grad`: it is given norms, and only observes.

Engines that shard or accumulate gradients in buffers of their own leave `p.grad` empty. What they have instead is
turned into one number per parameter; each stands as the "gradient" of a scalar in a shadow of the model, and a usual
controller reads the shadow: the norm of a unit is the norm of its parameters' norms. So history, policy, recorder,
events and state are the usual ones.

A parameter whose norm is exactly 0 had no gradient in this step (buffers are zeroed, not emptied), and is not seen. If
none has any, that is an error and not a row of zeros.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from trimtab.control.controller import Controller
from trimtab.control.policy import Policy
from trimtab.control.units import Grouping, find_units, trainable
from trimtab.control.values import Plan
from trimtab.errors import TrimtabError


class NormController(Controller, ABC):
    """Observes a model by norms that a subclass finds; `norms` is all that it must define."""

    library: str
    """Whose gradients these are, for the errors."""

    def __init__(
        self, model: nn.Module, policy: Policy | None = None, *, units: Grouping | None = None, **options: Any
    ) -> None:
        mode = options.pop("mode", "observe")
        if mode == "act":
            raise TrimtabError(
                f"{self.library} can be observed and not acted on, got mode='act': non-finite steps are its own to "
                "skip, and its modules are not trimtab's; use mode='observe'"
            )
        self.trained = list(trainable([model]))
        found = find_units(model, units)
        if any(unit.index is not None for unit in found):
            raise TrimtabError(
                f"a norm here is of a whole parameter, got units that are slices of one: use units='linear' or 'block' "
                f"with {self.library}"
            )
        place = self.trained[0].device if self.trained else torch.device("cpu")
        self._scalars = {id(p): nn.Parameter(torch.zeros((), device=place)) for p in self.trained}
        shadow = nn.Module()
        for name, p in model.named_parameters():
            if id(p) in self._scalars:
                shadow.register_parameter(name.replace(".", "/"), self._scalars[id(p)])
        shadows = [replace(u, parameters=tuple(self._scalars[id(p)] for p in u.parameters), switch=None) for u in found]
        super().__init__(shadow, policy, mode=mode, units=shadows, **options)
        if self._sensors:
            raise TrimtabError(
                f"sensors read gradients and outputs, got {', '.join(self._sensors)}: with {self.library} choose a "
                "detector of norms alone"
            )
        self._shadow = shadow  # alive as long as the controller

    @abstractmethod
    def norms(self, parameters: Sequence[nn.Parameter]) -> Tensor:  # (P,) float32
        """The norm of each whole parameter's gradient, un-scaled; 0 where there is none. The same on every rank."""

    def step(self) -> Plan:
        """Read the norms of this step and record what would be decided; between backward and the update."""
        if self.mode == "off":
            return self.plan
        norms = self.norms(self.trained)
        present = (norms != 0).tolist()
        if not any(present):
            raise TrimtabError(
                f"no parameter has a gradient in {self.library}'s buffers: call step() after backward and before the "
                "update"
            )
        for scalar, norm, here in zip(self._scalars.values(), norms.float().unbind(), present, strict=True):
            scalar.grad = norm.to(scalar.device) if here else None
        return super().step()

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        raise TrimtabError(f"gradients are {self.library}'s to clip, got clip_grad_norm_({max_norm}): set it there")
