# SPDX-License-Identifier: Apache-2.0
"""Questions and answers for fine-tuning: JSON lines in, token ids with the answers marked out.

    {"messages": [{"role": "user", "content": ...}, {"role": "assistant", "content": ...}, ...]}
    {"prompt": ..., "answer": ...}      or "question" and "answer", "prompt" and "completion",
    {"instruction": ..., "output": ...}     with "input", if there, behind the instruction

A source is one .jsonl file, or a folder: its `train.jsonl` if it has one (the others are for tests then), else every
.jsonl below it. A pair is a dialogue of two messages. The tokenizer's chat template writes the dialogue; without one,
prompt and answer stand on lines of their own and an end token closes each answer. Only the answers have a loss, the end
that the template puts behind them included.

Prompt and answer are cut into tokens apart, because that is what happens when a model is asked. An example longer than
`seq` tokens loses its end; one that has no answer left is dropped; both are counted. One in `1 / holdout` examples
is held out.

`ExampleSampler` has no state: the order of an epoch comes from (seed, epoch), and each example is seen once in it.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from trimtab.checks import parse_json, shown
from trimtab.errors import TrimtabError
from trimtab.lab.task import IGNORED

PAIRS = (("prompt", "answer"), ("question", "answer"), ("prompt", "completion"), ("instruction", "output"))
ANSWERS = "assistant"
Messages = list[dict[str, str]]


class Source(NamedTuple):
    """The dialogues of a file or folder, read and checked, not yet cut into tokens."""

    path: Path
    sha256: str
    """Of the files' bytes, joined."""
    dialogues: list[tuple[str, Messages]]
    """Each with the words for where it stands."""


class Piece(NamedTuple):
    """A stretch of a dialogue's text."""

    text: str
    is_answer: bool


class Example(NamedTuple):
    """One dialogue as tokens."""

    ids: np.ndarray  # (tokens,) int64
    is_answer: np.ndarray  # (tokens,) bool


@dataclass(frozen=True, eq=False)
class Examples:
    """Dialogues to train on and dialogues held out, with what identifies them."""

    train: list[Example]
    held_out: list[Example]
    name: str
    sha256: str
    """Of the files' bytes, joined."""
    truncated: int
    """How many were longer than `seq` and lost their end."""
    dropped: int
    """How many had no answer within `seq` tokens."""

    def describe(self) -> dict[str, Any]:
        """What a run folder keeps of them."""
        lists = {"train": len(self.train), "held_out": len(self.held_out)}
        return {name: getattr(self, name) for name in ("name", "sha256", "truncated", "dropped")} | lists


