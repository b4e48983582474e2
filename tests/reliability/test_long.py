# SPDX-License-Identifier: Apache-2.0
"""Long runs: what a run costs does not depend on how long it has been going on. Memory of the controller, the recorder
and whoever follows the run is flat; the trace takes the bytes that docs/runs.md says; a resume reads as much of a long
run as of a short one, counted by the kernel.

Some thousands of steps here, 100,000 steps of 84 units with TRIMTAB_LONG=1; `pytest -s` shows the figures.
"""

import gc
import json
import math
import shutil
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from trimtab import Controller, Policy, Recorder
from trimtab.control import record
from trimtab.control.units import Switch
from trimtab.lab.train import train
from trimtab.report.follow import Follower
from trimtab.report.live import Live

UNITS = 84
Rounds = Callable[[int, int], int]


def resident() -> int:
    """Bytes of this process that are in memory."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


def bytes_read(act: Callable[[], Any]) -> int:
    """How much this process has read from files during a call, by the kernel's count."""

    def count() -> int:
        with open("/proc/self/io") as file:
            return int(file.readline().split()[1])

    gc.collect()
    before = count()
    act()
    return count() - before


def net(num: int) -> nn.Sequential:
    model = nn.Sequential(*(nn.Linear(2, 2, bias=False) for _ in range(num)))
    for path, module in model.named_children():
        vars(module)["switch"] = Switch(path, roots=(module,))
    return model


class Run:
    """A synthetic run: a controller that acts, a recorder, and gradients of noise with a spike now and then."""

    def __init__(self, folder: Path) -> None:
        self.model, self.step = net(UNITS), 0
        self.recorder = Recorder(folder, run={"name": "long"})
        policy = Policy(max_high=4, alpha=1.5, alpha_warmup=None, beta=2.0)
        self.controller = Controller(self.model, policy, recorder=self.recorder)
        self.grads = torch.zeros(UNITS, 2, 2)
        self.rng = np.random.default_rng(0)

    def go(self, steps: int) -> None:
        for _ in range(steps):
            self.step += 1
            sizes = self.rng.lognormal(0, 0.05, UNITS)
            sizes[self.step % UNITS] *= 3 if self.step % 7 == 0 else 1
            if self.step % 100 == 0:
                sizes[3] = math.nan
            self.grads.copy_(torch.from_numpy(sizes).view(UNITS, 1, 1))
            if self.model[0].weight.grad is None:  # the first, or after a step that was skipped
                for linear, grad in zip(self.model, self.grads, strict=True):
                    linear.weight.grad = grad
            self.controller.step()
            self.recorder.log(self.step, loss=2 + 1 / self.step, lr=1e-3)

    def settle(self) -> None:
        """Nothing waits to be written, and nothing to be collected."""
        self.recorder.flush()
        self.controller.summary()
        gc.collect()


@pytest.mark.timeout(3600)
def test_a_controller_that_records_does_not_grow(
    tmp_path: Path, rounds: Rounds, caplog: pytest.LogCaptureFixture
) -> None:
    """Of 512 steps a list of even the step numbers alone would be 20 kB more, one row of norms each 172 kB."""
    caplog.set_level("ERROR", "trimtab")  # pytest would keep every warning
    run = Run(tmp_path / "run")
    run.go(256)
    tracemalloc.start()
    try:
        run.go(128)
        run.settle()
        before = tracemalloc.get_traced_memory()[0]
        run.go(512)
        run.settle()
        grown = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    print(f"{grown:,} bytes more after 512 steps")
    assert grown < 8_000
    total = rounds(896, 100_000)
    seen: dict[int, int] = {run.step: resident()}
    started = time.monotonic()
    while run.step < total:
        run.go(min(10_000 - run.step % 10_000, total - run.step))
        run.settle()
        seen[run.step] = resident()
    if total > 896:
        print("RSS in MB:", {step: round(size / 1e6, 1) for step, size in seen.items()})
        print(f"{1e6 * (time.monotonic() - started) / total:.0f} us a step")
        assert seen[100_000] - seen[10_000] < 2_000_000
    run.recorder.close()
    size = (tmp_path / "run" / "trace.arrow").stat().st_size / (run.step * UNITS)
    print(f"{size:.3f} bytes per unit and step")
    assert 4.1 < size < 4.4  # docs/runs.md: about 4.2


