# SPDX-License-Identifier: Apache-2.0
"""Read a run folder back: what was configured, what was logged, what was measured.

The folder may come from a run that is still going, was killed, or ran out of disk, so its last bytes may be
half a line or half a batch. That tail is dropped and counted (`Trace.dropped_bytes`): everything before it
is whole. Anything else that is wrong is not a torn tail but another file, and raises in one line.

    read_run(folder)      Run: run.json, metrics, trace
    read_trace(path)      Trace: the whole matrix in memory
    iter_trace(path)      the same in blocks of rows, so that memory stays bounded
    iter_batches(path)    batch by batch as they were written, from a byte on: for a run that still goes on
    scan_trace(path)      how many rows, and whether anything ever ran high

A `Trace` holds `norms` with NaN where a unit had no gradient; `seen` tells that apart from a norm that
really was NaN. `high` is the set executed in that step, `columns` what other sensors measured, NaN where they did
not. A step may occur twice: a pass that was run again.
No torch here, and pyarrow only when a trace is read.
"""

import math
from array import array
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from trimtab.checks import parse_json
from trimtab.control.decide import Quota
from trimtab.control.messages import CONTINUATION, is_compressed, next_message, schema_of
from trimtab.control.record import METRICS, RUN, TRACE
from trimtab.control.writers import FORMAT, METADATA_KEY
from trimtab.errors import TrimtabError, missing_extra

CELLS = 1 << 20


@dataclass(frozen=True, eq=False)
class Trace:
    """Norms and executed sets of T passes over U units, with what the controller was told."""

    steps: NDArray[np.int64]  # (T,)
    norms: NDArray[np.float32]  # (T, U) NaN where the unit had no gradient
    seen: NDArray[np.bool_]  # (T, U)
    high: NDArray[np.bool_]  # (T, U) executed high in this step
    units: tuple[str, ...] = ()
    recoverable: NDArray[np.bool_] = field(default_factory=lambda: np.zeros(0, bool))  # (U,)
    policy: Mapping[str, Any] = field(default_factory=dict)
    max_high: int = 0
    warmup_steps: int = 0
    total_steps: int | None = None
    columns: Mapping[str, NDArray[np.float32]] = field(default_factory=dict)  # each (T, U)
    """What was measured besides the norms, by name."""
    detector: Mapping[str, Any] = field(default_factory=lambda: {"name": "gnmr"})
    """What the run was judged by: `trimtab.control.detectors.detector_of` builds it."""
    quotas: tuple[Quota, ...] = ()
    """Budgets of parts of the units (pipeline stages), in place of one for all."""
    dropped_bytes: int = 0
    """Length of the torn tail, 0 for a trace that ends where a batch ends."""

    def __len__(self) -> int:
        return len(self.steps)


