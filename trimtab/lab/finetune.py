# SPDX-License-Identifier: Apache-2.0
"""Fine-tuning under control: a pretrained model learns answers, its base linears in INT8.

With LoRA the base is frozen and its linears run low or high; the adapters around them stay in high precision and are
what learns. So a unit has two sides: its switch is on the base linears of one decoder layer, its signal is the gradient
norm of that layer's adapters. With `full` both are the layer itself.

The steps, the control, the record and the checkpoints are those of `trimtab train`. Beside the checkpoints a run folder
has `adapter/`, the last checkpoint's adapters as peft writes them:

    peft.PeftModel.from_pretrained(base, "runs/finetune/adapter")

or, with `full`, `model/` when the run is finished. Adapters are kept and updated in FP32 whatever the base is in.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from trimtab.control.sinks import Sinks
from trimtab.errors import TrimtabError, missing_extra
from trimtab.lab.arms import random_from
from trimtab.lab.chat import Example, ExampleSampler, collate, load_examples, pad_id, read_source
from trimtab.lab.config import Settings
from trimtab.lab.finetune_config import ALL_LINEAR, FinetuneConfig
from trimtab.lab.pretrained import Pretrained, load, quiet, replacing
from trimtab.lab.resume import stored_settings
from trimtab.lab.run import Watcher
from trimtab.lab.subject import logits_loss
from trimtab.lab.task import IGNORED
from trimtab.lab.train import Result, train

ADAPTER, MODEL = "adapter", "model"
PLACES = ("model", "data", "random_like")
SAMPLED = 4096

Item = TypeVar("Item")


def finetune(
    settings: Mapping[str, Any],
    out: str | Path,
    *,
    resume: bool = False,
    force: bool = False,
    watcher: Watcher | None = None,
    sinks: Sinks | None = None,
) -> Result:
    """Fine-tune from settings (those of `FinetuneConfig`, `model` and `data` at least) into a run folder.

    Args:
        resume: continue the run in `out` from its last checkpoint, with its own settings, or start it.
        force: replace the run that is in `out`.
    """
    out = Path(out)
    settings = {**settings, **{key: _place(settings[key]) for key in PLACES if key in settings}}
    asked = {**((stored_settings(out) if resume else None) or {}), **settings}
    selection = None
    if asked.get("random_like") is not None:
        selection = random_from(Path(asked["random_like"]), int(asked.get("seed", 0)))
    kind: dict[str, Any] = {"selection": selection, "task": Finetuning, "sinks": sinks}
    return train(settings, out, resume=resume, force=force, watcher=watcher, **kind)


class Finetuning:
    """A pretrained model, with adapters unless every weight is trained, and examples of questions and answers."""

    settings: ClassVar[type[Settings]] = FinetuneConfig

    def __init__(self, config: FinetuneConfig) -> None:
        self._config = config
        source = read_source(config.data)  # a bad line is told before a model is loaded
        self.base = load(config.model, dtype=config.dtype)
        limit = getattr(self.base.model.config, "max_position_embeddings", None) or 2048
        self.seq = limit if config.seq is None else config.seq
        if self.seq > limit:
            raise TrimtabError(f"seq must be at most the model's {limit} tokens, got {self.seq}")
        self.examples = load_examples(source, self.base.tokenizer, seq=self.seq, holdout=config.holdout)
        self._pad = pad_id(self.base.tokenizer)
        self.sampler = ExampleSampler(
            self.examples.train, batch=config.batch, accumulate=config.accumulate, seed=config.seed, pad=self._pad
        )
        self.identity = {"data": self.examples.sha256, "base": fingerprint(self.base.model)}
        self.peft = None if config.full else add_adapters(self.base, config)
        self.model: Any = self.base.model.train()  # peft has put the adapters into it: names stay those of the model
        if config.checkpointing:
            self.model.gradient_checkpointing_enable({"use_reentrant": False})
        self.tokens_per_step = config.batch * config.accumulate * self.seq

    def notes(self) -> Sequence[str]:
        found, total = self.examples, sum(p.numel() for p in self.model.parameters())
        what = "every weight" if self._config.full else f"LoRA of rank {self._config.lora_r}"
        return (
            f"{self.base.name}: {what}, {self._trained:,} of {total:,} parameters train",
            f"{found.name}: {len(found.train):,} examples to train on, {len(found.held_out):,} held out; "
            f"{found.truncated:,} longer than {self.seq} tokens were cut, {found.dropped:,} without an answer dropped",
        )

    @property
    def _trained(self) -> int:
        return sum(p.numel() for p in self.model.parameters() if p.requires_grad)

    def describe(self) -> dict[str, Any]:
        base = {"base": self.base.name, "base_sha256": self.identity["base"], "trained_parameters": self._trained}
        return self.examples.describe() | base

    def batch_at(self, step: int, micro: int = 0) -> tuple[Tensor, Tensor]:
        return self.sampler.batch_at(step, micro)

    def held_out(self) -> Iterator[tuple[Tensor, Tensor]]:
        batch = self._config.batch
        taken = spread(self.examples.held_out, batch * self._config.eval_batches)
        return (collate(taken[at : at + batch], self._pad) for at in range(0, len(taken), batch))

    def loss(self, net: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
        return logits_loss(net, (inputs, targets))

    def weights(self) -> dict[str, Tensor]:
        if self._config.full:
            return self.model.state_dict()
        return {name: p.detach() for name, p in self.model.named_parameters() if p.requires_grad}

    def load_weights(self, weights: dict[str, Tensor]) -> None:
        self.model.load_state_dict(weights, strict=self._config.full)

    def saved(self, folder: Path, *, last: bool) -> None:
        """Write the adapters as they are now, or at the end of a full run the model."""
        if self.peft is not None:
            save_adapter(self.peft, folder / ADAPTER)
        elif last:
            with quiet(), replacing(folder / MODEL) as draft:
                self.model.save_pretrained(draft)
                self.base.tokenizer.save_pretrained(draft)


def add_adapters(base: Pretrained, config: FinetuneConfig) -> Any:
    """Put LoRA adapters by peft around a model's linears, in place, and freeze all else; returns peft's wrapper."""
    try:
        import peft
    except ImportError:
        raise missing_extra("peft", "hf", "LoRA") from None
    targets = config.lora_targets if config.lora_targets == ALL_LINEAR else list(config.lora_targets)
    lora = peft.LoraConfig(
        r=config.lora_r,
        lora_alpha=config.lora_alpha,  # pyright: ignore[reportArgumentType]  (any number will do)
        lora_dropout=config.lora_dropout,
        target_modules=targets,
        task_type="CAUSAL_LM",
        base_model_name_or_path=base.source,
    )
    try:
        with quiet():
            return peft.get_peft_model(base.model, lora)
    except ValueError as error:
        raise TrimtabError(f"lora_targets must name linears of the model, got {targets}: {error}") from None


def save_adapter(model: Any, folder: Path) -> Path:
    """Write the adapters of a `PeftModel` as `adapter_model.safetensors` and `adapter_config.json`, or nothing."""
    with quiet(), replacing(folder) as draft:
        model.save_pretrained(draft, save_embedding_layers=False)  # "auto" asks the hub
        (draft / "README.md").unlink(missing_ok=True)  # a form with nothing filled in
    return folder


def fingerprint(model: nn.Module) -> str:
    """A sha256 over names, shapes and some 4,096 elements of each parameter, evenly spread: tells models apart."""
    found = hashlib.sha256()
    for name, p in model.named_parameters():
        flat = p.detach().flatten()
        picked = flat[:: max(1, flat.numel() // SAMPLED)].float().cpu().numpy()
        found.update(f"{name}{tuple(p.shape)}".encode() + picked.tobytes())
    return found.hexdigest()


@torch.no_grad()
def answer_scores(model: nn.Module, examples: Sequence[Example], *, batch: int, pad: int) -> list[tuple[float, int]]:
    """Of each example, the log-likelihood of its answers and how many tokens they have."""
    device = next(model.parameters()).device
    order = sorted(range(len(examples)), key=lambda number: len(examples[number].ids))  # rows of like length together
    scores: dict[int, tuple[float, int]] = {}
    for at in range(0, len(order), batch):
        rows = order[at : at + batch]
        inputs, targets = collate([examples[number] for number in rows], pad)
        logits = model(input_ids=inputs.to(device), use_cache=False).logits.float()
        losses = cross_entropy(logits.flatten(0, 1), targets.to(device).flatten(), reduction="none").view_as(targets)
        sums, counts = (-losses.sum(dim=1).double()).tolist(), (targets != IGNORED).sum(dim=1).tolist()
        scores |= dict(zip(rows, zip(sums, counts, strict=True), strict=True))
    return [scores[number] for number in range(len(examples))]


def spread(examples: Sequence[Item], count: int) -> list[Item]:
    """At most `count` of them, evenly spread."""
    taken = min(count, len(examples))
    return [examples[number * len(examples) // taken] for number in range(taken)]


def _place(value: Any) -> Any:
    """A path that does not depend on the working directory; what is no path stays."""
    return str(Path(value).resolve()) if isinstance(value, str | Path) and Path(value).exists() else value
