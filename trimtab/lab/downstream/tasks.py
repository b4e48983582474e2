# SPDX-License-Identifier: Apache-2.0
"""Tasks from local files: each line, row or article becomes an item, a few strings that a model is asked about.

    task             kind      file below --data            prompt and what is scored
    gsm8k            gold      gsm8k/test.jsonl             "Question: ...\\nAnswer:" and " " + the worked answer
    gsm8k_match      generate  gsm8k/test.jsonl             the same prompt; the number after "####"
    mmlu             choice    mmlu/test/*_test.csv         the question, its choices, "Answer:" and " A" to " D"
    arc_easy, arc_challenge, piqa, openbookqa
                     choice    tasks/NAME.jsonl             "Question: ...\\nAnswer:" and " " + each choice
    winogrande       choice    tasks/winogrande.jsonl       the end of a sentence after each of two beginnings
    lambada          gold      tasks/lambada_openai.jsonl   a passage and " " + its last word
    wikitext2        text      wikitext-2/test.txt          each article, every token of it

Prompts are those of lm-eval. Examples before the question (shots) are the first rows of gsm8k/train.jsonl, or of the
subject's mmlu/dev file; the other tasks have no such file. An article of WikiText-2 is joined as lm-eval does it
(`detokenize`), its words are counted before. `<unk>` stays in the text where the file has it, so perplexities are to be
compared with each other and not with those of the raw set.

GSM8K can also be asked as a dialogue: the tokenizer's chat template around the bare problem, as `trimtab finetune` has
trained it, and the answer after it.

A limit takes items evenly spaced over the whole set, because files are sorted (MMLU by subject).
"""

import csv
import hashlib
import io
import itertools
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from trimtab.checks import parse_json, shown
from trimtab.errors import TrimtabError

LETTERS = "ABCD"
HEADING = re.compile(r"^ = [^=].* = $")


@dataclass(frozen=True)
class Item:
    """What a model is asked once."""

    id: str
    requests: tuple[tuple[str, str], ...]
    """(context, continuation): the choices, or the one thing to score; a text has no context, a prompt to go on from
    no continuation."""
    gold: int = 0
    """Which request is the right one."""
    target: str = ""
    """The right answer to generate."""
    words: int = 0
    """Of a text, before it was joined."""


Reader = Callable[[Path, int], list[Item]]
"""(the data folder, shots) -> items."""


@dataclass(frozen=True)
class Task:
    """A set of items, and how its answers are measured; the first measure is the one to look at first."""

    name: str
    kind: str
    """`choice`, `gold`, `text` or `generate`."""
    read: Reader
    measures: tuple[str, ...]
    takes_shots: bool = False
    chat: Reader | None = None
    """Its items as turns of a dialogue: what a user says, and the answer."""


def question(row: Mapping[str, Any]) -> tuple[str, str]:
    """The prompt of a GSM8K problem, and its worked answer."""
    return f"Question: {row['question']}\nAnswer:", f" {row['answer']}"


def read_gsm8k(data: Path, shots: int = 0) -> list[Item]:
    """Problems with their worked answers; `target` is the number after "####"."""
    train = data / "gsm8k" / "train.jsonl"
    rows = _first(list(_rows(train, question=str, answer=str)), shots, train) if shots else []
    before = "".join(f"{''.join(question(row))}\n\n" for _, row in rows)
    return [
        Item(one.id, ((before + prompt, answer),), target=one.target)
        for one in read_gsm8k_turns(data, 0)
        for prompt, answer in [question(dict(zip(("question", "answer"), one.requests[0], strict=True)))]
    ]


def read_gsm8k_turns(data: Path, shots: int) -> list[Item]:
    """The problems and answers alone, for a chat template."""
    items = []
    for where, row in _rows(data / "gsm8k" / "test.jsonl", question=str, answer=str):
        if "#### " not in row["answer"]:
            raise TrimtabError(f"{where}: the answer of a GSM8K problem ends in '#### ' and a number, got none")
        target = row["answer"].split("#### ")[-1].strip()
        items.append(Item(f"{len(items)}", ((row["question"], row["answer"]),), target=target))
    return items


def _to_answer(read: Reader) -> Reader:
    """The same items, to be answered: the right answer is not shown."""
    return lambda data, shots: [replace(one, requests=((one.requests[0][0], ""),)) for one in read(data, shots)]


def read_mmlu(data: Path, shots: int = 0) -> list[Item]:
    """Every subject's questions, in the order of the files' names."""
    folder = data / "mmlu" / "test"
    files = sorted(folder.glob("*_test.csv"))
    if not files:
        raise TrimtabError(f"mmlu is read from {folder}/SUBJECT_test.csv, and there is none: see --data")
    items = []
    for file in files:
        subject = file.name.removesuffix("_test.csv")
        dev = data / "mmlu" / "dev" / f"{subject}_dev.csv"
        before = f"The following are multiple choice questions (with answers) about {subject.replace('_', ' ')}.\n\n"
        for row, gold in _first(list(_mmlu_rows(dev)), shots, dev) if shots else ():
            before += f"{_mmlu_prompt(row)} {LETTERS[gold]}\n\n"
        for number, (row, gold) in enumerate(_mmlu_rows(file)):
            prompt = before + _mmlu_prompt(row)
            items.append(Item(f"{subject}/{number}", tuple((prompt, f" {letter}") for letter in LETTERS), gold))
    return items


