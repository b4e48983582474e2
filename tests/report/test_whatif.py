# SPDX-License-Identifier: Apache-2.0
"""What if: rows are replays of the whole log, spikes and quiet steps those of its loss, and the page says open-loop."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from trimtab import Policy, TrimtabError, replay
from trimtab.report.imports import read_log
from trimtab.report.read import read_trace
from trimtab.report.whatif import OPEN_LOOP, bases_of, changed, grid_of, render_sweep, says, table, whatif

Make = Callable[..., np.ndarray]
EVIL = "</script><img src=x onerror=alert(1)>\x1b[2J"


@pytest.fixture(scope="module", name="folder")
def _folder(tmp_path_factory: pytest.TempPathFactory, make_run: Make) -> Path:
    """A run that only watched: unit 3 leaves its range at step 293, the loss at 300; a known fault at 100."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    config = {"faults": [{"unit": "x", "kind": "scale", "start": 100, "width": 5}], "name": EVIL}
    make_run(folder, act=False, faults=((3, 293, 12, 8.0), (1, 100, 5, 8.0)), config=config)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for row in rows:
        row["loss"] += 3 * (300 <= row["step"] < 310)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_rows_spikes_and_quiet_steps(folder: Path) -> None:
    log = read_log(folder)
    policies = {"own": Policy.from_dict(log.header.policy), "deaf": Policy(alpha=50.0, beta=None, alpha_warmup=None)}
    found = whatif(log, policies)
    trace = read_trace(folder / "trace.arrow")
    assert [found.spike_step(spike) for spike in found.spikes] == [300]
    away = (found.steps < 100) | (found.steps >= 125)  # the known fault and 20 steps after it
    away &= (found.steps < 280) | (found.steps > 329)  # the spike and 20 steps on both sides
    np.testing.assert_array_equal(found.quiet, away)
    for row in found.rows:
        alone = replay(trace.norms, row.policy, total_steps=trace.total_steps)
        assert list(row.summary.values()) == list(alone.summary(found.quiet).values())
    own, deaf = found.rows
    assert (own.caught, own.lead, own.summary["false_alarms_per_1k"]) == (1, 7.0, 0.0)
    assert deaf.caught == 0
    assert found.suggested == "own"
    assert "1 of 1, 7 steps before" in says(found)[0]


def test_a_grid_crosses_what_is_asked_and_the_usual_one_has_no_twins() -> None:
    own = Policy(max_high=2)
    asked = grid_of(own, {"alpha": [1.5, 2.0], "beta": [None, 3.0]})
    assert [(p.alpha, p.beta) for p in asked.values()] == [(1.1, 1.5), (1.5, None), (1.5, 3.0), (2.0, None), (2.0, 3.0)]
    assert list(asked)[1] == "alpha 1.5, beta none"
    usual = grid_of(own)
    assert len(set(usual.values())) == len(usual) >= 46
    assert usual["alpha 3 beta 2"].alpha_warmup == 3.0  # a warm-up is never below what follows it
    assert {"own", "steady", "paper-a"} <= set(usual)
    with pytest.raises(TrimtabError, match="1,000 policies"):
        grid_of(own, {"alpha": list(np.linspace(1, 2, 40)), "beta": list(np.linspace(1, 2, 40))})
    with pytest.raises(TrimtabError, match="unknown policy setting 'alpa'"):
        grid_of(own, {"alpa": [1.0]})


def test_a_run_without_a_budget_is_asked_with_the_default_one() -> None:
    assert [base.max_high for base in bases_of(Policy(max_high=0))] == [0.05, 0.05]
    assert [base.max_high for base in bases_of(Policy(max_high=3))] == [3, 3]


def test_thresholds_set_from_the_run_are_quiet_on_it(folder: Path) -> None:
    log = read_log(folder)
    found = whatif(log, {"own": Policy()}, calibrate=bases_of(Policy()))
    assert found.names[1:] == ("calibrated 1/1k", "calibrated 10/1k", "calibrated 1/1k w20", "calibrated 10/1k w20")
    for row in found.rows[
        1:
    ]:  # the first 20 steps, whose histories are short, are left out as `Policy.calibrated` does
        assert (row.alarmed & found.quiet)[20:].mean() <= 0.01
    settings = changed(found.rows[1].policy, Policy())
    assert re.fullmatch(r"--set alpha=\S+ --set alpha_warmup=\S+ --set beta=\S+", settings)


def test_what_is_changed_can_be_given_back_to_the_command_line() -> None:
    assert changed(Policy(beta=None, history="ema", alpha=2.0), Policy()) == (
        "--set alpha=2 --set beta=none --set history=ema"
    )
    assert changed(Policy(), Policy()) == ""


def test_the_page_and_the_table_say_the_same_and_that_it_is_open_loop(folder: Path) -> None:
    found = whatif(read_log(folder), grid_of(Policy(max_high=2)))
    page = render_sweep(found)
    heads, rows = table(found)
    assert heads[-3:] == ["spikes", "lead", "chance"]
    assert len(rows) == len(found.rows)
    body = re.sub(r"<script>.*?</script>", "", page, flags=re.S)
    assert all(f">{cell}<" in body or f"<b>{cell}</b>" in body for cell in (row[0] for row in rows))
    assert OPEN_LOOP in body
    assert "\x1b" not in body
    assert "<img" not in body
    told = re.search(r'id="data">(.*?)</script>', page, re.S)
    assert told
    figures = json.loads(told.group(1))["figures"]
    assert [figure["id"] for figure in figures] == ["policies-plot", "fires"]
    assert figures[1]["windows"] == [[300, 309]]
    assert 293 in figures[1]["traces"][1]["x"]
    json.dumps(found.to_dict(), allow_nan=False)


def test_without_a_loss_there_is_no_lead_and_it_is_said(folder: Path) -> None:
    found = whatif(read_log(folder / "trace.arrow"), grid_of(Policy(max_high=2)))
    assert "spikes" not in table(found)[0]
    assert "Lead times are not shown: no loss was logged." in says(found)
    assert '"policies-plot"' in render_sweep(found)


def test_nothing_to_sweep_is_refused(tmp_path: Path) -> None:
    (tmp_path / "log.csv").write_text("step,loss\n1,2\n")
    with pytest.raises(TrimtabError, match="needs gradient norms"):
        whatif(read_log(tmp_path / "log.csv"), {"own": Policy()})
