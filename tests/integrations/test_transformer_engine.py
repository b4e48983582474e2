# SPDX-License-Identifier: Apache-2.0
"""Transformer Engine's modules as units: ON A STAND-IN (standins/transformer_engine), not on the real library."""

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from integrations.notes import POLICY, Notes, example, without
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import trimtab
from trimtab.errors import MissingExtraError

OURS = "trimtab.integrations.transformer_engine"


@pytest.fixture
def te(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The stand-in as `te`, with our module as `te.trimtab`."""
    before = dict(sys.modules)
    monkeypatch.syspath_prepend(str(Path(__file__).parent / "standins"))
    for name in [n for n in before if n.split(".")[0] == "transformer_engine" or n == OURS]:
        del sys.modules[name]
    module = importlib.import_module("transformer_engine.pytorch")
    module.trimtab = importlib.import_module(OURS)  # type: ignore[attr-defined]
    module.recipe = importlib.import_module("transformer_engine.common.recipe")  # type: ignore[attr-defined]
    yield module
    for name in [n for n in sys.modules if n.split(".")[0] == "transformer_engine" or n == OURS]:
        del sys.modules[name]


def net(te: Any) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(te.Linear(16, 32), nn.GELU(), te.LayerNormLinear(32, 32), te.Linear(32, 16))


def gradients(te: Any, model: nn.Module, x: Tensor, **region: Any) -> list[Tensor]:
    model.zero_grad()
    with te.autocast(**{"enabled": True, "recipe": te.recipe.Float8CurrentScaling()} | region):
        y = model(x)
    y.square().sum().backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(map(torch.equal, a, b))


def test_high_is_the_module_with_autocast_off_and_the_region_around_goes_on(te: Any) -> None:
    x = torch.randn(8, 16)
    low, off = gradients(te, net(te), x), gradients(te, net(te), x, enabled=False)
    assert not same(low, off)
    model = net(te)
    report = te.trimtab.adopt_(model)
    assert report.covered == ("0", "2", "3")
    assert same(gradients(te, model, x), low)
    with trimtab.running(model, "high"):
        assert same(gradients(te, model, x), off)
    model[2].switch.planned = True
    mixed = gradients(te, model, x)
    assert not same(mixed, low)
    assert not same(mixed, off)


def test_an_evaluation_without_fp8_stays_without(te: Any) -> None:
    x = torch.randn(8, 16)
    model = net(te)
    expected = model(x)
    te.trimtab.adopt_(model)
    with trimtab.running(model, "high"):
        assert torch.equal(model(x), expected)


def test_a_recompute_repeats_the_forward(te: Any) -> None:
    x = torch.randn(8, 16, requires_grad=True)
    model = net(te)
    te.trimtab.adopt_(model)
    expected = gradients(te, model, x, enabled=False)
    model.zero_grad()
    with trimtab.running(model, "high"):
        y = checkpoint(model, x, use_reentrant=False)
    with te.autocast(enabled=True, recipe=te.recipe.Float8CurrentScaling()):
        y.square().sum().backward()  # low now, and FP8 around the recompute
    assert same([p.grad for p in model.parameters()], expected)


@pytest.mark.parametrize("delayed", [True, False])
def test_under_delayed_scaling_a_high_unit_goes_on_calibrating(te: Any, delayed: bool) -> None:
    recipe = te.recipe.DelayedScaling() if delayed else te.recipe.Float8CurrentScaling()
    model = net(te)
    te.trimtab.adopt_(model)
    with trimtab.running(model, "high"):
        gradients(te, model, torch.full((8, 16), 7.0), recipe=recipe)
    assert model[0].amax_history == ([7.0] if delayed else [])


def test_a_controller_moves_the_units(te: Any) -> None:
    model, notes = net(te), Notes()
    te.trimtab.adopt_(model)
    controller = trimtab.Controller(model, POLICY, total_steps=8, recorder=notes)
    assert controller.names == ("0", "2", "3")
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-2)
    for step in range(8):
        x = torch.randn(8, 16) * (8 if step % 3 == 1 else 1)
        with te.autocast(enabled=True, recipe=te.recipe.Float8CurrentScaling()):
            loss = (model(x) - x).square().mean()
        loss.backward()
        controller.step()
        optimizer.step()
        optimizer.zero_grad()
    assert notes.high.any()
    assert not notes.high.all()


def test_fp8_primary_weights_are_left_alone_and_release_undoes(te: Any) -> None:
    with te.quantized_model_init():
        primary = te.Linear(16, 16)
    model = nn.Sequential(net(te), primary)
    report = te.trimtab.adopt_(model)
    assert report.skipped == {"1": "its primary weights are FP8: there is no high-precision weight"}
    assert te.trimtab.release_(model) == 3
    assert [type(m) for m in model[0].modules()] == [type(m) for m in net(te).modules()]


def test_the_example_learns_with_and_without_its_marked_lines(te: Any, capsys: pytest.CaptureFixture) -> None:
    main, plain = example("transformer_engine_loop.py")
    for run in (main, plain):
        losses = run(30)
        assert losses[-1] < losses[0] - 0.05
    assert "8 of 8 modules switchable in 8 units" in capsys.readouterr().out


def test_without_the_library_the_import_says_how_to_get_it() -> None:
    line = r"pip install --no-build-isolation 'transformer_engine\[pytorch\]'$"
    with without("transformer_engine", OURS), pytest.raises(MissingExtraError, match=line):
        importlib.import_module(OURS)
