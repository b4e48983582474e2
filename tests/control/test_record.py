# SPDX-License-Identifier: Apache-2.0
"""The recorder's claims: exact, append-only, resumable to the byte, and nothing lost on a normal exit."""

import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trimtab.control import record, writers
from trimtab.control.record import Recorder
from trimtab.errors import TrimtabError
from trimtab.report.read import read_run, read_trace

UNITS = ["a", "b", "c"]
NAN, INF = float("nan"), float("inf")


def opened(folder: Path, units: list[str] = UNITS, **kwargs: Any) -> Recorder:
    recorder = Recorder(folder, **kwargs)
    start(recorder, units)
    return recorder


def start(recorder: Recorder, units: list[str] = UNITS) -> None:
    recorder.open_trace(units, np.ones(len(units), bool), {"alpha": 1.5}, 2, 10, 100)


def feed(recorder: Recorder, step: int, *, log: bool = True) -> None:
    rng = np.random.default_rng(step)
    recorder.observe(step, rng.random(3, np.float32), rng.random(3) < 0.8, rng.random(3) < 0.5, step / 7, [])
    if log:
        recorder.log(step, loss=1 / step)


def lines(folder: Path) -> list[dict[str, Any]]:
    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is not JSON")

    text = (folder / "metrics.jsonl").read_text()
    assert text == "" or text.endswith("\n")
    return [json.loads(line, parse_constant=refuse) for line in text.splitlines()]


def same(a: Path, b: Path) -> bool:
    one, two = read_trace(a / "trace.arrow"), read_trace(b / "trace.arrow")
    equal = [
        np.array_equal(getattr(one, x), getattr(two, x), equal_nan=x == "norms") for x in ("steps", "norms", "seen")
    ]
    return all(equal) and np.array_equal(one.high, two.high)


def test_trace_is_exact_with_nan_inf_unseen_and_repeated_steps(tmp_path: Path) -> None:
    norms = np.array([[1e-42, NAN, 3e38], [0.1, INF, 2.5], [0.1, 7.0, 0.0]], np.float32)
    seen = np.array([[True, True, True], [True, True, False], [False, True, True]])
    high = np.array([[False, False, True], [True, False, False], [True, True, True]])
    with opened(tmp_path / "r") as recorder:
        for step, n, s, h in zip((1, 2, 2), norms, seen, high, strict=True):
            recorder.observe(step, n, s, h, 1.0)
    trace = read_trace(tmp_path / "r" / "trace.arrow")
    assert trace.steps.tolist() == [1, 2, 2]
    assert np.array_equal(trace.seen, seen)
    assert np.array_equal(trace.high, high)
    assert trace.norms[seen].tobytes() == norms[seen].tobytes()  # bit for bit
    assert np.isnan(trace.norms[~seen]).all()
    assert trace.units == ("a", "b", "c")
    assert (trace.policy, trace.max_high, trace.warmup_steps, trace.total_steps) == ({"alpha": 1.5}, 2, 10, 100)


def test_any_arrow_reader_reads_the_trace(tmp_path: Path) -> None:
    ipc = pytest.importorskip("pyarrow.ipc")
    with opened(tmp_path / "r") as recorder:
        for step in range(1, 701):
            feed(recorder, step)
    with (tmp_path / "r" / "trace.arrow").open("rb") as file:
        batches = list(ipc.open_stream(file))
    assert [batch.num_rows for batch in batches] == [256, 256, 188]
    assert [row for batch in batches for row in batch.column("step").to_pylist()] == list(range(1, 701))


def test_run_json_comes_first_and_never_changes(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "r", run={"lr": np.float32(0.5), "path": Path("x"), "bad": NAN, "seed": 3})
    first = (tmp_path / "r" / "run.json").read_bytes()
    start(recorder)
    feed(recorder, 1)
    recorder.close()
    assert (tmp_path / "r" / "run.json").read_bytes() == first
    run = json.loads(first)
    assert run["config"] == {"lr": 0.5, "path": "x", "bad": None, "seed": 3}
    assert run["versions"]["python"] == ".".join(map(str, sys.version_info[:3]))
    assert run["versions"]["numpy"] == np.__version__
    assert run["versions"]["trimtab"]
    assert run["command"] == sys.argv
    assert run["started"].endswith("+00:00")
    assert os.uname().nodename not in {str(value) for value in run.values()}


def test_a_folder_with_a_run_is_refused_and_force_replaces_it(tmp_path: Path) -> None:
    folder = tmp_path / "r"
    with opened(folder) as recorder:
        feed(recorder, 1)
    (folder / "checkpoints").mkdir()
    (folder / "checkpoints" / "1.pt").write_text("old")
    (folder / "report.html").write_text("old")
    (folder / "notes.txt").write_text("mine")
    with pytest.raises(TrimtabError, match=r"already holds a run.*--resume.*--force") as caught:
        Recorder(folder)
    assert str(folder) in str(caught.value)
    assert len(lines(folder)) == 1  # refusing has not touched it
    Recorder(folder, force=True).close()
    assert sorted(path.name for path in folder.iterdir()) == ["metrics.jsonl", "notes.txt", "run.json"]
    assert lines(folder) == []


