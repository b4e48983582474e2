# SPDX-License-Identifier: Apache-2.0
"""Waiting: when the host waits for the norms, and who skips a bad step if it does not.

    step      in `Controller.step()`: the plan is that of this step, bad gradients are dropped, a batch can be run again
    forward   when the next forward reads its first switch: the optimizer's work is queued by then, so that the device
              has something to do while the host looks; the decisions are the same
    never     in the next `step()`, when the copy has long arrived: every decision comes one step later

Unless the host waits in `step()`, it learns of a non-finite gradient too late to drop it. The device knows in time: the
flag `found_inf`, which fused optimizers of torch look at (a GradScaler uses it too), makes their update do nothing.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from trimtab.control.policy import Policy
from trimtab.errors import TrimtabError

WAITS = ("step", "forward", "never")


def skip_flag(wait: str, policy: Policy, acting: bool, optimizers: Sequence[torch.optim.Optimizer]) -> Tensor | None:
    """Check when to wait; the flag by which optimizers skip a non-finite step on the device, if they must."""
    if wait not in WAITS:
        raise TrimtabError(f"wait must be one of {', '.join(WAITS)}, got {wait!r}")
    if wait == "step":
        return None
    if policy.replay_step is not None:
        raise TrimtabError(f'replay_step must know the norms at once, got wait="{wait}": use wait="step"')
    if not acting:
        return None
    able = optimizers and all(getattr(o, "_step_supports_amp_scaling", False) for o in optimizers)
    if not able:
        raise TrimtabError(
            f'wait="{wait}" lets optimizers skip a non-finite step on the device, so it needs optimizer= with fused '
            f"ones (torch.optim.AdamW(..., fused=True)), got {[type(o).__name__ for o in optimizers] or 'none'}: make "
            'them fused, or use wait="step"'
        )
    devices = {p.device for o in optimizers for group in o.param_groups for p in group["params"]}
    if len(devices) != 1:
        raise TrimtabError(
            f'wait="{wait}" has one flag for all parameters, got parameters on {sorted(map(str, devices))}: use '
            'wait="step"'
        )
    found_inf = torch.zeros((), device=devices.pop())
    for optimizer in optimizers:
        optimizer.found_inf = found_inf  # type: ignore[attr-defined]  # what a GradScaler sets, too
    return found_inf
