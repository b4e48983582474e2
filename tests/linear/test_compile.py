# SPDX-License-Identifier: Apache-2.0
"""Under torch.compile: the same numbers as without, the path of a backward is that of its forward, and nothing is
ever compiled again because a switch moved."""

import copy
import gc
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import trimtab
from trimtab.control.gaps import Gap
from trimtab.control.units import find_units
from trimtab.errors import TrimtabError
from trimtab.linear import RECIPES, convert_, opaque, real, revert_
from trimtab.linear.linear import SwitchLinear, switch_linears

pytestmark = [  # torch's own, while it compiles
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*script_method:DeprecationWarning"),
]
WIDTH, BLOCKS = 32, 10  # dynamo gives up after 8 variants of one code object


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.silu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self, blocks: int = BLOCKS) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.recompute = False

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)  # type: ignore[assignment]
        return x


def model(recipe: str = "fp8", blocks: int = BLOCKS, unit: str = "linear") -> Model:
    torch.manual_seed(0)
    made = Model(blocks)
    convert_(made, recipe, unit=unit, backend="emulated")
    return made


def compiled(made: Model, **options: Any) -> Model:
    for block in made.blocks:
        block.compile(fullgraph=True, **({"backend": "aot_eager"} | options))
    return made


def x() -> Tensor:
    return torch.randn(3, 4, WIDTH, generator=torch.Generator().manual_seed(1))


def gradients(made: Model) -> list[Tensor]:
    found = [p.grad.clone() for p in made.parameters() if p.grad is not None]
    made.zero_grad()
    return found


def step(made: Model, given: Tensor | None = None) -> list[Tensor]:
    given = (x() if given is None else given).requires_grad_()
    y = made(given)
    y.square().sum().backward()
    assert given.grad is not None
    return [y.detach(), given.grad, *gradients(made)]


def flip(made: Model, generator: torch.Generator) -> None:
    switches = {id(m.switch): m.switch for m in switch_linears(made)}
    for switch, coin in zip(switches.values(), torch.rand(len(switches), generator=generator), strict=True):
        switch.planned = bool(coin < 0.3)


