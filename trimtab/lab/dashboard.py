# SPDX-License-Identifier: Apache-2.0
"""Dashboard: a run of the lab shown where people look anyway, and told to who is not looking.

    trimtab train --log tensorboard --log wandb --alert https://hooks.example/x

`--log` names a sink (`control/sinks.py`): the controller's few values go there, and the run's own beside them, every
ten steps. `--alert` names somebody to tell (`control/alerts.py`): an address, `wandb`, or a program. Neither is a
setting: a run is the same run whoever looks on, and an address with a key in it never enters the run folder.

    train/loss, train/lr, train/tokens_per_s    of the step
    eval/loss_high, eval/loss_low               at each evaluation
"""

import shlex
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from trimtab.control.alerts import Alerts, Target, command, wandb_alert, webhook
from trimtab.control.sinks import Sink, Sinks, TensorBoard, Trackio, WandB
from trimtab.control.values import Event
from trimtab.errors import TrimtabError
from trimtab.lab.run import Run, StepInfo, Watcher

PROJECT = "trimtab"
EVERY = 10
KINDS = ("tensorboard", "wandb", "trackio")


class Dashboard:
    """A watcher that hands everything on to another, writes to sinks and alerts."""

    def __init__(self, watcher: Watcher, sinks: Sinks, alerts: Alerts | None = None) -> None:
        self._watcher, self.sinks, self._alerts = watcher, sinks, alerts

    def started(self, run: Run) -> None:
        """Hand it on."""
        self._watcher.started(run)

    def stepped(self, info: StepInfo) -> None:
        """Write how a step went, now and then."""
        self._watcher.stepped(info)
        if info.step % EVERY == 0:
            told = {"train/loss": info.loss, "train/lr": info.lr, "train/tokens_per_s": info.tokens_per_s}
            self.sinks.write(info.step, told)

    def evaluated(self, step: int, losses: Mapping[str, float]) -> None:
        """Write the held-out losses."""
        self._watcher.evaluated(step, losses)
        self.sinks.write(step, {name.replace("eval_", "eval/", 1): loss for name, loss in losses.items()})

    def happened(self, event: Event) -> None:
        """Tell whoever wants to be told."""
        self._watcher.happened(event)
        if self._alerts is not None:
            self._alerts(event)

    def close(self) -> None:
        """Write and send what is left."""
        self.sinks.close()
        if self._alerts is not None:
            self._alerts.flush()


def dashboard(watcher: Watcher, logs: Sequence[str], alerts: Sequence[str], out: Path) -> Dashboard:
    """Build what the command line asks for."""
    targets = [_target(name) for name in alerts]  # refused before a sink has opened anything
    for kind in logs:
        if kind not in KINDS:
            raise TrimtabError(f"--log must be one of {', '.join(KINDS)}, got {kind!r}")
    sinks = Sinks(_sink(kind, out) for kind in dict.fromkeys(logs))
    return Dashboard(watcher, sinks, Alerts(*targets, run=out.name) if targets else None)


def _sink(kind: str, out: Path) -> Sink:
    if kind == "tensorboard":
        return TensorBoard(out / "tensorboard")
    return (WandB if kind == "wandb" else Trackio)(project=PROJECT, name=out.name)


def _target(name: str) -> Target:
    if "://" in name:
        return webhook(name)
    if name == "wandb":
        return wandb_alert()
    program = (shlex.split(name) or [""])[0]
    if program and shutil.which(program) is None:
        raise TrimtabError(f"--alert must be an http(s) address, wandb or a program that is here, got {program!r}")
    return command(name)
