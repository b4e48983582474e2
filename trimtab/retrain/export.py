# SPDX-License-Identifier: Apache-2.0
"""A retrained model for others to open.

    save_model      config and safetensors of the weights Q + LoRA: `from_pretrained` gives the same logits
    save_base       the same of Q alone, the quantized base
    save_adapter    the LoRA factors in peft's own format: `PeftModel.from_pretrained(base, folder)` computes what the
                    retrained model does, with factors that can be trained on

    to_torchao      one packed base weight as torchao's integer tensor, for its kernels
    save_folder     the packed file (`packed.py`) with config and tokenizer beside it
    load_folder     a plain Transformers model out of that, with the bits that were saved

The first three hold ordinary floating-point weights, which Q is exact in (float32) or rounded to (bfloat16); what saves
space is the packed file. A folder is written beside its place and moved there: it is whole or not there.
"""

import copy
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from trimtab.checks import check_parts, parse_json
from trimtab.errors import MissingExtraError, TrimtabError, missing_extra, one_line
from trimtab.files import check_plain, disk_errors
from trimtab.retrain.packed import Packed, check_packed, load_packed_, safetensors, save_packed
from trimtab.retrain.walk import Retrained

PACKED = "packed.safetensors"


def save_model(model: nn.Module, folder: str | Path, *, tokenizer: Any = None) -> Path:
    """Write a Transformers model as it stands, with its tokenizer if given, as a folder; returns the folder."""
    save = getattr(model, "save_pretrained", None)
    if not callable(save):
        raise TrimtabError(
            f"a model folder is written from a Transformers model, got a {type(model).__name__}: save_packed takes any "
            "model, and trimtab.lab.export.to_llama makes a LLaMA of a lab decoder"
        )
    with _whole(Path(folder)) as draft:
        save(draft)
        if tokenizer is not None:
            tokenizer.save_pretrained(draft)
    return Path(folder)


@torch.no_grad()
def save_base(model: nn.Module, retrained: Retrained, folder: str | Path, *, tokenizer: Any = None) -> Path:
    """Write a retrained model without its LoRA factors; the model stays as it is."""
    kept = {path: model.get_submodule(path).get_parameter("weight").clone() for path in retrained.linears}
    try:
        for path, one in retrained.linears.items():
            model.get_submodule(path).get_parameter("weight").copy_(one.quantized())
        return save_model(model, folder, tokenizer=tokenizer)
    finally:
        for path, weight in kept.items():
            model.get_submodule(path).get_parameter("weight").copy_(weight)


def save_adapter(retrained: Retrained, folder: str | Path, *, base: str | Path | None = None) -> Path:
    """Write the LoRA factors as a peft adapter over `save_base`'s model; `base` is where that is."""
    settings = retrained.settings
    if not settings.rank:
        raise TrimtabError("an adapter holds LoRA factors, and this model was retrained without: give a rank above 0")
    try:
        from peft import LoraConfig
    except ImportError:
        raise missing_extra("peft", "hf", "An adapter") from None
    alpha = int(settings.alpha) if float(settings.alpha).is_integer() else settings.alpha
    config = LoraConfig(
        r=settings.rank,
        lora_alpha=alpha,  # pyright: ignore[reportArgumentType] (any number works)
        lora_dropout=0.0,
        target_modules=list(retrained.linears),
        base_model_name_or_path=None if base is None else str(base),
        task_type="CAUSAL_LM",
        inference_mode=False,
    )
    tensors = {}
    for path, one in retrained.linears.items():
        assert one.A is not None
        assert one.B is not None
        tensors |= {f"base_model.model.{path}.lora_A.weight": one.A, f"base_model.model.{path}.lora_B.weight": one.B}
    with _whole(Path(folder)) as draft:
        config.save_pretrained(str(draft))
        safetensors().torch.save_file(tensors, draft / "adapter_model.safetensors", {"format": "pt"})
    return Path(folder)


def to_torchao(packed: Packed) -> torch.Tensor:
    """Q as torchao's `IntxUnpackedToInt8Tensor`, which its own packing starts from; it holds whole groups only."""
    bits, group = packed.settings.bits, packed.settings.group
    if packed.shape[1] % group:
        raise TrimtabError(
            f"torchao holds groups of one length, got {packed.shape[1]} inputs in groups of {group}: use a group that "
            "divides them, or the packed file"
        )
    try:
        from torchao.quantization import IntxUnpackedToInt8Tensor  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise MissingExtraError("A torchao tensor needs torchao, which is not installed: pip install torchao") from None
    middle = 2 ** (bits - 1)
    codes, zero = packed.levels()
    return IntxUnpackedToInt8Tensor(
        (codes.to(torch.int16) - middle).to(torch.int8),
        packed.scale.float(),
        (zero.to(torch.int16) - middle).to(torch.int8),
        getattr(torch, f"int{bits}"),
        (1, group),
        torch.float32,
        None,
    )


def save_folder(model: nn.Module, retrained: Retrained, folder: str | Path, *, tokenizer: Any = None) -> Path:
    """Write a retrained Transformers model as a packed file, with its config and tokenizer beside it."""
    config = getattr(model, "config", None)
    if not hasattr(config, "save_pretrained"):
        raise TrimtabError(
            f"a packed folder is written from a Transformers model, got a {type(model).__name__}: save_packed takes any"
        )
    with _whole(Path(folder)) as draft:
        config = copy.deepcopy(config)
        config.dtype = next(model.parameters()).dtype  # pyright: ignore[reportOptionalMemberAccess]
        config.save_pretrained(draft)  # pyright: ignore[reportOptionalMemberAccess]
        save_packed(model, retrained.linears, draft / PACKED)
        if tokenizer is not None:
            tokenizer.save_pretrained(draft)
    return Path(folder)


def load_folder(folder: str | Path) -> tuple[nn.Module, dict[str, Packed]]:
    """The model of `save_folder`, in eval mode, and its packed weights."""
    folder = Path(folder)
    try:
        from transformers import AutoConfig, AutoModelForCausalLM
    except ImportError:
        raise missing_extra("transformers", "hf", "A packed folder") from None
    for name in (PACKED, "config.json"):
        if not (folder / name).is_file():
            raise TrimtabError(f"a packed folder holds a {name}, {str(folder)!r} has none: give the folder that has it")
    check_plain(folder)
    try:
        check_parts(parse_json((folder / "config.json").read_text(encoding="utf-8")), folder / "config.json")
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        options: dict[str, Any] = {"trust_remote_code": False, "dtype": config.dtype or torch.float32}
        with torch.device("meta"):  # a config may claim any size: first see that the file has it
            check_packed(AutoModelForCausalLM.from_config(config, **options), folder / PACKED)
        with torch.random.fork_rng(devices=[]):
            model = AutoModelForCausalLM.from_config(config, **options)
    except TrimtabError:
        raise
    except Exception as error:  # Transformers raises many kinds
        raise TrimtabError(f"{folder / 'config.json'} is not of a causal language model: {one_line(error)}") from error
    return model.eval(), load_packed_(model, folder / PACKED)


@contextmanager
def _whole(folder: Path) -> Iterator[Path]:
    """A folder to write into, which takes its place when all went well."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise TrimtabError(f"a model is saved into a new or empty folder, got {str(folder)!r}: choose another")
    folder.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        with disk_errors(draft):
            yield draft
        draft.chmod(0o755)
        os.replace(draft, folder)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise
