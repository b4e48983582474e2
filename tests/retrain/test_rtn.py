# SPDX-License-Identifier: Apache-2.0
"""`rtn_` on whole models: a decoder written out by hand with every quantizer in its place gives the same logits, a
Transformers LLaMA with the same weights does too, and what the protocol leaves alone keeps every bit."""

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm, scaled_dot_product_attention, silu

from trimtab.control.act import running
from trimtab.errors import NoEffectWarning, TrimtabError
from trimtab.lab.model import Decoder, ModelConfig, rope
from trimtab.linear.convert import convert_
from trimtab.retrain import RtnReport, mix, quantize_activation, quantize_kv, quantize_weight, rtn_

VOCAB = 40
SHAPE = {"vocab_size": VOCAB, "width": 32, "layers": 2, "heads": 4, "ffn": 44, "max_seq": 16}


def decoder(**changes: Any) -> Decoder:
    """A small decoder in float64, where a rounding does not depend on the order of a sum; larger weights than usual."""
    model = Decoder(ModelConfig(**{**SHAPE, **changes}), seed=0).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4.0 if parameter.dim() > 1 else torch.linspace(0.5, 2, parameter.numel()))
    return model


def tokens(seed: int = 0) -> Tensor:
    return torch.randint(0, VOCAB, (3, 16), generator=torch.Generator().manual_seed(seed))


def logits(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return model(tokens()).logits


def change(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / b.norm())


def state(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def is_untouched(model: nn.Module, before: dict[str, Tensor]) -> bool:
    hooks = any(module._forward_pre_hooks for module in model.modules())
    return not hooks and all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def by_hand(model: Decoder, w: int, a: int, kv: int, had: bool) -> Tensor:
    """The dense decoder as a formula, with the quantizers written where the protocol has them."""
    config, size = model.config, model.config.head_dim

    def linear(module: nn.Linear, x: Tensor, group: int | None = None, rotate: bool = False) -> Tensor:
        weight, x = (mix(module.weight), mix(x)) if rotate else (module.weight, x)
        return quantize_activation(x, a, group=group) @ quantize_weight(weight, w).T

    def heads(x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, size)).transpose(1, 2)

    x = model.embed(tokens())
    for block in model.blocks:
        attn, mlp = block.attn, block.mlp
        y = rms_norm(x, (config.width,), block.attn_norm.weight, config.norm_eps)
        q, k = (rope(heads(linear(m, y)), model.cos, model.sin) for m in (attn.q, attn.k))
        q, k, v = quantize_kv(q, k, heads(linear(attn.v, y)), kv) if kv < 16 else (q, k, heads(linear(attn.v, y)))
        k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for t in (k, v))
        y = scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2)
        x = x + linear(attn.o, y, group=size)
        y = rms_norm(x, (config.width,), block.mlp_norm.weight, config.norm_eps)
        x = x + linear(mlp.down, silu(linear(mlp.gate, y)) * linear(mlp.up, y), rotate=had)
    return rms_norm(x, (config.width,), model.norm.weight, config.norm_eps) @ model.head.weight.T


@pytest.mark.parametrize("kv_heads", [None, 2])
@pytest.mark.parametrize("bits", [(4, 16, 16), (16, 4, 16), (16, 16, 4), (4, 4, 16), (4, 8, 8), (4, 4, 4), (2, 3, 5)])
def test_the_decoder_computes_what_the_protocol_says(bits: tuple[int, int, int], kv_heads: int | None) -> None:
    model = decoder(kv_heads=kv_heads)
    plain = logits(model)
    with torch.no_grad():
        expected = by_hand(model, *bits, had=False)
    rtn_(model, *bits)
    torch.testing.assert_close(logits(model), expected, rtol=1e-9, atol=1e-9)
    assert change(expected, plain) > 0.01


@pytest.mark.parametrize("ffn", [32, 44])
def test_the_rotation_of_the_ffn_spreads_its_outliers(ffn: int) -> None:
    model = decoder(ffn=ffn)
    with torch.no_grad():
        for block in model.blocks:
            block.mlp.up.weight[3] *= 40  # one feature of the feed-forward layer is an outlier
        expected = by_hand(model, 4, 4, 4, had=True)
        plain = logits(model)
        without = by_hand(model, 4, 4, 4, had=False)
    report = rtn_(model, 4, 4, 4, ffn_hadamard=True)
    torch.testing.assert_close(logits(model), expected, rtol=1e-9, atol=1e-9)
    assert change(expected, plain) < change(without, plain)
    assert report.rotated == ("blocks.0.mlp.down", "blocks.1.mlp.down")


