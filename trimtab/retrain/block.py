# SPDX-License-Identifier: Apache-2.0
"""One decoder block in few bits: ApiQ's objective (arXiv 2402.05147), with a term for salient weights (2504.13932).

x_fp is the stream of the plain model, x_q that of the model whose earlier blocks are quantized already; so each block
also learns to undo what those before it did.

    y_fp = block(x_fp)      y_aug = block(x_q)      y_q = block with Q + LoRA (x_q)

    E = mean (y_q - y_fp)^2 + mean (y_q - y_aug)^2                the second with `aug_loss`
    S = sum over linears and weights of F (W' - W)^2              W' = Q, or Q + LoRA with `after_lora`
    L = E / E_0  +  lam * S / S_0

E_0 and S_0 are the values before the first step, over all sequences: what rounding to nearest costs this block. In the
papers E is a mean over activations and S a sum over weights and over Fisher samples, and lam must be found anew for
every model. Here both are shares of what rounding costs: with lam = 0.1 it is worth as much to remove all of the
salient weight error as to remove a tenth of the output error, whatever the model's size, the scale of its weights, the
number of Fisher samples or bits. (AdamW itself does not see the size of a loss.)

The streams of a block are computed once, then sequences are drawn in an order that depends on the seed and the block
alone. The block runs in its own type, the trained numbers and the loss are FP32.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from trimtab.errors import NonFiniteError, TrimtabError
from trimtab.retrain.blocks import Call, stream
from trimtab.retrain.packed import Packed
from trimtab.retrain.quantizer import ClippedLora
from trimtab.retrain.settings import Settings

Watch = Callable[[int], None]


@dataclass(frozen=True, eq=False)
class Calibrated:
    """What became of a block."""

    y_fp: Tensor
    """The plain block's output on the plain stream."""
    y_q: Tensor
    """The quantized block's output on the quantized stream."""
    linears: Mapping[str, Packed]
    """By their path inside the block."""
    before: float
    """Mean squared error of the output against y_fp, over that of y_fp around 0, rounded to nearest."""
    after: float
    """The same at the end, as stored."""


def calibrate_block(
    block: nn.Module,
    x_fp: Tensor,  # (sequences, length, width)
    x_q: Tensor,  # (sequences, length, width)
    settings: Settings,
    *,
    linears: Mapping[str, nn.Linear] | None = None,
    saliency: Mapping[str, Tensor] | None = None,
    call: Call | None = None,
    index: int = 0,
    watch: Watch | None = None,
) -> Calibrated:
    """Quantize a block, in place: its linears keep their class and get the weight Q + LoRA.

    Args:
        linears: what to quantize, by path inside the block; None means every `nn.Linear`.
        saliency: F by path inside the block; None leaves the term out.
        call: the block's other arguments.
        index: of the block in its model; with the seed it fixes every random number.
        watch: called after each epoch with its number.
    """
    call = Call() if call is None else call
    if linears is None:
        linears = {path: module for path, module in block.named_modules() if isinstance(module, nn.Linear)}
    check_linears(linears)
    generator = torch.Generator().manual_seed(settings.seed * 1_000_003 + index)
    quantizers = {path: ClippedLora(one.weight, settings, generator=generator) for path, one in linears.items()}
    y_fp = run_block(block, call, x_fp, settings.batch)
    targets = [y_fp]
    if settings.aug_loss:
        targets.append(y_fp if x_q is x_fp else run_block(block, call, x_q, settings.batch))
    term = _saliency_term(quantizers, saliency, settings)
    before = _error(block, call, x_q, targets, quantizers, settings.batch)
    if settings.epochs:
        _train(block, call, x_q, targets, quantizers, before, term, settings, generator, watch)
    packed = {path: quantizer.freeze() for path, quantizer in quantizers.items()}
    apply(linears, packed)
    y_q = run_block(block, call, x_q, settings.batch)
    size = _mean_square(y_fp)
    return Calibrated(y_fp, y_q, packed, before[0] / size, _mean_square(y_q - y_fp) / size)


def check_linears(linears: Mapping[str, nn.Linear]) -> None:
    """Refuse linears that cannot be trained for."""
    if not linears:
        raise TrimtabError("a block must hold a linear to quantize, and this one holds none")
    shared = len({id(one.weight) for one in linears.values()}) < len(linears)
    if shared:
        raise TrimtabError("linears that share one weight cannot be quantized apart: such a model is not supported")
    for path, one in linears.items():
        if one.weight.dtype == torch.float16:
            raise TrimtabError(f"{path} is float16, whose gradients underflow: load the model in bfloat16 or float32")


@torch.no_grad()
def run_block(block: nn.Module, call: Call, x: Tensor, batch: int) -> Tensor:
    """A block's output on all sequences."""
    outputs = []
    for part in x.split(batch):
        args, kwargs = call.arguments(part)
        outputs.append(stream(block(*args, **kwargs)))
    return torch.cat(outputs)


