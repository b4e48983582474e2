# SPDX-License-Identifier: Apache-2.0
"""The lab's decoder: its sizes, its structure, and that it learns."""

import copy
import dataclasses
import io
import math
import sysconfig
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.functional import linear, scaled_dot_product_attention

import trimtab
from trimtab.control.units import find_units
from trimtab.errors import TrimtabError
from trimtab.lab.model import (
    SIZES,
    Decoder,
    Mixture,
    ModelConfig,
    SwiGLU,
    causal_attention,
    rope,
    rope_tables,
    route,
)
from trimtab.modules import output_head
from trimtab.nn import SSNorm

SMALL = ModelConfig(vocab_size=32, width=16, layers=2, heads=2, ffn=24, max_seq=12)
ROUTED = dataclasses.replace(SMALL, num_experts=4, top_k=2)
OSP = dataclasses.replace(SMALL, norm="ssnorm", embproj=True)


def _tokens(config: ModelConfig, batch: int = 2) -> torch.Tensor:
    return torch.randint(config.vocab_size, (batch, config.max_seq + 1), generator=torch.Generator().manual_seed(7))


def _gradients(model: Decoder) -> dict[str, torch.Tensor | None]:
    tokens = _tokens(model.config)
    model.zero_grad()
    loss = model(tokens[:, :-1], tokens[:, 1:]).loss
    assert loss is not None
    loss.backward()
    return {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize(
    ("name", "millions"), [("micro", 0.132), ("tiny", 0.857), ("60m", 60), ("130m", 130), ("350m", 350), ("1b", 1300)]
)
def test_sizes_have_the_parameters_their_names_say(name: str, millions: float) -> None:
    with torch.device("meta"):
        model = Decoder(ModelConfig.size(name))
    assert model.num_parameters() == pytest.approx(millions * 1e6, rel=0.06)


def test_the_paper_sizes_have_its_recoverable_units() -> None:
    for name, units in (("60m", 56), ("130m", 84), ("350m", 168), ("1b", 168)):
        with torch.device("meta"):
            model = Decoder(ModelConfig.size(name))
        assert sum(isinstance(m, nn.Linear) for m in model.blocks.modules()) == units


def test_a_size_takes_overrides_and_names_what_it_does_not_know() -> None:
    assert ModelConfig.size("60m", vocab_size=256).vocab_size == 256
    assert SIZES["60m"].vocab_size == 32_000
    with pytest.raises(TrimtabError, match=r"60m.*got 'huge'"):
        ModelConfig.size("huge")
    with pytest.raises(TrimtabError, match=r"no field 'depth'.*layers"):
        ModelConfig.size("micro", depth=3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"heads": 3}, "width 16 and heads 3"),
        ({"heads": 16}, "even multiple"),
        ({"kv_heads": 3}, "kv_heads must divide"),
        ({"kv_heads": 0}, "kv_heads must divide"),
        ({"layers": 0}, "layers must be at least 1"),
        ({"num_experts": 2, "top_k": 3}, "top_k must lie between 1 and num_experts"),
        ({"num_experts": -1}, "num_experts must be 0"),
        ({"num_experts": 10**6}, r"at most 32,768 linears, got 6,000,008 \(2 layers, 1,000,000 experts\)"),
        ({"layers": 10**9}, "at most 32,768 linears"),
        ({"norm": "layernorm"}, "rmsnorm, ssnorm, got 'layernorm'"),
    ],
)
def test_a_config_that_cannot_work_is_refused(change: dict, message: str) -> None:
    with pytest.raises(TrimtabError, match=message):
        dataclasses.replace(SMALL, **change)


def test_module_paths_are_the_documented_ones() -> None:
    block = {"attn_norm", "attn.q", "attn.k", "attn.v", "attn.o", "mlp_norm", "mlp.gate", "mlp.up", "mlp.down"}
    names = {name.removesuffix(".weight") for name, _ in Decoder(SMALL).named_parameters()}
    assert names == {"embed", "norm", "head"} | {f"blocks.{i}.{name}" for i in range(2) for name in block}
    routed = {name.removesuffix(".weight") for name, _ in Decoder(ROUTED).named_parameters()}
    assert {"blocks.1.mlp.router", "blocks.1.mlp.experts.3.down"} <= routed
    assert "blocks.1.mlp.down" not in routed


