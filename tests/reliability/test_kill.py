# SPDX-License-Identifier: Apache-2.0
"""Kill and resume: whatever ends `trimtab train`, `bench`, `finetune` or `quantize`, the same command goes on, and ends
with the bits of the run that nothing happened to. So do several processes (ranks under ddp and fsdp2, a bench with
--jobs), of which all are killed, or one, or the one that has started the others: nobody outlives that.

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
import re
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

from trimtab.lab import checkpoint, dcp
from trimtab.report.read import Trace, read_run, read_trace

WORDS = ("the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog")
VERBS = ("train", "bench", "finetune", "finetune --full", "quantize")
SEVERAL = ("train ddp", "train fsdp2", "bench --jobs")
"""What runs in several processes."""
CHECKPOINT = re.compile(r"(?:.*/)?step_(\d+)(?:\.pt)?")
FOLDER = re.compile(r"step_\d+(\.tmp)?")
"""A checkpoint of several ranks, or its draft."""
LOST = "ended without an error of its own (killed? out of memory?)"
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
    "finetune --full": ("steps=5", "checkpoint_every=2", "seq=32", "policy.max_high=1"),
    "ranks": ("steps=6", "checkpoint_every=2", "eval_every=3", "recipe=fp8_delayed", f"faults={WINDOW}"),
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
    """All files; the folder that is a checkpoint of several ranks stands for what is in it."""
    found: dict[str, Path] = {}
    for path in sorted(folder.rglob("*")):
        inside = any(FOLDER.fullmatch(above.name) for above in path.parents)
        if not inside and (path.is_file() or FOLDER.fullmatch(path.name)):
            found[str(path.relative_to(folder))] = path
    return found


def state(path: Path) -> dict[str, Any]:
    """A checkpoint but for where files ended (the clock's digits differ in length) and how its faults are written."""
    found = checkpoint.read(path)
    found["config"]["faults"] = None
    if path.is_dir():
        sizes = {name: dcp.sizes(found, name) for name in ("model", "optimizer")}
        tensors = {
            f"{kind}.{name}": torch.full(size, torch.nan).to(dtype)
            for kind, each in sizes.items()
            for name, (size, dtype) in each.items()
        }
        dcp.fill(path, found, tensors)
        assert all(tensor.isfinite().all() for tensor in tensors.values())  # each was read
        found |= {"model": dict(sorted(tensors.items())), "index": None}  # which says where each lies
    return {key: value for key, value in found.items() if key != "offsets"}


def assert_equal_file(name: str, ours: Path, theirs: Path) -> None:
    """Two files of one name hold the same, by what such a file holds."""
    if name.endswith("metrics.jsonl"):
        assert lines(ours.parent) == lines(theirs.parent), name
    elif name.endswith("trace.arrow"):
        assert rows(read_trace(ours)) == rows(read_trace(theirs)), name
    elif CHECKPOINT.fullmatch(name):
        assert_same(state(ours), state(theirs), name)
    elif name.endswith(".json"):
        assert without_clock(json.loads(ours.read_text())) == without_clock(json.loads(theirs.read_text())), name
    elif not name.endswith(".html"):
        assert ours.read_bytes() == theirs.read_bytes(), name


class Ordeal:
    """One command, the folder it makes when nothing happens, and one that everything happens to."""

    def __init__(self, stage: Stage, args: Sequence[object], folder: Path, ranks: int = 1) -> None:
        self._stage, self._args, self._ranks = stage, args, ranks
        self.whole, self.cut = folder / "whole", folder / "cut"
        answer = self._call(self.whole)
        assert (answer.code, answer.err) == (0, "")
        self.seconds = answer.seconds
        self.sizes = [path.stat().st_size for path in self.whole.rglob("*") if path.is_file()]
        self.traced = any(name.endswith("trace.arrow") for name in files(self.whole))
        self.kills = self.finished = self.failures = 0

    def _call(self, out: Path, plan: Mapping[str, Any] | None = None) -> Answer:
        return self._stage.call([*self._args, "--out", out], out, plan, ranks=self._ranks)

    def go(self, plans: Sequence[Mapping[str, Any]]) -> None:
        """Call it under one plan after the other, and look at what each leaves; then let it finish."""
        for plan in (*plans, {}):
            answer = self._call(self.cut, plan)
            assert answer.orphans == 0, (plan, answer)
            if answer.killed:
                self.kills += 1
                assert answer.err == "" or says_that_torchrun_has_ended(plan, answer), (plan, answer)
                self.check(answer)
            elif answer.code and (LOST in answer.err or plan.get("whom") == "one"):
                self.kills += 1
                assert names_who_was_lost(plan, answer), (plan, answer)
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
        needed = sum(self.sizes)
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
                found, full = lines(path.parent), lines(theirs.parent)
                if found and not answer.killed:  # closed in the middle of a step: its line says what was known of it
                    assert found[-1].items() <= full[len(found) - 1].items(), name
                    del found[-1]
                assert found == full[: len(found)], name
            elif match := CHECKPOINT.fullmatch(name):
                assert state(path)["step"] == int(match.group(1)), name
            elif name.endswith((".json", ".safetensors")) and theirs.exists() and "adapter" not in name:
                assert_equal_file(name, path, theirs)  # what is nowhere in the uninterrupted run is a draft

    def compare(self) -> None:
        """It is the uninterrupted run, file by file."""
        ours, theirs = files(self.cut), files(self.whole)
        for folder in {path.parent for path in ours.values() if path.parent.name == "checkpoints"}:
            kept = sorted(name for name, path in ours.items() if path.parent == folder)
            if len(kept) == 3 and kept[0] not in theirs and (ours[kept[0]].is_dir() or kept[0].endswith(".pt")):
                del ours[kept[0]]  # the process was killed when it was about to
        assert sorted(ours) == sorted(theirs)
        for name in ours:
            assert_equal_file(name, ours[name], theirs[name])


def is_one_line(answer: Answer) -> bool:
    """One line that says what is wrong, of which file, and what to do."""
    line = answer.err.removesuffix("\n")
    return line.startswith("error: ") and "\n" not in line and line.count(": ") >= 3


def says_that_torchrun_has_ended(plan: Mapping[str, Any], answer: Answer) -> bool:
    """A rank says it below what torch writes of the connection, or the one that finds that rank gone says that."""
    said = [line for line in answer.err.splitlines() if line.startswith("error: ")]
    causes = ("torchrun has ended (killed?)", f"another rank {LOST}")
    return plan.get("whom") == "parent" and all(any(cause in line for cause in causes) for line in said)


def names_who_was_lost(plan: Mapping[str, Any], answer: Answer) -> bool:
    """One line, with the number of the rank, if it was one; before ranks have met, nothing but what torchrun says."""
    said = [line for line in answer.err.splitlines() if "real" not in plan or line.startswith("error: ")]
    causes = (f": rank {plan.get('rank', 0)} of 2 {LOST}", f"a process of the bench {LOST}")
    return len(said) == 1 and any(cause in said[0] for cause in causes) if said else "after" in plan


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


@pytest.fixture(scope="module")
def ordeal(request: pytest.FixtureRequest, stage: Stage, tmp_path_factory: pytest.TempPathFactory) -> Ordeal:
    verb, _, how = request.param.partition(" ")
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
        "train": lambda: ["--resume", *sets(f"data={text}", *RUN, *SIZES["ranks" if how else "train"])],
        "bench": lambda: [
            *("smoke", "--seeds", 2 if how else 1, "--arms", "low" if how else "gnmr,random"),
            *sets(f"data={text}", *RUN, *SIZES["bench"]),
        ],
        "finetune": lambda: [
            *(request.getfixturevalue("tiny_llama"), sums, "--resume"),
            *sets(*RUN, *SIZES[request.param]),
        ],
        "quantize": lambda: [
            *(request.getfixturevalue("tiny_llama"), "--resume", "--saliency", "--data", text, "--device", "cpu"),
            *("--sequences", 2, "--length", 16, "--epochs", 1, "--rank", 4, "--group", 16, "--eval-tokens", 64),
            *("--export", "packed", "--export", "peft"),
        ],
    }
    more = {"train": sets(f"parallel={how}"), "bench": [how, 2]}.get(verb, [how]) if how else []
    return Ordeal(stage, [verb, *args[verb](), *more], folder, 2 if "train " in request.param else 1)


