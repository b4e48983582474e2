# SPDX-License-Identifier: Apache-2.0
"""Sinks: what a dashboard is told are the run's own numbers, few of them, now and then; and a sink that fails takes
nothing down with it."""

import json
import logging
import os
import subprocess
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import trimtab
from trimtab import Controller, Policy, TrimtabError
from trimtab.control import sinks
from trimtab.control.sinks import Tee, TensorBoard, Trackio, WandB
from trimtab.control.units import Switch
from trimtab.errors import MissingExtraError
from trimtab.report.read import read_run

POLICY = Policy(max_high=2, alpha=1.5, alpha_warmup=None, beta=None)
NAN = float("nan")


class Kept:
    """A sink in memory."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, dict[str, float]]] = []
        self.closed = 0

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self.rows.append((step, dict(values)))

    def close(self) -> None:
        self.closed += 1


def norms(steps: int = 35, units: int = 6) -> np.ndarray:
    """A quiet run with two spikes, and a step that is not finite."""
    found = np.random.default_rng(0).lognormal(0, 0.02, (steps, units))
    found[11, 2] *= 9
    found[24, 4] *= 6
    found[17, 1] = NAN
    return found


def drive(recorder: Any, rows: np.ndarray, policy: Policy = POLICY, names: Any = None) -> Controller:
    """A controller on gradients that are set directly."""
    units = rows.shape[1]
    model = nn.ModuleList(nn.Linear(2, 2, bias=False) for _ in range(units))
    for i, module in enumerate(model):
        module.switch = Switch(names[i] if names else f"u{i}", roots=(module,))
    controller = Controller(model, policy, recorder=recorder, total_steps=len(rows))
    for row in rows:
        for module, norm in zip(model, row.tolist(), strict=True):
            module.weight.grad = torch.tensor([[norm, 0.0], [0.0, 0.0]])
        controller.step()
    return controller


def test_the_values_are_the_runs_own(tmp_path: Path) -> None:
    kept = Kept()
    with trimtab.Recorder(tmp_path / "run") as recorder:
        drive(Tee(recorder, kept), norms())
    run = read_run(tmp_path / "run")
    assert run.trace is not None
    trace, metrics = run.trace, {line["step"]: line for line in run.metrics}
    risks = trimtab.replay(trace.norms, POLICY, seen=trace.seen, total_steps=35).risk
    written = [step for step, _ in kept.rows]
    assert written == [1, 10, 18, 20, 30]  # at once, every ten, and at the step that was not finite
    start = 0
    for step, values in kept.rows:
        rows = slice(start, step)
        if step != 18:  # its norm over all is not finite, so it is left out
            assert values["stability/grad_norm"] == metrics[step]["grad_norm"]
        assert values["stability/num_high"] == metrics[step]["num_high"]
        assert values["stability/promotion"] == pytest.approx(trace.high[rows].mean())
        assert values["stability/max_risk"] == risks[rows][np.isfinite(risks[rows])].max()
        assert values["stability/nonfinite"] == (~np.isfinite(trace.norms[rows]).all(axis=1)).sum()
        start = step
    assert "stability/grad_norm" not in dict(kept.rows)[18]
    assert dict(kept.rows)[18]["stability/max_risk"] > 5
    assert sum(values["stability/promotion"] for _, values in kept.rows) > 0


def test_the_run_folder_is_the_same_with_and_without_sinks(tmp_path: Path) -> None:
    for name in ("plain", "teed"):
        with trimtab.Recorder(tmp_path / name) as recorder:
            drive(recorder if name == "plain" else Tee(recorder, Kept()), norms())
    for file in ("metrics.jsonl", "trace.arrow"):
        assert (tmp_path / "plain" / file).read_bytes() == (tmp_path / "teed" / file).read_bytes()


def test_offenders_are_named_while_they_offend_and_nobody_else() -> None:
    kept = Kept()
    rows = np.ones((14, 6))
    rows[9, 3] = 8  # triggers in the tenth step, which is written
    drive(Tee(None, kept), rows)
    named = {step: [key for key in values if key.startswith("stability/risk/")] for step, values in kept.rows}
    assert named == {1: [], 10: ["stability/risk/u3"]}
    assert dict(kept.rows)[10]["stability/risk/u3"] == pytest.approx(8 / 1.5)


def test_never_a_curve_per_unit() -> None:
    kept = Kept()
    rows = np.random.default_rng(0).lognormal(0, 1, (60, 100))  # everybody triggers all the time
    drive(Tee(None, kept, every=1), rows, POLICY.replace(max_high=20))
    own = [{key for key in values if key.startswith("stability/risk/")} for _, values in kept.rows]
    assert max(map(len, own)) == sinks.SHOWN
    assert len(set().union(*own)) == sinks.MOST
    rest = {key for _, values in kept.rows for key in values} - set().union(*own)
    assert rest == {f"stability/{name}" for name in ("grad_norm", "num_high", "promotion", "max_risk", "nonfinite")}


def test_further_columns_go_through(tmp_path: Path) -> None:
    class Rows:
        columns: Any = None

        def open_trace(self, units: list[str], **header: Any) -> None:
            assert header["columns"] == ["update"]

        def observe(self, *args: Any, columns: Any = None) -> None:
            self.columns = columns

    rows = Rows()
    tee = Tee(rows, Kept())
    tee.open_trace(["u"], recoverable=np.ones(1, bool), columns=["update"])
    one = np.ones(1, np.float32)
    tee.observe(1, one, one > 0, one > 2, 1.0, [], columns={"update": one})
    assert list(rows.columns) == ["update"]


def test_a_tee_in_a_tee_tells_both() -> None:
    inner, outer = Kept(), Kept()
    drive(Tee(Tee(None, inner), outer), norms())
    assert inner.rows == outer.rows
    assert len(outer.rows) == 5


def test_a_sink_that_fails_is_named_once_and_the_rest_goes_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Broken(Kept):
        def write(self, step: int, values: Mapping[str, float]) -> None:
            super().write(step, values)
            raise OSError("disk\nfull")

    broken, kept = Broken(), Kept()
    with trimtab.Recorder(tmp_path / "run") as recorder, caplog.at_level(logging.WARNING, "trimtab.control.sinks"):
        drive(Tee(recorder, broken, kept), norms())
    assert len(broken.rows) == 1
    assert len(kept.rows) == 5
    assert len(read_run(tmp_path / "run").metrics) == 35
    assert [r.getMessage() for r in caplog.records if r.name.endswith("sinks")] == [
        "Broken failed and gets no more values: disk full"
    ]


def test_closing_closes_everything(tmp_path: Path) -> None:
    kept, recorder = Kept(), trimtab.Recorder(tmp_path / "run")
    with Tee(recorder, kept) as tee:
        drive(tee, norms()[:3])
    assert kept.closed == 1
    assert len(read_run(tmp_path / "run").metrics) == 3


def test_bad_settings_are_refused() -> None:
    with pytest.raises(TrimtabError, match="every must be at least 1"):
        Tee(None, Kept(), every=0)
    with pytest.raises(TrimtabError, match="got none"):
        Tee(None)


@pytest.mark.parametrize(
    ("package", "build"),
    [
        ("torch.utils.tensorboard", lambda: TensorBoard("nowhere")),
        ("wandb", WandB),
        ("trackio", lambda: Trackio(project="x")),
    ],
)
def test_a_missing_package_is_named_with_its_pip_line(
    monkeypatch: pytest.MonkeyPatch, package: str, build: Any
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingExtraError, match=rf"pip install 'trimtab\[{package.rpartition('.')[2]}\]'"):
        build()


def test_tensorboard_reads_back_what_was_written(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    kept = Kept()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of tensorboard's own imports
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        with Tee(None, TensorBoard(tmp_path), kept) as tee:
            drive(tee, norms())
        found = EventAccumulator(str(tmp_path)).Reload()
    for name in ("stability/grad_norm", "stability/promotion", "stability/max_risk"):
        wanted = [(step, values[name]) for step, values in kept.rows if name in values]
        points = [(point.step, point.value) for point in found.Scalars(name)]
        assert points == [(step, pytest.approx(value)) for step, value in wanted]


def test_a_writer_of_somebody_elses_stays_open() -> None:
    class Writer:
        calls: tuple[str, ...] = ()

        def add_scalar(self, name: str, value: float, step: int) -> None:
            pass

        def flush(self) -> None:
            self.calls += ("flush",)

    writer = Writer()
    with Tee(None, TensorBoard(writer)) as tee:
        drive(tee, norms()[:3])
    assert writer.calls == ("flush",)


def test_wandb_gets_the_values_on_an_axis_of_their_own() -> None:
    class Run:
        def __init__(self) -> None:
            self.axes: list[tuple[str, Any]] = []
            self.rows: list[dict[str, float]] = []

        def define_metric(self, name: str, step_metric: str | None = None, hidden: bool = False) -> None:
            self.axes.append((name, step_metric))

        def log(self, values: dict[str, float]) -> None:
            self.rows.append(values)

    run, kept = Run(), Kept()
    with Tee(None, WandB(run), kept) as tee:
        drive(tee, norms())
    assert ("stability/*", "stability/step") in run.axes
    assert run.rows == [values | {"stability/step": step} for step, values in kept.rows]


SCRIPT = """
import json, sys, warnings
import numpy as np
from trimtab.control.sinks import Tee, Trackio, WandB
from trimtab.control.values import Risk
warnings.simplefilter("ignore")
which, folder = sys.argv[1:]
if which == "wandb":
    sink = WandB(mode="offline", dir=folder, settings={"console": "off", "x_disable_stats": True})