def test_a_row_that_is_a_batch_by_itself_costs_a_little_more(tmp_path: Path) -> None:
    """Steps of five seconds or more: docs/runs.md says 8 bytes per unit and step with 84 units."""
    run = Run(tmp_path / "run")
    run.go(1)
    run.settle()
    before = (tmp_path / "run" / "trace.arrow").stat().st_size
    for _ in range(20):
        run.go(1)
        run.recorder.flush()
    assert 7.5 < ((tmp_path / "run" / "trace.arrow").stat().st_size - before) / (20 * UNITS) < 8.2
    run.recorder.close()


def test_the_state_of_a_controller_has_one_size(tmp_path: Path) -> None:
    def size(run: Run) -> int:
        torch.save(run.controller.state_dict(), tmp_path / "state.pt")
        return (tmp_path / "state.pt").stat().st_size

    run = Run(tmp_path / "run")
    run.go(210)
    first = size(run)
    run.go(420)
    assert abs(size(run) - first) <= 64  # a longer number, perhaps
    run.recorder.close()


def write(folder: Path, steps: int) -> dict[str, int]:
    """A run folder of so many steps, without a controller; returns what a checkpoint of its end would store."""
    rng = np.random.default_rng(1)
    norms = rng.lognormal(0, 0.05, (1024, UNITS)).astype(np.float32)
    everybody, nobody = np.ones(UNITS, bool), np.zeros(UNITS, bool)
    policy = Policy(max_high=4)
    with Recorder(folder, run={"name": "long"}) as recorder:
        units = [f"layers.{i}.down" for i in range(UNITS)]
        recorder.open_trace(units, everybody, policy.to_dict(), *policy.resolve(UNITS, steps), total_steps=steps)
        for step in range(1, steps + 1):
            recorder.observe(step, norms[step % 1024], everybody, nobody, 9.0)
            recorder.log(step, loss=2 + 1 / step, lr=1e-3)
        return recorder.offsets()


@pytest.mark.timeout(3600)
def test_who_follows_a_run_does_not_hold_it(tmp_path: Path, rounds: Rounds) -> None:
    """The page of a run four times as long takes the same memory, and its answers are no longer."""
    held, answers, peaks = [], [], []
    for steps in (1_000, rounds(4_000, 100_000)):
        write(tmp_path / str(steps), steps)
        gc.collect()
        tracemalloc.start()
        try:
            with Live([tmp_path / str(steps)], port=0) as live:
                while (answer := json.loads(live.answer("/data?run=0")[1]))["behind"] or answer["step"] < steps:  # type: ignore[index]
                    pass
                gc.collect()
                now, peak = tracemalloc.get_traced_memory()
                held.append(now)
                peaks.append(peak)
                answers.append(len(json.dumps(answer)))
        finally:
            tracemalloc.stop()
        assert answer["step"] == answer["total"] == steps
    print(f"held {held}, peaks {peaks}, answers {answers}")
    assert held[1] < held[0] + 100_000  # 3,000 rows of norms are 1 MB
    assert peaks[1] < 1.5 * peaks[0] + 4_000_000
    assert answers[1] < 2 * answers[0]


def test_following_reads_only_what_is_new(tmp_path: Path, rounds: Rounds) -> None:
    steps = rounds(5_000, 100_000)
    offsets = write(tmp_path / "run", steps)
    follower = Follower(tmp_path / "run")
    follower.refresh(1e9)
    assert follower.step == steps
    policy = Policy(max_high=4)
    with Recorder.resume(tmp_path / "run", offsets) as recorder:
        units = [f"layers.{i}.down" for i in range(UNITS)]
        everybody = np.ones(UNITS, bool)
        recorder.open_trace(units, everybody, policy.to_dict(), *policy.resolve(UNITS, steps), total_steps=steps)
        recorder.observe(steps + 1, np.ones(UNITS, np.float32), everybody, ~everybody, 9.0)
        recorder.log(steps + 1, loss=1.0)
    assert bytes_read(follower.refresh) < 40_000
    assert follower.step == steps + 1


