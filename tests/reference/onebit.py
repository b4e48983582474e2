# SPDX-License-Identifier: Apache-2.0
"""1-bit Adam letter by letter, all ranks in one process and in float64; and the method that the paper shows to fail.

Slow on purpose: every chunk of every tensor of every rank is a plain array, nothing is packed and nothing is sent.
Source: arXiv 2102.02888, with the decisions that the specification lists (bias corrections, decoupled decay, the real
number of elements in every scale). `wire` is the type in which scales travel.
"""

import math

import numpy as np


def array(tensor):
    return tensor.detach().double().numpy().reshape(-1).copy()


def sign(z):
    return np.where(z >= 0, 1.0, -1.0)


def scale_of(z, kind):
    if z.size == 0:
        return 0.0
    return math.sqrt(float(np.square(z).sum()) / z.size) if kind == "l2" else float(np.abs(z).sum()) / z.size


def compress(z, kind="l2", wire=np.float32):
    return float(wire(scale_of(z, kind))) * sign(z)


def chunk_of(n, num_ranks):
    """Elements that one rank serves: a multiple of 8."""
    return math.ceil(n / (8 * num_ranks)) * 8


class Mean:
    """The two-phase mean of one tensor of n elements over N ranks, with its errors."""

    def __init__(self, n, num_ranks, kind="l2"):
        self.n, self.num_ranks, self.kind = n, num_ranks, kind
        self.worker = [np.zeros(n) for _ in range(num_ranks)]
        self.server = np.zeros(n)

    def __call__(self, inputs):
        sent = []
        for i, x in enumerate(inputs):
            z = x + self.worker[i]
            c = compress(z, self.kind)
            self.worker[i] = z - c
            sent.append(c)
        out, chunk = np.zeros(self.n), chunk_of(self.n, self.num_ranks)
        for j in range(self.num_ranks):
            part = slice(j * chunk, (j + 1) * chunk)
            z = sum(c[part] for c in sent) / self.num_ranks + self.server[part]
            out[part] = compress(z, self.kind)
            self.server[part] = z - out[part]
        return out

    def residual(self):
        return sum(self.worker) / self.num_ranks + self.server


class Adam:
    """1-bit Adam of one tensor over N ranks. With one rank nothing is compressed."""

    def __init__(self, p, num_ranks, *, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=1e-2, warmup=3, kind="l2"):
        self.p = array(p)
        self.m, self.v, self.t = np.zeros(self.p.size), np.zeros(self.p.size), 0
        self.lr, (self.beta1, self.beta2), self.eps, self.weight_decay = lr, betas, eps, weight_decay
        self.warmup, self.num_ranks = warmup, num_ranks
        self.mean = Mean(self.p.size, num_ranks, kind)

    def step(self, grads):
        grads = [array(g) for g in grads]
        self.t += 1
        if self.t <= self.warmup:
            g = sum(grads) / self.num_ranks
            self.m = self.beta1 * self.m + (1 - self.beta1) * g
            self.v = self.beta2 * self.v + (1 - self.beta2) * g**2
        else:
            local = [self.beta1 * self.m + (1 - self.beta1) * g for g in grads]
            self.m = local[0] if self.num_ranks == 1 else self.mean(local)
        den = np.sqrt(self.v / (1 - self.beta2 ** min(self.t, self.warmup))) + self.eps
        move = np.where(self.v > 0, self.m / (1 - self.beta1**self.t) / den, 0.0)
        self.p = self.p - self.lr * (move + self.weight_decay * self.p)


class NaiveAdam(Adam):
    """What does not work: the gradient is compressed with error feedback, and both of Adam's moments live on it."""

    def step(self, grads):
        self.t += 1
        g = self.mean([array(g) for g in grads])
        self.m = self.beta1 * self.m + (1 - self.beta1) * g
        self.v = self.beta2 * self.v + (1 - self.beta2) * g**2
        den = np.sqrt(self.v / (1 - self.beta2**self.t)) + self.eps
        self.p = self.p - self.lr * (self.m / (1 - self.beta1**self.t) / den + self.weight_decay * self.p)
