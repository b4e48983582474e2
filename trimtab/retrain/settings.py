# SPDX-License-Identifier: Apache-2.0
"""The numbers of ultra-low-bit retraining, checked once.

The defaults are ApiQ's (arXiv 2402.05147: rank 64, alpha 16, weight decay 0.1, 20 epochs) with two
bits in groups of 64. `lam` has the meaning that `block.py` gives it, not that of a paper. Arms of a comparison are
settings, and no code of their own:

    Settings(rank=0, epochs=0)      round to nearest
    Settings(rank=0)                clipping only
    Settings(lam=0)                 clipping and LoRA: ApiQ
    Settings()                      with the saliency term, where a saliency is given
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trimtab.checks import is_number, is_positive, is_whole, meant, require
from trimtab.errors import TrimtabError

STEPS = 2560
"""Of ApiQ per block: 20 epochs of 128 sequences, one at a time."""
SCHEDULES = ("linear", "constant")


@dataclass(frozen=True)
class Settings:
    """How a model is quantized and what is trained on the way."""

    bits: int = 2
    """2 to 8."""
    group: int = 64
    """Weights of a row that share a scale; the last group of a row may be short."""
    symmetric: bool = False
    rank: int = 64
    """Of the LoRA factors; 0 trains the clipping alone."""
    alpha: float = 16.0
    """The factors count alpha / rank."""
    lam: float = 0.1
    """Weight of the saliency term: what the salient weight error counts against the output error."""
    after_lora: bool = False
    """Whether the saliency term looks at Q + LoRA in place of Q alone."""
    aug_loss: bool = True
    """Whether the output is also compared with that of the plain block on the quantized stream."""
    epochs: int = 20
    """Passes over the calibration sequences, per block."""
    batch: int = 1
    """Sequences per step."""
    lr_clip: float | None = None
    """None: see `rates`."""
    lr_lora: float | None = None
    schedule: str = "linear"
    """How the rates go over a block's steps: "linear" falls to 0; "constant" is ApiQ's, and needs its many steps."""
    weight_decay: float = 0.1
    seed: int = 0

    def __post_init__(self) -> None:
        require(self.bits in range(2, 9) and is_whole(self.bits), "bits must be an int from 2 to 8", self.bits)
        for name, least in (("group", 1), ("rank", 0), ("epochs", 0), ("batch", 1), ("seed", 0)):
            value = getattr(self, name)
            require(is_whole(value, least), f"{name} must be a whole number of at least {least}", value)
        numbers = {"lam": self.lam, "weight_decay": self.weight_decay}
        rates = {name: rate for name in ("lr_clip", "lr_lora") if (rate := getattr(self, name)) is not None}
        for name, value in (numbers | rates).items():
            require(is_number(value) and value >= 0, f"{name} must be a number of at least 0", value)
        require(self.schedule in SCHEDULES, f"schedule must be one of {', '.join(SCHEDULES)}", self.schedule)
        require(is_positive(self.alpha), "alpha must be a number above 0", self.alpha)

    @property
    def factor(self) -> float:
        """What the product of the LoRA factors is multiplied by."""
        return self.alpha / self.rank if self.rank else 0.0

    def steps(self, sequences: int) -> int:
        """Updates of a block, at least 1."""
        return max(self.epochs * -(-sequences // self.batch), 1)

    def share(self, step: int, sequences: int) -> float:
        """The share of its rate that a step of a block has, the first being 0."""
        return 1 - step / self.steps(sequences) if self.schedule == "linear" else 1.0

    def rates(self, sequences: int) -> tuple[float, float]:
        """The learning rates of clipping and LoRA for so many calibration sequences.

        ApiQ's are 5e-3 and 5e-4 for its 2,560 steps per block. What AdamW can move a number by is rate times steps, so
        fewer steps take proportionally larger ones, up to twentyfold. Rates of that size must fall: held constant, they
        leave a block further from its target than rounding did.
        """
        more = min(max(STEPS / self.steps(sequences), 1.0), 20.0)
        clip = 5e-3 * more if self.lr_clip is None else self.lr_clip
        lora = 5e-4 * more if self.lr_lora is None else self.lr_lora
        return clip, lora

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Settings":
        """Settings by name; an unknown name is refused."""
        names = [field.name for field in dataclasses.fields(cls)]
        for name in values:
            if name not in names:
                raise TrimtabError(f"retraining has no setting {name!r}: {meant(name, names)}")
        return cls(**values)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as `from_dict` takes them."""
        return dataclasses.asdict(self)
