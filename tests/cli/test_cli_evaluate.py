# SPDX-License-Identifier: Apache-2.0
"""`trimtab evaluate`: tables that agree with the library, JSON that agrees with them, one line for bad input."""

import functools
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from trimtab.lab.downstream import compare, evaluate_model, read_results
from trimtab.lab.downstream.measures import MEASURES
from trimtab.lab.downstream.tasks import COMMONSENSE
from trimtab.lab.evaluate import evaluate_run
from trimtab.lab.finetune import finetune


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


def tasks_of(text: str) -> dict[tuple[str, str], list[str]]:
    """(task, measure) -> the row's other cells; a task is named in its first row only."""
    found, task = {}, ""
    for cells in (line.split() for line in text.splitlines()):
        known = [at for at, cell in enumerate(cells) if cell in MEASURES or cell == "average"]
        if known and cells[0] != "commonsense":
            task = cells[0] if known[0] else task
            found[task, cells[known[0]]] = cells[known[0] + 1 :]
    return found


def test_tasks_are_shown_as_the_library_finds_them(
    evaluate: Any, tiny_llama: Path, downstream_data: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out.json"
    asked = (tiny_llama, "--tasks", "commonsense,gsm8k", "--data", downstream_data, "--device", "cpu")
    answer = evaluate(*asked, "--out", out)
    assert (answer.code, answer.err) == (0, "")
    assert not set("│┃━") & set(answer.out)
    names = [*COMMONSENSE, "gsm8k"]
    expected = evaluate_model(tiny_llama, names, downstream_data, device="cpu")
    shown = tasks_of(answer.out)
    for name in names:
        for measure, score in expected["tasks"][name]["scores"].items():
            assert shown[name, measure][0] == f"{score['value']:.4f}"
    assert f"commonsense average {expected['commonsense']['average']:.4f} of piqa acc_norm" in answer.out
    assert "HellaSwag is not among them" in answer.out
    kept = read_results(out)
    assert {name: task["items"] for name, task in kept["tasks"].items()} == {
        name: task["items"] for name, task in expected["tasks"].items()
    }
    printed = json.loads(evaluate(*asked, "--out", out, "--json").out)
    assert printed == kept | {
        "tasks": {k: {n: x for n, x in v.items() if n != "items"} for k, v in kept["tasks"].items()}
    }


def test_an_arm_is_compared_with_another(
    evaluate: Any, tiny_llama: Path, downstream_data: Path, tmp_path: Path
) -> None:
    out, asked = tmp_path / "out.json", (tiny_llama, "--tasks", "piqa", "--data", downstream_data, "--device", "cpu")
    evaluate(*asked, "--out", out)
    low = evaluate(*asked, "--recipe", "int8", "--against", out)
    assert (low.code, low.err) == (0, "")
    ours = evaluate_model(tiny_llama, ["piqa"], downstream_data, recipe="int8", device="cpu")
    text = low.out[low.out.index("against tiny-llama") :]
    for one in compare(ours, read_results(out)):
        cells = tasks_of(text)["piqa", one.measure]
        assert cells[:3] == [f"{one.ours:.4f}", f"{one.theirs:.4f}", f"{one.mean:+.4g}"]
    assert text.count("no conclusion: fewer than 30 items") == 4
    printed = json.loads(evaluate(*asked, "--recipe", "int8", "--path", "high", "--against", out, "--json").out)
    assert [row["mean"] for row in printed["against"]] == [0, 0, 0, 0]
    look = evaluate(*asked, "--limit", "2")
    assert "2 of 4" in look.out
    assert "a quick look: no conclusion without whole sets" in look.out


def test_bad_input_of_tasks_gets_one_line(
    evaluate: Any, run: Path, tiny_llama: Path, downstream_data: Path, tmp_path: Path
) -> None:
    def asked(*options: object, tasks: str = "piqa", model: object = tiny_llama, data: object = downstream_data) -> Any:
        return evaluate(model, "--tasks", tasks, "--data", data, "--device", "cpu", *options)

    refused(asked(tasks="hellaswag"), "there is no task 'hellaswag'", "choose from gsm8k")
    refused(asked(data=tmp_path), "is expected at", str(tmp_path / "tasks" / "piqa.jsonl"))
    refused(evaluate(tiny_llama, "--tasks", "piqa"), "name their folder with --data")
    refused(evaluate(run, "--limit", "3", "--out", "x.json"), "--limit, --out need --tasks")
    refused(asked("--batches", "2"), "--limit limits the items")
    refused(asked("--bits", "4-4-16", "--bits", "4-4-4"), "give one --bits")
    refused(asked("--path", "middle"), "--path must be low or high, got 'middle'")
    refused(asked("--path", "high"), "name it with --recipe")
    refused(asked("--recipe", "int9"), "int9")
    refused(asked(model=tmp_path / "none"), "nothing is downloaded")
    refused(asked(model=run), "is a run of trimtab train", "leave --tasks out")
    refused(asked("--against", tmp_path / "none.json"), "cannot be read")
    bare = shutil.copytree(tiny_llama, tmp_path / "bare", ignore=shutil.ignore_patterns("token*", "*.jinja"))
    refused(asked(model=bare), "tokenizer")
    out = tmp_path / "out.json"
    assert asked("--out", out, "--limit", "2").code == 0
    refused(asked("--against", out), "piqa has 4 of 4 here and 2 of 4 there", "the same --data, --limit and --shots")
    refused(asked("--out", out), "holds results of other settings", "--force")
    assert asked("--out", out, "--force").code == 0


def test_a_fine_tuned_run_is_asked_and_not_measured_on_text(
    evaluate: Any, tiny_llama: Path, downstream_data: Path, tmp_path: Path
) -> None:
    pytest.importorskip("peft")
    run = tmp_path / "run"
    examples = downstream_data / "gsm8k" / "train.jsonl"
    settings = {"model": str(tiny_llama), "data": str(examples), "steps": 2, "batch": 1, "lr": 0.1, "device": "cpu"}
    finetune({**settings, "holdout": 0.5, "checkpoint_every": 0}, run)
    refused(evaluate(run), "is a run of trimtab finetune", "--tasks gsm8k --chat")
    asked = ("--tasks", "gsm8k", "--data", downstream_data, "--chat", "--device", "cpu", "--json")
    tuned, plain = (json.loads(evaluate(model, *asked).out) for model in (run, tiny_llama))
    adapter = evaluate_model(tiny_llama, ["gsm8k"], downstream_data, adapter=run / "adapter", chat=True, device="cpu")
    assert tuned["tasks"]["gsm8k"]["scores"] == adapter["tasks"]["gsm8k"]["scores"]
    assert tuned["about"]["weights"] == adapter["about"]["weights"] != plain["about"]["weights"]
    assert tuned["tasks"]["gsm8k"]["scores"] != plain["tasks"]["gsm8k"]["scores"]
