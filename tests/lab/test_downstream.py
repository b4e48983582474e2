# SPDX-License-Identifier: Apache-2.0
"""Downstream tasks: files into items, answers against forwards by hand and against lm-eval, figures and comparisons
against plain numpy."""

import copy
import json
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("transformers")

from trimtab.errors import MissingExtraError, TrimtabError
from trimtab.lab.downstream import compare, evaluate_model, harness, own, read_results, results
from trimtab.lab.downstream.compare import Difference, bootstrap
from trimtab.lab.downstream.measures import Answer, columns, flexible_number, normal, score, strict_number
from trimtab.lab.downstream.own import Asked, likelihoods, own_answers, windows
from trimtab.lab.downstream.results import evaluate_set, load_sets
from trimtab.lab.downstream.tasks import COMMONSENSE, TASKS, Item, articles, detokenize, digest, parse_tasks, spaced
from trimtab.lab.pretrained import load

CHOICES = ["arc_easy", "arc_challenge", "piqa", "openbookqa", "winogrande", "mmlu"]


def silent(*_: Any) -> None:
    """No progress is shown."""


@pytest.fixture(name="data", scope="module")
def _data(downstream_data: Path) -> Path:
    return downstream_data


@pytest.fixture(scope="module")
def wiki(data: Path) -> str:
    return (data / "wikitext-2" / "test.txt").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def asked(tiny_llama: Path) -> Asked:
    """A tiny model whose logits are far from flat."""
    found = load(tiny_llama)
    with torch.no_grad():
        found.model.lm_head.weight *= 30
    return Asked(found.model, found.tokenizer, batch=3, context=256)


def by_hand(asked: Asked, context: str, continuation: str) -> tuple[float, bool]:
    """One forward without a batch; a token of this tokenizer is a byte, so the two can be cut apart."""
    first, then = (asked.tokenizer(text)["input_ids"] for text in (context, continuation))
    with torch.no_grad():
        logits = asked.model(torch.tensor([first + then])).logits[0].double().log_softmax(-1)
    rows = logits[len(first) - 1 : -1]
    return rows[range(len(then)), then].sum().item(), rows.argmax(-1).tolist() == then


def close(a: Any, b: Any) -> bool:
    return bool(np.allclose(a, b, rtol=1e-5, atol=1e-4))


# The files


def test_every_file_becomes_items_with_the_prompts_of_lm_eval(data: Path) -> None:
    read = {name: task.read(data, 0) for name, task in TASKS.items()}
    assert {name: len(items) for name, items in read.items()} == {
        "wikitext2": 2,
        **dict.fromkeys(("gsm8k", "gsm8k_match", "lambada"), 3),
        **dict.fromkeys(CHOICES, 4),
    }
    first = {name: items[0] for name, items in read.items()}
    prompt = "Question: What is 2 + 3?\nAnswer:"
    assert first["gsm8k"] == Item("0", ((prompt, " 2 + 3 = <<2+3=5>>5.\n#### 5"),), target="5")
    assert first["gsm8k_match"] == Item("0", ((prompt, ""),), target="5")
    assert first["piqa"].requests == (
        ("Question: Dry it\nAnswer:", " in the sun"),
        ("Question: Dry it\nAnswer:", " no"),
    )
    assert first["openbookqa"].requests[1] == ("Predators eat", " no")
    assert first["winogrande"] == Item("0", (("Sam hit Tom so Sam", " ran."), ("Sam hit Tom so Tom", " ran.")), 1)
    assert first["lambada"].requests == (("I do not care about", " signs"),)
    assert [item.id for item in read["mmlu"]] == ["law/0", "law/1", "us_history/0", "us_history/1"]
    assert [item.gold for item in read["mmlu"]] == [1, 3, 0, 2]
    about = "The following are multiple choice questions (with answers) about us history.\n\n"
    history = read["mmlu"][2].requests
    assert history[0][0] == f"{about}Who, said\nit?\nA. a\nB. b\nC. c\nD. d\nAnswer:"
    assert [end for _, end in history] == [" A", " B", " C", " D"]


def test_shots_come_from_the_files_of_examples(data: Path) -> None:
    one = TASKS["gsm8k"].read(data, 1)[0].requests[0][0]
    assert one == "Question: What is 1 + 1?\nAnswer: 1 + 1 = 2\n#### 2\n\nQuestion: What is 2 + 3?\nAnswer:"
    law = TASKS["mmlu"].read(data, 1)[0].requests[0][0]
    assert law.count("Answer: C\n\n") == 1
    assert law.index("Answer: C") < law.index("Is it?")
    with pytest.raises(TrimtabError, match=r"5 shots need as many rows, .*train\.jsonl has 2"):
        TASKS["gsm8k"].read(data, 5)
    with pytest.raises(TrimtabError, match="--shots is for gsm8k, gsm8k_match, mmlu, and not for piqa"):
        load_sets(["piqa"], data, shots=2)
    assert [one.shots for one in load_sets(["piqa", "gsm8k"], data, shots=2)] == [0, 2]


