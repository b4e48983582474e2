# SPDX-License-Identifier: Apache-2.0
"""convert_ and revert_: what is covered, what is left alone and why, and that nothing else changes."""

import copy

import pytest
import torch
from torch import nn

from trimtab.control.units import find_units
from trimtab.errors import NoEffectWarning, TrimtabError
from trimtab.linear import RECIPES, Path, Recipe, SwitchLinear, convert_, path_state, revert_


class Odd(nn.Linear):
    """A subclass that computes something of its own."""


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.norm = nn.LayerNorm(8)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.odd = Odd(8, 8)
        self.head = nn.Linear(8, 11, bias=False)

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.odd(x))


class LoraLinear(nn.Module):
    """The structure that peft gives a linear."""

    def __init__(self, base):
        super().__init__()
        self.base_layer = base.requires_grad_(False)
        self.lora_A = nn.ModuleDict({"default": nn.Linear(base.in_features, 2, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(2, base.out_features, bias=False)})

    def forward(self, x):
        return self.base_layer(x) + self.lora_B["default"](self.lora_A["default"](x))


TOKENS = torch.arange(10).reshape(2, 5)
LINEARS = ("layers.0.up", "layers.0.down", "layers.1.up", "layers.1.down")


def test_the_report_says_what_was_covered_and_why_the_rest_was_not():
    model = Model()
    report = convert_(model, "saved4", filter_fn=lambda module, fqn: fqn != "layers.1.up")
    assert report.covered == ("layers.0.up", "layers.0.down", "layers.1.down")
    assert report.skipped == {
        "layers.1.up": "filter_fn said no",
        "odd": "subclass Odd",
        "head": "output head",
    }
    assert list(report.units) == list(report.covered)
    assert report.backend == "emulated"
    text = str(report)
    assert "3 of 6 linears" in text
    assert "3 units, emulated" in text
    assert "saved4: low saved-e2m1, high saved-e4m3" in text
    assert "skipped 1 (output head): head" in text
    assert all(isinstance(model.get_submodule(path), SwitchLinear) for path in report.covered)
    assert type(model.head) is nn.Linear


class Experts(nn.Module):
    """Experts as slices of one parameter."""

    def __init__(self):
        super().__init__()
        self.gate_up, self.bias = nn.Parameter(torch.zeros(4, 8, 16)), nn.Parameter(torch.zeros(4, 16))


def test_weights_of_three_dimensions_are_listed_and_not_passed_over():
    model = Model()
    model.moe, model.layers[1].mix = nn.Module(), Experts()
    model.moe.experts = Experts()
    model.conv = nn.Conv1d(8, 8, 3)
    report = convert_(model, "fp8")
    assert report.covered == LINEARS
    assert report.observed == {"layers.1.mix.gate_up": 4, "moe.experts.gate_up": 4}
    assert "seen, observe only, 2" in str(report)
    assert "moe.experts.gate_up" in str(report)
    with pytest.warns(NoEffectWarning, match="seen, observe only, 1"):
        convert_(Experts(), "fp8")
    assert "observe only" not in str(convert_(Model(), "fp8"))


def test_paths_are_those_of_the_bare_model():
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    model = Model()
    for i in range(2):
        model.layers[i] = checkpoint_wrapper(model.layers[i])
    report = convert_(torch.compile(model, backend="eager"), "fp8")
    assert report.covered == LINEARS
    assert report.skipped == {"odd": "subclass Odd", "head": "output head"}
    assert list(path_state(model)) == list(LINEARS)


def test_conversion_keeps_modules_weights_hooks_and_references():
    model = Model()
    up, weight, calls = model.layers[0].up, model.layers[0].up.weight, []
    up.register_forward_hook(lambda *_: calls.append(1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    convert_(model, "fp8")
    assert model.layers[0].up is up
    assert up.weight is weight is optimizer.param_groups[0]["params"][1]
    model(TOKENS).sum().backward()
    assert calls == [1]


@pytest.mark.parametrize("name", RECIPES)
def test_revert_restores_type_attributes_and_bits(name):
    model, plain = Model(), Model()
    plain.load_state_dict(model.state_dict())
    keys = {n: set(vars(m)) for n, m in model.named_modules()}
    convert_(model, name)
    model(TOKENS).sum().backward()
    model.zero_grad()
    assert revert_(model) == 4
    assert {n: set(vars(m)) for n, m in model.named_modules()} == keys
    assert all(type(model.get_submodule(path)) is nn.Linear for path in LINEARS)
    for m in (model, plain):
        m(TOKENS).square().sum().backward()
    for a, b in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)
    assert revert_(model) == 0


def test_units_share_one_switch_and_start_low():
    model = Model()
    report = convert_(model, "fp8", unit="block")
    assert report.units == {"layers.0": LINEARS[:2], "layers.1": LINEARS[2:]}
    first = model.layers[0]
    assert first.up.switch is first.down.switch is not model.layers[1].up.switch
    assert first.up.switch.name == "layers.0"
    assert first.up.switch.roots == (first,)
    assert not first.up.switch.high
    assert [unit.name for unit in find_units(model)] == ["layers.0", "layers.1"]


def test_patterns_name_units_and_leave_the_rest():
    report = convert_(Model(), "fp8", unit=["*.up", "layers.0.*"])
    assert report.units == {"*.up": ("layers.0.up", "layers.1.up"), "layers.0.*": ("layers.0.down",)}
    assert report.skipped["layers.1.down"] == "matches no unit pattern"
    assert report.covered == ("layers.0.up", "layers.0.down", "layers.1.up")


@pytest.mark.parametrize("unit", ["linear", "block"])
def test_under_lora_the_base_is_switched_and_the_adapters_are_the_signal(unit):
    model = Model()
    for layer in model.layers:
        layer.up = LoraLinear(layer.up)
    report = convert_(model, "int8", unit=unit, filter_fn=lambda module, fqn: "up" in fqn)
    assert report.covered == ("layers.0.up.base_layer", "layers.1.up.base_layer")
    assert report.skipped["layers.0.up.lora_A.default"] == "LoRA adapter"
    first = model.layers[0]
    switch = first.up.base_layer.switch
    if unit == "linear":
        assert switch.name == "layers.0.up"
        assert switch.roots == (first.up,)
        (unit0, _) = find_units(model)
        assert {id(p) for p in unit0.parameters} == {id(p) for p in first.up.parameters() if p.requires_grad}
        assert len(unit0.parameters) == 2
    else:
        assert switch.name == "layers.0"
        assert switch.roots == (first,)
    model(TOKENS).sum().backward()
    assert first.up.base_layer.weight.grad is None
    assert first.up.lora_B["default"].weight.grad is not None
    assert list(path_state(model)) == ["layers.0.up.base_layer", "layers.1.up.base_layer"]


def test_a_switch_linear_cannot_be_built_by_hand():
    with pytest.raises(TrimtabError, match="use convert_"):
        SwitchLinear(4, 4)


def test_a_shared_module_converts_once():
    linear = nn.Linear(4, 4)
    model = nn.ModuleDict({"a": linear, "b": linear, "c": nn.Linear(4, 4)})
    report = convert_(model, "fp8")
    assert report.covered == ("a", "c")
    assert model["b"].switch is model["a"].switch


def test_the_head_can_be_named():
    model = Model()
    report = convert_(model, "fp8", head="layers.0.up")
    assert report.skipped["layers.0.up"] == "output head"
    assert "head" in report.covered


def test_converting_twice_reports_and_names_stay_unique():
    model = Model()
    convert_(model, "fp8", filter_fn=lambda m, fqn: "up" in fqn)
    report = convert_(model, "fp4")
    assert report.skipped["layers.0.up"] == "already converted"
    assert report.covered == ("layers.0.down", "layers.1.down")
    assert model.layers[0].up.recipe.name == "fp8"
    with pytest.warns(NoEffectWarning, match=r"4 .*already converted"):
        convert_(model, "fp8")
    other = Model()
    convert_(other, "fp8", unit="block", filter_fn=lambda m, fqn: "up" in fqn)
    with pytest.raises(TrimtabError, match=r"already has layers\.0, layers\.1"):
        convert_(other, "fp4", unit="block")
    assert type(other.layers[0].down) is nn.Linear


def test_no_match_warns_with_what_was_seen():
    with pytest.warns(NoEffectWarning, match="no nn.Linear at all"):
        convert_(nn.Sequential(nn.ReLU()), "fp8")
    with pytest.warns(NoEffectWarning, match=r"6 linears, all skipped(.|\n)*filter_fn said no"):
        convert_(Model(), "fp8", filter_fn=lambda m, fqn: False)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"recipe": "fp9"},
            r"saved4, fp8, fp8_delayed, fp8_row, fp8_block, .*, nvfp4.*did you mean",
        ),
        ({"recipe": "fp8", "backend": "real"}, "means real kernels here, and .* cannot run on them"),
        ({"recipe": "fp8", "backend": "cuda"}, "auto, emulated, real"),
        ({"recipe": "fp8", "unit": "layer"}, '"linear", "block", "expert"'),
        ({"recipe": "fp8", "head": "nowhere"}, "path of a module"),
    ],
)
def test_bad_arguments_raise_before_anything_changes(arguments, message):
    model = Model()
    with pytest.raises(TrimtabError, match=message):
        convert_(model, **arguments)
    assert not any(isinstance(m, SwitchLinear) for m in model.modules())


