# SPDX-License-Identifier: Apache-2.0
"""The command line called in this process: what it printed, and its exit code."""

import logging
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest

from trimtab.cli.main import main


class Answer(NamedTuple):
    code: int
    out: str
    err: str


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
