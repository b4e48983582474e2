# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed, the real one, on two ranks: norms through ZeRO's partitions are those of a plain loop on all the data."""

import importlib
import os
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from comm.ranks import in_ranks
from integrations.notes import POLICY, Notes, example, without
from torch import Tensor, nn

import trimtab
from trimtab.errors import MissingExtraError

pytest.importorskip("deepspeed")

STEPS, MICRO = 4, 2
ROWS = torch.randn(STEPS, MICRO, 2, 4, 16, generator=torch.Generator().manual_seed(1))  # (step, micro, rank, ...)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self.unused = nn.Linear(16, 5)  # never has a gradient; an odd number of rows, so that ZeRO must pad

    def forward(self, x: Tensor) -> Tensor:
        y = x
        for layer in self.layers:
            y = layer(y)
        return (y - x.roll(1, -1)).square().mean()


def expected() -> np.ndarray:
    """Norms of every unit in a plain loop, NaN where there is no gradient."""
    model, notes = Net(), Notes()
    controller = trimtab.Controller(model, POLICY, mode="observe", total_steps=STEPS, recorder=notes)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    seen = []
    for batches in ROWS:
        for x in batches.flatten(0, 1):
            (model(x) / (2 * MICRO)).backward()
        controller.step()
        assert controller.reading is not None
        seen.append(controller.reading.seen)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()
        optimizer.zero_grad()
    return np.where(seen, notes.norms, np.nan)


def observed(rank: int) -> dict[str, Any]:
    warnings.simplefilter("ignore")
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", DS_ACCELERATOR="cpu")
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # or it is compiled, for two minutes
    deepspeed.accelerator.get_accelerator().is_fp16_supported = lambda: True  # slow on a CPU, and right
    from trimtab.integrations.deepspeed import ZeroController

    found: dict[str, Any] = {}
    for name, stage, more in (
        ("0", 0, {}),
        ("1", 1, {}),
        ("2", 2, {}),
        ("3", 3, {}),
        ("bf16", 1, {"bf16": {"enabled": True}}),
        ("fp16", 2, {"fp16": {"enabled": True, "loss_scale": 128}}),
    ):
        model, notes = Net(), Notes()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        config = {
            "train_micro_batch_size_per_gpu": 4,
            "gradient_accumulation_steps": MICRO,
            "gradient_clipping": 0.05,
            "zero_optimization": {"stage": stage},
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
        }
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config | more)
        controller = ZeroController(engine, POLICY, total_steps=STEPS, recorder=notes)
        seen = []
        for batches in ROWS:
            for x in batches[:, rank]:
                x = x.to(next(model.parameters()).dtype)
                engine.backward(engine(x))
                controller.step()
                engine.step()
            assert controller.reading is not None
            seen.append(controller.reading.seen)
        found[name] = np.where(seen, notes.norms, np.nan)
        assert controller.steps == STEPS
        engine.set_gradient_accumulation_boundary(True)
        found[f"late {name}"] = refusal(controller.step)
        found["clip"] = refusal(lambda: controller.clip_grad_norm_(1.0))  # noqa: B023
        if stage:
            found["plain"] = refusal(lambda: trimtab.Controller(model, mode="observe"))  # noqa: B023
        found["act"] = refusal(lambda: ZeroController(engine, mode="act"))  # noqa: B023
    main, plain = example("deepspeed_zero.py")
    found["example"] = main(4), plain(4)
    return found


def refusal(call: Any) -> str:
    try:
        call()
    except trimtab.TrimtabError as error:
        return str(error)
    raise AssertionError("this must be refused")


def test_norms_come_from_the_partitions(tmp_path: Path) -> None:
    ranks = in_ranks(2, observed, tmp_path)
    norms = expected()
    assert np.isnan(norms[:, 3]).all()  # the unused one
    assert np.isfinite(norms[:, :3]).all()
    for found in ranks:
        for stage in "0123":
            np.testing.assert_allclose(found[stage], norms, rtol=2e-5, err_msg=f"stage {stage}")
        for half in ("bf16", "fp16"):  # the loss is scaled by 128 in the second
            np.testing.assert_allclose(found[half], norms, rtol=5e-2, err_msg=half)
        assert "mode='observe'" in found["act"]
        assert "ZeroController(engine)" in found["plain"]
        assert "DeepSpeed's to clip" in found["clip"]
        watched, bare = found["example"]
        assert watched == bare
        assert watched[-1] < watched[0]
        for stage in ("0", "1", "2", "3", "bf16", "fp16"):
            assert "after backward and before the update" in found[f"late {stage}"]
            np.testing.assert_array_equal(found[stage], ranks[0][stage])


def test_without_the_library_the_import_says_how_to_get_it() -> None:
    name = "trimtab.integrations.deepspeed"
    with without("deepspeed", name), pytest.raises(MissingExtraError, match=r"pip install 'trimtab\[deepspeed\]'$"):
        importlib.import_module(name)
