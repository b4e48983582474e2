# SPDX-License-Identifier: Apache-2.0
"""The watch: what it reports equals errors computed by hand, on every recipe, with faults and under activation
checkpointing, and it changes not a bit of the training that it looks at."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import trimtab
from trimtab.lab.faults import Faults
from trimtab.linear.linear import SwitchLinear, path_state, switch_linears
from trimtab.linear.recipes import RECIPES

NAMES = ("saved4", "fp8", "fp8_delayed", "fp8_row", "fp8_block", "fp6", "fp4", "int8", "int8_static", "mxfp4", "nvfp4")
ROLES = ("output", "grad_input", "grad_weight")


class Notes:
    """A watch that keeps everything."""

    def __init__(self) -> None:
        self.taken: list[tuple[str, nn.Module, Tensor, Tensor]] = []

    def output(self, module: Any, error_sq: Tensor, reference_sq: Tensor) -> None:
        self.taken.append(("output", module, error_sq, reference_sq))

    def grad_input(self, module: Any, error_sq: Tensor, reference_sq: Tensor) -> None:
        self.taken.append(("grad_input", module, error_sq, reference_sq))

    def grad_weight(self, module: Any, error_sq: Tensor, reference_sq: Tensor) -> None:
        self.taken.append(("grad_weight", module, error_sq, reference_sq))

    def roles(self) -> list[str]:
        return [role for role, *_ in self.taken]


def model_of(recipe: str, depth: int = 3, width: int = 32) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(depth)))
    trimtab.convert_(model, recipe)
    return model


def batch(step: int = 0, width: int = 32) -> Tensor:
    return torch.randn(16, width, generator=torch.Generator().manual_seed(step))


def one_pass(module: SwitchLinear, x: Tensor, g: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Output, gradient passed on and weight gradient of one linear for a given incoming gradient."""
    x = x.clone().requires_grad_()
    module.zero_grad()
    y = module(x)
    y.backward(g)
    assert x.grad is not None
    assert module.weight.grad is not None
    return y.detach(), x.grad, module.weight.grad.clone()


def square(x: Tensor) -> float:
    return float(x.double().square().sum())


def test_every_recipe_is_looked_at() -> None:
    assert set(NAMES) == set(RECIPES)


@pytest.mark.parametrize("fault", [None, "output_scale", "zero_blocks", "stale_scale", "grad_scale", "grad_burst"])
@pytest.mark.parametrize("recipe", NAMES)
def test_reports_are_the_errors_of_the_low_path(recipe: str, fault: str | None) -> None:
    x, g = batch(1), batch(2)
    with trimtab.running(model := model_of(recipe, 1), "high"):
        high = one_pass(model[0], x, g)
    model = model_of(recipe, 1)
    if fault is not None:
        Faults(model, f"*:{fault}:start=1").at(1)
    watch = Notes()
    model[0].watch = watch  # type: ignore[assignment]
    low = one_pass(model[0], x, g)
    assert sorted(watch.roles()) == sorted(ROLES)
    for role, module, error_sq, reference_sq in watch.taken:
        at = ROLES.index(role)
        assert module is model[0]
        assert float(reference_sq) == pytest.approx(square(high[at]), rel=1e-4)
        assert float(error_sq) == pytest.approx(square(low[at] - high[at]), rel=1e-3, abs=1e-9)
    if fault == "output_scale":
        assert float({r: e / n for r, _, e, n in watch.taken}["output"]) > 10


def test_the_high_path_an_evaluation_and_a_module_unwatched_report_nothing() -> None:
    model, watch = model_of("fp8", 1), Notes()
    model[0].watch = watch  # type: ignore[assignment]
    with trimtab.running(model, "high"):
        one_pass(model[0], batch(), batch(1))  # type: ignore[arg-type]
    model.eval()
    model(batch())
    model.train()
    model[0].watch = None  # type: ignore[assignment]
    one_pass(model[0], batch(), batch(1))  # type: ignore[arg-type]
    assert not watch.taken


def train(recipe: str, watched: bool, *, recompute: bool) -> tuple[list[float], list[Tensor], dict, Notes]:
    model, watch = model_of(recipe), Notes()
    faults = Faults(model, "1:grad_scale:start=2; 0:output_scale:start=3")
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    losses, grads = [], []
    for step in range(1, 6):
        faults.at(step)
        for module in switch_linears(model):
            module.watch = watch if watched and step != 4 else None
        x = batch(step)
        y = checkpoint(model, x, use_reentrant=False) if recompute else model(x)
        loss = y.square().mean()
        loss.backward()
        losses.append(loss.item())
        grads += [p.grad.clone() for p in model.parameters() if p.grad is not None]
        optimizer.step()
        optimizer.zero_grad()
    return losses, grads, path_state(model), watch


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("recipe", NAMES)
def test_a_watched_run_is_the_same_run(recipe: str, recompute: bool) -> None:
    one = train(recipe, False, recompute=recompute)
    two = train(recipe, True, recompute=recompute)
    assert one[0] == two[0]
    assert all(torch.equal(a, b) for a, b in zip(one[1], two[1], strict=True))
    for name, state in one[2].items():
        assert all(torch.equal(torch.as_tensor(v), torch.as_tensor(two[2][name][k])) for k, v in state.items())
    assert two[3].roles().count("output") == 3 * 4  # linears times watched steps: a recompute is not counted
    assert two[3].roles().count("grad_weight") == 3 * 4


def test_checkpointing_reports_what_a_plain_run_reports() -> None:
    plain, recomputed = (train("fp8", True, recompute=recompute)[3] for recompute in (False, True))

    def by_module(notes: Notes) -> list[tuple]:
        return sorted((role, module.fqn, float(e), float(r)) for role, module, e, r in notes.taken)  # type: ignore[union-attr]

    assert by_module(plain) == by_module(recomputed)


def test_a_copy_and_a_reverted_model_are_not_watched() -> None:
    model = model_of("fp8")
    model[0].watch = Notes()  # type: ignore[assignment]
    assert copy.deepcopy(model)[0].watch is None
    trimtab.revert_(model)
    assert not hasattr(model[0], "watch")


def test_frozen_weights_and_first_inputs_report_what_exists() -> None:
    model, watch = model_of("fp8", 1), Notes()
    model[0].watch = watch  # type: ignore[assignment]
    model[0].weight.requires_grad_(False)
    x = batch().requires_grad_()
    model(x).sum().backward()
    assert sorted(watch.roles()) == ["grad_input", "output"]
