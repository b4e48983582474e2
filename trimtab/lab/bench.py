# SPDX-License-Identifier: Apache-2.0
"""The bench: every cell of a suite, every arm, every seed; one folder of runs, one table, one page.

    DIR/<cell>/<arm>/<seed>/     a run folder as any other (`trimtab report`, `trimtab replay` read it), and done.json
    DIR/bench.json               everything: settings, seeds, versions, each run's scores, means with intervals
    DIR/report.html              the same to look at, offline (`write_bench_page`, which needs plotly)

    tasks(...)        what is to be run, in order: cell, seed, arm; an arm comes after the one it is measured by
    run_task(...)     one run, unless its done.json says that it was run before
    run_bench(...)    both, then what `gather` makes of the folders

Arms of one seed share weights, data order and faults, so they are compared seed by seed (`intervals`). `low` and the
cell's `top` (`high`, or `clean` where faults are injected) are always run: every gap is the one between them. A run
whose gradients or weights stop being finite has *died*: that is a result, it is kept, and its losses are missing from
the means, which say how many runs they are over.
"""

import ctypes
import dataclasses
import json
import logging
import multiprocessing
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from trimtab.checks import is_number, parse_json
from trimtab.control.record import RUN
from trimtab.control.secrets import without_secrets
from trimtab.errors import TrimtabError, one_line
from trimtab.files import write_whole
from trimtab.lab.arms import Arm, find_arm, run_arm
from trimtab.lab.config import Config
from trimtab.lab.run import Silent, Watcher
from trimtab.lab.suites import Cell, Suite, merged

log = logging.getLogger(__name__)

DONE = "done.json"
PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Task:
    """One run of the bench."""

    cell: str
    arm: Arm
    seed: int
    settings: Mapping[str, Any]
    """What every arm of this cell and seed trains with; the arm's own come on top."""
    folder: Path
    done: Mapping[str, Path]
    """The runs of this cell and seed that come before it, by arm."""

    @property
    def name(self) -> str:
        """How the task is called in a line of progress."""
        return f"{self.cell} {self.arm.name} {self.seed}"


@dataclass(frozen=True)
class Outcome:
    """How a task ended."""

    seconds: float
    died: str | None = None
    """Why the run could not be finished, if it could not."""
    peak_bytes: int | None = None
    """Peak memory of the device, on CUDA."""
    before: bool = False
    """It had been run by an earlier call."""


Watch = Callable[[Task], AbstractContextManager[Watcher]]
Told = Callable[[int, int, Task, Outcome], None]


def tasks(
    suite: Suite, out: Path, *, seeds: Sequence[int], arms: Sequence[str] | None = None, given: Mapping[str, Any]
) -> list[Task]:
    """Everything that is to be run, checked, in an order in which each run finds those it needs."""
    found = []
    for cell in suite.cells:
        wanted = arms_of(suite, cell, arms)
        for seed in seeds:
            settings = suite.settings_of(cell, seed, given)
            for arm in wanted:
                Config.from_dict(arm.over(settings))
            folders = {arm.name: out / _safe(cell.name) / _safe(arm.name) / str(seed) for arm in wanted}
            for place, arm in enumerate(wanted):
                earlier = {other.name: folders[other.name] for other in wanted[:place]}
                found.append(Task(cell.name, arm, seed, settings, folders[arm.name], earlier))
    return found


def arms_of(suite: Suite, cell: Cell, asked: Sequence[str] | None) -> list[Arm]:
    """The arms of a cell: those asked for or the suite's own, its two ends, and whatever they come after."""
    elsewhere = {name for other in suite.cells for name in other.variants} - set(cell.variants)
    ordered: dict[str, Arm] = {}

    def add(name: str) -> None:
        arm = _variant(cell, name) if name in cell.variants else find_arm(name)
        if name not in ordered:
            if arm.after is not None:
                add(arm.after)
            ordered[name] = arm

    for name in (cell.top, "low", *(suite.arms_of(cell) if asked is None else asked)):
        if name not in elsewhere:
            add(name)
    return list(ordered.values())


def _variant(cell: Cell, name: str) -> Arm:
    base, changes = cell.variants[name]
    arm = find_arm(base)
    return dataclasses.replace(arm, name=name, what=f"{arm.what}: {name}", settings=merged(arm.settings, changes))


