# SPDX-License-Identifier: Apache-2.0
"""Logs of other tools: the same numbers whatever the file, what is missing said, what is broken refused in one line."""

import csv
import json
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trimtab import Policy, TrimtabError, replay
from trimtab.errors import MissingExtraError
from trimtab.report.imports import WHOLE, Log, read_log
from trimtab.report.names import Meaning, Naming, visible
from trimtab.report.read import read_trace

Make = Callable[..., np.ndarray]
UNITS = ("layers.0.attn.q", "layers.0.mlp.up", "layers.1.attn.q")


def numbers(steps: int = 30) -> dict[str, list[float]]:
    rng = np.random.default_rng(0)
    columns = {f"grad_norm/{unit}": rng.lognormal(0, 0.3, steps).astype(np.float32).tolist() for unit in UNITS}
    columns["train/grad_norm"] = rng.lognormal(1, 0.2, steps).astype(np.float32).tolist()
    columns["train/loss"] = np.linspace(5, 2, steps).astype(np.float32).tolist()
    columns["eval/loss"] = np.linspace(6, 3, steps).astype(np.float32).tolist()
    return columns


def as_csv(folder: Path, columns: dict[str, list[Any]], step: str = "step") -> Path:
    path = folder / "log.csv"
    with path.open("w", newline="") as file:
        out = csv.writer(file)
        out.writerow([step, *columns])
        out.writerows([t + 1, *row] for t, row in enumerate(zip(*columns.values(), strict=True)))
    return path


def as_jsonl(folder: Path, columns: dict[str, list[Any]]) -> Path:
    path = folder / "log.jsonl"
    rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    path.write_text("".join(json.dumps({"step": t + 1, **row}) + "\n" for t, row in enumerate(rows)))
    return path


def as_json(folder: Path, columns: dict[str, list[Any]]) -> Path:
    path = folder / "trainer_state.json"
    rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    path.write_text(json.dumps({"log_history": [{"step": t + 1, **row} for t, row in enumerate(rows)]}))
    return path


def as_parquet(folder: Path, columns: dict[str, list[Any]]) -> Path:
    pa = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    path = folder / "log.parquet"
    steps = list(range(1, len(next(iter(columns.values()))) + 1))
    parquet.write_table(pa.table({"_step": steps, **columns}), path)
    return path


def as_events(folder: Path, columns: dict[str, list[Any]]) -> Path:
    pytest.importorskip("tensorboard")
    from torch.utils.tensorboard.writer import SummaryWriter

    with SummaryWriter(str(folder / "tb")) as writer:
        for name, values in columns.items():
            for t, value in enumerate(values):
                if value is not None:
                    writer.add_scalar(name, value, t + 1)
    return folder / "tb"


@pytest.mark.parametrize("write", [as_csv, as_jsonl, as_json, as_parquet, as_events])
def test_every_kind_of_file_gives_the_same_log(tmp_path: Path, write: Callable[..., Path]) -> None:
    columns = numbers()
    log = read_log(write(tmp_path, columns))
    trace = log.trace()
    assert trace.units == UNITS
    assert trace.steps.tolist() == list(range(1, 31))
    for u, unit in enumerate(UNITS):
        np.testing.assert_array_equal(trace.norms[:, u], np.float32(columns[f"grad_norm/{unit}"]))
    assert trace.seen.all()
    assert log.loss is not None
    assert log.grad_norm is not None
    np.testing.assert_array_equal(np.float32(log.loss.values), np.float32(columns["train/loss"]))
    np.testing.assert_array_equal(np.float32(log.grad_norm.values), np.float32(columns["train/grad_norm"]))
    assert log.per_unit
    assert not log.ours
    assert "loss train/loss, global norm train/grad_norm, norms of 3 units" in log.notes[0]
    found = replay(trace.norms, Policy(max_high=1), seen=trace.seen)
    wanted = replay(np.stack([columns[f"grad_norm/{u}"] for u in UNITS], axis=1), Policy(max_high=1))
    np.testing.assert_array_equal(found.high, wanted.high)


