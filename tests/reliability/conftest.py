# SPDX-License-Identifier: Apache-2.0
"""Two modes: a few rounds of everything in the normal suite, all of them with TRIMTAB_LONG=1 (`make long`)."""

import os
from collections.abc import Callable

import pytest

LONG = os.environ.get("TRIMTAB_LONG") == "1"


@pytest.fixture(scope="session")
def rounds() -> Callable[[int, int], int]:
    """How often: `rounds(3, 20)` is 3 in the normal suite and 20 in the long mode."""
    return lambda short, long: long if LONG else short
