# SPDX-License-Identifier: Apache-2.0
"""The trainer: a run folder is complete, a run repeats itself bit for bit from its seed and across a kill and a resume,
looking on changes nothing, faults reach the low path alone, and settings that do not fit are refused by name."""

import copy
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from reference.replayed import replayed
from same import assert_same

from trimtab.control.policy import HISTORIES
from trimtab.errors import NonFiniteError, TrimtabError
from trimtab.lab.config import Config
from trimtab.lab.run import Run, Silent, StepInfo
from trimtab.lab.train import train
from trimtab.linear.linear import path_state
from trimtab.report.read import Trace, read_run

FAULTS = "blocks.*.attn.v:stuck_scale:start=4,width=4,size=2; blocks.1.mlp.up:grad_scale:start=6,width=2,size=32"
GUARD = {"faults": "blocks.1.mlp.up:grad_scale:start=6,width=2,size=64", "policy": {"replay_step": 4.0}}

RESUMED: dict[str, dict[str, Any]] = {
    **{history: {"policy": {"history": history}} for history in HISTORIES},
    **{recipe: {"recipe": recipe} for recipe in ("fp8_delayed", "nvfp4", "saved4")},
    "faults": {"faults": FAULTS},
    "accumulation and clipping": {"accumulate": 2, "clip": 0.5, "weight_decay": 0.1},
    "guard": GUARD,
    "growing lock": {"policy": {"lock_growth": 2.0, "memory": 3, "prefer_locked": True}},
    "experts": {"unit": "expert", "num_experts": 4, "top_k": 1},
    "blocks, grouped queries": {"unit": "block", "kv_heads": 2, "policy": {"max_high": 1}},
    "bf16, recomputed": {"dtype": "bf16", "checkpointing": True, "recipe": "nvfp4"},
    "sgd": {"optimizer": "sgd"},
    "spam": {"optimizer": "spam", "optimizer_options": {"reset_every": 4, "warmup": 1, "grace": 1, "density": 0.5}},
    "stable spam": {"optimizer": "stable_spam", "optimizer_options": {"reset_every": 4}},
    "osp": {"optimizer": "osp", "norm": "ssnorm", "embproj": True},
    "adagc": {"transform": "adagc"},
    "zclip": {"transform": "zclip"},
    "observe": {"mode": "observe", "path": "low", "recipe": "fp8_delayed"},
    "skipped steps": {"guard": "skip_step", "guard_options": {"warmup": 2, "window": 4, "sigmas": 1.0}},
    "clipped units": {"guard": "clip_flagged", "mode": "observe", "path": "low", "faults": FAULTS},
    "round robin": {"selection": "round_robin"},
    "largest norms beside fixed units": {"selection": "top_norm", "fixed_high": ["blocks.0.attn.*"], "faults": FAULTS},
    "gaps": {"detector": "gap", "detector_options": {"full": True}},
    "spectral norms": {"detector": "jacobian"},
    "signal to noise, cut": {"detector": "gsnr", "split": 2},
    "bad data, cut": {"bad_data": "start=4,width=3", "split": 2, "accumulate": 2},
    "off": {"mode": "off", "path": "low", "recipe": "nvfp4"},
    "off, delayed": {"mode": "off", "path": "low", "recipe": "fp8_delayed"},
}


class Killed(Silent):
    """Ends the process of a run, so to speak, right after a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def stepped(self, info: StepInfo) -> None:
        if info.step == self.step:
            raise KeyboardInterrupt


@pytest.fixture
def go(tmp_path: Path, small: dict[str, Any]) -> Any:
    """Train into a named folder: `small`, with some settings changed and the policy's merged."""

    def go(name: str, *, settings: Mapping[str, Any] | None = None, killed_at: int = 0, **options: Any) -> Path:
        settings = dict(settings or {})
        policy = {**small["policy"], **settings.pop("policy", {})}
        watcher = Killed(killed_at) if killed_at else None
        if killed_at:
            with pytest.raises(KeyboardInterrupt):
                train({**small, **settings, "policy": policy}, tmp_path / name, watcher=watcher, **options)
        else:
            train({**small, **settings, "policy": policy}, tmp_path / name, **options)
        return tmp_path / name

    return go


