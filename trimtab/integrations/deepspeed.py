# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed, ZeRO 0 to 3: observe, through its own partitioned gradients.

    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    controller = ZeroController(engine, total_steps=1000)
    for batch in loader:
        engine.backward(engine(batch).loss)
        controller.step()                             # nothing between the micro-batches of a step
        engine.step()

ZeRO empties `p.grad` and keeps each rank's part of the reduced gradient until `engine.step()`. Each rank takes the norm
of its own parts, and one all-reduce of a number per parameter makes them whole: no gradient is gathered. Norms are
before DeepSpeed's clipping and without its loss scale.

What it can switch: nothing; it observes, records and says what a policy would do. Refused: pipeline and tensor parallel
engines, whose parameters are pieces that ZeRO does not know of. `step()` is collective.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trimtab.control.policy import Policy
from trimtab.control.values import Plan
from trimtab.errors import TrimtabError, missing_extra
from trimtab.integrations.norms import NormController

try:
    from deepspeed.runtime.engine import DeepSpeedEngine
    from deepspeed.utils import safe_get_local_grad
except ImportError as error:
    raise missing_extra("deepspeed", "deepspeed", "trimtab.integrations.deepspeed") from error


class ZeroController(NormController):
    """A controller that observes a DeepSpeed engine."""

    library = "DeepSpeed"

    def __init__(self, engine: DeepSpeedEngine, policy: Policy | None = None, **options: Any) -> None:
        """Find the units of an engine's model.

        Args:
            options: further arguments of `trimtab.Controller`; `units` groups the model, `mode` is `"observe"`.
        """
        if type(engine).__name__ == "PipelineEngine" or engine.mp_world_size > 1:
            raise TrimtabError(
                "a parameter must be whole but for ZeRO's own cuts, got a pipeline or tensor parallel engine: observe "
                "with data parallelism alone"
            )
        module, optimizer = engine.module, engine.basic_optimizer
        if not isinstance(module, nn.Module) or optimizer is None:
            raise TrimtabError("an engine must train, got one without an optimizer: pass it to deepspeed.initialize")
        self._engine = engine
        # ZeRO 3 keeps old gradients after an update: nobody else would notice a call that comes too late.
        self._is_fresh = False
        self._hooks = [
            module.register_forward_pre_hook(lambda *_: self._mark(True)),
            optimizer.register_step_post_hook(lambda *_: self._mark(False)),
        ]
        many = dist.is_initialized() and dist.get_world_size() > 1
        super().__init__(module, policy, process_group=dist.group.WORLD if many else None, **options)

    def _mark(self, is_fresh: bool) -> None:
        self._is_fresh = is_fresh

    def detach(self) -> None:
        """Take the hooks off the engine; the controller must not step after it."""
        super().detach()
        for hook in self._hooks:
            hook.remove()

    def step(self) -> Plan:
        """Read the norms after the last micro-batch of a step; before `engine.step()`."""
        return super().step() if self._engine.is_gradient_accumulation_boundary() else self.plan

    def norms(self, parameters: Sequence[nn.Parameter]) -> Tensor:  # (P,)
        squares = torch.zeros(len(parameters), dtype=torch.float64, device=self._engine.device)
        if not self._is_fresh:
            return squares
        spread: dict[Any, list[int]] = {}
        for i, p in enumerate(parameters):
            ranks, part = _part(p)
            if part is not None:
                squares[i] = torch.linalg.vector_norm(part, dtype=torch.float64).square()
            if ranks is not None:
                spread.setdefault(ranks, []).append(i)
        for ranks, places in spread.items():
            summed = squares[places]
            dist.all_reduce(summed, group=ranks)
            squares[places] = summed
        return squares.sqrt() / float(getattr(self._engine.optimizer, "loss_scale", 1.0))


def _part(p: Any) -> tuple[Any, Tensor | None]:
    """Over which ranks a gradient is spread (None: it is whole here), and the part that this rank keeps."""
    if hasattr(p, "ds_id"):  # ZeRO 3
        return p._z3_optimizer.dp_process_group, safe_get_local_grad(p)
    if hasattr(p, "_hp_mapping") and (p.grad is None or getattr(p, "_hp_grad", None) is not None):  # ZeRO 1, 2, BF16
        mapping = p._hp_mapping
        if mapping is None:
            return p._dp_group, None
        part = mapping.get_lp_grad_fragment(p._index_in_param_group).flatten()
        address = mapping.lp_fragment_address
        if part.numel() == p.numel():  # the BF16 optimizer keeps all of it, and answers for its own fragment
            part = part.narrow(0, address.start, address.numel)
        return p._dp_group, part
    return None, p.grad
