# SPDX-License-Identifier: Apache-2.0
"""One thread per worker: with two OpenMP threads and any other busy process a step slows about twenty times."""

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.pop("TRIMTAB", None)

import pytest
import torch
from hypothesis import settings

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
