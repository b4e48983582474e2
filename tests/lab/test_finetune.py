# SPDX-License-Identifier: Apache-2.0
"""Fine-tuning: what an example becomes, what a unit's norm is, what INT8 computes, and that a run can be trusted.

The oracles are computed by hand beside the run: adapter gradients by autograd, W8A8 by rounding, plain training by peft
and AdamW alone.
"""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, linear

pytest.importorskip("transformers")
pytest.importorskip("peft")

import peft

from trimtab.control.act import running
from trimtab.errors import TrimtabError
from trimtab.lab import chat, checkpoint
from trimtab.lab.chat import load_examples
from trimtab.lab.finetune import ADAPTER, MODEL, Finetuning, answer_scores, finetune
from trimtab.lab.finetune_config import FinetuneConfig
from trimtab.lab.optimizers import schedule
from trimtab.lab.pretrained import load
from trimtab.lab.run import Run, Silent
from trimtab.linear.linear import switch_linears
from trimtab.report.read import read_run, read_trace

LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@pytest.fixture(scope="session")
def sums(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Forty small sums and their answers."""
    path = tmp_path_factory.mktemp("data") / "sums.jsonl"
    lines = [{"question": f"{a} plus {b}?", "answer": f"It is {a + b}."} for a in range(8) for b in range(5)]
    path.write_text("\n".join(map(json.dumps, lines)) + "\n", encoding="utf-8")
    return path


@pytest.fixture
def small(tiny_llama: Path, sums: Path) -> dict[str, Any]:
    """Settings of a run of six steps that acts."""
    policy = {"warmup_steps": 1, "alpha": 1.01, "alpha_warmup": None, "beta": 1.05, "window": 2}
    given = {"steps": 6, "batch": 3, "seq": 64, "lr": 5e-3, "eval_batches": 1, "checkpoint_every": 3, "threads": 1}
    return {"model": str(tiny_llama), "data": str(sums), "device": "cpu", "policy": policy, **given}


def make_run(settings: Mapping[str, Any]) -> Run:
    return Run(FinetuneConfig.from_dict(settings), Silent(), task=Finetuning)


def write(path: Path, *lines: object) -> Path:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def answers_of(example: chat.Example, tokenizer: Any) -> str:
    return tokenizer.decode(example.ids[example.is_answer])


# Examples.


def test_only_answers_are_marked_in_every_form(tiny_llama: Path, tmp_path: Path) -> None:
    tokenizer = load(tiny_llama).tokenizer
    say = lambda role, text: {"role": role, "content": text}  # noqa: E731
    path = write(
        tmp_path / "forms.jsonl",
        {"prompt": "one", "answer": "uno"},
        {"question": "one", "answer": "uno"},
        {"prompt": "one", "completion": "uno"},
        {"instruction": "say", "input": "one", "output": "uno"},
        {"messages": [say("user", "one"), say("assistant", "uno")]},
        {"messages": [say("system", "s"), say("user", "one"), say("assistant", "uno"), say("user", "two")]},
        {"messages": [say("user", "1"), say("assistant", "uno"), say("user", "2"), say("assistant", "due")]},
        "",
        {"prompt": "x", "answer": "y"},
    )
    found = load_examples(path, tokenizer, seq=100, holdout=0.1)
    assert (len(found.train), len(found.held_out)) == (7, 1)
    texts = [tokenizer.decode(example.ids) for example in found.train]
    asked = "<|start|>user\none<|end|>\n<|start|>assistant\nuno<|end|>\n"
    assert texts[:3] == [asked] * 3
    assert "say\n\none" in texts[3]
    assert tokenizer.decode(found.held_out[0].ids) == asked
    assert texts[4].endswith("uno<|end|>\n")
    marked = [answers_of(example, tokenizer) for example in found.train]
    assert marked == ["uno<|end|>\n"] * 5 + ["uno<|end|>\ndue<|end|>\n", "y<|end|>\n"]


def test_without_a_template_an_end_token_closes_the_answer(tiny_llama: Path, tmp_path: Path) -> None:
    tokenizer = load(tiny_llama).tokenizer
    tokenizer.chat_template = None
    path = write(tmp_path / "two.jsonl", *[{"prompt": "one", "answer": "uno"}] * 2)
    example = load_examples(path, tokenizer, seq=100).train[0]
    assert tokenizer.decode(example.ids) == "one\nuno<|end|>"
    assert answers_of(example, tokenizer) == "uno<|end|>"


def test_prompt_and_answer_are_cut_apart(tiny_llama: Path, tmp_path: Path) -> None:
    """Where the tokenizer would join the end of the prompt with the answer, the tokens of the prompt stay its own."""
    tokenizer = load(tiny_llama).tokenizer
    asked, answered = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in ("<|start|>u", "no"))
    (example,) = chat.encode([[chat.Piece("<|start|>u", False), chat.Piece("no", True)]], tokenizer)
    assert example.ids.tolist() == asked + answered
    assert example.is_answer.tolist() == [False] * len(asked) + [True] * len(answered)


def test_long_examples_are_cut_or_dropped_and_counted(tiny_llama: Path, tmp_path: Path) -> None:
    tokenizer = load(tiny_llama).tokenizer
    short = {"prompt": "a", "answer": "b"}
    path = write(
        tmp_path / "long.jsonl", short, short, {"prompt": "a", "answer": "b" * 99}, {"prompt": "a" * 99, "answer": "b"}
    )
    found = load_examples(path, tokenizer, seq=40)
    assert (found.truncated, found.dropped, len(found.train) + len(found.held_out)) == (2, 1, 3)
    assert max(len(example.ids) for example in found.train + found.held_out) == 40
    with pytest.raises(TrimtabError, match=r"an answer within seq=5 tokens, and .* has 0 of 4: .* a larger seq"):
        load_examples(path, tokenizer, seq=5)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (['{"prompt": "a", "answer": "b"}', "{oops"], r"line 2 of .* is not: Expecting .* at column 2"),
        (["[1, 2]"], "line 1 of .* is a list"),
        ([{"text": "a"}], "line 1 of .* has 'text': rename its fields"),
        ([{"prompt": "a", "answer": 3}], "line 1 of .* has 'prompt', 'answer'"),
        ([{"prompt": "a", "answer": " "}], "an answer .* that is not empty, line 1"),
        ([{"messages": [{"role": "user", "content": "a"}]}], "an example needs an answer"),
        ([{"messages": "hello"}], "messages must be a list"),
        ([], "there is no example"),
        ([{"prompt": "a", "answer": "b"}], "has 1 of 1"),
    ],
)
def test_bad_lines_are_named(tiny_llama: Path, tmp_path: Path, lines: list[Any], message: str) -> None:
    with pytest.raises(TrimtabError, match=message):
        load_examples(write(tmp_path / "bad.jsonl", *lines), load(tiny_llama).tokenizer, seq=64)


def test_a_folder_means_its_training_file(tiny_llama: Path, tmp_path: Path) -> None:
    tokenizer = load(tiny_llama).tokenizer
    with pytest.raises(TrimtabError, match="holds none"):
        load_examples(tmp_path, tokenizer, seq=64)
    with pytest.raises(TrimtabError, match="does not exist"):
        load_examples(tmp_path / "absent", tokenizer, seq=64)
    pair = {"prompt": "a", "answer": "b"}
    write(tmp_path / "test.jsonl", pair, pair)
    write(tmp_path / "more.jsonl", pair)
    assert len(load_examples(tmp_path, tokenizer, seq=64).train) == 2  # three, one held out
    write(tmp_path / "train.jsonl", *[pair] * 6)
    assert len(load_examples(tmp_path, tokenizer, seq=64).train) == 5


def test_a_template_that_rewrites_is_refused(tiny_llama: Path, tmp_path: Path) -> None:
    tokenizer = load(tiny_llama).tokenizer
    tokenizer.chat_template = "{{ messages | length }}{{ messages[-1]['content'] }}"
    path = write(tmp_path / "two.jsonl", *[{"prompt": "a", "answer": "b"}] * 2)
    with pytest.raises(TrimtabError, match="rewrites what it wrote before, so the answers of line 1"):
        load_examples(path, tokenizer, seq=64)
    tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(TrimtabError, match=r"cannot write line 1 .*: roles must alternate"):
        load_examples(path, tokenizer, seq=64)


def test_an_epoch_shows_each_example_once_and_depends_on_the_seed() -> None:
    examples = [chat.Example(np.array([n, n]), np.array([False, True])) for n in range(10)]

    def seen(seed: int, steps: range) -> list[int]:
        sampler = chat.ExampleSampler(examples, batch=2, accumulate=1, seed=seed, pad=0)
        return [int(n) for step in steps for n in sampler.batch_at(step)[0][:, 0]]

    first, second = seen(0, range(1, 6)), seen(0, range(6, 11))
    assert sorted(first) == sorted(second) == list(range(10))
    assert first != second
    assert seen(0, range(3, 5)) == first[4:8]  # a resumed run sees what the uninterrupted one would
    assert seen(1, range(1, 6)) != first
    halves = chat.ExampleSampler(examples, batch=1, accumulate=2, seed=0, pad=0)
    assert [int(halves.batch_at(step, micro)[0]) for step in range(1, 6) for micro in range(2)] == first


def test_padding_changes_no_loss(small: dict[str, Any]) -> None:
    """The loss of a padded batch is the mean over answer tokens of the examples' own losses."""
    run = make_run({**small, "mode": "off"})
    inputs, targets = run.task.batch_at(1)
    assert (targets == -100).any(dim=1).all()
    assert len({int((row != -100).sum()) for row in targets}) > 1 or inputs.shape[0] > 1
    total = count = 0.0
    for row, target in zip(inputs, targets, strict=True):
        stop = int((target != -100).nonzero().max()) + 1
        logits = run.model(row[None, :stop]).logits[0]
        counted = target[:stop] != -100
        total += cross_entropy(logits[counted], target[:stop][counted], reduction="sum").item()
        count += int(counted.sum())
    assert run.task.loss(run.model, inputs, targets).item() == pytest.approx(total / count, rel=1e-5)


def test_accumulation_weighs_by_answer_tokens(small: dict[str, Any]) -> None:
    """Two micro-batches of one example give the loss and gradient of one batch of two, whatever their lengths."""
    whole = make_run({**small, "batch": 2, "recipe": "none", "mode": "observe"})
    parts = make_run({**small, "batch": 1, "accumulate": 2, "recipe": "none", "mode": "observe"})
    for step in range(1, 30):  # a pair of answers of different lengths
        whole.step = parts.step = step
        if len({int((row != -100).sum()) for row in whole.task.batch_at(step)[1]}) > 1:
            break
    else:
        pytest.fail("all answers have one length")
    assert whole._backward() == pytest.approx(parts._backward(), rel=1e-6)
    for (name, p), q in zip(whole.model.named_parameters(), parts.model.parameters(), strict=True):
        if p.requires_grad:
            torch.testing.assert_close(p.grad, q.grad, rtol=1e-4, atol=1e-7, msg=name)


# Units, norms, paths.


def test_a_unit_is_a_layer_with_seven_base_linears_and_fourteen_adapters(small: dict[str, Any]) -> None:
    run = make_run(small)
    assert run.report is not None
    assert [unit.name for unit in run.controller.units] == [f"model.layers.{n}" for n in range(4)]
    assert len(run.report.covered) == 28
    assert all(path.endswith(".base_layer") for path in run.report.covered)
    for number, unit in enumerate(run.controller.units):
        names = {name for name, p in run.model.named_parameters() if any(p is q for q in unit.parameters)}
        wanted = {
            f"model.layers.{number}.{'mlp' if name[0] in 'gud' else 'self_attn'}.{name}.lora_{letter}.default.weight"
            for name in LINEARS
            for letter in "AB"
        }
        assert names == wanted
        assert len(unit.modules) == 7
    assert run.config.build_policy().resolve(4, 6).max_high == 1
    assert run.config.build_policy().resolve(30, 6).max_high == 7


def test_recorded_norms_are_those_of_the_adapters_gradients(small: dict[str, Any], tmp_path: Path) -> None:
    finetune({**small, "mode": "observe", "steps": 2, "clip": None}, tmp_path / "run")
    trace = read_trace(tmp_path / "run" / "trace.arrow")
    run = make_run({**small, "mode": "off", "steps": 2})
    task = run.task
    with running(run.model, "low"):
        task.loss(run.model, *task.batch_at(1)).backward()
    for number in range(4):
        grads = [p.grad for n, p in run.model.named_parameters() if f"layers.{number}." in n and "lora_" in n]
        by_hand = math.sqrt(sum(g.double().square().sum().item() for g in grads if g is not None))
        assert trace.norms[0, number] == pytest.approx(by_hand, rel=1e-5)


def w8a8(x: Tensor, weight: Tensor) -> Tensor:
    """INT8 by hand: one scale per token and per output row, integers multiplied exactly."""
    scales = [t.abs().amax(-1, keepdim=True).double() / 127 for t in (x, weight)]
    left, right = ((t.double() / s).round() for t, s in zip((x, weight), scales, strict=True))
    return (linear(left, right) * scales[0] * scales[1].squeeze(-1)).float()


def test_fixed_int8_is_a_forward_of_w8a8_linears(small: dict[str, Any]) -> None:
    class ByHand(nn.Module):
        def __init__(self, inner: nn.Linear) -> None:
            super().__init__()
            self.weight = inner.weight

        def forward(self, x: Tensor) -> Tensor:
            return w8a8(x, self.weight)

    run = make_run({**small, "mode": "off", "path": "low"})
    inputs, targets = run.task.batch_at(1)
    with running(run.model, "low"), torch.no_grad():
        ours = run.task.loss(run.model, inputs, targets).item()
    with running(run.model, "high"), torch.no_grad():
        exact = run.task.loss(run.model, inputs, targets).item()
    plain = load(small["model"]).model  # adapters start as zero: the base alone gives the same
    for name in LINEARS:
        for path, module in list(plain.named_modules()):
            if path.endswith(name):
                plain.set_submodule(path, ByHand(module))
    with torch.no_grad():
        logits = plain(inputs).logits
    by_hand = cross_entropy(logits.flatten(0, 1), targets.flatten()).item()
    assert ours == pytest.approx(by_hand, abs=2e-6)
    assert abs(ours - exact) > 2e-5


def test_a_high_run_without_control_is_plain_peft_training(small: dict[str, Any], tmp_path: Path) -> None:
    """Bit for bit: the same loss and the same adapters as peft, AdamW and clipping by torch alone."""
    settings = {**small, "mode": "off", "path": "high", "steps": 4}
    finetune(settings, tmp_path / "run")
    config = FinetuneConfig.from_dict(settings)
    base = load(small["model"])
    examples = load_examples(small["data"], base.tokenizer, seq=64)
    sampler = chat.ExampleSampler(examples.train, batch=3, accumulate=1, seed=0, pad=base.tokenizer.pad_token_id)
    torch.manual_seed(0)
    model = peft.get_peft_model(
        base.model, peft.LoraConfig(r=16, lora_alpha=32, target_modules=list(LINEARS), task_type="CAUSAL_LM")
    )
    model.train()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=5e-3, weight_decay=0.0)
    losses = []
    for step in range(1, 5):
        inputs, targets = sampler.batch_at(step)
        loss = cross_entropy(model(input_ids=inputs).logits.flatten(0, 1), targets.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.param_groups[0]["lr"] = 5e-3 * schedule(step, config)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert [row["loss"] for row in metrics(tmp_path / "run", "loss")] == losses
    learned = peft.PeftModel.from_pretrained(load(small["model"]).model, tmp_path / "run" / ADAPTER)
    ours = {name: p for name, p in learned.named_parameters() if "lora_" in name}
    assert len(ours) == 56
    for name, p in model.named_parameters():
        if "lora_" in name:
            assert torch.equal(p, ours[name]), name


def metrics(folder: Path, key: str) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if key in row]


