# SPDX-License-Identifier: Apache-2.0
"""How much the model's loss depends on each weight: the diagonal of the empirical Fisher information.

    F_ij = sum over sequences of (d loss / d W_ij)^2        squared per sequence, then summed; divided by its mean

The square of a summed gradient would be another number (gradients of different sequences cancel), so there is one
backward per sequence. A gradient is squared, added to a sum on the CPU and dropped as soon as it is there: beside the
model, one gradient at a time is held, and not one for every weight. Each linear's F has mean 1, because its raw size
says how many sequences there were, and what the loss was scaled by, before it says anything of weights.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from trimtab.errors import TrimtabError
from trimtab.retrain import packed as files
from trimtab.retrain.cover import cover

Watch = Callable[[int], None]


def next_token_loss(model: nn.Module, tokens: Tensor) -> Tensor:
    """The mean loss of each token given those before it; tokens (batch, length)."""
    found = model(tokens)
    logits = getattr(found, "logits", found)
    if not isinstance(logits, Tensor) or logits.dim() != 3:
        raise TrimtabError(
            f"a language model returns logits of shape (batch, length, vocabulary), got {type(logits).__name__}: give "
            "a loss of your own"
        )
    return cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())


def saliency(
    model: nn.Module,
    sequences: Iterable[Any],
    *,
    paths: Iterable[str] | None = None,
    loss: Callable[[nn.Module, Any], Tensor] | None = None,
    watch: Watch | None = None,
) -> dict[str, Tensor]:
    """The normalised diagonal Fisher information of a model's linears, by path, on the CPU.

    The model is left as it was, gradients included; it is evaluated in eval mode.

    Args:
        sequences: token tensors, (length) or (1, length), one sample each; with `loss` anything that it takes.
        paths: of the linears; None means all that are quantized by default (`cover.py`).
        loss: (model, sample) -> a scalar; None is the mean next-token loss.
        watch: called with the number of sequences done.
    """
    linears = cover(model, (), None)[0] if paths is None else {path: model.get_submodule(path) for path in paths}
    weights = {path: linear.get_parameter("weight") for path, linear in linears.items()}
    if not weights:
        raise TrimtabError("saliency needs a model with linears to look at, and found none: give their paths")
    total = {path: torch.zeros_like(w, dtype=_sum_type(w), device="cpu") for path, w in weights.items()}
    parameters = list(model.parameters())
    before = [(parameter, parameter.requires_grad, parameter.grad) for parameter in parameters]
    modes = [(module, module.training) for module in model.modules()]
    chosen = {id(weight) for weight in weights.values()}
    hooks = []
    done = 0
    try:
        model.eval()
        for parameter in parameters:
            parameter.grad = None
            parameter.requires_grad_(id(parameter) in chosen)
        for path, weight in weights.items():
            hooks.append(weight.register_post_accumulate_grad_hook(_adder(total[path])))
        device = parameters[0].device
        for sample in sequences:
            if loss is None:
                tokens = torch.as_tensor(sample, device=device)
                tokens = tokens.unsqueeze(0) if tokens.dim() == 1 else tokens
                if tokens.dim() != 2 or tokens.shape[0] != 1 or tokens.shape[1] < 2:
                    raise TrimtabError(
                        f"saliency takes one sequence of at least 2 tokens at a time, got {tuple(tokens.shape)}"
                    )
                value = next_token_loss(model, tokens)
            else:
                value = loss(model, sample)
            if not bool(torch.isfinite(value)):
                raise TrimtabError(f"the loss of calibration sequence {done} is {value.item()}: check model and data")
            value.backward()
            done += 1
            if watch is not None:
                watch(done)
    finally:
        for hook in hooks:
            hook.remove()
        for parameter, needs, grad in before:
            parameter.requires_grad_(needs)
            parameter.grad = grad
        for module, mode in modes:
            module.training = mode
    if not done:
        raise TrimtabError("saliency needs at least one calibration sequence, got none")
    return {path: normalised(value) for path, value in total.items()}


def normalised(value: Tensor) -> Tensor:
    """With mean 1; a weight that never received a gradient is as salient everywhere as anywhere."""
    mean = value.mean()
    return value / mean if mean > 0 else torch.ones_like(value)


class StoredSaliency(Mapping[str, Tensor]):
    """A saliency in a file, in bfloat16: a linear's is read when it is asked for, so one block's are in memory."""

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)
        with self._open() as file:
            self._names = list(file.keys())

    @classmethod
    def save(cls, path: str | Path, values: Mapping[str, Tensor], **header: Any) -> "StoredSaliency":
        """Write a saliency; the header says what it belongs to."""
        files.write(
            Path(path), {name: value.bfloat16() for name, value in values.items()}, {"format": files.FORMAT, **header}
        )
        return cls(path)

    @staticmethod
    def header(path: str | Path) -> dict[str, Any] | None:
        """What a stored saliency belongs to; None if there is none that can be read."""
        try:
            return files.read_header(Path(path))
        except TrimtabError:
            return None

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._names:
            raise KeyError(name)
        with self._open() as file:
            return file.get_tensor(name).float()

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def _open(self) -> Any:
        return files.safetensors().safe_open(self._path, framework="pt")


def _adder(total: Tensor) -> Callable[[Tensor], None]:
    def add(parameter: Tensor) -> None:
        assert parameter.grad is not None
        grad = parameter.grad.to("cpu", total.dtype)
        total.addcmul_(grad, grad)
        parameter.grad = None

    return add


def _sum_type(weight: Tensor) -> torch.dtype:
    return torch.promote_types(weight.dtype, torch.float32)
