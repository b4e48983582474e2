# SPDX-License-Identifier: Apache-2.0
"""Observe: norms equal torch's own over the concatenated gradients for every kind of parameter, with one copy to the
host; clipping equals torch's bit for bit in either order; and a reading is never reused once it is no longer true."""

import copy

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from trimtab import Controller, Policy
from trimtab.control.observe import Observer
from trimtab.control.units import Unit, trainable


def units_of(model: nn.Sequential) -> list[Unit]:
    return [Unit(name, trainable([module])) for name, module in model.named_children()]


def observer(model: nn.Module, units: list[Unit] | None = None) -> Observer:
    return Observer(units_of(model) if units is None else units, trainable([model]))  # type: ignore[arg-type]


def mlp(width: int = 8, layers: int = 3) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))


def backward(model: nn.Module, scale: float = 1.0, width: int = 8) -> None:
    (model(torch.randn(4, width)).square().sum() * scale).backward()


def true_norm(parameters: tuple[nn.Parameter, ...]) -> float:
    grads = [p.grad.to_dense().double().flatten() for p in parameters if p.grad is not None]
    return float(torch.linalg.vector_norm(torch.cat(grads))) if grads else 0.0


def assert_true(reading_of: Observer, units: list[Unit], rtol: float = 1e-6) -> None:
    reading = reading_of.read()
    np.testing.assert_allclose(reading.norm, [true_norm(unit.parameters) for unit in units], rtol=rtol)
    assert reading.total == pytest.approx(true_norm(tuple(reading_of.parameters)), rel=rtol)


# Norms


def test_a_unit_s_norm_is_that_of_its_concatenated_gradients() -> None:
    model = mlp()
    units = [Unit("both", trainable([model[0], model[2]])), Unit("one", trainable([model[1]]))]
    backward(model)
    reader = observer(model, units)
    assert_true(reader, units)
    assert reader.read().norm.dtype == np.float32
    assert reader.read().seen.all()


def test_the_total_holds_parameters_outside_every_unit() -> None:
    model = mlp()
    backward(model)
    reading = observer(model, units_of(model)[:1]).read()
    assert reading.total > float(reading.norm[0])
    assert reading.total == pytest.approx(true_norm(trainable([model])), rel=1e-6)


def test_a_tied_weight_counts_in_each_unit_and_once_in_the_total() -> None:
    model = mlp(layers=2)
    model[1].weight = model[0].weight
    backward(model)
    units = units_of(model)
    assert_true(observer(model, units), units)
    separate = sum(true_norm(unit.parameters) ** 2 for unit in units) ** 0.5
    assert observer(model, units).read().total < separate * 0.99


def test_a_unit_without_a_gradient_is_not_seen() -> None:
    model = mlp()
    model[1].weight.requires_grad_(False)  # half frozen
    for parameter in model[2].parameters():
        parameter.requires_grad_(False)  # wholly frozen
    backward(model)
    units = units_of(model)
    assert_true(observer(model, units), units)
    assert observer(model, units).read().seen.tolist() == [True, True, False]


def test_a_parameter_without_a_gradient_adds_nothing() -> None:
    model = mlp()
    backward(model)
    model[0].bias.grad = None
    for parameter in model[1].parameters():
        parameter.grad = None
    units = units_of(model)
    assert_true(observer(model, units), units)
    assert observer(model, units).read().seen.tolist() == [True, False, True]


def test_before_any_backward_nothing_is_seen() -> None:
    reading = observer(mlp()).read()
    assert not reading.seen.any()
    assert reading.norm.tolist() == [0, 0, 0]
    assert reading.total == 0


