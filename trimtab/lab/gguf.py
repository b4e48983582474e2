# SPDX-License-Identifier: Apache-2.0
"""A look at a GGUF file before anybody reads it: all its counts and lengths must be backed by bytes.

    GGUF, version, number of tensors, number of values
    per value      a name, a type, and a number, a text (length, bytes), or an array (type, length, items)
    per tensor     a name, its dimensions, a type, where its bytes begin
    the bytes of the tensors

The reader of the package gguf slices what a length says: past the end of the file a slice is empty, so an array of
10^12 items is gone through one by one, in memory that grows with each. Transformers builds as many layers as a value
says. So the file is walked here first, with its end as the limit.
"""

import math
import mmap
import struct
from pathlib import Path

from trimtab.checks import MOST_PARTS
from trimtab.errors import TrimtabError

MAGIC = b"GGUF"
NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""The struct code of each type that is a number."""
TEXT, ARRAY = 8, 9
MOST_ITEMS = 1 << 22
"""Of all arrays together; the largest vocabularies, with their merges, have about a million."""
MOST_DIMENSIONS = 8
MOST_PER_BYTE = 8
"""Numbers that a byte of the file may stand for; the smallest formats of GGUF have 5."""


def check_gguf(path: Path) -> None:
    """Refuse a file that is no GGUF, or promises what it does not hold."""
    with path.open("rb") as file:
        if file.read(4) != MAGIC:
            raise TrimtabError(f"a model file must be a GGUF, and {str(path)!r} does not begin like one: give a folder")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            try:
                _Walk(data).walk()
            except ValueError as error:
                raise TrimtabError(
                    f"the model in {str(path)!r} cannot be read (it is cut short or damaged: {error}): get it once more"
                ) from None


class _Walk:
    """Goes through the head of a file; ValueError where it ends too soon, or promises too much."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data, self.at, self.order, self.items = data, len(MAGIC), "<", 0
        self.numbers: dict[bytes, int] = {}

    def walk(self) -> None:
        version = self.number("I")
        if version & 0xFFFF == 0:  # written on a machine that begins with the other end
            self.order = ">"
        tensors, values = self.number("Q"), self.number("Q")
        for _ in range(values):
            self.value(self.text())
        sizes = [self.tensor() for _ in range(tensors)]
        if sum(sizes) > MOST_PER_BYTE * len(self.data):
            raise ValueError(f"tensors of {sum(sizes):,} numbers in {len(self.data):,} bytes")
        for name, most in ((b".block_count", tensors), (b".expert_count", MOST_PARTS)):
            for key, count in self.numbers.items():
                if key.endswith(name) and count > most:
                    raise ValueError(f"{key.decode('utf-8', 'replace')} is {count:,}, with {tensors:,} tensors")
        if not any(key.endswith(b".block_count") for key in self.numbers):  # Transformers would build 32 of them
            raise ValueError("it does not say how many blocks it has")

    def value(self, name: bytes) -> None:
        kind = self.number("I")
        if kind == TEXT:
            self.text()
        elif kind == ARRAY:
            self.array()
        else:
            self.numbers[name] = self.number(self.code(kind))

    def array(self) -> None:
        kind, count = self.number("I"), self.number("Q")
        self.items += count
        if self.items > MOST_ITEMS:
            raise ValueError(f"arrays of {self.items:,} items")
        if kind == TEXT:
            for _ in range(count):
                self.text()
        else:
            self.skip(count * struct.calcsize(self.code(kind)))

    def tensor(self) -> int:
        """The numbers of the next tensor."""
        self.text()
        dimensions = self.number("I")
        if dimensions > MOST_DIMENSIONS:
            raise ValueError(f"a tensor of {dimensions:,} dimensions")
        shape = [self.number("Q") for _ in range(dimensions)]
        self.skip(4 + 8)
        return math.prod(shape)

    def code(self, kind: int) -> str:
        if kind not in NUMBERS:
            raise ValueError(f"a value of the type {kind}")
        return NUMBERS[kind]

    def number(self, code: str) -> int:
        begin = self.at
        self.skip(struct.calcsize(code))
        return struct.unpack_from(f"{self.order}{code}", self.data, begin)[0]

    def text(self) -> bytes:
        length = self.number("Q")
        self.skip(length)
        return self.data[self.at - min(length, 200) : self.at]

    def skip(self, count: int) -> None:
        if count > len(self.data) - self.at:
            raise ValueError(f"a length of {count:,} where {len(self.data) - self.at:,} bytes are left")
        self.at += count
