# SPDX-License-Identifier: Apache-2.0
"""What others open: Transformers a plain folder, peft an adapter over the quantized base, trimtab the packed one."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("transformers")

import transformers

from trimtab.errors import MissingExtraError, TrimtabError
from trimtab.retrain import (
    ClippedLora,
    Retrained,
    Settings,
    load_folder,
    retrain_,
    save_adapter,
    save_base,
    save_folder,
    save_model,
    to_torchao,
)

QUICK = {"group": 16, "rank": 4, "alpha": 8.0, "epochs": 3, "lr_clip": 0.05, "lr_lora": 5e-3, "bits": 3}


def tokens() -> Tensor:
    return torch.randint(0, 40, (3, 12), generator=torch.Generator().manual_seed(1))


def retrained(**options: Any) -> tuple[Any, Retrained]:
    """A llama whose inputs are no multiple of the group, with tied embeddings."""
    config = transformers.LlamaConfig(
        vocab_size=40, hidden_size=40, intermediate_size=56, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=options.pop("tied", True),
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM._from_config(config, dtype=options.pop("dtype", torch.float32)).eval()
    return model, retrain_(model, tokens(), Settings.from_dict({**QUICK, **options}))


def logits(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return model(tokens()).logits


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_transformers_opens_the_dequantized_folder(tmp_path: Path, dtype: torch.dtype) -> None:
    model, _ = retrained(dtype=dtype)
    folder = save_model(model, tmp_path / "out" / "model")
    plain = transformers.AutoModelForCausalLM.from_pretrained(folder)
    assert plain.dtype == dtype
    assert torch.equal(logits(plain), logits(model))
    assert {path.suffix for path in folder.iterdir()} <= {".json", ".safetensors"}  # nothing to unpickle
    with pytest.raises(TrimtabError, match="new or empty folder"):
        save_model(model, folder)
    assert list(folder.parent.iterdir()) == [folder]


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize(("dtype", "tied"), [(torch.float32, True), (torch.bfloat16, False)])
def test_the_packed_folder_opens_bit_for_bit(tmp_path: Path, dtype: torch.dtype, tied: bool, symmetric: bool) -> None:
    model, report = retrained(dtype=dtype, tied=tied, symmetric=symmetric, bits=2)
    folder = save_folder(model, report, tmp_path / "packed")
    again, linears = load_folder(folder)
    assert torch.equal(logits(again), logits(model))
    assert next(again.parameters()).dtype == dtype
    assert not again.training
    assert (again.lm_head.weight is again.model.embed_tokens.weight) == tied  # type: ignore[union-attr]
    for path, one in report.linears.items():
        assert torch.equal(linears[path].codes, one.codes)
    (folder / "config.json").write_text("{}")
    with pytest.raises(TrimtabError, match="not of a causal language model"):
        load_folder(folder)
    (folder / "packed.safetensors").unlink()
    with pytest.raises(TrimtabError, match=r"holds a packed\.safetensors, .* has none"):
        load_folder(folder)


def test_peft_opens_the_adapter_over_the_base(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    model, report = retrained()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    base_folder = save_base(model, report, tmp_path / "base")
    folder = save_adapter(report, tmp_path / "adapter", base=base_folder)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    base = transformers.AutoModelForCausalLM.from_pretrained(base_folder)
    for path, one in report.linears.items():
        assert torch.equal(base.get_submodule(path).weight, one.quantized())
    alone = logits(base)
    both = peft.PeftModel.from_pretrained(base, folder, is_trainable=True).eval()
    torch.testing.assert_close(logits(both), logits(model), rtol=1e-4, atol=1e-5)
    assert not torch.allclose(alone, logits(model), rtol=1e-3, atol=1e-3)
    trained = [name for name, parameter in both.named_parameters() if parameter.requires_grad]
    assert len(trained) == 2 * len(report.linears)
    torch.testing.assert_close(logits(both.merge_and_unload()), logits(model), rtol=1e-4, atol=1e-5)
    config = json.loads((folder / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["base_model_name_or_path"]) == (4, 8, str(base_folder))
    assert {path.name for path in folder.iterdir()} == {"adapter_config.json", "adapter_model.safetensors"}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("bits", [2, 3, 4])
def test_torchao_holds_the_base(bits: int, symmetric: bool) -> None:
    pytest.importorskip("torchao")
    packed = ClippedLora(torch.randn(16, 128), Settings(bits=bits, symmetric=symmetric, rank=0)).freeze()
    held = to_torchao(packed)
    assert torch.equal(held.dequantize(), packed.quantized())  # type: ignore[operator]


def test_torchao_holds_no_short_group(monkeypatch: pytest.MonkeyPatch) -> None:
    packed = ClippedLora(torch.randn(16, 130), Settings(rank=0)).freeze()
    with pytest.raises(TrimtabError, match="groups of one length, got 130 inputs in groups of 64"):
        to_torchao(packed)
    monkeypatch.setitem(sys.modules, "torchao.quantization", None)
    with pytest.raises(MissingExtraError, match="pip install torchao"):
        to_torchao(ClippedLora(torch.randn(16, 128), Settings(rank=0)).freeze())


def test_what_cannot_be_exported_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, report = retrained(rank=0, epochs=0)
    with pytest.raises(TrimtabError, match="retrained without: give a rank above 0"):
        save_adapter(report, tmp_path / "adapter")
    with pytest.raises(TrimtabError, match="from a Transformers model, got a Linear"):
        save_model(nn.Linear(2, 2), tmp_path / "model")
    with pytest.raises(TrimtabError, match="from a Transformers model, got a Linear"):
        save_folder(nn.Linear(2, 2), report, tmp_path / "model")
    _, report = retrained(epochs=0)
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'trimtab\[hf\]'"):
        save_adapter(report, tmp_path / "adapter")
    assert list(tmp_path.iterdir()) == []


def test_a_failed_export_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, report = retrained(epochs=0)

    def full(*args: object) -> None:
        raise OSError("no space left")

    with monkeypatch.context() as patch:
        patch.setattr(type(model), "save_pretrained", full)
        with pytest.raises(OSError, match="no space left"):
            save_base(model, report, tmp_path / "base")
    assert list(tmp_path.iterdir()) == []
    path = next(iter(report.linears))
    assert torch.equal(model.get_submodule(path).weight, report.linears[path].weight())
