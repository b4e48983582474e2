# SPDX-License-Identifier: Apache-2.0
"""The controller: five lines in somebody's own loop.

    controller = trimtab.Controller(model, total_steps=10_000)
    for batch in loader:
        model(batch).loss.backward()
        controller.step()             # observe -> judge -> decide -> act: who runs high in the next step
        optimizer.step()
        optimizer.zero_grad()

It holds the state of the pure functions in `advance`, calls them once per optimizer step, and does the three
things they cannot: read gradients, flip switches, tell people. Call it once per *optimizer* step, after the
last micro-batch; with a GradScaler after `scaler.unscale_`; clip after it, or with `controller.clip_grad_norm_`,
which reuses the norms in either order.

Modes: `act` switches units and skips non-finite steps; `observe` works on any model, decides and records, and
changes not a bit of the run; `off` does nothing. `TRIMTAB=off|observe|act` in the environment overrides.

On many ranks give it the model that trains, wrapped by DDP or sharded by `fully_shard` or `parallelize_module`, on
every rank: `step()` and `clip_grad_norm_` are then collective, and all ranks decide alike (`ranks.py`).
"""

import logging
import os
import time
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.profiler import record_function

from trimtab.control import act
from trimtab.control.advance import State, Verdict, advance
from trimtab.control.decide import Ledger, Quota, quotas_of
from trimtab.control.detectors import Detector, described, detector_of
from trimtab.control.events import Narrator
from trimtab.control.observe import Observer, measured
from trimtab.control.policy import Policy
from trimtab.control.ranks import Ranks, check_bound, join, refuse_sensors
from trimtab.control.selections import Selection
from trimtab.control.sensing import attach_sensors
from trimtab.control.sensors import Sensor
from trimtab.control.state import (
    STATE_VERSION,
    check_state,
    column,
    columns,
    load_path_states,
    load_sensors,
    path_states,
    to_tensors,
)
from trimtab.control.tally import Tally
from trimtab.control.units import Grouping, Unit, gather_units, trainable
from trimtab.control.values import Event, Plan, Reading, Risk
from trimtab.control.waiting import skip_flag
from trimtab.errors import NonFiniteError, TrimtabError

log = logging.getLogger(__name__)

BLIND = (
    "step() found no gradient in any parameter: call it after backward and before zero_grad(); gradients in main_grad "
    "or in ZeRO's partitions are read by trimtab.integrations.megatron and trimtab.integrations.deepspeed"
)

MODES = ("off", "observe", "act")


class RecorderLike(Protocol):
    """What the controller asks of a recorder (`trimtab.Recorder` is one).

    `columns` and `detector` are passed only where there is more than GNMR and its norms, `quotas` only where stages
    have budgets of their own, and `risk` (a `Risk` of this pass) only to a recorder whose `wants_risk` is true.
    """

    def open_trace(
        self,
        units: list[str],
        *,
        recoverable: np.ndarray,
        policy: dict,
        max_high: int,
        warmup_steps: int,
        total_steps: int | None,
        columns: Sequence[str] = ...,
        detector: Mapping[str, Any] | None = ...,
        quotas: Sequence[Quota] = ...,
    ) -> None:
        """Learn what the rows will mean."""

    def observe(
        self,
        step: int,
        norms: np.ndarray,
        seen: np.ndarray,
        high: np.ndarray,
        grad_norm: float,
        events: list[dict],
        columns: Mapping[str, np.ndarray] | None = ...,
    ) -> None:
        """Take one pass: the norms measured, and the set that was executed."""


