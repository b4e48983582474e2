# SPDX-License-Identifier: Apache-2.0
"""`trimtab quantize`: a folder that opens again, a run that goes on after a kill, one line for bad input."""

import functools
import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

import transformers

from trimtab.retrain import load_folder

WORDS = ("the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog")
QUICK = ("--device", "cpu", "--sequences", 4, "--length", 32, "--epochs", 2, "--rank", 4, "--group", 16)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "words.txt"
    path.write_text(" ".join(random.Random(0).choices(WORDS, k=1200)), encoding="utf-8")
    return path


@pytest.fixture
def quantize(trimtab: Any, tiny_llama: Path, text: Path, tmp_path: Path) -> Any:
    """Call `trimtab quantize` on the tiny model, into `out`."""
    options = ("--data", text, "--out", tmp_path / "out", "--eval-tokens", 256)
    return functools.partial(trimtab, "quantize", tiny_llama, *QUICK, *options)


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.arange(3, 40)[None]).logits


def refused(answer: Any, *words: str) -> None:
    assert answer.code == 2, answer
    assert answer.err.startswith("error: ")
    assert answer.err.count("\n") == 1, answer.err
    for word in words:
        assert word in answer.err


def test_every_export_computes_the_same(quantize: Any, tiny_llama: Path, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    answer = quantize("--saliency", *(f"--export={name}" for name in ("packed", "dequantized", "peft")))
    assert (answer.code, answer.err) == (0, "")
    out = tmp_path / "out"
    lines = answer.out.splitlines()
    assert lines[0].startswith("perplexity ")
    assert [line.split()[0] for line in lines if line.startswith("saliency")] == ["saliency"] * 4
    assert [line.split(",")[0] for line in lines if line.startswith("block")] == [
        f"block {n}/4  done" for n in (1, 2, 3, 4)
    ]
    report = json.loads((out / "report.json").read_text())
    assert any(f"{report['bits_per_weight']:.3f} bits per weight" in line for line in lines)
    assert lines[-4:] == [str(out / name) for name in ("packed", "dequantized", "base", "adapter")]
    assert report["settings"]["bits"] == 2
    assert report["saliency"] is True
    assert report["perplexity"]["after"] >= 1
    assert len(report["blocks"]) == 4
    packed, _ = load_folder(out / "packed")
    plain = transformers.AutoModelForCausalLM.from_pretrained(out / "dequantized")
    assert torch.equal(logits(packed), logits(plain))
    assert not torch.allclose(logits(transformers.AutoModelForCausalLM.from_pretrained(tiny_llama)), logits(plain))
    base = transformers.AutoModelForCausalLM.from_pretrained(out / "base")
    both = peft.PeftModel.from_pretrained(base, out / "adapter")
    torch.testing.assert_close(logits(both), logits(plain), rtol=1e-4, atol=1e-4)
    tokenizer = transformers.AutoTokenizer.from_pretrained(out / "packed")
    assert tokenizer.decode(tokenizer("a dog")["input_ids"]) == "a dog"


def test_a_killed_run_goes_on_and_ends_the_same(
    quantize: Any, trimtab: Any, tmp_path: Path, contents: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from trimtab.cli.quantize import _Bar

    whole, cut = tmp_path / "whole", tmp_path / "out"
    assert quantize("--saliency", "--out", whole).code == 0
    watch = _Bar.watch

    def killed(self: _Bar, at: Any) -> None:
        watch(self, at)
        if at.block == 2:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(_Bar, "watch", killed)
        answer = quantize("--saliency")
    assert answer.code == 130
    assert "--resume continues it" in answer.err
    assert not (cut / "packed").exists()
    before = contents(cut)
    refused(quantize("--saliency"), "holds a quantization already: --resume continues it, --force replaces it")
    refused(quantize("--saliency", "--resume", "--bits", 3), "bits = 2, this one has 3")
    refused(quantize("--saliency", "--resume", "--force"), "give one of them")
    assert contents(cut) == before
    answer = quantize("--saliency", "--resume")
    assert answer.code == 0
    assert "block 2/4  found" in answer.out
    assert "block 3/4  done" in answer.out
    assert "saliency 4/4" not in answer.out  # it is stored
    assert contents(cut) == contents(whole)
    assert "block 4/4  found" in quantize("--saliency", "--resume", "--export", "dequantized").out
    assert (cut / "dequantized" / "model.safetensors").is_file()
    assert quantize("--saliency", "--force").code == 0
    assert contents(cut) == contents(whole)


def test_rounding_and_other_settings(quantize: Any, tmp_path: Path) -> None:
    answer = quantize("--epochs", 0, "--rank", 0, "--bits", 4, "--symmetric", "--eval-tokens", 0, "--set", "batch=2")
    assert (answer.code, answer.err) == (0, "")
    assert "perplexity" not in answer.out
    assert "4 bits symmetric in groups of 16: 5.000 bits per weight\n" in answer.out
    assert json.loads((tmp_path / "out" / "report.json").read_text())["settings"]["batch"] == 2


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--bits", 1), "bits must be an int from 2 to 8, got 1"),
        (("--sequences", 4000), "4000 calibration sequences of 32 tokens need 128,000 tokens, the text has"),
        (("--eval-tokens", 8), "needs that many held-out tokens"),
        (("--data", "nowhere.txt"), "a corpus must be an existing file or folder"),
        (("--export", "gptq"), "--export is one of packed, dequantized, peft, got 'gptq'"),
        (("--export", "peft", "--rank", 0), "--export peft holds LoRA factors: give a --rank above 0"),
        (("--lam", 0.5), "--lam weighs the term of --saliency"),
        (("--saliency", "--epochs", 0), "with lam or epochs of 0 there is none"),
        (("--set", "bitz=3"), "no setting 'bitz': did you mean 'bits'?"),
        (("--device", "abacus"), "--device must be one that torch can use here, got 'abacus'"),
    ],
)
def test_bad_input_is_one_line_and_leaves_no_folder(quantize: Any, tmp_path: Path, options: tuple, words: str) -> None:
    refused(quantize(*options), words)
    assert not (tmp_path / "out").exists()


def test_a_model_that_is_none_and_a_folder_of_others_are_refused(
    quantize: Any, trimtab: Any, tmp_path: Path, text: Path, contents: Any
) -> None:
    refused(trimtab("quantize", text, *QUICK, "--out", tmp_path / "out"), "must be a GGUF")
    refused(trimtab("quantize", tmp_path / "no", *QUICK, "--out", tmp_path / "out"), "is none that is here")
    other = tmp_path / "mine"
    other.mkdir()
    (other / "diary.txt").write_text("dear")
    for option in ("--force", "--resume"):
        refused(quantize("--out", other, option), "must be a new folder or one of trimtab quantize")
    assert contents(other) == {"diary.txt": b"dear"}
    refused(quantize("--out", other / "diary.txt", "--force"), "is a file: choose another")
    (tmp_path / "out" / ".packed.x1").mkdir(parents=True)  # what a kill leaves
    (tmp_path / "out" / "saliency.tmp").write_bytes(b"torn")
    refused(quantize(), "--resume continues it")
    assert quantize("--resume", "--epochs", 0).code == 0
