# SPDX-License-Identifier: Apache-2.0
"""Attribution without training: exact against gradients written out by hand, without a trace on the model, and the
deliberately bad unit comes first."""

import copy
import json
import math
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from trimtab.control.units import find_units
from trimtab.errors import TrimtabError
from trimtab.lab.data import Sampler, load_corpus
from trimtab.lab.diagnose import diagnose, pattern_of, recovery_gaps
from trimtab.lab.diagnosis import gap, over_batches
from trimtab.lab.faults import Faults
from trimtab.lab.model import Decoder, ModelConfig
from trimtab.lab.probing import mixed
from trimtab.lab.subject import load_subject
from trimtab.lab.train import train
from trimtab.linear import Path as LinearPath
from trimtab.linear import Recipe, convert_, fake_quant, path_state
from trimtab.linear.linear import switch_linears

Batch = tuple[Tensor, Tensor]


class Two(nn.Module):
    """o = (x A^T) B^T, loss = mean (o - y)^2."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 5, bias=False), nn.Linear(5, 4, bias=False)

    def forward(self, x: Tensor, y: Tensor) -> SimpleNamespace:
        return SimpleNamespace(loss=(self.b(self.a(x)) - y).square().mean())


class Odd(nn.Module):
    """All that a pass may change: dropout, running statistics, a module in another mode."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(32, 32), nn.Linear(32, 32)
        self.norm, self.drop, self.still = nn.BatchNorm1d(32), nn.Dropout(), nn.Identity().eval()

    def forward(self, x: Tensor, y: Tensor) -> SimpleNamespace:
        return SimpleNamespace(loss=(self.last(self.drop(self.norm(self.first(x)))) - y).square().mean())


def batches(count: int, tokens: int = 7, features: tuple[int, int] = (6, 4)) -> list[Batch]:
    return [(torch.randn(tokens, features[0]), torch.randn(tokens, features[1])) for _ in range(count)]


def by_hand(model: Two, batch: Batch, low: dict[str, set[str]]) -> tuple[float, Tensor]:
    """Loss and gradient (A's, then B's) with some roles of a and b in hybrid FP8."""

    def q(unit: str, role: str, x: Tensor, fmt: str = "e4m3") -> Tensor:
        return fake_quant(x, fmt, group="tensor") if role in low.get(unit, ()) else x

    (x, y), A, B = batch, model.a.weight.detach(), model.b.weight.detach()
    h = q("a", "output", x) @ q("a", "output", A).T
    o = q("b", "output", h) @ q("b", "output", B).T
    do = 2 * (o - y) / o.numel()
    db = q("b", "grad_weight", do, "e5m2").T @ q("b", "grad_weight", h)
    dh = q("b", "grad_input", do, "e5m2") @ q("b", "grad_input", B)
    da = q("a", "grad_weight", dh, "e5m2").T @ q("a", "grad_weight", x)
    return (o - y).square().mean().item(), torch.cat((da.flatten(), db.flatten())).double()


ALL = {"output", "grad_input", "grad_weight"}


def test_every_figure_equals_the_one_worked_out_by_hand() -> None:
    model, given = Two(), batches(3)
    convert_(model, "fp8")
    found = diagnose(model, given, max_high=1)
    assert found.units == ("a", "b")
    assert list(found.roles) == ["output", "grad_input", "grad_weight"]
    for i, batch in enumerate(given):
        loss, g = by_hand(model, batch, {})
        assert found.loss[i] == pytest.approx(loss)
        assert found.norm[i] == pytest.approx(g.norm().item())

        def check(probe: Any, at: tuple[int, ...], low: dict[str, set[str]], batch: Any = batch, g: Any = g) -> float:
            there, other = by_hand(model, batch, low)
            error = (other - g).square().sum().item()
            assert probe.error[at] == pytest.approx(error, rel=1e-4, abs=1e-12)
            assert probe.relative[at] == pytest.approx(math.sqrt(error) / g.norm().item(), rel=1e-4, abs=1e-6)
            assert probe.cosine[at] == pytest.approx(torch.cosine_similarity(other, g, dim=0).item())
            if len(at) == 2:
                part = slice(0, 30) if at[0] == 0 else slice(30, 50)
                assert probe.own[at] == pytest.approx(((other - g)[part].norm() / g[part].norm()).item(), rel=1e-4)
            assert probe.loss[at] == pytest.approx(there, rel=1e-5)
            return error

        everything = check(found.low, (i,), {"a": ALL, "b": ALL})
        left = [check(found.only_high, (0, i), {"b": ALL}), check(found.only_high, (1, i), {"a": ALL})]
        check(found.only_low, (0, i), {"a": ALL})
        check(found.only_low, (1, i), {"b": ALL})
        for role in ALL:
            check(found.roles[role], (0, i), {"a": {role}})
            check(found.roles[role], (1, i), {"b": {role}})
        assert found.gaps[:, i] == pytest.approx([everything - one for one in left], rel=1e-3)
        assert recovery_gaps(model, batch) == pytest.approx(found.gaps[:, i], rel=1e-12)
    assert (found.low.error > 0).all()
    assert found.roles["grad_input"].error[0].tolist() == [0, 0, 0]  # nothing upstream of the first linear needs it


