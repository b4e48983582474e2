# SPDX-License-Identifier: Apache-2.0
"""What the command line knows of several ranks before torch is loaded: torchrun's environment."""

import os


def is_one_of_many() -> bool:
    """Whether torchrun has started other processes beside this one."""
    return os.environ.get("WORLD_SIZE", "1") != "1"


def is_quiet() -> bool:
    """Whether this is a rank that leaves the talking to the first one."""
    return is_one_of_many() and os.environ.get("RANK", "0") != "0"
