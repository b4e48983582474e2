# SPDX-License-Identifier: Apache-2.0
"""Lightning's Trainer, the real one, makes the decisions of a plain loop: with clipping, accumulation, resume."""

import importlib
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from integrations.notes import POLICY, Notes, example, without
from torch import Tensor, nn

import trimtab

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of its own dependencies
    lightning = pytest.importorskip("lightning.pytorch")

from trimtab.errors import MissingExtraError, TrimtabError
from trimtab.integrations.lightning import TrimtabCallback

STEPS = 8

pytestmark = pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning")  # its own


class Net(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))
        self.optimizer = torch.optim.AdamW(self.parameters(), lr=3e-2)

    def training_step(self, batch: tuple[Tensor], index: int = 0) -> Tensor:
        (x,) = batch
        return (self.blocks(x) - x.roll(1, -1)).square().mean()

    def configure_optimizers(self) -> Any:
        return self.optimizer


def net() -> Net:
    module = Net()
    trimtab.convert_(module, "fp8")
    return module


class Batches:
    """A loader that knows where it is, so that Lightning can resume within an epoch."""

    def __init__(self) -> None:
        self.rows = torch.randn(2 * STEPS, 4, 16, generator=torch.Generator().manual_seed(1))
        self.at = 0

    def __iter__(self) -> Any:
        while self.at < len(self.rows):
            self.at += 1
            yield (self.rows[self.at - 1],)

    def __len__(self) -> int:
        return len(self.rows)

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        self.at = state_dict["at"]


def fitted(
    folder: Path, *, steps: int = STEPS, module: Any = None, resume: Any = None, policy: Any = POLICY, **more: Any
) -> tuple[Any, Any, Notes, TrimtabCallback]:
    notes, module = Notes(), net() if module is None else module
    callback = TrimtabCallback(policy, recorder=notes, total_steps=STEPS)
    trainer = lightning.Trainer(
        default_root_dir=folder,
        accelerator="cpu",
        max_steps=steps,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[callback],
        **more,
    )
    trainer.fit(module, Batches(), ckpt_path=resume, **({"weights_only": True} if resume else {}))
    return trainer, module, notes, callback


def by_hand(micro: int, clip: float | None) -> tuple[Net, Notes]:
    module, notes = net(), Notes()
    controller = trimtab.Controller(module, POLICY, total_steps=STEPS, recorder=notes)
    batches = iter(Batches())
    for _ in range(STEPS):
        for _ in range(micro):
            (module.training_step(tuple(next(batches))) / micro).backward()
        controller.step()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(module.parameters(), clip)
        module.optimizer.step()
        module.optimizer.zero_grad()
    return module, notes


@pytest.mark.parametrize(("micro", "clip"), [(1, 0.05), (2, 0.05), (2, None)])
def test_a_fit_decides_as_a_plain_loop(tmp_path: Path, micro: int, clip: float | None) -> None:
    model, expected = by_hand(micro, clip)
    _, module, notes, _ = fitted(tmp_path, accumulate_grad_batches=micro, gradient_clip_val=clip)
    assert expected.is_eventful()
    assert notes.rows == expected.rows
    assert all(torch.equal(a, b) for a, b in zip(module.parameters(), model.parameters(), strict=True))


def test_a_resumed_fit_goes_on_as_if_nothing_had_been(tmp_path: Path) -> None:
    whole = fitted(tmp_path, gradient_clip_val=0.05, accumulate_grad_batches=2)[2]
    trainer, _, first, _ = fitted(tmp_path, steps=5, gradient_clip_val=0.05, accumulate_grad_batches=2)
    trainer.save_checkpoint(tmp_path / "cut.ckpt")
    saved = torch.load(tmp_path / "cut.ckpt", weights_only=True)["callbacks"]["TrimtabCallback"]
    assert saved["step"] == 5
    _, _, rest, _ = fitted(
        tmp_path, resume=str(tmp_path / "cut.ckpt"), gradient_clip_val=0.05, accumulate_grad_batches=2
    )
    assert whole.is_eventful()
    assert first.rows + rest.rows == whole.rows


def test_a_checkpoint_without_our_state_is_met_with_a_warning(tmp_path: Path) -> None:
    trainer = fitted(tmp_path, steps=3)[0]
    trainer.save_checkpoint(tmp_path / "cut.ckpt")
    checkpoint = torch.load(tmp_path / "cut.ckpt", weights_only=True)
    checkpoint["callbacks"].clear()
    torch.save(checkpoint, tmp_path / "bare.ckpt")
    with pytest.warns(UserWarning, match="no controller state"):
        notes = fitted(tmp_path, resume=str(tmp_path / "bare.ckpt"))[2]
    assert len(notes.rows) == STEPS - 3


def test_a_poisoned_step_does_nothing(tmp_path: Path) -> None:
    module = net()
    calls: list[Tensor] = []

    def poison(grad: Tensor) -> Tensor:
        calls.append(module.blocks[0].weight.detach().clone())
        return grad * float("nan") if len(calls) == 3 else grad

    module.blocks[3].bias.register_hook(poison)
    _, _, _, callback = fitted(tmp_path, module=module, gradient_clip_val=0.05)
    assert torch.equal(calls[2], calls[3])
    assert not torch.equal(calls[3], calls[4])
    assert callback.controller is not None
    assert callback.controller.steps == STEPS


def test_what_cannot_work_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TrimtabError, match="replay_step=None"):
        TrimtabCallback(POLICY.replace(replay_step=10.0))
    module = net()
    module.automatic_optimization = False
    with pytest.raises(TrimtabError, match="manual optimization"):
        fitted(tmp_path, module=module)


@pytest.mark.filterwarnings("ignore:.*does not have many workers")
def test_the_example_learns_with_and_without_its_marked_lines(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    main, plain = example("lightning_loop.py")
    for run in (main, plain):
        losses = run(8, str(tmp_path / run.__module__))
        assert len(losses) == 16
        assert losses[-1] < losses[0] - 0.2
    assert "switchable in 2 units" in capsys.readouterr().out


def test_without_the_library_the_import_says_how_to_get_it() -> None:
    name = "trimtab.integrations.lightning"
    with without("lightning", name), pytest.raises(MissingExtraError, match=r"pip install 'trimtab\[lightning\]'$"):
        importlib.import_module(name)