def read_choices(data: Path, name: str, *, asked: bool) -> list[Item]:
    """Lines of query, choices and gold; `asked` puts "Answer:" after the query."""
    items = []
    for where, row in _rows(data / "tasks" / f"{name}.jsonl", query=str, choices=list, gold=int):
        query, choices, gold = row["query"], row["choices"], row["gold"]
        if len(choices) < 2 or not all(isinstance(one, str) and one for one in choices):
            raise TrimtabError(f"{where}: choices must be two or more strings, got {shown(choices)}")
        _check_gold(where, gold, len(choices))
        prompt = f"{query.rstrip()}\nAnswer:" if asked else query.rstrip()
        items.append(Item(f"{len(items)}", tuple((prompt, f" {choice}") for choice in choices), gold))
    return items


def read_winogrande(data: Path, shots: int = 0) -> list[Item]:
    """Two beginnings and one end."""
    items = []
    for where, row in _rows(data / "tasks" / "winogrande.jsonl", context_options=list, continuation=str, gold=int):
        options, end, gold = row["context_options"], row["continuation"], row["gold"]
        if len(options) < 2 or not all(isinstance(one, str) and one for one in options):
            raise TrimtabError(f"{where}: context_options must be two or more strings, got {shown(options)}")
        _check_gold(where, gold, len(options))
        items.append(Item(f"{len(items)}", tuple((option, f" {end}") for option in options), gold))
    return items


def read_lambada(data: Path, shots: int = 0) -> list[Item]:
    """A passage and its last word."""
    rows = _rows(data / "tasks" / "lambada_openai.jsonl", context=str, continuation=str)
    return [Item(f"{n}", ((row["context"], f" {row['continuation'].strip()}"),)) for n, (_, row) in enumerate(rows)]


def read_wikitext(data: Path, shots: int = 0) -> list[Item]:
    """The articles of the test part."""
    file = data / "wikitext-2" / "test.txt"
    pages = articles(_text(file))
    if not pages:
        raise TrimtabError(f"{file} has no text: it must be the test part of WikiText-2")
    return [Item(f"{n}", (("", detokenize(page)),), words=len(re.split(r"\s+", page))) for n, page in enumerate(pages)]


def articles(text: str) -> list[str]:
    """Cut WikiText at its headings of the first level, which stand between empty lines."""
    lines = text.split("\n")
    blank = [True, *(not line.strip() for line in lines), True]
    starts = [i for i, line in enumerate(lines) if HEADING.match(line) and blank[i] and blank[i + 2]]
    cuts = [0, *(start for start in starts if start), len(lines)]
    pages = ("\n".join(lines[a:b]) for a, b in itertools.pairwise(cuts))
    return [page for page in pages if page.strip()]


def detokenize(page: str) -> str:
    """Join WikiText's words and signs again; the rules are lm-eval's, those without effect left out."""
    page = page.replace("s '", "s'")
    for sign, plain in ((" @-@ ", "-"), (" @,@ ", ","), (" @.@ ", ".")):
        page = page.replace(sign, plain)
    for sign in ":;.!?,":
        page = page.replace(f" {sign} ", f"{sign} ")
    for first, last in ("()", "[]", "{}", '""', "''"):
        page = _hugged(page, first, last)
    for sign, plain in (("= = = =", "===="), ("= = =", "==="), ("= =", "=="), (" \N{DEGREE SIGN} ", "\N{DEGREE SIGN}")):
        page = page.replace(sign, plain)
    for sign, plain in ((" \n", "\n"), ("\n ", "\n"), (" N ", " 1 "), (" 's", "'s")):
        page = page.replace(sign, plain)
    return page


def _hugged(page: str, first: str, last: str) -> str:
    """What stands between two signs without the space inside of them; one pass, however often a sign is not closed."""
    parts, at = [], 0
    while (start := page.find(first, at)) >= 0 and (stop := page.find(last, start + 1)) >= 0:
        parts += [page[at : start + 1], page[start + 1 : stop].strip(), last]
        at = stop + 1
    return "".join(parts) + page[at:]


def _asked(name: str) -> Reader:
    return lambda data, shots: read_choices(data, name, asked=True)