# Runs.


class Stop(Exception):  # noqa: N818
    """Somebody pulled the plug."""


class Plug(Silent):
    """Stops a run after a step."""

    def __init__(self, step: int) -> None:
        self._step = step

    def stepped(self, info: Any) -> None:
        if info.step == self._step:
            raise Stop


def final(folder: Path) -> dict[str, Any]:
    found = checkpoint.latest(folder / "checkpoints")
    assert found is not None
    return found[1]


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"recipe": "int8_static", "recipe_options": {"calibrate": 2}, "lora_dropout": 0.1},
        {"full": True, "lr": 1e-3},
    ],
    ids=["lora", "static-dropout", "full"],
)
def test_a_killed_run_resumes_bit_for_bit(small: dict[str, Any], tmp_path: Path, change: dict[str, Any]) -> None:
    settings = {**small, **change}
    finetune(settings, tmp_path / "whole")
    with pytest.raises(Stop):
        finetune(settings, tmp_path / "cut", watcher=Plug(5))
    finetune({}, tmp_path / "cut", resume=True)
    whole, cut = final(tmp_path / "whole"), final(tmp_path / "cut")
    assert whole["step"] == cut["step"] == 6
    assert len(whole["model"]) == (len(load(small["model"]).model.state_dict()) if "full" in change else 56)
    for name, value in whole["model"].items():
        assert torch.equal(value, cut["model"][name]), name
    one, two = (read_trace(tmp_path / name / "trace.arrow") for name in ("whole", "cut"))
    assert np.array_equal(one.norms, two.norms)
    assert np.array_equal(one.high, two.high)
    assert one.high.any()  # the policy acted: there was something to resume
    assert [r["loss"] for r in metrics(tmp_path / "whole", "loss")] == [
        r["loss"] for r in metrics(tmp_path / "cut", "loss")
    ]


