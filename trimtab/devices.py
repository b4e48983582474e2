# SPDX-License-Identifier: Apache-2.0
"""What the machine can do, asked once."""

import importlib.util
from functools import cache


@cache
def has_triton() -> bool:
    """Whether Triton is installed; it comes with torch's CUDA builds."""
    return importlib.util.find_spec("triton") is not None
