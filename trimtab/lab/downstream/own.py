# SPDX-License-Identifier: Apache-2.0
"""A model's answers by plain batched forwards: what lm-eval's Hugging Face model computes, in a few functions.

    likelihoods   the continuation's tokens are those of context + continuation after the context's own; what is longer
                  than `context` tokens loses its beginning
    texts         windows of `context` tokens, each token predicted once: the first window begins with the BOS (or EOS)
                  token, the last one is filled up with what came before

                      tokens 0 1 2 3 4 5 6 7 8 9, context 4:    B 0 1 2 -> 0 1 2 3
                                                                3 4 5 6 -> 4 5 6 7
                                                                5 6 7 8 ->     8 9
    generate      greedy, until a stop or 256 tokens

Inputs that are the same, such as those of " A" to " D" after one question, are run once. Rows are sorted by length and
padded on the right, where a causal model does not look; a recipe with one scale per tensor does see the padding, so
compare arms at the same batch.

One difference from lm-eval: where a tokenizer puts BOS in front of everything, lm-eval also predicts that BOS at the
beginning of a text.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trimtab.errors import TrimtabError
from trimtab.lab.downstream.measures import Answer
from trimtab.lab.downstream.tasks import Item, Task

UNTIL = ("Question:", "</s>", "<|im_end|>")
MAX_TOKENS = 256
MAX_CONTEXT = 2048

Progress = Callable[[int, int], None]
"""Called with (done, of all)."""
Tokens = list[int]
Request = tuple[Tokens, Tokens]
"""The input, and the targets of its last positions."""


@dataclass(frozen=True)
class Asked:
    """A model and its tokenizer, and how it is asked."""

    model: Any
    tokenizer: Any
    batch: int = 8
    context: int = MAX_CONTEXT
    """Most tokens of an input."""

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device


def own_answers(asked: Asked, task: Task, items: Sequence[Item], progress: Progress) -> Any:
    """One answer per request of each item; of a task to generate, one text per item."""
    if task.kind == "generate":
        return generate(asked, [item.requests[0][0] for item in items], progress)
    if task.kind == "text":
        return [(answer,) for answer in texts(asked, [item.requests[0][1] for item in items], progress)]
    answers = iter(likelihoods(asked, [pair for item in items for pair in item.requests], progress))
    return [tuple(next(answers) for _ in item.requests) for item in items]


def likelihoods(asked: Asked, pairs: Sequence[tuple[str, str]], progress: Progress) -> list[Answer]:
    """Log-likelihood of each continuation after its context."""
    requests = [encode_pair(asked, *pair) for pair in pairs]
    scored = score(asked, requests, progress)
    return [Answer(ll, len(targets), greedy) for (ll, greedy), (_, targets) in zip(scored, requests, strict=True)]


def texts(asked: Asked, whole: Sequence[str], progress: Progress) -> list[Answer]:
    """Log-likelihood of whole texts."""
    cut = [list(windows(encode_text(asked, text), prefix_token(asked), asked.context)) for text in whole]
    scored = iter(score(asked, [request for requests in cut for request in requests], progress))
    lls = [math.fsum(next(scored)[0] for _ in requests) for requests in cut]
    return [Answer(ll, sum(len(targets) for _, targets in requests)) for ll, requests in zip(lls, cut, strict=True)]


@torch.no_grad()
def score(asked: Asked, requests: Sequence[Request], progress: Progress) -> list[tuple[float, bool]]:
    """Log-likelihood of each request's targets, and whether each target is the likeliest token."""
    by_input: dict[tuple[int, ...], list[int]] = {}
    for number, (tokens, _) in enumerate(requests):
        by_input.setdefault(tuple(tokens), []).append(number)
    rows = sorted(by_input, key=len, reverse=True)
    found: list[tuple[float, bool]] = [(math.nan, False)] * len(requests)
    done = 0
    for first in range(0, len(rows), asked.batch):
        batch = rows[first : first + asked.batch]
        inputs, mask = pad(batch, left=False, device=asked.device)
        logits = asked.model(input_ids=inputs, attention_mask=mask, use_cache=False).logits
        numbers, sums = [], []
        for row, tokens in enumerate(batch):
            for number in by_input[tokens]:
                targets = torch.tensor(requests[number][1], device=logits.device)
                at = logits[row, len(tokens) - len(targets) : len(tokens)].float()  # (targets, vocabulary)
                picked = at.log_softmax(-1).gather(-1, targets[:, None])
                greedy = (at.argmax(-1) == targets).all()
                numbers.append(number)
                sums.append(torch.stack((picked.double().sum(), greedy.double())))
        for number, (ll, greedy) in zip(numbers, torch.stack(sums).tolist(), strict=True):
            found[number] = (ll, bool(greedy))
        done += len(numbers)
        progress(done, len(requests))
    return found


