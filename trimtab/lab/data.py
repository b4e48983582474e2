# SPDX-License-Identifier: Apache-2.0
"""Text for the lab's experiments: a corpus, and batches that are a pure function of (seed, step).

A corpus is raw bytes, cut into tokens. By default a token is a byte and the text is Python's own standard
library, about 12 MB that every interpreter carries: an experiment needs no download. It differs between
Python versions, so a corpus keeps the sha256 of its bytes; compare losses only where that agrees.

    source                          documents
    None, "stdlib"                  the *.py files of the standard library, without its tests
    a folder                        every UTF-8 file below it, hidden and binary ones left out
    a .jsonl file (also in a folder)  each line's "text", else "content", else "question" and "answer"
    any other file                  the file

Documents are sorted by path and joined by an empty line. The held-out part is every 20th chunk of 64 Ki
tokens (shorter ones when the corpus is short), so that it is spread over all of the text; the rest, joined,
is the training part. No token is in both.

`Sampler` has no state. The offsets of the windows of a step come from Philox, a counter-based generator:

    raw     = Philox4x64-10(key = (seed, 0), counter = (0, 0, micro, step)), one 64-bit word per window
    offset  = raw mod (number of tokens - seq)

so a run resumes from its step alone, runs that share a seed see the same batches, and gradient
accumulation or data-parallel ranks take different values of `micro`. Philox's raw words are fixed by its
definition, unlike the ranges drawn by numpy's distributions, which may change with numpy.
"""

import hashlib
import os
import platform
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from trimtab.checks import parse_json
from trimtab.errors import TrimtabError, missing_extra

SEPARATOR = b"\n\n"
CHUNK = 65_536
HOLES = 65_536
"""Numbers without a word that a vocabulary may have, beside as many as it has words."""
NOT_LIBRARY = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}


@dataclass(frozen=True, eq=False)
class Corpus:
    """Tokens to train on and tokens held out, with what identifies the text."""

    train: np.ndarray  # (tokens,) uint8 for bytes, else uint16 or int32
    held_out: np.ndarray
    name: str
    sha256: str
    """Of the documents' bytes, joined."""
    vocab_size: int
    num_bytes: int


def load_corpus(
    source: str | Path | None = None, *, tokenizer: str | Path | None = None, holdout: float = 0.05
) -> Corpus:
    """Read a corpus; see this file's docstring for the sources.

    Args:
        tokenizer: a JSON file of the `tokenizers` package; None means bytes.
        holdout: the share of the tokens held out, in (0, 0.5], rounded to one chunk in n.
    """
    if not 0 < holdout <= 0.5:
        raise TrimtabError(f"holdout must be a share in (0, 0.5], got {holdout}: 0.05 holds out every 20th chunk")
    name, documents = _documents(source)
    raw = SEPARATOR.join(documents)
    if tokenizer is None:
        tokens, vocab_size = np.frombuffer(raw, dtype=np.uint8), 256
    else:
        tokens, vocab_size = _tokenize(documents, Path(tokenizer))
    train, held_out = split(tokens, every=round(1 / holdout), name=name)
    return Corpus(train, held_out, name, hashlib.sha256(raw).hexdigest(), vocab_size, len(raw))


