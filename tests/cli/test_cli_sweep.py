# SPDX-License-Identifier: Apache-2.0
"""`trimtab sweep`, and `replay` on files of other tools: the table, the JSON, the page, and one line for bad input."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trimtab.control.policy import Policy
from trimtab.control.record import Recorder
from trimtab.control.replay import replay
from trimtab.report.read import read_trace

EVIL = "[/red]\x1b[2J<b>"


@pytest.fixture(name="run")
def _run(tmp_path: Path) -> Path:
    """A recorded run of 150 steps; two of its units have names that markup would stumble over."""
    norms = np.random.default_rng(0).lognormal(0, 0.1, (150, 4)).astype(np.float32)
    norms[120:124, 2] *= 9
    policy = Policy(max_high=1, alpha=1.05, beta=None, alpha_warmup=None)
    units = ["a", EVIL, "[bold]c", "d"]
    with Recorder(tmp_path / "run", run={"name": EVIL}) as recorder:
        recorder.open_trace(units, np.ones(4, bool), policy.to_dict(), 1, 0, 150)
        for t in range(150):
            recorder.observe(t + 1, norms[t], np.ones(4, bool), np.zeros(4, bool), float(np.linalg.norm(norms[t])))
            recorder.log(t + 1, loss=3.0 - 0.01 * t + (5 if t == 125 else 0))
    return tmp_path / "run"


@pytest.fixture(name="table")
def _table(tmp_path: Path) -> Path:
    norms = np.random.default_rng(0).lognormal(0, 0.2, (100, 2))
    rows = "".join(f"{t + 1},{a},{b},{5 - t / 50}\n" for t, (a, b) in enumerate(norms.tolist()))
    (tmp_path / "log.csv").write_text(f"step,grad_norm/a,grad_norm/b,loss\n{rows}")
    return tmp_path / "log.csv"


def refused(answer: Any, *words: str) -> None:
    assert answer.code == 2, answer
    assert answer.err.startswith("error: ")
    assert answer.err.count("\n") == 1, answer.err
    for word in words:
        assert word in answer.err


def test_a_run_gets_a_table_a_suggestion_and_a_page(trimtab: Any, run: Path) -> None:
    answer = trimtab("sweep", run)
    assert (answer.code, answer.err) == (0, "")
    assert "150 steps, 4 units" in answer.out
    assert "Suggested: " in answer.out
    assert "Open-loop" in answer.out
    assert "\x1b" not in answer.out
    assert re.search(r"^ *own +\d+ +\d+\.\d", answer.out, re.M)
    assert (run / "sweep.html").is_file()
    next_ = re.search(r"^next: trimtab replay (\S+) (.*)$", answer.out, re.M)
    assert next_
    again = trimtab("replay", run, *next_.group(2).split())
    assert again.code == 0, again


def test_a_grid_of_ones_own_as_json_equals_replays(trimtab: Any, run: Path) -> None:
    answer = trimtab(
        "sweep", run, "--grid", "alpha=1.2,2", "--grid", "policy.beta=none,3", "--set", "max_high=2", "--json"
    )
    assert (answer.code, answer.err) == (0, "")
    told = json.loads(answer.out)
    assert [p["name"] for p in told["policies"]] == [
        "own", "alpha 1.2, beta none", "alpha 1.2, beta 3", "alpha 2, beta none", "alpha 2, beta 3",
    ]  # fmt: skip
    trace = read_trace(run / "trace.arrow")
    for row in told["policies"]:
        policy = Policy.from_dict(row["policy"])
        assert policy.max_high == 2
        found = replay(trace.norms, policy, total_steps=150)
        assert row["firings"] == int(found.alarmed.sum())
        assert row["summary"]["denied"] == found.summary()["denied"]
    assert told["spikes"] == [126]
    assert told["suggested"]["name"] in [p["name"] for p in told["policies"]]


def test_a_file_of_another_tool_is_swept_and_replayed_and_left_alone(trimtab: Any, table: Path, tmp_path: Path) -> None:
    before = table.read_bytes()
    answer = trimtab("sweep", table, "--out", tmp_path / "new" / "page.html")
    assert (answer.code, answer.err) == (0, "")
    assert "found loss loss, norms of 2 units" in answer.out
    assert (tmp_path / "new" / "page.html").is_file()
    answer = trimtab("sweep", table)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["log.csv", "new"]
    answer = trimtab("replay", table, "--set", "alpha=1.3")
    assert (answer.code, answer.err) == (0, "")
    assert "100 steps, 2 units" in answer.out
    assert "default" in answer.out
    assert "alpha=1.3 (was 1.1)" in answer.out
    assert table.read_bytes() == before


def test_columns_loss_and_step_can_be_named(trimtab: Any, table: Path) -> None:
    table.write_text(table.read_text().replace("step,grad_norm/a,grad_norm/b,loss", "when,u.a.x,u.b.x,price"))
    for verb in ("sweep", "replay", "postmortem"):
        refused(trimtab(verb, table), "no column of steps", "--step COLUMN")
        refused(trimtab(verb, table, "--step", "when"), "no loss and no gradient norm", "u.a.x", "--columns")
        answer = trimtab(verb, table, "--step", "when", "--columns", "u.*.x", "--loss", "price")
        assert answer.code == 0, answer
        assert "norms of 2 units (u.a.x, ...)" in answer.out


def test_none_of_it_loads_torch(run: Path, table: Path, tmp_path: Path) -> None:
    out = str(tmp_path / "page.html")
    calls = [["sweep", str(run), "--grid", "alpha=2"], ["sweep", str(table)], ["postmortem", str(table), "--md"]]
    calls += [["report", str(run), str(run), "--out", out], ["report", "--md", str(run)], ["replay", str(table)]]
    script = (
        "import sys\nfrom trimtab.cli.main import main\n"
        f"for args in {calls!r}:\n    sys.argv = ['trimtab', *args]\n    try:\n        main()\n"
        "    except SystemExit as left:\n        assert not left.code, args\n"
        "    assert 'torch' not in sys.modules, args"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


def test_bad_input_is_one_line(trimtab: Any, run: Path, tmp_path: Path) -> None:
    refused(trimtab("sweep", tmp_path / "gone"), "there is no", "gone")
    refused(trimtab("sweep", run, "--grid", "alpha"), "--grid must be KEY=A,B,C", "'alpha'")
    refused(trimtab("sweep", run, "--grid", "alpa=1,2"), "unknown policy setting 'alpa'", "'alpha'")
    refused(trimtab("sweep", run, "--grid", "alpha=1,-2"), "alpha must be a positive number", "-2")
    refused(trimtab("sweep", run, "--alarms", "-1"), "--alarms must be a number of at least 0")
    refused(trimtab("sweep", run, "--alarms", "nan"), "--alarms must be a number of at least 0")
    (tmp_path / "loss.csv").write_text("step,loss\n1,2\n")
    refused(trimtab("sweep", tmp_path / "loss.csv"), "needs gradient norms", "loss.csv")
    refused(trimtab("replay", tmp_path / "loss.csv"), "needs gradient norms", "loss.csv")


def test_a_trace_of_no_rows_is_one_line(trimtab: Any, tmp_path: Path) -> None:
    with Recorder(tmp_path / "empty") as recorder:
        recorder.open_trace(["a"], np.ones(1, bool), Policy().to_dict(), 1, 0, 10)
    for verb in ("sweep", "replay"):
        refused(trimtab(verb, tmp_path / "empty"), "holds no step yet")
    refused(trimtab("postmortem", tmp_path / "empty"), "neither a loss nor gradient norms")
