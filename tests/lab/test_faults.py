# SPDX-License-Identifier: Apache-2.0
"""Fault windows: each kind does what it says, in its window, on its unit, on the low path alone."""

import io
import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from trimtab.control.units import Switch
from trimtab.errors import TrimtabError
from trimtab.lab.damage import flipped, spiked, zeroed
from trimtab.lab.faults import KINDS, Faults, FaultWindow, parse_faults
from trimtab.lab.model import Decoder, ModelConfig
from trimtab.linear.convert import convert_
from trimtab.linear.recipes import RECIPES

LIMIT = 448.0


class _Low(torch.autograd.Function):
    """A low path with a scale: values are clamped to the amax the scale was made from."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, fault: Any) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.fault = fault
        y = _saturated("input", x, fault) @ _saturated("weight", weight, fault).T
        return y if fault is None else fault.output(y)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight = ctx.saved_tensors
        g = grads[0] if ctx.fault is None else ctx.fault.grad_output(grads[0])
        g = _saturated("grad_output", g, ctx.fault)
        grad_weight = g.flatten(0, -2).T @ x.flatten(0, -2)
        return g @ weight, grad_weight if ctx.fault is None else ctx.fault.grad_weight(grad_weight), None


def _saturated(operand: str, x: Tensor, fault: Any) -> Tensor:
    amax = x.abs().max()
    amax = amax if fault is None else fault.amax(operand, amax)
    scale = LIMIT / amax
    return (x * scale).clamp(-LIMIT, LIMIT) / scale


class StandIn(nn.Linear):
    """A switchable linear that follows the protocol of the real one."""

    def __init__(self, switch: Switch, num_in: int, num_out: int, fqn: str) -> None:
        super().__init__(num_in, num_out, bias=False)
        self.switch, self.fqn = switch, fqn
        self.fault: Any = None

    def forward(self, x: Tensor) -> Tensor:
        if self.switch.high:
            return super().forward(x)
        return _Low.apply(x, self.weight, self.fault)


def _model(units: tuple[str, ...] = ("0", "1")) -> nn.Sequential:
    return nn.Sequential(StandIn(Switch(units[0]), 8, 64, "0"), StandIn(Switch(units[1]), 64, 48, "1"))


def _run(model: nn.Module, *, scale: float = 1.0) -> dict[str, Tensor]:
    """Forward and backward on fixed data; returns the output and all gradients."""
    x = scale * torch.randn(3, 5, 8, generator=torch.Generator().manual_seed(5))
    x.requires_grad_()
    model.zero_grad()
    y = model(x)
    (y * torch.linspace(-1, 1, y.numel()).view_as(y)).sum().backward()
    assert x.grad is not None
    found = {"y": y.detach(), "x": x.grad}
    return found | {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def _same(a: dict[str, Tensor], b: dict[str, Tensor]) -> dict[str, bool]:
    return {name: torch.equal(a[name], b[name]) for name in a}


# When and where


@pytest.mark.parametrize("kind", KINDS)
def test_a_fault_acts_in_its_window_on_its_unit_on_the_low_path_alone(kind: str) -> None:
    model = _model()
    plain = nn.Sequential(nn.Linear(8, 64, bias=False), nn.Linear(64, 48, bias=False))
    plain.load_state_dict(model.state_dict())
    clean, high = _run(model), _run(plain)
    faults = Faults(model, f"1:{kind}:start=3,width=2{',size=4' if kind == 'stuck_scale' else ''}")
    for step in range(1, 7):
        faults.at(step)
        assert [m.fault is not None for m in model] == [False, step in (3, 4)]
        assert faults.active(step) == ({"1"} if step in (3, 4) else set())
        assert all(_same(clean, _run(model)).values()) == (step not in (3, 4))
        for module in model:
            module.switch.forced = True
        assert all(_same(high, _run(model)).values())
        for module in model:
            module.switch.forced = None


def test_a_fault_on_one_unit_leaves_what_lies_before_it_in_the_forward() -> None:
    model = _model()
    clean = _run(model)
    faults = Faults(model, "1:output_scale:start=1,size=4")
    faults.at(1)
    hit = _run(model)
    assert _same(clean, hit) == {"y": False, "x": True, "0.weight": True, "1.weight": True}
    torch.testing.assert_close(hit["y"], 4 * clean["y"])


def test_a_gradient_fault_spares_the_forward_and_reaches_every_gradient_behind_it() -> None:
    model = _model()
    clean = _run(model)
    faults = Faults(model, "1:grad_scale:start=1,size=64")
    faults.at(1)
    hit = _run(model)
    assert torch.equal(hit["y"], clean["y"])
    for name in ("1.weight", "0.weight", "x"):
        torch.testing.assert_close(hit[name], 64 * clean[name], rtol=1e-4, atol=1e-4)


def test_repeated_windows_open_at_each_start() -> None:
    faults = Faults(_model(), "0:grad_scale:start=5,width=2,every=10,count=3")
    assert [step for step in range(1, 60) if faults.active(step)] == [5, 6, 15, 16, 25, 26]
    assert [(w.start, w.width, w.every, w.count) for w in faults.windows] == [
        (start, 2, None, None) for start in (5, 15, 25)
    ]
    assert FaultWindow("0", "nan", 5, width=2, every=10, count=3).contains(16)


def test_two_windows_on_one_unit_compound() -> None:
    model = _model()
    clean = _run(model)
    faults = Faults(model, "1:output_scale:start=1,width=3,size=4; *:output_scale:start=2,size=0.5")
    faults.at(2)
    torch.testing.assert_close(_run(model)["y"], clean["y"] * 4 * 0.5 * 0.5)
    assert faults.active(2) == {"0", "1"}
    faults.at(3)
    torch.testing.assert_close(_run(model)["y"], clean["y"] * 4)


def test_disarm_takes_every_fault_off_until_the_next_step() -> None:
    model = _model()
    faults = Faults(model, "*:nan:start=1,width=9")
    faults.at(2)
    faults.disarm()
    assert all(m.fault is None for m in model)
    faults.at(2)
    assert all(m.fault is not None for m in model)


# What each kind does


def _armed(kind: str, *, size: float | None = None, seed: int = 0) -> Any:
    model = _model()
    faults = Faults(model, FaultWindow("1", kind, 1, size=size, seed=seed))
    faults.at(1)
    return model[1].fault


def test_stale_scales_saturate_the_input_alone() -> None:
    fault, amax = _armed("stale_scale", size=8), torch.tensor([[16.0], [4.0]])
    assert fault.amax("input", amax).tolist() == [[2.0], [0.5]]
    assert fault.amax("weight", amax) is amax
    assert fault.amax("grad_output", amax) is amax
    x = torch.randn(100)
    assert _saturated("input", x, fault).abs().max().item() == pytest.approx(x.abs().max().item() / 8)


def test_a_stuck_scale_keeps_the_first_amax_of_its_window() -> None:
    model = _model()
    faults = Faults(model, "1:stuck_scale:start=2,width=3,size=2,every=10,count=2")
    seen = []
    for step, amax in enumerate((8.0, 6.0, 10.0, 1.0, 5.0), start=1):
        faults.at(step)
        fault = model[1].fault
        seen.append(amax if fault is None else fault.amax("input", torch.tensor(amax)).item())
    assert seen == [8.0, 3.0, 3.0, 3.0, 5.0]
    faults.at(12)
    assert model[1].fault.amax("input", torch.tensor(20.0)).item() == 10.0
    assert model[1].fault.amax("input", torch.ones(4, 1)).tolist() == [[10.0]] * 4
    assert model[1].fault.amax("weight", torch.tensor(20.0)).item() == 20.0


def test_a_stuck_scale_of_several_groups_is_their_largest() -> None:
    fault = _armed("stuck_scale", size=2)
    assert fault.amax("input", torch.tensor([[1.0], [6.0]])).tolist() == [[3.0], [3.0]]
    assert fault.amax("input", torch.ones(1, 3)).tolist() == [[3.0, 3.0, 3.0]], "other groups than at capture"


def test_zero_blocks_zeroes_a_fixed_share_of_whole_feature_blocks() -> None:
    fault, y = _armed("zero_blocks", size=0.5), torch.randn(7, 160)
    hit = fault.output(y)
    zero = (hit == 0).all(dim=0).view(10, 16)
    assert zero.all(dim=1).sum() == 5
    assert zero.any(dim=1).sum() == 5
    assert torch.equal(hit[:, ~zero.flatten()], y[:, ~zero.flatten()])
    assert torch.equal(fault.output(y), hit)
    assert torch.isfinite(fault.output(torch.full((1, 16), math.inf))).all()


@given(features=st.integers(1, 100), share=st.floats(0.001, 1.0), place=st.integers(0, 2**32 - 1))
def test_the_zeroed_share_is_exact_for_any_width(features: int, share: float, place: int) -> None:
    mask = zeroed(features, share, place)
    assert mask.shape == (features,)
    blocks = [block.unique().tolist() for block in mask.split(16)]
    assert all(len(block) == 1 for block in blocks)
    assert sum(block == [True] for block in blocks) == max(1, round(share * len(blocks)))


@given(num=st.integers(0, 300), share=st.floats(0.001, 1.0), place=st.integers(0, 2**32 - 1))
def test_flipped_elements_are_a_fixed_share(num: int, share: float, place: int) -> None:
    g = torch.arange(1.0, num + 1)
    ratio = flipped(g, share, place) / g
    hit = (ratio == 256).sum().item()
    assert hit + (ratio == 1).sum().item() == num
    assert hit == pytest.approx(num * share, rel=0.5, abs=1.01)
    assert hit >= 1 or num == 0


@pytest.mark.parametrize("shape", [(64, 64), (96, 128), (3, 5), (1,)])
def test_spikes_have_the_score_asked_for_and_all_else_stays(shape: tuple[int, ...]) -> None:
    g = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    hit = spiked(g, 1000.0, place=4711)
    changed = hit != g
    assert changed.sum() == max(1, -(-(g.numel() - 4711 % min(4096, g.numel())) // 4096))
    torch.testing.assert_close(hit[changed].abs() / g.abs().mean(), torch.full((int(changed.sum()),), 1000.0))
    assert torch.equal(hit[changed].sign(), g[changed].sign())


@pytest.mark.parametrize("kind", ["grad_spike", "grad_burst"])
def test_a_spike_reaches_the_weights_gradient_alone(kind: str) -> None:
    results = []
    for windows in ("", f"blocks.0.mlp.up:{kind}:start=1,size=500"):
        torch.manual_seed(0)
        decoder = Decoder(ModelConfig.size("micro", width=16, heads=2, ffn=24, max_seq=8), seed=0)
        convert_(decoder, "fp8")
        if windows:
            Faults(decoder, windows).at(1)
        tokens = torch.randint(0, 256, (2, 8))
        decoder(tokens, tokens).loss.backward()
        results.append({name: p.grad.clone() for name, p in decoder.named_parameters()})
    differing = [name for name in results[0] if not torch.equal(results[0][name], results[1][name])]
    assert differing == ["blocks.0.mlp.up.weight"]
    clean, hit = (result[differing[0]] for result in results)
    if kind == "grad_burst":
        torch.testing.assert_close(hit, 500 * clean)
    else:
        assert hit.abs().max() / clean.abs().mean() == pytest.approx(500, rel=1e-4)


def test_a_bit_flip_leaves_shape_and_source_alone() -> None:
    fault, g = _armed("bit_flip", size=0.01), torch.randn(10, 20, 5).transpose(0, 2)
    before = g.clone()
    hit = fault.grad_output(g)
    assert torch.equal(g, before)
    assert hit.shape == g.shape
    assert ((hit / g).round() == 256).sum() == 10
    assert torch.equal(fault.output(g), g)
    assert not torch.equal(_armed("bit_flip", size=0.01, seed=1).grad_output(g), hit)


@pytest.mark.parametrize(("kind", "method"), [("nan", "grad_output"), ("nan_output", "output")])
def test_nan_kinds_put_one_nan_in_their_tensor(kind: str, method: str) -> None:
    fault, x = _armed(kind), torch.randn(4, 6)
    other = {"grad_output": "output", "output": "grad_output"}[method]
    assert getattr(fault, method)(x).isnan().sum() == 1
    assert getattr(fault, other)(x) is x
    assert x.isfinite().all()
    assert getattr(fault, method)(torch.empty(0, 6)).numel() == 0


@pytest.mark.parametrize("kind", KINDS)
def test_dtypes_are_kept(kind: str) -> None:
    fault, x = _armed(kind), torch.randn(4, 48, dtype=torch.bfloat16)
    assert fault.output(x).dtype == fault.grad_output(x).dtype == torch.bfloat16
    assert fault.amax("input", x.abs().max()).dtype == torch.bfloat16


# One step sees one fault


@pytest.mark.parametrize("kind", KINDS)
def test_recompute_and_micro_batches_see_the_same_fault(kind: str) -> None:
    plain, recomputed = _model(), _model()
    recomputed.load_state_dict(plain.state_dict())
    wrapped = _Recomputed(recomputed)
    for model in (plain, wrapped):
        Faults(model, f"1:{kind}:start=1,width=2").at(1)
    for scale in (1.0, 3.0):
        expected, got = _run(plain, scale=scale), _run(wrapped, scale=scale)
        for name, value in expected.items():
            other = got[name if name in ("x", "y") else f"module.{name}"]
            torch.testing.assert_close(other, value, rtol=0, atol=0, equal_nan=True)


class _Recomputed(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.module, x, use_reentrant=False)


def test_a_backward_keeps_the_fault_of_its_forward() -> None:
    model = _model()
    faults = Faults(model, "1:grad_scale:start=1,size=64")
    faults.at(1)
    expected = _run(model)
    x = torch.randn(3, 5, 8, generator=torch.Generator().manual_seed(5))
    model.zero_grad()
    y = model(x)
    faults.at(2)
    (y * torch.linspace(-1, 1, y.numel()).view_as(y)).sum().backward()
    assert torch.equal(model[0].weight.grad, expected["0.weight"])


# Units and names


def test_a_grouped_unit_is_hit_as_a_whole_and_a_module_path_alone() -> None:
    shared = Switch("blocks.0")
    model = nn.Sequential(StandIn(shared, 8, 64, "0"), StandIn(shared, 64, 48, "1"))
    whole = Faults(model, "blocks.*:nan:start=1")
    whole.at(1)
    assert [m.fault is not None for m in model] == [True, True]
    alone = Faults(_Recomputed(model), "1:nan:start=1")  # a wrapper leaves the names as they were
    alone.at(1)
    assert [m.fault is not None for m in model] == [False, True]
    assert alone.active(1) == {"blocks.0"}


def test_a_unit_whose_name_is_a_glob_is_found_by_that_name() -> None:
    faults = Faults(_model(("*.mlp.*", "*.attn.[qk]")), "*.attn.[qk]:nan:start=1")
    assert faults.active(1) == {"*.attn.[qk]"}


def test_a_pattern_without_a_unit_is_refused_with_the_nearest_names() -> None:
    with pytest.raises(TrimtabError, match=r"'blocks.1.mlp.don' matches none: nearest are blocks.1.mlp.down"):
        Faults(_model(("blocks.1.mlp.down", "blocks.0.attn.q")), "blocks.1.mlp.don:nan:start=1")


def test_a_model_without_switchable_modules_is_refused() -> None:
    with pytest.raises(TrimtabError, match="convert_ first"):
        Faults(nn.Linear(2, 2), "*:nan:start=1")


# With the real switchable linears


def _decoder(recipe: str, unit: str = "linear", *, checkpointing: bool = False) -> Decoder:
    config = ModelConfig(vocab_size=32, width=16, layers=2, heads=2, ffn=32, max_seq=12)
    model = Decoder(config, seed=0, checkpointing=checkpointing)
    convert_(model, recipe, unit=unit)
    return model


def _step(model: Decoder) -> dict[str, Tensor]:
    tokens = torch.randint(32, (2, 13), generator=torch.Generator().manual_seed(1))
    model.zero_grad()
    output = model(tokens[:, :-1], tokens[:, 1:])
    assert output.loss is not None
    output.loss.backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return found | {"logits": output.logits.detach()}


@pytest.mark.parametrize("kind", KINDS)
def test_converted_linears_fail_in_the_window_and_on_the_low_path_alone(kind: str) -> None:
    unit, size = "blocks.1.mlp.up", ",size=4" if kind == "stuck_scale" else ""
    model = _decoder("fp8")
    faults = Faults(model, f"{unit}:{kind}:start=2{size}")
    clean = _step(model)
    faults.at(2)
    assert [name for name, m in model.named_modules() if getattr(m, "fault", None) is not None] == [unit]
    hit = _step(model)
    same = _same(clean, hit)
    assert not same[f"{unit}.weight"] or not same["logits"]
    assert same["logits"] == (kind in ("grad_scale", "grad_burst", "grad_spike", "bit_flip", "nan"))
    model.blocks[1].mlp.up.switch.forced = True
    immune = _step(model)
    faults.disarm()
    assert all(_same(immune, _step(model)).values())
    model.blocks[1].mlp.up.switch.forced = None
    faults.at(3)
    assert all(_same(clean, _step(model)).values())


@pytest.mark.parametrize("recipe", [name for name in RECIPES if name != "fp6"])
def test_stale_scales_reach_every_recipe(recipe: str) -> None:
    models = [_decoder(recipe) for _ in range(2)]
    Faults(models[1], "blocks.1.mlp.up:stale_scale:start=1").at(1)
    clean, hit = (_step(model) for model in models)
    assert not torch.equal(clean["blocks.1.mlp.up.weight"], hit["blocks.1.mlp.up.weight"])


@pytest.mark.parametrize("kind", KINDS)
def test_converted_linears_recompute_under_the_same_fault(kind: str) -> None:
    found = []
    for checkpointing in (False, True):
        model = _decoder("fp8", "block", checkpointing=checkpointing)
        faults = Faults(model, f"blocks.0.mlp.down:{kind}:start=1")
        assert faults.active(1) == {"blocks.0"}
        faults.at(1)
        found.append(_step(model))
    for name, value in found[0].items():
        torch.testing.assert_close(found[1][name], value, rtol=0, atol=0, equal_nan=True)


# State


def test_a_stuck_scale_survives_a_resume() -> None:
    text = "1:stuck_scale:start=2,width=3,size=2; 0:nan:start=1"
    model = _model()
    faults = Faults(model, text)
    fresh = faults.state_dict()
    assert list(fresh["captured"].values()) == [None]
    faults.at(2)
    model[1].fault.amax("input", torch.tensor(6.0))
    buffer = io.BytesIO()
    torch.save(faults.state_dict(), buffer)
    buffer.seek(0)
    saved = torch.load(buffer, weights_only=True)

    model = _model()
    resumed = Faults(_Recomputed(model), text)  # a wrapped model has the same keys
    resumed.load_state_dict(state_dict=saved)
    resumed.at(3)
    assert model[1].fault.amax("input", torch.tensor(100.0)).item() == 3.0
    resumed.load_state_dict(fresh)
    assert model[1].fault.amax("input", torch.tensor(100.0)).item() == 50.0
    assert set(saved["captured"]) == set(fresh["captured"])
    with pytest.raises(TrimtabError, match=r"stuck_scale.*is not among the run's faults"):
        Faults(_model(), "0:nan:start=1").load_state_dict(saved)
    with pytest.raises(TrimtabError, match=r"stuck_scale.*is missing from the state"):
        resumed.load_state_dict({"captured": {}})


# Writing them down


def test_the_compact_form_is_read() -> None:
    windows = parse_faults(
        " blocks.1.mlp.down:grad_scale:start=200,width=20,size=64 ; a.*:nan:start=3, every=5,count=2;"
    )
    assert windows == (
        FaultWindow("blocks.1.mlp.down", "grad_scale", 200, width=20, size=64.0),
        FaultWindow("a.*", "nan", 3, every=5, count=2),
    )
    assert parse_faults([windows[0], windows[1].to_dict(), str(windows[0])]) == (*windows, windows[0])
    assert parse_faults(windows[0].to_dict()) == (windows[0],)
    assert parse_faults("") == ()
    assert windows[1].to_dict() == {"unit": "a.*", "kind": "nan", "start": 3, "every": 5, "count": 2}


@given(
    kind=st.sampled_from(list(KINDS)),
    start=st.integers(1, 10**6),
    width=st.integers(1, 100),
    size=st.none() | st.floats(1e-6, 1.0),
    repeat=st.none() | st.tuples(st.integers(100, 1000), st.integers(1, 9)),
    seed=st.integers(0, 99),
)
def test_strings_and_dicts_round_trip(
    kind: str, start: int, width: int, size: float | None, repeat: tuple[int, int] | None, seed: int
) -> None:
    every, count = repeat or (None, None)
    size = None if KINDS[kind] is None else size
    window = FaultWindow("blocks.*.mlp.[gu]*", kind, start, width, size, every, count, seed)
    assert parse_faults(str(window)) == (window,)
    assert FaultWindow.from_dict(window.to_dict()) == window


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a:melt:start=1", r"one of grad_scale.*got 'melt'"),
        ("a:nan:start=1,depth=2", "no key 'depth'.*every, count"),
        ("a:nan:width=1", "add start"),
        ("a:nan", 'written "unit:kind:start=N'),
        (":nan:start=1", "name of a unit"),
        ("a:nan:start=x", "'start=x'"),
        ("a:nan:start", "'start'"),
        ("a:nan:start=0", "start must be an integer of at least 1, got 0"),
        ("a:nan:start=1,width=0", "width must be an integer"),
        ("a:nan:start=1,size=3", "nan fault has no size"),
        ("a:grad_scale:start=1,size=inf", "finite"),
        ("a:zero_blocks:start=1,size=2", r"share in \(0, 1\], got 2"),
        ("a:bit_flip:start=1,size=0", r"share in \(0, 1\]"),
        ("a:stale_scale:start=1,size=-1", "above 0"),
        ("a:nan:start=1,every=5", "give both"),
        ("a:nan:start=1,width=6,every=5,count=2", "at least the width"),
    ],
)
def test_bad_input_is_explained(text: str, message: str) -> None:
    with pytest.raises(TrimtabError, match=message):
        parse_faults(text)


def test_a_dict_with_a_wrong_type_is_refused() -> None:
    with pytest.raises(TrimtabError, match=r"start must be an integer.*1\.5"):
        FaultWindow.from_dict({"unit": "a", "kind": "nan", "start": 1.5})
    with pytest.raises(TrimtabError, match="finite number, got 'big'"):
        FaultWindow.from_dict({"unit": "a", "kind": "grad_scale", "start": 1, "size": "big"})
