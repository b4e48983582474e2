# SPDX-License-Identifier: Apache-2.0
"""EmbProj: a learned square matrix after the embedding and before the output head (OSP, arXiv 2506.19697, section 3.4).

    x_0     = P E[token]               P, R  dim x dim, orthogonal at the start, free afterwards, no bias
    logits  = H (R norm(x_L))

Embedding and head are best trained by Adam, which works on single features and lets outliers grow there. P and R are
trained by Muon, which has no favourite feature, and spread what the embedding concentrates before it enters the
residual stream. Orthogonal at the start, they change no norm.

After training they are multiplied into their neighbours, and an ordinary model is left:

    E' = E P^T          H' = H R

E' and H' differ, so a model with tied embeddings leaves training untied: `absorb_`, given the model, refuses a shared
weight, because folding P into it would change the other place it is used in.

An `EmbProj` is an `nn.Linear` by class, so optimizers treat it as the matrix it is. `trimtab.convert_` passes over it
as it does over embedding and head (it covers plain `nn.Linear` only): in the model that is deployed it is part of them.
"""

import torch
from torch import Tensor, nn

from trimtab.errors import TrimtabError


def fold_embedding(
    embedding: Tensor,  # (tokens, dim)
    projection: Tensor,  # (dim, dim)
) -> Tensor:  # (tokens, dim)
    """E P^T: the embedding whose rows are projected already; multiplied in float64, in the embedding's dtype."""
    return (embedding.double() @ projection.double().T).to(embedding.dtype)


def fold_head(
    head: Tensor,  # (tokens, dim)
    projection: Tensor,  # (dim, dim)
) -> Tensor:  # (tokens, dim)
    """H R: the head that projects its input itself; multiplied in float64, in the head's dtype."""
    return (head.double() @ projection.double()).to(head.dtype)


class EmbProj(nn.Linear):
    """A linear map of `dim` features onto as many, orthogonal at the start, that an embedding or head can absorb."""

    def __init__(self, dim: int, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> None:
        super().__init__(dim, dim, bias=False, device=device, dtype=dtype)

    @torch.no_grad()
    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Draw a random orthogonal matrix: on the CPU in FP32, so that a seed means the same one on every device.

        On the meta device nothing is drawn.
        """
        if self.weight.is_meta:
            return
        drawn = torch.empty(self.weight.shape, dtype=torch.float32, device="cpu")
        self.weight.copy_(nn.init.orthogonal_(drawn, generator=generator))

    @torch.no_grad()
    def absorb_(self, target: nn.Embedding | nn.Linear, model: nn.Module | None = None) -> None:
        """Multiply this projection into the embedding before it or the head after it, and become the identity.

        The model computes what it did, to the rounding of its dtype; an identity may then be left out.

        Args:
            target: the embedding whose output comes here, or the linear that takes what comes out of here.
            model: what holds `target`. It is searched for other users of the weight, which would change with it, and
                such a tied weight is refused; a target alone does not show that it is tied.
        """
        self._check(target, model)
        fold = fold_embedding if isinstance(target, nn.Embedding) else fold_head
        target.weight.copy_(fold(target.weight, self.weight))
        nn.init.eye_(self.weight)

    def _check(self, target: nn.Embedding | nn.Linear, model: nn.Module | None) -> None:
        if not isinstance(target, nn.Embedding | nn.Linear):
            raise TrimtabError(f"absorb_ takes an nn.Embedding or an nn.Linear, got a {type(target).__name__}")
        if target.weight.shape[1] != self.in_features:
            raise TrimtabError(
                f"a projection of {self.in_features} features fits a weight of as many columns, got one of shape "
                f"{tuple(target.weight.shape)}: pass the embedding before it or the head after it"
            )
        if isinstance(target, nn.Embedding) and target.max_norm is not None:
            raise TrimtabError(
                f"an embedding with max_norm ({target.max_norm}) rescales its rows when they are read, which a product "
                "cannot hold: set max_norm to None first"
            )
        if model is None:
            return
        users = [path for path, module in model.named_modules() if getattr(module, "weight", None) is target.weight]
        if not users:
            raise TrimtabError("model must be the module that holds the target, got one without its weight")
        if len(users) > 1:
            raise TrimtabError(
                f"a tied weight cannot absorb a projection, got one shared by {' and '.join(users)}: the other place "
                "would change too; untie it first, head.weight = nn.Parameter(head.weight.detach().clone())"
            )