def test_the_rotations_alone_change_no_logits() -> None:
    model = decoder(kv_heads=2)
    plain, before = logits(model), state(model)
    report = rtn_(model, 16, 16, 16, ffn_hadamard=True)
    assert not torch.allclose(model.blocks[0].mlp.down.weight, before["blocks.0.mlp.down.weight"])
    torch.testing.assert_close(logits(model), plain, rtol=1e-9, atol=1e-9)
    report.remove()
    torch.testing.assert_close(model.blocks[0].mlp.down.weight, before["blocks.0.mlp.down.weight"])
    seen = []
    for block in model.blocks:
        inner = block.attn.attend

        def rotated(q: Tensor, k: Tensor, v: Tensor, inner: Callable[..., Tensor] = inner) -> Tensor:
            seen.append(change(quantize_kv(q, k, v, 16)[1], k))
            return inner(*quantize_kv(q, k, v, 16))

        block.attn.attend = rotated
    torch.testing.assert_close(logits(model), plain, rtol=1e-9, atol=1e-9)
    assert len(seen) == 2
    assert min(seen) > 0.1  # the keys really were others


def test_weights_are_rounded_in_place_and_the_rest_keeps_every_bit() -> None:
    model = decoder()
    before, pointers = state(model), {name: p.data_ptr() for name, p in model.named_parameters()}
    report = rtn_(model, 4, 16)
    linears = {f"blocks.{i}.{part}" for i in (0, 1) for part in ("attn.q", "attn.k", "attn.v", "attn.o")}
    linears |= {f"blocks.{i}.mlp.{part}" for i in (0, 1) for part in ("gate", "up", "down")}
    assert set(report.weights) == linears
    assert report.inputs == {}
    for name, value in model.state_dict().items():
        wanted = quantize_weight(before[name], 4) if name.removesuffix(".weight") in linears else before[name]
        assert torch.equal(value, wanted), name
    assert {name: p.data_ptr() for name, p in model.named_parameters()} == pointers
    assert all(p.requires_grad for p in model.parameters())


def test_every_linear_but_the_head_gets_a_rounded_input() -> None:
    model, seen = decoder(), {}
    report = rtn_(model, 16, 3)
    for path, module in model.named_modules():
        if isinstance(module, nn.Linear):
            module.register_forward_pre_hook(lambda _, args, path=path: seen.update({path: args[0]}))
    logits(model)
    assert set(seen) == {*report.inputs, "head"}
    assert report.inputs["blocks.1.attn.o"] == 8
    assert report.inputs["blocks.1.attn.q"] is None
    for path, x in seen.items():
        group = report.inputs.get(path) or x.shape[-1]
        counts = [len(torch.unique(row)) for row in x.reshape(-1, group)]
        assert (max(counts) > 8) == (path == "head")


def test_without_the_clip_search_weights_keep_their_largest_value() -> None:
    model = decoder()
    before = state(model)
    rtn_(model, 4, 16, clip_search=False)
    weight = model.blocks[0].attn.q.weight
    torch.testing.assert_close(weight.abs().amax(dim=1), before["blocks.0.attn.q.weight"].abs().amax(dim=1))


def test_remove_takes_the_quantizers_out_and_leaves_the_weights() -> None:
    model = decoder()
    with torch.no_grad():
        expected = by_hand(model, 4, 16, 16, had=True)
    report = rtn_(model, 4, 4, 4, ffn_hadamard=True)
    with pytest.raises(TrimtabError, match="quantized already"):
        rtn_(model, 16, 4)
    report.remove()
    report.remove()
    torch.testing.assert_close(logits(model), expected, rtol=1e-9, atol=1e-9)
    assert not any(module._forward_pre_hooks for module in model.modules())
    rtn_(model, 16, 4, 4)


@pytest.mark.filterwarnings("ignore:.*Function'> should not be instantiated:DeprecationWarning")  # torch's own tracing
def test_a_model_compiled_before_is_rounded_too_and_goes_back() -> None:
    model = decoder()
    compiled = torch.compile(model, backend="eager")
    plain = logits(compiled)
    report = rtn_(model, 16, 4, 4, ffn_hadamard=True)
    rounded = logits(model)
    assert change(rounded, plain) > 0.01
    torch.testing.assert_close(logits(compiled), rounded)
    report.remove()
    torch.testing.assert_close(logits(compiled), plain)


