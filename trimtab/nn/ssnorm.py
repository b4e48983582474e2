# SPDX-License-Identifier: Apache-2.0
"""SSNorm: a root-mean-square norm with one gain for all features (OSP, arXiv 2506.19697, section 3.3).

    SSNorm    y = gamma * x / rms(x)          gamma a single number        rms(x) = sqrt(mean(x^2) + eps)
    RMSNorm   y = gamma * x / rms(x)          gamma one number per feature

A gain per feature privileges the features: the optimizer can make one of them large for all tokens, and a channel
that is large for all tokens is what a 4-bit activation cannot hold. One number scales the whole vector and leaves
the directions equal. Without any gain the network starves early in training or is unstable late (the paper's reason
for keeping the one). The paper prints gamma * x / |x|, its code the form above: they differ by sqrt(dim) in gamma.

It replaces every norm of a model, the final one included. Nothing has to know it afterwards: it equals an RMSNorm
whose weight is filled with gamma (`to_rmsnorm`, and `to_rmsnorms_` for a whole model).
"""

import warnings

import torch
from torch import Tensor, nn

from trimtab.checks import is_positive, is_whole, require
from trimtab.errors import NoEffectWarning, TrimtabError


def ss_norm(
    x: Tensor,  # (..., dim)
    gain: Tensor,  # (1,)
    eps: float,
) -> Tensor:  # (..., dim)
    """Scale each vector to root mean square `gain`.

    Numbers and types are those of `torch.nn.functional.rms_norm` with the gain in every feature, to a rounding. A GPU
    has one kernel for that, and spreading the gain before it (in the backward, summing it up) costs two small ones. A
    CPU has none: there the gain goes into the one factor of each vector, which saves a pass.
    """
    if x.is_cuda and x.dtype == gain.dtype:
        dims = x.shape[-1:]
        return torch.rms_norm(x, dims, gain.expand(dims), eps)
    wide = torch.promote_types(torch.promote_types(x.dtype, gain.dtype), torch.float32)
    u, gain = x.to(wide), gain.to(wide)
    return (u * (torch.rsqrt(u.square().mean(dim=-1, keepdim=True) + eps) * gain)).to(x.dtype)


class SSNorm(nn.Module):
    """A root-mean-square norm over the last dimension with a single learned gain.

    The gain, `weight`, has shape (1,) and not (): a sharded model must be able to cut it along a dimension.
    """

    def __init__(
        self, dim: int, eps: float = 1e-6, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        require(is_whole(dim, 1), "dim must be a whole number of at least 1", dim)
        require(is_positive(eps), "eps must be a positive number", eps)
        self.dim, self.eps = dim, eps
        self.weight = nn.Parameter(torch.empty(1, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the gain to one."""
        nn.init.ones_(self.weight)

    def forward(self, x: Tensor) -> Tensor:  # (..., dim)
        if x.shape[-1:] != (self.dim,):
            raise TrimtabError(f"the last dimension must be dim = {self.dim}, got an input of shape {tuple(x.shape)}")
        return ss_norm(x, self.weight, self.eps)

    def to_rmsnorm(self) -> nn.RMSNorm:
        """The RMSNorm that computes the same: its weight is filled with the gain."""
        norm = nn.RMSNorm(self.dim, eps=self.eps, device=self.weight.device, dtype=self.weight.dtype)
        with torch.no_grad():
            norm.weight.copy_(self.weight.expand(self.dim))
        norm.weight.requires_grad_(self.weight.requires_grad)
        return norm.train(self.training)

    def extra_repr(self) -> str:
        return f"{self.dim}, eps={self.eps}"


def to_rmsnorms_(model: nn.Module) -> int:
    """Replace every SSNorm inside a model by the RMSNorm that computes the same; returns how many there were.

    For export: the new norms have new parameters (an optimizer made before does not know them) and none of the hooks
    of the old ones.
    """
    if isinstance(model, SSNorm):
        raise TrimtabError(
            "to_rmsnorms_ replaces norms inside a model, got an SSNorm itself: use its to_rmsnorm() and keep what it "
            "returns"
        )
    made: dict[SSNorm, nn.RMSNorm] = {}  # a norm that stands in two places stays one
    for module in list(model.modules()):
        for name, child in module._modules.items():
            if isinstance(child, SSNorm):
                module._modules[name] = made.setdefault(child, child.to_rmsnorm())
    if not made:
        warnings.warn(
            "to_rmsnorms_ changed nothing: the model has no SSNorm; pass the model that holds them",
            NoEffectWarning,
            stacklevel=2,
        )
    return len(made)
