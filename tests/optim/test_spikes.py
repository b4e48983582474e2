# SPDX-License-Identifier: Apache-2.0
"""GradSpikes: scores by the definition, an injected spike found in its kind with its size, and nothing else: not in
noise, not in rows never met, not from what is not finite."""

import math

import numpy as np
import pytest
import torch
from torch import nn

from trimtab.errors import TrimtabError
from trimtab.lab.model import Decoder, ModelConfig
from trimtab.optim.spikes import GradSpikes, kind_of, score

CONFIG = {"vocab_size": 11, "width": 8, "layers": 2, "heads": 2, "ffn": 12, "max_seq": 6}


class Toy(nn.Module):
    """One parameter of every kind."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.norm = nn.RMSNorm(4)
        self.attn = nn.Linear(4, 4, bias=False)
        self.mlp = nn.Linear(4, 4, bias=False)
        self.rest = nn.Parameter(torch.zeros(3))
        self.head = nn.Linear(4, 7, bias=False)


def drive(model: nn.Module, probe: GradSpikes, steps: int, seed: int = 0, change=None) -> list[dict]:
    """Gaussian gradients, changed by `change(step, model)`; returns those of every step."""
    generator = torch.Generator().manual_seed(seed)
    grads = []
    for step in range(steps):
        for param in model.parameters():
            param.grad = torch.randn(param.shape, generator=generator).to(param.dtype)
        if change is not None:
            change(step, model)
        grads.append({n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()})
        probe.step()
    return grads


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("embed.weight", "embedding"),
        ("blocks.0.attn_norm.weight", "norm"),
        ("blocks.1.attn.q.weight", "attention"),
        ("blocks.1.mlp_norm.weight", "norm"),
        ("blocks.0.mlp.down.weight", "mlp"),
        ("norm.weight", "norm"),
        ("head.weight", "head"),
    ],
)
def test_the_kinds_of_the_labs_decoder(name, kind):
    assert kind_of(Decoder(ModelConfig(**CONFIG), seed=0), name) == kind


def test_the_kinds_of_a_mixture_and_of_a_tied_model():
    mixture = Decoder(ModelConfig(**CONFIG, num_experts=2, top_k=1), seed=0)
    kinds = {name: kind_of(mixture, name) for name, _ in mixture.named_parameters()}
    assert kinds["blocks.0.mlp.experts.1.up.weight"] == kinds["blocks.0.mlp.router.weight"] == "mlp"
    assert "other" not in kinds.values()
    tied = Decoder(ModelConfig(**CONFIG, tied=True), seed=0)
    assert GradSpikes(tied).kinds["embed.weight"] == "embedding"
    assert "head" not in GradSpikes(tied).summary()


def test_kinds_come_from_types_too_and_what_has_no_sign_is_other():
    class SelfAttention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.out = nn.Linear(2, 2)

    class AttentionModel(nn.Module):  # the model's own name says nothing about its layers
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([SelfAttention(), nn.Linear(2, 2), nn.LayerNorm(2)])
            self.scale = nn.Parameter(torch.ones(1))

    model = AttentionModel()
    names = ("layers.0.out.bias", "layers.1.weight", "layers.2.bias", "scale")
    assert [kind_of(model, name) for name in names] == ["attention", "other", "norm", "other"]
    assert kind_of(model, "layers.1.weight", head="layers.1") == "head"


def test_an_injected_spike_is_found_with_its_kind_and_size_and_nothing_else_is():
    model = Toy()
    probe = GradSpikes(model)

    def spike(step: int, toy: Toy) -> None:
        if step == 60:
            toy.norm.weight.grad[2] = 300.0

    grads = drive(model, probe, 120, change=spike)
    past = np.mean([g["norm.weight"][2].abs() for g in grads[:60]])
    summary = probe.summary()
    assert summary["norm"] == {
        "parameters": 1,
        "scored": 100 * 4,  # 20 steps of warm-up
        "spikes": 1,
        "share": 1 / 400,
        "mean": pytest.approx(300.0 / past, rel=1e-5),
        "largest": pytest.approx(300.0 / past, rel=1e-5),
    }
    assert list(summary) == ["norm", "embedding", "head", "attention", "mlp", "other"]
    others = [entry for kind, entry in summary.items() if kind != "norm"]
    assert all(entry["spikes"] == 0 and 1 < entry["largest"] < 50 for entry in others)


def test_scores_are_to_the_mean_of_the_past_alone():
    model = Toy()
    probe = GradSpikes(model, threshold=2.0, warmup=3)
    grads = drive(model, probe, 30)
    found: list[float] = []
    largest = 0.0
    for t in range(3, 30):
        past = np.mean([g["attn.weight"].abs().numpy() for g in grads[:t]], axis=0)
        scores = grads[t]["attn.weight"].abs().numpy() / past
        found += scores[scores > 2.0].tolist()
        largest = max(largest, scores.max())
    entry = probe.summary()["attention"]
    assert entry["spikes"] == len(found) > 10
    assert entry["mean"] == pytest.approx(np.mean(found), rel=1e-5)
    assert entry["largest"] == pytest.approx(largest, rel=1e-5)
    assert entry["share"] == len(found) / (27 * 16)


def test_a_row_never_met_has_no_score_and_its_first_gradient_is_no_spike():
    model = Toy()
    probe = GradSpikes(model, warmup=2)

    def rows(step: int, toy: Toy) -> None:
        toy.embed.weight.grad[3:] = 0.0  # rows 3 to 6 are never met
        if step == 8:
            toy.embed.weight.grad[5] = 1.0  # row 5 once

    drive(model, probe, 10, change=rows)
    entry = probe.summary()["embedding"]
    assert entry["scored"] == 8 * 3 * 4 + 4  # row 5 only after it was met
    assert entry["spikes"] == 0
    assert entry["largest"] < 50


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_what_is_not_finite_is_neither_scored_nor_remembered(bad):
    model, clean = Toy(), Toy()

    def poison(step: int, toy: nn.Module) -> None:
        if step == 5:
            toy.mlp.weight.grad[0] = bad

    probe, other = GradSpikes(model, warmup=2), GradSpikes(clean, warmup=2)
    drive(model, probe, 12, change=poison)
    drive(clean, other, 12)
    entry, expected = probe.summary()["mlp"], other.summary()["mlp"]
    assert entry["scored"] == expected["scored"] - 4
    assert all(math.isfinite(value) for kind in probe.summary().values() for value in kind.values())
    assert entry["spikes"] == 0


def test_a_parameter_without_a_gradient_keeps_its_mean_and_its_warm_up():
    model = Toy()
    probe = GradSpikes(model, warmup=4)

    def idle(step: int, toy: Toy) -> None:
        if step % 2:
            toy.rest.grad = None

    drive(model, probe, 12, change=idle)
    assert probe.summary()["other"]["scored"] == (6 - 4) * 3
    assert probe.summary()["head"]["scored"] == (12 - 4) * 28


def test_extreme_scores_stay_finite():
    found = score(torch.tensor([3e38, 1.0]), torch.tensor([1e-38, 1e-45]), 50.0)
    assert int(found.found) == 2
    assert torch.isfinite(found.total)
    assert torch.isfinite(found.largest)


def test_the_cost_is_one_fp32_number_per_coordinate():
    model = Toy().to(torch.bfloat16)
    probe = GradSpikes(model)
    drive(model, probe, 3)
    held = [t for value in vars(probe).values() if isinstance(value, dict) for t in value.values()]
    held = [t for t in held if isinstance(t, torch.Tensor) and t is not None and not isinstance(t, nn.Parameter)]
    assert {t.dtype for t in held} == {torch.float32}
    assert sum(t.numel() for t in held) == sum(p.numel() for p in model.parameters())


def test_frozen_parameters_are_not_watched_and_wrong_settings_are_refused():
    model = Toy()
    model.embed.requires_grad_(False)
    assert "embedding" not in GradSpikes(model).summary()
    with pytest.raises(TrimtabError, match="threshold"):
        GradSpikes(model, 0.0)
    with pytest.raises(TrimtabError, match="warmup"):
        GradSpikes(model, warmup=0)
    with pytest.raises(TrimtabError, match="requires a gradient"):
        GradSpikes(model.requires_grad_(False))
    sparse = nn.Embedding(3, 2, sparse=True)
    probe = GradSpikes(sparse)
    sparse(torch.tensor([1])).sum().backward()
    with pytest.raises(TrimtabError, match="sparse=False"):
        probe.step()
