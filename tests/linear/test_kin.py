# SPDX-License-Identifier: Apache-2.0
"""Weights that are cast together: the numbers of single casts, whoever is high, missing, or changed meanwhile."""

import copy
import gc
import subprocess
import sys
import weakref
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from trimtab.linear import convert_, real, revert_
from trimtab.linear.kin import MOST, SOON, Kin, introduce
from trimtab.linear.linear import switch_linears

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 9)
DEVICES = [
    "cpu",
    pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not HOPPER, reason="needs FP8 units")]),
]
NAMES = ("q", "k", "v", "down")
WIDTH = 64


class Block(nn.Module):
    """Three linears on one input, and one on what they make."""

    def __init__(self) -> None:
        super().__init__()
        for name in NAMES:
            setattr(self, name, nn.Linear(WIDTH, WIDTH, bias=False))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.q(x) * self.k(x) + self.v(x))


def model(
    device: str = "cpu", *, kin: bool = True, blocks: int = 2, recipe: str = "fp8", seed: int = 0
) -> nn.Sequential:
    """Some blocks on real kernels, with kin or without."""
    torch.manual_seed(seed)
    made = nn.Sequential(*[Block() for _ in range(blocks)]).to(device, torch.bfloat16)
    convert_(made, recipe, backend="emulated")
    linears = list(switch_linears(made))
    for linear in linears:
        linear.real = True
    if kin:
        introduce(linears)
    return made


def data(device: str = "cpu", seed: int = 1) -> Tensor:
    return torch.randn(48, WIDTH, generator=torch.Generator().manual_seed(seed)).to(device, torch.bfloat16)


def step(made: nn.Module, x: Tensor, *, again: bool = False) -> list[Tensor]:
    """Output and gradients."""
    y = checkpoint(made, x, use_reentrant=False) if again else made(x)
    y.float().square().sum().backward()
    found = [y.detach(), *(p.grad for p in made.parameters())]
    for parameter in made.parameters():
        parameter.grad = None
    return found


@pytest.fixture
def casts(monkeypatch) -> list[int]:
    """How many weights each cast was of."""
    seen: list[int] = []
    plain = real.together
    monkeypatch.setattr(real, "together", lambda weights, cast: seen.append(len(weights)) or plain(weights, cast))
    return seen


def high(made: nn.Module, *names: str) -> None:
    for linear in switch_linears(made):
        linear.switch.planned = linear.switch.name in names


