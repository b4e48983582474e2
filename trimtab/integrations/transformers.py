# SPDX-License-Identifier: Apache-2.0
"""Hugging Face `Trainer` and what is built on it (TRL's trainers): a callback.

    trimtab.convert_(model, "fp8")
    trainer = Trainer(model=model, args=args, train_dataset=data)
    trainer.add_callback(TrimtabCallback(trainer, policy))
    trainer.train()                                   # or train(resume_from_checkpoint=True)

It asks for the trainer because a callback alone learns of the gradients too late: `on_pre_optimizer_step` fires after
clipping. The norms are read where the trainer's accelerator clips, or asks for the norm without clipping
(`accelerate.BeforeClipping`); one reading per optimizer step, however many micro-batches it has. A trainer that
overrides `training_step` or `compute_loss` changes nothing of that.

A checkpoint folder gets `trimtab.pt`, which `torch.load(..., weights_only=True)` takes; `resume_from_checkpoint`
restores it, and a folder without it is met with a warning. On several ranks the first one's state is kept.

What it can switch: whatever the model's units can. Refused: DeepSpeed, and `replay_step`, because a trainer cannot run
a batch again.
"""

import functools
import os
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn

from trimtab.control.controller import Controller
from trimtab.control.policy import Policy
from trimtab.errors import TrimtabError, missing_extra, one_line

try:
    from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
    from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, get_last_checkpoint
except ImportError as error:
    raise missing_extra("transformers", "hf", "trimtab.integrations.transformers") from error

from trimtab.integrations.accelerate import AcceleratedOptimizer, BeforeClipping, refuse_own_steps
from trimtab.integrations.loops import refuse_reruns

STATE = "trimtab.pt"


class TrimtabCallback(TrainerCallback):
    """Puts a controller into a trainer's loop; `controller` is the one of the last `train()`."""

    controller: Controller | None

    def __init__(self, trainer: Trainer, policy: Policy | None = None, **options: Any) -> None:
        """Bind to a trainer; `trainer.add_callback` must follow.

        Args:
            options: further arguments of `trimtab.Controller`; `total_steps` is the trainer's own.
        """
        if not isinstance(trainer, Trainer):
            raise TrimtabError(
                f"the callback must know its trainer, got {type(trainer).__name__}: make the trainer first, then "
                "trainer.add_callback(TrimtabCallback(trainer, policy))"
            )
        refuse_reruns(policy, options.get("mode", "act"), "a Trainer")
        self.controller, self._trainer, self._policy, self._options = None, trainer, policy, options
        self._resumed: str | None = None
        self._seam: BeforeClipping | None = None
        trainer.train = self._wrapped(trainer.train)  # the only one who is told where a run resumes from

    def _wrapped(self, train: Any) -> Any:
        @functools.wraps(train)
        def wrapper(resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
            if self not in self._trainer.callback_handler.callbacks:
                raise TrimtabError(
                    "a callback must be given to its trainer, got one that was not: trainer.add_callback(callback)"
                )
            self._resumed = None if isinstance(resume_from_checkpoint, bool) else resume_from_checkpoint
            if resume_from_checkpoint is True:
                self._resumed = get_last_checkpoint(str(self._trainer.args.output_dir))
            try:
                return train(resume_from_checkpoint, *args, **kwargs)
            finally:
                self._close()

        return wrapper

    def _close(self) -> None:
        if self._seam is not None:
            self._seam.close()
            self._seam = None
        if self.controller is not None:
            self.controller.detach()

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Make the controller, of the model as it trains, and continue where a checkpoint was."""
        trainer = self._trainer
        self._close()
        refuse_own_steps(trainer.accelerator)
        model, optimizer = trainer.model_wrapped, trainer.optimizer
        assert isinstance(model, nn.Module)
        assert isinstance(optimizer, AcceleratedOptimizer)
        options: dict[str, Any] = {**self._options, "total_steps": state.max_steps}
        if options.get("wait", "step") != "step":
            options["optimizer"] = optimizer.optimizer
        self.controller = Controller(model, self._policy, **options)
        if self._resumed is not None:
            self._restore(Path(self._resumed) / STATE)
        self._seam = BeforeClipping(trainer.accelerator, optimizer, self.controller)

    def _restore(self, file: Path) -> None:
        """Take over the state in a checkpoint folder; whatever a damaged one raises becomes one line."""
        assert self.controller is not None
        try:
            self.controller.load_state_dict(torch.load(file, weights_only=True) if file.exists() else None)
        except TrimtabError:
            raise
        except Exception as error:  # a torn zip, a foreign file, other values in it: many kinds
            raise TrimtabError(
                f"{file} cannot be read ({one_line(error, 120)}): resume from another checkpoint, or remove the file "
                "to begin anew"
            ) from error

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Put the controller's state into the checkpoint that the trainer has just written."""
        if self.controller is None or not args.should_save:
            return
        runs = Path(self._trainer._get_output_dir(getattr(self._trainer, "_trial", None)))
        folder = runs / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"
        if not folder.is_dir():
            warnings.warn(f"no checkpoint folder {folder}: the controller's state was not saved", stacklevel=2)
            return
        part = folder / f"{STATE}.part"
        torch.save(self.controller.state_dict(), part)
        os.replace(part, folder / STATE)
