# SPDX-License-Identifier: Apache-2.0
"""The memory account: which tensors linears keep, who shares them, and how many bits each path stands for."""

import torch

from trimtab import Recipe, convert_
from trimtab.lab.model import Decoder, ModelConfig
from trimtab.linear.account import describe_saved, saved_bits, saved_inputs


def test_a_layer_has_seven_linears_and_four_saved_inputs() -> None:
    model = Decoder(ModelConfig.size("micro"), seed=0)
    convert_(model, "saved4")
    tokens = torch.randint(0, 256, (2, 16))
    found = saved_inputs(model, lambda: model(tokens))
    width, ffn, rows = 64, 172, 2 * 16
    layers = [found[:4], found[4:]]
    for i, layer in enumerate(layers):
        attn, mlp = f"blocks.{i}.attn", f"blocks.{i}.mlp"
        assert [x.units for x in layer] == [
            (f"{attn}.q", f"{attn}.k", f"{attn}.v"),
            (f"{attn}.o",),
            (f"{mlp}.gate", f"{mlp}.up"),
            (f"{mlp}.down",),
        ]
        assert [x.elements for x in layer] == [rows * width, rows * width, rows * width, rows * ffn]


def test_looking_changes_nothing() -> None:
    model = Decoder(ModelConfig.size("micro"), seed=0)
    convert_(model, "nvfp4", unit="block")
    tokens = torch.randint(0, 256, (2, 16))
    before = [m.memory.state_dict() for m in model.modules() if hasattr(m, "memory")]
    random = torch.get_rng_state()
    saved_inputs(model, lambda: model(tokens))
    after = [m.memory.state_dict() for m in model.modules() if hasattr(m, "memory")]
    assert str(before) == str(after)
    assert torch.equal(random, torch.get_rng_state())
    assert model.training
    assert not any(m._forward_pre_hooks for m in model.modules())


def test_the_bits_are_those_of_what_each_path_keeps() -> None:
    saved4, fp8, fp4 = Recipe.named("saved4"), Recipe.named("fp8"), Recipe.named("fp4")
    assert [saved_bits(p, torch.float32) for p in (saved4.low, saved4.high)] == [4, 8]
    assert [saved_bits(p, torch.bfloat16) for p in (fp8.low, fp8.high)] == [8, 16]
    assert [saved_bits(p, torch.bfloat16) for p in (fp4.low, fp4.high)] == [4, 8]


def test_a_block_counts_once_per_linear() -> None:
    model = Decoder(ModelConfig.size("micro"), seed=0)
    convert_(model, "saved4", unit="block")
    said = describe_saved(model, lambda: model(torch.zeros(1, 8, dtype=torch.long)))
    assert said["bits"] == [4, 8]
    assert said["inputs"][0]["units"] == ["blocks.0"] * 3
