# SPDX-License-Identifier: Apache-2.0
"""Kill and resume: whatever ends `trimtab train`, `bench`, `finetune` or `quantize`, the same command goes on, and ends
with the bits of the run that nothing happened to.

One run is killed again and again (`killing.py` says how: at random moments, at each operation on a file, in the middle
of a checkpoint and of a trace batch) and resumed each time. After each kill everything under its final name must be
whole: traces and metrics are the first rows of the uninterrupted run and lack none that was written, every checkpoint
can be loaded, every finished block is the uninterrupted run's. A run that is finished at last must equal that run in
every loss, norm, decision, event and weight, with no file more and no file less (but for a checkpoint that was about to
be removed: the newest two are kept, and a kill between the third and that leaves three).

A disk that is full or read-only is one line with a remedy and a code that is not 0, and costs as little.
"""

import json
import os
import random
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from killing import Answer, Stage
from same import assert_same

from trimtab.report.read import Trace, read_run, read_trace

WORDS = ("the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog")
VERBS = ("train", "bench", "finetune", "quantize")
CLOCK = ("tokens_per_s", "controller_ms", "ms_per_step", "seconds", "finished", "started", "command")
CLOCK += ("git", "base_model_name_or_path")
"""What may differ between two runs that are the same: the clock, the commit, the name of the folder."""
POLICY = ("max_high=3", "alpha=1.05", "beta=1.1", "window=2", "span=4", "lock_steps=2", "warmup_steps=1")
RUN = ("device=cpu", "threads=1", "batch=2", "seq=16", "eval_batches=1", *(f"policy.{one}" for one in POLICY))
WINDOW = "blocks.1.mlp.up:grad_scale:start=2,width=2,size=64"
SIZES = {
    "train": ("steps=14", "checkpoint_every=4", "eval_every=5", "recipe=fp8_delayed", f"faults={WINDOW}"),
    "bench": ("steps=3", "checkpoint_every=2", f"faults={WINDOW}"),
    "finetune": ("steps=5", "checkpoint_every=2", "seq=32", "policy.max_high=1", "lora_dropout=0.1"),
}
Rounds = Callable[[int, int], int]


def sets(*pairs: str) -> list[str]:
    return [part for pair in pairs for part in ("--set", pair)]


def without_clock(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: without_clock(item) for key, item in value.items() if key not in CLOCK}
    return [without_clock(item) for item in value] if isinstance(value, list) else value


def lines(folder: Path) -> list[Any]:
    return [without_clock(line) for line in read_run(folder, with_trace=False).metrics]


def rows(trace: Trace, count: int | None = None) -> dict[str, bytes]:
    """The first rows of a trace, by column."""
    columns = {name: getattr(trace, name) for name in ("steps", "norms", "seen", "high")} | dict(trace.columns)
    return {name: column[:count].tobytes() for name, column in columns.items()}


def files(folder: Path) -> dict[str, Path]:
    return {str(path.relative_to(folder)): path for path in folder.rglob("*") if path.is_file()}


def state(path: Path) -> dict[str, Any]:
    """A checkpoint but for where files ended (the clock's digits differ in length) and how its faults are written."""
    found = torch.load(path, weights_only=True)
    found["config"]["faults"] = None
    return {key: value for key, value in found.items() if key != "offsets"}


def assert_equal_file(name: str, ours: Path, theirs: Path) -> None:
    """Two files of one name hold the same, by what such a file holds."""
    if name.endswith("metrics.jsonl"):
        assert lines(ours.parent) == lines(theirs.parent), name
    elif name.endswith("trace.arrow"):
        assert rows(read_trace(ours)) == rows(read_trace(theirs)), name
    elif name.endswith(".pt"):
        assert_same(state(ours), state(theirs), name)
    elif name.endswith(".json"):
        assert without_clock(json.loads(ours.read_text())) == without_clock(json.loads(theirs.read_text())), name
    elif not name.endswith(".html"):
        assert ours.read_bytes() == theirs.read_bytes(), name