class Controller:
    """Watches the gradient norms of a model's units and decides who runs high in the next step."""

    def __init__(
        self,
        model: nn.Module,
        policy: Policy | None = None,
        *,
        mode: str = "act",
        total_steps: int | None = None,
        recorder: RecorderLike | None = None,
        on_event: Callable[[Event], None] | None = None,
        units: Grouping | Sequence[Unit] | None = None,
        watch: Sequence[str] = (),
        selection: Selection | None = None,
        detector: str | Mapping[str, Any] | Detector = "gnmr",
        sensors: Sequence[Sensor] = (),
        wait: str = "step",
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] = (),
        process_group: dist.ProcessGroup | None = None,
        stage: int | None = None,
        quota: str | None = None,
    ) -> None:
        """Find the model's units and start with an empty history.

        Args:
            policy: thresholds, budget and lock; the paper's two-stage rule by default.
            mode: `"act"`, `"observe"` or `"off"`; the environment variable TRIMTAB overrides it.
            total_steps: optimizer steps of the whole run, which fixes the warm-up.
            recorder: takes every reading and event, for `trimtab report` and `trimtab replay`.
            on_event: called with each `Event`: who went high or back and why, denied, non-finite, ...
            units: for a model that was not converted, how to group it (`"linear"`, `"block"`, `"expert"`, name
                patterns), or ready-made units; a converted model brings its own.
            watch: name patterns of further modules to watch and record; they are never switched.
            selection: fills the seats in another way than Algorithm 2 (`trimtab.control.selections`), to compare.
            detector: what risks are read from (`trimtab.control.detectors`): a name, a dict of name and options, or
                a detector; `"gsnr:full"` fills the budget in every step.
            sensors: for columns that the detector needs or that only the trace should have
                (`trimtab.control.sensors`); what the detector needs is added by itself.
            wait: when the host waits for the norms. `"step"`: in `step()`, so that its plan is that of this step and a
                batch can be run again. `"forward"`: just before the next forward, when the optimizer's work is queued
                already; the decision is the same. `"never"`: not at all, and every decision comes one step later.
            optimizer: with `wait` other than `"step"` in act mode, whoever updates the weights: a non-finite step is
                then skipped on the device, which fused optimizers can do (`torch.optim.AdamW(..., fused=True)`).
            process_group: the ranks that must decide alike, where the model itself does not say so: None means those of
                its DDP wrapper or of its parameters' mesh, and nobody for a plain model.
            stage: the number of the pipeline stage that `model` is. The units of all stages then share one budget, and
                the ranks of `process_group` (None: all) hold the stages among them.
            quota: `"stage"` gives each stage a budget of its own, `policy.max_high` of its units.
        """
        self.mode = _resolve_mode(mode)
        self.policy = Policy() if policy is None else policy
        # Observe mode never asks for a batch to be run again.
        self._in_force = self.policy if self.mode == "act" else self.policy.replace(replay_step=None)
        self.total_steps = total_steps
        self._on_event, self._recorder, self._selection = on_event, recorder, selection
        self._wait, self._pending = wait, None
        optimizers = [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else list(optimizer)
        self._found_inf = skip_flag(wait, self._in_force, self.mode == "act", optimizers)
        self._paused = False
        self._bad_steps = 0
        self._began_in = "an earlier part of the run"
        self.seconds = 0.0  # how long the last step() took
        found = () if self.mode == "off" else gather_units(model, units, watch, self.mode)
        parameters = measured(found, trainable([model]))
        self.detector = detector_of(detector)
        self._ranks = None
        if self.mode != "off":
            wanted = list(dict.fromkeys([*(sensor.column for sensor in sensors), *self.detector.columns]))
            refuse_sensors(wanted, model, found, parameters)
            terms = {"policy": self.policy.to_dict(), "mode": self.mode, "wait": wait, "total_steps": total_steps}
            terms |= {"detector": described(self.detector), "sensors": wanted}
            self._ranks = join(model, found, parameters, terms, process_group=process_group, stage=stage)
        self.units: tuple[Unit, ...] = found if self._ranks is None else self._ranks.units
        self._model: weakref.ref[nn.Module] | None = weakref.ref(model)
        switchable = np.array([unit.recoverable for unit in self.units], bool)
        # A plain model has no switch at all: observe mode then decides as if every unit could be switched.
        on_paper = np.array([not unit.bystander for unit in self.units], bool)
        self._recoverable = switchable if switchable.any() else on_paper
        self.reading: Reading | None = None  # what the last step() has read
        self._saw = False
        self._sensors = {} if self.mode == "off" else attach_sensors(self.detector, sensors, self.units)
        self._observer = Observer(self.units, parameters, tuple(self._sensors.values()), self._ranks)
        self.limits = self.policy.resolve(int(self._recoverable.sum()), total_steps if self.mode != "off" else 1)
        self._quotas = _quotas(quota, stage, self._ranks, self._recoverable, self.policy)
        if self._quotas:
            self.limits = self.limits._replace(max_high=sum(part.max_high for part in self._quotas))
        self._reset()
        if recorder is not None and self.mode != "off":
            more: dict[str, Any] = {"columns": list(self._sensors)} if self._sensors else {}
            more |= {"detector": described(self.detector)} if self.detector.name != "gnmr" else {}
            more |= {"quotas": self._quotas} if self._quotas else {}
            recorder.open_trace(
                list(self.names),
                recoverable=self._recoverable,
                policy=self._in_force.to_dict(),  # what a replay of the rows must use
                max_high=self.limits.max_high,
                warmup_steps=self.limits.warmup_steps,
                total_steps=total_steps,
                **more,
            )

    def _reset(self) -> None:
        self._state = State.fresh(self._recoverable, self.policy, self.limits, self.detector)
        self._tally = Tally(self._recoverable, self._state.ledger.high, self.policy, self.limits)
        acting, judge = self.mode == "act", self.detector.name
        self._narrator = Narrator(self.names, self.policy, self.limits, acting=acting, detector=judge)
        self._set_plan(0)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the units, in the order of every array."""
        return tuple(unit.name for unit in self.units)

    @property
    def steps(self) -> int:
        """Optimizer steps observed so far."""
        return self._state.step

    def step(self) -> Plan:
        """Read the norms of this step and choose who runs high in the next; call before `optimizer.step()`.

        With `wait` other than `"step"` it only sends the norms on their way and returns the plan in force (`settle`).

        On a non-finite gradient (`plan.nonfinite`), and where the batch must be run again (`plan.rerun`), the
        gradients are set to None, so that a following `optimizer.step()` does nothing. Raises `NonFiniteError`
        after `policy.max_nonfinite` non-finite steps in a row.
        """
        if self.mode == "off":
            return self.plan
        started = time.perf_counter()
        if self._model is not None and (model := self._model()) is not None:
            check_bound(model, self._observer.parameters)
            self._model = None
        ran = self._executed()  # before what is still on its way changes the plan
        self.settle()
        with _span("trimtab::observe"):
            self._pending = self._observer.start(self._found_inf), ran
        if self._wait == "step":
            self.settle()
        elif self._wait == "forward":
            for unit in self.units:
                if unit.switch is not None:
                    unit.switch.pending = self.settle
        self.seconds = time.perf_counter() - started
        return self.plan

    def settle(self) -> Plan:
        """Wait for the norms of the last step, if they are still on their way, and act on them; the plan in force."""
        if self._pending is None:
            return self.plan
        pending, ran = self._pending
        self._forget()
        with _span("trimtab::observe"):
            reading = self.reading = self._observer.finish(pending)
        if not self._saw and not reading.seen.any():
            log.warning(BLIND)
        self._saw = True
        with _span("trimtab::decide"):
            before = self._state
            verdict, self._state = advance(
                before,
                reading.norm[None],
                reading.seen[None],
                self._recoverable,
                self._in_force,
                self.limits,
                self.detector,
                {name: reading.columns[name][None] for name in self.detector.columns},
                self._quotas,
            )
            if self._selection is not None:
                verdict = self._reselect(verdict, self._selection)
            nonfinite = not (np.isfinite(reading.total) and np.isfinite(reading.norm[reading.seen]).all())
            events = self._narrator.tell(before.ledger, verdict, self._state.ledger, nonfinite)
        with _span("trimtab::act"):
            self._set_plan(int(verdict.steps[0]), nonfinite=nonfinite, rerun=bool(verdict.rerun[0]))
            if self.mode == "act" and self._wait == "step" and (nonfinite or self.plan.rerun):
                self._observer.drop()
            for sensor in self._sensors.values():
                sensor.aim(verdict.risk.risk[0], self._executed())
        with _span("trimtab::record"):
            self._record(verdict, reading, ran, events)
        self._count_bad(nonfinite, np.flatnonzero(reading.seen & ~np.isfinite(reading.norm)))
        return self.plan

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Clip the total gradient norm, as `torch.nn.utils.clip_grad_norm_` does, without a second pass over it.

        Works before or after `step()`; the norms that are judged are those before clipping.
        """
        return self._observer.clip_(max_norm)

    def _forget(self) -> None:
        """Nothing is on its way any more."""
        self._pending = None
        for unit in self.units:
            if unit.switch is not None:
                unit.switch.pending = None

    def pause(self) -> None:
        """Let every unit run low from the next step on; norms are still read, judged and recorded."""
        self._paused = True

    def resume(self) -> None:
        """Act again from the next step on."""
        self._paused = False

    def rescale_history(self, factor: float) -> None:
        """Scale every unit's remembered norms, for when the number of micro-batches (and so the norm) changes."""
        if not (np.isfinite(factor) and factor > 0):
            raise TrimtabError(f"factor must be a positive number, got {factor!r}")
        self.settle()
        self._state = self._state._replace(history=self.detector.rescaled(self._state.history, factor))

    def detach(self) -> None:
        """Take the sensors off the model; the controller must not step after it."""
        self._forget()
        for sensor in self._sensors.values():
            sensor.detach()

    def summary(self) -> dict[str, float]:
        """The metrics of `trimtab.control.tally`, false alarms first."""
        self.settle()
        return self._tally.summary()

    def median_ratios(self) -> dict[str, float]:
        """Median ratio of each unit so far: what alpha means for it."""
        return dict(zip(self.names, self._tally.median_ratios().tolist(), strict=True))

    def _reselect(self, verdict: Verdict, selection: Selection) -> Verdict:
        """Let another selection fill the seats; the ledger then speaks of its choice."""
        high = selection(int(verdict.steps[0]), verdict)
        self._state = self._state._replace(ledger=self._state.ledger._replace(high=high))
        return verdict._replace(choice=verdict.choice._replace(high=high[None]))

    def _executed(self) -> np.ndarray:
        """The set that really runs high in the step under way."""
        acting = self.mode == "act"
        return np.array([acting and u.switch is not None and u.switch.planned for u in self.units], bool)

    def _set_plan(self, step: int, *, nonfinite: bool = False, rerun: bool = False) -> None:
        """Make the ledger's set the plan, and apply it."""
        mask = self._state.ledger.high.copy()
        mask.setflags(write=False)
        self.plan = Plan(step, self.names, mask, nonfinite, rerun)
        self._held = self._paused
        if self.mode == "act":
            act.apply(self.units, mask & (not self._held))

    def _record(self, verdict: Verdict, reading: Reading, ran: np.ndarray, events: list[Event]) -> None:
        self._tally.add_later(verdict, ran[None] if self.mode == "act" else None)
        if self._recorder is not None:
            told = [event.to_dict() for event in events]
            more: dict[str, Any] = {}
            if self._sensors:
                more["columns"] = {name: reading.columns[name] for name in self._sensors}
            if getattr(self._recorder, "wants_risk", False):
                more["risk"] = Risk(*(column[0] for column in verdict.risk))
            self._recorder.observe(self.plan.step, reading.norm, reading.seen, ran, reading.total, told, **more)
        for event in events:
            told_here = self._ranks is None or self._ranks.is_first  # all ranks would say the same
            if event.kind in ("nonfinite", "persistent", "budget_full") and told_here:
                log.warning("step %d: %s", event.step, event.message)
            if self._on_event is not None:
                self._on_event(event)

    def _count_bad(self, nonfinite: bool, guilty: np.ndarray) -> None:
        if self.plan.rerun:
            return
        if nonfinite and self._bad_steps == 0:
            names = [self.names[b] for b in guilty[:3]]
            more = f" and {len(guilty) - 3} more" if len(guilty) > 3 else ""
            self._began_in = (", ".join(names) or "parameters outside every unit") + more
        self._bad_steps = self._bad_steps + 1 if nonfinite else 0
        if self.mode == "act" and self._bad_steps >= self.policy.max_nonfinite:
            raise NonFiniteError(
                f"the gradient was not finite for {self._bad_steps} steps in a row (max_nonfinite="
                f"{self.policy.max_nonfinite}), last at step {self.plan.step}; it began in {self._began_in}: lower the "
                "learning rate, or go back to an earlier checkpoint"
            )

    def state_dict(self) -> dict[str, Any]:
        """Everything a resumed run needs to decide identically: plain values and tensors, by unit name."""
        if self.mode == "off":
            return {}
        self.settle()
        state = self._state
        return {
            "version": STATE_VERSION,
            "policy": self.policy.to_dict(),
            "units": list(self.names),
            "step": state.step,
            "again": state.again,
            "paused": self._paused,
            "held": self._held,
            "bad_steps": self._bad_steps,
            "detector": described(self.detector),
            "sensors": {name: sensor.state_dict() for name, sensor in self._sensors.items()},
            "history": to_tensors(state.history._asdict()),
            "ledger": to_tensors(state.ledger._asdict()),
            "tally": to_tensors(self._tally.state_dict()),
            "narrator": to_tensors(self._narrator.state_dict()),
            "paths": path_states(self.units),
        }

    def load_state_dict(self, state_dict: Mapping[str, Any] | None) -> None:
        """Continue from a saved state; without one (a checkpoint made without trimtab) warn and start afresh."""
        if self.mode == "off":
            return
        self._forget()
        if not state_dict:
            warnings.warn("the checkpoint holds no controller state: starting with a fresh history", stacklevel=2)
            self._reset()
            return
        check_state(state_dict, self.names, self.policy, described(self.detector))
        order = [list(state_dict["units"]).index(name) for name in self.names]
        memory = self.detector.fresh(len(self.names), self.policy)
        history = type(memory)(**columns(state_dict["history"], order))
        load_sensors(self._sensors, state_dict.get("sensors", {}))
        ledger = Ledger(**columns(state_dict["ledger"], order))
        self._state = State(int(state_dict["step"]), bool(state_dict["again"]), history, ledger)
        tally = dict(state_dict["tally"])
        by_unit = {name: column(tally[name], order, axis=0) for name in ("ratios", "executed", "last")}
        self._tally.load_state_dict({"counts": tally["counts"], **by_unit})
        told = dict(state_dict["narrator"])
        self._narrator.load_state_dict(told | {"denied": column(told["denied"], order)})
        self._bad_steps = int(state_dict["bad_steps"])
        load_path_states(self.units, state_dict["paths"])
        self._paused = bool(state_dict["held"])  # a pause not yet in force must not reach into the step under way
        self._set_plan(self._state.step)
        self._paused = bool(state_dict["paused"])


def _span(name: str) -> AbstractContextManager[Any]:
    """A range in the profiler; nothing at all while no profiler runs, because an idle range costs 60 microseconds."""
    profiling = torch.autograd._profiler_enabled()  # pyright: ignore[reportPrivateImportUsage]
    return record_function(name) if profiling else nullcontext()


def _quotas(
    quota: str | None, stage: int | None, ranks: Ranks | None, recoverable: np.ndarray, policy: Policy
) -> tuple[Quota, ...]:
    """The budget of each stage, or none of them: one budget for all."""
    if quota is None:
        return ()
    if quota != "stage" or stage is None:
        raise TrimtabError(
            f'quota must be None, or "stage" with a number of the stage, got {quota!r}, {stage=}: give both'
        )
    stages = np.zeros(len(recoverable), np.int64) if ranks is None else np.array(ranks.stages)
    return quotas_of([np.flatnonzero(stages == one).tolist() for one in np.unique(stages)], recoverable, policy)


def _resolve_mode(mode: str) -> str:
    override = os.environ.get("TRIMTAB", "").strip().lower()
    for source, value in (("mode", mode), ("the environment variable TRIMTAB", override)):
        if value not in MODES and (value or source == "mode"):
            raise TrimtabError(f"{source} must be one of {', '.join(MODES)}, got {value!r}")
    return override or mode
