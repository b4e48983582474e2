# SPDX-License-Identifier: Apache-2.0
"""`trimtab postmortem`, and `trimtab report` for several runs and as Markdown: what is printed, what is written."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trimtab.control.policy import Policy
from trimtab.control.record import Recorder

EVIL = "[/red]\x1b[2J<b>"


@pytest.fixture(name="make")
def _make(tmp_path: Path) -> Any:
    def make(name: str, lift: float = 0.0) -> Path:
        norms = np.random.default_rng(0).lognormal(0, 0.1, (90, 2)).astype(np.float32)
        norms[70:75, 1] *= 20
        with Recorder(tmp_path / name, run={"name": name, "lift": lift}) as recorder:
            recorder.open_trace(["a", EVIL], np.ones(2, bool), Policy(max_high=1).to_dict(), 1, 3, 90)
            for t in range(90):
                recorder.observe(t + 1, norms[t], np.ones(2, bool), np.zeros(2, bool), 1.0)
                recorder.log(t + 1, loss=3.0 - 0.01 * t + lift + (5 if t >= 74 else 0))
        return tmp_path / name

    return make


def test_a_run_folder_is_told_in_lines_markdown_and_json(trimtab: Any, make: Any) -> None:
    run = make("run")
    answer = trimtab("postmortem", run)
    assert (answer.code, answer.err) == (0, "")
    assert "at step 75, and did not come back" in answer.out
    assert "1. [/red]\\u001b[2J<b>: left its range at step 71, 4 steps before" in answer.out
    answer = trimtab("postmortem", run, "--md")
    assert answer.out.startswith("### Postmortem: `run`")
    assert "| 1 | `[/red]\\u001b[2J<b>` | step 71, 4 steps before |" in answer.out
    told = json.loads(trimtab("postmortem", run, "--json").out)
    assert told["spikes"][0]["units"][0] == {**told["spikes"][0]["units"][0], "unit": EVIL, "step": 71, "lead": 4}


def test_loss_alone_is_enough(trimtab: Any, tmp_path: Path) -> None:
    rows = "".join(f"{t},{'nan' if t > 60 else 2}\n" for t in range(1, 80))
    (tmp_path / "log.csv").write_text("step,train/loss\n" + rows)
    answer = trimtab("postmortem", tmp_path / "log.csv")
    assert (answer.code, answer.err) == (0, "")
    assert "The loss was not finite at step 61" in answer.out
    assert "What this log cannot tell" in answer.out
    assert 'trimtab.Controller(model, mode="observe"' in answer.out


def test_several_runs_get_one_page(trimtab: Any, make: Any, tmp_path: Path) -> None:
    a, b = make("[bold]a"), make("b", 1.0)
    answer = trimtab("report", a, b)
    assert (answer.code, answer.err) == (0, "")
    assert "[bold]a ends lowest" in answer.out
    assert (tmp_path / "comparison.html").is_file()
    assert not (a / "report.html").exists()
    assert trimtab("report", a, b, "--out", tmp_path / "x.html").code == 0
    assert (tmp_path / "x.html").is_file()
    answer = trimtab("report", "--md", a, b)
    assert (tmp_path / "comparison.md").read_text().startswith("### 2 runs")
    assert (tmp_path / "comparison.svg").is_file()


def test_one_run_as_markdown(trimtab: Any, make: Any) -> None:
    run = make("run")
    answer = trimtab("report", "--md", run)
    assert (answer.code, answer.err) == (0, "")
    assert str(run / "report.md") in answer.out
    assert "\x1b" not in answer.out
    assert {"report.md", "report.svg"} <= {path.name for path in run.iterdir()}
    assert not (run / "report.html").exists()


def test_a_folder_that_is_none_stops_a_comparison(trimtab: Any, make: Any, tmp_path: Path) -> None:
    answer = trimtab("report", make("run"), tmp_path / "gone")
    assert answer.code == 2
    assert "gone is not a run folder" in answer.err
    assert not (tmp_path / "comparison.html").exists()
