# SPDX-License-Identifier: Apache-2.0
"""A decoder as a Hugging Face LLaMA: the same logits, from memory and from the folder."""

import copy
import dataclasses
import json
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import trimtab
from trimtab.errors import MissingExtraError, TrimtabError
from trimtab.lab.export import save_llama, to_llama
from trimtab.lab.model import Decoder, ModelConfig, causal_attention
from trimtab.nn import KurtosisProbe

transformers = pytest.importorskip("transformers")

SMALL = ModelConfig(vocab_size=40, width=32, layers=2, heads=4, ffn=24, max_seq=24, norm_eps=1e-4)
TOKENS = torch.randint(40, (3, 24), generator=torch.Generator().manual_seed(2))


@pytest.fixture(autouse=True)
def _quiet() -> None:
    transformers.utils.logging.disable_progress_bar()


def decoder(**changes) -> Decoder:
    """A decoder that looks trained: gains are not one, projections not orthogonal."""
    model = Decoder(dataclasses.replace(SMALL, **changes), seed=0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    return model


def assert_same(llama: nn.Module, model: Decoder, atol: float = 1e-5) -> None:
    with torch.no_grad():
        expected, logits = model(TOKENS).logits, llama(TOKENS).logits
    assert expected.abs().max() > 0.5
    torch.testing.assert_close(logits, expected, rtol=0, atol=atol)


@pytest.mark.parametrize("embproj", [False, True])
@pytest.mark.parametrize("norm", ["rmsnorm", "ssnorm"])
@pytest.mark.parametrize("tied", [False, True])
def test_the_logits_are_the_same(norm: str, embproj: bool, tied: bool) -> None:
    model = decoder(norm=norm, embproj=embproj, tied=tied)
    before = copy.deepcopy(model.state_dict())
    state = torch.get_rng_state()
    llama = to_llama(model)
    assert torch.equal(torch.get_rng_state(), state), "no random number was used"
    assert type(llama) is transformers.LlamaForCausalLM
    assert not llama.training
    assert_same(llama, model)
    assert llama.config.tie_word_embeddings == (tied and not embproj)
    assert (llama.lm_head.weight is llama.model.embed_tokens.weight) == (tied and not embproj)
    with torch.no_grad():
        for parameter in llama.parameters():
            parameter.zero_()
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), "the decoder stays as it was, and shares nothing"


@pytest.mark.parametrize("changes", [{"kv_heads": 2}, {"kv_heads": 1}, {"rope_theta": 500.0}, {"norm_eps": 0.1}])
def test_shape_positions_and_eps_are_carried_over(changes: dict) -> None:
    model = decoder(**changes)
    assert_same(to_llama(model), model)
    with torch.no_grad():
        assert (decoder()(TOKENS).logits - model(TOKENS).logits).abs().max() > 1e-3, "the setting matters"


@pytest.mark.parametrize("tied", [False, True])
def test_the_folder_loads_as_any_other_llama(tmp_path: Path, tied: bool) -> None:
    model = decoder(norm="ssnorm", embproj=True, kv_heads=2, tied=tied)
    folder = save_llama(model, tmp_path / "out")
    assert {"config.json", "model.safetensors"} <= {path.name for path in folder.iterdir()}
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    for cls in (transformers.LlamaForCausalLM, transformers.AutoModelForCausalLM):
        loaded = cls.from_pretrained(folder)
        assert loaded.dtype == torch.float32
        assert_same(loaded, model)


def test_a_converted_model_exports_its_weights() -> None:
    model = decoder(norm="ssnorm", embproj=True)
    plain = copy.deepcopy(model)
    trimtab.convert_(model, "fp8")
    llama = to_llama(model)
    assert_same(llama, plain)
    with trimtab.running(model, "high"):
        assert_same(llama, model)
    with torch.no_grad():
        assert (llama(TOKENS).logits - model(TOKENS).logits).abs().max() > 1e-3, "the low path rounds; weights do not"


def test_a_compiled_model_exports_what_it_wraps_and_another_wrapper_is_refused() -> None:
    model = decoder()
    assert_same(to_llama(torch.compile(model, backend="eager")), model)  # type: ignore[arg-type]
    with pytest.raises(TrimtabError, match="takes a Decoder, got a DataParallel: pass what it wraps"):
        to_llama(torch.nn.DataParallel(model))  # type: ignore[arg-type]


def test_what_it_generates_is_the_decoders_greedy_continuation() -> None:
    model = decoder(norm="ssnorm", embproj=True, kv_heads=2)
    start = longer = TOKENS[:1, :4]
    asked = {"attention_mask": torch.ones_like(start), "max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    with torch.no_grad():
        for _ in range(8):
            longer = torch.cat([longer, model(longer).logits[:, -1:].argmax(-1)], dim=1)
    assert torch.equal(to_llama(model).generate(start, **asked), longer)


def test_a_bf16_model_becomes_a_bf16_llama_with_exact_positions() -> None:
    model = decoder(norm="ssnorm", embproj=True).to(torch.bfloat16)
    llama = to_llama(model)
    assert {p.dtype for p in llama.parameters()} == {torch.bfloat16}
    assert llama.model.rotary_emb.inv_freq.dtype == torch.float32
    assert_same(llama, model, atol=0.25)  # both round at every step


def test_the_probe_reads_the_same_inside_both() -> None:
    model = decoder(norm="ssnorm", embproj=True, kv_heads=2)
    llama = to_llama(model)
    for where in ("residual", "linears"):
        with torch.no_grad(), KurtosisProbe(model, where=where) as ours, KurtosisProbe(llama, where=where) as theirs:
            model(TOKENS)
            llama(TOKENS)
        assert len(ours.summary()) == len(theirs.summary()) == (3 if where == "residual" else 14)
        for a, b in zip(ours.summary().values(), theirs.summary().values(), strict=True):
            assert a.mean == pytest.approx(b.mean, abs=1e-3)
            assert a.tokens == b.tokens == 72


def test_what_a_llama_cannot_do_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TrimtabError, match=r"a mixture of 4 experts: only dense"):
        to_llama(decoder(num_experts=4))
    model = decoder()
    model.blocks[1].attn.attend = lambda q, k, v: causal_attention(q, k, v.round())
    with pytest.raises(TrimtabError, match=r"'blocks.1.attn' with an `attend` of its own"):
        to_llama(model)
    model = decoder()
    model.blocks[0].mlp.up = nn.Sequential(model.blocks[0].mlp.up)
    with pytest.raises(TrimtabError, match=r"'blocks.0.mlp.up' as a Sequential"):
        to_llama(model)
    model = decoder()
    handle = model.blocks[0].mlp.down.register_forward_pre_hook(lambda _, args: (args[0].round(),))
    with pytest.raises(TrimtabError, match=r"'blocks.0.mlp.down' with one.*before it is quantized"):
        to_llama(model)
    handle.remove()
    assert_same(to_llama(model), model)
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(MissingExtraError, match=r"to_llama needs transformers.*trimtab\[hf\]"):
        to_llama(decoder())
