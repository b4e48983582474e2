# SPDX-License-Identifier: Apache-2.0
"""torchtitan 0.2: a model converter, named in the TOML; no line of Python changes; 0.3 has neither.

    [job]
    custom_config_module = "trimtab.integrations.torchtitan"       # adds the section [trimtab]
    [experimental]
    custom_import = "trimtab.integrations.torchtitan"              # registers the converter
    [model]
    converters = ["trimtab"]
    [trimtab]
    recipe = "fp8"
    max_high = 4

`convert` makes the linears switchable before torchtitan compiles and shards them; the controller is made in the first
step, of the model as it then is. A converter is told of a step after the update, and torchtitan always clips: so norms
are read in `torchtitan.distributed.utils.clip_grad_norm_`, which is wrapped in this process, and the hook after the
update checks that they were.

What it can switch: every covered linear, under FSDP2, tensor parallelism and compile as trimtab's own linears can.
`mode = "observe"` converts nothing, and works beside any converter of torchtitan's. Refused: pipeline parallelism (the
stages are made after the conversion, as copies), the optimizer in backward, and `replay_step`. A converter has no state
in torchtitan's checkpoints: after a resume the history starts afresh, and a warning says so.
"""

import functools
import logging
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trimtab.control.controller import Controller
from trimtab.control.policy import Policy
from trimtab.control.record import Recorder
from trimtab.errors import TrimtabError, missing_extra
from trimtab.integrations.loops import refuse_reruns, true_total
from trimtab.linear.convert import convert_

try:
    from torchtitan.config import JobConfig as TitanConfig
    from torchtitan.distributed import ParallelDims
    from torchtitan.distributed import utils as dist_utils
    from torchtitan.protocols.model_converter import register_model_converter
except ImportError as error:
    raise missing_extra("torchtitan 0.2", "torchtitan", "trimtab.integrations.torchtitan") from error

log = logging.getLogger(__name__)


@dataclass
class Trimtab:
    """The section [trimtab] of a job's TOML."""

    recipe: str = "fp8"
    """What low and high are."""
    unit: str = "linear"
    """What switches together: linear, block or expert."""
    mode: str = "act"
    """act, observe (nothing is converted, no bit changes) or off."""
    preset: str = ""
    """A policy by name; empty: the default one."""
    max_high: float | None = None
    """The budget: a number of units, or below 1 a fraction of them."""
    run_folder: str = ""
    """Where to record norms and decisions for `trimtab report`; empty: nowhere."""


@dataclass
class JobConfig:
    """What torchtitan merges into its own configuration."""

    trimtab: Trimtab = field(default_factory=Trimtab)


class TrimtabConverter:
    """A model converter of torchtitan's protocol."""

    controller: Controller | None = None

    def __init__(self, job_config: TitanConfig, parallel_dims: ParallelDims) -> None:
        self._job, self._settings = job_config, getattr(job_config, "trimtab", Trimtab())
        if parallel_dims.pp_enabled or job_config.optimizer.early_step_in_backward:
            what = "pipeline parallelism" if parallel_dims.pp_enabled else "early_step_in_backward"
            raise TrimtabError(
                f"norms are read from one whole model between backward and update, got {what}: turn it off, or leave "
                '"trimtab" out of model.converters'
            )
        self._policy = Policy.preset(self._settings.preset) if self._settings.preset else Policy()
        if (budget := self._settings.max_high) is not None:
            self._policy = self._policy.replace(max_high=budget if 0 < budget < 1 else int(budget))
        refuse_reruns(self._policy, self._settings.mode, "torchtitan")
        self._has_read = False

    def convert(self, model: nn.Module) -> None:
        """Make the linears switchable, and be there when gradients are clipped."""
        if self._settings.mode == "act":
            backend = "real" if torch.cuda.is_available() else "emulated"  # the model is on no device yet
            log.info("%s", convert_(model, self._settings.recipe, unit=self._settings.unit, backend=backend))
        self._model = model
        clip = getattr(dist_utils.clip_grad_norm_, "__wrapped__", dist_utils.clip_grad_norm_)
        dist_utils.clip_grad_norm_ = functools.wraps(clip)(functools.partial(self._clip, clip))

    def post_optimizer_hook(self, model: nn.Module | list[nn.Module]) -> None:
        """Check that this step was read."""
        if not self._has_read:
            raise TrimtabError(
                "norms are read in torchtitan.distributed.utils.clip_grad_norm_, and this step did not call it: a "
                "trainer with clipping of its own needs trimtab.Controller(...).step() before it"
            )
        self._has_read = False

    def _clip(self, clip: Any, *args: Any, **kwargs: Any) -> Tensor:
        if self.controller is None:
            self.controller = self._made()
        self.controller.step()
        self._has_read = True
        return true_total(self.controller, clip(*args, **kwargs))

    def _made(self) -> Controller:
        job, settings = self._job, self._settings
        if job.checkpoint.enable and any(Path(job.job.dump_folder, job.checkpoint.folder).glob("step-*")):
            log.warning("torchtitan's checkpoints hold no state of a converter: a resumed run starts a fresh history")
        recorder = None
        if settings.run_folder and not (dist.is_initialized() and dist.get_rank()):
            recorder = Recorder(settings.run_folder)
        steps = job.training.steps
        return Controller(self._model, self._policy, mode=settings.mode, total_steps=steps, recorder=recorder)


register_model_converter(TrimtabConverter, "trimtab")
