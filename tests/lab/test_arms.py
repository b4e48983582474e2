# SPDX-License-Identifier: Apache-2.0
"""Arms: each runs ten steps on one small setting and does what its name says, as its trace shows; arms of one seed
share weights, data and budget; an arm made from another's run needs it; a killed one goes on where it was."""

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from reference.replayed import replayed

from trimtab.control.policy import Policy
from trimtab.control.replay import replay
from trimtab.errors import TrimtabError
from trimtab.lab.arms import ARMS, DETECTORS, Arm, adapt_from, find_arm, random_like, run_arm
from trimtab.lab.config import Config
from trimtab.lab.run import Silent, StepInfo
from trimtab.report.read import Run, Trace, read_run

FAULT = "blocks.1.mlp.up:grad_scale:start=5,width=3,size=64"
STATIC = {"adapt", "ends"}
NOBODY = {"high", "low", "clean", "plain", "trigger-clip", "clip", "autoclip", "zclip", "adagc", "skip-step", "spam"}
NOBODY |= {"stable-spam", "stabilizer"}
FULL = {"round-robin", "top-norm", "by-lot", *(f"{name}-full" for name in ("gnmr", *DETECTORS))}
BLOCKS = {"unit": "block", "policy": {"max_high": 1}}  # the oracle measures every unit in every step
POLICY = {name for name in ARMS if name.startswith(("gnmr", "steady", *DETECTORS))} | {"secondhand"}
RANDOM = {name for name in ARMS if name.startswith("random")}
QUIET = {"update", "source", "source-replay"}  # Adam's updates do not spike; eight values come before a judgement

Ran = Callable[[str], Run]


@pytest.fixture(scope="module")
def suite(small: dict[str, Any]) -> dict[str, Any]:
    """Ten steps with a fault, under the small policy, with a warm-up long enough for adapt to learn something."""
    policy = {**small["policy"], "warmup_steps": 4}
    return {**small, "policy": policy, "faults": FAULT, "checkpoint_every": 0}


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory, suite: dict[str, Any]) -> Ran:
    """The run of an arm, and first of the one it comes after; each is run once."""
    out, found = tmp_path_factory.mktemp("arms"), dict[str, Run]()

    def get(name: str) -> Run:
        if name not in found:
            arm = find_arm(name)
            done = {} if arm.after is None else {arm.after: get(arm.after).folder}
            run_arm(arm, {**suite, **BLOCKS} if name == "oracle" else suite, out / name, done=done)
            found[name] = read_run(out / name)
        return found[name]

    return get


def trace(run: Run) -> Trace:
    assert run.trace is not None
    return run.trace


def last_passes(found: Trace) -> np.ndarray:
    """The set that each step ended with."""
    return np.array([found.high[found.steps == step][-1] for step in range(1, found.steps.max() + 1)])


@pytest.mark.parametrize("name", ARMS)
def test_each_arm_runs_high_whom_its_name_says(ran: Ran, name: str) -> None:
    run = ran(name)
    found = trace(run)
    assert (found.steps.max(), len(found.units)) == (10, 2 if name == "oracle" else 14)
    losses = run.column("loss")[1]
    assert len(losses) == 10
    assert np.isfinite(losses).all()
    sizes = last_passes(found).sum(axis=1)
    if name in NOBODY:
        assert not found.high.any()
    elif name in FULL:
        assert sizes.tolist() == [0] + [3] * 9
    elif name == "oracle":
        assert sizes.max() == 1
        assert found.high[4:7, found.units.index("blocks.1")].all()  # it knows before the fault strikes
    elif name in POLICY | RANDOM:
        assert sizes.max() <= 3  # the suite's budget
        assert sizes[0] == 0
        assert sizes.any() or name in QUIET
    else:
        assert name in STATIC
        assert sizes.all()


