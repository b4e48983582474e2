# SPDX-License-Identifier: Apache-2.0
"""Transformers' Trainer, the real one, makes the decisions of a plain loop: with clipping, accumulation, resume."""

import importlib
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from comm.ranks import in_ranks
from integrations.notes import POLICY, Notes, example, without

import trimtab

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from trimtab.errors import MissingExtraError, TrimtabError
from trimtab.integrations.transformers import STATE, TrimtabCallback

STEPS = 8
SHAPE = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}


def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(vocab_size=64, num_hidden_layers=2, **SHAPE))


def texts() -> list[dict[str, torch.Tensor]]:
    rows = torch.randint(0, 64, (64, 17), generator=torch.Generator().manual_seed(1))
    return [{"input_ids": row, "labels": row} for row in rows]


class TrlLike(Trainer):
    """Overrides what TRL's trainers override: the loss, and the step around it. Keeps the order of its data."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **more: Any) -> Any:
        loss, outputs = super().compute_loss(model, inputs, return_outputs=True, **more)
        return (loss, outputs) if return_outputs else loss

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return super().training_step(*args, **kwargs)

    def _get_train_sampler(self, *_: Any) -> Any:
        return torch.utils.data.SequentialSampler(self.train_dataset)  # type: ignore[arg-type]


def arguments(folder: Path, **more: Any) -> TrainingArguments:
    common: dict[str, Any] = {
        "per_device_train_batch_size": 4,
        "max_steps": STEPS,
        "learning_rate": 5e-2,
        "weight_decay": 0.0,
        "optim": "adamw_torch",
        "lr_scheduler_type": "constant",
        "logging_steps": 1,
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
        "save_strategy": "no",
        "dataloader_pin_memory": False,
    }
    return TrainingArguments(output_dir=str(folder), **common | more)


def trained(folder: Path, model: Any = None, resume: Any = None, **more: Any) -> tuple[Trainer, Notes, TrimtabCallback]:
    if model is None:
        model = llama()
        trimtab.convert_(model, "fp8")
    trainer = TrlLike(model=model, args=arguments(folder, **more), train_dataset=texts())  # type: ignore[arg-type]
    notes = Notes()
    callback = TrimtabCallback(trainer, POLICY, recorder=notes)
    trainer.add_callback(callback)
    trainer.train(resume_from_checkpoint=resume)
    return trainer, notes, callback


def by_hand(micro: int, clip: float | None) -> tuple[torch.nn.Module, Notes]:
    """The same training as a plain loop."""
    model, notes = llama(), Notes()
    trimtab.convert_(model, "fp8")
    model.train()
    controller = trimtab.Controller(model, POLICY, total_steps=STEPS, recorder=notes)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-2, weight_decay=0.0)
    rows = [text["input_ids"] for text in texts()] * 2
    for step in range(STEPS):
        batches = [torch.stack(rows[4 * i : 4 * i + 4]) for i in range(step * micro, step * micro + micro)]
        for batch in batches:
            model(input_ids=batch, labels=batch, num_items_in_batch=torch.tensor(micro * 4 * 16)).loss.backward()
        controller.step()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
    return model, notes


@pytest.mark.parametrize(("micro", "clip"), [(1, 0.1), (2, 0.1), (2, None)])
def test_a_trainer_decides_as_a_plain_loop(tmp_path: Path, micro: int, clip: float | None) -> None:
    model, expected = by_hand(micro, clip)
    trainer, notes, _ = trained(tmp_path, gradient_accumulation_steps=micro, max_grad_norm=clip or 0.0)
    assert expected.is_eventful()
    assert notes.rows == expected.rows
    for ours, theirs in zip(trainer.model.parameters(), model.parameters(), strict=True):  # type: ignore[union-attr]
        assert torch.equal(ours, theirs)
    logged = [entry["grad_norm"] for entry in trainer.state.log_history if "grad_norm" in entry]
    np.testing.assert_allclose(logged, [row[3] for row in expected.rows], rtol=1e-5)  # all above the clip


@pytest.mark.parametrize("by_name", [False, True])
def test_a_resumed_trainer_goes_on_as_if_nothing_had_been(tmp_path: Path, by_name: bool) -> None:
    runs = tmp_path / "runs"
    whole = trained(runs, save_strategy="steps", save_steps=5)[1]
    (runs / "checkpoint-8").rename(tmp_path / "end")
    folder = runs / "checkpoint-5"
    assert torch.load(folder / STATE, weights_only=True)["step"] == 5
    rest = trained(runs, resume=str(folder.rename(tmp_path / "moved")) if by_name else True)[1]
    assert whole.is_eventful()
    assert rest.rows == whole.rows[5:]


def test_a_checkpoint_without_our_state_is_met_with_a_warning(tmp_path: Path) -> None:
    trained(tmp_path, save_strategy="steps", save_steps=4)
    (tmp_path / "checkpoint-4" / STATE).unlink()
    with pytest.warns(UserWarning, match="no controller state"):
        _, notes, _ = trained(tmp_path, resume=str(tmp_path / "checkpoint-4"))
    assert len(notes.rows) == 4


def test_a_damaged_state_of_ours_is_one_line(tmp_path: Path) -> None:
    trained(tmp_path, save_strategy="steps", save_steps=4)
    file = tmp_path / "checkpoint-4" / STATE
    state = torch.load(file, weights_only=True)
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(TrimtabError, match=r"trimtab\.pt cannot be read .* resume from another checkpoint"):
        trained(tmp_path, resume=str(tmp_path / "checkpoint-4"))
    torch.save(state | {"step": "no such thing"}, file)
    with pytest.raises(TrimtabError, match=r"trimtab\.pt cannot be read"):
        trained(tmp_path, resume=str(tmp_path / "checkpoint-4"))


def test_a_poisoned_step_is_skipped_and_its_norm_is_not_zero(tmp_path: Path) -> None:
    model = llama()
    trimtab.convert_(model, "fp8")
    calls: list[int] = []

    def poison(grad: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return grad * float("nan") if len(calls) == 3 else grad

    head = model.model.norm.weight
    head.register_hook(poison)
    before: list[torch.Tensor] = []
    trainer = TrlLike(model=model, args=arguments(tmp_path), train_dataset=texts())  # type: ignore[arg-type]
    callback = TrimtabCallback(trainer, POLICY)
    trainer.add_callback(callback)
    step = trainer.training_step

    def watched(*args: Any, **kwargs: Any) -> Any:
        before.append(head.detach().clone())
        return step(*args, **kwargs)

    trainer.training_step = watched  # type: ignore[method-assign]
    trainer.train()
    assert torch.equal(before[2], before[3])  # the third step did nothing
    assert not torch.equal(before[3], before[4])
    logged = [entry["grad_norm"] for entry in trainer.state.log_history if "grad_norm" in entry]
    assert not np.isfinite(logged[2])
    assert np.isfinite(logged[3])


def test_observing_changes_no_bit_and_the_trainer_is_left_as_it_was(tmp_path: Path) -> None:
    plain = TrlLike(model=llama(), args=arguments(tmp_path), train_dataset=texts())  # type: ignore[arg-type]
    plain.train()
    watched = TrlLike(model=llama(), args=arguments(tmp_path), train_dataset=texts())  # type: ignore[arg-type]
    callback = TrimtabCallback(watched, mode="observe")
    watched.add_callback(callback)
    watched.train()
    assert callback.controller is not None
    assert callback.controller.steps == STEPS
    for ours, theirs in zip(watched.model.parameters(), plain.model.parameters(), strict=True):  # type: ignore[union-attr]
        assert torch.equal(ours, theirs)
    assert not {"clip_grad_norm_", "unscale_gradients"} & set(vars(watched.accelerator))


def on_one_of_two_ranks(rank: int, folder: Path) -> np.ndarray:
    here = {"LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}  # asked for, and not used
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", **here)
    return norms_of(folder, batch=2)


def norms_of(folder: Path, batch: int) -> np.ndarray:
    args = arguments(folder, per_device_train_batch_size=batch, max_grad_norm=0.1)
    trainer = TrlLike(model=llama(), args=args, train_dataset=texts())  # type: ignore[arg-type]
    notes = Notes()
    trainer.add_callback(TrimtabCallback(trainer, mode="observe", recorder=notes))
    trainer.train()
    return notes.norms


def test_two_ranks_read_what_one_does(tmp_path: Path) -> None:
    first, second = in_ranks(2, on_one_of_two_ranks, tmp_path, tmp_path / "two")
    np.testing.assert_array_equal(first, second)
    np.testing.assert_allclose(first[:4], norms_of(tmp_path / "one", batch=4)[:4], rtol=1e-3)


def test_what_cannot_work_is_refused(tmp_path: Path) -> None:
    trainer = TrlLike(model=llama(), args=arguments(tmp_path), train_dataset=texts())  # type: ignore[arg-type]
    with pytest.raises(TrimtabError, match="replay_step=None"):
        TrimtabCallback(trainer, POLICY.replace(replay_step=10.0))
    TrimtabCallback(trainer, mode="observe")
    with pytest.raises(TrimtabError, match=r"trainer\.add_callback\(callback\)"):
        trainer.train()
    with pytest.raises(TrimtabError, match=r"add_callback\(TrimtabCallback\(trainer, policy\)\)"):
        TrimtabCallback(POLICY)  # type: ignore[arg-type]


def test_the_example_learns_with_and_without_its_marked_lines(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    main, plain = example("hf_trainer.py")
    for run in (main, plain):
        losses = run(12, str(tmp_path))
        assert len(losses) == 12
        assert losses[-1] < losses[0] - 0.5
    assert "28 of 29 linears switchable in 4 units" in capsys.readouterr().out


def test_without_the_library_the_import_says_how_to_get_it() -> None:
    name = "trimtab.integrations.transformers"
    with without("transformers", name), pytest.raises(MissingExtraError, match=r"pip install 'trimtab\[hf\]'$"):
        importlib.import_module(name)
