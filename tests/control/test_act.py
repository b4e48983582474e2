# SPDX-License-Identifier: Apache-2.0
"""Acting: a plan is applied whole, `running` overrides it for a while and gives it back, whatever happens inside."""

import numpy as np
import pytest
import torch
from torch import nn

import trimtab
from trimtab.control.act import apply
from trimtab.control.units import find_units


def build() -> nn.Sequential:
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))
    trimtab.convert_(model, "fp4", head="4")
    return model


def test_a_plan_is_a_full_state_and_not_a_diff() -> None:
    units = find_units(build())
    apply(units, np.array([True, False]))
    apply(units, np.array([False, True]))
    apply(units, np.array([False, True]))
    assert [unit.switch.high for unit in units if unit.switch] == [False, True]


def test_running_chooses_a_path_by_hand_and_restores_the_plan() -> None:
    model, x = build(), torch.randn(5, 8)
    units = find_units(model)
    apply(units, np.array([True, False]))
    planned = model(x)
    with trimtab.running(model, "high"):
        high = model(x)
        with trimtab.running(model, "low"):
            low = model(x)
        assert torch.equal(model(x), high)
        with trimtab.running(model, "plan"):
            assert torch.equal(model(x), planned)
    assert torch.equal(model(x), planned)
    assert not torch.equal(high, low)
    assert not torch.equal(high, planned)
    assert not torch.equal(low, planned)


def test_running_restores_the_plan_after_an_error() -> None:
    model = build()
    with pytest.raises(RuntimeError, match="inside"), trimtab.running(model, "high"):
        raise RuntimeError("inside")
    assert all(unit.switch.forced is None for unit in find_units(model) if unit.switch)


def test_an_unknown_path_is_refused_before_anything_changes() -> None:
    model = build()
    with pytest.raises(trimtab.TrimtabError, match="'middle'"), trimtab.running(model, "middle"):
        pass


def test_eval_mode_switches_nothing_by_itself() -> None:
    model, x = build(), torch.randn(5, 8)
    assert torch.equal(model.train()(x), model.eval()(x))
