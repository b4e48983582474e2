# SPDX-License-Identifier: Apache-2.0
"""The command line: every verb does what it says, bad input gets one line, a code and no traceback, and nothing heavy
is loaded before it is needed. Most cases run `main` in this process; what depends on the process runs in its own."""

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from trimtab.cli.env import to_toml
from trimtab.control.policy import Policy
from trimtab.control.replay import replay
from trimtab.lab.config import Config, load_settings
from trimtab.report.read import read_trace

VERBS = (
    *("train", "finetune", "bench", "diagnose", "quantize", "evaluate", "demo"),
    *("report", "replay", "sweep", "postmortem", "env"),
    *("watch", "doctor", "export"),
)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "words.txt"
    words = ("the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog")
    path.write_text(" ".join(random.Random(0).choices(words, k=1200)), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def tiny(text: Path) -> list[str]:
    """Arguments of a run of six steps."""
    pairs = (f"data={text}", "device=cpu", "steps=6", "batch=2", "seq=16", "eval_batches=1", "checkpoint_every=3")
    return [part for pair in pairs for part in ("--set", pair)]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, tiny: list[str]) -> Path:
    """A finished run, made by the command line in a process of its own, and what it printed beside it."""
    folder = tmp_path_factory.mktemp("runs") / "first"
    done = process("train", *tiny, "--out", folder, "--set", "policy.max_high=3", "--seed", "3")
    assert done.returncode == 0, done.stderr
    (folder.parent / "printed.txt").write_text(done.stdout)
    assert done.stderr == ""
    return folder


def process(*args: object, **options: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "trimtab", *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, **options)


def refused(answer: Any, *words: str, code: int = 2) -> None:
    assert answer.code == code, answer
    assert answer.err.startswith("error: ")
    assert answer.err.count("\n") == 1, answer.err
    assert "Traceback" not in answer.err
    for word in words:
        assert word in answer.err


# What a run prints and leaves.


def test_a_piped_run_prints_plain_lines(run: Path) -> None:
    printed = (run.parent / "printed.txt").read_text()
    assert "\x1b" not in printed
    assert "\r" not in printed
    assert re.search(r"^train 6/6  loss \d+\.\d+  [\d.]+k? tok/s  .* left$", printed, re.M)
    assert re.search(r"^step 6  held-out loss \d+\.\d+ on the high path, \d+\.\d+ on the low path$", printed, re.M)
    assert "alarms per 1,000 steps" in printed
    assert f"next: trimtab report {run}" in printed
    assert {"run.json", "metrics.jsonl", "trace.arrow", "checkpoints"} <= {path.name for path in run.iterdir()}
    assert json.loads((run / "run.json").read_text())["config"]["seed"] == 3


def test_verbose_prints_the_switches(trimtab: Any, tiny: list[str], tmp_path: Path) -> None:
    loud = [*tiny, "--set", "policy.alpha=0.5", "--set", "policy.alpha_warmup=none", "-v"]
    assert "-> high" in trimtab("train", *loud, "--out", tmp_path / "loud").out
    assert "-> high" not in trimtab("train", *loud[:-1], "--out", tmp_path / "quiet").out


def test_a_finished_run_says_so(trimtab: Any, run: Path) -> None:
    before = contents(run)
    answer = trimtab("train", "--resume", "--out", run)
    assert (answer.code, answer.err) == (0, "")
    assert "is finished: 6 steps" in answer.out
    assert contents(run) == before


def test_resume_starts_continues_and_refuses_by_name(trimtab: Any, tiny: list[str], tmp_path: Path) -> None:
    out = tmp_path / "a" / "run"
    assert trimtab("train", *tiny, "--out", out, "--resume").code == 0
    refused(trimtab("train", "--out", out, "--resume", "--set", "lr=1"), "lr was", "is now 1", "start a new folder")
    refused(trimtab("train", "--out", out, "--resume", "--seed", "5"), "seed was 0 and is now 5")
    refused(trimtab("train", "--out", out, "--resume", "--set", "policy.alpha=7"), "policy.alpha was 1.1 and is now 7")
    refused(trimtab("train", "--out", out, "--resume", "--set", "stesp=9"), "did you mean 'steps'?")
    answer = trimtab("train", *tiny, "--set", "steps=8", "--out", out, "--resume")
    assert answer.code == 0
    assert "resuming at step 6" in answer.out
    assert "8 steps, loss" in answer.out


