# SPDX-License-Identifier: Apache-2.0
"""Ways to damage a file, with and without knowing what is in it.

    any bytes    flipped, cut, removed, doubled, inserted; numbers of 4 and 8 bytes overwritten by extreme ones; noise
    structure    the file is taken apart (JSON, TOML, YAML, CSV, Arrow, Parquet, events, safetensors, torch, GGUF), a
                 value somewhere in it becomes another type, a huge, negative or missing one, or a deep nest, and the
                 file is put together again, so that checksums and lengths are right and the reader gets past them

Every damage is a function of the bytes and a random generator, so a case is found again by its seed.
"""

import copy
import csv
import io
import json
import random
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

Damage = Callable[[bytes, random.Random], bytes]

NUMBERS: tuple[Any, ...] = (
    *(0, 1, -1, 2, 255, 2**31 - 1, 2**31, 2**32, 2**53, 2**63 - 1, 2**63, -(2**63) - 1, 2**64, 10**12, 10**400),
    *(0.0, -0.0, 0.5, 1e-320, 1e18, 1e300, -1e300, float("nan"), float("inf"), float("-inf"), -(10**400)),
)
TEXTS = (
    *("", " ", "none", "true", "1e999", "nan", "self", "name", "\x00", "\x1b[2J", "\u202eabc", "\ud800", "\U0001f600"),
    *("a\nb", "a" * 70_000, "</script><img src=x>", "../../etc/passwd", "%s%n{0}", "-1", "1_0", "\u0661", "=", "*"),
    *("step", "loss", "__class__", "[" * 5000),
)


def odd_value(rng: random.Random) -> Any:
    """Some value of JSON."""
    kind = rng.randrange(7)
    if kind < 2:
        return rng.choice(NUMBERS)
    if kind < 4:
        return rng.choice(TEXTS)
    if kind == 4:
        return rng.choice((None, True, False, [], {}, [[]], [None], {"": None}))
    if kind == 5:
        return [odd_value(rng) for _ in range(rng.randrange(4))]
    return {rng.choice(TEXTS): odd_value(rng) for _ in range(rng.randrange(3))}


def nest(depth: int, text: str = "[") -> str:
    """Text of many brackets that all close."""
    return text * depth + "".join({"[": "]", "{": "}"}.get(char, "") for char in reversed(text)) * depth


def damage_value(value: Any, rng: random.Random) -> Any:
    """The same tree of dicts and lists with one place changed."""
    value = copy.deepcopy(value)
    places: list[tuple[Any, Any]] = []
    todo: list[Any] = [value]
    while todo:
        one = todo.pop()
        keys = list(one) if isinstance(one, dict) else list(range(len(one)))
        places += [(one, key) for key in keys]
        todo += [one[key] for key in keys if isinstance(one[key], dict | list)]
    if not places or rng.random() < 0.02:
        return odd_value(rng)
    holder, key = rng.choice(places)
    kind = rng.randrange(8)
    if kind == 0:
        del holder[key]
    elif kind == 1 and isinstance(holder, dict):
        holder[rng.choice(TEXTS)] = holder.pop(key)
    elif kind == 1:
        holder.extend([holder[key]] * rng.choice((1, 1000)))
    elif kind == 2:
        holder[key] = [holder[key]]
    elif kind == 3:
        holder[key] = str(holder[key])
    elif kind == 4:
        other, place = rng.choice(places)
        holder[key] = (
            copy.deepcopy(other[place]) if place in (other if isinstance(other, dict) else range(len(other))) else 0
        )
    else:
        holder[key] = odd_value(rng)
    return value


# Damage to bytes.


def damage_bytes(data: bytes, rng: random.Random) -> bytes:
    """One to four changes that know nothing of what the bytes mean."""
    raw = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        size, kind = len(raw), rng.randrange(9)
        at = rng.randrange(min(size, rng.choice((64, 1024, max(size, 1))))) if size else 0
        length = rng.choice((1, 2, 4, 8, 100, 5000))
        if kind == 0 and size:
            raw[at] ^= 1 << rng.randrange(8)
        elif kind == 1 and size:
            raw[at] = rng.randrange(256)
        elif kind == 2:
            del raw[rng.randrange(size + 1) :]
        elif kind == 3:
            del raw[at : at + length]
        elif kind == 4:
            raw[at:at] = raw[at : at + length]
        elif kind == 5:
            raw[at:at] = rng.randbytes(length) if rng.random() < 0.5 else bytes(length)
        elif kind == 6:
            form = rng.choice(["<i", "<q", ">i", ">q"])
            most = 2 ** (8 * struct.calcsize(form) - 1) - 1
            number = rng.choice((0, -1, 1, most, -most, min(10**12, most), min(1 << 30, most), size, 2 * size))
            raw[at : at + struct.calcsize(form)] = struct.pack(form, number)
        elif kind == 7:
            raw[at : at + length] = bytes([rng.choice((0, 255, 32, 10, 13, 34, 91, 123, 44))]) * length
        elif kind == 8 and rng.random() < 0.2:
            raw = bytearray(
                rng.choice((b"", b"\n", b"{}", b"[]", b"null", b"\xff" * 64, rng.randbytes(rng.choice((3, 400)))))
            )
    return bytes(raw)