CHOICE = ("acc_norm", "acc", "gold_ll", "gold_ll_token")
TASKS = {
    task.name: task
    for task in (
        Task("gsm8k", "gold", read_gsm8k, ("gold_ll_token", "gold_ll"), takes_shots=True, chat=read_gsm8k_turns),
        Task(
            "gsm8k_match",
            "generate",
            _to_answer(read_gsm8k),
            ("strict", "flexible"),
            takes_shots=True,
            chat=_to_answer(read_gsm8k_turns),
        ),
        Task("mmlu", "choice", read_mmlu, ("acc", "gold_ll"), takes_shots=True),
        Task("arc_easy", "choice", _asked("arc_easy"), CHOICE),
        Task("arc_challenge", "choice", _asked("arc_challenge"), CHOICE),
        Task("piqa", "choice", _asked("piqa"), CHOICE),
        Task("openbookqa", "choice", lambda data, _: read_choices(data, "openbook_qa", asked=False), CHOICE),
        Task("winogrande", "choice", read_winogrande, ("acc", "gold_ll", "gold_ll_token")),
        Task("lambada", "gold", read_lambada, ("perplexity", "greedy", "gold_ll_token")),
        Task("wikitext2", "text", read_wikitext, ("word_perplexity", "token_perplexity")),
    )
}
COMMONSENSE = {
    "piqa": "acc_norm",
    "arc_easy": "acc_norm",
    "arc_challenge": "acc_norm",
    "openbookqa": "acc_norm",
    "winogrande": "acc",
}
"""Task -> the measure that is averaged. HellaSwag usually stands among them; it is not here."""
GROUPS = {"commonsense": tuple(COMMONSENSE), "all": tuple(TASKS)}


def parse_tasks(text: str) -> list[str]:
    """Read names of tasks or groups, separated by commas."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in TASKS and name not in GROUPS:
            raise TrimtabError(f"there is no task {name!r}: choose from {', '.join((*TASKS, *GROUPS))}")
    if not names:
        raise TrimtabError(f"an evaluation needs a task: choose from {', '.join((*TASKS, *GROUPS))}")
    return list(dict.fromkeys(task for name in names for task in GROUPS.get(name, (name,))))


def spaced(items: Sequence[Item], limit: int | None) -> list[Item]:
    """At most `limit` items, evenly spaced."""
    if limit is None or limit >= len(items):
        return list(items)
    return [items[i * len(items) // limit] for i in range(limit)]


def digest(items: Sequence[Item]) -> str:
    """What identifies a set of items: the sha256 of all that a model is asked, and of the right answers."""
    asked = [[one.id, one.requests, one.gold, one.target, one.words] for one in items]
    return hashlib.sha256(json.dumps(asked).encode()).hexdigest()


def _mmlu_prompt(row: Sequence[str]) -> str:
    choices = "".join(f"{letter}. {choice}\n" for letter, choice in zip(LETTERS, row[1:5], strict=True))
    return f"{row[0].strip()}\n{choices}Answer:"


def _mmlu_rows(file: Path) -> Iterator[tuple[list[str], int]]:
    """Rows of question, four choices and the answer (0 to 3, or A to D), below a header or without one."""
    for number, row in enumerate(_cells(file), 1):
        if number == 1 and row[:1] == ["question"]:
            continue
        if len(row) != 6:
            raise TrimtabError(
                f"{file}, row {number}: a row is a question, 4 choices and the answer, got {len(row)} cells"
            )
        answer = row[5].strip()
        if answer not in (*"0123", *LETTERS):
            raise TrimtabError(f"{file}, row {number}: an answer is 0 to 3, or A to D, got {shown(answer)}")
        yield row, LETTERS.index(answer) if answer in LETTERS else int(answer)


def _cells(file: Path) -> Iterator[list[str]]:
    try:
        yield from csv.reader(io.StringIO(_text(file)))
    except csv.Error as error:
        raise TrimtabError(f"{file} is not a CSV file: {error}") from None


def _rows(file: Path, **types: type) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each line's object with where it stands; its keys are checked."""
    for number, line in enumerate(_text(file).split("\n"), 1):
        where = f"{file}, line {number}"
        if not line.strip():
            continue
        try:
            row = parse_json(line)
        except ValueError as error:
            raise TrimtabError(f"{where}: every line must be JSON, got {line[:60]!r} ({error})") from None
        for key, kind in types.items():
            value = row.get(key) if isinstance(row, dict) else None
            if not isinstance(value, kind) or isinstance(value, bool) or value == "":
                raise TrimtabError(
                    f"{where}: {key!r} must be a {'number' if kind is int else 'list' if kind is list else 'text'}, "
                    f"got {shown(value)}"
                )
        yield where, row


def _text(file: Path) -> str:
    if not file.is_file():
        raise TrimtabError(f"the data of a task is expected at {file}, and there is no such file: see --data")
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise TrimtabError(f"{file} is not UTF-8 text: {error}") from None


def _first(rows: list[Any], shots: int, file: Path) -> list[Any]:
    if len(rows) < shots:
        raise TrimtabError(f"{shots} shots need as many rows, {file} has {len(rows)}: ask for fewer")
    return rows[:shots]


def _check_gold(where: str, gold: int, num_choices: int) -> None:
    if not 0 <= gold < num_choices:
        raise TrimtabError(f"{where}: gold must be the number of a choice, 0 to {num_choices - 1}, got {shown(gold)}")
