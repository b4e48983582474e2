# SPDX-License-Identifier: Apache-2.0
"""Events: who went high or back and why, who was denied (once), who keeps coming back, and the one line about a budget
that is always full, with its numbers. Gradients are set directly, so that every cause is known."""

import dataclasses
import json
import logging
import re

import numpy as np
import pytest
import torch
from torch import nn

import trimtab
from trimtab import Controller, Event, Policy
from trimtab.control.units import Switch
from trimtab.control.values import KINDS

RATIO = {"alpha": 1.5, "alpha_warmup": None, "beta": None, "lock_steps": 1}
OFFENDED = RATIO | {"max_high": 1, "history": "exclude_triggered", "max_freeze": 999}
OFFENDED |= {"repeat_within": 4, "persistent_after": 3}
NAN = float("nan")


def build(policy: Policy, units: int = 3, **options: object) -> tuple[nn.ModuleList, Controller, list[Event]]:
    model = nn.ModuleList(nn.Linear(2, 2, bias=False) for _ in range(units + 1))  # the last lies outside every unit
    for i, module in enumerate(model[:-1]):
        module.switch = Switch(f"u{i}", roots=(module,))
    events: list[Event] = []
    return model, Controller(model, policy, on_event=events.append, **options), events  # type: ignore[arg-type]


def drive(model: nn.ModuleList, controller: Controller, rows: list[list[float]], outside: float = 0.0) -> None:
    for row in rows:
        for module, norm in zip(model, [*row, outside], strict=True):
            module.weight.grad = torch.tensor([[norm, 0.0], [0.0, 0.0]])
        controller.step()


def told(events: list[Event], *kinds: str) -> list[tuple]:
    return [(e.step, e.kind, e.unit, e.cause) for e in events if not kinds or e.kind in kinds]


def test_a_unit_says_when_and_why_it_goes_high_and_how_it_comes_back() -> None:
    model, controller, events = build(Policy(**RATIO, max_high=1))
    drive(model, controller, [[1, 1, 1], [1, 1, 1], [1, 6, 1], [1, 1, 1], [1, 1, 1], [1, 1, 1]])
    assert told(events) == [(3, "high", "u1", "ratio"), (5, "low", "u1", "quiet")]
    high = events[0]
    assert (high.ratio, high.risk) == (pytest.approx(6), pytest.approx(4))
    assert high.message == "u1  6x its history -> high"
    assert "u1  quiet -> low" in events[1].message


def test_the_jump_is_named_where_it_is_the_cause() -> None:
    model, controller, events = build(Policy(alpha=100.0, alpha_warmup=None, beta=1.5, window=3, max_high=1))
    drive(model, controller, [[1, 1, 1]] * 4 + [[1, 1, 5]])
    assert told(events) == [(5, "high", "u2", "jump")]
    assert events[0].jump == pytest.approx(5)
    assert "its last 3 steps" in events[0].message


def test_an_evicted_unit_says_so() -> None:
    model, controller, events = build(Policy(**(RATIO | {"lock_steps": 5}), max_high=1))
    drive(model, controller, [[1, 1, 1], [6, 1, 1], [1, 1, 9]])
    assert told(events)[1:] == [(3, "high", "u2", "ratio"), (3, "low", "u0", "evicted")]


def test_a_denied_unit_says_so_once_for_as_long_as_it_is_denied() -> None:
    model, controller, events = build(Policy(**RATIO, max_high=1, history="exclude_triggered"))
    drive(model, controller, [[1, 1, 1], [9, 5, 1], [9, 5, 1], [9, 5, 1], [9, 1, 1], [9, 5, 1]])
    assert told(events, "denied") == [(2, "denied", "u1", "ratio"), (6, "denied", "u1", "ratio")]
    assert "denied, the budget of 1 is full" in next(e for e in events if e.kind == "denied").message


def test_a_steady_state_is_silent() -> None:
    model, controller, events = build(Policy(**(RATIO | {"lock_steps": 50}), max_high=1))
    drive(model, controller, [[1, 1, 1], [9, 1, 1]] + [[1, 1, 1]] * 30)
    assert told(events) == [(2, "high", "u0", "ratio")]


def test_a_non_finite_gradient_names_the_units_that_brought_it(caplog: pytest.LogCaptureFixture) -> None:
    model, controller, events = build(Policy(**RATIO, max_high=3))
    with caplog.at_level(logging.WARNING, "trimtab"):
        drive(model, controller, [[1, 1, 1], [1, NAN, NAN]])
    assert told(events)[0] == (2, "nonfinite", "u1", "nonfinite")
    assert "2 of 3 units, first u1" in events[0].message
    assert "skipped" in events[0].message
    assert {e[2] for e in told(events, "high")} == {"u1", "u2"}
    assert {e[3] for e in told(events, "high")} == {"nonfinite"}
    assert "step 2: the gradient is not finite" in caplog.text


