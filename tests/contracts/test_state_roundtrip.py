# SPDX-License-Identifier: Apache-2.0
"""The contract of every history and every option: ten steps equal five, a checkpoint saved and loaded by a fresh
controller, and five more, bit for bit: plans, switches, counts and the state itself."""

import io

import numpy as np
import pytest
import torch
from torch import nn

from trimtab import Controller, Plan, Policy
from trimtab.control.policy import HISTORIES, WARMUPS
from trimtab.control.units import Switch

UNITS = 5
BASE = Policy(alpha=1.2, max_high=2, window=3, span=4, max_freeze=2, warmup_steps=3, repeat_within=3)
OPTIONS = {
    "plain": {},
    "no jump": {"beta": None},
    "growing lock": {"lock_growth": 2.0, "lock_steps": 1},
    "guard": {"replay_step": 2.0},
    "guard and growing lock": {"replay_step": 2.0, "lock_growth": 1.5},
    "locked first": {"prefer_locked": True, "lock_steps": 3},
    "memory": {"memory": 3},
    "rebased": {"rebase_at": (3, 6)},
    "rebased under the guard": {"rebase_at": (4, 6), "replay_step": 2.0},
}


def build(policy: Policy) -> tuple[nn.ModuleList, Controller]:
    model = nn.ModuleList(nn.Linear(2, 2, bias=False) for _ in range(UNITS))
    for i, module in enumerate(model):
        module.switch = Switch(f"unit {i}", roots=(module,))
    return model, Controller(model, policy)


def drive(model: nn.ModuleList, controller: Controller, rows: np.ndarray) -> list[tuple]:
    """What is seen from outside after each pass."""
    seen = []
    for row in rows:
        for module, norm in zip(model, row.tolist(), strict=True):
            module.weight.grad = None if norm < 0 else torch.tensor([[norm, 0.0], [0.0, 0.0]])
        plan: Plan = controller.step()
        switches = [module.switch.high for module in model]
        seen.append((plan.step, plan.high, plan.nonfinite, plan.rerun, switches, controller.summary()))
    return seen


def norms(seed: int, passes: int) -> np.ndarray:
    """Noise with spikes, ties, zeros, NaN, and units without a gradient (-1)."""
    rng = np.random.default_rng(seed)
    out = np.exp(rng.normal(0, 0.6, (passes, UNITS)))
    out[:, 4] = out[:, 3]
    for value, share in ((0.0, 0.04), (np.nan, 0.05), (-1.0, 0.06)):
        out[rng.random(out.shape) < share] = value
    return out


def through_a_file(state: dict) -> dict:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def assert_same(one: object, two: object, path: str = "state") -> None:
    if isinstance(one, dict):
        assert isinstance(two, dict)
        assert list(one) == list(two), path
        for key in one:
            assert_same(one[key], two[key], f"{path}.{key}")
    elif isinstance(one, torch.Tensor):
        assert torch.equal(one, two), path  # type: ignore[arg-type]
    else:
        assert one == two, path


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("warmup", WARMUPS)
@pytest.mark.parametrize("history", HISTORIES)
def test_ten_steps_equal_five_a_checkpoint_and_five(history: str, warmup: str, option: str) -> None:
    policy = BASE.replace(history=history, warmup=warmup, **OPTIONS[option])
    rows = norms(HISTORIES.index(history), 10)
    model, whole = build(policy)
    wanted = drive(model, whole, rows)
    assert any(high for _, high, *_ in wanted)
    for cut in (0, 1, 5, 9):
        first_model, first = build(policy)
        before = drive(first_model, first, rows[:cut])
        second_model, second = build(policy)
        second.load_state_dict(through_a_file(first.state_dict()))
        after = drive(second_model, second, rows[cut:])
        np.testing.assert_equal(before + after, wanted)
        assert_same(second.state_dict(), whole.state_dict())


def test_the_guard_is_cut_between_its_two_passes_somewhere() -> None:
    policy = BASE.replace(replay_step=2.0)
    rows = norms(0, 40)
    model, whole = build(policy)
    wanted = drive(model, whole, rows)
    cuts = [i + 1 for i, (*_, rerun, _, _) in enumerate(wanted) if rerun]
    assert len(cuts) > 3
    for cut in cuts:
        first_model, first = build(policy)
        drive(first_model, first, rows[:cut])
        second_model, second = build(policy)
        second.load_state_dict(through_a_file(first.state_dict()))
        np.testing.assert_equal(drive(second_model, second, rows[cut:]), wanted[cut:])
