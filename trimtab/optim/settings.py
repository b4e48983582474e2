# SPDX-License-Identifier: Apache-2.0
"""What SPAM's settings and gradients must satisfy: each rule with the value that broke it and the remedy."""

import math
from typing import Any

import torch
from torch import Tensor

from trimtab.checks import check_adam, is_positive, is_whole, require

NAMES = (
    *("lr", "betas", "eps", "weight_decay", "threshold", "reset_every", "warmup", "grace"),
    *("density", "seed", "reference", "foreach", "fused"),
)


def check_group(group: dict[str, Any]) -> None:
    """Refuse settings that cannot work, with the remedy."""
    missing = [name for name in NAMES if name not in group]
    require(not missing, "a group of SPAM has all its settings (was it saved by another optimizer?)", missing)
    grace, period, threshold = group["grace"], group["reset_every"], group["threshold"]
    check_adam(group)
    rule = "threshold must be above 0 (math.inf cuts nothing)"
    require(threshold == math.inf or is_positive(threshold), rule, threshold)
    for name in ("warmup", "grace", "seed"):
        require(is_whole(group[name]), f"{name} must be a whole number of at least 0", group[name])
    require(period is None or is_whole(period, 1), "reset_every must be a whole number, or None for never", period)
    rule = f"reset_every must exceed warmup + grace = {group['warmup'] + grace}, or be None"
    require(period is None or period > group["warmup"] + grace, rule, period)
    rule = "density must lie in (0, 1]; 1.0 keeps all moments"
    require(is_positive(group["density"]) and group["density"] <= 1, rule, group["density"])
    rule = "reference=True needs a grace of at least 2: v = 0 is cut to zero there, and nothing would ever move"
    require(not group["reference"] or threshold == math.inf or grace >= 2, rule, grace)
    rule = "at most one of foreach and fused may be True"
    require(not (group["foreach"] and group["fused"]), rule, (group["foreach"], group["fused"]))
    for p in group["params"]:
        rule = "what SPAM trains must be real floating-point numbers: give complex ones as torch.view_as_real"
        require(p.is_floating_point() or not p.requires_grad, rule, p.dtype)


def check_gradient(grad: Tensor) -> None:
    """Refuse gradients that the arithmetic does not know."""
    rule = "SPAM needs dense gradients: build the embedding with sparse=False"
    require(grad.layout == torch.strided, rule, grad.layout)
