# SPDX-License-Identifier: Apache-2.0
"""Units: how modules are grouped, which parameters are a unit's signal, where a switch sits (also on frozen linears
under adapters), and that a model that has nothing to watch or to switch is refused with the remedy."""

import logging

import numpy as np
import pytest
import torch
from torch import nn

import trimtab
from trimtab import Controller, Policy, TrimtabError
from trimtab.control.units import Switch, Unit, find_units, group, trainable

PATHS = ["embed", "layers.0.attn.q", "layers.0.mlp.up", "layers.1.attn.q", "layers.1.mlp.up", "head"]
CONSTANT = Policy(alpha_warmup=None, max_high=1.0)


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 4), nn.Linear(4, 4)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attn = nn.LayerNorm(4), nn.Linear(4, 4)
        self.experts = nn.ModuleList(Expert() for _ in range(2))


class Model(nn.Module):
    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(11, 4), nn.Linear(4, 11, bias=False)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        if tied:
            self.head.weight = self.embed.weight


def names(units: tuple[Unit, ...]) -> list[str]:
    return [unit.name for unit in units]


def give_norms(model: nn.Module, units: tuple[Unit, ...], norms: dict[str, float]) -> None:
    """Set gradients so that each unit has the given norm (1 if not named)."""
    for parameter in model.parameters():
        parameter.grad = None
    for unit in units:
        size = sum(p.numel() for p in unit.parameters)
        for p in unit.parameters:
            p.grad = torch.full_like(p, norms.get(unit.name, 1.0) / size**0.5)


# Grouping


def test_each_path_is_its_own_unit() -> None:
    assert group(PATHS, "linear") == {path: [path] for path in PATHS}


def test_the_paths_of_a_block_are_one_unit_and_the_others_stand_alone() -> None:
    grouped = group(PATHS, "block")
    assert list(grouped) == ["embed", "layers.0", "layers.1", "head"]
    assert grouped["layers.1"] == ["layers.1.attn.q", "layers.1.mlp.up"]


def test_the_paths_of_an_expert_are_one_unit_and_the_others_stand_alone() -> None:
    paths = ["l.0.q", "l.0.moe.experts.0.up", "l.0.moe.experts.0.down", "l.0.moe.experts.11.up", "l.0.my_experts.1.up"]
    assert group(paths, "expert") == {
        "l.0.q": ["l.0.q"],
        "l.0.moe.experts.0": ["l.0.moe.experts.0.up", "l.0.moe.experts.0.down"],
        "l.0.moe.experts.11": ["l.0.moe.experts.11.up"],
        "l.0.my_experts.1.up": ["l.0.my_experts.1.up"],
    }


def test_each_pattern_is_one_unit_and_the_first_match_wins() -> None:
    grouped = group(PATHS, ["layers.0.*", "*.mlp.*"])
    assert grouped == {"layers.0.*": ["layers.0.attn.q", "layers.0.mlp.up"], "*.mlp.*": ["layers.1.mlp.up"]}


def test_an_unknown_grouping_is_refused() -> None:
    with pytest.raises(TrimtabError, match=r'"linear", "block", "expert".*\'layer\''):
        group(PATHS, "layer")


# Plain models


def test_a_plain_model_is_watched_per_matrix_without_embedding_and_head() -> None:
    for tied in (False, True):
        found = names(find_units(Model(tied)))
        assert found[:3] == ["layers.0.attn", "layers.0.experts.0.up", "layers.0.experts.0.down"]
        assert len(found) == 10
        assert not {"embed", "head"} & set(found)


def test_a_block_s_signal_holds_all_its_trainable_parameters_norms_included() -> None:
    model = Model()
    units = find_units(model, "block")
    assert names(units) == ["layers.0", "layers.1"]
    assert {id(p) for p in units[0].parameters} == {id(p) for p in model.layers[0].parameters()}


