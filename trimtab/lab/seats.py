# SPDX-License-Identifier: Apache-2.0
"""Who else fills the seats of a run: the settings `selection` and `fixed_high`, as selections.

    selection=round_robin, top_norm   the policy's whole budget in every step
    selection=by_lot                  the same, drawn with chances in proportion to the detector's risk
    selection=oracle                  in every step the units with the largest recovery gaps, measured exactly
    fixed_high=["blocks.0.*"]         these always, beside those chosen; with policy.max_high=0 these alone
    fixed_high=ends                   the first 2/62 and the last 8/62 of the blocks, at least one each

The last is the static rule with which NVFP4 was trained on 62 blocks (arXiv 2509.25149). On few blocks "at least one
each" is much: with 4 blocks half of the model, with 2 all of it. The promotion beside each result says so.

The oracle is no method, it is what one could reach: it measures on the very batch that a step is about to train on
(`recovery_gaps`, U + 2 passes more), so that it sees a fault before it strikes, and leaves seats empty only where
recovery would make the gradient worse.
"""

from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from trimtab.checks import meant
from trimtab.control.advance import Verdict
from trimtab.control.selections import ByLot, Fixed, RoundRobin, Selection, TopNorm
from trimtab.control.units import Unit
from trimtab.control.values import Bools
from trimtab.errors import TrimtabError
from trimtab.lab.config import ENDS, Settings
from trimtab.lab.diagnose import recovery_gaps
from trimtab.modules import block_of

FIRST, LAST = 2 / 62, 8 / 62


def build_selection(
    config: Settings, units: tuple[Unit, ...], given: Selection | None, norms: Callable[[], NDArray[np.float32]]
) -> Selection | None:
    """What chooses instead of the policy, or beside it; None where the policy alone does.

    Args:
        given: a selection from outside of the settings.
        norms: gives the norms of the step that is being judged.
    """
    if given is not None and config.selection != "policy":
        raise TrimtabError(f"a run has one selection, got one and selection={config.selection}: give one of them")
    recoverable = np.array([unit.recoverable for unit in units], bool)
    budget = config.build_policy().resolve(int(recoverable.sum()), config.steps).max_high
    chosen = given
    if config.selection == "round_robin":
        chosen = RoundRobin(budget, recoverable)
    elif config.selection == "by_lot":
        chosen = ByLot(budget, recoverable, seed=config.seed)
    elif config.selection == "oracle":
        chosen = Oracle(budget, units)
    elif config.selection == "top_norm":
        chosen = TopNorm(budget, recoverable, norms)
    return Fixed(fixed_mask(config.fixed_high, [u.name for u in units]), chosen) if config.fixed_high else chosen


class Oracle:
    """Seats the units with the largest recovery gaps on a batch, before the step that trains on it."""

    def __init__(self, count: int, units: tuple[Unit, ...]) -> None:
        self._count, self._units = count, units

    def __call__(self, step: int, verdict: Verdict) -> Bools:
        """From a step that is over it chooses nobody: `choose` looks at the next one when it comes."""
        return np.zeros_like(verdict.choice.high[0])

    def choose(self, model: nn.Module, batches: Sequence[tuple[Tensor, Tensor]]) -> Bools:
        """Whom to run high for these micro-batches."""
        gaps = recovery_gaps(model, batches, _mean_loss, units=self._units)
        order = np.argsort(-gaps, kind="stable")[: self._count]
        mask = np.zeros(len(gaps), bool)
        mask[order[gaps[order] > 0]] = True
        return mask


def _mean_loss(model: nn.Module, batches: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    losses = [model(inputs, targets).loss / len(batches) for inputs, targets in batches]
    return torch.stack(losses).sum()


def fixed_mask(patterns: str | Sequence[str], names: Sequence[str]) -> Bools:
    """Which units are named by patterns, or lie in the first and last blocks; a pattern that names none raises."""
    if patterns == ENDS:
        return _ends(names)
    mask = np.zeros(len(names), bool)
    for pattern in patterns:
        found = np.array([name == pattern or fnmatchcase(name, pattern) for name in names], bool)
        if not found.any():
            raise TrimtabError(f"fixed_high must name units, {pattern!r} matches none: {meant(pattern, names)}")
        mask |= found
    return mask


def _ends(names: Sequence[str]) -> Bools:
    blocks = list(dict.fromkeys(block for name in names if (block := block_of(name)) is not None))
    if not blocks:
        raise TrimtabError(f"fixed_high={ENDS} needs units inside of numbered blocks, got {list(names)[:3]}: name them")
    first, last = (max(1, round(share * len(blocks))) for share in (FIRST, LAST))
    kept = {*blocks[:first], *blocks[-last:]}
    return np.array([block_of(name) in kept for name in names], bool)