@torch.no_grad()
def apply(linears: Mapping[str, nn.Linear], packed: Mapping[str, Packed]) -> None:
    """Give linears the weights that are stored for them."""
    for path, linear in linears.items():
        linear.weight.copy_(packed[path].weight(linear.weight.dtype))


def _saliency_term(
    quantizers: Mapping[str, ClippedLora], saliency: Mapping[str, Tensor] | None, settings: Settings
) -> Callable[[Mapping[str, Tensor], Mapping[str, Tensor]], Tensor] | None:
    """lam * S / S_0 as a function of the quantized and of the merged weights; None where it counts nothing."""
    if saliency is None or not settings.lam or not settings.epochs:
        return None
    F, W = {}, {}
    for path, quantizer in quantizers.items():
        W[path] = quantizer.groups.flatten(1)[:, : quantizer.columns]
        F[path] = saliency[path].to(W[path].device, W[path].dtype)
        if F[path].shape != W[path].shape:
            raise TrimtabError(
                f"the saliency of {path} must have its weight's shape {tuple(W[path].shape)}, got "
                f"{tuple(F[path].shape)}: compute it on this model"
            )

    def error(weights: Mapping[str, Tensor]) -> Tensor:
        return torch.stack([(F[path] * (w - W[path]).square()).sum() for path, w in weights.items()]).sum()

    with torch.no_grad():  # before the first step Q + LoRA is Q
        start = error({path: quantizer.quantized() for path, quantizer in quantizers.items()})
    factor = settings.lam / start.clamp(min=torch.finfo(start.dtype).tiny)
    return lambda quantized, merged: factor * error(merged if settings.after_lora else quantized)


@torch.no_grad()
def _error(
    block: nn.Module,
    call: Call,
    x: Tensor,
    targets: list[Tensor],
    quantizers: Mapping[str, ClippedLora],
    batch: int,
) -> list[float]:
    """The mean squared error against each target, with the weights as they are now."""
    weights = {f"{path}.weight": _like(block, path, quantizer()) for path, quantizer in quantizers.items()}
    sums = [torch.zeros((), dtype=torch.float64, device=x.device) for _ in targets]
    for at in range(0, len(x), batch):
        y = stream(functional_call(block, weights, *call.arguments(x[at : at + batch])))
        for total, target in zip(sums, targets, strict=True):
            total += (y.float() - target[at : at + batch].float()).square().sum(dtype=torch.float64)
    return [float(total) / x.numel() for total in sums]


def _train(
    block: nn.Module,
    call: Call,
    x: Tensor,
    targets: list[Tensor],
    quantizers: Mapping[str, ClippedLora],
    before: list[float],
    term: Callable[[Mapping[str, Tensor], Mapping[str, Tensor]], Tensor] | None,
    settings: Settings,
    generator: torch.Generator,
    watch: Watch | None,
) -> None:
    lr_clip, lr_lora = settings.rates(len(x))
    groups: list[dict[str, Any]] = [
        {"params": [p for q in quantizers.values() for p in q.clipping()], "lr": lr_clip},
        {"params": [p for q in quantizers.values() for p in q.factors()], "lr": lr_lora},
    ]
    optimizer = torch.optim.AdamW(
        [group for group in groups if group["params"]], weight_decay=settings.weight_decay, fused=True
    )
    frozen = {name: parameter.detach() for name, parameter in block.named_parameters()}
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: settings.share(step, len(x)))
    scale = 1 / max(sum(before), torch.finfo(torch.float32).tiny)
    for epoch in range(settings.epochs):
        order = torch.randperm(len(x), generator=generator)
        worst = torch.zeros((), device=x.device)
        for chosen in order.to(x.device).split(settings.batch):
            quantized = {path: quantizer.quantized() for path, quantizer in quantizers.items()}
            merged = {path: quantizer.merged(quantized[path]) for path, quantizer in quantizers.items()}
            weights = {f"{path}.weight": _like(block, path, weight) for path, weight in merged.items()}
            y = stream(functional_call(block, frozen | weights, *call.arguments(x[chosen]))).float()
            loss = scale * sum((y - target[chosen].float()).square().mean() for target in targets)
            if term is not None:
                loss = loss + term(quantized, merged)
            assert isinstance(loss, Tensor)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            worst = torch.maximum(worst, loss.detach())
        if not bool(torch.isfinite(worst)):  # one wait per epoch
            raise NonFiniteError("the loss of a block is not finite: lower the learning rates, or check the model")
        if watch is not None:
            watch(epoch + 1)


def _like(block: nn.Module, path: str, weight: Tensor) -> Tensor:
    return weight.to(block.get_submodule(path).get_parameter("weight").dtype)


def _mean_square(x: Tensor) -> float:
    return float(x.float().square().mean(dtype=torch.float64))