@pytest.mark.parametrize("name", ARMS)
def test_arms_share_weights_and_data(ran: Ran, name: str) -> None:
    config, reference = ran(name).config, ran("low").config
    for key in ("seed", "batch", "seq", "accumulate", "model", "lr", "steps", "data", "bad_data", "dtype"):
        assert config[key] == reference[key]
    assert config["faults"] == ([] if name in ("plain", "clean") else reference["faults"])
    first, low = ran(name).column("loss")[1][0], ran("low").column("loss")[1][0]
    # The same batch and weights: apart from the path and the order of a sum, the first loss is one number.
    assert first == pytest.approx(low, abs=0.02)
    if name not in ("high", "plain", "oracle", *STATIC) and not name.startswith("gsnr"):
        assert first == low


@pytest.mark.parametrize("name", sorted(POLICY))
def test_whom_the_policy_chooses_follows_from_what_was_read(ran: Ran, name: str) -> None:
    found = trace(ran(name))
    full = name.endswith("-full")
    read = name.split("-")[0]
    assert found.detector["name"] == (read if read in DETECTORS else "gnmr") + (":full" if full else "")
    assert (replayed(found).high[:-1] == found.high[1:]).all()


def test_gnmr_is_the_suites_policy_and_its_variants_change_one_thing(ran: Ran, suite: dict[str, Any]) -> None:
    base = Policy().replace(**suite["policy"])
    changes = {"gnmr": {}, "gnmr-no-jump": {"beta": None}, "gnmr-replay": {"replay_step": 10.0}, "gnmr-clip": {}}
    for name, change in changes.items():
        assert Policy.from_dict(trace(ran(name)).policy) == base.replace(**change)
    assert (trace(ran("gnmr-no-jump")).high != trace(ran("gnmr")).high).any()
    assert len(trace(ran("gnmr-replay"))) > 10  # a batch ran again
    assert trace(ran("gnmr")).steps.tolist() == list(range(1, 11))


def test_arms_of_a_preset_keep_the_suites_budget_and_warm_up_unless_they_have_their_own(ran: Ran) -> None:
    steady, told = Policy.preset("steady").replace(warmup_steps=4), Policy.preset("secondhand")
    again = steady.replace(max_high=0.1, replay_step=2.0)
    wanted = {
        "steady": (steady.replace(max_high=3), 3),
        "steady-replay": (again, 1),
        "source-replay": (Policy.preset("repair").replace(warmup_steps=4), 1),
        "secondhand": (told.replace(warmup_steps=4), 1),
    }
    for name, (policy, most) in wanted.items():
        assert Policy.from_dict(trace(ran(name)).policy) == policy
        assert trace(ran(name)).max_high == most
    assert len(trace(ran("steady-replay"))) > 10  # a batch ran again


@pytest.mark.parametrize("name", ["random", "random-gnmr-replay", "random-steady", "random-gap"])
def test_random_units_are_as_many_as_the_other_arm_had_and_others(ran: Ran, name: str) -> None:
    other = last_passes(trace(ran(str(ARMS[name].after))))
    found = trace(ran(name))
    assert found.steps.tolist() == list(range(1, 11))
    assert found.high.sum(axis=1).tolist() == other.sum(axis=1).tolist()
    assert (found.high != other).any()


def test_round_robin_covers_all(ran: Ran) -> None:
    found = trace(ran("round-robin"))
    assert found.high[1:6].any(axis=0).all()  # 14 units, 3 at a time: 5 steps
    assert found.high[1:].sum(axis=0).max() == 2


def test_top_norm_takes_the_largest_norms_of_the_step_before(ran: Ran) -> None:
    found = trace(ran("top-norm"))
    for norms, high in zip(found.norms[:-1], found.high[1:], strict=True):
        assert set(np.flatnonzero(high)) == set(np.argsort(-norms, kind="stable")[:3])