@pytest.mark.parametrize(
    ("task", "file", "text", "words"),
    [
        ("gsm8k", "gsm8k/test.jsonl", '{"question": "q", "answer": "5"}\n', r"line 1: .*ends in '#### '"),
        ("gsm8k", "gsm8k/test.jsonl", '{"question": "q"}\n', r"line 1: 'answer' must be a text, got None"),
        ("piqa", "tasks/piqa.jsonl", '{"query": "q", "choices": ["a", "b"], "gold": 2}\n', r"0 to 1, got 2"),
        (
            "piqa",
            "tasks/piqa.jsonl",
            '{"query": "q", "choices": ["a", "b"], "gold": true}\n',
            r"'gold' must be a number",
        ),
        ("piqa", "tasks/piqa.jsonl", '{"query": "q", "choices": ["a"], "gold": 0}\n', r"two or more strings"),
        ("piqa", "tasks/piqa.jsonl", "\n\n[1]\n", r"line 3: 'query' must be a text"),
        ("piqa", "tasks/piqa.jsonl", "", r"piqa has no items"),
        ("lambada", "tasks/lambada_openai.jsonl", "{no\n", r"line 1: every line must be JSON, got '\{no'"),
        ("lambada", "tasks/lambada_openai.jsonl", "\xff", r"is not UTF-8"),
        ("winogrande", "tasks/winogrande.jsonl", '{"context_options": "ab", "continuation": "c", "gold": 0}', "a list"),
        ("mmlu", "mmlu/test/law_test.csv", "q,a,b,c,1\n", r"row 1: .*got 5 cells"),
        ("mmlu", "mmlu/test/law_test.csv", "q,a,b,c,d,E\n", r"row 1: an answer is 0 to 3, or A to D, got 'E'"),
        ("wikitext2", "wikitext-2/test.txt", " \n", r"has no text"),
    ],
)
def test_a_wrong_row_is_refused_by_its_place(task: str, file: str, text: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / file
    path.parent.mkdir(parents=True)
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(TrimtabError, match=words) as error:
        load_sets([task], tmp_path)
    assert path.name in str(error.value) or "no items" in str(error.value)


@pytest.mark.parametrize("task", TASKS)
def test_a_missing_file_is_named(task: str, tmp_path: Path) -> None:
    with pytest.raises(TrimtabError, match=rf"{tmp_path}.*(test|{task[:8]}).*see --data"):
        load_sets([task], tmp_path)


def test_tasks_are_named_or_refused(tmp_path: Path) -> None:
    assert parse_tasks("gsm8k, piqa,gsm8k") == ["gsm8k", "piqa"]
    assert parse_tasks("mmlu,commonsense") == ["mmlu", *COMMONSENSE]
    assert parse_tasks("all") == list(TASKS)
    for wrong in ("hellaswag", "piqa,,arc"):
        with pytest.raises(TrimtabError, match=r"there is no task .*choose from gsm8k, .*commonsense"):
            parse_tasks(wrong)
    with pytest.raises(TrimtabError, match="needs a task"):
        parse_tasks(" ,")
    with pytest.raises(TrimtabError, match="is a folder, there is none"):
        load_sets(["piqa"], tmp_path / "absent")


def test_a_limit_is_spread_over_the_whole_set() -> None:
    items = [Item(str(n), ()) for n in range(100)]
    assert [item.id for item in spaced(items, 4)] == ["0", "25", "50", "75"]
    assert spaced(items, 100) == spaced(items, None) == spaced(items, 1000) == items
    assert digest(items) != digest(items[1:])
    assert digest([Item("0", (("a", "b"),), gold=0)]) != digest([Item("0", (("a", "b"),), gold=1)])


def test_articles_begin_at_headings_between_empty_lines(wiki: str) -> None:
    found = articles(wiki)
    assert len(found) == 2
    assert "".join(found).replace("\n", "") == wiki.replace("\n", "")
    assert found[1].startswith(" = Second ( film ) = ")


def test_text_is_joined_and_counted_as_lm_eval_does_it(wiki: str, data: Path) -> None:
    theirs = pytest.importorskip("lm_eval.tasks.wikitext.preprocess_wikitext")
    odd = (
        " It 's 20 \N{DEGREE SIGN} C [ see ] { x } = = = Deep = = = ' so ' N ! yes ? no : a @.@ b\n the dogs ' bark \n"
    )
    for page in (*articles(wiki), odd):
        assert detokenize(page) == theirs.wikitext_detokenizer({"page": page})
    counted = [theirs.process_results({"page": page}, (-1.0,))["word_perplexity"][1] for page in articles(wiki)]
    assert [item.words for item in TASKS["wikitext2"].read(data, 0)] == counted


# The answers


def test_log_likelihoods_are_those_of_single_forwards(asked: Asked) -> None:
    pairs = [("What is it?", " a thing"), ("x", " y"), ("A longer context, by far", " end"), ("x", " yy")]
    moved: list[tuple[int, int]] = []
    found = likelihoods(asked, pairs, lambda *at: moved.append(at))
    for answer, pair in zip(found, pairs, strict=True):
        ll, greedy = by_hand(asked, *pair)
        assert close(answer.ll, ll)
        assert (answer.tokens, answer.greedy) == (len(pair[1]), greedy)
    assert moved == [(3, 4), (4, 4)]


def test_what_the_model_prefers_is_greedy(asked: Asked) -> None:
    tokens = asked.tokenizer("Question: a")["input_ids"]
    with torch.no_grad():
        best = int(asked.model(torch.tensor([tokens])).logits[0, -1].argmax())
    requests = [(tokens, [best]), (tokens, [best - 1])]
    assert [greedy for _, greedy in own.score(asked, requests, silent)] == [True, False]


def test_spaces_at_the_end_of_a_context_are_predicted(asked: Asked) -> None:
    (found,) = likelihoods(asked, [("ab  ", "c")], silent)
    assert found.tokens == 3
    assert close(found.ll, by_hand(asked, "ab", "  c")[0])


def test_a_long_context_loses_its_beginning(asked: Asked) -> None:
    short = Asked(asked.model, asked.tokenizer, batch=2, context=8)
    (found,) = likelihoods(short, [("0123456789abc", " de")], silent)
    assert close(found.ll, by_hand(asked, "89abc"[-6:], " de")[0]) is False  # 8 inputs: six of the context, two more
    assert close(found.ll, by_hand(asked, "789abc", " de")[0])
    with pytest.raises(TrimtabError, match="1 to 8 tokens after a context, got 11"):
        likelihoods(short, [("x", " 0123456789")], silent)
    with pytest.raises(TrimtabError, match="after a context, got 2"):
        likelihoods(short, [("", " x")], silent)


def test_equal_inputs_run_once(asked: Asked, data: Path) -> None:
    rows: list[int] = []
    handle = asked.model.register_forward_pre_hook(
        lambda _, args, kwargs: rows.append(len(kwargs["input_ids"])), with_kwargs=True
    )
    items = TASKS["mmlu"].read(data, 0)
    try:
        found = own_answers(asked, TASKS["mmlu"], items, silent)
    finally:
        handle.remove()
    assert sum(rows) == len(items)  # A to D differ in their last token alone
    for item, answers in zip(items, found, strict=True):
        assert close([answer.ll for answer in answers], [by_hand(asked, *pair)[0] for pair in item.requests])


@pytest.mark.parametrize("name", CHOICES)
def test_accuracy_is_the_argmax_by_hand(name: str, asked: Asked, data: Path) -> None:
    (one,) = load_sets([name], data)
    found = evaluate_set(asked, one)
    lls = [[by_hand(asked, *pair)[0] for pair in item.requests] for item in one.items]
    sizes = [[len(pair[1]) - 1 for pair in item.requests] for item in one.items]
    gold = [item.gold for item in one.items]
    assert found["items"]["acc"] == [int(ll.index(max(ll)) == g) for ll, g in zip(lls, gold, strict=True)]
    per = [[x / n for x, n in zip(ll, size, strict=True)] for ll, size in zip(lls, sizes, strict=True)]
    assert found["items"]["acc_norm"] == [int(ll.index(max(ll)) == g) for ll, g in zip(per, gold, strict=True)]
    assert close(found["items"]["gold_ll"], [ll[g] for ll, g in zip(lls, gold, strict=True)])
    assert found["scores"]["acc"]["value"] == np.mean(found["items"]["acc"])
    tokens = sum(len(item.requests[item.gold][1].encode()) for item in one.items)
    if "gold_ll_token" in found["scores"]:
        assert close(found["scores"]["gold_ll_token"]["value"], sum(found["items"]["gold_ll"]) / tokens)


def test_every_token_of_a_text_is_predicted_once() -> None:
    assert list(windows(list(range(10)), -1, 4)) == [
        ([-1, 0, 1, 2], [0, 1, 2, 3]),
        ([3, 4, 5, 6], [4, 5, 6, 7]),
        ([5, 6, 7, 8], [8, 9]),
    ]
    assert list(windows([7], -1, 4)) == [([-1], [7])]
    assert list(windows([], -1, 4)) == []


def test_windows_are_those_of_lm_eval() -> None:
    theirs = pytest.importorskip("lm_eval.utils").get_rolling_token_windows
    for length in range(14):
        for context in (1, 2, 3, 5, 13):
            tokens = list(range(length))
            assert list(windows(tokens, -1, context)) == list(
                theirs(token_list=tokens, prefix_token=-1, max_seq_len=context, context_len=1)
            )


def test_perplexity_is_the_exponential_of_the_mean_loss_by_hand(asked: Asked, data: Path) -> None:
    (one,) = load_sets(["wikitext2"], data)
    found = evaluate_set(asked, one)["scores"]
    total = tokens = words = 0
    for item in one.items:
        ids = asked.tokenizer(item.requests[0][1])["input_ids"]
        assert len(ids) < asked.context
        with torch.no_grad():
            logits = asked.model(torch.tensor([[asked.tokenizer.eos_token_id, *ids[:-1]]])).logits[0]
        total += torch.nn.functional.cross_entropy(logits.double(), torch.tensor(ids), reduction="sum").item()
        tokens, words = tokens + len(ids), words + item.words
    assert math.isclose(found["token_perplexity"]["value"], math.exp(total / tokens), rel_tol=1e-5)
    assert math.isclose(found["word_perplexity"]["value"], math.exp(total / words), rel_tol=1e-4)


def test_generation_is_greedy_and_padding_does_not_show(asked: Asked, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own, "MAX_TOKENS", 6)
    prompts = ["Question: a", "Question: a much longer one", "x"]
    expected = []
    for prompt in prompts:
        ids = asked.tokenizer(prompt)["input_ids"]
        start = len(ids)
        with torch.no_grad():
            while len(ids) < start + 6 and ids[-1] != asked.tokenizer.eos_token_id:
                ids.append(asked.model(torch.tensor([ids])).logits[0, -1].argmax().item())
        expected.append(asked.tokenizer.decode(ids[start:], skip_special_tokens=True))
    assert own.generate(asked, prompts, silent) == expected
    stop = next(text for text in expected if len(text) > 2)[2]
    monkeypatch.setattr(own, "UNTIL", (stop,))
    assert own.generate(asked, prompts, silent) == [text.split(stop)[0] for text in expected]
    with pytest.raises(TrimtabError, match="context must be larger, got 6"):
        own.generate(Asked(asked.model, asked.tokenizer, context=6), prompts, silent)


@pytest.mark.parametrize("name", TASKS)
def test_both_engines_agree(name: str, asked: Asked, data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("lm_eval")
    for module in (own, harness):
        monkeypatch.setattr(module, "MAX_TOKENS", 8)
    asked = Asked(asked.model, asked.tokenizer, batch=3, context=64 if name == "wikitext2" else 256)
    (one,) = load_sets([name], data)
    ours, theirs = (evaluate_set(asked, one, engine=engine) for engine in ("own", "lm-eval"))
    assert ours["items"].keys() == theirs["items"].keys()
    for key, values in ours["items"].items():
        if isinstance(values[0], str):
            assert values == theirs["items"][key]
        else:
            assert close(values, theirs["items"][key]), key
    metrics = {key.split(",")[0] if name != "gsm8k_match" else key: value for key, value in theirs["lm_eval"].items()}
    same = {"word_perplexity": "word_perplexity", "strict": "exact_match,strict", "flexible": "exact_match,flexible"}
    same |= {"acc": "acc", "acc_norm": "acc_norm", "greedy": "acc"} | (
        {"perplexity": "perplexity"} if name == "lambada" else {}
    )
    for measure in set(ours["scores"]) & set(same):
        assert math.isclose(ours["scores"][measure]["value"], metrics[same[measure]], rel_tol=1e-4, abs_tol=1e-9)


def test_without_lm_eval_its_engine_says_how_to_get_it(
    asked: Asked, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "lm_eval"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'trimtab\[eval\]'"):
        evaluate_set(asked, load_sets(["piqa"], data)[0], engine="lm-eval")


def test_a_model_that_is_not_finite_is_refused(asked: Asked, data: Path) -> None:
    broken = copy.deepcopy(asked.model)
    with torch.no_grad():
        broken.lm_head.weight[5] = math.nan
    with pytest.raises(TrimtabError, match=r"must be finite, item 0 of piqa has \[nan"):
        evaluate_set(Asked(broken, asked.tokenizer), load_sets(["piqa"], data)[0])


def test_the_mode_of_the_model_is_restored(asked: Asked, data: Path) -> None:
    asked.model.train()
    evaluate_set(asked, load_sets(["winogrande"], data)[0])
    assert asked.model.training
    asked.model.eval()


# The figures


@pytest.mark.parametrize(
    ("text", "strict", "flexible"),
    [
        (" 2 + 3 = 5.\n#### 5", "5", "5"),
        ("so $1,234.50 in all.\n#### $1,234.50", None, "1234.50"),
        ("#### 7\n\nand 8 more", "7", "8"),
        ("#### -3.", "-3", "-3"),
        ("the answer is 42.", None, "42"),
        ("no number at all", None, None),
        ("", None, None),
        ("####5", None, "5"),
    ],
)
def test_numbers_are_found_in_answers(text: str, strict: str | None, flexible: str | None) -> None:
    assert (normal(strict_number(text)), normal(flexible_number(text))) == (strict, flexible)


def test_an_answer_is_right_whatever_its_commas() -> None:
    items = [Item("0", (("q", ""),), target="1,000"), Item("1", (("q", ""),), target="2")]
    found = columns(TASKS["gsm8k_match"], items, ["so\n#### 1000", "I think 2 or 3"])
    assert (found["strict"], found["flexible"]) == ([1, 0], [1, 0])


def test_intervals_of_a_score_are_those_of_a_ratio() -> None:
    rng = np.random.default_rng(0)
    values = rng.normal(size=200)
    plain = score("gold_ll", {"gold_ll": values})
    half = 1.959964 * values.std(ddof=1) / math.sqrt(200)
    assert np.allclose(plain, (values.mean(), values.mean() - half, values.mean() + half))
    tokens = rng.integers(1, 9, size=200)
    ratio = score("gold_ll_token", {"gold_ll": values - tokens, "gold_tokens": tokens})
    drawn = bootstrap(values - tokens, tokens.astype(float))
    assert np.allclose(ratio[1:], np.percentile(drawn, [2.5, 97.5]), atol=0.006)
    shown = score("token_perplexity", {"gold_ll": values - tokens, "gold_tokens": tokens})
    assert np.allclose(shown, np.exp([-ratio.value, -ratio.high, -ratio.low]))
    assert score("token_perplexity", {"gold_ll": [-1e6], "gold_tokens": [1]}).value == math.inf


# The comparison


def arm(*, gold: Any, tokens: Any = None, of: int | None = None, name: str = "gsm8k", **more: Any) -> dict[str, Any]:
    """The results of one task."""
    n = len(gold)
    items = {"id": [str(i) for i in range(n)], "gold_ll": list(gold)}
    items |= {"gold_tokens": [10] * n if tokens is None else list(tokens), "greedy": [0] * n, **more}
    return {"tasks": {name: {"n": n, "of": of or n, "sha256": f"{n}", "items": items}}}


def test_the_bootstrap_is_that_of_plain_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(3)
    values, weights = rng.normal(size=37), rng.uniform(1, 5, size=37)
    drawn = np.random.default_rng([11, 0]).integers(0, 37, size=(500, 37))
    expected = [sum(values[i] for i in row) / sum(weights[i] for i in row) for row in drawn]
    assert np.allclose(bootstrap(values, weights, resamples=500, seed=11), expected)
    monkeypatch.setitem(bootstrap.__globals__, "CHUNK", 100)
    assert np.allclose(bootstrap(values, weights, resamples=500, seed=11), expected)
    assert not np.allclose(bootstrap(values, weights, resamples=500, seed=11, part=1), expected)


def test_intervals_cover_the_truth_as_often_as_they_say() -> None:
    rng, hits, trials = np.random.default_rng(0), 0, 400
    for trial in range(trials):
        values = 0.3 + rng.standard_t(6, size=80)
        low, high = np.percentile(bootstrap(values, np.ones(80), resamples=600, seed=trial), [2.5, 97.5])
        hits += low <= 0.3 <= high
    assert 0.91 <= hits / trials <= 0.98


def test_a_planted_difference_is_found_and_its_size_is_right() -> None:
    rng = np.random.default_rng(1)
    hard, tokens = rng.normal(-90, 30, size=400), rng.integers(20, 200, size=400)
    better = hard + rng.normal(0.8, 3, size=400)  # far below what items differ by
    per_token, per_item = compare(arm(gold=better, tokens=tokens), arm(gold=hard, tokens=tokens))
    assert (per_item.task, per_item.measure, per_item.verdict, per_token.verdict) == (
        "gsm8k",
        "gold_ll",
        "better",
        "better",
    )
    assert math.isclose(per_item.mean, (better - hard).mean(), rel_tol=1e-9)
    assert math.isclose(per_token.mean, (better - hard).sum() / tokens.sum(), rel_tol=1e-9)
    assert per_item.low < 0.8 < per_item.high
    assert math.isclose(per_item.detectable, 2.8 * 3 / 20, rel_tol=0.2)
    turned = compare(arm(gold=hard, tokens=tokens), arm(gold=better, tokens=tokens))[1]
    assert turned.verdict == "worse"
    assert np.allclose((turned.low, turned.high), (-per_item.high, -per_item.low), atol=0.02)


def test_identical_arms_and_noise_give_no_conclusion() -> None:
    rng = np.random.default_rng(2)
    gold = rng.normal(size=100)
    same = compare(arm(gold=gold), arm(gold=gold))[0]
    assert same.verdict == "no conclusion: the same on every item"
    noise = rng.normal(size=100)
    other = compare(arm(gold=gold + noise - noise.mean()), arm(gold=gold))[1]
    assert other.low < 0 < other.high
    assert other.verdict.startswith("no conclusion: the interval holds 0 (80 % power for 0.")


def test_a_quick_look_and_a_handful_give_no_conclusion() -> None:
    look = compare(arm(gold=np.ones(50), of=60), arm(gold=np.zeros(50), of=60))[0]
    assert look.verdict == "no conclusion: a quick look at 50 of 60 items"
    few = compare(arm(gold=np.ones(20)), arm(gold=np.zeros(20)))[0]
    assert few.verdict == "no conclusion: fewer than 30 items"
    tokens = compare(arm(gold=np.ones(40), tokens=[9] * 40), arm(gold=np.zeros(40)))
    assert [one.verdict for one in tokens] == ["no conclusion: the models cut the text into different tokens", "better"]
    assert json.loads(json.dumps(tokens[0].to_dict(), allow_nan=False))["mean"] is None


def test_other_items_are_refused() -> None:
    with pytest.raises(TrimtabError, match="gsm8k has 40 of 40 here and 41 of 41 there"):
        compare(arm(gold=np.ones(40)), arm(gold=np.ones(41)))
    with pytest.raises(TrimtabError, match="both have: there is gsm8k here and lambada there"):
        compare(arm(gold=np.ones(40)), arm(gold=np.ones(40), name="lambada"))


def test_the_commonsense_average_draws_each_task_on_its_own() -> None:
    rng = np.random.default_rng(4)
    ours, theirs, distances, shares = {}, {}, [], []
    for number, (name, measure) in enumerate(COMMONSENSE.items()):
        n = 60 + 40 * number
        a, b = rng.integers(0, 2, size=n), rng.integers(0, 2, size=n)
        both = [{"acc": rng.integers(0, 2, size=n), "acc_norm": rng.integers(0, 2, size=n), measure: x} for x in (a, b)]
        for results_, more in zip((ours, theirs), both, strict=True):
            results_ |= arm(gold=np.zeros(n), name=name, **more)["tasks"]
        distances.append(a - b)
        shares.append(a.mean())
    last = compare({"tasks": ours}, {"tasks": theirs})[-1]
    assert (last.task, last.n) == ("commonsense", sum(map(len, distances)))
    assert math.isclose(last.ours, float(np.mean(shares)))
    assert math.isclose(last.mean, float(np.mean([d.mean() for d in distances])))
    spread = math.sqrt(sum(d.var(ddof=1) / len(d) for d in distances)) / len(distances)
    assert math.isclose(last.high - last.low, 2 * 1.96 * spread, rel_tol=0.05)
    del ours["piqa"]
    assert all(one.task != "commonsense" for one in compare({"tasks": ours}, {"tasks": theirs}))


def test_a_verdict_needs_an_interval_without_zero() -> None:
    def said(low: float, high: float) -> str:
        return Difference("piqa", "acc", 0.5, 0.4, (low + high) / 2, low, high, 0.1, 50, 50).verdict

    assert said(0.01, 0.2) == "better"
    assert said(-0.2, -0.01) == "worse"
    assert said(0.0, 0.2).startswith("no conclusion: the interval holds 0")


# One model


def test_results_are_kept_and_resumed(
    tiny_llama: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, ran = tmp_path / "deep" / "out.json", []
    real = results.own_answers

    def counted(asked: Asked, task: Any, items: Any, progress: Any) -> Any:
        ran.append(task.name)
        return real(asked, task, items, progress)

    monkeypatch.setattr(results, "own_answers", counted)
    first = evaluate_model(tiny_llama, ["piqa", "winogrande"], data, out=out, device="cpu")
    assert read_results(out) == json.loads(json.dumps(first))
    again = evaluate_model(tiny_llama, ["winogrande", "lambada"], data, out=out, device="cpu")
    assert ran == ["piqa", "winogrande", "lambada"]
    assert list(again["tasks"]) == list(read_results(out)["tasks"]) == ran
    assert again["tasks"]["piqa"] == read_results(out)["tasks"]["piqa"]
    before = out.read_bytes()
    for other, words in (
        ({"limit": 2}, r"piqa was .*'n': 4.*now .*'n': 2"),
        ({"recipe": "int8"}, "recipe was None, now int8"),
        ({"batch": 2}, "batch was 8, now 2"),
    ):
        with pytest.raises(TrimtabError, match=f"holds results of other settings.*{words}.*--force"):
            evaluate_model(tiny_llama, ["piqa"], data, out=out, device="cpu", **other)
    assert out.read_bytes() == before
    assert [path.name for path in out.parent.iterdir()] == ["out.json"]
    evaluate_model(tiny_llama, ["piqa"], data, out=out, device="cpu", limit=2, force=True)
    assert list(read_results(out)["tasks"]) == ["piqa"]
    assert read_results(out)["tasks"]["piqa"]["n"] == 2


@pytest.mark.parametrize("place", ["about.dtype", "tasks.piqa.scores.acc.value", "tasks.piqa.scores.acc.high"])
def test_results_without_what_is_shown_of_them_are_refused_and_kept(
    tiny_llama: Path, data: Path, tmp_path: Path, place: str
) -> None:
    out = tmp_path / "out.json"
    told = evaluate_model(tiny_llama, ["piqa"], data, out=out, device="cpu")
    *outer, last = place.split(".")
    one = told
    for key in outer:
        one = one[key]
    del one[last]
    out.write_text(json.dumps(told))
    with pytest.raises(TrimtabError, match=f"{out}.*: make it again"):
        evaluate_model(tiny_llama, ["piqa"], data, out=out, device="cpu")
    assert json.loads(out.read_text()) == told


def test_other_weights_at_the_same_place_are_noticed(tiny_llama: Path, data: Path, tmp_path: Path) -> None:
    model, out = load(tiny_llama), tmp_path / "out.json"
    for value in (0.0, 1.0):
        with torch.no_grad():
            model.model.model.norm.weight += value
        model.model.save_pretrained(tmp_path / "model")
        model.tokenizer.save_pretrained(tmp_path / "model")
        if not value:
            evaluate_model(tmp_path / "model", ["piqa"], data, out=out, device="cpu")
    with pytest.raises(TrimtabError, match="weights was"):
        evaluate_model(tmp_path / "model", ["piqa"], data, out=out, device="cpu")


def test_what_is_no_results_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "torn.json").write_text('{"format": "trimtab down')
    (tmp_path / "other.json").write_text("[1]")
    (tmp_path / "old.json").write_text('{"format": "trimtab downstream 0"}')
    for name, words in (
        ("absent", "cannot be read"),
        ("torn", "is not one"),
        ("other", "is not one"),
        ("old", "make it"),
    ):
        with pytest.raises(TrimtabError, match=words):
            read_results(tmp_path / f"{name}.json")


def test_a_recipe_runs_on_the_path_that_is_asked_for(tiny_llama: Path, data: Path) -> None:
    def lls(**options: Any) -> Any:
        found = evaluate_model(tiny_llama, ["piqa"], data, device="cpu", **options)
        return found["tasks"]["piqa"]["items"]["choices_ll"]

    plain = lls()
    assert np.array_equal(lls(recipe="int8", path="high"), plain)
    assert not np.allclose(lls(recipe="int8"), plain, atol=1e-6)
    assert not np.allclose(lls(bits="4-16-16"), plain, atol=1e-6)
    with pytest.raises(TrimtabError, match="give one of them"):
        lls(recipe="int8", bits="4-16-16")
    with pytest.raises(TrimtabError, match="at most the model's 512 positions, got 600"):
        lls(context=600)
    with pytest.raises(TrimtabError, match="engine must be own or lm-eval, got 'vllm'"):
        lls(engine="vllm")


def test_an_adapter_is_put_on(tiny_llama: Path, data: Path, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    from trimtab.lab.finetune import save_adapter

    base = load(tiny_llama)
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM")
    model = peft.get_peft_model(base.model, config)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_B" in name:
                p += 0.5
    save_adapter(model, tmp_path / "adapter")
    found = evaluate_model(tiny_llama, ["piqa"], data, adapter=tmp_path / "adapter", device="cpu")
    merged = Asked(model.merge_and_unload(), base.tokenizer)
    expected = evaluate_set(merged, load_sets(["piqa"], data)[0])
    assert close(found["tasks"]["piqa"]["items"]["choices_ll"], expected["items"]["choices_ll"])
    plain = evaluate_model(tiny_llama, ["piqa"], data, device="cpu")
    assert not close(found["tasks"]["piqa"]["items"]["choices_ll"], plain["tasks"]["piqa"]["items"]["choices_ll"])
    assert found["about"]["weights"] != plain["about"]["weights"]

    run = tmp_path / "run"
    run.mkdir()
    settings = {"model": str(tiny_llama), "data": "sums.jsonl", "lora_r": 2, "full": False, "dtype": "fp32"}
    (run / "run.json").write_text(json.dumps({"config": settings}))
    with pytest.raises(TrimtabError, match="has no adapter yet"):
        evaluate_model(run, ["piqa"], data, device="cpu")
    (tmp_path / "adapter").rename(run / "adapter")
    tuned = evaluate_model(run, ["piqa"], data, device="cpu")
    assert tuned["tasks"]["piqa"]["items"] == found["tasks"]["piqa"]["items"]
    assert (tuned["about"]["model"], tuned["about"]["source"]) == ("run", str(run.resolve()))
    with pytest.raises(TrimtabError, match="is the run's own adapter"):
        evaluate_model(run, ["piqa"], data, adapter=run / "adapter", device="cpu")
    (run / "run.json").write_text(json.dumps({"config": {"model": "micro"}}))
    with pytest.raises(TrimtabError, match="is a run of trimtab train: leave --tasks out"):
        evaluate_model(run, ["piqa"], data, device="cpu")
    with pytest.raises(TrimtabError, match=r"an adapter is a PEFT folder with an adapter_config\.json"):
        evaluate_model(tiny_llama, ["piqa"], data, adapter=tmp_path, device="cpu")


def test_an_adapter_of_another_model_is_refused(tiny_llama: Path, data: Path, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    from trimtab.lab.finetune import save_adapter

    config = peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
    folder = save_adapter(peft.get_peft_model(load(tiny_llama).model, config), tmp_path / "adapter")
    about, weights = folder / "adapter_config.json", folder / "adapter_model.safetensors"
    written = json.loads(about.read_text())
    for targets in (["nowhere"], ["q_proj", "down_proj"]):  # of the second peft would draw half the weights
        about.write_text(json.dumps(written | {"target_modules": targets}))
        with pytest.raises(TrimtabError, match="does not fit tiny-llama"):
            evaluate_model(tiny_llama, ["piqa"], data, adapter=folder, device="cpu")
    about.write_text(json.dumps(written))
    weights.write_bytes(weights.read_bytes()[:100])
    with pytest.raises(TrimtabError, match="does not fit tiny-llama"):
        evaluate_model(tiny_llama, ["piqa"], data, adapter=folder, device="cpu")


def test_an_adapters_config_claims_no_memory_and_names_no_code(
    tiny_llama: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    peft = pytest.importorskip("peft")
    from trimtab.lab.finetune import save_adapter

    config = peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
    folder = save_adapter(peft.get_peft_model(load(tiny_llama).model, config), tmp_path / "adapter")
    about, mark = folder / "adapter_config.json", tmp_path / "ran"
    written = json.loads(about.read_text())
    about.write_text(json.dumps(written | {"r": 1 << 32}))  # half a terabyte
    with pytest.raises(TrimtabError, match=r"matrices of 4294967296 rows, and none in .* is longer than 32"):
        evaluate_model(tiny_llama, ["piqa"], data, adapter=folder, device="cpu")
    (tmp_path / "evil_megatron.py").write_text(f"open({str(mark)!r}, 'w')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    about.write_text(json.dumps(written | {"megatron_config": {"a": 1}, "megatron_core": "evil_megatron"}))
    with pytest.raises(TrimtabError, match="never imported"):
        evaluate_model(tiny_llama, ["piqa"], data, adapter=folder, device="cpu")
    assert not mark.exists()


def test_a_chat_is_asked_through_the_template(tiny_llama: Path, data: Path, asked: Asked) -> None:
    (one,) = load_sets(["gsm8k"], data, chat=True)
    assert one.items[0].requests == (("What is 2 + 3?", "2 + 3 = <<2+3=5>>5.\n#### 5"),)
    found = evaluate_set(asked, one)["items"]
    pieces = asked.tokenizer("<|start|>user\nWhat is 2 + 3?<|end|>\n<|start|>assistant")["input_ids"]
    answer = asked.tokenizer("\n2 + 3 = <<2+3=5>>5.\n#### 5")["input_ids"]
    with torch.no_grad():
        logits = asked.model(torch.tensor([pieces + answer])).logits[0].double().log_softmax(-1)
    ll = logits[len(pieces) - 1 : -1][range(len(answer)), answer].sum().item()
    assert close(found["gold_ll"][0], ll)
    assert (
        evaluate_model(tiny_llama, ["gsm8k", "piqa"], data, chat=True, device="cpu")["tasks"]["piqa"]["chat"] is False
    )
    with pytest.raises(TrimtabError, match="--chat is for gsm8k, gsm8k_match, and not for piqa"):
        load_sets(["piqa"], data, chat=True)
    with pytest.raises(TrimtabError, match="give one of them"):
        load_sets(["gsm8k"], data, chat=True, shots=1)
    bare = copy.copy(asked.tokenizer)
    bare.chat_template = None
    with pytest.raises(TrimtabError, match="chat template, and it has none"):
        evaluate_set(Asked(asked.model, bare), one)


def test_bad_data_is_found_before_the_model_is_loaded(data: Path, tmp_path: Path) -> None:
    with pytest.raises(TrimtabError, match="is expected at"):
        evaluate_model(tmp_path / "no model", ["gsm8k"], tmp_path)
    with pytest.raises(TrimtabError, match="same --data, --limit and --shots"):
        evaluate_model(tmp_path / "no model", ["gsm8k"], data, against=arm(gold=[1.0]))


def test_answers_are_plain_values() -> None:
    found = columns(TASKS["lambada"], [Item("0", (("a", " b"),))], [(Answer(-1.5, 1, True),)])
    assert found == {"id": ["0"], "gold_ll": [-1.5], "gold_tokens": [1], "greedy": [1]}
