# SPDX-License-Identifier: Apache-2.0
"""The bench: paired runs in one folder, run once, and numbers that the folders give back."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from trimtab.errors import NonFiniteError, TrimtabError
from trimtab.lab import bench
from trimtab.lab.arms import ARMS
from trimtab.lab.bench import Outcome, Task, arms_of, run_bench, run_task, tasks
from trimtab.lab.gather import curve, rate_curve, rival_of, sweeps
from trimtab.lab.suites import SUITES, Cell, Suite
from trimtab.report.read import read_run, read_trace

FAULTS = "blocks.1.mlp.up:grad_scale:start=10,width=4,size=64; blocks.0.attn.v:grad_scale:start=20,width=4,size=64"
CORE = ("high", "low", "gnmr", "random")
STRUCK = ("clean", "low", "high", "gnmr", "random")  # with faults the two ends come first, and the top is `clean`


@pytest.fixture(name="suite", scope="module")
def _suite(small: dict[str, Any]) -> Suite:
    settings = {**small, "steps": 8, "checkpoint_every": 0}
    cells = (Cell("one"), Cell("two", {"lr": 0.002}, variants={"shy": ("gnmr", {"policy": {"max_high": 1}})}))
    return Suite("small", "two cells", settings, CORE, cells)


@pytest.fixture(name="smoke", scope="module")
def _smoke(tmp_path_factory: pytest.TempPathFactory, small: dict[str, Any]) -> tuple[dict[str, Any], Path]:
    """The smoke suite, smaller: a micro model, 30 steps, two seeds, nobody high before step 9."""
    out = tmp_path_factory.mktemp("bench") / "out"
    given = {**small, "steps": 30, "checkpoint_every": 0, "faults": FAULTS}
    given["policy"] = {**small["policy"], "warmup_steps": 8}
    return run_bench(SUITES["smoke"], out, seeds=(0, 1), given=given, command=["trimtab", "bench", "smoke"]), out


def folders(out: Path) -> dict[tuple[str, int], Path]:
    return {(path.parent.name, int(path.name)): path for path in out.glob("grad_scale/*/*")}


def test_a_smaller_smoke_leaves_one_folder_of_runs_and_a_file(smoke: tuple[dict[str, Any], Path]) -> None:
    result, out = smoke
    assert set(folders(out)) == {(arm, seed) for arm in STRUCK for seed in (0, 1)}
    assert json.loads((out / "bench.json").read_text(encoding="utf-8")) == result
    assert result["command"] == ["trimtab", "bench", "smoke"]
    assert result["seeds"] == [0, 1]
    assert result["versions"]["torch"]
    assert result["hardware"]["device"] == "cpu"
    assert list(result["cells"][0]["arms"]) == list(STRUCK)


def test_arms_of_a_seed_are_paired_and_random_has_controls_own_counts(smoke: tuple[dict[str, Any], Path]) -> None:
    found = folders(smoke[1])
    for seed in (0, 1):
        first = {read_run(found[arm, seed]).column("loss")[1][0] for arm in ("clean", "low", "gnmr", "random")}
        assert len(first) == 1  # same weights, same batch, all low in the first step
        gnmr, random = (read_trace(found[arm, seed] / "trace.arrow") for arm in ("gnmr", "random"))
        assert random.high.sum(axis=1).tolist() == gnmr.high.sum(axis=1).tolist()
        assert (random.high != gnmr.high).any()
        assert not gnmr.high[:8].any()  # it only watches until the first fault is near
        assert gnmr.high[8:].any()
        assert len({json.dumps(read_run(found[arm, seed]).config["faults"]) for arm in CORE}) == 1
        assert read_run(found["clean", seed]).config["faults"] == []
    assert read_run(found["low", 0]).column("loss")[1][0] != read_run(found["low", 1]).column("loss")[1][0]


def test_the_stated_numbers_are_those_of_the_folders(smoke: tuple[dict[str, Any], Path]) -> None:
    result, out = smoke
    cell, found = result["cells"][0], folders(out)
    loss = {key: read_run(path).column("eval_loss_high")[1][-1] for key, path in found.items()}
    gaps = [(loss["low", s] - loss["gnmr", s]) / (loss["low", s] - loss["clean", s]) for s in (0, 1)]
    gnmr = cell["arms"]["gnmr"]
    assert gnmr["stats"]["gap"]["mean"] == pytest.approx(np.mean(gaps))
    assert gnmr["stats"]["eval_high"]["mean"] == pytest.approx(np.mean([loss["gnmr", 0], loss["gnmr", 1]]))
    assert gnmr["vs_low"]["mean"] == pytest.approx(np.mean([loss["gnmr", s] - loss["low", s] for s in (0, 1)]))
    assert gnmr["vs_random"]["mean"] == pytest.approx(np.mean([loss["gnmr", s] - loss["random", s] for s in (0, 1)]))
    assert cell["damage"]["mean"] == pytest.approx(np.mean([loss["low", s] - loss["clean", s] for s in (0, 1)]))
    pooled = 1 - (loss["gnmr", 0] + loss["gnmr", 1] - loss["clean", 0] - loss["clean", 1]) / sum(
        loss["low", s] - loss["clean", s] for s in (0, 1)
    )
    assert gnmr["gap_pooled"] == pytest.approx(pooled)
    assert [cell["arms"][arm]["random"] for arm in STRUCK] == [None, None, None, "random", None]
    assert cell["windows"] == [[10, 14], [20, 24]]


def test_in_a_cell_with_faults_the_gap_is_that_between_low_and_clean(smoke: tuple[dict[str, Any], Path]) -> None:
    cell = smoke[0]["cells"][0]
    assert cell["top"] == "clean"
    for stat in ("gap", "gap_low"):
        assert [cell["arms"][end]["stats"][stat]["mean"] for end in ("clean", "low")] == [1.0, 0.0]
        assert cell["arms"]["high"]["stats"][stat]["mean"] not in (0.0, 1.0)
    assert [cell["arms"][end]["gap_pooled"] for end in ("clean", "low")] == [1.0, 0.0]


def test_in_a_cell_without_faults_high_is_the_top(suite: Suite, tmp_path: Path) -> None:
    cell = run_bench(suite.only(["one"]), tmp_path, seeds=(0,), arms=("clean",))["cells"][0]
    assert cell["top"] == "high"
    assert {name: arm["stats"]["gap"]["mean"] for name, arm in cell["arms"].items()} == {
        "high": 1.0,
        "low": 0.0,
        "clean": 0.0,  # nothing to leave out: it is low
    }
    losses = {name: arm["stats"]["eval_high"]["mean"] for name, arm in cell["arms"].items()}
    assert cell["damage"]["mean"] == pytest.approx(losses["low"] - losses["high"])
    assert cell["windows"] == []


def test_what_triggers_is_scored_as_a_trigger_and_random_units_are_not(smoke: tuple[dict[str, Any], Path]) -> None:
    arms = smoke[0]["cells"][0]["arms"]
    for name in ("false_alarms_per_1k", "denied"):
        assert arms["gnmr"]["stats"][name]["n"] == 2
        assert arms["random"]["stats"][name]["n"] == 0
    for name in ("promotion_ratio", "detected", "blocked", "top1", "ms_per_step", "extra_bytes_mean"):
        assert arms["gnmr"]["stats"][name]["n"] == arms["random"]["stats"][name]["n"] == 2
    assert arms["random"]["stats"]["promotion_ratio"] == arms["gnmr"]["stats"]["promotion_ratio"]


@pytest.fixture(name="counted")
def _counted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The folders that were trained into, in order."""
    calls: list[str] = []
    real = bench.run_arm

    def counting(arm: Any, settings: Any, out: Path, **rest: Any) -> Any:
        calls.append("/".join(out.parts[-3:]))
        return real(arm, settings, out, **rest)

    monkeypatch.setattr(bench, "run_arm", counting)
    return calls