# Damage to structure, by the end of a file's name.


def damage_json(data: bytes, rng: random.Random) -> bytes:
    """A JSON document with one value changed, or one that nests deeper than any reader may follow."""
    if rng.random() < 0.03:
        return nest(rng.choice((50, 900, 3000, 100_000)), rng.choice(("[", '{"a":[', '{"step":'))).encode()
    return json.dumps(damage_value(json.loads(data), rng)).encode("utf-8", "surrogatepass")


def damage_lines(data: bytes, rng: random.Random) -> bytes:
    """JSON lines, one of which is changed, doubled, swapped or joined with the next."""
    lines = data.split(b"\n")
    at = rng.randrange(len(lines))
    kind = rng.randrange(6)
    if kind < 4 and lines[at].strip():
        lines[at] = damage_json(lines[at], rng)
    elif kind == 4:
        lines.insert(rng.randrange(len(lines)), lines[at])
    else:
        lines[at : at + 2] = [b"".join(lines[at : at + 2])]
    return b"\n".join(lines)


def toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(key)} = {toml(one)}" for key, one in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(toml, value)) + "]"
    if isinstance(value, float):
        return str(value)
    return json.dumps("none" if value is None else value)


TOML_ONLY = (
    "1979-05-27",
    "07:32:00",
    "1" * 5000,
    "0x" + "f" * 400,
    "+inf",
    "'''\n'''",
    "[" * 3000,
    nest(3000),
    "{}",
    "1__0",
)
NAMED = (
    "policy.self",
    "policy.preset",
    "detector_options.name",
    "optimizer_options.self",
    "recipe_options.name",
    "self",
    "",
)


def damage_toml(data: bytes, rng: random.Random) -> bytes:
    """Lines `key = value` of which one gets another value, another key, or stands twice."""
    lines = data.decode().split("\n")
    at = rng.choice([n for n, line in enumerate(lines) if "=" in line])
    key, _, value = lines[at].partition("=")
    kind = rng.randrange(5)
    if kind == 0:
        key = rng.choice((*NAMED, "\U0001f600", json.dumps(rng.choice(TEXTS)))) + " "
    elif kind == 1:
        lines.append(lines[at])
    elif kind == 2:
        value = f" {rng.choice(TOML_ONLY)}"
    else:
        value = f" {toml(odd_value(rng))}"
    lines[at] = f"{key}={value}"
    return "\n".join(lines).encode("utf-8", "surrogatepass")


LAUGHS = "a: &a [1,1,1,1,1,1,1,1,1]\n" + "".join(
    f"{b}: &{b} [{','.join([f'*{a}'] * 9)}]\n" for a, b in zip("abcdefghij", "bcdefghijk", strict=True)
)
"""A few lines of YAML that are 10^10 values once they are written out."""


def damage_yaml(data: bytes, rng: random.Random) -> bytes:
    """YAML with another value; now and then tags, anchors that hold themselves, and a small text that grows."""
    if rng.random() < 0.2:
        more = ("policy: &a {a: *a}\n", "unit: &a [*a]\n", "? [1]\n: 2\n", "1: 2\n", "steps: !!python/name:os.system\n")
        more += (
            LAUGHS,
            f"{LAUGHS}unit: *k\n",
            "policy: {1: 2}\n",
            f"unit: {nest(2000)}\n",
            "lr: 1:2:3\n",
            "steps: 0b1_0\n",
        )
        return data + rng.choice(more).encode()
    return damage_toml(data.replace(b": ", b" = "), rng).replace(b" = ", b": ").replace(b"=", b":")


