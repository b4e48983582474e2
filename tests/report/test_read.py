# SPDX-License-Identifier: Apache-2.0
"""The reader's claims: a torn tail costs only itself, and a foreign file is refused in one line."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trimtab.control.decide import Quota
from trimtab.control.policy import Policy
from trimtab.control.record import Recorder
from trimtab.errors import TrimtabError
from trimtab.report.passes import replayed, rules_of
from trimtab.report.read import iter_trace, read_run, read_trace, scan_trace

pa = pytest.importorskip("pyarrow")


def record(folder: Path, rows: int, per_batch: int) -> list[tuple[int, int]]:
    """Record a small trace; returns (end of message, rows so far) for each message, the schema's first."""
    rng = np.random.default_rng(0)
    ends = []
    with Recorder(folder) as recorder:
        recorder.open_trace(["a", "b"], np.array([True, False]), {"alpha": 2.0}, 1, 0, None)
        ends.append((recorder.offsets()["trace"], 0))
        for step in range(1, rows + 1):
            recorder.observe(step, rng.random(2, np.float32), rng.random(2) < 0.7, rng.random(2) < 0.5, 1.0)
            if step % per_batch == 0 or step == rows:
                ends.append((recorder.offsets()["trace"], step))
    return ends


def test_budgets_of_stages_are_read_again_and_rule_the_replay(tmp_path: Path) -> None:
    quotas = (Quota((0, 1), 1), Quota((2, 3), 1))
    policy = Policy(alpha=2.0, alpha_warmup=None, beta=None, lock_steps=0)
    norms = np.array([[1, 1, 1, 1], [9, 8, 7, 1]], np.float32)
    for told, wanted in ((quotas, [True, False, True, False]), ((), [True, True, False, False])):
        folder = tmp_path / str(len(told))
        with Recorder(folder) as recorder:
            recorder.open_trace(list("abcd"), np.ones(4, bool), policy.to_dict(), 2, 0, None, quotas=told)
            for step, row in enumerate(norms, 1):
                recorder.observe(step, row, np.ones(4, bool), np.zeros(4, bool), 1.0)
        trace = read_trace(folder / "trace.arrow")
        assert trace.quotas == told
        ((_, verdict),) = replayed(rules_of(trace, acted=True), [trace])
        assert verdict.choice.high[1].tolist() == wanted


def test_a_trace_cut_at_any_byte_gives_its_whole_batches(tmp_path: Path) -> None:
    ends = record(tmp_path / "r", rows=6, per_batch=2)
    data = (tmp_path / "r" / "trace.arrow").read_bytes()
    whole = read_trace(tmp_path / "r" / "trace.arrow")
    assert whole.dropped_bytes == 0
    assert len(whole) == 6
    torn = tmp_path / "torn.arrow"
    for cut in range(len(data) + 1):
        torn.write_bytes(data[:cut])
        end, rows = max(((e, r) for e, r in ends if e <= cut), default=(0, 0))
        trace = read_trace(torn)
        assert len(trace) == rows, cut
        assert trace.dropped_bytes == cut - end, cut
        assert trace.units == (("a", "b") if cut >= ends[0][0] else ()), cut
        assert np.array_equal(trace.norms, whole.norms[:rows].reshape(rows, len(trace.units)), equal_nan=True)
        assert scan_trace(torn).rows == rows
        assert sum(len(block) for block in iter_trace(torn)) == rows


def test_zeros_after_the_last_batch_are_a_torn_tail(tmp_path: Path) -> None:
    record(tmp_path / "r", rows=3, per_batch=3)
    path = tmp_path / "r" / "trace.arrow"
    path.write_bytes(path.read_bytes() + bytes(4096))  # what some file systems leave after a power loss
    trace = read_trace(path)
    assert len(trace) == 3
    assert trace.dropped_bytes == 4096


@pytest.mark.parametrize("rows", [1, 2, 3, 5, 10, 1000])
def test_blocks_put_together_are_the_trace(tmp_path: Path, rows: int) -> None:
    record(tmp_path / "r", rows=10, per_batch=4)
    path = tmp_path / "r" / "trace.arrow"
    whole, blocks = read_trace(path), list(iter_trace(path, rows))
    assert [len(block) for block in blocks[:-1]] == [rows] * (len(blocks) - 1)
    assert 0 < len(blocks[-1]) <= rows
    for name in ("steps", "norms", "seen", "high"):
        joined = np.concatenate([getattr(block, name) for block in blocks])
        assert np.array_equal(joined, getattr(whole, name), equal_nan=name == "norms")
    assert blocks[0].units == whole.units
    assert scan_trace(path)[1:] == (10, 1, 10, bool(whole.high.any()))


def stream(schema: Any) -> bytes:
    return schema.serialize().to_pybytes()


def schema(metadata: dict[str, Any] | None = None, **changes: Any) -> Any:
    told = {"format": 1, "units": ["a"], "recoverable": [True], "policy": {}, "max_high": 1}
    told |= {"warmup_steps": 0, "total_steps": None} | (metadata or {})
    columns = {"step": pa.int64(), "norms": pa.list_(pa.float32(), 1), "high": pa.list_(pa.bool_(), 1)} | changes
    fields = [(name, kind) for name, kind in columns.items() if kind is not None]
    return pa.schema(fields, metadata={"trimtab": json.dumps(told)})


