# SPDX-License-Identifier: Apache-2.0
"""GradSpikes: where gradient spikes occur, how often, and how large they are.

SPAM (arXiv 2501.06842) calls a coordinate's gradient a spike when its gradient spike score exceeds 50:

    GSS = |g| / mean of |g| over time

The paper takes the mean over a whole recorded run, the scored step included. A probe that runs along cannot know the
future, so here the mean is over the *past* steps alone, and a parameter is scored only after `warmup` steps of its
own. Two consequences: a score has no upper bound (the paper's cannot exceed the number of steps), and where gradients
shrink over training, as they usually do, it reads somewhat low. With few past steps a mean can be small by chance:
for Gaussian gradients one coordinate in 80 passes 50 after a single step, and none in practice after ten.

What is not scored: a coordinate whose past mean is zero (a row of an embedding not met so far), and one that is Inf or
NaN now, which never enters the mean either. A coordinate that is mostly zero does have a mean, a small one: rows of
rare tokens score high by the paper's definition, so read the share of the embeddings with that in mind.

The cost is one FP32 tensor per parameter, as much as one of Adam's two averages, and a few passes over every gradient
per step. Nothing waits for the device before `summary()`. It is a probe for a run that one wants to understand, not
something to leave on:

    spikes = GradSpikes(model)
    loss.backward(); spikes.step()          # before any clipping; then the optimizer as always
    spikes.summary()                        # {"norm": {"share": 2e-5, "largest": 310.0, ...}, "attention": ...}

Under FSDP2 or tensor parallelism each process scores the shard it holds.
"""

from typing import NamedTuple, TypedDict

import torch
from torch import Tensor, nn

from trimtab.checks import is_positive, is_whole, require
from trimtab.errors import TrimtabError
from trimtab.modules import output_head
from trimtab.shards import is_partial, local

KINDS = ("norm", "embedding", "head", "attention", "mlp", "other")
ATTENTION = ("attn", "attention")
MLP = ("mlp", "ffn", "feedforward", "feed_forward", "swiglu", "moe", "expert", "mixture")

LARGEST = 1e30  # a score is cut off here, so that sums of scores stay finite


class Spikes(NamedTuple):
    """What one gradient shows."""

    scored: Tensor
    """How many of its coordinates were scored."""
    found: Tensor
    """How many of these are spikes."""
    total: Tensor
    """Sum of the scores of the spikes."""
    largest: Tensor
    """The largest score of all, spike or not."""


class Summary(TypedDict):
    """What the parameters of one kind have shown so far."""

    parameters: int
    """Tensors of this kind."""
    scored: int
    """Coordinates scored, added up over steps."""
    spikes: int
    share: float
    """Spikes per scored coordinate."""
    mean: float
    """Mean score of the spikes, 0 if there are none."""
    largest: float
    """The largest score, spike or not."""


def kind_of(model: nn.Module, fqn: str, *, head: nn.Module | str | None = None) -> str:
    """The kind of layer that a parameter belongs to, by the type of its module, then by names.

    A tied weight is what it is named after: `named_parameters` lists it once, mostly as the embedding. `head`, a module
    or its path, overrides the search for the output head.
    """
    path = fqn.split(".")[:-1]
    owners = [model]
    for name in path:
        owners.append(owners[-1].get_submodule(name))
    owner = owners[-1]
    if owner is output_head(model, head):
        return "head"
    if isinstance(owner, nn.Embedding):
        return "embedding"
    if "norm" in type(owner).__name__.lower():
        return "norm"
    for name, module in zip(reversed(path), reversed(owners), strict=False):  # from the inside out, not the model
        words = f"{name} {type(module).__name__}".lower()
        for kind, signs in (("attention", ATTENTION), ("mlp", MLP)):
            if any(sign in words for sign in signs):
                return kind
    return "other"


