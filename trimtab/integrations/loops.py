# SPDX-License-Identifier: Apache-2.0
"""What a controller needs in a loop that is somebody else's."""

from torch import Tensor

from trimtab.control.controller import Controller
from trimtab.control.policy import Policy
from trimtab.errors import TrimtabError


def refuse_reruns(policy: Policy | None, mode: str, loop: str) -> None:
    """Refuse a policy that wants a batch run again where nobody could."""
    if policy is not None and policy.replay_step is not None and mode == "act":
        raise TrimtabError(
            f"replay_step runs a batch again, which {loop} cannot do, got replay_step={policy.replay_step}: use "
            "policy.replace(replay_step=None), or trimtab.Controller in a loop of your own"
        )


def true_total(controller: Controller, total: Tensor) -> Tensor:
    """What clipping should report: of a non-finite step the gradients are gone, and their norm was not 0."""
    gone = controller.plan.nonfinite and all(p.grad is None for unit in controller.units for p in unit.parameters)
    return total.new_tensor(controller.reading.total) if gone and controller.reading is not None else total
