# SPDX-License-Identifier: Apache-2.0
"""Who gets which optimizer: Muon for the matrices and AdamW for the rest (OSP), and where SPAM's momentum is sparse.

    AdamW    embeddings, the output head (tied or not), every vector and scalar
    Muon     all other matrices, an `EmbProj` among them

Roles are read off the types of modules and the shapes of weights, never off names. Muon replaces the momentum of a
matrix by the nearest matrix with equal singular values, so no direction and no single feature grows faster than the
others: that is where outlier-free training begins (arXiv 2506.19697). With momentum B and gradient g:

    B <- g + mu B;   U = g + mu B                                          Nesterov
    X = orthogonalise(U)                                                   five Newton-Schulz steps in BF16
    W <- W - lr (0.2 sqrt(max(rows, cols)) X + wd W)

which is `torch.optim.Muon` with `adjust_lr_fn="match_rms_adamw"`; its default scales otherwise. The factor gives an
update the size that AdamW's has, so that both work at one learning rate. OSP gives vectors and scalars a normalised
momentum of their own; AdamW is used here instead, since a single number has no basis to privilege.

`embeddings="muon"` is the paper's row "Muon everywhere". Muon orthogonalises whole matrices: it cannot work on shards.
"""

from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim import AdamW, Optimizer

from trimtab.checks import is_number, require
from trimtab.errors import TrimtabError
from trimtab.modules import output_head
from trimtab.shards import is_dtensor


class Split(NamedTuple):
    """The trainable parameters of a model by path, each in one of two parts."""

    muon: dict[str, nn.Parameter]
    adam: dict[str, nn.Parameter]


def split(
    model: nn.Module, *, embeddings: str = "adam", stacked: str = "refuse", head: nn.Module | str | None = None
) -> Split:
    """Divide a model's trainable parameters between Muon and AdamW.

    Args:
        embeddings: who gets embeddings and the output head, `"adam"` or `"muon"`.
        stacked: what to do with weights of three and more dimensions (experts kept as one tensor, convolutions), which
            Muon does not take: `"refuse"`, or `"adam"`.
        head: the output head (a module or its path), where it is not found by itself.
    """
    require(embeddings in ("adam", "muon"), "embeddings must be 'adam' or 'muon'", embeddings)
    require(stacked in ("refuse", "adam"), "stacked must be 'refuse' or 'adam'", stacked)
    tables = [module for module in model.modules() if isinstance(module, nn.Embedding | nn.EmbeddingBag)]
    last = output_head(model, head)
    ends = {id(p) for module in (*tables, *([last] if last is not None else [])) for p in module.parameters()}
    parts = Split({}, {})
    for path, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        if parameter.ndim > 2 and stacked == "refuse":
            raise TrimtabError(
                f"Muon takes matrices, got {path!r} of shape {tuple(parameter.shape)}: keep each matrix as a parameter "
                'of its own, or pass stacked="adam" to train such weights by AdamW'
            )
        plain = parameter.ndim == 2 and (id(parameter) not in ends or embeddings == "muon")
        (parts.muon if plain else parts.adam)[path] = parameter
    return parts


def osp_optimizers(
    model: nn.Module,
    lr: float = 5e-4,
    weight_decay: float = 0.01,
    *,
    adam_lr: float | None = None,
    adam_betas: tuple[float, float] = (0.9, 0.95),
    momentum: float = 0.95,
    embeddings: str = "adam",
    stacked: str = "refuse",
    head: nn.Module | str | None = None,
) -> list[Optimizer]:
    """The optimizers of outlier-safe training: [Muon, AdamW]; step and zero both. AdamW is left out if it has no work.

    Args:
        lr: Muon's learning rate.
        weight_decay: of both, on everything they train.
        adam_lr: AdamW's learning rate; None means `lr` (the paper does not say which it used).
        momentum: Muon's.
        embeddings: see `split`, as for `stacked` and `head`.
    """
    muon_class = getattr(torch.optim, "Muon", None)
    if muon_class is None:
        raise TrimtabError(
            f"osp_optimizers needs torch.optim.Muon, which is in torch 2.9 and later, got torch {torch.__version__}: "
            "pip install --upgrade 'torch>=2.9'"
        )
    muon, adam = split(model, embeddings=embeddings, stacked=stacked, head=head)
    if not muon:
        raise TrimtabError(
            f"osp_optimizers needs at least one trainable matrix for Muon, got {len(adam)} trainable parameters and "
            "none such: pass the model before its parameters are flattened or frozen"
        )
    for path, parameter in muon.items():
        if is_dtensor(parameter):
            raise TrimtabError(
                f"torch.optim.Muon needs whole matrices, got {path!r} as a shard (DTensor): replicate the model (DDP), "
                "or use a sharded Muon (microsoft/dion, torchtitan, NVIDIA-NeMo/Emerging-Optimizers) on split(model)"
            )
    # Nesterov is not a choice: without it torch up to 2.13 corrupts the momentum of BF16 parameters.
    optimizers: list[Optimizer] = [
        muon_class(
            list(muon.values()),
            lr=lr,
            weight_decay=weight_decay,
            momentum=momentum,
            nesterov=True,
            adjust_lr_fn="match_rms_adamw",
        )
    ]
    if adam:
        rate = lr if adam_lr is None else adam_lr
        optimizers.append(AdamW(list(adam.values()), lr=rate, betas=adam_betas, weight_decay=weight_decay))
    return optimizers


def spam_groups(model: nn.Module, density: float, head: nn.Module | str | None = None) -> list[dict[str, Any]]:
    """Parameter groups for `SPAM` with sparse momentum: `density` for the weights of linears, 1.0 for all else.

    The published scope: embeddings, norms, biases and the output head stay dense.
    """
    require(is_number(density) and 0 < density <= 1, "density must lie above 0 and be at most 1", density)
    last = output_head(model, head)
    ends = {id(p) for p in last.parameters()} if last is not None else set()
    linears = {id(m.weight) for m in model.modules() if isinstance(m, nn.Linear)} - ends
    trainable = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trainable if id(p) in linears], "density": density},
        {"params": [p for p in trainable if id(p) not in linears], "density": 1.0},
    ]
    if not groups[0]["params"]:
        raise TrimtabError(
            "sparse momentum needs a trainable nn.Linear besides the output head, and the model has none"
        )
    return [group for group in groups if group["params"]]
