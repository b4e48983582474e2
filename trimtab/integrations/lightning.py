# SPDX-License-Identifier: Apache-2.0
"""Lightning: a callback.

    trimtab.convert_(module, "fp8")
    trainer = L.Trainer(callbacks=[TrimtabCallback(policy)], gradient_clip_val=1.0, accumulate_grad_batches=4)
    trainer.fit(module, loader)                       # or fit(..., ckpt_path="last")

`on_before_optimizer_step` fires once per optimizer step, after un-scaling and before clipping: norms are read there.
The controller's state is in Lightning's own checkpoints, under the callback's name.

What it can switch: whatever the module's units can. Refused: manual optimization and several optimizers (who clips, and
where a step ends, is then the module's own affair), DeepSpeed's strategy, and `replay_step`.
"""

import math
from typing import Any

from torch.optim import Optimizer

from trimtab.control.controller import Controller
from trimtab.control.policy import Policy
from trimtab.errors import TrimtabError, missing_extra
from trimtab.integrations.loops import refuse_reruns

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
except ImportError as error:
    raise missing_extra("lightning", "lightning", "trimtab.integrations.lightning") from error


class TrimtabCallback(Callback):
    """Puts a controller into `fit`; `controller` is the one of the last fit."""

    controller: Controller | None

    def __init__(self, policy: Policy | None = None, **options: Any) -> None:
        """Keep what the controller will be made of.

        Args:
            options: further arguments of `trimtab.Controller`; `total_steps` is the trainer's own unless given.
        """
        refuse_reruns(policy, options.get("mode", "act"), "Lightning's trainer")
        self.controller, self._policy, self._options = None, policy, options
        self._saved: dict[str, Any] | None = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Make the controller, of the module as it trains, and continue where a checkpoint was."""
        _check(trainer, pl_module)
        steps = trainer.estimated_stepping_batches
        known: dict[str, Any] = {"total_steps": int(steps) if math.isfinite(steps) else None}
        options = known | self._options
        if options.get("wait", "step") != "step":
            options["optimizer"] = trainer.optimizers
        model = pl_module if trainer.strategy.model is None else trainer.strategy.model
        self.controller = Controller(model, self._policy, **options)
        if self._saved is not None:
            self.controller.load_state_dict(self._saved)
            self._saved = None
        elif trainer.ckpt_path is not None:
            self.controller.load_state_dict(None)  # warns

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        """Read the norms, before clipping, and choose who runs high next."""
        assert self.controller is not None
        self.controller.step()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Take the sensors off the model."""
        if stage == "fit" and self.controller is not None:
            self.controller.detach()

    def state_dict(self) -> dict[str, Any]:
        """What Lightning puts into its checkpoint."""
        return (self._saved or {}) if self.controller is None else self.controller.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep a state until the training starts: Lightning restores callbacks before there is a controller."""
        self._saved = dict(state_dict) or None


def _check(trainer: Trainer, module: LightningModule) -> None:
    what = f"{len(trainer.optimizers)} optimizers" if module.automatic_optimization else "manual optimization"
    if what != "1 optimizers":
        raise TrimtabError(
            f"a step must be one optimizer's and Lightning's own, got {what}: call trimtab.Controller(...).step() in "
            "training_step, before you clip"
        )
    if "DeepSpeed" in type(trainer.strategy).__name__:
        raise TrimtabError(
            "norms are read from gradients, got DeepSpeed's strategy, which keeps them to itself: use its own loop, "
            "with trimtab.integrations.deepspeed, or train with DDP or FSDP2"
        )
