# SPDX-License-Identifier: Apache-2.0
"""What is diagnosed: a model from a folder, converted, with batches of somebody's text.

    a run folder of `trimtab train`    its last checkpoint; the batches are those of its next steps, on the text given
    one of its checkpoints             that one
    a Hugging Face folder              a causal language model in FP32; tokens by its tokenizer.json, or bytes where it
                                       has none and a vocabulary of 256 (what `trimtab.lab.export` writes)
    a GGUF file, or `smollm2`          the same, with the tokenizer inside the file (see `pretrained.py`)

Everything is read, nothing is written. A recipe that remembers (delayed scales, random draws) goes on from what the
run's checkpoint remembers, if the run had that recipe.
"""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from trimtab.control.record import CHECKPOINTS, RUN
from trimtab.errors import NoEffectWarning, TrimtabError, one_line
from trimtab.lab import checkpoint
from trimtab.lab.config import Config
from trimtab.lab.data import Corpus, Sampler, load_corpus
from trimtab.lab.diagnose import model_loss
from trimtab.lab.evaluate import load_model as run_model
from trimtab.lab.pretrained import SMOLLM2, is_smollm2, load, load_model
from trimtab.lab.probing import LossFn
from trimtab.linear.convert import ConvertReport, convert_
from trimtab.linear.linear import load_path_state, switch_linears

HF_BATCH, HF_SEQ = 4, 256


@dataclass(frozen=True, eq=False)
class Subject:
    """A converted model in training mode, batches on its device, and the loss that takes both."""

    model: nn.Module
    batches: list[tuple[Tensor, Tensor]]
    loss_fn: LossFn
    name: str
    step: int | None
    """The step of a run's checkpoint; None for other models."""
    data: str
    """Name of the text."""
    report: ConvertReport


def load_subject(
    path: str | Path,
    data: str | Path,
    *,
    recipe: str = "fp8",
    unit: str | Sequence[str] = "linear",
    batches: int = 8,
    batch: int | None = None,
    seq: int | None = None,
    device: str | torch.device | None = None,
) -> Subject:
    """Read a model and some text; see this file's docstring.

    Args:
        batch: sequences per batch; None means the run's own, 4 for other models.
        seq: tokens per sequence; None means the run's own, 256 for other models.
        device: None means a GPU if there is one.
    """
    path = Path(path)
    file = step = state = config = None
    if path.suffix == ".gguf" or is_smollm2(path):
        model, corpus = _with_tokenizer(path, data)
        loss_fn, batch, seq, seed = logits_loss, batch or HF_BATCH, seq or HF_SEQ, 0
    elif path.is_file() or (path / RUN).is_file() or (path / checkpoint.REST).is_file():
        file, state = _checkpoint(path)
        config = Config.from_dict(state["config"])
        if config.model == "micro":
            torch.set_num_threads(1)  # its operators are too small to share, see Config.threads
        corpus = load_corpus(data, tokenizer=config.tokenizer)
        model, loss_fn, step = run_model(config, corpus.vocab_size, file, state), model_loss, int(state["step"])
        batch, seq, seed = batch or config.batch, seq or model.config.max_seq, config.seed
    elif (path / "config.json").is_file():
        model = load_model(path, dtype="fp32")
        corpus = _corpus(path, data, int(model.config.vocab_size))  # type: ignore[union-attr]
        loss_fn, batch, seq, seed = logits_loss, batch or HF_BATCH, seq or HF_SEQ, 0
    else:
        raise TrimtabError(
            f"a diagnosis needs a run folder of trimtab train ({RUN}), one of its checkpoints, a Hugging Face folder "
            f"(config.json), a .gguf file or the name {SMOLLM2}, got {str(path)!r}: there is none of them"
        )
    model.to(device or ("cuda" if torch.cuda.is_available() else "cpu")).train()
    report = _convert(model, recipe, unit)
    if file and state and config and config.recipe == recipe and config.roles is None:
        _remember(model, state.get("paths"), file)
    where = next(model.parameters()).device
    sampler = Sampler(corpus.train, batch=batch, seq=seq, seed=seed)
    taken = [sampler.batch_at((step or 0) + 1 + number) for number in range(batches)]
    moved = [(inputs.to(where), targets.to(where)) for inputs, targets in taken]
    if loss_fn is logits_loss:
        _try(model, moved[0], path)
    return Subject(model, moved, loss_fn, path.resolve().name, step, corpus.name, report)


