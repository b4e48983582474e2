# SPDX-License-Identifier: Apache-2.0
"""A bad data shard: its steps are uniform noise, fixed by seed and step; all others are the text's own batches."""

from typing import Any

import numpy as np
import pytest
import torch

from trimtab.errors import TrimtabError
from trimtab.lab.data import Sampler
from trimtab.lab.noise import Spoiled, parse_bad_data

TEXT = np.full(5000, 65, np.uint8)


def sampler(seed: int = 3, **options: Any) -> Spoiled:
    settings = {"batch": 8, "seq": 64, "vocab_size": 256, "bad": (range(4, 6),), **options}
    return Spoiled(TEXT, seed=seed, **settings)


def test_only_the_named_steps_are_noise() -> None:
    plain, spoiled = Sampler(TEXT, batch=8, seq=64, seed=3), sampler()
    for step in range(1, 9):
        same = all(a.equal(b) for a, b in zip(plain.batch_at(step), spoiled.batch_at(step), strict=True))
        assert same == (step not in (4, 5))


def test_the_noise_is_uniform_and_fixed_by_seed_step_and_micro_batch() -> None:
    inputs, targets = sampler().batch_at(4)
    assert (inputs.shape, inputs.dtype) == ((8, 64), torch.int64)
    assert targets[:, :-1].equal(inputs[:, 1:])
    assert inputs.equal(sampler().batch_at(4)[0])
    others = [sampler(seed=4).batch_at(4), sampler().batch_at(5), sampler().batch_at(4, micro=1)]
    assert not any(inputs.equal(other) for other, _ in others)
    many = torch.cat([sampler(batch=500, bad=(range(1, 9),)).batch_at(step)[0] for step in range(1, 9)])
    counts = torch.bincount(many.flatten(), minlength=256).double()
    assert abs(counts / counts.mean() - 1).max() < 5 / counts.mean().sqrt()  # 1,000 each, give or take 5 deviations
    assert sampler(vocab_size=7).batch_at(4)[0].unique().tolist() == list(range(7))


def test_stretches_are_read_from_text() -> None:
    assert parse_bad_data("start=200,width=20; start=500") == (range(200, 220), range(500, 501))
    assert parse_bad_data(None) == parse_bad_data("") == ()


@pytest.mark.parametrize("text", ["width=3", "start=0", "start=2,width=-1", "start=x", "steps=3", "200"])
def test_what_is_no_stretch_is_refused(text: str) -> None:
    with pytest.raises(TrimtabError, match=r"bad_data (is written|needs)"):
        parse_bad_data(text)
