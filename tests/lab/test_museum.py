# SPDX-License-Identifier: Apache-2.0
"""The museum: each defect does what its thread says and nothing else, and the rows say what the runs did."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from trimtab.control.act import running
from trimtab.control.record import TRACE
from trimtab.errors import TrimtabError
from trimtab.lab.config import Config
from trimtab.lab.exhibits import EXHIBITS, Exhibit
from trimtab.lab.exhibits.blocks import gradient_blocks
from trimtab.lab.exhibits.recompute import ForgetfulLinear
from trimtab.lab.exhibits.scaling import EARLY, RESUMED
from trimtab.lab.museum import Outcome, half_width, hurt, run_museum, saved
from trimtab.lab.run import Run, Silent
from trimtab.linear.casts import apply_cast
from trimtab.linear.linear import path_state, switch_linears
from trimtab.report.read import read_trace

CASES = {exhibit.name: exhibit for exhibit in EXHIBITS}


def build(exhibit: Exhibit, text: Path, *, broken: bool, **changes: Any) -> Run:
    settings = {**exhibit.settings, "data": str(text), "device": "cpu", "mode": "off", "path": "low", **changes}
    run = Run(Config.from_dict({**settings, "batch": 2, "seq": 16}), Silent())
    exhibit.prepare(run, broken)
    return run


def gradients(run: Run) -> dict[str, torch.Tensor]:
    """Of one backward on the low path, by name; the loss must be finite."""
    inputs, targets = run.task.batch_at(1)
    with running(run.model, run.config.path):
        loss = run.model(inputs, targets).loss
        assert torch.isfinite(loss)
        loss.backward()
    return {name: p.grad for name, p in run.model.named_parameters() if p.grad is not None}


@pytest.fixture(scope="module")
def rows(text: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[tuple[str, str], dict[str, Any]], Path]:
    """The cases that die at once, with one seed and twelve steps."""
    out = tmp_path_factory.mktemp("museum")
    settings = {"data": str(text), "steps": 12, "batch": 2, "seq": 16, "eval_batches": 1}
    chosen = [CASES["overflow"], CASES["lora"]]
    table = run_museum(out, seeds=1, exhibits=chosen, settings=settings)
    return {(row["case"], row["arm"]): row for row in table}, out


def test_every_case_names_a_thread_and_has_the_four_arms() -> None:
    assert len(CASES) == len(EXHIBITS) == 9
    for exhibit in EXHIBITS:
        repository, _, number = exhibit.thread.partition("#")
        assert repository.count("/") == 1
        assert number.isdigit()
        assert [arm.name for arm in exhibit.arms[:5]] == ["high", "low", "control", "random", "repair"]


def test_a_zero_scale_kills_low_in_the_first_step_and_control_with_it(rows: Any) -> None:
    table, _ = rows
    assert table["lora", "low"]["died"] == 1
    assert table["lora", "low"]["survived"] == 0
    assert table["lora", "low"]["loss"] is None
    for arm in ("control", "random"):
        assert table["lora", arm]["died"] == 1
        assert table["lora", arm]["skipped"] == 10
        assert not table["lora", arm]["saved"]


def test_a_floor_or_a_high_start_saves_lora(rows: Any) -> None:
    table, _ = rows
    for arm in ("floored", "warm"):
        assert table["lora", arm]["died"] == 0
        assert table["lora", arm]["saved"]
    assert table["lora", "floored"]["loss"] == pytest.approx(table["lora", "high"]["loss"], abs=0.02)
    assert table["lora", "warm"]["promotion"] > table["lora", "control"]["promotion"]


def test_without_saturation_the_first_growth_is_fatal_and_with_it_harmless(rows: Any) -> None:
    table, _ = rows
    assert table["overflow", "low"]["died"] == 1
    assert 1 <= table["overflow", "low"]["survived"] < 12, "the first step measures, so it cannot overflow"
    assert table["overflow", "saturating"]["survived"] == 12
    assert table["overflow", "saturating"]["saved"]


def test_random_has_controls_count_in_each_step(rows: Any) -> None:
    _, out = rows
    for case in ("lora", "overflow"):
        control, random = (read_trace(out / case / f"{arm}-0" / TRACE).high for arm in ("control", "random"))
        length = min(len(control), len(random))
        assert control[:length].any()
        assert control[:length].sum(1).tolist() == random[:length].sum(1).tolist()
        assert (control[:length] != random[:length]).any()


def test_scales_after_the_resume_are_those_of_the_early_step_or_none(text: Path) -> None:
    for broken in (True, False):
        run = build(CASES["resume"], text, broken=broken)
        before = CASES["resume"].prepare(run, broken)
        assert before is not None
        before(1)
        assert run.config.path == "high"
        fill(run, 3.0)
        before(EARLY + 1)
        fill(run, 7.0)
        before(RESUMED + 1)
        assert run.config.path == "low"
        found = {state["input_amax"].max().item() for state in path_state(run.model).values()}
        assert found == ({3.0} if broken else {0.0})


def fill(run: Run, amax: float) -> None:
    for module in switch_linears(run.model):
        for operand in module.memory.histories:
            module.memory.past_amax(operand, torch.tensor(amax), remember=True)


def test_a_stuck_scale_flushes_the_gradients_that_enter_from_no_residual(text: Path) -> None:
    for broken in (True, False):
        run = build(CASES["stuck"], text, broken=broken)
        inner = tuple(f".{name}.weight" for name in ("q", "k", "v", "gate", "up"))
        found = [grad.any().item() for name, grad in gradients(run).items() if name.endswith(inner)]
        assert found == [not broken] * 10


def test_a_forgetful_recompute_takes_the_gradient_of_another_forward(text: Path) -> None:
    case = CASES["recompute"]
    stored = build(Exhibit("plain", "a/b#1", "no checkpoint", case.settings), text, broken=False)
    faithful, forgetful = (build(case, text, broken=broken) for broken in (False, True))
    assert all(type(m) is ForgetfulLinear for m in switch_linears(forgetful.model))
    ours, theirs, truth = (gradients(run) for run in (faithful, forgetful, stored))
    name = "blocks.0.mlp.gate.weight"
    assert torch.equal(ours[name], truth[name])
    assert (theirs[name] - truth[name]).norm() > 0.05 * truth[name].norm()


def test_an_expert_without_tokens_has_nan_in_its_down_projection_alone(text: Path) -> None:
    run = build(CASES["expert"], text, broken=True, num_experts=16)
    bad = {name for name, grad in gradients(run).items() if not grad.isfinite().all()}
    assert bad, "with 32 tokens some of 16 experts are empty"
    assert all(".experts." in name and name.endswith("down.weight") for name in bad)
    healthy = gradients(build(CASES["expert"], text, broken=False, num_experts=16))
    assert all(grad.isfinite().all() for grad in healthy.values())
    assert all(not healthy[name].any() for name in bad), "what was not written would have been zero"


def test_a_coarse_block_silences_the_tokens_beside_a_loud_one() -> None:
    gradient = torch.full((4, 16), 1e-3)
    gradient[0] = 1.0
    coarse, tiles = (gradient_blocks("e2m1", rows).low.grad_input for rows in (128, 1))
    assert coarse is not None
    assert tiles is not None
    assert coarse.left is not None
    assert tiles.left is not None
    assert not apply_cast(gradient, coarse.left)[0][1:].any()
    assert apply_cast(gradient, tiles.left)[0][1:].all()


def outcome(loss: float, *, skipped: int = 0) -> Outcome:
    return Outcome(
        survived=10,
        steps=10,
        loss=loss,
        losses=(),
        begins=1,
        skipped=skipped,
        promotion=0,
        blamed=None,
        delay=None,
        ms=1,
    )


def test_saved_means_alive_where_low_died_and_half_of_the_loss_where_it_did_not() -> None:
    high, dead = [outcome(1.0)] * 3, [outcome(math.nan)] * 3
    low = [outcome(2.0), outcome(2.1), outcome(1.9)]
    assert saved([outcome(1.3)] * 3, high, low)
    assert not saved([outcome(1.7)] * 3, high, low)
    assert saved([outcome(1.7)] * 3, high, dead)
    assert not saved(dead, high, dead)
    assert not saved([outcome(1.7, skipped=6)] * 3, high, dead), "skipping most steps is no life"
    assert not saved([outcome(1.0)] * 3, high, [outcome(1.0), outcome(1.2), outcome(0.9)]), "nothing to save"


def test_an_arm_is_hurt_if_it_dies_or_surely_loses() -> None:
    assert half_width([1.0, 2.0, 3.0]) == pytest.approx(4.3027 / math.sqrt(3), rel=1e-4)
    assert math.isnan(half_width([1.0]))
    assert math.isnan(half_width([1.0, 2.0, math.nan]))
    assert hurt([1.0, 1.1, 0.9])
    assert not hurt([1.0, -0.5, 0.2])
    assert hurt([math.nan, 0.0, 0.0])


def test_no_seed_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TrimtabError, match="seeds must be a whole number"):
        run_museum(tmp_path, seeds=0)