def test_adapt_is_high_in_its_warm_up_and_then_keeps_the_quarter_with_the_largest_mean_ratio(ran: Ran) -> None:
    found, high = trace(ran("adapt")), trace(ran("high"))
    assert found.high[:4].all()
    assert (found.high[4:] == found.high[4]).all()
    assert (found.norms[:4] == high.norms[:4]).all()  # to the bit the run of `high`, where its list is read
    means = np.array([np.mean([ratio_by_hand(high.norms[:4, b], t) for t in range(4)]) for b in range(14)])
    assert set(np.flatnonzero(found.high[4])) == set(np.argsort(-means, kind="stable")[:3])  # a quarter of 14


def ratio_by_hand(norms: np.ndarray, step: int) -> float:
    return 1.0 if step == 0 else float(norms[step]) / float(np.mean(norms[:step], dtype=np.float64))


def test_ends_never_change_and_leave_the_middle_low(tmp_path: Path, suite: dict[str, Any]) -> None:
    run_arm(ARMS["ends"], {**suite, "model": "tiny", "steps": 4}, tmp_path / "run", done={})
    found = trace(read_run(tmp_path / "run"))
    ends = np.array([name.split(".")[1] in ("0", "3") for name in found.units])
    assert (found.high == ends).all()  # from the first step on
    assert 0 < ends.sum() < len(ends)


def test_trigger_clip_flags_as_control_does_and_recovers_nobody(ran: Ran) -> None:
    run = ran("trigger-clip")
    found = trace(run)
    clipped = run.column("clipped")[1]
    flagged = replay(found.norms, Policy.from_dict(found.policy))
    assert (clipped <= flagged.high.sum(axis=1)).all()
    assert clipped[4] > 0  # the fault
    assert trace(ran("gnmr")).norms[:2].tobytes() == found.norms[:2].tobytes()


def test_a_fault_reaches_low_and_not_high(ran: Ran) -> None:
    unit = trace(ran("low")).units.index("blocks.1.mlp.up")
    assert trace(ran("low")).norms[4, unit] > 20 * trace(ran("high")).norms[4, unit]


def test_clean_is_low_to_the_bit_until_the_first_fault_and_not_from_there_on(ran: Ran) -> None:
    clean, low = ran("clean"), ran("low")
    first = 5 - 1  # the row of the first faulty step
    norms, struck = trace(clean).norms, trace(low).norms
    assert norms[:first].tobytes() == struck[:first].tobytes()
    unit = trace(low).units.index("blocks.1.mlp.up")
    assert struck[first, unit] > 20 * norms[first, unit]
    losses, hurt = (run.column("loss")[1] for run in (clean, low))
    assert losses[: first + 1].tolist() == hurt[: first + 1].tolist()  # a backward fault shows in the next loss
    assert (losses[first + 1 :] != hurt[first + 1 :]).all()
    assert (norms[first:] != struck[first:]).any(axis=1).all()


def test_a_clipped_arm_moves_less(ran: Ran) -> None:
    """Each clipping arm leaves the path of `low` at its first clipped step at the latest by the fault."""
    low = ran("low").column("loss")[1]
    for name in ("clip", "autoclip", "zclip", "adagc", "spam", "stable-spam", "stabilizer"):
        assert (ran(name).column("loss")[1] != low).any(), name
    # ten steps are too few for skip-step to act: it must then change nothing at all
    assert (ran("skip-step").column("loss")[1] == low).all()


