# SPDX-License-Identifier: Apache-2.0
"""Controller: that it decides live what a replay decides, acts one step later and only at step boundaries, changes not
a bit of a run it merely observes, skips what is not finite, and runs a batch again when asked to. Switches are put on a
small model by hand; where only norms matter, gradients are set directly."""

import copy
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn

import trimtab
from trimtab import Controller, NonFiniteError, Plan, Policy, TrimtabError
from trimtab.control.units import Switch

CONSTANT = Policy(alpha_warmup=None, max_high=2)
SPIKES = {"alpha": 1.5, "alpha_warmup": None, "beta": None, "lock_steps": 1, "max_high": 1}


class TwoPaths(nn.Linear):
    """Exact when high, rounded to eighths when low; keeps what its switch said at each forward."""

    def __init__(self, width: int, name: str) -> None:
        super().__init__(width, width)
        self.switch = Switch(name, roots=(self,))
        self.ran: list[bool] = []

    def forward(self, x: Tensor) -> Tensor:
        self.ran.append(self.switch.high)
        y = super().forward(x)
        return y if self.switch.high else y + ((y * 8).round() / 8 - y).detach()


def switchable(units: int = 4, width: int = 6) -> nn.Sequential:
    return nn.Sequential(*(TwoPaths(width, f"u{i}") for i in range(units)), nn.Linear(width, width))


class Rows:
    """A recorder in memory."""

    def __init__(self) -> None:
        self.header: dict = {}
        self.steps: list[int] = []
        self.rows: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
        self.totals: list[float] = []
        self.events: list[dict] = []

    def open_trace(self, units: list[str], **header: object) -> None:
        self.header = {"units": units, **header}

    def observe(self, step, norms, seen, high, grad_norm, events) -> None:  # type: ignore[no-untyped-def]
        self.steps.append(step)
        self.rows.append((norms.copy(), seen.copy(), high.copy()))
        self.totals.append(grad_norm)
        self.events += events

    def column(self, index: int) -> np.ndarray:
        return np.array([row[index] for row in self.rows])

    def replayed(self) -> trimtab.Decisions:
        return trimtab.replay(
            self.column(0),
            Policy.from_dict(self.header["policy"]),
            seen=self.column(1),
            recoverable=self.header["recoverable"],
            total_steps=self.header["total_steps"],
        )


def train(model: nn.Module, controller: Controller | None, steps: int = 40, *, spike: float = 30.0, bad: int = -1):
    """A plain loop on random data with a spike now and then; returns the losses and the plans."""
    generator = torch.Generator().manual_seed(7)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses, plans = [], []
    for step in range(1, steps + 1):
        x = torch.randn(8, 6, generator=generator) * (spike if step % 9 == 0 else 1.0)
        loss = model(x).square().mean() + 0 * torch.rand(()).item()  # the global generator is used, too
        if step == bad:
            loss = loss * float("nan")
        loss.backward()
        if controller is not None:
            plans.append(controller.step())
            controller.clip_grad_norm_(1.0)
        else:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses, plans


def feed(model: nn.Module, norms: list[float | None]) -> None:
    """Give each switchable module a gradient of this norm; None for no gradient."""
    model.zero_grad()
    for module, norm in zip([m for m in model.modules() if isinstance(m, TwoPaths)], norms, strict=True):
        if norm is not None:
            module.weight.grad = torch.zeros_like(module.weight)
            module.weight.grad[0, 0] = norm


def drive(model: nn.Module, controller: Controller, rows: list[list[float | None]]) -> list[Plan]:
    plans = []
    for row in rows:
        feed(model, row)
        plans.append(controller.step())
    return plans


def spiky_norms() -> np.ndarray:
    generator = np.random.default_rng(0)
    norms = np.exp(generator.normal(0, 0.3, (60, 4)))
    norms[generator.random(norms.shape) < 0.08] *= 40
    return norms


def planned(model: nn.Module) -> list[bool]:
    return [module.switch.high for module in model.modules() if isinstance(module, TwoPaths)]


# Live and replayed


