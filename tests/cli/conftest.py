# SPDX-License-Identifier: Apache-2.0
"""The command line called in this process: what it printed, and its exit code."""

import logging
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from trimtab.cli.main import main
from trimtab.lab.train import train

WORDS = ("the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog")


class Answer(NamedTuple):
    code: int
    out: str
    err: str


@pytest.fixture(scope="module")
def short_run(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Makes a run of a few steps, on a text that lies beside it."""

    def make(steps: int) -> Path:
        folder = tmp_path_factory.mktemp("short")
        (folder / "words.txt").write_text(" ".join(random.Random(0).choices(WORDS, k=1200)), encoding="utf-8")
        settings = {"data": str(folder / "words.txt"), "device": "cpu", "steps": steps, "batch": 2, "seq": 16}
        train({**settings, "eval_batches": 2}, folder / "run")
        return folder / "run"

    return make


@pytest.fixture
def contents() -> Any:
    """Every file below a folder, by its path there."""

    def read(folder: Path) -> dict[str, bytes]:
        return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}

    return read


@pytest.fixture
def trimtab(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Call `trimtab ARGS` in this process."""
    logger, noisy = logging.getLogger("trimtab"), logging.getLogger("trimtab.control.controller")
    handlers, level = list(logger.handlers), noisy.level

    def call(*args: object) -> Answer:
        monkeypatch.setattr(sys, "argv", ["trimtab", *map(str, args)])
        logger.handlers[:] = handlers
        capsys.readouterr()
        with pytest.raises(SystemExit) as left:
            main()
        code = left.value.code
        return Answer(code if isinstance(code, int) else 0 if code is None else 1, *capsys.readouterr())

    yield call
    logger.handlers[:] = handlers
    noisy.setLevel(level)
