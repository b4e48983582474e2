# SPDX-License-Identifier: Apache-2.0
"""GradStabilizer: keep a gradient's direction, replace its length by a steady one.

A spike poisons Adam's averages for 1 / (1 - beta) steps. GradientStabilizer (arXiv 2502.17055 v4, the norm part of
Stable-SPAM, its v1 to v3) never lets it in: whatever the norm R of a gradient, the optimizer gets one of norm rho,

    m   <- g1 * m + (1 - g1) * R           g1 = 0.6, short memory: what the norm is now
    v   <- g2 * v + (1 - g2) * R^2         g2 = 0.999, long memory: what it usually is
    rho  = m / sqrt(v)
    grad <- rho * grad / R

For norms that vary with a coefficient of variation c, rho settles at 1 / sqrt(1 + c^2). It follows a trend and
flattens a spike: rho can never exceed sqrt( (1-g1)^2 / (1-g2) / (1 - g1^2/g2) ) = 15.816 (this needs g1^2 < g2),
however large R is. It goes in front of any optimizer; after it the gradient's own scale is gone, so a clip at a
fixed norm, or SGD with a learning rate tuned for raw gradients, makes no sense beside it.

Where this differs from the paper, and why:
- **Bias correction.** The paper has none: rho is 12.65 at the first step and decays slowly. Adam hides that, SGD
  does not. By default m and v are corrected as in Adam, so rho is exactly 1 at the first step and stays below

      sqrt( (1-g1)^2/(1-g2) * (1-q^t)/(1-q) * (1-g2^t)/(1-g1^t)^2 ),   q = g1^2/g2        (`supremum`)

  which norms growing by g2/g1 = 1.665 a step attain. `bias_correction=False` is the paper's form.
- **Per tensor**, as in Stable-SPAM; the paper's "Flatten(g)" leaves it open. `global_norm=True` takes one norm for
  all parameters together.
- **v is kept as its root**, in the unit of a norm: an FP32 square overflows from 1.8e19 on.
- **eps is 0.** Stable-SPAM divides by sqrt(v) + 1e-8, which bends rho for small gradients; a norm of zero is left
  out of the history instead (see `transform`).

`clip_gamma=0.999` puts Stable-SPAM's AdaClip in front: each tensor's largest |g| against its own average,

    T <- g3 * T + (1 - g3) * max|g|;   where |g| > T / (1 - g3^t):   g <- g * T / ((1 - g3^t) * max|g|)

keeping the ratios among the coordinates above the ceiling. The spike itself enters T before it is clipped, so it
lifts its own ceiling: that is the method. The average's counter is its own, so a reset of the optimizer's moments does
not touch it (in the authors' code it does, and AdaClip is then off for hundreds of steps). Stable-SPAM is
`GradStabilizer(params, (0.7, 0.9), clip_gamma=0.999, eps=1e-8)` before an Adam that wipes its moments now and then.
"""

import math
from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trimtab.checks import is_number, require
from trimtab.errors import TrimtabError
from trimtab.optim.transform import Gradients, Params, is_decay, loaded, moved, saved, seen


class NormHistory(NamedTuple):
    """What is remembered of the norms, one number each."""

    mean: Tensor
    """m, the average of R."""
    rms: Tensor
    """sqrt(v), v the average of R^2."""
    steps: Tensor
    """How many norms have entered."""


class Ceiling(NamedTuple):
    """What AdaClip remembers of the largest coordinates."""

    mean: Tensor
    steps: Tensor


def stabilize(
    norms: Tensor,  # (T,)
    history: NormHistory,
    gammas: tuple[float, float] = (0.6, 0.999),
    *,
    bias_correction: bool = True,
    eps: float = 0.0,
) -> tuple[Tensor, NormHistory]:
    """The factor of each gradient, rho / R, and the history with these norms in it."""
    gamma1, gamma2 = gammas
    enters = seen(norms)
    mean = torch.where(enters, torch.lerp(history.mean, norms, 1 - gamma1), history.mean)
    blended = torch.hypot(math.sqrt(gamma2) * history.rms, math.sqrt(1 - gamma2) * norms)
    rms = torch.where(enters, blended, history.rms)
    steps = history.steps + enters
    if bias_correction:
        rho = mean / weight(gamma1, steps) / (rms / weight(gamma2, steps).sqrt() + eps)
    else:
        rho = mean / (rms + eps)
    return torch.where(enters, rho / norms, 1.0), NormHistory(mean, rms, steps)


def ada_clip(maxima: Tensor, ceiling: Ceiling, gamma: float) -> tuple[Tensor, Tensor, Ceiling]:  # (T,)
    """AdaClip: the limit of each tensor's coordinates, the factor of those above it, and the new ceiling."""
    enters = seen(maxima)
    mean = torch.where(enters, torch.lerp(ceiling.mean, maxima, 1 - gamma), ceiling.mean)
    steps = ceiling.steps + enters
    limits = mean / weight(gamma, steps)
    return (
        torch.where(enters, limits, torch.inf),
        torch.where(enters, limits / maxima, 1.0),
        Ceiling(mean, steps),
    )


