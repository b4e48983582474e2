# SPDX-License-Identifier: Apache-2.0
"""State: what a checkpoint holds, what is refused and by which name, and that loading neither changes the caller's
dictionary nor depends on the order of the units. That a resumed run decides identically is a contract of its own."""

import copy
import io
import warnings
from typing import Any

import pytest
import torch
from torch import nn

from trimtab import Controller, Policy, TrimtabError
from trimtab.control.units import Switch

POLICY = Policy(alpha=1.3, alpha_warmup=None, max_high=2, history="window", span=4)
ROWS = [[1, 2, 1, 3], [1, 9, 1, 3], [2, 1, 8, 3], [1, 7, 1, 9], [4, 1, 1, 3], [1, 2, 9, 3]]


def build(policy: Policy = POLICY, names: str = "abcd", **options: object) -> tuple[nn.ModuleDict, Controller]:
    model = nn.ModuleDict({name: nn.Linear(2, 2, bias=False) for name in names})
    for name, module in model.items():
        module.switch = Switch(name, roots=(module,))
    return model, Controller(model, policy, **options)  # type: ignore[arg-type]


def drive(model: nn.ModuleDict, controller: Controller, rows: list[list[float]]) -> list[tuple[str, ...]]:
    """Norms are given for a, b, c, d, whatever their order in the model."""
    chosen = []
    for row in rows:
        for name, norm in zip("abcd", row, strict=True):
            model[name].weight.grad = torch.tensor([[float(norm), 0.0], [0.0, 0.0]])
        chosen.append(tuple(sorted(controller.step().high)))
    return chosen


def same(one: object, two: object) -> bool:
    if isinstance(one, dict):
        return set(one) == set(two) and all(same(one[key], two[key]) for key in one)  # type: ignore[arg-type, index]
    if isinstance(one, torch.Tensor):
        return one.dtype == two.dtype and torch.equal(one, two)  # type: ignore[attr-defined, arg-type]
    return one == two


def shape(state: object) -> object:
    if isinstance(state, dict):
        return {key: shape(value) for key, value in state.items()}
    return (state.dtype, state.shape) if isinstance(state, torch.Tensor) else type(state)


def saved_and_loaded(state: dict) -> dict:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def test_a_state_survives_a_checkpoint_that_trusts_nobody() -> None:
    model, controller = build()
    drive(model, controller, ROWS)
    state = controller.state_dict()
    assert same(saved_and_loaded(state), state)


def test_the_state_is_complete_before_the_first_step() -> None:
    model, controller = build()
    early = controller.state_dict()
    drive(model, controller, ROWS)
    assert shape(early) == shape(controller.state_dict())
    other_model, other = build()
    other.load_state_dict(saved_and_loaded(early))
    fresh_model, fresh = build()
    assert drive(other_model, other, ROWS) == drive(fresh_model, fresh, ROWS)


def test_the_state_holds_what_the_specification_names() -> None:
    state = build()[1].state_dict()
    assert {"version", "policy", "units", "step"} <= set(state)
    assert {"num_seen", "mean", "queue"} <= set(state["history"])
    assert {"lock", "high"} <= set(state["ledger"])


def test_a_state_is_a_snapshot() -> None:
    model, controller = build()
    drive(model, controller, ROWS[:3])
    state = controller.state_dict()
    kept = copy.deepcopy(state)
    drive(model, controller, ROWS[3:])
    assert same(state, kept)


def test_loading_leaves_the_caller_s_dictionary_alone_also_later() -> None:
    model, controller = build()
    drive(model, controller, ROWS[:3])
    state = controller.state_dict()
    kept = copy.deepcopy(state)
    other_model, other = build()
    other.load_state_dict(state)
    drive(other_model, other, ROWS[3:])
    other.rescale_history(2.0)
    assert same(state, kept)


def test_units_in_another_order_find_their_own_history() -> None:
    model, controller = build()
    drive(model, controller, ROWS[:3])
    turned_model, turned = build(names="cadb")
    turned.load_state_dict(controller.state_dict())
    for name in "abcd":
        assert turned_model[name].switch.high == model[name].switch.high
    assert turned.summary() == controller.summary()
    assert turned.median_ratios() == controller.median_ratios()
    rows = [[1, 2, 1.5, 3], [1, 4, 1, 3], *ROWS]  # without ties, which go by index
    assert drive(turned_model, turned, rows) == drive(model, controller, rows)
    assert turned.summary() == controller.summary()
    assert turned.median_ratios() == controller.median_ratios()


def test_the_plan_is_in_force_right_after_loading() -> None:
    model, controller = build()
    drive(model, controller, ROWS[:2])
    assert controller.plan.high == ("b",)
    other_model, other = build()
    other.load_state_dict(controller.state_dict())
    assert other.plan.high == ("b",)
    assert other.plan.step == other.steps == 2
    assert [module.switch.high for module in other_model.values()] == [False, True, False, False]


