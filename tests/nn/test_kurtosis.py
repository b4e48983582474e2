# SPDX-License-Identifier: Apache-2.0
"""Excess kurtosis against its closed forms and scipy (oracles K1, K2), and the probe that measures it in a model."""

import dataclasses
import math
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from trimtab.errors import NoEffectWarning, TrimtabError
from trimtab.lab.model import Decoder, ModelConfig
from trimtab.linear import convert_
from trimtab.nn import Kurtosis, KurtosisProbe, excess_kurtosis

SMALL = ModelConfig(vocab_size=32, width=16, layers=2, heads=2, ffn=24, max_seq=12)
TOKENS = torch.randint(32, (2, 12), generator=torch.Generator().manual_seed(1))


def published_kurtosis(x: Tensor) -> Tensor:
    """What the script published with OSP computes: uncentred fourth moment, unbiased variance, clamped at zero."""
    return (x.pow(4).mean(-1) / x.std(-1).pow(4) - 3).relu()


def one_hot(dim: int) -> Tensor:
    return torch.eye(dim, dtype=torch.float64)[dim // 3]


def test_gaussian_noise_has_its_known_mean_and_spread() -> None:
    dim, vectors = 256, 4000
    values = excess_kurtosis(torch.randn(vectors, dim))
    assert values.mean().item() == pytest.approx(-6 / (dim + 1), abs=4 * math.sqrt(24 / (dim * vectors)))
    assert values.std().item() == pytest.approx(math.sqrt(24 / dim), rel=0.15)


@pytest.mark.parametrize("dim", [2, 3, 64, 2048])
def test_one_large_entry_has_the_largest_value(dim: int) -> None:
    expected = dim - 5 + 1 / (dim - 1)
    assert excess_kurtosis(one_hot(dim)).item() == pytest.approx(expected, rel=1e-6)
    assert excess_kurtosis(one_hot(dim).float()).item() == pytest.approx(expected, rel=1e-5)


def test_uniform_entries_have_minus_one_point_two() -> None:
    assert excess_kurtosis(torch.rand(500, 4096)).mean().item() == pytest.approx(-1.2, abs=0.01)


def test_it_is_scipys() -> None:
    x = torch.randn(6, 50, dtype=torch.float64).pow(3) + 2
    for dim in (0, 1, -1):
        expected = torch.from_numpy(stats.kurtosis(x.numpy(), axis=dim, fisher=True, bias=True))
        torch.testing.assert_close(excess_kurtosis(x, dim=dim), expected, rtol=1e-6, atol=1e-6)
    expected = torch.from_numpy(stats.kurtosis(x.numpy(), axis=-1)).float()
    torch.testing.assert_close(excess_kurtosis(x.float()), expected, rtol=1e-5, atol=1e-5)
    rounded = torch.from_numpy(stats.kurtosis(x.bfloat16().double().numpy(), axis=-1)).float()
    torch.testing.assert_close(excess_kurtosis(x.bfloat16()), rounded, rtol=1e-5, atol=1e-5)
    assert excess_kurtosis(x.bfloat16()).dtype == torch.float32
    assert excess_kurtosis(x).dtype == torch.float64


@given(
    st.lists(st.floats(-1, 1, width=32), min_size=2, max_size=30), st.floats(-30, 30), st.floats(-10, 10), st.booleans()
)
def test_shift_and_scale_do_not_matter_and_it_has_bounds(entries, exponent, shift, negate) -> None:
    x = torch.tensor(entries, dtype=torch.float64)
    assume((x.max() - x.min()).item() > 1e-3)
    value = excess_kurtosis(x).item()
    scale = 10**exponent * (-1 if negate else 1)
    assert excess_kurtosis(scale * (x + shift)).item() == pytest.approx(value, rel=1e-6, abs=1e-6)
    dim = len(entries)
    assert -2 - 1e-9 <= value <= dim - 5 + 1 / (dim - 1) + 1e-9


@pytest.mark.parametrize("scale", [1e-35, 1e-12, 1e12, 1e37])
def test_no_size_overflows_or_vanishes_in_float32(scale: float) -> None:
    x = torch.randn(4, 100)
    torch.testing.assert_close(excess_kurtosis(x * scale), excess_kurtosis(x), rtol=1e-3, atol=1e-3)


def test_a_vector_without_spread_has_none() -> None:
    for value in (0.0, 0.1, -7.3e8):
        assert excess_kurtosis(torch.full((3, 37), value)).isnan().all()
    assert excess_kurtosis(torch.tensor([1.0, math.inf, 0.0])).isnan()


def test_the_published_variant_is_another_measure() -> None:
    noise = torch.randn(6000, 2048)
    assert published_kurtosis(noise).mean().item() == pytest.approx(0.042, abs=0.003)
    assert published_kurtosis(one_hot(2048)).item() == pytest.approx(2048 - 3, rel=1e-9)
    shifted = noise[:2000] + 2
    assert published_kurtosis(shifted).mean().item() == pytest.approx(40, abs=0.5)
    assert excess_kurtosis(shifted).mean().item() == pytest.approx(0, abs=0.02)


class Recorded(nn.Module):
    """Two numbered layers; remembers what entered each."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))
        self.inputs: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            self.inputs.append(x)
            x = layer(input=x)  # by keyword
        self.inputs.append(x)
        return x


def test_the_probe_gives_the_mean_and_the_largest_over_all_tokens() -> None:
    model = Recorded()
    batches = [torch.randn(3, 5, 16), torch.randn(2, 16) ** 3]
    with KurtosisProbe(model) as probe:
        for batch in batches:
            model(batch)
    summary = probe.summary()
    assert list(summary) == ["layers.0", "layers.1", "layers.1 output"]
    for place, name in enumerate(summary):
        expected = torch.cat([excess_kurtosis(x).flatten() for x in (model.inputs[place], model.inputs[place + 3])])
        assert summary[name].mean == pytest.approx(expected.mean().item(), rel=1e-6)
        assert summary[name].max == pytest.approx(expected.max().item())
        assert summary[name].tokens == 17
    assert probe.mean() == pytest.approx(sum(row.mean for row in summary.values()) / 3)


def test_tokens_without_spread_are_counted_apart() -> None:
    x = torch.randn(4, 16)
    x[1], x[2, 3] = 0.5, math.nan
    with KurtosisProbe(model := Recorded()) as probe:
        model(x)
        model(x[:0])
    row = probe.summary()["layers.0"]
    assert (row.tokens, row.undefined) == (2, 2)
    assert row.mean == pytest.approx(excess_kurtosis(x[[0, 3]]).mean().item())


def test_outside_its_block_the_model_has_no_trace_of_it() -> None:
    model = Recorded()
    probe = KurtosisProbe(model, where="linears")

    def hooks() -> int:
        return sum(len(m._forward_pre_hooks) + len(m._forward_hooks) for m in model.modules())

    nothing = probe.summary()["layers.0"]
    assert (nothing.tokens, math.isnan(nothing.mean), math.isnan(nothing.max)) == (0, True, True)
    assert math.isnan(probe.mean())
    with probe:
        assert hooks() == 2
        model(torch.randn(3, 16))
        with pytest.raises(TrimtabError, match="this one is active"), probe:
            pass
    assert hooks() == 0
    model(torch.randn(3, 16))
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"), probe:
        model(torch.randn(3, 5))
    assert hooks() == 0
    assert (probe.summary()["layers.0"].tokens, probe.summary()["layers.1"].tokens) == (6, 3), "it went on counting"


class NoWaiting(TorchDispatchMode):
    """Fails where a value of a tensor is read by the host."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func is not torch.ops.aten._local_scalar_dense.default, "the host waits for a value"
        return func(*args, **(kwargs or {}))


def test_nothing_is_read_by_the_host_before_the_summary() -> None:
    model = Decoder(SMALL, seed=0)
    with KurtosisProbe(model) as probe, NoWaiting():
        model(TOKENS)
        model(TOKENS)
    assert probe.summary()["blocks.0"].tokens == 48
    with pytest.raises(AssertionError, match="waits"), NoWaiting():
        torch.ones(1).item()


@pytest.mark.parametrize("inference", [False, True])
def test_numbers_and_gradients_are_the_same_under_the_probe(inference: bool) -> None:
    plain, probed = Decoder(SMALL, seed=0), Decoder(SMALL, seed=0)
    convert_(probed, "fp8")
    convert_(plain, "fp8")
    with KurtosisProbe(probed, where="linears") as probe, torch.inference_mode(inference):
        loss = probed(TOKENS, TOKENS).loss
        if not inference:
            loss.backward()
    probed(TOKENS, TOKENS)
    expected = plain(TOKENS, TOKENS).loss
    assert torch.equal(loss, expected)
    if not inference:
        expected.backward()
        for a, b in zip(plain.parameters(), probed.parameters(), strict=True):
            assert torch.equal(a.grad, b.grad)
    assert all(row.tokens == 24 for row in probe.summary().values())


@pytest.mark.parametrize("changes", [{}, {"norm": "ssnorm", "embproj": True}, {"num_experts": 3, "top_k": 1}])
def test_the_places_of_a_decoder(changes: dict) -> None:
    model = Decoder(dataclasses.replace(SMALL, **changes), seed=0)
    with (
        KurtosisProbe(model) as residual,
        KurtosisProbe(model, where="linears") as linears,
        KurtosisProbe(model, ["blocks.*_norm"]) as named,
        KurtosisProbe(model, lambda _, path: path.endswith("_proj") or path == "norm") as some,
    ):
        model(TOKENS)
    with KurtosisProbe(model, ["embed"]), pytest.raises(TrimtabError, match="'embed' has none"):
        model(TOKENS)
    assert list(residual.summary()) == ["blocks.0", "blocks.1", "blocks.1 output"]
    assert set(named.summary()) == {f"blocks.{i}.{name}_norm" for i in range(2) for name in ("attn", "mlp")}
    assert set(some.summary()) == ({"norm", "embed_proj", "head_proj"} if "embproj" in changes else {"norm"})
    names = set(linears.summary())
    assert {"blocks.0.attn.q", "blocks.1.attn.o"} <= names
    assert not names & {"head", "embed_proj", "head_proj", "blocks.0.mlp.router"}
    if "num_experts" in changes:
        rows = [linears.summary()[f"blocks.0.mlp.experts.{e}.down"].tokens for e in range(3)]
        assert sum(rows) == 24


def test_recomputed_forwards_are_not_counted_twice() -> None:
    model = Decoder(SMALL, seed=0, checkpointing=True)
    with KurtosisProbe(model, where="linears") as probe:
        model(TOKENS, TOKENS).loss.backward()
    assert {row.tokens for row in probe.summary().values()} == {24}


def test_a_block_without_a_forward_warns_and_so_does_a_model_compiled_before() -> None:
    model = Decoder(SMALL, seed=0)
    compiled = torch.compile(model, backend="eager")
    compiled(TOKENS)
    probe = KurtosisProbe(model)
    for run in (lambda: None, lambda: compiled(TOKENS)):
        with pytest.warns(NoEffectWarning, match="measured nothing"), probe:
            run()
    with torch.compiler.set_stance("force_eager"), probe:
        compiled(TOKENS)
    assert probe.summary()["blocks.0"].tokens == TOKENS.numel()


def test_outliers_show_where_they_are() -> None:
    model = Decoder(ModelConfig.size("micro", layers=3), seed=0)
    with torch.no_grad():
        model.blocks[1].mlp.down.weight[7] *= 1000  # one feature of the residual stream, from block 1 on
    with KurtosisProbe(model) as probe, torch.no_grad():
        model(torch.randint(256, (2, 64)))
    means = {name: row.mean for name, row in probe.summary().items()}
    assert abs(means["blocks.0"]) < 1
    assert abs(means["blocks.1"]) < 1
    assert means["blocks.2"] > 20
    assert means["blocks.2 output"] > 20


def test_a_place_that_does_not_exist_is_refused() -> None:
    model = Decoder(SMALL)
    for arguments, options, message in (
        ((["blocks.*.ffn"],), {}, "got 'blocks.\\*.ffn'"),
        (("blocks.*",), {}, "write \\['blocks.\\*'\\]"),
        ((lambda *_: False,), {}, "got none"),
        ((["norm"],), {"where": "linears"}, "got both"),
        ((), {"where": "attention"}, "'residual' or 'linears', got 'attention'"),
    ):
        with pytest.raises(TrimtabError, match=message):
            KurtosisProbe(model, *arguments, **options)
    with pytest.raises(TrimtabError, match="got none"):
        KurtosisProbe(nn.Linear(3, 3))
    assert Kurtosis(0.0, 0.0, 0, 0)._fields == ("mean", "max", "tokens", "undefined")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_the_gpu_it_waits_for_nothing_and_finds_the_same(no_waits: Any) -> None:
    model = Decoder(SMALL, seed=0)
    with KurtosisProbe(model) as expected:
        model(TOKENS)
    model, tokens = model.cuda(), TOKENS.cuda()
    with KurtosisProbe(model) as probe, no_waits():
        model(tokens)
    for name, row in probe.summary().items():
        assert row.mean == pytest.approx(expected.summary()[name].mean, rel=1e-3, abs=1e-3)