def test_an_expert_s_signal_is_the_expert_s() -> None:
    model = Model()
    units = {unit.name: unit for unit in find_units(model, "expert")}
    assert set(units) == {f"layers.{i}.{x}" for i in range(2) for x in ("attn", "experts.0", "experts.1")}
    expert = model.layers[1].experts[0]
    assert {id(p) for p in units["layers.1.experts.0"].parameters} == {id(p) for p in expert.parameters()}


def test_a_pattern_s_signal_is_what_it_matches() -> None:
    model = Model()
    (unit,) = find_units(model, ["layers.*.attn"])
    wanted = [p for layer in model.layers for p in layer.attn.parameters()]
    assert {id(p) for p in unit.parameters} == {id(p) for p in wanted}


def test_frozen_matrices_form_no_unit() -> None:
    model = Model()
    for parameter in model.layers[0].parameters():
        parameter.requires_grad_(False)
    model.layers[1].attn.weight.requires_grad_(False)
    assert all(name.startswith("layers.1.experts") for name in names(find_units(model)))


def test_a_model_without_a_matrix_is_refused() -> None:
    with pytest.raises(TrimtabError, match="no unit to watch"):
        Controller(nn.Sequential(nn.LayerNorm(4)), CONSTANT, mode="observe")
    with pytest.raises(TrimtabError, match="no unit to watch"):
        Controller(Model(), CONSTANT, mode="observe", units=["nothing.*"])


def test_a_plain_model_cannot_act_and_the_remedy_is_named() -> None:
    with pytest.raises(TrimtabError, match=r"act.*trimtab\.convert_\(model, recipe\).*mode='observe'"):
        Controller(Model(), CONSTANT)


# Switches


def switched(model: nn.Module, *groups: tuple[str, ...]) -> list[Switch]:
    """Put one Switch on each group of modules, as a conversion does."""
    switches = []
    for group_ in groups:
        modules = [model.get_submodule(path) for path in group_]
        switch = Switch("+".join(group_), roots=tuple(modules))
        for module in modules:
            module.switch = switch
        switches.append(switch)
    return switches


def test_modules_that_share_a_switch_are_one_unit() -> None:
    model = Model()
    both = ("layers.0.experts.0.up", "layers.0.experts.0.down")
    one, two = switched(model, both, ("layers.1.attn",))
    units = find_units(model)
    assert names(units) == ["+".join(both), "layers.1.attn"]
    assert [unit.switch for unit in units] == [one, two]
    assert len(units[0].parameters) == 4
    assert units[0].modules == tuple(model.get_submodule(path) for path in both)


def test_a_block_switch_takes_its_signal_from_the_whole_block() -> None:
    model = Model()
    switch = Switch("layers.0", roots=(model.layers[0],))
    model.layers[0].attn.switch = switch
    (unit,) = find_units(model)
    assert unit.parameters == trainable([model.layers[0]])


