# SPDX-License-Identifier: Apache-2.0
"""One run: its model, data, optimizer, faults and controller, and what an optimizer step does with them.

    faults.at(step)                      the windows of this step, if any
    for each micro-batch: loss.backward()
    plan = controller.step()             norms, decision, switch; a bad step's gradients are gone
    (plan.rerun: the same batch again)
    guard.step_(loss)                    a guard, if any, may drop or clip the gradients
    controller.clip_grad_norm_(clip)     the same norms
    update.step(schedule(step))          a gradient transform, if any, then the optimizers

Batch, learning rate and faults are pure functions of the step, so a resumed run repeats the uninterrupted one bit for
bit on the same machine.

On several ranks (`parallel.py`) each has a `Run` of its own and does all of this alike, on its rows of every batch.
`model` is the bare one, with the names that a checkpoint has; `net` is what is called in training, which shares the
gradients.
"""

import logging
import platform
import time
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from trimtab.control import act
from trimtab.control.act import running
from trimtab.control.controller import Controller
from trimtab.control.record import CHECKPOINTS, Recorder
from trimtab.control.secrets import without_secrets
from trimtab.control.selections import Fixed, Selection
from trimtab.control.sinks import Sinks, Tee
from trimtab.control.units import find_units
from trimtab.control.values import Event, Plan
from trimtab.errors import NoEffectWarning, TrimtabError, one_line
from trimtab.lab import checkpoint, parallel
from trimtab.lab.config import Settings
from trimtab.lab.faults import Faults, Windows, parse_faults
from trimtab.lab.guards import ClipFlagged, build_guard
from trimtab.lab.memories import Memories
from trimtab.lab.optimizers import Update, schedule
from trimtab.lab.parallel import Unwritten, World
from trimtab.lab.resume import changed, comparable
from trimtab.lab.seats import Oracle, build_selection
from trimtab.lab.task import IGNORED, Pretraining, Task
from trimtab.linear.account import describe_saved
from trimtab.linear.convert import ConvertReport, convert_
from trimtab.linear.linear import load_path_state, path_state
from trimtab.linear.paths import Recipe

log = logging.getLogger(__name__)

OTHER = {
    "data": ("other text", "give the same data; the standard library's text differs between Python versions"),
    "base": ("another base model", "give the model it was started with"),
}
"""What differs where a checkpoint's identity does, and the remedy."""


class StepInfo(NamedTuple):
    """What a progress display may want to know of a step."""

    step: int
    loss: float
    lr: float
    tokens_per_s: float
    plan: Plan


class Watcher(Protocol):
    """Somebody who looks on: the command line's progress bar, or nobody."""

    def started(self, run: "Run") -> None:
        """The run is set up and about to begin at `run.step`."""

    def stepped(self, info: StepInfo) -> None:
        """One optimizer step is done."""

    def evaluated(self, step: int, losses: Mapping[str, float]) -> None:
        """The held-out part was evaluated."""

    def happened(self, event: Event) -> None:
        """The controller has something to say."""


class Silent:
    """A watcher that shows nothing."""

    def started(self, run: "Run") -> None:
        """Show nothing."""

    def stepped(self, info: StepInfo) -> None:
        """Show nothing."""

    def evaluated(self, step: int, losses: Mapping[str, float]) -> None:
        """Show nothing."""

    def happened(self, event: Event) -> None:
        """Show nothing."""


