# SPDX-License-Identifier: Apache-2.0
"""`retrain_`: any model with decoder blocks, block by block, and bit for bit the same after an interruption."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from trimtab.errors import TrimtabError
from trimtab.lab.model import Decoder, ModelConfig
from trimtab.retrain import Packed, Progress, Settings, perplexity, retrain_, saliency, windows
from trimtab.retrain.blocks import find_blocks, record_calls

VOCAB = 24
QUICK = Settings(group=16, rank=4, alpha=4.0, epochs=2, batch=2, lr_clip=0.05, lr_lora=5e-3)


def decoder(**fields: Any) -> Decoder:
    shape = {"vocab_size": VOCAB, "width": 32, "layers": 3, "heads": 2, "ffn": 40, "max_seq": 32} | fields
    return Decoder(ModelConfig(**shape), seed=0)


def transformers_model(kind: str) -> Any:
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2}
    torch.manual_seed(0)
    if kind == "llama":
        config = transformers.LlamaConfig(**sizes, intermediate_size=40, num_key_value_heads=1)
    elif kind == "neox":
        config = transformers.GPTNeoXConfig(**sizes, intermediate_size=40)
    elif kind == "opt":
        config = transformers.OPTConfig(**sizes, ffn_dim=40, word_embed_proj_dim=32, max_position_embeddings=64)
    else:
        config = transformers.Gemma3TextConfig(
            **sizes, intermediate_size=40, num_key_value_heads=1, head_dim=16, sliding_window=4,
            layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        )  # fmt: skip
    return transformers.AutoModelForCausalLM.from_config(config).eval()


def sequences(num: int = 4) -> Tensor:
    return torch.randint(0, VOCAB, (num, 12), generator=torch.Generator().manual_seed(1))


def logits(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return model(sequences()).logits


def same(one: dict[str, Packed] | Any, other: dict[str, Packed] | Any) -> bool:
    return list(one) == list(other) and all(
        torch.equal(value, other[path].tensors()[name]) for path in one for name, value in one[path].tensors().items()
    )


@pytest.mark.parametrize(
    ("kind", "prefix", "linears"),
    [
        ("decoder", "blocks.", 21),
        ("llama", "model.layers.", 21),
        ("neox", "gpt_neox.layers.", 12),
        ("opt", "model.decoder.layers.", 18),
        ("gemma3", "model.layers.", 21),
    ],
)
def test_a_model_of_any_names_is_retrained(kind: str, prefix: str, linears: int) -> None:
    model = decoder() if kind == "decoder" else transformers_model(kind)
    plain = copy.deepcopy(model)
    seen: list[Progress] = []
    report = retrain_(model, sequences(), QUICK, watch=seen.append)
    assert len(report.linears) == linears
    assert all(path.startswith(prefix) for path in report.linears)
    assert [(at.block, at.epoch) for at in seen if at.after is not None] == [(0, 2), (1, 2), (2, 2)]
    assert [(at.block, at.epoch) for at in seen if at.after is None] == [(b, e) for b in range(3) for e in (1, 2)]
    for name, parameter in plain.named_parameters():
        path = name.removesuffix(".weight")
        now = model.get_parameter(name)
        if path in report.linears:
            assert torch.equal(now, report.linears[path].weight())
            assert not torch.equal(now, parameter)
        else:
            assert torch.equal(now, parameter)
    for block, other in zip(find_blocks(model).values(), find_blocks(plain).values(), strict=True):
        assert [type(m) for m in block.modules()] == [type(m) for m in other.modules()]
        assert not any(m._forward_pre_hooks or m._forward_hooks for m in block.modules())
    assert all(parameter.requires_grad for parameter in model.parameters())
    # The streams that the walk handed on are those of the model itself.
    outputs: dict[str, list[Tensor]] = {"plain": [], "few bits": []}
    for name, one in (("plain", plain), ("few bits", model)):
        for block in find_blocks(one).values():
            block.register_forward_hook(
                lambda _, __, out, to=outputs[name]: to.append(out[0] if isinstance(out, tuple) else out)
            )
        logits(one)
    for error, good, low in zip(report.blocks, outputs["plain"], outputs["few bits"], strict=True):
        assert error.after == pytest.approx(((low - good).square().mean() / good.square().mean()).item(), rel=1e-3)


def test_retraining_beats_rounding_on_a_model_that_has_learned() -> None:
    torch.manual_seed(0)
    model = decoder(layers=2, width=64, ffn=96)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)

    def text(num: int) -> Tensor:
        return (torch.randint(0, VOCAB, (num, 1)) + torch.randint(1, 4, (num, 1)) * torch.arange(17)) % VOCAB

    for _ in range(60):
        drawn = text(16)
        loss = model(drawn[:, :-1], drawn[:, 1:]).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    calibration, held_out = text(16), text(64)
    F = saliency(model, calibration)

    def log_probs(model: nn.Module) -> Tensor:
        with torch.no_grad():
            return model(held_out).logits.log_softmax(-1)

    plain = log_probs(model)
    arms = {
        "rounded": {"rank": 0, "epochs": 0},
        "clipped": {"rank": 0},
        "lora": {"lam": 0.0},
        "salient": {"lam": 0.1},
    }
    found = {}
    weights, factors = 4 * 64 * 64 + 3 * 64 * 96, 8 * (4 * 128 + 3 * 160)
    for name, arm in arms.items():
        settings = Settings.from_dict({"group": 32, "rank": 8, "alpha": 8.0, "epochs": 4, "batch": 2, **arm})
        one = copy.deepcopy(model)
        report = retrain_(one, calibration, settings, saliency=F)
        found[name] = (plain.exp() * (plain - log_probs(one))).sum(-1).mean()  # the divergence from the plain model
        assert report.bits_per_weight == pytest.approx(2 + 18 / 32 + bool(settings.rank) * 16 * factors / weights)
    assert found["clipped"] < 0.8 * found["rounded"]
    assert found["lora"] < 0.8 * found["clipped"]
    assert found["salient"] < 0.8 * found["clipped"]


def test_an_interrupted_walk_goes_on_bit_for_bit(tmp_path: Path) -> None:
    pytest.importorskip("safetensors")
    F = saliency(decoder(), sequences())
    whole_model = decoder()
    whole = retrain_(whole_model, sequences(), QUICK, saliency=F, folder=tmp_path / "whole")

    class Killed(BaseException):
        pass

    def kill(at: Progress) -> None:
        if at.block == 1 and at.epoch == 1:
            raise Killed

    model, folder = decoder(), tmp_path / "cut"
    with pytest.raises(Killed):
        retrain_(model, sequences(), QUICK, saliency=F, folder=folder, watch=kill)
    assert sorted(path.name for path in folder.iterdir()) == ["block_000.safetensors", "retrain.json"]
    model, seen = decoder(), []
    report = retrain_(model, sequences(), QUICK, saliency=F, folder=folder, watch=seen.append)
    assert [at.resumed for at in seen if at.after is not None] == [True, False, False]
    assert same(report.linears, whole.linears)
    assert report.blocks == whole.blocks
    assert torch.equal(logits(model), logits(whole_model))
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert files == {path.name: path.read_bytes() for path in (tmp_path / "whole").iterdir()}
    again = decoder()
    assert same(retrain_(again, sequences(), QUICK, saliency=F, folder=folder).linears, whole.linears)
    assert torch.equal(logits(again), logits(whole_model))


def test_a_folder_of_something_else_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("safetensors")
    quick = Settings.from_dict(QUICK.to_dict() | {"epochs": 1})
    retrain_(decoder(), sequences(), quick, folder=tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    def refused(words: str, model: nn.Module, tokens: Tensor, settings: Settings, **options: Any) -> None:
        with pytest.raises(TrimtabError, match=words):
            retrain_(model, tokens, settings, folder=tmp_path, **options)

    other = decoder()
    with torch.no_grad():
        other.blocks[0].attn.q.weight.mul_(1.5)  # type: ignore[union-attr]
    refused("block_000.safetensors was made from other weights", other, sequences(), quick)
    refused("holds a retraining with bits = 2, this one has 3", decoder(), sequences(), Settings(bits=3, group=16))
    refused("with other sequences", decoder(), sequences(5), quick)
    refused("with other saliency", decoder(), sequences(), quick, saliency=saliency(decoder(), sequences()))
    refused("with other linears", decoder(layers=4), sequences(), quick)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    (tmp_path / "block_001.safetensors").write_bytes(b"torn")
    refused("not a whole safetensors file", decoder(), sequences(), quick)
    (tmp_path / "retrain.json").write_text(json.dumps([1]))
    refused("not the manifest of a retraining", decoder(), sequences(), quick)


class Backwards(nn.Module):
    """Calls its blocks in another order than they are listed."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 8)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8)) for _ in range(3))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in reversed(self.blocks):
            x = block(x)
        return x


