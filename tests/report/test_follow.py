# SPDX-License-Identifier: Apache-2.0
"""Follow: reading a run while it is written gives what reading it afterwards gives, whatever happens to its files."""

import base64
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from growing import POLICY, Writer

from trimtab.control.replay import replay
from trimtab.errors import TrimtabError
from trimtab.report import follow
from trimtab.report.follow import MAX_SHOWN, Follower
from trimtab.report.pool import encode
from trimtab.report.read import read_trace
from trimtab.report.strip import MAX_COLUMNS


def shown(follower: Follower) -> dict[str, Any]:
    """Everything that a new page is told, without what depends on when it asks."""
    told = follower.since()
    return {key: value for key, value in told.items() if key not in ("token", "tick", "age", "behind")}


def fresh(folder: Path) -> dict[str, Any]:
    follower = Follower(folder)
    follower.refresh(60)
    return shown(follower)


def heat(told: dict[str, Any], units: int) -> np.ndarray:
    return np.frombuffer(base64.b64decode(told["heat"]["ratio"]), np.uint8).reshape(-1, units)


def high(told: dict[str, Any], units: int) -> np.ndarray:
    share = np.frombuffer(base64.b64decode(told["heat"]["high"]), np.uint8).reshape(-1, units)
    assert set(share.ravel().tolist()) <= {0, 255}  # a column is one step
    return share > 0


def test_a_run_read_while_it_is_written_is_the_run_read_afterwards(tmp_path: Path) -> None:
    writer = Writer(tmp_path / "a")
    follower = Follower(writer.folder)
    for part in range(8):
        writer.write(5, spikes={part % 5: 6.0}, high=(part % 5,))
        follower.refresh()
    assert follower.step == 40
    assert shown(follower) == fresh(writer.folder)
    told, trace = shown(follower), read_trace(writer.folder / "trace.arrow")
    decisions = replay(trace.norms, POLICY, seen=trace.seen, total_steps=1000)
    assert np.array_equal(heat(told, 5), encode(decisions.ratio))
    assert np.array_equal(high(told, 5), trace.high)
    losses = [json.loads(line)["loss"] for line in (writer.folder / "metrics.jsonl").read_text().splitlines()]
    assert told["curves"]["loss"]["mean"] == pytest.approx(losses, rel=1e-5)
    assert told["curves"]["loss"]["low"] == told["curves"]["loss"]["high"]


def test_a_page_is_told_only_what_is_new(tmp_path: Path) -> None:
    writer = Writer(tmp_path / "a")
    writer.write(30)
    follower = Follower(writer.folder)
    follower.refresh()
    first = follower.since()
    writer.write(4, spikes={2: 9.0}, events=({"kind": "persistent", "unit": "layers.2.down", "message": "again"},))
    follower.refresh()
    second = follower.since(first["token"], first["tick"])
    assert (first["from"], second["from"], second["used"]) == (0, 30, 34)
    assert "units" in first
    assert "units" not in second
    assert len(second["curves"]["loss"]["mean"]) == 4
    assert heat(second, 5).shape == (4, 5)
    assert [event["message"] for event in second["notable"]] == ["again"]
    follower.refresh()
    third = follower.since(second["token"], second["tick"])
    assert third["from"] == third["used"]
    assert "events" not in third
    assert follower.since("another", third["tick"])["from"] == 0


def test_who_is_high_is_named_first_and_since_when(tmp_path: Path) -> None:
    writer = Writer(tmp_path / "a")
    writer.write(10)
    writer.write(3, spikes={4: 3.0}, high=(4,))
    writer.write(2, spikes={1: 7.0}, high=(4,))
    told = fresh(writer.folder)
    assert [(row["unit"], row["since"]) for row in told["now"][:2]] == [("layers.4.down", 11), ("layers.1.down", None)]
    assert told["now"][1]["risk"] > 1
    assert (told["num_high"], told["max_high"], told["acted"]) == (1, 2, True)


def test_a_run_that_only_observes_shows_who_would_have_run_high(tmp_path: Path) -> None:
    writer = Writer(tmp_path / "a")
    writer.write(10)
    writer.write(1, spikes={3: 9.0})
    writer.write(5)
    told, trace = fresh(writer.folder), read_trace(writer.folder / "trace.arrow")
    chosen = replay(trace.norms, POLICY, total_steps=1000).high
    assert told["acted"] is False
    assert np.array_equal(high(told, 5), np.concatenate([np.zeros((1, 5), bool), chosen[:-1]]))
    assert high(told, 5)[11, 3]


