# SPDX-License-Identifier: Apache-2.0
"""The reference trainer: a plain loop, with everything a run needs around it.

    faults.at(step)                      the windows of this step, if any
    for each micro-batch: loss.backward()
    plan = controller.step()             norms, decision, switch; a bad step's gradients are gone
    (plan.rerun: the same batch again)
    controller.clip_grad_norm_(clip)     the same norms
    optimizer.step()

The run folder is written as it goes (docs/runs.md). Batch, learning rate and faults are pure functions of the
step, so a resumed run repeats the uninterrupted one bit for bit on the same machine. `Run` holds the pieces;
`train` drives them from start to end. The learning rate follows the length the run was started with: a run
continued past it goes on at the final rate.
"""

import json
import math
import platform
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch

from trimtab.control.act import running
from trimtab.control.controller import Controller
from trimtab.control.record import CHECKPOINTS, RUN, Recorder
from trimtab.control.selections import Selection
from trimtab.control.values import Event, Plan
from trimtab.errors import NoEffectWarning, TrimtabError
from trimtab.lab import checkpoint
from trimtab.lab.config import Config
from trimtab.lab.data import Corpus, Sampler, eval_batches, load_corpus
from trimtab.lab.faults import Faults, Windows, parse_faults
from trimtab.lab.model import Decoder, ModelConfig
from trimtab.linear.account import describe_saved
from trimtab.linear.convert import ConvertReport, convert_
from trimtab.linear.linear import load_path_state, path_state
from trimtab.linear.paths import Recipe

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": lambda params, config: torch.optim.AdamW(params, lr=config.lr, weight_decay=config.weight_decay),
    "sgd": lambda params, config: torch.optim.SGD(params, lr=config.lr, weight_decay=config.weight_decay, momentum=0.9),
}


DERIVED = ("corpus", "hardware", "saved")
"""What run.json keeps beside the settings; they follow from them."""


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


@dataclass(frozen=True)
class Result:
    """How a run ended."""

    folder: Path
    steps: int
    loss: float
    """Mean training loss of the last 20 steps that this process ran; NaN if it ran none."""
    eval_loss_high: float
    eval_loss_low: float
    summary: dict[str, float]
    num_high: list[int] = field(repr=False)
    """Units that ran high in each step that this process ran."""
    finished_before: bool = False
    """The run had been finished already; nothing was done."""


def learning_rate(step: int, config: Config) -> float:
    """Linear warm-up over the first tenth of the steps, cosine to a tenth of the peak, then constant."""
    warmup = max(1, round(0.1 * config.steps))
    if step <= warmup:
        return config.lr * step / warmup
    progress = min(1.0, (step - warmup) / max(1, config.steps - warmup))
    return config.lr * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * progress)))