def test_a_resumed_run_needs_its_data_its_base_and_its_settings(
    small: dict[str, Any], tmp_path: Path, tiny_llama: Path
) -> None:
    data = write(tmp_path / "own.jsonl", *Path(small["data"]).read_text().splitlines())
    settings = {**small, "data": str(data), "steps": 3}
    finetune(settings, tmp_path / "run")
    assert finetune({}, tmp_path / "run", resume=True).finished_before
    with pytest.raises(TrimtabError, match="a resumed run keeps its settings: lora_r was 16 and is now 8"):
        finetune({"lora_r": 8}, tmp_path / "run", resume=True)
    write(data, *[{"prompt": "a", "answer": "b"}] * 40)
    with pytest.raises(TrimtabError, match="was trained on other text"):
        finetune({"steps": 4}, tmp_path / "run", resume=True)
    model = load(tiny_llama).model
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight.mul_(1.5)
    moved = tmp_path / "base"
    other = {**small, "model": str(moved), "steps": 3}
    load_and_save(tiny_llama, moved)
    finetune(other, tmp_path / "run2")
    model.save_pretrained(moved)
    with pytest.raises(TrimtabError, match="was trained on another base model"):
        finetune({"steps": 4}, tmp_path / "run2", resume=True)


def load_and_save(source: Path, folder: Path) -> None:
    from trimtab.lab.pretrained import save_folder

    save_folder(load(source), folder)


