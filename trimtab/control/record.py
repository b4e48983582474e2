# SPDX-License-Identifier: Apache-2.0
"""Record: a run folder that can be read again, on any machine, without a GPU.

    run.json        config, versions, hardware, command: written first, never changed
    metrics.jsonl   one JSON object per line: step, loss, ..., grad_norm, num_high, events
    trace.arrow     every norm and every executed set: Arrow IPC stream of (step, norms, high, further columns)

A report, a replay and a sweep over policies all start from this folder (schema: docs/runs.md), so what is
written here is exact. A norm is stored as the float32 that was judged, NaN and Inf included; a unit without
a gradient is an Arrow null. JSON has no NaN, so metrics.jsonl says null there.

Both files only grow. The trace is a schema message followed by self-contained batch messages, so cutting it
at the end of a batch gives a valid shorter trace: a checkpoint stores `offsets()`, and `Recorder.resume`
cuts both files there and goes on. Rows wait in preallocated arrays and lines in a buffer; both are
written after 256 rows or 5 seconds. A crash loses that tail and nothing else; a normal exit loses nothing,
even in a loop that never calls `close()`.

A metrics line has two authors. The controller's part of a step comes with `observe`, the trainer's with
`log`; the line is written when both are there. In a loop that never logs, the controller's part is written
alone when the next step arrives.

    with Recorder("runs/a", run={"lr": 1e-3}) as recorder:
        recorder.open_trace(units, recoverable, policy, max_high=3, warmup_steps=25, total_steps=1000)
        recorder.observe(1, norms, seen, high, grad_norm=0.7, events=[])
        recorder.log(1, loss=5.5, lr=1e-4)

No torch here: the controller hands over numpy arrays.
"""

import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
import time
import weakref
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import trimtab
from trimtab.control.decide import Quota
from trimtab.control.secrets import command_line, without_secrets
from trimtab.control.writers import FORMAT, MetricsWriter, TraceWriter, plain
from trimtab.errors import TrimtabError
from trimtab.files import write_whole

RUN, METRICS, TRACE, CHECKPOINTS, REPORT = "run.json", "metrics.jsonl", "trace.arrow", "checkpoints", "report.html"
BATCH_SECONDS = 5.0