@pytest.mark.parametrize("mode", ["act", "observe"])
@pytest.mark.parametrize(
    "policy",
    [
        Policy(max_high=2),
        Policy(max_high=1, history="winsorized", lock_growth=2.0, rebase_at=(20,)),
        Policy(max_high=2, history="ema", warmup="high", warmup_steps=3),
        Policy(max_high=1, history="exclude_triggered", prefer_locked=True, warmup="monitor"),
        Policy(max_high=0.5, history="window", span=7),
    ],
    ids=["paper", "winsorized", "ema", "exclude", "window"],
)
def test_live_decisions_are_those_of_a_replay_of_the_recorded_norms(policy: Policy, mode: str) -> None:
    model, rows = switchable(), Rows()
    controller = Controller(model, policy, mode=mode, total_steps=200, recorder=rows)
    _, plans = train(model, controller)
    d = rows.replayed()
    assert d.high.any()
    np.testing.assert_array_equal([plan.mask for plan in plans], d.high)
    assert rows.steps == list(range(1, 41))
    executed = rows.column(2)
    if mode == "act":
        opening = policy.warmup == "high"
        assert (executed[0] == opening).all()
        np.testing.assert_array_equal(executed[1:], d.high[:-1])
        np.testing.assert_array_equal(np.array([m.ran for m in model[:-1]]).T, executed)
        assert controller.summary() == d.summary()
    else:
        assert not executed.any()
        assert not np.array([m.ran for m in model[:-1]]).any()


def test_recorded_norms_are_before_clipping_and_the_total_covers_everything() -> None:
    model, rows = switchable(), Rows()
    controller = Controller(model, CONSTANT, recorder=rows)
    model(torch.randn(8, 6)).square().sum().backward()
    wanted = [float(torch.cat([p.grad.flatten() for p in m.parameters()]).norm()) for m in model[:-1]]
    total = float(torch.cat([p.grad.flatten() for p in model.parameters()]).norm())
    controller.clip_grad_norm_(1e-3)
    controller.step()
    np.testing.assert_allclose(rows.column(0)[0], wanted, rtol=1e-5)
    assert rows.totals[0] == pytest.approx(total, rel=1e-5)


def test_the_recorder_learns_what_the_rows_mean() -> None:
    rows = Rows()
    Controller(switchable(), Policy(max_high=0.5), total_steps=400, recorder=rows, watch=["4"])
    assert rows.header["units"] == ["u0", "u1", "u2", "u3", "4"]
    assert rows.header["recoverable"].tolist() == [True] * 4 + [False]
    assert (rows.header["max_high"], rows.header["warmup_steps"], rows.header["total_steps"]) == (2, 10, 400)
    assert Policy.from_dict(rows.header["policy"]) == Policy(max_high=0.5)


def test_a_recorded_observe_run_replays_to_its_own_decisions_with_a_guard_too() -> None:
    model, rows = switchable(), Rows()
    controller = Controller(model, Policy(**SPIKES, replay_step=3.0), mode="observe", recorder=rows)
    plans = drive(model, controller, spiky_norms().tolist())
    assert not any(plan.rerun for plan in plans)
    np.testing.assert_array_equal([plan.mask for plan in plans], rows.replayed().high)


# Observing changes nothing


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(6, 6)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.drop = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = self.drop(torch.tanh(layer(self.embed(x))))
        return x


@pytest.mark.parametrize("bad", [-1, 11])
@pytest.mark.parametrize("build", [Plain, switchable])
def test_observing_changes_not_a_bit(build: object, bad: int) -> None:
    results = []
    for watched in (False, True):
        torch.manual_seed(3)
        model = build()  # type: ignore[operator]
        policy = Policy(max_nonfinite=1, replay_step=2.0)
        controller = Controller(model, policy, mode="observe", total_steps=100) if watched else None
        losses, plans = train(model, controller, bad=bad)
        results.append((losses, [p.detach() for p in model.parameters()], torch.get_rng_state()))
        if watched:
            assert any(plan.num_high for plan in plans)
            assert plans[-1].nonfinite == (bad > 0)
    (losses, weights, rng), (their_losses, their_weights, their_rng) = results
    np.testing.assert_array_equal(losses, their_losses)
    assert np.isnan(losses).any() == (bad > 0)
    assert all(torch.equal(a.nan_to_num(7), b.nan_to_num(7)) for a, b in zip(weights, their_weights, strict=True))
    assert torch.equal(rng, their_rng)


def test_observing_a_run_that_is_broken_for_good_raises_nothing() -> None:
    model = switchable(2)
    controller = Controller(model, Policy(alpha_warmup=None, max_high=2, max_nonfinite=3), mode="observe")
    plans = drive(model, controller, [[float("nan")] * 2] * 250)
    assert all(plan.nonfinite for plan in plans)
    assert model[0].weight.grad is not None


