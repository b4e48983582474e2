# SPDX-License-Identifier: Apache-2.0
"""The gradient transforms letter by letter, on numpy arrays and Python floats, one tensor and one step at a time.

Sources: GradientStabilizer arXiv 2502.17055 v4, Stable-SPAM its v1 to v3 (counters as pytorch_optimizer 4.1 separates
them), ZClip arXiv 2504.02507, AdaGC arXiv 2502.11034, AutoClip arXiv 2007.14469.
"""

import math

import numpy as np


class Stabilizer:
    """One tensor of GradientStabilizer or AdaGN."""

    def __init__(self, gamma1, gamma2, *, correct=True, eps=0.0):
        self.gamma1, self.gamma2, self.correct, self.eps = gamma1, gamma2, correct, eps
        self.m = self.v = 0.0
        self.t = 0

    def rho(self, R):
        self.t += 1
        self.m = self.gamma1 * self.m + (1 - self.gamma1) * R
        self.v = self.gamma2 * self.v + (1 - self.gamma2) * R**2
        m, v = self.m, self.v
        if self.correct:
            m, v = m / (1 - self.gamma1**self.t), v / (1 - self.gamma2**self.t)
        return m / (math.sqrt(v) + self.eps)

    def __call__(self, g):
        R = float(np.linalg.norm(g))
        return self.rho(R) * g / R


class AdaClip:
    """One tensor of Stable-SPAM's AdaClip."""

    def __init__(self, gamma3):
        self.gamma3, self.T, self.t = gamma3, 0.0, 0

    def __call__(self, g):
        self.t += 1
        gmax = float(np.abs(g).max())
        self.T = self.gamma3 * self.T + (1 - self.gamma3) * gmax
        hat = self.T / (1 - self.gamma3**self.t)
        g = g.copy()
        for i in range(g.size):
            if abs(g.flat[i]) > hat:
                g.flat[i] = g.flat[i] / gmax * hat
        return g


class Adam:
    """Adam that wipes m and v, and its own counter, in every step whose number is a multiple of `reset_every`."""

    def __init__(self, p, lr, betas, eps, reset_every):
        self.p, self.lr, self.betas, self.eps, self.reset_every = p.copy(), lr, betas, eps, reset_every
        self.m, self.v = np.zeros_like(p), np.zeros_like(p)
        self.age = self.total = 0

    def step(self, g):
        self.total += 1
        self.age += 1
        if self.total % self.reset_every == 0:
            self.m[:], self.v[:], self.age = 0, 0, 1
        b1, b2 = self.betas
        self.m = b1 * self.m + (1 - b1) * g
        self.v = b2 * self.v + (1 - b2) * g * g
        mhat, vhat = self.m / (1 - b1**self.age), self.v / (1 - b2**self.age)
        self.p = self.p - self.lr * mhat / (np.sqrt(vhat) + self.eps)


class ZClip:
    """The clipped value of each norm."""

    def __init__(self, alpha=0.97, z_thres=2.5, warmup=25, eps=1e-6):
        self.alpha, self.z_thres, self.warmup, self.eps = alpha, z_thres, warmup, eps
        self.buffer = []
        self.mu = self.var = None

    def __call__(self, n):
        if self.mu is None:
            self.buffer.append(n)
            if len(self.buffer) == self.warmup:
                self.mu, self.var = float(np.mean(self.buffer)), float(np.var(self.buffer))
            return n
        sigma = math.sqrt(self.var)
        z = (n - self.mu) / (sigma + self.eps)
        if z > self.z_thres:
            n = self.mu + self.z_thres**2 / z * sigma
        self.mu = self.alpha * self.mu + (1 - self.alpha) * n
        self.var = self.alpha * self.var + (1 - self.alpha) * (n - self.mu) ** 2
        return n


class AdaGC:
    """The clipped norms of a list of tensors."""

    def __init__(self, beta=0.98, lambda_rel=1.05, lambda_abs=1.0, warmup=100):
        self.beta, self.lambda_rel, self.lambda_abs, self.warmup = beta, lambda_rel, lambda_abs, warmup
        self.gamma, self.t = None, 0

    def __call__(self, norms):
        self.t += 1
        if self.t <= self.warmup:
            total = math.sqrt(sum(n * n for n in norms))
            clipped = [n * min(1.0, self.lambda_abs / total) for n in norms]
            self.gamma = (
                clipped if self.gamma is None else [min(a, b) for a, b in zip(self.gamma, clipped, strict=True)]
            )
            return clipped
        clipped = [n * min(1.0, self.lambda_rel * a / n) for a, n in zip(self.gamma, norms, strict=True)]
        self.gamma = [self.beta * a + (1 - self.beta) * n for a, n in zip(self.gamma, clipped, strict=True)]
        return clipped


class AutoClip:
    """The clipped value of each norm, over the whole history."""

    def __init__(self, percentile=10):
        self.percentile, self.history = percentile, []

    def __call__(self, n):
        self.history.append(n)
        return min(n, float(np.percentile(self.history, self.percentile)))
