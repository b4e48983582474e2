# SPDX-License-Identifier: Apache-2.0
"""Models whose gradients are in `main_grad`: ON A STAND-IN for Megatron-Core's DDP, not on the real library.

Faithful in these: gradients are added up in FP32 buffers when they arrive, `p.grad` is None at all times outside, the
buffers are zeroed and not emptied, and what tensor parallelism cuts says so (`tensor_model_parallel`).
"""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from comm.ranks import in_ranks
from integrations.notes import POLICY, Notes, example
from torch import Tensor, nn

import trimtab
from trimtab.errors import TrimtabError
from trimtab.integrations.megatron import MainGradController

STEPS, MICRO = 6, 2
ROWS = torch.randn(STEPS, MICRO, 4, 16, generator=torch.Generator().manual_seed(1))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self.unused = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        y = x
        for layer in self.layers:
            y = layer(y)
        return (y - x.roll(1, -1)).square().mean()


class MegatronLikeDDP(nn.Module):
    """Adds gradients up in `main_grad`, as megatron.core.distributed.DistributedDataParallel does."""

    def __init__(self, module: nn.Module, use_distributed_optimizer: bool = False) -> None:
        super().__init__()
        self.module = module
        self.ddp_config = SimpleNamespace(use_distributed_optimizer=use_distributed_optimizer)
        for p in module.parameters():
            p.main_grad = torch.zeros_like(p, dtype=torch.float32)  # type: ignore[attr-defined]
            p.register_post_accumulate_grad_hook(self._accumulate)

    @staticmethod
    def _accumulate(p: Any) -> None:
        p.main_grad.add_(p.grad)
        p.grad = None

    def forward(self, *args: Any) -> Any:
        return self.module(*args)

    def zero_grad_buffer(self) -> None:
        for p in self.module.parameters():
            p.main_grad.zero_()  # type: ignore[attr-defined]


def expected() -> Notes:
    model, notes = Net(), Notes()
    controller = trimtab.Controller(model, POLICY, mode="observe", total_steps=STEPS, recorder=notes)
    for batches in ROWS:
        for x in batches:
            (model(x) / MICRO).backward()
        controller.step()
        _descend(model, [p.grad for p in model.parameters()])
        model.zero_grad()
    return notes


def _descend(model: nn.Module, grads: list[Tensor | None]) -> None:
    with torch.no_grad():
        for p, grad in zip(model.parameters(), grads, strict=True):
            p -= 0.1 * (0 if grad is None else grad)


def observed(scale: float = 1.0) -> tuple[Notes, MainGradController]:
    model = MegatronLikeDDP(Net())
    notes = Notes()
    controller = MainGradController(model, POLICY, total_steps=STEPS, recorder=notes, loss_scale=lambda: scale)
    for batches in ROWS:
        model.zero_grad_buffer()
        for x in batches:
            (model(x) * scale / MICRO).backward()
        assert all(p.grad is None for p in model.parameters())
        controller.step()
        _descend(model.module, [p.main_grad / scale for p in model.module.parameters()])  # type: ignore
    return notes, controller


@pytest.mark.parametrize("scale", [1.0, 512.0])
def test_norms_come_from_main_grad(scale: float) -> None:
    theirs = expected()
    ours, controller = observed(scale)
    assert controller.names == ("layers.0", "layers.1", "layers.2", "unused")
    np.testing.assert_allclose(ours.norms, theirs.norms, rtol=1e-6)
    assert controller.reading is not None
    assert controller.reading.seen.tolist() == [True, True, True, False]
    state = controller.state_dict()
    again = MainGradController(MegatronLikeDDP(Net()), POLICY, total_steps=STEPS)
    again.load_state_dict(state)
    assert again.steps == STEPS


def cut(rank: int) -> list[float]:
    """Each rank has half the rows of two weights, and all of the rest."""
    model = Net()
    model(ROWS[0, 0]).backward()
    for name, p in model.named_parameters():
        whole = torch.zeros_like(p) if p.grad is None else p.grad
        p.grad = None
        p.main_grad = whole  # type: ignore[attr-defined]
        if name in ("layers.0.weight", "layers.2.weight"):
            p.tensor_model_parallel = True  # type: ignore[attr-defined]
            p.main_grad = whole.chunk(2)[rank].clone()  # type: ignore[attr-defined]
    controller = MainGradController(
        model, POLICY, total_steps=STEPS, tensor_group=dist.group.WORLD, process_group=dist.group.WORLD
    )
    controller.step()
    assert controller.reading is not None
    return controller.reading.norm.tolist()


def test_what_tensor_parallelism_cuts_is_made_whole_and_copies_count_once(tmp_path: Path) -> None:
    first, second = in_ranks(2, cut, tmp_path)
    model = Net()
    model(ROWS[0, 0]).backward()
    controller = trimtab.Controller(model, POLICY, mode="observe", total_steps=STEPS)
    controller.step()
    assert controller.reading is not None
    assert first == second
    np.testing.assert_allclose(first, controller.reading.norm, rtol=1e-6)


def test_what_cannot_be_read_is_refused_and_never_a_zero() -> None:
    with pytest.raises(TrimtabError, match="use_distributed_optimizer=False"):
        MainGradController(MegatronLikeDDP(Net(), use_distributed_optimizer=True), total_steps=STEPS)
    with pytest.raises(TrimtabError, match="mode='observe'"):
        MainGradController(MegatronLikeDDP(Net()), total_steps=STEPS, mode="act")
    with pytest.raises(TrimtabError, match=r"use trimtab\.Controller"):
        MainGradController(Net(), total_steps=STEPS).step()
    with pytest.raises(TrimtabError, match="after backward and before the update"):
        MainGradController(MegatronLikeDDP(Net()), total_steps=STEPS).step()
    model = Net()
    model.layers[0].weight.tensor_model_parallel = True  # type: ignore[union-attr]
    with pytest.raises(TrimtabError, match="tensor_group="):
        MainGradController(MegatronLikeDDP(model), total_steps=STEPS)


def test_a_detector_that_needs_more_than_norms_is_refused() -> None:
    with pytest.raises(TrimtabError, match="detector of norms alone"):
        MainGradController(MegatronLikeDDP(Net()), total_steps=STEPS, detector="gsnr")


def test_the_example_observes_and_changes_nothing(capsys: pytest.CaptureFixture) -> None:
    main, plain = example("main_grad.py")
    assert main(6) == plain(6)
    assert "blocks.0" in capsys.readouterr().out