def ratio_to_mean(norms: Tensor, history: NormHistory, gamma: float) -> Tensor:  # (T,)
    """R over the average of the norms before it: 1 at the first, 0 without a gradient, not finite where R is not."""
    first = torch.where(seen(norms), 1.0, norms)
    return torch.where(history.steps > 0, norms / (history.mean / weight(gamma, history.steps)), first)


def weight(gamma: float, steps: Tensor) -> Tensor:
    """1 - gamma^steps, what the weights of an average add up to; `expm1` because gamma is near 1."""
    return -torch.expm1(steps * math.log(gamma))


def supremum(step: int, gammas: tuple[float, float] = (0.6, 0.999)) -> float:
    """The largest rho that any norms can bring about in the given step (from 1), with bias correction."""
    gamma1, gamma2 = gammas
    q = gamma1**2 / gamma2
    spread = (1 - gamma1) ** 2 / (1 - gamma2) * (1 - q**step) / (1 - q)
    return math.sqrt(spread * (1 - gamma2**step)) / (1 - gamma1**step)


class GradStabilizer:
    """Gives every gradient a steady norm; call `step_()` after backward, before the optimizer.

    Args:
        params: parameters, (name, parameter) pairs or parameter groups.
        gammas: memory of the norm's mean and of its mean square.
        bias_correction: False is the paper's form.
        global_norm: one norm for all parameters together, instead of one for each.
        clip_gamma: memory of AdaClip's ceiling (0.999); None leaves AdaClip out.
        eps: added to the denominator of rho, in the unit of a norm.
    """

    def __init__(
        self,
        params: Params,
        gammas: tuple[float, float] = (0.6, 0.999),
        *,
        bias_correction: bool = True,
        global_norm: bool = False,
        clip_gamma: float | None = None,
        eps: float = 0.0,
    ) -> None:
        pair = isinstance(gammas, tuple | list) and len(gammas) == 2
        require(pair and all(map(is_decay, gammas)), "gammas must be two numbers in (0, 1)", gammas)
        require(gammas[0] ** 2 < gammas[1], "gammas must satisfy gamma1^2 < gamma2, or rho is not bounded", gammas)
        require(clip_gamma is None or is_decay(clip_gamma), "clip_gamma must be None or lie in (0, 1)", clip_gamma)
        require(is_number(eps) and eps >= 0, "eps must be a number of at least 0", eps)
        self._stabilize = partial(stabilize, gammas=gammas, bias_correction=bias_correction, eps=eps)
        self._gamma, self._clip_gamma, self._together = gammas[0], clip_gamma, global_norm
        self._gradients = Gradients(params)
        zeros = self._gradients.zeros(together=global_norm)
        self._history = NormHistory(zeros, zeros.clone(), zeros.clone())
        each = self._gradients.zeros()
        self._ceiling = Ceiling(each, each.clone())
        self.norms = zeros.clone()
        """Norms of the last step, after AdaClip and before scaling; 0 where there was no gradient."""
        self.scales = torch.ones_like(zeros)
        """What the gradients of the last step were multiplied by: rho over the norm."""
        self.ratio = zeros.clone()
        """Those norms over the average of the norms before them: how far the last step left its range."""

    @torch.no_grad()
    def step_(self) -> None:
        """Scale the gradients in place."""
        if self._clip_gamma is not None:
            maxima = self._gradients.maxima()
            limits, factors, self._ceiling = ada_clip(maxima, moved(self._ceiling, maxima.device), self._clip_gamma)
            self._gradients.shrink_(limits, factors)
        self.norms = self._gradients.norms(together=self._together)
        history = moved(self._history, self.norms.device)
        self.ratio = ratio_to_mean(self.norms, history, self._gamma)
        self.scales, self._history = self._stabilize(self.norms, history)
        self._gradients.scale_(self.scales)

    def state_dict(self) -> dict[str, Any]:
        """The averages as plain tensors; `ceiling` is None without AdaClip."""
        ceiling = None if self._clip_gamma is None else saved(self._ceiling)
        return {"norms": saved(self._history), "ceiling": ceiling}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from a saved state, bit for bit."""
        require(sorted(state_dict) == ["ceiling", "norms"], "the state has keys norms and ceiling", list(state_dict))
        if (state_dict["ceiling"] is None) != (self._clip_gamma is None):
            here, there = ("without", "with") if self._clip_gamma is None else ("with", "without")
            raise TrimtabError(
                f"clip_gamma must be as it was when the state was saved, got a state saved {there} AdaClip for a "
                f"transform {here} it: build the transform with the same clip_gamma"
            )
        history = loaded(self._history, state_dict["norms"])
        if self._clip_gamma is not None:
            self._ceiling = loaded(self._ceiling, state_dict["ceiling"])
        self._history = history