else:
    sink = Trackio(project="p", name="r", auto_log_gpu=False, auto_log_cpu=False)
tee, one = Tee(None, sink, every=1), np.ones(2, np.float32)
tee.open_trace(["a", "b"], recoverable=one > 0)
for step in (1, 2, 3):
    risk = np.array([0.5, 0.25 * step])
    tee.observe(step, one, one > 0, risk > 0.6, 1.5 * step, [], risk=Risk(risk, risk, risk))
tee.close()
if which == "trackio":
    from trackio.sqlite_storage import SQLiteStorage
    print(json.dumps(SQLiteStorage.get_logs("p", "r"), default=str))
"""


def in_its_own_process(which: str, folder: Path) -> str:
    """These packages leave threads and processes behind, so they run in a process of their own."""
    env = os.environ | {"WANDB_SILENT": "true", "TRACKIO_DIR": str(folder), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-W", "ignore", "-c", SCRIPT, which, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=env)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_wandb_offline_takes_a_whole_run(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    in_its_own_process("wandb", tmp_path)
    (file,) = (tmp_path / "wandb").glob("offline-run-*/*.wandb")
    data = file.read_bytes()
    assert b"stability/max_risk" in data
    assert b"stability/risk/b" in data


def test_trackio_reads_back_what_was_written(tmp_path: Path) -> None:
    pytest.importorskip("trackio")
    printed = in_its_own_process("trackio", tmp_path).splitlines()
    rows = json.loads(next(line for line in printed if line.startswith("[{")))
    found = {row["step"]: row for row in rows}
    assert sorted(found) == [1, 2, 3]
    assert found[3]["stability/grad_norm"] == 4.5
    assert found[3]["stability/max_risk"] == 0.75
    assert found[3]["stability/risk/b"] == 0.75
    assert found[3]["stability/promotion"] == 0.5