@dataclass(frozen=True, eq=False)
class Run:
    """One run folder in memory."""

    folder: Path
    info: Mapping[str, Any]
    """run.json as it stands; empty where the folder has none."""
    metrics: tuple[dict[str, Any], ...]
    """The lines of metrics.jsonl in order; a step may have several, each with its own keys."""
    trace: Trace | None
    dropped_bytes: int = 0
    """Length of a torn last line of metrics.jsonl."""

    @property
    def config(self) -> Mapping[str, Any]:
        """What the caller configured."""
        config = self.info.get("config")
        return config if isinstance(config, Mapping) else {}

    @property
    def name(self) -> str:
        """What to call the run: its configured name, else its folder's."""
        return str(self.config.get("name") or self.folder.resolve().name)

    def column(self, key: str) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Steps and values of one metric, NaN where a line says null; lines without the key are left out."""
        rows = [(line["step"], line[key]) for line in self.metrics if key in line]
        steps = np.array([step for step, _ in rows], np.int64)
        return steps, np.array([number_of(value) for _, value in rows], np.float64)


class Scan(NamedTuple):
    """What one cheap pass over a trace tells."""

    header: Trace
    """A trace of no rows: units, policy and limits."""
    rows: int
    first_step: int
    last_step: int
    acted: bool
    """Whether any unit ever ran high."""


def read_run(folder: str | Path, *, with_trace: bool = True) -> Run:
    """Read a run folder; with `with_trace=False` the trace stays on disk, for `iter_trace`."""
    folder = Path(folder)
    if not any((folder / name).is_file() for name in (RUN, METRICS, TRACE)):
        raise TrimtabError(f"{folder} is not a run folder: it has none of {RUN}, {METRICS} and {TRACE}")
    metrics, dropped = _read_metrics(folder / METRICS)
    trace = read_trace(folder / TRACE) if with_trace and (folder / TRACE).is_file() else None
    return Run(folder, _read_info(folder / RUN), metrics, trace, dropped)


def read_trace(path: str | Path) -> Trace:
    """Read a whole trace."""
    blocks = list(_batches(Path(path)))
    rows = [block for block in blocks if len(block)]
    if not rows:
        return blocks[-1]
    return replace(_join(rows), dropped_bytes=blocks[-1].dropped_bytes)


def iter_trace(path: str | Path, rows: int | None = None) -> Iterator[Trace]:
    """Read a trace in blocks of `rows` rows (the last may be shorter); an empty trace gives no block.

    Without a number a block has 4,096 rows, or so many fewer that it holds a million norms.
    """
    held: list[Trace] = []
    count = 0
    for batch in _batches(Path(path)):
        rows = rows or max(min(4096, CELLS // max(len(batch.units), 1)), 1)
        while count + len(batch) >= rows:
            cut = rows - count
            yield _join([*held, _slice(batch, 0, cut)])
            held, count, batch = [], 0, _slice(batch, cut, len(batch))
        if len(batch):
            held.append(batch)
            count += len(batch)
    if held:
        yield _join(held)


def scan_trace(path: str | Path) -> Scan:
    """Count the rows of a trace and see whether anything ever ran high."""
    rows, first, last, acted = 0, 0, 0, False
    header = None
    for header in _batches(Path(path)):
        if len(header):
            first = int(header.steps[0]) if rows == 0 else first
            last = int(header.steps[-1])
            rows += len(header)
            acted = acted or bool(header.high.any())
    assert header is not None  # the last block of _batches is the tail's, and always there
    return Scan(header, rows, first, last, acted)


def _join(blocks: list[Trace]) -> Trace:
    if len(blocks) == 1:
        return blocks[0]
    rows = {name: np.concatenate([getattr(b, name) for b in blocks]) for name in ("steps", "norms", "seen", "high")}
    columns = {name: np.concatenate([b.columns[name] for b in blocks]) for name in blocks[0].columns}
    return replace(blocks[0], **rows, columns=columns)


def _slice(trace: Trace, start: int, stop: int) -> Trace:
    rows = {name: getattr(trace, name)[start:stop] for name in ("steps", "norms", "seen", "high")}
    return replace(trace, **rows, columns={name: column[start:stop] for name, column in trace.columns.items()})


def iter_batches(path: str | Path, offset: int = 0) -> Iterator[tuple[Trace, int]]:
    """The header of a trace as a block of no rows, then its whole batches, each with the byte at which it ends.

    A reader of a file that still grows comes back with the last byte it was given as `offset`. A file that is torn
    inside its first message gives nothing.
    """
    pa, path = _pyarrow(), Path(path)
    if not path.is_file():
        raise TrimtabError(f"there is no trace at {path}: record one with Controller(..., recorder=...)")
    with pa.OSFile(str(path)) as source:
        head = source.read(4)
        source.seek(0)
        if head != CONTINUATION[: len(head)]:
            raise TrimtabError(f"{path} is not a trimtab trace: it is not an Arrow IPC stream")
        schema = _next_schema(pa, source, path)
        if schema is None:
            return
        header = _header(pa, schema, path)
        source.seek(max(offset, source.tell()))
        yield header, source.tell()
        while (batch := _next_batch(pa, source, schema, path)) is not None:
            try:
                block = _columns(batch, header)
            except ValueError:
                raise TrimtabError(f"{path} is damaged before byte {source.tell():,}: restore it") from None
            yield block, source.tell()


def _batches(path: Path) -> Iterator[Trace]:
    """The batches of a trace file, then an empty one that carries the length of the torn tail."""
    size = path.stat().st_size if path.is_file() else 0
    header, good = _empty(0), 0  # if it is torn inside the first message, nothing is known yet
    for number, (block, end) in enumerate(iter_batches(path)):
        good = end
        if number:
            yield block
        else:
            header = block
    yield replace(header, dropped_bytes=max(size - good, 0))


def _next_schema(pa: Any, source: Any, path: Path) -> Any:
    """Read the schema message; None if the file ends inside it."""
    try:
        message = next_message(pa, source)
    except (EOFError, OSError, pa.ArrowException):
        return None
    try:
        return schema_of(pa, message)
    except (OSError, pa.ArrowException):
        raise TrimtabError(f"{path} is not a trimtab trace: its first message is not an Arrow schema") from None


def _next_batch(pa: Any, source: Any, schema: Any, path: Path) -> Any:
    """Read the next batch; None at the end of the file or where it is torn."""
    try:
        message = next_message(pa, source)
        if message.type != "record batch":
            return None
        if is_compressed(message):
            raise TrimtabError(
                f"{path} has compressed batches, which may unpack to any size and are not written by trimtab: write it "
                "anew without compression"
            )
        batch = pa.ipc.read_record_batch(message, schema)
        batch.validate()
    except (EOFError, OSError, pa.ArrowException):
        return None
    return batch


def _empty(num_units: int) -> Trace:
    shape = (0, num_units)
    return Trace(np.zeros(0, np.int64), np.zeros(shape, np.float32), np.zeros(shape, bool), np.zeros(shape, bool))


def _header(pa: Any, schema: Any, path: Path) -> Trace:
    """What the schema says of the trace, checked, as a trace of no rows."""
    try:
        told = parse_json((schema.metadata or {})[METADATA_KEY])
        units = tuple(str(name) for name in told["units"])
        newer, names = told["format"] > FORMAT, schema.names  # the latter decodes them
        header = replace(
            _empty(len(units)),
            units=units,
            recoverable=np.array([bool(one) for one in told["recoverable"]], bool),
            policy=dict(told["policy"]),
            max_high=_count(told["max_high"]),
            warmup_steps=_count(told["warmup_steps"]),
            total_steps=None if told["total_steps"] is None else _count(told["total_steps"]),
            columns={str(name): np.zeros((0, len(units)), np.float32) for name in told.get("columns", ())},
            detector={"name": "gnmr"} | dict(told.get("detector", {})),
            quotas=tuple(_quota(part, most, len(units)) for part, most in told.get("quotas", ())),
        )
    except (KeyError, TypeError, ValueError, OverflowError, AttributeError):
        raise TrimtabError(f"{path} is not a trimtab trace: its schema does not carry our metadata") from None
    if newer:
        raise TrimtabError(f"{path} has format {told['format']}, this trimtab reads up to {FORMAT}: upgrade trimtab")
    wanted = {"step": pa.int64(), "norms": pa.list_(pa.float32(), len(units)), "high": pa.list_(pa.bool_(), len(units))}
    wanted |= {name: pa.list_(pa.float32(), len(units)) for name in header.columns}
    for name, kind in wanted.items():
        found = schema.field(name).type if names.count(name) == 1 else "absent"
        if found != kind:
            raise TrimtabError(f"{path} is not a trimtab trace: column {name!r} must be {kind}, found {found}")
    if len(header.recoverable) != len(units):
        raise TrimtabError(f"{path} is not a trimtab trace: {len(units)} units, {len(header.recoverable)} recoverable")
    return header


def _count(value: Any) -> int:
    """A number of units or steps."""
    if not is_step(value) or value < 0:
        raise ValueError(value)
    return value


def _quota(part: Any, most: Any, num_units: int) -> Quota:
    units = tuple(_count(unit) for unit in part)
    if any(unit >= num_units for unit in units):
        raise ValueError(units)
    return Quota(units, _count(most))


def _columns(batch: Any, header: Trace) -> Trace:
    """One Arrow batch as numpy; ValueError where only norms may be null, and something else is."""
    shape = (batch.num_rows, len(header.units))
    lists = [batch.column(name) for name in ("norms", "high", *header.columns)]
    nulls = [batch.column("step"), *lists, batch.column("high").flatten()]
    if any(column.null_count for column in nulls):
        raise ValueError("nulls")
    norms = batch.column("norms").flatten()
    seen = norms.is_valid().to_numpy(zero_copy_only=False).reshape(shape)
    values = norms.to_numpy(zero_copy_only=False).reshape(shape)  # a null becomes NaN
    high = batch.column("high").flatten().to_numpy(zero_copy_only=False).reshape(shape)
    columns = {
        name: batch.column(name).flatten().to_numpy(zero_copy_only=False).reshape(shape) for name in header.columns
    }
    if (values < 0).any():
        raise ValueError("negative norms")
    return replace(header, steps=batch.column("step").to_numpy(), norms=values, seen=seen, high=high, columns=columns)


def _read_info(path: Path) -> Mapping[str, Any]:
    if not path.is_file():
        return {}
    try:
        info = parse_json(path.read_text(encoding="utf-8"))
    except ValueError:
        info = None
    if not isinstance(info, dict):
        raise TrimtabError(f"{path} must be one JSON object, and it is not: restore it, or remove it to read the rest")
    return info


def read_columns(
    folder: str | Path, *keys: str
) -> tuple[Run, dict[str, tuple[NDArray[np.int64], NDArray[np.float64]]]]:
    """A run without its metrics and its trace, and what `Run.column` gives for some keys: a few bytes per line."""
    folder = Path(folder)
    run = Run(folder, _read_info(folder / RUN), (), None)
    found = {key: (array("q"), array("d")) for key in keys}
    torn: list[int] = []
    for line in _lines(folder / METRICS, torn):
        for key, (steps, values) in found.items():
            if key in line:
                steps.append(line["step"])
                values.append(number_of(line[key]))
    columns = {key: (np.array(steps, np.int64), np.array(values, np.float64)) for key, (steps, values) in found.items()}
    return replace(run, dropped_bytes=sum(torn)), columns


def _read_metrics(path: Path) -> tuple[tuple[dict[str, Any], ...], int]:
    """The lines of metrics.jsonl, and the length of a torn last one."""
    torn: list[int] = []
    return tuple(_lines(path, torn)), sum(torn)


def _lines(path: Path, torn: list[int]) -> Iterator[dict[str, Any]]:
    """The lines of metrics.jsonl one by one; the length of a torn last one is put into `torn`."""
    if not path.is_file():
        return
    with path.open("rb") as file:
        for number, raw in enumerate(file, 1):
            try:
                line = parse_json(raw)
            except ValueError:
                if not raw.endswith(b"\n"):
                    torn.append(len(raw))
                    return
                line = None
            if not (isinstance(line, dict) and is_step(line.get("step"))):
                raise TrimtabError(f"{path}, line {number}: must be a JSON object with a step, got {raw[:60]!r}")
            yield line


def is_step(value: Any) -> bool:
    """Whether a value of a file is the number of a step."""
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < 1 << 62


def number_of(value: Any) -> float:
    """A value of a file as a number; NaN for what is none."""
    try:
        return float(value) if isinstance(value, int | float) else math.nan
    except OverflowError:  # a whole number of hundreds of digits
        return math.nan


def _pyarrow() -> Any:
    try:
        import pyarrow as pa
        import pyarrow.ipc
    except ImportError:
        raise missing_extra("pyarrow", "report", "Reading a trace") from None
    return pa
