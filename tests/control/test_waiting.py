# SPDX-License-Identifier: Apache-2.0
"""When the host waits: the same decisions just before the next forward, the same one step later, and bad steps skipped
by the optimizer on the device."""

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import trimtab
from trimtab import Controller, NonFiniteError, Policy, TrimtabError, convert_

POLICY = Policy(alpha=1.3, beta=1.5, alpha_warmup=None, max_high=2)
SIZES = [1, 1, 1, 9, 1, 1, 30, 1, 1, 1, 5, 1]
"""How large the loss of each step is."""


class Recorded:
    """A recorder that keeps what it was told."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, list[float], list[bool]]] = []

    def open_trace(self, *_: Any, **__: Any) -> None: ...

    def observe(self, step: int, norms: np.ndarray, seen: np.ndarray, high: np.ndarray, *_: Any, **__: Any) -> None:
        self.rows.append((step, norms.tolist(), high.tolist()))


def made(**options: Any) -> tuple[nn.Module, torch.optim.Optimizer, Controller, Recorded]:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))
    convert_(model, "fp4")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    told = Recorded()
    return model, optimizer, Controller(model, POLICY, optimizer=optimizer, recorder=told, **options), told


def run(model: nn.Module, optimizer: torch.optim.Optimizer, controller: Controller, sizes: list[float]) -> None:
    for turn, size in enumerate(sizes):
        x = torch.randn(8, 16, generator=torch.Generator().manual_seed(turn))
        (model(x).square().mean() * size).backward()
        controller.step()
        optimizer.step()
        optimizer.zero_grad()


def weights(model: nn.Module) -> list[torch.Tensor]:
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("clip", [False, True])
def test_waiting_for_the_forward_changes_no_bit_of_a_run(clip):
    ends = []
    for wait in ("step", "forward"):
        model, optimizer, controller, told = made(wait=wait)
        if clip:
            plain = controller.step
            controller.step = lambda c=controller, p=plain: (p(), c.clip_grad_norm_(0.5))[0]  # type: ignore[method-assign]
        run(model, optimizer, controller, SIZES)
        controller.settle()
        ends.append((weights(model), told.rows, controller.state_dict()["step"]))
    (one, rows, steps), (other, later, more) = ends
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    assert rows == later
    assert any(any(high) for _, _, high in rows)
    assert steps == more == len(SIZES)


def test_a_plan_is_made_when_the_next_forward_reads_its_first_switch():
    model, optimizer, controller, told = made(wait="forward")
    run(model, optimizer, controller, [1, 1, 1])
    (model(torch.randn(8, 16)).square().mean() * 100).backward()
    controller.step()
    assert len(told.rows) == 3  # the fourth is on its way
    assert controller.plan.step == 3
    with trimtab.running(model, "high"), torch.no_grad():
        model(torch.randn(2, 16))
    assert controller.plan.step == 3  # a forced path does not ask
    model(torch.randn(2, 16))
    assert controller.plan.step == 4
    assert len(told.rows) == 4
    assert controller.plan.num_high > 0
    assert [m.switch.planned for m in model] == controller.plan.mask.tolist()


def test_never_decides_the_same_one_step_later():
    rows = {}
    for wait in ("step", "never"):
        model, optimizer, controller, told = made(wait=wait)
        optimizer.param_groups[0]["lr"] = 0.0
        for linear in model:  # weights stand still and both paths are one: norms do not depend on who is high
            linear.recipe = trimtab.Recipe(low=linear.recipe.high, high=linear.recipe.high)
        run(model, optimizer, controller, SIZES)
        controller.settle()
        rows[wait] = told.rows
    assert [norms for _, norms, _ in rows["step"]] == [norms for _, norms, _ in rows["never"]]
    high = {wait: [high for _, _, high in found] for wait, found in rows.items()}
    assert any(map(any, high["step"]))
    assert high["never"][1:] == high["step"][:-1]


@pytest.mark.parametrize("wait", ["forward", "never"])
def test_a_step_that_is_not_finite_is_skipped_on_the_device_and_training_goes_on(wait):
    model, optimizer, controller, _ = made(wait=wait)
    run(model, optimizer, controller, [1, 1])
    before, state = weights(model), copy.deepcopy(optimizer.state_dict()["state"])
    run(model, optimizer, controller, [float("nan")])
    assert all(torch.equal(a, b) for a, b in zip(before, weights(model), strict=True))
    after = optimizer.state_dict()["state"]
    assert all(torch.equal(state[k][name], after[k][name]) for k in state for name in state[k])
    run(model, optimizer, controller, [1, 1])
    controller.settle()
    assert not torch.equal(before[0], weights(model)[0])
    assert all(p.isfinite().all() for p in weights(model))
    assert controller.steps == 5


@pytest.mark.parametrize("wait", ["forward", "never"])
def test_too_many_bad_steps_stop_the_run_here_too(wait):
    model, optimizer, controller, _ = made(wait=wait)
    with pytest.raises(NonFiniteError, match="not finite for 10 steps in a row"):
        run(model, optimizer, controller, [float("nan")] * 13)


def test_a_checkpoint_between_step_and_forward_loses_nothing():
    one, other = made(wait="forward"), made(wait="forward")
    run(*one[:3], SIZES)
    run(*other[:3], SIZES[:6])
    model, optimizer, controller, told = made(wait="forward")
    model.load_state_dict(other[0].state_dict())
    optimizer.load_state_dict(other[1].state_dict())
    controller.load_state_dict(other[2].state_dict())
    for turn, size in enumerate(SIZES[6:], 6):
        x = torch.randn(8, 16, generator=torch.Generator().manual_seed(turn))
        (model(x).square().mean() * size).backward()
        controller.step()
        optimizer.step()
        optimizer.zero_grad()
    assert all(torch.equal(a, b) for a, b in zip(weights(one[0]), weights(model), strict=True))
    controller.settle()
    one[2].settle()
    assert told.rows == one[3].rows[6:]


def test_a_copied_model_does_not_take_the_controller_along():
    model, optimizer, controller, _ = made(wait="forward")
    run(model, optimizer, controller, [1, 1])
    twin = copy.deepcopy(model)
    assert all(m.switch.pending is None for m in twin)
    assert all(m.switch.pending is not None for m in model)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"wait": "later"}, "wait must be one of step, forward, never, got 'later'"),
        ({"wait": "forward"}, "got none: make them fused"),
        ({"wait": "never", "optimizer": "plain"}, r"got \['AdamW'\]: make them fused"),
        ({"wait": "forward", "policy": POLICY.replace(replay_step=3.0), "optimizer": "fused"}, "replay_step must know"),
    ],
)
def test_what_cannot_work_is_refused(options, message):
    model = nn.Sequential(nn.Linear(16, 16))
    convert_(model, "fp8")
    options = {"policy": POLICY, **options}
    if "optimizer" in options:
        options["optimizer"] = torch.optim.AdamW(model.parameters(), fused=options["optimizer"] == "fused")
    with pytest.raises(TrimtabError, match=message):
        Controller(model, **options)


def test_an_observer_needs_no_optimizer_and_waits_for_nobody():
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    controller = Controller(model, POLICY, mode="observe", units="linear", wait="never")
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    run(model, optimizer, controller, SIZES)
    assert controller.steps == len(SIZES) - 1
    controller.settle()
    assert controller.steps == len(SIZES)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_step_on_a_gpu_waits_for_nothing(no_waits):
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)).cuda()
    convert_(model, "fp8", backend="emulated")
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    controller = Controller(model, POLICY, wait="never", optimizer=optimizer)
    x = torch.randn(8, 64, device="cuda")
    for turn in range(4):
        model(x).square().mean().backward()
        if turn < 2:
            controller.step()
        else:
            with no_waits():
                controller.step()
                controller.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
