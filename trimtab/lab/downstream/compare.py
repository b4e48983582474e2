# SPDX-License-Identifier: Apache-2.0
"""Two arms over the same items: paired differences with bootstrap intervals, and what may be said.

Items differ far more than arms do: an easy question is easy for both. The difference item by item leaves that out. A
measure is sum(v) / sum(w) over items (`measures.py`), so with equal w the difference is

    sum_i (v_i - v'_i) / sum_i w_i

and its interval the 2.5 and 97.5 percentiles of the same ratio over 10,000 sets of n items drawn with replacement, from
a seeded generator. Differences are on the scale where more is better: of a perplexity, the log-likelihood's. The
commonsense average draws each of its tasks on its own.

The interval is over items: it says whether these two models differ on questions of this kind, and nothing about another
seed of the training that made them. About one comparison in twenty excludes 0 by chance.

A verdict needs whole sets, 30 items or more, and an interval without 0. Where it holds 0, `detectable` tells how large
a difference would have been seen four times in five: no conclusion is not "no difference".
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trimtab.errors import TrimtabError
from trimtab.lab.downstream.measures import parts, score
from trimtab.lab.downstream.tasks import COMMONSENSE, TASKS

RESAMPLES = 10_000
CHUNK = 4_000_000
MIN_ITEMS = 30
POWER = 1.959964 + 0.841621  # a two-sided test at 5 % that sees it in 80 %


@dataclass(frozen=True)
class Difference:
    """Ours minus theirs, in one measure."""

    task: str
    measure: str
    ours: float
    theirs: float
    """Both as they are shown: means or perplexities."""
    mean: float
    low: float
    high: float
    """Ends of the 95 % interval; NaN where tokens differ."""
    detectable: float
    """How large a difference would be seen four times in five."""
    n: int
    of: int
    """Items in the whole set."""

    @property
    def verdict(self) -> str:
        """What may be said."""
        if math.isnan(self.low):
            return "no conclusion: the models cut the text into different tokens"
        if self.n < self.of:
            return f"no conclusion: a quick look at {self.n:,} of {self.of:,} items"
        if self.n < MIN_ITEMS:
            return f"no conclusion: fewer than {MIN_ITEMS} items"
        if self.mean == self.low == self.high == 0:
            return "no conclusion: the same on every item"
        if self.low <= 0 <= self.high:
            return f"no conclusion: the interval holds 0 (80 % power for {self.detectable:.2g})"
        return "better" if self.mean > 0 else "worse"

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON; what is not finite is None."""
        plain = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in asdict(self).items()}
        return plain | {"verdict": self.verdict}


def bootstrap(
    values: NDArray[np.float64],
    weights: NDArray[np.float64],
    *,
    resamples: int = RESAMPLES,
    seed: int = 0,
    part: int = 0,
) -> NDArray[np.float64]:
    """sum(values) / sum(weights) of each resample; `part` draws other items from the same seed."""
    rng, n = np.random.default_rng([seed, part]), len(values)
    rows = max(1, CHUNK // n)
    found = []
    for first in range(0, resamples, rows):
        drawn = rng.integers(0, n, size=(min(rows, resamples - first), n))
        found.append(values[drawn].sum(axis=1) / weights[drawn].sum(axis=1))
    return np.concatenate(found)


def compare(ours: Mapping[str, Any], theirs: Mapping[str, Any], *, seed: int = 0) -> list[Difference]:
    """Every measure of every task that both results have; the commonsense average comes last."""
    common = [name for name in ours["tasks"] if name in theirs["tasks"]]
    check_same(ours, theirs, common)
    found, averaged = [], {}
    for name in common:
        a, b = ours["tasks"][name], theirs["tasks"][name]
        for measure in TASKS[name].measures:
            (v, w), (v_, w_) = parts(measure, a["items"]), parts(measure, b["items"])
            same = np.array_equal(w, w_)
            one = Difference(
                name,
                measure,
                score(measure, a["items"]).value,
                score(measure, b["items"]).value,
                float((v - v_).sum() / w.sum()) if same else math.nan,
                *_ends(bootstrap(v - v_, w, seed=seed) if same else np.full(2, math.nan)),
                a["n"],
                a["of"],
            )
            found.append(one)
            if COMMONSENSE.get(name) == measure:
                averaged[name] = one, v - v_
    return found + ([_average(averaged, seed)] if len(averaged) == len(COMMONSENSE) else [])


def _average(averaged: Mapping[str, tuple[Difference, NDArray[np.float64]]], seed: int) -> Difference:
    """The mean over tasks, each drawn on its own."""
    rows = [one for one, _ in averaged.values()]
    drawn = [bootstrap(d, np.ones_like(d), seed=seed, part=n) for n, (_, d) in enumerate(averaged.values())]
    return Difference(
        "commonsense",
        "average",
        float(np.mean([row.ours for row in rows])),
        float(np.mean([row.theirs for row in rows])),
        float(np.mean([row.mean for row in rows])),
        *_ends(np.mean(drawn, axis=0)),
        sum(row.n for row in rows),
        sum(row.of for row in rows),
    )


def check_same(ours: Mapping[str, Any], theirs: Mapping[str, Any], names: Sequence[str]) -> None:
    """Refuse results of other items: a paired difference has none to pair."""
    if not names:
        raise TrimtabError(
            f"a comparison needs a task that both have: there is {', '.join(ours['tasks'])} here and "
            f"{', '.join(theirs['tasks']) or 'none'} there"
        )
    for name in names:
        a, b = ours["tasks"][name], theirs["tasks"][name]
        if a["sha256"] != b["sha256"]:
            raise TrimtabError(
                f"arms are compared over the same items: {name} has {a['n']:,} of {a['of']:,} here and {b['n']:,} of "
                f"{b['of']:,} there, with other contents: use the same --data, --limit and --shots for both"
            )


def _ends(drawn: NDArray[np.float64]) -> tuple[float, float, float]:
    """The interval's ends, and what would be detected."""
    low, high = np.percentile(drawn, [2.5, 97.5])
    return float(low), float(high), float(POWER * drawn.std(ddof=1))