def test_the_state_dict_holds_parameters_only() -> None:
    model = Decoder(SMALL)
    assert set(model.state_dict()) == {name for name, _ in model.named_parameters()}


@pytest.mark.parametrize("config", [SMALL, dataclasses.replace(SMALL, kv_heads=1), ROUTED])
def test_a_token_changes_no_logits_before_it(config: ModelConfig) -> None:
    model = Decoder(config, seed=0).eval()
    tokens = _tokens(config)[:, :-1]
    changed = tokens.clone()
    changed[:, 5] = (changed[:, 5] + 1) % config.vocab_size
    before, after = model(tokens).logits, model(changed).logits
    torch.testing.assert_close(before[:, :5], after[:, :5], rtol=0, atol=1e-6)
    assert (before[:, 5:] - after[:, 5:]).abs().amax(dim=(0, 2)).min() > 1e-6


def test_rope_products_depend_on_the_distance_alone() -> None:
    cos, sin = rope_tables(20, 8, 10_000.0)
    assert cos[3].tolist() == pytest.approx([math.cos(3 * 10_000 ** (-2 * i / 8)) for i in range(4)])
    assert sin[7].tolist() == pytest.approx([math.sin(7 * 10_000 ** (-2 * i / 8)) for i in range(4)])
    query, key = torch.randn(8), torch.randn(8)
    turned_query, turned_key = rope(query.expand(20, 8), cos, sin), rope(key.expand(20, 8), cos, sin)
    products = turned_query @ turned_key.T  # (20, 20)
    for distance in (-7, 0, 3):
        diagonal = products.diagonal(distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal))
    assert products[0, 0] != products[0, 5]
    torch.testing.assert_close(turned_query.norm(dim=-1), query.norm().expand(20))


def test_grouped_queries_equal_full_attention_with_repeated_keys_and_values() -> None:
    config = ModelConfig(vocab_size=32, width=32, layers=2, heads=4, ffn=24, max_seq=12, kv_heads=2)
    grouped, full = Decoder(config, seed=0), Decoder(dataclasses.replace(config, kv_heads=None), seed=1)
    state = grouped.state_dict()
    for name in [n for n in state if n.endswith(("attn.k.weight", "attn.v.weight"))]:
        state[name] = state[name].view(2, 8, 32).repeat_interleave(2, dim=0).reshape(32, 32)
    full.load_state_dict(state)
    tokens = _tokens(config)[:, :-1]
    torch.testing.assert_close(grouped(tokens).logits, full(tokens).logits)


def test_one_expert_equals_a_dense_layer() -> None:
    config = dataclasses.replace(SMALL, num_experts=1, top_k=1)
    dense, routed = Decoder(SMALL, seed=0), Decoder(config, seed=1)
    state = {name.replace(".mlp.", ".mlp.experts.0."): value for name, value in dense.state_dict().items()}
    missing = routed.load_state_dict(state, strict=False)
    assert all(name.endswith("router.weight") for name in missing.missing_keys)
    tokens = _tokens(SMALL)
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    torch.testing.assert_close(dense(inputs).logits, routed(inputs).logits)
    # An even load costs exactly the coefficient, and only while training.
    assert (routed(inputs, targets).loss - dense(inputs, targets).loss).item() == pytest.approx(0.01, abs=1e-6)
    assert routed.eval()(inputs, targets).loss.item() == pytest.approx(dense(inputs, targets).loss.item(), abs=1e-6)


@pytest.mark.parametrize("top_k", [1, 2, 3])
def test_routing_conserves_tokens(top_k: int) -> None:
    logits = torch.randn(50, 4)
    weights, chosen, balance = route(logits, top_k)
    assert all(len(set(row.tolist())) == top_k for row in chosen)
    if top_k > 1:
        torch.testing.assert_close(weights.sum(dim=-1), torch.ones(50))
    share = torch.stack([(chosen == e).float().mean() for e in range(4)])
    torch.testing.assert_close(balance, 4 * (share * logits.softmax(-1).mean(0)).sum())