def test_observing_switches_nothing() -> None:
    model = switchable()
    model[2].switch.planned = True  # somebody else's
    controller = Controller(model, Policy(**SPIKES), mode="observe")
    plans = drive(model, controller, [[1, 1, 1, 1], [9, 1, 1, 1]])
    assert plans[-1].high == ("u0",)
    assert planned(model) == [False, False, True, False]


# Acting


def test_a_choice_acts_in_the_next_step_and_the_first_step_runs_low() -> None:
    model = switchable()
    controller = Controller(model, Policy(**SPIKES))
    assert planned(model) == [False] * 4
    history = []
    for row in [[1, 1, 1, 1], [1, 9, 1, 1], [1, 1, 1, 1], [1, 1, 1, 1], [1, 1, 1, 1]]:
        history.append([i for i, high in enumerate(planned(model)) if high])
        drive(model, controller, [row])  # type: ignore[list-item]
    assert history == [[], [], [1], [1], []]


def test_a_plan_is_the_full_set_and_cannot_be_changed() -> None:
    model = switchable()
    controller = Controller(model, Policy(**SPIKES))
    (_, plan) = drive(model, controller, [[1, 1, 1, 1], [1, 1, 9, 1]])
    assert plan is controller.plan
    assert (plan.step, plan.high, plan.num_high, plan.units) == (2, ("u2",), 1, ("u0", "u1", "u2", "u3"))
    with pytest.raises(ValueError, match="read-only"):
        plan.mask[0] = True
    with pytest.raises(AttributeError):
        plan.step = 7  # type: ignore[misc]


def test_the_mask_is_constant_inside_an_accumulation_window() -> None:
    model = switchable()
    controller = Controller(model, Policy(**SPIKES))
    drive(model, controller, [[1, 1, 1, 1], [1, 9, 1, 1]])
    model.zero_grad()
    for module in model[:-1]:
        module.ran.clear()
    for scale in (1.0, 1e4, 1e-4, 1.0):  # micro-batches, one of them wild
        (model(torch.randn(8, 6) * scale).square().sum() / 4).backward()
        controller.clip_grad_norm_(1e9)  # reads, must not decide
    assert [module.ran for module in model[:-1]] == [[False] * 4, [True] * 4, [False] * 4, [False] * 4]


def test_an_accumulated_gradient_is_one_observation() -> None:
    model, rows = switchable(), Rows()
    controller = Controller(model, CONSTANT, recorder=rows)
    for _ in range(3):
        for _ in range(4):
            (model(torch.randn(8, 6)).square().sum() / 4).backward()
        controller.step()
        model.zero_grad()
    assert controller.steps == len(rows.rows) == 3


def test_a_first_step_that_finds_no_gradient_anywhere_says_where_to_look(caplog: pytest.LogCaptureFixture) -> None:
    for norms, told in (([None] * 4, 1), ([None, 1.0, None, None], 0)):
        model = switchable()
        for parameter in model.parameters():
            parameter.main_grad = torch.ones_like(parameter)  # type: ignore[attr-defined]
        caplog.clear()
        drive(model, Controller(model, Policy(alpha_warmup=None), mode="observe"), [norms, [None] * 4])
        assert caplog.text.count("found no gradient in any parameter") == told


def test_a_unit_without_a_gradient_keeps_its_history() -> None:
    model, rows = switchable(), Rows()
    controller = Controller(model, Policy(**SPIKES), recorder=rows)
    plans = drive(model, controller, [[1, 1, 1, 1], [1, None, 1, 1], [1, None, 1, 1], [1, 9, 1, 1]])
    assert rows.column(1)[1].tolist() == [True, False, True, True]
    assert plans[-1].high == ("u1",)


def test_pause_and_resume_take_effect_at_the_next_step_boundary() -> None:
    model, rows = switchable(), Rows()
    controller = Controller(model, Policy(**(SPIKES | {"lock_steps": 9})), recorder=rows)
    drive(model, controller, [[1, 1, 1, 1], [9, 1, 1, 1]])
    controller.pause()
    assert planned(model) == [True, False, False, False]  # the step under way keeps its mask
    plans = drive(model, controller, [[1, 1, 1, 1]])
    assert planned(model) == [False] * 4
    assert plans[0].high == ("u0",)  # still judged
    controller.resume()
    assert planned(model) == [False] * 4
    drive(model, controller, [[1, 1, 1, 1]])
    assert planned(model) == [True, False, False, False]
    drive(model, controller, [[1, 1, 1, 1]])
    assert rows.column(2)[:, 0].tolist() == [False, False, True, False, True]
    np.testing.assert_array_equal(rows.replayed().high[:, 0], [False, True, True, True, True])