def test_a_resumed_observer_may_repeat_any_of_its_settings(trimtab: Any, tiny: list[str], tmp_path: Path) -> None:
    plain = ["--set", "recipe=none", "--set", "mode=observe"]
    assert trimtab("train", *tiny, *plain, "--out", tmp_path / "run").code == 0
    answer = trimtab("train", "--resume", "--set", "recipe=none", "--out", tmp_path / "run")
    assert (answer.code, "is finished" in answer.out) == (0, True)


def test_an_interrupted_run_exits_130_and_keeps_its_checkpoint(tiny: list[str], tmp_path: Path) -> None:
    out = tmp_path / "run"
    command = [sys.executable, "-m", "trimtab", "train", *tiny, "--set", "steps=99999", "--out", str(out)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as running:
        deadline = time.monotonic() + 60
        while not list(out.glob("checkpoints/step_*.pt")) and time.monotonic() < deadline:
            time.sleep(0.05)
        running.send_signal(signal.SIGINT)
        try:
            _, err = running.communicate(timeout=60)
        finally:
            running.kill()
    assert running.returncode == 130
    assert err.strip() == "error: interrupted; the run folder is whole up to its last checkpoint, --resume continues it"
    newest = max(out.glob("checkpoints/step_*.pt"))
    assert torch.load(newest, weights_only=True)["step"] == int(newest.stem.removeprefix("step_"))
    assert not list(out.glob("checkpoints/*.tmp"))


# Bad input.


@pytest.mark.parametrize(
    ("pair", "words"),
    [
        ("stepss=3", ("unknown setting 'stepss'", "did you mean 'steps'?")),
        ("policy.alpa=3", ("unknown policy setting 'alpa'", "did you mean 'alpha'?")),
        ("steps=0", ("steps must be a whole number of at least 1", "got 0")),
        ("lr=nan", ("lr must be a positive number", "got nan")),
        ("data=/no/such/text", ("existing file or folder", "/no/such/text")),
        ("data=", ("data must be text, not empty",)),
        ("recipe=fp9", ("recipe must be one of", "fp8_block", "got 'fp9'")),
        ("recipe=none", ("set mode=observe",)),
        ('unit=["nothing"]', ("nothing to convert", "['nothing']")),
        ("unit=layer", ('unit must be "linear", "block", "expert"', "got 'layer'")),
        ("faults=3", ("faults are text", "got 3")),
        ("faults=blocks.0.mlp.up:boom:start=3", ("kind must be one of", "grad_scale", "'boom'")),
        ("roles=3", ("roles must be text",)),
        ("tokenizer=3", ("tokenizer must be text",)),
        ("seed=36893488147419103232", ("seed must lie below 2^64",)),
        ("model=big", ("model size must be one of micro", "got 'big'")),
        ("device=toaster", ("device must be one that torch can use here",)),
        ("seq=5000", ("a window needs seq + 1 = 5001 tokens", "shorter seq")),
        ("nonsense", ("key=value", "'nonsense'")),
    ],
)
def test_a_bad_setting_gets_one_line(trimtab: Any, tiny: list[str], tmp_path: Path, pair: str, words: tuple) -> None:
    refused(trimtab("train", *tiny, "--out", tmp_path / "run", "--set", pair), *words)
    assert not (tmp_path / "run").exists()


def test_empty_data_is_refused(trimtab: Any, tiny: list[str], tmp_path: Path) -> None:
    (tmp_path / "empty.txt").touch()
    answer = trimtab("train", *tiny, "--set", f"data={tmp_path / 'empty.txt'}", "--out", tmp_path / "run")
    refused(answer, "must not be empty", "empty.txt")


def test_an_existing_run_is_refused_and_kept(trimtab: Any, tiny: list[str], run: Path) -> None:
    before = contents(run)
    refused(trimtab("train", *tiny, "--out", run), "already holds a run", "--resume", "--force")
    refused(trimtab("train", *tiny, "--out", run, "--resume", "--force"), "give one of them")
    refused(trimtab("train", *tiny, "--out", run, "--force", "--set", "unit=[]"), "unit")
    refused(trimtab("train", *tiny, "--out", run / "run.json"), "must be a directory")
    assert contents(run) == before


def test_a_folder_that_cannot_be_written_gets_one_line(trimtab: Any, tiny: list[str], run: Path) -> None:
    refused(trimtab("train", *tiny, "--out", run / "run.json" / "below"), "run.json", code=1)


def test_a_run_that_breaks_exits_with_1(trimtab: Any, tiny: list[str], tmp_path: Path) -> None:
    nan = ["--set", "faults=blocks.0.mlp.up:nan:start=2,width=9", "--set", "policy.max_high=0"]
    answer = trimtab("train", *tiny, *nan, "--set", "policy.max_nonfinite=2", "--out", tmp_path / "run")
    refused(answer, "not finite for 2 steps in a row", "lower the learning rate", code=1)


@pytest.mark.parametrize("verb", ["report", "replay"])
def test_a_folder_without_a_run_is_refused(trimtab: Any, tmp_path: Path, verb: str) -> None:
    refused(trimtab(verb, tmp_path / "missing"), "missing")
    refused(trimtab(verb, tmp_path), str(tmp_path))


@pytest.mark.parametrize("verb", ["report", "replay"])
def test_a_foreign_trace_is_refused_and_kept(trimtab: Any, tmp_path: Path, verb: str) -> None:
    (tmp_path / "trace.arrow").write_bytes(b"PAR1 something else entirely")
    refused(trimtab(verb, tmp_path), "trace.arrow is not a trimtab trace")
    assert contents(tmp_path) == {"trace.arrow": b"PAR1 something else entirely"}


def test_a_torn_trace_is_read_up_to_its_tail(trimtab: Any, run: Path, tmp_path: Path) -> None:
    whole = (run / "trace.arrow").read_bytes()
    for name, size in (("tail", len(whole) - 7), ("head", 40), ("empty", 0)):
        (tmp_path / f"{name}.arrow").write_bytes(whole[:size])
    answer = trimtab("replay", tmp_path / "tail.arrow")
    assert answer.code == 0, answer
    assert "3 steps, 14 units" in answer.out  # the checkpoint at step 3 ended a batch; the second one is torn
    for name in ("head", "empty"):
        refused(trimtab("replay", tmp_path / f"{name}.arrow"), f"{name}.arrow holds no step yet")


def test_a_replay_setting_that_is_wrong_is_refused(trimtab: Any, run: Path) -> None:
    refused(trimtab("replay", run, "--set", "alpa=2"), "unknown policy setting 'alpa'", "'alpha'")
    refused(trimtab("replay", run, "--set", "alpha=-2"), "alpha must be a positive number", "-2")
    refused(trimtab("replay", run, "--set", "lr=2"), "unknown policy setting 'lr'")
    refused(trimtab("replay", run, "--calibrate", "1"), "at least 70 steps", "longer quiet stretch")


@pytest.mark.parametrize(("args", "words"), [(["nonsense"], "nonsense"), (["train", "--nope"], "--nope")])
def test_a_usage_error_is_one_line(trimtab: Any, args: list[str], words: str) -> None:
    refused(trimtab(*args), words)


def test_no_verb_shows_the_help(trimtab: Any) -> None:
    answer = trimtab()
    assert (answer.code, answer.err) == (2, "")
    assert all(verb in answer.out for verb in VERBS)


def test_a_process_of_its_own_fails_in_one_line_too(tmp_path: Path) -> None:
    done = process("train", "--set", "learning_rat=3", "--out", tmp_path / "run")
    refused(SimpleNamespace(code=done.returncode, out=done.stdout, err=done.stderr), "unknown setting 'learning_rat'")


# replay, report, env, demo.


def test_replay_shows_its_own_and_the_other_decisions(trimtab: Any, run: Path) -> None:
    answer = trimtab("replay", run, "--set", "alpha=1.3", "--set", "policy.max_high=1")
    assert (answer.code, answer.err) == (0, "")
    assert re.search(r"the run's own\s*│\s*what if", answer.out) or re.search(r"the run's own.*what if", answer.out)
    trace = read_trace(run / "trace.arrow")
    own = Policy.from_dict(trace.policy)
    summaries = [
        replay(
            trace.norms, policy, seen=trace.seen, recoverable=trace.recoverable, total_steps=trace.total_steps
        ).summary()
        for policy in (own, own.replace(alpha=1.3, max_high=1))
    ]
    row = next(line for line in answer.out.splitlines() if "promotion_ratio" in line)
    assert re.findall(r"[\d.]+%", row) == [f"{summary['promotion_ratio']:.3%}" for summary in summaries]
    assert summaries[0]["promotion_ratio"] != summaries[1]["promotion_ratio"]
    assert "alpha=1.3 (was 1.1)" in answer.out
    assert "max_high=1 (was 3)" in answer.out
    assert "open-loop" in answer.out


def test_replay_alone_shows_the_runs_own_decisions(trimtab: Any, run: Path) -> None:
    for target in (run, run / "trace.arrow"):
        answer = trimtab("replay", target)
        assert answer.code == 0
        assert "the run's own" in answer.out
        assert "what if" not in answer.out


def test_replay_takes_a_preset_as_the_start(trimtab: Any, run: Path) -> None:
    answer = trimtab("replay", run, "--set", "preset=steady", "--set", "alpha=4")
    assert "history=winsorized (was cumulative)" in answer.out
    assert "alpha=4 (was 1.1)" in answer.out


def test_report_writes_the_page(trimtab: Any, run: Path, tmp_path: Path) -> None:
    answer = trimtab("report", run, "--out", tmp_path / "page.html")
    assert (answer.code, answer.err) == (0, "")
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert page.lstrip().lower().startswith("<!doctype html")
    assert "blocks.0.attn.q" in page
    assert answer.out.splitlines()[-1] == str(tmp_path / "page.html")
    assert trimtab("report", run).code == 0
    assert (run / "report.html").is_file()


def test_env_prints_what_a_bug_report_needs(trimtab: Any) -> None:
    answer = trimtab("env")
    assert answer.code == 0
    assert re.search(rf"^torch\s+{re.escape(torch.__version__)}$", answer.out, re.M)
    assert re.search(rf"^python\s+{'.'.join(map(str, sys.version_info[:3]))}", answer.out, re.M)


CONFIGS = {
    "a.toml": 'lr = 2e-3\nclip = "none"\nunit = ["a.*", "b"]\nfaults = "a:nan:start=3; b:nan:start=4"\n'
    '[policy]\npreset = "steady"\nalpha = 2\nrebase_at = [5]\n',
    "a.yaml": "lr: 0.002\nunit: ['a.*', b]\nfaults: 'a:nan:start=3; b:nan:start=4'\n"
    "policy: {preset: steady, alpha: 2, rebase_at: [5]}\n",
    "b.toml": 'data = "naïve/\U0001f600 \\"quoted\\".txt"\n[[faults]]\nunit = "a"\nkind = "nan"\nstart = 3\n',
}


@pytest.mark.parametrize("name", CONFIGS)
def test_env_prints_settings_that_read_back_the_same(trimtab: Any, tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text(CONFIGS[name], encoding="utf-8")
    printed = trimtab("env", "--config", tmp_path / name, "--set", "steps=7").out
    assert set(tomllib.loads(printed)) == set(Config().to_dict())
    (tmp_path / "again.toml").write_text(printed, encoding="utf-8")
    assert trimtab("env", "--config", tmp_path / "again.toml").out == printed
    given = Config.from_dict(load_settings(tmp_path / name, ["steps=7"]))
    again = Config.from_dict(load_settings(tmp_path / "again.toml"))
    assert again.build_policy() == given.build_policy()
    assert again.replace(policy={}) == given.replace(policy={})
    assert again.steps == 7


def test_toml_and_yaml_resolve_to_the_same(trimtab: Any, tmp_path: Path) -> None:
    for name in ("a.toml", "a.yaml"):
        (tmp_path / name).write_text(CONFIGS[name], encoding="utf-8")
    assert trimtab("env", "--config", tmp_path / "a.toml").out == trimtab("env", "--config", tmp_path / "a.yaml").out


def test_every_default_reads_back() -> None:
    values = Config().to_dict() | {"policy": Policy().to_dict()}
    read = tomllib.loads(to_toml(values))
    assert read == json.loads(json.dumps(values).replace("null", '"none"'))


def test_a_config_file_trains(trimtab: Any, text: Path, tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(
        f"data = '{text}'\nsteps = 2\nbatch = 2\nseq = 16\neval_batches = 1\nlr = 1e-3\npolicy.alpha = 1.7\n"
    )
    assert trimtab("train", "--config", tmp_path / "run.toml", "--set", "lr=5e-3", "--out", tmp_path / "run").code == 0
    config = json.loads((tmp_path / "run" / "run.json").read_text())["config"]
    assert (config["lr"], config["steps"], config["policy"]) == (5e-3, 2, {"alpha": 1.7})


def test_demo_runs_four_arms_and_writes_a_report(trimtab: Any, tiny: list[str], tmp_path: Path) -> None:
    faults = ["--set", "faults=blocks.1.mlp.up:grad_scale:start=2,width=3,size=64"]
    answer = trimtab("demo", *tiny, *faults, "--out", tmp_path / "demo")
    assert (answer.code, answer.err) == (0, "")
    assert {path.name for path in (tmp_path / "demo").iterdir()} == {"high", "low", "control", "random"}
    assert (tmp_path / "demo" / "control" / "report.html").is_file()
    for arm in ("high", "low", "control", "random"):
        assert re.search(rf"^{arm}\s+held-out loss \d\.\d{{4}}$", answer.out, re.M)
    assert "of the damage" in answer.out
    assert "the faults were injected" in answer.out
    assert f"report: {tmp_path / 'demo' / 'control' / 'report.html'}" in answer.out
    refused(trimtab("demo", *tiny, *faults, "--out", tmp_path / "demo"), "already holds a run", "--force")


# What is loaded.

WITHOUT_TORCH = """
import sys
from trimtab.cli.main import main
for args in {calls!r}:
    sys.argv = ["trimtab", *args]
    try:
        main()
    except SystemExit as left:
        print("code", left.code)
    assert "torch" not in sys.modules, args
"""


def test_help_replay_report_and_refusals_load_no_torch(run: Path, tmp_path: Path) -> None:
    calls = [[], ["--help"], *([verb, "--help"] for verb in VERBS)]
    calls += [["replay", str(run), "--set", "alpha=2"], ["report", str(run), "--out", str(tmp_path / "page.html")]]
    calls += [["train", "--set", "stepss=3"], ["env", "--set", "steps=3"], ["demo", "--set", "stepss=3"]]
    calls += [["finetune", "model", "data", "--set", "lora_r=0"]]
    script = WITHOUT_TORCH.format(calls=calls)
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "COLUMNS": "200"},
    )
    assert done.returncode == 0, done.stderr
    codes = re.findall(r"^code (\w+)$", done.stdout, re.M)
    assert codes == ["2", *["0"] * (1 + len(VERBS)), "None", "None", "2", "None", "2", "2"]
    assert "--resume" in done.stdout