@pytest.mark.parametrize("call", ["pause", "resume"])
def test_a_pause_not_yet_in_force_does_not_reach_into_the_step_under_way(call: str) -> None:
    model, controller = build()
    if call == "resume":
        controller.pause()
    drive(model, controller, ROWS[:2])
    getattr(controller, call)()
    other_model, other = build()
    other.load_state_dict(saved_and_loaded(controller.state_dict()))
    for _ in range(2):
        assert [m.switch.high for m in other_model.values()] == [m.switch.high for m in model.values()]
        drive(model, controller, ROWS[2:3])
        drive(other_model, other, ROWS[2:3])
    assert any(m.switch.high for m in model.values()) == (call == "resume")


def test_bad_steps_in_a_row_are_counted_across_a_resume() -> None:
    policy = POLICY.replace(max_nonfinite=3)
    model, controller = build(policy)
    bad = [1, float("nan"), 1, 1]
    drive(model, controller, [bad, bad])
    other_model, other = build(policy)
    other.load_state_dict(controller.state_dict())
    with pytest.raises(TrimtabError, match="3 steps in a row"):
        drive(other_model, other, [bad])


def test_the_line_about_the_budget_is_not_said_again_after_a_resume() -> None:
    told: list[str] = []
    policy = Policy(alpha=0.5, alpha_warmup=None, max_high=1)
    model, controller = build(policy, on_event=lambda event: told.append(event.kind))
    drive(model, controller, [[1, 1, 1, 1]] * 210)
    assert told.count("budget_full") == 1
    other_model, other = build(policy, on_event=lambda event: told.append(event.kind))
    other.load_state_dict(controller.state_dict())
    drive(other_model, other, [[1, 1, 1, 1]] * 210)
    assert told.count("budget_full") == 1


def test_the_line_about_the_budget_comes_when_it_would_have_come_without_a_resume() -> None:
    """Its look-back of 200 steps is in the state, by unit: with other units first, after a resume, it says the same."""
    policy = Policy(alpha=1.05, beta=1.1, alpha_warmup=None, max_high=1)
    norms = [[1.0 + step % 3, 2.0 + step % 5, 1.0, 3.0 + step % 2] for step in range(230)]
    told: dict[str, list[tuple[int, str]]] = {"whole": [], "cut": []}

    def hear(name: str) -> Any:
        return lambda event: told[name].append((event.step, event.message)) if event.kind == "budget_full" else None

    model, controller = build(policy, on_event=hear("whole"))
    drive(model, controller, norms)
    model, controller = build(policy, on_event=hear("cut"))
    drive(model, controller, norms[:150])
    other_model, other = build(policy, names="dbca", on_event=hear("cut"))
    other.load_state_dict(saved_and_loaded(controller.state_dict()))
    drive(other_model, other, norms[150:])
    assert len(told["whole"]) == 1
    assert told["cut"] == told["whole"]


# What is refused


def test_the_state_of_another_version_is_refused() -> None:
    _, controller = build()
    for version in (2, None, "1"):
        with pytest.raises(TrimtabError, match=rf"version 1, got {version!r}"):
            controller.load_state_dict(controller.state_dict() | {"version": version})
    state = controller.state_dict()
    del state["version"]
    with pytest.raises(TrimtabError, match="version 1, got None"):
        controller.load_state_dict(state)


def test_the_state_of_another_model_is_refused_by_the_units_names() -> None:
    state = build(names="abcx")[1].state_dict()
    with pytest.raises(TrimtabError, match=r"lacks \['d'\] and has \['x'\]"):
        build()[1].load_state_dict(state)


def test_the_state_of_another_policy_is_refused_by_the_setting_s_name() -> None:
    state = build(POLICY.replace(alpha=1.7, window=3))[1].state_dict()
    with pytest.raises(TrimtabError, match=r"alpha 1\.7 -> 1\.3; window 3 -> 5") as caught:
        build()[1].load_state_dict(state)
    assert "history" not in str(caught.value)


def test_a_refused_state_changes_nothing() -> None:
    model, controller = build()
    drive(model, controller, ROWS[:3])
    before = controller.state_dict()
    for state in (build(names="abcx")[1].state_dict(), build(POLICY.replace(alpha=2.0))[1].state_dict()):
        with pytest.raises(TrimtabError):
            controller.load_state_dict(state)
    assert same(controller.state_dict(), before)


@pytest.mark.parametrize("empty", [None, {}])
def test_a_checkpoint_without_controller_state_warns_once_and_starts_afresh(empty: dict | None) -> None:
    model, controller = build()
    drive(model, controller, ROWS[:2])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        controller.load_state_dict(empty)
    assert [str(w.message) for w in caught] == [
        "the checkpoint holds no controller state: starting with a fresh history"
    ]
    assert caught[0].filename == __file__
    assert controller.steps == 0
    assert controller.plan.high == ()
    fresh_model, fresh = build()
    assert drive(model, controller, ROWS) == drive(fresh_model, fresh, ROWS)