def test_the_keep_high_list_is_measured_as_a_whole() -> None:
    model = Two()
    convert_(model, "fp8")
    given = batches(2)
    one, both = diagnose(model, given, max_high=1), diagnose(model, given, max_high=1.0)
    best = int(np.argmax(one.gaps.mean(axis=1)))
    assert one.kept == (one.units[best],) == tuple(one.keep_high(1))
    assert one.kept_high is not None
    assert one.kept_high.error.tolist() == one.only_high.error[best].tolist()
    assert set(both.kept) == {"a", "b"}
    assert both.kept_high is not None
    assert both.kept_high.error.tolist() == [0, 0]
    plain = both.to_dict()["keep_high"]
    assert plain["share"] == pytest.approx(1)
    assert plain["gap"]["mean"] == pytest.approx(both.low.error.mean())
    assert plain["sum_of_gaps"]["mean"] == pytest.approx(both.gaps.sum(axis=0).mean())
    assert plain["sum_of_gaps"]["mean"] != pytest.approx(plain["gap"]["mean"], rel=1e-3)  # gaps do not add up


def test_a_unit_whose_recovery_does_not_help_is_never_kept() -> None:
    model = Two()
    convert_(model, "fp8")
    found = diagnose(model, batches(2))
    worse = replace(found, only_high=found.only_high._replace(error=found.only_high.error * np.array([[1], [1e9]])))
    assert worse.keep_high(1.0) == ["a"]
    assert [row.unit for row in worse.ranked()] == ["a", "b"]
    assert found.keep_high(0) == []
    with pytest.raises(TrimtabError, match="max_high"):
        found.keep_high(1.5)


def everything(model: nn.Module) -> list[Any]:
    """All state there is, comparable."""
    linears = list(switch_linears(model))
    return [
        [p.detach().clone() for p in model.parameters()],
        [None if p.grad is None else p.grad.clone() for p in model.parameters()],
        [b.clone() for b in model.buffers()],
        [id(b) for b in model.buffers()],
        path_state(model),
        [m.training for m in model.modules()],
        [(m.switch.planned, m.switch.forced, m.recipe, id(m.fault), id(m._last)) for m in linears],
        [dict(m.fault.captured) if m.fault is not None else None for m in linears],  # type: ignore[attr-defined]
        torch.get_rng_state(),
    ]


def same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return a == b


@pytest.fixture(name="odd", params=["fp8_delayed", "mxfp4"])
def _odd(request: pytest.FixtureRequest) -> nn.Module:
    model = Odd()
    convert_(model, request.param)
    for batch in batches(3, 9, (32, 32)):
        model(*batch).loss.backward()  # grads, histories and draws that must survive
    first, last = (unit.switch for unit in find_units(model))
    first.planned, last.forced = True, False  # type: ignore[union-attr]
    faults = Faults(model, "last:stuck_scale:start=1,width=9,size=2")
    faults.at(1)
    return model


def test_everything_is_as_it_was_bit_for_bit(odd: nn.Module) -> None:
    given, before = batches(2, 9, (32, 32)), everything(odd)
    found = diagnose(odd, given)
    assert same(everything(odd), before)
    assert (found.low.error > 0).all()
    recovery_gaps(odd, given[0])
    assert same(everything(odd), before)
    odd(*given[0]).loss.backward()  # and one ordinary pass is noticed in all that it changes
    noticed = [not same(a, b) for a, b in zip(everything(odd), before, strict=True)]
    assert noticed == [False, True, True, False, True, False, True, True, True]


