# SPDX-License-Identifier: Apache-2.0
"""Sinks: a few numbers of a run for the dashboard that people have open anyway.

    from trimtab.control.sinks import Tee, TensorBoard

    recorder = trimtab.Recorder("runs/a")
    controller = trimtab.Controller(model, total_steps=10_000, recorder=Tee(recorder, TensorBoard("runs/a/tb")))

A `Tee` stands where a recorder stands: it hands everything on to the recorder (or to None) and writes a few values to
its sinks, every ten steps and whenever something needs an eye. The run folder keeps every norm of every unit; a
dashboard with a curve per unit is one that nobody opens twice.

    stability/grad_norm   norm over all trainable parameters before clipping, of this step
    stability/num_high    units that ran high in this step
    stability/promotion   share of unit-steps that ran high since the last write
    stability/max_risk    largest risk since the last write; above 1 somebody triggered
    stability/nonfinite   passes since the last write whose gradient was not finite
    stability/risk/UNIT   risk of the units that are high or trigger now, the five worst; 20 different ones in a run

What is not finite is not written: `stability/nonfinite` says it. A sink is anything with `write(step, values)` and
`close()`. One that fails is named once and gets no more values; training goes on.
"""

import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from trimtab.control.values import Risk
from trimtab.errors import TrimtabError, missing_extra

log = logging.getLogger(__name__)

PREFIX = "stability/"
URGENT = ("nonfinite", "rerun", "persistent", "budget_full")
"""Events that are written at once."""
SHOWN, MOST = 5, 20
"""Units with a curve of their own: at a time, and in a whole run."""


class Sink(Protocol):
    """Takes named values of a step."""

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Take the values of one step; all are finite."""

    def close(self) -> None:
        """Write what is left."""


class Sinks:
    """Several sinks as one: what is not finite is left out, and a sink that fails is named once and gets no more."""

    def __init__(self, sinks: Iterable[Sink]) -> None:
        self._sinks = list(sinks)

    def __bool__(self) -> bool:
        return bool(self._sinks)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Hand the values on."""
        finite = {name: value for name, value in values.items() if math.isfinite(value)}
        for sink in list(self._sinks):
            try:
                sink.write(step, finite)
            except Exception as error:
                self._drop(sink, error)

    def close(self) -> None:
        """Let every sink write what is left."""
        for sink in list(self._sinks):
            try:
                sink.close()
            except Exception as error:
                self._drop(sink, error)

    def _drop(self, sink: Sink, error: Exception) -> None:
        self._sinks.remove(sink)
        log.warning("%s failed and gets no more values: %s", type(sink).__name__, " ".join(str(error).split()))


