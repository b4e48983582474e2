# SPDX-License-Identifier: Apache-2.0
"""A pretrained model to few bits, into a folder: what `trimtab quantize` does.

    blocks/            each finished block, and what the run was started with (`retrain/walk.py`): what a resume needs
    saliency.safetensors   the Fisher diagonal in bfloat16, where it was asked for
    packed/            the result: packed.safetensors, config.json, tokenizer (`trimtab.retrain.load_folder` opens it)
    dequantized/       export `dequantized`: a plain Transformers folder
    base/, adapter/    export `peft`: the quantized base and the LoRA factors over it
    report.json        settings, bits per weight, each block's error, perplexities, versions

Calibration sequences are drawn from the training part of a text, perplexity is taken on its held-out part (or on a text
of its own). The model stays on the CPU and blocks go to the device one at a time; only the saliency needs a
backward through the whole model, which runs on the device where that has room for the model and its activations.
"""

import json
import platform
import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import trimtab
from trimtab.errors import TrimtabError
from trimtab.files import write_whole
from trimtab.lab.data import load_corpus
from trimtab.lab.pretrained import Pretrained, quiet
from trimtab.retrain.calibration import perplexity, windows
from trimtab.retrain.export import save_adapter, save_base, save_folder, save_model
from trimtab.retrain.fisher import StoredSaliency, saliency
from trimtab.retrain.packed import fingerprint
from trimtab.retrain.settings import Settings
from trimtab.retrain.walk import Progress, Retrained, retrain_

EXPORTS = ("packed", "dequantized", "peft")
SALIENCY = "saliency.safetensors"
OURS = ("blocks", SALIENCY, "saliency.tmp", "packed", "dequantized", "base", "adapter", "report.json", "report.tmp")
DRAFT = re.compile(r"^\.(packed|dequantized|base|adapter)\.")
"""A folder that was being written when the process was killed."""


@dataclass(frozen=True, eq=False)
class Quantized:
    """What came of it."""

    retrained: Retrained
    perplexity_before: float | None
    perplexity_after: float | None
    eval_tokens: int
    folders: tuple[Path, ...]


@dataclass(frozen=True, eq=False)
class Text:
    """Tokens to calibrate with and tokens to measure on."""

    calibration: Tensor  # (sequences, length)
    held_out: Tensor  # (tokens,), as many as are measured


def read_text(
    tokenizer: Any,
    data: str | Path | None,
    *,
    sequences: int,
    length: int,
    seed: int = 0,
    evaluate: str | Path | None = None,
    eval_tokens: int = 8192,
) -> Text:
    """Tokenize a text; `evaluate` is another to measure on, in place of the held-out part of the first."""
    corpus = load_corpus(data)
    held_out = corpus.held_out if evaluate is None else load_corpus(evaluate).train
    calibration = windows(encode(tokenizer, corpus.train.tobytes()), sequences, length, seed=seed)
    measured = encode(tokenizer, held_out.tobytes()[: 16 * eval_tokens])[:eval_tokens] if eval_tokens else None
    if measured is not None and len(measured) < length:
        raise TrimtabError(
            f"a perplexity over windows of {length} tokens needs that many held-out tokens, the text has "
            f"{len(measured)}: give more text, or --eval-tokens 0 to leave it out"
        )
    return Text(calibration, torch.empty(0, dtype=torch.long) if measured is None else measured)


def encode(tokenizer: Any, raw: bytes) -> Tensor:
    """The token ids of a text, without special ones."""
    found = tokenizer(raw.decode("utf-8", "replace"), add_special_tokens=False, verbose=False)
    return torch.tensor(found["input_ids"], dtype=torch.long)


def prepare(out: Path, settings: Settings, exports: Sequence[str], *, resume: bool, force: bool) -> None:
    """Look at what is wanted, and at the folder to write into, before anything is loaded."""
    for name in exports:
        if name not in EXPORTS:
            raise TrimtabError(f"--export is one of {', '.join(EXPORTS)}, got {name!r}")
    if "peft" in exports and not settings.rank:
        raise TrimtabError("--export peft holds LoRA factors: give a --rank above 0")
    if resume and force:
        raise TrimtabError("--resume continues a run and --force replaces it: give one of them")
    if out.exists() and not out.is_dir():
        raise TrimtabError(f"--out must be a folder, and {str(out)!r} is a file: choose another")
    names = [path.name for path in out.iterdir()] if out.exists() else []
    if any(name not in OURS and not DRAFT.match(name) for name in names):
        raise TrimtabError(f"--out must be a new folder or one of trimtab quantize, got {str(out)!r}: choose another")
    if names and force:
        shutil.rmtree(out)
    elif names and not resume:
        raise TrimtabError(f"{out} holds a quantization already: --resume continues it, --force replaces it")
    else:
        for name in filter(DRAFT.match, names):
            shutil.rmtree(out / name)