def test_everything_is_as_it_was_after_an_error_too(odd: nn.Module) -> None:
    given, before, calls = batches(2, 9, (32, 32)), everything(odd), []

    def fails(model: nn.Module, batch: Any) -> Tensor:
        calls.append(1)
        model.eval()
        if len(calls) == 9:
            raise RuntimeError("ninth")
        return model(*batch).loss

    with pytest.raises(RuntimeError, match="ninth"):
        diagnose(odd, given, loss_fn=fails)
    assert len(calls) == 9
    assert same(everything(odd), before)


def test_passes_differ_in_nothing_but_their_paths() -> None:
    """Dropout, stochastic rounding and amax histories are the same in all: a low path that is the high one is exact."""
    for path in (LinearPath.plain(), Recipe.named("mxfp4").low, Recipe.named("fp8_delayed").low):
        model = Odd()
        convert_(model, Recipe(path, path))
        found = diagnose(model, batches(2, 9, (32, 32)))
        for probe in (found.low, found.only_low, found.only_high):
            assert not probe.error.any()
        assert not found.gaps.any()
        assert found.roles == {}
        assert found.keep_high(1.0) == []


def test_gradients_do_not_need_to_be_enabled_and_are_not_left_behind() -> None:
    model, (batch,) = Two(), batches(1)
    convert_(model, "fp8")
    expected = recovery_gaps(model, batch)
    with torch.no_grad():
        assert recovery_gaps(model, batch).tolist() == expected.tolist()
    assert all(p.grad is None for p in model.parameters())


def test_the_cost_is_what_is_said() -> None:
    model, calls, told = Two(), [], []

    def loss(model: nn.Module, batch: Any) -> Tensor:
        calls.append(1)
        return model(*batch).loss

    convert_(model, "fp8")
    recovery_gaps(model, batches(1)[0], loss)
    assert len(calls) == 2 + 2
    calls.clear()
    found = diagnose(model, batches(2), loss_fn=loss, progress=lambda *at: told.append(at))
    assert len(calls) == found.passes == 2 * (3 + (2 + 3) * 2)
    assert told == [(i + 1, found.passes) for i in range(found.passes)]


def test_roles_follow_the_recipe() -> None:
    model = Two()
    convert_(model, "saved4")
    found = diagnose(model, batches(2))
    assert list(found.roles) == ["grad_weight"]  # the only GEMM in which its two paths differ
    assert found.roles["grad_weight"].error.tolist() == found.only_low.error.tolist()
    assert not (found.only_low.loss - found.loss).any()  # its forward is exact
    fp4, fp8 = Recipe.named("fp4"), Recipe.named("fp8")
    assert mixed(fp4, "output").output == fp4.low.output
    assert mixed(fp4, "output").grad_input == fp4.high.grad_input
    assert replace(mixed(fp8, "grad_input"), name="") == replace(fp8.low.only("grad_input"), name="")
    assert diagnose(model, batches(1), roles=()).roles == {}


@pytest.mark.parametrize(
    ("kind", "hurt"),
    [("output_scale", {"output"}), ("grad_scale", {"grad_input", "grad_weight"}), ("grad_burst", {"grad_weight"})],
)
def test_a_fault_shows_in_its_own_role(kind: str, hurt: set[str]) -> None:
    model, given = Two(), batches(2)
    convert_(model, "fp8")
    clean = diagnose(model, given)
    Faults(model, f"b:{kind}:start=1,size=16").at(1)
    found = diagnose(model, given)
    ratios = {role: found.roles[role].error[1].mean() / clean.roles[role].error[1].mean() for role in found.roles}
    assert {role for role, ratio in ratios.items() if ratio > 10} == hurt
    assert all(ratio == 1 for role, ratio in ratios.items() if role not in hurt)
    assert found.ranked()[0].unit == "b"
    assert found.ranked()[0].worst_role in hurt


