# SPDX-License-Identifier: Apache-2.0
"""An arm: a model as it is to be asked.

    a Hugging Face folder, a GGUF file, smollm2    as `trimtab.lab.pretrained` reads it
    a run folder of trimtab finetune               its base with its adapter, or the model it has made
    adapter                                        a PEFT folder, put on it and not merged
    recipe, path                                   its linears converted, all of them low or high
    bits                                           its weights, activations, keys and values rounded

A recipe leaves adapters and the output head as they are; so do bits.
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from trimtab.checks import is_whole, parse_json, shown
from trimtab.control.act import running
from trimtab.control.record import RUN
from trimtab.errors import TrimtabError, missing_extra
from trimtab.files import check_plain
from trimtab.lab import checkpoint
from trimtab.lab.evaluate import parse_bits
from trimtab.lab.finetune import ADAPTER, MODEL
from trimtab.lab.finetune_config import FinetuneConfig
from trimtab.lab.pretrained import Pretrained, load, quiet
from trimtab.lab.resume import stored_settings
from trimtab.linear.convert import convert_
from trimtab.retrain.rtn import rtn_

MEGATRON = "megatron.core"
"""What peft's configs say where nobody means Megatron."""
SIZES = ("r", "init_r", "num_virtual_tokens", "encoder_hidden_size", "n_frequency")
"""Settings of adapters that are lengths of their matrices."""


def load_arm(
    source: str | Path, adapter: str | Path | None = None, *, dtype: str | None = None, device: Any = None
) -> Pretrained:
    """A pretrained model with its adapter, if any."""
    run = Path(source) if (Path(source) / RUN).is_file() else None
    if run is not None:
        source, found, dtype = _finetuned(run, dtype)
        if adapter is not None and found is not None:
            raise TrimtabError(f"{found} is the run's own adapter, got {adapter} too: leave --adapter out")
        adapter = adapter or found
    pretrained = load(source, dtype=dtype, device=device)
    if adapter is not None:
        pretrained = replace(pretrained, model=_adapted(pretrained, Path(adapter)))
    return pretrained if run is None else replace(pretrained, name=run.resolve().name, source=str(run.resolve()))


def _adapted(pretrained: Pretrained, adapter: Path) -> nn.Module:
    try:
        from peft import PeftModel
    except ImportError:
        raise missing_extra("peft", "hf", "--adapter") from None
    if not (adapter / "adapter_config.json").is_file():
        raise TrimtabError(f"an adapter is a PEFT folder with an adapter_config.json, {str(adapter)!r} has none")
    if not any((adapter / f"adapter_model.{kind}").is_file() for kind in ("safetensors", "bin")):
        # peft would take the path for a name on the hub, and fetch whatever is there
        raise TrimtabError(
            f"an adapter folder holds an adapter_model.safetensors, {str(adapter)!r} has none: get it anew"
        )
    check_plain(adapter)
    try:
        with quiet(), warnings.catch_warnings(record=True) as told:  # of weights that an adapter lacks peft only warns
            warnings.simplefilter("always")
            _check_adapter(adapter)
            model = PeftModel.from_pretrained(pretrained.model, str(adapter)).eval()
    except TrimtabError:
        raise
    except Exception as error:  # another model's adapter, a torn file: many kinds
        line = " ".join(str(error).split())[:200]
        raise TrimtabError(f"the adapter {str(adapter)!r} does not fit {pretrained.name}: {line}") from error
    absent = [str(one.message) for one in told if "missing adapter keys" in str(one.message)]
    if absent:
        raise TrimtabError(f"the adapter {str(adapter)!r} does not fit {pretrained.name}: {absent[0][:200]}")
    return model


def _check_adapter(adapter: Path) -> None:
    """Refuse a config that names a module to import, or claims ranks that its weights do not have."""
    from safetensors import safe_open

    about = adapter / "adapter_config.json"
    said = parse_json(about.read_text(encoding="utf-8"))
    if said.get("megatron_config") or said.get("megatron_core") not in (None, MEGATRON):  # peft imports what it names
        raise TrimtabError(f"{about} asks for a module of Megatron, which is never imported: give a plain adapter")
    file = adapter / "adapter_model.safetensors"
    if file.is_file():
        with safe_open(file, framework="pt") as tensors:  # checks that the file is as long as it says
            shapes = [tensors.get_slice(name).get_shape() for name in tensors.keys()]  # noqa: SIM118 (no mapping)
    else:
        shapes = [tensor.shape for tensor in checkpoint.load(adapter / "adapter_model.bin").values()]
    longest = max((size for shape in shapes for size in shape), default=0)
    claimed = [said.get(key) for key in SIZES] + list((said.get("rank_pattern") or {}).values())
    for size in claimed:  # peft makes matrices of it before it looks at the file
        if is_whole(size, longest + 1):
            raise TrimtabError(
                f"{about} speaks of matrices of {shown(size)} rows, and none in {file} is longer than {longest:,}: "
                "get it anew"
            )


def _finetuned(folder: Path, dtype: str | None) -> tuple[str | Path, Path | None, str | None]:
    """What a run of `trimtab finetune` has made: a model, or an adapter for one; and the type it was trained in."""
    stored = stored_settings(folder) or {}
    if "lora_r" not in stored:
        raise TrimtabError(
            f"tasks need a model that was pretrained on text, with its tokenizer; {folder} is a run of trimtab train: "
            "leave --tasks out for its held-out loss"
        )
    settings = FinetuneConfig.from_dict(stored)
    made = folder / (MODEL if settings.full else ADAPTER)
    if not made.is_dir():
        raise TrimtabError(f"{folder} has no {made.name} yet: let it finish, or go on with trimtab finetune --resume")
    dtype = dtype or settings.dtype
    return (made, None, dtype) if settings.full else (settings.model, made, dtype)


@contextmanager
def prepared(
    model: nn.Module, *, recipe: str | None = None, path: str = "low", backend: str = "auto", bits: str | None = None
) -> Iterator[None]:
    """The model in few bits, rounded or on a path of a recipe; it stays rounded or converted afterwards."""
    if bits is not None:
        w, a, kv, had = parse_bits(bits)
        rtn_(model, w, a, kv, ffn_hadamard=had)
    if recipe is None:
        yield
        return
    convert_(model, recipe, backend=backend)
    with running(model, path):
        yield