def quantize(
    pretrained: Pretrained,
    text: Text,
    settings: Settings,
    out: Path,
    *,
    salient: bool = False,
    device: torch.device | str = "cpu",
    exports: Sequence[str] = ("packed",),
    watch: Callable[[Progress], None] | None = None,
    told: Callable[[str], None] = lambda line: None,
) -> Quantized:
    """Quantize a pretrained model, in place, and write the result; the same call goes on where one was interrupted."""
    device = torch.device(device)
    model, length = pretrained.model, text.calibration.shape[1]
    before = _perplexity(model, text.held_out, length, device)
    if before is not None:
        told(f"perplexity {before:.3f} before, on {_counted(text, length):,} tokens in windows of {length}")
    F = _saliency(model, text.calibration, out / SALIENCY, device, told) if salient else None
    retrained = retrain_(
        model, text.calibration, settings, saliency=F, device=device, folder=out / "blocks", watch=watch
    )
    after = _perplexity(model, text.held_out, length, device)
    result = Quantized(retrained, before, after, _counted(text, length), _export(pretrained, retrained, out, exports))
    _write_report(out / "report.json", pretrained, result, text, salient)
    return result


def _export(pretrained: Pretrained, retrained: Retrained, out: Path, exports: Sequence[str]) -> tuple[Path, ...]:
    """Write what is asked for and not there yet."""
    model, tokenizer = pretrained.model, pretrained.tokenizer
    writers: dict[Path, Callable[[Path], Path]] = {}
    if "packed" in exports:
        writers[out / "packed"] = lambda folder: save_folder(model, retrained, folder, tokenizer=tokenizer)
    if "dequantized" in exports:
        writers[out / "dequantized"] = lambda folder: save_model(model, folder, tokenizer=tokenizer)
    if "peft" in exports:
        writers[out / "base"] = lambda folder: save_base(model, retrained, folder, tokenizer=tokenizer)
        writers[out / "adapter"] = lambda folder: save_adapter(retrained, folder, base=out / "base")
    for folder, write in writers.items():
        if not folder.exists():
            with quiet():
                write(folder)
    return tuple(writers)


def _saliency(
    model: nn.Module, sequences: Tensor, path: Path, device: torch.device, told: Callable[[str], None]
) -> StoredSaliency:
    """The saliency of a model, computed once: a stored one of the same sequences and weights is taken."""
    source = fingerprint({"tokens": sequences, **dict(model.named_parameters())})
    if (StoredSaliency.header(path) or {}).get("source") == source:
        return StoredSaliency(path)
    home = next(model.parameters()).device
    if device.type == "cuda" and _fits(model, device):
        model.to(device)
    every = max(1, len(sequences) // 8)
    try:
        found = saliency(
            model,
            sequences,
            watch=lambda n: told(f"saliency {n}/{len(sequences)}") if n % every == 0 else None,
        )
    finally:
        model.to(home)
    return StoredSaliency.save(path, found, source=source)


def _fits(model: nn.Module, device: torch.device) -> bool:
    """Whether a device has room for a model and as much again, for activations and a gradient."""
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    return torch.cuda.mem_get_info(device)[0] > 2 * size + 2**30


def _perplexity(model: nn.Module, tokens: Tensor, length: int, device: torch.device) -> float | None:
    if not len(tokens):
        return None
    home = next(model.parameters()).device
    if device.type == "cuda" and _fits(model, device):
        model.to(device)
    try:
        return perplexity(model, tokens, length)
    finally:
        model.to(home)


def _counted(text: Text, length: int) -> int:
    return len(text.held_out) // length * (length - 1)


def _write_report(path: Path, pretrained: Pretrained, result: Quantized, text: Text, salient: bool) -> None:
    retrained = result.retrained
    report = {
        "model": pretrained.name,
        "settings": retrained.settings.to_dict(),
        "saliency": salient,
        "sequences": list(text.calibration.shape),
        "linears": len(retrained.linears),
        "bits_per_weight": retrained.bits_per_weight,
        "perplexity": {
            "before": result.perplexity_before,
            "after": result.perplexity_after,
            "tokens": result.eval_tokens,
            "window": text.calibration.shape[1],
        },
        "blocks": [one._asdict() for one in retrained.blocks],
        "left_alone": dict(retrained.skipped),
        "versions": {
            "trimtab": trimtab.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
    }
    write_whole(path, json.dumps(report, indent=2) + "\n")