class Run:
    """The pieces of one run, built from its settings; deterministic by its seed.

    Building one writes nothing. `record` gives it a run folder and its controller; then it can step.

    Args:
        world: the ranks that share the run; each builds its own, at the same time.
        task: what makes the model and the data from the settings.
        sinks: get the controller's few values as well as the run folder.
    """

    recorder: Recorder | Unwritten

    def __init__(
        self,
        config: Settings,
        watcher: Watcher,
        selection: Selection | None = None,
        world: World | None = None,
        task: type[Task] = Pretraining,
        sinks: Sinks | None = None,
    ) -> None:
        self.config, self.watcher, self._sinks = config, watcher, sinks
        self.world = World() if world is None else world
        parallel.check(config, self.world)
        self.device = _device(parallel.local_device(config.device, self.world))
        if config.threads or config.model == "micro":
            torch.set_num_threads(config.threads or 1)
        torch.manual_seed(config.seed)
        self.task = task(config)
        self.model = self.task.model.to(self.device)
        self.report = None if config.recipe == "none" else _convert(self.model, config)
        self.net = parallel.wrap(self.model, config, self.world)
        self.update = Update(self.model, config)
        self.faults = self._bind(config.faults)
        alone = self.world.size == 1
        self.memories = None if alone else Memories(self.model, self.faults, self.world, config.split)
        units = find_units(self.model, None if self.report is not None else config.unit)
        self.guard = build_guard(self.model, config, units)
        if isinstance(self.guard, ClipFlagged):
            if selection is not None:
                raise TrimtabError("guard=clip_flagged lets nobody run high, and a selection chooses: give one of them")
            selection = self.guard
        self.selection = build_selection(config, units, selection, self._norms)
        self.step, self.last_step = 0, config.steps
        self._bad_ranks: list[int] = []  # whose loss was not finite in the last step
        self.tokens_per_step = self.task.tokens_per_step
        self.controller = self._control(None)  # refuses what it cannot control before a folder is touched

    def _bind(self, windows: Windows) -> Faults | None:
        return Faults(self.model, windows) if parse_faults(windows) else None

    def describe(self) -> dict[str, Any]:
        """What run.json keeps: the settings, each fault window written out, and what identifies the text."""
        windows = () if self.faults is None else self.faults.windows
        described = self.config.to_dict() | {"faults": [w.to_dict() for w in windows], "corpus": self.task.describe()}
        name = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else platform.machine()
        described["hardware"] = {"device": str(self.device), "name": name, "threads": torch.get_num_threads()}
        described["hardware"]["ranks"] = self.world.size
        if self.report is not None:
            batch = self.task.batch_at(0)[0].to(self.device)
            described["saved"] = describe_saved(self.model, lambda: self.model(batch))
        return described

    def record(self, recorder: Recorder | Unwritten) -> None:
        """Take a run folder, and start the controller."""
        self.recorder = recorder
        self.controller.detach()
        self.controller = self._control(None if isinstance(recorder, Unwritten) else recorder)
        if isinstance(self.selection, Fixed):  # from the first step on; a resumed run loads its plan over this
            act.apply(self.controller.units, self.controller.plan.mask | self.selection.mask)

    def _control(self, recorder: Recorder | None) -> Controller:
        return Controller(
            self.net,
            self.config.build_policy(),
            mode=self.config.mode,
            total_steps=self.config.steps,
            recorder=recorder if recorder is None or not self._sinks else Tee(recorder, self._sinks),
            on_event=self.watcher.happened,
            units=None if self.report is not None else self.config.unit,
            selection=self.selection,
            detector={**self.config.detector_options, "name": self.config.detector},
        )

    def _norms(self) -> NDArray[np.float32]:
        """The norms that the controller is judging."""
        assert self.controller.reading is not None
        return self.controller.reading.norm

    def train_step(self) -> StepInfo:
        """One optimizer step, run again once where the controller asks for it."""
        started, config = time.perf_counter(), self.config
        self.step += 1
        share = schedule(self.step, config)
        while True:
            if self.faults is not None:
                self.faults.at(self.step)
            if isinstance(self.selection, Oracle):
                act.apply(self.controller.units, self.selection.choose(self.model, self._batches()))
            with running(self.model, config.path):
                loss = self._backward()
            plan = self.controller.step()
            if not plan.rerun:
                break
        told = {} if self.guard is None else self.guard.step_(loss)
        if config.clip is not None and not plan.nonfinite:
            self._clip(config.clip)
        self.update.step(share)
        self.update.zero_grad()
        speed = self.tokens_per_step / max(time.perf_counter() - started, 1e-9)
        cost = round(1000 * self.controller.seconds, 4)
        told |= {"tokens_per_s": round(speed, 1), "controller_ms": cost}
        self.recorder.log(self.step, loss=loss, lr=config.lr * share, **told)
        return StepInfo(self.step, loss, config.lr * share, speed, plan)

    def _clip(self, max_norm: float) -> None:
        if self.controller.mode == "off" and self.world.size > 1:  # it knows nothing of the others then
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), max_norm)
        else:
            self.controller.clip_grad_norm_(max_norm)

    def _backward(self) -> float:
        """Accumulate the gradient of the mean loss over all micro-batches' targets and the ranks; returns that loss."""
        total = torch.zeros((), device=self.device)
        batches = self._parts()
        self.tokens_per_step = self.world.size * sum(inputs.numel() for inputs, _ in batches)
        counts = [_counted(targets) for _, targets in batches]  # on the host: nothing waits for a GPU
        for number, batch in enumerate(batches):
            inputs, targets = (tensor.to(self.device) for tensor in batch)
            if self.memories is not None:
                self.memories.before(number)
            with parallel.syncing(self.net, last=number == len(batches) - 1):
                loss = self.task.loss(self.net, inputs, targets) / (sum(counts) / counts[number])
                loss.backward()
            if self.memories is not None:
                self.memories.after(number)
            total += loss.detach()
        return self._shared(total)

    def _shared(self, loss: Tensor) -> float:
        """The mean loss of all ranks; where it is not finite, whose it was is said once."""
        losses = self.world.gather(loss.double())
        bad = torch.nonzero(~losses.isfinite()).flatten().tolist()
        if bad and not self._bad_ranks and self.world.leads and self.world.size > 1:
            log.warning("step %d: the loss is not finite on rank %s", self.step, ", ".join(map(str, bad)))
        self._bad_ranks = bad
        return losses.mean().item()

    def _parts(self) -> list[tuple[Tensor, Tensor]]:
        """This rank's rows of the micro-batches of the present step, cut into parts of equal size; on the CPU."""
        whole = (self.task.batch_at(self.step, micro) for micro in range(self.config.accumulate))
        found = (self.world.share(*batch) for batch in whole)
        parts = self.config.split
        return [part for x, y in found for part in zip(x.chunk(parts), y.chunk(parts), strict=True)]

    def _batches(self) -> list[tuple[Tensor, Tensor]]:
        return [(inputs.to(self.device), targets.to(self.device)) for inputs, targets in self._parts()]

    @torch.no_grad()
    def evaluate(self) -> dict[str, float]:
        """Mean loss on the held-out part, on both paths, without faults; changes no state of the run."""
        if self.faults is not None:
            self.faults.disarm()
        self.model.eval()
        losses = {}
        for path in ("high", "low"):
            with running(self.model, path):
                losses[f"eval_loss_{path}"] = self._held_out_loss()
            if self.report is None:
                losses["eval_loss_low"] = losses["eval_loss_high"]
                break
        self.model.train()
        self.recorder.log(self.step, **losses)
        return losses

    def _held_out_loss(self) -> float:
        """Mean over the held-out batches, whole ones in turn by the ranks: each is what one process would make of it.

        Where fewer are left than ranks, the others run the last once more and throw it away: with fsdp2 a forward needs
        all ranks.
        """
        taken = list(self.task.held_out())
        parts: list[list[float]] = []
        for start in range(0, len(taken), self.world.size):
            here = start + self.world.rank
            x, y = taken[min(here, len(taken) - 1)]
            loss = self.task.loss(self.model, x.to(self.device), y.to(self.device)).item()
            counted = _counted(y) if here < len(taken) else 0
            parts += self.world.gather(torch.tensor([loss, counted], dtype=torch.float64)).tolist()
        counts = [(loss, count) for loss, count in parts if count]
        return sum(loss * count for loss, count in counts) / sum(count for _, count in counts)

    def save(self) -> None:
        """Write a checkpoint, unless what would be in it is broken: the last healthy one is then kept."""
        kept = {"weights": self.model.parameters(), "optimizer's moments": self.update.moments()}
        for what, tensors in kept.items():
            if not self.world.all(checkpoint.is_finite(tensors)):
                raise TrimtabError(
                    f"the {what} are not finite at step {self.step}, so no checkpoint is written: "
                    "resume from the last one with a lower lr, or with clip=1"
                )
        state = {
            "step": self.step,
            "steps": self.last_step,
            "config": without_secrets(self.config.to_dict()),  # as in run.json
            **self.task.identity,
            "controller": self.controller.state_dict(),
            "guard": None if self.guard is None else self.guard.state_dict(),
            "paths": path_state(self.model),  # the controller's state has them too, but for mode=off
            "faults": None if self.faults is None else self.faults.state_dict(),
            "rng": torch.get_rng_state(),
            "offsets": self.recorder.offsets(),
        }
        folder = self.recorder.folder / CHECKPOINTS
        if self.config.parallel == "none":
            state |= {"model": self.task.weights(), "optimizer": self.update.state_dict()}
            self.task.saved(self.recorder.folder, last=self.step == self.last_step)  # first: the checkpoint ends a run
            checkpoint.save(folder, self.step, state)
            return
        tensors = {f"model.{name}": value for name, value in self.model.state_dict().items()}
        more, rest = self.update.named_state(self._names())
        tensors |= {f"optimizer.{name}": value for name, value in more.items()}
        checkpoint.save_together(folder, self.step, tensors, state | {"optimizer": rest}, self.world)

    def _names(self) -> dict[int, str]:
        return {id(p): name for name, p in self.model.named_parameters()}

    def check(self, path: Path, state: Mapping[str, Any]) -> None:
        """Refuse a checkpoint of other text, another model or other settings, before anything is changed."""
        for key, value in self.task.identity.items():
            if state.get(key) != value:
                what, remedy = OTHER[key]
                raise TrimtabError(
                    f"{path} was trained on {what} (sha256 {str(state.get(key))[:12]}, now {value[:12]}): {remedy}"
                )
        checkpoint.check_model(self.task.weights(), state["model"], path)
        if not path.is_dir() and self.world.size > 1 and self.config.parallel == "fsdp2":
            raise TrimtabError(
                f"fsdp2 reads a checkpoint folder that can be cut, got {path} of a run with parallel=none: continue it "
                "with parallel=ddp, whose checkpoints are folders"
            )
        ours, theirs = comparable(self.config), comparable(self.config.from_dict(state["config"]))
        for key, value in theirs.items():
            if value != ours.get(key):
                raise TrimtabError(
                    f"{path} is of another run: {key} was {value!r} there and is {ours.get(key)!r} here; "
                    "move it away, or start a new folder"
                )

    def check_faults(self, windows: Windows) -> None:
        """Refuse other faults than the run has; globs are compared by what they name in this model."""
        ours, theirs = ([] if f is None else [str(w) for w in f.windows] for f in (self.faults, self._bind(windows)))
        if ours != theirs:
            raise changed("faults", ours, theirs)

    def load(self, path: Path, state: Mapping[str, Any]) -> None:
        """Continue from a checkpoint; of one that is damaged whatever its parts raise becomes one line."""
        try:
            self._load(path, state)
        except (TrimtabError, OSError):
            raise
        except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RuntimeError) as error:
            said = one_line(error)
            raise TrimtabError(
                f"{path} cannot be continued ({said}): move it away to go on from the one before"
            ) from error

    def _load(self, path: Path, state: Mapping[str, Any]) -> None:
        if path.is_dir():
            self._load_tensors(path, state)
        else:
            self.task.load_weights(state["model"])
            self.update.load_state_dict(state["optimizer"])
        self.controller.load_state_dict(state["controller"])
        if self.guard is not None:
            self.guard.load_state_dict(state["guard"])
        load_path_state(self.model, state["paths"])
        if self.faults is not None:
            self.faults.load_state_dict(state["faults"])
        torch.set_rng_state(state["rng"])
        self.step = int(state["step"])

    @torch.no_grad()
    def _load_tensors(self, path: Path, state: Mapping[str, Any]) -> None:
        """Read weights and moments from a checkpoint folder, each rank what it holds of them."""
        from trimtab.lab import dcp

        parameters = dict(self.model.named_parameters())
        moments = {
            name: dcp.like(parameters[name.rpartition(".")[0]], size, dtype)
            for name, (size, dtype) in dcp.sizes(state, "optimizer").items()
        }
        tensors = {f"model.{name}": value for name, value in self.model.state_dict().items()}
        dcp.fill(path, state, tensors | {f"optimizer.{name}": value for name, value in moments.items()})
        self.update.load_named_state(moments, state["optimizer"])


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise TrimtabError(f"device must be one that torch can use here, got {name!r}: {reason}") from None
    return device


def _counted(targets: Tensor) -> int:
    """How many targets have a loss."""
    return int((targets != IGNORED).sum())


def _convert(model: nn.Module, config: Settings) -> ConvertReport:
    recipe = Recipe.named(config.recipe, **config.recipe_options)
    if config.roles is not None:
        recipe = recipe.only(*(role.strip() for role in config.roles.split(",")))
    with warnings.catch_warnings():
        warnings.simplefilter("error", NoEffectWarning)
        try:
            return convert_(model, recipe, unit=config.unit, backend=config.backend)
        except NoEffectWarning:
            raise TrimtabError(
                f"a unit pattern must match a linear such as blocks.0.attn.q, got unit={config.unit!r}, which matches "
                "none: there is nothing to convert"
            ) from None
