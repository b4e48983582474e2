# SPDX-License-Identifier: Apache-2.0
"""Optimizers and gradient transforms that survive spikes, and who gets which optimizer.

spam.py        SPAM: spike-aware Adam with momentum reset; settings.py its checks, sparse.py its sparse momentum
kernels.py     one update of SPAM, in a loop or many tensors at once; fused.py as one Triton launch
stabilizer.py  GradStabilizer: keeps a gradient's direction and replaces its size; with `clip_gamma`, Stable-SPAM's part
clipping.py    ZClip, AdaGC, AutoClip: clipping against a history of norms
skipping.py    SkipStep: no step at all where norm or loss is an outlier
transform.py   what these transforms share; scaling.py their one Triton launch, launch.py the tables of both
groups.py      osp_optimizers: Muon for matrices, AdamW for the rest; spam_groups: who gets sparse momentum
spikes.py      GradSpikes: how often and how far coordinates spike, by kind of layer

Stable-SPAM is a combination, not a class:

    GradStabilizer(params, gammas=(0.7, 0.9), clip_gamma=0.999)
    SPAM(params, threshold=math.inf, warmup=0, grace=0, reset_every=1000, eps=1e-8)       every 500 at 4 bit
"""

from trimtab.optim.clipping import AdaGC, AutoClip, ZClip
from trimtab.optim.groups import osp_optimizers, spam_groups
from trimtab.optim.skipping import SkipStep
from trimtab.optim.spam import SPAM
from trimtab.optim.spikes import GradSpikes
from trimtab.optim.stabilizer import GradStabilizer

__all__ = [
    "SPAM",
    "AdaGC",
    "AutoClip",
    "GradSpikes",
    "GradStabilizer",
    "SkipStep",
    "ZClip",
    "osp_optimizers",
    "spam_groups",
]