@pytest.mark.parametrize(
    ("build", "tokens", "options", "words"),
    [
        (lambda: nn.Sequential(nn.Embedding(VOCAB, 8), nn.Linear(8, VOCAB)), sequences(), {}, "Sequential has none"),
        (Backwards, sequences(), {}, "must call each of its blocks once and in order, and called blocks.2"),
        (decoder, sequences().float(), {}, "one tensor of token ids"),
        (decoder, sequences()[0], {}, "one tensor of token ids"),
        (decoder, sequences()[:0], {}, r"at least one calibration sequence of 2 tokens, got \(0, 12\)"),
        (decoder, sequences()[:, :1], {}, "at least one calibration sequence"),
        (decoder, sequences(), {"skip": ["blocks.1.*"]}, "skip leaves blocks.1 none"),
        (decoder, sequences(), {"skip": ["nothing"]}, "skip: a pattern must match"),
        (decoder, sequences(), {"saliency": {"blocks.0.attn.q": torch.ones(32, 32)}}, "blocks.0.attn.k is missing"),
    ],
)
def test_bad_input_is_refused_and_changes_nothing(build: Any, tokens: Tensor, options: dict, words: str) -> None:
    model = build().train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(TrimtabError, match=words):
        retrain_(model, tokens, QUICK, **options)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert model.training
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_a_weight_that_two_blocks_share_is_refused() -> None:
    model = decoder()
    model.blocks[1].attn.q.weight = model.blocks[0].attn.q.weight  # type: ignore[union-attr]
    with pytest.raises(TrimtabError, match="share one weight"):
        retrain_(model, sequences(), QUICK)