def test_a_file_in_place_of_the_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "r").write_text("")
    with pytest.raises(TrimtabError, match="must be a directory"):
        Recorder(tmp_path / "r")


def test_a_line_has_the_trainers_and_the_controllers_part(tmp_path: Path) -> None:
    yes, no = np.array([True, True, True]), np.array([False, False, True])
    with opened(tmp_path / "r") as recorder:
        recorder.observe(1, np.ones(3, np.float32), yes, no, 0.5, [{"kind": "high", "unit": "c", "risk": INF}])
        recorder.log(1, loss=2.0, lr=1e-3)
        recorder.log(1, eval_loss_high=1.5, eval_loss_low=1.75)
        recorder.observe(2, np.ones(3, np.float32), yes, yes, NAN)
        recorder.log(2, loss=np.float64(NAN))
    assert lines(tmp_path / "r") == [
        {
            "step": 1, "loss": 2.0, "lr": 0.001, "grad_norm": 0.5, "num_high": 1,
            "events": [{"kind": "high", "unit": "c", "risk": None}],
        },
        {"step": 1, "eval_loss_high": 1.5, "eval_loss_low": 1.75},
        {"step": 2, "loss": None, "grad_norm": None, "num_high": 3},
    ]  # fmt: skip


def test_a_loop_that_never_logs_still_gets_a_line_per_step(tmp_path: Path) -> None:
    with opened(tmp_path / "r") as recorder:
        for step in (1, 2, 2, 3):
            feed(recorder, step, log=False)
        recorder.log(7, loss=1.0)  # another step: the held part is not its
    got = lines(tmp_path / "r")
    assert [line["step"] for line in got] == [1, 2, 2, 3, 7]
    assert all("num_high" in line for line in got[:4])
    assert got[4] == {"step": 7, "loss": 1.0}


def test_resumed_equals_uninterrupted(tmp_path: Path) -> None:
    with opened(tmp_path / "whole") as recorder:
        for step in range(1, 11):
            feed(recorder, step)
    recorder = opened(tmp_path / "cut")
    for step in range(1, 7):
        feed(recorder, step)
    offsets = recorder.offsets()
    for step in range(7, 10):  # lost work: recorded, but after the checkpoint
        feed(recorder, step + 50)
    recorder.close()
    recorder = Recorder.resume(tmp_path / "cut", offsets)
    start(recorder)
    for step in range(7, 11):
        feed(recorder, step)
    recorder.close()
    assert (tmp_path / "cut" / "metrics.jsonl").read_bytes() == (tmp_path / "whole" / "metrics.jsonl").read_bytes()
    assert same(tmp_path / "cut", tmp_path / "whole")


def test_offsets_cover_a_step_that_was_observed_but_not_logged(tmp_path: Path) -> None:
    recorder = opened(tmp_path / "r")
    feed(recorder, 1, log=False)
    offsets = recorder.offsets()
    recorder.close()
    Recorder.resume(tmp_path / "r", offsets).close()
    assert [line["step"] for line in lines(tmp_path / "r")] == [1]
    assert offsets == {name: (tmp_path / "r" / file).stat().st_size for name, file in
                       (("metrics", "metrics.jsonl"), ("trace", "trace.arrow"))}  # fmt: skip


def test_resume_before_the_trace_was_opened(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "r")
    offsets = recorder.offsets()
    start(recorder)
    feed(recorder, 1)
    recorder.close()
    assert offsets == {"metrics": 0, "trace": 0}
    with Recorder.resume(tmp_path / "r", offsets) as recorder:
        start(recorder)
        feed(recorder, 2)
    assert read_trace(tmp_path / "r" / "trace.arrow").steps.tolist() == [2]


@pytest.mark.parametrize(
    ("units", "words"),
    [
        (["a", "x", "c"], "unit 1 is 'b' in the file and 'x' now"),
        (["a", "b"], "unit 2 is 'c' in the file and nothing now"),
        (["a", "b", "c", "d"], "unit 3 is nothing in the file and 'd' now"),
    ],
)
def test_resume_with_other_units_names_the_first_that_differs(tmp_path: Path, units: list[str], words: str) -> None:
    recorder = opened(tmp_path / "r")
    feed(recorder, 1)
    offsets = recorder.offsets()
    recorder.close()
    with Recorder.resume(tmp_path / "r", offsets) as recorder, pytest.raises(TrimtabError, match=words):
        start(recorder, units)


