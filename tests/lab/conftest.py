# SPDX-License-Identifier: Apache-2.0
"""A small text and small settings: a run of ten steps takes a fraction of a second."""

import random
from pathlib import Path
from typing import Any

import pytest

WORDS = ("the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "while", "seven", "wizards", "sing")


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """About 6 kB of words."""
    path = tmp_path_factory.mktemp("data") / "words.txt"
    path.write_text(" ".join(random.Random(0).choices(WORDS, k=1200)), encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def small(text: Path) -> dict[str, Any]:
    """Settings of a ten-step run with a checkpoint in the middle, under a policy that acts on nearly every step."""
    policy = {"max_high": 3, "alpha": 1.05, "alpha_warmup": None, "beta": 1.1, "window": 2, "span": 4, "lock_steps": 2}
    return {
        "data": str(text),
        "device": "cpu",
        "lr": 0.004,
        "steps": 10,
        "batch": 2,
        "seq": 16,
        "eval_batches": 1,
        "checkpoint_every": 5,
        "policy": policy,
    }