def test_a_mixture_is_the_weighted_sum_of_the_chosen_experts() -> None:
    mixture = Mixture(ROUTED)
    x = torch.randn(2, 5, ROUTED.width)
    weights, chosen, _ = route(mixture.router(x.view(10, -1)), 2)
    every = torch.stack([expert(x.view(10, -1)) for expert in mixture.experts])  # (experts, tokens, width)
    expected = sum(weights[:, k, None] * every[chosen[:, k], torch.arange(10)] for k in range(2))
    torch.testing.assert_close(mixture(x)[0].view(10, -1), expected)


def test_an_even_load_has_balance_one_and_a_collapsed_one_more() -> None:
    even = torch.full((8, 4), -20.0)
    even[torch.arange(8), torch.arange(8) % 4] = 20.0
    collapsed = torch.full((8, 4), -20.0)
    collapsed[:, 0] = 20.0
    assert route(even, 1)[2].item() == pytest.approx(1.0)
    assert route(collapsed, 1)[2].item() == pytest.approx(4.0)


def test_an_expert_without_tokens_has_no_gradient() -> None:
    model = Decoder(dataclasses.replace(ROUTED, num_experts=8, top_k=1), seed=0)
    used: set[str] = set()
    for name, module in model.named_modules():
        if isinstance(module, SwiGLU):
            module.register_forward_hook(lambda *_, name=name: used.add(name))
    tokens = _tokens(SMALL)[:1, :5]  # four tokens reach at most four of the eight experts
    model(tokens[:, :-1], tokens[:, 1:]).loss.backward()
    for name, parameter in model.named_parameters():
        if ".experts." in name:
            assert (parameter.grad is not None) == (name.rsplit(".", 2)[0] in used), name
        else:
            assert parameter.grad is not None, name
    assert 2 <= len(used) <= 8


@pytest.mark.parametrize("config", [SMALL, ROUTED, OSP, dataclasses.replace(OSP, num_experts=4)])
def test_checkpointing_gives_bit_equal_gradients(config: ModelConfig) -> None:
    plain, recomputed = Decoder(config, seed=0), Decoder(config, seed=0, checkpointing=True)
    calls: list[int] = []
    recomputed.blocks[0].register_forward_pre_hook(lambda *_: calls.append(1))
    expected, got = _gradients(plain), _gradients(recomputed)
    assert len(calls) == 2, "the block was run again in the backward"
    for name, gradient in expected.items():
        if gradient is None:
            assert got[name] is None
        else:
            assert torch.equal(got[name], gradient), name


def test_a_seed_fixes_the_weights_and_leaves_the_global_generator_alone() -> None:
    state = torch.get_rng_state()
    first, second, third = Decoder(SMALL, seed=3), Decoder(SMALL, seed=3), Decoder(SMALL, seed=4)
    by_generator = Decoder(SMALL, seed=torch.Generator().manual_seed(3))
    assert torch.equal(torch.get_rng_state(), state)
    for name, value in first.state_dict().items():
        assert torch.equal(value, second.state_dict()[name])
        assert torch.equal(value, by_generator.state_dict()[name])
    assert not torch.equal(first.head.weight, third.head.weight)


def test_weights_can_be_drawn_after_a_build_on_the_meta_device() -> None:
    with torch.device("meta"):
        late = Decoder(dataclasses.replace(SMALL, tied=True))
    late.to_empty(device="cpu")
    late.head.weight = late.embed.weight
    late.reset_parameters(3)
    tokens = _tokens(SMALL)[:, :-1]
    assert torch.equal(late(tokens).logits, Decoder(dataclasses.replace(SMALL, tied=True), seed=3)(tokens).logits)


