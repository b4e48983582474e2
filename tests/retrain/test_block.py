# SPDX-License-Identifier: Apache-2.0
"""`calibrate_block`: ApiQ's objective on one block, and a saliency term whose weight means the same everywhere."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from trimtab.errors import TrimtabError
from trimtab.lab.model import Block, Decoder, ModelConfig
from trimtab.retrain import Calibrated, Settings, calibrate_block
from trimtab.retrain.blocks import Call

SHAPE = ModelConfig(vocab_size=24, width=32, layers=1, heads=2, ffn=48, max_seq=8)
QUICK = {"group": 16, "rank": 4, "alpha": 4.0, "epochs": 6, "batch": 2, "lr_clip": 0.05, "lr_lora": 5e-3}


def parts(**fields: Any) -> tuple[Block, Call, Tensor]:
    model = Decoder(SHAPE, seed=0).eval()
    torch.manual_seed(0)
    block = model.blocks[0]
    assert isinstance(block, Block)
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.mul_(6.0 if parameter.dim() > 1 else 1.0)  # so that the block matters beside its residual
    return block, Call((model.cos, model.sin)), torch.randn(8, 8, 32)


def calibrated(block: nn.Module, call: Call, x: Tensor, x_q: Tensor | None = None, **settings: Any) -> Calibrated:
    F = settings.pop("saliency", None)
    chosen = Settings.from_dict({**QUICK, **settings})
    return calibrate_block(block, x, x if x_q is None else x_q, chosen, saliency=F, call=call)


def drawn(block: nn.Module) -> dict[str, Tensor]:
    linears = {path: m for path, m in block.named_modules() if isinstance(m, nn.Linear)}
    return {path: torch.rand(m.weight.shape) ** 6 for path, m in linears.items()}


def test_the_plain_output_is_the_untouched_blocks_and_the_error_falls() -> None:
    block, call, x = parts()
    with torch.no_grad():
        plain = block(x, *call.args)[0]
    before = copy.deepcopy(block)
    seen: list[int] = []
    made = calibrate_block(block, x, x, Settings.from_dict(QUICK | {"batch": 8}), call=call, watch=seen.append)
    assert torch.equal(made.y_fp, plain)
    assert made.after < 0.8 * made.before
    assert seen == [1, 2, 3, 4, 5, 6]
    assert all(parameter.grad is None and parameter.requires_grad for parameter in block.parameters())
    with torch.no_grad():
        assert torch.equal(block(x, *call.args)[0], made.y_q)
    error = (made.y_q - plain).square().mean() / plain.square().mean()
    assert made.after == pytest.approx(error.item(), rel=1e-4)
    for name, parameter in block.named_parameters():
        path = name.removesuffix(".weight")
        if path in made.linears:
            assert torch.equal(parameter, made.linears[path].weight())
        else:
            assert torch.equal(parameter, before.get_parameter(name))


def test_epochs_0_rounds_to_nearest() -> None:
    block, call, x = parts()
    made = calibrated(block, call, x, epochs=0)
    assert made.after == pytest.approx(made.before, rel=0.02)  # scales in 16 bits
    for one in made.linears.values():
        assert one.B is not None
        assert not one.B.any()
        assert torch.equal(one.weight(), one.quantized())


def test_a_block_learns_to_undo_what_came_before_it() -> None:
    """Trained for the quantized stream, a block comes nearer to the plain one than trained for the plain stream."""
    errors = {}
    for trained_on in ("plain", "quantized"):
        block, call, x = parts()
        x_q = x + 0.3 * torch.randn(x.shape, generator=torch.Generator().manual_seed(1)) + 0.4
        made = calibrated(block, call, x, x if trained_on == "plain" else x_q, epochs=12, aug_loss=False)
        with torch.no_grad():
            errors[trained_on] = (block(x_q, *call.args)[0] - made.y_fp).square().mean()
    assert errors["quantized"] < errors["plain"]


def test_lam_0_is_no_saliency_bit_for_bit() -> None:
    weights = []
    for options in ({"lam": 0.0, "saliency": "drawn"}, {"lam": 0.5}):
        block, call, x = parts()
        F = drawn(block) if options.pop("saliency", None) else None
        made = calibrated(block, call, x, saliency=F, **options)
        weights.append({path: one.tensors() for path, one in made.linears.items()})
    for path, tensors in weights[0].items():
        for name, value in tensors.items():
            assert torch.equal(value, weights[1][path][name])


@pytest.mark.parametrize("after_lora", [False, True])
def test_the_saliency_term_spares_salient_weights(after_lora: bool) -> None:
    def error(lam: float) -> float:
        block, call, x = parts()
        F = drawn(block)
        W = {path: block.get_submodule(path).get_parameter("weight").clone() for path in F}
        made = calibrated(block, call, x, saliency=F, lam=lam, after_lora=after_lora, epochs=20)
        stored = {path: one.weight() if after_lora else one.quantized() for path, one in made.linears.items()}
        return sum((F[path] * (stored[path] - W[path]) ** 2).sum().item() for path in F)

    assert error(3.0) < 0.95 * error(0.0)


def test_lam_means_the_same_whatever_the_scale_of_saliency_and_of_the_model() -> None:
    """A thousandfold F, or weights and stream four times as large, train to the same codes."""

    def made(*, size: float = 1.0, scale: float = 1.0, **settings: Any) -> Calibrated:
        torch.manual_seed(0)
        linear = nn.Sequential(nn.Linear(32, 32, bias=False))
        x, F = torch.randn(8, 8, 32), torch.rand(32, 32) ** 6
        with torch.no_grad():
            linear[0].weight.mul_(scale)
        return calibrated(linear, Call(), scale * x, saliency={"0": size * F}, **settings)

    plain, large = made(lam=1.0, rank=0), made(lam=1.0, rank=0, scale=4.0)
    assert torch.equal(large.linears["0"].codes, plain.linears["0"].codes)
    assert torch.equal(large.linears["0"].scale, 4 * plain.linears["0"].scale)
    assert not torch.equal(plain.linears["0"].codes, made(lam=4.0, rank=0).linears["0"].codes)
    plain, loud = made(lam=1.0), made(lam=1.0, size=1024.0)
    for name, value in plain.linears["0"].tensors().items():
        assert torch.equal(value, loud.linears["0"].tensors()[name])


def test_rates_fall_to_zero_unless_they_are_asked_to_stay() -> None:
    assert [Settings(epochs=2, batch=4).share(step, 8) for step in range(4)] == [1.0, 0.75, 0.5, 0.25]
    assert [Settings(epochs=2, batch=4, schedule="constant").share(step, 8) for step in range(4)] == [1.0] * 4
    with pytest.raises(TrimtabError, match="schedule must be one of linear, constant, got 'cosine'"):
        Settings(schedule="cosine")

    def scales(schedule: str, epochs: int) -> Tensor:
        block, call, x = parts()
        made = calibrated(block, call, x, schedule=schedule, epochs=epochs, batch=8)
        return torch.cat([one.tensors()["scale"].flatten() for one in made.linears.values()])

    assert torch.equal(scales("linear", 1), scales("constant", 1))  # the first step has the whole rate
    assert not torch.equal(scales("linear", 2), scales("constant", 2))


def test_random_numbers_depend_on_seed_and_index_alone() -> None:
    def codes(**options: Any) -> Tensor:
        block, call, x = parts()
        torch.rand(int(torch.randint(1, 9, ())))  # whatever the global generator does
        settings = Settings.from_dict({**QUICK, "seed": options.pop("seed", 0)})
        made = calibrate_block(block, x, x, settings, call=call, **options)
        return torch.cat([one.B.flatten() for one in made.linears.values() if one.B is not None])

    assert torch.equal(codes(), codes())
    assert not torch.equal(codes(), codes(seed=1))
    assert not torch.equal(codes(), codes(index=1))


def test_a_bfloat16_block_trains_in_float32() -> None:
    block, call, x = parts()
    made = calibrated(block.bfloat16(), call, x.bfloat16(), epochs=10)
    assert made.y_q.dtype == torch.bfloat16
    assert block.attn.q.weight.dtype == torch.bfloat16
    assert made.after < 0.9 * made.before


def test_a_mixture_is_trained_and_idle_experts_are_rounded() -> None:
    model = Decoder(ModelConfig(24, 32, 1, 2, 16, 8, num_experts=4, top_k=1), seed=0).eval()
    call, x = Call((model.cos, model.sin)), torch.randn(2, 8, 32)
    block = model.blocks[0]
    linears = {path: m for path, m in block.named_modules() if isinstance(m, nn.Linear) and "router" not in path}
    made = calibrate_block(block, x, x, Settings.from_dict(QUICK), call=call, linears=linears)
    assert len(made.linears) == 4 + 3 * 4
    assert made.after <= made.before


def test_bad_blocks_are_refused() -> None:
    x = torch.randn(2, 4, 8)
    with pytest.raises(TrimtabError, match="holds none"):
        calibrate_block(nn.LayerNorm(8), x, x, Settings())
    shared = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    shared[1].weight = shared[0].weight
    with pytest.raises(TrimtabError, match="share one weight"):
        calibrate_block(shared, x, x, Settings())
    with pytest.raises(TrimtabError, match=r"0 is float16.*bfloat16 or float32"):
        calibrate_block(nn.Sequential(nn.Linear(8, 8).half()), x.half(), x.half(), Settings())
    with pytest.raises(TrimtabError, match=r"saliency of 0 must have its weight's shape \(8, 8\), got \(8, 4\)"):
        calibrate_block(nn.Sequential(nn.Linear(8, 8)), x, x, Settings(), saliency={"0": torch.ones(8, 4)})
