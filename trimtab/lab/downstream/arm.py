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

from trimtab.control.act import running
from trimtab.control.record import RUN
from trimtab.errors import TrimtabError, missing_extra
from trimtab.lab.evaluate import parse_bits
from trimtab.lab.finetune import ADAPTER, MODEL
from trimtab.lab.pretrained import Pretrained, load, quiet
from trimtab.lab.resume import stored_settings
from trimtab.linear.convert import convert_
from trimtab.retrain.rtn import rtn_


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
    try:
        with quiet(), warnings.catch_warnings(record=True) as told:  # of weights that an adapter lacks peft only warns
            warnings.simplefilter("always")
            model = PeftModel.from_pretrained(pretrained.model, str(adapter)).eval()
    except Exception as error:  # another model's adapter, a torn file: many kinds
        line = " ".join(str(error).split())[:200]
        raise TrimtabError(f"the adapter {str(adapter)!r} does not fit {pretrained.name}: {line}") from error
    absent = [str(one.message) for one in told if "missing adapter keys" in str(one.message)]
    if absent:
        raise TrimtabError(f"the adapter {str(adapter)!r} does not fit {pretrained.name}: {absent[0][:200]}")
    return model


def _finetuned(folder: Path, dtype: str | None) -> tuple[str | Path, Path | None, str | None]:
    """What a run of `trimtab finetune` has made: a model, or an adapter for one; and the type it was trained in."""
    settings = stored_settings(folder) or {}
    if "lora_r" not in settings:
        raise TrimtabError(
            f"tasks need a model that was pretrained on text, with its tokenizer; {folder} is a run of trimtab train: "
            "leave --tasks out for its held-out loss"
        )
    made = folder / (MODEL if settings["full"] else ADAPTER)
    if not made.is_dir():
        raise TrimtabError(f"{folder} has no {made.name} yet: let it finish, or go on with trimtab finetune --resume")
    dtype = dtype or settings["dtype"]
    return (made, None, dtype) if settings["full"] else (settings["model"], made, dtype)


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
