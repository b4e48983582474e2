# SPDX-License-Identifier: Apache-2.0
"""One model over some tasks, into a results file.

    format, about    what was asked of which model, and how; `weights` identifies them
    versions
    tasks            name -> n, of, sha256 (of the items), seconds, scores, and `items`: a list per column
    commonsense      the average of the five commonsense tasks, if all are there

The file is written whole after each task. A second call with the same `out` runs the tasks that are not in it yet, and
refuses a file of another model or other settings; `force` starts anew. Everything that can be wrong with the files or
with `against` is found before the model is loaded.
"""

import importlib.metadata
import json
import math
import os
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from trimtab.checks import is_number, is_whole, parse_json, shown
from trimtab.errors import TrimtabError
from trimtab.lab.downstream.arm import load_arm, prepared
from trimtab.lab.downstream.compare import check_same
from trimtab.lab.downstream.harness import lm_eval_answers
from trimtab.lab.downstream.measures import MEASURES, Score, columns, score
from trimtab.lab.downstream.own import MAX_CONTEXT, Asked, own_answers
from trimtab.lab.downstream.tasks import COMMONSENSE, TASKS, Item, Task, digest, spaced
from trimtab.lab.finetune import fingerprint

FORMAT = "trimtab downstream 1"
ENGINES = ("own", "lm-eval")
SHOWN = ("model", "adapter", "bits", "recipe", "path", "dtype")
"""What is said of an arm."""

Results = dict[str, Any]
Progress = Callable[[str, int, int], None]
"""Called with (task, done, of all)."""


class Set(NamedTuple):
    """The items of a task, all or some."""

    task: Task
    items: list[Item]
    of: int
    """How many there are in all."""
    sha256: str
    shots: int
    chat: bool

    def about(self) -> dict[str, Any]:
        """What identifies it in a results file."""
        return {"n": len(self.items), "of": self.of, "sha256": self.sha256, "shots": self.shots, "chat": self.chat}


def evaluate_model(
    source: str | Path,
    tasks: Sequence[str],
    data: str | Path,
    *,
    adapter: str | Path | None = None,
    recipe: str | None = None,
    path: str = "low",
    backend: str = "auto",
    bits: str | None = None,
    limit: int | None = None,
    shots: int = 0,
    chat: bool = False,
    batch: int = 8,
    context: int | None = None,
    engine: str = "own",
    dtype: str | None = None,
    device: str | torch.device | None = None,
    seed: int = 0,
    out: str | Path | None = None,
    force: bool = False,
    against: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
) -> Results:
    """Evaluate a model on tasks from local files; see `tasks.py` for the files below `data`.

    Args:
        source: a Hugging Face folder, a GGUF file, `smollm2`, or a run folder of `trimtab finetune`.
        adapter: a PEFT folder to put on it.
        recipe: convert the linears with this one and run them on `path`, low or high; `backend` is that of `convert_`.
        bits: round the model to few bits, W-A-KV, such as 4-16-16.
        limit: so many items of each task, evenly spaced: a quick look.
        shots: examples before the question, for the tasks that have a file of them.
        chat: ask through the tokenizer's chat template, the tasks that can be asked so.
        context: most tokens of an input; None means 2,048, or what the model can take if that is less.
        engine: `own`, or `lm-eval`, which must give the same.
        seed: of what a recipe draws.
        against: results that these are to be compared with; other items are refused before anything is run.
    """
    if engine not in ENGINES:
        raise TrimtabError(f"engine must be {' or '.join(ENGINES)}, got {engine!r}")
    if recipe is not None and bits is not None:
        raise TrimtabError("a recipe converts a model and bits round it: give one of them")
    sets = load_sets(tasks, data, limit=limit, shots=shots, chat=chat)
    if against is not None:
        ours = {"tasks": {one.task.name: one.about() for one in sets}}
        check_same(ours, against, [name for name in ours["tasks"] if name in against["tasks"]])
    before = read_results(out) if out is not None and not force and Path(out).exists() else None
    pretrained = load_arm(
        source, adapter, dtype=dtype, device=device or ("cuda" if torch.cuda.is_available() else "cpu")
    )
    model, most = pretrained.model, getattr(pretrained.model.config, "max_position_embeddings", MAX_CONTEXT)
    if context is not None and context > most:
        raise TrimtabError(f"context must be at most the model's {most} positions, got {context}")
    about: dict[str, Any] = {
        "model": pretrained.name,
        "source": pretrained.source,
        "adapter": None if adapter is None else str(adapter),
        "weights": fingerprint(model),
        "dtype": str(next(model.parameters()).dtype).removeprefix("torch."),
        "recipe": recipe,
        "path": None if recipe is None else path,
        "backend": None if recipe is None else backend,
        "bits": bits,
        "device": next(model.parameters()).device.type,
        "engine": engine,
        "batch": batch,
        "context": min(MAX_CONTEXT, most) if context is None else context,
        "seed": seed,
    }
    asked = Asked(model, pretrained.tokenizer, batch, about["context"])
    results = _start(before, about, sets, out)
    with prepared(model, recipe=recipe, path=path, backend=backend, bits=bits):
        for one in sets:
            if one.task.name not in results["tasks"]:
                torch.manual_seed(seed)  # for each task, so that none depends on which were run before it
                results["tasks"][one.task.name] = evaluate_set(asked, one, engine=engine, progress=progress)
                _write(results, out)
    return results | _commonsense(results)