def assert_same(got: list[Tensor], wanted: list[Tensor]) -> None:
    for one, other in zip(got, wanted, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("device", DEVICES)
def test_a_block_is_cast_at_once_and_has_the_numbers_of_single_casts(device, again, casts) -> None:
    ours, plain = model(device), model(device, kin=False)
    for seed in range(3):
        assert_same(step(ours, data(device, seed), again=again), step(plain, data(device, seed), again=again))
        with torch.no_grad():
            for one in (ours, plain):
                for parameter in one.parameters():
                    parameter.mul_(1.5)
    assert casts == [4] * (2 * 3 * (2 if again else 1))


@pytest.mark.parametrize("device", DEVICES)
def test_who_is_high_is_not_cast(device, casts) -> None:
    ours, plain = model(device), model(device, kin=False)
    for names in (["0.q"], ["0.q", "0.v", "1.down"], [f"1.{name}" for name in NAMES], []):
        for one in (ours, plain):
            high(one, *names)
        casts.clear()
        assert_same(step(ours, data(device)), step(plain, data(device)))
        low = [4 - sum(name.startswith(f"{block}.") for name in names) for block in range(2)]
        assert casts == [count for count in low if count]


def test_what_changes_past_its_version_is_seen_in_the_next_pass(casts) -> None:
    ours, plain = model(), model(kin=False)
    for factor in (1.0, 8.0, 0.25):
        for one in (ours, plain):
            for parameter in one.parameters():
                parameter.data.mul_(factor)
        assert_same(step(ours, data()), step(plain, data()))
    assert casts == [4] * 6


def test_a_change_between_two_members_is_seen(casts) -> None:
    block = model(blocks=1)[0]
    x = data()
    with torch.no_grad():
        block.q(x)
        block.k.weight.mul_(4)
        changed = block.k(x)
        alone = model(blocks=1, kin=False)[0]
        alone.k.weight.mul_(4)
        assert torch.equal(changed, alone.k(x))
    assert casts[0] == 4


def test_for_one_that_is_not_called_nothing_is_made_until_it_is(casts) -> None:
    block = model(blocks=1)[0]
    x = data()

    def call(*names: str) -> None:
        casts.clear()
        with torch.no_grad():
            for name in names:
                getattr(block, name)(x)

    call("q", "k", "down")
    assert casts == [4]
    call("q", "k", "down")
    assert casts == [3]
    assert not block.q.kin._made  # nothing holds a weight in 8 bits
    call("q", "k", "v", "down")
    assert casts == [3, 1]
    call("q", "k", "v", "down")
    assert casts == [4]


def test_what_was_left_behind_is_too_old_soon(casts) -> None:
    ours, plain = model(blocks=3), model(blocks=3, kin=False)
    with torch.no_grad():
        ours[0].q(data())  # three are left
        for _ in range(SOON + 1):
            ours[1:](data())
        for one in (ours, plain):
            one[0].k.weight.data.mul_(3)
        assert torch.equal(ours[0].k(data()), plain[0].k(data()))


def test_one_without_a_weight_of_its_own_casts_for_itself(casts) -> None:
    ours, plain = model(), model(kin=False)
    for one in (ours, plain):
        one[0].v.weight = nn.Parameter(one[0].v.weight.data.float())  # to be cast by autocast
        one[0].k.fault = Doubled()
    with torch.autocast("cpu", torch.bfloat16):
        assert_same(step(ours, data()), step(plain, data()))
    assert casts == [2, 4]  # q and down; the second block


class Doubled:
    """A fault of the scale."""

    def output(self, y: Tensor) -> Tensor:
        return y

    grad_output = grad_weight = output

    def amax(self, operand: str, amax: Tensor) -> Tensor:
        return 2 * amax


def test_inference_mode_leaves_nothing_for_training() -> None:
    ours, plain = model(blocks=1), model(blocks=1, kin=False)
    with torch.inference_mode():
        ours[0].q(data())
    assert_same(step(ours, data()), step(plain, data()))
    with torch.inference_mode():
        assert torch.equal(ours(data()), plain(data()))


def test_copies_and_reverted_linears_have_no_kin(casts) -> None:
    ours = model()
    copied = copy.deepcopy(ours)
    assert all(linear.kin is None for linear in switch_linears(copied))
    assert_same(step(copied, data()), step(ours, data()))
    assert casts == [4, 4]
    revert_(ours[0].k)
    casts.clear()
    step(ours, data())
    assert casts == [3, 4]
    revert_(ours)
    assert not hasattr(ours[0].q, "kin")


def test_a_family_keeps_no_module_alive() -> None:
    ours = model()
    step(ours, data())
    ref = weakref.ref(ours[0].q)
    del ours
    gc.collect()
    assert ref() is None


def test_experts_are_kin_among_themselves_and_families_fit_a_launch() -> None:
    mixture = nn.ModuleDict({"experts": nn.ModuleList(Block() for _ in range(3))})
    made = nn.ModuleList([nn.ModuleDict({"mlp": mixture, "wide": nn.Linear(WIDTH, WIDTH)})])
    convert_(made, "fp8", backend="emulated")
    linears = {linear.fqn: linear for linear in switch_linears(made)}
    for linear in linears.values():
        linear.real = True
    introduce(list(linears.values()))
    families = {id(linears[f"0.mlp.experts.{i}.q"].kin) for i in range(3)}
    assert len(families) == 3
    assert linears["0.mlp.experts.1.q"].kin is linears["0.mlp.experts.1.down"].kin
    assert id(linears["0.wide"].kin) not in families
    many = nn.ModuleList([nn.ModuleDict({f"m{i}": nn.Linear(WIDTH, WIDTH) for i in range(MOST + 3)})])
    convert_(many, "fp8", backend="emulated")
    found = list(switch_linears(many))
    for linear in found:
        linear.real = True
    introduce(found)
    assert sorted(len(kin._linears) for kin in {id(one.kin): one.kin for one in found}.values()) == [3, MOST]


@pytest.mark.parametrize("recipe", ["fp8_delayed", "fp8_row", "fp8_block", "int8", "saved4"])
def test_other_recipes_have_none(recipe) -> None:
    assert all(linear.kin is None for linear in switch_linears(model(recipe=recipe)))


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(["call", "call", "call", "flip", "change", "pass"]), st.integers(0, len(NAMES) - 1)),
        max_size=24,
    )
)
def test_whatever_happens_a_linear_multiplies_by_its_weight(events) -> None:
    ours, plain = model(blocks=1)[0], model(blocks=1, kin=False)[0]
    x = data()
    with torch.no_grad():
        for what, which in [*events, ("pass", 0)]:
            name = NAMES[which]
            pair = [getattr(one, name) for one in (ours, plain)]
            if what == "flip":
                for linear in pair:
                    linear.switch.planned = not linear.switch.planned
            elif what == "change":
                for linear in pair:
                    linear.weight.mul_(-2)
            elif what == "call":
                assert torch.equal(pair[0](x), pair[1](x))
            else:
                assert torch.equal(ours(x), plain(x))