class Ordeal:
    """One command, the folder it makes when nothing happens, and one that everything happens to."""

    def __init__(self, stage: Stage, args: Sequence[object], folder: Path) -> None:
        self._stage, self._args = stage, args
        self.whole, self.cut = folder / "whole", folder / "cut"
        answer = self._call(self.whole)
        assert (answer.code, answer.err) == (0, "")
        self.seconds = answer.seconds
        self.sizes = {name: path.stat().st_size for name, path in files(self.whole).items()}
        self.kills = self.finished = self.failures = 0

    def _call(self, out: Path, plan: Mapping[str, Any] | None = None) -> Answer:
        return self._stage.call([*self._args, "--out", out], out, plan)

    def go(self, plans: Sequence[Mapping[str, Any]]) -> None:
        """Call it under one plan after the other, and look at what each leaves; then let it finish."""
        for plan in (*plans, {}):
            answer = self._call(self.cut, plan)
            if answer.killed:
                self.kills += 1
                assert answer.err == "", (plan, answer)
                self.check(answer)
            elif answer.code:
                self.failures += 1
                assert is_one_line(answer), (plan, answer)
                self.check(answer)
            else:
                assert answer.err == "", (plan, answer)
                self.finished += 1
                self.compare()
                shutil.rmtree(self.cut)

    def is_refused_below_a_file(self) -> None:
        """A folder that cannot be made."""
        file = self.whole.parent / "words.txt"
        before = file.read_bytes()
        answer = self._call(file / "run")
        assert answer.code in (1, 2), answer
        assert is_one_line(answer), answer
        assert file.read_bytes() == before

    def on_a_small_disk(self, disk: Path, shares: Sequence[float]) -> None:
        """On a disk with room for a share of the run, which grows; and, after a kill, on one that is read-only."""
        needed = sum(self.sizes.values())
        for share in shares:
            with mounted(disk, int(share * needed)) as remount:
                self.cut = disk / "cut"
                answer = self._call(self.cut)
                assert answer.code == 1, (share, answer)
                assert is_one_line(answer), (share, answer)
                assert "No space left on device" in answer.err
                self.check(answer)
                remount(f"size={10 * needed}")
                self.go([{"after": self.seconds / 2}])
                assert self._call(self.cut, {"op": 9}).killed
                remount("ro")
                answer = self._call(self.cut)
                assert answer.code == 1, (share, answer)
                assert is_one_line(answer), (share, answer)
                assert "Read-only file system" in answer.err
                self.check(answer)
                remount("rw")
                self.go([])
            self.failures += 2

    def check(self, answer: Answer) -> None:
        """What lies there under its final name is whole, and lacks nothing that was written."""
        for name, path in files(self.cut).items():
            theirs = self.whole / name
            if name.endswith("trace.arrow"):
                found, full = read_trace(path), read_trace(theirs)
                assert rows(found) == rows(full, len(found)), name
                last = answer.flushed.get(str(path.parent.relative_to(self.cut)), 0)
                assert last == 0 or found.steps[-1] >= last, name
            elif name.endswith("metrics.jsonl"):
                found = lines(path.parent)
                assert found == lines(theirs.parent)[: len(found)], name
            elif name.endswith(".pt"):
                assert torch.load(path, weights_only=True)["step"] == int(path.stem.removeprefix("step_")), name
            elif name.endswith((".json", ".safetensors")) and theirs.exists() and "adapter" not in name:
                assert_equal_file(name, path, theirs)  # what is nowhere in the uninterrupted run is a draft

    def compare(self) -> None:
        """It is the uninterrupted run, file by file."""
        ours, theirs = files(self.cut), files(self.whole)
        for name in [name for name in ours if name.endswith(".pt")]:
            kept = [one for one in ours if one.endswith(".pt") and Path(one).parent == Path(name).parent]
            if name not in theirs and name == min(kept) and len(kept) == 3:
                del ours[name]  # the process was killed when it was about to
        assert sorted(ours) == sorted(theirs)
        for name in ours:
            assert_equal_file(name, ours[name], theirs[name])


def is_one_line(answer: Answer) -> bool:
    """One line that says what is wrong, of which file, and what to do."""
    line = answer.err.removesuffix("\n")
    return line.startswith("error: ") and "\n" not in line and line.count(": ") >= 3