def damage_csv(data: bytes, rng: random.Random) -> bytes:
    """A table with one cell, one row or one column changed."""
    rows = list(csv.reader(io.StringIO(data.decode())))
    row = rng.choice([one for one in rows if one])
    kind = rng.randrange(5)
    if kind < 3:
        value = odd_value(rng)
        row[rng.randrange(len(row))] = value if isinstance(value, str) else json.dumps(value)
    elif kind == 3:
        rows.insert(rng.randrange(len(rows)), row)
    else:
        column = rng.randrange(len(rows[0]))
        rows = [[*one, *one[column : column + 1]] for one in rows]  # a name twice
    out = io.StringIO()
    csv.writer(out, lineterminator=rng.choice(("\n", "\r\n", "\r"))).writerows(rows)
    return out.getvalue().encode("utf-8", "surrogatepass")


def damage_trace(data: bytes, rng: random.Random) -> bytes:
    """An Arrow stream whose header says something else, or whose rows are of another type, null, or extreme."""
    import pyarrow as pa

    with pa.BufferReader(data) as source:
        schema = pa.ipc.read_schema(source)
        head = source.tell()
        batch = pa.ipc.read_record_batch(source, schema)
    told = json.loads(schema.metadata[b"trimtab"])
    if rng.random() < 0.6:
        other = schema.with_metadata({b"trimtab": json.dumps(damage_value(told, rng)).encode("utf-8", "surrogatepass")})
        return other.serialize().to_pybytes() + data[head:]
    name = rng.choice(batch.schema.names)
    column = batch.column(name)
    kind = rng.randrange(5)
    if kind == 0:
        column = pa.array([None, *column.to_pylist()[1:]], column.type)
    elif kind == 1 and name == "step":
        column = pa.array([rng.choice((0, -1, 2**63 - 1, -(2**63), 10**12)), *column.to_pylist()[1:]], column.type)
    elif kind == 1:
        rows = column.to_pylist()
        rows[0] = [rng.choice((float("nan"), float("inf"), -1.0, 1e38)) if name != "high" else None] * len(rows[0])
        column = pa.array(rows, column.type)
    elif kind == 2:
        column = pa.array([json.dumps(value) for value in column.to_pylist()])
    columns = {field: batch.column(field) for field in batch.schema.names} | {name: column}
    if kind == 3:
        del columns[name]
    made = pa.record_batch(list(columns.values()), names=list(columns)).replace_schema_metadata(schema.metadata)
    sink = io.BytesIO()
    options = pa.ipc.IpcWriteOptions(compression=rng.choice((None, None, "lz4", "zstd")))
    with pa.ipc.new_stream(sink, made.schema, options=options) as writer:
        writer.write_batch(made)
    return sink.getvalue()


def damage_parquet(data: bytes, rng: random.Random) -> bytes:
    """A table with one column of another type, doubled or renamed."""
    import pyarrow as pa
    from pyarrow import parquet

    table = parquet.read_table(io.BytesIO(data))
    at = rng.randrange(len(table.column_names))
    name = rng.choice((table.column_names[at], rng.choice(table.column_names), "a\x00b", "</script>", "\U0001f600"))
    values = [odd_value(rng) for _ in range(table.num_rows)]
    kind = rng.randrange(5)
    if kind == 0:
        column = pa.array([json.dumps(value) for value in values])
    elif kind == 1:
        column = pa.array([float(value) if isinstance(value, float) else 1e300 for value in values])
    elif kind == 2:
        column = pa.array([[1.0]] * table.num_rows)
    elif kind == 3:
        column = pa.array([rng.choice((2**63 - 1, -(2**63), 0))] * table.num_rows)
    else:
        column = pa.nulls(table.num_rows)
    table = table.set_column(at, name, column)
    out = io.BytesIO()
    parquet.write_table(table, out, compression=rng.choice(("none", "snappy", "zstd")))
    return out.getvalue()


def damage_events(data: bytes, rng: random.Random) -> bytes:
    """An event file with a record whose step, tag or number is odd, in a frame of the right length."""
    from tensorboard.compat.proto import event_pb2

    records, at = [], 0
    while at + 12 <= len(data):
        length = struct.unpack_from("<Q", data, at)[0]
        records.append(data[at + 12 : at + 12 + length])
        at += 16 + length
    place = rng.randrange(len(records))
    if rng.random() < 0.5:
        event = event_pb2.Event.FromString(records[place])  # pyright: ignore[reportAttributeAccessIssue]
        event.step = rng.choice((0, -1, 2**63 - 1, -(2**63)))
        for value in event.summary.value:
            value.tag = rng.choice([text for text in TEXTS if "\ud800" not in text])
            value.simple_value = rng.choice((float("nan"), float("inf"), -1.0, 3e38))
        records[place] = event.SerializeToString()
    else:
        records[place] = damage_bytes(records[place], rng)
    return b"".join(struct.pack("<QI", len(one), 0) + one + bytes(4) for one in records)


