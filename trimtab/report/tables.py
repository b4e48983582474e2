# SPDX-License-Identifier: Apache-2.0
"""Tables: curves out of other people's files, whatever their shape, and nothing else.

    event files     *tfevents*: TensorBoard's records (length, checksum, message); its message classes are used, and
                    TensorFlow is not. Of a histogram the L2 norm is taken, the root of its sum of squares
    CSV, TSV        one row per step; a chart of W&B, its whole history, Lightning's metrics.csv
    JSONL           one object per line, nested ones by `/`
    JSON            a list of objects, or one with a `log_history` (trainer_state.json of Transformers)
    Parquet         one row per step

An empty cell, a missing key and a null are "not logged in this step"; NaN and Infinity are values. A torn end (half a
record, half a line) is left out and counted. Only columns that are asked for are kept.
"""

import codecs
import csv
import io
import math
import struct
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trimtab.checks import parse_json
from trimtab.errors import TrimtabError, missing_extra
from trimtab.report.names import STEPS

Wanted = Callable[[str], bool]
LONGEST = 1 << 30
"""No record of an event file is as long: its length is damaged."""
FARTHEST = 2.0**53
"""Steps are below: from there on a float holds no odd number."""
MOST_CELLS = 100_000_000
DEEPEST = 32


@dataclass
class Curves:
    """Columns as they are found: steps and values of each, in the order of the file."""

    found: dict[str, tuple[array, array]] = field(default_factory=dict)
    names: dict[str, None] = field(default_factory=dict)
    """Every column of the file, kept or not."""
    torn: int = 0
    """Bytes (of event files) or rows (of tables) that could not be read at the end."""
    without_step: int = 0

    def add(self, name: str, step: int, value: float) -> None:
        """Take one value."""
        steps, values = self.found.setdefault(name, (array("q"), array("d")))
        steps.append(step)
        values.append(value)

    def extend(self, name: str, steps: NDArray[np.int64], values: NDArray[np.float64]) -> None:
        """Take many values."""
        if len(steps):
            known = self.found.setdefault(name, (array("q"), array("d")))
            known[0].frombytes(steps.tobytes())
            known[1].frombytes(values.tobytes())


def read_curves(path: Path, wanted: Wanted, is_step: Wanted) -> Curves:
    """Read the wanted columns of a file, by its kind."""
    curves, kind = Curves(), kind_of(path)
    if kind == "events":
        _events(path, wanted, curves)
    elif kind == "parquet":
        _parquet(path, wanted, is_step, curves)
    elif kind == "csv":
        _csv(path, wanted, is_step, curves)
    else:
        _rows(path, _json_rows(path, curves, kind), wanted, is_step, curves)
    return curves


def kind_of(path: Path) -> str:
    """What kind of file it is, by its name, else by how it begins."""
    name = path.name.lower()
    if "tfevents" in name:
        return "events"
    for ends, kind in (
        ((".csv", ".tsv", ".csv.gz"), "csv"),
        ((".jsonl", ".ndjson"), "jsonl"),
        ((".json",), "json"),
        ((".parquet", ".pq"), "parquet"),
        ((".arrow",), "trace"),
    ):
        if name.endswith(ends):
            return kind
    with path.open("rb") as file:
        start = file.read(4)
    if start == b"PAR1":
        return "parquet"
    if start == b"\xff\xff\xff\xff":
        return "trace"
    if start[:1] in (b"{", b"["):
        return "jsonl" if start[:1] == b"{" else "json"
    raise TrimtabError(
        f"{path} is of no kind that is read here: give a run folder, a trace.arrow, TensorBoard event files, or a "
        ".csv, .jsonl, .json or .parquet"
    )


def _events(path: Path, wanted: Wanted, curves: Curves) -> None:
    try:
        from tensorboard.compat.proto import event_pb2
    except ImportError:
        raise missing_extra("tensorboard", "tensorboard", "Reading event files") from None
    from google.protobuf.message import DecodeError

    parse: Callable[[bytes], Any] = event_pb2.Event.FromString  # pyright: ignore[reportAttributeAccessIssue]
    for place, record in _records(path, curves):
        try:
            event = parse(record)
        except DecodeError:
            raise TrimtabError(
                f"{path} is not an event file of TensorBoard, or is damaged at byte {place:,}: give another"
            ) from None
        for value in event.summary.value:
            if (number := _scalar(value)) is not None:
                curves.names.setdefault(value.tag)
                if wanted(value.tag):
                    curves.add(value.tag, event.step, number)


