# SPDX-License-Identifier: Apache-2.0
"""Accelerate: the controller steps by itself, inside the calls that a loop makes anyway.

    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    controller = control(accelerator, model, policy, total_steps=1000)
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(**batch).loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)      # norms are read here, before clipping
            optimizer.step()                                              # or here, where nothing clips
            optimizer.zero_grad()

An `Accelerator` un-scales the gradients (FP16) once per optimizer step, just before it clips. That is the place: a few
methods of this accelerator and its optimizer are wrapped, nothing of the library itself, and `BeforeClipping.close`
takes the wrappers off. Between optimizer steps nothing is read. `save_state` and `load_state` keep the controller.

What it can switch: whatever the model's units can; Accelerate adds nothing. DDP and FSDP2 work as in a plain loop.
"""

import functools
from collections.abc import Callable
from typing import Any

from torch import nn

from trimtab.control.controller import Controller
from trimtab.control.policy import Policy
from trimtab.errors import TrimtabError, missing_extra
from trimtab.integrations.loops import refuse_reruns, true_total

try:
    from accelerate import Accelerator, DistributedType
    from accelerate.optimizer import AcceleratedOptimizer
except ImportError as error:
    raise missing_extra("accelerate", "accelerate", "trimtab.integrations.accelerate") from error

OWN_STEPS = {DistributedType.DEEPSPEED: "DeepSpeed", DistributedType.MEGATRON_LM: "Megatron-LM"}


def control(accelerator: Accelerator, model: nn.Module, policy: Policy | None = None, **options: Any) -> Controller:
    """Make the controller of a prepared model: it steps by itself, and is part of the accelerator's checkpoints.

    Args:
        model: as `accelerator.prepare` returned it, prepared together with its one optimizer.
        options: further arguments of `trimtab.Controller`, `total_steps` and `mode` among them.
    """
    refuse_own_steps(accelerator)
    refuse_reruns(policy, options.get("mode", "act"), "an accelerator's loop")
    optimizer = _optimizer_of(accelerator, model)
    if options.get("wait", "step") != "step":
        options = {"optimizer": optimizer.optimizer} | options
    controller = Controller(model, policy, **options)
    BeforeClipping(accelerator, optimizer, controller)
    accelerator.register_for_checkpointing(controller)
    return controller


class BeforeClipping:
    """Steps a controller once per optimizer step, when gradients are whole and un-scaled and not yet clipped."""

    def __init__(self, accelerator: Accelerator, optimizer: AcceleratedOptimizer, controller: Controller) -> None:
        self._accelerator, self._optimizer, self._controller = accelerator, optimizer, controller
        self._has_read = False
        self._unscaled = accelerator.unscale_gradients
        self._undo = [
            _wrap(accelerator, "backward", self._backward),
            _wrap(accelerator, "unscale_gradients", self._unscale),
            _wrap(accelerator, "clip_grad_norm_", self._clip),
            _wrap(optimizer, "step", self._step),
        ]

    def close(self) -> None:
        """Take the wrappers off again."""
        while self._undo:
            self._undo.pop()()

    def _read(self) -> None:
        if not self._has_read:
            self._unscaled()
            self._controller.step()
            self._has_read = True

    def _backward(self, backward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._has_read = False  # a loop may have skipped the update of what was read
        return backward(*args, **kwargs)

    def _unscale(self, unscale: Callable[..., None], optimizer: Any = None) -> None:
        if self._accelerator.sync_gradients:
            self._read()
        else:
            unscale(optimizer)

    def _clip(self, clip: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not self._accelerator.sync_gradients:
            return clip(*args, **kwargs)
        self._read()
        return true_total(self._controller, clip(*args, **kwargs))

    def _step(self, step: Callable[..., Any], closure: Callable[[], Any] | None = None) -> Any:
        if closure is not None:
            raise TrimtabError(
                "gradients must exist before optimizer.step, got a closure that makes them: call backward"
            )
        if not self._accelerator.sync_gradients:
            return step()
        self._read()
        self._has_read = False
        return step()


def refuse_own_steps(accelerator: Accelerator) -> None:
    """Refuse engines that update the weights inside `accelerator.backward`: there is no moment to read norms."""
    if accelerator.distributed_type in OWN_STEPS:
        engine = OWN_STEPS[accelerator.distributed_type]
        raise TrimtabError(
            f"norms are read between backward and update, got {engine}, which does both in one call: use its own loop, "
            "with trimtab.integrations.deepspeed or .megatron, or train with DDP or FSDP2"
        )


def _optimizer_of(accelerator: Accelerator, model: nn.Module) -> AcceleratedOptimizer:
    """The one optimizer that updates the model's parameters."""
    own = {id(p) for p in model.parameters()}
    found = [
        o for o in accelerator._optimizers if any(id(p) in own for group in o.param_groups for p in group["params"])
    ]
    if len(found) != 1:
        raise TrimtabError(
            f"a step must be one optimizer's, got {len(found)} prepared optimizers with parameters of this model: "
            "prepare the model with its optimizer, and with several call trimtab.Controller(...).step() yourself"
        )
    return found[0]


def _wrap(owner: Any, name: str, wrapper: Callable[..., Any]) -> Callable[[], None]:
    """Put `wrapper(original, ...)` in a method's place, on this object alone; returns what undoes it."""
    original, before = getattr(owner, name), vars(owner).get(name)
    setattr(owner, name, functools.wraps(original)(functools.partial(wrapper, original)))

    def undo() -> None:
        if before is None:
            delattr(owner, name)
        else:
            setattr(owner, name, before)

    return undo