class Run:
    """The pieces of one run, built from its settings; deterministic by its seed.

    Building one writes nothing. `record` gives it a run folder and its controller; then it can step.
    """

    recorder: Recorder

    def __init__(self, config: Config, watcher: Watcher, selection: Selection | None = None) -> None:
        self.config, self.watcher, self.selection = config, watcher, selection
        self.corpus = load_corpus(config.data, tokenizer=config.tokenizer)
        self.device = _device(config.device)
        if config.threads or config.model == "micro":
            torch.set_num_threads(config.threads or 1)
        torch.manual_seed(config.seed)
        self.model = _build_model(config, self.corpus).to(self.device)
        self.report = None if config.recipe == "none" else _convert(self.model, config)
        self.seq = self.model.config.max_seq
        self.sampler = Sampler(self.corpus.train, batch=config.batch, seq=self.seq, seed=config.seed)
        eval_batches(self.corpus.held_out, batch=config.batch, seq=self.seq)  # too short a text is refused here
        if config.optimizer not in OPTIMIZERS:
            raise TrimtabError(f"optimizer must be one of {', '.join(OPTIMIZERS)}, got {config.optimizer!r}")
        self.optimizer = OPTIMIZERS[config.optimizer](self.model.parameters(), config)
        self.faults = self._bind(config.faults)
        self.step, self.last_step = 0, config.steps
        self.tokens_per_step = config.batch * config.accumulate * self.seq
        self.controller = self._control(None)  # refuses what it cannot control before a folder is touched

    def _bind(self, windows: Windows) -> Faults | None:
        return Faults(self.model, windows) if parse_faults(windows) else None

    def describe(self) -> dict[str, Any]:
        """What run.json keeps: the settings, each fault window written out, and what identifies the text."""
        windows = () if self.faults is None else self.faults.windows
        corpus = {name: getattr(self.corpus, name) for name in ("name", "sha256", "num_bytes", "vocab_size")}
        described = self.config.to_dict() | {"faults": [w.to_dict() for w in windows], "corpus": corpus}
        name = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else platform.machine()
        described["hardware"] = {"device": str(self.device), "name": name, "threads": torch.get_num_threads()}
        if self.report is not None:
            batch = self.sampler.batch_at(0)[0].to(self.device)
            described["saved"] = describe_saved(self.model, lambda: self.model(batch))
        return described

    def record(self, recorder: Recorder) -> None:
        """Take a run folder, and start the controller."""
        self.recorder = recorder
        self.controller = self._control(recorder)

    def _control(self, recorder: Recorder | None) -> Controller:
        return Controller(
            self.model,
            self.config.build_policy(),
            mode=self.config.mode,
            total_steps=self.config.steps,
            recorder=recorder,
            on_event=self.watcher.happened,
            units=None if self.report is not None else self.config.unit,
            selection=self.selection,
        )

    def train_step(self) -> StepInfo:
        """One optimizer step, run again once where the controller asks for it."""
        started, config = time.perf_counter(), self.config
        self.step += 1
        rate = learning_rate(self.step, config)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        while True:
            if self.faults is not None:
                self.faults.at(self.step)
            with running(self.model, config.path):
                loss = self._backward()
            plan = self.controller.step()
            if not plan.rerun:
                break
        if config.clip is not None and not plan.nonfinite:
            self.controller.clip_grad_norm_(config.clip)
        self.optimizer.step()
        self.optimizer.zero_grad()
        speed = self.tokens_per_step / max(time.perf_counter() - started, 1e-9)
        cost = round(1000 * self.controller.seconds, 4)
        self.recorder.log(self.step, loss=loss, lr=rate, tokens_per_s=round(speed, 1), controller_ms=cost)
        return StepInfo(self.step, loss, rate, speed, plan)

    def _backward(self) -> float:
        """Accumulate the gradient of the mean loss over the micro-batches; returns that loss."""
        total = torch.zeros((), device=self.device)
        for micro in range(self.config.accumulate):
            inputs, targets = self.sampler.batch_at(self.step, micro)
            loss = self.model(inputs.to(self.device), targets.to(self.device)).loss / self.config.accumulate
            loss.backward()
            total += loss.detach()
        return total.item()

    @torch.no_grad()
    def evaluate(self) -> dict[str, float]:
        """Mean loss on the held-out part, on both paths, without faults; changes no state of the run."""
        if self.faults is not None:
            self.faults.disarm()
        self.model.eval()
        losses = {}
        for path in ("high", "low"):
            with running(self.model, path):
                parts = [
                    (self.model(x.to(self.device), y.to(self.device)).loss.item(), y.numel())
                    for x, y in eval_batches(
                        self.corpus.held_out, batch=self.config.batch, seq=self.seq, limit=self.config.eval_batches
                    )
                ]
            losses[f"eval_loss_{path}"] = sum(a * n for a, n in parts) / sum(n for _, n in parts)
            if self.report is None:
                losses["eval_loss_low"] = losses["eval_loss_high"]
                break
        self.model.train()
        self.recorder.log(self.step, **losses)
        return losses

    def save(self) -> None:
        """Write a checkpoint, unless the weights are broken: the last healthy one is then kept."""
        if not checkpoint.is_finite(self.model):
            raise TrimtabError(
                f"the weights are not finite at step {self.step}, so no checkpoint is written: "
                "resume from the last one with a lower lr, or with clip=1"
            )
        state = {
            "step": self.step,
            "steps": self.last_step,
            "config": self.config.to_dict(),
            "data": self.corpus.sha256,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "controller": self.controller.state_dict(),
            "paths": path_state(self.model),  # the controller's state has them too, but for mode=off
            "faults": None if self.faults is None else self.faults.state_dict(),
            "rng": torch.get_rng_state(),
            "offsets": self.recorder.offsets(),
        }
        checkpoint.save(self.recorder.folder / CHECKPOINTS, self.step, state)

    def check(self, path: Path, state: Mapping[str, Any]) -> None:
        """Refuse a checkpoint of other text, another model or other settings, before anything is changed."""
        if state["data"] != self.corpus.sha256:
            raise TrimtabError(
                f"{path} was trained on other text (sha256 {state['data'][:12]}, now {self.corpus.sha256[:12]}): "
                "give the same data; the standard library's text differs between Python versions"
            )
        checkpoint.check_model(self.model, state["model"], path)
        ours, theirs = _comparable(self.config), _comparable(Config.from_dict(state["config"]))
        for key, value in theirs.items():
            if value != ours[key]:
                raise TrimtabError(
                    f"{path} is of another run: {key} was {value!r} there and is {ours[key]!r} here; "
                    "move it away, or start a new folder"
                )

    def check_faults(self, windows: Windows) -> None:
        """Refuse other faults than the run has; globs are compared by what they name in this model."""
        ours, theirs = ([] if f is None else [str(w) for w in f.windows] for f in (self.faults, self._bind(windows)))
        if ours != theirs:
            raise _changed("faults", ours, theirs)

    def load(self, state: Mapping[str, Any]) -> None:
        """Continue from a checkpoint."""
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.controller.load_state_dict(state["controller"])
        load_path_state(self.model, state["paths"])
        if self.faults is not None:
            self.faults.load_state_dict(state["faults"])
        torch.set_rng_state(state["rng"])
        self.step = int(state["step"])