def _records(path: Path, curves: Curves) -> Iterator[tuple[int, bytes]]:
    """The records of an event file; one that is cut off at the end is left out and counted."""
    size, place = path.stat().st_size, 0
    with path.open("rb") as file:
        while head := file.read(12):
            length = struct.unpack("<Q", head[:8])[0] if len(head) == 12 else 0
            if place == 0 and length > max(size, LONGEST):
                raise TrimtabError(f"{path} is not an event file of TensorBoard: its first record has no length")
            record = file.read(min(length, size)) if len(head) == 12 else b""
            if len(head) < 12 or len(record) < length or len(file.read(4)) < 4:
                curves.torn += size - place
                return
            yield place, record
            place += 16 + length


def _scalar(value: Any) -> float | None:
    """The number in one entry of a summary, or the L2 norm of a histogram; None for pictures, texts and the like."""
    kind = value.WhichOneof("value")
    if kind == "simple_value":
        return float(value.simple_value)
    if kind == "histo":
        return math.sqrt(value.histo.sum_squares) if value.histo.sum_squares >= 0 else math.nan
    if kind == "tensor" and value.metadata.plugin_data.plugin_name in ("scalars", ""):
        tensor = value.tensor
        for numbers in (tensor.float_val, tensor.double_val):
            if len(numbers) == 1:
                return float(numbers[0])
        form = {1: "<f", 2: "<d"}.get(tensor.dtype)
        if form and len(tensor.tensor_content) == struct.calcsize(form):
            return float(struct.unpack(form, tensor.tensor_content)[0])
    return None


def _csv(path: Path, wanted: Wanted, is_step: Wanted, curves: Curves) -> None:
    pa = _pyarrow(path)
    from pyarrow import csv as pa_csv

    header, delimiter = _header(path, pa)

    def skip(row: Any) -> str:
        curves.torn += 1
        return "skip"

    handler = skip if _is_utf8(path, pa) else None  # Arrow's handler is given text, and none of other bytes
    kept = [name for name in dict.fromkeys(header) if wanted(name) or is_step(name)]
    curves.names |= dict.fromkeys(header)
    try:
        table = pa_csv.read_csv(
            path,
            read_options=pa_csv.ReadOptions(use_threads=False),
            parse_options=pa_csv.ParseOptions(
                delimiter=delimiter, invalid_row_handler=handler, newlines_in_values=True
            ),
            convert_options=pa_csv.ConvertOptions(
                include_columns=kept or header[:1],
                column_types=dict.fromkeys(kept, pa.string()),
                null_values=[""],
                strings_can_be_null=True,
                quoted_strings_can_be_null=True,
            ),
        )
    except (pa.ArrowException, OSError, ValueError) as error:
        raise TrimtabError(f"{path} is not a CSV file with one header line: {_line(error)}") from None
    _table(path, pa, table, wanted, is_step, curves)


def _is_utf8(path: Path, pa: Any) -> bool:
    """Look over a CSV file once: whether it is UTF-8. One that unpacks to far more than it looks like is refused."""
    decoder, size = codecs.getincrementaldecoder("utf-8")(), 0
    try:
        with pa.input_stream(str(path), compression="detect") as stream:
            while data := stream.read(1 << 20):
                size += len(data)
                if size > max(MOST_CELLS * 8, path.stat().st_size):
                    raise TrimtabError(f"{path} unpacks to more than {size:,} bytes: unpack it, and give fewer rows")
                decoder.decode(data)
            decoder.decode(b"", final=True)
    except UnicodeDecodeError:
        return False
    except (pa.ArrowException, OSError) as error:
        raise TrimtabError(f"{path} is not a CSV file: {_line(error)}") from None
    return True


def _header(path: Path, pa: Any) -> tuple[list[str], str]:
    """The names in the first line, and what stands between them."""
    with pa.input_stream(str(path), compression="detect") as stream:
        start = stream.read(1 << 20)
    if not start.strip():
        raise TrimtabError(f"{path} is empty: give a file with a header line and one row per step")
    first = start.decode("utf-8-sig", errors="replace").splitlines()[0]
    delimiter = max(",;\t", key=first.count)
    try:
        names = next(csv.reader(io.StringIO(first), delimiter=delimiter), [])
    except csv.Error as error:
        raise TrimtabError(f"{path} is not a CSV file with one header line: {error}") from None
    if not names:
        raise TrimtabError(f"{path} begins with an empty line: give a file with a header line and one row per step")
    return names, delimiter


def _parquet(path: Path, wanted: Wanted, is_step: Wanted, curves: Curves) -> None:
    pa = _pyarrow(path)
    from pyarrow import parquet

    try:
        file = parquet.ParquetFile(path)
        curves.names |= dict.fromkeys(file.schema_arrow.names)
        kept = [name for name in file.schema_arrow.names if wanted(name) or is_step(name)]
        _check_size(path, file.metadata.num_rows, max(len(kept), 1))
        table = file.read(columns=kept)
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:  # a damaged one is any of these
        raise TrimtabError(f"{path} is not a Parquet file: {_line(error)}") from None
    _table(path, pa, table, wanted, is_step, curves)