def test_a_zero_gradient_is_seen() -> None:
    model = mlp()
    backward(model, scale=0.0)
    reading = observer(model).read()
    assert reading.seen.all()
    assert reading.norm.tolist() == [0, 0, 0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_norms_of_every_float_type_are_read_in_full_precision(dtype: torch.dtype) -> None:
    model = mlp()
    model[1].to(dtype)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    units = [*units_of(model), Unit("mixed", trainable([model]))]
    assert_true(observer(model, units), units)


def test_a_low_precision_gradient_does_not_overflow_its_own_norm() -> None:
    model = nn.Sequential(nn.Linear(64, 64, bias=False).to(torch.float16))
    model[0].weight.grad = torch.full_like(model[0].weight, 60_000.0)
    assert observer(model).read().norm[0] == pytest.approx(60_000.0 * 64, rel=1e-5)


@pytest.mark.parametrize("tokens", [[1, 1, 4], []])
def test_a_sparse_gradient_is_summed_before_its_norm(tokens: list[int]) -> None:
    model = nn.Sequential(nn.Embedding(6, 8, sparse=True), nn.Linear(8, 8))
    model(torch.tensor(tokens, dtype=torch.long)).square().sum().backward()
    assert model[0].weight.grad.is_sparse
    units = units_of(model)
    assert_true(observer(model, units), units)


def test_a_sparse_gradient_is_clipped_with_the_others() -> None:
    model = nn.Sequential(nn.Embedding(6, 8, sparse=True), nn.Linear(8, 8))
    model(torch.tensor([1, 1, 4])).square().sum().backward()
    before = true_norm(trainable([model]))
    reader = observer(model)
    assert float(reader.clip_(before / 4)) == pytest.approx(before, rel=1e-6)
    assert true_norm(trainable([model])) == pytest.approx(before / 4, rel=1e-5)
    assert reader.read().total == pytest.approx(before, rel=1e-6)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_non_finite_gradient_shows_in_its_unit_and_the_total_only(bad: float) -> None:
    model = mlp()
    backward(model)
    model[1].weight.grad[3, 4] = bad
    reading = observer(model).read()
    assert np.isfinite(reading.norm).tolist() == [True, False, True]
    assert not np.isfinite(reading.total)


# One copy to the host


class Waits(TorchDispatchMode):
    """Counts what makes the host wait for the device."""

    def __init__(self) -> None:
        super().__init__()
        self.scalars = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.scalars += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The size of every tensor brought to the host by `.cpu()`, `.tolist()` or `.item()`."""
    found: list[int] = []
    for name in ("cpu", "tolist", "item"):
        original = getattr(Tensor, name)

        def counted(self: Tensor, *args: object, _original=original, **kwargs: object) -> object:  # type: ignore[no-untyped-def]
            found.append(self.numel())
            return _original(self, *args, **kwargs)

        monkeypatch.setattr(Tensor, name, counted)
    return found


def test_a_reading_is_one_copy_whatever_the_number_of_parameters(copies: list[int]) -> None:
    model = mlp(layers=20)
    backward(model)
    reader = observer(model)
    with Waits() as waits:
        reader.read()
    assert copies == [40]
    assert waits.scalars == 0


def test_a_whole_controller_step_with_clipping_is_one_copy(copies: list[int]) -> None:
    model = mlp(layers=10)
    controller = Controller(model, Policy(alpha_warmup=None), mode="observe")
    for order in ("clip", "step"):
        backward(model)
        copies.clear()
        with Waits() as waits:
            if order == "clip":
                controller.clip_grad_norm_(1.0)
                controller.step()
            else:
                controller.step()
                controller.clip_grad_norm_(1.0)
        assert copies == [20]
        assert waits.scalars == 0
        model.zero_grad()


# Clipping


@pytest.mark.parametrize("max_norm", [1e-3, 1.0, 1e9])
@pytest.mark.parametrize("order", ["clip then step", "step then clip"])
def test_clipping_equals_torch_s_bit_for_bit_in_either_order(order: str, max_norm: float) -> None:
    ours = mlp()
    theirs = copy.deepcopy(ours)
    controller = Controller(ours, Policy(alpha_warmup=None), mode="observe")
    for seed in range(5):
        for model in (ours, theirs):
            torch.manual_seed(seed)
            backward(model)
        if order == "step then clip":
            controller.step()
        total = controller.clip_grad_norm_(max_norm)
        if order == "clip then step":
            controller.step()
        assert torch.equal(total, nn.utils.clip_grad_norm_(theirs.parameters(), max_norm))
        for one, two in zip(ours.parameters(), theirs.parameters(), strict=True):
            assert torch.equal(one.grad, two.grad)
        ours.zero_grad()
        theirs.zero_grad()


def test_clipping_mixed_types_brings_the_total_norm_down() -> None:
    model = mlp()
    model[1].to(torch.bfloat16)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    observer(model).clip_(0.5)
    assert true_norm(trainable([model])) == pytest.approx(0.5, rel=1e-2)


def test_clipping_without_any_gradient_is_a_norm_of_zero() -> None:
    assert float(observer(mlp()).clip_(1.0)) == 0


@pytest.mark.parametrize("order", ["clip then step", "step then clip"])
def test_the_norms_that_are_judged_are_those_before_clipping(order: str) -> None:
    model = mlp()
    backward(model)
    reader, units = observer(model), units_of(model)
    wanted = [true_norm(unit.parameters) for unit in units]
    if order == "step then clip":
        np.testing.assert_allclose(reader.read().norm, wanted, rtol=1e-6)
    reader.clip_(0.01)
    np.testing.assert_allclose(reader.read().norm, wanted, rtol=1e-6)


# Stale readings


def clip_like_torch(reader: Observer, model: nn.Module, max_norm: float) -> None:
    twin = copy.deepcopy(model)
    for one, two in zip(model.parameters(), twin.parameters(), strict=True):
        two.grad = None if one.grad is None else one.grad.clone()
    wanted = nn.utils.clip_grad_norm_(twin.parameters(), max_norm)
    assert torch.equal(reader.clip_(max_norm), wanted)
    for one, two in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(one.grad, two.grad)


def test_the_second_of_two_clips_sees_the_first() -> None:
    model = mlp()
    backward(model)
    reader = observer(model)
    before = [true_norm(unit.parameters) for unit in units_of(model)]
    clip_like_torch(reader, model, 1.0)
    clip_like_torch(reader, model, 0.1)
    clip_like_torch(reader, model, 0.1)
    np.testing.assert_allclose(reader.read().norm, before, rtol=1e-6)  # still those before any clipping


@pytest.mark.parametrize("clipped", [False, True])
@pytest.mark.parametrize("set_to_none", [False, True])
def test_a_new_backward_is_read_anew(set_to_none: bool, clipped: bool) -> None:
    model = mlp()
    reader, units = observer(model), units_of(model)
    for scale in (1.0, 5.0, 0.1):
        backward(model, scale)
        assert_true(reader, units)
        if clipped:
            reader.clip_(0.5)
        model.zero_grad(set_to_none=set_to_none)


def test_a_gradient_zeroed_in_place_is_read_as_zero() -> None:
    model = mlp()
    backward(model)
    reader = observer(model)
    reader.read()
    model.zero_grad(set_to_none=False)
    assert reader.read().norm.tolist() == [0, 0, 0]
    assert reader.read().seen.all()


@pytest.mark.parametrize("clipped", [False, True])
def test_an_accumulated_gradient_is_read_anew(clipped: bool) -> None:
    model = mlp()
    reader, units = observer(model), units_of(model)
    backward(model)
    reader.read()
    if clipped:
        reader.clip_(0.1)
    backward(model, 3.0)
    assert_true(reader, units)
    clip_like_torch(reader, model, 0.1)


def test_a_gradient_changed_by_hand_is_read_anew() -> None:
    model = mlp()
    reader, units = observer(model), units_of(model)
    backward(model)
    reader.read()
    model[1].weight.grad.mul_(7)
    assert_true(reader, units)
    model[2].weight.grad = torch.ones_like(model[2].weight)
    assert_true(reader, units)
    model[0].bias.grad = None
    assert_true(reader, units)


def test_a_true_reading_is_reused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = mlp()
    backward(model)
    calls: list[int] = []
    original = torch._foreach_norm
    monkeypatch.setattr(torch, "_foreach_norm", lambda *args: calls.append(1) or original(*args))
    reader = observer(model)
    reader.read()
    reader.clip_(1.0)
    reader.read()
    assert len(calls) == 1


def test_dropped_gradients_are_gone_and_never_read_again() -> None:
    model = mlp()
    backward(model)
    reader = observer(model)
    reader.read()
    reader.drop()
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not reader.read().seen.any()
    assert reader.read().total == 0