def test_a_column_of_many_steps_says_in_how_many_of_them_a_unit_ran_high(tmp_path: Path) -> None:
    writer = Writer(tmp_path / "a")
    writer.write(MAX_COLUMNS, high=(0,))
    writer.write(3 * MAX_COLUMNS - 1)
    writer.write(1, high=(2,))
    told = fresh(writer.folder)
    share = np.frombuffer(base64.b64decode(told["heat"]["high"]), np.uint8).reshape(-1, 5)
    assert told["width"] == 4
    assert (share[: MAX_COLUMNS // 4, 0] == 255).all()
    assert not share[MAX_COLUMNS // 4 :, 0].any()
    assert share[-1].tolist() == [0, 0, 64, 0, 0]


@pytest.mark.parametrize("name", ["trace.arrow", "metrics.jsonl"])
def test_half_a_record_waits_until_it_is_whole(tmp_path: Path, name: str) -> None:
    writer = Writer(tmp_path / "a")
    writer.write(10)
    before = writer.folder / name
    half = before.read_bytes()
    writer.write(6)
    whole = before.read_bytes()
    follower = Follower(writer.folder)
    for cut in (len(half) + 1, (len(half) + len(whole)) // 2, len(whole) - 1):
        before.write_bytes(whole[:cut])
        follower.refresh()
        told = shown(follower)
        judged = int((heat(told, 5) < 254).any(axis=1).sum())
        logged = sum(value is not None for value in told["curves"]["loss"]["mean"])
        assert judged == 10 if name == "trace.arrow" else 10 <= logged < 16
        assert not told["notes"]
    before.write_bytes(whole)
    follower.refresh()
    assert follower.generation == 1
    assert shown(follower) == fresh(writer.folder)


def test_a_tail_that_stays_torn_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = Writer(tmp_path / "a")
    writer.write(10)
    with (writer.folder / "trace.arrow").open("ab") as file:
        file.write(b"\xff\xff\xff\xff\x10")
    follower = Follower(writer.folder)
    monkeypatch.setattr(follower, "_age", lambda: 100.0)
    follower.refresh()
    assert any("last 5 bytes are torn" in note for note in follower.since()["notes"])


def test_a_resumed_run_is_read_anew_even_if_its_files_are_longer_than_before(tmp_path: Path) -> None:
    writer = Writer(tmp_path / "a")
    writer.write(20)
    offsets = writer.recorder.offsets()
    writer.write(10, spikes={0: 8.0})
    follower = Follower(writer.folder)
    follower.refresh()
    sizes = {name: (writer.folder / name).stat().st_size for name in ("metrics.jsonl", "trace.arrow")}
    writer.resume(offsets, 20)
    writer.write(40)
    assert all((writer.folder / name).stat().st_size > size for name, size in sizes.items())
    follower.refresh()
    assert follower.generation == 2
    assert shown(follower) == fresh(writer.folder)
    assert not (heat(shown(follower), 5)[20:, 0] > encode(np.array([[2.0]]))[0, 0]).any()  # the spike is gone


def test_a_resumed_run_that_repeats_itself_is_not_read_twice(tmp_path: Path) -> None:
    writer = Writer(tmp_path / "a")
    writer.write(20)
    offsets, state = writer.recorder.offsets(), writer.rng.bit_generator.state
    writer.write(10)
    follower = Follower(writer.folder)
    follower.refresh()
    writer.resume(offsets, 20)
    writer.rng.bit_generator.state = state
    writer.write(10)
    follower.refresh()
    assert follower.generation == 1
    assert shown(follower) == fresh(writer.folder)


def test_a_cut_file_is_read_anew(tmp_path: Path) -> None:
    writer = Writer(tmp_path / "a")
    writer.write(20)
    offsets = writer.recorder.offsets()
    writer.write(10)
    follower = Follower(writer.folder)
    follower.refresh()
    writer.resume(offsets, 20)  # cut, and nothing written yet
    follower.refresh()
    assert follower.step == 20
    assert shown(follower) == fresh(writer.folder)


def test_a_run_that_is_started_again_takes_the_place_of_the_old_one(tmp_path: Path) -> None:
    writer = Writer(tmp_path / "a", units=5)
    writer.write(30)
    follower = Follower(writer.folder)
    follower.refresh()
    token = follower.since()["token"]
    writer.recorder.close()
    again = Writer(writer.folder, units=["x", "y"], seed=1, force=True)
    again.write(3)
    follower.refresh()
    told = follower.since(token, 999)
    assert (told["units"], told["step"], told["from"]) == (["x", "y"], 3, 0)
    assert shown(follower) == fresh(writer.folder)


def test_a_folder_may_go_away_and_come_back(tmp_path: Path) -> None:
    writer = Writer(tmp_path / "a")
    writer.write(5)
    writer.recorder.close()
    follower = Follower(writer.folder)
    follower.refresh()
    shutil.move(writer.folder, tmp_path / "away")
    follower.refresh()
    told = follower.since()
    assert told["used"] == 0
    assert told["age"] is None
    assert told["notes"] == ["Nothing has been recorded yet."]
    shutil.move(tmp_path / "away", writer.folder)
    follower.refresh()
    assert shown(follower) == fresh(writer.folder)


def test_metrics_before_the_first_row_of_the_trace_are_kept(tmp_path: Path) -> None:
    folder = tmp_path / "a"
    folder.mkdir()
    event = '{"kind": "nonfinite", "message": "bad"}'
    lines = [f'{{"step": {step}, "loss": {step}.5, "events": [{event}]}}\n' for step in (1, 2)]
    (folder / "metrics.jsonl").write_text("".join(lines))
    follower = Follower(folder)
    follower.refresh()
    assert follower.since()["curves"]["loss"]["mean"] == [1.5, 2.5]
    other = Writer(tmp_path / "b")
    other.write(4)
    shutil.copy(other.folder / "trace.arrow", folder)
    follower.refresh()
    told = follower.since()
    assert told["curves"]["loss"]["mean"] == [1.5, 2.5, None, None]
    assert len(told["notable"]) == 2
    assert told["used"] == 4


def test_a_broken_line_is_counted_and_the_rest_goes_on(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_bytes(b'{"step": 1, "loss": 3}\n{"st\n[]\n{"step": 2, "loss": null}\n')
    told = fresh(tmp_path)
    assert told["notes"] == ["2 broken lines of metrics.jsonl are left out."]
    assert told["curves"]["loss"] == {"low": [3.0, None], "high": [3.0, None], "mean": [3.0, None], "bad": [1]}


def test_a_foreign_trace_is_a_note_and_not_the_end(tmp_path: Path) -> None:
    (tmp_path / "trace.arrow").write_bytes(b"PK\x03\x04 not ours")
    (tmp_path / "metrics.jsonl").write_bytes(b'{"step": 1, "loss": 3}\n')
    told = fresh(tmp_path)
    assert "not a trimtab trace" in told["notes"][0]


def test_of_very_many_units_those_that_stand_out_are_shown(tmp_path: Path) -> None:
    writer = Writer(tmp_path / "a", units=MAX_SHOWN + 100)
    writer.write(8)
    follower = Follower(writer.folder)
    follower.refresh()
    before = follower.since()
    last = f"layers.{MAX_SHOWN + 99}.down"
    writer.write(1, spikes={MAX_SHOWN + 99: 20.0})
    follower.refresh()
    told = follower.since(before["token"], before["tick"])
    assert len(told["units"]) == MAX_SHOWN
    assert last in told["units"]
    assert told["from"] == 0  # other units: everything is sent anew
    assert "largest ratios" in told["notes"][-1]


def test_a_long_record_is_read_in_slices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = Writer(tmp_path / "a")
    for _ in range(10):
        writer.write(3)
    follower, calls = Follower(writer.folder), 0
    monkeypatch.setattr(follow, "CHUNK", 64)  # shorter than a line
    while calls == 0 or follower.behind:
        follower.refresh(0)
        calls += 1
        assert calls < 100
    assert calls > 8
    assert shown(follower) == fresh(writer.folder)


def test_what_is_no_run_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TrimtabError, match=r"is not a run folder.*start the run first"):
        Follower(tmp_path)