class Recorder:
    """Writes one run folder.

    Args:
        folder: created if it is not there; a folder that already holds a run is refused.
        run: the caller's configuration, kept under "config" in run.json, without the secrets in it (`secrets.py`). A
            list under "faults" (dicts with unit, kind, start, width) tells the report which steps were not quiet.
        force: remove the run that is in the folder, checkpoints included.
    """

    def __init__(self, folder: str | Path, *, run: Mapping[str, Any] | None = None, force: bool = False) -> None:
        self.folder = Path(folder)
        _claim(self.folder, force=force)
        _write_run(self.folder / RUN, run or {})
        self._start(metrics_at=0, trace_at=0)

    @classmethod
    def resume(cls, folder: str | Path, offsets: Mapping[str, int]) -> "Recorder":
        """Continue a run: cut both files to the offsets that a checkpoint stored, and append."""
        recorder = cls.__new__(cls)
        recorder.folder = Path(folder)
        if not (recorder.folder / RUN).is_file():
            raise TrimtabError(f"resume needs a run folder, and {folder} has no {RUN}: start a new run there")
        for name, key in ((METRICS, "metrics"), (TRACE, "trace")):
            path, wanted = recorder.folder / name, int(offsets[key])
            if not path.is_file() and os.path.lexists(path):  # a pipe would be waited for
                raise TrimtabError(f"{path} must be a file, and is a folder, a pipe or a broken link: move it away")
            found = path.stat().st_size if path.is_file() else 0
            if not 0 <= wanted <= found:
                raise TrimtabError(
                    f"{path} has {found} bytes, but the checkpoint was taken at byte {wanted}: "
                    "resume from a checkpoint of this folder"
                )
        for name, key in ((METRICS, "metrics"), (TRACE, "trace")):
            if (recorder.folder / name).is_file():
                os.truncate(recorder.folder / name, int(offsets[key]))
        recorder._start(metrics_at=int(offsets["metrics"]), trace_at=int(offsets["trace"]))
        return recorder

    def _start(self, *, metrics_at: int, trace_at: int) -> None:
        self._metrics = MetricsWriter(self.folder / METRICS, metrics_at)
        self._trace = TraceWriter(self.folder / TRACE, trace_at)
        self._due = time.monotonic() + BATCH_SECONDS
        self._closer = weakref.finalize(self, _close, self._metrics, self._trace, os.getpid())

    def open_trace(
        self,
        units: Sequence[str],
        recoverable: NDArray[np.bool_],  # (U,)
        policy: Mapping[str, Any],
        max_high: int,
        warmup_steps: int,
        total_steps: int | None,
        columns: Sequence[str] = (),
        detector: Mapping[str, Any] | None = None,
        quotas: Sequence[Quota] = (),
    ) -> None:
        """Say what the trace is about; after a resume, check that it is about the same units and columns.

        Args:
            columns: names of what is measured besides the norms, each a column of the trace.
            detector: what the run was judged by, if not by GNMR (`trimtab.control.detectors.described`).
            quotas: the budgets of parts of the units, where there is not one for all.
        """
        header = {
            "format": FORMAT,
            "units": list(units),
            "recoverable": [bool(x) for x in recoverable],
            "policy": dict(policy),
            "max_high": int(max_high),
            "warmup_steps": int(warmup_steps),
            "total_steps": None if total_steps is None else int(total_steps),
        }
        taken = sorted({"step", "norms", "high"} & set(columns))
        if taken or len(set(columns)) != len(columns):
            raise TrimtabError(f"columns must have names of their own, got {list(columns)}: rename one")
        header |= {"columns": list(columns)} if columns else {}
        header |= {} if detector is None else {"detector": dict(detector)}
        header |= {"quotas": [[list(part.units), part.max_high] for part in quotas]} if quotas else {}
        if not units:
            raise TrimtabError("a trace needs at least one unit, got none: check what was converted or watched")
        if len(header["recoverable"]) != len(units):
            raise TrimtabError(f"recoverable must have one value per unit, got {len(recoverable)} for {len(units)}")
        self._trace.open(header)

    def observe(
        self,
        step: int,
        norms: NDArray[np.float32],  # (U,)
        seen: NDArray[np.bool_],  # (U,)
        high: NDArray[np.bool_],  # (U,) the set executed in this step
        grad_norm: float,
        events: Sequence[Mapping[str, Any]] = (),
        columns: Mapping[str, NDArray[np.float32]] | None = None,  # each (U,)
    ) -> None:
        """Take the controller's part of one pass; a step that is run again is simply observed again."""
        self._trace.append(step, norms, seen, high, columns)
        values = {"grad_norm": float(grad_norm), "num_high": int(np.count_nonzero(high))}
        if events:
            values["events"] = list(events)
        self._metrics.hold(step, values)
        if self._trace.full or time.monotonic() >= self._due:
            self.flush()

    def log(self, step: int, **values: Any) -> None:
        """Write the line of a step: these values, and the controller's if it observed that step."""
        self._metrics.write(step, values)
        if time.monotonic() >= self._due:
            self.flush()

    def flush(self) -> None:
        """Hand every complete row and line to the operating system."""
        self._trace.flush()
        self._metrics.flush()
        self._due = time.monotonic() + BATCH_SECONDS

    def offsets(self) -> dict[str, int]:
        """Flush, and say where both files end: what a checkpoint stores."""
        self._metrics.release()
        self.flush()
        return {"metrics": self._metrics.position, "trace": self._trace.position}

    def close(self) -> None:
        """Write what is left and close the files; a second call does nothing."""
        self._closer()

    def __enter__(self) -> "Recorder":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _close(metrics: MetricsWriter, trace: TraceWriter, owner: int) -> None:
    if os.getpid() != owner:
        return  # a forked child must not write its parent's rows a second time
    trace.close()
    metrics.close()


def _claim(folder: Path, *, force: bool) -> None:
    """Make the folder ours: create it, and refuse or remove a run that is in it."""
    if folder.exists() and not folder.is_dir():
        raise TrimtabError(f"a run folder must be a directory, got the file {folder}: choose another path")
    if any((folder / name).exists() for name in (RUN, METRICS, TRACE)):
        if not force:
            raise TrimtabError(
                f"{folder} already holds a run: continue it (--resume), replace it (--force, in Python "
                "force=True), or choose another folder"
            )
        # A kill in between must leave a run that can be resumed: no checkpoint of files that are gone, and run.json,
        # which knows the settings, until the new one takes its place.
        shutil.rmtree(folder / CHECKPOINTS, ignore_errors=True)
        for name in (METRICS, TRACE, REPORT):
            (folder / name).unlink(missing_ok=True)
    folder.mkdir(parents=True, exist_ok=True)


def _write_run(path: Path, config: Mapping[str, Any]) -> None:
    """Write run.json, over the one of a run that is replaced."""
    run = {
        "format": FORMAT,
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": command_line(),
        "git": _git_hash(),
        "versions": {name: _version(name) for name in ("trimtab", "torch", "numpy", "pyarrow")}
        | {"python": platform.python_version()},
        "platform": platform.platform(),
        "cpu_count": os.cpu_count(),
        "config": without_secrets(plain(config)),
    }
    write_whole(path, json.dumps(plain(run), indent=2, allow_nan=False) + "\n")


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return trimtab.__version__ if package == "trimtab" else None  # a source tree has no metadata


def _git_hash() -> str | None:
    """The commit of the working directory, if there is one."""
    try:
        done = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, timeout=2, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None
