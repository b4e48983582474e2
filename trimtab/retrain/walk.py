# SPDX-License-Identifier: Apache-2.0
"""A whole model in few bits, block by block.

    F = saliency(model, sequences)                                    # optional
    report = retrain_(model, sequences, Settings(bits=2, group=64), saliency=F, folder="runs/quantize")
    report.bits_per_weight                                            # 2.68, not 2

`retrain_` computes the streams before the first block once and hands them from block to block (`block.py`). On the
device there are one block, what is trained for it, and four streams of the calibration sequences; the model may stay on
the CPU. Afterwards the model is a plain one: the weight of each linear is Q + LoRA, its parts are in the report.

With a folder each finished block is written there at once. The same call goes on behind the last finished block: its
streams are computed again from the stored blocks, and on a CPU with the same number of threads the result has the same
bits as without the interruption. A folder of other settings, other sequences or another model is refused.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from trimtab.checks import is_number, parse_json
from trimtab.errors import TrimtabError
from trimtab.files import write_whole
from trimtab.retrain import packed as files
from trimtab.retrain.block import Calibrated, apply, calibrate_block, check_linears, run_block
from trimtab.retrain.blocks import find_blocks, first_inputs, record_calls
from trimtab.retrain.cover import cover
from trimtab.retrain.packed import Packed, bits_per_weight, fingerprint
from trimtab.retrain.settings import Settings

MANIFEST = "retrain.json"


class Progress(NamedTuple):
    """Where a walk is: after an epoch, or with its errors after a block."""

    block: int
    num_blocks: int
    epoch: int
    before: float | None = None
    after: float | None = None
    resumed: bool = False


class BlockError(NamedTuple):
    """A block's output error against the plain model's, relative: rounded to nearest, and as stored."""

    path: str
    before: float
    after: float


@dataclass(frozen=True, eq=False)
class Retrained:
    """What `retrain_` made of a model."""

    settings: Settings
    linears: Mapping[str, Packed]
    """By path."""
    blocks: tuple[BlockError, ...]
    skipped: Mapping[str, str]
    """Path -> reason, for every other weight matrix."""

    @property
    def bits_per_weight(self) -> float:
        """What a quantized weight costs in truth: codes, scales, zero points, LoRA factors."""
        return bits_per_weight([one.shape for one in self.linears.values()], self.settings)

    def __str__(self) -> str:
        weights = sum(rows * columns for rows, columns in (one.shape for one in self.linears.values()))
        kind = "symmetric" if self.settings.symmetric else "asymmetric"
        bare = bits_per_weight([one.shape for one in self.linears.values()], base_settings(self.settings))
        lora = f" ({bare:.3f} without LoRA)" if self.settings.rank else ""
        return (
            f"{len(self.linears)} linears of {len(self.blocks)} blocks, {weights:,} weights, {self.settings.bits} bits "
            f"{kind} in groups of {self.settings.group}: {self.bits_per_weight:.3f} bits per weight{lora}"
        )


def base_settings(settings: Settings) -> Settings:
    """The same without LoRA."""
    return Settings.from_dict(settings.to_dict() | {"rank": 0})


def retrain_(
    model: nn.Module,
    sequences: Tensor,  # (sequences, length) token ids
    settings: Settings | None = None,
    *,
    saliency: Mapping[str, Tensor] | None = None,
    device: torch.device | str | None = None,
    folder: str | Path | None = None,
    skip: Sequence[str] = (),
    watch: Callable[[Progress], None] | None = None,
) -> Retrained:
    """Quantize the linears of a model's decoder blocks, in place; embeddings, norms and head stay as they are.

    Args:
        sequences: calibration text, all of one length.
        saliency: F by path of the linear, as `saliency` returns it; None leaves the term out.
        device: where blocks are trained; None is where the model is.
        folder: where finished blocks are kept, to go on after an interruption.
        skip: patterns of further linears to leave alone.
        watch: called after each epoch and each block.
    """
    settings = Settings() if settings is None else settings
    _check_sequences(sequences)
    blocks = find_blocks(model)
    linears, skipped = _of_blocks(model, blocks, skip)
    if saliency is not None:
        absent = [path for path in linears if path not in saliency]
        if absent:
            raise TrimtabError(f"saliency must hold every linear that is quantized, and {absent[0]} is missing")
    home = next(model.parameters()).device
    device = home if device is None else torch.device(device)
    store = None if folder is None else _Store(Path(folder), settings, sequences, linears, saliency)
    modes = [(module, module.training) for module in model.modules()]
    needs = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    try:
        model.eval().requires_grad_(False)
        found, errors = _walk(model, blocks, linears, sequences, settings, saliency, home, device, store, watch)
    finally:
        for module, mode in modes:
            module.training = mode
        for parameter, wanted in needs:
            parameter.requires_grad_(wanted)
    return Retrained(settings, found, tuple(errors), skipped)


def _walk(
    model: nn.Module,
    blocks: dict[str, nn.Module],
    linears: Mapping[str, nn.Linear],
    sequences: Tensor,
    settings: Settings,
    saliency: Mapping[str, Tensor] | None,
    home: torch.device,
    device: torch.device,
    store: "_Store | None",
    watch: Callable[[Progress], None] | None,
) -> tuple[dict[str, Packed], list[BlockError]]:
    calls = record_calls(model, blocks, sequences[:1], None if device == home else device)
    x_fp = x_q = first_inputs(model, next(iter(blocks.values())), sequences).to(device)
    found: dict[str, Packed] = {}
    errors = []
    for index, ((path, block), call) in enumerate(zip(blocks.items(), calls, strict=True)):
        own = {name.removeprefix(f"{path}."): one for name, one in linears.items() if name.startswith(f"{path}.")}
        try:
            block.to(device)
            call = call.on(device)
            stored = None if store is None else store.load(index, own)
            if stored is None:
                F = None if saliency is None else {name: saliency[f"{path}.{name}"] for name in own}
                told = None if watch is None else _teller(watch, index, len(blocks))
                source = None if store is None else fingerprint({name: one.weight for name, one in own.items()})
                made = calibrate_block(
                    block, x_fp, x_q, settings, linears=own, saliency=F, call=call, index=index, watch=told
                )
                if store is not None:
                    store.save(index, made, source)
                done, x_fp, x_q = (made.linears, made.before, made.after), made.y_fp, made.y_q
            else:
                x_fp = run_block(block, call, x_fp, settings.batch)
                apply(own, stored[0])
                x_q = run_block(block, call, x_q, settings.batch)
                done = stored
        finally:
            block.to(home)
        found |= {f"{path}.{name}": one for name, one in done[0].items()}
        errors.append(BlockError(path, *done[1:]))
        if watch is not None:
            watch(Progress(index, len(blocks), settings.epochs, *done[1:], resumed=stored is not None))
    return found, errors


def _teller(watch: Callable[[Progress], None], index: int, num_blocks: int) -> Callable[[int], None]:
    return lambda epoch: watch(Progress(index, num_blocks, epoch))


def _check_sequences(sequences: Tensor) -> None:
    if not isinstance(sequences, Tensor) or sequences.dim() != 2 or sequences.is_floating_point():
        raise TrimtabError("calibration sequences must be one tensor of token ids, (sequences, length)")
    if len(sequences) < 1 or sequences.shape[1] < 2:
        raise TrimtabError(
            f"retraining needs at least one calibration sequence of 2 tokens, got {tuple(sequences.shape)}: give more"
        )


def _of_blocks(
    model: nn.Module, blocks: Mapping[str, nn.Module], skip: Sequence[str]
) -> tuple[dict[str, nn.Linear], dict[str, str]]:
    """The linears to quantize by path, and why every other weight matrix stays."""
    linears, skipped = cover(model, skip, None)
    inside = {path: one for path, one in linears.items() if path.startswith(tuple(f"{block}." for block in blocks))}
    check_linears(inside)
    for path in blocks:
        if not any(name.startswith(f"{path}.") for name in inside):
            raise TrimtabError(f"every block must keep a linear to quantize, and skip leaves {path} none")
    return inside, skipped | {path: "outside the blocks" for path in linears if path not in inside}


class _Store:
    """The finished blocks of a walk, in a folder."""

    def __init__(
        self,
        folder: Path,
        settings: Settings,
        sequences: Tensor,
        linears: Mapping[str, nn.Linear],
        saliency: Mapping[str, Tensor] | None,
    ) -> None:
        self.folder, self.settings = folder, settings
        used = saliency is not None and settings.lam > 0 and settings.epochs > 0
        identity = {
            "format": files.FORMAT,
            "settings": settings.to_dict(),
            "sequences": fingerprint({"tokens": sequences.long()}),
            "saliency": fingerprint({path: saliency[path] for path in linears}) if used and saliency else None,
            "linears": {path: list(one.weight.shape) for path, one in linears.items()},
        }
        path = folder / MANIFEST
        if path.is_file():
            _compare(path, identity)
            return
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps(identity, indent=2) + "\n")

    def path(self, index: int) -> Path:
        return self.folder / f"block_{index:03d}.safetensors"

    def load(self, index: int, linears: Mapping[str, nn.Linear]) -> tuple[dict[str, Packed], float, float] | None:
        """A finished block; None if it is not there."""
        path = self.path(index)
        if not path.is_file():
            return None
        tensors, header = files.read(path)
        if header.get("source") != fingerprint({name: one.weight for name, one in linears.items()}):
            raise TrimtabError(f"{path} was made from other weights: give the model of that run, or another folder")
        found, errors = files.from_file(path, tensors, header), [header.get(key) for key in ("before", "after")]
        shapes = {name: tuple(one.weight.shape) for name, one in linears.items()}
        if {name: one.shape for name, one in found.items()} != shapes or not all(map(is_number, errors)):
            raise TrimtabError(f"{path} is not this block: remove it, and it is made again")
        return found, float(errors[0]), float(errors[1])  # pyright: ignore[reportArgumentType]

    def save(self, index: int, made: Calibrated, source: str | None) -> None:
        tensors, header = files.to_file(made.linears)
        files.write(self.path(index), tensors, header | {"source": source, "before": made.before, "after": made.after})


def _compare(path: Path, identity: Mapping[str, Any]) -> None:
    try:
        stored = parse_json(path.read_text(encoding="utf-8"))
        settings = dict(stored["settings"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise TrimtabError(f"{path} is not the manifest of a retraining ({error!r}): choose another folder") from None
    for name, value in identity["settings"].items():
        if settings.get(name) != value:
            raise TrimtabError(
                f"{path.parent} holds a retraining with {name} = {settings.get(name)}, this one has {value}: repeat "
                "its settings, or choose another folder"
            )
    for name in ("format", "sequences", "saliency", "linears"):
        if stored.get(name) != identity[name]:
            raise TrimtabError(
                f"{path.parent} holds a retraining with other {name}: give what it began with, or another folder"
            )
