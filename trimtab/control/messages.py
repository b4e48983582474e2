# SPDX-License-Identifier: Apache-2.0
"""Messages of an Arrow stream, looked at before they are read: a damaged length must not become an allocation.

    ff ff ff ff | length of the metadata, int32 | metadata, a flatbuffer | body

Arrow allocates what a message says that it has, and finds out later that the file is shorter. Here both lengths are
held against the rest of the file first; what does not fit is a torn end. Of the flatbuffer only two fields of its first
table are looked at: 2, the message proper, and 3, the length of the body. Arrow checks all of it afterwards.
"""

import struct
from typing import Any

CONTINUATION = b"\xff\xff\xff\xff"
"""What every message starts with."""


def next_message(pa: Any, source: Any) -> Any:
    """The next message of a file; EOFError where there is no whole one, and the place is then the same as before."""
    start = source.tell()
    left = source.size() - start - 8
    prefix = source.read(8)
    try:
        length = struct.unpack("<i", prefix[4:])[0] if prefix[:4] == CONTINUATION else 0
        if not 0 < length <= left:
            raise EOFError
        metadata = source.read(length)
        body = field(metadata, below(metadata, 0), 3)
        if body and not 0 <= struct.unpack_from("<q", metadata, body)[0] <= left - length:
            raise EOFError
    except struct.error:
        raise EOFError from None
    finally:
        source.seek(start)
    return pa.ipc.read_message(source)


def schema_of(pa: Any, message: Any) -> Any:
    """The schema in a message; ArrowInvalid where it is another one, at which Arrow's own reader ends the process."""
    if message.type != "schema":
        raise pa.ArrowInvalid(f"a message of the kind {message.type!r} is no schema")
    return pa.ipc.read_schema(message)


def is_compressed(message: Any) -> bool:
    """Whether a batch that Arrow has checked names a compression: its field 3 says it."""
    metadata = message.metadata.to_pybytes()
    batch = below(metadata, field(metadata, below(metadata, 0), 2))
    return bool(field(metadata, batch, 3))


def field(metadata: bytes, table: int, number: int) -> int:
    """Where a field of a flatbuffer's table lies; 0 if it is absent."""
    fields = table - struct.unpack_from("<i", metadata, table)[0]
    if 6 + 2 * number > struct.unpack_from("<H", metadata, fields)[0]:
        return 0
    offset = struct.unpack_from("<H", metadata, fields + 4 + 2 * number)[0]
    return table + offset if offset else 0


def below(metadata: bytes, place: int) -> int:
    """Where the table lies that a place points to."""
    return place + struct.unpack_from("<I", metadata, place)[0]