def split(tokens: np.ndarray, *, every: int, name: str = "the corpus") -> tuple[np.ndarray, np.ndarray]:
    """Cut tokens into a training part and a held-out part: one of each `every` chunks, the middle one."""
    if len(tokens) < every:
        raise TrimtabError(
            f"a corpus needs at least {every} tokens to hold some out, {name} has {len(tokens)}: give more text"
        )
    chunk = min(CHUNK, len(tokens) // every)
    held_out = range(every // 2 * chunk, len(tokens), every * chunk)  # where the held-out chunks start
    train = zip([0, *(start + chunk for start in held_out)], [*held_out, len(tokens)], strict=True)
    return (
        np.concatenate([tokens[start:stop] for start, stop in train]),
        np.concatenate([tokens[start : start + chunk] for start in held_out]),
    )


def _documents(source: str | Path | None) -> tuple[str, list[bytes]]:
    """The name of a source and the bytes of its documents."""
    if source is None or source == "stdlib":
        return f"stdlib-{platform.python_version()}", _stdlib()
    path = Path(source)
    if path.is_dir():
        documents = _folder(path)
    elif path.is_file():
        documents = _file(path)
    else:
        raise TrimtabError(f'a corpus must be an existing file or folder or "stdlib", got {str(source)!r}')
    if not any(documents):
        raise TrimtabError(f"a corpus must not be empty, found no text in {str(source)!r}")
    return path.resolve().name, documents


def _stdlib() -> list[bytes]:
    """The standard library's own modules, as bytes."""
    root = Path(sysconfig.get_path("stdlib"))
    documents = [path.read_bytes() for path in _walk(root, NOT_LIBRARY) if path.suffix == ".py"]
    if not documents:
        raise TrimtabError(
            f"the standard library has no *.py files under {root}: name a file or folder of text instead"
        )
    return documents


def _walk(root: Path, excluded: set[str]) -> list[Path]:
    """All files below a folder, hidden ones and excluded folders left out, sorted by their relative path."""
    found = []
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if name not in excluded and not name.startswith(".")]
        found += [Path(folder, name) for name in files if not name.startswith(".")]
    found = [path for path in found if path.is_file()]  # no pipes, which would be waited for, and no broken links
    return sorted(found, key=lambda path: path.relative_to(root).as_posix())


def _folder(root: Path) -> list[bytes]:
    """The text files below a folder; binary ones are left out."""
    documents = []
    for path in _walk(root, {"__pycache__"}):
        raw = path.read_bytes()
        if raw and _is_text(raw):
            documents += _lines(path, raw) if path.suffix == ".jsonl" else [raw]
    return documents


def _file(path: Path) -> list[bytes]:
    raw = path.read_bytes()
    if not _is_text(raw):
        raise TrimtabError(f"a corpus must be UTF-8 text, {str(path)!r} is not: unpack it, or convert it with iconv")
    return _lines(path, raw) if path.suffix == ".jsonl" else [raw]


def _is_text(raw: bytes) -> bool:
    """Whether bytes are UTF-8 without NUL, which no text has and nearly every binary does."""
    if b"\0" in raw:
        return False
    try:
        raw.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True


def _lines(path: Path, raw: bytes) -> list[bytes]:
    """The documents of a .jsonl file."""
    documents = []
    for number, line in enumerate(raw.split(b"\n"), start=1):
        if not line.strip():
            continue
        try:
            entry = parse_json(line)
        except ValueError as error:
            raise TrimtabError(f"each line of a .jsonl must be JSON, line {number} of {str(path)!r}: {error}") from None
        documents.append(_text_of(entry, f"line {number} of {str(path)!r}").encode("utf-8", "replace"))
    return documents


def _text_of(entry: object, where: str) -> str:
    """The text of one JSON line."""
    rule = 'a .jsonl line must be an object with a string "text" or "content", or "question" and "answer"'
    if not isinstance(entry, dict):
        raise TrimtabError(f"{rule}, {where} is a {type(entry).__name__}: write such objects")
    for fields in (("text",), ("content",), ("question", "answer")):
        texts = [entry.get(field) for field in fields]
        if all(isinstance(text, str) for text in texts):
            return "\n".join(map(str, texts))
    raise TrimtabError(f"{rule}, {where} has {', '.join(map(repr, entry)) or 'none'}: rename the field with the text")


def _tokenize(documents: list[bytes], path: Path) -> tuple[np.ndarray, int]:
    """Encode documents with a tokenizer file; returns the tokens and the vocabulary's size."""
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise missing_extra("tokenizers", "tokenizers", "a tokenizer file") from error
    if not path.is_file():
        raise TrimtabError(f"tokenizer must be a JSON file of the tokenizers package, {str(path)!r} is no file")
    with _refused(path):
        encoder = Tokenizer.from_file(str(path))
    numbers = encoder.get_vocab().values()
    vocab_size = 1 + max(numbers, default=-1)  # ids may have holes
    if vocab_size > 2 * len(numbers) + HOLES:
        raise TrimtabError(
            f"a model has a row for every number up to the vocabulary's largest, and {str(path)!r} has "
            f"{len(numbers):,} words and the number {vocab_size - 1:,}: it is damaged, make it again"
        )
    dtype = np.uint16 if vocab_size <= 65_536 else np.int32
    pieces = [piece for document in documents for piece in _pieces(document + SEPARATOR)]
    with _refused(path):
        parts = [
            np.array(encoding.ids, dtype=dtype)
            for start in range(0, len(pieces), 256)  # an encoding holds far more than its ids: a few at a time
            for encoding in encoder.encode_batch(pieces[start : start + 256], add_special_tokens=False)
        ]
    return np.concatenate(parts), vocab_size


@contextmanager
def _refused(path: Path) -> Iterator[None]:
    """Whatever the tokenizers package raises, as one line; its panics are no Exception."""
    try:
        yield
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        said = " ".join(str(error).split())[:200]
        raise TrimtabError(
            f"tokenizer must be a JSON file of the tokenizers package that works, got {str(path)!r}: {said}"
        ) from None


def _pieces(document: bytes) -> Iterator[str]:
    """Cut a document behind line ends into pieces of about `CHUNK` bytes."""
    start = 0
    while start < len(document):
        stop = document.find(b"\n", start + CHUNK) + 1 or len(document)
        yield document[start:stop].decode("utf-8", "replace")
        start = stop


class Sampler:
    """Random windows of a token array; the batch of a step depends on the seed and the step alone."""

    def __init__(self, tokens: np.ndarray, *, batch: int, seq: int, seed: int) -> None:
        _check_windows(tokens, batch, seq)
        if not 0 <= seed < 2**64:
            raise TrimtabError(f"seed must lie in [0, 2^64), got {seed}")
        self.tokens = tokens
        self.batch = batch
        self.seq = seq
        self.seed = seed

    def batch_at(self, step: int, micro: int = 0) -> tuple[Tensor, Tensor]:
        """Inputs and targets, each (batch, seq) int64, of a step's micro-batch."""
        if step < 0 or micro < 0:
            raise TrimtabError(f"step and micro must not be negative, got {step} and {micro}")
        return _windows(self.tokens, self.offsets(step, micro), self.seq)

    def offsets(self, step: int, micro: int = 0) -> np.ndarray:
        """Where the windows of a step's micro-batch start."""
        key = np.array([self.seed, 0], dtype=np.uint64)
        counter = np.array([0, 0, micro, step], dtype=np.uint64)
        raw = np.random.Philox(key=key, counter=counter).random_raw(self.batch)
        return (raw % np.uint64(len(self.tokens) - self.seq)).astype(np.int64)


def eval_batches(
    tokens: np.ndarray, *, batch: int, seq: int, limit: int | None = None
) -> Iterator[tuple[Tensor, Tensor]]:
    """Fixed windows that do not overlap, as (inputs, targets); the last batch may be smaller.

    Args:
        limit: the most batches; their windows are then spread evenly over the tokens.
    """
    _check_windows(tokens, batch, seq)
    if limit is not None and limit < 1:
        raise TrimtabError(f"limit must be at least 1 batch, got {limit}: None means all")
    num_windows = (len(tokens) - 1) // seq
    num_taken = num_windows if limit is None else min(num_windows, limit * batch)
    offsets = np.arange(num_taken) * num_windows // num_taken * seq
    return (_windows(tokens, offsets[at : at + batch], seq) for at in range(0, num_taken, batch))


def _windows(tokens: np.ndarray, offsets: np.ndarray, seq: int) -> tuple[Tensor, Tensor]:
    """The windows at some offsets: inputs, and targets one token on."""
    window = torch.from_numpy(tokens[offsets[:, None] + np.arange(seq + 1)].astype(np.int64))  # (batch, seq + 1)
    return window[:, :-1].contiguous(), window[:, 1:].contiguous()


def _check_windows(tokens: np.ndarray, batch: int, seq: int) -> None:
    if batch < 1 or seq < 1:
        raise TrimtabError(f"batch and seq must be at least 1, got {batch} and {seq}")
    if len(tokens) < seq + 1:
        raise TrimtabError(
            f"a window needs seq + 1 = {seq + 1} tokens, there are {len(tokens)}: give more text or a shorter seq"
        )
