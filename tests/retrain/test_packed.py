# SPDX-License-Identifier: Apache-2.0
"""Packed weights: every bit comes back, the true cost is counted, and a file that does not fit is refused."""

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from trimtab.errors import TrimtabError
from trimtab.lab.model import Decoder, ModelConfig
from trimtab.retrain import ClippedLora, Packed, Settings, bits_per_weight, load_packed_, save_packed
from trimtab.retrain.packed import pack, unpack

pytest.importorskip("safetensors")

LLAMA_7B = [(4096, 4096)] * 4 + [(11008, 4096)] * 2 + [(4096, 11008)]
LLAMA_13B = [(5120, 5120)] * 4 + [(13824, 5120)] * 2 + [(5120, 13824)]


@given(st.integers(2, 8), st.lists(st.integers(0, 255), min_size=1, max_size=40))
def test_packing_keeps_every_number(bits: int, numbers: list[int]) -> None:
    codes = torch.tensor([number % 2**bits for number in numbers], dtype=torch.uint8)
    packed = pack(codes, bits)
    assert packed.numel() == -(-len(numbers) * bits // 8)
    assert torch.equal(unpack(packed, bits, len(numbers)), codes)


def test_bits_per_weight_are_the_true_ones() -> None:
    assert bits_per_weight(LLAMA_7B, Settings(rank=0)) == 2.28125
    assert bits_per_weight(LLAMA_7B, Settings()) == pytest.approx(2.676, abs=5e-4)
    assert bits_per_weight(LLAMA_13B, Settings()) == pytest.approx(2.597, abs=5e-4)
    assert bits_per_weight(LLAMA_7B, Settings(rank=0, symmetric=True, bits=4, group=128)) == 4 + 16 / 128
    assert bits_per_weight([(4, 65)], Settings(rank=0)) == 2 + 2 * 18 / 65  # a group of 64 and one of 1


@pytest.mark.parametrize("rank", [0, 8])
@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize(("bits", "shape"), [(2, (16, 128)), (3, (8, 72)), (4, (8, 130))])
def test_what_is_stored_is_as_large_as_is_said(bits: int, shape: tuple[int, int], symmetric: bool, rank: int) -> None:
    settings = Settings(bits=bits, symmetric=symmetric, rank=rank)
    packed = ClippedLora(torch.randn(shape), settings).freeze()
    said = bits_per_weight([shape], settings) * shape[0] * shape[1]
    assert 0 <= packed.num_bits() - said < 16  # the last bytes of codes and zero points
    again = Packed.from_tensors(shape, settings, packed.tensors())
    assert torch.equal(again.weight(), packed.weight())
    assert (packed.quantized().unique(dim=1).shape[1]) > 1


def test_the_weight_is_exact_in_any_order_of_summation() -> None:
    one = ClippedLora(torch.randn(64, 192), Settings())
    assert one.B is not None
    with torch.no_grad():
        one.B.normal_(std=1e-2)
    packed = one.freeze()
    assert packed.A is not None
    assert packed.B is not None
    order = torch.randperm(64)
    turned = Packed(
        packed.shape, packed.settings, packed.codes, packed.scale, packed.zero, packed.A[order], packed.B[:, order]
    )
    assert torch.equal(turned.weight(), packed.weight())
    assert not torch.equal(packed.B.float()[:, order] @ packed.A.float()[order], packed.B.float() @ packed.A.float())


def test_factors_beyond_sixteen_bits_are_refused() -> None:
    one = ClippedLora(torch.randn(8, 16), Settings(rank=2))
    assert one.B is not None
    with torch.no_grad():
        one.B.fill_(1e6)
    with pytest.raises(TrimtabError, match="LoRA factor B is not finite in 16 bits"):
        one.freeze()


# A whole model in one file.


def decoder(seed: int = 0, **fields: Any) -> Decoder:
    shape = {"vocab_size": 24, "width": 32, "layers": 2, "heads": 2, "ffn": 40, "max_seq": 16} | fields
    return Decoder(ModelConfig(**shape), seed=seed).eval()


def packed_model(tmp_path: Path, **fields: Any) -> tuple[Decoder, dict[str, Packed], Path]:
    model = decoder(**fields)
    settings = Settings(bits=3, group=16, rank=4)
    linears = {}
    for path, linear in model.blocks.named_modules(prefix="blocks"):
        if isinstance(linear, nn.Linear):
            one = ClippedLora(linear.weight, settings)
            assert one.B is not None
            with torch.no_grad():
                one.B.normal_(std=0.01)
                linears[path] = one.freeze()
                linear.weight.copy_(linears[path].weight())
    return model, linears, save_packed(model, linears, tmp_path / "deep" / "model.safetensors")


def logits(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return model(torch.arange(16)[None]).logits


@pytest.mark.parametrize("tied", [False, True])
def test_a_model_loads_again_bit_for_bit(tmp_path: Path, tied: bool) -> None:
    model, linears, path = packed_model(tmp_path, tied=tied)
    again = decoder(seed=7, tied=tied)
    found = load_packed_(again, path)
    assert torch.equal(logits(again), logits(model))
    for name, value in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], value), name
    assert (again.head.weight is again.embed.weight) == tied
    for name, one in linears.items():
        assert found[name].settings == one.settings
        for part, value in one.tensors().items():
            assert torch.equal(found[name].tensors()[part], value)
    rest = sum(p.numel() for p in model.parameters()) - sum(one.shape[0] * one.shape[1] for one in linears.values())
    stored = sum(one.num_bits() for one in linears.values()) // 8 + 4 * rest
    assert path.stat().st_size - stored < 20_000  # the header: names, shapes
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"layers": 3}, "is of another model: blocks.2.attn.k.weight is absent there"),
        ({"ffn": 48}, r"blocks.0.mlp.down.weight is \(32, 40\) there and \(32, 48\) here"),
        ({"vocab_size": 25}, r"embed.weight is \(24, 32\) there"),
    ],
)
def test_a_file_of_another_model_is_refused_and_changes_nothing(tmp_path: Path, fields: dict, words: str) -> None:
    _, _, path = packed_model(tmp_path)
    other = decoder(**fields)
    before = {name: value.clone() for name, value in other.state_dict().items()}
    with pytest.raises(TrimtabError, match=words):
        load_packed_(other, path)
    assert all(torch.equal(value, before[name]) for name, value in other.state_dict().items())