def test_rescaling_the_history_makes_scaled_norms_normal_again() -> None:
    for policy in (Policy(**SPIKES), Policy(**SPIKES, history="ema"), Policy(**SPIKES, history="window", span=3)):
        model = switchable()
        plain, scaled = Controller(model, policy), Controller(model, policy)
        rows = [[1, 2, 1, 3], [2, 2, 1, 3], [1, 2, 1, 2]]
        drive(model, plain, rows)  # type: ignore[arg-type]
        drive(model, scaled, rows)  # type: ignore[arg-type]
        scaled.rescale_history(8.0)
        later = [[1, 2, 9, 3], [1, 2, 1, 3]]
        one = drive(model, plain, later)  # type: ignore[arg-type]
        two = drive(model, scaled, [[8 * n for n in row] for row in later])
        assert [plan.high for plan in one] == [plan.high for plan in two]
        assert one[0].high == ("u2",)
        mean = [controller.state_dict()["history"]["num_seen"].tolist() for controller in (plain, scaled)]
        assert mean[0] == mean[1]


@pytest.mark.parametrize("factor", [0, -1.0, float("nan"), float("inf")])
def test_an_impossible_rescaling_is_refused(factor: float) -> None:
    with pytest.raises(TrimtabError, match="factor must be"):
        Controller(switchable(), CONSTANT).rescale_history(factor)


# Non-finite gradients


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("outside", [False, True])
def test_a_non_finite_gradient_anywhere_skips_the_step(bad: float, outside: bool) -> None:
    model = switchable()
    controller = Controller(model, CONSTANT)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0)
    model(torch.randn(8, 6)).square().sum().backward()
    (model[-1].weight if outside else model[1].weight).grad.view(-1)[3] = bad
    before = copy.deepcopy(model.state_dict())
    plan = controller.step()
    assert plan.nonfinite
    assert plan.high == (() if outside else ("u1",))
    assert all(parameter.grad is None for parameter in model.parameters())
    controller.clip_grad_norm_(1.0)
    optimizer.step()
    assert all(torch.equal(model.state_dict()[key], value) for key, value in before.items())
    assert not optimizer.state
    model(torch.randn(8, 6)).square().sum().backward()
    assert not controller.step().nonfinite


def test_poisoned_units_keep_their_history_and_the_others_go_on() -> None:
    model = switchable()
    controller = Controller(model, CONSTANT)
    drive(model, controller, [[1, 1, 1, 1], [1, float("nan"), 1, 1]])
    history = controller.state_dict()["history"]
    assert history["num_seen"].tolist() == [2, 1, 2, 2]
    assert history["mean"].tolist() == [1, 1, 1, 1]


def test_a_step_without_gradients_after_a_skipped_one_is_not_non_finite() -> None:
    model = switchable()
    controller = Controller(model, CONSTANT)
    assert drive(model, controller, [[1, float("nan"), 1, 1]])[0].nonfinite
    assert not controller.step().nonfinite


def test_the_run_stops_after_max_nonfinite_bad_steps_in_a_row_and_not_before() -> None:
    model = switchable()
    controller = Controller(model, Policy(alpha_warmup=None, max_nonfinite=3))
    nan, fine = [1, float("nan"), 1, 1], [1, 1, 1, 1]
    drive(model, controller, [nan, nan, fine, nan, nan])  # type: ignore[list-item]
    with pytest.raises(NonFiniteError, match=r"3 steps in a row \(max_nonfinite=3\), last at step 6"):
        drive(model, controller, [nan])  # type: ignore[list-item]
    assert all(parameter.grad is None for parameter in model.parameters())


# Modes


