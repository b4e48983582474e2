# SPDX-License-Identifier: Apache-2.0
"""Calibration sequences out of a text, and the perplexity of a model on another.

windows       n sequences of `length` tokens that do not overlap, spread over the text by the seed
perplexity    exp of the mean loss over windows of `length` tokens, one after the other; the first token of a
              window has nothing before it and is not counted. Longer windows give lower figures: state the length.
"""

import math

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from trimtab.errors import TrimtabError
from trimtab.retrain.blocks import run


def windows(tokens: Tensor, num: int, length: int, *, seed: int = 0) -> Tensor:
    """`num` sequences of `length` tokens that do not overlap, (num, length)."""
    if num < 1 or length < 2:
        raise TrimtabError(f"calibration needs at least 1 sequence of at least 2 tokens, got {num} of {length}")
    places = len(tokens) // length
    if places < num:
        raise TrimtabError(
            f"{num} calibration sequences of {length} tokens need {num * length:,} tokens, the text has "
            f"{len(tokens):,}: give more text, fewer or shorter sequences"
        )
    chosen = torch.randperm(places, generator=torch.Generator().manual_seed(seed))[:num].sort().values
    return torch.stack([tokens[at * length : (at + 1) * length] for at in chosen.tolist()])


@torch.no_grad()
def perplexity(model: nn.Module, tokens: Tensor, length: int, *, batch: int = 1) -> float:
    """The perplexity of a language model on whole windows of a text."""
    places = len(tokens) // length
    if length < 2 or not places:
        raise TrimtabError(f"a perplexity needs at least one window of {length} tokens, the text has {len(tokens)}")
    total = 0.0
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    for part in tokens[: places * length].view(places, length).split(batch):
        found = run(model, part)
        logits = getattr(found, "logits", found)
        losses = cross_entropy(
            logits[:, :-1].flatten(0, 1).float(), part[:, 1:].flatten().to(logits.device), reduction="sum"
        )
        total += float(losses)
    for module, mode in modes:
        module.training = mode
    return math.exp(min(total / (places * (length - 1)), 700.0))
