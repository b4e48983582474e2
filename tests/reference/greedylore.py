# SPDX-License-Identifier: Apache-2.0
"""GreedyLore for one matrix in one process, letter by letter: fed with the mean gradient, it is what N ranks do.

It orients by hand, takes the basis from an SVD, keeps one residual (the ranks' mean) and knows no distributed code.
"""

import torch


class GreedyLore:
    def __init__(self, rank, every, start):
        self.rank, self.every, self.start = rank, every, start
        self.step, self.error, self.basis = 0, None, None

    def __call__(self, grad, probes, basis=None, chosen=None):
        """One step: `probes` (q, a, b); `basis` and `chosen` replace what it would take by itself."""
        flat = grad.reshape(grad.shape[0], -1)
        tall = flat.shape[0] > flat.shape[1]
        h = flat.T if tall else flat
        self.step += 1
        if self.step > self.start:
            h = h if self.error is None else h + self.error
            if (self.step - self.start - 1) % self.every == 0:
                self.basis = torch.linalg.svd(h, full_matrices=False)[0] if basis is None else basis
                self.error = torch.zeros_like(h)
            else:
                rows = self.basis.T @ h
                energy = sum((rows * v).sum(1) ** 2 for v in probes)
                if chosen is None:
                    chosen = sorted(range(len(energy)), key=lambda j: (-float(energy[j]), j))[: self.rank]
                p = self.basis[:, chosen]
                self.error = h - p @ (p.T @ h)
                h = p @ (p.T @ h)
        return (h.T if tall else h).reshape(grad.shape)
