# SPDX-License-Identifier: Apache-2.0
"""Evaluation: the loss is the run's own, the bits are read as they are written, and neither model nor run changes."""

import json
import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from trimtab.errors import TrimtabError
from trimtab.lab.data import eval_batches, load_corpus
from trimtab.lab.evaluate import COLUMNS, Bits, Score, evaluate, evaluate_bits, evaluate_run, parse_bits
from trimtab.lab.model import Decoder, ModelConfig
from trimtab.lab.train import train
from trimtab.nn.kurtosis import excess_kurtosis
from trimtab.retrain import rtn_


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, small: dict[str, Any]) -> Path:
    """A run in FP8 that has learned something, with the shape that has every part."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    shape = {"kv_heads": 2, "norm": "ssnorm", "embproj": True}
    train({**small, **shape, "steps": 60, "batch": 8, "eval_batches": 2, "checkpoint_every": 30}, folder)
    return folder


@pytest.fixture
def decoder() -> Decoder:
    return Decoder(ModelConfig.size("micro", width=16, heads=2, ffn=24, max_seq=8), seed=0)


@pytest.fixture
def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [(torch.randint(0, 256, (rows, 8)), torch.randint(0, 256, (rows, 8))) for rows in (4, 2)]


# Bits.


@pytest.mark.parametrize(
    ("text", "bits"),
    [
        ("4-4-16", Bits(4, 4, 16)),
        ("4-4-4+had", Bits(4, 4, 4, had=True)),
        (" 2-8-5+HAD ", Bits(2, 8, 5, had=True)),
        ("16-16-16", Bits()),
    ],
)
def test_bits_are_read_and_written_alike(text: str, bits: Bits) -> None:
    assert parse_bits(text) == bits
    assert str(bits) == text.strip().lower()


@pytest.mark.parametrize("text", ["", "4", "4-4", "4-4-4-4", "4,4,4", "4-4-4+hat", "4-4-x", "-4-4-4", "4-4-4 +had"])
def test_other_spellings_are_refused(text: str) -> None:
    with pytest.raises(
        TrimtabError, match=r"bits are written weights-activations-kv, such as 4-4-16, .* got "
    ) as caught:
        parse_bits(text)
    assert repr(text) in str(caught.value)


@pytest.mark.parametrize(("text", "part"), [("1-4-4", "weights"), ("4-9-4", "activations"), ("4-4-32", "kv")])
def test_other_numbers_are_refused_by_name(text: str, part: str) -> None:
    with pytest.raises(TrimtabError, match=f"the bits of {part} in '{text}' must be 2 to 8, or 16"):
        parse_bits(text)


# The loss of a model.


def test_the_loss_is_the_mean_over_all_tokens(decoder: Decoder, batches: Any) -> None:
    batches[0][1][0, :5] = -100
    with torch.no_grad():
        parts = [(decoder.eval()(x, y).loss.item(), int((y != -100).sum())) for x, y in batches]
    expected = sum(loss * count for loss, count in parts) / sum(count for _, count in parts)
    assert evaluate(decoder, batches) == pytest.approx(expected, rel=1e-6)
    assert expected != pytest.approx(sum(loss for loss, _ in parts) / 2, rel=1e-6)


def test_modes_and_weights_are_restored_even_after_an_error(decoder: Decoder, batches: Any) -> None:
    decoder.train()
    decoder.blocks[0].eval()
    before = {name: value.clone() for name, value in decoder.state_dict().items()}

    def broken() -> Iterator[Any]:
        yield batches[0]
        raise OSError("the disk is gone")

    evaluate(decoder, batches)
    evaluate_bits(decoder, batches, "2-2-2+had")
    with pytest.raises(OSError, match="the disk is gone"):
        evaluate(decoder, broken())
    modes = {name: module.training for name, module in decoder.named_modules()}
    assert modes["blocks.1.attn"]
    assert not modes["blocks.0"]
    assert not modes["blocks.0.attn"]
    assert all(torch.equal(value, before[name]) for name, value in decoder.state_dict().items())
    assert not any(module._forward_pre_hooks for module in decoder.modules())


def test_nothing_to_predict_is_refused(decoder: Decoder, batches: Any) -> None:
    with pytest.raises(TrimtabError, match="at least one token to predict"):
        evaluate(decoder, [])
    with pytest.raises(TrimtabError, match="at least one token to predict"):
        evaluate(decoder, [(x, torch.full_like(y, -100)) for x, y in batches])


def test_rounded_losses_are_those_of_a_rounded_model(decoder: Decoder, batches: Any) -> None:
    losses = {text: evaluate_bits(decoder, batches, text) for text in ("16-16-16", "3-3-3", "3-3-3+had")}
    assert losses["16-16-16"] == evaluate(decoder, batches)
    rtn_(decoder, 3, 3, 3)
    assert losses["3-3-3"] == evaluate(decoder, batches)
    assert len(set(losses.values())) == 3


def test_perplexity_overflows_to_infinity() -> None:
    assert Score(Bits(), 2.0).perplexity == pytest.approx(math.e**2)
    assert Score(Bits(), 1e4).perplexity == math.inf
    assert math.isnan(Score(Bits(), math.nan).perplexity)


# A run.


def test_the_plain_score_is_the_runs_own_and_the_folder_stays(run: Path) -> None:
    before = contents(run)
    result = evaluate_run(run, ["8-8-8", "2-2-2", "8-8-8", "16-16-16"])
    assert contents(run) == before
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    own = [line["eval_loss_high"] for line in lines if "eval_loss_high" in line][-1]
    assert [str(score.bits) for score in result.scores] == ["16-16-16", "8-8-8", "2-2-2"]
    plain, eight, two = result.scores
    assert plain.loss == pytest.approx(own, rel=1e-6)  # on the high path FP8 is the plain linear
    assert abs(result.change(eight)) < 0.02
    assert result.change(two) > 10 * abs(result.change(eight))
    assert result.bits_per_byte(plain) == pytest.approx(plain.loss / math.log(2))
    assert (result.step, result.tokens, result.data) == (60, 2 * 8 * 16, "words.txt")


def test_the_kurtosis_is_that_of_the_residual_stream(run: Path, small: dict[str, Any]) -> None:
    result = evaluate_run(run, [])
    state = torch.load(max((run / "checkpoints").iterdir()), weights_only=True)
    shape = ModelConfig.size("micro", max_seq=16, kv_heads=2, norm="ssnorm", embproj=True)
    model = Decoder(shape)
    model.load_state_dict(state["model"])
    corpus = load_corpus(small["data"])
    seen: list[torch.Tensor] = []
    for block in model.blocks:
        block.register_forward_hook(lambda module, args, out: seen.append(excess_kurtosis(args[0])))
    model.blocks[-1].register_forward_hook(lambda module, args, out: seen.append(excess_kurtosis(out[0])))
    with torch.no_grad():
        for inputs, _ in eval_batches(corpus.held_out, batch=8, seq=16, limit=2):
            model(inputs)
    assert result.kurtosis_mean == pytest.approx(torch.stack(seen).mean().item(), rel=1e-4)
    assert result.kurtosis_max == pytest.approx(torch.stack(seen).max().item(), rel=1e-4)


def test_the_columns_of_the_paper_are_the_default(run: Path) -> None:
    result = evaluate_run(run, batches=1)
    assert tuple(str(score.bits) for score in result.scores) == ("16-16-16", *COLUMNS)
    assert result.tokens == 8 * 16


def test_other_text_may_be_named(run: Path, tmp_path: Path) -> None:
    (tmp_path / "other.txt").write_text("completely different signs: 0123456789 " * 60)
    own, other = evaluate_run(run, []), evaluate_run(run, [], data=tmp_path / "other.txt")
    assert other.data == "other.txt"
    assert other.scores[0].loss > own.scores[0].loss + 1


def test_a_mixture_run_is_evaluated(tmp_path: Path, small: dict[str, Any]) -> None:
    moe = {"num_experts": 3, "top_k": 1, "recipe": "none", "mode": "observe", "dtype": "bf16", "steps": 2}
    train({**small, **moe, "policy": {}}, tmp_path / "run")
    result = evaluate_run(tmp_path / "run", ["4-4-4+had"])
    assert all(math.isfinite(score.loss) for score in result.scores)
    assert result.scores[0].loss != result.scores[1].loss


def test_plain_values_are_json(run: Path) -> None:
    result = evaluate_run(run, ["4-4-16"])
    values = json.loads(json.dumps(result.to_dict(), allow_nan=False))
    assert [score["bits"] for score in values["scores"]] == ["16-16-16", "4-4-16"]
    assert values["scores"][1]["change"] == pytest.approx(result.scores[1].loss - result.scores[0].loss)
    assert values["kurtosis"] == {"mean": result.kurtosis_mean, "max": result.kurtosis_max}


# What cannot be evaluated.


def refused(folder: Path, match: str, **options: Any) -> None:
    before = contents(folder)
    with pytest.raises(TrimtabError, match=match) as caught:
        evaluate_run(folder, ["4-4-16"], **options)
    assert "\n" not in str(caught.value)
    assert contents(folder) == before


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    refused(tmp_path / "missing", r"needs a run folder, and there is no .*run\.json: give one of trimtab train")


def test_a_run_without_a_checkpoint_says_what_to_do(run: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(run, tmp_path / "run")
    shutil.rmtree(folder / "checkpoints")
    refused(folder, f"has no checkpoint yet: .* trimtab train --resume --out {folder}")


def test_unreadable_checkpoints_say_what_to_do(run: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(run, tmp_path / "run")
    for path in (folder / "checkpoints").iterdir():
        path.write_bytes(b"PK")
    refused(folder, f"none of the 2 checkpoints in .* can be read: restore one, or .* --out {folder} --force")


def test_a_torn_checkpoint_falls_back_to_the_one_before(run: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(run, tmp_path / "run")
    newest = max((folder / "checkpoints").iterdir())
    newest.write_bytes(newest.read_bytes()[:500])
    assert evaluate_run(folder, []).step == 30


def test_text_that_has_changed_is_refused_unless_named(run: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(run, tmp_path / "run")
    path = max((folder / "checkpoints").iterdir())
    state = torch.load(path, weights_only=True)
    torch.save({**state, "data": "0" * 64}, path)
    refused(folder, r"has changed since .* name a text \(--data .*words\.txt is this one\)")
    assert evaluate_run(folder, [], data=state["config"]["data"]).step == 60


def test_text_that_is_not_there_says_where_to_evaluate(run: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(run, tmp_path / "run")
    path = max((folder / "checkpoints").iterdir())
    state = torch.load(path, weights_only=True)
    torch.save({**state, "config": {**state["config"], "data": "gone.txt"}}, path)
    refused(
        folder, r"got 'gone\.txt' \(as .* names it: evaluate from where it was trained, or name a text with --data\)"
    )


def test_a_checkpoint_of_another_shape_is_refused_by_name(run: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(run, tmp_path / "run")
    path = max((folder / "checkpoints").iterdir())
    state = torch.load(path, weights_only=True)
    torch.save({**state, "config": {**state["config"], "kv_heads": None}}, path)
    refused(folder, r"is of another model: blocks\.0\.attn\.k\.weight")


def test_an_hf_style_model_is_evaluated_by_its_logits() -> None:
    class Bigram(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding.from_pretrained(torch.log(torch.tensor([[0.25, 0.75], [0.5, 0.5]])))

        def forward(self, x: torch.Tensor) -> Any:
            return type("Out", (), {"logits": self.table(x)})

    loss = evaluate(Bigram(), [(torch.tensor([[0, 1, 0]]), torch.tensor([[1, 0, 0]]))])
    assert loss == pytest.approx(-(math.log(0.75) + math.log(0.5) + math.log(0.25)) / 3)
