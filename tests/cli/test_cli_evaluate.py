# SPDX-License-Identifier: Apache-2.0
"""`trimtab evaluate`: a table that agrees with the library, JSON that agrees with the table, one line for bad input."""

import functools
import json
import re
from pathlib import Path
from typing import Any

import pytest

from trimtab.lab.evaluate import evaluate_run


@pytest.fixture(name="run", scope="module")
def _run(short_run: Any) -> Path:
    return short_run(4)


@pytest.fixture
def evaluate(trimtab: Any) -> Any:
    """Call `trimtab evaluate ARGS` in this process."""
    return functools.partial(trimtab, "evaluate")


def rows(text: str) -> dict[str, list[str]]:
    """Bits -> the other cells of its row."""
    found = [line.split() for line in text.splitlines() if re.match(r"\s*\d+-\d+-\d+", line)]
    return {cells[0]: cells[1:] for cells in found}


def refused(answer: Any, *words: str) -> None:
    assert answer.code == 2, answer
    assert answer.out == ""
    assert answer.err.startswith("error: ")
    assert answer.err.count("\n") == 1, answer.err
    for word in words:
        assert word in answer.err


def test_the_table_holds_what_the_library_finds(evaluate: Any, run: Path, contents: Any) -> None:
    before = contents(run)
    answer = evaluate(run, "--bits", "4-4-16", "--bits", "2-2-2+had")
    assert (answer.code, answer.err) == (0, "")
    assert "\x1b" not in answer.out
    assert not set("│┃━") & set(answer.out)  # piped, it is plain text
    result = evaluate_run(run, ["4-4-16", "2-2-2+had"])
    table = rows(answer.out)
    assert list(table) == ["16-16-16", "4-4-16", "2-2-2+had"]
    for score in result.scores:
        cells = table[str(score.bits)]
        assert cells[:2] == [f"{score.loss:.4f}", f"{score.perplexity:.4g}"]
        assert cells[2] == f"{result.bits_per_byte(score):.4f}"
        assert cells[3:] == ([] if score is result.scores[0] else [f"{result.change(score):+.4f}"])
    assert "step 4, 64 held-out tokens of words.txt" in answer.out
    assert f"excess kurtosis of the residual stream: {result.kurtosis_mean:.2f} on average" in answer.out
    assert contents(run) == before


def test_without_bits_the_columns_of_the_paper_are_shown(evaluate: Any, run: Path) -> None:
    answer = evaluate(run, "--batches", "1")
    assert list(rows(answer.out)) == ["16-16-16", "4-8-8", "4-4-16", "4-4-4", "4-4-4+had"]
    assert "step 4, 32 held-out tokens" in answer.out


def test_json_holds_the_same(evaluate: Any, run: Path) -> None:
    printed = evaluate(run, "--bits", "4-4-16", "--json")
    assert (printed.code, printed.err) == (0, "")
    assert json.loads(printed.out) == json.loads(json.dumps(evaluate_run(run, ["4-4-16"]).to_dict()))


def test_other_text_is_evaluated(evaluate: Any, run: Path, tmp_path: Path) -> None:
    (tmp_path / "other.txt").write_text("0123456789 " * 60)
    answer = evaluate(run, "--bits", "8-8-8", "--data", tmp_path / "other.txt")
    assert "held-out tokens of other.txt" in answer.out
    assert rows(answer.out)["16-16-16"] != rows(evaluate(run, "--bits", "8-8-8").out)["16-16-16"]


def test_bad_input_gets_one_line(evaluate: Any, run: Path, tmp_path: Path) -> None:
    refused(evaluate(tmp_path / "missing"), "needs a run folder", "missing")
    refused(evaluate(run / "run.json"), "needs a run folder")
    refused(evaluate(run, "--bits", "4-4"), "weights-activations-kv, such as 4-4-16", "'4-4'")
    refused(evaluate(run, "--bits", "4-4-9"), "the bits of kv in '4-4-9' must be 2 to 8, or 16", "got 9")
    refused(evaluate(run, "--data", tmp_path / "nothing"), "existing file or folder", "nothing")
    refused(evaluate(run, "--batches", "0"), "--batches")
    refused(evaluate(), "RUN")


def test_a_run_without_a_checkpoint_says_what_to_do(evaluate: Any, run: Path, tmp_path: Path) -> None:
    (tmp_path / "run.json").write_bytes((run / "run.json").read_bytes())
    refused(evaluate(tmp_path), "has no checkpoint yet", f"trimtab train --resume --out {tmp_path}")
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "step_000002.pt").write_bytes(b"PK")
    answer = evaluate(tmp_path)
    warning, error = answer.err.splitlines()
    assert warning.startswith("warning: ")
    assert "step_000002.pt cannot be read" in warning
    refused(answer._replace(err=f"{error}\n"), "none of the 1 checkpoints", "restore one", "--force")
