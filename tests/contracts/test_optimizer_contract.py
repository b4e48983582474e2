# SPDX-License-Identifier: Apache-2.0
"""The contract of every optimizer, trimtab's and those it builds from torch's: groups, closures, resuming bit by bit,
gradients that are only read, schedulers, copies, odd shapes. A new optimizer is one row of `ROWS`."""

import copy
import io
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from same import assert_same
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from trimtab.comm.onebit_adam import OneBitAdam
from trimtab.optim.spam import SPAM

STEPS = 16


@dataclass(frozen=True)
class Row:
    """How to build an optimizer, and what it takes."""

    build: Callable[..., Optimizer]
    """(params) -> optimizer; small periods, so that 16 steps see everything it does on a clock."""
    shapes: tuple[tuple[int, ...], ...] = ((6, 8), (5,), (3, 4, 2))
    cuts: tuple[int, ...] = (0, 1, 8)
    """Steps after which a run is saved and resumed."""


def spam(**settings: Any) -> Row:
    # Resets at steps 6 and 12, re-warm-up of two steps, cuts from the second step on.
    def build(params: Any) -> Optimizer:
        return SPAM(params, lr=1e-2, reset_every=6, warmup=2, grace=2, threshold=4.0, weight_decay=0.1, **settings)

    return Row(build, cuts=(0, 1, 5, 6, 7, 11, 12, 15))


def onebit(**settings: Any) -> Row:
    def build(params: Any) -> Optimizer:
        return OneBitAdam(params, lr=1e-2, weight_decay=0.1, **settings)

    return Row(build, cuts=(0, 1, 4, 5, 6, 12))


def muon(params: Any) -> Optimizer:
    return torch.optim.Muon(params, lr=1e-2, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")


ROWS = {
    "spam": spam(),
    "spam foreach": spam(foreach=True),
    "spam reference": spam(reference=True),
    "spam sparse": spam(density=0.5, seed=3),
    "onebit": onebit(warmup=5),
    "onebit foreach": onebit(warmup=5, foreach=True),
    "adamw": Row(lambda params: torch.optim.AdamW(params, lr=1e-2, weight_decay=0.1)),
    "muon": Row(muon, shapes=((6, 8), (8, 6))),
}
every = pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)


