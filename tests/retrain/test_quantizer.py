# SPDX-License-Identifier: Apache-2.0
"""The quantizer of ultra-low-bit retraining: its grid, its gradients, and that training it pays."""

import math

import pytest
import torch
from torch import Tensor, nn

from trimtab.errors import TrimtabError
from trimtab.retrain import ClippedLora, Settings, calibrate_block


def literal(w: Tensor, a: float, c: float, bits: int, symmetric: bool) -> tuple[Tensor, float]:
    """ApiQ's formula for one group, as it is printed; and the scale."""
    hi, lo = w.max().item() / (1 + math.exp(-a)), w.min().item() / (1 + math.exp(-c))
    if symmetric:
        s, z = max(abs(hi), abs(lo)) / (2 ** (bits - 1) - 1), 2 ** (bits - 1) - 1
    else:
        s = (hi - lo) / (2**bits - 1)
        z = round(-lo / s)
    s = min(max(s, 1e-5), 1e4)
    return torch.tensor([s * (min(max(round(x / s) + z, 0), 2**bits - 1) - z) for x in w.tolist()]), s


def quantizer(w: Tensor, **settings: object) -> ClippedLora:
    return ClippedLora(w, Settings.from_dict({"group": 16, "rank": 4, **settings}))


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("bits", [2, 3, 4])
@pytest.mark.parametrize("columns", [48, 40])  # 40: the last group has 8 weights
def test_the_grid_is_the_papers(bits: int, symmetric: bool, columns: int) -> None:
    w = torch.randn(6, columns) + 0.3
    one = quantizer(w, bits=bits, symmetric=symmetric)
    with torch.no_grad():
        one.a.uniform_(0, 4)
        one.c.uniform_(0, 4)
    q = one.quantized()
    for row in range(6):
        for g, part in enumerate(w[row].split(16)):
            expected, s = literal(part, one.a[row, g, 0].item(), one.c[row, g, 0].item(), bits, symmetric)
            found = q[row, 16 * g : 16 * g + 16]
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
            assert len(found.unique()) <= 2**bits
            if symmetric and bits == 2:
                levels = (found / s).round()
                assert set(levels.tolist()) <= {-1.0, 0.0, 1.0, 2.0}
                torch.testing.assert_close(levels * s, found)


def test_a_group_of_one_sign_or_one_value_keeps_a_zero_point_of_its_bits() -> None:
    w = torch.cat((torch.rand(4, 16) + 0.5, torch.full((4, 16), -0.7), torch.zeros(4, 1)), dim=1)
    one = quantizer(w)
    zero = one.grid()[1]
    assert zero.min() >= 0
    assert zero.max() <= 3
    torch.testing.assert_close(one.quantized()[:, 16:32], w[:, 16:32], rtol=0.02, atol=0)
    assert torch.equal(one.quantized()[:, 32], w[:, 32])


def test_step_zero_is_rounding_to_nearest() -> None:
    one = quantizer(torch.randn(8, 32))
    assert torch.equal(one(), one.quantized())
    assert one.A is not None
    assert one.A.abs().min() > 0
    assert torch.equal(quantizer(one.groups.flatten(1), rank=0)(), one.quantized())


def test_gradients_reach_what_is_trained_and_nothing_else() -> None:
    w = torch.randn(8, 40, requires_grad=True)
    before = w.detach().clone()
    one = quantizer(w)
    (one() * torch.randn(8, 40)).sum().backward()
    assert one.A is not None
    assert one.B is not None
    for name in ("a", "c", "B"):
        grad = getattr(one, name).grad
        assert torch.isfinite(grad).all(), name
        assert grad.abs().sum() > 0, name
    assert one.A.grad is not None
    assert not one.A.grad.any()  # B is 0
    assert w.grad is None
    assert torch.equal(w, before)