def test_a_preset_replaces_the_policy_but_not_the_budget_and_the_warm_up() -> None:
    arm = Arm("x", "", {"policy": {"preset": "steady"}, "optimizer_options": {"eps": 1e-6}})
    suite = {"policy": {"alpha": 9.0, "max_high": 7}, "optimizer_options": {"betas": [0.9, 0.95]}, "lr": 1e-3}
    over = arm.over(suite)
    assert Config.from_dict(over).build_policy() == Policy.preset("steady").replace(max_high=7)
    assert over["optimizer_options"] == {"betas": [0.9, 0.95], "eps": 1e-6}
    assert over["lr"] == 1e-3
    assert suite["policy"] == {"alpha": 9.0, "max_high": 7}
    kept = arm.over({"policy": {"preset": "paper-b8"}})
    assert Config.from_dict(kept).build_policy().max_high == Policy.preset("paper-b8").max_high
    # A warm-up is kept where the suite names it, not where it comes with the suite's own preset.
    moe = {"preset": "paper-moe", "max_high": 2}
    steady = Policy.preset("steady").replace(max_high=2)
    assert Config.from_dict(arm.over({"policy": moe})).build_policy() == steady
    watched = {**moe, "warmup": "monitor", "warmup_steps": 40}
    found = Config.from_dict(arm.over({"policy": watched})).build_policy()
    assert found == steady.replace(warmup="monitor", warmup_steps=40)
    own = Arm("y", "", {"policy": {"preset": "steady", "warmup_steps": 7}})
    assert Config.from_dict(own.over({"policy": watched})).build_policy() == found.replace(warmup_steps=7)


@pytest.mark.parametrize("name", ["random", "adapt"])
def test_an_arm_made_from_another_needs_it(tmp_path: Path, suite: dict[str, Any], name: str) -> None:
    with pytest.raises(TrimtabError, match=rf"the arm {name} is made from the run of {ARMS[name].after}, got \[\]"):
        run_arm(ARMS[name], suite, tmp_path / "run", done={})
    assert not (tmp_path / "run").exists()


def test_arms_are_found_by_name() -> None:
    assert find_arm("zclip") is ARMS["zclip"]
    assert find_arm("random-zscore").after == "zscore"
    assert random_like("gnmr").name == "random-gnmr"
    with pytest.raises(TrimtabError, match="there is no arm 'roundrobin': did you mean 'round-robin'"):
        find_arm("roundrobin")
    for name, arm in ARMS.items():
        assert arm.name == name
        assert arm.after is None or arm.after in ARMS
        assert arm.what
        assert "\n" not in arm.what
        assert pickle.loads(pickle.dumps(arm)) == arm  # a bench sends it to other processes


@pytest.mark.parametrize("name", ["random", "adapt", "top-norm", "oracle", "gap"])
def test_a_killed_arm_goes_on_and_a_finished_one_is_left_alone(
    ran: Ran, suite: dict[str, Any], tmp_path: Path, name: str
) -> None:
    class Killed(Silent):
        def stepped(self, info: StepInfo) -> None:
            if info.step == 7:
                raise KeyboardInterrupt

    arm, whole = find_arm(name), ran(name)
    done = {} if arm.after is None else {arm.after: ran(arm.after).folder}
    often = {**suite, **(BLOCKS if name == "oracle" else {}), "checkpoint_every": 3}
    with pytest.raises(KeyboardInterrupt):
        run_arm(arm, often, tmp_path / "run", done=done, watcher=Killed())
    assert not run_arm(arm, often, tmp_path / "run", done=done).finished_before
    found = read_run(tmp_path / "run")
    assert trace(found).high.tobytes() == trace(whole).high.tobytes()
    assert trace(found).norms.tobytes() == trace(whole).norms.tobytes()
    assert found.column("loss")[1].tolist() == whole.column("loss")[1].tolist()
    assert run_arm(arm, often, tmp_path / "run", done=done).finished_before


def test_adapt_needs_a_warm_up(tmp_path: Path, suite: dict[str, Any]) -> None:
    settings = {**suite, "steps": 2, "policy": {**suite["policy"], "warmup_steps": 0, "alpha_warmup": 1.5}}
    run_arm(ARMS["high"], settings, tmp_path / "high", done={})
    with pytest.raises(TrimtabError, match=r"adapt learns its list in the warm-up, got policy.warmup_steps=0"):
        adapt_from(tmp_path / "high", 0)
