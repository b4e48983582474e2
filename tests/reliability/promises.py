# SPDX-License-Identifier: Apache-2.0
"""Small files that promise a lot: 10^12 rows, a vocabulary of 4 billion, a table that is empty but for its diagonal.

    python tests/reliability/promises.py

Each is made, read by trimtab, and must be read or refused with less than `MORE` of memory asked for.
"""

import contextlib
import gzip
import json
import resource
import struct
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fuzzing
import targets

MORE = 600 << 20
MANY = 10**12
Read = Callable[[], Any]


def trace_rows(folder: Path) -> Read:
    """A batch of 20 rows that says it has 10^12."""
    targets.make_run(folder)
    data = (folder / "trace.arrow").read_bytes()
    patched = data.replace(struct.pack("<q", 20), struct.pack("<q", MANY))
    assert patched != data
    (folder / "trace.arrow").write_bytes(patched)
    return lambda: targets.read_traces(folder)


def trace_body(folder: Path) -> Read:
    """A message whose length is said to be two gigabytes, and one whose body has 10^12 bytes."""
    import pyarrow as pa

    targets.make_run(folder)
    path = folder / "trace.arrow"
    data = path.read_bytes()
    with pa.BufferReader(data) as source:
        pa.ipc.read_schema(source)
        head = source.tell()
        body = pa.ipc.read_message(source).body.size
    long = data[:head] + b"\xff\xff\xff\xff" + struct.pack("<i", 2**31 - 8) + data[head + 8 :]
    wide = data[:head] + data[head:].replace(struct.pack("<q", body), struct.pack("<q", MANY))
    assert wide != data

    def read() -> None:
        for one in (long, wide):
            path.write_bytes(one)
            targets.each(lambda: targets.read_traces(folder), lambda: targets.read_folder(folder))

    return read


def header(folder: Path, **changes: Any) -> Read:
    """A trace whose header has other values."""
    import pyarrow as pa

    targets.make_run(folder)
    path = folder / "trace.arrow"
    data = path.read_bytes()
    with pa.BufferReader(data) as source:
        schema, head = pa.ipc.read_schema(source), source.tell()
    told = json.loads(schema.metadata[b"trimtab"])
    told["policy"] |= changes.pop("policy", {})
    other = schema.with_metadata({b"trimtab": json.dumps(told | changes).encode()})
    path.write_bytes(other.serialize().to_pybytes() + data[head:])
    return lambda: targets.each(lambda: targets.read_traces(folder), lambda: targets.read_folder(folder))


def far_step(folder: Path) -> Read:
    """Lines at step 1 and at step 10^12."""
    targets.make_run(folder)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": MANY, "loss": 1.0, "grad_norm": 1.0}) + "\n")
    return lambda: targets.read_folder(folder)


def diagonal(folder: Path) -> Read:
    """A log each of whose 12,000 lines has a column of its own: one value each, 144 million cells."""
    lines = (json.dumps({"step": n, f"grad_norm/layers.{n}": 1.0}) for n in range(12_000))
    (folder / "log.jsonl").write_text("\n".join(lines) + "\n")
    return lambda: targets.read_tables(folder)


def packed_rows(folder: Path) -> Read:
    """A Parquet file of a few kilobytes with 60 million equal rows."""
    import numpy as np
    import pyarrow as pa
    from pyarrow import parquet

    schema = pa.schema([("step", pa.int64()), ("loss", pa.float64())])
    block = pa.table([np.ones(1_000_000, np.int64), np.ones(1_000_000)], schema=schema)
    with parquet.ParquetWriter(folder / "log.parquet", schema, compression="zstd") as writer:
        for _ in range(60):
            writer.write_table(block, row_group_size=1_000_000)
    return lambda: targets.read_tables(folder)


def packed_text(folder: Path) -> Read:
    """A compressed CSV of two megabytes that unpacks to two gigabytes."""
    block = gzip.compress(b"1,1.0\n" * 900_000)  # members may follow each other
    (folder / "log.csv.gz").write_bytes(gzip.compress(b"step,loss\n") + block * 400)
    return lambda: targets.read_tables(folder)


