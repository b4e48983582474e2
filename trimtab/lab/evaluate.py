# SPDX-License-Identifier: Apache-2.0
"""Evaluate a model, and what is left of it in few bits.

    loss          mean cross entropy of the next token over held-out windows, in nats
    perplexity    exp(loss)
    bits/byte     loss / ln 2, where a token is a byte
    kurtosis      excess kurtosis of the residual stream: outliers, which are what few bits cannot hold

Bits are written as in OSP's tables (arXiv 2506.19697), weights-activations-keys and values: `4-4-16` rounds the first
two to 4 bits and leaves the keys and values, `4-4-4+had` also rotates the input of every down projection. The rounding
is `trimtab.retrain.rtn_`, always of a copy of the model in its plain, unconverted form.

    evaluate(model, batches)                    the loss of a model
    evaluate_bits(model, batches, "4-4-16")     the loss of a rounded copy
    evaluate_run("runs/train")                  both, and the kurtosis, for the last checkpoint of a run
"""

import copy
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from trimtab.control.record import CHECKPOINTS, RUN
from trimtab.errors import TrimtabError
from trimtab.lab import checkpoint
from trimtab.lab.config import Config
from trimtab.lab.data import eval_batches, load_corpus
from trimtab.lab.model import Decoder
from trimtab.lab.task import build_model
from trimtab.nn.kurtosis import KurtosisProbe
from trimtab.retrain.rounding import KEEP, check_bits
from trimtab.retrain.rtn import rtn_

COLUMNS = ("4-8-8", "4-4-16", "4-4-4", "4-4-4+had")
"""The columns of OSP's table."""
LONGEST = 1 << 20
"""Tokens of a sequence that any checkpoint may be made for; more only if it has as many weights."""

Batch = tuple[Tensor, Tensor]
"""Inputs and targets, each (batch, seq) int64; a target of -100 does not count."""


class Bits(NamedTuple):
    """How many bits weights, activations, and keys and values have; `str` writes it as `parse_bits` reads it."""

    w: int = KEEP
    a: int = KEEP
    kv: int = KEEP
    had: bool = False
    """Rotate the input of every down projection: the "+ Had" of OSP's tables."""

    def __str__(self) -> str:
        return f"{self.w}-{self.a}-{self.kv}{'+had' if self.had else ''}"


PLAIN = Bits()


def parse_bits(text: str) -> Bits:
    """Read bits written W-A-KV, such as `4-4-16` or `4-4-4+had`."""
    match = re.fullmatch(r"(\d+)-(\d+)-(\d+)(\+had)?", text.strip().lower())
    if match is None:
        raise TrimtabError(
            f"bits are written weights-activations-kv, such as 4-4-16, or 4-4-4+had to rotate the inputs of the down "
            f"projections, got {text!r}"
        )
    w, a, kv = (int(number) for number in match.groups()[:3])
    for name, bits in (("weights", w), ("activations", a), ("kv", kv)):
        check_bits(bits, f"the bits of {name} in {text!r}")
    return Bits(w, a, kv, match.group(4) is not None)


@dataclass(frozen=True)
class Score:
    """The loss of a model in some bits."""

    bits: Bits
    loss: float

    @property
    def perplexity(self) -> float:
        """exp(loss); infinite where that overflows."""
        return math.exp(self.loss) if not self.loss > 700 else math.inf