def _try(model: nn.Module, batch: tuple[Tensor, Tensor], path: Path) -> None:
    """Run one sequence: a config may name what can be loaded and not run."""
    try:
        with torch.no_grad():
            logits_loss(model, (batch[0][:1], batch[1][:1]))
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RuntimeError) as error:
        raise TrimtabError(
            f"the model in {str(path)!r} cannot be run ({one_line(error)}): look at its config.json"
        ) from error


def logits_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """The next-token loss of a Hugging Face model: targets are shifted already, so its own loss would shift twice."""
    inputs, targets = batch
    logits = model(input_ids=inputs, use_cache=False).logits
    return cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def _checkpoint(path: Path) -> tuple[Path, dict[str, Any]]:
    """The checkpoint that a file is, or the last one of a run."""
    if (path / RUN).is_file():
        found = checkpoint.latest(path / CHECKPOINTS)
        if found is None:
            raise TrimtabError(
                f"{path} has no checkpoint yet: let the run reach its first one, or continue it with "
                f"trimtab train --resume --out {path}"
            )
        return found
    try:
        state = checkpoint.read(path)
    except Exception as error:  # a torn zip, a foreign file: torch raises many kinds
        raise TrimtabError(
            f"a checkpoint is a .pt file of trimtab train, got {str(path)!r}: {' '.join(str(error).split())[:120]}"
        ) from None
    if not checkpoint.is_ours(state):
        raise TrimtabError(f"a checkpoint is a .pt file of trimtab train, got {str(path)!r}: it lacks its settings")
    return path, state


def _remember(model: nn.Module, paths: Any, file: Path) -> None:
    """Go on from what a run's linears remember, if it had the same ones."""
    names = [linear.fqn for linear in switch_linears(model)]
    if isinstance(paths, dict) and not set(names) <= set(paths):
        return
    try:
        load_path_state(model, {name: paths[name] for name in names})
    except TrimtabError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RuntimeError) as error:
        raise TrimtabError(
            f"what the linears remember in {file} is damaged ({one_line(error, 60)}): give another checkpoint"
        ) from error


def _with_tokenizer(source: Path, data: str | Path) -> tuple[nn.Module, Corpus]:
    """A model that comes in one file with its tokenizer, and the text in its tokens."""
    found = load(source, dtype="fp32")
    with TemporaryDirectory() as folder:
        tokenizer = Path(folder, "tokenizer.json")
        found.tokenizer.backend_tokenizer.save(str(tokenizer))
        return found.model, load_corpus(data, tokenizer=tokenizer)


def _corpus(path: Path, data: str | Path, vocab_size: int) -> Corpus:
    tokenizer = path / "tokenizer.json"
    if not tokenizer.is_file() and vocab_size != 256:
        raise TrimtabError(
            f"a model with {vocab_size:,} tokens needs its tokenizer, and {tokenizer} does not exist: put it there"
        )
    corpus = load_corpus(data, tokenizer=tokenizer if tokenizer.is_file() else None)
    if corpus.vocab_size > vocab_size:
        raise TrimtabError(
            f"the model knows {vocab_size:,} tokens and {tokenizer} has {corpus.vocab_size:,}: give the model's own"
        )
    return corpus


def _convert(model: nn.Module, recipe: str, unit: str | Sequence[str]) -> ConvertReport:
    with warnings.catch_warnings():
        warnings.simplefilter("error", NoEffectWarning)
        try:
            return convert_(model, recipe, unit=unit, backend="emulated")
        except NoEffectWarning:
            raise TrimtabError(
                f"unit must match at least one linear of the model, got {unit!r}, which matches none: "
                'use "linear", "block", "expert", or patterns over paths such as "*.down*"'
            ) from None
