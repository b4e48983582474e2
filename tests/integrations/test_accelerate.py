# SPDX-License-Identifier: Apache-2.0
"""Accelerate, the real one: the controller steps by itself, where a plain loop would call it."""

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from integrations.notes import POLICY, Notes, example, without
from torch import Tensor, nn

import trimtab

accelerate = pytest.importorskip("accelerate")

from accelerate.state import AcceleratorState, GradientState, PartialState  # noqa: E402

from trimtab.errors import MissingExtraError, TrimtabError  # noqa: E402
from trimtab.integrations.accelerate import control  # noqa: E402

STEPS = 8
ROWS = torch.randn(2 * STEPS, 4, 16, generator=torch.Generator().manual_seed(1))


@pytest.fixture(autouse=True)
def _fresh_state() -> Iterator[None]:
    """Accelerate keeps its state per process."""
    yield
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()


def net() -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))
    trimtab.convert_(model, "fp8")
    return model


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return (model(x) - x.roll(1, -1)).square().mean()


class Run:
    """A loop in Accelerate's manner; the micro-batches of a step are counted by the library."""

    def __init__(
        self, micro: int = 1, policy: Any = POLICY, scale: float | None = None, fused: bool = False, **options: Any
    ) -> None:
        self.accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=micro)
        model = net()
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-2, fused=fused)
        if scale is not None:  # what fp16 does, without fp16: CPUs are refused
            self.accelerator.native_amp, self.accelerator.state._mixed_precision = True, "fp16"
            self.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=scale)
            self.accelerator.autocast_handler = accelerate.utils.AutocastKwargs(enabled=False)
        self.model, self.optimizer = self.accelerator.prepare(model, optimizer)
        self.notes = Notes()
        self.controller = control(
            self.accelerator, self.model, policy, total_steps=STEPS, recorder=self.notes, **options
        )
        self.totals: list[float] = []

    def train(self, rows: Tensor, clip: float | None) -> "Run":
        for x in rows:
            with self.accelerator.accumulate(self.model):
                self.accelerator.backward(loss_of(self.model, x))
                if self.accelerator.sync_gradients and clip is not None:
                    self.totals.append(self.accelerator.clip_grad_norm_(self.model.parameters(), clip).item())
                self.optimizer.step()
                self.optimizer.zero_grad()
        return self


def by_hand(micro: int, clip: float | None) -> tuple[nn.Module, Notes]:
    model, notes = net(), Notes()
    controller = trimtab.Controller(model, POLICY, total_steps=STEPS, recorder=notes)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-2)
    for step in range(STEPS):
        for x in ROWS[step * micro : (step + 1) * micro]:
            (loss_of(model, x) / micro).backward()
        controller.step()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
    return model, notes


@pytest.mark.parametrize(("micro", "clip"), [(1, 0.05), (2, 0.05), (2, None)])
def test_an_accelerated_loop_decides_as_a_plain_one(micro: int, clip: float | None) -> None:
    model, expected = by_hand(micro, clip)
    run = Run(micro).train(ROWS[: micro * STEPS], clip)
    assert expected.is_eventful()
    assert run.notes.rows == expected.rows
    assert all(torch.equal(a, b) for a, b in zip(run.model.parameters(), model.parameters(), strict=True))


@pytest.mark.parametrize("clip", [0.05, None])
def test_norms_are_of_the_unscaled_gradient(clip: float | None) -> None:
    _, expected = by_hand(1, clip)
    run = Run(scale=1024.0).train(ROWS[:STEPS], clip)  # a power of two: scaling and un-scaling are exact
    assert run.notes.rows == expected.rows


def test_the_host_need_not_wait() -> None:
    waiting = Run(fused=True).train(ROWS[:STEPS], 0.05)
    ahead = Run(fused=True, wait="forward").train(ROWS[:STEPS], 0.05)
    ahead.controller.settle()
    assert ahead.notes.rows == waiting.notes.rows


def test_a_step_that_the_scaler_skips_is_seen_and_the_next_one_too() -> None:
    run = Run(scale=1024.0)
    rows = ROWS[:STEPS].clone()
    rows[2] *= 1e30
    run.train(rows, 0.05)
    assert len(run.notes.rows) == STEPS
    assert not np.isfinite(run.totals[2])
    assert np.isfinite(run.totals[3:]).all()
    assert run.accelerator.scaler.get_scale() == 512.0


def test_an_update_that_the_loop_skips_does_not_hide_the_next_step() -> None:
    run = Run()
    run.train(ROWS[:2], 0.05)
    run.accelerator.backward(loss_of(run.model, ROWS[2]))
    run.accelerator.clip_grad_norm_(run.model.parameters(), 0.05)
    run.optimizer.zero_grad()
    run.train(ROWS[3:5], 0.05)
    assert [step for step, *_ in run.notes.rows] == [1, 2, 3, 4, 5]


def test_the_state_is_in_the_accelerators_checkpoint(tmp_path: Path) -> None:
    whole = Run().train(ROWS[:STEPS], 0.05)
    cut = Run().train(ROWS[:5], 0.05)
    cut.accelerator.save_state(str(tmp_path))
    rest = Run()
    rest.accelerator.load_state(str(tmp_path))
    rest.train(ROWS[5:STEPS], 0.05)
    assert whole.notes.is_eventful()
    assert cut.notes.rows + rest.notes.rows == whole.notes.rows


def test_what_cannot_work_is_refused() -> None:
    with pytest.raises(TrimtabError, match="replay_step=None"):
        Run(policy=POLICY.replace(replay_step=10.0))
    accelerator = accelerate.Accelerator(cpu=True)
    model = net()
    with pytest.raises(TrimtabError, match="0 prepared optimizers"):
        control(accelerator, model)
    accelerator.state.distributed_type = accelerate.DistributedType.DEEPSPEED
    with pytest.raises(TrimtabError, match=r"trimtab\.integrations\.deepspeed"):
        control(accelerator, model)


def test_the_example_learns_with_and_without_its_marked_lines(capsys: pytest.CaptureFixture) -> None:
    main, plain = example("accelerate_loop.py")
    for run in (main, plain):
        losses = run(8)
        assert len(losses) == 16
        assert losses[-1] < losses[0] - 0.2
    assert "switchable in 2 units" in capsys.readouterr().out


def test_without_the_library_the_import_says_how_to_get_it() -> None:
    name = "trimtab.integrations.accelerate"
    with without("accelerate", name), pytest.raises(MissingExtraError, match=r"pip install 'trimtab\[accelerate\]'$"):
        importlib.import_module(name)