@pytest.fixture(name="trained", scope="module")
def _trained(tmp_path_factory: pytest.TempPathFactory, small: dict[str, Any]) -> Path:
    folder = tmp_path_factory.mktemp("diagnose") / "run"
    settings = {"recipe": "fp8_delayed", "steps": 20, "batch": 4, "seq": 32, "mode": "off", "checkpoint_every": 10}
    train({**small, **settings}, folder)
    return folder


@pytest.mark.parametrize(
    ("unit", "fault"),
    [
        ("blocks.0.attn.k", "grad_scale:start=1,size=16"),
        ("blocks.1.attn.v", "output_scale:start=1,size=4"),
        ("blocks.0.mlp.up", "stale_scale:start=1,size=8"),
        ("blocks.1.mlp.gate", "zero_blocks:start=1,size=0.25"),
        ("blocks.0.attn.o", "bit_flip:start=1,size=0.001"),
        ("blocks.1.mlp.down", "output_scale:start=1,size=2"),
    ],
)
def test_one_deliberately_bad_unit_comes_first(trained: Path, text: Path, unit: str, fault: str) -> None:
    subject = load_subject(trained, text, batches=1, batch=2, device="cpu")
    Faults(subject.model, f"{unit}:{fault}").at(1)
    found = diagnose(subject.model, subject.batches, roles=())
    assert found.ranked()[0].unit == found.ranked("own")[0].unit == unit
    assert found.kept == (unit,)


def test_a_unit_that_makes_a_nan_has_an_infinite_gap() -> None:
    model, given = Two(), batches(2)
    convert_(model, "fp8")
    Faults(model, "b:nan:start=1").at(1)
    found = diagnose(model, given, max_high=1)
    assert found.gaps.tolist() == [[0, 0], [math.inf, math.inf]]
    assert found.kept == ("b",)
    row = found.ranked()[0]
    assert (row.unit, row.gap.mean, row.share) == ("b", math.inf, None)
    json.dumps(found.to_dict(), allow_nan=False)
    Faults(model, "*:nan:start=1").at(1)
    both = diagnose(model, given)
    assert not both.gaps.any()  # recovering one leaves the other's
    assert np.isinf(both.only_low.error).all()
    assert both.keep_high(1.0) == []
    assert gap(np.array([1.0]), np.array([np.inf])).tolist() == [-np.inf]


def test_intervals_are_over_batches() -> None:
    model, batch = Two(), batches(1)[0]
    convert_(model, "fp8")
    twice = diagnose(model, [batch, batch]).ranked()[0]
    assert twice.gap.half == 0
    assert math.isnan(diagnose(model, [batch]).ranked()[0].gap.half)
    three = diagnose(model, batches(3))
    row = three.ranked()[0]
    values = three.gaps[three.units.index(row.unit)]
    assert row.gap.half == pytest.approx(4.302653 * values.std(ddof=1) / math.sqrt(3))
    assert over_batches(np.array([1.0, math.inf])).mean == math.inf


def test_chosen_units_are_probed_while_the_others_go_with_the_rest() -> None:
    model, given = Two(), batches(2)
    convert_(model, "fp8")
    every, some = diagnose(model, given), diagnose(model, given, units=["b*"])
    assert some.units == ("b",)
    assert some.gaps.tolist() == every.gaps[1:].tolist()
    units = (*find_units(model), replace(find_units(model)[0], switch=None))
    assert recovery_gaps(model, given[0], units=units).tolist() == [*every.gaps[:, 0].tolist(), 0.0]


def test_an_expert_without_tokens_is_no_obstacle() -> None:
    shape = ModelConfig(vocab_size=32, width=16, layers=1, heads=2, ffn=16, max_seq=8, num_experts=8, top_k=1)
    model = Decoder(shape, seed=0, checkpointing=True)
    convert_(model, "fp4", unit="expert")
    tokens = torch.randint(32, (1, 8))
    found = diagnose(model, [(tokens, tokens)], roles=())
    idle = [not error.any() for error in found.only_low.error]
    assert any(idle)
    assert not all(idle)
    assert np.isfinite(found.gaps).all()


@pytest.mark.parametrize("unit", ["linear", "block", ["*.q", "*.mlp.*"]])
def test_patterns_name_exactly_the_linears_of_their_unit(unit: Any) -> None:
    model = Decoder(ModelConfig.size("micro"), seed=0)
    report = convert_(model, "fp8", unit=unit)
    for one in find_units(model):
        named = tuple(path for path in report.covered if fnmatchcase(path, pattern_of(one)))
        assert named == report.units[one.name]