def load_sets(
    names: Sequence[str], data: str | Path, *, limit: int | None = None, shots: int = 0, chat: bool = False
) -> list[Set]:
    """Read the items of some tasks."""
    if not Path(data).is_dir():
        raise TrimtabError(f"the data of the tasks is a folder, there is none at {str(data)!r}: see --data")
    for name in names:
        if name not in TASKS:
            raise TrimtabError(f"there is no task {name!r}: choose from {', '.join(TASKS)}")
    for what, value, able in (
        ("shots", shots, [task.name for task in TASKS.values() if task.takes_shots]),
        ("chat", chat, [task.name for task in TASKS.values() if task.chat]),
    ):
        if value and not set(able) & set(names):
            raise TrimtabError(f"--{what} is for {', '.join(able)}, and not for {', '.join(names)}: leave it out")
    if shots and chat:
        raise TrimtabError("--shots puts examples before a question and --chat asks it alone: give one of them")
    sets = []
    for name in names:
        task = TASKS[name]
        taken = shots if task.takes_shots else 0
        items = task.chat(Path(data), 0) if chat and task.chat else task.read(Path(data), taken)
        if not items:
            raise TrimtabError(f"{name} has no items below {data}: its file is empty")
        some = spaced(items, limit)
        sets.append(Set(task, some, len(items), digest(some), taken, chat and task.chat is not None))
    return sets


def evaluate_set(asked: Asked, one: Set, *, engine: str = "own", progress: Progress | None = None) -> dict[str, Any]:
    """One task's part of a results file."""
    name, began = one.task.name, time.perf_counter()
    items = _as_chat(asked.tokenizer, one.items) if one.chat else one.items
    mode = asked.model.training
    asked.model.eval()
    try:
        if engine == "own":
            moved = (
                (lambda done, total: None) if progress is None else (lambda done, total: progress(name, done, total))
            )
            answers, theirs = own_answers(asked, one.task, items, moved), None
        else:
            answers, theirs = lm_eval_answers(asked, one.task, items)
    finally:
        asked.model.train(mode)
    found = columns(one.task, items, answers)
    scores = {measure: _plain(score(measure, found)) for measure in one.task.measures}
    result = one.about() | {"seconds": round(time.perf_counter() - began, 2), "scores": scores, "items": found}
    return result if theirs is None else result | {"lm_eval": theirs}


def read_results(file: str | Path) -> Results:
    """Read a results file; anything else is refused."""
    try:
        if Path(file).exists() and not Path(file).is_file():  # a pipe would be waited for
            raise TrimtabError(f"results are a file of trimtab evaluate --out, {file} is no file")
        results = parse_json(Path(file).read_text(encoding="utf-8"))
        known = results["format"]
    except TrimtabError:
        raise
    except OSError as error:
        raise TrimtabError(
            f"results are a file of trimtab evaluate --out, {file} cannot be read: {error.strerror}"
        ) from None
    except (ValueError, KeyError, TypeError):
        raise TrimtabError(f"results are a file of trimtab evaluate --out, {file} is not one") from None
    if known != FORMAT:
        raise TrimtabError(f"results have the format {FORMAT!r}, {file} has {shown(known)}: make it again")
    about, tasks = results.get("about"), results.get("tasks")
    if not isinstance(about, dict) or not set(SHOWN) <= set(about) or not isinstance(tasks, dict):
        raise TrimtabError(f"results say what was asked of which model, {file} does not: make it again")
    for name, task in tasks.items():
        if not is_result(name, task):
            raise TrimtabError(f"{file} is damaged at the task {shown(name)}: make it again")
    return results


