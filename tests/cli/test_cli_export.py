# SPDX-License-Identifier: Apache-2.0
"""`trimtab export`: prints or writes the list, and refuses what cannot be exported in one line."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trimtab import Policy, Recorder


@pytest.fixture(name="run", scope="module")
def _run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of three units, of which one went high and came back, time after time."""
    folder, policy = tmp_path_factory.mktemp("runs") / "run", Policy(max_high=1, persistent_after=2)
    with Recorder(folder) as recorder:
        names = ["layers.0.q_proj", "layers.1.down_proj", "layers.2.q_proj"]
        recorder.open_trace(names, np.ones(3, bool), policy.to_dict(), 1, 5, 60)
        for step in range(1, 61):
            high = np.array([False, step > 20 and step % 4 < 2, step == 10])
            recorder.observe(step, np.ones(3, np.float32), np.ones(3, bool), high, 1.7)
    return folder


def test_the_list_is_printed_or_written(trimtab: Any, run: Path, tmp_path: Path) -> None:
    printed = trimtab("export", run, "--to", "torchao")
    assert (printed.code, printed.err) == (0, "")
    exec(printed.out, names := {})
    assert names["KEEP_HIGH"] == ["layers.1.down_proj"]
    file = tmp_path / "new" / "keep.py"
    written = trimtab("export", run, "--to", "torchao", "--out", file)
    assert file.read_text() == printed.out
    assert str(file) in written.out
    exec(trimtab("export", run, "--to", "te", "--top", "2").out, names)
    assert names["KEEP_HIGH"] == ["layers.1.down_proj", "layers.2.q_proj"]
    assert "*decoder.layers.1.mlp.linear_fc2" in trimtab("export", run, "--to", "megatron").out


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["{run}", "--to", "torcha"], "did you mean 'torchao'"),
        (["{run}", "--to", "te", "--top", "0"], "at least 1"),
        (["{tmp}", "--to", "te"], "is not a run folder"),
        (["{run}"], "--to"),
    ],
)
def test_bad_input_gets_one_line(trimtab: Any, run: Path, tmp_path: Path, args: list[str], words: str) -> None:
    answer = trimtab("export", *(arg.format(run=run, tmp=tmp_path) for arg in args))
    assert answer.code == 2
    assert answer.err.count("\n") == 1
    assert words in answer.err
