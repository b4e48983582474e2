# SPDX-License-Identifier: Apache-2.0
"""Who else fills the seats: patterns and ends name the right units, and the oracle seats those whose recovery makes the
gradient best."""

from typing import Any

import numpy as np
import pytest
from torch import nn

from trimtab.control.selections import Fixed, RoundRobin
from trimtab.control.units import find_units
from trimtab.errors import TrimtabError
from trimtab.lab.config import Config
from trimtab.lab.faults import Faults
from trimtab.lab.run import Run, Silent
from trimtab.lab.seats import Oracle, build_selection, fixed_mask

PARTS = ("attn.q", "mlp.up")
NORMS = np.ones(14, np.float32)


def linears(blocks: int) -> list[str]:
    return [f"blocks.{block}.{part}" for block in range(blocks) for part in PARTS]


@pytest.mark.parametrize(
    ("blocks", "high"),
    [
        (62, {0, 1, *range(54, 62)}),
        (24, {0, 21, 22, 23}),
        (8, {0, 7}),
        (2, {0, 1}),
    ],
)
def test_ends_are_nvfp4s_shares_of_the_blocks(blocks: int, high: set[int]) -> None:
    by_linear = fixed_mask("ends", linears(blocks)).reshape(blocks, len(PARTS))
    assert (by_linear.all(axis=1) == by_linear.any(axis=1)).all()
    assert set(np.flatnonzero(by_linear[:, 0])) == high
    assert set(np.flatnonzero(fixed_mask("ends", [f"blocks.{b}" for b in range(blocks)]))) == high


def test_patterns_name_units_and_one_that_names_none_is_refused() -> None:
    assert np.flatnonzero(fixed_mask(["blocks.1.*", "blocks.0.mlp.up"], linears(3))).tolist() == [1, 2, 3]
    assert fixed_mask(["a.*"], ["a.*", "b"]).tolist() == [True, False]  # a unit's own name may be a glob
    with pytest.raises(TrimtabError, match=r"fixed_high must name units, 'blocks.1.attn' matches none: did you mean"):
        fixed_mask(["blocks.1.attn"], linears(2))
    with pytest.raises(TrimtabError, match="ends needs units inside of numbered blocks"):
        fixed_mask("ends", ["a", "b"])


def test_settings_become_selections(small: dict[str, Any]) -> None:
    run = Run(Config.from_dict({**small, "steps": 1}), Silent())
    units = find_units(run.model)
    assert build_selection(run.config, units, None, lambda: NORMS) is None
    given = RoundRobin(1, np.ones(14, bool))
    assert build_selection(run.config, units, given, lambda: NORMS) is given
    assert isinstance(build_selection(run.config.replace(fixed_high="ends"), units, given, lambda: NORMS), Fixed)
    with pytest.raises(TrimtabError, match="a run has one selection"):
        build_selection(run.config.replace(selection="top_norm"), units, given, lambda: NORMS)


@pytest.mark.parametrize("split", [1, 2])
def test_the_oracle_seats_the_largest_gaps_and_leaves_the_model_as_it_was(small: dict[str, Any], split: int) -> None:
    run = Run(Config.from_dict({**small, "recipe": "fp4", "split": split}), Silent())
    faults = Faults(run.model, "blocks.1.mlp.up:grad_scale:start=1,size=64; blocks.0.attn.v:grad_scale:start=1,size=64")
    faults.at(1)
    run.step = 1
    units, batches = find_units(run.model), run._batches()
    names = [unit.name for unit in units]
    assert len(batches) == split
    mask = Oracle(2, units).choose(run.model, batches)
    assert {names[b] for b in np.flatnonzero(mask)} == {"blocks.1.mlp.up", "blocks.0.attn.v"}
    assert all(unit.switch is not None and unit.switch.forced is None and not unit.switch.planned for unit in units)
    assert all(p.grad is None for p in run.model.parameters())


def test_the_oracle_seats_nobody_whose_recovery_would_hurt(monkeypatch: pytest.MonkeyPatch) -> None:
    gaps = np.array([0.1, -2.0, 0.0, np.inf, 3.0])
    monkeypatch.setattr("trimtab.lab.seats.recovery_gaps", lambda *args, **options: gaps)
    for count, chosen in ((0, []), (1, [3]), (2, [3, 4]), (5, [0, 3, 4])):
        assert np.flatnonzero(Oracle(count, ()).choose(nn.Identity(), [])).tolist() == chosen
