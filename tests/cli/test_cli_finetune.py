# SPDX-License-Identifier: Apache-2.0
"""`trimtab finetune`: a run from the command line, its report, and what it says when the input is wrong."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")
pytest.importorskip("peft")

import numpy as np

from trimtab.report.read import read_trace


@pytest.fixture(scope="module")
def sums(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "sums.jsonl"
    lines = [{"question": f"{a} plus {b}?", "answer": f"It is {a + b}."} for a in range(8) for b in range(5)]
    path.write_text("\n".join(map(json.dumps, lines)) + "\n", encoding="utf-8")
    return path


@pytest.fixture
def small() -> list[str]:
    """Arguments of a run of six steps that acts on nearly every one."""
    pairs = ("device=cpu", "steps=6", "batch=2", "seq=64", "eval_batches=1", "checkpoint_every=3", "threads=1")
    policy = ("policy.warmup_steps=1", "policy.alpha=1.01", "policy.beta=1.05")
    return [part for pair in (*pairs, *policy) for part in ("--set", pair)]


def test_a_run_says_what_it_does_and_has_a_report(
    trimtab: Any, tiny_llama: Path, sums: Path, small: list[str], tmp_path: Path
) -> None:
    out = tmp_path / "run"
    answer = trimtab("finetune", tiny_llama, sums, *small, "--out", out, "--set", "seq=32")
    assert answer.code == 0, answer.err
    assert answer.err == ""
    assert "tiny-llama: LoRA of rank 16, 32,768 of 86,496 parameters train" in answer.out
    assert "sums.jsonl: 38 examples to train on, 2 held out; 40 longer than 32 tokens were cut, 0 without" in answer.out
    assert "held-out loss" in answer.out
    assert "6 steps, loss" in answer.out
    assert f"{out}/adapter holds what was learned" in answer.out.replace("\n", "")
    names = {path.name for path in out.iterdir()}
    assert names == {"run.json", "metrics.jsonl", "trace.arrow", "checkpoints", "adapter"}
    info = json.loads((out / "run.json").read_text())
    assert info["config"]["recipe"] == "int8"
    assert info["config"]["model"] == str(tiny_llama.resolve())
    shown = trimtab("report", out)
    assert shown.code == 0, shown.err
    page = (out / "report.html").read_text(encoding="utf-8")
    assert "model.layers.3" in page
    assert trimtab("replay", out, "--set", "alpha=2").code == 0
    again = trimtab("finetune", "--resume", "--out", out)
    assert (again.code, "is finished: 6 steps" in again.out) == (0, True)
    assert trimtab("finetune", tiny_llama, sums, *small, "--out", out).code == 2  # a run is there


def test_fixed_and_random_arms(trimtab: Any, tiny_llama: Path, sums: Path, small: list[str], tmp_path: Path) -> None:
    arms = {
        "low": ("mode=off", "path=low"),
        "high": ("mode=off", "path=high"),
        "control": (),
        "random": (f"random_like={tmp_path / 'control'}",),
    }
    for name, sets in arms.items():
        given = [part for pair in sets for part in ("--set", pair)]
        answer = trimtab("finetune", tiny_llama, sums, *small, *given, "--out", tmp_path / name)
        assert answer.code == 0, answer.err
    texts = {name: (tmp_path / name / "metrics.jsonl").read_text() for name in arms}
    losses = {name: [json.loads(line) for line in text.splitlines()] for name, text in texts.items()}
    first = {name: next(row["loss"] for row in rows if "loss" in row) for name, rows in losses.items()}
    assert first["low"] == first["control"] == first["random"]
    assert first["high"] != first["low"]
    control, other = (read_trace(tmp_path / name / "trace.arrow").high.sum(axis=1) for name in ("control", "random"))
    assert control.any()
    assert np.array_equal(control, other)


def test_wrong_input_is_one_line(trimtab: Any, tiny_llama: Path, sums: Path, small: list[str], tmp_path: Path) -> None:
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"prompt": "a", "answer": "b"}\n{"prompt": "a"\n')
    empty = tmp_path / "empty.jsonl"
    empty.write_text("")
    out = tmp_path / "run"
    cases: list[tuple[list[object], str]] = [
        ([], "fine-tuning needs a model: trimtab finetune MODEL DATA"),
        ([tiny_llama], "fine-tuning needs examples"),
        ([tiny_llama, bad], f"line 2 of '{bad}' is not"),
        ([tiny_llama, empty], "there is no example in"),
        ([tiny_llama, sums, "--set", "seq=4"], "an answer within seq=4 tokens"),
        ([tmp_path / "absent", sums], "nothing is downloaded"),
        ([tiny_llama, sums, "--set", "rank=8"], "unknown setting 'rank'"),
        ([tiny_llama, sums, "--set", "recipe=int9"], "recipe must be one of"),
        ([tiny_llama, sums, "--resume", "--force"], "give one of them"),
        ([tiny_llama, sums, "--set", f"random_like={tmp_path / 'no'}"], "no"),
    ]
    for args, message in cases:
        answer = trimtab("finetune", *small, *args, "--out", out)
        assert (answer.code, message in answer.err) == (2, True), (args, answer)
        assert len(answer.err.splitlines()) == 1
        assert not out.exists()


def test_an_interrupted_run_goes_on(
    trimtab: Any, tiny_llama: Path, sums: Path, small: list[str], tmp_path: Path
) -> None:
    """SIGINT in the middle, then --resume: the same weights as without a break."""
    call = ["finetune", str(tiny_llama), str(sums), *small, "--set", "steps=40", "--set", "checkpoint_every=5", "--out"]
    cut = subprocess.Popen(
        [sys.executable, "-m", "trimtab", *call, str(tmp_path / "cut")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    while cut.poll() is None and not any((tmp_path / "cut" / "checkpoints").glob("*.pt")):
        time.sleep(0.02)
    cut.send_signal(signal.SIGINT)
    _, told = cut.communicate(timeout=60)
    assert cut.returncode == 130, told
    assert told.strip().splitlines()[-1].startswith("error: interrupted; the run folder is whole")
    answer = trimtab(*call, tmp_path / "cut", "--resume")
    assert answer.code == 0, answer.err
    assert "resuming at step" in answer.out
    assert trimtab(*call, tmp_path / "whole").code == 0
    files = [tmp_path / name / "adapter" / "adapter_model.safetensors" for name in ("cut", "whole")]
    assert files[0].read_bytes() == files[1].read_bytes()
