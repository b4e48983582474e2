# SPDX-License-Identifier: Apache-2.0
"""Skip a step: drop an update whose gradient, or whose loss, is far above those before it.

Clipping shortens a bad gradient and still follows its direction. OLMo trains with the plainer rule of taking no step
at all where the loss or the norm of all gradients is an outlier among the last 128:

    drop  if  norm > mean + 6 std   or   loss > mean + 6 std       of the last 128 values, this one not included

The first 64 values only collect. Every finite value enters the window, a dropped one too: a level that rises for good
is then accepted after a while, because its own values widen the deviation. The deviation is that of a sample (n - 1).

    skip = SkipStep(model.parameters())
    loss.backward()
    skip.step_(loss)                 # without the loss: by the norm alone
    optimizer.step()                 # does nothing where the step was dropped

To drop is to set the gradients to None: weights, moments and their counts all stay as they were, which a zero gradient
would not do. That needs an answer on the host, so this transform, unlike the others, waits for the device once a step.
A norm or a loss that is not finite is dropped from the first step on, and enters no window. A norm of zero (all
parameters without a gradient, or an all-zero one) says nothing, and such a step leaves the norms' window as it was.
With several ranks give the loss averaged over them, or they will not agree.

Source of the rule: allenai/OLMo-core `src/olmo_core/optim/skip_step_optimizer.py`, where the present value counts among
the 64, so that it begins one step earlier.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trimtab.checks import is_positive, is_whole, require
from trimtab.optim.transform import LEAST_NORM, Gradients, Params, loaded, saved


class Recent(NamedTuple):
    """The last values of K series, each in a ring, and how many have entered; on the host."""

    values: Tensor  # (window, K) float64
    steps: Tensor  # (K,) int64


def skip_step(
    values: Tensor,  # (K,) float64
    given: Tensor,  # (K,) bool
    recent: Recent,
    *,
    sigmas: float = 6.0,
    warmup: int = 64,
) -> tuple[Tensor, Recent]:
    """Which of K values are outliers of their own series, and the series with them in it."""
    size = len(recent.values)
    filled = torch.arange(size).unsqueeze(1) < recent.steps  # (window, K)
    count = recent.steps.clamp(max=size)
    mean = torch.where(filled, recent.values, 0.0).sum(dim=0) / count.clamp(min=1)
    squares = torch.where(filled, (recent.values - mean).square(), 0.0).sum(dim=0)
    limit = mean + sigmas * (squares / (count - 1).clamp(min=1)).sqrt()
    finite = torch.isfinite(values)
    drop = given & (~finite | ((values > limit) & (count >= warmup)))
    enters = given & finite
    slot = (recent.steps % size).unsqueeze(0)
    entry = torch.where(enters, values, recent.values.gather(0, slot).squeeze(0))
    return drop, Recent(recent.values.scatter(0, slot, entry.unsqueeze(0)), recent.steps + enters)


class SkipStep:
    """Drops the gradients of a step whose norm, or whose loss, is an outlier among the last ones.

    Args:
        params: parameters, (name, parameter) pairs or parameter groups.
        sigmas: standard deviations above the mean from which on a step is dropped.
        window: how many values to remember.
        warmup: how many values to collect before any step is dropped for its size.
    """

    def __init__(self, params: Params, *, sigmas: float = 6.0, window: int = 128, warmup: int = 64) -> None:
        require(is_positive(sigmas), "sigmas must be above 0", sigmas)
        require(is_whole(warmup, 2), "warmup must be at least 2 values, or there is no deviation", warmup)
        require(is_whole(window, warmup), f"window must hold at least the warmup of {warmup} values", window)
        self._skip = partial(skip_step, sigmas=float(sigmas), warmup=warmup)
        self._gradients = Gradients(params)
        self._recent = Recent(torch.zeros(window, 2, dtype=torch.float64), torch.zeros(2, dtype=torch.int64))
        self.skipped = False
        """Whether the last step was dropped."""
        self.nonfinite = False
        """Whether it was dropped because norm or loss was not finite."""

    @torch.no_grad()
    def step_(self, loss: float | Tensor | None = None) -> bool:
        """Set the gradients to None if this step is an outlier; says whether it was."""
        self.skipped = self.nonfinite = False
        if all(param.grad is None for param in self._gradients.params):  # dropped already: there was no step
            return False
        norm = float(self._gradients.norms(together=True))
        values = torch.tensor([norm, 0.0 if loss is None else float(loss)], dtype=torch.float64)
        given = torch.tensor([not norm < LEAST_NORM, loss is not None])
        drop, self._recent = self._skip(values, given, self._recent)
        self.skipped, self.nonfinite = bool(drop.any()), not bool(values.isfinite().all())
        if self.skipped:
            for param in self._gradients.params:
                param.grad = None
        return self.skipped

    def state_dict(self) -> dict[str, Any]:
        """The window as plain tensors."""
        return saved(self._recent)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from a saved state, bit for bit."""
        self._recent = loaded(self._recent, state_dict)