def test_initial_weights_have_the_documented_scale() -> None:
    model = Decoder(ModelConfig.size("tiny"), seed=0)
    assert model.blocks[0].mlp.up.weight.std().item() == pytest.approx(0.02, rel=0.03)
    assert model.blocks[0].mlp.down.weight.std().item() == pytest.approx(0.02 / 8**0.5, rel=0.03)
    assert model.blocks[3].attn.o.weight.std().item() == pytest.approx(0.02 / 8**0.5, rel=0.03)
    assert torch.equal(model.norm.weight, torch.ones(128))


def test_a_tied_head_shares_its_weight_and_is_counted_once() -> None:
    free, tied = Decoder(SMALL), Decoder(dataclasses.replace(SMALL, tied=True))
    assert tied.head.weight is tied.embed.weight
    assert free.num_parameters() - tied.num_parameters() == 32 * 16
    assert output_head(tied) is tied.head
    assert output_head(free) is free.head


def test_a_sequence_beyond_max_seq_is_refused() -> None:
    with pytest.raises(TrimtabError, match="at most max_seq = 12 tokens, got 13"):
        Decoder(SMALL)(torch.zeros(1, 13, dtype=torch.int64))


def test_the_loss_is_computed_in_fp32() -> None:
    tokens = _tokens(SMALL)
    output = Decoder(SMALL, seed=0).to(torch.bfloat16)(tokens[:, :-1], tokens[:, 1:])
    assert output.logits.dtype == torch.bfloat16
    assert output.loss.dtype == torch.float32
    assert Decoder(SMALL)(tokens[:, :-1]).loss is None


def test_swiglu_is_its_formula() -> None:
    layer, x = SwiGLU(SMALL), torch.randn(3, 16)
    gate = x @ layer.gate.weight.T
    expected = (gate * gate.sigmoid() * (x @ layer.up.weight.T)) @ layer.down.weight.T
    torch.testing.assert_close(layer(x), expected)


def test_ssnorm_replaces_every_norm_and_uses_the_same_eps() -> None:
    model = Decoder(dataclasses.replace(SMALL, norm="ssnorm", norm_eps=1e-3), seed=0)
    norms = [module for module in model.modules() if isinstance(module, SSNorm)]
    assert len(norms) == 5
    assert not any(isinstance(module, nn.RMSNorm) for module in model.modules())
    assert all(norm.eps == 1e-3 and norm.weight.tolist() == [1.0] for norm in norms)
    # With all gains at one the two kinds of norm are one function.
    tokens = _tokens(SMALL)[:, :-1]
    plain = Decoder(dataclasses.replace(SMALL, norm_eps=1e-3), seed=0)
    torch.testing.assert_close(model(tokens).logits, plain(tokens).logits)


def test_embproj_is_its_formula_and_starts_orthogonal() -> None:
    model, tokens = Decoder(OSP, seed=3), _tokens(OSP)[:, :-1]
    seen: dict[str, torch.Tensor] = {}
    model.blocks[0].register_forward_pre_hook(lambda _, args: seen.update(x0=args[0]))
    model.norm.register_forward_hook(lambda _, args, y: seen.update(last=y))
    logits = model(tokens).logits
    P, R = model.embed_proj.weight, model.head_proj.weight
    torch.testing.assert_close(seen["x0"], model.embed.weight[tokens] @ P.T)
    torch.testing.assert_close(logits, linear(linear(seen["last"], R), model.head.weight))
    for matrix in (P, R):
        torch.testing.assert_close(matrix @ matrix.T, torch.eye(16), rtol=0, atol=2e-6)
    assert not torch.equal(P, R)


@pytest.mark.parametrize("config", [SMALL, ROUTED, dataclasses.replace(SMALL, tied=True)])
def test_embproj_leaves_the_other_weights_of_a_seed_as_they_were(config: ModelConfig) -> None:
    plain = Decoder(config, seed=3).state_dict()
    first, second = (Decoder(dataclasses.replace(config, embproj=True), seed=3).state_dict() for _ in range(2))
    assert set(first) - set(plain) == {"embed_proj.weight", "head_proj.weight"}
    assert all(torch.equal(first[name], value) for name, value in plain.items())
    assert all(torch.equal(first[name], value) for name, value in second.items())


