# SPDX-License-Identifier: Apache-2.0
"""The switch: one decision for a forward, its backward and its recompute; and what a module remembers."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from trimtab.errors import TrimtabError
from trimtab.linear import (
    RECIPES,
    Cast,
    Gemm,
    Path,
    Recipe,
    SwitchLinear,
    convert_,
    fake_quant,
    load_path_state,
    path_state,
)

WIDTH = 40


class Net(nn.Module):
    """Two blocks of two linears, optionally checkpointed block by block."""

    def __init__(self, reentrant=None):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 48), nn.GELU(), nn.Linear(48, WIDTH, bias=False)) for _ in range(2)
        )
        self.reentrant = reentrant

    def forward(self, x):
        for block in self.blocks:
            x = x + (block(x) if self.reentrant is None else checkpoint(block, x, use_reentrant=self.reentrant))
        return x


def converted(recipe, *, reentrant=None, seed=0):
    torch.manual_seed(seed)
    model = Net(reentrant)
    convert_(model, recipe)
    return model


def linears(model):
    return [m for m in model.modules() if isinstance(m, SwitchLinear)]


def flip(model, bits):
    for i, module in enumerate(linears(model)):
        module.switch.planned = bool(bits >> i & 1)


def batch(step):
    generator = torch.Generator().manual_seed(100 + step)
    return torch.randn(3, 7, WIDTH, generator=generator) * (1 + step % 3)


def train(model, steps, *, start=0, plan=lambda step: 0, flip_between=False):
    """A few SGD steps under a plan; returns everything that could differ."""
    trace = []
    for step in range(start, start + steps):
        flip(model, plan(step))
        x = batch(step).requires_grad_()
        loss = model(x).square().mean()
        if flip_between:
            flip(model, ~plan(step))
        loss.backward()
        trace += [loss.detach().clone(), x.grad]
        with torch.no_grad():
            for p in model.parameters():
                trace.append(p.grad.clone())
                p -= 0.05 * p.grad
                p.grad = None
    return trace


def same(a, b):
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def same_state(a, b):
    flat = [[(m, k, v) for m, state in s.items() for k, v in state.items()] for s in (a, b)]
    return len(flat[0]) == len(flat[1]) and all(
        x[:2] == y[:2] and (torch.equal(x[2], y[2]) if torch.is_tensor(x[2]) else x[2] == y[2])
        for x, y in zip(*flat, strict=True)
    )


def restless(step):
    """A plan that changes every step."""
    return (0b0000, 0b0101, 0b1110, 0b0011, 0b1111)[step % 5]


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("high", [False, True])
def test_the_backward_takes_the_path_of_its_forward(name, high):
    model, still = converted(name), converted(name)
    results = []
    for m, moves in ((model, True), (still, False)):
        flip(m, 15 if high else 0)
        x = batch(0).requires_grad_()
        loss = m(x).square().mean()
        if moves:
            flip(m, 0 if high else 15)
        loss.backward()
        results.append([x.grad, *(p.grad for p in m.parameters())])
    assert same(*results)


@pytest.mark.parametrize("flip_between", [False, True])
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", RECIPES)
def test_checkpointing_changes_no_bit_while_the_plan_changes_every_step(name, reentrant, flip_between):
    plain, recomputing = converted(name), converted(name, reentrant=reentrant)
    traces = [train(m, 5, plan=restless, flip_between=flip_between) for m in (plain, recomputing)]
    assert same(*traces)
    assert same_state(path_state(plain), path_state(recomputing))


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_repeats_a_stochastic_forward(reentrant):
    noisy = Recipe(Path("noisy", output=Gemm(Cast("e2m1", rounding="stochastic"))), Path.plain())
    plain, recomputing = converted(noisy), converted(noisy, reentrant=reentrant)
    assert same(train(plain, 3), train(recomputing, 3))


@pytest.mark.parametrize("name", RECIPES)
def test_resuming_from_path_state_is_bit_exact(name):
    whole = converted(name)
    trace = train(whole, 6, plan=restless)
    first = converted(name)
    head = train(first, 3, plan=restless)
    buffer = io.BytesIO()
    torch.save({"model": first.state_dict(), "paths": path_state(first)}, buffer)
    buffer.seek(0)
    saved = torch.load(buffer, weights_only=True)
    second = converted(name, seed=1)
    second.load_state_dict(saved["model"])
    load_path_state(second, saved["paths"])
    assert same(trace, head + train(second, 3, start=3, plan=restless))
    assert same_state(path_state(whole), path_state(second))


def test_path_state_is_complete_before_the_first_step_and_is_a_copy():
    model = converted("fp8_delayed")
    before = path_state(model)
    assert list(before) == ["blocks.0.0", "blocks.0.2", "blocks.1.0", "blocks.1.2"]
    train(model, 1)
    after = path_state(model)
    assert {k: set(v) for k, v in before.items()} == {k: set(v) for k, v in after.items()}
    assert before["blocks.0.0"]["input_amax"].shape == (1024,)
    assert before["blocks.0.0"]["input_amax"].sum() == 0 < after["blocks.0.0"]["input_amax"].sum()
    assert after["blocks.0.0"]["grad_output_count"] == 1


def test_loading_a_path_state_that_does_not_fit_names_the_module_and_changes_nothing():
    model = converted("fp8_delayed")
    train(model, 1)
    before, state = path_state(model), path_state(model)
    missing = {k: v for k, v in state.items() if k != "blocks.1.0"}
    short = {**state, "blocks.1.2": {**state["blocks.1.2"], "input_amax": torch.zeros(3)}}
    for bad, message in (
        (missing, r"no entry for blocks\.1\.0"),
        ({**state, "extra": {}}, "it has extra"),
        (short, r"input_amax of 'blocks\.1\.2' must have shape \(1024,\)"),
        (path_state(converted("fp8")), r"'blocks\.0\.0' must have the keys"),
    ):
        with pytest.raises(TrimtabError, match=message):
            load_path_state(model, bad)
    assert same_state(path_state(model), before)


def delayed_linear(history=3, margin=0):
    options = {"delayed": True, "history": history, "margin": margin}
    cast, grad = (Cast(fmt, "tensor", **options) for fmt in ("e4m3", "e5m2"))
    model = nn.Sequential(nn.Linear(8, 6, bias=False))
    convert_(model, Recipe(Path("d", Gemm(cast, cast), Gemm(grad, cast), Gemm(grad, cast)), Path.plain()))
    return model[0]


def test_delayed_scaling_uses_the_largest_of_the_last_steps_and_the_current_amax_at_first():
    module = delayed_linear(history=3)
    sizes = [1.0, 8.0, 0.5, 0.25, 0.125, 4.0, 2.0]
    seen: dict[str, list[torch.Tensor]] = {"x": [], "w": [], "g": []}
    for size in sizes:
        x, g = (torch.randn(5, 8) * size).requires_grad_(), torch.randn(5, 6) * size
        with torch.no_grad():
            module.weight.mul_(size)
        tensors = {"x": x.detach(), "w": module.weight.detach(), "g": g}
        amax = {k: torch.stack(seen[k][-3:]).max() if seen[k] else tensors[k].abs().max() for k in seen}
        xq, wq, gq = (
            fake_quant(tensors[k], "e5m2" if k == "g" else "e4m3", group="tensor", amax=amax[k])
            for k in ("x", "w", "g")
        )
        module.zero_grad()
        y = module(x)
        y.backward(g)
        torch.testing.assert_close(y.detach(), xq @ wq.t(), rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(x.grad, gq @ wq, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(module.weight.grad, gq.t() @ xq, rtol=1e-6, atol=1e-6)
        for k in seen:
            seen[k].append(tensors[k].abs().max())


def test_the_margin_leaves_headroom_above_the_history():
    tight, roomy = delayed_linear(), delayed_linear(margin=3)
    with torch.no_grad():
        for module in (tight, roomy):
            module.weight.copy_(torch.eye(6, 8))
            module(torch.ones(1, 8))
    big = torch.full((1, 8), 8.0)
    assert tight(big).max().item() == pytest.approx(1.0, rel=1e-5)  # saturates at the remembered amax
    assert roomy(big).max().item() == pytest.approx(8.0, rel=1e-5)


def test_a_history_written_in_inference_mode_stays_usable():
    module = delayed_linear()
    with torch.inference_mode():
        module(torch.randn(2, 8))
    module(torch.randn(2, 8)).sum().backward()
    assert module.memory.counts == {"grad_output": 1, "input": 2, "weight": 2}


def test_the_history_is_fed_on_the_high_path_too_forward_and_backward():
    low, high = converted("fp8_delayed"), converted("fp8_delayed")
    train(low, 1)
    train(high, 1, plan=lambda step: 15)
    for name, state in path_state(high).items():
        for operand in ("input", "weight", "grad_output"):
            assert state[f"{operand}_count"] == 1
            expected = path_state(low)[name][f"{operand}_amax"][0]
            torch.testing.assert_close(state[f"{operand}_amax"][0], expected, rtol=0.2, atol=0)


def test_the_high_path_remembers_the_amax_that_autocast_will_see():
    low, high = delayed_linear(), delayed_linear()
    high.load_state_dict(low.state_dict())
    high.switch.planned = True
    x = torch.randn(5, 8)
    for module in (low, high):
        with torch.autocast("cpu", torch.bfloat16):
            module(x).float().sum().backward()
    assert same_state({"": low.memory.state_dict()}, {"": high.memory.state_dict()})


def test_evaluation_feeds_no_history_and_draws_nothing():
    for name in ("fp8_delayed", "mxfp4"):
        model = converted(name)
        train(model, 2)
        before = path_state(model)
        model.eval()
        a, b = model(batch(7)), model(batch(7))
        assert torch.equal(a, b)
        model(batch(7)).sum().backward()
        assert same_state(path_state(model), before)


def test_a_non_finite_step_stays_visible_and_does_not_poison_the_history():
    module = delayed_linear()
    for value in (None, torch.inf, None):
        x = torch.randn(5, 8)
        if value is not None:
            x[2, 3] = value
        y = module(x)
        assert torch.equal(y.isfinite().all(1), x.isfinite().all(1))
        y.sum().backward()
    assert module.memory.histories["input"].isfinite().all()


def test_a_zero_history_means_the_current_amax():
    module = delayed_linear()
    module(torch.zeros(2, 8))
    y = module(torch.full((2, 8), 1e-6))
    assert (y != 0).any()


def test_state_dict_is_the_plain_one_and_loads_both_ways():
    plain, model = Net(), converted("fp8_delayed", seed=3)
    assert list(plain.state_dict()) == list(model.state_dict())
    model.load_state_dict(plain.state_dict())
    assert same(list(model.state_dict().values()), list(plain.state_dict().values()))
    train(model, 1)
    plain.load_state_dict(model.state_dict())
    assert [n for n, _ in plain.named_parameters()] == [n for n, _ in model.named_parameters()]
    assert not list(model.buffers())


@pytest.mark.parametrize("copier", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["deepcopy", "pickle"])
@pytest.mark.parametrize("name", ["fp8_delayed", "mxfp4"])
def test_copies_keep_their_units_together_and_apart_from_the_original(copier, name):
    torch.manual_seed(0)
    model = Net()
    convert_(model, name, unit="block")
    train(model, 2)
    twin = copier(model)
    first, second = (m.switch for m in linears(twin)[:2])
    assert first is second
    assert first.roots == (twin.blocks[0],)
    assert first is not linears(model)[0].switch
    assert all(m._last is None for m in linears(twin))
    assert same(train(model, 2, start=2), train(twin, 2, start=2))


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("shape", [(8,), (1, 8), (3, 8), (2, 3, 8), (2, 2, 2, 8), (0, 8), (2, 0, 8)])
def test_any_leading_shape_works(name, shape):
    model = nn.Sequential(nn.Linear(8, 6))
    convert_(model, name)
    x = torch.randn(shape, requires_grad=True)
    y = model(x)
    y.sum().backward()
    assert y.shape == (*shape[:-1], 6)
    assert x.grad.shape == shape
    assert torch.equal(model[0].bias.grad, torch.full((6,), float(x.numel() // 8)))
    assert model[0].weight.grad.shape == (6, 8)


@pytest.mark.parametrize("name", RECIPES)
def test_gradients_are_computed_only_where_needed(name):
    model = nn.Sequential(nn.Linear(8, 6))
    convert_(model, name)
    x = torch.randn(3, 8, requires_grad=True)
    model.requires_grad_(False)
    model(x).sum().backward()
    assert model[0].weight.grad is None
    model.requires_grad_(True)
    y = model(x.detach())
    y.sum().backward()
    assert model[0].weight.grad is not None
    with torch.no_grad():
        assert not model(x).requires_grad


def test_int8_saves_no_activation_under_a_frozen_weight():
    model = nn.Sequential(nn.Linear(8, 6))
    convert_(model, "int8")
    model.requires_grad_(False)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.shape) or t, lambda t: t):
        model(torch.randn(5, 8, requires_grad=True))
    assert saved == [(6, 8)]


def test_saved4_saves_the_quantized_input():
    model = nn.Sequential(nn.Linear(8, 6))
    convert_(model, "saved4")
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        model(torch.randn(1, 8))
    assert len(saved) == 1
    levels = (saved[0] / saved[0].abs().max() * 6).abs()
    assert all(min(abs(v - g) for g in (0, 0.5, 1, 1.5, 2, 3, 4, 6)) < 1e-5 for v in levels.flatten().tolist())


def test_double_backward_is_refused():
    model = nn.Sequential(nn.Linear(8, 6))
    convert_(model, "fp8")
    x = torch.randn(3, 8, requires_grad=True)
    (grad,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


def test_a_wrong_dtype_or_width_is_named():
    model = nn.Sequential(nn.Linear(8, 6))
    convert_(model, "fp8")
    with pytest.raises(TrimtabError, match=r"input of '0' must be torch\.float32 with last dimension 8"):
        model(torch.randn(3, 8, dtype=torch.bfloat16))
    with pytest.raises(TrimtabError, match="last dimension 8"):
        model(torch.randn(3, 7))


class Spy:
    """A fault that does nothing but count, or scales what it sees."""

    def __init__(self, factor=1.0):
        self.factor, self.seen = factor, []

    def output(self, y):
        self.seen.append("output")
        return y * self.factor

    def grad_output(self, g):
        self.seen.append("grad_output")
        return g * self.factor

    def grad_weight(self, g):
        self.seen.append("grad_weight")
        return g

    def amax(self, operand, amax):
        self.seen.append(operand)
        return amax


@pytest.mark.parametrize("name", RECIPES)
def test_a_fault_touches_the_low_path_only(name):
    results = []
    for fault in (None, Spy(factor=64.0)):
        model = converted(name)
        for module in linears(model):
            module.fault = fault
        results.append(train(model, 2, plan=lambda step: 15))
    assert fault.seen == []
    assert same(*results)
    train(model, 1)
    assert {"output", "grad_output", "grad_weight"} <= set(fault.seen)


@pytest.mark.parametrize("name", RECIPES)
def test_a_fault_that_changes_nothing_changes_nothing(name):
    clean, spied = converted(name), converted(name)
    for module in linears(spied):
        module.fault = Spy()
    assert same(train(clean, 2), train(spied, 2))


def test_without_gradients_only_the_operands_of_the_output_are_quantized():
    model = nn.Sequential(nn.Linear(8, 6))
    convert_(model, "nvfp4")
    model[0].fault = spy = Spy()
    with torch.no_grad():
        model(torch.randn(3, 8))
    assert spy.seen == ["input", "weight", "output"]


def test_an_output_fault_is_unknown_to_the_backward_and_a_gradient_fault_reaches_all_three_gradients():
    class Output(Spy):
        def grad_output(self, g):
            return g

    class Gradient(Spy):
        def output(self, y):
            return y

    results = {}
    for key, fault in (("clean", None), ("output", Output(4.0)), ("gradient", Gradient(4.0))):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 6))
        convert_(model, "fp8")
        model[0].fault = fault
        x = torch.randn(3, 8, requires_grad=True)
        y = model(x)
        y.backward(torch.ones_like(y))
        results[key] = (y.detach(), x.grad, model[0].weight.grad, model[0].bias.grad)
    assert torch.equal(results["output"][0], 4 * results["clean"][0])
    assert same(results["output"][1:], results["clean"][1:])
    assert torch.equal(results["gradient"][0], results["clean"][0])
    assert same(results["gradient"][1:], [4 * t for t in results["clean"][1:]])


@pytest.mark.parametrize("operand", ["input", "weight", "grad_output"])
def test_a_stale_amax_fault_saturates_its_operand(operand):
    class Stale(Spy):
        def amax(self, name, amax):
            return amax / 64 if name == operand else amax

    model = nn.Sequential(nn.Linear(32, 32, bias=False))
    convert_(model, "fp8")
    x, g = torch.randn(16, 32, requires_grad=True), torch.randn(16, 32)
    results = []
    for fault in (None, Stale()):
        model[0].fault = fault
        x.grad = None
        model.zero_grad()
        y = model(x)
        y.backward(g)
        results.append({"output": y.detach(), "grad_input": x.grad, "grad_weight": model[0].weight.grad})
    touched = {"input": {"output", "grad_weight"}, "weight": {"output", "grad_input"}}
    for role, clean in results[0].items():
        ratio = float(results[1][role].norm() / clean.norm())
        if role in touched.get(operand, {"grad_input", "grad_weight"}):
            assert ratio < 0.1
        else:
            assert ratio == 1


def test_a_plain_low_path_still_consults_its_fault():
    model = nn.Sequential(nn.Linear(8, 6))
    convert_(model, Recipe(Path.plain(), Path.plain()))
    x = torch.randn(3, 8)
    clean = model(x)
    model[0].fault = Spy(2.0)
    assert torch.equal(model(x), 2 * clean)


def test_printing_the_model_shows_unit_low_and_high():
    assert "unit='blocks.1.2', low=fp8-hybrid, high=plain" in repr(converted("fp8"))


def test_float64_modules_work():
    model = nn.Sequential(nn.Linear(8, 6)).double()
    convert_(model, "fp8")
    y = model(torch.randn(3, 8, dtype=torch.float64))
    y.sum().backward()
    assert y.dtype == model[0].weight.grad.dtype == torch.float64