class Tee:
    """A recorder that also writes a few values to sinks.

    Args:
        recorder: gets everything that the controller records; None keeps no run folder.
        sinks: get the values above.
        every: steps between two writes.
    """

    wants_risk = True

    def __init__(self, recorder: Any, *sinks: Sink, every: int = 10) -> None:
        if every < 1:
            raise TrimtabError(f"every must be at least 1 step, got {every}")
        if not sinks:
            raise TrimtabError("a Tee writes to sinks, got none: give one, or pass the recorder itself")
        self._recorder, self._sinks, self._every = recorder, Sinks(sinks), every
        self._units: list[str] = []
        self._num_recoverable = 1
        self._named: set[str] = set()
        self._written = -1
        self._forget()

    def _forget(self) -> None:
        self._passes = self._high = self._nonfinite = 0
        self._max_risk = -math.inf

    def open_trace(self, units: Sequence[str], *, recoverable: np.ndarray, **more: Any) -> None:
        """Learn the units, and tell the recorder."""
        self._units, self._num_recoverable = list(units), max(int(np.count_nonzero(recoverable)), 1)
        if self._recorder is not None:
            self._recorder.open_trace(units, recoverable=recoverable, **more)

    def observe(
        self,
        step: int,
        norms: np.ndarray,
        seen: np.ndarray,
        high: np.ndarray,
        grad_norm: float,
        events: Sequence[Mapping[str, Any]] = (),
        columns: Mapping[str, np.ndarray] | None = None,
        risk: Risk | None = None,
    ) -> None:
        """Take one pass."""
        if self._recorder is not None:
            more: dict[str, Any] = {} if columns is None else {"columns": columns}
            more |= {"risk": risk} if getattr(self._recorder, "wants_risk", False) else {}
            self._recorder.observe(step, norms, seen, high, grad_norm, events, **more)
        risks = np.zeros(len(norms)) if risk is None else risk.risk
        self._passes += 1
        self._high += int(np.count_nonzero(high))
        self._nonfinite += not (math.isfinite(grad_norm) and np.isfinite(norms[seen]).all())
        if risk is not None:
            self._max_risk = max(self._max_risk, float(np.max(risks, where=np.isfinite(risks), initial=-math.inf)))
        urgent = any(event.get("kind") in URGENT for event in events)
        if urgent or step // self._every > self._written // self._every:
            self._write(step, high, grad_norm, risks)

    def _write(self, step: int, high: np.ndarray, grad_norm: float, risks: np.ndarray) -> None:
        values = {
            "grad_norm": float(grad_norm),
            "num_high": float(np.count_nonzero(high)),
            "promotion": self._high / (self._passes * self._num_recoverable),
            "max_risk": self._max_risk,
            "nonfinite": float(self._nonfinite),
        }
        values |= {f"risk/{self._units[unit]}": float(risks[unit]) for unit in self._offenders(high, risks)}
        self._sinks.write(step, {PREFIX + name: value for name, value in values.items()})
        self._written = step
        self._forget()

    def _offenders(self, high: np.ndarray, risks: np.ndarray) -> list[int]:
        """The worst units of those that are high or trigger now, as long as there are not too many names."""
        found = np.flatnonzero(high | (risks > 1))
        shown = found[np.argsort(-risks[found], kind="stable")][:SHOWN].tolist()
        for unit in shown:
            if len(self._named) < MOST:
                self._named.add(self._units[unit])
        return [unit for unit in shown if self._units[unit] in self._named]

    def close(self) -> None:
        """Close the recorder, then the sinks."""
        if self._recorder is not None:
            self._recorder.close()
        self._sinks.close()

    def __enter__(self) -> "Tee":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class TensorBoard:
    """Writes scalars for TensorBoard.

    A folder is opened at the first write, and what an earlier run has there of later steps is hidden: a run that goes
    on from a checkpoint, or starts again, has one curve.

    Args:
        writer: a folder, or a `SummaryWriter` of your own, which is left open.
    """

    def __init__(self, writer: Any) -> None:
        self._own = isinstance(writer, str | Path)
        self._folder, self._writer = (str(writer), None) if self._own else (None, writer)
        if self._own:
            try:
                import torch.utils.tensorboard  # noqa: F401  # refused here, not in the middle of a run
            except ImportError:
                raise missing_extra("tensorboard", "tensorboard", "Writing for TensorBoard") from None

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Add one point to each curve."""
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(self._folder, purge_step=step)
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Write what is left."""
        if self._writer is not None:
            self._writer.close() if self._own else self._writer.flush()


class WandB:
    """Writes to a run of Weights & Biases, on an x axis of its own: `stability/step`, the optimizer step.

    Args:
        run: a run of your own, which is left open; None takes the one that is open, or opens one.
        options: of `wandb.init`, for a new run.
    """

    def __init__(self, run: Any = None, **options: Any) -> None:
        self._own = False
        if run is None:
            wandb = import_wandb()
            self._own = wandb.run is None
            run = wandb.init(**options) if wandb.run is None else wandb.run
        self._run = run
        run.define_metric(f"{PREFIX}step", hidden=True)
        run.define_metric(f"{PREFIX}*", step_metric=f"{PREFIX}step")

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Log the values; their step is a value too, so that W&B's own count does not matter."""
        self._run.log({**values, f"{PREFIX}step": step})

    def close(self) -> None:
        """Finish a run that was opened here."""
        if self._own:
            self._run.finish()


class Trackio:
    """Writes to a run of Trackio.

    Args:
        run: a run of your own, which is left open; None opens one.
        options: of `trackio.init`, for a new run: `project="..."` at least.
    """

    def __init__(self, run: Any = None, **options: Any) -> None:
        self._own = run is None
        if run is None:
            try:
                import trackio
            except ImportError:
                raise missing_extra("trackio", "trackio", "Writing to Trackio") from None
            run = trackio.init(**{"embed": False, **options})
        self._run = run

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Log the values at their step."""
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        """Finish a run that was opened here."""
        if self._own:
            self._run.finish()


def import_wandb() -> Any:
    """The package, or the error that says how to get it."""
    try:
        import wandb
    except ImportError:
        raise missing_extra("wandb", "wandb", "Writing to Weights & Biases") from None
    return wandb