def _check_size(path: Path, rows: int, columns: int) -> None:
    """Refuse what would fill the memory: a few kilobytes may unpack to anything."""
    if rows * columns > MOST_CELLS:
        raise TrimtabError(
            f"{path} has {rows:,} rows of {columns:,} columns, and at most {MOST_CELLS:,} values are read: write fewer "
            "rows, such as every tenth"
        )


def _line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)[:300]


def _table(path: Path, pa: Any, table: Any, wanted: Wanted, is_step: Wanted, curves: Curves) -> None:
    """Columns of an Arrow table, each without its empty cells."""
    step = _step_column(path, [name for name in table.column_names if is_step(name)], curves)
    places: dict[str, int] = {}
    for place, name in enumerate(table.column_names):
        places.setdefault(name, place)  # of a name that is there twice the first counts
    at, there = _numbers(pa, table.column(places[step]))
    there = there & (np.abs(at) < FARTHEST)
    curves.without_step += int((~there).sum())
    for name, place in places.items():
        if wanted(name):
            values, filled = _numbers(pa, table.column(place))
            rows = filled & there
            curves.extend(name, at[rows].astype(np.int64), values[rows])


def _numbers(pa: Any, column: Any) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """A column as numbers, and where there is one: an empty cell, a text or a dict is none."""
    try:
        column = column.cast(pa.float64())
        return column.to_numpy(), column.is_valid().to_numpy()
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
        is_text = pa.types.is_string(column.type) or pa.types.is_large_string(column.type)
        cells = column.cast(pa.large_binary()) if is_text else column  # not all text is UTF-8
        values = [_number(value) for value in cells.to_pylist()]
        filled = np.array([value is not None for value in values], bool)
        return np.array([math.nan if value is None else value for value in values], np.float64), filled


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or value is None:
        return None
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):  # the last is of whole numbers of hundreds of digits
        return None


def _json_rows(path: Path, curves: Curves, kind: str) -> Iterator[Mapping[str, Any]]:
    if kind == "json":
        try:
            told = parse_json(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise TrimtabError(f"{path} is not JSON: {error}") from None
        rows = told.get("log_history") if isinstance(told, dict) else told
        if not isinstance(rows, list):
            raise TrimtabError(f"{path} must be a list of objects, or have one under log_history: it has neither")
        yield from (row for row in rows if isinstance(row, dict))
        return
    with path.open("rb") as file:
        for number, raw in enumerate(file, 1):
            try:
                row = parse_json(raw) if raw.strip() else {}
            except ValueError:
                if raw.endswith(b"\n"):
                    raise TrimtabError(f"{path}, line {number}: must be a JSON object, got {raw[:60]!r}") from None
                curves.torn += 1
                return
            if isinstance(row, dict):
                yield row


def _rows(path: Path, rows: Iterable[Mapping[str, Any]], wanted: Wanted, is_step: Wanted, curves: Curves) -> None:
    """Rows of objects; each says its own step."""
    count = 0
    for row in rows:
        flat = dict(_flat("", row))
        count += bool(flat)
        curves.names |= dict.fromkeys(flat)
        named = [name for name in flat if is_step(name)]
        at = _number(flat[_step_column(path, named, curves)]) if named else None
        if at is None or not abs(at) < FARTHEST:
            curves.without_step += bool(flat)
            continue
        ours = "num_high" in flat  # our own metrics.jsonl says null where a value was not finite
        for name, value in flat.items():
            number = math.nan if value is None and ours else _number(value)
            if number is not None and wanted(name):
                curves.add(name, int(at), number)
    if count and curves.without_step == count:
        _step_column(path, [], curves)


def _flat(prefix: str, row: Mapping[str, Any], depth: int = 0) -> Iterator[tuple[str, Any]]:
    """The values of an object by their paths; what lies more than `DEEPEST` objects down is no curve."""
    for key, value in row.items():
        if isinstance(value, Mapping):
            yield from _flat(f"{prefix}{key}/", value, depth + 1) if depth < DEEPEST else ()
        elif not isinstance(value, list):
            yield f"{prefix}{key}", value


def _step_column(path: Path, found: list[str], curves: Curves) -> str:
    """The column of steps: of several the one that counts optimizer steps."""
    if found:
        return min(found, key=lambda name: STEPS.index(name.lower()) if name.lower() in STEPS else -1)
    names = list(curves.names)
    shown = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
    raise TrimtabError(
        f"{path} has no column of steps (looked for {', '.join(STEPS)}; it has {shown or 'none'}): "
        "name it with --step COLUMN"
    )


def _pyarrow(path: Path) -> Any:
    try:
        import pyarrow as pa
    except ImportError:
        raise missing_extra("pyarrow", "report", f"Reading {path.name}") from None
    return pa
