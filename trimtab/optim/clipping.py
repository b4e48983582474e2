# SPDX-License-Identifier: Apache-2.0
"""Clipping whose threshold learns from the norms so far: ZClip, AdaGC, AutoClip.

Clipping at a fixed norm needs the right number, and the right number falls as training goes on. These three read it
off the history. All work in place between backward and the optimizer, and clipping only ever shortens a gradient.

**ZClip** (arXiv 2504.02507) asks how many standard deviations z the norm n of all gradients lies above its mean:

    z = (n - mean) / (std + eps);   z <= 2.5: nothing.   z > 2.5: clip to  mean + 2.5^2 / z * std
    then, with n the clipped norm:   mean <- a*mean + (1-a)*n;   var <- a*var + (1-a)*(n - mean)^2,   a = 0.97

The further out, the harder: z = 5 is clipped to 1.25 standard deviations above the mean, z = 100 to 0.06. The first
25 norms are not clipped and give the first mean and (population) variance. As in the authors' code the variance uses
the mean that was just updated. Their code also clips at a fixed norm of 1.0 by default; here that is `max_norm`, off
by default, and as there it does not touch the statistics.

**AdaGC** (arXiv 2502.11034) gives each tensor its own threshold, a multiple of the average of its *clipped* norms:

    scale = min(1, 1.05 * gamma / |g|);   gamma <- 0.98*gamma + 0.02*scale*|g|

In a tensor's first 100 steps all are clipped together at the total norm 1.0, and gamma is the smallest clipped norm.
Afterwards a threshold can fall as fast as the norms do and rise by 0.1 % a step at most (0.02 * 0.05): a tensor whose
gradient grows for good, or that was unusually quiet in its warm-up, is held back for long. That is the method.

**AutoClip** (arXiv 2007.14469) clips at a percentile of all norms so far, the present one included: with the paper's
10, nine steps in ten are shortened. The percentile interpolates as numpy's does. Memory is bounded: the last
`window` norms are kept (10,000: for that many steps exactly the paper), sorted anew in every step.

Each function works on vectors; ZClip and AutoClip get a vector of one norm, all gradients together, unless
`per_tensor=True`. Zero and non-finite norms stay outside, as `transform` says. An AdaGC step whose total is not finite
leaves the tensors that are still in their warm-up alone.

Sources: bluorion-com/ZClip `zclip/zclip.py`; the update rule in PaddlePaddle/PaddleFleet `Research/AdaGC/README.md`
and the warm-up as in pytorch_optimizer 4.1; pseeth/autoclip `autoclip.py`.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trimtab.checks import is_number, is_positive, is_whole, meant, require
from trimtab.errors import TrimtabError
from trimtab.optim.transform import Gradients, Params, is_decay, loaded, moved, saved, seen
from trimtab.shards import total_norm


class ZHistory(NamedTuple):
    """What ZClip remembers of the norms."""

    mean: Tensor
    std: Tensor
    """The root of the variance, kept because an FP32 square overflows from 1.8e19 on."""
    steps: Tensor


class Thresholds(NamedTuple):
    """What AdaGC remembers: gamma, and how many norms have entered."""

    gamma: Tensor
    steps: Tensor


class Window(NamedTuple):
    """What AutoClip remembers: the last norms, in a ring."""

    norms: Tensor  # (window, T)
    steps: Tensor  # (T,) int64


# Where a norm of z standard deviations above the mean is clipped to, in standard deviations above the mean.
MODES = {
    "reciprocal": lambda z, threshold: threshold**2 / z,
    "threshold": lambda z, threshold: torch.full_like(z, threshold),
    "mean": lambda z, threshold: torch.zeros_like(z),
}


def z_clip(
    norms: Tensor,  # (T,)
    history: ZHistory,
    *,
    alpha: float = 0.97,
    z_threshold: float = 2.5,
    warmup: int = 25,
    mode: str = "reciprocal",
    eps: float = 1e-6,
) -> tuple[Tensor, ZHistory]:
    """ZClip: the factor of each gradient and the history with the clipped norms in it."""
    enters, warming = seen(norms), history.steps < warmup
    z = (norms - history.mean) / (history.std + eps)
    clipped = torch.where((z > z_threshold) & ~warming, history.mean + MODES[mode](z, z_threshold) * history.std, norms)
    # In the warm-up the weight 1/n makes mean and variance those of all n norms (Welford); then they are averages.
    new = torch.where(warming, 1 / (history.steps + 1), 1 - alpha)
    away = clipped - history.mean
    spread = torch.where(warming, new.mul(1 - new).sqrt(), new.sqrt() * (1 - new)) * away
    return torch.where(enters, clipped / norms, 1.0), ZHistory(
        torch.where(enters, history.mean + new * away, history.mean),
        torch.where(enters, torch.hypot((1 - new).sqrt() * history.std, spread), history.std),
        history.steps + enters,
    )


def ada_gc(
    norms: Tensor,  # (T,)
    state: Thresholds,
    *,
    beta: float = 0.98,
    lambda_rel: float = 1.05,
    lambda_abs: float = 1.0,
    warmup: int = 100,
) -> tuple[Tensor, Thresholds]:
    """AdaGC: the factor of each gradient and the new thresholds."""
    total, warming = total_norm(norms), state.steps < warmup
    enters = seen(norms) & (torch.isfinite(total) | ~warming)
    together = (lambda_abs / total).clamp(max=1.0)
    alone = (lambda_rel * state.gamma / norms).clamp(max=1.0)
    scales = torch.where(warming, together, alone)
    clipped = scales * norms
    least = torch.where(state.steps > 0, torch.minimum(state.gamma, clipped), clipped)
    gamma = torch.where(warming, least, torch.lerp(state.gamma, clipped, 1 - beta))
    return (
        torch.where(enters, scales, 1.0),
        Thresholds(torch.where(enters, gamma, state.gamma), state.steps + enters),
    )


def auto_clip(norms: Tensor, window: Window, *, percentile: float = 10.0) -> tuple[Tensor, Window]:  # (T,)
    """AutoClip: the factor of each gradient and the window with these norms in it."""
    enters = seen(norms)
    size = len(window.norms)
    slot = (window.steps % size).unsqueeze(0)
    entry = torch.where(enters, norms, window.norms.gather(0, slot).squeeze(0))
    ring = window.norms.scatter(0, slot, entry.unsqueeze(0))  # (window, T)
    steps = window.steps + enters
    filled = torch.arange(size, device=norms.device).unsqueeze(1) < steps  # (window, T)
    ordered = torch.where(filled, ring, torch.inf).sort(dim=0).values
    rank = (steps.clamp(1, size) - 1).to(norms.dtype) * (percentile / 100)
    below, above = (ordered.gather(0, at.long().unsqueeze(0)).squeeze(0) for at in (rank.floor(), rank.ceil()))
    limit = torch.lerp(below, above, rank.frac())
    return torch.where(enters, (limit / norms).clamp(max=1.0), 1.0), Window(ring, steps)


class ZClip:
    """Clips norms that lie too many standard deviations above their mean.

    Args:
        params: parameters, (name, parameter) pairs or parameter groups.
        alpha: memory of mean and variance.
        z_threshold: standard deviations above the mean from which on a norm is clipped.
        warmup: steps that only collect.
        mode: where to: "reciprocal" (z_threshold^2 / z), "threshold" (z_threshold) or "mean" (0 deviations).
        max_norm: a fixed limit on top, from the first step on; None for none.
        per_tensor: a history for each tensor, instead of one for all gradients together.
        eps: added to the standard deviation, in the unit of a norm.
    """

    def __init__(
        self,
        params: Params,
        *,
        alpha: float = 0.97,
        z_threshold: float = 2.5,
        warmup: int = 25,
        mode: str = "reciprocal",
        max_norm: float | None = None,
        per_tensor: bool = False,
        eps: float = 1e-6,
    ) -> None:
        require(is_decay(alpha), "alpha must lie in (0, 1)", alpha)
        require(is_positive(z_threshold), "z_threshold must be above 0", z_threshold)
        require(is_whole(warmup, 2), "warmup must be at least 2 steps, or there is no deviation", warmup)
        require(max_norm is None or is_positive(max_norm), "max_norm must be None or above 0", max_norm)
        require(is_positive(eps), "eps must be above 0", eps)
        if mode not in MODES:
            raise TrimtabError(f"mode must be one of {', '.join(MODES)}, got {mode!r}: {meant(mode, MODES)}")
        self._clip = partial(z_clip, alpha=alpha, z_threshold=z_threshold, warmup=warmup, mode=mode, eps=eps)
        self._max_norm, self._together = max_norm, not per_tensor
        self._gradients = Gradients(params)
        zeros = self._gradients.zeros(together=not per_tensor)
        self._history = ZHistory(zeros, zeros.clone(), zeros.clone())
        self.norms = zeros.clone()
        """Norms of the last step, before clipping."""
        self.scales = torch.ones_like(zeros)
        """What the gradients of the last step were multiplied by."""

    @torch.no_grad()
    def step_(self) -> None:
        """Clip the gradients in place."""
        self.norms = self._gradients.norms(together=self._together)
        self.scales, self._history = self._clip(self.norms, moved(self._history, self.norms.device))
        if self._max_norm is not None:
            fixed = torch.where(seen(self.norms), self._max_norm / self.norms, 1.0)
            self.scales = torch.minimum(self.scales, fixed)
        self._gradients.scale_(self.scales)

    def state_dict(self) -> dict[str, Any]:
        """The history as plain tensors."""
        return saved(self._history)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from a saved state, bit for bit."""
        self._history = loaded(self._history, state_dict)


