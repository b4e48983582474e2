# SPDX-License-Identifier: Apache-2.0
"""`trimtab diagnose`: table and JSON are the library's, the advice works, a page is written only if asked for."""

import functools
import json
import re
import shlex
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest

from trimtab.lab.config import load_settings
from trimtab.lab.diagnose import diagnose
from trimtab.lab.model import Decoder, ModelConfig
from trimtab.lab.subject import load_subject
from trimtab.linear import convert_
from trimtab.report.read import read_trace

UNITS = [f"blocks.{end}" for end in ("0.attn.*", "0.mlp.*", "1.attn.*", "1.mlp.gate", "1.mlp.up", "1.mlp.down")]


@pytest.fixture(name="folder", scope="module")
def _folder(short_run: Any) -> Path:
    """A run of three steps, and its text beside it."""
    return short_run(3).parent


@pytest.fixture(name="call")
def _call(trimtab: Any) -> Any:
    """Call `trimtab diagnose ARGS` in this process."""
    return functools.partial(trimtab, "diagnose")


def table(text: str) -> list[list[str]]:
    return [line.split() for line in text.splitlines() if re.match(r"\s*blocks\.\S+\s+-?\d", line)]


def lines_of(text: str) -> list[str]:
    """The rows of units that are patterns; without an interval, as after one batch."""
    return [line for line in text.splitlines() if re.match(r"\s*\*\.\S+\s+-?\d", line)]


def test_the_table_is_the_librarys_and_the_advice_works(call: Any, folder: Path, contents: Any) -> None:
    before = contents(folder)
    options = ("--batches", "2", "--batch", "1", "--keep", "2", "--top", "4", "--device", "cpu")
    answer = call(folder / "run", folder / "words.txt", "--unit", json.dumps(UNITS), *options)
    assert (answer.code, answer.err) == (0, "")
    assert contents(folder) == before
    subject = load_subject(folder / "run", folder / "words.txt", unit=UNITS, batches=2, batch=1, device="cpu")
    expected = diagnose(subject.model, subject.batches, max_high=2).ranked()
    rows = table(answer.out)
    assert [row[0] for row in rows] == [row.unit for row in expected[:4]]
    for cells, row in zip(rows, expected, strict=False):
        own, error, change = row.only_low["own"].mean, row.only_low["relative"].mean, row.only_low["loss_change"].mean
        assert cells[1:3] == [f"{row.gap.mean:.3g}", f"+-{row.gap.half:.2g}"]
        assert cells[3:6] == [f"{100 * row.share:.1f}%", f"{100 * own:.2f}%", f"{100 * error:.2f}%"]
        assert cells[6:] == [f"{change:+.5f}", row.worst_role]
    assert "and 2 more (--top 6)" in answer.out
    assert "run at step 3, 6 units, 2 batches of words.txt, 66 passes" in answer.out
    kept = [row.unit for row in expected[:2]]
    assert f"keep high: {', '.join(kept)}" in answer.out

    line = next(line for line in answer.out.splitlines() if "trimtab train" in line)
    settings = load_settings(None, [word for word in shlex.split(line) if "=" in word])
    report = convert_(Decoder(ModelConfig.size("micro"), seed=0), settings["recipe"], unit=settings["unit"])
    everything = {path for path in (*report.covered, *report.skipped) if path != "head"}
    wanted = {path for path in everything if any(fnmatch(path, pattern) for pattern in kept)}
    assert wanted
    assert everything - set(report.covered) == wanted

    line = next(line for line in answer.out.splitlines() if "trimtab.convert_" in line)
    model = Decoder(ModelConfig.size("micro"), seed=0)
    report = eval(line.strip().removeprefix("trimtab."), {"convert_": convert_, "fnmatch": fnmatch, "model": model})
    assert everything - set(report.covered) == wanted


def test_json_is_nothing_but_json_and_blocks_are_units(call: Any, folder: Path) -> None:
    options = ("--unit", "block", "--recipe", "saved4", "--batches", "2", "--batch", "1", "--seq", "8")
    answer = call(folder / "run", folder / "words.txt", *options, "--json")
    assert (answer.code, answer.err) == (0, "")
    found = json.loads(answer.out)
    assert (found["model"], found["step"], found["data"], found["recipe"]) == ("run", 3, "words.txt", "saved4")
    assert {row["unit"] for row in found["units"]} == {"blocks.0", "blocks.1"}
    assert {row["pattern"] for row in found["units"]} == {"blocks.0.*", "blocks.1.*"}
    assert all(list(row["roles"]) == ["grad_weight"] for row in found["units"])
    gaps = [row["gap"]["mean"] for row in found["units"]]
    assert gaps == sorted(gaps, reverse=True)
    assert len(found["keep_high"]["units"]) == 1