@pytest.mark.parametrize("asked", ["act", "observe", "off"])
@pytest.mark.parametrize("forced", ["act", "observe", "off", "OFF", ""])
def test_the_environment_overrides_the_mode(asked: str, forced: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRIMTAB", forced)
    assert Controller(switchable(), CONSTANT, mode=asked).mode == (forced.lower() or asked)


def test_an_unknown_mode_is_refused_by_its_source(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TrimtabError, match=r"mode must be one of off, observe, act, got 'watch'"):
        Controller(switchable(), CONSTANT, mode="watch")
    monkeypatch.setenv("TRIMTAB", "on")
    with pytest.raises(TrimtabError, match=r"TRIMTAB must be one of off, observe, act, got 'on'"):
        Controller(switchable(), CONSTANT)


def test_off_is_a_run_without_trimtab_but_clip_still_clips() -> None:
    results = []
    for mode in (None, "off"):
        torch.manual_seed(3)
        model, rows = Plain(), Rows()  # nothing to switch, and no run length: off asks for neither
        controller = None if mode is None else Controller(model, mode=mode, recorder=rows)
        losses, plans = train(model, controller, bad=30)
        results.append((losses, [p.detach().nan_to_num(7) for p in model.parameters()], torch.get_rng_state()))
        assert not rows.rows
        assert not rows.header
    assert all(plan.num_high == 0 and not plan.nonfinite for plan in plans)
    np.testing.assert_array_equal(results[0][0], results[1][0])
    assert all(torch.equal(a, b) for a, b in zip(results[0][1], results[1][1], strict=True))
    assert torch.equal(results[0][2], results[1][2])


def test_off_takes_every_call() -> None:
    model = switchable()
    model[1].switch.planned = True
    controller = Controller(model, mode="off")
    controller.pause()
    controller.resume()
    controller.rescale_history(2.0)
    drive(model, controller, [[1, float("nan"), 1, 1]] * 20)
    assert model[0].weight.grad is not None
    assert planned(model) == [False, True, False, False]
    assert controller.steps == 0
    assert controller.summary()["steps"] == 0
    controller.load_state_dict(Controller(switchable(), CONSTANT).state_dict())
    controller.load_state_dict({})


def test_a_state_saved_while_off_does_not_stop_a_later_run() -> None:
    state = Controller(switchable(), mode="off").state_dict()
    controller = Controller(switchable(), CONSTANT)
    with pytest.warns(UserWarning, match="no controller state"):
        controller.load_state_dict(state)


def test_acting_on_an_unconverted_model_names_the_remedy() -> None:
    with pytest.raises(TrimtabError, match=r"trimtab\.convert_"):
        Controller(Plain(), CONSTANT)


def test_an_unknown_run_length_is_refused_at_construction() -> None:
    with pytest.raises(TrimtabError, match="total_steps"):
        Controller(switchable())


# The guard


def guarded(**more: object) -> tuple[nn.Sequential, Controller, Rows]:
    model, rows = switchable(), Rows()
    return model, Controller(model, Policy(**SPIKES, replay_step=5.0, **more), recorder=rows), rows  # type: ignore[arg-type]


def test_an_extreme_risk_asks_for_the_batch_once_more_and_drops_the_gradients() -> None:
    model, controller, _ = guarded()
    first, spike = drive(model, controller, [[1, 1, 1, 1], [1, 99, 1, 1]])
    assert not first.rerun
    assert spike.rerun
    assert spike.high == ("u1",)
    assert planned(model) == [False, True, False, False]  # at once: the same batch runs under the new plan
    assert all(parameter.grad is None for parameter in model.parameters())
    (second,) = drive(model, controller, [[1, 99, 1, 1]])  # still extreme: it counts all the same
    assert not second.rerun
    assert model[1].weight.grad is not None
    assert (first.step, spike.step, second.step, controller.steps) == (1, 2, 2, 2)


def test_history_is_as_if_the_first_pass_never_happened() -> None:
    model, controller, _ = guarded()
    drive(model, controller, [[1, 1, 1, 1], [1, 99, 1, 1], [1, 2, 1, 1]])
    other, plain, _ = guarded()
    drive(other, plain, [[1, 1, 1, 1], [1, 2, 1, 1]])
    one, two = controller.state_dict(), plain.state_dict()
    assert one["step"] == two["step"] == 2
    for name in one["history"]:
        assert torch.equal(one["history"][name], two["history"][name])


def test_a_non_finite_pass_is_run_again_before_it_counts_as_bad() -> None:
    model, controller, _ = guarded(max_nonfinite=1)
    drive(model, controller, [[1, 1, 1, 1]])
    (plan,) = drive(model, controller, [[1, float("nan"), 1, 1]])
    assert plan.rerun
    assert plan.nonfinite
    with pytest.raises(NonFiniteError):
        drive(model, controller, [[1, float("nan"), 1, 1]])


def test_a_guarded_live_run_equals_the_replay_of_its_passes() -> None:
    model, controller, rows = guarded(lock_growth=2.0)
    plans = drive(model, controller, spiky_norms().tolist())
    d = rows.replayed()
    assert 3 < d.rerun.sum() < 30
    np.testing.assert_array_equal([plan.rerun for plan in plans], d.rerun)
    np.testing.assert_array_equal([plan.mask for plan in plans], d.high)
    np.testing.assert_array_equal(rows.column(2)[1:], d.high[:-1])
    assert controller.summary() == d.summary()
    assert controller.summary()["reruns"] == d.rerun.sum()


def test_a_loop_with_the_guard_keeps_the_bad_update_out() -> None:
    torch.manual_seed(0)
    model = switchable()
    controller = Controller(model, Policy(**SPIKES, replay_step=5.0))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    taken = 0
    x = torch.randn(8, 6)
    for step in range(6):
        for attempt in range(2):
            loss = model(x).square().mean() * (1e4 if step == 4 and attempt == 0 else 1.0)  # a fault of the low path
            loss.backward()
            if controller.step().rerun:
                assert (step, attempt) == (4, 0)
                continue
            optimizer.step()
            optimizer.zero_grad()
            taken += 1
            break
    assert taken == controller.steps == 6
    assert max(float(p.detach().abs().max()) for p in model.parameters()) < 2


# Looking at it


def test_the_three_stages_show_in_a_profile() -> None:
    model = switchable()
    controller = Controller(model, CONSTANT)
    feed(model, [1, 1, 1, 1])
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True) as profile:
        controller.step()
    found = {event.key for event in profile.key_averages()}
    assert {"trimtab::observe", "trimtab::decide", "trimtab::act", "trimtab::record"} <= found