def test_random_like_takes_as_many_layers_as_the_other_run(small: dict[str, Any], tmp_path: Path) -> None:
    settings = {**small, "steps": 8, "policy": {**small["policy"], "max_high": 2}}
    finetune(settings, tmp_path / "control")
    finetune({**settings, "random_like": str(tmp_path / "control")}, tmp_path / "random")
    control, other = (read_trace(tmp_path / name / "trace.arrow").high for name in ("control", "random"))
    assert control.any()
    assert np.array_equal(control.sum(axis=1), other.sum(axis=1))
    assert not np.array_equal(control, other)
    with pytest.raises(TrimtabError, match="random_like needs a plan"):
        finetune({**settings, "random_like": str(tmp_path / "control"), "mode": "off"}, tmp_path / "no")


def test_the_adapter_is_pefts_own_and_follows_the_last_checkpoint(small: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(Stop):
        finetune(small, tmp_path / "run", watcher=Plug(5))
    folder = tmp_path / "run" / ADAPTER
    assert {path.name for path in folder.iterdir()} == {"adapter_model.safetensors", "adapter_config.json"}
    config = json.loads((folder / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], set(config["target_modules"])) == (16, 32, set(LINEARS))
    assert config["base_model_name_or_path"] == str(Path(small["model"]).resolve())
    learned = peft.PeftModel.from_pretrained(load(small["model"]).model, folder).eval()
    state = final(tmp_path / "run")
    assert state["step"] == 3
    run = make_run(small)
    run.task.load_weights(state["model"])
    inputs, _ = run.task.batch_at(1)
    run.model.eval()
    with running(run.model, "high"), torch.no_grad():
        assert torch.equal(run.model(inputs).logits, learned(inputs).logits)


def test_a_full_run_trains_every_weight_and_leaves_a_model(small: dict[str, Any], tmp_path: Path) -> None:
    result = finetune({**small, "full": True, "lr": 2e-3, "steps": 20}, tmp_path / "run")
    before, after = load(small["model"]).model, load(tmp_path / "run" / MODEL).model
    changed = [not torch.equal(p, q) for p, q in zip(before.parameters(), after.parameters(), strict=True)]
    assert all(changed)
    assert not (tmp_path / "run" / ADAPTER).exists()
    losses = [row["loss"] for row in metrics(tmp_path / "run", "loss")]
    assert result.eval_loss_high < losses[0] - 0.5
    described = read_run(tmp_path / "run").config["corpus"]
    assert described["trained_parameters"] == sum(p.numel() for p in before.parameters())


def test_defaults_are_the_papers_where_it_has_any(tiny_llama: Path, sums: Path) -> None:
    given = {"model": str(tiny_llama), "data": str(sums)}
    lora, full = FinetuneConfig.from_dict(given), FinetuneConfig.from_dict({**given, "full": True})
    policy = lora.build_policy()
    wanted = {"alpha": 1.1, "alpha_warmup": 1.5, "beta": 1.5, "window": 5, "lock_steps": 1, "max_high": 0.25}
    assert {key: getattr(policy, key) for key in wanted} == wanted
    assert (policy.warmup, full.build_policy().warmup) == ("monitor", "threshold")
    assert (lora.recipe, lora.unit, lora.lora_r, lora.lora_alpha, lora.lora_dropout) == ("int8", "block", 16, 32, 0)
    assert (lora.lr, full.lr) == (2e-4, 2e-5)
    own = FinetuneConfig.from_dict({**given, "policy": {"alpha": 3.0}}).build_policy()
    assert (own.alpha, own.max_high, own.warmup) == (3.0, 0.25, "monitor")
    other = FinetuneConfig.from_dict({**given, "policy": {"preset": "steady"}}).build_policy()
    assert (other.alpha, other.history) == (3.0, "winsorized")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lora_r": 0}, "lora_r must be a whole number of at least 1"),
        ({"lora_alpha": -1}, "lora_alpha must be a positive number"),
        ({"lora_dropout": 1}, r"lora_dropout must lie in \[0, 1\)"),
        ({"lora_targets": []}, "lora_targets must be a list of names"),
        ({"holdout": 0.9}, "holdout must lie in"),
        ({"parallel": "ddp"}, "one process"),
        ({"selection": "oracle"}, "oracle"),
        ({"num_experts": 2}, "unknown setting 'num_experts'"),
        ({"seq": 100_000}, "at most the model's 512 tokens"),
        ({"lora_targets": ["nope"]}, "lora_targets must name linears of the model"),
        ({"model": "nowhere"}, "nothing is downloaded"),
    ],
)
def test_bad_settings_are_refused_before_a_folder_is_made(
    small: dict[str, Any], tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    with pytest.raises(TrimtabError, match=message):
        finetune({**small, **change}, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_checkpointing_changes_no_bit(small: dict[str, Any], tmp_path: Path) -> None:
    finetune(small, tmp_path / "plain")
    finetune({**small, "checkpointing": True}, tmp_path / "again")
    one, two = final(tmp_path / "plain")["model"], final(tmp_path / "again")["model"]
    assert all(torch.equal(value, two[name]) for name, value in one.items())


def test_static_scales_are_those_of_the_first_batches(small: dict[str, Any]) -> None:
    run = make_run({**small, "mode": "off", "recipe": "int8_static", "recipe_options": {"calibrate": 2}})
    linear_ = next(iter(switch_linears(run.model)))
    seen: list[float] = []
    linear_.register_forward_pre_hook(lambda module, args: seen.append(args[0].abs().max().item()))
    for step in range(1, 6):
        run.model(run.task.batch_at(step)[0])
    assert linear_.memory.histories["input"].tolist() == pytest.approx(seen[:2])
    x = torch.full((1, 32), 10 * max(seen))  # far beyond what was calibrated: it is clipped
    with running(run.model, "low"):
        clipped = linear_(x)
    amax = linear_.weight.abs().max()
    weight = (linear_.weight * 127 / amax).round() * amax / 127
    torch.testing.assert_close(clipped, linear(torch.full((1, 32), max(seen[:2])), weight), rtol=1e-5, atol=1e-6)


def test_answer_scores_add_up_to_the_loss(small: dict[str, Any]) -> None:
    run = make_run({**small, "mode": "off"})
    task = run.task
    assert isinstance(task, Finetuning)
    examples = task.examples.train[:7]
    scores = answer_scores(run.model, examples, batch=3, pad=0)
    for example, (score, count) in zip(examples, scores, strict=True):
        inputs, targets = chat.collate([example], 0)
        assert count == int(example.is_answer[1:].sum())
        assert -score / count == pytest.approx(task.loss(run.model, inputs, targets).item(), rel=1e-5)


# The real model.


def test_smollm2_learns_is_controlled_and_round_trips(smollm2: Path, sums: Path, tmp_path: Path) -> None:
    """A few LoRA steps lower the loss; the layer whose INT8 path is hurt is the one that runs high; peft reads it.

    The first layer is hurt: a gradient that is too large travels on to all layers below it, and there are none.
    """
    hurt = 0
    policy = {"max_high": 1, "alpha": 4.0, "alpha_warmup": None, "beta": None, "warmup_steps": 0, "lock_steps": 0}
    faults = f"model.layers.{hurt}:grad_scale:start=4,width=1,size=64"
    settings = {"model": str(smollm2), "data": str(sums), "device": "cpu", "policy": policy, "faults": faults}
    given = {"steps": 6, "batch": 2, "seq": 64, "lr": 1e-3, "lr_warmup": 1, "eval_batches": 1, "threads": 1}
    result = finetune({**settings, **given, "checkpoint_every": 0}, tmp_path / "run")
    trace = read_trace(tmp_path / "run" / "trace.arrow")
    assert len(trace.units) == 30
    assert [trace.units[n] for n in np.flatnonzero(trace.high[4])] == [f"model.layers.{hurt}"]
    assert not trace.high[:4].any()
    losses = [row["loss"] for row in metrics(tmp_path / "run", "loss")]
    assert result.eval_loss_high < losses[0] - 0.3
    base = load(smollm2, dtype="fp32")
    ids = base.tokenizer("Two plus two?", return_tensors="pt")["input_ids"]
    with torch.no_grad():
        before = base.model(ids).logits
        learned = peft.PeftModel.from_pretrained(base.model, tmp_path / "run" / ADAPTER)
        after = learned(ids).logits
    run = make_run({**settings, **given})
    run.task.load_weights(final(tmp_path / "run")["model"])
    run.model.eval()
    with running(run.model, "high"), torch.no_grad():
        assert torch.equal(run.model(ids).logits, after)
    assert not torch.allclose(before, after)