def limits(ordeal: Ordeal, rng: random.Random, count: int) -> list[int]:
    """Bytes that some file of the run will want to grow beyond."""
    return [rng.randrange(size) for size in rng.choices(sorted(ordeal.sizes), k=count) if size]


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("ordeal", VERBS, indirect=True)
def test_whatever_ends_it_the_same_command_goes_on_and_ends_the_same(ordeal: Ordeal, rounds: Rounds) -> None:
    rng = random.Random(1)
    numbers = range(1, rounds(3, 25))
    operations: list[dict[str, Any]] = [{"op": n, "how": how} for n in numbers for how in ("kill", "torn")]
    others: list[dict[str, Any]] = [{"after": rng.uniform(0.02, ordeal.seconds)} for _ in range(rounds(1, 40))]
    others += [{"limit": limit, "fatal": True} for limit in limits(ordeal, rng, rounds(1, 16))]
    if ordeal.traced:
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


def tries(rng: random.Random, count: int, **plan: Any) -> list[dict[str, Any]]:
    """So many times at some operation, in some checkpoint, in some batch of a trace, and at some moment."""
    return [
        {**where, **plan, "rank": number % 2}
        for number in range(count)
        for where in (
            {"op": rng.randrange(1, 40), "how": rng.choice(("kill", "torn"))},
            {"half": "checkpoint", "nth": rng.randrange(1, 80)},
            {"half": "trace", "nth": rng.randrange(1, 3)},
            {"after": rng.uniform(0.02, 1.0)},
        )
    ]


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("ordeal", SEVERAL, indirect=True)
def test_whoever_of_several_processes_is_ended_nobody_is_left_and_it_goes_on(ordeal: Ordeal, rounds: Rounds) -> None:
    """All at once, the one that has started the others, or one of these."""
    rng = random.Random(2)
    plans: list[dict[str, Any]] = [
        {"limit": 20_000, "rank": 1},
        {"op": 9, "how": "torn", "whom": "all"},
        {"op": 1, "whom": "one", "rank": 1},
        {"half": "checkpoint", "nth": 2, "whom": "parent"},
        {"half": "checkpoint", "nth": 3, "whom": "all", "rank": 1},
        {"after": rng.uniform(0.1, 0.4), "whom": "all"},
    ]
    if rounds(0, 1):
        plans += [plan for whom in ("all", "parent", "one") for plan in tries(rng, 6, whom=whom)]
        plans += [{"op": n, "how": how, "rank": n % 2} for n in range(1, 30, 3) for how in ("full", "readonly")]
        room = [limit for limit in limits(ordeal, rng, 20) if limit > 64]  # what a lock between processes needs
        plans += [{"limit": limit, "fatal": n % 2 == 0} for n, limit in enumerate(room)]
        rng.shuffle(plans)
    ordeal.go(plans)
    if rounds(0, 1):
        ordeal.go([{"real": True}])
        real = {"real": True, "rank": 1}  # the first child of a bench is Python's resource tracker, which nobody misses
        ordeal.go([real | {"after": rng.uniform(0.5, 9), "whom": whom} for whom in ("all", "parent", "one") * 3])
    print(f"{ordeal.kills} kills, {ordeal.failures} failures, finished {ordeal.finished} times")
    assert ordeal.kills >= rounds(4, 50)  # a moment may come after the end
    assert ordeal.failures >= rounds(1, 15)