class LoraLinear(nn.Module):
    """A frozen base linear with a trainable low-rank adapter around it."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(4, 4).requires_grad_(False)
        self.lora_a, self.lora_b = nn.Linear(4, 2, bias=False), nn.Linear(2, 4, bias=False)


def lora_model() -> nn.Module:
    model = nn.Module()
    model.q, model.k = LoraLinear(), LoraLinear()
    model.plain, model.frozen = nn.Linear(4, 4), nn.Linear(4, 4).requires_grad_(False)
    return model


def test_a_frozen_linear_takes_its_signal_from_the_adapters_around_it() -> None:
    model = lora_model()
    switched(model, ("q.base",), ("k.base",), ("plain",))
    q, k, plain = find_units(model)
    assert {id(p) for p in q.parameters} == {id(p) for p in model.q.parameters() if p.requires_grad}
    assert len(k.parameters) == 2
    assert not {id(p) for p in q.parameters} & {id(p) for p in k.parameters}
    assert {id(p) for p in plain.parameters} == {id(p) for p in model.plain.parameters()}


def test_adapters_steer_the_switch_of_the_frozen_linear() -> None:
    model = lora_model()
    q, k = switched(model, ("q.base",), ("k.base",))
    controller = Controller(model, CONSTANT)
    for norms in ({}, {}, {"k.base": 50.0}):
        give_norms(model, controller.units, norms)
        controller.step()
    assert (q.high, k.high) == (False, True)
    assert model.k.base.weight.grad is None


def test_a_frozen_linear_without_adapters_does_not_borrow_another_unit_s_signal(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = lora_model()
    switched(model, ("q.base",), ("frozen",))
    with caplog.at_level(logging.WARNING, "trimtab"):
        controller = Controller(model, CONSTANT)
    assert {unit.name: len(unit.parameters) for unit in controller.units} == {"q.base": 2, "frozen": 0}
    assert "1 of 2 units have no trainable parameter" in caplog.text
    assert "frozen" in caplog.text


# Watching and ready-made units


class Rows:
    """A recorder that keeps what it is told."""

    def __init__(self) -> None:
        self.header: dict = {}
        self.norms: list[np.ndarray] = []

    def open_trace(self, units: list[str], **header: object) -> None:
        self.header = {"units": units, **header}

    def observe(self, step, norms, seen, high, grad_norm, events) -> None:  # type: ignore[no-untyped-def]
        self.norms.append(norms)


@pytest.mark.parametrize("mode", ["act", "observe"])
def test_watched_units_are_recorded_and_never_selected(mode: str) -> None:
    model, rows = Model(), Rows()
    if mode == "act":
        switched(model, ("layers.0.attn",), ("layers.1.attn",))
    units = None if mode == "act" else ["*.attn"]
    controller = Controller(model, CONSTANT, mode=mode, units=units, watch=["embed", "layers.*.norm"], recorder=rows)
    assert rows.header["units"][-3:] == ["embed", "layers.0.norm", "layers.1.norm"]
    assert not any(rows.header["recoverable"][-3:])
    spikes = {"embed": 90.0, "layers.1.norm": 90.0, "layers.1.attn": 40.0, "*.attn": 40.0}
    for norms in ({}, {}, spikes):
        give_norms(model, controller.units, norms)
        plan = controller.step()
    np.testing.assert_allclose(rows.norms[-1][-3:], [90, 1, 90], rtol=1e-6)
    assert plan.high == (("layers.1.attn",) if mode == "act" else ("*.attn",))


def test_a_watch_pattern_that_matches_nothing_new_is_refused() -> None:
    model = Model()
    switched(model, ("layers.0.attn",))
    for pattern in ("nowhere.*", "layers.0.attn"):
        with pytest.raises(TrimtabError, match=rf"watch pattern {pattern!r}".replace("*", r"\*")):
            Controller(model, CONSTANT, watch=[pattern])


def test_ready_made_units_are_taken_as_they_are() -> None:
    model = Model()
    own = [Unit("mine", trainable([model.layers[0]])), Unit("other", trainable([model.layers[1]]))]
    controller = Controller(model, CONSTANT, mode="observe", units=own)
    assert controller.units == tuple(own)


# The switch itself


def test_running_overrides_the_plan_and_gives_it_back() -> None:
    model = Model()
    one, two = switched(model, ("layers.0.attn",), ("layers.1.attn",))
    one.planned = True
    with trimtab.running(model, "low"):
        assert (one.high, two.high) == (False, False)
        with trimtab.running(model, "high"):
            assert (one.high, two.high) == (True, True)
            with trimtab.running(model, "plan"):
                assert (one.high, two.high) == (True, False)
        assert (one.high, two.high) == (False, False)
    assert (one.high, two.high) == (True, False)


def test_running_gives_the_plan_back_after_an_error_too() -> None:
    model = Model()
    (one,) = switched(model, ("layers.0.attn",))
    with pytest.raises(KeyError), trimtab.running(model, "high"):
        raise KeyError
    assert not one.high


def test_running_refuses_an_unknown_path() -> None:
    with pytest.raises(TrimtabError, match="'fast'"), trimtab.running(Model(), "fast"):
        pass
