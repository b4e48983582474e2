# SPDX-License-Identifier: Apache-2.0
"""The two kinds of step of 1-bit Adam, when it changes from one to the other, and what it refuses.

    dense_mean      the mean gradient in one collective, and who has none
    adamw_          warm-up: torch's AdamW on that mean, bit by bit
    frozen_         afterwards: momentum with a fixed size per coordinate
    has_settled     whether the second moment has stopped changing, for `warmup="auto"`

Functions of tensors, groups and clocks; `onebit_adam.py` explains the method and holds the state.
"""

# pyright: reportPrivateImportUsage=false
# (foreach operations are what torch.optim itself is written with)

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim.adamw import adamw

from trimtab.checks import check_adam, is_whole, require
from trimtab.comm.onebit import put_
from trimtab.comm.traffic import Group, all_reduce
from trimtab.shards import is_dtensor

SETTLED = 0.96
"""How near the sums of v must come for `warmup="auto"`."""

MOMENTS = ("exp_avg", "exp_avg_sq")
State = dict[str, Tensor]


def dense_mean(
    grads: Sequence[Tensor | None], like: Sequence[Tensor], group: Group, found_inf: Tensor | None = None
) -> list[Tensor | None]:
    """The mean over ranks in one collective; None where no rank has a gradient, NaN if a rank wants no step."""
    whole = [torch.zeros_like(p) if g is None else g for g, p in zip(grads, like, strict=True)]
    has = [torch.full((1,), float(g is not None), device=p.device) for g, p in zip(grads, like, strict=True)]
    flat = torch.cat([*(g.reshape(-1) for g in whole), *has])
    if found_inf is not None:
        flat = torch.where(found_inf.to(flat.device) > 0, math.nan, flat)
    all_reduce(flat, group, op=dist.ReduceOp.AVG)
    *means, has = flat.split([*(p.numel() for p in like), len(like)])
    return [None if n == 0 else g.view(p.shape) for g, p, n in zip(means, like, has.tolist(), strict=True)]


def adamw_(group: dict[str, Any], params: Sequence[Tensor], grads: Sequence[Tensor], states: Sequence[State]) -> None:
    """One step of torch's AdamW; a parameter narrower than its moments is widened, and rounded once."""
    moments, variances = ([state[name] for state in states] for name in MOMENTS)
    wide = [p.to(m.dtype) for p, m in zip(params, moments, strict=True)]
    adamw(
        wide,
        [g.to(m.dtype) for g, m in zip(grads, moments, strict=True)],
        moments,
        variances,
        [],
        [state["step"] for state in states],
        foreach=group["foreach"],
        amsgrad=False,
        beta1=group["betas"][0],
        beta2=group["betas"][1],
        lr=group["lr"],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        maximize=False,
    )
    for p, w, state in zip(params, wide, states, strict=True):
        state["step_sq"].copy_(state["step"])
        if w is not p:
            p.copy_(w)


class Sizes(NamedTuple):
    """The numbers of one parameter's frozen update."""

    rate: float
    """lr / (1 - beta1^t)."""
    root: float
    """sqrt(1 - beta2^T)."""
    eps: float
    keep: float
    """1 - lr * weight_decay."""


def sizes(group: dict[str, Any], state: State) -> Sizes:
    """Read a parameter's clocks."""
    lr, (beta1, beta2) = float(group["lr"]), group["betas"]
    rate = lr / (1 - beta1 ** int(state["step"]))
    root = math.sqrt(1 - beta2 ** max(int(state["step_sq"]), 1))
    return Sizes(rate, root, group["eps"], 1 - lr * group["weight_decay"])


def frozen_(
    params: Sequence[Tensor],
    states: Sequence[State],
    means: Sequence[Tensor],
    live: Tensor,  # (K,) bool
    numbers: Sequence[Sizes],
) -> None:
    """Take the new momenta and move, in place, where `live`; v is only read."""
    rates, roots, eps, keeps = (list(column) for column in zip(*numbers, strict=True))
    variances = [state["exp_avg_sq"] for state in states]
    dens = torch._foreach_sqrt(variances)
    torch._foreach_div_(dens, roots)
    torch._foreach_add_(dens, eps)
    torch._foreach_div_(dens, torch._foreach_sign(variances))  # infinite where v is zero: no move
    moved = torch._foreach_mul([p.to(den.dtype) for p, den in zip(params, dens, strict=True)], keeps)
    torch._foreach_addcdiv_(moved, list(means), dens, [-rate for rate in rates])
    for p, state, mean, new, alive in zip(params, states, means, moved, live.unbind(), strict=True):
        put_(p, new, alive)
        put_(state["exp_avg"], mean, alive)


def limit_of(group: dict[str, Any]) -> int | None:
    """The number of gradients after which a parameter of the group is frozen, if that is known."""
    return group["warmup"] if is_whole(group["warmup"]) else group["freeze"]


def period(beta2: float) -> int:
    """Updates after which a second moment has forgotten most of what it was."""
    return max(round(1 / (1 - beta2)), 1)


def sum_of_variance(states: Sequence[State], beta2: float) -> Tensor:  # () float64
    """The sum of all second moments, each corrected for its age."""
    met = [state for state in states if state["step_sq"] > 0]
    sums = [state["exp_avg_sq"].sum(dtype=torch.float64) / (1 - beta2 ** int(state["step_sq"])) for state in met]
    return torch.stack(sums).sum()


def has_settled(now: Sequence[float], before: Sequence[float] | None, step: int, every: int) -> bool:
    """Whether (sum of v, lr) has stayed within 4 % since the look before, without a rising learning rate."""
    if before is None or step < 2 * every:
        return False
    low, high = sorted((now[0], before[0]))
    return low >= SETTLED * high > 0 and now[1] <= before[1]


def check_group(group: dict[str, Any]) -> None:
    """Refuse settings and parameters that cannot work, with the remedy."""
    warmup = group["warmup"]
    check_adam(group)
    rule = 'warmup must be a whole number of at least 1, "auto", or None for a group that is never compressed'
    require(warmup is None or warmup == "auto" or is_whole(warmup, 1), rule, warmup)
    require(not group.get("amsgrad"), "amsgrad has no meaning under a frozen second moment: leave it False", True)
    for p in group["params"]:
        rule = "what OneBitAdam trains must be real floating-point numbers: give complex ones as torch.view_as_real"
        require(p.is_floating_point() or not p.requires_grad, rule, p.dtype)
        rule = "parameters must be whole on every rank, not sharded by FSDP2 or tensor parallelism: use DDP"
        require(not is_dtensor(p), rule, type(p).__name__)


def check_gradient(p: Tensor) -> None:
    """Refuse gradients that the arithmetic does not know."""
    rule = "OneBitAdam needs dense gradients: build the embedding with sparse=False"
    require(p.grad is None or p.grad.layout == torch.strided, rule, None if p.grad is None else p.grad.layout)
