# SPDX-License-Identifier: Apache-2.0
"""Writers: the two growing files of a run folder, each valid after every flush.

`MetricsWriter` appends JSON lines; it holds the controller's part of a step until the trainer's arrives.
`TraceWriter` appends Arrow record batches; rows wait in preallocated arrays, so that a step costs a few
copies, and one batch of 256 rows is built at a time.

Both files are opened unbuffered and written in whole pieces. When the disk is full the piece is taken back,
so a file never holds half of one unless the process died inside the write.
"""

import json
import logging
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from trimtab.checks import parse_json
from trimtab.control.messages import next_message, schema_of
from trimtab.errors import TrimtabError, missing_extra
from trimtab.files import disk_errors

FORMAT = 1
"""Version of the folder's schema; raised when an old reader would misread a new folder."""
METADATA_KEY = b"trimtab"
"""Key of the trace's JSON in the Arrow schema metadata."""
BATCH_ROWS = 256

logger = logging.getLogger(__name__)


class MetricsWriter:
    """Appends JSON lines, and holds the controller's part of a step until the trainer's arrives."""

    def __init__(self, path: Path, position: int) -> None:
        self._path, self.position = path, position
        self._file = path.open("ab", buffering=0)
        self._lines: list[bytes] = []
        self._pending: tuple[int, dict[str, Any]] | None = None

    def hold(self, step: int, values: dict[str, Any]) -> None:
        self.release()
        self._pending = (int(step), values)

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        if self._pending is not None and self._pending[0] == int(step):
            values = {**values, **self._pending[1]}
            self._pending = None
        self.release()
        self._line(step, values)

    def release(self) -> None:
        """Write the held part by itself."""
        if self._pending is not None:
            (step, values), self._pending = self._pending, None
            self._line(step, values)

    def _line(self, step: int, values: Mapping[str, Any]) -> None:
        line = {"step": int(step), **values}
        self._lines.append(json.dumps(plain(line), allow_nan=False, separators=(", ", ": ")).encode() + b"\n")

    def flush(self) -> None:
        with disk_errors(self._path):
            self.position = _append(self._file, b"".join(self._lines), self.position)
        self._lines.clear()

    def close(self) -> None:
        self.release()
        self.flush()
        self._file.close()


class TraceWriter:
    """Appends Arrow record batches; rows wait in preallocated arrays."""

    def __init__(self, path: Path, position: int) -> None:
        self.path = path
        self.position = position
        self._file = path.open("ab", buffering=0) if position else None
        self._schema: Any = None
        self._rows = 0
        self._columns: dict[str, np.ndarray] = {}

    @property
    def full(self) -> bool:
        return self._rows == BATCH_ROWS

    def open(self, header: dict[str, Any]) -> None:
        pa = _pyarrow()
        num_units = len(header["units"])
        further = list(header.get("columns", ()))
        wanted = pa.schema(
            [
                pa.field("step", pa.int64(), nullable=False),
                pa.field("norms", pa.list_(pa.float32(), num_units), nullable=False),
                pa.field("high", pa.list_(pa.bool_(), num_units), nullable=False),
                *(pa.field(name, pa.list_(pa.float32(), num_units), nullable=False) for name in further),
            ],
            metadata={METADATA_KEY: json.dumps(plain(header), allow_nan=False)},
        )
        if self.position:
            self._schema = _same_units(self.path, header)
            if not self._schema.equals(wanted):
                raise TrimtabError(f"{self.path} has columns of other types: restore it, or start a new folder")
        else:
            self._schema = wanted
            self._file = self.path.open("wb", buffering=0) if self._file is None else self._file
            self._send(self._schema.serialize())
        self._steps = np.empty(BATCH_ROWS, np.int64)
        self._norms = np.empty((BATCH_ROWS, num_units), np.float32)
        self._hidden = np.empty((BATCH_ROWS, num_units), np.bool_)
        self._high = np.empty((BATCH_ROWS, num_units), np.bool_)
        self._columns = {name: np.empty((BATCH_ROWS, num_units), np.float32) for name in further}

    def append(
        self,
        step: int,
        norms: np.ndarray,
        seen: np.ndarray,
        high: np.ndarray,
        columns: Mapping[str, np.ndarray] | None = None,
    ) -> None:
        if self._schema is None:
            raise TrimtabError("observe needs to know the units: call open_trace first")
        row = self._rows
        self._steps[row] = step
        self._norms[row] = norms
        np.logical_not(seen, out=self._hidden[row])
        self._high[row] = high
        if set(columns or ()) != set(self._columns):
            raise TrimtabError(
                f"a row must have the columns that the trace was opened with, {sorted(self._columns)}, got "
                f"{sorted(columns or ())}"
            )
        for name, kept in self._columns.items():
            kept[row] = columns[name]  # type: ignore[index]
        self._rows = row + 1

    def flush(self) -> None:
        if not self._rows:
            return
        pa, rows, num_units = _pyarrow(), self._rows, self._norms.shape[1]
        norms = pa.array(self._norms[:rows].ravel(), mask=self._hidden[:rows].ravel())
        high = pa.array(self._high[:rows].ravel())
        columns = [
            pa.array(self._steps[:rows]),
            pa.FixedSizeListArray.from_arrays(norms, num_units),
            pa.FixedSizeListArray.from_arrays(high, num_units),
        ]
        for kept in self._columns.values():
            columns.append(pa.FixedSizeListArray.from_arrays(pa.array(kept[:rows].ravel()), num_units))
        self._send(pa.record_batch(columns, schema=self._schema).serialize())
        self._rows = 0

    def _send(self, buffer: Any) -> None:
        assert self._file is not None
        with disk_errors(self.path):
            self.position = _append(self._file, buffer, self.position)

    def close(self) -> None:
        self.flush()
        if self._file is not None:
            self._file.close()