def test_an_interrupted_bench_goes_on_and_trains_nothing_twice(
    suite: Suite, tmp_path: Path, counted: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(number: int, total: int, task: Task, outcome: Outcome) -> None:
        if number == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_bench(suite, tmp_path, seeds=(0,), told=stop)
    assert len(counted) == 5
    seen: list[bool] = []
    result = run_bench(suite, tmp_path, seeds=(0,), told=lambda n, total, task, outcome: seen.append(outcome.before))
    assert seen == [True] * 5 + [False] * 4  # four arms, and five of the second cell
    assert len(counted) == len(set(counted)) == 9
    again = run_bench(suite, tmp_path, seeds=(0,))
    assert len(counted) == 9
    assert again["cells"] == result["cells"]
    run_bench(suite, tmp_path, seeds=(0, 1), arms=("low",))
    assert sorted(counted[9:]) == sorted(f"{cell}/{arm}/1" for cell in ("one", "two") for arm in ("high", "low"))


def test_runs_of_other_settings_are_not_taken_for_these(suite: Suite, tmp_path: Path) -> None:
    todo = tasks(suite, tmp_path, seeds=(0,), given={})
    run_task(todo[0])
    other = tasks(suite, tmp_path, seeds=(0,), given={"lr": 0.1, "policy": {"alpha": 9}})
    with pytest.raises(TrimtabError, match=r"other settings \(lr, policy\): give another --out"):
        run_task(other[0])


def test_a_run_from_before_a_setting_existed_is_found_and_one_of_other_settings_is_not(
    suite: Suite, tmp_path: Path, counted: list[str]
) -> None:
    (task,) = [t for t in tasks(suite, tmp_path, seeds=(0,), given={}) if t.cell == "one" and t.arm.name == "low"]
    ran = run_task(task)
    path = task.folder / bench.DONE
    old = json.loads(path.read_text(encoding="utf-8"))
    assert old["settings"].pop("recipe_options") == {}
    path.write_text(json.dumps(old), encoding="utf-8")
    again = run_task(task)
    assert again.before
    assert again.seconds == ran.seconds
    assert len(counted) == 1
    (other,) = [
        t
        for t in tasks(suite, tmp_path, seeds=(0,), given={"recipe": "saved4", "recipe_options": {"scope": "forward"}})
        if t.cell == "one" and t.arm.name == "low"
    ]
    with pytest.raises(TrimtabError, match=r"other settings \(recipe, recipe_options\)"):
        run_task(other)  # what the old run did not name, it did not do
    old["settings"]["lr"] *= 2
    path.write_text(json.dumps(old), encoding="utf-8")
    with pytest.raises(TrimtabError, match=r"other settings \(lr\): give another --out"):
        run_task(task)
    assert len(counted) == 1


DAMAGED = (
    "",
    "{",
    "[1]",
    "\udcff",
    '{"settings": {}}',
    '{"settings": 3}',
    '{"settings": {"steps": "many"}}',
    "seconds",
    "died",
    "peak_bytes",
)


def test_a_damaged_done_file_is_said_and_costs_no_finished_run(
    suite: Suite, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    only = suite.only(["one"])
    result = run_bench(only, tmp_path, seeds=(0,), arms=("low",))
    done = tmp_path / "one" / "low" / "0" / bench.DONE
    said = json.loads(done.read_text(encoding="utf-8"))
    files = {path: path.read_bytes() for path in (tmp_path / "one").rglob("*") if path.is_file() and path != done}
    seen: list[bool] = []
    for damage in DAMAGED:
        text = json.dumps(said | {damage: ["no such thing"]}) if damage in said else damage
        done.write_bytes(text.encode("utf-8", "surrogateescape"))
        caplog.clear()
        seen.clear()
        again = run_bench(only, tmp_path, seeds=(0,), arms=("low",), told=lambda *told: seen.append(told[3].before))
        assert [record.getMessage().partition(" (")[0] for record in caplog.records] == [f"{done} is damaged"]
        assert seen == [True, False]  # it was gone on with, and found to be at its end
        assert {path: path.read_bytes() for path in files} == files
        assert again["cells"] == result["cells"]
        assert json.loads(done.read_text(encoding="utf-8")) | {"seconds": 0} == said | {"seconds": 0}


def test_a_damaged_run_is_named_and_one_that_others_are_made_from_must_be_whole(suite: Suite, tmp_path: Path) -> None:
    only = suite.only(["one"])
    run_bench(only, tmp_path, seeds=(0,))
    run, trace = tmp_path / "one" / "low" / "0" / "run.json", tmp_path / "one" / "gnmr" / "0" / "trace.arrow"
    whole = run.read_bytes()
    run.write_text(json.dumps({"config": {"faults": [3]}}), encoding="utf-8")
    with pytest.raises(TrimtabError, match=r"one.low.0 cannot be scored .* restore it, or move the folder away"):
        run_bench(only, tmp_path, seeds=(0,))
    run.write_bytes(whole)
    first = tmp_path / "one" / "high" / "0" / "run.json"
    told = json.loads(first.read_text(encoding="utf-8"))
    first.write_text(json.dumps(told | {"cpu_count": float("nan")}), encoding="utf-8")
    assert run_bench(only, tmp_path, seeds=(0,))["cpu_count"] is None  # and bench.json was written
    (tmp_path / "one" / "random" / "0" / bench.DONE).unlink()
    trace.write_bytes(trace.read_bytes()[:-9])
    with pytest.raises(TrimtabError, match=r"trace.arrow must hold every step of its run, and is"):
        run_bench(only, tmp_path, seeds=(0,))


def test_the_order_puts_ends_first_and_each_arm_after_what_it_needs(suite: Suite, tmp_path: Path) -> None:
    one, two = suite.cells
    assert [arm.name for arm in arms_of(suite, one, ["random-steady"])] == ["high", "low", "steady", "random-steady"]
    assert [arm.name for arm in arms_of(suite, two, None)] == [*CORE, "shy"]
    assert [arm.name for arm in arms_of(suite, one, ["shy"])] == ["high", "low"]  # a variant of the other cell
    struck = SUITES["smoke"]
    assert [arm.name for arm in arms_of(struck, struck.cells[0], ["random"])] == ["clean", "low", "gnmr", "random"]
    found = tasks(suite, tmp_path, seeds=(0,), given={})
    for task in found:
        assert task.arm.after is None or task.done[task.arm.after] == task.folder.parent.parent / task.arm.after / "0"
    shy = next(task for task in found if task.arm.name == "shy")
    assert shy.arm.over(shy.settings)["policy"] == {**suite.settings["policy"], "max_high": 1}
    assert shy.folder == tmp_path / "two" / "shy" / "0"
    with pytest.raises(TrimtabError, match="did you mean 'gnmr-replay'"):
        tasks(suite, tmp_path, seeds=(0,), arms=["gnmr-reply"], given={})


def test_a_run_that_dies_is_a_result_and_is_not_run_again(
    suite: Suite, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    real = bench.run_arm

    def dying(arm: Any, settings: Any, out: Path, **rest: Any) -> Any:
        calls.append(arm.name)
        result = real(arm, settings, out, **rest)
        if arm.name == "low" and settings["seed"] == 1:
            raise NonFiniteError("the gradient was not finite for 10 steps in a row")
        return result

    monkeypatch.setattr(bench, "run_arm", dying)
    only = suite.only(["one"])
    result = run_bench(only, tmp_path, seeds=(0, 1), arms=("gnmr",))
    low = result["cells"][0]["arms"]["low"]
    assert low["died"] == [1]
    assert low["stats"]["eval_high"]["n"] == 1
    assert result["cells"][0]["arms"]["gnmr"]["stats"]["gap"]["n"] == 1
    run_bench(only, tmp_path, seeds=(0, 1), arms=("gnmr",))
    assert len(calls) == 6


def test_weights_that_stop_being_finite_are_such_a_death(suite: Suite, tmp_path: Path) -> None:
    given = {"faults": "blocks.1.mlp.up:nan:start=3,width=2"}
    result = run_bench(suite.only(["one"]), tmp_path, seeds=(0,), arms=("gnmr",), given=given)
    arms = result["cells"][0]["arms"]
    assert {name: arm["died"] for name, arm in arms.items()} == {"high": [], "low": [0], "gnmr": []}
    assert arms["low"]["stats"]["eval_high"]["n"] == 0
    assert arms["gnmr"]["stats"]["nonfinite"]["mean"] > 0


def test_an_error_that_is_no_death_stops_the_bench(
    suite: Suite, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise TrimtabError("the disk is full")

    monkeypatch.setattr(bench, "run_arm", broken)
    with pytest.raises(TrimtabError, match="disk is full"):
        run_bench(suite, tmp_path, seeds=(0,))


def test_an_error_in_one_process_lets_no_other_chain_begin(
    suite: Suite, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[int] = []

    def chain(todo: list[Task]) -> list[Outcome]:
        begun.append(todo[0].seed)
        if todo[0].seed == 0:
            raise TrimtabError("the disk is full")
        time.sleep(0.2)
        return [Outcome(0.0, None, None) for _ in todo]

    monkeypatch.setattr(bench, "ProcessPoolExecutor", lambda jobs, *_: ThreadPoolExecutor(jobs))
    monkeypatch.setattr(bench, "run_chain", chain)
    with pytest.raises(TrimtabError, match="disk is full"):
        run_bench(suite.only(["one"]), tmp_path, seeds=range(12), jobs=2)
    assert len(begun) < 6


def test_processes_give_the_numbers_that_one_gives(suite: Suite, tmp_path: Path) -> None:
    only = suite.only(["one"])
    results = [
        run_bench(only, tmp_path / str(jobs), seeds=(0,), arms=("random",), jobs=jobs)["cells"][0] for jobs in (1, 2)
    ]
    for arm in CORE:
        for name in ("eval_high", "eval_low", "promotion_ratio", "gap"):
            assert results[0]["arms"][arm]["stats"][name] == results[1]["arms"][arm]["stats"][name]
    assert results[0]["curves"] == results[1]["curves"]


def test_only_random_units_at_an_arms_own_counts_are_its_rival() -> None:
    after = {name: ARMS[name].after for name in ("gnmr", "random", "steady", "random-steady", "gap", "high")}
    assert [rival_of(name, after) for name in ("gnmr", "steady", "gap", "high", "random")] == [
        "random",
        "random-steady",
        None,
        None,
        None,
    ]


def test_a_curve_is_the_mean_over_seeds_and_breaks_where_a_loss_does(
    tmp_path: Path, make_metrics: Callable[[str, list[float | None]], Path]
) -> None:
    found = curve([make_metrics("a", [1.0, 2.0, 3.0]), make_metrics("b", [3.0, 6.0]), make_metrics("c", [2.0, None])])
    assert found["x"] == [1.0, 2.0, 3.0]
    assert found["y"] == [2.0, None, 3.0]
    assert (found["low"][0], found["high"][0]) == (1.0, 3.0)


@pytest.fixture(name="make_metrics")
def _make_metrics(tmp_path: Path) -> Callable[[str, list[float | None]], Path]:
    def make(name: str, losses: list[float | None]) -> Path:
        folder = tmp_path / name
        folder.mkdir()
        lines = [json.dumps({"step": i, "loss": loss}) for i, loss in enumerate(losses, 1)]
        (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
        return folder

    return make


def test_the_largest_stable_rate_is_the_last_before_the_loss_rises_or_a_run_dies() -> None:
    rates, starts = [1e-3, 2e-3, 4e-3, 8e-3], [5.0] * 4
    slow = rate_curve(rates, [2.0, 1.0, 1.05, 1.3], [0, 0, 0, 0], starts)
    assert slow["largest_stable"] == 4e-3  # 2.0 at the smallest rate is slow, not unstable
    assert slow["sensitivity"] == pytest.approx((1.0 + 0.0 + 0.05 + 0.3) / 4)
    dead = rate_curve(rates, [2.0, 1.0, 1.0, None], [0, 0, 1, 3], starts)
    assert dead["largest_stable"] == 2e-3  # one seed of the third rate died
    assert dead["sensitivity"] == pytest.approx((1.0 + 0.0 + 4.0 + 4.0) / 4)
    nothing = {"largest_stable": None, "sensitivity": None}
    assert rate_curve([1e-3], [None], [2], [None]) == nothing
    assert rate_curve([1e3], [5.54], [0], [5.55]) == nothing  # alive, and as good as untrained


def test_a_sweep_is_the_cells_of_one_line_in_order() -> None:
    def cell(name: str, group: str, rate: float, loss: float) -> dict[str, Any]:
        stats = {"eval_high": {"mean": loss, "half": 0.1}, "gap": {"mean": None, "half": None}}
        return {
            "name": name,
            "group": group,
            "axis": ["lr", rate],
            "arms": {"low": {"stats": stats, "died": []}},
            "curves": {"low": {"y": [5.0]}},
        }

    found = sweeps([cell("b", "g", 2.0, 1.0), cell("a", "g", 1.0, 1.5), cell("c", "h", 1.0, 9.0)])
    assert [(row["group"], row["x"], row["eval_high"]) for row in found] == [
        ("g", [1.0, 2.0], [1.5, 1.0]),
        ("h", [1.0], [9.0]),
    ]
    assert found[0]["largest_stable"] == 2.0


@pytest.mark.skipif(sys.platform != "linux", reason="processes follow their parent on Linux only")
def test_a_killed_bench_leaves_nobody_training(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "trimtab", "bench", "smoke", "--jobs", "2", "--seeds", "2", "--device", "cpu"]
    process = subprocess.Popen([*command, "--set", "steps=100000", "--out", str(tmp_path)], stderr=subprocess.DEVNULL)
    try:
        waiting = time.monotonic() + 60
        while len(list(tmp_path.glob("*/*/*/run.json"))) < 2:  # two workers have begun
            assert time.monotonic() < waiting
            time.sleep(0.1)
        children = [
            int(child) for child in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        ]
        assert len(children) >= 2
    finally:
        process.kill()
        process.wait()
    waiting = time.monotonic() + 20
    while any(is_alive(child) for child in children):
        assert time.monotonic() < waiting
        time.sleep(0.1)


def test_a_worker_that_starts_after_the_bench_was_killed_ends_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes seconds to start, and would find its first tasks in a pipe."""
    left: list[int] = []
    monkeypatch.setattr(bench.ctypes, "CDLL", lambda name: SimpleNamespace(prctl=lambda *args: 0))
    monkeypatch.setattr(bench.os, "_exit", left.append)
    bench._end_with_parent(os.getppid())
    assert left == []
    bench._end_with_parent(os.getpid())
    assert left == [1]


def is_alive(process: int) -> bool:
    """Whether a process runs; a zombie that nobody has waited for does not."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