def score(grad: Tensor, mean: Tensor, threshold: float) -> Spikes:
    """Score a gradient against the mean of |g| in the past; both of one shape."""
    size = grad.abs().to(mean.dtype)
    scored = (mean > 0) & torch.isfinite(size)
    scores = torch.where(scored, (size / mean).clamp(max=LARGEST), 0.0)
    spikes = scores > threshold
    largest = scores.max() if scores.numel() else scores.sum()
    return Spikes(scored.sum(), spikes.sum(), torch.where(spikes, scores, 0.0).sum(), largest)


def update_mean_(mean: Tensor, grad: Tensor, steps: int) -> None:
    """Let a gradient into the mean of |g|, as number `steps` (from 1); what is not finite stays out."""
    size = grad.abs().to(mean.dtype)
    mean.copy_(torch.where(torch.isfinite(size), mean + (size - mean) / steps, mean))


class GradSpikes:
    """Counts the spikes among all coordinates of a model's gradients, by kind of layer.

    Args:
        model: all its parameters that require a gradient are watched.
        threshold: the score from which on a coordinate is a spike.
        warmup: steps a parameter needs in its mean before it is scored.
        head: the output head, a module or its path, where `output_head` would not find it.
    """

    def __init__(
        self, model: nn.Module, threshold: float = 50.0, *, warmup: int = 20, head: nn.Module | str | None = None
    ) -> None:
        require(is_positive(threshold), "threshold must be above 0", threshold)
        require(is_whole(warmup, 1), "warmup must be at least 1 step, or there is no mean", warmup)
        self.threshold, self.warmup = threshold, warmup
        self._params = {name: param for name, param in model.named_parameters() if param.requires_grad}
        require(bool(self._params), "model must have a parameter that requires a gradient", type(model).__name__)
        self.kinds = {name: kind_of(model, name, head=head) for name in self._params}
        """The kind of each watched parameter, by name."""
        self._mean = {name: _zeros(param) for name, param in self._params.items()}
        self._steps = dict.fromkeys(self._params, 0)
        self._so_far: dict[str, Spikes] = {}

    @torch.no_grad()
    def step(self) -> None:
        """Score the gradients of this step, then let them into the means."""
        for name, param in self._params.items():
            if param.grad is None:
                continue
            if param.grad.is_sparse or is_partial(param.grad):
                raise TrimtabError(
                    f"gradients must be dense and added up to be scored, got {name} with a sparse or Partial one: "
                    "build embeddings with sparse=False, redistribute Partial gradients to Replicate or Shard"
                )
            grad = local(param.grad)
            mean = self._mean[name] = self._mean[name].to(grad.device)  # the model may have been moved
            if self._steps[name] >= self.warmup:
                found, before = score(grad, mean, self.threshold), self._so_far.get(name)
                self._so_far[name] = found if before is None else _added(before, found)
            self._steps[name] += 1
            update_mean_(mean, grad, self._steps[name])

    def summary(self) -> dict[str, Summary]:
        """What was found so far, for each kind of layer that the model has."""
        found = {kind: Summary(parameters=0, scored=0, spikes=0, share=0.0, mean=0.0, largest=0.0) for kind in KINDS}
        for name, kind in self.kinds.items():
            entry = found[kind]
            entry["parameters"] += 1
            if name in self._so_far:
                scored, spikes, total, largest = (value.item() for value in self._so_far[name])
                entry["scored"] += int(scored)
                entry["spikes"] += int(spikes)
                entry["mean"] += total  # the sum for now
                entry["largest"] = max(entry["largest"], largest)
        for entry in found.values():
            entry["share"] = entry["spikes"] / max(entry["scored"], 1)
            entry["mean"] /= max(entry["spikes"], 1)
        return {kind: entry for kind, entry in found.items() if entry["parameters"]}


def _zeros(param: Tensor) -> Tensor:
    return torch.zeros_like(local(param.detach()), dtype=torch.float32)


def _added(one: Spikes, other: Spikes) -> Spikes:
    return Spikes(
        one.scored + other.scored,
        one.found + other.found,
        one.total + other.total,
        torch.maximum(one.largest, other.largest),
    )