def test_refusals_say_what_to_do() -> None:
    plain, given = Two(), batches(2)
    for call in (lambda: diagnose(plain, given), lambda: recovery_gaps(plain, given[0])):
        with pytest.raises(TrimtabError, match=r"units that can switch.*convert_\(model, recipe\) first"):
            call()
    model = copy.deepcopy(plain)
    convert_(model, "fp8")
    for options, words in (
        ({"units": ["c"]}, "'c' matches none: nearest are"),
        ({"units": []}, "at least one"),
        ({"roles": ["input"]}, "roles must be some of output, grad_input, grad_weight, got 'input'"),
        ({"loss_fn": lambda model, batch: 1.0}, "one number with a gradient, got float"),
        ({"loss_fn": lambda model, batch: model.b(model.a(batch[0]))}, "one number with a gradient, got shape"),
        ({"loss_fn": lambda model, batch: model(*batch).loss.detach()}, "no gradient"),
        ({"loss_fn": lambda model, batch: model(*batch).loss * math.inf}, r"finite.*got loss inf.*batch 1 of 2"),
        ({"loss_fn": lambda model, batch: model(*batch).loss * 0}, "not zero"),
    ):
        with pytest.raises(TrimtabError, match=words):
            diagnose(model, given, **options)
    with pytest.raises(TrimtabError, match="ranked by gap or own, got 'loss'"):
        diagnose(model, given).ranked("loss")
    with pytest.raises(TrimtabError, match="at least 1 batch"):
        diagnose(model, [])
    with torch.no_grad():
        model.a.weight[0, 0] = math.nan
    with pytest.raises(TrimtabError, match=r"got loss nan.*check the weights"):
        recovery_gaps(model, given[0])
    with pytest.raises(TrimtabError, match="no trainable parameter"):
        diagnose(model.requires_grad_(False), given)


def test_a_run_is_diagnosed_at_its_last_checkpoint_on_its_next_batches(trained: Path, text: Path) -> None:
    subject = load_subject(trained, text, recipe="fp8_delayed", batches=2, device="cpu")
    state = torch.load(trained / "checkpoints" / "step_000020.pt", weights_only=True)
    assert (subject.step, subject.name, subject.data) == (20, "run", "words.txt")
    assert same(dict(subject.model.state_dict()), state["model"])
    assert same(path_state(subject.model), state["paths"])  # delayed scales go on where the run stopped
    assert any(bool(one["input_amax"].any()) for one in path_state(subject.model).values())
    sampler = Sampler(load_corpus(text).train, batch=4, seq=32, seed=0)
    assert same(subject.batches, [sampler.batch_at(21), sampler.batch_at(22)])
    assert subject.model.training
    earlier = load_subject(trained / "checkpoints" / "step_000010.pt", text, batches=1, batch=1, seq=8, device="cpu")
    assert (earlier.step, tuple(earlier.batches[0][0].shape)) == (10, (1, 8))
    assert not path_state(earlier.model)["blocks.0.attn.q"].keys() - {"draws"}  # another recipe remembers nothing of it