def test_every_parameter_of_an_osp_model_gets_a_gradient_tied_or_not() -> None:
    for tied in (False, True):
        assert all(g is not None and g.any() for g in _gradients(Decoder(dataclasses.replace(OSP, tied=tied))).values())


def test_under_autocast_embproj_keeps_the_residual_stream_wide() -> None:
    model, types = Decoder(OSP, seed=0), []
    for block in model.blocks:
        block.register_forward_pre_hook(lambda _, args: types.append(args[0].dtype))
    with torch.autocast("cpu", torch.bfloat16):
        model(_tokens(OSP)[:, :-1])
    assert types == [torch.float32] * 2


@pytest.mark.parametrize("config", [OSP, dataclasses.replace(OSP, num_experts=4), dataclasses.replace(OSP, tied=True)])
def test_conversion_leaves_projections_and_head_high(config: ModelConfig) -> None:
    model = Decoder(config, seed=0)
    assert output_head(model) is model.head
    watched = {unit.name for unit in find_units(model)}
    assert {"embed_proj", "head_proj"} <= watched
    report = trimtab.convert_(model, "fp8")
    assert all(path.startswith("blocks.") for path in report.covered)
    assert {"embed_proj", "head_proj", "head"} <= set(report.skipped)
    assert {unit.name for unit in find_units(model)} == set(report.covered)
    _gradients(model)
    controller = trimtab.Controller(model, trimtab.Policy(max_high=1), total_steps=10)
    controller.step()


def test_attend_gets_the_true_keys_and_values_and_can_be_replaced() -> None:
    config = ModelConfig(vocab_size=32, width=32, layers=2, heads=4, ffn=24, max_seq=12, kv_heads=2)
    model, tokens, shapes = Decoder(config, seed=0), _tokens(config)[:, :-1], []
    before = model(tokens).logits
    keys = set(model.state_dict())

    def halved(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        shapes.append((tuple(q.shape), tuple(k.shape), tuple(v.shape)))
        return causal_attention(q, k, 0.5 * v)

    assert model.blocks[0].attn.attend is causal_attention
    for block in model.blocks:
        block.attn.attend = halved
    after = model(tokens).logits
    assert shapes == [((2, 4, 12, 8), (2, 2, 12, 8), (2, 2, 12, 8))] * 2
    scaled = Decoder(config, seed=0)
    for block in scaled.blocks:
        block.attn.v.weight.data *= 0.5
    torch.testing.assert_close(after, scaled(tokens).logits)
    assert not torch.allclose(after, before)
    assert set(model.state_dict()) == keys


def test_causal_attention_repeats_what_heads_share() -> None:
    q, k, v = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 5, 8), torch.randn(2, 2, 5, 8)
    y = causal_attention(q, k, v)
    for head in range(4):
        shared = slice(head // 2, head // 2 + 1)
        expected = scaled_dot_product_attention(q[:, head : head + 1], k[:, shared], v[:, shared], is_causal=True)
        torch.testing.assert_close(y[:, head : head + 1], expected)


def test_a_decoder_can_be_copied_and_pickled_whole() -> None:
    model, tokens = Decoder(OSP, seed=0), _tokens(OSP)[:, :-1]
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    for other in (copy.deepcopy(model), torch.load(buffer, weights_only=False)):
        assert torch.equal(other(tokens).logits, model(tokens).logits)
        assert other.blocks[0].attn.attend is causal_attention


@pytest.mark.parametrize("experts", [0, 4])
def test_a_micro_model_learns_real_text(experts: int) -> None:
    text = (Path(sysconfig.get_path("stdlib")) / "argparse.py").read_bytes()
    tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    model = Decoder(ModelConfig.size("micro", num_experts=experts), seed=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    generator = torch.Generator().manual_seed(0)
    losses = []
    for _ in range(60 if not experts else 40):
        offsets = torch.randint(len(tokens) - 129, (8,), generator=generator)
        batch = torch.stack([tokens[o : o + 129] for o in offsets])
        loss = model(batch[:, :-1], batch[:, 1:]).loss
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert losses[0] == pytest.approx(5.55, abs=0.1)
    assert min(losses[-5:]) < 3.0
