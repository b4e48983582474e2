# SPDX-License-Identifier: Apache-2.0
"""Checkpoints: whole or absent, the newest readable one is found, and one that does not belong here is refused by name
while the run folder stays as it was."""

import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from trimtab.errors import TrimtabError
from trimtab.lab import checkpoint
from trimtab.lab.parallel import World
from trimtab.lab.train import train

WHOLE = {"step": 3, "steps": 9, "model": {}, "optimizer": {}, "offsets": {"metrics": 0, "trace": 0}, "config": {}}


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def refused(out: Path, match: str, **settings: Any) -> None:
    """A resume must fail in one line that says why, and leave every byte of the folder."""
    before = contents(out)
    with pytest.raises(TrimtabError, match=match) as caught:
        train(settings, out, resume=True)
    assert "\n" not in str(caught.value)
    assert contents(out) == before


@pytest.fixture
def run(tmp_path: Path, small: dict[str, Any]) -> Path:
    train({**small, "steps": 4, "checkpoint_every": 2}, tmp_path / "run")
    return tmp_path / "run"


def test_the_newest_two_are_kept(tmp_path: Path) -> None:
    for step in (9, 10, 100, 1_000_000):
        checkpoint.save(tmp_path, step, {**WHOLE, "step": step})
    assert names(tmp_path) == ["step_000100.pt", "step_1000000.pt"]
    path, state = checkpoint.latest(tmp_path) or (None, {})
    assert (path, state["step"]) == (tmp_path / "step_1000000.pt", 1_000_000)


def test_a_write_that_fails_leaves_the_old_file_and_no_draft(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint.save(tmp_path, 3, WHOLE)
    before = contents(tmp_path)

    def full_disk(state: object, file: Any) -> None:
        file.write(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", full_disk)
    with pytest.raises(OSError, match="No space left"):
        checkpoint.save(tmp_path, 3, WHOLE)
    assert contents(tmp_path) == before


def test_a_draft_of_one_process_or_of_several_is_in_nobody_s_way(tmp_path: Path) -> None:
    """Killed while ranks write step 3, resumed by one process; and the other way round."""
    draft = tmp_path / "step_000003.tmp"
    draft.mkdir()
    (draft / "__0_0.distcp").write_text("half")
    checkpoint.save(tmp_path, 3, WHOLE)
    assert names(tmp_path) == ["step_000003.pt"]
    draft.write_text("half")
    checkpoint.save_together(tmp_path, 3, {"model.w": torch.ones(3)}, WHOLE, World())
    assert names(tmp_path) == ["step_000003", "step_000003.pt"]


def test_a_folder_is_whole_until_its_removal_has_begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that is killed in the middle of it leaves no part of one under its final name."""
    for step in (1, 2):
        checkpoint.save_together(tmp_path, step, {"model.w": torch.ones(3)}, {**WHOLE, "step": step}, World())

    def killed(path: Path, **_: Any) -> None:
        (path / "rest.pt").unlink()
        raise KeyboardInterrupt

    monkeypatch.setattr(checkpoint.shutil, "rmtree", killed)
    with pytest.raises(KeyboardInterrupt):
        checkpoint.save_together(tmp_path, 3, {"model.w": torch.ones(3)}, {**WHOLE, "step": 3}, World())
    assert names(tmp_path) == ["step_000001.tmp", "step_000002", "step_000003"]


def test_without_a_checkpoint_there_is_none(tmp_path: Path) -> None:
    assert checkpoint.latest(tmp_path / "missing") is None
    (tmp_path / "step_3.txt").write_text("not one")
    (tmp_path / "step_000003.tmp").write_text("a draft")
    assert checkpoint.latest(tmp_path) is None


def test_it_holds_tensors_and_plain_values_only(run: Path) -> None:
    state = torch.load(run / "checkpoints" / "step_000004.pt", weights_only=True)
    assert state["step"] == 4
    assert {"model", "optimizer", "controller", "paths", "faults", "rng", "offsets", "config", "data"} <= set(state)


def test_a_torn_one_falls_back_to_the_one_before(run: Path, caplog: pytest.LogCaptureFixture) -> None:
    newest = run / "checkpoints" / "step_000004.pt"
    newest.write_bytes(newest.read_bytes()[:1000])
    with caplog.at_level(logging.WARNING):
        path, state = checkpoint.latest(run / "checkpoints") or (None, {})
    assert (path, state["step"]) == (run / "checkpoints" / "step_000002.pt", 2)
    assert str(newest) in caplog.text
    assert train({}, run, resume=True).steps == 4
    assert checkpoint.latest(run / "checkpoints") is not None


def test_when_none_can_be_read_the_run_is_not_started_over(run: Path) -> None:
    for path in (run / "checkpoints").iterdir():
        path.write_bytes(b"PK")
    refused(run, "none of the 2 checkpoints in .* can be read")


def test_a_foreign_pt_is_refused(run: Path) -> None:
    torch.save({"state_dict": {}}, run / "checkpoints" / "step_000009.pt")
    refused(run, r"step_000009\.pt is not a checkpoint of trimtab train")


@pytest.mark.parametrize(
    ("other", "match"),
    [
        ({"num_experts": 2, "top_k": 1}, "is of another model: blocks.0.mlp"),
        ({"policy": {"alpha": 1.3}}, r"another run: policy\.alpha was 1\.3 there and is 1\.05 here"),
        ({"recipe": "nvfp4"}, "another run: recipe was 'nvfp4' there and is 'fp8' here"),
    ],
)
def test_one_of_another_run_is_refused(
    run: Path, tmp_path: Path, small: dict[str, Any], other: dict[str, Any], match: str
) -> None:
    policy = {**small["policy"], **other.get("policy", {})}
    train({**small, "steps": 2, "checkpoint_every": 2, **other, "policy": policy}, tmp_path / "other")
    shutil.copy(tmp_path / "other" / "checkpoints" / "step_000002.pt", run / "checkpoints" / "step_000009.pt")
    refused(run, match, steps=12)


def test_other_text_is_refused(tmp_path: Path, text: Path, small: dict[str, Any]) -> None:
    data = tmp_path / "data.txt"
    shutil.copy(text, data)
    train({**small, "data": str(data), "steps": 2}, tmp_path / "run")
    data.write_text(data.read_text() + "!")
    refused(tmp_path / "run", "was trained on other text", steps=4)


def test_check_model_names_what_differs() -> None:
    model = nn.Linear(3, 2, bias=False)
    checkpoint.check_model(model.state_dict(), model.state_dict(), Path("a.pt"))
    with pytest.raises(TrimtabError, match=r"a\.pt is of another model: weight is \(2, 4\) there and \(2, 3\) here"):
        checkpoint.check_model(model.state_dict(), nn.Linear(4, 2, bias=False).state_dict(), Path("a.pt"))
    with pytest.raises(TrimtabError, match=r"bias is \(2,\) there and absent here"):
        checkpoint.check_model(model.state_dict(), nn.Linear(3, 2).state_dict(), Path("a.pt"))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_bad_value_anywhere_is_not_finite(value: float, dtype: torch.dtype) -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 5)).to(dtype)
    assert checkpoint.is_finite(model.parameters())
    with torch.no_grad():
        model[1].bias[4] = value
    assert not checkpoint.is_finite(model.parameters())
