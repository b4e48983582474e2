# SPDX-License-Identifier: Apache-2.0
"""A trace that is larger than memory: replay holds one block of it and two bytes per step, gives the numbers that the
whole matrix gives, and its peak memory at ten times the size is the same. `TRIMTAB_LONG=1` replays 5 GB."""

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import trimtab
from trimtab.control.policy import Policy, quiet_level
from trimtab.control.record import Recorder
from trimtab.control.replay import Replay
from trimtab.report.imports import read_log
from trimtab.report.read import iter_trace, read_trace

pa = pytest.importorskip("pyarrow")

UNITS = 512
BLOCK = 256
PER_STEP = 8 + UNITS * 4 + UNITS / 8
"""Bytes of a step in the file."""
POLICY = Policy(max_high=4, alpha=1.3, beta=1.5, warmup_steps=20)


def write_run(folder: Path, steps: int, *, metrics: bool = True) -> Path:
    """A run folder of many steps, written in batches as the recorder writes them but without a call per step."""
    rng = np.random.default_rng(0)
    limits = POLICY.resolve(UNITS, steps)
    with Recorder(folder) as recorder:
        recorder.open_trace(
            [f"layers.{i}.down" for i in range(UNITS)], np.ones(UNITS, bool), POLICY.to_dict(), *limits, steps
        )
        schema = recorder._trace._schema
    kinds = [rng.lognormal(0, 0.1, (BLOCK, UNITS)).astype(np.float32) for _ in range(8)]
    high = pa.FixedSizeListArray.from_arrays(pa.array(np.zeros(BLOCK * UNITS, bool)), UNITS)
    norms = [pa.FixedSizeListArray.from_arrays(pa.array(kind.ravel()), UNITS) for kind in kinds]
    with (folder / "trace.arrow").open("ab") as file:
        for number, first in enumerate(range(1, steps + 1, BLOCK)):
            step = pa.array(np.arange(first, min(first + BLOCK, steps + 1)))
            columns = [step, norms[number % 8].slice(0, len(step)), high.slice(0, len(step))]
            file.write(pa.record_batch(columns, schema=schema).serialize())
    if metrics:
        with (folder / "metrics.jsonl").open("w", encoding="utf-8") as file:
            file.writelines(f'{{"step": {step}, "loss": 2.5, "grad_norm": 1.0}}\n' for step in range(1, steps + 1))
    return folder


CHILD = """
import json, resource, sys
sys.argv = ["trimtab", *sys.argv[1:]]
from trimtab.cli.main import main
try:
    main()
finally:
    print(json.dumps({"peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}))
"""


def replayed(*args: object) -> tuple[str, int]:
    """What `trimtab replay` says, and the most memory that it has held."""
    done = subprocess.run(
        [sys.executable, "-c", CHILD, "replay", *map(str, args)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    *lines, last = done.stdout.splitlines()
    return "\n".join(lines), json.loads(last)["peak"]


@pytest.mark.timeout(3600)
def test_peak_memory_does_not_grow_with_the_trace(tmp_path: Path, rounds: Callable[[int, int], int]) -> None:
    """A replay alone in the long mode; in the normal one also a calibration, which goes through the norms twice."""
    small, large = 2_000, round(rounds(50 * 10**6, 5 * 10**9) / PER_STEP)
    few, many = write_run(tmp_path / "few", small), write_run(tmp_path / "many", large)
    size = (many / "trace.arrow").stat().st_size
    options = ("--calibrate", 5) if rounds(1, 0) else ()
    _, before = replayed(few, *options)
    began = time.monotonic()
    said, after = replayed(many, *options)
    took = time.monotonic() - began
    print(f"{size / 1e9:.2f} GB, {large:,} steps: peak {before / 1e6:.0f} MB -> {after / 1e6:.0f} MB, {took:.1f} s")
    assert f"{large} steps, {UNITS} units" in said
    assert after - before < (12 << 20) + 80 * large  # two curves, quiet, alarms, peaks: 80 bytes a step of two thousand
    assert 80 * large < size / 20


def test_blocks_of_any_length_give_what_the_matrix_gives(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", 700) / "trace.arrow"
    trace = read_trace(path)
    for policy in (POLICY, POLICY.replace(history="exclude_triggered"), POLICY.replace(replay_step=1.2)):
        whole = trimtab.replay(trace.norms, policy, seen=trace.seen, total_steps=trace.total_steps)
        for rows in (1, 97, 700, None):
            going = Replay(policy, trace.recoverable, 700)
            for block in iter_trace(path, rows):
                going.add(block.norms, block.seen)
            found = going.decisions()
            assert found.summary() == whole.summary()
            assert np.array_equal(found.alarmed, whole.alarmed)
            assert np.array_equal(found.rerun, whole.rerun)
            assert len(found.ratio) == 0
            if policy.replay_step is not None:
                break  # row by row already, and slow


@pytest.mark.parametrize("base", [POLICY, POLICY.replace(beta=None), POLICY.replace(history="winsorized", memory=20)])
def test_a_calibration_over_blocks_is_the_one_over_the_matrix(tmp_path: Path, base: Policy) -> None:
    path = write_run(tmp_path / "run", 600) / "trace.arrow"
    trace = read_trace(path)
    found = Policy.calibrated(read_log(path), 5.0, base=base)
    watching = base.replace(alpha=sys.float_info.max, alpha_warmup=None, beta=None)
    whole = trimtab.replay(trace.norms, watching, seen=trace.seen)
    share = 5.0 / 1000 / (1 if base.beta is None else 2)
    assert found.alpha == quiet_level(whole.ratio[20:], share)
    assert found.beta == (None if base.beta is None else quiet_level(whole.jump[20:], share))
    assert found == Policy.calibrated(trace, 5.0, base=base) == Policy.calibrated(trace.norms, 5.0, base=base)


def test_curves_of_a_run_are_read_without_holding_its_lines(tmp_path: Path) -> None:
    import tracemalloc

    folder = write_run(tmp_path / "run", 20_000)

    def held(read: Callable[[], Any]) -> int:
        tracemalloc.start()
        read()
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return most

    log = read_log(folder)
    assert log.loss is not None
    assert len(log.loss.steps) == 20_000
    (folder / "trace.arrow").unlink()
    assert held(lambda: read_log(folder)) < 200 * 20_000  # a dict per line takes three times that