def damage_safetensors(data: bytes, rng: random.Random) -> bytes:
    """A safetensors file with another header, of the right length."""
    size = struct.unpack_from("<Q", data)[0]
    header, body = json.loads(data[8 : 8 + size]), data[8 + size :]
    inner = header.get("__metadata__", {}).get("trimtab")
    if inner and rng.random() < 0.7:
        header["__metadata__"]["trimtab"] = json.dumps(damage_value(json.loads(inner), rng))
    else:
        header = damage_value(header, rng)
    raw = json.dumps(header).encode("utf-8", "surrogatepass")
    return struct.pack("<Q", len(raw)) + raw + body


def damage_torch(data: bytes, rng: random.Random) -> bytes:
    """A file of torch.save with one value changed: tensors become others, plain values odd ones."""
    import torch

    state = torch.load(io.BytesIO(data), weights_only=True)
    tensors = (
        *(torch.zeros(()), torch.zeros(3), torch.full((2, 2), float("nan")), torch.zeros(4, dtype=torch.int64)),
        *(torch.zeros(1).expand(10**12), torch.empty(10**12, device="meta"), torch.zeros(2, dtype=torch.bool)),
    )
    holder, key = state, rng.choice(list(state)) if isinstance(state, dict) else 0
    while isinstance(holder[key], dict | list) and len(holder[key]) and rng.random() < 0.7:
        holder = holder[key]
        key = rng.choice(list(holder)) if isinstance(holder, dict) else rng.randrange(len(holder))
    kind = rng.randrange(4)
    if kind == 0:
        del holder[key]
    elif kind == 1 and isinstance(holder, dict):
        holder[rng.choice(TEXTS)] = holder.pop(key)
    elif kind == 2:
        holder[key] = rng.choice(tensors)
    else:
        holder[key] = odd_value(rng)
    out = io.BytesIO()
    torch.save(state, out)
    return out.getvalue()


def damage_gguf(data: bytes, rng: random.Random) -> bytes:
    """A GGUF file in which one number of its head (a count, a length, a type, a dimension, a value) is another."""
    places: list[tuple[int, str]] = [(4, "<I"), (8, "<Q"), (16, "<Q")]
    at = 24

    def number(code: str) -> int:
        nonlocal at
        places.append((at, code))
        at += struct.calcsize(code)
        return struct.unpack_from(code, data, places[-1][0])[0]

    def text() -> None:
        nonlocal at
        length = number("<Q")
        at += length

    def value(kind: int) -> None:
        if kind == 9:
            items, count = number("<I"), number("<Q")
            for _ in range(count):
                value(items)
        elif kind == 8:
            text()
        else:
            number(f"<{'BbHhIif?'[kind] if kind < 8 else 'Qqd'[kind - 10]}")

    tensors, values = struct.unpack_from("<QQ", data, 8)
    for _ in range(values):
        text()
        value(number("<I"))
    for _ in range(tensors):
        text()
        for _ in range(number("<I")):
            number("<Q")
        number("<I")
        number("<Q")
    few = [place for place in places if place[0] < 600 or place[0] > at - 900]  # not the thousand tokens between
    place, code = rng.choice(rng.choice((few, places)))
    raw = bytearray(data)
    if code[1] in "fd":
        struct.pack_into(code, raw, place, rng.choice((0.0, -1.0, float("nan"), float("inf"), 3e38)))
    else:
        most = 2 ** (8 * struct.calcsize(code) - (code[1] in "bhiq")) - 1
        odd = rng.choice((0, 1, 2, 7, 8, 9, 255, 1000, 10**5, 2**31 - 1, 10**12, 2**62, most))
        struct.pack_into(code, raw, place, min(odd, most))
    return bytes(raw)


STRUCTURED: dict[str, Damage] = {
    ".json": damage_json,
    ".jsonl": damage_lines,
    ".toml": damage_toml,
    ".yaml": damage_yaml,
    ".pairs": damage_toml,
    ".csv": damage_csv,
    ".arrow": damage_trace,
    ".parquet": damage_parquet,
    ".tfevents": damage_events,
    ".safetensors": damage_safetensors,
    ".pt": damage_torch,
    ".gguf": damage_gguf,
}


def damaged(name: str, data: bytes, rng: random.Random) -> bytes:
    """A file's bytes after some damage; half of it knows the file's structure where that is known."""
    structured = STRUCTURED.get(Path(name).suffix)
    if structured is not None and rng.random() < 0.6:
        data = structured(data, rng)
        return damage_bytes(data, rng) if rng.random() < 0.1 else data
    return damage_bytes(data, rng)
