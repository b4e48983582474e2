# SPDX-License-Identifier: Apache-2.0
"""`saliency`: squares of per-sequence gradients, normalised; and a model that does not notice."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from trimtab.errors import TrimtabError
from trimtab.lab.model import Decoder, ModelConfig
from trimtab.retrain import StoredSaliency, saliency
from trimtab.retrain.fisher import next_token_loss

SHAPE = ModelConfig(vocab_size=24, width=16, layers=2, heads=2, ffn=20, max_seq=16)


def decoder() -> Decoder:
    return Decoder(SHAPE, seed=0).double()


def sequences(num: int = 5) -> Tensor:
    return torch.randint(0, 24, (num, 12), generator=torch.Generator().manual_seed(1))


def test_it_is_the_sum_of_squares_of_each_sequences_gradient() -> None:
    model, data = decoder(), sequences()
    found = saliency(model, data)
    assert len(found) == 14
    paths = {path: model.get_submodule(path).get_parameter("weight") for path in found}
    squares = {path: torch.zeros_like(weight) for path, weight in paths.items()}
    sums = {path: torch.zeros_like(weight) for path, weight in paths.items()}
    for sequence in data:
        loss = next_token_loss(model, sequence[None])
        for path, grad in zip(paths, torch.autograd.grad(loss, list(paths.values())), strict=True):
            squares[path] += grad**2
            sums[path] += grad
    for path, value in found.items():
        expected = squares[path] / squares[path].mean()
        torch.testing.assert_close(value, expected, rtol=1e-10, atol=0)
        assert value.mean().item() == pytest.approx(1.0)
        whole = sums[path] ** 2 / (sums[path] ** 2).mean()
        assert (value - whole).abs().max() > 0.1
        assert (value.device.type, value.requires_grad) == ("cpu", False)


def test_the_loss_may_be_scaled_and_given() -> None:
    model, data = decoder(), sequences()
    plain = saliency(model, data)
    scaled = saliency(model, data, loss=lambda m, one: 1000 * next_token_loss(m, one[None]))
    for path in plain:
        torch.testing.assert_close(scaled[path], plain[path])


def test_the_model_is_left_as_it_was() -> None:
    model = decoder().train()
    model.head.weight.requires_grad_(False)
    next_token_loss(model, sequences()[:2]).backward()
    grads = {name: p.grad for name, p in model.named_parameters()}
    kept = {name: None if g is None else g.clone() for name, g in grads.items()}
    needs = {name: p.requires_grad for name, p in model.named_parameters()}
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    seen: list[int] = []
    saliency(model, sequences(), paths=["blocks.0.attn.q"], watch=seen.append)
    assert seen == [1, 2, 3, 4, 5]
    assert model.training
    for name, p in model.named_parameters():
        assert p.grad is grads[name]
        assert (p.grad is None and kept[name] is None) or torch.equal(p.grad, kept[name])  # type: ignore[arg-type]
        assert p.requires_grad == needs[name]
        assert torch.equal(p, weights[name])
        assert not p._post_accumulate_grad_hooks


def test_a_failure_leaves_the_model_as_it_was_too() -> None:
    model = decoder()
    with pytest.raises(TrimtabError, match="at least 2 tokens at a time, got"):
        saliency(model, [sequences()[0], torch.ones(3, 4, dtype=torch.long)])
    assert all(p.requires_grad and p.grad is None for p in model.parameters())
    with torch.no_grad():
        model.head.weight.fill_(torch.nan)
    with pytest.raises(TrimtabError, match="the loss of calibration sequence 0 is nan"):
        saliency(model, sequences())
    with pytest.raises(TrimtabError, match="at least one calibration sequence"):
        saliency(decoder(), [])
    with pytest.raises(TrimtabError, match="found none"):
        saliency(nn.LayerNorm(3), sequences())
    with pytest.raises(TrimtabError, match=r"returns logits of shape"):
        saliency(nn.Sequential(nn.Embedding(24, 4), nn.Flatten(), nn.Linear(48, 4)), sequences())


def test_a_linear_without_gradient_is_as_salient_everywhere() -> None:
    model = nn.ModuleDict({"used": nn.Linear(4, 4), "idle": nn.Linear(4, 4)})
    found = saliency(model, [torch.randn(4)], loss=lambda m, x: m["used"](x).square().sum())  # type: ignore[index]
    assert torch.equal(found["idle"], torch.ones(4, 4))


def test_a_stored_saliency_is_read_one_linear_at_a_time(tmp_path: Path) -> None:
    pytest.importorskip("safetensors")
    found = saliency(decoder(), sequences())
    path = tmp_path / "saliency.safetensors"
    stored = StoredSaliency.save(path, found, source="this")
    assert set(stored) == set(found)
    assert len(stored) == len(found)
    for name, value in found.items():
        torch.testing.assert_close(stored[name], value.float(), rtol=2**-8, atol=0)
    assert StoredSaliency.header(path) == {"format": "trimtab packed 1", "source": "this"}
    path.write_bytes(path.read_bytes()[:-3])
    assert StoredSaliency.header(path) is None
    with pytest.raises(KeyError):
        StoredSaliency.save(path, found)["nothing"]