def test_the_summary_and_the_medians_speak_of_this_run() -> None:
    model = switchable()
    controller = Controller(model, CONSTANT)
    drive(model, controller, [[1, 1, 2, None]] * 30 + [[9, 1, 2, None], [1, 1, 2, None]])
    medians = controller.median_ratios()
    assert list(medians) == ["u0", "u1", "u2", "u3"]
    assert medians["u0"] == pytest.approx(1, rel=0.02)
    assert np.isnan(medians["u3"])
    assert controller.summary()["steps"] == 32
    assert controller.summary()["promotion_ratio"] == pytest.approx(1 / (32 * 4))


# Several ranks


def run_rank(rank: int, ranks: int, folder: str) -> None:
    """Train on this rank's share of every batch; keep the norms and the executed sets."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model, rows = switchable(), Rows()
    whole: nn.Module = model
    if ranks > 1:
        meet = f"file://{folder}/meet"
        dist.init_process_group("gloo", init_method=meet, rank=rank, world_size=ranks, timeout=timedelta(seconds=60))
        whole = nn.parallel.DistributedDataParallel(model)
    controller = Controller(whole, Policy(**SPIKES), recorder=rows)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(5)
    for step in range(12):
        x = torch.randn(8, 6, generator=generator) * (40.0 if step in (5, 9) else 1.0)
        whole(x.chunk(ranks)[rank]).square().mean().backward()
        controller.step()
        optimizer.step()
        optimizer.zero_grad()
    out = {"norms": torch.from_numpy(rows.column(0)), "high": torch.from_numpy(rows.column(2))}
    torch.save(out, f"{folder}/{ranks}-{rank}.pt")
    if ranks > 1:
        dist.destroy_process_group()


def test_one_rank_and_two_ranks_agree(tmp_path: Path) -> None:
    run_rank(0, 1, str(tmp_path))
    mp.start_processes(run_rank, (2, str(tmp_path)), nprocs=2, daemon=True, start_method="spawn")
    one, left, right = (torch.load(tmp_path / f"{name}.pt") for name in ("1-0", "2-0", "2-1"))
    assert torch.equal(left["norms"], right["norms"])
    assert torch.equal(left["high"], right["high"])
    assert one["high"].any()
    torch.testing.assert_close(one["norms"], left["norms"], rtol=1e-3, atol=1e-6)
    assert torch.equal(one["high"], left["high"])
