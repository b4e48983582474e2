# SPDX-License-Identifier: Apache-2.0
"""Postmortems: the spike, its warning and its first unit are those that were put there; what cannot be known is said;
the three lines that record it next time do."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import trimtab
from trimtab import TrimtabError
from trimtab.report.imports import read_log
from trimtab.report.postmortem import NEXT_TIME, lines, postmortem, to_markdown, unknown

Make = Callable[..., np.ndarray]
EVIL = "<b>`x`|\x1b[2J\n"


def table(folder: Path, *, units: dict[str, int] | None = None, norm: int | None = None, steps: int = 600) -> Path:
    """A CSV whose loss jumps at step 400; units and the global norm rise so many steps before it."""
    rng = np.random.default_rng(0)
    loss = 2 + 4 / np.sqrt(1 + np.arange(steps) / 20) + rng.normal(0, 0.03, steps)
    loss[399:420] += 3
    columns = {"step": np.arange(1, steps + 1), "loss": loss}
    if norm is not None:
        columns["grad_norm"] = rng.lognormal(0, 0.1, steps)
        columns["grad_norm"][399 - norm : 420] *= 8
    for number, (name, lead) in enumerate((units or {}).items()):
        column = rng.lognormal(0, 0.1, steps)
        column[399 - lead : 420] *= 5 + number
        columns[f"grad_norm/{name}"] = column
    path = folder / "log.csv"
    rows = ["\n".join([",".join(columns)])]
    rows += [",".join(str(column[t]) for column in columns.values()) for t in range(steps)]
    path.write_text("\n".join(rows) + "\n")
    return path


def test_loss_and_global_norm_tell_when_and_what_the_warning_was(tmp_path: Path) -> None:
    found = postmortem(read_log(table(tmp_path, norm=7)))
    (case,) = found.cases
    assert (case.step, case.last, case.returned) == (400, 420, True)
    assert case.warning is not None
    assert (case.warning.step, case.warning.lead) == (393, 7)
    assert case.warning.ratio == pytest.approx(8, rel=0.5)
    assert found.by_chance == 0
    assert "at step 400" in found.verdict
    assert "before 1 of 1 spike, 7 steps ahead" in found.verdict
    assert any("which unit it began in" in line for line in unknown(found))
    text = "\n".join(lines(found))
    assert "What this log cannot tell:" in text
    assert all(line in text for line in NEXT_TIME)


def test_a_norm_that_stays_quiet_is_said_to_have_given_no_warning(tmp_path: Path) -> None:
    found = postmortem(read_log(table(tmp_path, norm=0)))
    assert "The global norm gave no warning" in found.verdict
    assert found.cases[0].warning is not None
    assert found.cases[0].warning.lead == 0  # the same step is no warning


def test_units_are_ranked_by_who_left_first(tmp_path: Path) -> None:
    found = postmortem(read_log(table(tmp_path, units={"late": 2, "first": 12, "never": -400, "tie": 2}, norm=1)))
    (case,) = found.cases
    assert [(left.unit, left.lead) for left in case.units] == [("first", 12), ("tie", 2), ("late", 2)]
    assert "The first unit to leave its range was first, 12 steps before." in found.verdict
    assert not any("which unit" in line for line in unknown(found))
    assert "1. first: left its range at step 388" in "\n".join(lines(found))


def test_a_healthy_log_says_so(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    path.write_text("step,loss\n" + "".join(f"{t},{5 / t**0.5}\n" for t in range(1, 300)))
    found = postmortem(read_log(path))
    assert found.cases == ()
    assert found.verdict == "The loss never left its range between steps 1 and 299."
    assert any("its global norm was not logged" in line for line in unknown(found))


def test_a_loss_that_ends_in_nan_never_came_back(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    path.write_text(
        "step,loss,grad_norm\n" + "".join(f"{t},{'nan' if t > 80 else 2},{1 + t % 2}\n" for t in range(1, 101))
    )
    found = postmortem(read_log(path))
    assert found.verdict.startswith("The loss was not finite at step 81, and did not come back.")
    assert "loss not finite in 20 steps, not back by the end" in "\n".join(lines(found))
    json.dumps(found.to_dict(), allow_nan=False)


def test_without_a_loss_the_global_norm_is_looked_at(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    rows = "".join(f"{t},{100 if t == 90 else 1 + 0.01 * (t % 7)}\n" for t in range(1, 120))
    path.write_text("step,grad_norm\n" + rows)
    found = postmortem(read_log(path))
    assert "The global norm rose from 1.03 to 100 at step 90" in found.verdict
    assert any("no loss was logged" in line for line in unknown(found))


def test_a_run_folder_names_its_faulty_unit_and_a_poisoned_norm(make_run: Make, tmp_path: Path) -> None:
    make_run(tmp_path / "run", steps=300, units=6, act=False, faults=((4, 200, 3, np.nan), (2, 240, 5, 30.0)))
    metrics = tmp_path / "run" / "metrics.jsonl"
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    for row in rows:
        if "loss" in row and 243 <= row["step"] < 260:
            row["loss"] += 4
    metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = postmortem(read_log(tmp_path / "run"))
    assert found.poisoned is not None
    assert (found.poisoned.unit, found.poisoned.step) == ("blocks.0.u", 200)
    case = next(case for case in found.cases if case.step == 243)
    assert case.units[0].unit == "blocks.0.u"  # it was poisoned within the steps that are looked at
    assert case.units[1].unit == "blocks.0.v"
    assert case.units[1].lead == 3
    assert not any(NEXT_TIME[0] in line for line in lines(found))  # this run is recorded already


def test_a_trace_alone_and_nothing_at_all(make_run: Make, tmp_path: Path) -> None:
    make_run(tmp_path / "run", steps=60, units=3)
    found = postmortem(read_log(tmp_path / "run" / "trace.arrow"))
    assert found.cases == ()
    (tmp_path / "run" / "metrics.jsonl").write_text("")
    (tmp_path / "run" / "trace.arrow").unlink()
    with pytest.raises(TrimtabError, match="neither a loss nor gradient norms"):
        postmortem(read_log(tmp_path / "run"))


def test_names_break_neither_lines_nor_markdown(tmp_path: Path) -> None:
    path = table(tmp_path, units={"NAME": 5}, norm=3)
    log = tmp_path / "log.jsonl"
    head, *rows = path.read_text().splitlines()
    keys = [key.replace("NAME", EVIL) for key in head.split(",")]
    log.write_text("".join(json.dumps(dict(zip(keys, map(float, row.split(",")), strict=True))) + "\n" for row in rows))
    found = postmortem(read_log(log))
    assert found.cases[0].units[0].unit == EVIL
    for line in lines(found):
        assert "\x1b" not in line
        assert "\n" not in line
    text = to_markdown(found)
    assert "\x1b" not in text
    (row,) = [line for line in text.splitlines() if line.startswith("| 1 |")]
    assert "`` <b>`x`\\|\\u001b[2J  ``" in row
    assert "<b>" not in text.replace("`` <b>", "")


def test_a_thousand_cases_are_cut_to_the_gravest(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    loss = 2 + rng.normal(0, 0.01, 3000)
    loss[200::40] += 1
    loss[1000] = 50
    path = tmp_path / "log.csv"
    path.write_text("step,loss\n" + "".join(f"{t + 1},{value}\n" for t, value in enumerate(loss)))
    text = list(lines(postmortem(read_log(path))))
    assert len(text) < 40
    assert any("step 1,001: loss 1.998 -> 50" in line for line in text)
    assert any("gravest of" in line for line in text)


def test_the_three_lines_record_what_was_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch
    from torch import nn

    monkeypatch.chdir(tmp_path)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    names: dict[str, Any] = {"trimtab": trimtab, "model": model, "total_steps": 5}
    exec("\n".join(NEXT_TIME[:2]), names)
    for step in range(1, 6):
        loss = model(torch.randn(16, 4)).square().mean()
        loss.backward()
        exec(NEXT_TIME[2], names | {"step": step, "loss": loss})
        optimizer.step()
        optimizer.zero_grad()
    names["recorder"].close()
    log = read_log("runs/next")
    assert (log.rows, log.per_unit, log.ours) == (5, True, True)
    assert len(log.header.units) == 2
    assert log.loss is not None
    assert log.grad_norm is not None
    assert log.loss.steps.tolist() == [1, 2, 3, 4, 5]
    assert not any("which unit" in line for line in unknown(postmortem(log)))