def is_result(name: str, task: Any) -> bool:
    """Whether a task of a results file has all that a table or a comparison reads of it."""
    if name not in TASKS or not isinstance(task, dict) or not isinstance(task.get("sha256"), str):
        return False
    n, items, scores = task.get("n"), task.get("items"), task.get("scores")
    if not is_whole(n, 1) or not is_whole(task.get("of"), 1) or not isinstance(items, dict):
        return False
    numbers = {one for measure in TASKS[name].measures for one in MEASURES[measure][:2] if one is not None}
    lists = [items.get(key) for key in numbers]
    if not all(isinstance(column, list) and len(column) == n and all(map(is_number, column)) for column in lists):
        return False
    if not isinstance(scores, dict) or not all(isinstance(one, dict) for one in scores.values()):
        return False
    if not all(set(Score._fields) <= set(one) for one in scores.values()):
        return False
    values = [one[key] for one in scores.values() for key in Score._fields]
    ends = all((one["low"] is None) == (one["high"] is None) for one in scores.values())
    return ends and all(value is None or is_number(value) for value in values)


def _as_chat(tokenizer: Any, items: Sequence[Item]) -> list[Item]:
    if not tokenizer.chat_template:
        raise TrimtabError("--chat asks through the tokenizer's chat template, and it has none: leave --chat out")

    def prompt(said: str) -> str:
        turns = [{"role": "user", "content": said}]
        return tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)

    return [replace(one, requests=tuple((prompt(said), answer) for said, answer in one.requests)) for one in items]


def _start(before: Results | None, about: dict[str, Any], sets: Sequence[Set], out: str | Path | None) -> Results:
    """New results, or those that the file has already, if they are of the same model, settings and items."""
    if before is None:
        packages = ("trimtab", "torch", "transformers", "peft", "lm_eval")
        versions = {"python": platform.python_version()} | {name: _version(name) for name in packages}
        return {"format": FORMAT, "about": about, "versions": versions, "tasks": {}}
    ours = {one.task.name: one.about() for one in sets}
    now = about | ours
    then = before["about"] | {
        name: {key: one.get(key) for key in ours[name]} for name, one in before["tasks"].items() if name in ours
    }
    for key in now:
        if key in then and now[key] != then[key]:
            raise TrimtabError(
                f"{out} holds results of other settings ({key} was {then[key]}, now {now[key]}): choose another --out, "
                "or --force replaces it"
            )
    return {key: value for key, value in before.items() if key != "commonsense"}


def _commonsense(results: Results) -> dict[str, Any]:
    """The commonsense average, where all of its tasks have a score."""
    scores = [results["tasks"].get(name, {"scores": {}})["scores"].get(key) for name, key in COMMONSENSE.items()]
    values = [one["value"] for one in scores if one is not None and one["value"] is not None]
    if len(values) < len(scores):
        return {}
    note = "HellaSwag is not among them: its data is not here"
    return {"commonsense": {"average": math.fsum(values) / len(values), "of": dict(COMMONSENSE), "note": note}}


def _write(results: Results, out: str | Path | None) -> None:
    """Write the file, with the commonsense average as it is by now."""
    if out is None:
        return
    file = Path(out)
    file.parent.mkdir(parents=True, exist_ok=True)
    draft = file.with_name(f".{file.name}.tmp")
    draft.write_text(json.dumps(results | _commonsense(results), allow_nan=False) + "\n", encoding="utf-8")
    os.replace(draft, file)


def _plain(found: Score) -> dict[str, float | None]:
    return {key: value if math.isfinite(value) else None for key, value in found._asdict().items()}


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
