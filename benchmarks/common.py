# SPDX-License-Identifier: Apache-2.0
"""What every benchmark shares: interleaved rounds, medians with spread, and a result file that says where it came from.

Machines are noisy, so arms are never timed one after the other: each round runs every arm once, in an order that
rotates, and a ratio is the median over rounds of arm over baseline *within* a round.
"""

import json
import multiprocessing
import os
import platform
import shlex
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, as_completed
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

import trimtab

RESULTS = Path(__file__).parent / "results"


def interleave(arms: dict[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """Time each arm once per round, the order rotating; an arm returns its seconds."""
    names = list(arms)
    times: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(rounds):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            times[name].append(arms[name]())
    return times


def against(times: dict[str, list[float]], baseline: str) -> dict[str, dict[str, float]]:
    """Median milliseconds of each arm, and its ratio to the baseline with quartiles."""
    table = {}
    for name, seconds in times.items():
        ratios = [a / b for a, b in zip(seconds, times[baseline], strict=True)]
        quartiles = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else [ratios[0]] * 3
        table[name] = {
            "ms": round(1000 * statistics.median(seconds), 4),
            "ratio": round(statistics.median(ratios), 5),
            "ratio_q1": round(quartiles[0], 5),
            "ratio_q3": round(quartiles[2], 5),
        }
    return table


def save(name: str, table: Any, **more: Any) -> None:
    """Write a result with its command, hardware and versions, and print it."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    result = {
        "name": name,
        "command": shlex.join(["python", *sys.argv]),
        "when": datetime.now(UTC).date().isoformat(),
        "hardware": {"cpu": _cpu(), "cores": os.cpu_count(), "gpu": gpu, "threads": torch.get_num_threads()},
        "versions": {"trimtab": trimtab.__version__, "torch": torch.__version__, "python": platform.python_version()},
        **more,
        "table": table,
    }
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}.json").write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(table, indent=2))


def train_all(
    runs: dict[str, dict[str, Any]], out: Path, *, jobs: int, measure: Callable[[Path], dict[str, float]] | None = None
) -> dict[str, dict[str, float]]:
    """Train every named run, `jobs` at a time, each in a process of its own; what each ended with, by name.

    A run that is in `out` already is not trained again, an unfinished one goes on. `measure` adds figures taken from
    the finished run folder.
    """
    found = {}
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn"), max_tasks_per_child=1) as pool:
        tasks = {pool.submit(_train, out / name, settings, measure): name for name, settings in runs.items()}
        for task in as_completed(tasks):
            found[tasks[task]] = task.result()
            print(tasks[task], found[tasks[task]], flush=True)
    return {name: found[name] for name in runs}


def rounded(value: float | None, digits: int = 4) -> float | None:
    """A figure for a table; None where a run broke."""
    return None if value is None else round(value, digits)


def _train(out: Path, settings: dict[str, Any], measure: Callable[[Path], dict[str, float]] | None) -> dict[str, float]:
    from trimtab.lab.train import train

    torch.set_float32_matmul_precision("high")  # TF32 where there is a GPU: these runs compare, they do not certify
    done = out / "figures.json"
    if done.is_file():
        before = json.loads(done.read_text())
        if before["settings"] != json.loads(json.dumps(settings)):
            raise SystemExit(f"{out} holds a run with other settings: give another --out, or remove it")
        return before["figures"]
    started = time.perf_counter()
    try:
        result = train(settings, out, resume=True)
        figures = {"loss": result.loss, "eval_loss": result.eval_loss_high, "promotion": 0.0}
        figures |= {"promotion": result.summary.get("promotion_ratio", 0.0)} if result.summary else {}
        figures |= {"seconds": round(time.perf_counter() - started, 1)}
        figures |= measure(out) if measure is not None else {}
    except trimtab.TrimtabError as error:  # a run that broke is a result too
        figures = {"loss": None, "eval_loss": None, "error": str(error)}
    out.mkdir(parents=True, exist_ok=True)
    done.write_text(json.dumps({"settings": settings, "figures": figures}))
    return figures


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine())
