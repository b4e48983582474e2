# SPDX-License-Identifier: Apache-2.0
"""One thread per worker: with two OpenMP threads and any other busy process a step slows about twenty times."""

import json
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.pop("TRIMTAB", None)

import pytest
import torch
from hypothesis import settings
from llama import make_llama

torch.set_num_threads(1)
settings.register_profile("trimtab", deadline=None)  # a busy machine is not a failure
settings.load_profile("trimtab")


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture
def no_waits() -> Any:
    """A context in which an operation that waits for the GPU raises."""

    @contextmanager
    def strict() -> Iterator[None]:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype")
            torch.cuda.set_sync_debug_mode("error")
            try:
                yield
            finally:
                torch.cuda.set_sync_debug_mode("default")

    return strict


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a random Llama of four layers, and a tokenizer by bytes that has a chat template."""
    pytest.importorskip("transformers")
    return make_llama(tmp_path_factory.mktemp("models") / "tiny-llama")


@pytest.fixture(scope="session")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SmolLM2 as a folder in bfloat16: read from its GGUF (20 s) once a session, by whichever worker comes first."""
    for package in ("transformers", "gguf", "filelock"):
        pytest.importorskip(package)
    from filelock import FileLock

    from trimtab.errors import MissingExtraError
    from trimtab.lab.pretrained import load, save_folder, smollm2_file

    try:
        smollm2_file()
    except MissingExtraError as error:
        pytest.skip(str(error))
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "smollm2"
    with FileLock(f"{folder}.lock"):
        if not folder.is_dir():
            save_folder(load("smollm2", dtype="bf16"), folder)
    return folder


WIKI = (
    *("", " = First = ", "", ' One , two @-@ three ( four ) . It \'s 3 @,@ 000 " words " long . '),
    *(" = not a heading = ", "", " = = Part = = ", "", " More of it ; and more . ", ""),
    *(" = Second ( film ) = ", "", " Short . ", ""),
)


@pytest.fixture(scope="session")
def downstream_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a few rows of every downstream task."""
    folder = tmp_path_factory.mktemp("downstream")
    problems = [("What is 2 + 3?", "2 + 3 = <<2+3=5>>5.\n#### 5"), ("And 9 - 1?", "It is 8\n#### 8")]
    problems.append(("A rather longer problem: what are 500 and 500?", "1,000.\n#### 1,000"))
    first = [("What is 1 + 1?", "1 + 1 = 2\n#### 2"), ("And 0?", "#### 0")]
    asked = [("Dry it\n", "in the sun", "no", 0), ("Cut", "with a knife", "by \N{LATIN SMALL LETTER E WITH ACUTE}", 1)]
    asked += [("Boil the water", "on ice", "over the fire", 1), ("Why", "because", "as it is so", 0)]
    choices = [{"query": f"Question: {q}", "choices": [a, b], "gold": g} for q, a, b, g in asked]
    facts = [{**row, "query": "Predators eat"} for row in choices]
    pairs = [("Sam", "Tom", 1), ("Tom", "Ann", 0), ("Ann", "Sam", 1), ("Bo", "Al", 0)]
    ends = [
        {"context_options": [f"{a} hit {b} so {a}", f"{a} hit {b} so {b}"], "continuation": "ran.", "gold": g}
        for a, b, g in pairs
    ]
    last = [("I do not care about", "signs"), ("He said it was a", "lie"), ("Long ago in a far away", "land")]
    header = "question,choice0,choice1,choice2,choice3,answer\n"
    files = {
        "gsm8k/test.jsonl": [{"question": q, "answer": a} for q, a in problems],
        "gsm8k/train.jsonl": [{"question": q, "answer": a} for q, a in first],
        "mmlu/test/law_test.csv": f"{header}Is it?,a,b,c,d,1\nWas it?,aa,bb,cc,dd,3\n",
        "mmlu/test/us_history_test.csv": '"Who, said\nit?",a,b,c,d,A\nWhen?,1,2,3,4,C\n',
        "mmlu/dev/law_dev.csv": f"{header}Will it?,a,b,c,d,2\n",
        "mmlu/dev/us_history_dev.csv": "Where?,a,b,c,d,D\n",
        **{f"tasks/{name}.jsonl": choices for name in ("arc_easy", "arc_challenge", "piqa")},
        "tasks/openbook_qa.jsonl": facts,
        "tasks/winogrande.jsonl": ends,
        "tasks/lambada_openai.jsonl": [{"context": c, "continuation": w} for c, w in last],
        "wikitext-2/test.txt": "\n".join(WIKI),
    }
    for name, rows in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        text = rows if isinstance(rows, str) else "".join(f"{json.dumps(row)}\n" for row in rows)
        path.write_text(text, encoding="utf-8")
    return folder
