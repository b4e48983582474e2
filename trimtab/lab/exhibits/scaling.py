# SPDX-License-Identifier: Apache-2.0
"""Delayed scaling: a scale from the last 1024 steps fits a tensor only as long as that tensor stays as it was.

RESUME. Weights come back from a checkpoint, scales from an earlier time. Here: the histories are those of step 2, the
weights those of step 40, and the steps between ran in high precision without feeding the histories, as a backend
without calibration does. Inputs of the down projections are then 20 to 32 times beyond their scale and saturate, until
the scales are made anew. With an update in each step that is one step; the thread does not say, so the exhibit
updates them every 20 (Megatron-LM calls it `fp8_interval`) and has `once`, which does so in the next step.

GROWTH. Activations grow faster than the history knows. Here: a learning rate that is hot after two steps of warm-up;
inputs of the down projections grow 2.4- to 3.2-fold from one step to the next, and saturate.

OVERFLOW. The same growth, with a cast that does not saturate: E4M3 has no infinity, so what rounds past 448 is NaN.
"""

from functools import partial

from torch import Tensor

from trimtab.lab.exhibits.case import SMALL, STEADY, Arm, BeforeStep, Exhibit, Quirk, quirks_
from trimtab.lab.run import Run
from trimtab.linear.linear import load_path_state, path_state

EARLY, RESUMED, INTERVAL = 2, 40, 20
DELAYED = SMALL | {"recipe": "fp8_delayed"}
WARM = {"warmup": "high", "warmup_steps": 20}
LOW_ONLY = {"mode": "observe", "path": "low"}

_OVERFLOW = {"input": 464 / 448, "weight": 464 / 448, "grad_output": 61_440 / 57_344}
"""How far past the scale's range a value may lie and still round to the largest number of E4M3 and E5M2."""


def stale(run: Run, broken: bool, *, interval: int = INTERVAL) -> BeforeStep:
    """The first steps on the high path; then low precision with the scales of step `EARLY`, or with none."""
    path, fresh, kept = run.config.path, path_state(run.model), {}

    def before(step: int) -> None:
        if step == 1:
            run.config = run.config.replace(path="high")
        if step == EARLY + 1:
            kept.update(path_state(run.model))
        if step == RESUMED + 1:
            run.config = run.config.replace(path=path)
            load_path_state(run.model, kept if broken else fresh)
        if broken and RESUMED + 1 < step <= RESUMED + interval:
            load_path_state(run.model, kept)

    return before


class Unsaturated(Quirk):
    """A cast to FP8 without saturation, by the tensor: NaN where its largest value rounds past the format's end."""

    def amax(self, operand: str, amax: Tensor) -> Tensor:
        """NaN if the value just remembered does not fit the scale in use."""
        memory = self.module.memory
        history = memory.histories[operand]
        current = history[(memory.counts[operand] - 1) % len(history)]
        return amax.where(current <= amax * _OVERFLOW[operand], amax.new_full((), float("nan")))


def unsaturated(run: Run, broken: bool) -> None:
    """Casts that do not saturate."""
    if broken:
        quirks_(run.model, Unsaturated)


RESUME = Exhibit(
    name="resume",
    thread="NVIDIA/TransformerEngine#982",
    what="the loss explodes after an FP8 checkpoint is loaded: its scales may have to be recalibrated",
    settings=DELAYED | {"steps": 80},
    prepare=stale,
    begins=RESUMED + 1,
    guilty=lambda name: name.endswith("mlp.down"),
    more=(
        Arm("once", LOW_ONLY, prepare=partial(stale, interval=1), note="low, scales made anew in the next step"),
        Arm("forgotten", LOW_ONLY, broken=False, note="low, histories lost altogether: trimtab then measures"),
    ),
    note="scales are made anew every 20 steps",
)

GROWTH = Exhibit(
    name="growth",
    thread="NVIDIA/TransformerEngine#1169",
    what="how long should an amax history be? 1024 steps favour stability, 16 adapt faster; growth outruns both",
    settings=DELAYED | {"steps": 70, "lr": 1e-2, "lr_warmup": 2},
    begins=2,
    guilty=lambda name: name.endswith("mlp.down"),
    more=(Arm("current", LOW_ONLY | {"recipe": "fp8"}, note="low, current scaling"),),
    note="the growth is real, its size is that of a 0.1M model",
)

OVERFLOW = Exhibit(
    name="overflow",
    thread="meta-pytorch/float8_experimental#33",
    what="a cast that does not saturate makes NaN of whatever has grown past a delayed scale",
    settings=DELAYED | {"steps": 60},
    prepare=unsaturated,
    begins=2,
    more=(
        Arm("warm", {"policy": STEADY | WARM}, note="control, all high for 20 steps: the histories are fed meanwhile"),
        Arm("saturating", LOW_ONLY, broken=False, note="low, trimtab's own cast"),
    ),
    note="a whole tensor turns NaN, not an element of it: the loss is NaN either way",
)