def lines(folder: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl without what the clock says."""
    found = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [
        {key: value for key, value in line.items() if key not in ("tokens_per_s", "controller_ms")} for line in found
    ]


def losses(folder: Path) -> list[float]:
    return [line["loss"] for line in lines(folder) if "loss" in line]


def trace(folder: Path) -> Trace:
    found = read_run(folder).trace
    assert found is not None
    return found


def state(folder: Path, step: int = 10) -> dict[str, Any]:
    """The checkpoint, but for the positions in the files (the clock's digits differ in length)."""
    found = torch.load(folder / "checkpoints" / f"step_{step:06d}.pt", weights_only=True)
    return {key: value for key, value in found.items() if key != "offsets"}


def assert_same_run(one: Path, two: Path) -> None:
    """Equal lines, norms, executed sets and everything a checkpoint holds."""
    assert lines(one) == lines(two)
    if (one / "trace.arrow").exists():
        for column in ("steps", "norms", "seen", "high"):
            assert getattr(trace(one), column).tobytes() == getattr(trace(two), column).tobytes(), column
    ours, theirs = state(one), state(two)
    for found in (ours, theirs):  # a resumed run knows its faults as run.json has them, written out
        found["config"]["faults"] = None
    assert_same(ours, theirs)


def test_the_run_folder_is_complete(go: Any) -> None:
    folder = go("run", settings={"eval_every": 4, "faults": "blocks.*.mlp.up:grad_scale:start=3"})
    assert {path.name for path in folder.iterdir()} == {"run.json", "metrics.jsonl", "trace.arrow", "checkpoints"}
    assert {path.name for path in (folder / "checkpoints").iterdir()} == {"step_000005.pt", "step_000010.pt"}
    run = read_run(folder)
    assert run.trace is not None
    steps = [line for line in run.metrics if "loss" in line]
    assert [line["step"] for line in steps] == list(range(1, 11))
    assert all({"step", "loss", "lr", "tokens_per_s", "grad_norm", "num_high"} <= set(line) for line in steps)
    evaluations = [line for line in run.metrics if "eval_loss_high" in line]
    assert [line["step"] for line in evaluations] == [4, 8, 10]
    assert all({"step", "eval_loss_high", "eval_loss_low"} == set(line) for line in evaluations)
    assert [line["num_high"] for line in steps] == run.trace.high.sum(axis=1).tolist()
    assert run.trace.high.any()
    assert run.trace.steps.tolist() == list(range(1, 11))
    assert len(run.trace.units) == 14
    assert run.config["steps"] == 10
    assert [window["unit"] for window in run.config["faults"]] == ["blocks.0.mlp.up", "blocks.1.mlp.up"]
    assert run.config["corpus"]["name"] == "words.txt"


def test_the_result_says_what_the_folder_says(tmp_path: Path, small: dict[str, Any]) -> None:
    result = train(small, tmp_path / "run")
    last = lines(tmp_path / "run")[-1]
    assert (result.eval_loss_high, result.eval_loss_low) == (last["eval_loss_high"], last["eval_loss_low"])
    assert result.loss == pytest.approx(np.mean(losses(tmp_path / "run")))
    assert result.summary["promotion_ratio"] == pytest.approx(trace(tmp_path / "run").high.mean())
    assert not result.finished_before


def test_the_loss_falls(go: Any) -> None:
    found = losses(go("run", settings={"steps": 40, "batch": 4, "checkpoint_every": 0}))
    assert np.mean(found[-5:]) < found[0] - 1


def test_one_seed_gives_one_run_and_another_another(go: Any) -> None:
    one, two = go("one", settings={"recipe": "nvfp4"}), go("two", settings={"recipe": "nvfp4"})
    assert_same_run(one, two)
    assert not set(losses(one)) & set(losses(go("three", settings={"recipe": "nvfp4", "seed": 1})))


@pytest.mark.parametrize("case", RESUMED)
def test_a_killed_and_resumed_run_equals_the_uninterrupted_one(go: Any, case: str) -> None:
    settings = RESUMED[case]
    whole = go("whole", settings=settings)
    broken = go("broken", settings=settings, killed_at=7)
    assert len(losses(broken)) == 7  # steps 6 and 7 came after the checkpoint and are cut off again
    go("broken", settings=settings, resume=True)
    assert_same_run(broken, whole)
    if settings.get("mode", "act") == "act" and "selection" not in settings:
        found = trace(whole)
        assert found.high[found.steps > 5].any()  # else there was no decision to repeat
        assert not found.high[0].any()
        assert (replayed(found).high[:-1] == found.high[1:]).all()
    if "replay_step" in settings.get("policy", {}):
        assert np.count_nonzero(np.diff(trace(whole).steps) == 0) > 0


def test_a_resume_needs_no_settings(go: Any, tmp_path: Path) -> None:
    whole = go("whole", settings={"recipe": "fp8_delayed", "faults": FAULTS, "clip": 1.0})
    go("broken", settings={"recipe": "fp8_delayed", "faults": FAULTS, "clip": 1.0}, killed_at=6)
    train({}, tmp_path / "broken", resume=True)
    assert_same_run(tmp_path / "broken", whole)


def test_a_resume_from_the_one_before_a_torn_checkpoint_is_exact(go: Any) -> None:
    whole = go("whole", settings={"checkpoint_every": 3})
    broken = go("broken", settings={"checkpoint_every": 3}, killed_at=8)
    newest = broken / "checkpoints" / "step_000006.pt"
    newest.write_bytes(newest.read_bytes()[:-100])
    go("broken", settings={"checkpoint_every": 3}, resume=True)
    assert_same_run(broken, whole)


def test_a_resume_without_a_folder_or_a_checkpoint_starts_at_the_beginning(go: Any) -> None:
    whole = go("whole")
    assert_same_run(go("missing", resume=True), whole)
    early = go("early", killed_at=3)
    assert_same_run(go("early", resume=True), whole)
    assert len(losses(early)) == 10


def test_a_finished_run_is_left_alone(go: Any, tmp_path: Path, small: dict[str, Any]) -> None:
    folder = go("run")
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    for settings in ({}, small):
        result = train(settings, folder, resume=True)
        assert (result.finished_before, result.steps) == (True, 10)
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


def test_a_larger_steps_goes_on_at_the_final_rate(go: Any) -> None:
    folder = go("run")
    ten = lines(folder)
    go("run", settings={"steps": 14}, resume=True)
    assert lines(folder)[: len(ten)] == ten
    rates = [line["lr"] for line in lines(folder) if "lr" in line]
    assert len(rates) == 14
    assert rates[9:] == pytest.approx([0.0004] * 5)
    found = trace(folder)
    assert (replayed(found).high[:-1] == found.high[1:]).all()


def test_a_longer_run_that_is_killed_keeps_its_new_end(go: Any, tmp_path: Path) -> None:
    folder = go("run", settings={"checkpoint_every": 4})
    go("run", settings={"steps": 15, "checkpoint_every": 4}, resume=True, killed_at=13)
    assert train({}, folder, resume=True).steps == 15
    with pytest.raises(TrimtabError, match="may only get longer: steps was 15 and is now 12"):
        train({"steps": 12}, folder, resume=True)


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"lr": 1.0}, "lr was 0.004 and is now 1.0"),
        ({"seed": 3}, "seed was 0 and is now 3"),
        ({"batch": 4, "steps": 20}, "batch was 2 and is now 4"),
        ({"unit": ["blocks.*"]}, "unit was 'linear' and is now"),
        ({"policy": {"alpha": 9.0}}, "policy.alpha was 1.05 and is now 9.0"),
        ({"policy": {"preset": "steady"}}, "policy.history was 'cumulative' and is now 'winsorized'"),
        ({"faults": "blocks.0.mlp.up:nan:start=3", "steps": 20}, r"faults was \[\] and is now \['blocks.0.mlp.up:nan"),
        ({"steps": 9}, "steps was 10 and is now 9"),
    ],
)
def test_a_changed_setting_is_refused_by_name(go: Any, settings: dict[str, Any], match: str) -> None:
    folder = go("run")
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    with pytest.raises(TrimtabError, match=match) as caught:
        train(settings, folder, resume=True)
    assert "\n" not in str(caught.value)
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize(
    "repeated",
    [
        {"faults": FAULTS},
        {"policy": {"alpha": 1.05}},
        {"policy": {"alpha": 1.05, "beta": 1.1}, "lr": 0.004},
        {"unit": ["blocks.0.*", "blocks.1.*"]},
        {"recipe": "fp8"},
    ],
)
def test_repeating_stored_settings_is_fine(go: Any, tmp_path: Path, repeated: dict[str, Any]) -> None:
    settings = {"faults": FAULTS, "unit": ["blocks.0.*", "blocks.1.*"]}
    go("run", settings=settings, killed_at=6)
    assert train(repeated, tmp_path / "run", resume=True).steps == 10


