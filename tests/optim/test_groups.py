# SPDX-License-Identifier: Apache-2.0
"""Who gets which optimizer, by type and shape; torch's Muon against the formula it stands for (oracle M1)."""

import dataclasses
import math
import types

import pytest
import torch
from torch import Tensor, nn

from trimtab.errors import TrimtabError
from trimtab.lab.model import Decoder, ModelConfig
from trimtab.linear import convert_
from trimtab.optim.groups import osp_optimizers, spam_groups, split

SMALL = ModelConfig(vocab_size=32, width=16, layers=2, heads=2, ffn=24, max_seq=12)


def osp_model(**changes) -> Decoder:
    return Decoder(dataclasses.replace(SMALL, **{"norm": "ssnorm", "embproj": True, **changes}), seed=0)


def orthogonalised(u: Tensor) -> Tensor:
    """Five Newton-Schulz steps in BF16, the matrix laid on its side if it is tall."""
    x = (u / (u.norm() + 1e-8)).bfloat16()
    x = x.T if u.shape[0] > u.shape[1] else x
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return (x.T if u.shape[0] > u.shape[1] else x).to(u.dtype)


@pytest.mark.parametrize("shape", [(64, 128), (128, 64), (96, 96), (1, 40), (40, 24)])
def test_muon_is_its_formula(shape: tuple[int, int]) -> None:
    layer = nn.Linear(shape[1], shape[0], bias=False)
    weight, lr, decay, momentum = layer.weight.detach().clone(), 5e-4, 0.01, torch.zeros(shape)
    start, size = weight.clone(), []
    (muon,) = osp_optimizers(layer)
    for _ in range(20):
        gradient = torch.randn(shape)
        momentum = gradient + 0.95 * momentum
        update = 0.2 * math.sqrt(max(shape)) * orthogonalised(gradient + 0.95 * momentum)
        size.append(update.square().mean().sqrt().item())
        weight -= lr * (update + decay * weight)
        layer.weight.grad = gradient
        muon.step()
    torch.testing.assert_close(layer.weight.detach(), weight, rtol=0, atol=1e-4)
    assert (weight - start).abs().max() > 1e-3
    if min(shape) > 60:
        assert sum(size) / 20 == pytest.approx(0.175, abs=0.02), "about the size of an update of AdamW"


def test_muon_decays_by_the_learning_rate_itself() -> None:
    layer = nn.Linear(8, 4, bias=False)
    expected = layer.weight.detach() * (1 - 0.1 * 0.5)  # not scaled by the shape, as the update is
    (muon,) = osp_optimizers(layer, lr=0.1, weight_decay=0.5)
    layer.weight.grad = torch.zeros(4, 8)
    muon.step()
    torch.testing.assert_close(layer.weight.detach(), expected)


@pytest.mark.parametrize("changes", [{}, {"tied": True}, {"num_experts": 3}, {"embproj": False, "norm": "rmsnorm"}])
@pytest.mark.parametrize("converted", [False, True])
def test_every_trainable_parameter_is_in_exactly_one_optimizer(changes: dict, converted: bool) -> None:
    model = osp_model(**changes)
    if converted:
        convert_(model, "fp8")
    model.blocks[1].attn.q.weight.requires_grad_(False)
    optimizers = osp_optimizers(model, lr=0.01, adam_lr=0.002, weight_decay=0.1, adam_betas=(0.8, 0.9), momentum=0.9)
    assert [type(optimizer) for optimizer in optimizers] == [torch.optim.Muon, torch.optim.AdamW]
    held = [p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]
    assert len(held) == len({id(p) for p in held})
    assert {id(p) for p in held} == {id(p) for p in model.parameters() if p.requires_grad}
    muon, adam = optimizers[0].param_groups[0], optimizers[1].param_groups[0]
    assert (muon["lr"], muon["weight_decay"], muon["momentum"], muon["nesterov"]) == (0.01, 0.1, 0.9, True)
    assert muon["adjust_lr_fn"] == "match_rms_adamw"
    assert (adam["lr"], adam["weight_decay"], adam["betas"]) == (0.002, 0.1, (0.8, 0.9))


def test_the_split_is_by_type_and_shape() -> None:
    parts = split(osp_model())
    norms = {f"blocks.{i}.{name}_norm.weight" for i in range(2) for name in ("attn", "mlp")} | {"norm.weight"}
    assert set(parts.adam) == {"embed.weight", "head.weight"} | norms
    assert {"embed_proj.weight", "head_proj.weight", "blocks.0.attn.q.weight", "blocks.1.mlp.down.weight"} <= set(
        parts.muon
    )
    assert len(parts.muon) == 2 + 2 * 7
    tied = split(osp_model(tied=True))
    assert "embed.weight" in tied.adam
    assert not {"embed.weight", "head.weight"} & set(tied.muon)
    everywhere = split(osp_model(), embeddings="muon")
    assert set(everywhere.adam) == norms
    assert {"embed.weight", "head.weight"} <= set(everywhere.muon)
    # A name says nothing: a linear called embed is a matrix, a table called weight an embedding, any head may be given.
    odd = nn.ModuleDict({"embed": nn.Linear(8, 8), "weight": nn.Embedding(5, 8), "last": nn.Linear(8, 3, bias=False)})
    assert set(split(odd).muon) == {"embed.weight", "last.weight"}
    assert set(split(odd, head="last").muon) == {"embed.weight"}
    assert set(split(odd, head=odd["last"]).adam) == {"embed.bias", "weight.weight", "last.weight"}


