# SPDX-License-Identifier: Apache-2.0
"""EmbProj: orthogonal at the start, by seed, and folded into its neighbours without changing the model (oracle E1)."""

import pytest
import torch
from torch import Tensor, nn

from trimtab.errors import TrimtabError
from trimtab.linear import convert_
from trimtab.modules import output_head
from trimtab.nn import EmbProj, SSNorm
from trimtab.nn.embproj import fold_embedding, fold_head


class Toy(nn.Module):
    """embed -> embed_proj -> norm -> head_proj -> head, all trained a little: no matrix is orthogonal any more."""

    def __init__(self, tied: bool = False, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.embed = nn.Embedding(40, 24, padding_idx=0)
        self.embed_proj = EmbProj(24)
        self.norm = SSNorm(24)
        self.head_proj = EmbProj(24)
        self.head = nn.Linear(24, 40)
        if tied:
            self.head.weight = self.embed.weight
        for projection in (self.embed_proj, self.head_proj):
            nn.init.normal_(projection.weight, std=0.3)
        self.to(dtype)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.head_proj(self.norm(self.embed_proj(self.embed(tokens)))))


TOKENS = torch.arange(40).view(4, 10)


@pytest.mark.parametrize("dim", [1, 8, 33])
def test_it_starts_orthogonal_and_keeps_norms(dim: int) -> None:
    projection = EmbProj(dim)
    assert projection.bias is None
    torch.testing.assert_close(projection.weight @ projection.weight.T, torch.eye(dim), rtol=0, atol=2e-6)
    x = torch.randn(5, dim)
    torch.testing.assert_close(projection(x).norm(dim=-1), x.norm(dim=-1))


def test_a_generator_fixes_it_in_every_dtype_and_draws_nothing_else() -> None:
    state = torch.get_rng_state()
    first, second = EmbProj(12, device="meta"), EmbProj(12, device="meta", dtype=torch.bfloat16)
    for projection in (first, second):
        projection.to_empty(device="cpu").reset_parameters(torch.Generator().manual_seed(5))
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(second.weight, first.weight.bfloat16())
    signs = torch.stack([_signs(seed) for seed in range(40)]).mean(0)
    assert signs.abs().max() < 0.6, "no entry has a preferred sign, as in a uniform draw"


def _signs(seed: int) -> Tensor:
    projection = EmbProj(3)
    projection.reset_parameters(torch.Generator().manual_seed(seed))
    return projection.weight.detach().sign()


def test_folds_are_the_matrix_products() -> None:
    table, projection, x = torch.randn(7, 4), torch.randn(4, 4), torch.randn(5, 4)
    torch.testing.assert_close(fold_embedding(table, projection), torch.stack([projection @ row for row in table]))
    torch.testing.assert_close(x @ fold_head(table, projection).T, (x @ projection.T) @ table.T)


@pytest.mark.parametrize(("dtype", "atol"), [(torch.float32, 1e-5), (torch.float64, 1e-13)])
def test_absorbed_or_not_the_logits_are_equal(dtype: torch.dtype, atol: float) -> None:
    model = Toy(dtype=dtype)
    expected = model(TOKENS)
    before = [model.embed.weight.clone(), model.head.weight.clone()]
    model.embed_proj.absorb_(model.embed, model)
    torch.testing.assert_close(model(TOKENS), expected, rtol=0, atol=atol)
    model.head_proj.absorb_(model.head, model)
    torch.testing.assert_close(model(TOKENS), expected, rtol=0, atol=atol)
    for old, new in zip(before, (model.embed.weight, model.head.weight), strict=True):
        assert (old - new).abs().max() > 0.1
        assert new.requires_grad
        assert new.dtype == dtype
    assert torch.equal(model.head_proj.weight, torch.eye(24, dtype=dtype))
    bare = model.head(model.norm(model.embed(TOKENS)))
    torch.testing.assert_close(bare, expected, rtol=0, atol=atol)
    assert not model.embed.weight[0].any(), "the row of a padding token is still zero"


def test_a_tied_weight_is_refused_until_it_is_untied() -> None:
    model = Toy(tied=True)
    expected, weight = model(TOKENS), model.embed.weight.clone()
    with pytest.raises(TrimtabError, match=r"tied weight cannot absorb.*embed and head.*untie it first"):
        model.embed_proj.absorb_(model.embed, model)
    assert torch.equal(model.embed.weight, weight)
    model.head.weight = nn.Parameter(model.head.weight.detach().clone())
    model.embed_proj.absorb_(model.embed, model)
    model.head_proj.absorb_(model.head, model)
    torch.testing.assert_close(model(TOKENS), expected, rtol=0, atol=1e-5)


def test_what_cannot_be_absorbed_is_refused() -> None:
    model = Toy()
    for target, message in (
        (nn.Embedding(5, 8), "of 24 features.*shape \\(5, 8\\)"),
        (nn.Linear(8, 24), "of 24 features.*shape \\(24, 8\\)"),
        (nn.Embedding(5, 24, max_norm=1.0), "max_norm"),
        (nn.Linear(24, 5), "model must be the module that holds the target"),
        (SSNorm(24), "an nn.Embedding or an nn.Linear, got a SSNorm"),
    ):
        with pytest.raises(TrimtabError, match=message):
            model.embed_proj.absorb_(target, model)


def test_convert_passes_over_it_and_says_so() -> None:
    model = nn.ModuleDict({"toy": Toy(), "body": nn.Linear(24, 24)})
    report = convert_(model, "fp8")
    assert report.covered == ("body",)
    assert report.skipped["toy.embed_proj"] == report.skipped["toy.head_proj"] == "subclass EmbProj"
    assert output_head(model) is model["toy"].head


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_seed_means_the_same_matrix_on_the_gpu() -> None:
    on_cpu, on_gpu = EmbProj(64), EmbProj(64, device="cuda")
    for projection in (on_cpu, on_gpu):
        projection.reset_parameters(torch.Generator().manual_seed(3))
    assert torch.equal(on_gpu.weight.cpu(), on_cpu.weight)
    model = Toy().cuda()
    expected = model(TOKENS.cuda())
    model.embed_proj.absorb_(model.embed, model)
    model.head_proj.absorb_(model.head, model)
    torch.testing.assert_close(model(TOKENS.cuda()), expected, rtol=0, atol=1e-5)