def test_a_run_that_is_there_is_refused_without_resume_or_force(go: Any) -> None:
    folder = go("run")
    before = (folder / "metrics.jsonl").read_bytes()
    with pytest.raises(TrimtabError, match=r"already holds a run.*--resume.*--force"):
        go("run")
    assert (folder / "metrics.jsonl").read_bytes() == before
    go("run", settings={"seed": 1, "steps": 3}, force=True)
    assert len(losses(folder)) == 3
    assert {path.name for path in (folder / "checkpoints").iterdir()} == {"step_000003.pt"}


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"unit": ["nothing.*"]}, "nothing to convert"),
        ({"faults": "blocks.7.mlp.up:nan:start=3"}, "must name a unit, 'blocks.7.mlp.up' matches none"),
        ({"faults": 3}, "faults are text such as .*, got 3"),
        ({"data": "no/such/file"}, "existing file or folder"),
        ({"optimizer": "lion"}, "optimizer must be one of adamw, sgd, spam, stable_spam, osp, got 'lion'"),
        ({"recipe": "fp9"}, "recipe must be one of"),
        ({"roles": "outputs"}, "roles must be one or more of output"),
        ({"model": "huge"}, "a model size must be one of"),
        ({"device": "toaster"}, "device must be one that torch can use here, got 'toaster'"),
        ({"seq": 500}, "a window needs seq . 1 = 501 tokens"),
        ({"kv_heads": 3}, "kv_heads must divide heads"),
        ({"num_experts": 2, "top_k": 3}, "top_k must lie between"),
        ({"policy": {"max_high": -1}}, "max_high as a count must be at least 0"),
    ],
)
def test_what_cannot_run_is_refused_before_the_folder_is_touched(go: Any, settings: dict[str, Any], match: str) -> None:
    folder = go("run", settings={"steps": 1})
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    with pytest.raises(TrimtabError, match=match) as caught:
        go("run", settings=settings, force=True)
    assert "\n" not in str(caught.value)
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before
    with pytest.raises(TrimtabError, match=match):
        go("new", settings=settings)
    assert not (folder.parent / "new").exists()