def test_one_learning_rate_serves_both_and_the_defaults_are_the_papers() -> None:
    muon, adam = osp_optimizers(osp_model())
    assert (muon.param_groups[0]["lr"], adam.param_groups[0]["lr"]) == (5e-4, 5e-4)
    assert (muon.param_groups[0]["weight_decay"], muon.param_groups[0]["momentum"]) == (0.01, 0.95)


def test_the_whole_recipe_learns() -> None:
    model, tokens = osp_model(), torch.arange(24).view(2, 12)
    optimizers = osp_optimizers(model, lr=0.01)
    losses = []
    for _ in range(15):
        loss = model(tokens, tokens).loss
        losses.append(loss.item())
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert losses[-1] < losses[0] - 0.5
    assert any(abs(gain.item() - 1) > 1e-3 for name, gain in model.named_parameters() if name.endswith("norm.weight"))


def test_stacked_weights_are_refused_or_go_to_adamw() -> None:
    model = nn.ModuleDict({"experts": nn.Conv1d(4, 4, 3, bias=False), "up": nn.Linear(4, 4, bias=False)})
    with pytest.raises(TrimtabError, match=r"'experts.weight' of shape \(4, 4, 3\).*stacked=\"adam\""):
        osp_optimizers(model)
    assert set(split(model, stacked="adam").adam) == {"experts.weight"}
    model["experts"].weight.requires_grad_(False)
    assert len(osp_optimizers(model)) == 1, "nothing is left for AdamW"


def test_shards_are_refused_with_the_remedy(tmp_path) -> None:
    from torch import distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        layer = nn.Linear(8, 8, bias=False)
        layer.weight = nn.Parameter(distribute_tensor(layer.weight.data, init_device_mesh("cpu", (1,)), [Shard(0)]))
        with pytest.raises(TrimtabError, match=r"'weight' as a shard.*replicate the model \(DDP\).*dion"):
            osp_optimizers(layer)
    finally:
        dist.destroy_process_group()


def test_what_cannot_be_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for options, message in (
        ({"embeddings": "sgd"}, "embeddings must be 'adam' or 'muon', got 'sgd'"),
        ({"stacked": "muon"}, "stacked must be 'refuse' or 'adam', got 'muon'"),
        ({"head": "nowhere"}, "head must be the path"),
    ):
        with pytest.raises(TrimtabError, match=message):
            osp_optimizers(osp_model(), **options)
    with pytest.raises(TrimtabError, match="at least one trainable matrix for Muon, got 2 trainable parameters"):
        osp_optimizers(nn.LayerNorm(4))
    monkeypatch.setattr(torch, "optim", types.SimpleNamespace())
    with pytest.raises(TrimtabError, match=r"torch 2.9 and later, got torch 2.*pip install"):
        osp_optimizers(nn.Linear(4, 4))


@pytest.mark.parametrize("tied", [False, True])
def test_sparse_momentum_is_for_the_weights_of_linears_except_the_head(tied: bool) -> None:
    model = osp_model(tied=tied, norm="rmsnorm", embproj=False)
    model.blocks[0].mlp.up = nn.Linear(16, 24)  # with a bias
    model.blocks[1].attn.q.weight.requires_grad_(False)
    sparse, dense = spam_groups(model, 0.25)
    assert (sparse["density"], dense["density"]) == (0.25, 1.0)
    names = {id(p): name for name, p in model.named_parameters()}
    linears = {f"{name}.weight" for name, m in model.blocks.named_modules(prefix="blocks") if isinstance(m, nn.Linear)}
    assert {names[id(p)] for p in sparse["params"]} == linears - {"blocks.1.attn.q.weight"}
    rest = {names[id(p)] for p in dense["params"]}
    assert {"embed.weight", "norm.weight", "blocks.0.mlp.up.bias"} <= rest
    assert ("head.weight" in rest) is not tied
    assert len(sparse["params"]) + len(dense["params"]) == sum(p.requires_grad for p in model.parameters())


def test_sparse_groups_check_their_density_and_their_model() -> None:
    for density in (0, 1.5, -1, math.nan, True):
        with pytest.raises(TrimtabError, match="density must"):
            spam_groups(osp_model(), density)
    with pytest.raises(TrimtabError, match=r"needs a trainable nn.Linear"):
        spam_groups(nn.LayerNorm(4), 0.5)
    (only,) = spam_groups(nn.Linear(4, 4, bias=False), 0.5)
    assert only["density"] == 0.5