def train(
    settings: Mapping[str, Any],
    out: str | Path,
    *,
    resume: bool = False,
    force: bool = False,
    watcher: Watcher | None = None,
    selection: Selection | None = None,
) -> Result:
    """Train from settings (those of `Config`; missing ones have defaults) into a run folder.

    Args:
        resume: continue the run in `out` from its last checkpoint, or start it if there is none. Settings may be
            repeated; a different one is refused by name, except a larger `steps`.
        force: replace the run that is in `out`.
    """
    out, watcher = Path(out), Silent() if watcher is None else watcher
    stored = stored_settings(out) if resume else None
    found = checkpoint.latest(out / CHECKPOINTS) if stored is not None else None
    path, state = found if found is not None else (None, None)
    config, steps = merge_settings(stored, settings, None if state is None else int(state["steps"]))
    if state is not None and int(state["step"]) >= steps:
        return _finished(out, state)
    run = Run(config, watcher, selection)
    run.check_faults(settings.get("faults", config.faults))
    if path is None or state is None:
        run.record(Recorder(out, run=run.describe(), force=force or stored is not None))
    else:
        run.check(path, state)
        run.record(Recorder.resume(out, state["offsets"]))
        run.load(state)
    run.last_step = steps
    return _drive(run)


def _drive(run: Run) -> Result:
    """From the run's step to the last, with evaluations and checkpoints on the way."""
    config, recent, num_high = run.config, [], []
    losses = {"eval_loss_high": math.nan, "eval_loss_low": math.nan}
    run.watcher.started(run)
    with run.recorder:
        while run.step < run.last_step:
            num_high.append(run.controller.plan.num_high)
            info = run.train_step()
            recent = [*recent[-19:], info.loss]
            run.watcher.stepped(info)
            last = run.step == run.last_step
            if last or (config.eval_every and run.step % config.eval_every == 0):
                losses = run.evaluate()
                run.watcher.evaluated(run.step, losses)
            if last or (config.checkpoint_every and run.step % config.checkpoint_every == 0):
                run.save()
    return Result(
        folder=run.recorder.folder,
        steps=run.step,
        loss=sum(recent) / len(recent),
        eval_loss_high=losses["eval_loss_high"],
        eval_loss_low=losses["eval_loss_low"],
        summary=run.controller.summary() if config.mode != "off" else {},
        num_high=num_high,
    )


