# SPDX-License-Identifier: Apache-2.0
"""Every example runs at toy size and leaves what it promises."""

import runpy
from pathlib import Path

import pytest
from comm.ranks import in_ranks

from trimtab.lab.model import Decoder, ModelConfig
from trimtab.report.read import read_run

EXAMPLES = Path(__file__).parent.parent / "examples"


def test_the_plain_loop_trains_and_leaves_a_run_folder(tmp_path: Path) -> None:
    main = runpy.run_path(str(EXAMPLES / "plain_loop.py"))["main"]
    summary = main(12, str(tmp_path / "run"))
    assert summary["steps"] == 12
    run = read_run(tmp_path / "run")
    steps, losses = run.column("loss")
    assert steps.tolist() == list(range(1, 13))
    assert losses[-1] < losses[0]
    assert run.trace is not None
    assert run.trace.units == ("blocks.0", "blocks.1")


def test_the_finetuning_example_learns_through_its_adapters(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("peft")
    main = runpy.run_path(str(EXAMPLES / "finetune.py"))["main"]
    assert main(12, str(tmp_path / "run"))["steps"] == 12
    run = read_run(tmp_path / "run")
    _, losses = run.column("loss")
    assert losses[-1] < losses[0] - 0.05
    assert run.trace is not None
    assert run.trace.units == tuple(f"model.layers.{n}" for n in range(8))


def ddp_example(rank: int) -> dict[str, float]:
    return runpy.run_path(str(EXAMPLES / "ddp.py"))["main"](8)


def test_ranks_of_the_ddp_example_agree_and_send_less(tmp_path: Path) -> None:
    first, second = in_ranks(2, ddp_example, tmp_path)
    assert first == second
    assert first["steps"] == 8
    numbers = sum(p.numel() for p in Decoder(ModelConfig.size("micro"), seed=0).parameters())
    assert 0 < first["payload"] < 0.5 * 4 * numbers


def test_every_example_is_short_and_has_a_test() -> None:
    here = "".join(path.read_text(encoding="utf-8") for path in Path(__file__).parent.rglob("test_*.py"))
    for path in EXAMPLES.glob("*.py"):
        assert len(path.read_text(encoding="utf-8").splitlines()) <= 60, path
        assert path.name in here, path