@pytest.mark.gpu
@pytest.mark.skipif(not HOPPER, reason="needs FP8 units")
@pytest.mark.parametrize("bad", [None, float("nan"), float("inf")])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("fmt", ["e4m3", "e5m2"])
@pytest.mark.parametrize("count", [2, 7, 8])
def test_one_launch_has_the_bits_of_single_casts(count, fmt, dtype, bad) -> None:
    from trimtab.linear import kernels
    from trimtab.linear.paths import Cast

    torch.manual_seed(count)
    weights = [(3.0**i * torch.randn(64 * (1 + i % 3), 64 * (1 + i % 2))).to("cuda", dtype) for i in range(count)]
    weights[1].zero_()
    if bad is not None:
        weights[0][5, 3] = bad
    cast = Cast(fmt, "tensor")
    assert kernels.takes_together(weights)
    for _ in range(2):  # the second time without Triton's search
        made = real.together(weights, cast)
        for weight, (operand, amax) in zip(weights, made, strict=True):
            ((wanted, wanted_amax),) = real.together([weight], cast)
            assert torch.equal(amax, wanted_amax) or (amax.isnan() and wanted_amax.isnan())
            assert torch.equal(operand.scale, wanted.scale) or (operand.scale.isnan() and wanted.scale.isnan())
            assert operand.data.shape == wanted.data.shape
            assert operand.scale.data_ptr() % 16 == operand.data.data_ptr() % 16 == 0  # or the product refuses them
            assert torch.equal(operand.data.view(torch.uint8), wanted.data.view(torch.uint8))


@pytest.mark.gpu
@pytest.mark.skipif(not HOPPER, reason="needs FP8 units")
def test_one_launch_casts_large_weights_too() -> None:
    weights = [torch.randn(2048, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(7)]
    from trimtab.linear import kernels
    from trimtab.linear.paths import Cast

    assert kernels.TOGETHER == MOST
    for weight, (operand, _) in zip(weights, real.together(weights, Cast("e4m3", "tensor")), strict=True):
        ((wanted, _),) = real.together([weight], Cast("e4m3", "tensor"))
        assert torch.equal(operand.data.view(torch.uint8), wanted.data.view(torch.uint8))


def test_a_turn_is_counted_for_those_who_have_kin() -> None:
    before = Kin.turns
    model(blocks=2, kin=False)(data())
    assert Kin.turns == before
    model(blocks=2)(data())
    assert Kin.turns == before + 8


@pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor:UserWarning"
)  # the compiler looks at what a block is given
def test_compiled_code_finds_the_same_and_no_plan_compiles_again(casts) -> None:
    ours, plain = model(), model(kin=False)
    for block in ours:
        block.compile(fullgraph=True, backend="aot_eager")
    step(ours, data())
    generator = torch.Generator().manual_seed(0)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for turn in range(12):
            names = [f"{b}.{n}" for b in range(2) for n in NAMES if torch.rand((), generator=generator) < 0.3]
            casts.clear()
            for one in (ours, plain):
                high(one, *names)
                with torch.no_grad():
                    for parameter in one.parameters():
                        parameter.mul_(1.1)
            assert_same(step(ours, data(seed=turn)), step(plain, data(seed=turn)))
            low = [4 - sum(name.startswith(f"{block}.") for name in names) for block in range(2)]
            assert casts == [count for count in low if count]


SHARDED = """
import sys
sys.path.insert(0, sys.argv[1])
import torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from test_kin import data, model
from trimtab.linear import real

dist.init_process_group("gloo", store=dist.FileStore(sys.argv[2], 1), rank=0, world_size=1)
mesh, seen = init_device_mesh("cpu", (1,)), []
together = real.together
real.together = lambda weights, cast: seen.append(len(weights)) or together(weights, cast)
made = [model(kin=True), model(kin=False)]
for one in made:
    for block in one:
        fully_shard(block, mesh=mesh)
    fully_shard(one, mesh=mesh)
optimizers = [torch.optim.SGD(one.parameters(), lr=0.5) for one in made]
for turn in range(4):
    found = []
    for one, optimizer in zip(made, optimizers):
        y = one(data(seed=turn))
        y.float().square().mean().backward()
        found.append([y.detach(), *(p.grad.full_tensor() for p in one.parameters())])
        optimizer.step()
        optimizer.zero_grad()
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True)), turn
assert seen == [4] * 8, seen
dist.destroy_process_group()
"""


def test_sharded_weights_are_cast_as_they_are_gathered(tmp_path) -> None:
    """FSDP2 writes gathered weights past their versions, and frees them after the block."""
    command = [sys.executable, "-c", SHARDED, str(Path(__file__).parent), str(tmp_path / "store")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