FOREIGN = {
    "text": (lambda: b"step,loss\n1,2\n", "not an Arrow IPC stream"),
    "arrow file": (lambda: b"ARROW1\0\0" + bytes(64), "not an Arrow IPC stream"),
    "no metadata": (lambda: stream(pa.schema([("x", pa.int64())])), "does not carry our metadata"),
    "metadata without units": (lambda: stream(schema({"units": None})), "does not carry our metadata"),
    "doubles": (lambda: stream(schema(norms=pa.list_(pa.float64(), 1))), "column 'norms' must be"),
    "no high": (lambda: stream(schema(high=None)), "column 'high' must be .* found absent"),
    "mask of another length": (lambda: stream(schema({"recoverable": []})), "1 units, 0 recoverable"),
    "later format": (lambda: stream(schema({"format": 2})), "has format 2.*upgrade trimtab"),
}


@pytest.mark.parametrize("name", FOREIGN)
def test_a_foreign_file_is_refused_in_one_line(tmp_path: Path, name: str) -> None:
    make, words = FOREIGN[name]
    path = tmp_path / "trace.arrow"
    path.write_bytes(make())
    for read in (read_trace, scan_trace, lambda p: list(iter_trace(p))):
        with pytest.raises(TrimtabError, match=words) as caught:
            read(path)
        assert "\n" not in str(caught.value)
        assert str(path) in str(caught.value)


def test_our_own_schema_passes_where_the_foreign_ones_fail(tmp_path: Path) -> None:
    (tmp_path / "trace.arrow").write_bytes(stream(schema()))
    assert read_trace(tmp_path / "trace.arrow").units == ("a",)


def test_absent_things_are_named(tmp_path: Path) -> None:
    with pytest.raises(TrimtabError, match="there is no trace at"):
        read_trace(tmp_path / "trace.arrow")
    with pytest.raises(TrimtabError, match="is not a run folder: it has none of"):
        read_run(tmp_path)


def test_a_torn_last_line_is_dropped_at_any_byte(tmp_path: Path) -> None:
    first, last = b'{"step": 1, "loss": 2.5}\n', b'{"step": 2, "loss": null}'
    path = tmp_path / "metrics.jsonl"
    for cut in range(len(last) + 1):
        path.write_bytes(first + last[:cut])
        run = read_run(tmp_path)
        whole = cut == len(last)
        assert [line["step"] for line in run.metrics] == ([1, 2] if whole else [1])
        assert run.dropped_bytes == (0 if whole else cut)


@pytest.mark.parametrize("bad", [b'{"step": 2, "lo\n', b"[1, 2]\n", b'{"loss": 1}\n', b"\xff\xfe\n", b"\n"])
def test_a_corrupt_line_in_the_middle_is_named(tmp_path: Path, bad: bytes) -> None:
    (tmp_path / "metrics.jsonl").write_bytes(b'{"step": 1}\n' + bad + b'{"step": 3}\n')
    with pytest.raises(TrimtabError, match=r"metrics.jsonl, line 2: must be a JSON object with a step"):
        read_run(tmp_path)


def test_columns_keep_null_as_nan_and_leave_other_lines_out(tmp_path: Path) -> None:
    text = '{"step": 1, "loss": 2}\n{"step": 2, "eval_loss_low": 9}\n{"step": 3, "loss": null}\n'
    (tmp_path / "metrics.jsonl").write_text(text)
    (tmp_path / "run.json").write_text('{"config": {"name": "first"}}')
    run = read_run(tmp_path)
    steps, values = run.column("loss")
    assert steps.tolist() == [1, 3]
    assert values[0] == 2
    assert np.isnan(values[1])
    assert (run.name, run.trace) == ("first", None)


def test_a_broken_run_json_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text("[")
    with pytest.raises(TrimtabError, match=r"run.json must be one JSON object"):
        read_run(tmp_path)


DOCS = Path(__file__).parents[2] / "docs" / "runs.md"


def test_the_documented_snippets_run(tmp_path: Path, make_run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    make_run(tmp_path / "runs" / "a", steps=30)
    monkeypatch.chdir(tmp_path)
    snippets = re.findall(r"```python\n(.*?)```", DOCS.read_text(), re.S)
    assert len(snippets) == 2
    for snippet in snippets:
        exec(snippet, {})
    assert (tmp_path / "runs" / "a" / "report.html").is_file()


def test_the_document_names_every_key_and_column(tmp_path: Path, make_run: Any) -> None:
    make_run(tmp_path / "r", steps=30)
    text = DOCS.read_text()
    with pa.OSFile(str(tmp_path / "r" / "trace.arrow")) as file:
        table = pa.ipc.open_stream(file).read_all()
    told = json.loads(table.schema.metadata[b"trimtab"])
    run = read_run(tmp_path / "r")
    logged = {key for line in run.metrics for key in line}
    for key in [*table.column_names, *told, *run.info, *logged]:
        assert f"`{key}`" in text, key


def test_reading_and_reporting_load_no_torch() -> None:
    code = "import trimtab.report.page, trimtab.control.record, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
