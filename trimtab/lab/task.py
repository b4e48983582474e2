# SPDX-License-Identifier: Apache-2.0
"""What a run trains: a model and its examples, behind one small face.

    Pretraining   the lab's decoder on the text of a corpus (`trimtab train`)
    Finetuning    a pretrained model on questions and answers (`finetune.py`, `trimtab finetune`)

Everything else of a run (steps, control, faults, evaluations, checkpoints) is the same for both and lives in `run.py`.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn

from trimtab.lab.config import Config, Settings
from trimtab.lab.data import eval_batches, load_corpus
from trimtab.lab.model import Decoder, ModelConfig
from trimtab.lab.noise import Spoiled, parse_bad_data

IGNORED = -100
"""The target of a position whose loss does not count (torch's own `ignore_index`)."""


class Task(Protocol):
    """A model and its data; built on the CPU, from settings alone, after the seed has been set."""

    settings: ClassVar[type[Settings]]
    model: nn.Module
    tokens_per_step: int
    """At most."""
    identity: dict[str, str]
    """What a checkpoint must share to be continued: `data` is the sha256 of the text, `base` that of the weights."""

    def __init__(self, config: Any) -> None: ...

    def notes(self) -> Sequence[str]:
        """Lines that a person should read before the first step."""
        ...

    def describe(self) -> dict[str, Any]:
        """What run.json keeps of the data."""
        ...

    def batch_at(self, step: int, micro: int = 0) -> tuple[Tensor, Tensor]:
        """Inputs and targets, each (batch, seq), of a step's micro-batch; a pure function of both numbers."""
        ...

    def held_out(self) -> Iterator[tuple[Tensor, Tensor]]:
        """The batches of an evaluation."""
        ...

    def loss(self, net: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
        """The mean loss over the targets that count."""
        ...

    def weights(self) -> dict[str, Tensor]:
        """What a checkpoint keeps of the model."""
        ...

    def load_weights(self, weights: dict[str, Tensor]) -> None:
        """Take that back."""

    def saved(self, folder: Path, *, last: bool) -> None:
        """A checkpoint was written: put beside it, in the run folder, what else should be there."""


class Pretraining:
    """The lab's decoder, its weights drawn by the seed, on windows of a text."""

    settings: ClassVar[type[Settings]] = Config

    def __init__(self, config: Config) -> None:
        self._config = config
        self.corpus = load_corpus(config.data, tokenizer=config.tokenizer)
        decoder = build_model(config, self.corpus.vocab_size)
        self.model: nn.Module = decoder
        self.seq = decoder.config.max_seq
        shape: dict[str, Any] = {"batch": config.batch, "seq": self.seq, "seed": config.seed}
        bad = parse_bad_data(config.bad_data)
        self.sampler = Spoiled(self.corpus.train, **shape, vocab_size=self.corpus.vocab_size, bad=bad)
        self.held_out()  # too short a text is refused here
        self.tokens_per_step = config.batch * config.accumulate * self.seq
        self.identity = {"data": self.corpus.sha256}

    def notes(self) -> Sequence[str]:
        return ()

    def describe(self) -> dict[str, Any]:
        return {name: getattr(self.corpus, name) for name in ("name", "sha256", "num_bytes", "vocab_size")}

    def batch_at(self, step: int, micro: int = 0) -> tuple[Tensor, Tensor]:
        return self.sampler.batch_at(step, micro)

    def held_out(self) -> Iterator[tuple[Tensor, Tensor]]:
        config = self._config
        return eval_batches(self.corpus.held_out, batch=config.batch, seq=self.seq, limit=config.eval_batches)

    def loss(self, net: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
        return net(inputs, targets).loss

    def weights(self) -> dict[str, Tensor]:
        return self.model.state_dict()

    def load_weights(self, weights: dict[str, Tensor]) -> None:
        self.model.load_state_dict(weights)

    def saved(self, folder: Path, *, last: bool) -> None:
        """The checkpoint is all there is."""


def build_model(config: Config, vocab_size: int) -> Decoder:
    """The decoder that settings describe, its weights drawn by their seed; not converted."""
    shape: dict[str, Any] = {"vocab_size": vocab_size, "kv_heads": config.kv_heads}
    shape |= {"norm": config.norm, "embproj": config.embproj}
    if config.num_experts:
        shape |= {"num_experts": config.num_experts, "top_k": config.top_k}
    if config.seq is not None:
        shape["max_seq"] = config.seq
    model = Decoder(ModelConfig.size(config.model, **shape), seed=config.seed, checkpointing=config.checkpointing)
    return model.to(torch.bfloat16 if config.dtype == "bf16" else torch.float32)
