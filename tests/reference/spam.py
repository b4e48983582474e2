# SPDX-License-Identifier: Apache-2.0
"""SPAM letter by letter, one coordinate and one float at a time; counters live outside, as in the published code.

Slow on purpose: no arrays, no closed forms, no shared subexpressions. Source: arXiv 2501.06842, and the facts about
its published code that the specification lists. `Published` is that code's semantics; `Decided` is trimtab's, with the
bias correction restarted, eps after it, and coordinates without a history never cut.
"""

import math


class Published:
    """One tensor of coordinates."""

    def __init__(self, p, *, lr=1e-3, betas=(0.9, 0.999), eps=1e-6, weight_decay=0.0, threshold=5000.0,
                 reset_every=500, warmup=150, grace=20):  # fmt: skip
        self.p = [float(x) for x in p]
        self.m, self.v = [0.0] * len(self.p), [0.0] * len(self.p)
        self.lr, (self.beta1, self.beta2), self.eps, self.weight_decay = lr, betas, eps, weight_decay
        self.threshold, self.reset_every, self.warmup, self.grace = threshold, reset_every, warmup, grace
        self.total = 0  # updates made
        self.since = None  # updates since the last reset; None before the first
        self.age = 0

    def step(self, g):
        self.total += 1
        self.age += 1
        if self.since is not None:
            self.since += 1
        if self.total % self.reset_every == 0:
            for i in range(len(self.p)):
                self.m[i] = 0.0
                self.v[i] = 0.0
            self.since = 0
            self.forget()
        s = 1.0
        if self.since is not None and self.since < self.warmup:
            s = 1.0 - 0.99 * (1.0 + math.cos(math.pi * self.since / (self.warmup + 1))) / 2.0
        position = self.total if self.since is None else self.since
        for i in range(len(self.p)):
            x = float(g[i])
            if position >= self.grace and self.cuts(x, self.v[i]):
                x = math.copysign(math.sqrt(self.threshold * self.v[i]), x)
            self.m[i] = self.beta1 * self.m[i] + (1.0 - self.beta1) * x
            self.v[i] = self.beta2 * self.v[i] + (1.0 - self.beta2) * x * x
            self.p[i] = self.p[i] - self.lr * s * self.direction(self.m[i], self.v[i])
            self.p[i] = self.p[i] - self.lr * self.weight_decay * self.p[i]
        return self.p

    def forget(self):
        """The published counter of the bias correction goes on."""

    def cuts(self, x, v):
        return x * x > self.threshold * v

    def direction(self, m, v):
        correction1, correction2 = 1.0 - self.beta1**self.age, 1.0 - self.beta2**self.age
        return math.sqrt(correction2) / correction1 * m / (math.sqrt(v) + self.eps)


class Decided(Published):
    """trimtab's semantics."""

    def forget(self):
        self.age = 1

    def cuts(self, x, v):
        return v > 0.0 and x * x > self.threshold * v

    def direction(self, m, v):
        corrected_m, corrected_v = m / (1.0 - self.beta1**self.age), v / (1.0 - self.beta2**self.age)
        return corrected_m / (math.sqrt(corrected_v) + self.eps)