def stored_settings(folder: Path) -> dict[str, Any] | None:
    """The settings in a folder's run.json; None if there is no run."""
    path = folder / RUN
    if not path.is_file():
        return None
    try:
        config = json.loads(path.read_text(encoding="utf-8"))["config"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise TrimtabError(f"{path} is not the run.json of a trimtab run ({error!r}): choose another folder") from None
    return {key: value for key, value in config.items() if key not in DERIVED}


def merge_settings(stored: Mapping[str, Any] | None, given: Mapping[str, Any], steps: int | None) -> tuple[Config, int]:
    """The settings to run with, and the step to run to.

    A resumed run keeps its stored settings, its `steps` included, which fix the learning rate and the warm-up; a
    larger `steps` only moves the end.
    """
    if stored is None:
        wanted = Config.from_dict(given)
        return wanted, wanted.steps
    config = Config.from_dict(stored)
    policy = given.get("policy", {})
    policy = {**config.policy, **policy} if isinstance(policy, Mapping) else policy
    wanted = config.replace(**{**given, "policy": policy})
    steps = max(config.steps, steps or 0)
    ours, theirs = _comparable(config), _comparable(wanted)
    for key, value in theirs.items():
        if value != ours[key]:
            raise _changed(key, ours[key], value)
    if "steps" in given and wanted.steps < steps:
        raise TrimtabError(f"a resumed run may only get longer: steps was {steps} and is now {wanted.steps}")
    return config, max(steps, wanted.steps)


def _comparable(config: Config) -> dict[str, Any]:
    """Settings that a resumed run must share, the policy written out; faults need the model (`Run.check_faults`)."""
    settings = {key: value for key, value in config.to_dict().items() if key not in ("steps", "faults", "policy")}
    settings |= {f"policy.{key}": value for key, value in config.build_policy().to_dict().items()}
    return {key: list(value) if isinstance(value, tuple) else value for key, value in settings.items()}


def _changed(key: str, before: object, now: object) -> TrimtabError:
    return TrimtabError(
        f"a resumed run keeps its settings: {key} was {before!r} and is now {now!r}; "
        "leave it out, or start a new folder"
    )


def _finished(folder: Path, state: Mapping[str, Any]) -> Result:
    nan = math.nan
    return Result(folder, int(state["step"]), nan, nan, nan, {}, [], finished_before=True)


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


def _build_model(config: Config, corpus: Corpus) -> Decoder:
    shape: dict[str, Any] = {"vocab_size": corpus.vocab_size, "kv_heads": config.kv_heads}
    if config.num_experts:
        shape |= {"num_experts": config.num_experts, "top_k": config.top_k}
    if config.seq is not None:
        shape["max_seq"] = config.seq
    model = Decoder(ModelConfig.size(config.model, **shape), seed=config.seed, checkpointing=config.checkpointing)
    return model.to(torch.bfloat16 if config.dtype == "bf16" else torch.float32)


def _convert(model: Decoder, config: Config) -> ConvertReport:
    recipe = Recipe.named(config.recipe)
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
