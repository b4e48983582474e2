# SPDX-License-Identifier: Apache-2.0
"""A run from the command line, seen by TensorBoard and told to a program."""

import json
import sys
from pathlib import Path

import pytest

from trimtab.control.sinks import Sinks
from trimtab.control.values import Event
from trimtab.errors import TrimtabError
from trimtab.lab.dashboard import Dashboard, dashboard
from trimtab.lab.run import Silent

SMALL = ["--set", "steps=20", "--set", "batch=2", "--set", "seq=16", "--set", "eval_every=20"]


def curves(folder: Path) -> dict[str, list[int]]:
    """The steps of each curve, as TensorBoard shows them."""
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    found = accumulator.EventAccumulator(str(folder)).Reload()
    return {name: [event.step for event in found.Scalars(name)] for name in found.Tags()["scalars"]}


def test_a_run_writes_its_own_values_beside_the_controllers_and_one_that_goes_on_has_one_curve(trimtab, tmp_path):
    out = tmp_path / "a"
    assert trimtab("train", "--out", out, *SMALL, "--log", "tensorboard", "--set", "checkpoint_every=10").code == 0
    found = curves(out / "tensorboard")
    assert found["train/loss"] == [10, 20]
    assert found["stability/grad_norm"] == [1, 10, 20]
    assert found["eval/loss_high"] == found["eval/loss_low"] == [20]
    assert trimtab("train", "--out", out, "--log", "tensorboard", "--resume", "--set", "steps=30").code == 0
    assert curves(out / "tensorboard")["train/loss"] == [10, 20, 30]
    assert trimtab("train", "--out", out, *SMALL, "--log", "tensorboard", "--force").code == 0
    assert curves(out / "tensorboard")["train/loss"] == [10, 20]


def test_trouble_is_told_and_the_address_stays_out_of_the_run_folder(trimtab, tmp_path):
    told, out = tmp_path / "told.jsonl", tmp_path / "a"
    script = tmp_path / "tell.py"
    script.write_text(f"import sys; open({str(told)!r}, 'a').write(sys.stdin.read() + '\\n')")
    fault = "--set=faults=blocks.0.attn.q:nan:start=5,width=1"
    alerts = ("--alert", f"{sys.executable} {script}", "--alert", "http://127.0.0.1:9/key-of-mine")
    assert trimtab("train", "--out", out, *SMALL, *alerts, fault).code == 0
    messages = [json.loads(line) for line in told.read_text().splitlines()]
    assert [(m["kind"], m["step"], m["run"]) for m in messages] == [("nonfinite", 5, "a")]
    assert not any("key-of-mine" in path.read_text("latin-1") for path in out.rglob("*") if path.is_file())


def test_a_sink_that_fails_costs_its_values_and_nothing_else(caplog):
    class Broken:
        def write(self, step, values):
            raise OSError("disk full")

        def close(self):
            raise OSError("disk full")

    class Kept:
        def __init__(self):
            self.values = []

        def write(self, step, values):
            self.values.append((step, dict(values)))

        def close(self):
            pass

    kept = Kept()
    board = Dashboard(Silent(), Sinks([Broken(), kept]))
    for step in (10, 20):
        board.evaluated(step, {"eval_loss_high": float(step), "eval_loss_low": float("nan")})
    board.happened(Event(step=1, kind="nonfinite", unit=None, message="m"))
    board.close()
    assert kept.values == [(10, {"eval/loss_high": 10.0}), (20, {"eval/loss_high": 20.0})]
    assert caplog.text.count("Broken failed and gets no more values: disk full") == 1


@pytest.mark.parametrize(
    ("logs", "alerts", "says"),
    [
        (["tensorbord"], [], "--log must be one of tensorboard, wandb, trackio, got 'tensorbord'"),
        ([], [""], "a command must name a program, got nothing"),
        ([], ["http://"], "a webhook is an http:// or https:// address"),
        ([], ["ftp://host"], "a webhook is an http:// or https:// address"),
        ([], ["no-such-program --now"], "a program that is here, got 'no-such-program'"),
    ],
)
def test_what_is_not_known_is_refused_before_anything_is_opened(tmp_path, logs, alerts, says):
    with pytest.raises(TrimtabError, match=says):
        dashboard(Silent(), logs, alerts, tmp_path / "a")
    assert not (tmp_path / "a").exists()
