# SPDX-License-Identifier: Apache-2.0
"""Imports: a run that somebody already has, in the shape that replay, sweep and postmortem take.

    log = read_log("runs/a")                                     a run folder of ours, or its trace.arrow
    log = read_log("tb/run1")                                    TensorBoard event files
    log = read_log("loss.csv", "norms.csv", columns=["blk*.g"])  several files of one run, joined by step
    for line in log.notes: print(line)                           what was found, what is missing
    for block in log.blocks(): block.steps, block.norms          the norms, in blocks of bounded size

Where only the global norm was logged it stands in as one unit, and the notes say so: thresholds can be tried on it, but
it cannot say who. A row is a step that was logged. Where only every tenth was, histories are made of those, and what
happened between them is not seen.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from trimtab.control.policy import Policy
from trimtab.control.record import METRICS, RUN, TRACE
from trimtab.errors import TrimtabError
from trimtab.report.names import Naming, loss_rank, of_chart, visible
from trimtab.report.read import Trace, iter_trace, read_columns, scan_trace
from trimtab.report.tables import Curves, kind_of, read_curves
from trimtab.report.verdict import brief, plural

WHOLE = "whole model"
"""The name of the one unit of a log that has only the global norm."""
SPARSE_CELLS = 10_000_000
"""A table of steps by units that is larger must have a value in every hundredth cell."""
FOLDER_FILES = ("trainer_state.json", "metrics.csv", "metrics.jsonl")


class Curve(NamedTuple):
    """One value over the steps, in order, each step once."""

    steps: NDArray[np.int64]
    values: NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Log:
    """One run, as far as it was logged."""

    name: str
    header: Trace
    """Units and policy; no rows."""
    rows: int
    blocks: Callable[[], Iterable[Trace]] = field(repr=False)
    per_unit: bool
    """False: the global norm stands in as one unit, or there is no norm at all (`rows` is 0)."""
    ours: bool
    """Whether the run was recorded under a policy of ours."""
    loss: Curve | None = None
    grad_norm: Curve | None = None
    config: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    folder: Path | None = None

    @property
    def recoverable(self) -> NDArray[np.bool_]:
        """Which units a policy may choose: all where none had a high path, as in a run that was only watched."""
        told = self.header.recoverable
        return told if told.any() else np.ones(len(self.header.units), bool)

    def trace(self) -> Trace:
        """All blocks as one."""
        blocks = list(self.blocks())
        if not blocks:
            return self.header
        parts = {n: np.concatenate([getattr(b, n) for b in blocks]) for n in ("steps", "norms", "seen", "high")}
        columns = {name: np.concatenate([b.columns[name] for b in blocks]) for name in blocks[0].columns}
        return replace(blocks[0], **parts, columns=columns)


def read_log(*paths: str | Path, columns: Sequence[str] = (), loss: str | None = None, step: str | None = None) -> Log:
    """Read a run from its folder, or from files of other tools.

    Args:
        columns: patterns of per-unit norms (`layers.*.gnorm`), in place of the usual names.
        loss: the column of the loss, in place of the usual names.
        step: the column of the steps, in place of the usual names.
    """
    if not paths:
        raise TrimtabError("there must be a run folder or a file to read, got none")
    given = [Path(path) for path in paths]
    for path in given:
        if not path.exists():
            raise TrimtabError(f"there is no {path}: give a run folder, or files that a run has logged")
    if len(given) == 1 and not columns:
        if _is_run(given[0]):
            return _of_folder(given[0])
        if given[0].is_file() and kind_of(given[0]) == "trace":
            return _of_trace(given[0])
    ours = [path for path in given if _is_run(path) or (path.is_file() and kind_of(path) == "trace")]
    if ours:
        raise TrimtabError(
            f"{ours[0]} is a run of trimtab, which is read alone and by its own names: give it without other files and "
            "without --columns (trimtab report compares several)"
        )
    naming = Naming(columns, loss, step)
    files = [file for path in given for file in _files(path)]
    read = [(file, read_curves(file, _wanted(naming), naming.is_step)) for file in files]
    return _joined(given[0], read, naming)


def _is_run(folder: Path) -> bool:
    return any((folder / name).is_file() for name in (RUN, TRACE))


def _of_trace(path: Path) -> Log:
    scan = scan_trace(path)
    notes = [_torn(path, scan.header.dropped_bytes)] if scan.header.dropped_bytes else []
    return Log(
        name=path.stem,
        header=scan.header,
        rows=scan.rows,
        blocks=lambda: iter_trace(path),
        per_unit=True,
        ours=True,
        notes=(*notes, "no loss: only the trace was given, not its run folder"),
    )


def _of_folder(folder: Path) -> Log:
    run, columns = read_columns(folder, "loss", "grad_norm")
    loss, norm = (_curve(*columns[key]) for key in ("loss", "grad_norm"))
    notes = [] if loss else ["no loss was logged in this run"]
    notes += [_torn(folder / METRICS, run.dropped_bytes)] if run.dropped_bytes else []
    more = {"loss": loss, "grad_norm": norm, "config": run.config, "folder": folder}
    if not (folder / TRACE).is_file():
        told = Log(run.name, _empty(), 0, list, False, False, **more, notes=(*notes, f"no {TRACE} in this folder"))
        return _whole(told)
    log = _of_trace(folder / TRACE)
    torn = [note for note in log.notes if "torn" in note]
    return replace(log, name=run.name, **more, notes=(*notes, *torn))


def _files(path: Path) -> list[Path]:
    """The files of a path: itself, or what a folder of logs holds."""
    if path.is_file():
        return [path]
    events = sorted(found for found in path.rglob("*tfevents*") if found.is_file())
    folders = sorted({str(found.parent) for found in events})
    if len(folders) > 1:
        shown = ", ".join(folders[:4]) + (f" and {len(folders) - 4} more" if len(folders) > 4 else "")
        raise TrimtabError(f"{path} holds event files of {len(folders)} runs ({shown}): give the folder of one")
    others = [path / name for name in FOLDER_FILES if (path / name).is_file()]
    if not events and not others:
        raise TrimtabError(
            f"{path} is not a run folder, and holds neither event files of TensorBoard nor any of "
            f"{', '.join(FOLDER_FILES)}: give the files themselves"
        )
    return events or others[:1]


def _wanted(naming: Naming) -> Callable[[str], bool]:
    def wanted(name: str) -> bool:
        split = of_chart(name)
        return split is not None and naming.meaning(split[1]) is not None

    return wanted


def _joined(first: Path, read: list[tuple[Path, Curves]], naming: Naming) -> Log:
    """Curves of several files as one log."""
    runs: dict[str, None] = {}
    columns: dict[str, list[tuple]] = {}
    for _, curves in read:
        for name, (steps, values) in curves.found.items():
            run, column = of_chart(name) or ("", name)
            runs |= {run: None} if run else {}
            columns.setdefault(column, []).append((steps, values))
    if len(runs) > 1:
        raise TrimtabError(
            f"{first} holds the columns of {len(runs)} runs ({', '.join(map(visible, runs))}): keep those of one"
        )
    found = {name: _of_parts(parts) for name, parts in columns.items()}
    meanings = {name: naming.meaning(name) for name in found}
    picked = {kind: [n for n, m in meanings.items() if m and m.kind == kind] for kind in ("loss", "norm", "unit")}
    if not any(picked.values()):
        raise TrimtabError(_nothing(first, read, naming))
    losses = sorted(picked["loss"], key=loss_rank)
    norms = sorted(picked["norm"], key=lambda name: (len(name), name))
    units = {name: meaning.unit for name, meaning in meanings.items() if meaning and meaning.kind == "unit"}
    taken = Counter(units.values())
    units = {name: unit if taken[unit] == 1 else name for name, unit in units.items()}
    for name in (*norms, *units):
        if (found[name].values < 0).any():
            raise TrimtabError(
                f"{first}: column {visible(name)!r} was taken for gradient norms, and holds negative values: say which "
                "columns are norms with --columns PATTERN"
            )
    log = Log(
        name=next(iter(runs), first.stem),
        header=_empty(),
        rows=0,
        blocks=list,
        per_unit=False,
        ours=False,
        loss=found[losses[0]] if losses else None,
        grad_norm=found[norms[0]] if norms else None,
        notes=tuple(_found_notes(read, losses, norms, units, found, naming)),
    )
    return _whole(log) if not units else _with_units(log, {unit: found[name] for name, unit in units.items()})


def _found_notes(
    read: list[tuple[Path, Curves]],
    losses: list[str],
    norms: list[str],
    units: dict[str, str],
    found: dict[str, Curve],
    naming: Naming,
) -> Iterable[str]:
    """What was found, what was not, and what to know about it."""
    parts = [f"loss {visible(losses[0])}"] if losses else []
    parts += [f"global norm {visible(norms[0])}"] if norms else []
    if units:
        names = [visible(name) for name in units]
        parts.append(f"norms of {plural(len(units), 'unit')} ({brief(names[0])}{', ...' if len(names) > 1 else ''})")
    steps = np.unique(np.concatenate([curve.steps for curve in found.values()]))
    every = int(np.median(np.diff(steps))) if len(steps) > 1 else 1
    yield f"found {', '.join(parts)}; steps {steps[0]:,} to {steps[-1]:,}, {len(steps):,} of them logged"
    if every > 1:
        yield f"one step in {every} was logged: what happened between is not seen, and steps below are logged ones"
    if len(losses) > 1:
        others = ", ".join(visible(name) for name in losses[1:4])
        yield f"other losses were left aside ({others}); --loss COLUMN chooses"
    if not losses:
        yield "no loss was found: --loss COLUMN names it"
    if not units:
        yield (
            "no norms of single units were found, so nothing can be said of which unit it was; if they are there, "
            "--columns PATTERN names them"
        )
    for path, curves in read:
        empty = [name for name in curves.names if name not in curves.found and _wanted(naming)(name)]
        if empty:
            count = plural(len(empty), "column")
            yield f"{path.name}: {count} without a number left out, such as {brief(visible(empty[0]))}"
        if curves.torn:
            what = f"{curves.torn:,} bytes" if kind_of(path) == "events" else plural(curves.torn, "row")
            yield f"{path.name}: {what} at the end or out of shape left out"
        if curves.without_step:
            yield f"{path.name}: {plural(curves.without_step, 'row')} without a step left out"


def _nothing(first: Path, read: list[tuple[Path, Curves]], naming: Naming) -> str:
    names = [visible(name) for _, curves in read for name in curves.names]
    asked = f"nothing like {', '.join(naming.columns)}" if naming.columns else "no loss and no gradient norm"
    if not names:
        return f"{first} holds no values at all: there is nothing to read yet"
    if any(_wanted(naming)(name) for _, curves in read for name in curves.names):
        return f"{first} has the columns ({', '.join(names[:8])}), and no value in them yet: there is nothing to read"
    shown = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
    return f"{first} has {asked} (it has {shown}): name the norms with --columns PATTERN, the loss with --loss COLUMN"


def _of_parts(parts: list[tuple]) -> Curve:
    steps = np.concatenate([np.frombuffer(part[0], np.int64) for part in parts])
    values = np.concatenate([np.frombuffer(part[1], np.float64) for part in parts])
    curve = _curve(steps, values)
    assert curve is not None  # a column is made by its first value
    return curve


def _curve(steps: NDArray[np.int64], values: NDArray[np.float64]) -> Curve | None:
    """Steps in order, each once: of a step that was logged twice, as after a restart, the last value counts."""
    if not len(steps):
        return None
    order = np.argsort(steps, kind="stable")
    steps, values = steps[order], values[order]
    last = np.append(steps[1:] != steps[:-1], True)
    return Curve(steps[last], values[last])


def _empty() -> Trace:
    none = np.zeros((0, 0))
    return Trace(np.zeros(0, np.int64), none.astype(np.float32), none.astype(bool), none.astype(bool))


def _whole(log: Log) -> Log:
    """Let the global norm stand in as one unit."""
    if log.grad_norm is None:
        return log
    return replace(_with_units(log, {WHOLE: log.grad_norm}), per_unit=False)


def _with_units(log: Log, units: Mapping[str, Curve]) -> Log:
    """Put curves of norms side by side, by step."""
    steps = np.unique(np.concatenate([curve.steps for curve in units.values()]))
    cells, filled = len(steps) * len(units), sum(len(curve.steps) for curve in units.values())
    if cells > max(SPARSE_CELLS, 100 * filled):
        raise TrimtabError(
            f"{log.name} has {len(units):,} columns of norms over {len(steps):,} steps with {filled:,} values in all: "
            "that is no log of one run; name the columns of it with --columns PATTERN"
        )
    norms = np.full((len(steps), len(units)), np.nan, np.float32)
    seen = np.zeros(norms.shape, bool)
    for column, curve in enumerate(units.values()):
        rows = np.searchsorted(steps, curve.steps)
        with np.errstate(over="ignore"):
            norms[rows, column] = curve.values
        seen[rows, column] = True
    policy = Policy()
    limits = policy.resolve(len(units), len(steps))
    trace = Trace(
        steps=steps,
        norms=norms,
        seen=seen,
        high=np.zeros(norms.shape, bool),
        units=tuple(units),
        recoverable=np.ones(len(units), bool),
        policy=policy.to_dict(),
        max_high=limits.max_high,
        warmup_steps=limits.warmup_steps,
        total_steps=None,
    )
    nothing = {"steps": steps[:0], "norms": norms[:0], "seen": seen[:0], "high": seen[:0]}
    return replace(log, header=replace(trace, **nothing), rows=len(steps), blocks=lambda: [trace], per_unit=True)


def _torn(path: Path, count: int) -> str:
    return f"the last {count:,} bytes of {path.name} were torn, as after a crash, and are left out"