def assert_equal(one: list[Tensor], other: list[Tensor]) -> None:
    assert len(one) == len(other)
    for a, b in zip(one, other, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("high", [False, True])
@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_has_the_same_bits_as_without_compilation(recipe: str, high: bool) -> None:
    eager, made = model(recipe, 2), compiled(model(recipe, 2))
    for both in (eager, made):
        for linear in switch_linears(both):
            linear.switch.planned = high
    for _ in range(2):  # delayed scales and random draws move on alike
        assert_equal(step(eager), step(made))


def test_autocast_and_a_frozen_weight_are_as_without_compilation() -> None:
    results = []
    for made in (model("fp8", 2), compiled(model("fp8", 2))):
        made.blocks[0].up.weight.requires_grad_(False)  # type: ignore[union-attr]
        with torch.autocast("cpu", torch.bfloat16):
            results.append(step(made))
    assert_equal(*results)


@pytest.mark.parametrize("faulty", [False, True])
@pytest.mark.parametrize("recipe", ["fp8", "fp8_delayed", "fp8_row"])
def test_of_real_kernels_the_graph_measures_what_is_scaled_as_a_whole(recipe, faulty, monkeypatch) -> None:
    eager, made = model(recipe, 2), model(recipe, 2)
    for one in (eager, made):
        for linear in switch_linears(one):
            linear.real = True
            linear.fault = Sixteenfold() if faulty else None
    compiled(made)
    step(eager)
    step(made)
    seen: list[tuple[int, ...]] = []
    plain = real._measure
    monkeypatch.setattr(real, "_measure", lambda x, cast: seen.append(tuple(x.shape)) or plain(x, cast))
    wanted = step(eager)
    before, _ = len(seen), seen.clear()
    assert_equal(wanted, step(made))
    weights = [s for s in seen if s in ((WIDTH, 2 * WIDTH), (2 * WIDTH, WIDTH))]
    if recipe == "fp8":
        assert before == 3 * 4  # input, weight and gradient of each
        assert len(seen) == len(weights) + 4 * faulty  # a fault changes the gradient, which is then measured again
        assert len(weights) == 4


class Sixteenfold:
    """A fault of the gradient that arrives."""

    def output(self, y: Tensor) -> Tensor:
        return y

    def grad_output(self, g: Tensor) -> Tensor:
        return 16 * g

    def grad_weight(self, g: Tensor) -> Tensor:
        return g

    def amax(self, operand: str, amax: Tensor) -> Tensor:
        return amax


@pytest.mark.parametrize(("unit", "plans"), [("linear", 1000), ("block", 100)])
def test_a_thousand_random_plans_compile_nothing_again(unit: str, plans: int) -> None:
    made, generator = compiled(model("saved4", unit=unit)), torch.Generator().manual_seed(0)
    made(x()).sum().backward()
    with trimtab.running(made, "high"), torch.no_grad():
        made(x())
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    with torch._dynamo.config.patch(error_on_recompile=True):
        for turn in range(plans):
            flip(made, generator)
            if turn % 50 == 0:  # gradient accumulation, and an evaluation between
                first, second = made(x()), made(-x())
                (first.sum() + second.sum()).backward()
                with trimtab.running(made, "high"), torch.no_grad():
                    made(x())
            else:
                made(x()).sum().backward()
            made.zero_grad()
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs
    assert graphs <= 3  # ten equal blocks share: for an input without gradient, for one with, for an evaluation


def test_a_compiled_step_follows_the_plan_and_matches_the_eager_one() -> None:
    eager, made = model("fp4"), compiled(model("fp4"))
    for turn in range(5):
        for both in (eager, made):
            flip(both, torch.Generator().manual_seed(turn))
        assert_equal(step(eager), step(made))
    high = [m.switch.planned for m in switch_linears(made)]
    assert any(high)
    assert not all(high)


def test_with_inductor_the_numbers_agree_and_nothing_is_compiled_again() -> None:
    eager, made = model("fp8", 2), compiled(model("fp8", 2), backend="inductor")
    step(made)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for turn in range(5):
            for both in (eager, made):
                flip(both, torch.Generator().manual_seed(turn))
            for a, b in zip(step(eager), step(made), strict=True):
                assert (a - b).norm() <= 0.02 * a.norm() + 1e-6  # fused norms round differently, and FP8 sees it


@pytest.mark.parametrize("recompute", [False, True])
def test_a_backward_takes_the_path_of_its_forward_although_the_switch_has_moved(recompute: bool) -> None:
    eager, made = model("fp4", 3), compiled(model("fp4", 3))
    made.recompute = recompute
    wanted = step(eager)
    y = made(x())
    for linear in switch_linears(made):
        linear.switch.planned = True
    y.square().sum().backward()
    assert_equal(gradients(made), wanted[2:])


def test_checkpointing_changes_no_gradient_while_the_plan_changes_every_step() -> None:
    one, other, generators = compiled(model("fp8_delayed", 3)), compiled(model("fp8_delayed", 3)), []
    other.recompute = True
    generators = [torch.Generator().manual_seed(0) for _ in range(2)]
    for _ in range(6):
        for both, generator in zip((one, other), generators, strict=True):
            flip(both, generator)
        assert_equal(step(one), step(other))


def test_a_copy_switches_by_itself_and_a_reverted_model_is_plain() -> None:
    made = compiled(model("fp4", 1))
    for duplicate in (copy.deepcopy(made), pickle.loads(pickle.dumps(model("fp4", 1)))):
        numbers = {int(m.number) for both in (made, duplicate) for m in switch_linears(both)}
        assert len(numbers) == 4
        for linear in switch_linears(duplicate):
            linear.switch.planned = True
        low, high = step(made), step(compiled(duplicate))
        assert not torch.equal(low[0], high[0])
    revert_(made)
    assert all(not hasattr(m, "number") for m in made.modules())


def test_a_watch_hears_the_same_as_without_compilation() -> None:
    found = []
    for made in (model("fp8", 2), compiled(model("fp8", 2))):
        sensor = Gap(units_per_step=4)
        sensor.attach(find_units(made))
        step(made)
        made(x()).sum().backward()
        found.append(sensor.read())
    assert torch.isfinite(found[0]).any()
    assert torch.equal(found[0].nan_to_num(), found[1].nan_to_num())


def test_a_fault_reaches_a_compiled_model() -> None:
    from trimtab.lab.faults import Faults

    made = compiled(model("fp8", 2))
    before = step(made)
    faults = Faults(made, "blocks.0.up:output_scale:start=1,size=8")
    faults.at(1)
    assert not torch.equal(before[0], step(made)[0])


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_call_is_forgotten_with_its_graph(backend: str) -> None:
    made = compiled(model("fp8", 1), backend=backend)
    linears = list(switch_linears(made))

    def remembered() -> list[int]:
        gc.collect()
        return [len(opaque.calls.of(linear.fqn)) for linear in linears]

    first, second = made(x()), made(x())
    assert remembered() == [2, 2]
    first.sum().backward()
    assert remembered() == [1, 1]
    del second  # dropped without a backward
    assert remembered() == [0, 0]
    with torch.no_grad():
        made(x())
    assert remembered() == [0, 0]


def test_a_wrong_input_is_refused_by_name() -> None:
    made = compiled(model("fp8", 1))
    linear = made.blocks[0].up  # type: ignore[union-attr]
    assert isinstance(linear, SwitchLinear)
    with pytest.raises(Exception, match=r"the input of 'blocks\.0\.up' must be"):
        torch.compile(linear, backend="aot_eager", fullgraph=True)(torch.randn(2, WIDTH + 1))


@pytest.mark.parametrize("change", ["revert", "delete"])
@pytest.mark.parametrize("recipe", ["fp8", "saved4"])
def test_a_backward_does_not_need_its_modules_any_more(recipe: str, change: str) -> None:
    eager, made = model(recipe, 1), model(recipe, 1)
    for linear in [*switch_linears(eager), *switch_linears(made)]:
        linear.real = recipe == "saved4"
    wanted, parameters = step(eager)[2:], list(made.parameters())
    y = torch.compile(made, backend="aot_eager", fullgraph=True)(x())
    if change == "revert":
        revert_(made)
    else:
        del made, linear
        torch._dynamo.reset()
        gc.collect()
    y.square().sum().backward()
    assert_equal([p.grad for p in parameters], wanted)  # type: ignore[misc]


def test_hooks_that_copy_the_token_are_refused_in_backward() -> None:
    made = compiled(model("fp8", 1))
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t):
        y = made(x())
    with pytest.raises(TrimtabError, match="hooks copy or offload floating-point tensors only"):
        y.sum().backward()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone() if t.is_floating_point() else t, lambda t: t):
        y = made(x())
    y.square().sum().backward()
    assert_equal(gradients(made), step(model("fp8", 1))[2:])