def test_a_model_on_the_meta_device_converts_and_materializes():
    with torch.device("meta"):
        model = Model()
    assert convert_(model, "fp8_delayed").backend == "emulated"
    assert model(torch.zeros(2, 5, dtype=torch.long, device="meta")).shape == (2, 5, 11)
    model = model.to_empty(device="cpu")
    model.load_state_dict(Model().state_dict())
    model(TOKENS).sum().backward()


def test_a_recipe_of_ones_own_works():
    model, plain = Model(), Model()
    plain.load_state_dict(model.state_dict())
    report = convert_(model, Recipe(Path.plain(), Path.plain(), name="mine"))
    assert "mine: low plain, high plain" in str(report)
    assert torch.equal(model(TOKENS), plain(TOKENS))


def test_training_on_the_low_path_still_learns():
    torch.manual_seed(0)
    model = Model()
    convert_(model, "fp8")
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    losses = []
    for _ in range(30):
        loss = nn.functional.cross_entropy(model(TOKENS).flatten(0, 1), TOKENS.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.3 * losses[0]


def test_deepcopy_before_conversion_shares_nothing():
    model = Model()
    twin = copy.deepcopy(model)
    convert_(model, "fp8")
    assert type(twin.layers[0].up) is nn.Linear


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_auto_means_real_kernels_and_names_the_remedy_where_there_is_none():
    assert convert_(nn.Sequential(nn.Linear(32, 64)).cuda(), "fp8").backend == "real"
    model = Model().cuda()
    with pytest.raises(TrimtabError, match='backend="emulated"'):
        convert_(model, "fp4")
    assert convert_(model, "fp4", backend="emulated").backend == "emulated"
    model(TOKENS.cuda()).sum().backward()