def vocabulary(folder: Path) -> Read:
    """A tokenizer in which one word has the number 4 billion."""
    from trimtab.lab.data import load_corpus

    targets.make_text(folder)
    told = json.loads((folder / "tokenizer.json").read_text())
    word = next(reversed(told["model"]["vocab"]))
    told["model"]["vocab"][word] = 2**32 - 2
    (folder / "tokenizer.json").write_text(json.dumps(told))
    return lambda: load_corpus(folder / "text.txt", tokenizer=folder / "tokenizer.json")


def index(folder: Path) -> Read:
    """A checkpoint folder whose index says that a tensor of 12 numbers has 10^12."""
    import torch

    targets.make_sharded(folder)
    path = folder / "step_000003" / "rest.pt"
    state = torch.load(path, weights_only=True)
    state["index"]["model.a"] |= {"size": [3, MANY // 3]}
    torch.save(state, path)
    return lambda: targets.read_sharded(folder)


def moments(folder: Path) -> Read:
    """A checkpoint in which one number stands for a moment of 10^9."""
    import torch

    targets.make_checkpoint(folder)
    for path in (folder / "run" / "checkpoints").glob("*.pt"):
        state = torch.load(path, weights_only=True)
        state["optimizer"]["optimizers"][0]["state"][0]["exp_avg"] = torch.zeros(1).expand(10**9)
        torch.save(state, path)
    return lambda: targets.read_checkpoint(folder)


def tensors(folder: Path) -> Read:
    """A packed model whose header says 10^12 rows."""
    targets.make_packed(folder)
    path = folder / "model.safetensors"
    data = path.read_bytes()
    size = struct.unpack_from("<Q", data)[0]
    told = json.loads(data[8 : 8 + size])
    inner = json.loads(told["__metadata__"]["trimtab"])
    inner["linears"]["0"] = [MANY, 16]
    told["__metadata__"]["trimtab"] = json.dumps(inner)
    raw = json.dumps(told).encode()
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + data[8 + size :])
    return lambda: targets.read_packed(folder)


def laughs(folder: Path) -> Read:
    """Eleven lines of YAML that are 10^10 values."""
    import damage

    from trimtab.lab.config import load_settings

    (folder / "a.yaml").write_text(f"{damage.LAUGHS}unit: *k\nsteps: *k\npolicy: {{alpha: *k}}\n")
    return lambda: targets.settle(load_settings(folder / "a.yaml"))


def brackets(folder: Path) -> Read:
    """A page of WikiText that opens a bracket 200,000 times and closes none."""
    from trimtab.lab.downstream.results import load_sets

    targets.make_tasks(folder)
    (folder / "wikitext-2" / "test.txt").write_text(" = A = \n\n" + "( [ { \" ' " * 200_000 + "(" + " " * 200_000)
    return lambda: load_sets(["wikitext2"], folder)


PROMISES: dict[str, Callable[[Path], Read]] = {
    "rows of a trace": trace_rows,
    "bytes of a message": trace_body,
    "a window": lambda folder: header(folder, policy={"window": MANY}),
    "a span": lambda folder: header(folder, policy={"span": MANY, "history": "window"}),
    "a budget": lambda folder: header(folder, max_high=MANY, warmup_steps=MANY, total_steps=MANY),
    "a far step": far_step,
    "a diagonal": diagonal,
    "packed rows": packed_rows,
    "packed text": packed_text,
    "a vocabulary": vocabulary,
    "an index": index,
    "moments": moments,
    "tensors": tensors,
    "laughs": laughs,
    "brackets": brackets,
}


def main() -> int:
    """Read all of them in this process; the exit code counts those that asked for more."""
    broken = 0
    warnings.simplefilter("ignore")
    for name, make in PROMISES.items():
        with tempfile.TemporaryDirectory(prefix="promises-") as place:
            with fuzzing.silent():
                read = make(Path(place))
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            fuzzing.limit_memory(MORE)
            said = "read"
            try:
                with fuzzing.limit(fuzzing.SECONDS), fuzzing.silent(), contextlib.redirect_stderr(None):
                    read()
            except targets.ALLOWED as error:
                said = f"refused: {str(error)[:160]}"
            except BaseException as error:
                said, broken = f"FAILED: {type(error).__name__}: {error}\n{fuzzing.trace_of(error)}", broken + 1
            fuzzing.limit_memory(1 << 40)
            grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
            print(f"{name}: {grown >> 10} MiB more, {said}", flush=True)
    return broken


if __name__ == "__main__":
    sys.exit(main())