def test_a_held_out_part_too_short_for_a_window_is_refused_at_once(go: Any, tmp_path: Path, text: Path) -> None:
    short = tmp_path / "short.txt"
    short.write_text(text.read_text()[:300])  # 285 tokens to train on, 15 held out
    with pytest.raises(TrimtabError, match="there are 15: give more text or a shorter seq"):
        go("run", settings={"data": str(short)})


@pytest.mark.parametrize("recipe", ["fp8_delayed", "nvfp4"])
def test_an_evaluation_changes_nothing(go: Any, recipe: str) -> None:
    settings = {"recipe": recipe, "faults": FAULTS}
    often, seldom = go("often", settings={**settings, "eval_every": 2}), go("seldom", settings=settings)
    assert losses(often) == losses(seldom)
    ours, theirs = state(often), state(seldom)
    assert ours.pop("config")["eval_every"] != theirs.pop("config")["eval_every"]
    assert_same(ours, theirs)
    evaluations = [line for line in lines(often) if "eval_loss_high" in line]
    assert len(evaluations) == 5
    assert all(line["eval_loss_high"] != line["eval_loss_low"] for line in evaluations)


def test_an_evaluation_is_the_mean_over_the_held_out_text(tmp_path: Path, small: dict[str, Any]) -> None:
    class Keep(Silent):
        def started(self, run: Run) -> None:
            self.run = run

    keep = Keep()
    train({**small, "eval_batches": 99, "recipe": "none", "mode": "observe"}, tmp_path / "run", watcher=keep)
    held_out = torch.from_numpy(keep.run.task.corpus.held_out.astype(np.int64))
    windows = (len(held_out) - 1) // 16
    inputs, targets = (held_out[at : at + windows * 16].view(windows, 16) for at in (0, 1))
    with torch.no_grad():
        expected = keep.run.model(inputs, targets).loss.item()
    last = lines(tmp_path / "run")[-1]
    assert last["eval_loss_high"] == last["eval_loss_low"] == pytest.approx(expected, rel=1e-5)