def test_the_merged_weight_computes_what_base_and_factors_do() -> None:
    w = torch.randn(24, 40)
    one = quantizer(w)
    assert one.A is not None
    assert one.B is not None
    with torch.no_grad():
        one.B.normal_()
        one.a.uniform_(0, 4)
    x = torch.randn(5, 40)
    apart = x @ one.quantized().T + (16 / 4) * (x @ one.A.T) @ one.B.T
    torch.testing.assert_close(x @ one().T, apart, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(one(), one.quantized() + 4 * one.B @ one.A, rtol=1e-6, atol=1e-6)


def test_what_is_stored_is_what_was_trained_to_sixteen_bits_of_scale_and_factors() -> None:
    one = quantizer(torch.randn(24, 40), bits=3)
    assert one.B is not None
    with torch.no_grad():
        one.B.normal_(std=0.1)
    packed = one.freeze()
    stored, trained = packed.quantized(), one.quantized()
    near = torch.isclose(stored, trained, rtol=1e-3, atol=0)
    assert near.float().mean() > 0.99  # a weight midway between two levels may go to the other
    torch.testing.assert_close(packed.weight()[near], one()[near], rtol=0, atol=2e-3)


def test_a_weight_that_is_not_finite_is_refused() -> None:
    w = torch.randn(4, 16)
    w[1, 3] = math.inf
    with pytest.raises(TrimtabError, match="must be finite"):
        quantizer(w)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"bits": 1}, "bits must be an int from 2 to 8, got 1"),
        ({"bits": True}, "bits must be an int"),
        ({"group": 0}, "group must be a whole number of at least 1, got 0"),
        ({"rank": -1}, "rank must be"),
        ({"lam": -0.1}, "lam must be a number of at least 0"),
        ({"alpha": 0}, "alpha must be a number above 0"),
        ({"lr_clip": math.nan}, "lr_clip must be"),
        ({"ranks": 3}, "no setting 'ranks': did you mean 'rank'"),
    ],
)
def test_bad_settings_are_refused(given: dict, words: str) -> None:
    with pytest.raises(TrimtabError, match=words):
        Settings.from_dict(given)


def test_fewer_steps_take_larger_ones() -> None:
    assert Settings().rates(128) == (5e-3, 5e-4)
    assert Settings(epochs=40).rates(128) == (5e-3, 5e-4)
    assert Settings(epochs=5).rates(32) == pytest.approx((0.08, 8e-3))
    assert Settings(epochs=5, batch=4).rates(32) == pytest.approx((0.1, 0.01))
    assert Settings(epochs=5, lr_clip=0.2, lr_lora=0.0).rates(32) == (0.2, 0.0)


# The toy of the literature: one matrix, inputs with a few strong directions.


class Toy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.linear = nn.Linear(128, 128, bias=False)
        draw = torch.randn(128, 128, generator=generator)
        mixing = torch.randn(128, 128, generator=generator) / 128**0.5 * torch.logspace(0, -2, 128)[:, None]
        self.inputs = (torch.randn(6144, 128, generator=generator) @ mixing).split((4096, 2048))
        self.F = torch.rand(128, 128, generator=generator) ** 6
        with torch.no_grad():
            self.linear.weight.copy_(draw / 128**0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


def errors(bits: int, **settings: object) -> tuple[float, float]:
    """Relative error of the output on unseen inputs, and of the weights, weighted by F."""
    toy = Toy()
    w, (seen, unseen) = toy.linear.weight.detach().clone(), toy.inputs
    chosen = {"rank": 8, "alpha": 8.0, "epochs": 4, "batch": 32, "lr_clip": 2e-2, "lr_lora": 8e-3, **settings}
    x = seen.unsqueeze(1)
    made = calibrate_block(toy, x, x, Settings.from_dict({"bits": bits, **chosen}), saliency={"linear": toy.F})
    y, q = unseen @ w.T, made.linears["linear"].quantized()
    output = (unseen @ toy.linear.weight.detach().T - y).norm() / y.norm()
    return output.item(), ((toy.F * (q - w) ** 2).sum() / (toy.F * w**2).sum()).sqrt().item()


@pytest.mark.parametrize("bits", [2, 3])
def test_clipping_beats_rounding_and_lora_beats_clipping_and_salient_weights_can_be_spared(bits: int) -> None:
    rounded = errors(bits, rank=0, epochs=0)[0]
    clipped = errors(bits, rank=0)[0]
    output, weights = errors(bits, lam=0.0)
    assert clipped < 0.96 * rounded
    assert output < 0.8 * clipped
    if bits == 2:
        spared = errors(bits, lam=1.0)
        assert spared[1] < 0.98 * weights
        assert spared[0] < 1.1 * output
