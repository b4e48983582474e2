# SPDX-License-Identifier: Apache-2.0
"""The settings of a fine-tuning run: those of any run, with the defaults of the paper's third bench where it has them.

The paper (arXiv 2606.00539, Table 7) fine-tunes LLaMA-2 13B with LoRA, INT8 base linears against BF16, a decoder layer
per unit, at most 10 of 40 layers high. Its data, steps, LoRA targets and INT8 scheme are not stated.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from trimtab.checks import is_number, require
from trimtab.control.policy import Policy
from trimtab.errors import TrimtabError
from trimtab.lab.config import Settings

ALL_LINEAR = "all-linear"
FULL_LR = 2e-5


@dataclass(frozen=True, kw_only=True)
class FinetuneConfig(Settings):
    """Settings of one run of `trimtab finetune`."""

    model: str
    """A Hugging Face folder, a GGUF file, or `smollm2`."""
    data: str
    """A .jsonl file of questions and answers, or a folder of them."""
    full: bool = False
    """Train every weight instead of LoRA adapters."""
    lora_r: int = 16
    """Rank of the adapters."""
    lora_alpha: float = 32.0
    """Their output is scaled by alpha / r."""
    lora_dropout: float = 0.0
    lora_targets: Any = ALL_LINEAR
    """Which linears get an adapter: all but the output head, or a list of names such as q_proj."""
    holdout: float = 0.05
    """Share of the examples held out for evaluation."""
    random_like: str | None = None
    """The folder of another run: random units, as many in each step as it had high."""
    recipe: str = "int8"
    unit: Any = "block"
    backend: str = "auto"
    lr: float = 2e-4
    """Peak learning rate; 2e-5 with `full` unless given."""
    steps: int = 200
    batch: int = 8
    seq: int | None = 512
    """The most tokens of an example; None means as many as the model takes."""
    clip: float | None = 1.0
    checkpoint_every: int = 100

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            is_number(self.lora_alpha) and self.lora_alpha > 0, "lora_alpha must be a positive number", self.lora_alpha
        )
        fine = is_number(self.lora_dropout) and 0 <= self.lora_dropout < 1
        require(fine, "lora_dropout must lie in [0, 1)", self.lora_dropout)
        require(is_number(self.holdout) and 0 < self.holdout <= 0.5, "holdout must lie in (0, 0.5]", self.holdout)
        names = isinstance(self.lora_targets, list | tuple) and all(isinstance(n, str) for n in self.lora_targets)
        fine = self.lora_targets == ALL_LINEAR or (names and self.lora_targets)
        require(bool(fine), f"lora_targets must be a list of names, or {ALL_LINEAR}", self.lora_targets)
        require(self.parallel == "none", "fine-tuning runs in one process, parallel must be none", self.parallel)
        require(self.selection != "oracle", "the oracle is for trimtab train, selection must be another", "oracle")
        if self.random_like is not None and (self.mode, self.path, self.selection) != ("act", "plan", "policy"):
            raise TrimtabError(
                f"random_like needs a plan that is carried out and nobody else who chooses, got mode={self.mode}, "
                f"path={self.path} and selection={self.selection}: set mode=act, path=plan and selection=policy"
            )

    def build_policy(self) -> Policy:
        """The paper's, on a quarter of the layers whatever their number; LoRA only looks on while it warms up.

        The second matrix of an adapter starts at zero, and with it the first one's gradient: the first norms say
        nothing yet.
        """
        base = {"preset": "paper-c", "max_high": 0.25} | ({} if self.full else {"warmup": "monitor"})
        settings = {**({} if "preset" in self.policy else base), **self.policy}
        preset = settings.pop("preset", None)
        return (Policy() if preset is None else Policy.preset(preset)).replace(**settings)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        for name, what in {"model": "a model", "data": "examples"}.items():
            if name not in values:
                raise TrimtabError(f"fine-tuning needs {what}: trimtab finetune MODEL DATA")
        return super().from_dict({"lr": FULL_LR, **values} if values.get("full") is True else values)
