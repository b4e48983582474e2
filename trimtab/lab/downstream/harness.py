# SPDX-License-Identifier: Apache-2.0
"""The same items through lm-eval: its task objects, its requests, its model, its metrics; nothing is downloaded.

Each task becomes a `ConfigurableTask` whose documents are our items, so lm-eval's `evaluate` asks exactly what `own.py`
is asked. The answers come back from its logged samples; its own metrics come along and must agree with ours.
"""

import contextlib
import io
import logging
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from trimtab.errors import missing_extra
from trimtab.lab.downstream.measures import FLEXIBLE, IGNORED, STRICT, Answer
from trimtab.lab.downstream.own import MAX_TOKENS, UNTIL, Asked, encode_pair, encode_text
from trimtab.lab.downstream.tasks import Item, Task

MODULES = ("evaluator", "api.task", "models.huggingface")
MEAN = {"aggregation": "mean", "higher_is_better": True}


def lm_eval_answers(asked: Asked, task: Task, items: Sequence[Item]) -> tuple[Any, dict[str, float]]:
    """One answer per request of each item (or its text), and lm-eval's own metrics."""
    with _quiet():
        try:
            evaluator, api, models = (import_module(f"lm_eval.{name}") for name in MODULES)
        except ImportError:
            raise missing_extra("lm-eval", "eval", "--engine lm-eval") from None
        model = models.HFLM(
            pretrained=asked.model,
            tokenizer=asked.tokenizer,
            backend="causal",
            batch_size=asked.batch,
            max_length=asked.context,
        )
        made = api.ConfigurableTask(config=config(task, items))
        found = evaluator.evaluate(model, {task.name: made}, bootstrap_iters=0, log_samples=True)
    samples = {sample["doc_id"]: sample["resps"] for sample in found["samples"][task.name]}
    answers = [_answer(asked, task, item, samples[number]) for number, item in enumerate(items)]
    metrics = found["results"][task.name]
    return answers, {key: float(value) for key, value in metrics.items() if isinstance(value, int | float)}


def config(task: Task, items: Sequence[Item]) -> dict[str, Any]:
    """A task of lm-eval with our items as its documents."""
    from datasets import Dataset

    about: dict[str, Any] = {
        "task": task.name,
        "custom_dataset": lambda **_: {"test": Dataset.from_dict({"number": list(range(len(items)))})},
        "test_split": "test",
        "num_fewshot": 0,
        "doc_to_text": lambda doc: items[doc["number"]].requests[0][0],
        "metadata": None,
    }
    if task.kind == "choice":
        same = all(len({context for context, _ in item.requests}) == 1 for item in items)
        part = 1 if same else 0  # where the choices differ: after one context, or before one end
        about |= {
            "output_type": "multiple_choice",
            "doc_to_choice": lambda doc: [pair[part][part:] for pair in items[doc["number"]].requests],
            "metric_list": [{"metric": name, **MEAN} for name in ("acc", "acc_norm")],
        }
        if same:
            return about | {"doc_to_target": lambda doc: items[doc["number"]].gold}
        ends = {"doc_to_target": lambda doc: items[doc["number"]].requests[0][1][1:]}
        return about | ends | {"doc_to_text": lambda doc: items[doc["number"]].gold}
    if task.kind == "gold":
        return about | {
            "output_type": "loglikelihood",
            "doc_to_target": lambda doc: items[doc["number"]].requests[0][1],
            "metric_list": [{"metric": "perplexity", "aggregation": "perplexity"}, {"metric": "acc", **MEAN}],
        }
    if task.kind == "text":
        return about | {
            "output_type": "loglikelihood_rolling",
            "doc_to_target": lambda doc: items[doc["number"]].requests[0][1],
            "process_results": lambda doc, results: {"word_perplexity": (results[0], items[doc["number"]].words)},
            "metric_list": [{"metric": "word_perplexity"}],
        }
    numbers = {"strict": (STRICT, 0), "flexible": (FLEXIBLE, -1)}  # which match is taken
    return about | {
        "output_type": "generate_until",
        "doc_to_target": lambda doc: items[doc["number"]].target,
        "generation_kwargs": {"until": list(UNTIL), "do_sample": False, "max_gen_toks": MAX_TOKENS},
        "filter_list": [
            {
                "name": name,
                "filter": [
                    {"function": "regex", "regex_pattern": regex.pattern, "group_select": which},
                    {"function": "take_first"},
                ],
            }
            for name, (regex, which) in numbers.items()
        ],
        "metric_list": [
            {
                "metric": "exact_match",
                **MEAN,
                "ignore_case": True,
                "regexes_to_ignore": [one.pattern for one in IGNORED],
            }
        ],
    }


def _answer(asked: Asked, task: Task, item: Item, found: Any) -> Any:
    if task.kind == "generate":
        return found[0][0]
    if task.kind == "text":
        return (Answer(float(found[0][0]), len(encode_text(asked, item.requests[0][1]))),)
    pairs = zip(item.requests, found, strict=True)
    return tuple(
        Answer(float(ll), len(encode_pair(asked, *request)[1]), bool(greedy)) for request, ((ll, greedy),) in pairs
    )


@contextmanager
def _quiet() -> Iterator[None]:
    """lm-eval without its log lines, and its bars on a terminal only."""
    disabled = logging.root.manager.disable
    logging.disable(logging.WARNING)
    away = contextlib.nullcontext() if sys.stderr.isatty() else contextlib.redirect_stderr(io.StringIO())
    try:
        with warnings.catch_warnings(), away:
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)
