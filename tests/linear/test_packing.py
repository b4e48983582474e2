# SPDX-License-Identifier: Apache-2.0
"""Activations kept in few bits: the numbers of the emulation to the bit, a quarter of the memory, each input once."""

import copy
import gc
import math

import pytest
import torch
import torch._dynamo
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from trimtab.control.gaps import Noise
from trimtab.control.units import find_units
from trimtab.linear import Recipe, convert_, fake_quant, opaque
from trimtab.linear.linear import switch_linears
from trimtab.linear.packing import BITS, pack, unpack
from trimtab.linear.quantize import group_amax

GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, GPU])]


def tokens(seed: int, rows: int, columns: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.exp2(torch.randint(-130, 100, (rows, 1), generator=generator).float())
    return torch.randn(rows, columns, generator=generator) * sizes


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("fmt", BITS)
@given(seed=st.integers(0, 1000), rows=st.integers(1, 5), columns=st.integers(1, 40))
def test_what_comes_back_is_what_the_emulation_keeps(fmt, dtype, device, seed, rows, columns):
    x = tokens(seed, rows, columns).to(device, dtype)
    x[0, 0] = 0
    codes, scale = pack(x, fmt)
    assert codes.dtype == torch.uint8
    assert codes.numel() == rows * (columns if BITS[fmt] == 8 else math.ceil(columns / 2))
    assert torch.equal(unpack(codes, scale, fmt, columns, dtype), fake_quant(x, fmt))


@pytest.mark.parametrize("fmt", BITS)
def test_a_token_that_is_not_finite_comes_back_as_nan_and_the_others_do_not(fmt):
    x = tokens(0, 4, 17)
    x[1, 3], x[2, 4] = math.inf, math.nan
    x[3] = 0
    back = unpack(*pack(x, fmt), fmt, 17, torch.float32)
    assert back[1:3].isnan().all()
    assert torch.equal(back[[0, 3]], fake_quant(x[[0, 3]], fmt))
    remembered = group_amax(x, "token").nan_to_num(posinf=1, nan=1)  # does not know of them
    again = unpack(*pack(x, fmt, remembered), fmt, 17, torch.float32)
    assert torch.equal(again.isnan(), back.isnan())


@pytest.mark.gpu
@GPU
@pytest.mark.parametrize("columns", [1, 7, 48, 2048, 2049, 20_001])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("fmt", BITS)
def test_one_launch_packs_and_unpacks_with_the_bits_of_the_torch_operations(fmt, dtype, columns):
    pytest.importorskip("triton")
    x = torch.randn(9, columns) if dtype == torch.float16 else tokens(2, 9, columns)
    x[0], x[1, 0], x[2, 0], x[3, -1] = 0, -0.0, math.inf, math.nan
    x, fine = x.to(dtype), [0, 1, 4, 5, 6, 7, 8]
    (codes, scale), (found, found_scale) = (pack(t, fmt) for t in (x, x.cuda()))
    assert found.shape == codes.shape
    assert torch.equal(found.cpu()[fine], codes[fine])
    assert torch.equal(found_scale.cpu().nan_to_num(-1), scale.nan_to_num(-1))
    for out in (torch.float32, torch.bfloat16, torch.float16):
        wanted = unpack(codes, scale, fmt, columns, out)
        got = unpack(found, found_scale, fmt, columns, out).cpu()
        assert got[2:4].isnan().all()
        assert torch.equal(got[fine].view(torch.uint8), wanted[fine].view(torch.uint8))


@pytest.mark.gpu
@GPU
def test_packing_and_unpacking_are_one_launch_each():
    pytest.importorskip("triton")
    x = torch.randn(64, 2048, device="cuda", dtype=torch.bfloat16)
    codes, scale = pack(x, "e2m1")
    for call in (lambda: pack(x, "e2m1"), lambda: unpack(codes, scale, "e2m1", 2048, x.dtype)):
        call()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as found:
            call()
            torch.cuda.synchronize()
        launches = [event for event in found.events() if event.device_type == torch.autograd.DeviceType.CUDA]
        assert len(launches) == 1, [event.name for event in launches]


def pair(recipe: str | Recipe = "saved4", device: str = "cpu") -> list[nn.Sequential]:
    """The same model twice: emulated, and with packed activations."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(48, 97), nn.SiLU(), nn.Linear(97, 32)).to(device)
    made = [copy.deepcopy(plain) for _ in range(2)]
    assert convert_(made[0], recipe, backend="emulated").backend == "emulated"
    assert convert_(made[1], recipe, backend="real").backend == "real"
    return made


def run(model: nn.Module, x: Tensor) -> list[Tensor]:
    x = x.clone().requires_grad_()
    y = model(x)
    y.square().sum().backward()
    found = [y.detach(), x.grad, *(p.grad.clone() for p in model.parameters())]
    model.zero_grad()
    return found


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("high", [False, True])
@pytest.mark.parametrize("scope", ["saved", "forward"])
@pytest.mark.parametrize("element", ["float", "int"])
def test_a_packed_model_has_the_bits_of_the_emulated_one(element, scope, high, device):
    emulated, packed = pair(Recipe.named("saved4", scope=scope, element=element), device)
    for model in (emulated, packed):
        for linear in switch_linears(model):
            linear.switch.planned = high
    for a, b in zip(
        *(run(model, tokens(1, 12, 48).sign().to(device) * 0.7) for model in (emulated, packed)), strict=True
    ):
        assert torch.equal(a, b)


def saved_bytes(model: nn.Module, x: Tensor) -> int:
    """Bytes that autograd keeps for the backward of one forward, weights apart, each storage once."""
    mine = {p.untyped_storage().data_ptr() for p in model.parameters()}
    seen: dict[int, int] = {}

    def keep(t: Tensor) -> Tensor:
        seen[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        y = model(x)
    found = sum(size for place, size in seen.items() if place not in mine)
    del y
    return found


class Shared(nn.Module):
    """Three projections of one input."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(256, 64, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.q(x) + self.k(x) + self.v(x)


def test_the_kept_bytes_are_a_quarter_and_a_shared_input_is_kept_once():
    x = torch.randn(8, 128, 256, dtype=torch.bfloat16)
    plain = Shared().bfloat16()
    full = x.numel() * 2
    assert saved_bytes(plain, x) == full
    packed = copy.deepcopy(plain)
    convert_(packed, "saved4", backend="real")
    assert saved_bytes(packed, x) <= 0.30 * full
    for linear in switch_linears(packed):
        linear.switch.planned = True
    assert saved_bytes(packed, x) <= 0.55 * full
    packed.q.switch.planned = False  # one of the sharers in 4 bit: both versions are kept
    assert 0.7 * full < saved_bytes(packed, x) <= 0.85 * full


def test_a_compiled_model_keeps_codes_and_not_the_input():
    torch._dynamo.reset()
    x = torch.randn(64, 256, dtype=torch.bfloat16)
    model = nn.Sequential(nn.Linear(256, 64, bias=False)).bfloat16()
    emulated = copy.deepcopy(model)
    convert_(model, "saved4", backend="real")
    convert_(emulated, "saved4", backend="emulated")
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    assert saved_bytes(compiled, x) < 64  # a number and a token
    y = compiled(x)
    linear = next(switch_linears(model))
    ((call, (codes, _, scale)),) = opaque.calls.of(linear.fqn)
    assert codes.nbytes + scale.nbytes <= 0.30 * x.nbytes
    y.square().sum().backward()
    del call, codes, scale, y
    gc.collect()
    assert not opaque.calls.of(linear.fqn)
    emulated(x).square().sum().backward()
    assert torch.equal(model[0].weight.grad, emulated[0].weight.grad)
    torch._dynamo.reset()


@pytest.fixture
def dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Chain(nn.Module):
    """Inputs of one shape after each other: a compiler writes the later ones where the earlier ones were."""

    def __init__(self) -> None:
        super().__init__()
        self.linears = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for linear in self.linears:
            x = torch.sin(linear(torch.relu(x) + 0.1))
        return x


@pytest.mark.filterwarnings("ignore:.*script_method:DeprecationWarning")  # torch's own, while it compiles
def test_a_buffer_that_inductor_uses_again_is_packed_again(dynamo):
    torch.manual_seed(0)
    model = Chain()
    convert_(model, "saved4", backend="real")
    wanted = run(model, tokens(1, 16, 64).sign())
    for a, b in zip(wanted, run(torch.compile(model, fullgraph=True), tokens(1, 16, 64).sign()), strict=True):
        assert (a - b).norm() <= 0.02 * a.norm()


def test_a_compiled_model_packs_a_shared_input_once_and_none_for_frozen_weights(dynamo):
    x = torch.randn(16, 256)
    model = Shared()
    convert_(model, "saved4", backend="real")
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)

    def codes() -> list[Tensor | None]:
        return [kept[0] for linear in switch_linears(model) for _, kept in opaque.calls.of(linear.fqn)]

    y = compiled(x)
    q, k, v = codes()
    assert q is not None
    assert q is k is v
    del y, q, k, v
    model.q.weight.requires_grad_(False)
    y = compiled(x.requires_grad_())
    assert [c is None for c in codes()] == [True, False, False]
    y.sum().backward()
    assert model.q.weight.grad is None
    assert model.k.weight.grad is not None