@torch.no_grad()
def generate(asked: Asked, prompts: Sequence[str], progress: Progress) -> list[str]:
    """What the model goes on with, greedily, up to a stop."""
    room = asked.context - MAX_TOKENS
    if room < 1:
        raise TrimtabError(f"an answer may have {MAX_TOKENS} tokens, so context must be larger, got {asked.context}")
    tokenizer = asked.tokenizer
    fill = next(one for one in (tokenizer.pad_token_id, tokenizer.eos_token_id, 0) if one is not None)
    tokens = [encode(asked, prompt)[-room:] for prompt in prompts]
    order = sorted(range(len(prompts)), key=lambda i: -len(tokens[i]))
    found = [""] * len(prompts)
    for first in range(0, len(order), asked.batch):
        numbers = order[first : first + asked.batch]
        inputs, mask = pad([tokens[i] for i in numbers], left=True, device=asked.device, fill=fill)
        width = inputs.shape[1]

        def stopped(ids: Tensor, scores: Any, *, width: int = width, **_: Any) -> Tensor:
            ends = [
                any(stop in tokenizer.decode(row) for stop in UNTIL) for row in ids[:, max(width, ids.shape[1] - 24) :]
            ]
            return torch.tensor(ends, device=ids.device)

        made = asked.model.generate(
            input_ids=inputs,
            attention_mask=mask,
            max_new_tokens=MAX_TOKENS,
            do_sample=False,
            temperature=None,
            top_p=None,
            top_k=None,
            pad_token_id=fill,
            eos_token_id=tokenizer.eos_token_id,
            stopping_criteria=[stopped],
        )
        for number, row in zip(numbers, made[:, width:].tolist(), strict=True):
            text = tokenizer.decode(row, skip_special_tokens=True)
            found[number] = text[: min((at for stop in UNTIL if (at := text.find(stop)) >= 0), default=None)]
        progress(first + len(numbers), len(order))
    return found


def encode_pair(asked: Asked, context: str, continuation: str) -> Request:
    """The input and the targets of a continuation; spaces at the context's end belong to it."""
    bare = context.rstrip()
    whole, before = encode(asked, context + continuation), encode(asked, bare)
    targets = whole[len(before) :]
    if not before or not targets or len(targets) > asked.context:
        raise TrimtabError(
            f"a continuation must have 1 to {asked.context} tokens after a context, got {len(targets)} of "
            f"{(context[-20:] + continuation)[:60]!r}: --context allows more"
        )
    return (before + targets)[-(asked.context + 1) :][:-1], targets


def encode(asked: Asked, text: str) -> Tokens:
    """The tokens of a text, with what the tokenizer puts in front, unless the text begins with BOS already."""
    bos = asked.tokenizer.bos_token
    return asked.tokenizer.encode(text, add_special_tokens=not (bos and text.startswith(bos)))


def encode_text(asked: Asked, text: str) -> Tokens:
    """The tokens of a text, without a BOS in front."""
    return asked.tokenizer.encode(text, add_special_tokens=False)


def prefix_token(asked: Asked) -> int:
    """What stands before a text's first token."""
    for token in (asked.tokenizer.bos_token_id, asked.tokenizer.eos_token_id):
        if token is not None:
            return token
    raise TrimtabError("a text begins with the tokenizer's BOS or EOS token, and it has neither: set one of them")


def windows(tokens: Tokens, prefix: int, context: int) -> Iterator[Request]:
    """Cut a text so that every token is a target once; see this file's docstring."""
    if tokens:
        begin = tokens[:context]
        yield [prefix, *begin[:-1]], begin
    for first in range(context, len(tokens), context):
        last = min(first + context, len(tokens))
        yield tokens[last - context - 1 : last - 1], tokens[first:last]


def pad(rows: Sequence[Sequence[int]], *, left: bool, device: torch.device, fill: int = 0) -> tuple[Tensor, Tensor]:
    """Rows as one tensor (rows, longest), and which of it is real."""
    width = max(map(len, rows))
    inputs, mask = torch.full((len(rows), width), fill), torch.zeros(len(rows), width, dtype=torch.int64)
    for number, row in enumerate(rows):
        at = slice(width - len(row), width) if left else slice(0, len(row))
        inputs[number, at], mask[number, at] = torch.tensor(row), 1
    return inputs.to(device), mask.to(device)