@dataclass(frozen=True)
class Evaluation:
    """What `evaluate_run` found; the first score is that of the model as it was trained."""

    folder: Path
    step: int
    data: str
    """Name of the text."""
    tokens: int
    """How many predictions each loss is the mean of."""
    is_bytes: bool
    kurtosis_mean: float
    """Excess kurtosis of the residual stream, over the tokens and the places between blocks."""
    kurtosis_max: float
    """The largest of a single token at one place."""
    scores: tuple[Score, ...]

    def change(self, score: Score) -> float:
        """How much a loss lies above that of the model as it was trained."""
        return score.loss - self.scores[0].loss

    def bits_per_byte(self, score: Score) -> float | None:
        """The loss in bits per byte; None where tokens are not bytes."""
        return score.loss / math.log(2) if self.is_bytes else None

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON; what is not finite is None."""
        scores = [
            {
                "bits": str(score.bits),
                "loss": _plain(score.loss),
                "perplexity": _plain(score.perplexity),
                "bits_per_byte": _plain(self.bits_per_byte(score)),
                "change": _plain(self.change(score)),
            }
            for score in self.scores
        ]
        kurtosis = {"mean": _plain(self.kurtosis_mean), "max": _plain(self.kurtosis_max)}
        run = {"run": str(self.folder), "step": self.step, "data": self.data, "tokens": self.tokens}
        return run | {"kurtosis": kurtosis, "scores": scores}


@torch.no_grad()
def evaluate(model: nn.Module, batches: Iterable[Batch]) -> float:
    """Mean loss per token over some batches; the model returns `.logits`, and its mode is restored."""
    modes = {module: module.training for module in model.modules()}
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    total, count = torch.zeros((), dtype=torch.float64), 0
    model.eval()
    try:
        for inputs, targets in batches:
            logits = model(inputs.to(device)).logits
            loss = cross_entropy(logits.flatten(0, 1).float(), targets.to(device).flatten(), reduction="sum")
            total += loss.double().cpu()
            count += int((targets != -100).sum())
    finally:
        for module, mode in modes.items():
            module.training = mode
    if not count:
        raise TrimtabError("an evaluation needs at least one token to predict, got none: give more batches")
    return total.item() / count


def evaluate_bits(model: nn.Module, batches: Iterable[Batch], bits: str | Bits) -> float:
    """Mean loss per token of a copy of the model that is rounded to some bits; the model stays as it is."""
    w, a, kv, had = parse_bits(bits) if isinstance(bits, str) else bits
    rounded = copy.deepcopy(model)
    rtn_(rounded, w, a, kv, ffn_hadamard=had)
    return evaluate(rounded, batches)


def evaluate_run(
    folder: str | Path,
    bits: Sequence[str | Bits] = COLUMNS,
    *,
    data: str | Path | None = None,
    batches: int | None = None,
    device: str | torch.device | None = None,
) -> Evaluation:
    """Evaluate the last checkpoint of a run as it is and in other bits; writes nothing.

    Args:
        data: take the held-out part of this text; None means that of the run's own.
        batches: how many, of the run's own batch size; None means as many as the run's own evaluations.
        device: None means a GPU if there is one.
    """
    wanted = [parse_bits(one) if isinstance(one, str) else one for one in bits]
    folder = Path(folder)
    path, state = _last_checkpoint(folder)
    if "lora_r" in state["config"]:
        raise TrimtabError(
            f"{folder} is a run of trimtab finetune: ask it questions, --tasks gsm8k --chat --data FOLDER"
        )
    config = Config.from_dict(state["config"])
    try:
        corpus = load_corpus(config.data if data is None else data, tokenizer=config.tokenizer)
    except TrimtabError as error:
        if data is not None:
            raise
        hint = f"as {folder} names it: evaluate from where it was trained, or name a text with --data"
        raise TrimtabError(f"{error} ({hint})") from None
    if data is None and (trained_on := str(state.get("data"))) != corpus.sha256:
        raise TrimtabError(
            f"the text of {folder} has changed since (sha256 {trained_on[:12]}, now {corpus.sha256[:12]}), so its "
            f"held-out part may hold what was trained on: restore it, or name a text (--data {config.data} is this one)"
        )
    model = load_model(config, corpus.vocab_size, path, state)
    model.to(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    limit = config.eval_batches if batches is None else batches
    taken = list(eval_batches(corpus.held_out, batch=config.batch, seq=model.config.max_seq, limit=limit))
    with KurtosisProbe(model, where="residual") as probe:
        scores = [Score(PLAIN, evaluate(model, taken))]
    scores += [Score(one, evaluate_bits(model, taken, one)) for one in dict.fromkeys(wanted) if one != PLAIN]
    return Evaluation(
        folder=folder,
        step=int(state["step"]),
        data=corpus.name,
        tokens=sum(targets.numel() for _, targets in taken),
        is_bytes=config.tokenizer is None,
        kurtosis_mean=probe.mean(),
        kurtosis_max=max((place.max for place in probe.summary().values() if place.tokens), default=math.nan),
        scores=tuple(scores),
    )


def load_model(config: Config, vocab_size: int, path: Path, state: dict[str, Any]) -> Decoder:
    """The decoder of a checkpoint, unconverted, on the CPU; its settings may claim any size, so shapes come first."""
    numbers = sum(tensor.numel() for tensor in state["model"].values())
    if config.num_experts > len(state["model"]) or (config.seq or 0) > max(numbers, LONGEST):
        raise TrimtabError(
            f"{path} is of another model: its settings say {config.num_experts:,} experts and {config.seq} tokens, and "
            f"it holds {numbers:,} numbers; give another checkpoint"
        )
    with torch.device("meta"):
        checkpoint.check_model(build_model(config, vocab_size).state_dict(), state["model"], path)
    model = build_model(config, vocab_size)
    model.load_state_dict(checkpoint.weights(path, state))
    return model.eval()


def _last_checkpoint(folder: Path) -> tuple[Path, dict[str, Any]]:
    if not (folder / RUN).is_file():
        raise TrimtabError(
            f"an evaluation needs a run folder, and there is no {folder / RUN}: give one of trimtab train, or "
            "--tasks for a pretrained model"
        )
    try:
        found = checkpoint.latest(folder / CHECKPOINTS)
    except TrimtabError as error:
        reason = str(error).partition(": ")[0]
        raise TrimtabError(f"{reason}: restore one, or train again with trimtab train --out {folder} --force") from None
    if found is None:
        raise TrimtabError(
            f"{folder} has no checkpoint yet: let the run reach its first one, or continue it with "
            f"trimtab train --resume --out {folder}"
        )
    return found


def _plain(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