def test_damaged_and_foreign_files_are_refused(tmp_path: Path) -> None:
    from safetensors import safe_open
    from safetensors.torch import save_file

    _, _, path = packed_model(tmp_path)
    with safe_open(path, framework="pt") as file:
        header, tensors = file.metadata(), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118

    def refused(words: str) -> None:
        with pytest.raises(TrimtabError, match=words):
            load_packed_(decoder(), path)

    name = "blocks.0.attn.q.scale"
    save_file(tensors | {name: tensors[name][:, :1].contiguous()}, path, header)
    refused(r"scale of a 32 x 32 weight in 3 bits must be \(32, 2\) float16, got \(32, 1\) float16")
    save_file(tensors | {name: tensors[name].float()}, path, header)
    refused("got .* float32")
    save_file({key: value for key, value in tensors.items() if key != name}, path, header)
    refused("got absent: the file is damaged")
    save_file(tensors, path, header | {"trimtab": header["trimtab"].replace("packed 1", "packed 9")})
    refused("has the format 'trimtab packed 9'")
    save_file(tensors, path, header | {"trimtab": header["trimtab"].replace('"bits": 3', '"bits": 1')})
    refused("bits must be an int from 2 to 8")
    save_file(tensors, path)
    refused("not one of trimtab quantize")
    path.write_bytes(path.read_bytes()[:-7])
    refused("not a whole safetensors file")
    path.write_text("no such thing")
    refused("not a whole safetensors file")
    path.unlink()
    refused("must exist")


def test_a_write_that_fails_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, linears, path = packed_model(tmp_path)
    before = path.read_bytes()

    def full(*args: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="no space left"):
        save_packed(model, linears, path)
    assert path.read_bytes() == before
    assert list(path.parent.iterdir()) == [path]