def test_without_roles_there_are_fewer_passes_and_the_same_gaps(call: Any, folder: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    options = ("--unit", "block", "--batches", "2", "--batch", "1", "--seq", "8", "--json")
    whole, short = (
        json.loads(call(folder / "run", folder / "words.txt", *options, *more).out)
        for more in ((), ("--no-roles", "--page", page))
    )
    assert (whole["passes"], short["passes"]) == (26, 14)
    assert [row["gap"] for row in short["units"]] == [row["gap"] for row in whole["units"]]
    assert all(row["roles"] == {} and row["worst_role"] is None for row in short["units"])
    assert "By role" not in page.read_text(encoding="utf-8")


def test_the_advice_for_a_pretrained_model_keeps_its_layers_high_while_it_is_tuned(
    trimtab: Any, call: Any, folder: Path, tiny_llama: Path, tmp_path: Path
) -> None:
    pytest.importorskip("peft")
    options = ("--recipe", "int8", "--unit", "block", "--batches", "1", "--seq", "16", "--keep", "2", "--no-roles")
    answer = call(tiny_llama, folder / "words.txt", *options, "--json")
    kept = json.loads(answer.out)["keep_high"]["units"]
    answer = call(tiny_llama, folder / "words.txt", *options)
    assert answer.code == 0, answer.err
    line = next(line for line in answer.out.splitlines() if "trimtab finetune" in line)
    _, verb, model, data, *settings = shlex.split(line)
    assert (verb, model, data) == ("finetune", str(tiny_llama), "DATA.jsonl")
    pairs = tmp_path / "pairs.jsonl"
    pairs.write_text("\n".join(json.dumps({"question": f"{n}?", "answer": f"{n}."}) for n in range(20)))
    short = [f"--set={pair}" for pair in ("steps=3", "batch=2", "seq=64", "eval_batches=1", "policy.max_high=0")]
    answer = trimtab("finetune", model, pairs, *settings, *short, "--out", tmp_path / "run", "--set", "device=cpu")
    assert answer.code == 0, answer.err
    trace = read_trace(tmp_path / "run" / "trace.arrow")
    always = [name for name, high in zip(trace.units, trace.high.T, strict=True) if high.all()]
    assert {name.removeprefix("base_model.model.") for name in always} == set(kept)
    assert trace.high.sum() == 3 * 2


def test_a_page_is_written_where_it_is_asked_for(call: Any, folder: Path, tmp_path: Path) -> None:
    page = tmp_path / "new" / "page.html"
    options = ("--unit", '["*.down", "*.q"]', "--batches", "1", "--seq", "8", "--page", page)
    answer = call(folder / "run" / "checkpoints" / "step_000003.pt", folder / "words.txt", *options, "--by", "own")
    assert answer.code == 0, answer
    owns = [float(cells[2].rstrip("%")) for cells in (line.split()[1:] for line in lines_of(answer.out))]
    assert owns == sorted(owns, reverse=True)
    assert str(page) in answer.out
    assert "*.down" in page.read_text(encoding="utf-8")
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["page.html"]


def test_bad_input_gets_one_line(call: Any, folder: Path, tmp_path: Path) -> None:
    run, text = folder / "run", folder / "words.txt"
    for args, words in (
        ((tmp_path, text), ("needs a run folder", "Hugging Face")),
        ((tmp_path / "nothing", text), ("there is none of them",)),
        ((run, tmp_path / "nothing"), ("existing file or folder",)),
        ((run, text, "--recipe", "fp9"), ("recipe must be one of", "did you mean")),
        ((run, text, "--unit", "layer"), ("unit must be",)),
        ((run, text, "--unit", '["x*"]'), ("matches none",)),
        ((run, text, "--seq", "64"), ("max_seq = 16",)),
        ((run, text, "--by", "loss"), ("--by must be gap or own",)),
        ((run, text, "--keep", "1.5"), ("max_high",)),
        ((run, text, "--batches", "0"), ("--batches",)),
        ((run,), ("DATA",)),
    ):
        answer = call(*args)
        assert answer.code == 2, answer
        assert answer.out == ""
        assert answer.err.startswith("error: ")
        assert answer.err.count("\n") == 1, answer.err
        for word in words:
            assert word in answer.err