def test_a_hugging_face_folder_is_diagnosed_like_its_run(trained: Path, text: Path, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    from trimtab.lab.export import save_llama

    ours = load_subject(trained, text, batches=1, batch=2, seq=16, device="cpu")
    save_llama(ours.model, tmp_path / "llama")  # type: ignore[arg-type]
    theirs = load_subject(tmp_path / "llama", text, batches=1, batch=2, seq=16, device="cpu")
    assert theirs.step is None
    theirs.batches[:] = ours.batches
    a, b = (diagnose(s.model, s.batches, loss_fn=s.loss_fn, roles=()) for s in (ours, theirs))
    assert b.units[0] == "model.layers.0.self_attn.q_proj"
    assert b.loss == pytest.approx(a.loss, rel=1e-4)
    assert b.gaps == pytest.approx(a.gaps, rel=0.05, abs=0.02 * a.low.error.max())
    config = json.loads((tmp_path / "llama" / "config.json").read_text())
    (tmp_path / "llama" / "config.json").write_text(json.dumps({**config, "vocab_size": 300}))
    with pytest.raises(TrimtabError, match=r"the model in .*llama' cannot be read .*mismatch"):
        load_subject(tmp_path / "llama", text, device="cpu")
    (tmp_path / "llama" / "config.json").write_text(json.dumps({**config, "attention_dropout": None}))
    with pytest.raises(TrimtabError, match=r"the model in .*llama' cannot be run \(TypeError"):
        load_subject(tmp_path / "llama", text, device="cpu")


def test_a_hugging_face_folder_without_all_weights_is_not_diagnosed_with_random_ones(
    trained: Path, text: Path, tmp_path: Path
) -> None:
    pytest.importorskip("transformers")
    from safetensors.torch import load_file, save_file

    from trimtab.lab.export import save_llama

    ours = load_subject(trained, text, batches=1, batch=2, seq=16, device="cpu")
    save_llama(ours.model, tmp_path)  # type: ignore[arg-type]
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.0.mlp.up_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(TrimtabError, match=r"1 absent \(model\.layers\.0\.mlp\.up_proj\.weight\)"):
        load_subject(tmp_path, text, device="cpu")


def test_smollm2_by_name_is_the_folder_made_of_it(smollm2: Path, text: Path) -> None:
    by_name, folder = (
        load_subject(source, text, unit=["model.layers.0.*"], batches=1, batch=1, seq=8, device="cpu")
        for source in ("smollm2", smollm2)
    )
    assert [unit.name for unit in find_units(by_name.model)] == ["model.layers.0.*"]
    assert by_name.name == "smollm2"
    assert torch.equal(by_name.batches[0][0], folder.batches[0][0])  # the tokenizer inside the file
    with torch.no_grad():
        losses = [float(s.loss_fn(s.model, s.batches[0])) for s in (by_name, folder)]
    assert losses[0] == pytest.approx(losses[1], rel=0.02)  # the folder's weights are in bf16


def test_a_torn_gguf_is_one_line(text: Path, tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    (tmp_path / "torn.gguf").write_bytes(b"GGUF\x03\x00\x00\x00")
    with pytest.raises(TrimtabError, match=r"torn\.gguf' cannot be read"):
        load_subject(tmp_path / "torn.gguf", text)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"paths": {"blocks.0.attn.q": 3}}, "what the linears remember in .* is damaged"),
        ({"paths": 7}, "what the linears remember in .* is damaged"),
        ({"step": 10**30}, "lacks its settings"),
        ({"config": [3]}, "lacks its settings"),
        ({"config.seq": 1 << 40}, "is of another model: its settings say 0 experts and 1099511627776 tokens"),
        (
            {"config.num_experts": 10**9, "config.top_k": 1},
            "is of another model: its settings say 1,000,000,000 experts",
        ),
        ({"config.model": "1b"}, "is of another model: "),
    ],
)
def test_a_damaged_checkpoint_is_one_line(
    trained: Path, text: Path, tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    state = torch.load(trained / "checkpoints" / "step_000020.pt", weights_only=True)
    for key, value in change.items():
        outer, _, inner = key.rpartition(".")
        if key == "paths" and isinstance(value, dict):
            state[key].update(value)
        else:
            (state[outer] if outer else state)[inner] = value
    torch.save(state, tmp_path / "a.pt")
    with pytest.raises(TrimtabError, match=message):
        load_subject(tmp_path / "a.pt", text, recipe="fp8_delayed", batches=1, batch=1, seq=8, device="cpu")


def test_what_is_no_model_is_refused(trained: Path, text: Path, tmp_path: Path) -> None:
    (tmp_path / "torn.pt").write_bytes(b"PK")
    torch.save({"step": 1}, tmp_path / "other.pt")
    bad = {tmp_path: "there is none of them", tmp_path / "torn.pt": "a .pt file", tmp_path / "other.pt": "lacks"}
    for path, words in bad.items():
        with pytest.raises(TrimtabError, match=words):
            load_subject(path, text)
    with pytest.raises(TrimtabError, match="unit must match at least one linear"):
        load_subject(trained, text, unit=["nothing*"])
    with pytest.raises(TrimtabError, match="recipe must be one of"):
        load_subject(trained, text, recipe="fp9")
