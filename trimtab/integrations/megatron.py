# SPDX-License-Identifier: Apache-2.0
"""Megatron-Core and models built like its: observe, through `param.main_grad`.

    controller = MainGradController(model, total_steps=1000, tensor_group=get_tensor_model_parallel_group())
    losses = forward_backward_func(...)               # main_grad is reduced when it returns
    controller.step()
    optimizer.step()

Megatron adds micro-batches up in `p.main_grad`, an FP32 buffer, and leaves `p.grad` empty. A parameter that tensor
parallelism cuts (`p.tensor_model_parallel`) is made whole by one all-reduce of its square over `tensor_group`; all
others are equal copies and count once. Norms are before clipping; with FP16 pass the loss scale.

What it can switch: nothing; it observes (Transformer Engine's modules inside can be adopted, see there). Refused: the
distributed optimizer, whose buffers hold the reduced gradient only in the part that a rank updates.

Nothing of Megatron is imported: the attributes above are the whole contract.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trimtab.control.policy import Policy
from trimtab.errors import TrimtabError
from trimtab.integrations.norms import NormController


class MainGradController(NormController):
    """A controller that observes a model whose gradients are in `main_grad`."""

    library = "Megatron"

    def __init__(
        self,
        model: nn.Module,
        policy: Policy | None = None,
        *,
        tensor_group: dist.ProcessGroup | None = None,
        loss_scale: Callable[[], float] = lambda: 1.0,
        **options: Any,
    ) -> None:
        """Find the units of a model.

        Args:
            model: the model, or Megatron's DDP around it.
            tensor_group: the ranks that hold the pieces of a parameter, where tensor parallelism cuts any.
            loss_scale: what the gradients are still multiplied by (FP16).
            options: further arguments of `trimtab.Controller`; `stage` and `process_group` for pipelines.
        """
        if getattr(getattr(model, "ddp_config", None), "use_distributed_optimizer", False):
            raise TrimtabError(
                "main_grad must hold the whole reduced gradient, got use_distributed_optimizer=True, which leaves it "
                "only the part that a rank updates: observe with use_distributed_optimizer=False"
            )
        model = model.module if hasattr(model, "ddp_config") else model  # pyright: ignore[reportAssignmentType]
        self._group, self._loss_scale = tensor_group, loss_scale
        super().__init__(model, policy, **options)
        cut = [name for name, p in model.named_parameters() if _is_cut(p)]
        if cut and tensor_group is None:
            raise TrimtabError(
                f"a norm is of a whole parameter, got {len(cut)} that tensor parallelism cuts ({', '.join(cut[:3])}): "
                "pass tensor_group=megatron.core.parallel_state.get_tensor_model_parallel_group()"
            )

    def norms(self, parameters: Sequence[nn.Parameter]) -> Tensor:  # (P,)
        grads: list[Tensor | None] = [getattr(p, "main_grad", None) for p in parameters]
        if all(grad is None for grad in grads):
            raise TrimtabError("gradients are read from main_grad, which no parameter has: use trimtab.Controller here")
        here = [i for i, grad in enumerate(grads) if grad is not None]
        found = torch._foreach_norm([grads[i] for i in here], 2, torch.float64)  # pyright: ignore
        squares = torch.zeros(len(grads), dtype=torch.float64, device=found[0].device)
        squares[here] = torch.stack(found).square()
        cut = [i for i, p in enumerate(parameters) if _is_cut(p)]
        if cut:
            summed = squares[cut]
            dist.all_reduce(summed, group=self._group)
            squares[cut] = summed
        return squares.sqrt() / self._loss_scale()


def _is_cut(p: Any) -> bool:
    return bool(getattr(p, "tensor_model_parallel", False))