@pytest.mark.parametrize("strict", [False, True])
def test_an_export_is_refused_by_name(strict: bool) -> None:
    with pytest.raises(Exception, match=r"'blocks\.0\.up' cannot be exported"):
        torch.export.export(model("fp8", 1), (x(),), strict=strict)


def test_a_model_made_on_the_meta_device_compiles_when_it_has_weights() -> None:
    eager = model("fp8", 1)
    with torch.device("meta"):
        made = Model(1)
        convert_(made, "fp8")
    made.to_empty(device="cpu").load_state_dict(eager.state_dict())
    assert_equal(step(compiled(made)), step(eager))


def test_a_linear_that_is_compiled_by_itself_can_be_pickled() -> None:
    made = model("fp8", 1)
    for linear in switch_linears(made):
        linear.compile(backend="aot_eager")
    wanted = step(made)
    assert_equal(step(pickle.loads(pickle.dumps(made))), wanted)


@pytest.mark.skipif(not hasattr(torch.Tag, "cudagraph_unsafe"), reason="this torch has no such tag")
def test_no_operator_may_be_recorded_in_a_cuda_graph() -> None:
    names = ("linear_forward", "linear_backward", "linear_saving_forward", "linear_saving_backward", "mark")
    for name in names:  # what they look up would be frozen
        assert torch.Tag.cudagraph_unsafe in getattr(torch.ops.trimtab, name).default.tags