def test_a_non_finite_gradient_outside_every_unit_says_that() -> None:
    model, controller, events = build(Policy(**RATIO, max_high=3))
    drive(model, controller, [[1, 1, 1]], outside=NAN)
    assert told(events) == [(1, "nonfinite", None, "nonfinite")]
    assert "parameters outside every unit" in events[0].message


def test_an_observed_non_finite_gradient_is_not_said_to_be_skipped() -> None:
    model, controller, events = build(Policy(**RATIO, max_high=3), mode="observe")
    drive(model, controller, [[1, NAN, 1]])
    assert events[0].kind == "nonfinite"
    assert "skipped" not in events[0].message


def test_a_batch_to_be_run_again_says_so() -> None:
    model, controller, events = build(Policy(**RATIO, max_high=1, replay_step=5.0))
    drive(model, controller, [[1, 1, 1], [1, 90, 1]])
    assert told(events)[0][:2] == (2, "rerun")
    assert told(events)[1] == (2, "high", "u1", "ratio")


def test_a_persistent_offender_is_named_once() -> None:
    policy = Policy(
        **RATIO, max_high=1, history="exclude_triggered", max_freeze=999, repeat_within=4, persistent_after=3
    )
    model, controller, events = build(policy)
    drive(model, controller, [[1, 1, 1]] + [[8, 1, 1], [1, 1, 1], [1, 1, 1]] * 8)
    assert told(events, "persistent") == [(11, "persistent", "u0", "")]  # its fourth trigger is its third repeat
    (event,) = [e for e in events if e.kind == "persistent"]
    assert "within 4 steps of its release 3 times in a row" in event.message


def test_a_unit_that_triggers_now_and_then_is_no_persistent_offender() -> None:
    policy = Policy(
        **RATIO, max_high=1, history="exclude_triggered", max_freeze=999, repeat_within=4, persistent_after=3
    )
    model, controller, events = build(policy)
    drive(model, controller, [[1, 1, 1]] + ([[8, 1, 1]] + [[1, 1, 1]] * 8) * 8)
    assert len(told(events, "high")) == 8
    assert not told(events, "persistent")


def flat_noise(steps: int, units: int = 3) -> list[list[float]]:
    return np.exp(np.random.default_rng(0).normal(0, 0.3, (steps, units))).tolist()


def test_a_full_budget_is_told_once_with_its_numbers() -> None:
    model, controller, events = build(Policy(alpha=1.1, alpha_warmup=None, beta=1.5, max_high=1))
    rows = flat_noise(600)
    drive(model, controller, rows)
    (event,) = [e for e in events if e.kind == "budget_full"]
    assert event.step == 200
    d = trimtab.replay(np.array(rows[:200]), controller.policy)
    median = float(np.median(d.ratio.astype(np.float32)))
    assert f"full on {d.high.any(axis=1).sum()} of the last 200 steps" in event.message
    assert f"The median ratio here is {median:.2f}" in event.message
    assert f"alpha=1.1 asks for {1.1 / median:.2f} times" in event.message
    alpha, beta = (float(x) for x in re.search(r"Policy\(alpha=([\d.]+), beta=([\d.]+)\)", event.message).groups())
    offered = Policy(alpha=alpha * 1.01, alpha_warmup=None, beta=beta * 1.01, max_high=1)  # 1.01: printed digits
    assert trimtab.replay(np.array(rows[:200]), offered).alarmed.sum() <= 4


def full_under(detector: str, **thresholds: object) -> tuple[Event | None, np.ndarray]:
    """The line about a full budget under a detector, and the ratios of those steps."""
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    trimtab.convert_(model, "fp8")
    policy = Policy(alpha_warmup=None, max_high=1, window=2, lock_steps=4, **thresholds)  # type: ignore[arg-type]
    events: list[Event] = []
    controller = Controller(model, policy, detector=detector, on_event=events.append)
    optimizer, rows = torch.optim.Adam(model.parameters(), lr=1e-4), []
    for _ in range(200):
        for _ in range(2):
            model(torch.randn(4, 8)).square().mean().backward()
        controller.step()
        optimizer.step()
        optimizer.zero_grad()
        assert controller.reading is not None
        rows.append(controller.reading.columns)
    columns = {name: np.array([row[name] for row in rows]) for name in rows[0]}
    found = trimtab.replay(columns.pop("norm"), policy, detector=detector, columns=columns)
    return next((e for e in events if e.kind == "budget_full"), None), found.ratio


@pytest.mark.parametrize("detector", ["zscore", "jacobian", "gsnr", "snr", "source", "gap"])
def test_a_ratio_that_is_no_norm_is_not_called_one_and_has_no_jump(detector: str) -> None:
    event, ratios = full_under(detector, alpha=0.05, beta=1.05)
    assert event is not None
    peaks = ratios.max(axis=1)
    assert f"ratio ({detector}) above {np.median(peaks.astype(np.float32)):.2f}, and alpha is 0.05" in event.message
    assert "norm" not in event.message
    assert "beta" not in event.message
    alpha = float(re.search(r"no ratio here exceeds Policy\(alpha=([\d.]+)\), spikes apart", event.message)[1])  # type: ignore[index]
    assert alpha > 0.05
    assert (peaks > alpha * 1.01).mean() < 0.05  # 1.01: printed digits