def test_keys_and_values_are_not_rounded_twice() -> None:
    model = decoder()
    report = rtn_(model, 16, 16, 4)
    before = logits(model)
    with pytest.raises(TrimtabError, match=r"keys and values of 'blocks\.0\.attn' are quantized already"):
        rtn_(model, 4, 16, 4)
    assert torch.equal(logits(model), before)
    report.remove()
    rtn_(model, 16, 16, 4)
    assert torch.equal(logits(model), before)


def test_a_copy_of_a_rounded_model_is_rounded_too() -> None:
    model = decoder()
    rtn_(model, 4, 4, 4)
    assert torch.equal(logits(copy.deepcopy(model)), logits(model))


def test_bf16_stays_bf16() -> None:
    model = decoder().bfloat16()
    before = state(model)
    rtn_(model, 4, 4, 4, ffn_hadamard=True)
    weight = model.blocks[0].attn.q.weight
    assert weight.dtype == torch.bfloat16
    assert torch.equal(weight, quantize_weight(before["blocks.0.attn.q.weight"], 4))
    down = quantize_weight(mix(before["blocks.0.mlp.down.weight"].float()), 4).bfloat16()
    assert torch.equal(model.blocks[0].mlp.down.weight, down)
    assert logits(model).isfinite().all()


# What is covered.


def test_a_mixture_keeps_its_routers() -> None:
    model = decoder(num_experts=3, top_k=1)
    before = state(model)
    report = rtn_(model, 4, 4, 4, ffn_hadamard=True)
    assert report.skipped == {
        "blocks.0.mlp.router": "router",
        "blocks.1.mlp.router": "router",
        "head": "output head",
    }
    assert len(report.weights) == 2 * (4 + 3 * 3)
    assert len(report.rotated) == 2 * 3
    assert torch.equal(model.blocks[0].mlp.router.weight, before["blocks.0.mlp.router.weight"])
    assert logits(model).isfinite().all()


def test_an_unabsorbed_embproj_gives_what_an_absorbed_one_gives() -> None:
    model = decoder(embproj=True, norm="ssnorm")
    absorbed = copy.deepcopy(model)
    absorbed.embed_proj.absorb_(absorbed.embed, absorbed)
    absorbed.head_proj.absorb_(absorbed.head, absorbed)
    torch.testing.assert_close(logits(model), logits(absorbed))
    plain = logits(model)
    for one in (model, absorbed):
        report = rtn_(one, 4, 4, 4)
        assert set(report.skipped) == {"embed_proj", "head_proj", "head"}
    torch.testing.assert_close(logits(model), logits(absorbed), rtol=1e-6, atol=1e-6)
    assert change(logits(model), plain) > 0.01


def test_a_tied_head_keeps_the_embedding() -> None:
    model = decoder(tied=True)
    before = state(model)
    report = rtn_(model, 2, 2)
    assert report.skipped == {"head": "output head"}
    assert torch.equal(model.embed.weight, before["embed.weight"])