def load_examples(source: str | Path | Source, tokenizer: Any, *, seq: int, holdout: float = 0.05) -> Examples:
    """Read dialogues and cut them into tokens; see this file's docstring.

    Args:
        tokenizer: one of Transformers.
        seq: the most tokens of an example.
        holdout: the share held out, in (0, 0.5].
    """
    if not 0 < holdout <= 0.5:
        raise TrimtabError(f"holdout must be a share in (0, 0.5], got {holdout}: 0.05 holds out every 20th example")
    given = source if isinstance(source, Source) else read_source(source)
    whole = encode([pieces(messages, tokenizer, where) for where, messages in given.dialogues], tokenizer)
    cut = [Example(ids[:seq], is_answer[:seq]) for ids, is_answer in whole]
    kept = [example for example in cut if example.is_answer[1:].any()]
    every = min(round(1 / holdout), max(len(kept), 2))
    held_out, train = kept[every // 2 :: every], [e for number, e in enumerate(kept) if number % every != every // 2]
    if not (train and held_out):
        raise TrimtabError(
            f"one example to train on and one to hold out are needed, each with an answer within seq={seq} tokens, and "
            f"{str(given.path)!r} has {len(kept)} of {len(whole)}: give more examples, or a larger seq"
        )
    truncated = sum(len(ids) > seq for ids, _ in whole)
    return Examples(train, held_out, given.path.resolve().name, given.sha256, truncated, len(whole) - len(kept))


def read_source(source: str | Path) -> Source:
    """Read and check every line of a file or folder; a bad one is refused by its number."""
    path = Path(source)
    files = _files(path)
    raw = [file.read_bytes() for file in files]
    dialogues = [found for file, text in zip(files, raw, strict=True) for found in read_dialogues(file, text)]
    if not dialogues:
        raise TrimtabError(f"there is no example in {str(source)!r}: write one JSON object per line")
    return Source(path, hashlib.sha256(b"\n".join(raw)).hexdigest(), dialogues)


def read_dialogues(path: Path, raw: bytes) -> Iterator[tuple[str, Messages]]:
    """The dialogues of a .jsonl file, each with the words for where it stands."""
    for number, line in enumerate(raw.split(b"\n"), start=1):
        if not line.strip():
            continue
        where = f"line {number} of {str(path)!r}"
        try:
            entry = parse_json(line.decode("utf-8"))
        except json.JSONDecodeError as error:
            raise TrimtabError(
                f"each line must be a JSON object, {where} is not: {error.msg} at column {error.colno}"
            ) from None
        except UnicodeDecodeError as error:
            raise TrimtabError(f"each line must be UTF-8, {where} is not: {error.reason}") from None
        except ValueError as error:
            raise TrimtabError(f"each line must be a JSON object that can be read, {where} is not: {error}") from None
        yield where, _messages(entry, where)


def _files(source: Path) -> list[Path]:
    if source.is_file():
        return [source]
    if not source.is_dir():
        raise TrimtabError(
            f"the examples are a .jsonl file or a folder of them, got {str(source)!r}: it does not exist"
        )
    if (source / "train.jsonl").is_file():
        return [source / "train.jsonl"]
    files = sorted(path for path in source.rglob("*.jsonl") if path.is_file())
    if not files:
        raise TrimtabError(f"the examples are a .jsonl file or a folder of them, {str(source)!r} holds none")
    return files


def _messages(entry: object, where: str) -> Messages:
    """A line as a list of messages; whatever else it is is refused with its place."""
    forms = '"messages", or ' + ", ".join(f'"{prompt}" and "{answer}"' for prompt, answer in PAIRS)
    if not isinstance(entry, dict):
        raise TrimtabError(f"each line must be a JSON object, {where} is a {type(entry).__name__}: write {forms}")
    if "messages" in entry:
        return _checked(entry["messages"], where)
    for prompt, answer in PAIRS:
        if isinstance(entry.get(prompt), str) and isinstance(entry.get(answer), str):
            more = entry.get("input") if prompt == "instruction" else None
            asked = f"{entry[prompt]}\n\n{more}" if isinstance(more, str) and more else entry[prompt]
            return _checked([{"role": "user", "content": asked}, {"role": ANSWERS, "content": entry[answer]}], where)
    found = ", ".join(map(shown, entry)) or "nothing"
    raise TrimtabError(f"a line holds strings under {forms}; {where} has {found}: rename its fields")


def _checked(messages: object, where: str) -> Messages:
    fine = isinstance(messages, list) and all(
        isinstance(m, dict) and isinstance(m.get("role"), str) and isinstance(m.get("content"), str) for m in messages
    )
    if not fine:
        raise TrimtabError(f'messages must be a list of objects with strings "role" and "content", {where} has others')
    assert isinstance(messages, list)
    if not any(m["role"] == ANSWERS and m["content"].strip() for m in messages):
        raise TrimtabError(f"an example needs an answer (role {ANSWERS!r}) that is not empty, {where} has none")
    return [{"role": m["role"], "content": m["content"]} for m in messages]


def pieces(messages: Messages, tokenizer: Any, where: str = "an example") -> list[Piece]:
    """A dialogue's text in stretches: what is asked, what is answered, and so on; it ends with the last answer."""
    last = max(number for number, m in enumerate(messages) if m["role"] == ANSWERS)
    messages = messages[: last + 1]
    if not tokenizer.chat_template:
        end = tokenizer.eos_token or "\n"
        return [Piece(m["content"] + (end if m["role"] == ANSWERS else "\n"), m["role"] == ANSWERS) for m in messages]

    def written(count: int, *, asked: bool) -> str:
        try:
            return tokenizer.apply_chat_template(messages[:count], tokenize=False, add_generation_prompt=asked)
        except Exception as error:  # whatever a template says it cannot write
            raise TrimtabError(f"the tokenizer's chat template cannot write {where}: {error}") from None

    found: list[Piece] = []
    done = ""
    for number in (number for number, m in enumerate(messages) if m["role"] == ANSWERS):
        before, after = written(number, asked=True) if number else "", written(number + 1, asked=False)
        if not (before.startswith(done) and after.startswith(before)):
            raise TrimtabError(
                f"the tokenizer's chat template rewrites what it wrote before, so the answers of {where} cannot be "
                "told apart: give examples with one answer, or set tokenizer.chat_template to one that only appends"
            )
        found += [Piece(before[len(done) :], False), Piece(after[len(before) :], True)]
        done = after
    return found


def encode(dialogues: Sequence[Sequence[Piece]], tokenizer: Any) -> list[Example]:
    """Tokens of dialogues, each piece cut apart; without a chat template the tokenizer's own beginning stands first."""
    texts = [piece.text for found in dialogues for piece in found]
    ids = iter(tokenizer(texts, add_special_tokens=False)["input_ids"])
    begin = tokenizer.bos_token_id
    opening = [] if tokenizer.chat_template or begin not in tokenizer("")["input_ids"] else [begin]
    examples = []
    for found in dialogues:
        parts = [(opening, False), *((next(ids), piece.is_answer) for piece in found)]
        whole = np.concatenate([np.asarray(part, dtype=np.int64) for part, _ in parts])
        examples.append(Example(whole, np.repeat([mark for _, mark in parts], [len(part) for part, _ in parts])))
    return examples


def collate(examples: Sequence[Example], pad: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets, each (batch, longest - 1); padding is on the right, where causal attention never looks."""
    longest = max(len(example.ids) for example in examples)
    inputs = torch.full((len(examples), longest - 1), pad)
    targets = torch.full_like(inputs, IGNORED)
    for row, (ids, is_answer) in enumerate(examples):
        inputs[row, : len(ids) - 1] = torch.from_numpy(ids[:-1])
        targets[row, : len(ids) - 1] = torch.from_numpy(np.where(is_answer[1:], ids[1:], IGNORED))
    return inputs, targets


class ExampleSampler:
    """Batches of examples, epoch by epoch; the batch of a step depends on the seed and the step alone."""

    def __init__(self, examples: Sequence[Example], *, batch: int, accumulate: int, seed: int, pad: int) -> None:
        self._examples, self._pad = examples, pad
        self._batch, self._accumulate = batch, accumulate
        self._order = lru_cache(maxsize=2)(lambda epoch: epoch_order(len(examples), seed, epoch))

    def batch_at(self, step: int, micro: int = 0) -> tuple[Tensor, Tensor]:
        """Inputs and targets of a step's micro-batch; steps count from 1, and step 0 is a look at the first."""
        first = (max(step - 1, 0) * self._accumulate + micro) * self._batch
        places = (divmod(first + row, len(self._examples)) for row in range(self._batch))
        return collate([self._examples[self._order(epoch)[place]] for epoch, place in places], self._pad)


def epoch_order(count: int, seed: int, epoch: int) -> np.ndarray:
    """A permutation from raw Philox words, which are fixed by definition, unlike numpy's own shuffles."""
    words = np.random.Philox(key=np.array([seed, epoch], dtype=np.uint64)).random_raw(count)
    return np.argsort(words, kind="stable")


def pad_id(tokenizer: Any) -> int:
    """The token that fills short rows; it is never looked at."""
    found: Mapping[str, int | None] = {"pad": tokenizer.pad_token_id, "eos": tokenizer.eos_token_id}
    return next((number for number in found.values() if number is not None), 0)
