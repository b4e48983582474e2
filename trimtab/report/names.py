# SPDX-License-Identifier: Apache-2.0
"""Names: what other people's logs call a loss, a global gradient norm, and the gradient norm of one unit.

    loss            loss, train/loss, train_loss, lm loss, loss_metrics/global_avg_loss, ...; never eval/ or val/
    global norm     grad_norm, train/grad_norm, grad-norm, grad_2.0_norm_total, l2_norm/grad/global, ...
    unit's norm     grad_norm/layers.0.q, gradients/..., grads/.../norm, l2_norm/grad/..., grad_2.0_norm/...,
                    layers.0.q/grad_norm
    step            step, _step, global_step, train/global_step, iteration, ...

A chart exported from W&B writes `run - column`, `run - column__MIN` and `run - column__MAX`; the run's name goes to the
side and the extremes are left out. A pattern of one's own (`layers.*.gnorm`) comes before all of these: what the stars
stand for is the unit's name.

Names are somebody else's text. `visible` writes characters that are not to be seen (control characters, changes of
direction, halves of a pair) as their codes, so that a name cannot move a terminal's cursor or hide in a page.
"""

import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

GENERIC = (
    *("train", "training", "trainer", "optim", "optimizer", "global", "metrics", "stability", "debug", "monitor"),
    *("norms", "norm", "model", "stats"),
)
"""First parts of a name that say nothing about a unit."""
HELD_OUT = ["eval", "evaluation", "val", "valid", "validation", "test", "dev", "holdout"]
LOSSES = (
    *("loss", "train_loss", "training_loss", "lm loss", "lm_loss", "global_avg_loss", "loss_step", "train_loss_step"),
    *("ce_loss", "nll_loss", "total_loss", "cross_entropy"),
)
GLOBALS = (
    *("grad_norm", "gradnorm", "gradient_norm", "global_grad_norm", "total_grad_norm", "grad_norm_total", "gnorm"),
    *("grad_2.0_norm_total", "global_norm", "total_norm", "grad_norm_step", "grads_norm"),
)
ALL = ["global", "total", "all", "overall", "total_norm", "global_norm"]
STATISTICS = ["min", "max", "mean", "avg", "std", "var", "median", "sum", "abs_max", "abs_mean"]
STEPS = ["train/global_step", "trainer/global_step", "global_step", "step", "_step", "iteration", "iter", "steps"]
_BEFORE = re.compile(
    r"(?:l2_norm/grad|grads?_norms?|gradient_norms?|grad_2\.0_norm|gradnorms?|gradients?|grads?)[/.:](?P<unit>.+)",
    re.DOTALL,
)
_AFTER = re.compile(r"(?P<unit>.+?)[/.:_](?:grads?_norms?|gradient_norm|grad_l2(?:_norm)?)", re.DOTALL)
_END = re.compile(r"[/._](?:grad_norm|l2_norm|norm|l2)$")

Kind = Literal["unit", "norm", "loss"]


class Meaning(NamedTuple):
    """What a column is, and of which unit."""

    kind: Kind
    unit: str = ""


@dataclass(frozen=True)
class Naming:
    """How columns are told apart: somebody's own names first, then the usual ones."""

    columns: Sequence[str] = ()
    """Patterns of per-unit norms, `*` for the unit."""
    loss: str | None = None
    step: str | None = None

    def meaning(self, name: str) -> Meaning | None:
        """What a column is; None where it is nothing that is asked for."""
        if self.loss is not None and name == self.loss:
            return Meaning("loss")
        for pattern in self.columns:
            if unit := _matched(pattern, name):
                return Meaning("unit", unit)
        return _usual(name, loss=self.loss is None, unit=not self.columns)

    def is_step(self, name: str) -> bool:
        """Whether a column may hold the steps."""
        return name == self.step if self.step is not None else name.lower() in STEPS


def _matched(pattern: str, name: str) -> str | None:
    parts = pattern.split("*")
    if len(parts) == 1:
        return name if name == pattern else None
    middle = ".*?".join(re.escape(part) for part in parts[1:-1])
    inner = f"(.*?{middle}.*)" if len(parts) > 2 else "(.*)"
    found = re.fullmatch(f"{re.escape(parts[0])}{inner}{re.escape(parts[-1])}", name, re.DOTALL)
    return found.group(1) or name if found else None


def _usual(name: str, *, loss: bool, unit: bool) -> Meaning | None:
    lower = name.lower().replace("-", "_")
    parts = re.split(r"[/]", lower)
    if any(part in HELD_OUT for part in parts) or any(parts[-1].startswith(f"{word}_") for word in HELD_OUT):
        return None
    if parts[-1] in LOSSES:
        return Meaning("loss") if loss else None
    start = 0
    while start < len(parts) - 1 and parts[start] in GENERIC:
        start += 1
    rest = "/".join(parts[start:])
    own = name.split("/", start)[-1]  # the same part as it was written
    if rest in GLOBALS:
        return Meaning("norm")
    found = _BEFORE.fullmatch(rest) or _AFTER.fullmatch(rest)
    if found is None or re.split(r"[/.]", rest)[-1] in STATISTICS:
        return None
    if found.group("unit") in ALL:
        return Meaning("norm")
    if not unit:
        return None
    written = own[slice(*found.span("unit"))]
    return Meaning("unit", _END.sub("", written) or written)


def of_chart(name: str) -> tuple[str, str] | None:
    """The run and the column of a header in a chart's export; None for the extremes beside it."""
    if name.endswith(("__MIN", "__MAX")):
        return None
    run, dash, column = name.rpartition(" - ")
    return (run, column) if dash else ("", name)


def loss_rank(name: str) -> tuple[int, int, str]:
    """Which of several losses is meant: the plainest name first."""
    last = name.lower().replace("-", "_").rsplit("/", 1)[-1]
    return (LOSSES.index(last) if last in LOSSES else len(LOSSES), len(name), name)


def visible(text: str) -> str:
    """A text whose every character can be seen; a line break becomes a space."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(_shown(char) for char in text)


def _shown(char: str) -> str:
    if char in "\n\r\t":
        return " "
    if unicodedata.category(char) in ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"):
        code = ord(char)
        return f"\\u{code:04x}" if code < 65536 else f"\\U{code:08x}"
    return char