@contextmanager
def mounted(disk: Path, size: int) -> Iterator[Callable[[str], None]]:
    """A disk of some bytes, in memory; what is given can change it."""
    disk.mkdir(exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", disk], check=True)
    try:
        yield lambda option: subprocess.run(["mount", "-o", f"remount,{option}", disk], check=True) and None
    finally:
        subprocess.run(["umount", disk], check=True)


@pytest.fixture(scope="module")
def stage() -> Iterator[Stage]:
    with Stage(pretrained=all(find_spec(name) for name in ("transformers", "peft"))) as found:
        yield found


@pytest.fixture(scope="module", params=VERBS)
def ordeal(request: pytest.FixtureRequest, stage: Stage, tmp_path_factory: pytest.TempPathFactory) -> Ordeal:
    verb = request.param
    if verb in ("finetune", "quantize"):
        pytest.importorskip("transformers")
        pytest.importorskip("peft")
    folder = tmp_path_factory.mktemp(verb)
    text = folder / "words.txt"
    text.write_text(" ".join(random.Random(0).choices(WORDS, k=1200)))
    sums = folder / "sums.jsonl"
    pairs = [{"question": f"{a} plus {b}?", "answer": f"It is {a + b}."} for a in range(8) for b in range(5)]
    sums.write_text("".join(f"{json.dumps(pair)}\n" for pair in pairs))
    args: dict[str, Callable[[], list[object]]] = {
        "train": lambda: ["--resume", *sets(f"data={text}", *RUN, *SIZES["train"])],
        "bench": lambda: [
            *("smoke", "--seeds", 1, "--arms", "gnmr,random"),
            *sets(f"data={text}", *RUN, *SIZES["bench"]),
        ],
        "finetune": lambda: [
            *(request.getfixturevalue("tiny_llama"), sums, "--resume"),
            *sets(*RUN, *SIZES["finetune"]),
        ],
        "quantize": lambda: [
            *(request.getfixturevalue("tiny_llama"), "--resume", "--saliency", "--data", text, "--device", "cpu"),
            *("--sequences", 2, "--length", 16, "--epochs", 1, "--rank", 4, "--group", 16, "--eval-tokens", 64),
            *("--export", "packed", "--export", "peft"),
        ],
    }
    return Ordeal(stage, [verb, *args[verb]()], folder)


def limits(ordeal: Ordeal, rng: random.Random, count: int) -> list[int]:
    """Bytes that some file of the run will want to grow beyond."""
    return [rng.randrange(size) for size in rng.choices(sorted(ordeal.sizes.values()), k=count) if size]


@pytest.mark.timeout(3600)
def test_whatever_ends_it_the_same_command_goes_on_and_ends_the_same(ordeal: Ordeal, rounds: Rounds) -> None:
    rng = random.Random(1)
    numbers = range(1, rounds(3, 25))
    operations: list[dict[str, Any]] = [{"op": n, "how": how} for n in numbers for how in ("kill", "torn")]
    others: list[dict[str, Any]] = [{"after": rng.uniform(0.02, ordeal.seconds)} for _ in range(rounds(1, 40))]
    others += [{"limit": limit, "fatal": True} for limit in limits(ordeal, rng, rounds(1, 16))]
    if any(name.endswith("trace.arrow") for name in ordeal.sizes):
        others += [{"half": what, "nth": n} for n in range(1, rounds(2, 7)) for what in ("trace", "checkpoint")]
    numbers = range(1, 31) if rounds(0, 1) else [rng.randrange(3, 13)]
    others += [{"op": n, "how": how} for n in numbers for how in ("full", "readonly")]
    others += [{"limit": limit} for limit in limits(ordeal, rng, rounds(1, 20))]
    others += [{"stdout": "/dev/full"}] * rounds(0, 1)
    rng.shuffle(others)
    ordeal.go([*operations, *others])
    if rounds(0, 1):
        ordeal.is_refused_below_a_file()
    if rounds(0, 1) and os.geteuid() == 0:  # only root may have a disk made
        ordeal.on_a_small_disk(ordeal.whole.parent / "disk", (0.1, 0.4, 0.8))
    print(f"{ordeal.kills} kills, {ordeal.failures} failures, finished {ordeal.finished} times")
    assert ordeal.kills >= rounds(4, 40)
    assert ordeal.failures >= rounds(1, 20)
