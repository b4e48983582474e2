# SPDX-License-Identifier: Apache-2.0
"""From a model's answers to figures: each measure is a sum over items, divided by another.

    gold_ll           log-likelihood of the right answer, in nats per item
    gold_ll_token     the same per token of it
    acc               the right choice is the most likely one
    acc_norm          the same with each log-likelihood divided by the choice's characters
    greedy            every token of the right answer is the most likely one
    perplexity        exp(-gold_ll): of a last word (LAMBADA)
    word_perplexity   exp(-log-likelihood per word of the text as it was before it was joined)
    token_perplexity  exp(-log-likelihood per token)
    strict            the number after the first "####" is the right one
    flexible          the last number is the right one

acc, acc_norm and the extraction of numbers follow lm-eval. What is kept is not the figures alone but every item's
columns, because arms are compared item by item.
"""

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from trimtab.errors import TrimtabError
from trimtab.lab.downstream.tasks import Item, Task
from trimtab.lab.intervals import Z_95

STRICT = re.compile(r"#### (\-?[0-9\.\,]+)")
FLEXIBLE = re.compile(r"(-?[$0-9.,]{2,})|(-?[0-9]+)")
IGNORED = tuple(re.compile(one) for one in (",", r"\$", r"(?s).*#### ", r"\.$"))

Columns = dict[str, list[Any]]
"""Name -> one value per item."""


class Answer(NamedTuple):
    """What a model makes of one request."""

    ll: float
    """Log-likelihood in nats."""
    tokens: int
    greedy: bool = False


class Measure(NamedTuple):
    """Which columns are divided, and how the result is shown."""

    value: str
    per: str | None = None
    """None is per item."""
    is_perplexity: bool = False


MEASURES = {
    "gold_ll": Measure("gold_ll"),
    "gold_ll_token": Measure("gold_ll", "gold_tokens"),
    "acc": Measure("acc"),
    "acc_norm": Measure("acc_norm"),
    "greedy": Measure("greedy"),
    "perplexity": Measure("gold_ll", is_perplexity=True),
    "word_perplexity": Measure("gold_ll", "words", is_perplexity=True),
    "token_perplexity": Measure("gold_ll", "gold_tokens", is_perplexity=True),
    "strict": Measure("strict"),
    "flexible": Measure("flexible"),
}


def columns(task: Task, items: Sequence[Item], answers: Sequence[Sequence[Answer]] | Sequence[str]) -> Columns:
    """Every item's values: one answer per request, or one text per item of a task to generate."""
    found: Columns = {"id": [item.id for item in items]}
    if task.kind == "generate":
        texts = [str(answer) for answer in answers]
        pairs = list(zip(texts, items, strict=True))
        found["strict"] = [int(normal(strict_number(text)) == normal(item.target)) for text, item in pairs]
        found["flexible"] = [int(normal(flexible_number(text)) == normal(item.target)) for text, item in pairs]
        return found | {"text": texts}
    rows: list[Sequence[Answer]] = list(answers)  # type: ignore[arg-type]
    for item, row in zip(items, rows, strict=True):
        if not all(math.isfinite(answer.ll) for answer in row):
            raise TrimtabError(
                f"a log-likelihood must be finite, item {item.id} of {task.name} has {[answer.ll for answer in row]}: "
                "the model's logits are not, look at its weights or at the recipe"
            )
    gold = [row[item.gold] for item, row in zip(items, rows, strict=True)]
    found |= {"gold_ll": [answer.ll for answer in gold], "gold_tokens": [answer.tokens for answer in gold]}
    if task.kind == "gold":
        found["greedy"] = [int(answer.greedy) for answer in gold]
    elif task.kind == "text":
        found["words"] = [item.words for item in items]
    else:
        lls = [[answer.ll for answer in row] for row in rows]
        sizes = [[len(text) - 1 for _, text in item.requests] for item in items]  # without the space in front
        found["acc"] = [int(np.argmax(ll) == item.gold) for ll, item in zip(lls, items, strict=True)]
        found["acc_norm"] = [
            int(np.argmax(np.divide(ll, size)) == item.gold) for ll, size, item in zip(lls, sizes, items, strict=True)
        ]
        found["choices_ll"] = lls
    return found


class Score(NamedTuple):
    """A measure over a set of items."""

    value: float
    """As it is shown: a mean, or a perplexity."""
    low: float
    high: float
    """Ends of its 95 % interval over items, of the ratio's linear part; NaN for one item."""


def score(name: str, found: Mapping[str, Sequence[Any]]) -> Score:
    """One measure of some columns."""
    value, per = parts(name, found)
    mean, n = value.sum() / per.sum(), len(value)
    spread = math.sqrt(float(((value - mean * per) ** 2).sum()) * n / (n - 1)) / per.sum() if n > 1 else math.nan
    ends = (mean, mean - Z_95 * spread, mean + Z_95 * spread)
    if MEASURES[name].is_perplexity:
        middle, low, high = (shown(name, float(end)) for end in (ends[0], ends[2], ends[1]))
        return Score(middle, low, high)
    return Score(*map(float, ends))


def parts(name: str, found: Mapping[str, Sequence[Any]]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """What a measure adds up and what it divides by, per item."""
    measure = MEASURES[name]
    value = np.asarray(found[measure.value], dtype=np.float64)
    return value, np.ones_like(value) if measure.per is None else np.asarray(found[measure.per], dtype=np.float64)


def shown(name: str, mean: float) -> float:
    """A mean as a person reads it: a perplexity where the measure is one, infinite where that overflows."""
    if not MEASURES[name].is_perplexity:
        return mean
    return math.exp(-mean) if -mean < 700 else math.inf


def strict_number(text: str) -> str | None:
    """The number after the first "####"."""
    match = STRICT.search(text)
    return None if match is None else match.group(1).strip()


def flexible_number(text: str) -> str | None:
    """The last number."""
    found = FLEXIBLE.findall(text)
    return None if not found else next(part for part in found[-1] if part).strip()


def normal(number: str | None) -> str | None:
    """A number without signs of currency, thousands and the end of a sentence."""
    for one in IGNORED:
        number = None if number is None else one.sub("", number)
    return number