def plain(value: Any) -> Any:
    """A value as strict JSON: numpy and torch scalars unpacked, non-finite floats as None, the rest as text."""
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, np.ndarray):
        return plain(value.tolist())
    if hasattr(value, "item"):
        return plain(value.item())
    return str(value)


def _append(file: Any, data: Any, position: int) -> int:
    """Write every byte or, when the disk is full, none; returns the new end of the file."""
    view = memoryview(data)
    try:
        while len(view):
            view = view[file.write(view) :]  # an unbuffered file may take fewer bytes than it is given
    except OSError:
        os.ftruncate(file.fileno(), position)
        raise
    return position + len(data)


def _same_units(path: Path, header: dict[str, Any]) -> Any:
    """The schema of a trace that is continued, once its units are known to be the same."""
    pa = _pyarrow()
    try:
        with pa.OSFile(str(path)) as source:
            schema = schema_of(pa, next_message(pa, source))
        written = parse_json(schema.metadata[METADATA_KEY])
        old, new, keys = list(written["units"]), header["units"], ("policy", "max_high", "warmup_steps")
        kept = {key: written[key] for key in keys}
    except (EOFError, OSError, KeyError, TypeError, ValueError, pa.ArrowException) as error:
        raise TrimtabError(
            f"{path} is damaged and cannot be continued ({type(error).__name__}): restore it, or start a new folder"
        ) from None
    if old != new:
        at = next((i for i, (a, b) in enumerate(zip(old, new, strict=False)) if a != b), min(len(old), len(new)))
        was = repr(old[at]) if at < len(old) else "nothing"
        now = repr(new[at]) if at < len(new) else "nothing"
        raise TrimtabError(
            f"{path} was recorded with other units: unit {at} is {was} in the file and {now} now; "
            "resume with the same model and conversion, or start a new folder"
        )
    before, now = ({"columns": h.get("columns", []), "detector": h.get("detector")} for h in (written, header))
    if before != plain(now):
        raise TrimtabError(
            f"{path} was recorded with the columns {before['columns']} and the detector {before['detector']}, now "
            f"there are {now['columns']} and {now['detector']}: resume with the same detector and sensors, or start a "
            "new folder"
        )
    changed = [key for key in keys if kept[key] != plain(header[key])]
    if changed:
        logger.warning("%s keeps the %s of its first start; a replay of it will use those", path, " and ".join(changed))
    return schema


def _pyarrow() -> Any:
    try:
        import pyarrow as pa
        import pyarrow.ipc
    except ImportError:
        raise missing_extra("pyarrow", "record", "Recording a trace") from None
    return pa