def test_resume_with_another_policy_says_which_one_is_kept(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    recorder = opened(tmp_path / "r")
    offsets = recorder.offsets()
    recorder.close()
    with Recorder.resume(tmp_path / "r", offsets) as recorder, caplog.at_level(logging.WARNING):
        start(recorder)
        assert not caplog.records
        recorder.open_trace(UNITS, np.ones(3, bool), {"alpha": 9.0}, 2, 10, 100)
    assert "policy of its first start" in caplog.text


def test_resume_beyond_the_file_or_without_a_run_is_refused(tmp_path: Path) -> None:
    recorder = opened(tmp_path / "r")
    offsets = recorder.offsets()
    recorder.close()
    size = (tmp_path / "r" / "trace.arrow").stat().st_size
    with pytest.raises(TrimtabError, match=rf"trace.arrow has {size} bytes.*at byte {size + 1}"):
        Recorder.resume(tmp_path / "r", offsets | {"trace": size + 1})
    with pytest.raises(TrimtabError, match=r"no run.json"):
        Recorder.resume(tmp_path / "nowhere", offsets)


def test_open_trace_refuses_no_units_and_a_short_mask(tmp_path: Path) -> None:
    with Recorder(tmp_path / "r") as recorder:
        with pytest.raises(TrimtabError, match="at least one unit"):
            recorder.open_trace([], np.zeros(0, bool), {}, 0, 0, None)
        with pytest.raises(TrimtabError, match="got 1 for 3"):
            recorder.open_trace(UNITS, np.ones(1, bool), {}, 0, 0, None)
        with pytest.raises(TrimtabError, match="call open_trace first"):
            feed(recorder, 1)


def test_flushed_rows_are_on_disk_and_time_flushes_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(record.time, "monotonic", lambda: now[0])
    recorder = opened(tmp_path / "r")
    path = tmp_path / "r" / "trace.arrow"
    feed(recorder, 1)
    assert len(read_trace(path)) == 0
    now[0] += 5.1
    feed(recorder, 2)
    assert len(read_trace(path)) == 2
    for step in range(3, 3 + 255):
        feed(recorder, step)
    assert len(read_trace(path)) == 2
    feed(recorder, 300)  # the 256th row since the last flush
    assert len(read_trace(path)) == 258
    recorder.close()


LOOP = """
import os, sys, numpy as np
from trimtab.control.record import Recorder
recorder = Recorder(sys.argv[1])
recorder.open_trace(["a"], np.ones(1, bool), {}, 0, 0, None)
for step in range(1, 301):
    recorder.observe(step, np.ones(1, np.float32), np.ones(1, bool), np.zeros(1, bool), 1.0)
assert "torch" not in sys.modules
if sys.argv[2] == "crash":
    os._exit(9)
"""


@pytest.mark.parametrize(("ending", "rows", "logged"), [("normal", 300, 300), ("crash", 256, 255)])
def test_exit_without_close_loses_nothing_and_a_crash_only_the_tail(
    tmp_path: Path, ending: str, rows: int, logged: int
) -> None:
    done = subprocess.run([sys.executable, "-c", LOOP, str(tmp_path / "r"), ending], check=False)
    assert done.returncode == (9 if ending == "crash" else 0)
    run = read_run(tmp_path / "r")
    assert run.trace is not None
    assert len(run.trace) == rows
    assert len(run.metrics) == logged


def test_a_forked_child_writes_nothing(tmp_path: Path) -> None:
    recorder = opened(tmp_path / "r")
    feed(recorder, 1)
    record._close(recorder._metrics, recorder._trace, os.getpid() + 1)
    assert (tmp_path / "r" / "metrics.jsonl").read_bytes() == b""
    recorder.close()
    recorder.close()
    assert len(lines(tmp_path / "r")) == 1


def test_a_full_disk_leaves_whole_pieces_and_a_later_write_follows_them(tmp_path: Path) -> None:
    class Full:
        """A file that takes some bytes and then fails, once."""

        def __init__(self, file: Any) -> None:
            self.file, self.left = file, 2

        def write(self, data: memoryview) -> int:
            self.left -= 1
            if self.left == 0:
                raise OSError(28, "No space left on device")
            return self.file.write(data[:10])

        def fileno(self) -> int:
            return self.file.fileno()

    with (tmp_path / "f").open("ab", buffering=0) as file:
        end = writers._append(file, b"whole", 0)
        with pytest.raises(OSError, match="No space"):
            writers._append(Full(file), b"x" * 50, end)
        assert writers._append(file, b" again", end) == 11
    assert (tmp_path / "f").read_bytes() == b"whole again"


def test_recording_needs_pyarrow_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with Recorder(tmp_path / "r") as recorder, pytest.raises(ImportError, match=r"pip install 'trimtab\[record\]'"):
        start(recorder)