def test_opening_a_long_run_for_resume_reads_no_more_of_it(tmp_path: Path, rounds: Rounds) -> None:
    lengths, counts, seconds = (1_000, rounds(20_000, 100_000)), [], []
    everybody, policy = np.ones(UNITS, bool), Policy(max_high=4)
    units = [f"layers.{i}.down" for i in range(UNITS)]
    for steps in lengths:
        offsets = write(tmp_path / str(steps), steps)
        assert offsets["trace"] > 4 * UNITS * steps

        def open_it(folder: Path = tmp_path / str(steps), offsets: dict[str, int] = offsets) -> None:
            with Recorder.resume(folder, offsets) as recorder:
                recorder.open_trace(units, everybody, policy.to_dict(), *policy.resolve(UNITS, 9), total_steps=None)

        open_it()
        started = time.perf_counter()
        counts.append(bytes_read(open_it))
        seconds.append(time.perf_counter() - started)
    for steps, count, second in zip(lengths, counts, seconds, strict=True):
        print(f"opened for resume after {steps:,} steps: {count:,} bytes read, {1000 * second:.1f} ms")
    assert abs(counts[1] - counts[0]) < 512
    assert counts[1] < 100_000


def test_a_run_resumes_after_any_number_of_steps_by_reading_the_same(tmp_path: Path) -> None:
    """The whole of `trimtab train --resume`, from the same checkpoint with a short and a long record before it."""
    (tmp_path / "words.txt").write_text(" ".join(f"word{i * i % 89}" for i in range(1500)))
    given = {"data": str(tmp_path / "words.txt"), "device": "cpu", "steps": 4, "batch": 2, "seq": 16, "threads": 1}
    train({**given, "eval_batches": 1, "checkpoint_every": 3}, tmp_path / "whole")
    counts, seconds = [], []
    for number, times in enumerate((1, 1, 400)):  # the first also loads what is loaded once
        run = shutil.copytree(tmp_path / "whole", tmp_path / str(number))
        (run / "checkpoints" / "step_000004.pt").unlink()
        path = run / "checkpoints" / "step_000003.pt"
        state = torch.load(path, weights_only=True)
        state["offsets"] = lengthen(run, state["offsets"], times)
        assert times == 1 or state["offsets"]["trace"] > 100_000
        torch.save(state, path)
        started = time.perf_counter()
        counts.append(bytes_read(lambda run=run: train({}, run, resume=True)))
        seconds.append(time.perf_counter() - started)
        lines = (run / record.METRICS).read_text().splitlines()
        assert [json.loads(line)["step"] for line in lines][-2:] == [4, 4]
        assert len(lines) > 3 * times
    print(f"resumed: {counts} bytes read, {[round(s, 2) for s in seconds]} s")
    assert abs(counts[2] - counts[1]) < 4096


def lengthen(run: Path, offsets: dict[str, int], times: int) -> dict[str, int]:
    """Repeat all rows and lines of a record up to its checkpoint; returns the new offsets."""
    import pyarrow as pa

    trace, metrics = (run / name for name in (record.TRACE, record.METRICS))
    with pa.OSFile(str(trace)) as source:
        pa.ipc.read_schema(source)
        head = source.tell()
    raw, lines = trace.read_bytes()[: offsets["trace"]], metrics.read_bytes()[: offsets["metrics"]]
    trace.write_bytes(raw[:head] + times * raw[head:])
    metrics.write_bytes(times * lines)
    return {"trace": trace.stat().st_size, "metrics": metrics.stat().st_size}