def test_watching_changes_not_a_bit(go: Any) -> None:
    settings = {"path": "low", "recipe": "nvfp4", "faults": FAULTS}
    off, observe = (go(mode, settings={**settings, "mode": mode}) for mode in ("off", "observe"))
    assert losses(off) == losses(observe)
    assert_same(state(off)["model"], state(observe)["model"])
    assert not (off / "trace.arrow").exists()
    assert not trace(observe).high.any()
    assert replayed(trace(observe)).high.any()  # it would have acted


def test_observe_leaves_every_unit_low(go: Any) -> None:
    assert losses(go("a", settings={"mode": "observe"})) == losses(go("b", settings={"mode": "observe", "path": "low"}))
    assert losses(go("c")) != losses(go("d", settings={"mode": "observe"}))


def test_all_high_is_the_plain_model(go: Any) -> None:
    plain = go("plain", settings={"recipe": "none", "mode": "observe"})
    high = go("high", settings={"recipe": "fp8", "mode": "observe", "path": "high"})
    assert losses(plain) == losses(high)
    assert_same(state(plain)["model"], state(high)["model"])
    assert trace(plain).norms.tobytes() == trace(high).norms.tobytes()
    assert trace(plain).units == trace(high).units
    assert losses(plain) != losses(go("low", settings={"mode": "observe", "path": "low"}))


@pytest.mark.parametrize("recipe", ["fp8", "nvfp4"])
def test_faults_hurt_the_low_path_alone(go: Any, recipe: str) -> None:
    def arm(path: str, faults: str) -> Path:
        settings = {"recipe": recipe, "mode": "observe", "path": path, "faults": faults}
        return go(f"{path} {bool(faults)}", settings=settings)

    clean, faulty = arm("high", ""), arm("high", FAULTS)
    assert losses(clean) == losses(faulty)
    assert_same(state(clean)["model"], state(faulty)["model"])
    clean, faulty = losses(arm("low", "")), losses(arm("low", FAULTS))
    assert clean[:3] == faulty[:3]  # the first window opens at step 4
    assert clean[3] != faulty[3]


@pytest.mark.parametrize(
    ("settings", "units"),
    [
        ({"unit": "block"}, ["blocks.0", "blocks.1"]),
        ({"unit": ["blocks.*.attn.*", "blocks.*.mlp.*"]}, ["blocks.*.attn.*", "blocks.*.mlp.*"]),
        (
            {"unit": "expert", "num_experts": 2, "top_k": 1},
            [f"blocks.{b}.{part}" for b in (0, 1) for part in ("attn.q", "mlp.experts.0", "mlp.experts.1")],
        ),
    ],
)
def test_units_are_those_that_were_asked_for(go: Any, settings: dict[str, Any], units: list[str]) -> None:
    found = trace(go("run", settings=settings))
    assert [unit for unit in found.units if unit in units] == units
    assert found.recoverable.all()


def test_bf16_weights_run_and_stay_bf16(go: Any) -> None:
    folder = go("run", settings={"dtype": "bf16"})
    model = state(folder)["model"]
    assert {value.dtype for value in model.values()} == {torch.bfloat16}
    assert all(map(math.isfinite, losses(folder)))
    assert losses(folder) != losses(go("fp32"))


def test_accumulation_is_the_mean_over_the_micro_batches(small: dict[str, Any]) -> None:
    run = Run(Config.from_dict({**small, "accumulate": 2, "recipe": "none", "mode": "observe"}), Silent())
    run.step = 3
    loss = run._backward()
    grad = run.model.head.weight.grad
    assert grad is not None
    got, expected = grad.clone(), torch.zeros_like(grad)
    total = 0.0
    for micro in (0, 1):
        run.update.zero_grad()
        part = run.model(*run.task.batch_at(3, micro)).loss
        part.backward()
        total += part.item() / 2
        expected += run.model.head.weight.grad / 2
    torch.testing.assert_close(got, expected)
    assert loss == pytest.approx(total)


def test_clipping_bounds_the_step_but_not_what_is_judged(go: Any) -> None:
    settings = {"optimizer": "sgd", "lr": 1e-9, "mode": "observe", "path": "high"}
    free, clipped = go("free", settings=settings), go("clipped", settings={**settings, "clip": 1e-3})
    norms = [[line["grad_norm"] for line in lines(folder) if "loss" in line] for folder in (free, clipped)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)
    momentum = state(clipped)["optimizer"]["optimizers"][0]["state"]
    total = math.sqrt(sum(entry["momentum_buffer"].double().square().sum().item() for entry in momentum.values()))
    assert total <= 1e-3 / (1 - 0.9) * 1.001
    assert min(norms[1]) > 0.1