def parameters(row: Row, dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    torch.manual_seed(1)
    return [nn.Parameter(torch.randn(shape).to(dtype)) for shape in row.shapes]


def gradient(p: Tensor, t: int, index: int) -> Tensor:
    """The same for the same step and place, with a spike now and then."""
    draw = torch.randn(p.shape, generator=torch.Generator().manual_seed(100 * t + index))
    return (draw * (100 if (t + index) % 4 == 0 else 1)).to(p.dtype)


def drive(ps: list[nn.Parameter], optimizer: Optimizer, steps: range) -> None:
    for t in steps:
        for index, p in enumerate(ps):
            p.grad = gradient(p, t, index)
        optimizer.step()


def through_a_file(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@every
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_run_resumes_bit_by_bit_wherever_it_was_cut(row: Row, dtype: torch.dtype) -> None:
    ps = parameters(row, dtype)
    optimizer = row.build(ps)
    drive(ps, optimizer, range(STEPS))
    for cut in row.cuts:
        first = parameters(row, dtype)
        before = row.build(first)
        drive(first, before, range(cut))
        saved = through_a_file({"p": [p.detach() for p in first], "o": before.state_dict()})
        second = [nn.Parameter(p) for p in saved["p"]]
        after = row.build(second)
        after.load_state_dict(state_dict=saved["o"])
        drive(second, after, range(cut, STEPS))
        assert_same([p.detach() for p in second], [p.detach() for p in ps], f"cut at {cut}")
        assert_same(after.state_dict(), optimizer.state_dict(), f"cut at {cut}")


@every
def test_every_parameter_moves_and_stays_finite(row: Row) -> None:
    ps = parameters(row)
    start = [p.detach().clone() for p in ps]
    drive(ps, row.build(ps), range(STEPS))
    for p, was in zip(ps, start, strict=True):
        assert p.isfinite().all()
        assert not torch.equal(p, was)


@every
def test_gradients_are_only_read(row: Row) -> None:
    ps = parameters(row)
    optimizer = row.build(ps)
    for t in range(STEPS):
        grads = [gradient(p, t, i) for i, p in enumerate(ps)]
        for p, g in zip(ps, grads, strict=True):
            p.grad = g
        kept = [g.clone() for g in grads]
        optimizer.step()
        for p, g, was in zip(ps, grads, kept, strict=True):
            assert p.grad is g
            assert torch.equal(g.view(torch.int32), was.view(torch.int32))


@every
def test_groups_have_settings_of_their_own(row: Row) -> None:
    ps, alone = parameters(row), parameters(row)
    optimizer = row.build([{"params": ps[:1], "lr": 0.0}, {"params": ps[1:], "lr": 3e-2}])
    start = ps[0].detach().clone()
    drive(ps, optimizer, range(STEPS))
    assert torch.equal(ps[0], start)
    same = row.build(alone)
    same.param_groups[0]["lr"] = 3e-2
    drive(alone, same, range(STEPS))
    assert_same([p.detach() for p in ps[1:]], [p.detach() for p in alone[1:]])


@every
def test_a_group_added_later_starts_there_and_disturbs_nobody(row: Row) -> None:
    ps, alone = parameters(row), parameters(row)
    late = nn.Parameter(torch.ones(row.shapes[0]))
    optimizer, same = row.build(ps), row.build(alone)
    drive(ps, optimizer, range(7))
    optimizer.add_param_group({"params": [late], "lr": 0.1})
    for t in range(7, STEPS):
        late.grad = gradient(late, t, 9)
        drive(ps, optimizer, range(t, t + 1))
    drive(alone, same, range(STEPS))
    assert_same([p.detach() for p in ps], [p.detach() for p in alone])
    assert not torch.equal(late, torch.ones_like(late))
    assert optimizer.param_groups[1]["lr"] == 0.1
    assert optimizer.param_groups[1].keys() == optimizer.param_groups[0].keys()


@every
def test_a_closure_runs_once_with_gradients_enabled_and_its_loss_comes_back(row: Row) -> None:
    ps, alone = parameters(row), parameters(row)
    optimizer, same, calls = row.build(ps), row.build(alone), []

    def closure() -> Tensor:
        calls.append(torch.is_grad_enabled())
        optimizer.zero_grad()
        loss = torch.stack([p.square().sum() for p in ps]).sum()
        loss.backward()
        return loss

    with torch.no_grad():
        loss = optimizer.step(closure)  # type: ignore[arg-type]
    assert calls == [True]
    assert loss == sum(p.detach().square().sum() for p in alone)
    for p in alone:
        p.grad = 2 * p.detach()
    same.step()
    assert_same([p.detach() for p in ps], [p.detach() for p in alone])


@every
def test_a_parameter_without_a_gradient_is_passed_over_and_its_clock_stands_still(row: Row) -> None:
    ps, alone = parameters(row), parameters(row)
    optimizer, same = row.build(ps), row.build(alone)
    absent = {2, 3, 6, 11}
    for t in range(STEPS):
        for i, p in enumerate(ps):
            p.grad = None if i == 0 and t in absent else gradient(p, t, i)
        was = ps[0].detach().clone()
        optimizer.step()
        assert torch.equal(ps[0], was) == (t in absent)
    for t in sorted(set(range(STEPS)) - absent):  # its own run, without the steps it missed
        for p in alone[1:]:
            p.grad = None
        alone[0].grad = gradient(alone[0], t, 0)
        same.step()
    assert torch.equal(ps[0], alone[0])


@every
def test_a_step_without_any_gradient_does_nothing(row: Row) -> None:
    ps = parameters(row)
    optimizer = row.build(ps)
    before = copy.deepcopy(optimizer.state_dict())
    optimizer.step()
    assert_same([p.detach() for p in ps], [p.detach() for p in parameters(row)])
    assert_same(optimizer.state_dict(), before)


@every
def test_zero_grad(row: Row) -> None:
    ps = parameters(row)
    optimizer = row.build(ps)
    drive(ps, optimizer, range(1))
    optimizer.zero_grad(set_to_none=False)
    assert all(p.grad is not None and not p.grad.any() for p in ps)
    optimizer.zero_grad()
    assert all(p.grad is None for p in ps)


@every
def test_a_scheduler_moves_the_learning_rate(row: Row) -> None:
    ps, alone = parameters(row), parameters(row)
    optimizer, same = row.build(ps), row.build(alone)
    base = optimizer.param_groups[0]["lr"]
    scheduler = LambdaLR(optimizer, lambda t: 1 / (1 + t))
    for t in range(STEPS):
        drive(ps, optimizer, range(t, t + 1))
        scheduler.step()
        same.param_groups[0]["lr"] = base * (1 / (1 + t))
        drive(alone, same, range(t, t + 1))
    assert_same([p.detach() for p in ps], [p.detach() for p in alone])


@every
def test_a_grad_scaler_that_found_an_inf_skips_the_step(row: Row) -> None:
    ps = parameters(row)
    optimizer, scaler = row.build(ps), torch.amp.GradScaler("cpu", init_scale=4.0)
    for poisoned in (True, False):
        before = [p.detach().clone() for p in ps]
        scaler.scale(torch.stack([p.square().sum() for p in ps]).sum()).backward()
        if poisoned:
            ps[0].grad.view(-1)[0] = torch.inf  # type: ignore[union-attr]
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        assert all(torch.equal(p, was) for p, was in zip(ps, before, strict=True)) == poisoned


@every
@pytest.mark.parametrize(
    "way", [copy.deepcopy, lambda value: pickle.loads(pickle.dumps(value))], ids=["copy", "pickle"]
)
def test_a_copy_goes_on_alone(row: Row, way: Callable[[Any], Any]) -> None:
    ps = parameters(row)
    optimizer = row.build(ps)
    drive(ps, optimizer, range(4))
    twin_ps, twin = way((ps, optimizer))
    was = [p.detach().clone() for p in twin_ps]
    drive(ps, optimizer, range(4, STEPS))
    assert_same([p.detach() for p in twin_ps], was)
    drive(twin_ps, twin, range(4, STEPS))
    assert_same([p.detach() for p in twin_ps], [p.detach() for p in ps])
    assert_same(twin.state_dict(), optimizer.state_dict())


@every
def test_the_layout_of_a_parameter_changes_nothing(row: Row) -> None:
    ps, alone = parameters(row), parameters(row)
    transposed = [nn.Parameter(p.detach().mT.contiguous().mT if p.dim() > 1 else p.detach().clone()) for p in alone]
    sliced = [nn.Parameter(torch.stack([p.detach(), p.detach()], dim=-1)[..., 0]) for p in alone]
    drive(ps, row.build(ps), range(STEPS))
    for others in (transposed, sliced):
        assert not others[0].is_contiguous()
        drive(others, row.build(others), range(STEPS))
        for p, q in zip(ps, others, strict=True):
            torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-6)


@every
def test_scalars_and_empty_parameters(row: Row) -> None:
    if all(len(shape) == 2 for shape in row.shapes):
        pytest.skip("takes matrices only")
    ps = [nn.Parameter(torch.ones(())), nn.Parameter(torch.ones(0, 3)), nn.Parameter(torch.ones(3, 0)),
          nn.Parameter(torch.ones(1, 1)), nn.Parameter(torch.ones(0))]  # fmt: skip
    optimizer = row.build(ps)
    drive(ps, optimizer, range(STEPS))
    assert ps[0] != 1
    assert ps[3] != 1
    optimizer.load_state_dict(through_a_file(optimizer.state_dict()))
    assert {int(state["step"]) for state in optimizer.state.values()} == {STEPS}


@every
def test_it_says_what_it_is(row: Row) -> None:
    optimizer = row.build(parameters(row))
    assert repr(optimizer).startswith(type(optimizer).__name__)
    assert "lr: 0.01" in repr(optimizer)


@every
def test_step_hooks_run(row: Row) -> None:
    ps = parameters(row)
    optimizer, seen = row.build(ps), []
    optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    optimizer.register_step_post_hook(lambda *_: seen.append("after"))
    drive(ps, optimizer, range(1))
    assert seen == ["before", "after"]