class Odd(nn.Module):
    """Two linears with one weight, a module under two names, one tied to the embedding, a bias, a lone parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 8)
        self.a, self.b, self.c = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8, bias=False)
        self.b.weight, self.c.weight = self.a.weight, self.embed.weight
        self.again = self.a
        self.head = nn.Linear(8, 8)
        self.stack = nn.Parameter(torch.randn(2, 8, 8))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.c(self.again(self.b(input=self.a(self.embed(x))))) @ self.stack[0])


def test_shared_and_lone_weights() -> None:
    model = Odd()
    before = state(model)
    report = rtn_(model, 3, 4, head="head")
    assert report.weights == ("a", "b")
    assert torch.equal(model.a.weight, quantize_weight(before["a.weight"], 3))  # rounded once, not twice
    assert model.b.weight is model.a.weight
    assert len(model.a._forward_pre_hooks) == 1
    for name in ("embed.weight", "a.bias", "b.bias", "stack", "head.weight"):
        assert torch.equal(model.state_dict()[name], before[name])
    assert report.skipped == {
        "head": "output head",
        "c": "shares its weight with an embedding or the head",
        "stack": "part of a Odd, not a linear",
    }
    h = model.embed(torch.arange(8))
    for linear in (model.a, model.b, model.a):
        h = quantize_activation(h, 4) @ linear.weight.T + linear.bias
    h = (h @ model.embed.weight.T) @ model.stack[0]
    torch.testing.assert_close(model(torch.arange(8)), h @ model.head.weight.T + model.head.bias)


def test_a_shared_weight_is_rotated_for_all_or_none() -> None:
    model = Odd()
    before = state(model)
    with pytest.raises(TrimtabError, match="of a, b only b would be: name all or none"):
        rtn_(model, 4, 4, head="head", ffn_hadamard=True, down_proj=["b"])
    assert is_untouched(model, before)
    plain = model(torch.arange(8))
    report = rtn_(model, 16, 16, head="head", ffn_hadamard=True, down_proj=["a", "b"])
    assert not torch.allclose(model.a.weight, before["a.weight"])
    torch.testing.assert_close(model(torch.arange(8)), plain)
    report.remove()
    torch.testing.assert_close(model.a.weight, before["a.weight"])


def test_other_names_are_given_by_patterns() -> None:
    model = nn.ModuleDict({"wo": nn.Linear(16, 8), "w2": nn.Linear(12, 8)})
    report = rtn_(model, 4, 4, out_proj={"w[o]": 4}, ffn_hadamard=True, down_proj=["w2"])
    assert report.inputs == {"wo": 4, "w2": None}
    assert report.rotated == ("w2",)
    x = torch.randn(5, 16)
    torch.testing.assert_close(model["wo"](x), nn.functional.linear(quantize_activation(x, 4, group=4), *wo(model)))


def wo(model: Any) -> tuple[Tensor, Tensor]:
    return model["wo"].weight, model["wo"].bias


def test_skipped_linears_stay() -> None:
    model = decoder()
    before = state(model)
    report = rtn_(model, 4, 4, skip=["blocks.0.*"])
    assert {path for path, reason in report.skipped.items() if reason == "skip"} == {
        f"blocks.0.{part}" for part in ("attn.q", "attn.k", "attn.v", "attn.o", "mlp.gate", "mlp.up", "mlp.down")
    }
    assert torch.equal(model.blocks[0].attn.q.weight, before["blocks.0.attn.q.weight"])
    assert not torch.equal(model.blocks[1].attn.q.weight, before["blocks.1.attn.q.weight"])


class Adapted(nn.Module):
    """A linear with a low-rank adapter beside it, named as PEFT names them."""

    def __init__(self) -> None:
        super().__init__()
        self.base_layer, self.lora_A, self.lora_B = nn.Linear(8, 8), nn.Linear(8, 2), nn.Linear(2, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) + self.lora_B(self.lora_A(x))


def test_adapters_stay_and_the_linear_below_them_does_not() -> None:
    model = nn.ModuleDict({"down": Adapted(), "up": nn.Linear(8, 8)})
    before = state(model)
    report = rtn_(model, 4, 4, ffn_hadamard=True)
    assert report.weights == ("down.base_layer", "up")
    assert report.rotated == ("down.base_layer",)
    assert report.skipped == dict.fromkeys(("down.lora_A", "down.lora_B"), "LoRA adapter")
    kept = {name for name, value in state(model).items() if torch.equal(value, before[name])}
    assert {"down.lora_A.weight", "down.lora_B.weight"} <= kept
    assert not kept & {"down.base_layer.weight", "up.weight"}


@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated")
@pytest.mark.parametrize("norm", [nn.utils.weight_norm, nn.utils.parametrizations.weight_norm])
def test_a_weight_that_is_computed_is_named_not_passed_off_as_rounded(norm: Any) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    norm(model[0])
    x = torch.randn(3, 8)
    before = model[0](x)
    report = rtn_(model, 2, 2)
    assert report.weights == ("1",)
    assert report.skipped["0"] == "its weight is computed anew at each call"
    assert torch.equal(model[0](x), before)


def test_torchs_own_attention_is_named_not_passed_off_as_rounded() -> None:
    report = rtn_(nn.TransformerEncoderLayer(8, 2, 16), 4, 4)
    assert report.weights == ("linear1", "linear2")
    assert report.skipped == {
        "self_attn.out_proj": "nn.MultiheadAttention does not call it",
        "self_attn.in_proj_weight": "part of a MultiheadAttention, not a linear",
    }


def test_a_converted_model_is_covered_and_its_high_path_is_the_plain_one() -> None:
    plain = decoder().float()
    converted = copy.deepcopy(plain)
    convert_(converted, "fp8")
    reports = [rtn_(model, 4, 4, 4) for model in (plain, converted)]
    assert reports[0].weights == reports[1].weights
    with running(converted, "high"):
        assert torch.equal(logits(converted), logits(plain))
    assert not torch.equal(logits(converted), logits(plain))


def test_the_report_says_what_was_done() -> None:
    model = decoder(embproj=True)
    text = str(rtn_(model, 4, 8, 8, ffn_hadamard=True))
    assert text.splitlines() == [
        "4-8-8 (weights-activations-kv): 14 weights; 14 inputs, 2 of them in groups of 8; 2 inputs rotated; keys and "
        "values of 2 attention modules",
        "  left alone 2 (EmbProj, to be absorbed by embedding or head): embed_proj, head_proj",
        "  left alone 1 (output head): head",
    ]
    assert "nothing rounded" in str(rtn_(decoder(), 16, 16, 16))
    many = str(rtn_(decoder(), 4, 16, skip=["blocks.*.attn.*"]))
    assert "left alone 8 (skip): blocks.0.attn.q, blocks.0.attn.k, blocks.0.attn.v and 5 more" in many


# Bad input leaves the model as it was.


class NoSeam(nn.Module):
    head_dim = 4

    def __init__(self) -> None:
        super().__init__()
        self.o = nn.Linear(8, 8)


@pytest.mark.parametrize(
    ("build", "options", "words"),
    [
        (decoder, {"w_bits": 9}, "w_bits must be 2 to 8, or 16 to leave it as it is, got 9"),
        (decoder, {"a_bits": 1}, "a_bits must be 2 to 8"),
        (decoder, {"kv_bits": True}, "kv_bits must be 2 to 8"),
        (decoder, {"skip": ["nothing.*"]}, "skip: a pattern must match the path of a linear, got 'nothing"),
        (decoder, {"out_proj": {"nothing": 8}}, "out_proj: a pattern must match"),
        (decoder, {"out_proj": {"blocks.*.attn.o": 5}}, r"must divide the 32 inputs of blocks\.0\.attn\.o, got 5"),
        (decoder, {"ffn_hadamard": True, "down_proj": ["nothing"]}, "down_proj: a pattern must match"),
        (decoder, {"head": "nothing"}, "head must be the path of a module"),
        (Odd, {"ffn_hadamard": True}, "named down or down_proj, and the model has none"),
        (Odd, {"kv_bits": 4}, "needs attention modules, .* and the model has none: set kv_bits=16"),
        (NoSeam, {"kv_bits": 4}, r"keys and values of '' \(NoSeam\) cannot be reached: give it an attribute `attend`"),
    ],
)
def test_bad_input_is_refused_before_anything_changes(build: Any, options: dict[str, Any], words: str) -> None:
    model = build()
    before = state(model)
    with pytest.raises(TrimtabError, match=words):
        rtn_(model, **options)
    assert is_untouched(model, before)


def test_a_model_without_linears_is_warned_about() -> None:
    with pytest.warns(NoEffectWarning, match="rounds no linear: it saw no nn.Linear at all") as caught:
        rtn_(nn.LayerNorm(4))
    assert caught[0].filename == __file__
    model = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 8))
    with pytest.warns(NoEffectWarning, match="it saw 1 weights with a reason to stay"):
        report = rtn_(model)
    assert report.skipped == {"1": "output head"}


# A model that has learned something.


@pytest.fixture(scope="module")
def trained() -> tuple[Decoder, Tensor]:
    """A decoder that has learned to continue arithmetic sequences, and some of them."""
    torch.manual_seed(0)
    model = Decoder(ModelConfig(**SHAPE), seed=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for _ in range(150):
        start, step = torch.randint(0, VOCAB, (32, 1)), torch.randint(1, 4, (32, 1))
        sequence = (start + step * torch.arange(17)) % VOCAB
        loss = model(sequence[:, :-1], sequence[:, 1:]).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval(), (torch.arange(VOCAB)[:, None] + 2 * torch.arange(17)) % VOCAB


def test_eight_bits_cost_little_and_two_bits_much(trained: tuple[Decoder, Tensor]) -> None:
    model, held_out = trained
    loss = {}
    for bits in (16, 8, 2):
        rounded = copy.deepcopy(model)
        rtn_(rounded, bits, bits, bits)
        with torch.no_grad():
            loss[bits] = rounded(held_out[:, :-1], held_out[:, 1:]).loss.item()
    assert loss[16] < 0.1 * math.log(VOCAB)
    assert loss[8] == pytest.approx(loss[16], rel=0.05)
    assert loss[2] > 3 * loss[16]


# Transformers.


def llama(model: Decoder, implementation: str = "sdpa") -> Any:
    """A Transformers LLaMA with the weights of a dense decoder."""
    transformers = pytest.importorskip("transformers")
    shape = model.config
    config = transformers.LlamaConfig(
        vocab_size=shape.vocab_size,
        hidden_size=shape.width,
        intermediate_size=shape.ffn,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads or shape.heads,
        rms_norm_eps=shape.norm_eps,
        max_position_embeddings=shape.max_seq,
        tie_word_embeddings=False,
        attn_implementation=implementation,
    )
    twin = transformers.LlamaForCausalLM(config).double().eval()
    pairs = {"embed": twin.model.embed_tokens, "norm": twin.model.norm, "head": twin.lm_head}
    for i, layer in enumerate(twin.model.layers):
        at, mlp = f"blocks.{i}", layer.mlp
        pairs |= {f"{at}.attn.{name}": getattr(layer.self_attn, f"{name}_proj") for name in "qkvo"}
        pairs |= {f"{at}.mlp.gate": mlp.gate_proj, f"{at}.mlp.up": mlp.up_proj, f"{at}.mlp.down": mlp.down_proj}
        pairs |= {f"{at}.attn_norm": layer.input_layernorm, f"{at}.mlp_norm": layer.post_attention_layernorm}
    with torch.no_grad():
        for name, module in pairs.items():
            module.weight.copy_(model.get_parameter(f"{name}.weight"))
    return twin


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_a_llama_computes_what_the_decoder_computes(implementation: str) -> None:
    model = decoder(kv_heads=2)
    twin, plain = llama(model, implementation), logits(model)
    torch.testing.assert_close(logits(twin), plain, rtol=1e-4, atol=1e-4)
    reports = [rtn_(one, 4, 4, 4, ffn_hadamard=True) for one in (model, twin)]
    ours, theirs = logits(model), logits(twin)
    assert change(ours, plain) > 0.05
    assert change(theirs, ours) < 1e-3  # its norms compute in FP32, ours in FP64
    assert len(reports[1].weights) == len(reports[0].weights) == 14
    assert reports[1].skipped == {"lm_head": "output head"}
    assert reports[1].attentions == ("model.layers.0.self_attn", "model.layers.1.self_attn")
    assert set(reports[1].inputs.values()) == {None, 8}
    with pytest.raises(TrimtabError, match="quantized already"):
        rtn_(twin, 16, 16, 8)


def test_another_llama_of_the_same_config_stays_as_it_is() -> None:
    transformers = pytest.importorskip("transformers")
    one = llama(decoder())
    other = transformers.LlamaForCausalLM(one.config).double().eval()
    before = logits(one), logits(other)
    report = rtn_(one, 16, 16, 2)
    assert torch.equal(logits(other), before[1])
    assert not torch.allclose(logits(one), before[0])
    assert one.config._attn_implementation == "sdpa"
    rounded = logits(one)
    for bits, hadamard in ((8, True), (2, False)):  # another way at the same time
        second = rtn_(other, 16, 16, bits, kv_hadamard=hadamard)
        assert torch.equal(logits(one), rounded)
        second.remove()
    report.remove()
    assert torch.equal(logits(one), before[0])
    assert one.model.layers[0].self_attn.config is one.config


def test_a_cache_gives_what_a_whole_sequence_gives() -> None:
    model = llama(decoder(kv_heads=2))
    plain = logits(model)
    rtn_(model, 16, 16, 3)
    whole, steps, cache = logits(model), [], None
    with torch.no_grad():
        for at in range(16):
            out = model(tokens()[:, at : at + 1], past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            steps.append(out.logits)
    torch.testing.assert_close(torch.cat(steps, dim=1), whole, rtol=1e-3, atol=1e-3)
    assert change(whole, plain) > 0.01


def test_the_report_is_a_plain_value() -> None:
    report = rtn_(decoder(), 4, 16)
    assert isinstance(report, RtnReport)
    assert (report.w_bits, report.a_bits, report.kv_bits) == (4, 16, 16)
