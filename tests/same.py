# SPDX-License-Identifier: Apache-2.0
"""Whether two states are the same, bit for bit: dicts, lists, tensors and plain values."""

from typing import Any

import torch


def assert_same(one: Any, two: Any, path: str = "state") -> None:
    """Equal bit for bit, NaN included."""
    assert type(one) is type(two), path
    if isinstance(one, dict):
        assert list(one) == list(two), path
        for key in one:
            assert_same(one[key], two[key], f"{path}.{key}")
    elif isinstance(one, list | tuple):
        assert len(one) == len(two), path
        for i, (a, b) in enumerate(zip(one, two, strict=True)):
            assert_same(a, b, f"{path}[{i}]")
    elif isinstance(one, torch.Tensor):
        assert (one.dtype, one.shape) == (two.dtype, two.shape), path
        assert one.contiguous().view(-1).view(torch.uint8).equal(two.contiguous().view(-1).view(torch.uint8)), path
    else:
        assert one == two or (one != one and two != two), path