class AdaGC:
    """Clips each tensor's gradient against the average of its own clipped norms.

    Args:
        params: parameters, (name, parameter) pairs or parameter groups.
        beta: memory of the average.
        lambda_rel: a tensor's limit, in averages.
        lambda_abs: the limit of the total norm during the warm-up.
        warmup: a tensor's first steps, which find its average.
    """

    def __init__(
        self,
        params: Params,
        *,
        beta: float = 0.98,
        lambda_rel: float = 1.05,
        lambda_abs: float = 1.0,
        warmup: int = 100,
    ) -> None:
        require(is_decay(beta), "beta must lie in (0, 1)", beta)
        require(is_number(lambda_rel) and lambda_rel > 1, "lambda_rel must be above 1: it caps growth", lambda_rel)
        require(is_positive(lambda_abs), "lambda_abs must be above 0", lambda_abs)
        require(is_whole(warmup, 1), "warmup must be at least 1 step, or there is no average", warmup)
        self._clip = partial(ada_gc, beta=beta, lambda_rel=lambda_rel, lambda_abs=lambda_abs, warmup=warmup)
        self._gradients = Gradients(params)
        zeros = self._gradients.zeros()
        self._state = Thresholds(zeros, zeros.clone())
        self.norms = zeros.clone()
        """Norms of the last step, before clipping."""
        self.scales = torch.ones_like(zeros)
        """What the gradients of the last step were multiplied by."""

    @torch.no_grad()
    def step_(self) -> None:
        """Clip the gradients in place."""
        self.norms = self._gradients.norms()
        self.scales, self._state = self._clip(self.norms, moved(self._state, self.norms.device))
        self._gradients.scale_(self.scales)

    def state_dict(self) -> dict[str, Any]:
        """The thresholds as plain tensors."""
        return saved(self._state)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from a saved state, bit for bit."""
        self._state = loaded(self._state, state_dict)


class AutoClip:
    """Clips at a percentile of the norms so far.

    Args:
        params: parameters, (name, parameter) pairs or parameter groups.
        percentile: in percent; the paper's 10 shortens nine steps in ten.
        window: how many norms to remember; FP32, for each tensor if `per_tensor`.
        per_tensor: a history for each tensor, instead of one for all gradients together.
    """

    def __init__(
        self, params: Params, *, percentile: float = 10.0, window: int = 10_000, per_tensor: bool = False
    ) -> None:
        require(is_number(percentile) and 0 <= percentile <= 100, "percentile must lie in [0, 100]", percentile)
        require(is_whole(window, 1), "window must be at least 1 norm", window)
        self._clip = partial(auto_clip, percentile=percentile)
        self._together = not per_tensor
        self._gradients = Gradients(params)
        zeros = self._gradients.zeros(together=not per_tensor)
        self._window = Window(zeros.repeat(window, 1), zeros.to(torch.int64))
        self.norms = zeros.clone()
        """Norms of the last step, before clipping."""
        self.scales = torch.ones_like(zeros)
        """What the gradients of the last step were multiplied by."""

    @torch.no_grad()
    def step_(self) -> None:
        """Clip the gradients in place."""
        self.norms = self._gradients.norms(together=self._together)
        self.scales, self._window = self._clip(self.norms, moved(self._window, self.norms.device))
        self._gradients.scale_(self.scales)

    def state_dict(self) -> dict[str, Any]:
        """The window as plain tensors."""
        return saved(self._window)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from a saved state, bit for bit."""
        self._window = loaded(self._window, state_dict)
