# SPDX-License-Identifier: Apache-2.0
"""The paper's Algorithms 1 and 2, letter by letter, one unit and one number at a time.

Slow on purpose: no arrays, no blocks, no shortcuts. The product is held against it bit for bit.
Source: arXiv 2606.00539, Algorithm 1 (scores), Algorithm 2 (selection, budget, lock).
"""

import math
from collections import deque

import numpy as np


class Scores:
    """Algorithm 1 for one unit."""

    def __init__(self, delta: int, eps: float) -> None:
        self.c, self.A, self.Q, self.delta, self.eps = 0, 0.0, deque(maxlen=delta), delta, eps

    def observe(self, n: float) -> tuple[float, float]:
        self.c += 1
        g = 1.0 if self.c == 1 or self.A == 0 else n / (self.A + self.eps)
        if len(self.Q) == self.delta:
            total = 0.0
            for value in self.Q:
                total = total + value
            d = g / (total / self.delta + self.eps)
        else:
            d = 1.0
        self.A = self.A + (n - self.A) / self.c
        self.Q.append(g)
        return g, d


def run(norms, *, alpha, beta, delta, max_high, lock_steps, eps=1e-12, seen=None, recoverable=None):
    """Algorithms 1 and 2 over a matrix of norms; alpha is a function of the step (from 1).

    Returns (ratio, jump, risk, high, denied, lock) as lists of rows.
    """
    steps, units = norms.shape
    scores = [Scores(delta, eps) for _ in range(units)]
    lock = [0] * units
    rec = [True] * units if recoverable is None else list(recoverable)
    out = {name: [] for name in ("ratio", "jump", "risk", "high", "denied", "lock")}
    for t in range(1, steps + 1):
        ratio, jump, R = [math.nan] * units, [math.nan] * units, [0.0] * units
        for b in range(units):
            n = float(np.float32(norms[t - 1, b]))
            if seen is not None and not seen[t - 1, b]:
                continue  # unobserved: state kept, R = 0
            if not math.isfinite(n):
                ratio[b] = jump[b] = R[b] = math.inf  # history untouched
                continue
            ratio[b], jump[b] = scores[b].observe(n)
            R[b] = ratio[b] / alpha(t)
            if beta is not None:
                R[b] = max(R[b], jump[b] / beta)
        C = [b for b in range(units) if rec[b] and (R[b] > 1 or lock[b] > 0)]
        S = set(sorted(C, key=lambda b: (-R[b], b))[: min(max_high, len(C))])
        for b in range(units):
            if b in S:
                lock[b] = lock_steps if R[b] > 1 else max(lock[b] - 1, 0)
            else:
                lock[b] = 0
        out["ratio"].append(ratio)
        out["jump"].append(jump)
        out["risk"].append(R)
        out["high"].append([b in S for b in range(units)])
        out["denied"].append([rec[b] and R[b] > 1 and b not in S for b in range(units)])
        out["lock"].append(list(lock))
    return {name: np.array(rows) for name, rows in out.items()}