@pytest.mark.parametrize(
    ("detector", "usual"), [("relative", "usual norm beside the others'"), ("update", "usual update")]
)
def test_a_ratio_against_a_units_own_mean_says_of_what(detector: str, usual: str) -> None:
    event, ratios = full_under(detector, alpha=0.1, beta=1.05)
    assert event is not None
    median = np.median(ratios[np.isfinite(ratios) & (ratios > 0)].astype(np.float32))
    assert f"alpha=0.1 asks for {0.1 / median:.2f} times a unit's {usual}; " in event.message
    assert re.search(r"Policy\(alpha=[\d.]+, beta=[\d.]+\) would have stayed quiet", event.message)
    without, _ = full_under(detector, alpha=0.1, beta=None)
    assert without is not None
    assert re.search(r"Policy\(alpha=[\d.]+\) would have stayed quiet", without.message)


def test_a_detector_that_is_asked_to_fill_the_budget_is_not_told_that_it_is_full() -> None:
    assert full_under("gnmr", alpha=0.1, beta=1.05)[0] is not None
    assert full_under("gnmr:full", alpha=0.1, beta=1.05)[0] is None


def test_advice_never_lowers_a_threshold() -> None:
    model, controller, events = build(Policy(alpha=50.0, alpha_warmup=None, beta=1.1, max_high=1))
    drive(model, controller, flat_noise(200))
    (jumps,) = [e.message for e in events if e.kind == "budget_full"]
    assert re.search(r"Policy\(alpha=50, beta=[2-9][\d.]*\)", jumps)
    model, controller, events = build(Policy(**(RATIO | {"lock_steps": 60, "beta": 1.5}), max_high=1))
    drive(model, controller, ([[1, 1, 1]] * 49 + [[1, 1, 30]]) * 4)  # four spikes, each with a long lock
    (locks,) = [e.message for e in events if e.kind == "budget_full"]
    assert "look for spikes, norms that are not finite, or long locks" in locks
    assert "Policy(" not in locks


def test_a_budget_that_is_not_full_is_not_mentioned() -> None:
    model, controller, events = build(Policy(**RATIO, max_high=3))
    drive(model, controller, flat_noise(500))
    assert told(events, "high")
    assert not told(events, "budget_full")


@pytest.mark.parametrize("mode", ["act", "observe"])
def test_dead_units_do_not_break_the_line_about_the_budget(mode: str) -> None:
    policy = Policy(alpha=1.1, alpha_warmup=None, max_high=1, history="exclude_triggered", max_freeze=9999)
    model, controller, events = build(policy, mode=mode)
    drive(model, controller, [[1, 1, 1], *[[9, 0, 0]] * 260])  # two of three ratios are zero
    assert len(told(events, "budget_full")) == 1


@pytest.mark.parametrize("good", [0, 30, 60])
def test_mostly_broken_steps_do_not_break_the_line_about_the_budget(good: int) -> None:
    model, controller, events = build(Policy(**RATIO, max_high=1), mode="observe")
    drive(model, controller, [[1, 1, 1]] * good + [[NAN] * 3] * 400)
    assert len(told(events, "budget_full")) == (good > 0)


def test_an_extreme_ratio_is_told_without_a_warning() -> None:
    model, controller, events = build(Policy(**(RATIO | {"beta": 1.5}), max_high=1, window=2))
    drive(model, controller, [[1e-8, 1, 1], [0, 1, 1], [0, 1, 1], [1e30, 1, 1]])
    assert told(events)[-1][1:3] == ("high", "u0")


def test_events_are_frozen_and_of_a_known_kind() -> None:
    model, controller, events = build(Policy(alpha=1.1, alpha_warmup=None, max_high=1, replay_step=3.0))
    drive(model, controller, [*flat_noise(250), [1, NAN, 1], [1, NAN, 1]])
    assert {event.kind for event in events} <= set(KINDS)
    assert len({event.kind for event in events}) >= 5
    with pytest.raises(dataclasses.FrozenInstanceError):
        events[0].unit = "other"  # type: ignore[misc]


class Lines:
    def __init__(self) -> None:
        self.events: list[dict] = []

    def open_trace(self, units: list[str], **header: object) -> None: ...

    def observe(self, step, norms, seen, high, grad_norm, events) -> None:  # type: ignore[no-untyped-def]
        self.events += events


def test_the_recorder_gets_the_same_story_as_plain_values() -> None:
    lines = Lines()
    model, controller, events = build(Policy(**RATIO, max_high=1), recorder=lines)
    drive(model, controller, [[1, 1, 1], [1, 6, 1], [1, 1, 1], [1, 1, 1], [1, 1, 1]])
    assert lines.events == [event.to_dict() for event in events]
    assert json.loads(json.dumps(lines.events[0]))["unit"] == "u1"
    assert set(lines.events[1]) == {"kind", "unit", "cause", "message"}  # what is not set is left out