def run_task(task: Task, watcher: Watcher | None = None) -> Outcome:
    """Run a task, or find that it was run before."""
    settings = without_secrets(json.loads(json.dumps(task.arm.over(task.settings))))
    found = read_done(task.folder)
    if found is not None:
        before, now = (Config.from_dict(one).to_dict() for one in (found["settings"], settings))
        if before != now:
            changed = sorted(key for key in now if before[key] != now[key])
            raise TrimtabError(
                f"{task.folder} was run with other settings ({', '.join(changed)}): give another --out, or remove it"
            )
        return Outcome(found["seconds"], found["died"], found["peak_bytes"], before=True)
    on_cuda = torch.cuda.is_available() and task.settings.get("device", "auto") != "cpu"
    if on_cuda:
        torch.cuda.reset_peak_memory_stats()
    started, died, trained = time.perf_counter(), None, True
    try:
        result = run_arm(task.arm, dict(task.settings), task.folder, done=task.done, watcher=watcher)
        trained = not result.finished_before
    except TrimtabError as error:
        if "not finite" not in str(error) or not (task.folder / RUN).is_file():
            raise
        died = str(error)
    peak = torch.cuda.max_memory_allocated() if on_cuda and trained else None
    outcome = Outcome(round(time.perf_counter() - started, 2), died, peak)
    said = {"settings": settings, "seconds": outcome.seconds, "died": died, "peak_bytes": peak}
    write_whole(task.folder / DONE, json.dumps(said, indent=1))
    return outcome


def read_done(folder: Path) -> dict[str, Any] | None:
    """What a run's done.json says; None if there is none. A damaged one counts as none, which is said.

    The run is then gone on with like one that was interrupted, from its own settings and checkpoints: a finished one
    stays as it is, and only one that had died without a checkpoint trains again.
    """
    path = folder / DONE
    if path.is_dir():
        raise TrimtabError(f"{path} must be a file, and is a folder: move it away")
    if not os.path.lexists(path):
        return None
    try:
        said: Any = parse_json(path.read_text(encoding="utf-8") if path.is_file() else "")  # a pipe would be waited for
        Config.from_dict(said["settings"])
        numbers = (said["seconds"], 0 if said["peak_bytes"] is None else said["peak_bytes"])
        if all(map(is_number, numbers)) and (said["died"] is None or isinstance(said["died"], str)):
            return said
        reason = "seconds, died or peak_bytes is no such thing"
    except (KeyError, TypeError, ValueError) as error:
        reason = one_line(error, 60)
    log.warning("%s is damaged (%s): the run is gone on with, or run again if it has no checkpoint", path, reason)
    return None


def run_bench(
    suite: Suite,
    out: str | Path,
    *,
    seeds: Sequence[int] = (0, 1, 2),
    arms: Sequence[str] | None = None,
    given: Mapping[str, Any] | None = None,
    jobs: int = 1,
    command: Sequence[str] = (),
    watch: Watch = lambda task: nullcontext(Silent()),
    told: Told = lambda number, total, task, outcome: None,
) -> dict[str, Any]:
    """Run a suite into a folder, write bench.json there, and return what it holds.

    Args:
        given: settings for every run, as `trimtab train` takes them; they win over the suite's.
        jobs: processes; each takes all arms of a cell and a seed.
        watch: gives somebody who looks on while a task runs (in this process only).
        told: called after each task with its number, their total, the task and how it ended.
    """
    from trimtab.lab.gather import gather  # reads folders, which is not needed to run

    out, given = Path(out), dict(given or {})
    todo = tasks(suite, out, seeds=seeds, arms=arms, given=given)
    ended = _parallel(todo, jobs) if jobs > 1 else _sequential(todo, watch)
    for number, (task, outcome) in enumerate(ended, 1):
        told(number, len(todo), task, outcome)
    result = gather(suite, todo, command=command, given=given)
    out.mkdir(parents=True, exist_ok=True)
    write_whole(out / "bench.json", json.dumps(result, indent=1, allow_nan=False))
    return result


def _sequential(todo: Sequence[Task], watch: Watch) -> Iterator[tuple[Task, Outcome]]:
    for task in todo:
        with watch(task) as watcher:
            outcome = run_task(task, watcher)
        yield task, outcome


def _parallel(todo: Sequence[Task], jobs: int) -> Iterator[tuple[Task, Outcome]]:
    """The arms of a cell and a seed in order in one process, several such chains at once."""
    chains: dict[tuple[str, int], list[Task]] = {}
    for task in todo:
        chains.setdefault((task.cell, task.seed), []).append(task)
    context = multiprocessing.get_context("spawn")  # a forked process would share torch's threads
    with ProcessPoolExecutor(jobs, context, _end_with_parent, (os.getpid(),)) as pool:
        running = {pool.submit(run_chain, chain): chain for chain in chains.values()}
        try:
            for future in as_completed(running):
                yield from zip(running[future], future.result(), strict=True)
        except BrokenProcessPool:  # which ends the others
            raise ChildProcessError(
                "a process of the bench ended without an error of its own (killed? out of memory?); finished runs are "
                "kept, the same command goes on"
            ) from None
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)  # chains under way end first, others do not begin
            raise


def _end_with_parent(parent: int) -> None:
    """On Linux: end when the bench ends, even if that was killed; an orphan would train on for hours.

    It may have been killed before this: a process takes seconds to start, and its first tasks wait in a pipe.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        os._exit(1)


def run_chain(chain: Sequence[Task]) -> list[Outcome]:
    """Run tasks one after the other, with one thread."""
    torch.set_num_threads(1)
    return [run_task(task) for task in chain]


def _safe(name: str) -> str:
    """A name as that of a folder."""
    return re.sub(r"[^\w.+=-]+", "_", name).strip("._") or "_"