def test_a_folder_of_ours_is_read_in_blocks_and_in_whole(make_run: Make, tmp_path: Path) -> None:
    make_run(tmp_path / "run", steps=60, units=4)
    for path in (tmp_path / "run", tmp_path / "run" / "trace.arrow"):
        log = read_log(path)
        assert log.ours
        assert log.rows == 60
        np.testing.assert_array_equal(log.trace().norms, read_trace(tmp_path / "run" / "trace.arrow").norms)
    assert read_log(tmp_path / "run").loss is not None
    (tmp_path / "run" / "trace.arrow").unlink()
    log = read_log(tmp_path / "run")
    assert (log.rows, log.per_unit, log.trace().units) == (60, False, (WHOLE,))


def test_several_files_of_one_run_are_joined_by_step(tmp_path: Path) -> None:
    columns = numbers()
    norms = {k: v for k, v in columns.items() if k.startswith("grad_norm/")}
    (tmp_path / "a").mkdir()
    first, second = as_csv(tmp_path, norms), as_jsonl(tmp_path / "a", {"loss": columns["train/loss"]})
    log = read_log(first, second)
    assert log.loss is not None
    assert len(log.loss.steps) == log.rows == 30


# Gaps, NaN, restarts.


def test_an_empty_cell_is_a_gap_and_nan_is_a_value(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    path.write_text("step,grad_norm/a,grad_norm/b,loss\n1,1.0,2.0,5\n2,,NaN,\n3,Infinity,3.0,nan\n5,1.5,,4\n")
    trace = read_log(path).trace()
    assert trace.steps.tolist() == [1, 2, 3, 5]
    assert trace.seen.tolist() == [[True, True], [False, True], [True, True], [True, False]]
    assert np.isnan(trace.norms[1, 1])
    assert np.isinf(trace.norms[2, 0])
    loss = read_log(path).loss
    assert loss is not None
    assert loss.steps.tolist() == [1, 3, 5]
    assert np.isnan(loss.values[1])


def test_json_says_the_same_with_missing_keys_nulls_and_nested_objects(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    rows = (
        '{"step": 1, "loss": 5, "grad_norm": {"a": 1, "b": 2}}\n{"step": 2, "loss": null, "grad_norm": {"a": NaN}}\n\n'
    )
    path.write_text(rows)
    log = read_log(path)
    assert log.trace().units == ("a", "b")
    assert log.trace().seen.tolist() == [[True, True], [True, False]]
    assert log.loss is not None
    assert log.loss.steps.tolist() == [1]


def test_our_own_metrics_alone_say_null_for_what_was_not_finite(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": null, "num_high": 0, "grad_norm": 2.0}\n')
    loss = read_log(tmp_path / "metrics.jsonl").loss
    assert loss is not None
    assert np.isnan(loss.values[0])


def test_of_a_step_logged_twice_the_last_counts_and_order_does_not(tmp_path: Path) -> None:
    (tmp_path / "log.csv").write_text("step,loss,grad_norm\n3,3,1\n1,1,1\n2,2,1\n3,9,1\n")
    loss = read_log(tmp_path / "log.csv").loss
    assert loss is not None
    assert loss.steps.tolist() == [1, 2, 3]
    assert loss.values.tolist() == [1, 2, 9]


def test_a_log_of_every_tenth_step_says_so(tmp_path: Path) -> None:
    (tmp_path / "log.csv").write_text("step,loss\n" + "".join(f"{10 * t},{t}\n" for t in range(1, 9)))
    assert any("one step in 10 was logged" in note for note in read_log(tmp_path / "log.csv").notes)


# What columns are called.


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("loss", Meaning("loss")),
        ("train/loss", Meaning("loss")),
        ("lm loss", Meaning("loss")),
        ("loss_metrics/global_avg_loss", Meaning("loss")),
        ("eval/loss", None),
        ("val_loss", None),
        ("train/learning_rate", None),
        ("train/grad_norm", Meaning("norm")),
        ("grad-norm", Meaning("norm")),
        ("grad_2.0_norm_total", Meaning("norm")),
        ("l2_norm/grad/global", Meaning("norm")),
        ("grad_norm/layers.0.attn.q", Meaning("unit", "layers.0.attn.q")),
        ("train/grad_norm/h.0", Meaning("unit", "h.0")),
        ("grads/h.0/norm", Meaning("unit", "h.0")),
        ("gradients/h.0.mlp.weight", Meaning("unit", "h.0.mlp.weight")),
        ("l2_norm/grad/Model.h.0", Meaning("unit", "Model.h.0")),
        ("l2_norm/param/h.0", None),
        ("grad_2.0_norm/h.0.weight", Meaning("unit", "h.0.weight")),
        ("H.0/grad_norm", Meaning("unit", "H.0")),
        ("grad_norm/max", None),
    ],
)
def test_the_usual_names_are_known(name: str, wanted: Meaning | None) -> None:
    assert Naming().meaning(name) == wanted


@pytest.mark.parametrize(
    ("pattern", "name", "unit"),
    [
        ("blk*.g", "blk.3.g", ".3"),
        ("g/*", "g/a", "a"),
        ("g/*/x*/n", "g/a/x1/n", "a/x1"),
        ("exact", "exact", "exact"),
        ("a[0]*", "a[0]b", "b"),
    ],
)
def test_what_the_stars_stand_for_is_the_unit(pattern: str, name: str, unit: str) -> None:
    assert Naming([pattern]).meaning(name) == Meaning("unit", unit)
    assert Naming([pattern]).meaning("grad_norm/other") is None


def test_somebodys_own_names(tmp_path: Path) -> None:
    (tmp_path / "log.csv").write_text("when,blk0.g,blk1.g,price\n1,1,2,5\n2,1,2,4\n")
    log = read_log(tmp_path / "log.csv", columns=["blk*.g"], loss="price", step="when")
    assert log.trace().units == ("0", "1")
    assert log.loss is not None
    assert log.loss.values.tolist() == [5, 4]


def test_a_chart_of_wandb_is_read_and_of_two_runs_refused(tmp_path: Path) -> None:
    path = tmp_path / "chart.csv"
    head = '"Step","my run - grad_norm/a","my run - grad_norm/a__MIN","my run - grad_norm/a__MAX"\n'
    path.write_text(head + '"0","1.5","1.5","1.5"\n"1","2.5","2.5","2.5"\n')
    log = read_log(path)
    assert log.trace().units == ("a",)
    assert log.trace().norms.tolist() == [[1.5], [2.5]]
    assert log.name == "my run"
    path.write_text('"Step","one - train/loss","two - train/loss"\n1,2,3\n')
    with pytest.raises(TrimtabError, match=r"columns of 2 runs \(one, two\)"):
        read_log(path)


def test_two_columns_of_the_same_unit_keep_their_own_names(tmp_path: Path) -> None:
    (tmp_path / "log.csv").write_text("step,grad_norm/a,gradients/a\n1,1,2\n")
    assert read_log(tmp_path / "log.csv").trace().units == ("grad_norm/a", "gradients/a")


def test_a_histogram_of_gradients_gives_their_norm(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    import torch
    from torch.utils.tensorboard.writer import SummaryWriter

    grads = torch.randn(100)
    with SummaryWriter(str(tmp_path)) as writer:
        writer.add_histogram("gradients/h.0", grads, 1)
    trace = read_log(tmp_path).trace()
    assert trace.norms[0, 0] == pytest.approx(float(grads.norm()), rel=1e-5)


def test_tensorflows_own_scalars_are_read(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.compat.proto import event_pb2

    event = event_pb2.Event(step=4)  # pyright: ignore
    value = event.summary.value.add(tag="train/loss")
    value.metadata.plugin_data.plugin_name = "scalars"
    value.tensor.dtype = 1
    value.tensor.tensor_content = struct.pack("<f", 2.5)
    record = event.SerializeToString()
    path = tmp_path / "events.out.tfevents.1"
    path.write_bytes(struct.pack("<Q", len(record)) + b"crc_" + record + b"crc_")
    loss = read_log(path).loss
    assert loss is not None
    assert (loss.steps.tolist(), loss.values.tolist()) == ([4], [2.5])


def test_only_the_global_norm_stands_in_as_one_unit_and_says_so(tmp_path: Path) -> None:
    (tmp_path / "log.csv").write_text("step,train/grad_norm\n1,2\n2,3\n")
    log = read_log(tmp_path / "log.csv")
    assert (log.per_unit, log.trace().units, log.rows) == (False, (WHOLE,), 2)
    assert any("no norms of single units" in note for note in log.notes)
    assert any("no loss was found" in note for note in log.notes)


# Broken on purpose.


def written(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


@pytest.mark.parametrize(
    ("name", "data", "words"),
    [
        ("log.csv", b"", "is empty"),
        ("log.csv", b"a,b\n1,2\n", "no column of steps"),
        ("log.csv", b"step,a\n1,2\n", "no loss and no gradient norm (it has step, a)"),
        ("log.csv", b"step,grad_norm\n", "has the columns (step, grad_norm), and no value"),
        ("log.csv", b"step,grad_norm/a\n1,-2\n", "holds negative values"),
        ("log.jsonl", b"", "holds no values at all"),
        ("log.jsonl", b'{"step": 1}\nnonsense\n{"step": 2}\n', "line 2"),
        ("log.jsonl", b'{"loss": 1}\n', "no column of steps"),
        ("log.json", b"{", "is not JSON"),
        ("log.json", b"3", "list of objects"),
        ("log.parquet", b"PAR1 and nothing", "is not a Parquet file"),
        ("x.tfevents.1", b"", "holds no values at all"),
        ("x.tfevents.1", b"this is not an event file at all", "is not an event file"),
        ("x.tfevents.1", struct.pack("<Q", 9) + b"crc_" + b"\xff" * 9 + b"crc_", "is not an event file"),
        ("picture.png", b"\x89PNG....", "of no kind that is read here"),
        ("trace.arrow", b"PAR1 something else", "is not a trimtab trace"),
    ],
)
def test_what_cannot_be_read_is_refused_in_one_line(tmp_path: Path, name: str, data: bytes, words: str) -> None:
    path = written(tmp_path / name, data)
    with pytest.raises(TrimtabError) as refused:
        read_log(path)
    assert words in str(refused.value)
    assert name in str(refused.value)
    assert "\n" not in str(refused.value)
    assert path.read_bytes() == data


def test_a_missing_path_and_an_empty_folder_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TrimtabError, match=r"there is no .*gone"):
        read_log(tmp_path / "gone")
    with pytest.raises(TrimtabError, match="is not a run folder"):
        read_log(tmp_path)
    with pytest.raises(TrimtabError, match="got none"):
        read_log()


def test_an_event_file_cut_anywhere_gives_what_is_before_the_cut(tmp_path: Path) -> None:
    folder = as_events(tmp_path, {"train/loss": list(range(20)), "grad_norm/a": list(range(20))})
    (whole,) = folder.glob("*tfevents*")
    data = whole.read_bytes()
    last = 20
    for size in range(len(data) - 1, len(data) // 2, -23):
        path = written(tmp_path / "cut.tfevents.1", data[:size])
        log: Log = read_log(path)
        assert log.loss is not None
        assert len(log.loss.steps) <= last
        last = len(log.loss.steps)
        np.testing.assert_array_equal(log.loss.values, np.arange(last))
    assert any("bytes at the end" in note for note in log.notes)


def test_a_torn_last_row_is_left_out_and_counted(tmp_path: Path) -> None:
    path = written(tmp_path / "log.csv", b"step,loss,grad_norm\n1,2,3\n2,2,3\n3,2")
    log = read_log(path)
    assert log.rows == 2
    assert any("1 row at the end" in note for note in log.notes)
    path = written(tmp_path / "log.jsonl", b'{"step": 1, "loss": 2}\n{"step": 2, "lo')
    assert any("1 row at the end" in note for note in read_log(path).notes)


def test_columns_that_hold_no_numbers_are_named(tmp_path: Path) -> None:
    path = written(tmp_path / "log.csv", b"step,loss,gradients/a\n1,2,\"{'bins': 3}\"\n2,1,\"{'bins': 3}\"\n")
    log = read_log(path)
    assert not log.per_unit
    assert any("1 column without a number left out, such as gradients/a" in note for note in log.notes)


def test_a_run_of_ours_is_not_mixed_with_anything(make_run: Make, tmp_path: Path) -> None:
    make_run(tmp_path / "a", steps=30)
    path = written(tmp_path / "log.csv", b"step,loss\n1,2\n")
    for call in (
        lambda: read_log(tmp_path / "a", path),
        lambda: read_log(path, tmp_path / "a" / "trace.arrow"),
        lambda: read_log(tmp_path / "a", columns=["x*"]),
    ):
        with pytest.raises(TrimtabError, match="is a run of trimtab, which is read alone"):
            call()


def test_event_files_of_two_runs_in_one_folder_are_not_mixed(tmp_path: Path) -> None:
    for run in ("a", "b"):
        (tmp_path / run).mkdir()
        as_events(tmp_path / run, {"loss": [1.0]})
    with pytest.raises(TrimtabError, match="event files of 2 runs"):
        read_log(tmp_path)


def test_without_tensorboard_the_remedy_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard.compat.proto", None)
    path = written(tmp_path / "x.tfevents.1", b"\0" * 16)
    with pytest.raises(MissingExtraError, match=r"pip install 'trimtab\[tensorboard\]'"):
        read_log(path)


def test_reading_needs_neither_tensorflow_nor_torch(tmp_path: Path) -> None:
    import subprocess

    folder = as_events(tmp_path, {"loss": [1.0, 2.0]})
    script = (
        f"import sys; from trimtab.report.imports import read_log; print(len(read_log({str(folder)!r}).loss.steps)); "
        "assert not {'torch', 'tensorflow'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "2"), done.stderr


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("layers.0.q", "layers.0.q"),
        ("a\x1b[31mb", "a\\u001b[31mb"),
        ("a\nb\tc", "a b c"),
        ("\u202eevil", "\\u202eevil"),
        ("\ud800", "\\ud800"),
        ("\u00fcber \u4e2d", "\u00fcber \u4e2d"),
        ("\x00", "\\u0000"),
    ],
)
def test_names_are_made_visible(text: str, wanted: str) -> None:
    assert visible(text) == wanted
    visible(text).encode("utf-8")


@pytest.mark.parametrize("large", [False, True])
def test_a_column_of_text_may_hold_numbers_and_bytes_that_are_no_text(tmp_path: Path, large: bool) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    cells = [b"1.5", b"\xf6\xff", b"2.5", b"text"]
    offsets = np.cumsum([0, *map(len, cells)]).astype(np.int64 if large else np.int32)
    buffers = [None, pa.py_buffer(offsets.tobytes()), pa.py_buffer(b"".join(cells))]
    column = pa.Array.from_buffers(pa.large_string() if large else pa.string(), len(cells), buffers)
    parquet.write_table(pa.table({"step": [1, 2, 3, 4], "loss": column}), tmp_path / "log.parquet")
    loss = read_log(tmp_path / "log.parquet").loss
    assert loss is not None
    assert (loss.steps.tolist(), loss.values.tolist()) == ([1, 3], [1.5, 2.5])