def test_a_watch_hears_the_same_of_a_compiled_packed_model(dynamo):
    x, found = torch.randn(4, 48, generator=torch.Generator().manual_seed(1)), []
    for compiles in (False, True):
        _, model = pair()
        sensor = Noise()
        sensor.attach(find_units(model))
        for _ in range(2):
            run(torch.compile(model, backend="aot_eager", fullgraph=True) if compiles else model, x)
        found.append(sensor.read())
    assert (found[0] > 0).all()
    assert torch.equal(*found)


@pytest.mark.parametrize("high", [False, True])
def test_a_compiled_backward_unpacks_what_its_forward_packed_although_the_switch_has_moved(dynamo, high):
    _, model = pair()
    x, found = tokens(1, 12, 48).sign(), []
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for later in (high, not high):
        for linear in switch_linears(model):
            linear.switch.planned = high
        y = compiled(x)
        for linear in switch_linears(model):
            linear.switch.planned = later
        y.square().sum().backward()
        found.append([p.grad.clone() for p in model.parameters()])
        model.zero_grad()
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_packing_in_inference_mode_leaves_nothing_that_training_would_pick_up():
    _, model = pair(Recipe.named("saved4", scope="forward"))
    x = torch.ones(4, 48)
    with torch.inference_mode():
        model(torch.ones(4, 48))
        model[0](x)
    model[0](x).sum().backward()
    assert model[0].weight.grad is not None


def test_a_compiled_packed_model_may_have_delayed_scales_on_its_high_path(dynamo):
    recipe = Recipe(Recipe.named("saved4").low, Recipe.named("fp8_delayed").low)
    model = nn.Sequential(nn.Linear(48, 32))
    convert_(model, recipe, backend="emulated")
    model[0].real = True
    twin, found = copy.deepcopy(model), []
    for either in (model, torch.compile(twin, backend="aot_eager", fullgraph=True)):
        for high in (False, True):
            for linear in switch_linears(either):
                linear.switch.planned = high
            found.append(run(either, torch.ones(4, 48) * (1 + high)))
    for eager, compiled in (found[0::2], found[1::2]):
        assert all(torch.equal(a, b) for a, b in zip(eager, compiled, strict=True))