def test_the_guard_runs_a_bad_batch_again(go: Any) -> None:
    folder = go("run", settings=GUARD)
    found = trace(folder)
    passes = np.flatnonzero(found.steps == 6)
    assert len(passes) == 2
    column = found.units.index("blocks.1.mlp.up")
    assert found.high[passes, column].tolist() == [False, True]
    assert found.norms[passes[0], column] > 4 * found.norms[passes[1], column]
    first, second = [line for line in lines(folder) if line["step"] == 6]
    assert "rerun" in [event["kind"] for event in first["events"]]
    assert "loss" not in first  # the pass that was thrown away is not a step
    assert "loss" in second


def test_weights_that_are_not_finite_never_reach_a_checkpoint(go: Any, tmp_path: Path, small: dict[str, Any]) -> None:
    class Breaks(Silent):
        def started(self, run: Run) -> None:
            self.run = run

        def stepped(self, info: StepInfo) -> None:
            if info.step == 3:
                with torch.no_grad():
                    self.run.model.norm.weight[0] = math.nan

    with pytest.raises(TrimtabError, match="weights are not finite at step 4"):
        train({**small, "checkpoint_every": 2}, tmp_path / "run", watcher=Breaks())
    folder = tmp_path / "run"
    assert {path.name for path in (folder / "checkpoints").iterdir()} == {"step_000002.pt"}
    train({}, folder, resume=True)
    assert_same_run(folder, go("whole", settings={"checkpoint_every": 2}))


def test_a_gradient_that_stays_non_finite_stops_the_run(go: Any, tmp_path: Path) -> None:
    settings = {
        "faults": "blocks.0.mlp.up:nan:start=3,width=8",
        "policy": {"max_high": 0, "max_nonfinite": 3},
        "checkpoint_every": 2,
    }
    with pytest.raises(NonFiniteError, match="3 steps in a row"):
        go("run", settings=settings)
    found = trace(tmp_path / "run")
    assert found.steps.tolist() == [1, 2, 3, 4, 5]
    assert np.isnan(found.norms[2:]).any(axis=1).all()
    assert_same(state(tmp_path / "run", 2)["model"], state(tmp_path / "run", 4)["model"])  # bad steps change nothing


def test_control_takes_a_poisoned_unit_high(go: Any) -> None:
    policy = {"max_high": 14, "alpha": 99.0, "beta": None, "lock_steps": 8}
    folder = go("run", settings={"faults": "blocks.0.mlp.up:nan:start=4,width=4", "policy": policy})
    bad = [line["step"] for line in lines(folder) if any(e["kind"] == "nonfinite" for e in line.get("events", ()))]
    assert bad == [4]
    assert trace(folder).high[4:8, trace(folder).units.index("blocks.0.mlp.up")].all()


def test_random_numbers_go_on_where_the_checkpoint_left_them(tmp_path: Path, small: dict[str, Any]) -> None:
    class Draws(Killed):
        def stepped(self, info: StepInfo) -> None:
            drawn[info.step] = torch.rand(()).item()
            super().stepped(info)

    drawn: dict[int, float] = {}
    train(small, tmp_path / "whole", watcher=Draws(99))
    whole, drawn = drawn, {}
    with pytest.raises(KeyboardInterrupt):
        train(small, tmp_path / "broken", watcher=Draws(7))
    train(small, tmp_path / "broken", watcher=Draws(99), resume=True)
    assert drawn == whole
    assert len(set(whole.values())) == 10


def test_a_mode_that_does_not_exist_costs_no_run(go: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = go("run", settings={"steps": 1})
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    monkeypatch.setenv("TRIMTAB", "sometimes")
    with pytest.raises(TrimtabError, match="TRIMTAB must be one of off, observe, act, got 'sometimes'"):
        go("run", force=True)
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("recipe", ["fp8_delayed", "nvfp4"])
def test_describing_a_run_changes_none_of_its_state(small: dict[str, Any], recipe: str) -> None:
    run = Run(Config.from_dict({**small, "recipe": recipe}), Silent())
    before, numbers = copy.deepcopy(path_state(run.model)), torch.get_rng_state()
    assert run.describe()["recipe"] == recipe
    assert_same(path_state(run.model), before)
    assert torch.get_rng_state().equal(numbers)
    assert run.model.training