def test_experts_are_not_taken_for_blocks() -> None:
    model = decoder(num_experts=8, layers=2, ffn=16)
    assert list(find_blocks(model)) == ["blocks.0", "blocks.1"]
    report = retrain_(model, sequences(), QUICK, skip=["*.attn.q"])
    assert "blocks.0.mlp.experts.7.down" in report.linears
    assert report.skipped["blocks.1.mlp.router"] == "router"
    assert report.skipped["blocks.0.attn.q"] == "skip"


def test_calls_are_recorded_with_one_block_on_the_device() -> None:
    model = transformers_model("llama")
    blocks = find_blocks(model)
    plain, moved = (record_calls(model, blocks, sequences()[:1], device) for device in (None, torch.device("cpu")))
    for one, other in zip(plain, moved, strict=True):
        tables = zip(one.kwargs["position_embeddings"], other.kwargs["position_embeddings"], strict=True)
        assert all(torch.equal(a, b) and a.shape == (1, 12, 16) for a, b in tables)
    assert not any(block._forward_pre_hooks or block._forward_hooks for block in blocks.values())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_holds_one_block_at_a_time_and_finds_what_a_cpu_finds() -> None:
    found = []
    for device in ("cpu", "cuda"):
        model = decoder()
        there: list[int] = []

        def look(at: Progress, model: Decoder = model, there: list[int] = there) -> None:
            if at.after is None:
                there.append(sum(parameter.is_cuda for parameter in model.parameters()))

        found.append(retrain_(model, sequences(), QUICK, device=device, watch=look))
        each = sum(1 for _ in model.blocks[0].parameters())
        assert there == [each if device == "cuda" else 0] * 6
        assert not any(parameter.is_cuda for parameter in model.parameters())
    for cpu, gpu in zip(found[0].blocks, found[1].blocks, strict=True):
        assert gpu.before == pytest.approx(cpu.before, rel=0.02)
        assert gpu.after == pytest.approx(cpu.after, rel=0.1)


def test_the_report_says_what_it_costs() -> None:
    report = retrain_(decoder(), sequences(), Settings.from_dict(QUICK.to_dict() | {"epochs": 0}))
    text = str(report)
    assert text.startswith("21 linears of 3 blocks, 23,808 weights, 2 bits asymmetric in groups of 16: ")
    assert f"{report.bits_per_weight:.3f} bits per weight (3.1" in text  # 40 inputs are groups of 16, 16 and 8


def test_windows_do_not_overlap_and_too_little_text_is_refused() -> None:
    tokens = torch.arange(100)
    found = windows(tokens, 5, 20, seed=3)
    assert found.flatten().tolist() == list(range(100))
    some = windows(tokens, 2, 20, seed=0)
    assert torch.equal(some, windows(tokens, 2, 20, seed=0))
    assert len({tuple(windows(tokens, 2, 20, seed=seed).flatten().tolist()) for seed in range(9)}) > 2
    with pytest.raises(TrimtabError, match="6 calibration sequences of 20 tokens need 120 tokens, the text has 100"):
        windows(tokens, 6, 20)
    with pytest.raises(TrimtabError, match="at least 1 sequence"):
        windows(tokens, 0, 20)


def test_perplexity_is_exp_of_the_mean_loss_inside_windows() -> None:
    model = decoder().train()
    tokens = sequences(5).flatten()
    with torch.no_grad():
        parts = tokens[:56].view(7, 8)
        model.eval()
        losses = [model(part[None, :-1], part[None, 1:]).loss for part in parts]
        model.train()
    assert perplexity(model, tokens[:60], 8) == pytest.approx(torch.stack(losses).mean().exp().item(), rel=1e-5)
    assert perplexity(model, tokens[:60], 8, batch=3) == pytest.approx(perplexity(model, tokens[:60], 8), rel=1e-6)
    assert model.training
    with pytest.raises(TrimtabError, match="at least one window of 64 tokens, the text has 60"):
        perplexity(model, tokens[:60], 64)
